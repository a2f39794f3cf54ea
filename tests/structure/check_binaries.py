#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the built files must be, read from their ELF tables by readelf.

usage: check_binaries.py --plugin FILE... --host FILE... --header FILE
  --plugin  exports exactly stg_plugin_probe, no STB_GNU_UNIQUE, nodelete, no executable stack, no text relocations
  --host    needs no LibTorch, CUDA, NCCL or logging library; a shared library exports exactly the functions of the header, versioned
"""
import argparse
import pathlib
import re
import subprocess
import sys


def readelf(*arguments):
    return subprocess.run(["readelf", "--wide", *arguments], check=True, capture_output=True, text=True).stdout


def exported(path):
    """(name, binding) of each defined dynamic symbol that others can see."""
    for line in readelf("--dyn-syms", path).splitlines():
        fields = line.split()
        if len(fields) >= 8 and fields[0].rstrip(":").isdigit() and fields[6] not in ("UND", "ABS") and fields[4] in ("GLOBAL", "WEAK", "UNIQUE"):
            yield fields[7], fields[4]


def needed(path):
    return re.findall(r"\(NEEDED\)\s+Shared library: \[([^]]+)\]", readelf("--dynamic", path))


def plugin_problems(path):
    names = [(name.split("@")[0], binding) for name, binding in exported(path)]
    if [name for name, _ in names] != ["stg_plugin_probe"]:
        yield f"exports {sorted(name for name, _ in names)[:5]}..., not just stg_plugin_probe"
    if any(binding == "UNIQUE" for _, binding in names):
        yield "has STB_GNU_UNIQUE symbols, which all plugins of a process would share"
    dynamic = readelf("--dynamic", path)
    if "NODELETE" not in dynamic:
        yield "is not linked -z nodelete"
    if "TEXTREL" in dynamic:
        yield "has text relocations"
    if re.search(r"GNU_STACK\s.*RWE", readelf("--program-headers", path)):
        yield "asks for an executable stack"


def host_problems(path, header):
    forbidden = [name for name in needed(path) if re.match(r"lib(torch|c10|cuda|cudart|nccl|spdlog|fmt|glog|log4|boost_log)", name)]
    if forbidden:
        yield f"needs {', '.join(forbidden)}"
    if ".so" in pathlib.Path(path).name:
        declared = set(re.findall(r"^STG_API [^;(]*?\b(stg_\w+)\(", pathlib.Path(header).read_text(), re.MULTILINE))
        names = [name for name, _ in exported(path)]
        wanted = {f"{name}@@STRATAGEM_1" for name in declared}
        if set(names) != wanted or not declared:
            yield f"exports, against its header: too many {sorted(set(names) - wanted)}, too few {sorted(wanted - set(names))}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugin", nargs="*", default=[])
    parser.add_argument("--host", nargs="*", default=[])
    parser.add_argument("--header")
    args = parser.parse_args()
    found = [f"{path} {problem}" for path in args.plugin for problem in plugin_problems(path)]
    found += [f"{path} {problem}" for path in args.host for problem in host_problems(path, args.header)]
    print("\n".join(found) or f"{len(args.plugin) + len(args.host)} files are as they must be")
    return 1 if found or not args.plugin + args.host else 0


if __name__ == "__main__":
    sys.exit(main())
