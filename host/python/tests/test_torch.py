# SPDX-License-Identifier: Apache-2.0
"""With PyTorch in the process, and plugins that need LibTorch: they share it, tensors cross without a copy, and the numbers are PyTorch's."""
import os
import tempfile
import threading
import weakref

from support import *  # noqa: F403

try:
    import numpy
    import torch
except ImportError as missing:
    print(f"skipped: {missing}")
    sys.exit(SKIPPED)

DATA_PARALLEL, SOFTMAX, OTHER = (os.environ[f"TEST_{name}"] for name in ("DATA_PARALLEL", "SOFTMAX", "OTHER_LIBTORCH"))
PIXELS, CLASSES, ROWS = 6, 3, 24


def mapped_libtorch():
    with open("/proc/self/maps") as maps:
        return {line[73:].strip() for line in maps if "libtorch_cpu.so" in line}


def data():
    torch.manual_seed(3)
    return {"inputs": torch.randint(0, 256, (ROWS, PIXELS), dtype=torch.uint8), "targets": torch.arange(ROWS) % CLASSES}


def config(**changes):
    return {"strategy": {"name": "data_parallel", "path": DATA_PARALLEL, "accelerator": "cpu", "devices": 2}, "precision": "64-true", "seed": 1,
            "model": {"kind": "library", "path": SOFTMAX, "options": {"pixels": PIXELS, "classes": CLASSES}}, "optimizer": {"name": "sgd", "lr": 0.1},
            "data": {"train": {"source": "mine", "batch_size": 8}}, "trainer": {"max_steps": 6}, **changes}


def session(changes=None, **options):
    return stratagem.Session(config(**(changes or {})), **{"sources": {"mine": data()}, "log": quiet, "convert": stratagem.Tensor.torch, **options})


def weights(run):
    return {name: tensor.clone() for name, tensor in run.strategy.export_state()["model"].items()}


def train_in_torch(start, batches):
    """Plain PyTorch from the same weights."""
    model = torch.nn.Linear(PIXELS, CLASSES).double()
    model.load_state_dict({name.removeprefix("linear."): value for name, value in start.items()})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch["inputs"].double() / 255), batch["targets"]).backward()
        optimizer.step()
    return {f"linear.{name}": value for name, value in model.state_dict().items()}


class Shared(Case):
    def test_plugins_use_the_libtorch_that_python_has_imported(self):
        before = mapped_libtorch()
        with session() as run:
            run.step()
        self.assertEqual((mapped_libtorch(), len(before)), (before, 1))

    def test_a_plugin_of_another_libtorch_is_refused_with_both_paths(self):
        (path,) = mapped_libtorch()
        with self.assertError(Code.FAILED_PRECONDITION, OTHER, path, "1.13.1", torch.__version__.split("+")[0]):
            stratagem.Plugin(OTHER)


class Tensors(Case):
    def test_tensors_of_torch_and_numpy_go_in_and_out_without_a_copy(self):
        with stratagem.Strategy(stratagem.Plugin(DATA_PARALLEL), config={"accelerator": "cpu", "devices": 2}, convert=stratagem.Tensor.torch) as made:
            given = {"a": torch.arange(6.0).reshape(2, 3).T, "b": (torch.tensor(True), numpy.arange(3)), "c": torch.zeros(0, 2, dtype=torch.bfloat16)}
            found = made.batch_to_device(given)
            self.assertEqual(found["a"].data_ptr(), given["a"].data_ptr())
            self.assertEqual((found["a"].stride(), found["b"][0].dtype, found["c"].dtype), ((1, 3), torch.bool, torch.bfloat16))
            self.assertEqual(found["b"][1].data_ptr(), given["b"][1].ctypes.data)
            found["a"][0, 0] = 9
            self.assertEqual(given["a"][0, 0], 9)

    def test_a_batch_is_let_go_by_the_replicas_threads_when_its_graph_is_gone(self):
        with session({"data": {}}, own_loop=True, sources=None) as run:
            batch = {name: tensor[:8].numpy().copy() for name, tensor in data().items()}
            dead = [weakref.ref(values) for values in batch.values()]
            run.strategy.training_step(batch)
            del batch
            run.strategy.backward()
            run.strategy.optimizer_step(0.1)
            self.assertEqual([ref() is None for ref in dead], [True, True])

    def test_a_state_is_views_of_the_weights(self):
        with session() as run:
            view = run.strategy.export_state()["model"]["linear.bias"]
            run.step()
            self.assertEqual(view.data_ptr(), run.strategy.export_state()["model"]["linear.bias"].data_ptr())
            copy = run.strategy.export_state(copy=True)["model"]["linear.bias"]
            self.assertNotEqual(view.data_ptr(), copy.data_ptr())
        self.assertTrue(torch.equal(view, copy))  # it outlives the session

    def test_what_torch_will_not_hand_over_is_told_with_its_place(self):
        with stratagem.Strategy(stratagem.Plugin(DATA_PARALLEL), config={"accelerator": "cpu", "devices": 1}) as made:
            with self.assertError(Code.INVALID_ARGUMENT, "batch/x", "require gradient", "detach()"):
                made.batch_to_device({"x": torch.zeros(2, requires_grad=True)})
            for tensor in (torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.float8_e5m2), numpy.arange(4.0)[::-1]):
                with self.assertError(Code.INVALID_ARGUMENT, "x"):
                    made.batch_to_device({"x": tensor})

    def test_a_wrong_dtype_is_an_error_that_names_it(self):
        wrong = {**data(), "targets": torch.arange(ROWS).float() % CLASSES}
        with session() as run:
            before = weights(run)
            with self.assertRaises(Error) as caught:
                run.strategy.train_batch({name: tensor[:8] for name, tensor in wrong.items()}, lr=0.1)
            self.assertIn("Long", str(caught.exception))
            for name, tensor in weights(run).items():
                self.assertTrue(torch.equal(tensor, before[name]))


