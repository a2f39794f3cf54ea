#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Kept releases: on copies of the headers, what breaks one must be found, and what doesn't must pass.

usage: check_drift.py edits ROOT                        every deliberate edit, by the rules
       check_drift.py kept ROOT                         what is done to the kept files, and `accept`
       check_drift.py abidiff ROOT COMPILER ABIDIFF     today's headers and every edit, by abidiff
Exit status 77: there is no libclang, or no abidiff.
"""
import pathlib
import shutil
import sys
import tempfile
import unittest

sys.dont_write_bytecode = True
sys.path.insert(0, str(pathlib.Path(__file__).parent))
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "minors"))
import next_minor
import probe
from edits import EDITS, Edit


known = {}


def read(headers):
    """layout.read, which takes a third of a second, once for the same texts."""
    key = tuple(sorted((name, path.read_text(encoding="utf-8")) for name, path in headers.items()))
    if key not in known:
        known[key] = layout.read(headers)
    return known[key]


def today(root):
    return releases.promises(read(layout.own_headers(root)))


def edit_headers(edit, paths):
    """`paths`: {name without folder: path}."""
    text = paths[edit.header].read_text(encoding="utf-8")
    for old, new in edit.changes:
        assert old in text, f"{edit.header} has changed; so must this test: {old}"
        text = text.replace(old, new, 1)
    paths[edit.header].write_text(text, encoding="utf-8")


class Copy(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name) / "copy"
        for name in ("abi/stratagem", "host/include/stratagem", "abi/layout"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
        (self.root / "docs").mkdir()
        shutil.copyfile(ROOT / drift.PAGE, self.root / drift.PAGE)
        self.paths = {p.name: p for p in layout.own_headers(self.root).values()}

    def check(self):
        return drift.check(self.root, today(self.root), read)

    def edit(self, name):
        edit_headers(EDITS[name], self.paths)

    def say(self, text):
        """A line in docs/versioning.md about the headers as they are."""
        with (self.root / drift.PAGE).open("a") as page:
            page.write(releases.line_for(today(self.root)) + text + "\n")

    def accept(self, freeze=False):
        return drift.accept(self.root, today(self.root), layout.own_headers(self.root), read, freeze)

    def assert_one(self, found, parts):
        self.assertEqual(len(found), 1, found)
        for part in parts:
            self.assertIn(part, found[0])


class EditsTest(Copy):
    """One method per edit; see below. Only the edited header is read, with two that others need: the version, the defaults, errors."""

    def promises(self, header):
        return releases.promises(read({f"stratagem/{name}": self.paths[name] for name in {"common.h", "error.h", header}}))

    def run_edit(self, name):
        edit = EDITS[name]
        before = self.promises(edit.header)
        self.edit(name)
        breaks, news = releases.compare(before, self.promises(edit.header))
        if not edit.breaks:
            self.assertEqual((breaks, sorted(news)), ([], sorted(edit.news)))
            return
        self.assertTrue(any(all(part in found for part in edit.breaks) for found in breaks), breaks)
        place = edit.breaks[0].split(".")[0].split(":")[0]
        self.assertTrue(all(found.startswith(place) for found in breaks), breaks)


def add_edits():
    for name in EDITS:
        setattr(EditsTest, "test_" + name.replace(" ", "_"), lambda self, name=name: self.run_edit(name))


class KeptTest(Copy):
    def raise_minor(self):
        text = self.paths["common.h"].read_text()
        self.assertIn("#define STG_ABI_MINOR 0u", text)
        self.paths["common.h"].write_text(text.replace("#define STG_ABI_MINOR 0u", "#define STG_ABI_MINOR 1u"))

    def test_todays_headers_keep_every_release(self):
        self.assertEqual(self.check(), ([], []))

    def test_a_missing_release_is_told(self):
        headers = self.root / "abi/layout/1.0"
        shutil.move(headers, self.root / "away")
        self.assert_one(self.check()[0], ["abi/layout/1.0 is missing", "git"])
        shutil.move(self.root / "away", headers)
        (self.root / "abi/layout/1.0.json").unlink()
        self.assert_one(self.check()[0], ["abi/layout/1.0.json is missing"])

    def test_a_release_that_was_edited_by_hand_is_told(self):
        file = self.root / "abi/layout/1.0.json"
        whole = file.read_text()
        self.assertIn('"STG_STAGE_TEST": "uint32_t 2"', whole)
        file.write_text(whole.replace('"STG_STAGE_TEST": "uint32_t 2"', '"STG_STAGE_TEST": "uint32_t 5"'))
        self.assert_one(self.check()[0], ["1.0.json and the headers beside it differ", "STG_STAGE_TEST", "abi-accept"])
        file.write_text(whole)
        edit_headers(EDITS["a number changes its sign"], {p.name: p for p in drift.kept_headers(self.root, "1.0").values()})
        self.assert_one(self.check()[0], ["stg_call.num_streams"])

    def test_a_layout_is_accepted_only_with_a_line_that_says_what_changed(self):
        self.edit("two fields of a growing struct change places")
        refused = self.accept()
        for part in (drift.PAGE, f"- `1.0` `{releases.digest_of(today(self.root))}`: ", "stg_call.deadline_ns"):
            self.assertIn(part, "\n".join(refused))
        self.say("")
        self.assertNotEqual(self.accept(), [], "a line without words")
        self.assertEqual(len(self.check()[0]), 1, "nothing was kept")
        self.say("the deadline comes after the flag; programs must be built again")
        self.assertEqual(self.accept(), [])
        self.assertEqual(self.check(), ([], []))

    def test_a_release_whose_line_was_taken_away_is_told(self):
        (self.root / drift.PAGE).write_text("# What may change\n")
        self.assert_one(self.check()[0], ["begins with '- `1.0` `"])

    def test_what_is_frozen_stays_and_what_is_new_is_a_new_minor(self):
        self.assertEqual(self.accept(freeze=True), [])
        self.assertEqual(self.check(), ([], []))
        self.edit("a growing struct grows at its end")
        self.assert_one(self.check()[0], ["1.0 is frozen", "raise STG_ABI_MINOR", "stg_call: grows by priority"])
        self.say("a field more, and that in a release that is frozen")
        self.assert_one(self.accept(), ["1.0 is frozen", "Raise STG_ABI_MINOR"])
        self.raise_minor()
        self.assert_one(self.check()[0], ["abi/layout/1.1.json is missing", "abi-accept"])
        self.say("calls have a priority; older plugins refuse one that is set")
        self.assertEqual(self.accept(), [])
        self.assertEqual(self.check(), ([], []))

    def test_a_new_minor_keeps_what_the_older_ones_promised(self):
        self.raise_minor()
        self.edit("a smallest size grows")
        self.say("a smallest size that grew, which no line makes right")
        self.assert_one(self.accept(), ["stg_model: its _MIN_SIZE"])

    def test_the_simulated_next_minor_breaks_nothing(self):
        for header, changes in next_minor.HEADERS.items():
            edit_headers(Edit(header, changes), self.paths)
        self.say("a minor of the tests' own, which is not kept")
        self.assertEqual(self.accept(), [])
        self.assertEqual(self.check(), ([], []))
        kept = json.loads((ROOT / "abi/layout/1.0.json").read_text())
        breaks, news = releases.compare(kept, today(self.root))
        self.assertEqual(breaks, [])
        self.assertEqual(sorted(news), [
            "STG_EXTENSION_HISTORY: new", "stg_history_api: new", "stg_model: grows by warm_up, from 144 to 152 bytes",
            "stg_strategy_api: grows by count_elements, from 272 to 280 bytes",
            "stg_update_args: grows by weight_decay, from 32 to 40 bytes", "stg_update_result: grows by parameter_norm, from 40 to 48 bytes"])

    def test_a_new_major_is_free(self):
        self.paths["common.h"].write_text(self.paths["common.h"].read_text().replace("#define STG_ABI_MAJOR 1u", "#define STG_ABI_MAJOR 2u"))
        self.edit("a constant is renumbered")
        self.say("a new major, in which stages have other numbers")
        self.assertEqual(self.accept(), [])
        self.assertEqual(self.check(), ([], []))


class AbidiffTest(Copy):
    def setUp(self):
        super().setUp()
        self.kept = json.loads((ROOT / "abi/layout/1.0.json").read_text())
        self.old, said = self.compile([ROOT / "abi/layout/1.0"], "old")
        self.assertIsNone(said)

    def compile(self, folders, name):
        return probe.compile_probe(COMPILER, self.kept, folders, self.root, name)

    def breaks(self):
        """Of the copy's headers, or what the compiler says where something is gone."""
        new, said = self.compile([self.root / "abi", self.root / "host/include"], "new")
        return [said] if said else probe.compare(ABIDIFF, self.old, new)

    def test_it_finds_nothing_in_todays_headers(self):
        self.assertEqual(self.breaks(), [])

    def test_it_finds_the_edits_that_change_types_and_takes_an_append(self):
        for name, edit in EDITS.items():
            with self.subTest(name):
                before = self.paths[edit.header].read_text()
                self.edit(name)
                found = self.breaks()
                self.paths[edit.header].write_text(before)
                self.assertEqual(bool(found), edit.abidiff, found)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    ROOT = pathlib.Path(arguments[0]).resolve()
    sys.path.insert(0, str(ROOT / "abi/layout"))
    try:
        import json

        import drift
        import layout  # ends with 77 where there is no libclang
        import releases
    except ImportError as missing:
        sys.exit(missing)
    add_edits()
    case = {"edits": EditsTest, "kept": KeptTest, "abidiff": AbidiffTest}[command]
    if command == "abidiff":
        COMPILER, ABIDIFF = arguments[1:]
        if not shutil.which(ABIDIFF):
            print("skipped: no abidiff here; Debian's package abigail-tools has it")
            sys.exit(77)
    unittest.main(argv=[sys.argv[0], case.__name__], verbosity=2)
