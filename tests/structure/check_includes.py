#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The arrows of the house: host -> abi <- core <- plugins. Which folder may include which, read from the sources.

usage: check_includes.py ROOT
"""
import pathlib
import re
import sys

# What a folder may include, by the first part of the include path. <stratagem/...> is abi/ (and, in the host, its own public headers).
ALLOWED = {
    "abi": {"stratagem"},
    "core/base": {"stratagem", "base"},
    "core/torch": {"stratagem", "base", "torch"},
    "core/strategy": {"stratagem", "base", "torch", "strategy"},
    "core/model": {"stratagem", "base", "torch", "model"},
    "plugins": {"stratagem", "base", "torch", "strategy", "model"},
    "host": {"stratagem", "base", "libstratagem", "config", "data", "loop", "plugins"},
}
LIBTORCH = re.compile(r"(ATen|c10|torch/(csrc|nn|torch\.h|all\.h|types\.h|optim|autograd|version\.h))")
NO_LIBTORCH = ("abi", "core/base", "host")
OURS = {"base", "torch", "strategy", "model", "libstratagem"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)


def problems(root, folder):
    for path in sorted((root / folder).rglob("*")):
        if path.suffix not in (".h", ".hpp", ".c", ".cpp", ".cu"):
            continue
        for match in INCLUDE.finditer(path.read_text()):
            target = match[2]
            first = target.split("/")[0]
            where = f"{path.relative_to(root)}: includes {target}"
            if folder in NO_LIBTORCH and LIBTORCH.match(target):
                yield f"{where}, but {folder} has no LibTorch"
            elif "/" in target and first in OURS and first not in ALLOWED[folder] and not LIBTORCH.match(target):
                yield f"{where}; {folder} may include {', '.join(sorted(ALLOWED[folder]))}"
            elif "../" in target:
                yield f"{where}: include by the path from core/ or the folder's own root"


def main():
    root = pathlib.Path(sys.argv[1])
    found = [problem for folder in ALLOWED for problem in problems(root, folder)]
    print("\n".join(found) or "the includes keep the arrows")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
