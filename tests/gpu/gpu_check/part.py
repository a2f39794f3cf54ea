# SPDX-License-Identifier: Apache-2.0
"""usage: python -m gpu_check.part NAME FILE SETTINGS

A part in its own process. Each result is a line of JSON at the end of FILE, written when it is known: {"name", "ok", "text" where not, ...}.
"""
import importlib
import json
import math
import os
import sys


def plain(value):
    """As JSON can say it, which has no infinity."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def main():
    name, file, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    with open(file, "a") as lines:
        def report(line):
            lines.write(json.dumps(plain(line)) + "\n")
            lines.flush()
        importlib.import_module(f"gpu_check.{name}").main(settings, report)


if __name__ == "__main__":
    main()
    # Everything is written; what CUDA and LibTorch do at the end of a process is not what is checked here.
    sys.stdout.flush()
    os._exit(0)
