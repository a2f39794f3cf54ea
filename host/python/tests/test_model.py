# SPDX-License-Identifier: Apache-2.0
"""Models written in Python: without LibTorch, and (test_torch.py) of torch modules."""
from support import *  # noqa: F403
from stratagem import model


class Line:
    """y = w x + b with the squared error, its gradients written out."""

    def __init__(self, fails=""):
        self.parameters = {"w": floats(0.5), "b": floats(0)}
        self.buffers = {}
        self.fails, self.trains = fails, None

    def set_mode(self, train):
        self.trains = train

    def step(self, batch, context):
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
