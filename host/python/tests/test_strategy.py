# SPDX-License-Identifier: Apache-2.0
"""A strategy driven by a loop of Python's own: a strategy in plain C and the toy model, without LibTorch."""
import ctypes
import gc
import json
import logging
import os
import subprocess
import tempfile
import threading
import weakref

from support import *  # noqa: F403


def strategy(num_devices=2, **options):
    return stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": num_devices, "optimizer": {"name": "sgd", "lr": 1}}, **options)


def trained(num_devices=2, w=10.0, **options):
    """One that is set up with the toy."""
    made = strategy(num_devices, **options)
    model = stratagem.Plugin(TOY).model(options={"w": w})
    made.setup(model)
    model.close()
    return made


class Queries(Case):
    def test_a_strategy_tells_what_it_is(self):
        with strategy(3) as made:
            self.assertEqual(made.devices(), [(1, 0), (1, 1), (1, 2)])
            self.assertEqual((made.ranks().world_size, made.status().state), (1, "created"))
        with trained() as made:
            self.assertEqual(made.status(), stratagem.Status("fit", 0, 0, False))
            self.assertEqual(made.describe_parameters(), ([stratagem.Parameter(("weight",), (1, 1), True, True)], []))
            made.teardown()
            self.assertEqual(made.status().state, "created")


class Data(Case):
    def test_a_batch_goes_to_the_device_and_back_in_the_same_memory(self):
        values = floats(1, 2, 3)
        with strategy() as made:
            for out in (made.batch_to_device({"x": values, "names": ("a", None)}), made.broadcast({"x": values, "names": ("a", None)}),
                        made.to_host({"x": values, "names": ("a", None)})):
                self.assertEqual(out["x"].data_ptr, values.buffer_info()[0])
                self.assertEqual(out["names"], ("a", None))

    def test_what_came_out_outlives_the_strategy(self):
        with strategy() as made:
            out = made.batch_to_device(floats(1, 2))
        self.assertEqual(out.tolist(), [1, 2])

    def test_what_comes_out_is_converted(self):
        with strategy(convert=lambda tensor: tensor.tolist()) as made:
            self.assertEqual([getattr(made, name)({"x": floats(1, 2)}) for name in ("broadcast", "batch_to_device")], [{"x": [1, 2]}] * 2)
        with trained(convert=lambda tensor: tensor.tolist()) as made:
            self.assertEqual(made.train_batch({"inputs": floats(2)}, lr=1)[0].outputs, {"loss": 20})

    def test_wrong_words_are_refused_with_those_that_there_are(self):
        with strategy() as made:
            with self.assertError(Code.INVALID_ARGUMENT, "'most'", "all, any"):
                made.reduce_boolean_decision(True, "most")
            with self.assertError(Code.INVALID_ARGUMENT, "'gpu'", "cpu, cuda"):
                made.batch_to_device(floats(1), ("gpu", 0))

    def test_objects_of_pythons_pass_through(self):
        thing = stratagem.Opaque({"any": "thing"})
        with strategy() as made:
            self.assertIs(made.broadcast([thing])[0], thing)


