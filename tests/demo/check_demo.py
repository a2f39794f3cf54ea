#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo's config under both strategies on real images: accuracy, checkpoint, metrics, and that one line of config is the difference.

usage: check_demo.py STRATAGEM CONFIG DATA_FOLDER IMAGES LEAST_ACCURACY
"""
import json
import pathlib
import subprocess
import sys
import tempfile


def fit(stratagem, config, data, images, folder, strategy, devices):
    settings = {
        "data.root": data, "data.train.limit": images, "strategy.name": strategy, "strategy.devices": devices,
        "checkpoint.dir": folder / strategy, "metrics.path": folder / f"{strategy}.jsonl",
    }
    command = [stratagem, "fit", config, "--json"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    stratagem, config, data, images, least = *sys.argv[1:4], int(sys.argv[4]), float(sys.argv[5])
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for strategy, devices in (("data_parallel", 2), ("single_device", 1)):
            result = fit(stratagem, config, data, images, folder, strategy, devices)
            accuracy = result["validation"]["accuracy"]
            print(f"{strategy}: accuracy {accuracy:.4f}, {result['steps']} steps, {result['seconds']:.1f} s")
            assert result["strategy"] == strategy and len(result["devices"]) == devices, result
            assert accuracy > least, f"accuracy {accuracy} is not over {least}"
            assert result["epochs"] == 2 and result["steps"] == 2 * -(-images // 256), result
            assert list(pathlib.Path(result["checkpoint"]).glob("*.safetensors")), result["checkpoint"]
            lines = [json.loads(line) for line in (folder / f"{strategy}.jsonl").read_text().splitlines()]
            assert lines[-1]["stage"] == "validate" and lines[-1]["accuracy"] == accuracy, lines[-1]


if __name__ == "__main__":
    main()
