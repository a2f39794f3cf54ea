# SPDX-License-Identifier: Apache-2.0
"""Runs from a config: a strategy in plain C and the toy model, without LibTorch."""
import json
import math
import os
import signal
import subprocess
import tempfile
import threading
import time

from support import *  # noqa: F403


def session(changes=None, **options):
    return stratagem.Session(config(**(changes or {})), **{"sources": numbers(), "log": quiet, **options})


def weight(run):
    return run.strategy.export_state()["model"]["weight"].item()


class Running(Case):
    def test_a_run_trains_and_gives_its_result(self):
        with session() as run:
            self.assertEqual(run.fit()["steps"], 4)
            self.assertEqual(weight(run), 0)

    def test_step_by_step_is_the_whole_run(self):
        with session() as run:
            weights, over = [], False
            while not over:
                over = run.step()
                weights.append(weight(run))
            self.assertEqual((weights, run.progress().step), ([9, 7, 4, 0], 4))
            self.assertEqual(run.fit()["steps"], 4)

    def test_one_call_trains(self):
        self.assertEqual(stratagem.fit(config(), sources=numbers(), log=quiet)["steps"], 4)

    def test_a_config_may_be_a_file_or_text_with_comments_and_be_overridden(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps(config()) + "// a comment")
            for given in (path, str(path), path.read_text()):
                for overrides in ({"trainer.max_steps": 2}, ["trainer.max_steps=2"]):
                    with stratagem.Session(given, sources=numbers(), log=quiet, overrides=overrides) as run:
                        self.assertEqual(run.fit()["steps"], 2)

    def test_a_strategy_is_swapped_between_updates_and_by_request(self):
        told = []
        with session(swap=lambda step, strategy, error: told.append((step, strategy["devices"], error and error.code))) as run:
            run.step(2)
            before = run.strategy
            run.swap({**config()["strategy"], "devices": 3})
            self.assertEqual((len(before.devices()), weight(run)), (3, 7))
            with self.assertError(Code.NOT_FOUND, "nothing"):
                run.swap({"name": "nothing"})
            self.assertEqual(len(run.strategy.devices()), 3)
            run.request_swap({**config()["strategy"], "devices": 1})
            run.fit()
            self.assertEqual((len(before.devices()), weight(run)), (1, 0))
        self.assertEqual([step for step, _, _ in told][-1], 2)
        self.assertIn((2, 1, None), told)

    def test_a_loop_of_ones_own_drives_the_strategy(self):
        with session({"data": {}}, own_loop=True, sources=None) as run:
            for value in (1, 2, 3):
                run.strategy.train_batch({"inputs": floats(value)}, lr=1)
            self.assertEqual(weight(run), 4)
            run.strategy.training_step({"inputs": floats(4)})
            run.strategy.backward()
            self.assertEqual(run.strategy.optimizer_step(1).outcome, "done")
            self.assertEqual(weight(run), 0)

    def test_a_run_stops_and_is_cancelled_from_another_thread(self):
        endless = {"trainer": {"max_steps": 10**9}}
        with session(endless) as run:
            threading.Timer(0.1, run.request_stop).start()
            self.assertTrue(run.fit()["interrupted"])
        with session(endless) as run:
            threading.Timer(0.1, run.cancel).start()
            with self.assertError(Code.CANCELLED):
                run.fit()


