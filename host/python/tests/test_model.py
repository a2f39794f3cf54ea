# SPDX-License-Identifier: Apache-2.0
"""Models written in Python: without LibTorch, and (test_torch.py) of torch modules."""
from support import *  # noqa: F403
from stratagem import model


class Line:
    """y = w x + b with the squared error, its gradients written out."""

    def __init__(self, fails=""):
        self.parameters = {"w": floats(0.5), "b": floats(0)}
        self.buffers = {}
        self.fails, self.told = fails, []

    def set_mode(self, train):
        self.told.append(train)

    def step(self, batch, context):
        self.told.append(context)
        if self.fails == "step":
            raise LookupError("in step")
        if self.fails == "nothing":
            return None
        x, y = batch["x"].tolist(), batch["y"].tolist()
        errors_ = [self.parameters["w"][0] * a + self.parameters["b"][0] - b for a, b in zip(x, y)]
        loss = memoryview(floats(sum(e * e for e in errors_) / len(x))).cast("B").cast("f", [])
        return stratagem.StepOutput({"loss": loss}, (x, errors_) if context.gradient else None)

    def backward(self, graph, scale):
        if self.fails == "backward":
            raise ArithmeticError("in backward")
        x, errors_ = graph
        factor = 2 * scale / len(x)
        found = {"w": floats(factor * sum(a * e for a, e in zip(x, errors_)))}
        return {**found, "odd": floats(1)} if self.fails == "odd" else {**found, "b": floats(factor * sum(errors_))}


def trained(num_devices, fails=""):
    made = stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": num_devices, "optimizer": {"name": "sgd", "lr": 0.1}})
    line = stratagem.PythonModel(lambda args: Line(fails))
    made.setup(line)
    line.close()
    return made


BATCH = {"x": floats(1, 2, 3, 4), "y": floats(3, 5, 7, 9)}


class Models(Case):
    def tearDown(self):
        super().tearDown()
        self.assertEqual((model._models, model._replicas, model._graphs), ({}, {}, {}))

    def test_a_model_of_pythons_is_trained_to_the_same_on_any_number_of_devices(self):
        found = []
        for num_devices in (1, 2, 3):
            with trained(num_devices) as made:
                for _ in range(200):
                    made.train_batch(BATCH, lr=0.05)
                state = made.export_state()["model"]
                found.append((state["w"].item(), state["b"].item()))
                self.assertEqual(list(state), ["w", "b"])
        for w, b in found:
            self.assertAlmostEqual(w, found[0][0], 4)
            self.assertAlmostEqual(w, 2, 1)
            self.assertAlmostEqual(b, 1, 0)

    def test_a_replica_is_told_how_it_is_made_and_what_a_step_is(self):
        made, lines = [], []

        def replicate(args):
            made.append(args)
            lines.append(Line())
            return lines[-1]

        with stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": 2, "seed": 7, "optimizer": {"name": "sgd", "lr": 0.1}}) as one:
            line = stratagem.PythonModel(replicate)
            one.setup(line)
            line.close()
            one.train_batch(BATCH, lr=0.1, batch_index=5, global_step=6)
            one.predict_step(BATCH, batch_index=8)
        self.assertEqual([(args.device, args.replica, args.num_replicas, args.seed) for args in made], [((1, 0), 0, 2, 7), ((1, 1), 1, 2, 7)])
        for replica, line in enumerate(lines):
            self.assertEqual(line.told, [True, stratagem.StepContext("fit", True, 5, 6, replica), False, stratagem.StepContext("predict", False, 8, 0, replica)])

    def test_a_loss_may_be_a_sum_and_a_share_weigh_what_the_model_says(self):
        class Shared(Line):
            def step(self, batch, context):
                output = super().step(batch, context)
                return stratagem.StepOutput(output.outputs, output.graph, denominator=len(batch["x"].tolist()) ** 2)

        weights = {}
        for name, kind, loss in (("mean", Line, "mean"), ("sum", Line, "sum"), ("denominator", Shared, "mean")):
            with stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": 2, "optimizer": {"name": "sgd", "lr": 0.1}}) as made:
                line = stratagem.PythonModel(lambda args, kind=kind: kind(), loss=loss)
                made.setup(line)
                line.close()
                weights[name] = made.train_batch({name: values[:3] for name, values in BATCH.items()}, lr=0.01)[0].weights
                weights[f"{name} w"] = made.export_state()["model"]["w"].item()
        # Shares of two rows and one: gradients of w -10.5 and -33 (see Line.backward).
        for name, expected in (("mean", 0.5 + 0.01 * (2 * 10.5 + 33) / 3), ("sum", 0.5 + 0.01 * (10.5 + 33)), ("denominator", 0.5 + 0.01 * (4 * 10.5 + 33) / 5)):
            self.assertAlmostEqual(weights[f"{name} w"], expected, 5, name)
        self.assertEqual((weights["mean"], weights["denominator"]), ((2, 1), (4, 1)))
        with self.assertError(Code.INVALID_ARGUMENT, "mean, sum"):
            stratagem.PythonModel(Line, loss="max")

    def test_a_graph_that_is_not_used_is_let_go(self):
        with trained(2) as made:
            made.training_step(BATCH)
            self.assertEqual(len(model._graphs), 2)
            made.training_step(BATCH)
            self.assertEqual(len(model._graphs), 2)
            made.zero_grad()
        self.assertEqual(model._graphs, {})

    def test_what_a_model_raises_is_the_cause(self):
        for where, kind in (("step", LookupError), ("backward", ArithmeticError), ("nothing", Error), ("odd", Error)):
            with trained(2, where) as made:
                with self.assertRaises(Error) as caught:
                    made.train_batch(BATCH, lr=0.1)
                origin = caught.exception
                while isinstance(origin, Error) and origin.__cause__ is not None:
                    origin = origin.__cause__
                self.assertIsInstance(origin, kind, where)
                self.assertIsNotNone(caught.exception.replica)

    def test_a_model_that_can_not_be_made_is_the_cause(self):
        made = stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": 1, "optimizer": {"name": "sgd", "lr": 0.1}})
        with made, self.assertRaises(Error) as caught:
            made.setup(stratagem.PythonModel(lambda args: 1 / 0))
        self.assertIsInstance(caught.exception.__cause__, ZeroDivisionError)

    def test_a_session_trains_it_as_its_models_kind_host(self):
        source = stratagem.Source(4, lambda rows: {name: floats(*(values[row] for row in rows)) for name, values in BATCH.items()})
        settings = config(model={"kind": "host"}, data={"train": {"source": "line", "batch_size": 4}}, optimizer={"name": "sgd", "lr": 0.05},
                          trainer={"max_steps": 50})
        with stratagem.Session(settings, sources={"line": source}, model=stratagem.PythonModel(lambda args: Line()), log=quiet) as run:
            run.fit()
            self.assertAlmostEqual(run.strategy.export_state()["model"]["w"].item(), 2, 0)


if __name__ == "__main__":
    unittest.main()