class Numbers(Case):
    def assertClose(self, one, other):
        self.assertEqual(one.keys(), other.keys())
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name], rtol=1e-12, atol=1e-14)

    def test_a_run_on_tensors_of_torch_ends_with_pytorchs_weights(self):
        whole = data()
        with session() as run:
            start = weights(run)
            run.fit()
            batches = [{name: tensor[at:at + 8] for name, tensor in whole.items()} for at in (0, 8, 16)] * 2
            self.assertClose(weights(run), train_in_torch(start, batches))

    def test_a_loop_of_ones_own_ends_with_pytorchs_weights(self):
        whole = data()
        batches = [{name: tensor[at:at + 7] for name, tensor in whole.items()} for at in (0, 7, 14)]
        with session({"data": {}}, own_loop=True, sources=None) as run:
            start = weights(run)
            for batch in batches:
                result = run.strategy.training_step(batch)
                self.assertEqual(sum(result.weights), 7)
                run.strategy.backward()
                run.strategy.optimizer_step(0.1)
            self.assertClose(weights(run), train_in_torch(start, batches))

    def test_gradients_are_pytorchs(self):
        with session({"data": {}}, own_loop=True, sources=None) as run:
            batch = {name: tensor[:8] for name, tensor in data().items()}
            start = weights(run)
            run.strategy.training_step(batch)
            run.strategy.backward()
            found = {name: tensor.clone() for name, tensor in run.strategy.gradients().items()}
            after = train_in_torch(start, [batch])
            self.assertClose({name: start[name] - 0.1 * found[name] for name in found}, after)

    def test_shuffled_samples_are_all_there(self):
        seen = []

        def read(rows):
            seen.extend(rows)
            return {name: tensor[torch.tensor(rows)] for name, tensor in data().items()}

        with session({"data": {"train": {"source": "mine", "batch_size": 8, "shuffle": True}}, "trainer": {"max_epochs": 1}},
                     sources={"mine": stratagem.Source(ROWS, read)}) as run:
            run.fit()
        self.assertEqual(sorted(seen), list(range(ROWS)))
        self.assertNotEqual(seen, sorted(seen))

        values = torch.arange(4)
        for rows in ([3, 1], [1, 2]):
            self.assertEqual(stratagem.Arrays({"x": values}).read(rows)["x"].tolist(), rows)

    def test_reduced_values_are_numbers(self):
        with stratagem.Strategy(stratagem.Plugin(DATA_PARALLEL), config={"accelerator": "cpu", "devices": 2}) as made:
            for op, number in (("mean", 3), ("sum", 9), ("min", 1), ("max", 6)):
                self.assertEqual(made.reduce({"x": torch.tensor([1.0, 2, 6])}, op)["x"].item(), number)

    def test_an_announced_batch_is_trained_on(self):
        batch = {name: tensor[:8] for name, tensor in data().items()}
        with session({"data": {}}, own_loop=True, sources=None) as run:
            start = weights(run)
            run.strategy.train_batch(announced=run.strategy.announce_batch(batch), lr=0.1)
            self.assertClose(weights(run), train_in_torch(start, [batch]))


class Files(Case):
    def test_a_run_is_saved_and_gone_on_with_and_evaluated(self):
        with tempfile.TemporaryDirectory() as folder:
            saved = {"checkpoint": {"dir": os.path.join(folder, "run")}}
            with session({**saved, "trainer": {"max_steps": 3}}) as run:
                run.fit()
            with session({**saved, "trainer": {"max_steps": 6}}, checkpoint=os.path.join(folder, "run")) as run:
                self.assertEqual(run.fit()["steps"], 6)
                resumed = weights(run)
            with session() as run:
                run.fit()
                for name, tensor in weights(run).items():
                    self.assertTrue(torch.equal(tensor, resumed[name]), name)
            found = stratagem.validate(config(data={"validation": {"source": "mine", "batch_size": 8}}), sources={"mine": data()}, log=quiet,
                                       checkpoint=os.path.join(folder, "run"))
            self.assertIn("loss", found["validation"])

    def test_a_strategy_saves_and_loads_what_the_host_gives_it(self):
        with tempfile.TemporaryDirectory() as folder, session() as run:
            run.strategy.save(os.path.join(folder, "here"), {"epoch": 3})
            saved = weights(run)
            run.step()
            host, report = run.strategy.load(os.path.join(folder, "here"))
            self.assertEqual((host, report["missing"]), ({"epoch": 3}, []))
            self.assertTrue(all(torch.equal(tensor, saved[name]) for name, tensor in weights(run).items()))


