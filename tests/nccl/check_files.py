#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: check_files.py STRATAGEM TRANSPORT PLUGIN...

The transport exports one symbol; it, and none of the plugins, needs CUDA's libraries; its search path starts beside it and names folders
that exist; and the command line, which finds it among the plugins, doesn't take it for one.
"""
import os
import pathlib
import re
import subprocess
import sys


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def entries(file, kind):
    return re.findall(kind + r"\).*\[(.*)\]", output("readelf", "--dynamic", "--wide", file))


program, transport, *plugins = sys.argv[1:]
symbols = [line.split()[-1] for line in output("nm", "--dynamic", "--defined-only", transport).splitlines()]
assert symbols == ["stratagem_transport"], symbols
for library in ("libtorch_cuda.so", "libc10_cuda.so", "libcudart.so.13", "libnccl.so.2"):
    assert library in entries(transport, "NEEDED"), (library, entries(transport, "NEEDED"))
for plugin in plugins:
    wrong = [name for name in entries(plugin, "NEEDED") if re.search("cuda|nccl", name)]
    assert not wrong, (plugin, wrong)

(path,) = entries(transport, "RUNPATH")
first, *others = path.split(":")
assert first == "$ORIGIN", path
missing = [folder for folder in others if folder and not os.path.isdir(folder)]  # empty: room that CMake keeps for the installed path
assert not missing, missing

listed = output(program, "plugins", "--json")
assert all(pathlib.Path(plugin).name in listed for plugin in plugins), listed
assert pathlib.Path(transport).name not in listed, listed
print("one symbol, CUDA stays where it is, and no plugin too many")