class Training(Case):
    def test_steps_one_by_one_are_a_train_batch(self):
        batches = [floats(1, 2, 3, 6), floats(2, 2), floats(5)]
        with trained() as one, trained() as other:
            for values in batches:
                step, update = one.train_batch({"inputs": values}, lr=0.5)
                result = other.training_step({"inputs": values})
                other.backward()
                after = other.optimizer_step(0.5)
                self.assertEqual((after.outcome, after.total_weight, result.weights), ("done", update.total_weight, step.weights))
                self.assertEqual(result.outputs["loss"].item(), step.outputs["loss"].item())
                self.assertEqual(weight(one), weight(other))
            self.assertEqual(weight(one), 10 - 0.5 * (3 + 2 + 5))
            self.assertEqual(one.status().num_updates, 3)

    def test_a_batch_is_not_held_longer_than_its_step(self):
        values = floats(1, 2)
        with trained() as made:
            made.train_batch({"inputs": values}, lr=1)
            values.append(3)  # would raise BufferError
            made.training_step({"inputs": values})
            made.backward()
            values.append(4)

    def test_micro_batches_gather_until_the_last(self):
        with trained() as made:
            self.assertEqual(made.train_batch({"inputs": floats(1)}, last=False)[1].outcome, "none")
            self.assertEqual(made.train_batch({"inputs": floats(3)}, lr=1)[1].outcome, "done")
            self.assertEqual(weight(made), 8)

    def test_gathered_gradients_are_dropped_by_zero_grad(self):
        with trained() as made:
            made.train_batch({"inputs": floats(1)}, last=False)
            made.zero_grad()
            made.train_batch({"inputs": floats(3)}, lr=1)
            self.assertEqual(weight(made), 7)

    def test_evaluation_changes_nothing(self):
        with trained() as made:
            self.assertEqual(made.validation_step({"inputs": floats(1, 3)}).outputs["loss"].tolist(), [10, 30])
            self.assertIn("x", made.predict_step({"inputs": floats(1, 3)}).outputs)
            made.test_step({"inputs": floats(1)})
            self.assertEqual(weight(made), 10)

    def test_a_state_moves_to_another_strategy(self):
        with trained(w=3) as one, trained(3) as other:
            one.train_batch({"inputs": floats(1)}, lr=1)
            report = other.import_state(one.export_state())
            self.assertEqual((report, weight(other)), ({"missing": [], "unexpected": [], "unknown_keys": []}, 2))
            with self.assertError(Code.INVALID_ARGUMENT, "extra"):
                other.import_state({**one.export_state(), "model": {**one.export_state()["model"], "extra": floats(1)}})
            self.assertEqual(weight(other), 2)

    def test_a_state_that_is_taken_is_not_written_to(self):
        mine = floats(5)
        with trained() as made:
            made.import_state({**made.export_state(), "model": {"weight": memoryview(mine).cast("B").cast("f", [1, 1])}})
            made.train_batch({"inputs": floats(1)}, lr=1)
            self.assertEqual((weight(made), mine[0]), (4, 5))


class Gradients(Case):
    def test_gradients_are_reduced_in_place(self):
        one, other = array.array("d", [1, 2]), array.array("d", [3, 6])
        with strategy() as made:
            made.setup()
            sets = [stratagem.GradientSet([one, None], 1, ("cpu", 0)), stratagem.GradientSet([other, floats(4)], 3, ("cpu", 1))]
            made.reduce_gradients(sets)
            self.assertEqual((list(one), list(other), sets[0].made[1].tolist()), ([2.5, 5], [2.5, 5], [3]))
            one.append(1)  # nobody holds it any more

    def test_read_only_gradients_are_refused(self):
        with strategy(1) as made:
            made.setup()
            with self.assertError(Code.INVALID_ARGUMENT, "read-only"):
                made.reduce_gradients([stratagem.GradientSet([memoryview(floats(1)).toreadonly()])])


