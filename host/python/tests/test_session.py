# SPDX-License-Identifier: Apache-2.0
"""Runs from a config: a strategy in plain C and the toy model, without LibTorch."""
import ctypes
import json
import logging
import math
import os
import tempfile
import threading
import time

from support import *  # noqa: F403
from stratagem.events import Events


class Running(Case):
    def test_a_run_trains_and_gives_its_result(self):
        with session() as run:
            self.assertEqual(run.fit()["steps"], 4)
            self.assertEqual(weight(run), 0)

    def test_step_by_step_is_the_whole_run(self):
        with session() as run:
            self.assertEqual([(run.step(), weight(run)) for _ in range(4)], [(False, 9), (False, 7), (False, 4), (True, 0)])
            self.assertEqual(run.fit()["steps"], 4)

    def test_so_many_updates_as_asked_for(self):
        with session() as run:
            for wrong in (0, -1, 2**64, 2**64 + 1):
                with self.assertError(Code.INVALID_ARGUMENT, str(wrong)):
                    run.step(wrong)
            self.assertEqual((run.step(3), weight(run)), (False, 4))
            self.assertEqual((run.step(2**64 - 1), weight(run)), (True, 0))

    def test_how_far_it_is_is_told(self):
        with session({"trainer": {"max_steps": 6, "max_epochs": 2, "log_every_n_steps": 1}}) as run:
            begin = run.progress()
            self.assertEqual((begin.loss == begin.loss, {**vars(begin), "loss": None}),
                             (False, dict(stage="fit", epoch=0, max_epochs=2, batch=0, num_batches=4, step=0, max_steps=6, loss=None)))
            run.step(5)
            self.assertEqual(run.progress(), stratagem.Progress("fit", 1, 2, 1, 4, 5, 6, 0.0))

    def test_one_call_trains_validates_tests_or_predicts(self):
        given = {"sources": numbers(), "log": quiet}
        self.assertEqual(stratagem.fit(config(), **given)["steps"], 4)
        for stage in ("validation", "test"):
            one = getattr(stratagem, {"validation": "validate"}.get(stage, stage))
            found = one(config(data={stage: {"source": "numbers", "batch_size": 4}}), **given)
            self.assertEqual(found[stage]["mean_x"], 2.5)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "out.npz")
            found = stratagem.predict(config(data={"predict": {"source": "numbers", "batch_size": 4}}), output=path, **given)
            self.assertEqual((found["predictions"], found["arrays"]["x"]), (str(path), [4]))
            self.assertTrue(path.exists())

    def test_paths_of_a_text_are_relative_to_the_given_folder(self):
        strategy = {**config()["strategy"], "path": os.path.basename(SEQUENTIAL)}
        with session({"strategy": strategy}, folder=os.path.dirname(SEQUENTIAL)) as run:
            self.assertEqual(run.fit()["steps"], 4)
        with self.assertError(Code.INVALID_ARGUMENT, os.path.join(os.getcwd(), os.path.basename(SEQUENTIAL))):
            session({"strategy": strategy})

    def test_a_config_may_be_a_file_or_text_with_comments_and_be_overridden(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps(config()) + "// a comment")
            for given in (path, str(path), path.read_text()):
                for overrides in ({"trainer.max_steps": 2}, ["trainer.max_steps=2"], "trainer.max_steps=2"):
                    with stratagem.Session(given, sources=numbers(), log=quiet, overrides=overrides) as run:
                        self.assertEqual(run.fit()["steps"], 2)

    def test_a_strategy_is_swapped_between_updates_and_by_request(self):
        told = []
        with session(swap=lambda step, strategy, error: told.append((step, strategy.get("devices"), error and error.code))) as run:
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
        self.assertEqual(told, [(2, 3, None), (2, None, Code.NOT_FOUND), (2, 1, None)])

    def test_a_config_file_is_read_again_by_request(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "config.json")
            path.write_text(json.dumps(config()))
            with stratagem.Session(path, sources=numbers(), log=quiet) as run:
                run.step()
                path.write_text(json.dumps(config(strategy={**config()["strategy"], "devices": 3})))
                run.step()
                self.assertEqual(len(run.strategy.devices()), 2)
                run.request_reload()
                run.step()
                self.assertEqual((len(run.strategy.devices()), weight(run)), (3, 4))

    def test_a_loop_of_ones_own_drives_the_strategy(self):
        with session({"data": {}}, own_loop=True, sources=None) as run:
            for value in (1, 2, 3):
                run.strategy.train_batch({"inputs": floats(value)}, lr=1)
            self.assertEqual(weight(run), 4)
            run.strategy.training_step({"inputs": floats(4)})
            run.strategy.backward()
            self.assertEqual(run.strategy.optimizer_step(1).outcome, "done")
            self.assertEqual(weight(run), 0)
            with self.assertError(Code.FAILED_PRECONDITION, "OWN_LOOP"):
                run.fit()
            run.strategy.abort()
            with self.assertError(Code.CANCELLED):
                run.strategy.barrier()

    def test_a_run_stops_and_is_cancelled_from_another_thread(self):
        endless = {"trainer": {"max_steps": 10**5}}  # seconds, where nobody stops it
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
        converted = []
        with session(convert=stratagem.Tensor.item, batch_end=lambda p, outputs: converted.append(outputs["loss"])) as run:
            run.fit()
        self.assertEqual(converted, [10, 18, 21, 16])

    def test_what_any_callback_raises_ends_the_run_and_is_the_cause(self):
        raised = RuntimeError("mine")

        def throw(*_):
            raise raised

        for name, step, told in (("batch_start", 0, "the event batch_start: RuntimeError: mine"), ("batch_end", 1, "the event batch_end: RuntimeError: mine"),
                                 ("progress", 1, "the event progress: RuntimeError: mine"), ("metrics", 1, "the event metrics: RuntimeError: mine"),
                                 ("swap", 0, "the event swap: RuntimeError: mine"), ("log", 0, "what log raised before it: RuntimeError: mine")):
            with self.subTest(name), session(**{name: throw}) as run:
                run.request_swap({**config()["strategy"], "devices": 1})  # which is logged, too
                with self.assertError(Code.UNKNOWN, told) as caught:
                    run.fit()
                self.assertIs(caught.exception.__cause__, raised)
                self.assertIn(run.progress().step, (step - 1, step))
                with self.assertRaises(Error):
                    run.step()

    def test_what_log_raises_where_nothing_follows_is_raised_at_the_end(self):
        def throw(*_):
            raise RuntimeError("mine")

        never = [{"at_step": 10, "strategy": config()["strategy"]}]
        with self.assertRaises(RuntimeError):
            session({"swap": never}, log=throw)
        with session(log=throw) as run:
            with self.assertRaises(RuntimeError):
                run.swap({**config()["strategy"], "devices": 1})
            self.assertEqual((len(run.strategy.devices()), run.fit()["steps"]), (1, 4))

    def test_the_log_has_loggings_levels_and_goes_there_where_nobody_takes_it(self):
        told = []
        with session(log=lambda *one: told.append(one)) as run:
            run.swap({**config()["strategy"], "devices": 1})
        self.assertEqual([level for level, _ in told], [logging.INFO])
        self.assertIn('strategy "sequential" on cpu:0', told[0][1])
        with self.assertLogs("stratagem", logging.INFO) as logged, session(log=None) as run:
            run.swap({**config()["strategy"], "devices": 1})
        self.assertEqual(logged.output, [f"INFO:stratagem:{told[0][1]}"])

    def test_a_table_outlives_what_it_told(self):
        told = []
        events = Events(services.Failure(), None, log=lambda *one: told.append(one), progress=told.append)
        copied = abi.stg_session_events.from_buffer_copy(events.table)  # as a session has one
        copied.log(copied.self, abi.STG_LOG_INFO, errors.text("once"))
        del events
        gc.collect()
        copied.log(copied.self, abi.STG_LOG_INFO, errors.text("twice"))
        self.assertIsNone(copied.progress(copied.self, ctypes.pointer(abi.stg_progress())))
        self.assertEqual(told, [(logging.INFO, "once")])

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

    def test_events_are_polled_where_no_callback_is_wanted(self):
        with session(queue_events=True) as run:
            run.fit()
            events = []
            while (event := run.poll()) is not None:
                events.append(event["event"])
            self.assertGreater(events.count("metrics"), 3)
            for timeout_s in (0.001, 0, -1):
                self.assertIsNone(run.poll(timeout_s))
            cpu_s = time.process_time()
            self.assertIsNone(run.poll(0.6))
            self.assertLess(time.process_time() - cpu_s, 0.1)  # it sleeps

    def test_a_poll_waits_for_what_comes(self):
        with session({"trainer": {"max_steps": 1}}, queue_events=True) as run:
            threading.Timer(0.3, run.fit).start()
            self.assertEqual(run.poll(60)["event"], "progress")
            while run.poll(1) is not None:
                pass


