#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every check of the conformance tool finds the fault that it is there for.

usage: bites.py TOOL one FAULTY.so ID    with this fault the check fails or crashes, without it the same plugin does not
       bites.py TOOL all ID...           the tool has these checks and no others
"""
import json
import os
import subprocess
import sys


def run(tool, *arguments, fault=""):
    environment = dict(os.environ, STRATAGEM_FAULT=fault)
    done = subprocess.run([tool, "conformance", "--json", *arguments], capture_output=True, text=True, env=environment, check=False)
    try:
        return done.returncode, json.loads(done.stdout)
    except json.JSONDecodeError:
        sys.exit(f"exit code {done.returncode}, no JSON: {done.stdout[-2000:]}{done.stderr[-2000:]}")


def results(report, check_id):
    found = [one for one in report["checks"] if one["id"] == check_id]
    return found or sys.exit(f"the report has no {check_id}: {report}")


def one(tool, plugin, check_id):
    code, report = run(tool, plugin, "--only", check_id, "--timeout", "15", fault=check_id)
    found = results(report, check_id)
    if code != 1 or not any(one["result"] in ("failed", "crashed") for one in found):
        sys.exit(f"the fault is not found: exit code {code}, {json.dumps(found, indent=1)}")
    if not any(one["messages"] or one["kind"] for one in found):
        sys.exit(f"the fault is found, but nothing says what it is: {found}")
    for one_result in found:
        print(check_id, one_result["result"], one_result["kind"] or "", *one_result["messages"][:2], sep="; ")
    if "faulty_plugin" not in os.path.basename(plugin):
        return  # the file is the fault
    code, report = run(tool, plugin, "--only", check_id)
    bad = [one for one in report["checks"] if one["result"] not in ("passed", "skipped")]  # it has not every function
    if code != 0 or bad:
        sys.exit(f"without the fault it does not pass: {bad}")


def all_of(tool, ids):
    _, report = run(tool, "--list")
    listed = [one["id"] for one in report["checks"]]
    twice = {one for one in listed if listed.count(one) > 1}
    missing, unknown = set(listed) - set(ids), set(ids) - set(listed)
    if twice or missing or unknown or len(listed) < 80:
        sys.exit(f"{len(listed)} checks; twice {twice}, without a test {missing}, tested but not there {unknown}")
    print(f"{len(listed)} checks, each has a fault")


if __name__ == "__main__":
    if sys.argv[2] == "one":
        one(sys.argv[1], *sys.argv[3:])
    else:
        all_of(sys.argv[1], sys.argv[3:])
