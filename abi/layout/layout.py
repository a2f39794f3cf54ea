#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The headers are the only source: this reads them, and writes all that is made from them.

    layout.py write ROOT              write what is made from them
    layout.py check ROOT              fail where a file is not what `write` would make it
    layout.py extract HEADER...       the layout of some headers (.../stratagem/x.h), as JSON, to the standard output
    layout.py drift ROOT              fail where they break a kept release (abi/layout/<version>.json)
    layout.py accept ROOT [freeze]    keep them as the release that they say they are; see drift.py

A header that can't be taken as it is (a function without a thread tag, a pointer without a lifetime, a construct that the layout
can't express) is told with its place and the way out; then nothing is written. Exit status: 0 all is well, 1 it is not, 77 there is
no libclang for this Python.
"""
import difflib
import json
import pathlib
import sys

try:
    from headers import read_headers
except ImportError as missing:
    print(f"no libclang for {sys.executable} ({missing}); `./run layout` sets it up, or: pip install -r core/libtorch/tools.lock")
    sys.exit(77)
import drift
import emit_c
import emit_julia
import emit_pages
import emit_python
from releases import promises


def own_headers(root):
    paths = [*(root / "abi" / "stratagem").glob("*.h"), *(root / "host" / "include" / "stratagem").glob("*.h")]
    return {f"stratagem/{path.name}": path for path in paths}


def read(headers):
    layout, problems = read_headers(headers)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        print(f"{len(problems)} problems in the headers; docs/abi.md, section J, has the rules", file=sys.stderr)
        sys.exit(1)
    return layout


def made_from(layout):
    """All that is made: {path: text}."""
    return {
        "abi/layout/asserts.c": emit_c.asserts(layout),
        "host/julia/src/generated.jl": emit_julia.declarations(layout),
        "host/python/stratagem/_generated.py": emit_python.declarations(layout),
        **{f"docs/reference/{name}": text for name, text in emit_pages.pages(layout).items()},
    }


def write(root):
    made = made_from(read(own_headers(root)))
    for name, text in made.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for page in leftover_pages(root, made):
        page.unlink()
    print(f"{len(made)} files written")
    return 0


def leftover_pages(root, made):
    return [page for page in sorted((root / "docs/reference").glob("*.md")) if f"docs/reference/{page.name}" not in made]


def check(root):
    made = made_from(read(own_headers(root)))
    wrong = [f"{page.relative_to(root)}: is made from no header" for page in leftover_pages(root, made)]
    for name, text in made.items():
        there = (root / name).read_text(encoding="utf-8") if (root / name).exists() else ""
        if there != text:
            wrong += [*difflib.unified_diff(there.splitlines(), text.splitlines(), f"{name} (as it is)", f"{name} (from the headers)",
                                            n=1, lineterm="")][:40]
    if wrong:
        print("\n".join(wrong))
        print("These files are made from the headers and differ from them. Write them anew, and commit them: ./run layout")
        return 1
    print(f"{len(made)} files are what the headers say")
    return 0


def check_drift(root):
    wrong, news = drift.check(root, promises(read(own_headers(root))), read)
    print("\n".join([*wrong, *news]))
    if wrong:
        print("What was released stays as it was: docs/versioning.md. Before 1.0 is frozen, deliberately: ./run abi-accept")
    else:
        print("all kept promises hold")
    return 1 if wrong else 0


def accept(root, freeze):
    wrong = drift.accept(root, promises(read(own_headers(root))), own_headers(root), read, freeze)
    print("\n".join(wrong) or "kept; commit abi/layout with docs/versioning.md")
    return 1 if wrong else 0


def main(arguments):
    if len(arguments) == 2 and arguments[0] in ("write", "check"):
        return {"write": write, "check": check}[arguments[0]](pathlib.Path(arguments[1]))
    if len(arguments) == 2 and arguments[0] == "drift":
        return check_drift(pathlib.Path(arguments[1]))
    if len(arguments) in (2, 3) and arguments[0] == "accept" and arguments[2:] in ([], ["freeze"]):
        return accept(pathlib.Path(arguments[1]), bool(arguments[2:]))
    if len(arguments) > 1 and arguments[0] == "extract":
        print(json.dumps(read({f"stratagem/{pathlib.Path(a).name}": a for a in arguments[1:]}), indent=1, ensure_ascii=False))
        return 0
    print(__doc__)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
