# SPDX-License-Identifier: Apache-2.0
"""The second opinion: abidiff, on what a compiler makes of the headers.

abidiff reads debug information, so there has to be an object with something of every type in it: a variable for each struct and each
pointer to a function. Its exit status does not tell a struct that grew at its end from one whose fields changed places; its report does.
It does not look into unions, and names, constants and comments are not in it.
"""
import re
import subprocess

# The lines of a report that something was appended, and what stands around them. Any other line is about more than that.
OF_AN_APPEND = re.compile(r"(Leaf changes|Changed leaf types|Removed/Changed/Added (functions|variables)) summary|\d+ (Changed|Added) variables?:"
                          r"|\[C\] |size of symbol changed|type of variable changed:|underlying type 'struct \w+' .*changed:"
                          r"|type size changed from (?P<size>\d+) to|\d+ data member insertions?:|'.*', at offset (?P<offset>\d+) \(in bits\)"
                          r"|'struct \w+ .*' changed:|details were reported earlier")


def source_of(release):
    """A C file that mentions all that a release promises, so that it doesn't compile where something is gone."""
    lines = ["#include <stratagem/abi.h>", "#include <stratagem/session.h>"]
    lines += [f"{name} probe_{name};" for name in release["structs"]]
    lines += [f"{name} *probe_{name};" for name, kind in release["types"].items() if kind == "opaque"]
    lines += [f"{name} probe_{name};" for name, kind in release["types"].items() if kind != "opaque"]
    lines += [f"__typeof__({name}) *probe_{name};" for name in release["functions"]]
    return "\n".join(lines) + "\n"


def compile_probe(compiler, release, include_folders, folder, name):
    """(the object, None), or (None, what the compiler says)."""
    source, output = folder / f"{name}.c", folder / f"{name}.o"
    source.write_text(source_of(release))
    result = subprocess.run([compiler, "-std=gnu11", "-g", "-c", *(f"-I{f}" for f in include_folders), source, "-o", output],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return (output, None) if result.returncode == 0 else (None, result.stdout)


def breaks_in(report):
    """The lines of a report that say more than that something was appended."""
    found, size_bits = [], 0
    for line in filter(None, (line.strip() for line in report.split("\n"))):
        match = OF_AN_APPEND.match(line)
        if match and match["size"]:
            size_bits = int(match["size"])
        if not match or match["offset"] and int(match["offset"]) < size_bits:
            found.append(line)
    return found


def compare(abidiff, old, new):
    """What breaks between two objects. Leaf changes: each type once, not again at all that reach it. abidiff's status: 1 and 2 are errors
    of its own, 4 a change, 8 a removal."""
    result = subprocess.run([abidiff, "--leaf-changes-only", "--no-default-suppression", old, new],
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode & 3:
        raise RuntimeError(f"{abidiff} failed with status {result.returncode}: {result.stdout}")
    return breaks_in(result.stdout)