class Callbacks(Case):
    def test_what_happens_is_told_in_order(self):
        told, lines = [], []
        with session(progress=lambda p: told.append(("progress", p.step)), metrics=lines.append,
                     batch_start=lambda p: told.append(("start", p.step)),
                     batch_end=lambda p, outputs: told.append(("end", p.step, outputs["loss"].item()))) as run:
            run.fit()
        self.assertEqual([t[0] for t in told[:3]], ["start", "end", "progress"])
        self.assertEqual([t[2] for t in told if t[0] == "end"], [10, 18, 21, 16])
        self.assertEqual([line["step"] for line in lines if "step" in line][:4], [1, 2, 3, 4])

    def test_outputs_are_lent_and_what_is_made_of_them_stays(self):
        kept = []
        with session(batch_end=lambda p, outputs: kept.append((outputs["loss"], outputs["loss"].copy()))) as run:
            run.fit()
        self.assertEqual([copy.item() for _, copy in kept], [10, 18, 21, 16])
        with self.assertError(Code.FAILED_PRECONDITION, "callback, which is over"):
            kept[0][0].item()

    def test_what_any_callback_raises_ends_the_run_and_is_the_cause(self):
        raised = RuntimeError("mine")

        def throw(*_):
            raise raised

        for name in ("progress", "metrics", "batch_start", "batch_end"):
            with session(**{name: throw}) as run:
                with self.subTest(name), self.assertRaises((Error, RuntimeError)) as caught:
                    run.fit()
                self.assertIn(raised, (caught.exception, caught.exception.__cause__))
                self.assertLess(run.progress().step, 3)

    def test_what_a_swap_callback_raises_ends_the_run(self):
        def throw(*_):
            raise RuntimeError("mine")

        with session(swap=throw) as run:
            run.request_swap({**config()["strategy"], "devices": 1})
            with self.assertRaises((Error, RuntimeError)):
                run.fit()

    def test_a_callback_may_close_the_session_that_calls_it(self):
        run = session(batch_end=lambda *_: run.close())
        self.assertTrue(run.fit()["interrupted"])
        with self.assertError(Code.FAILED_PRECONDITION, "closed"):
            run.fit()

    def test_a_callback_may_not_call_what_is_going_on(self):
        found = []

        def call(*_):
            for one in (run.fit, run.step, lambda: run.swap({}), lambda: run.strategy.barrier()):
                try:
                    one()
                except Error as error:
                    found.append(error.code)

        with session({"trainer": {"max_steps": 1}}, batch_start=call) as run:
            run.fit()
        self.assertEqual(found, [Code.FAILED_PRECONDITION] * 4)

    def test_control_c_stops_a_run_after_its_update(self):
        def interrupt(progress, _):
            if progress.step == 2:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

        with session(batch_end=interrupt) as run:
            with self.assertRaises(KeyboardInterrupt):
                run.fit()
            self.assertLessEqual(run.progress().step, 3)
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_events_are_polled_where_no_callback_is_wanted(self):
        with session(queue_events=True) as run:
            run.fit()
            events = []
            while (event := run.poll()) is not None:
                events.append(event["event"])
            self.assertEqual(events.count("metrics") > 3, True)
            self.assertIsNone(run.poll(0.001))