class Sources(Case):
    def test_a_source_that_raises_ends_the_run_with_that_cause(self):
        def read(rows):
            raise LookupError("row is gone")

        with session(sources={"numbers": stratagem.Source(4, read)}) as run:
            with self.assertError(Code.OUT_OF_RANGE, "row is gone") as caught:
                run.fit()
            self.assertIsInstance(caught.exception.__cause__, LookupError)

    def test_a_source_that_gives_no_batch_is_an_error(self):
        for wrong, part in ((None, "it gave no batch"), (5, "the batch has no tensor"), ({"inputs": floats(1, 2, 3)}, "shape (3)"),
                            ({"inputs": object()}, "batch/inputs: a builtins.object")):
            with session(sources={"numbers": stratagem.Source(4, lambda rows, wrong=wrong: wrong)}) as run:
                with self.assertError(Code.INVALID_ARGUMENT, part):
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

        for wrong in (0, -1, 2**63, 2**64 + 5):
            with self.assertError(Code.INVALID_ARGUMENT, f"num_samples is {wrong}"):
                stratagem.Source(wrong, quiet)

    def test_rows_in_a_row_are_not_copied(self):
        values = floats(1, 2, 3, 4)
        given = stratagem.Arrays({"inputs": memoryview(values)})
        batch = trees.take_tree(trees.Tree(given.read([2, 3])).abi)["inputs"]
        self.assertEqual((batch.data_ptr, batch.tolist()), (values.buffer_info()[0] + 2 * values.itemsize, [3, 4]))
        with session({"data": {"train": {"source": "numbers", "batch_size": 2}}, "trainer": {"max_steps": 2}}, sources={"numbers": given}) as run:
            run.fit()
            self.assertEqual(weight(run), 10 - 1.5 - 3.5)
        with self.assertError(Code.INVALID_ARGUMENT, "memoryview can't be shuffled"):
            given.read([3, 2])

    def test_numpy_arrays_are_shuffled_in_the_order_that_a_function_is_asked_for(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("no NumPy")
        values, asked = numpy.arange(8, dtype=numpy.float32), []
        function = stratagem.Source(8, lambda rows: asked.extend(rows) or {"inputs": values[list(rows)]})
        with tempfile.TemporaryDirectory() as folder:
            trained = pathlib.Path(folder, "trace")
            settings = {"data": {"train": {"source": "numbers", "batch_size": 4, "shuffle": True}}, "trainer": {"max_steps": 2},
                        "strategy": {**config()["strategy"], "devices": 1}, "model": {**config()["model"], "options": {"trace": str(trained)}}}
            for given in (function, {"inputs": values}):
                with session(settings, sources={"numbers": given}) as run:
                    run.fit()
                self.assertEqual([float(value) for value in trained.read_text().split()], asked)
                trained.unlink()
        self.assertEqual(sorted(asked), list(range(8)))
        self.assertNotEqual(asked, sorted(asked))

    def test_a_source_is_read_ahead_on_another_thread_where_it_may_be(self):
        for any_thread, caller_thread_only, elsewhere in ((False, False, False), (True, False, True), (True, True, False)):
            threads = set()
            source = stratagem.Source(4, lambda rows: threads.add(threading.get_ident()) or {"inputs": floats(1)}, any_thread=any_thread)
            with session(sources={"numbers": source}, caller_thread_only=caller_thread_only) as run:
                run.fit()
            self.assertEqual((len(threads), threading.get_ident() not in threads), (1, elsewhere))


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
        with session() as run:
            with run.strategy as strategy:
                strategy.barrier()
            strategy.close()
            run.step()
        for call in (run.step, strategy.barrier, strategy.status, lambda: strategy.export_state()):
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


if __name__ == "__main__":
    unittest.main()
