#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A good plugin passes every check, but for those that it has no use for: a file lists these, and no others may be skipped. A warning
about a file in the build folder (a line `warned <id>`) is let pass.

usage: passes.py TOOL PLUGIN.so SKIPPED.txt [ARGUMENTS...]
"""
import json
import pathlib
import subprocess
import sys


def main():
    tool, plugin, pinned, *arguments = sys.argv[1:]
    done = subprocess.run([tool, "conformance", "--json", plugin, *arguments], capture_output=True, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout else sys.exit(f"exit code {done.returncode}: {done.stderr}")
    lines = [line.split() for line in pathlib.Path(pinned).read_text().splitlines() if line.strip() and not line.startswith("#")]
    let_pass = {line[1] for line in lines if line[0] == "warned"}
    bad = [one for one in report["checks"] if one["result"] not in ("passed", "skipped")]
    bad = [one for one in bad if one["result"] != "warned" or one["id"] not in let_pass]
    for one in bad:
        print(one["result"], one["id"], one["kind"] or "", one["output"], *one["messages"], sep="\n  ")
    skipped = {one["id"]: one["messages"] for one in report["checks"] if one["result"] == "skipped"}
    expected = {line[0] for line in lines if line[0] != "warned"}
    for check_id in sorted(set(skipped) ^ expected):
        print(f"{check_id} {'is skipped: ' + str(skipped[check_id]) if check_id in skipped else 'is no longer skipped'}")
    counts = ", ".join(f"{number} {word}" for word, number in report["counts"].items())
    print(f"{counts}, in {report['seconds']:.1f} s; exit code {done.returncode}")
    return 1 if bad or done.returncode != 0 or set(skipped) != expected else 0


if __name__ == "__main__":
    sys.exit(main())
