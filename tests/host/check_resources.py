#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A run has a thread per replica and no pools besides, whatever OMP_NUM_THREADS says; the same run gives the same bits; and memory
doesn't grow with the number of batches.

usage: check_resources.py STRATAGEM MLP_LIBRARY
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from check_resume import write_npy

NUM_ROWS, NUM_INPUTS = 512, 512  # so that a product of matrices is worth several threads


def write_config(folder, strategy, sizes, batch_size, max_steps, **more):
    files = {"format": "npy", "inputs": "x.npy", "targets": "y.npy", "batch_size": batch_size}
    config = {
        "strategy": {"accelerator": "cpu", **strategy}, "model": {"kind": "library", "path": sys.argv[2], "options": {"sizes": sizes}},
        "optimizer": {"name": "sgd", "lr": 0.01}, "data": {"train": files, "validation": files}, "trainer": {"max_steps": max_steps}, **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def fit(config, **environment):
    """The result of a run, the largest number of threads it had, and its largest memory in MB."""
    # AddressSanitizer, where it is built in, keeps what was freed for a while, unless told otherwise.
    environment = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=1", **environment}
    with subprocess.Popen([sys.argv[1], "fit", config, "--json"], stdout=subprocess.PIPE, env=environment) as child:
        tasks = pathlib.Path("/proc", str(child.pid), "task")
        num_threads = 0
        ended = (0, 0, None)
        while ended[0] == 0:
            num_threads = max(num_threads, len(list(tasks.iterdir())))
            time.sleep(0.002)
            ended = os.wait4(child.pid, os.WNOHANG)
        child.returncode = os.waitstatus_to_exitcode(ended[1])
        output = child.stdout.read()
    assert child.returncode == 0, f"status {child.returncode}"
    return json.loads(output.splitlines()[-1]), num_threads, ended[2].ru_maxrss / 1024


def check_threads(folder):
    def run(strategy, environment, **more):
        return fit(write_config(folder, strategy, [NUM_INPUTS, 512, 2], batch_size=128, max_steps=40, **more), **environment)

    # The main thread is replica 0's. The one that reads ahead is gone early in a short epoch, so it may not be seen.
    for environment in ({}, {"OMP_NUM_THREADS": "1"}):
        for num_devices in (2, 8):
            num_threads = run({"name": "data_parallel", "devices": num_devices}, environment)[1]
            assert num_devices <= num_threads <= num_devices + 1, f"{num_threads} threads with {num_devices} devices, {environment}"

    runs = [run({"name": "single_device"}, {"OMP_NUM_THREADS": n}, threads=1) for n in ("1", "4", "4")]
    assert max(r[1] for r in runs) <= 2, f"{[r[1] for r in runs]} threads with one in the config, OMP_NUM_THREADS 1, 4, 4"
    assert len({r[0]["train_loss"] for r in runs}) == 1, [r[0]["train_loss"] for r in runs]


def check_memory(folder):
    for devices, precision in ((2, "32-true"), (2, "bf16-mixed"), (1, "16-mixed")):
        sizes_mb = []
        for max_steps in (300, 3000):
            config = write_config(folder, {"name": "data_parallel", "devices": devices}, [NUM_INPUTS, 4, 2], batch_size=2,
                                  max_steps=max_steps, precision=precision)
            sizes_mb.append(fit(config)[2])
        # Keeping each batch would take 12 MB more, and as much again those of validation; the cast weights of each step 11 MB.
        print(f"{precision}: {sizes_mb[0]:.1f} MB for 300 batches, {sizes_mb[1]:.1f} MB for 3000")
        assert sizes_mb[1] - sizes_mb[0] < 4


def main():
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_npy(folder / "x.npy", "f", "<f4", (NUM_ROWS, NUM_INPUTS), [(i % 7) / 7 for i in range(NUM_ROWS * NUM_INPUTS)])
        write_npy(folder / "y.npy", "q", "<i8", (NUM_ROWS,), [i % 2 for i in range(NUM_ROWS)])
        check_threads(folder)
        check_memory(folder)


if __name__ == "__main__":
    main()
