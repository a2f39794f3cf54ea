#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A run that is killed and resumed by another process ends with the unbroken run's weights, optimizer, losses and accuracy, to the bit.

usage: check_resume.py STRATAGEM MLP_LIBRARY
"""
import itertools
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile
import time

NUM_ROWS, BATCH_SIZE, EPOCHS = 150, 16, 10


def write_npy(path, code, dtype, shape, values):
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}"
    header += " " * (-(len(header) + 11) % 64) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + struct.pack(f"<{len(values)}{code}", *values))


def write_run(folder, strategy, devices, precision):
    """The config of a small run with dropout, buffers, momentum and shuffling."""
    random.seed(7)
    inputs = [random.gauss(0, 1) for _ in range(NUM_ROWS * 4)]
    write_npy(folder / "x.npy", "f", "<f4", (NUM_ROWS, 4), inputs)
    write_npy(folder / "y.npy", "q", "<i8", (NUM_ROWS,), [int(sum(inputs[4 * i:4 * i + 4]) > 0) for i in range(NUM_ROWS)])
    files = {"format": "npy", "inputs": "x.npy", "targets": "y.npy", "batch_size": BATCH_SIZE}
    config = {
        "strategy": {"name": strategy, "accelerator": "cpu", "devices": devices}, "seed": 3, "precision": precision,
        "model": {"kind": "library", "path": sys.argv[2], "options": {"sizes": [4, 16, 2], "dropout": 0.5, "buffers": True}},
        "optimizer": {"name": "adamw", "lr": 0.01}, "scheduler": {"name": "cosine", "warmup_steps": 5},
        "data": {"train": {**files, "shuffle": True}, "validation": files},
        "trainer": {"max_epochs": EPOCHS, "log_every_n_steps": 1},
        "checkpoint": {"dir": "run", "every_n_steps": 3, "keep_last": 3}, "metrics": {"path": "metrics.jsonl"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def fit(config, *arguments):
    result = subprocess.run([sys.argv[1], "fit", config, "--json", *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def kill_in_mid_run(config):
    run = config.parent / "run"
    with subprocess.Popen([sys.argv[1], "fit", config], stderr=subprocess.DEVNULL) as child:
        while len(list(run.glob("step-*"))) < 3 and child.poll() is None:
            time.sleep(0.001)
        child.kill()
    assert child.returncode == -9, f"the run ended with {child.returncode} before it could be killed"


def differences(unbroken, resumed):
    """By what two runs differ, that must not."""
    for name in ("weights.safetensors", "optimizer.safetensors"):
        files = [(pathlib.Path(run["checkpoint"]) / name).read_bytes() for run in (unbroken, resumed)]
        if files[0] != files[1]:
            yield name
    for name in ("steps", "epochs", "train_loss", "validation"):
        if unbroken[name] != resumed[name]:
            yield f"{name}: {unbroken[name]} and {resumed[name]}"
    lines = [[json.loads(line) for line in pathlib.Path(run["metrics"]).read_text().splitlines()] for run in (unbroken, resumed)]
    for first, second in itertools.zip_longest(*lines):
        for line in (first, second):
            if line:
                line.pop("time")
        if first != second:
            yield f"metrics: {first} and {second}"
            return


def main():
    for strategy, devices, precision in (("data_parallel", 2, "32-true"), ("data_parallel", 2, "16-mixed"),
                                         ("single_device", 1, "32-true"), ("single_device", 1, "bf16-mixed")):
        with tempfile.TemporaryDirectory() as name:
            runs = []
            for kind in ("unbroken", "resumed"):
                folder = pathlib.Path(name, kind)
                folder.mkdir()
                config = write_run(folder, strategy, devices, precision)
                if kind == "resumed":
                    kill_in_mid_run(config)
                    killed_at = max(folder.glob("run/step-*")).name
                    run = fit(config, "--resume", folder / "run")
                else:
                    run = fit(config)
                runs.append({**run, "metrics": folder / "metrics.jsonl"})
            assert runs[0]["steps"] == EPOCHS * -(-NUM_ROWS // BATCH_SIZE), runs[0]
            found = list(differences(*runs))
            assert not found, f"{strategy}, {precision}, killed after {killed_at}: {found}"
            print(f"{strategy}, {precision}: killed after {killed_at}, resumed, equal to the bit after {runs[0]['steps']} steps")


if __name__ == "__main__":
    main()
