#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The pieces of gpu-check and of pack.py, with made-up programs, traces and clocks: what they say where something is wrong.

usage: check_parts.py
"""
import contextlib
import io
import json
import os
import pathlib
import sys
import tempfile
import time
import types
import unittest
import unittest.mock

sys.dont_write_bytecode = True
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import pack  # noqa: E402
from gpu_check import main, part, place, programs  # noqa: E402

# A program with Catch2's arguments: a case does what its name says.
PROGRAM = r'''#!{python}
import os, re, sys, time
xml, names = open(sys.argv[4], "w"), [re.sub(r"\\(.)", r"\1", name) for name in re.split(r"(?<!\\),", sys.argv[5])]
def put(text): xml.write(text + "\n"); xml.flush()
if "skip" in names:
    print("skipped, for want of a GPU: none"); sys.exit(77)
if "another" in names:
    put("<Catch><TestCase name='unknown'>"); os._exit(139)
if "refuse" in names:
    print("no such library"); sys.exit(3)
put("<Catch><Group>")
for name in names:
    put('<TestCase name="%s" filename="a.cpp" line="7">' % name)
    if name == "hang": time.sleep(600)
    if name == "crash": print("about to"); sys.stdout.flush(); os._exit(139)
    if name == "fail":
        put('<Expression success="false" type="CHECK" filename="a.cpp" line="9"><Original>a == b</Original><Expanded>1 == 2</Expanded></Expression>')
    put('<OverallResult success="%s" durationInSeconds="0.5"/></TestCase>' % ("false" if name == "fail" else "true"))
put("</Group></Catch>")
if "crash at the end" in names: os._exit(134)
'''


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name, text, mode=0o644):
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(mode)
        return file


class ProgramsTest(Folder):
    def run_cases(self, *arguments, seconds=30, stalled_s=1.0):
        program = self.write("program", PROGRAM.replace("{python}", sys.executable), 0o755)
        cases = programs.run_program(program, list(arguments), dict(os.environ), self.folder, time.monotonic() + seconds, stalled_s)
        return {case["name"]: case for case in cases}

    def statuses(self, *arguments, **options):
        return {name: case["status"] for name, case in self.run_cases(*arguments, **options).items()}

    def test_each_case_is_told_and_a_failure_says_where(self):
        cases = self.run_cases("one", "two\\, with a comma", "fail")
        self.assertEqual({name: case["status"] for name, case in cases.items()}, {"one": "passed", "two, with a comma": "passed", "fail": "failed"})
        self.assertEqual(cases["one"]["seconds"], 0.5)
        self.assertEqual(cases["fail"]["text"], "a.cpp:9: a == b is 1 == 2")

    def test_a_case_that_hangs_or_ends_the_process_is_told_and_those_after_it_run(self):
        found = self.run_cases("one", "hang", "two", "crash", "three")
        self.assertEqual({name: case["status"] for name, case in found.items()},
                         {"one": "passed", "hang": "timeout", "two": "passed", "crash": "crashed", "three": "passed"})
        self.assertIn("139", found["crash"]["text"])
        self.assertIn("about to", found["crash"]["text"])

    def test_a_process_that_crashes_after_its_last_case_is_told(self):
        self.assertEqual(self.statuses("one", "crash at the end"), {"one": "passed", "crash at the end": "passed", "the end of the process": "crashed"})

    def test_what_there_is_no_time_for_is_told(self):
        began = time.monotonic()
        self.assertEqual(self.statuses("hang", "two", seconds=6, stalled_s=60), {"hang": "timeout", "two": "not run"})
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(self.statuses("one", seconds=0), {"one": "not run"})

    def test_a_program_that_is_skipped_or_does_not_start_is_told(self):
        self.assertEqual(self.statuses("skip", "two"), {"skip": "skipped", "two": "skipped"})
        self.assertEqual(self.statuses("another", "two"), {"unknown": "crashed", "another": "not run", "two": "not run"})
        found = self.run_cases("refuse", "two")
        self.assertEqual({case["status"] for case in found.values()}, {"not run"})
        self.assertIn("no such library", found["two"]["text"])


class PlaceTest(Folder):
    def torch(self, version, name="torch", cuda=True):
        self.write(f"{name}/version.py", f"__all__ = []\n__version__ = '{version}'\n")
        for library in ["libtorch_cpu.so"] + ["libtorch_cuda.so"] * cuda:
            self.write(f"{name}/lib/{library}", "")
        return self.folder / name

    def test_libtorch_is_found_in_a_folder_or_at_it_or_in_a_variable(self):
        folder = self.torch("2.11.0+cu130")
        (self.folder / "nvidia/nccl/lib").mkdir(parents=True)
        for given in (folder, self.folder):
            found = place.find_torch(str(given))
            self.assertEqual((found.folder, found.version, found.minor), (folder, "2.11.0+cu130", "2.11"))
            self.assertEqual(found.library_folders, [folder / "lib", self.folder / "nvidia/nccl/lib"])
        with unittest.mock.patch.dict(os.environ, {place.VARIABLE: str(folder)}):
            self.assertEqual(place.find_torch().folder, folder)

    def test_another_libtorch_or_none_is_missing_with_what_there_is(self):
        pack_of = {"torch": "2.11.0"}
        place.check_torch(place.find_torch(self.torch("2.11.1+cu130")), pack_of, "cuda")
        with self.assertRaisesRegex(place.Missing, "torch 2.9.1.*2.11.0"):
            place.check_torch(place.find_torch(self.torch("2.9.1")), pack_of, "cuda")
        cpu = place.find_torch(self.torch("2.11.0+cpu", "cpu", cuda=False))
        place.check_torch(cpu, pack_of, "cpu")
        with self.assertRaisesRegex(place.Missing, "without CUDA"):
            place.check_torch(cpu, pack_of, "cuda")
        with self.assertRaisesRegex(place.Missing, "nowhere"):
            place.find_torch("/nowhere")
        with unittest.mock.patch("importlib.util.find_spec", lambda name: None), self.assertRaisesRegex(place.Missing, "no package torch.*--torch"):
            place.find_torch()

    def test_an_older_libc_is_missing(self):
        with unittest.mock.patch("platform.libc_ver", lambda: ("glibc", "2.31")), self.assertRaisesRegex(place.Missing, "2.31.*2.34"):
            place.check_libc({"glibc": "2.34"})
        with unittest.mock.patch("platform.libc_ver", lambda: ("glibc", "2.100")):
            place.check_libc({"glibc": "2.34"})

    def test_a_fault_of_driver_or_devices_is_missing_and_no_other(self):
        def report(ident, status):
            return {"checks": [{"id": ident, "problems": [{"status": status, "wrong": "it is gone", "remedy": "find it"}]}]}
        for ident in ("driver", "devices"):
            with self.assertRaisesRegex(place.Missing, "it is gone; find it"):
                place.check_gpus(report(ident, "fault"))
        place.check_gpus(report("devices", "warning"))
        place.check_gpus(report("shared-memory", "fault"))

    def test_programs_that_do_not_start_are_missing_with_what_the_loader_says(self):
        self.write("bin/stratagem", "#!/bin/sh\necho 'version GLIBC_2.99 not found' >&2\nexit 127\n", 0o755)
        with self.assertRaisesRegex(place.Missing, "GLIBC_2.99"):
            place.ask_doctor(self.folder, dict(os.environ), "cuda", self.folder)


class MainTest(Folder):
    def check(self, seconds, *parts):
        args = types.SimpleNamespace(accelerator="cpu", torch=None, part=list(parts), limit=seconds)
        self.write("pack.json", json.dumps({"version": "1", "commit": "", "torch": "2.11.0", "programs": []}))
        with unittest.mock.patch.object(main, "ROOT", self.folder):
            check = main.Check(args, self.folder)
        check.variables, check.doctor = dict(os.environ, PYTHONPATH=str(self.folder)), {}
        return check

    def parts(self, **texts):
        self.write("gpu_check/__init__.py", "")
        self.write("gpu_check/part.py", pathlib.Path(part.__file__).read_text())
        for name, text in {"machine": "report({'name': 'here', 'ok': True})", **texts}.items():
            self.write(f"gpu_check/{name}.py", "import os, time\n\n\ndef main(settings, report):\n" + "".join(f"    {line}\n" for line in text.splitlines()))

    def run_check(self, check):
        with contextlib.redirect_stderr(io.StringIO()):
            check.run()
        return check

    def test_a_part_that_hangs_fails_or_ends_is_told_with_what_it_had_found_and_the_next_one_runs(self):
        self.parts(parity="report({'name': 'first', 'ok': True})\ntime.sleep(600)", syncs="report({'name': 'a wait', 'ok': False, 'text': 'of one'})",
                   timing="report({'name': 'whole', 'ok': True})\nprint('what was said', flush=True)\nos._exit(7)")
        check = self.run_check(self.check(20, "parity", "syncs", "timing"))
        self.assertEqual({name: found["status"] for name, found in check.parts.items()},
                         {"machine": "passed", "parity": "failed", "syncs": "failed", "timing": "failed"})
        self.assertEqual(check.parts["parity"]["results"], [{"name": "first", "ok": True}])
        self.assertEqual(check.failures, ["parity: it was not done in its time", "syncs: a wait: of one", "timing: the process ended with status 7"])
        self.assertIn("what was said", check.parts["timing"]["log"])
        self.assertLess(check.report("failed")["seconds"], 20)

    def test_time_that_a_part_leaves_goes_to_the_next(self):
        self.parts(timing="report({'name': 'left', 'ok': True, 's': settings['ends_at'] - time.monotonic()})")
        check = self.run_check(self.check(100, "timing"))
        self.assertEqual(check.failures, [])
        self.assertGreater(check.parts["timing"]["results"][0]["s"], 80)

    def test_a_line_that_was_cut_off_is_left_out(self):
        self.assertEqual(main.read_lines('{"a": 1}\n{"b": 2}\n{"c'), [{"a": 1}, {"b": 2}])

    def test_what_json_cannot_say_is_text(self):
        self.assertEqual(part.plain({"a": [float("inf"), 1.5, "x"]}), {"a": ["inf", 1.5, "x"]})


class PackTest(Folder):
    def pack(self):
        build = types.SimpleNamespace(foreign_places=lambda: ["/home/builder/source"])
        return pack.Pack(build, self.folder / "pack")

    def test_a_file_that_names_the_build_machine_is_refused(self):
        made = self.pack()
        self.write("pack/lib/clean.so", "\0./core/base\0")
        self.assertEqual(made.check(1), 13)
        self.write("pack/lib/dirty.so", "\0/home/builder/source/core\0more")
        with self.assertRaisesRegex(SystemExit, "dirty.so names a folder of this machine: /home/builder/source/core$"):
            made.check(1)

    def test_a_pack_that_is_too_large_is_refused(self):
        self.write("pack/lib/large.so", "x" * 2000)
        with self.assertRaisesRegex(SystemExit, "large.so"):
            self.pack().check(0.001)

    def test_a_folder_with_something_else_in_it_stays(self):
        kept = self.write("pack/thesis.txt", "all of it")
        with self.assertRaisesRegex(SystemExit, "is no pack"):
            self.pack().clear()
        self.assertTrue(kept.exists())
        self.write("pack/pack.json", "{}")
        self.pack().clear()
        self.assertFalse(kept.exists())


try:
    from gpu_check import parity, syncs, timing
except ImportError as error:
    print(f"without torch: {error}")
else:
    class TorchTest(unittest.TestCase):
        def test_a_trace_is_counted_inside_its_window_alone(self):
            def event(name, ts, cat="cuda_runtime"):
                return {"name": name, "cat": cat, "ts": ts, "dur": 1}
            events = [{**event(syncs.WINDOW, 100, "user_annotation"), "dur": 50}, {"ph": "M", "name": "process_name"}, event("cudaDeviceSynchronize", 90),
                      event("cudaStreamSynchronize", 110), event("cudaMalloc", 120), event("cudaLaunchKernelExC_v11060", 130), event("cudaMalloc", 160),
                      event("cudaLaunchKernel", 140), event("cudaStreamSynchronize", 115, "kernel"), event("cuLaunchKernel", 149, "cuda_driver")]
            self.assertEqual(syncs.count({"traceEvents": events}), {"waits": {"cudaStreamSynchronize": 1}, "allocations": {"cudaMalloc": 1}, "launches": 3})

        def test_waits_are_wrong_and_a_trace_that_shows_nothing_is_no_proof(self):
            clean = {"waits": {}, "allocations": {}, "launches": 9}
            self.assertEqual(syncs.judged(clean, False, None), "")
            self.assertIn("2 x cudaStreamSynchronize", syncs.judged({**clean, "waits": {"cudaStreamSynchronize": 2}}, False, None))
            self.assertIn("1 x cudaMalloc", syncs.judged({**clean, "allocations": {"cudaMalloc": 1}}, False, None))
            self.assertIn("item()", syncs.judged(clean, False, "called a synchronizing operation: item()"))
            self.assertIn("no launch", syncs.judged({**clean, "launches": 0}, False, None))
            self.assertIn("doesn't show it", syncs.judged(clean, True, None))
            self.assertEqual(syncs.judged({**clean, "waits": {"cudaStreamSynchronize": syncs.STEPS}}, True, None), "")

        def test_contenders_take_turns_and_a_ratio_is_of_one_round(self):
            now, order = [0.0], []
            speed = {"PyTorch": 1.0, "single_device": 1.5}

            def contender(who):
                def step(number):
                    order.append(who)
                    now[0] += speed[who] * (1 + len(order) // 4)  # the machine becomes slower: both do
                return step
            times = timing.rounds({who: contender(who) for who in speed}, lambda: None, time.monotonic() + 60, steps=2, most=5, clock=lambda: now[0])
            self.assertEqual(order[:8], ["PyTorch"] * 2 + ["single_device"] * 4 + ["PyTorch"] * 2)
            self.assertEqual([len(values) for values in times.values()], [5, 5])
            self.assertAlmostEqual(timing.ratio(times, "single_device", "PyTorch")["median"], 1.5, delta=0.3)

        def test_the_median_has_an_interval_by_ranks(self):
            self.assertEqual(timing.median_of([3, 1, 2]), {"median": 2, "low": 1, "high": 3})
            found = timing.median_of(range(101))
            self.assertEqual((found["median"], found["low"], found["high"]), (50, 40, 60))

        def test_a_goal_is_judged_only_where_it_counts(self):
            def lines(ours, is_judged):
                times = {"PyTorch": [1.0] * 5, "PyTorch again": [1.0] * 5, "single_device": [ours] * 5, "data_parallel": [ours] * 5}
                return {line["name"].split(": ")[1]: line for line in timing.lines_of("net", times, is_judged)}
            self.assertTrue(all(line["ok"] for line in lines(1.01, True).values()))
            slow = lines(1.05, True)
            self.assertFalse(slow["single_device against PyTorch"]["ok"])
            self.assertIn("1.050", slow["single_device against PyTorch"]["text"])
            self.assertTrue(slow["data_parallel on one device against single_device"]["ok"])
            self.assertTrue(all(line["ok"] for line in lines(1.05, False).values()))

        def test_a_deviation_that_is_no_number_is_infinite(self):
            self.assertEqual(parity.largest([0.1, float("nan"), 0.2]), float("inf"))
            self.assertEqual(parity.deviation_of_losses([1.0, 2.0], [1.0, 2.5]), 0.2)
            self.assertEqual(parity.deviation({"a": 1}, {"b": 1}), float("inf"))

        def test_losses_and_weights_are_judged_by_their_tolerance(self):
            import torch
            weights = {"w": torch.ones(4)}
            falling, flat = [2.0] * 4 + [1.0] * 4, [2.0] * 8
            self.assertTrue(parity.judged((falling, weights), {"from it": ((falling, weights), 1e-6)})["ok"])
            self.assertIn("not become smaller", parity.judged((flat, weights), {})["text"])
            other = {"w": torch.ones(4) + 1e-3}
            self.assertIn("from it: losses differ by 0.0e+00, weights by 1.0e-03",
                          parity.judged((falling, weights), {"from it": ((falling, other), 1e-6)})["text"])


if __name__ == "__main__":
    unittest.main()
