#!/usr/bin/env python3
"""Writes core/libtorch/<torch version>.lock, the list that `./run setup` installs, and tools.lock.

    python3 core/libtorch/lock.py 2.15.0
    python3 core/libtorch/lock.py tools

pip resolves the requirements below once, for the running interpreter. Wheels that are built per
Python version are then asked for again for the other ones, at the same versions, so that one lock
serves them all. The toolkit is pinned through cuda-toolkit's extras because nvidia-cuda-nvcc asks
for its parts without versions. What needs no LibTorch beside it is in tools.lock, an environment of
its own: a new tool doesn't install 5 GB again, nor move the headers that were compiled.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

CUDA_TOOLKIT = {"2.11.0": "13.0.2", "2.15.0": "13.2.2"}
TOOLS = ["numpy==2.4.6", "safetensors==0.8.0", "cmake==4.4.5", "ninja==1.13.2", "clang-format==16.0.6"]
APART = ["libclang==18.1.1", "tree-sitter==0.26.1", "tree-sitter-julia==0.23.1"]
PYTHONS = ["3.11", "3.12", "3.13"]


def resolve(pip, requirements, *options):
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        subprocess.run([pip, "install", "--quiet", "--dry-run", "--ignore-installed", "--only-binary", ":all:",
                        "--report", report.name, *options, *requirements], check=True)
        return json.load(report)["install"]


def main():
    name = sys.argv[1]
    requirements = APART if name == "tools" else [
        f"torch=={name}", f"cuda-toolkit[nvcc,crt,nvvm,cccl]=={CUDA_TOOLKIT[name]}", *TOOLS]
    hashes = {}
    per_python = set()

    def add(packages):
        for package in packages:
            pin = f"{package['metadata']['name'].lower()}=={package['metadata']['version']}"
            hashes.setdefault(pin, set()).add(package["download_info"]["archive_info"]["hashes"]["sha256"])
            if "-none-" not in package["download_info"]["url"]:
                per_python.add(pin)

    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run([sys.executable, "-m", "venv", scratch], check=True)
        pip = f"{scratch}/bin/pip"
        add(resolve(pip, requirements))
        for python in PYTHONS if per_python else []:
            add(resolve(pip, sorted(per_python), "--no-deps", "--python-version", python, "--target", f"{scratch}/t"))

    lines = [f"# Written by `python3 core/libtorch/lock.py {name}` from: {' '.join(requirements)}",
             f"# Linux x86_64, CPython {', '.join(PYTHONS)}."]
    for pin in sorted(hashes):
        lines.append(" \\\n    ".join([pin, *(f"--hash=sha256:{h}" for h in sorted(hashes[pin]))]))
    pathlib.Path(__file__).with_name(f"{name}.lock").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
