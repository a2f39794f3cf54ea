# SPDX-License-Identifier: Apache-2.0
"""usage: gpu-check [--torch FOLDER] [--part NAME]... [--limit SECONDS] [--accelerator cpu]

Checks Stratagem on this machine's GPUs: runs the tests that need one, compares it with the CPU and with PyTorch in the same run, counts what
makes the host wait, and takes the times of a step beside PyTorch's. Prints one JSON; what it is doing, and what was wrong, on stderr.

  --torch FOLDER      Python's package torch (or $STRATAGEM_TORCH); by default that of the Python that runs this
  --part NAME         only this part, and machine: tests, parity, syncs, timing
  --limit SECONDS     when to be done; what was not done by then is told (default 350)
  --accelerator cpu   on the CPU in the GPUs' place, with small networks: shows that the pack and this script work, and no goal is judged

Ends with 0 where all is well, 1 where something is not, and 3 where it can't be run here, and says what is missing.
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from . import place, programs

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCHEMA_VERSION = 1
# Of the limit, in the order in which they run; a part that needs less leaves it to those after it.
SHARES = {"machine": 0.12, "tests": 0.28, "parity": 0.20, "syncs": 0.12, "timing": 0.28}
MAX_TEXT = 3000


def say(text):
    print(f"gpu-check: {text}", file=sys.stderr, flush=True)


def parse(argv):
    parser = argparse.ArgumentParser(prog="gpu-check", usage=__doc__, allow_abbrev=False)
    parser.add_argument("--torch")
    parser.add_argument("--part", action="append", choices=[name for name in SHARES if name != "machine"])
    parser.add_argument("--limit", type=float, default=350)
    parser.add_argument("--accelerator", choices=["cuda", "cpu"], default="cuda")
    return parser.parse_args(argv)


class Check:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.began = time.monotonic()
        self.pack = json.loads((ROOT / "pack.json").read_text())
        self.parts = {}
        self.failures = []

    def report(self, status, **more):
        return {"schema_version": SCHEMA_VERSION, "status": status, "seconds": round(time.monotonic() - self.began, 1),
                "accelerator": self.args.accelerator, "pack": {key: self.pack[key] for key in ("version", "commit", "torch")}, **more,
                "failures": self.failures, "parts": self.parts}

    # --- before anything runs

    def look(self):
        """Throws place.Missing where the pack can't run here."""
        place.check_libc(self.pack)
        torch = place.find_torch(self.args.torch)
        place.check_torch(torch, self.pack, self.args.accelerator)
        self.variables = place.environment(ROOT, torch)
        doctor = place.ask_doctor(ROOT, self.variables, self.args.accelerator, self.folder)
        if self.args.accelerator == "cuda":
            place.check_gpus(doctor)
        else:
            self.variables.update(STRATAGEM_TEST_ACCELERATOR="cpu", OMP_NUM_THREADS="1")  # small networks, and others at work beside them
        self.doctor = doctor

    # --- parts

    def run(self):
        wanted = ["machine", *(name for name in SHARES if name in (self.args.part or SHARES) and name != "machine")]
        spent = 0.0
        for name in wanted:
            spent += SHARES[name]
            ends_at = self.began + self.args.limit * spent / sum(SHARES[other] for other in wanted)
            began = time.monotonic()
            say(f"{name} (to be done in {ends_at - began:.0f} s)")
            part = self.run_tests(ends_at) if name == "tests" else self.run_part(name, ends_at)
            part["seconds"] = round(time.monotonic() - began, 1)
            self.parts[name] = part
            self.failures += [f"{name}: {text}" for text in part.pop("failures")]
        self.parts["machine"]["doctor"] = self.doctor

    def run_tests(self, ends_at):
        results, failures = {}, []
        for program in self.pack["programs"]:
            cases = programs.run_program(ROOT / "bin" / program["name"], program["tests"], self.variables, self.folder, ends_at)
            results[program["name"]] = cases
            failures += [f"{program['name']}: {case['name']}: {case['status']}" for case in cases if case["status"] != "passed"]
        counts = {}
        for case in (case for cases in results.values() for case in cases):
            counts[case["status"]] = counts.get(case["status"], 0) + 1
        return {"status": "failed" if failures else "passed", "counts": counts, "programs": results, "failures": failures}

    def run_part(self, name, ends_at):
        """A part in a process of its own, which writes one JSON a line. What it wrote counts, also where it comes to no end."""
        lines, log = self.folder / f"{name}.jsonl", self.folder / f"{name}.log"
        lines.write_text("")
        settings = {"accelerator": self.args.accelerator, "root": str(ROOT), "folder": str(self.folder), "ends_at": ends_at}
        with open(log, "wb") as output:
            process = subprocess.Popen([sys.executable, "-m", "gpu_check.part", name, str(lines), json.dumps(settings)], env=self.variables,
                                       cwd=self.folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                process.wait(max(1.0, ends_at - time.monotonic()))
                end = None if process.returncode == 0 else f"the process ended with status {process.returncode}"
            except subprocess.TimeoutExpired:
                end = "it was not done in its time"
            finally:
                programs.stop(process)
        return summary(read_lines(lines.read_text(errors="replace")), end, log.read_text(errors="replace"))


def read_lines(text):
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            pass  # the last one, cut off
    return found


def summary(results, end, log):
    failures = [f"{result['name']}: {result.get('text', 'failed')}" for result in results if not result["ok"]]
    if end:
        failures.append(end)
    part = {"status": "failed" if failures else "passed", "results": results, "failures": failures}
    if failures and log.strip():
        part["log"] = log[-MAX_TEXT:]
    return part


def main(argv=None):
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through the finally of what runs
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as name:
        check = Check(args, pathlib.Path(name))
        try:
            check.look()
        except place.Missing as missing:
            say(f"this can't be run here: {missing}")
            print(json.dumps(check.report("unavailable", missing=str(missing))))
            return 3
        check.run()
    status = "failed" if check.failures else "passed"
    for failure in check.failures:
        say(failure)
    say(status)
    print(json.dumps(check.report(status)))
    sys.stdout.flush()
    return 1 if check.failures else 0


if __name__ == "__main__":
    os._exit(main())
