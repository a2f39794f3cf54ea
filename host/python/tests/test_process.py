# SPDX-License-Identifier: Apache-2.0
"""Control-C, forks, garbage collection and the end of a process, in the middle of a run."""
import os
import signal
import subprocess
import tempfile
import threading
import time

from support import *  # noqa: F403

HEAD = f"""
import os, signal, sys, threading, time
sys.path.insert(0, {str(HERE)!r})
from support import *
"""


def child(code):
    """What a process of its own did."""
    found = subprocess.run([sys.executable, "-W", "ignore::DeprecationWarning", "-c", HEAD + code], capture_output=True, text=True, timeout=60, check=False)
    return found.returncode, found.stdout, found.stderr


class Interrupts(Case):
    def setUp(self):
        # Where a script starts this in the background, SIGINT is ignored.
        self.addCleanup(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, signal.default_int_handler))

    def press(self, times=1):
        for _ in range(times):
            os.kill(os.getpid(), signal.SIGINT)

    def test_control_c_stops_a_run_after_its_update(self):
        with session(batch_start=lambda progress: progress.step == 2 and self.press()) as run:
            with self.assertRaises(KeyboardInterrupt) as caught:
                run.fit()
            self.assertIsNone(caught.exception.__context__)
            self.assertEqual((run.progress().step, weight(run)), (3, 4))
        self.assertIs(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_a_second_control_c_cancels(self):
        with session(batch_start=lambda progress: progress.step == 2 and self.press(2)) as run:
            with self.assertRaises(KeyboardInterrupt) as caught:
                run.fit()
            self.assertEqual(caught.exception.__context__.code, Code.CANCELLED)
            self.assertEqual(weight(run), 7)
            with self.assertRaises(Error):  # the Control-C is answered
                run.fit()

    def test_a_handler_of_ones_own_stays(self):
        seen = []
        signal.signal(signal.SIGINT, lambda *_: seen.append(1))
        with session(batch_start=lambda progress: progress.step == 2 and self.press()) as run:
            self.assertEqual((run.fit()["steps"], seen), (4, [1]))

    def test_control_c_in_a_step_leaves_a_checkpoint_to_go_on_from(self):
        with tempfile.TemporaryDirectory() as folder:
            settings = {"strategy": {"name": "single_device", "path": SINGLE_DEVICE, "accelerator": "cpu", "devices": 1},
                        "checkpoint": {"dir": folder}}
            with session({**settings, "trainer": {"max_steps": 10**4}}, batch_end=lambda progress, _: progress.step == 7 and self.press()) as run:
                with self.assertRaises(KeyboardInterrupt):
                    run.step(10**6)
                done, trained = run.progress().step, weight(run)
            self.assertIn(done, (7, 8))
            with session({**settings, "trainer": {"max_steps": done + 1}}, checkpoint=folder) as run:
                self.assertEqual((run.progress().step, run.progress().max_steps, weight(run)), (done, done + 1, trained))
                self.assertEqual(run.fit()["steps"], done + 1)
                self.assertEqual(weight(run), trained - (1, 2, 3, 4)[done % 4])

    def test_control_c_ends_a_poll(self):
        with session(queue_events=True) as run:
            started = time.monotonic()
            threading.Timer(0.2, self.press).start()
            with self.assertRaises(KeyboardInterrupt):
                while time.monotonic() - started < 60:
                    run.poll(60)
            self.assertLess(time.monotonic() - started, 20)


FORK = """
pid = os.fork()
if pid == 0:
    {}
    sys.exit(5)
end = time.monotonic() + 5
while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0) and time.monotonic() < end:
    time.sleep(0.01)
if ended == (0, 0):
    os.kill(pid, signal.SIGKILL)
print(os.waitstatus_to_exitcode(ended[1]) if ended[0] else "it hangs")
"""


class Forks(unittest.TestCase):
    """A child of fork has none of the session's threads."""

    SESSIONS = {"a source that is read ahead": """
many = stratagem.Source(1000, lambda rows: {"inputs": floats(*rows)}, any_thread=True)
run = stratagem.Session(config(), sources={"numbers": many}, log=quiet)
run.step(2)
""", "files": """
import tempfile
with tempfile.TemporaryDirectory() as folder:
    pathlib.Path(folder, "x.csv").write_text("x\\n" + "1\\n" * 1000)
    run = stratagem.Session(config(data={"train": {"format": "csv", "inputs": "x.csv"}}), folder=folder, log=quiet)
run.step(2)
"""}
    FIT = """
    try:
        run.fit()
    except Error as error:
        assert error.code == Code.FAILED_PRECONDITION and "fork" in str(error), error
        os._exit(5)
"""

    def test_the_childs_close_exit_and_fit_end(self):
        for kind, begin in self.SESSIONS.items():
            for name, what in (("exit", "pass"), ("close", "run.close()"), ("fit", self.FIT)):
                with self.subTest(kind, what=name):
                    self.assertEqual(child(begin + FORK.format(what) + 'print(run.fit()["steps"])'), (0, "5\n4\n", ""))

    def test_the_childs_end_waits_for_no_call_of_the_parents(self):
        code = """
inside, go_on = threading.Event(), threading.Event()
def wait(*_):
    inside.set()
    go_on.wait(30)
run = stratagem.Session(config(), sources=numbers(), log=quiet, batch_start=wait)
made = stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": 1})
made._gate.enter()  # as while a call goes on
thread = threading.Thread(target=run.fit)
thread.start()
inside.wait(30)
""" + FORK.format("pass") + """
made._gate.leave()
go_on.set()
thread.join()
"""
        self.assertEqual(child(code), (0, "5\n", ""))


READ_AHEAD = """
go_on, done = threading.Event(), threading.Event()
def read(rows):
    if rows[0] == 3:  # three are ready: it is here only after the first step
        go_on.wait(30)
        end()
        done.set()
    return {"inputs": floats(*rows)}
given = {"numbers": stratagem.Source(1000, read, any_thread=True)}
"""
WAIT = """
go_on.set()
done.wait(30)
until = time.monotonic() + 30
while sources._lent and time.monotonic() < until:
    time.sleep(0.01)
print(len(sources._lent))
"""


class Readers(unittest.TestCase):
    """The thread that reads ahead may be where a session ends, which waits for that thread."""

    def test_the_garbage_collector_may_end_it_there(self):
        code = READ_AHEAD + """
import gc
gc.disable()
end = gc.collect
class Shown:
    def __init__(self):
        self.run = stratagem.Session(config(), sources=given, progress=self.show, log=quiet)
    def show(self, progress):
        pass
shown = Shown()
shown.run.step()
del shown
""" + WAIT
        self.assertEqual(child(code), (0, "0\n", ""))

    def test_the_source_may_close_it_there(self):
        code = READ_AHEAD + """
run = stratagem.Session(config(), sources=given, log=quiet)
end = run.close
run.step()
""" + WAIT + """
try:
    run.step()
except Error as error:
    print(error.code.name)
"""
        self.assertEqual(child(code), (0, "0\nFAILED_PRECONDITION\n", ""))


class Ends(unittest.TestCase):
    def test_a_program_that_ends_with_everything_in_hand_ends_quietly(self):
        code = """
run = stratagem.Session(config(), sources=numbers(), log=quiet)
run.step()
model = stratagem.Plugin(TOY).model()
made = stratagem.Strategy(stratagem.Plugin(SEQUENTIAL), config={"devices": 2, "optimizer": {"name": "sgd", "lr": 1}})
made.setup(model)
made.training_step({"inputs": floats(1, 2)})
given = made.broadcast({"x": floats(1), "o": stratagem.Opaque([])})
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
        self.assertEqual(child(code), (0, "", ""))

    def test_a_program_that_ends_in_the_middle_of_a_run_ends(self):
        code = """
run = stratagem.Session(config(trainer={"max_steps": 10**9}), sources=numbers(), log=quiet)
threading.Thread(target=run.fit, daemon=True).start()
while run.progress().step < 10:
    time.sleep(0.001)
"""
        self.assertEqual(child(code), (0, "", ""))


if __name__ == "__main__":
    unittest.main()