class Modules(Case):
    def make(self):
        return torch.nn.Sequential(torch.nn.Linear(PIXELS, 8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, CLASSES))

    def step(self, module, batch, stage):
        return torch.nn.functional.cross_entropy(module(batch["inputs"].to(module[0].weight.dtype) / 255), batch["targets"])

    def test_a_module_of_pythons_is_trained_on_two_devices_as_pytorch_trains_it(self):
        whole = data()
        torch.manual_seed(5)
        reference = self.make().double().eval()  # so that shares of a batch do not change the arithmetic

        def make():
            made = self.make().double()
            made.load_state_dict(reference.state_dict())
            made.eval()
            made.train = lambda mode=True: made  # as above
            return made

        settings = {"model": {"kind": "host"}, "trainer": {"max_steps": 6}}
        with session(settings, model=stratagem.TorchModel(make, self.step)) as run:
            run.step(3)
            run.swap({**config()["strategy"], "devices": 3})
            run.fit()
            found = weights(run)
        optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
        for at in (0, 8, 16) * 2:
            optimizer.zero_grad()
            self.step(reference, {name: tensor[at:at + 8] for name, tensor in whole.items()}, "fit").backward()
            optimizer.step()
        expected = reference.state_dict()
        self.assertEqual(found.keys(), expected.keys())
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-14)

    def test_a_modules_loss_may_be_a_sum(self):
        batch = {name: tensor[:8] for name, tensor in data().items()}

        def step(module, batch, stage):
            return self.step(module, batch, stage) * len(batch["targets"])

        with session({"model": {"kind": "host"}, "data": {}}, own_loop=True, sources=None,
                     model=stratagem.TorchModel(lambda: torch.nn.Sequential(torch.nn.Linear(PIXELS, CLASSES)), step, loss="sum")) as run:
            start = {f"linear.{name[2:]}": tensor for name, tensor in weights(run).items()}
            run.strategy.train_batch(batch, lr=0.1 / 8)
            after = {f"linear.{name[2:]}": tensor for name, tensor in weights(run).items()}
        for name, tensor in train_in_torch(start, [batch]).items():
            torch.testing.assert_close(after[name], tensor, rtol=1e-12, atol=1e-14)

    def test_a_module_begins_as_the_seed_says_and_in_the_dtype_of_the_run(self):
        found = []
        for seed in (1, 1, 2):
            stages = []

            def step(module, batch, stage):
                stages.append((stage, module.training, torch.is_grad_enabled()))
                return self.step(module, batch, stage)

            with session({"model": {"kind": "host"}, "seed": seed, "data": {}}, own_loop=True, sources=None, model=stratagem.TorchModel(self.make, step)) as run:
                found.append(weights(run)["0.weight"])
                buffers = [buffer.names[0] for buffer in run.strategy.describe_parameters()[1]]
                batch = {name: tensor[:8] for name, tensor in data().items()}
                run.strategy.train_batch(batch, lr=0.1)
                run.strategy.validation_step(batch)
            self.assertEqual(stages, [("fit", True, True)] * 2 + [("validate", False, False)] * 2)
        self.assertEqual((found[0].dtype, buffers), (torch.float64, ["2.running_mean", "2.running_var", "2.num_batches_tracked"]))
        self.assertTrue(torch.equal(found[0], found[1]))
        self.assertFalse(torch.equal(found[0], found[2]))

    def test_what_a_module_raises_on_a_replicas_thread_is_the_cause(self):
        def step(module, batch, stage):
            raise LookupError("mine")

        with session({"model": {"kind": "host"}}, model=stratagem.TorchModel(self.make, step)) as run:
            with self.assertRaises(Error) as caught:
                run.fit()
        origin = caught.exception
        while isinstance(origin, Error):
            origin = origin.__cause__
        self.assertIsInstance(origin, LookupError)


class Threads(Case):
    def test_what_is_raised_on_a_replicas_thread_is_raised_by_the_call(self):
        threads = set()

        def trace(phase, replica, begins):
            threads.add(threading.get_ident())
            raise LookupError(phase)

        model = stratagem.Plugin(SOFTMAX).model(options={"pixels": PIXELS, "classes": CLASSES})
        with stratagem.Strategy(stratagem.Plugin(DATA_PARALLEL), config={"accelerator": "cpu", "devices": 2, "optimizer": {"name": "sgd", "lr": 0.1}},
                                services=stratagem.Services(trace=trace)) as made:
            with self.assertRaises(LookupError):
                made.setup(model)
                made.train_batch({name: tensor[:8] for name, tensor in data().items()}, lr=0.1)
        self.assertTrue(threads - {threading.get_ident()})


if __name__ == "__main__":
    unittest.main()
