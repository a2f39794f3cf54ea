#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Holds the headers in abi/stratagem/ against the rules that a compiler does not know.

    check_headers.py rules FOLDER MORE.h...             the rules of docs/abi: sizes, types, states
    check_headers.py compile FOLDER MORE.h... CC CXX... each header alone, in C99, C11, C++17, C++20, padding an error
    check_headers.py states FOLDER PAGE.md              the page has the table of states.h, as Markdown
    check_headers.py self-test FOLDER MORE.h...         breaks a copy of the headers once per rule; each must be found

It reads the headers as text, with the few forms that they are written in: a form that it does not understand is an error, so
nothing slips through unread. Thread tags and lifetimes are abi/layout's (check_layout.py). The self-test is there because a checker that finds nothing looks like one that works.
"""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SCALARS = {"uint8_t": 1, "uint16_t": 2, "uint32_t": 4, "int32_t": 4, "int64_t": 8, "uint64_t": 8, "double": 8, "char": 1}
FIXED = {"stg_string", "stg_device", "stg_stream", "stg_dtype", "stg_tensor_view", "stg_tensor", "stg_value", "stg_entry",
         "stg_tree", "stg_error", "stg_probe_request", "stg_probe_reply"}
# What names an enumeration in a member's comment, and as a parameter.
ENUMERATION = re.compile(r"\bSTG_(STAGE|LOSS|CLIP|UPDATE|REDUCE|DECIDE|LOG|STATE|STREAM)_(\*|[A-Z]+ or STG_)")
ENUMERATION_NAMES = {"stage", "op", "mode", "level", "clip", "outcome", "loss_kind", "kind", "state", "decision", "train"}
FORBIDDEN = r"\b(bool|_Bool|enum|long|short|size_t|ssize_t|ptrdiff_t|wchar_t|int|unsigned|signed|float|va_list|intptr_t|uintptr_t)\b"
STATE_WORDS = {"created": 1, "fit": 2, "evaluate": 4, "modelless": 8, "draining": 16, "live": 15, "all": 31, "model": 6}
MAX_STRUCT_SIZE_BYTES = 65536

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
STRUCT = re.compile(r"typedef struct (stg_\w+) \{\n(.*?)\n\} (\w+);", re.DOTALL)
FUNCTION = re.compile(r"^(?:const )?(?:struct )?[\w]+ \**\(\*(\w+)\)\((.*)\)$", re.DOTALL)
MEMBER = re.compile(r"^((?:const )?(?:struct )?(\w+)(?:\s*\*(?:\s?const\b)?)*)\s*(\w+)$")


class Member:
    def __init__(self, text, comment):
        self.text, self.comment = " ".join(text.split()), " ".join(comment.split())
        function, plain = FUNCTION.match(self.text), MEMBER.match(self.text)
        self.is_function = bool(function)
        self.known = bool(function or plain)
        self.name = function.group(1) if function else plain.group(3) if plain else self.text
        self.type = plain.group(2) if plain else ""
        self.num_stars = 0 if function or not plain else plain.group(1).count("*")
        self.is_pointer = self.is_function or self.num_stars > 0


def split_members(body):
    """Members with their comments: the one before, and the one on the same line after."""
    members, before, rest = [], "", body
    while rest.strip():
        rest = rest.lstrip()
        comment = COMMENT.match(rest)
        if comment:
            text = comment.group(0)[2:-2].replace("\n   *", "\n").strip()
            trailing = members and "\n" not in body[:len(body) - len(rest)].rsplit(";", 1)[-1]
            if trailing:
                members[-1].comment = (members[-1].comment + " " + " ".join(text.split())).strip()
            else:
                before = text
            rest = rest[comment.end():]
            continue
        end = rest.index(";")
        members.append(Member(rest[:end], before))
        before, rest = "", rest[end + 1:]
    return members


class Headers:
    """Those of the ABI, and of libstratagem, whose header keeps the same rules but is no part of abi.h."""

    def __init__(self, folder, more=()):
        paths = sorted(pathlib.Path(folder).glob("*.h"))
        self.own = [p.name for p in paths]
        self.texts = {p.name: p.read_text(encoding="utf-8") for p in paths + [pathlib.Path(m) for m in more]}
        self.structs = {}
        for text in self.texts.values():
            for name, body, last in STRUCT.findall(text):
                union = re.search(r"  union \{\n(.*?)\n  \} (\w+);", body, re.DOTALL)
                self.structs[name] = (last, body, split_members(body.replace(union.group(0), "  int64_t as;") if union else body),
                                      split_members(union.group(1)) if union else [])

    def constant(self, name):
        for text in self.texts.values():
            found = re.search(rf"^#define {name} (\d+)u?\b", text, re.MULTILINE)
            if found:
                return int(found.group(1))
        return None

    def size_of(self, member):
        if member.is_pointer:
            return 8
        if member.type in SCALARS:
            return SCALARS[member.type]
        return self.layout(member.type)[1] if member.type in self.structs else None

    def alignment_of(self, type_name):
        if type_name in SCALARS:
            return SCALARS[type_name]
        return max(8 if m.is_pointer else self.alignment_of(m.type) for m in self.structs[type_name][2])

    def layout(self, name):
        """Offsets after each member, and the size; None where a member leaves a gap."""
        ends, offset = [], 0
        for member in self.structs[name][2]:
            size = self.size_of(member)
            if size is None or offset % (8 if member.is_pointer else self.alignment_of(member.type)):
                return ends, None
            offset += size
            ends.append(offset)
        return ends, offset


def upper(name):
    return "STG_" + name[len("stg_"):].upper()


def check_struct(headers, name, problems):
    last, body, members, union = headers.structs[name]
    asserted = re.search(rf"STG_ASSERT_SIZE\({name}, (\d+)\)", "".join(headers.texts.values()))
    ends, size = headers.layout(name) if all(m.known for m in members) else ([], None)
    if last != name:
        problems.append(f"{name}: the typedef is called {last}")
    if not asserted:
        problems.append(f"{name}: has no STG_ASSERT_SIZE")
    if size is None:
        problems.append(f"{name}: has a member that this script can't lay out, or padding")
    elif asserted and int(asserted.group(1)) != size:
        problems.append(f"{name}: asserted {asserted.group(1)} bytes, laid out {size}")
    for member in members + union:
        check_member(headers, name, member, problems)
    check_lone_enumerations(headers, name, problems)
    if name in FIXED:
        return
    if members[0].text != "uint64_t struct_size":
        problems.append(f"{name}: is not in the list of fixed structs and does not begin with uint64_t struct_size")
    smallest = headers.constant(upper(name) + "_MIN_SIZE")
    if smallest is None:
        problems.append(f"{name}: has no {upper(name)}_MIN_SIZE")
    elif smallest not in ends or not 16 <= smallest <= MAX_STRUCT_SIZE_BYTES:
        problems.append(f"{name}: {upper(name)}_MIN_SIZE {smallest} is not the end of one of its members")
    for member, following in zip(members, members[1:]):
        listed = following.name == "num_" + member.name and member.num_stars == 1
        if listed and member.type in headers.structs and member.type not in FIXED:
            problems.append(f"{name}.{member.name}: an array of a growing struct; make it an array of pointers")


def check_member(headers, name, member, problems):
    where = f"{name}.{member.name}"
    if not member.known:
        problems.append(f"{where}: a form of declaration that this script does not know (bitfield, array, several names)")
        return
    if re.search(FORBIDDEN, member.text) or "..." in member.text:
        problems.append(f"{where}: uses a type that may not cross: {member.text}")
    check_enumerations(name, member, where, problems)
    if not member.is_function and not member.num_stars and member.type in headers.structs and member.type not in FIXED:
        problems.append(f"{where}: nests the growing struct {member.type} by value")


def check_enumerations(name, member, where, problems):
    """A parameter is uint32_t; a field is so too, or uint64_t where it stands alone (two of 32 bits would fit as well)."""
    if member.is_function:
        for type_name, parameter in re.findall(r"(\w+) (\w+)[,)]", member.text):
            if parameter in ENUMERATION_NAMES and type_name != "uint32_t":
                problems.append(f"{where}: the enumeration {parameter} is {type_name}; parameters are uint32_t")
    elif (ENUMERATION.search(member.comment) or member.name in ENUMERATION_NAMES) and not member.num_stars:
        if member.name != "flags" and member.type not in ("uint32_t", "uint64_t", "int64_t" if name == "stg_value" else ""):
            problems.append(f"{where}: an enumeration of type {member.type}; it is uint32_t, or uint64_t where it stands alone")


def check_lone_enumerations(headers, name, problems):
    members = headers.structs[name][2]
    for first, second in zip(members, members[1:]):
        wide = [m for m in (first, second) if m.type == "uint64_t" and m.name in ENUMERATION_NAMES]
        if len(wide) == 2:
            problems.append(f"{name}: {first.name} and {second.name} are enumerations side by side; make them uint32_t")


def states_of(tag):
    words = tag.replace(",", "").split()[1:]
    bits = 0
    for word in words:
        bits |= STATE_WORDS.get(word, 0)
    return bits if words else STATE_WORDS["all"]


def check_states(headers, problems):
    """states.h names the slots of stg_strategy_api in order; callers and states are those of the comments."""
    values = {"STG_THREAD_ANY": "any", "STG_THREAD_OWNER": "owner", "STG_THREAD_REPLICA": "replica"}
    text = headers.texts["states.h"]
    rows = re.findall(r"^  X\((\w+), (\w+), (\w+)\)", text, re.MULTILINE)
    slots = [m for m in headers.structs["stg_strategy_api"][2] if m.is_function and m.name != "create"]
    for (row, _, _), slot in zip(rows, slots):
        if row != slot.name:
            problems.append(f"states.h: has {row} where stg_strategy_api has {slot.name}")
            return
    if len(rows) != len(slots):
        problems.append(f"states.h: names {len(rows)} functions, stg_strategy_api has {len(slots)}")
        return
    for (row, caller, states), slot in zip(rows, slots):
        tag = re.search(r"\[([^\]]*)\]$", slot.comment)
        if not tag:
            continue
        if values.get(caller) != tag.group(1).split(",")[0]:
            problems.append(f"states.h: {row} is {caller}, its comment says [{tag.group(1)}]")
        if headers.constant(states) != states_of(tag.group(1)):
            problems.append(f"states.h: {row} is legal in {states}, its comment says [{tag.group(1)}]")


def check_text(headers, problems):
    for name, text in headers.texts.items():
        code = COMMENT.sub(" ", text)
        code = "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))
        code = code.replace("struct_size", "").replace("\\", " ")
        if not text.startswith("/* SPDX-License-Identifier: Apache-2.0\n"):
            problems.append(f"{name}: has no licence line")
        if re.search(r"//", text.replace("://", "")):
            problems.append(f"{name}: has a // comment, which C89 compilers in pedantic builds refuse")
        for found in re.finditer(FORBIDDEN, code):
            problems.append(f"{name}: uses {found.group(0)} outside of comments and macros")
        if "..." in code:
            problems.append(f"{name}: declares a variadic function")
        num_structs = len(re.findall(r"^typedef struct \w+ \{", code, re.MULTILINE))
        if num_structs != len(STRUCT.findall(text)):
            problems.append(f"{name}: a struct is written in a form that this script does not read")


def find_problems(folder, more=()):
    headers, problems = Headers(folder, more), []
    if "stg_strategy_api" not in headers.structs:
        return [f"{folder}: no stg_strategy_api found; is this the folder of the headers?"]
    check_text(headers, problems)
    for name in FIXED - set(headers.structs):
        problems.append(f"{name}: is in the list of fixed structs, but not in the headers")
    for name in headers.structs:
        check_struct(headers, name, problems)
    check_states(headers, problems)
    everything = headers.texts["abi.h"]
    for name in headers.own:
        if name != "abi.h" and f"#include <stratagem/{name}>" not in everything:
            problems.append(f"abi.h: does not include {name}")
    return problems


# One breach per rule: file, what stands there, what is put there, and a word of the complaint that must come.
BREACHES = [
    ("call.h", "  uint64_t struct_size;\n", "", "does not begin with uint64_t struct_size"),
    ("call.h", "#define STG_CALL_MIN_SIZE 40u\n", "", "has no STG_CALL_MIN_SIZE"),
    ("call.h", "STG_CALL_MIN_SIZE 40u", "STG_CALL_MIN_SIZE 36u", "not the end of one of its members"),
    ("call.h", "STG_ASSERT_SIZE(stg_call, 40);", "", "no STG_ASSERT_SIZE"),
    ("call.h", "  uint64_t num_streams;", "  uint64_t num_streams;\n  uint32_t more;", "laid out"),
    ("call.h", "  uint64_t num_streams;", "  uint32_t more;\n  uint64_t num_streams;", "padding"),
    ("call.h", "uint64_t num_streams", "size_t num_streams", "may not cross"),
    ("call.h", "uint64_t num_streams", "unsigned long num_streams", "form of declaration"),
    ("call.h", "uint64_t num_streams", "uint64_t num_streams : 3", "form of declaration"),
    ("error.h", "uint32_t flags;", "bool flags;", "uses bool"),
    ("strategy.h", "[owner, created] */", "[owner, fit] */", "its comment says"),
    ("strategy.h", "[owner, created] */", "[any, created] */", "its comment says"),
    ("strategy.h", "const stg_setup_args *args);", "const stg_setup_args *args, ...);", "variadic"),
    ("strategy.h", "  stg_tree *state; ", "  stg_call state; ", "nests the growing struct"),
    ("states.h", "  X(save, STG_THREAD_OWNER, STG_STATES_MODEL_)                   \\\n", "", "states.h: has load"),
    ("states.h", "X(load, STG_THREAD_OWNER", "X(load, STG_THREAD_ANY", "its comment says"),
    ("plugin.h", "const stg_model_factory *const *models;", "const stg_model_factory *models;", "array of a growing struct"),
    ("strategy.h", "uint32_t op, stg_tree *out);", "uint64_t op, stg_tree *out);", "parameters are uint32_t"),
    ("model.h", "  uint64_t loss_kind;", "  int64_t loss_kind;", "an enumeration of type int64_t"),
    ("strategy.h", "  uint32_t state;             /* one of STG_STATE_* */\n  uint32_t stage; ",
     "  uint64_t state; /* one of STG_STATE_* */\n  uint64_t stage;", "side by side"),
    ("session.h", "  uint64_t struct_size;\n  uint64_t stage;", "  uint64_t stage;", "does not begin with uint64_t struct_size"),
    ("session.h", "  int64_t num_batches;", "  int32_t num_batches;", "padding"),
    ("abi.h", "#include <stratagem/value.h>\n", "", "does not include value.h"),
]


def self_test(folder, more):
    failures = 0
    before = find_problems(folder, more)
    with tempfile.TemporaryDirectory() as temporary:
        for number, (name, old, new, complaint) in enumerate(BREACHES):
            copy = pathlib.Path(temporary) / str(number)
            shutil.copytree(folder, copy / "abi")
            others = [shutil.copy(path, copy) for path in more]
            changed = copy / name if (copy / name).exists() else copy / "abi" / name
            text = changed.read_text(encoding="utf-8")
            changed.write_text(text.replace(old, new, 1), encoding="utf-8")
            problems = [p for p in find_problems(copy / "abi", others) if p not in before]
            if old not in text or not any(complaint in p for p in problems):
                failures += 1
                print(f"not found: {name}: {old.strip()!r} made {new.strip()!r}, expected '{complaint}', got {problems}")
    print(f"{len(BREACHES) - failures} of {len(BREACHES)} breaches were found")
    return failures


def compile_alone(folder, more, compilers):
    folder, failures, count = pathlib.Path(folder), 0, 0
    headers = sorted(folder.glob("*.h")) + [pathlib.Path(m) for m in more]
    for compiler in compilers:
        cxx = "++" in pathlib.Path(compiler).name
        for standard in ("c++17", "c++20") if cxx else ("c99", "c11"):
            for header in headers:
                command = [compiler, f"-std={standard}", "-Wall", "-Wextra", "-Wpedantic", "-Wpadded", "-Werror", "-fsyntax-only",
                           f"-I{folder.parent}", f"-I{header.parent.parent}", "-x", "c++" if cxx else "c", "-"]
                source = f"#include <stratagem/{header.name}>\n" * 2 + "typedef int stg_not_empty;\n"
                result = subprocess.run(command, input=source, text=True, capture_output=True)
                count += 1
                if result.returncode:
                    failures += 1
                    print(" ".join(command), header.name, result.stderr, sep="\n")
    print(f"{count - failures} of {count} compilations succeeded")
    return failures or not count


def states_table(folder):
    """The rows of states.h for people."""
    rows = re.findall(r"^  X\((\w+), STG_THREAD_(\w+), (\w+)\)", (pathlib.Path(folder) / "states.h").read_text(), re.MULTILINE)
    states = ["created", "fit", "evaluate", "modelless", "draining"]
    yield "| function | who | " + " | ".join(states) + " |"
    yield "|---" * (2 + len(states)) + "|"
    for function, who, word in rows:
        mask = STATE_WORDS[re.sub("^STG_STATES?_|_$", "", word).lower()]
        marks = " | ".join("yes" if mask & STATE_WORDS[state] else " " for state in states)
        yield f"| `{function}` | {who.lower()} | {marks} |"


def states_differ(folder, page):
    table = "\n".join(states_table(folder))
    if table in pathlib.Path(page).read_text(encoding="utf-8"):
        print(f"{page} has the table of states.h")
        return False
    print(f"{page} must have this table, which states.h gives:\n{table}")
    return True


def main(arguments):
    if len(arguments) < 2 or arguments[0] not in ("rules", "compile", "states", "self-test"):
        print(__doc__)
        return 2
    if arguments[0] == "states":
        return 1 if states_differ(*arguments[1:]) else 0
    more = [a for a in arguments[2:] if a.endswith(".h")]
    if arguments[0] == "compile":
        return 1 if compile_alone(arguments[1], more, [a for a in arguments[2:] if a not in more]) else 0
    if arguments[0] == "self-test":
        return 1 if self_test(arguments[1], more) else 0
    problems = find_problems(arguments[1], more)
    for problem in problems:
        print(problem)
    print(f"{len(problems)} problems in {arguments[1]}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
