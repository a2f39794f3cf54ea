# SPDX-License-Identifier: Apache-2.0
"""What the comments of the headers say about threads and ownership, and where they say nothing. docs/abi.md, section J, is the rule.

The words and the defaults are those of common.h: the defaults are read from its comment, so that they stand once.
"""
import re

THREADS = ("any", "owner", "replica")
STATES = ("created", "fit", "evaluate", "modelless", "draining", "live", "all")
TAG = re.compile(r"\[([a-z, ]*)\]$")
OWNERSHIP = re.compile(r"\b(lifetime|lives?|borrowed|owned|owns|moved|consume[sd]?|valid|releases?|released|retained|copied|caller's|stays)\b",
                       re.IGNORECASE)
OF_ALL_FIELDS = re.compile(r"\b(all pointers|points to)\b", re.IGNORECASE)
OF_THE_RESULT = re.compile(r"\bthe result\b", re.IGNORECASE)
# Rows of the table in common.h, and which pointers each is for. The first that fits is taken.
DEFAULTS = {
    "`self`": lambda pointer: pointer["name"] == "self",
    "`out`": lambda pointer: pointer["name"] == "out" and pointer["stars"] == 1,
    "const T *": lambda pointer: pointer["name"] and pointer["stars"] == 1 and pointer["const"],
    "number *": lambda pointer: pointer["name"] and pointer["stars"] == 1 and pointer["of"] == "number",
    "handle *": lambda pointer: pointer["name"] and pointer["stars"] == 1 and pointer["of"] == "opaque",
    "stg_error * as result": lambda pointer: not pointer["name"] and pointer["stars"] == 1 and pointer["base"] == "stg_error",
}


def sentences(text):
    """Those of a comment, without its tag. A line that is set in begins a new one, and so does the line after such lines."""
    parts, was_set_in = [""], False
    for line in re.sub(r"\s*\[[a-z, ]*\]$", "", text).split("\n"):
        set_in = line.startswith("  ")
        if not line or set_in or was_set_in:
            parts.append("")
        parts[-1] += line.strip() + " "
        was_set_in = set_in
    return [s for part in parts for s in re.split(r"(?<=[.!?])\s+(?=[A-Z`{(])", part.strip()) if s]


def first_statement(text, about):
    """The first sentence that `about` finds something in and that has a word of ownership."""
    return next((s for s in sentences(text) if about.search(s) and OWNERSHIP.search(s)), None)


def read_defaults(common_doc):
    """The rows of common.h's table of defaults: {key: statement}."""
    rows = {}
    for key in DEFAULTS:
        row = re.search(rf"^ +{re.escape(key)} {{2,}}(.*(?:\n {{10,}}\S.*)*)$", common_doc, re.MULTILINE)
        if row:
            rows[key] = " ".join(row.group(1).split())
    return rows


def tag_of(doc):
    """(thread, states) of a comment's tag, or None. States are the words of the tag, in its order."""
    found = TAG.search(doc.strip())
    if not found:
        return None
    words = found.group(1).replace(",", " ").split()
    if not words or words[0] not in THREADS or set(words[1:]) - set(STATES):
        return None
    return words[0], words[1:]


def ownership_of(pointer, function_doc, table_doc, header_doc, defaults):
    """What is said about a parameter (or, without a name, a result), from the nearest comment that says it; None if none does."""
    about = re.compile(rf"`{re.escape(pointer['name'])}`") if pointer["name"] else OF_THE_RESULT
    for doc in (function_doc, table_doc, header_doc):
        statement = first_statement(doc, about)
        if statement:
            return statement
    return next((defaults[key] for key, fits in DEFAULTS.items() if key in defaults and fits(pointer)), None)


def ownership_of_field(field_doc, struct_doc):
    if OWNERSHIP.search(field_doc):
        return " ".join(field_doc.split())
    return first_statement(struct_doc, OF_ALL_FIELDS)