class Services(Case):
    NOTHING = {"inputs": floats(0)}  # no sample counts: the update is skipped, which is logged

    def made(self, **services):
        made = strategy(services=stratagem.Services(**services))
        model = stratagem.Plugin(TOY).model(options={"counts": True})
        made.setup(model)
        model.close()
        return made

    def test_a_plugins_log_is_told(self):
        told = []
        with self.made(log=lambda *one: told.append(one)) as made:
            self.assertEqual(made.train_batch(self.NOTHING, lr=1)[1].outcome, "skipped: no weight")
        self.assertEqual(told, [(logging.WARNING, "all denominators were 0: the update is skipped", {})])

    def test_without_a_log_it_goes_to_logging(self):
        with self.assertLogs("stratagem", logging.WARNING) as told, self.made() as made:
            made.train_batch(self.NOTHING, lr=1)
        self.assertIn("all denominators were 0", told.output[0])

    def test_what_a_log_raises_is_raised_when_the_call_is_over(self):
        with self.made(log=lambda *_: 1 / 0) as made:
            with self.assertRaises(ZeroDivisionError):
                made.train_batch(self.NOTHING, lr=1)
            made.barrier()

    def test_fields_progress_and_traces_are_told(self):
        told = []
        given = stratagem.Services(log=lambda *one: told.append(one), progress=lambda *one: told.append(one), trace=lambda *one: told.append(one))
        table = given.pointer.contents
        with trees.Tree({"a": 1}, moved=False) as fields:
            table.log(table.self, abi.STG_LOG_ERROR, errors.text("here"), fields)
        table.progress(table.self, errors.text("saving"), 1, 2)
        table.trace_begin(table.self, errors.text("step"), 3)
        table.trace_end(table.self, errors.text("step"), 3)
        self.assertEqual(told, [(logging.ERROR, "here", {"a": 1}), ("saving", 1, 2), ("step", 3, True), ("step", 3, False)])

    def test_a_model_is_made_with_them(self):
        told, table, kinds = [], abi.stg_model(), dict(abi.stg_model_factory._fields_)

        @kinds["create"]
        def create(options, host, out):
            host.contents.log(host.contents.self, abi.STG_LOG_INFO, options, None)
            out[0] = ctypes.pointer(table)

        plugin = stratagem.Plugin(TOY)
        plugin._models["mine"] = abi.stg_model_factory(create=create)
        plugin.model("mine", {"a": 1}, stratagem.Services(log=lambda *one: told.append(one)))
        self.assertEqual(told, [(logging.INFO, '{"a": 1}', {})])

    def test_they_live_as_long_as_a_plugin_holds_them(self):
        given = stratagem.Services(log=quiet)
        dead, table = weakref.ref(given), given.pointer.contents.self
        services._retain(table)
        del given
        gc.collect()
        self.assertIsNotNone(dead())
        services._release(table)
        gc.collect()
        self.assertIsNone(dead())


class Misuse(Case):
    def test_a_closed_strategy_is_an_error(self):
        made = trained()
        made.close()
        made.close()
        for call in (made.barrier, made.status, made.devices, lambda: made.train_batch({"inputs": floats(1)}, lr=1)):
            with self.assertError(Code.FAILED_PRECONDITION, "closed"):
                call()
        made.abort()

    def test_a_closed_model_is_an_error(self):
        model = stratagem.Plugin(TOY).model()
        model.close()
        with strategy() as made, self.assertError(Code.FAILED_PRECONDITION, "the model toy is closed"):
            made.setup(model)

    def test_a_second_caller_and_one_from_inside_get_an_error(self):
        found = []

        def call():
            try:
                made.barrier()
            except Error as error:
                found.append(error.code)

        made = strategy()
        with made._gate:  # as while a call goes on
            thread = threading.Thread(target=call)
            thread.start()
            thread.join()
            call()
        self.assertEqual(found, [Code.FAILED_PRECONDITION] * 2)
        made.close()

    def test_a_function_that_is_not_there_is_unimplemented(self):
        with trained() as made, self.assertError(Code.UNIMPLEMENTED, "gradients"):
            made.train_batch({"inputs": floats(1)}, last=False)
            made.gradients()

    def test_garbage_in_a_config_is_told(self):
        with self.assertError(Code.INVALID_ARGUMENT, "devices"):
            stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": "many"})
        with self.assertError(Code.INVALID_ARGUMENT, "no strategy 'nothing'", "sequential"):
            stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), "nothing")

    def test_a_deadline_that_has_passed_does_not_harm(self):
        with trained() as made:
            made.timeout_s = 1e-9
            for call in (made.barrier, lambda: made.train_batch({"inputs": floats(1)}, lr=1)):
                with self.assertError(Code.DEADLINE_EXCEEDED, "the deadline passed"):
                    call()
            made.timeout_s = None
            made.train_batch({"inputs": floats(1)}, lr=1)
            self.assertEqual(weight(made), 9)

    def test_only_the_callers_thread_runs(self):
        with trained(caller_thread_only=True) as made:
            made.train_batch({"inputs": floats(1, 3)}, lr=1)
            self.assertEqual(weight(made), 8)


