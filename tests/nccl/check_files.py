#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: check_files.py TRANSPORT PLUGIN...

The transport exports one symbol; it, and none of the plugins, needs CUDA's libraries.
"""
import re
import subprocess
import sys


def output(*command):
    return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout


def needed(file):
    return re.findall(r"NEEDED.*\[(.*)\]", output("readelf", "--dynamic", file))


transport, *plugins = sys.argv[1:]
symbols = [line.split()[-1] for line in output("nm", "--dynamic", "--defined-only", transport).splitlines()]
assert symbols == ["stratagem_transport"], symbols
for library in ("libtorch_cuda.so", "libcudart.so.13", "libnccl.so.2"):
    assert library in needed(transport), (library, needed(transport))
for plugin in plugins:
    wrong = [name for name in needed(plugin) if re.search("cuda|nccl", name)]
    assert not wrong, (plugin, wrong)
print("one symbol, and CUDA stays where it is")
