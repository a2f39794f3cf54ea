#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`stratagem fit` with the strategy plugin written in Rust, on a model whose steps can be worked out by hand: alone, and swapped in mid-run
for a strategy of another author.

usage: check_template.py STRATAGEM PLUGIN TOY_LINEAR
"""
import json
import pathlib
import struct
import subprocess
import sys
import tempfile


def write_npy(path, values):
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({len(values)},), }}".ljust(117) + "\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + struct.pack(f"<{len(values)}f", *values))


def fit(program, folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    result = subprocess.run([program, "fit", folder / "config.json", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert result.returncode == 0, f"{config}\n{result.stderr}"
    return json.loads(result.stdout.splitlines()[-1])


def main():
    program, plugin, model = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        inputs = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        write_npy(folder / "x.npy", inputs)
        config = {
            "strategy": {"name": "rust_sgd", "path": plugin, "accelerator": "cpu"},
            "model": {"kind": "library", "name": model, "options": {"size": 1, "weight": 0.5}},
            "optimizer": {"name": "sgd", "lr": 0.125},
            "data": {"train": {"format": "npy", "inputs": "x.npy", "batch_size": 2}},
            "trainer": {"max_epochs": 2, "log_every_n_steps": 1},
            "metrics": {"path": "metrics.jsonl"},
        }
        result = fit(program, folder, config)
        assert (result["strategy"], result["steps"], result["devices"]) == ("rust_sgd", 6, ["cpu:0"]), result
        # The loss of a batch is the weight times the mean of its inputs, so the weight goes down by lr times that mean.
        weight, losses = 0.5, []
        for step in range(6):
            mean = sum(inputs[2 * (step % 3):][:2]) / 2
            losses.append(weight * mean)
            weight -= 0.125 * mean
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        logged = [line["loss"] for line in lines if "loss" in line]
        assert logged == losses, (logged, losses, lines)

        # The same run, half of it under a strategy of another author.
        other = {"name": "single_device", "accelerator": "cpu"}
        for first, second in ((config["strategy"], other), (other, config["strategy"])):
            config.update(strategy=first, swap=[{"at_step": 3, "strategy": second}], metrics={"path": "swapped.jsonl"})
            assert fit(program, folder, config)["strategy"] == second["name"]
            lines = [json.loads(line) for line in (folder / "swapped.jsonl").read_text().splitlines()]
            assert [line["loss"] for line in lines if "loss" in line] == losses, (first, lines)
            assert [line["stage"] for line in lines].count("swap") == 1, lines
    print("the losses are those computed by hand")


if __name__ == "__main__":
    main()
