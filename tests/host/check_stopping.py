#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A classifier that stops early: its weights have moved, and its best checkpoint gives the same accuracy in a fresh process. And figures
over several devices and batches of unequal size are one device's.

usage: check_stopping.py STRATAGEM MLP_LIBRARY
"""
import json
import pathlib
import random
import struct
import subprocess
import sys
import tempfile

from check_resume import write_npy

STRATEGIES = (("single_device", 1), ("data_parallel", 3))


def stratagem(*arguments):
    result = subprocess.run([sys.argv[1], *map(str, arguments), "--json"], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def write_samples(folder, name, num_rows):
    """Two classes that overlap, so that no training gets all of them right."""
    labels = [random.randrange(2) for _ in range(num_rows)]
    inputs = [random.gauss(label, 1) for label in labels for _ in range(4)]
    write_npy(folder / f"{name}x.npy", "f", "<f4", (num_rows, 4), inputs)
    write_npy(folder / f"{name}y.npy", "q", "<i8", (num_rows,), labels)
    return {"format": "npy", "inputs": f"{name}x.npy", "targets": f"{name}y.npy"}


def write_config(folder, strategy, devices, data, **more):
    config = {
        "strategy": {"name": strategy, "accelerator": "cpu", "devices": devices}, "seed": 5,
        "model": {"kind": "library", "path": sys.argv[2], "options": {"sizes": [4, 16, 2]}},
        "optimizer": {"name": "sgd", "lr": 0.5, "momentum": 0.9}, "data": data, "metrics": {"path": "metrics.jsonl"}, **more,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def weights_of(checkpoint):
    """All weights of a safetensors file as one list."""
    content = pathlib.Path(checkpoint, "weights.safetensors").read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    data = content[8 + size:]
    return struct.unpack(f"<{len(data) // 4}f", data)


def check_early_stopping(strategy, devices):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        train = {**write_samples(folder, "t", 300), "batch_size": 32, "shuffle": True}
        validation = {**write_samples(folder, "v", 200), "batch_size": 64}
        config = write_config(folder, strategy, devices, {"train": train, "validation": validation},
                              trainer={"max_epochs": 50}, early_stopping={"monitor": "accuracy", "mode": "max", "patience": 4},
                              checkpoint={"dir": "run", "keep_last": 1, "monitor": "accuracy", "mode": "max"})
        still = stratagem("fit", config, "--set", "optimizer.lr=0", "--set", "checkpoint.dir=still", "--set", "trainer.max_epochs=1")
        fit = stratagem("fit", config)
        assert fit["epochs"] < 50 and "/early_stopping/patience (4)" in fit["ended_by"], fit
        moved = max(abs(a - b) for a, b in zip(weights_of(still["checkpoint"]), weights_of(fit["checkpoint"])))
        assert moved > 0.03, moved
        assert fit["best"]["value"] > 0.7 and fit["best"]["step"] < fit["steps"], fit["best"]
        fresh = stratagem("validate", config, "--checkpoint", folder / "run" / "best")
        assert fresh["checkpoint"] == fit["best"]["checkpoint"], fresh
        assert fresh["validation"]["accuracy"] == fit["best"]["value"], (fresh, fit["best"])
        print(f"{strategy}: stopped after {fit['epochs']} epochs, weights moved by {moved:.3f}, accuracy {fit['best']['value']:.3f}")


def check_weighted_means():
    """10,000 images in batches of 512 over 3 devices: the last batch has 272, shares of 91, 91 and 90."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        samples = {**write_samples(folder, "s", 10000), "batch_size": 512}
        results = []
        for strategy, devices in STRATEGIES:
            config = write_config(folder, strategy, devices, {"train": samples, "validation": samples}, precision="64-true",
                                  trainer={"log_every_n_steps": 1})
            fit = stratagem("fit", config)
            lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
            epoch = next(line for line in lines if line["stage"] == "epoch")
            assert epoch["train_loss"] == fit["train_loss"]
            losses = [line["loss"] for line in lines if line["stage"] == "fit"]
            assert len(losses) == 20, losses
            results.append((fit["train_loss"], fit["validation"]["loss"], fit["validation"]["accuracy"], *losses))
        for one, three in zip(*results):
            assert abs(one - three) <= 1e-9 * abs(one), results
        # As the model's accuracies are float32 means: the number of right answers is a whole one.
        assert abs(results[0][2] * 10000 - round(results[0][2] * 10000)) < 1e-2, results
        print(f"figures of one and three devices: {[figures[:3] for figures in results]}")


if __name__ == "__main__":
    random.seed(11)
    for arguments in STRATEGIES:
        check_early_stopping(*arguments)
    check_weighted_means()
