#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Good plugins under the conformance tool again and again: 10 whole runs, and 50 of the checks that measure time.

usage: false_alarms.py TOOL PLUGIN.so...
"""
import json
import subprocess
import sys


def run(tool, *arguments):
    done = subprocess.run([tool, "conformance", "--json", *arguments], capture_output=True, text=True, check=False)
    return json.loads(done.stdout)


def main():
    tool, *plugins = sys.argv[1:]
    timed = [one["id"] for one in run(tool, "--list")["checks"] if one["is_timed"]]
    only = [word for check_id in timed for word in ("--only", check_id)]
    num_alarms = 0
    for plugin in plugins:
        seconds = []
        for number in range(60):
            report = run(tool, plugin, *(only if number >= 10 else []))
            bad = [one for one in report["checks"] if one["result"] in ("failed", "crashed")]
            for one in bad:
                print(f"{plugin}, run {number + 1}: {one['result']} {one['id']} {one['kind']} {one['messages']}")
            num_alarms += len(bad)
            seconds += [report["seconds"]] if number < 10 else []
        print(f"{plugin}: 10 whole runs in {min(seconds):.1f} to {max(seconds):.1f} s, 50 of {len(timed)} timed checks")
    print(f"{num_alarms} false alarms")
    return 1 if num_alarms else 0


if __name__ == "__main__":
    sys.exit(main())
