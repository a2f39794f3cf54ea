#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The script `run`, loaded as a module. Where it calls apt-get or pip, a recorder stands.

usage: run_test.py RUN
"""
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import types
import unittest
import unittest.mock


def load(path):
    loader = importlib.machinery.SourceFileLoader("run", path)
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("run", loader))
    loader.exec_module(module)
    return module


class RunTest(unittest.TestCase):
    def setUp(self):
        self.run_script = load(RUN)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.run_script.CACHE = self.folder / "cache"

    def replace(self, name, value):
        patch = unittest.mock.patch.object(self.run_script, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def refusal(self, *arguments):
        """What is said by a call that must end with an error."""
        said = io.StringIO()
        with contextlib.redirect_stderr(said), unittest.mock.patch.object(sys, "argv", ["run", *arguments]):
            with self.assertRaises(SystemExit) as end:
                self.run_script.main()
        self.assertNotIn(end.exception.code, (0, None))
        return said.getvalue()

    def test_the_demo_sets_up_before_it_looks_for_the_images(self):
        data = self.folder / "data"

        def set_up_debian(names):
            self.assertIn("dataset-fashion-mnist", names)
            data.mkdir(exist_ok=True)
            (data / "train-images-idx3-ubyte.gz").touch()

        class Built(Exception):
            pass

        self.replace("set_up_debian", set_up_debian)
        self.replace("Build", unittest.mock.Mock(side_effect=Built))
        with self.assertRaises(Built):
            self.run_script.command_demo(types.SimpleNamespace(data=str(data), images=None), None)

    def test_a_demo_without_images_says_where_they_come_from(self):
        self.replace("set_up_debian", lambda names: None)
        said = self.refusal("demo", "--data", str(self.folder))
        self.assertIn(str(self.folder), said)
        self.assertIn("dataset-fashion-mnist", said)

    def test_debian_packages_are_installed_once(self):
        installed, calls = [], []
        self.replace("missing_debian_packages", lambda names: [name for name in names if name not in installed])
        self.replace("apt_install", lambda names: (calls.append(names), installed.extend(names)))
        self.replace("shutil", unittest.mock.Mock(which=lambda name: f"/usr/bin/{name}"))
        for _ in range(2):
            self.run_script.set_up_debian(["g++", "catch2"])
        self.assertEqual(calls, [["g++", "catch2"]])

    def test_one_who_is_not_root_is_told_both_commands(self):
        self.replace("os", unittest.mock.Mock(geteuid=lambda: 1000))
        self.replace("shutil", unittest.mock.Mock(which=lambda name: None))
        said = io.StringIO()
        with contextlib.redirect_stderr(said), self.assertRaises(SystemExit):
            self.run_script.apt_install(["catch2"])
        self.assertIn("apt-get update && apt-get install --no-install-recommends catch2", said.getvalue())

    def test_crates_are_fetched_once_and_without_them_nothing_of_rust_is_tested(self):
        calls = []
        self.status = 1
        self.replace("find_cargo", lambda: "/usr/bin/cargo")
        self.replace("subprocess", unittest.mock.Mock(run=lambda command, **_: calls.append(command[1]) or types.SimpleNamespace(returncode=self.status)))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(self.run_script.set_up_rust(), ["-DSTRATAGEM_CARGO=FALSE"])
            self.assertIn("nothing of Rust is tested", said.getvalue())
            self.status = 0
            found = [self.run_script.set_up_rust() for _ in range(2)]
        self.assertEqual(calls, ["fetch"] * 3)
        self.assertEqual(found, [["-DSTRATAGEM_CARGO=/usr/bin/cargo", f"-DSTRATAGEM_RUST_CACHE={self.run_script.CACHE / 'rust'}"]] * 2)

    def test_a_cargo_that_is_too_old_is_not_used(self):
        self.replace("shutil", unittest.mock.Mock(which=lambda name: f"/usr/bin/{name}"))
        said = io.StringIO()
        for version, found in [("cargo 0.66.0", None), ("cargo 1.84.1", None), ("cargo 1.85.0", "/usr/bin/cargo"), ("cargo 2.0.0", "/usr/bin/cargo")]:
            self.replace("subprocess", unittest.mock.Mock(run=lambda *_, **__: types.SimpleNamespace(stdout=version, returncode=0)))
            with contextlib.redirect_stderr(said):
                self.assertEqual(self.run_script.find_cargo(), found)
        self.assertIn("Rust 1.85 is needed", said.getvalue())

    def test_python_packages_are_installed_once_and_again_after_a_broken_set_up(self):
        calls = []

        def call(*command, **_):
            calls.append(command[1:3])
            if "venv" in command:
                (pathlib.Path(command[-1]) / "bin").mkdir(parents=True)
                (pathlib.Path(command[-1]) / "bin" / "python").touch()
            elif self.breaks:
                raise SystemExit(1)

        self.replace("call", call)
        self.breaks = True
        with contextlib.redirect_stderr(io.StringIO()):
            with self.assertRaises(SystemExit):
                self.run_script.set_up_python(self.run_script.DEFAULT_TORCH)
            self.breaks = False
            folders = {self.run_script.set_up_python(self.run_script.DEFAULT_TORCH) for _ in range(2)}
        self.assertEqual(len(folders), 1)
        self.assertEqual([command[0] for command in calls], ["-m", "install", "-m", "install"])

    def test_an_install_builds_first_and_goes_where_it_was_told(self):
        built = unittest.mock.Mock(folder="here", tool=lambda name: name)
        calls = []
        self.replace("Build", lambda args: built)
        self.replace("call", lambda *command, **_: calls.append([str(word) for word in command]))
        with unittest.mock.patch.object(sys, "argv", ["run", "install", str(self.folder / "there")]):
            self.run_script.main()
        self.assertEqual(calls, [["cmake", "--install", "here", "--prefix", str(self.folder / "there")]])
        self.assertIn("usage", self.refusal("install"))

    def test_a_pack_is_of_the_libtorch_of_gpu_machines_and_a_check_of_this_build_ends_with_its_status(self):
        calls, variants = [], []
        built = unittest.mock.Mock(folder=self.folder / "build", venv=self.folder / "venv")
        self.replace("Build", lambda args, targets: variants.append((args.torch, targets)) or built)
        self.replace("call", lambda *command, **_: calls.append([str(word) for word in command[1:]]))
        run = unittest.mock.Mock(return_value=types.SimpleNamespace(returncode=3))
        self.replace("subprocess", types.SimpleNamespace(run=run))
        with contextlib.redirect_stderr(io.StringIO()) as said:
            for arguments in (["--pack", str(self.folder / "there")], ["--pack", str(self.folder / "there"), "--torch", "2.15.0"]):
                with unittest.mock.patch.object(sys, "argv", ["run", "gpu-check", *arguments]):
                    self.run_script.main()
            with unittest.mock.patch.object(sys, "argv", ["run", "gpu-check", "--", "--part", "tests"]), self.assertRaises(SystemExit) as end:
                self.run_script.main()
        self.assertEqual(end.exception.code, 3)
        self.assertEqual(variants, [(version, ["pack_files"]) for version in ("2.11.0", "2.15.0", self.run_script.DEFAULT_TORCH)])
        pack = str(self.run_script.ROOT / "tests" / "gpu" / "pack.py")
        self.assertEqual(calls, 2 * [[pack, str(built.folder), str(self.folder / "there")]] + [[pack, str(built.folder), str(built.folder / "gpu-check")]])
        self.assertEqual(run.call_args[0][0], [str(self.folder / "venv/bin/python"), str(built.folder / "gpu-check" / "gpu-check"), "--part", "tests"])
        self.assertIn("torch 2.11: python3 there/gpu-check", said.getvalue())

    def test_a_part_that_runs_over_its_time_is_ended_with_all_it_started(self):
        self.replace("PART_LIMIT_S", 1)
        pid_file = self.folder / "pid"
        grandchild = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid())); time.sleep(600)"
        result = self.run_script.run_part([sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {grandchild!r}])"])
        self.assertIn("FAILED (not done in", result)
        pid = int(pid_file.read_text())
        for _ in range(1000):  # until init has reaped it
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                return
            if pathlib.Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] == "Z":
                return
            time.sleep(0.01)
        self.fail(f"process {pid} is still there")

    def test_a_failed_part_fails_the_whole(self):
        self.replace("run_part", lambda command: "FAILED (8)" if "clang" in command else "passed")
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.redirect_stderr(io.StringIO()):
            with self.assertRaises(SystemExit):
                self.run_script.test_all_parts([])
        for name in self.run_script.PARTS:
            self.assertRegex(printed.getvalue(), f"{name} +{'FAILED' if name == 'clang' else 'passed'}")

    def test_a_training_that_is_interrupted_ends_by_itself(self):
        ready = self.folder / "ready"
        child = ("import pathlib, signal, sys, time\n"
                 "def stop(*_): time.sleep(0.5); print('saved'); sys.exit(130)\n"
                 "signal.signal(signal.SIGTERM, stop)\n"
                 f"pathlib.Path({str(ready)!r}).touch()\n"
                 "while True: time.sleep(0.01)\n")

        def interrupt():
            while not ready.exists():
                time.sleep(0.01)
            main = threading.main_thread().ident
            signal.pthread_kill(main, signal.SIGINT)  # must not end the wait
            signal.pthread_kill(main, signal.SIGTERM)  # must reach the child

        thread = threading.Thread(target=interrupt)
        thread.start()
        self.assertEqual(self.run_script.run_to_its_end([sys.executable, "-c", child]), (130, "saved\n"))
        thread.join()

    def test_arguments_for_cmake_tell_whether_there_is_a_libtorch(self):
        own = self.folder / "share/cmake/Torch/TorchConfig.cmake"
        own.parent.mkdir(parents=True)
        own.touch()
        for arguments, expected in ((["-DTorch_DIR=/x"], True), (["-D", "Torch_ROOT=/x"], True), (["-DTorch_DIR:PATH=/a b"], True),
                                    ([f"-DCMAKE_PREFIX_PATH=/opt/boost;{self.folder}"], True), (["-DCMAKE_PREFIX_PATH=/opt/boost"], False),
                                    (["-DX=Torch_DIR=3"], False), ([], False)):
            self.assertEqual(self.run_script.names_a_torch(arguments), expected, arguments)

    def test_a_record_of_arguments_that_was_cut_off_is_as_none(self):
        build = self.run_script.Build.__new__(self.run_script.Build)
        build.record = self.folder / "run-arguments.json"
        build.record.write_text('{"user": ["-DX=1"], "all": [')
        self.assertEqual(build.read_record(), {"user": [], "all": None})
        build.record.write_text(json.dumps({"user": ["-DX=1"], "all": []}))
        self.assertEqual(build.read_record()["user"], ["-DX=1"])

    def test_wrong_arguments_are_refused_with_the_way_out(self):
        self.replace("set_up_debian", lambda names: None)
        self.assertIn("at least 1", self.refusal("demo", "--images", "0"))
        self.assertIn("--part", self.refusal("test", "--all", "--torch", "2.11.0"))
        self.assertIn("--all", self.refusal("test", "--part", "asan"))
        self.assertIn(self.run_script.DEFAULT_TORCH, self.refusal("setup", "--torch", "1.0.0"))


if __name__ == "__main__":
    RUN = sys.argv.pop(1)
    unittest.main()
