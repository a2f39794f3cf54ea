# SPDX-License-Identifier: Apache-2.0
"""Each sentence of docs/semantics.md has a row in sentences.md, each row a sentence and tests that exist.

check_sentences.py SEMANTICS SENTENCES CTEST BUILD_FOLDER     the check
check_sentences.py SEMANTICS                                  prints the sentences
"""

import json
import pathlib
import re
import subprocess
import sys

MOST_UNTESTED = 12


def sentences(text):
    """The sentences in order; a row of a table is one. Headings and code are none."""
    text = re.sub(r"^\|.*\n\|[-|: ]+\|$", "", text, flags=re.M)
    blocks = []
    for line in re.sub(r"```.*?```", "", text, flags=re.S).split("\n"):
        line = line.rstrip()
        if not line or line.startswith("#"):
            blocks.append("")
        elif line.startswith("|"):
            yield line.strip("| ")
        elif line.startswith("- "):
            blocks.append(line[2:])
        elif blocks and blocks[-1]:
            blocks[-1] += " " + line.strip()
        else:
            blocks.append(line.strip())
    for block in blocks:
        for sentence in re.split(r"(?<=[.!?])\)?\s+(?=[A-Z0-9`\"(])", re.sub(r"\s+", " ", block)):
            if sentence:
                yield sentence


def rows(text):
    """(beginning or case, tests or why there are none)"""
    for line in text.split("\n"):
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if not line.startswith("| ") or len(cells) < 2 or cells[0] in ("sentence", "case"):
            continue
        yield cells[0].replace("\\|", "|"), cells[1]


def test_names(ctest, build):
    listing = json.loads(subprocess.run([ctest, "--show-only=json-v1"], cwd=build, check=True, capture_output=True).stdout)
    names = {test["name"] for test in listing["tests"]}
    return names | {re.sub(r"^\w+: ?", "", name) for name in names}


def main():
    semantics = list(sentences(pathlib.Path(sys.argv[1]).read_text()))
    if len(sys.argv) == 2:
        print("\n".join(semantics))
        return 0
    spec, _, cases = pathlib.Path(sys.argv[2]).read_text().partition("\n## Cases")
    known = test_names(sys.argv[3], sys.argv[4])
    faults, matched, untested = [], {}, []
    for beginning, tests in rows(spec):
        found = [sentence for sentence in semantics if sentence.startswith(beginning)]
        if len(found) != 1:
            faults.append(f"{len(found)} sentences begin with {beginning!r}")
        for sentence in found:
            if sentence in matched:
                faults.append(f"{sentence!r} has two rows")
            matched[sentence] = tests
            if tests.startswith("("):
                untested.append(sentence)
    faults += [f"no row for {sentence!r}" for sentence in semantics if sentence not in matched]
    for name, tests in [*rows(spec), *rows(cases)]:
        if tests.startswith("("):
            continue
        for test in tests.split("; "):
            if test not in known:
                faults.append(f"{name!r} names the test {test!r}, which doesn't exist")
    num_cases = len(list(rows(cases)))
    if len(untested) > MOST_UNTESTED:
        faults.append(f"{len(untested)} sentences have no test, {MOST_UNTESTED} may")
    print(f"{len(semantics)} sentences, {len(semantics) - len(untested)} with tests; {num_cases} cases")
    for fault in faults:
        print(fault)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
