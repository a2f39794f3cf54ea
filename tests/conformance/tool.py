#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The tool itself: whatever a plugin does in its child is a result, and what is no plugin is told apart from a plugin that is wrong.

usage: tool.py TOOL FAULTY.so GOOD.so
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

TOOL, FAULTY, GOOD = sys.argv[1:4]
CHECK = "runs-repeat-bitwise"


def run(*arguments, fault="", file=""):
    environment = dict(os.environ, STRATAGEM_FAULT=fault, STRATAGEM_FAULT_FILE=file)
    return subprocess.run([TOOL, "conformance", *arguments], capture_output=True, text=True, env=environment, check=False, timeout=120)


def report(*arguments, **more):
    return json.loads(run("--json", *arguments, **more).stdout)


class Children(unittest.TestCase):
    def misbehave(self, how, *arguments, **more):
        found = report(FAULTY, "--only", CHECK, *arguments, fault=how, **more)["checks"]
        self.assertEqual(len(found), 1)
        return found[0]

    def crash(self, how, kind, *arguments):
        result = self.misbehave(how, *arguments)
        self.assertEqual(result["result"], "crashed", result)
        self.assertIn(kind, result["kind"])

    def test_an_exit_with_0_is_no_pass(self):
        self.crash("misbehaves-by-exit", "exit code 0 before it was done")

    def test_an_abort_is_told_by_its_signal(self):
        self.crash("misbehaves-by-abort", "signal 6")

    def test_a_hang_is_ended(self):
        self.crash("misbehaves-by-hanging", "timed out after 1 s", "--timeout", "1")

    def test_ignored_signals_don_t_help(self):
        self.crash("misbehaves-by-ignoring-signals", "timed out after 1 s", "--timeout", "1")

    def test_memory_has_a_limit(self):
        self.crash("misbehaves-by-memory", "more than 300 MiB", "--memory", "300")

    def test_closed_descriptors_are_no_pass(self):
        self.crash("misbehaves-by-closing", "before it was done")

    def test_a_record_of_the_plugin_s_own_is_no_pass(self):
        self.crash("misbehaves-by-pretending", "exit code 0 before it was done")

    def test_a_flood_of_output_is_cut(self):
        result = self.misbehave("misbehaves-by-output")
        self.assertEqual(result["result"], "passed")
        self.assertLessEqual(len(result["output"]), 4096)
        self.assertGreater(len(result["output"]), 0)

    def test_what_a_plugin_leaves_running_is_killed(self):
        for how in ("misbehaves-by-child", "misbehaves-by-daemon"):
            with tempfile.TemporaryDirectory() as folder:
                file = os.path.join(folder, "pid")
                self.misbehave(how, file=file)
                self.assertFalse(pathlib.Path(f"/proc/{int(pathlib.Path(file).read_text())}").exists(), how)

    def test_a_probe_that_ends_the_process_is_the_plugin_s_fault(self):
        done = run("--json", FAULTY, fault="misbehaves-in-probe")
        found = {one["id"]: one["result"] for one in json.loads(done.stdout)["checks"]}
        self.assertEqual(done.returncode, 1)
        self.assertEqual(found["plugin-enters"], "crashed")
        self.assertEqual(found["elf-nodelete"], "passed")
        self.assertEqual(found[CHECK], "skipped")


class NoPlugins(unittest.TestCase):
    def refuse(self, path, part):
        done = run(str(path))
        self.assertEqual(done.returncode, 3, done.stdout + done.stderr)
        self.assertIn(part, done.stdout)
        found = report(str(path))
        self.assertIn(part, found["no_plugin"])
        self.assertFalse(found["conforms"])

    def test_files_that_are_no_plugins(self):
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            (folder / "text.so").write_text("not a library\n")
            (folder / "empty.so").write_bytes(b"")
            (folder / "cut.so").write_bytes(pathlib.Path(GOOD).read_bytes()[:6000])
            needed = subprocess.run(["ldd", TOOL], capture_output=True, text=True, check=True).stdout
            libc = next(line.split()[2] for line in needed.splitlines() if "libc.so" in line)
            self.refuse(folder / "text.so", "not an ELF file")
            self.refuse(folder / "empty.so", "not an ELF file")
            self.refuse(folder / "cut.so", "cut off")
            self.refuse(libc, "no Stratagem plugin")
            self.refuse("/bin/sh", "no ")
            self.refuse(folder / "nowhere.so", "nowhere.so")
            self.refuse(folder, name)

    def test_a_plugin_that_can_t_be_loaded(self):
        with tempfile.TemporaryDirectory() as name:
            alone = pathlib.Path(name) / "alone.so"  # without the library beside it that it needs
            alone.write_bytes((pathlib.Path(FAULTY).parent.parent / "tests/conformance/faulty/faulty_note_names_libraries.so").read_bytes())
            self.refuse(alone, "libc10.so")


class Output(unittest.TestCase):
    def test_the_list_needs_no_plugin(self):
        listed = report("--list")
        self.assertEqual(listed["schema"], 1)
        self.assertGreaterEqual(len(listed["checks"]), 80)
        for check in listed["checks"]:
            self.assertRegex(check["id"], "^[a-z0-9]+(-[a-z0-9]+)+$")
            self.assertRegex(check["rule"], "^([A-G][0-9]|H)$")
            self.assertRegex(check["sentence"], "^[A-Z1-9a-z].*[^.]$")
        self.assertEqual(len(report("--list", "--only", "tree-*", "--skip", "tree-k*")["checks"]),
                         sum(check["id"].startswith("tree-") and not check["id"].startswith("tree-k") for check in listed["checks"]))

    def test_a_pattern_that_fits_nothing_is_told(self):
        done = run(GOOD, "--only", "nonsense*")
        self.assertEqual(done.returncode, 2)
        self.assertIn("nonsense*", done.stderr)

    def test_the_report_is_the_same_again(self):
        def key(found):
            return [(one["id"], one["strategy"], one["result"], one["messages"]) for one in found["checks"]]
        first, second = (report(GOOD, "--skip", "*100-ms", "--skip", "deadline*") for _ in range(2))
        self.assertEqual(key(first), key(second))
        self.assertEqual(first["schema"], 1)
        self.assertEqual(first["seed"], 20260101)
        self.assertTrue(first["conforms"])
        self.assertEqual(sum(first["counts"].values()), len(first["checks"]))

    def test_other_seeds_conform_too(self):
        for seed in ("1", "77"):
            found = report(GOOD, "--seed", seed, "--only", "trains*", "--only", "tensor*", "--only", "r*-bitwise*")
            self.assertTrue(found["conforms"], found)
            self.assertEqual(found["seed"], int(seed))

    def test_in_process_gives_the_same(self):
        done = run(GOOD, "--in-process", "--only", "tree-*")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("passed", done.stdout)

    def test_people_are_told_what_was_promised(self):
        done = run(FAULTY, "--only", "status-counts", fault="status-counts")
        self.assertEqual(done.returncode, 1)
        for part in ("failed   H   status-counts", "promised: status counts", "not so: on 1 device", "it does not conform: 1 checks",
                     "seed 20260101 (the default)"):
            self.assertIn(part, done.stdout)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