class Sources(Case):
    def test_a_source_that_raises_ends_the_run_with_that_cause(self):
        def read(rows):
            raise LookupError("row is gone")

        with session(sources={"numbers": stratagem.Source(4, read)}) as run:
            with self.assertError(Code.OUT_OF_RANGE, "row is gone") as caught:
                run.fit()
            self.assertIsInstance(caught.exception.__cause__, LookupError)

    def test_a_source_that_gives_no_batch_is_an_error(self):
        for wrong in (None, 5, {"inputs": floats(1, 2, 3)}, {"inputs": object()}):
            with session(sources={"numbers": stratagem.Source(4, lambda rows, wrong=wrong: wrong)}) as run, self.assertRaises(Error):
                run.fit()

    def test_sources_are_let_go_when_open_fails_and_when_the_session_ends(self):
        with self.assertError(Code.INVALID_ARGUMENT, "seed"):
            session({"seed": "x"})
        self.assertEqual(sources._lent, {})
        with session():
            self.assertEqual(len(sources._lent), 1)
        self.assertEqual(sources._lent, {})

    def test_what_is_no_source_is_refused(self):
        with self.assertError(Code.INVALID_ARGUMENT, "not a list"):
            session(sources={"numbers": [1, 2]})
        with self.assertError(Code.INVALID_ARGUMENT, "equally many rows"):
            session(sources={"numbers": {"inputs": floats(1), "targets": floats(1, 2)}})

    def test_rows_in_a_row_are_not_copied(self):
        values = memoryview(floats(1, 2, 3, 4))
        with session({"data": {"train": {"source": "numbers", "batch_size": 2}}, "trainer": {"max_steps": 2}}, sources={"numbers": {"inputs": values}}) as run:
            run.fit()
            self.assertEqual(weight(run), 10 - 1.5 - 3.5)

    def test_numpy_arrays_are_shuffled(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("no NumPy")
        seen = []
        data = {"inputs": numpy.arange(1, 5, dtype=numpy.float32)}
        with session({"data": {"train": {"source": "numbers", "shuffle": True}}}, sources={"numbers": data},
                     metrics=lambda line: seen.append(line)) as run:
            run.fit()
            self.assertEqual(weight(run), 0)


class Misuse(Case):
    def test_garbage_for_a_config_is_told(self):
        for given, code, part in (("{", Code.INVALID_ARGUMENT, "not JSON"), ({}, Code.INVALID_ARGUMENT, "/strategy"), ({"sede": 1}, Code.INVALID_ARGUMENT, "/sede"),
                                  ("/nowhere/config.json", Code.NOT_FOUND, "/nowhere/config.json"), (5, Code.INVALID_ARGUMENT, "not a int"),
                                  (config(optimizer={"name": "sgd", "lr": math.nan}), Code.INVALID_ARGUMENT, "config")):
            with self.assertError(code, part):
                stratagem.Session(given, log=quiet)
        with self.assertError(Code.INVALID_ARGUMENT, "fit, validate, test, predict"):
            session(stage="train")

    def test_a_closed_session_is_an_error(self):
        run = session()
        run.close()
        run.close()
        for call in (run.fit, run.step, run.progress, run.poll, lambda: run.swap({}), lambda: run.request_swap(config()["strategy"]),
                     lambda: run.strategy.barrier()):
            with self.assertError(Code.FAILED_PRECONDITION, "closed"):
                call()
        run.request_stop()
        run.cancel()

    def test_a_strategy_of_a_session_ends_with_it(self):
        run = session()
        strategy = run.strategy
        strategy.barrier()
        run.close()
        for call in (strategy.barrier, strategy.status, lambda: strategy.export_state()):
            with self.assertError(Code.FAILED_PRECONDITION, "closed"):
                call()

    def test_a_second_thread_gets_an_error_and_the_first_goes_on(self):
        inside, go_on, found = threading.Event(), threading.Event(), []

        def wait(*_):
            inside.set()
            go_on.wait(10)

        with session(batch_start=wait) as run:
            thread = threading.Thread(target=lambda: found.append(run.fit()["steps"]))
            thread.start()
            inside.wait(10)
            for call in (run.fit, run.step, lambda: run.swap(config()["strategy"]), lambda: run.strategy.export_state()):
                with self.assertError(Code.FAILED_PRECONDITION, "one caller at a time"):
                    call()
            go_on.set()
            thread.join()
        self.assertEqual(found, [4])

    def test_a_session_that_is_forgotten_ends(self):
        run = session()
        del run
        self.assertEqual(sources._lent, {})

    def test_a_program_that_ends_with_everything_in_hand_ends_quietly(self):
        code = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from support import *
run = stratagem.Session(config(), sources=numbers(), log=quiet)
run.step()
model = stratagem.Plugin(TOY).model()
made = stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={{"devices": 2, "optimizer": {{"name": "sgd", "lr": 1}}}})
made.setup(model)
made.training_step({{"inputs": floats(1, 2)}})
given = made.broadcast({{"x": floats(1), "o": stratagem.Opaque([])}})
state = run.strategy.export_state()
view = given["x"].buffer()
try:
    import numpy
    array_ = numpy.from_dlpack(given["x"])
    numpy.kept = [given, state, view, array_, model, made, run]
except ImportError:
    pass
sys.kept = [given, state, view, model, made, run]
"""
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((found.returncode, found.stderr), (0, ""))

    def test_a_program_that_ends_in_the_middle_of_a_run_ends(self):
        code = f"""
import sys, threading
sys.path.insert(0, {str(HERE)!r})
from support import *
run = stratagem.Session(config(trainer={{"max_steps": 10**9}}), sources=numbers(), log=quiet)
threading.Thread(target=run.fit, daemon=True).start()
import time; time.sleep(0.2)
"""
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((found.returncode, found.stderr), (0, ""))


if __name__ == "__main__":
    unittest.main()
