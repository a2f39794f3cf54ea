#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the programs that libFuzzer is in, each until it has had its CPU time: on a busy machine seconds of the clock say little.

usage: run_targets.py BUILD [--seconds N] [--jobs N] [--target NAME]...

What a run learns stays in BUILD/corpus, where the next one begins. What it finds lies in BUILD/found; put it into tests/fuzz/seeds/TARGET
once it is mended, under a name that says what it is.
"""
import argparse
import concurrent.futures
import os
import pathlib
import re
import signal
import subprocess
import sys

SEEDS = pathlib.Path(__file__).resolve().parent / "seeds"
LIMITS = ["-max_len=16384", "-timeout=20", "-rss_limit_mb=1024", "-malloc_limit_mb=256"]  # a small file must take little of either


def run_round(folder, target, seconds):
    """One run of at most so many seconds by the clock: (status, CPU seconds, log)."""
    corpus, found, log = folder / "corpus" / target, folder / "found", folder / f"{target}.log"
    corpus.mkdir(parents=True, exist_ok=True)
    found.mkdir(exist_ok=True)
    with log.open("wb") as output:
        child = subprocess.Popen([folder / f"fuzz-{target}", f"-max_total_time={seconds}", f"-artifact_prefix={found}/{target}-", *LIMITS,
                                  "-print_final_stats=1", corpus, SEEDS / target], stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    return child.returncode, usage.ru_utime + usage.ru_stime, log.read_text(errors="replace")


def is_slow_machine(folder, target, log):
    """Whether a timeout was the machine's: libFuzzer's clock goes on while nothing runs. The file is then run again, by CPU time."""
    file = re.search(r"Test unit written to (\S*-timeout-\w+)", log)
    if not file:
        return False
    child = subprocess.Popen([folder / f"fuzz-{target}", file[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0 or usage.ru_utime + usage.ru_stime > 5:
        return False
    pathlib.Path(file[1]).unlink()
    return True


def fuzz(folder, target, seconds):
    """(whether nothing was found, a line for people)."""
    spent, num_runs, coverage = 0.0, 0, "?"
    while spent + 1 < seconds:
        status, cpu, log = run_round(folder, target, max(1, round(seconds - spent)))
        spent += cpu
        num_runs += sum(map(int, re.findall(r"number_of_executed_units: (\d+)", log)))
        coverage = (re.findall(r" cov: (\d+)", log) or [coverage])[-1]
        if status != 0 and is_slow_machine(folder, target, log):
            continue
        if status != 0:
            return False, f"{target}: FOUND after {spent:.0f} s of CPU time (status {status}); the end of {folder / target}.log:\n" + log[-6000:]
    return True, f"{target}: nothing found; {spent:.0f} s of CPU time, {num_runs} runs, {coverage} places of the code reached"


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    parser = argparse.ArgumentParser(usage=__doc__.split("usage: ")[1].split("\n")[0])
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--seconds", type=int, default=600)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--target", action="append", default=[])
    arguments = parser.parse_args()
    known = sorted(path.name for path in SEEDS.iterdir())
    for target in arguments.target:
        if target not in known:
            parser.error(f"no target {target}; there are {', '.join(known)}")
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        running = [pool.submit(fuzz, arguments.build.resolve(), target, arguments.seconds) for target in arguments.target or known]
        results = []
        for future in concurrent.futures.as_completed(running):
            results.append(future.result())
            print(results[-1][1], flush=True)
    return 0 if all(is_fine for is_fine, _ in results) else 1


if __name__ == "__main__":
    sys.exit(main())