class Loading(Case):
    def test_a_library_that_is_no_plugin_is_refused_with_the_reason(self):
        for path, code, reason in ((abi.__file__, Code.FAILED_PRECONDITION, "not an ELF file"), (sys.executable, Code.FAILED_PRECONDITION, "no Stratagem plugin"),
                                   ("/nowhere/x.so", Code.NOT_FOUND, "/nowhere/x.so")):
            with self.assertError(code, reason):
                stratagem.Plugin(path)

    def test_each_kind_of_bad_plugin_is_refused(self):
        folder = pathlib.Path(os.environ["TEST_BAD"])
        reasons = {"refuses": "refuses this host", "no_probe": "no function stg_plugin_probe", "other_major": "ABI", "null_table": "no table",
                   "missing_dependency": "libdep.so"}
        for name, reason in reasons.items():
            with self.assertError(Code.FAILED_PRECONDITION, f"{name}.so", reason):
                stratagem.Plugin(folder / f"{name}.so")

    def test_plugins_are_listed_and_described(self):
        self.assertEqual(stratagem.inspect_plugin(SEQUENTIAL)["strategies"], ["sequential"])
        self.assertEqual([s["name"] for s in stratagem.describe_plugin(SEQUENTIAL)["strategies"]], ["sequential"])
        self.assertIn("strategy", stratagem.config_schema()["properties"])
        toy, sequential = stratagem.Plugin(TOY), stratagem.Plugin(SEQUENTIAL)
        self.assertEqual((toy.name, toy.version, toy.path, toy.models, toy.strategies), ("toy_model", "1.0.0", TOY, ["toy"], []))
        self.assertEqual((sequential.strategies, sequential.models), (["sequential"], []))
        with self.assertError(Code.INVALID_ARGUMENT, "no model 'other'", "available: toy"):
            toy.model("other")
        self.assertEqual(stratagem.version(), "1.0.0")

    def test_a_configs_folders_are_searched(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps({"plugin_path": [str(pathlib.Path(TOY).parent)]}))
            found = stratagem.list_plugins(path)
            self.assertIn(str(pathlib.Path(TOY).resolve()), [str(pathlib.Path(plugin["path"]).resolve()) for plugin in found["plugins"]])
            self.assertNotIn(TOY, [plugin["path"] for plugin in stratagem.list_plugins()["plugins"]])

    def test_the_machine_is_looked_at(self):
        report = stratagem.doctor()
        self.assertEqual(report["schema_version"], 1)
        self.assertIn("plugin-folders", [check["id"] for check in report["checks"]])
        with self.assertError(Code.NOT_FOUND, "/nowhere.json"):
            stratagem.doctor("/nowhere.json")

    def test_schemas_of_options_are_told(self):
        code = "import stratagem; print(stratagem.options_schema('sequential')['type'], sorted(stratagem.options_schema('toy', 'model')['properties'])[0])"
        folders = ":".join(str(pathlib.Path(path).parent) for path in (SEQUENTIAL, TOY))
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False,
                               env={**os.environ, "STRATAGEM_PLUGIN_PATH": folders, "PYTHONPATH": str(HERE.parent)})
        self.assertEqual(found.stdout, "object counts\n", found.stderr)
        with self.assertError(Code.INVALID_ARGUMENT, "'models'", '"strategy" and "model"'):
            stratagem.options_schema("toy", "models")

    def test_a_library_that_is_missing_or_no_libstratagem_is_told(self):
        for path in ("/nowhere/libstratagem.so", SEQUENTIAL):
            found = subprocess.run([sys.executable, "-c", "import stratagem; stratagem.version()"], capture_output=True, text=True, check=False,
                                   env={**os.environ, "STRATAGEM_LIBRARY": path, "PYTHONPATH": str(HERE.parent)})
            self.assertEqual(found.returncode, 1)
            self.assertIn(path, found.stderr.splitlines()[-1])
            self.assertIn("stratagem.errors.Error", found.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
