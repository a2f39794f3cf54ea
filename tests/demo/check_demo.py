#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo's config under both strategies on real images: accuracy, checkpoint, metrics, and that one line of config is the difference.

usage: check_demo.py STRATAGEM CONFIG DATA_FOLDER IMAGES LEAST_ACCURACY [MODEL_LIBRARY]
"""
import json
import pathlib
import subprocess
import sys
import tempfile


def stratagem(command, config, settings, *arguments):
    line = [sys.argv[1], command, config, "--json", *arguments]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    result = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(result.stdout.splitlines()[-1])


def main():
    config, data, images, least, *model = sys.argv[2], sys.argv[3], int(sys.argv[4]), float(sys.argv[5]), *sys.argv[6:]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for strategy, num_devices in (("data_parallel", 2), ("single_device", 1)):
            settings = {"data.root": data, "data.train.limit": images, "strategy.name": strategy,
                        "checkpoint.dir": folder / strategy, "metrics.path": folder / f"{strategy}.jsonl"}
            if model:
                settings["model"] = json.dumps({"kind": "library", "path": model[0]})
            result = stratagem("fit", config, settings)
            accuracy = result["validation"]["accuracy"]
            print(f"{strategy}: accuracy {accuracy:.4f}, {result['steps']} steps, {result['seconds']:.1f} s")
            assert result["strategy"] == strategy and len(result["devices"]) == num_devices, result
            assert accuracy > least, f"accuracy {accuracy} is not over {least}"
            assert result["epochs"] == 2 and result["steps"] == 2 * -(-images // 256), result
            assert list(pathlib.Path(result["checkpoint"]).glob("*.safetensors")), result["checkpoint"]
            lines = [json.loads(line) for line in (folder / f"{strategy}.jsonl").read_text().splitlines()]
            assert lines[-1]["stage"] == "validate" and lines[-1]["accuracy"] == accuracy, lines[-1]
            # Another process, the same images under another name: the same accuracy.
            tested = stratagem("test", config, settings, "--checkpoint", result["checkpoint"])
            assert tested["test"]["accuracy"] == accuracy, (tested, accuracy)


if __name__ == "__main__":
    main()
