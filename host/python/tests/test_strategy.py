# SPDX-License-Identifier: Apache-2.0
"""A strategy driven by a loop of Python's own: a strategy in plain C and the toy model, without LibTorch."""
import os
import subprocess
import threading

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


def weight(made):
    return made.export_state()["model"]["weight"].item()


class Queries(Case):
    def test_a_strategy_tells_what_it_is(self):
        with strategy(3) as made:
            self.assertEqual(made.devices(), [(1, 0), (1, 1), (1, 2)])
            self.assertEqual((made.ranks().world_size, made.status().state), (1, "created"))
        with trained() as made:
            self.assertEqual(made.status().state, "fit")
            (parameter,), buffers = made.describe_parameters()
            self.assertEqual((parameter.names, parameter.shape, parameter.requires_grad, buffers), (("weight",), (1, 1), True, []))


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

    def test_decisions_and_barriers(self):
        with strategy() as made:
            made.barrier("here")
            self.assertEqual((made.reduce_boolean_decision(True), made.reduce_boolean_decision(False, "any")), (True, False))

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

    def test_an_announced_batch_is_used_by_its_ticket(self):
        with trained() as made:
            try:
                ticket = made.announce_batch({"inputs": floats(4)})
            except Error as error:
                return self.assertEqual(error.code, Code.UNIMPLEMENTED)  # a strategy need not have it
            made.train_batch(announced=ticket, lr=1)
            self.assertEqual(weight(made), 6)

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

    def test_closing_while_a_call_goes_on_leaves_the_end_to_it(self):
        made = strategy()
        with made._gate:
            made.close()
            self.assertIsNotNone(made._life.address)
        self.assertIsNone(made._life.address)

    def test_a_function_that_is_not_there_is_unimplemented(self):
        with trained() as made, self.assertError(Code.UNIMPLEMENTED, "gradients"):
            made.train_batch({"inputs": floats(1)}, last=False)
            made.gradients()

    def test_what_a_log_raises_is_raised_when_the_call_is_over(self):
        services = stratagem.Services(log=lambda *_: 1 / 0)
        services._callbacks[0](None, abi.STG_LOG_INFO, abi.stg_string(), None)  # as a plugin would
        with self.assertRaises(ZeroDivisionError):
            services.failure.raise_it()
        services.failure.raise_it()

    def test_garbage_in_a_config_is_told(self):
        with self.assertError(Code.INVALID_ARGUMENT, "devices"):
            stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": "many"})
        with self.assertError(Code.INVALID_ARGUMENT, "no strategy 'nothing'", "sequential"):
            stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), "nothing")

    def test_a_deadline_that_has_passed_does_not_harm(self):
        with trained() as made:
            made.timeout_s = 3600
            made.barrier()
            made.train_batch({"inputs": floats(1)}, lr=1)

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
        self.assertIn("folders", stratagem.list_plugins())
        self.assertIn("properties", stratagem.config_schema())
        self.assertEqual(stratagem.Plugin(TOY).models, ["toy"])

    def test_a_library_that_is_missing_or_no_libstratagem_is_told(self):
        for path in ("/nowhere/libstratagem.so", SEQUENTIAL):
            found = subprocess.run([sys.executable, "-c", "import stratagem; stratagem.version()"], capture_output=True, text=True, check=False,
                                   env={**os.environ, "STRATAGEM_LIBRARY": path, "PYTHONPATH": str(HERE.parent)})
            self.assertEqual(found.returncode, 1)
            self.assertIn(path, found.stderr.splitlines()[-1])
            self.assertIn("stratagem.errors.Error", found.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
