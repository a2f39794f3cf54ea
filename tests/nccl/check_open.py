#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: check_open.py OPEN_CUDA TRANSPORT ANOTHER_BUILD SHORTER_TABLE

What a plugin says of CUDA's transport beside it: one that isn't there, isn't a library, is of another build, comes too late, or is right.
"""
import pathlib
import shutil
import subprocess
import sys
import tempfile

program, transport, another_build, shorter_table = map(pathlib.Path, sys.argv[1:])


def opened(library, *options):
    """What the program says with the library (a file, its text, or None) beside it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "open_cuda")
        shutil.copy(program, copy)
        beside = pathlib.Path(folder, "libstratagem_cuda.so")
        if isinstance(library, pathlib.Path):
            beside.symlink_to(library)
        elif library is not None:
            beside.write_text(library)
        ran = subprocess.run([copy, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=True)
        return ran.stdout.replace(folder, "FOLDER").strip()


def expect(said, *parts):
    for part in parts:
        assert part in said, f"{part!r} is not in {said!r}"


expect(opened(None), "FAILED_PRECONDITION: there is no FOLDER/libstratagem_cuda.so", "-DSTRATAGEM_CUDA=ON")
expect(opened("no library"), "FAILED_PRECONDITION: FOLDER/libstratagem_cuda.so: file too short", "stratagem doctor")
for other in (another_build, shorter_table):
    expect(opened(other), "FAILED_PRECONDITION: FOLDER/libstratagem_cuda.so is of another build")
expect(opened(transport, "--after-libtorch"), "FAILED_PRECONDITION: LibTorch was used in this process before", "libtorch_cuda")
right = opened(transport)
if not right.startswith("opened NCCL 2."):  # the file is, but there is no GPU
    expect(right, "FAILED_PRECONDITION: LibTorch finds no device", "driver")
print(right)
