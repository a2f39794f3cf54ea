#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every code block of README and docs that names its file must be that file's text, so that what a reader copies is what is built.

In Markdown, before a fence:   <!-- from: docs/examples/strategy_plugin/gradient_descent.cpp -->
A part of a file:              <!-- from: host/examples/fashion.json lines: 3-9 -->
The SPDX line at the top of a file is left out. Fences of C, C++, CMake and JSON without such a line are an error. So is what a merge
left undecided.

usage: check_snippets.py ROOT FILE.md...
"""
import pathlib
import re
import sys

MARKER = re.compile(r"<!-- from: (?P<path>\S+?)(?: lines: (?P<first>\d+)-(?P<last>\d+))? -->")
CHECKED = {"c", "cpp", "cmake", "json", "rust", "julia", "python"}


def expected(root, match):
    lines = (root / match["path"]).read_text().splitlines()
    if match["first"]:
        return lines[int(match["first"]) - 1 : int(match["last"])]
    return lines[1:] if lines and "SPDX-License-Identifier" in lines[0] else lines


def problems(root, page):
    lines = page.read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if re.match("(<{7}|>{7}) |={7}$", line):
            yield f"{page}:{number}: the mark of a merge conflict"
    i = 0
    while i < len(lines):
        fence = re.fullmatch(r"\s*```(\w+)\s*", lines[i])
        if not fence:
            i += 1
            continue
        end = next(j for j in range(i + 1, len(lines)) if lines[j].strip() == "```")
        block = lines[i + 1 : end]
        match = MARKER.fullmatch(lines[i - 1].strip()) if i > 0 else None
        if match:
            want = expected(root, match)
            if block != want:
                differing = next((k for k, (a, b) in enumerate(zip(block, want)) if a != b), min(len(block), len(want)))
                yield f"{page}:{i + 2 + differing}: the block differs from {match['path']} here"
        elif fence[1] in CHECKED:
            yield f"{page}:{i + 1}: a {fence[1]} block that names no file; add <!-- from: FILE --> before it"
        i = end + 1


def main():
    root = pathlib.Path(sys.argv[1])
    found = [problem for page in sys.argv[2:] for problem in problems(root, pathlib.Path(page))]
    print("\n".join(found) or f"{len(sys.argv) - 2} pages agree with their files")
    return 1 if found or len(sys.argv) < 3 else 0


if __name__ == "__main__":
    sys.exit(main())
