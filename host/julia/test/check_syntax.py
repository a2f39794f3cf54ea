#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every file of Julia is parsed by tree-sitter, which knows newer Julia than the one that runs here; so are lines that only that one runs.

usage: check_syntax.py FOLDER
Exit status: 0 all parse, 1 one doesn't, 77 there is no tree-sitter for this Python.
"""
import pathlib
import sys

try:
    import tree_sitter
    import tree_sitter_julia
except ImportError as missing:
    print(f"no tree-sitter for {sys.executable} ({missing})")
    sys.exit(77)

PARSER = tree_sitter.Parser(tree_sitter.Language(tree_sitter_julia.language()))


def broken_lines(source):
    def visit(node):
        if node.is_error or node.is_missing:
            yield node.start_point[0] + 1
        elif node.has_error:
            for child in node.children:
                yield from visit(child)
    return sorted(set(visit(PARSER.parse(source).root_node)))


def main():
    assert broken_lines(b"f(x) = (x\n") and broken_lines(b"struct S\n"), "the parser finds nothing wrong in what is wrong"
    assert not broken_lines(b"@ccall gc_safe=true $f(x::Cint)::Cvoid\n")
    paths = sorted(pathlib.Path(sys.argv[1]).rglob("*.jl"))
    wrong = [f"{path}:{line}: does not parse" for path in paths for line in broken_lines(path.read_bytes())]
    print("\n".join(wrong) or f"{len(paths)} files parse")
    return 1 if wrong or not paths else 0


sys.exit(main())
