#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""abi/layout on copies of the headers: what it must refuse, with its words, and what it must find changed.

usage: check_layout.py ROOT
"""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

try:
    import clang.cindex  # noqa: F401
except ImportError as missing:
    print(f"skipped: {missing}; `./run layout` sets libclang up")
    sys.exit(77)

# What is done to which header, where the complaint must point (a text of the changed header), and its parts: what is wrong, the way out.
REFUSED = {
    "a slot without a thread tag": (
        "error.h", "Never null. [any] */", "Never null. */", "void (*release)", ["stg_error.release", "thread tag", "End it in [any], [owner]"]),
    "a function without a thread tag": (
        "session.h", "/* The config's JSON Schema. [any] */", "/* The config's JSON Schema. */", "*stg_config_schema(",
        ["stg_config_schema", "thread tag", "[replica]"]),
    "a pointer to a function without a thread tag": (
        "plugin.h", "caller's memory. [any] */", "caller's memory. */", "(*stg_plugin_probe_fn)", ["stg_plugin_probe_fn", "thread tag"]),
    "a thread that does not exist": (
        "strategy.h", "[owner, created] */", "[ownr, created] */", "(*setup)", ["stg_strategy_api.setup", "thread tag"]),
    "a state that does not exist": (
        "strategy.h", "[owner, created] */", "[owner, creatd] */", "(*setup)", ["stg_strategy_api.setup", "states behind a comma", "created"]),
    "a field that points, without a lifetime": (
        "types.h", "/* lifetime: the call; for CUDA a cudaStream_t */", "/* for CUDA a cudaStream_t */", "void *handle",
        ["stg_stream.handle", "pointer (void *) without a lifetime", "lifetime: ..., borrowed, moved"]),
    "a union's member that points, without a lifetime": (
        "value.h", ("All pointers live until", "const char *utf8;          /* lifetime: until the tree's release */"),
        ("They live until", "const char *utf8;"), "const char *utf8",
        ["stg_value.as.utf8", "without a lifetime"]),
    "a parameter that points, without an owner": (
        "model.h", "`gradient` is moved, on error too;", "The tensor is moved, on error too;", "(*ready)(",
        ["stg_gradient_sink.ready", "parameter `gradient` (stg_tensor *)", "Write a sentence with `gradient` and one of borrowed, moved"]),
    "a result that points, without an owner": (
        "host.h", "The result\n   * is the caller's, released by deallocate.", "", "*(*allocate)", ["stg_host.allocate", "result (void *)", "the words: the result"]),
    "an array of objects handed out, without an owner": (
        "strategy.h", "`out` lives until destroy. ", "", "*(*devices)", ["stg_strategy_api.devices", "parameter `out` (const stg_device **)"]),
    "a bitfield": (
        "call.h", "uint64_t num_streams;", "uint64_t num_streams : 3;", "num_streams : 3", ["stg_call.num_streams", "a bitfield", "flags"]),
    "a union of other sizes": (
        "value.h", "    double f64;\n", "    double f64;\n    uint32_t u32;\n", "uint32_t u32", ["stg_value.as", "a union", "8 bytes each"]),
    "a union without a name": (
        "value.h", "  } as;\n", "  };\n", "  union {", ["stg_value", "a union without a name", "name"]),
    "a type that doesn't cross": (
        "call.h", "uint64_t num_streams;", "long num_streams;", "long num_streams", ["stg_call.num_streams", "type long", "uint64_t"]),
    "an array": (
        "call.h", "uint64_t num_streams;", "uint64_t num_streams[1];", "num_streams[1]", ["stg_call.num_streams", "uint64_t[1]", "B2"]),
    "a variadic function": (
        "session.h", "stg_config_schema(stg_tree *result)", "stg_config_schema(stg_tree *result, ...)", "*stg_config_schema(",
        ["stg_config_schema", "variadic", "fixed parameters"]),
    "a parameter without a name": (
        "session.h", "stg_config_schema(stg_tree *result)", "stg_config_schema(stg_tree *)", "*stg_config_schema(", ["a parameter without a name"]),
    "a variable": (
        "call.h", "STG_EXTERN_C_END", "extern uint32_t stg_counter;\nSTG_EXTERN_C_END", "stg_counter", ["stg_counter", "form of declaration"]),
    "a function with a body": (
        "call.h", "STG_EXTERN_C_END", "/* [any] */\nstatic inline uint32_t stg_one(void) { return 1; }\nSTG_EXTERN_C_END", "stg_one",
        ["stg_one", "has a body", "source file"]),
    "a growing struct without its smallest size": (
        "call.h", "#define STG_CALL_MIN_SIZE 40u\n", "", None, ["stg_call", "STG_CALL_MIN_SIZE"]),
    "a header that doesn't compile": ("call.h", "uint64_t num_streams;", "uint65_t num_streams;", "uint65_t", ["unknown type name 'uint65_t'"]),
    "a table of defaults that lacks a row": (
        "common.h", " *   const T *              borrowed\n", "", None, ["common.h", "const T *", "table of defaults"]),
}


class LayoutTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "copy"
        for name in ("abi", "host/include", "host/julia/src", "host/python/stratagem", "docs/reference"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        self.headers = {p.name: p for p in [*self.root.glob("abi/stratagem/*.h"), *self.root.glob("host/include/stratagem/*.h")]}

    def script(self, *arguments, **environment):
        return subprocess.run([sys.executable, "-B", str(ROOT / "abi/layout/layout.py"), *map(str, arguments)], text=True, capture_output=True,
                              env={**os.environ, **environment})

    def change(self, name, old, new):
        text = self.headers[name].read_text()
        for was, becomes in [(old, new)] if isinstance(old, str) else zip(old, new):
            self.assertIn(was, text, f"{name} has changed; so must this test")
            text = text.replace(was, becomes, 1)
        self.headers[name].write_text(text)

    def test_what_it_cannot_take_is_refused_with_the_place_and_the_way_out(self):
        for title, (name, old, new, place, parts) in REFUSED.items():
            with self.subTest(title):
                before = self.headers[name].read_text()
                self.change(name, old, new)
                problems = read_headers({f"stratagem/{own}": path for own, path in self.headers.items()})[1]
                lines = self.headers[name].read_text().split("\n")
                self.headers[name].write_text(before)
                complaints = [problem for problem in problems if all(part in problem for part in parts)]
                self.assertEqual(len(complaints), 1, problems)
                if place:
                    number = 1 + next(i for i, line in enumerate(lines) if place in line)
                    self.assertTrue(complaints[0].startswith(f"stratagem/{name}:{number}: "), f"{number}: {complaints[0]}")

    def test_nothing_is_written_from_headers_that_are_refused(self):
        layout = self.root / "abi/layout/asserts.c"
        layout.write_text("old")
        self.change("error.h", "Never null. [any] */", "Never null. */")
        for result in (self.script("write", self.root), self.script("check", self.root), self.script("extract", *self.headers.values())):
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn("thread tag", result.stderr)
            self.assertIn("docs/abi.md, section J", result.stderr)
        self.assertEqual(layout.read_text(), "old")

    def test_a_field_that_has_moved_is_found_in_every_file(self):
        self.assertEqual(self.script("check", self.root).returncode, 0)
        self.change("call.h", "  uint64_t num_streams;\n", "")
        self.change("call.h", "  uint64_t deadline_ns; ", "  uint64_t num_streams;\n  uint64_t deadline_ns; ")
        result = self.script("check", self.root)
        self.assertEqual(result.returncode, 1)
        self.assertIn("./run layout", result.stdout)
        for part in ("+FIELD(stg_call, num_streams, 8, 8);", "-FIELD(stg_call, num_streams, 32, 8);", "host/julia/src/generated.jl", "host/python/stratagem/_generated.py",
                     "docs/reference/call.md"):
            self.assertIn(part, result.stdout)
        self.assertEqual(self.script("write", self.root).returncode, 0)
        self.assertEqual(self.script("check", self.root).returncode, 0)

    def test_a_changed_word_a_missing_file_and_a_page_too_many_are_found(self):
        (self.root / "docs/reference/none.md").touch()
        (self.root / "abi/layout/asserts.c").unlink()
        self.change("call.h", "in nanoseconds", "in picoseconds")
        found = self.script("check", self.root).stdout
        for part in ("docs/reference/none.md: is made from no header", "+SIZE(stg_string, 16);", "picoseconds"):
            self.assertIn(part, found)
        self.assertEqual(self.script("write", self.root).returncode, 0)
        self.assertFalse((self.root / "docs/reference/none.md").exists())

    def test_neither_the_folder_nor_the_order_nor_the_hashes_of_python_change_the_layout(self):
        first = self.script("extract", *self.headers.values())
        for seed in ("1", "2"):
            again = self.script("extract", *reversed([*ROOT.glob("abi/stratagem/*.h"), *ROOT.glob("host/include/stratagem/*.h")]), PYTHONHASHSEED=seed)
            self.assertEqual(first.stdout, again.stdout)
        self.assertNotIn(str(self.root), first.stdout)

    def test_what_is_said_of_a_pointer_comes_from_the_nearest_comment_that_says_it(self):
        layout = json.loads(self.script("extract", *self.headers.values()).stdout)
        items = {i["name"]: i for h in layout["headers"].values() for i in h["items"] if "name" in i}
        slots = {f["name"]: f for f in items["stg_strategy_api"]["fields"]}

        def said(function, name):
            return next(p["ownership"] for p in function["parameters"] if p["name"] == name)

        self.assertEqual(said(slots["broadcast"], "object"), "`object` is moved or borrowed.")  # its own comment
        self.assertEqual(said(slots["reduce"], "object"), "`batch`, `object` and `state` are moved or borrowed.")  # its table's
        self.assertIn("owned by the caller", said(items["stg_config_schema"], "result"))  # its header's
        self.assertEqual(said(slots["setup"], "args"), "borrowed")  # common.h's
        self.assertEqual((slots["setup"]["thread"], slots["setup"]["states"]), ("owner", ["created"]))
        everything = [f for i in items.values() for f in [*i.get("fields", []), i]]
        pointers = [p for f in everything for p in [*f.get("parameters", []), *f.get("members", []), f, f.get("result", {})]
                    if "*" in p.get("type", "")]
        self.assertGreater(len(pointers), 200)
        self.assertTrue(all(p["ownership"] for p in pointers))


if __name__ == "__main__":
    ROOT = pathlib.Path(sys.argv.pop(1)).resolve()
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(ROOT / "abi/layout"))
    from headers import read_headers
    unittest.main()
