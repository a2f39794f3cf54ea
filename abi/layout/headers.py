# SPDX-License-Identifier: Apache-2.0
"""The headers as data: read by libclang, with their comments, as a dictionary.

libclang knows types, sizes and offsets. It does not know which comment belongs to what, so that is settled here, by lines: a comment
belongs to what begins on the next line, or to what it follows on its own line. One that does neither is a section of its own, so
that no text is lost. What this file can't express is a problem that names the place, never something left out.

Nothing of the machine enters: the target is fixed, and <stddef.h> and <stdint.h>, all that the headers need, are put in their place.
"""
import os
import pathlib
import re
import tempfile

from clang import cindex

from statements import DEFAULTS, STATES, THREADS, ownership_of, ownership_of_field, read_defaults, tag_of

ARGUMENTS = ["-x", "c", "-std=c11", "-nostdinc", "-target", "x86_64-unknown-linux-gnu", "-Wno-unused", "-ferror-limit=0"]
STDINT = "".join(f"typedef {c} {name};\n" for c, name in [
    ("signed char", "int8_t"), ("short", "int16_t"), ("int", "int32_t"), ("long", "int64_t"), ("unsigned char", "uint8_t"),
    ("unsigned short", "uint16_t"), ("unsigned", "uint32_t"), ("unsigned long", "uint64_t")])
STDDEF = "#define offsetof(type, member) __builtin_offsetof(type, member)\n#define NULL ((void *)0)\n"
NUMBERS = ("int8_t", "int16_t", "int32_t", "int64_t", "uint8_t", "uint16_t", "uint32_t", "uint64_t", "double", "char")
MACRO_TYPES = {"int": "int32_t", "unsigned int": "uint32_t", "long": "int64_t", "unsigned long": "uint64_t",
               "long long": "int64_t", "unsigned long long": "uint64_t"}
Kind, Type = cindex.CursorKind, cindex.TypeKind


class Problem(Exception):
    """One place that can't be taken as it is: where, what, and the way out."""


def clean(comment):
    """A comment's text: without its stars, and with its lines, since some are tables."""
    lines = [re.sub(r"^ *\* ?", "", line) if number else line for number, line in enumerate(comment[2:-2].split("\n"))]
    return "\n".join(line.rstrip() for line in lines).strip("\n").strip() if len(lines) == 1 else "\n".join(
        line.rstrip() for line in [lines[0].strip(), *lines[1:]]).strip()


class Comment:
    """One comment: its text, and its lines."""

    def __init__(self, token, lines):
        extent = token.extent
        self.first, self.last, self.text = extent.start.line, extent.end.line, clean(token.spelling)
        self.alone = not lines[self.first - 1][:extent.start.column - 1].strip()


class Comments:
    """The comments of one header, handed out once each."""

    def __init__(self, unit, path):
        self.lines = path.read_text(encoding="utf-8").split("\n")
        file = cindex.File.from_name(unit, str(path))
        whole = cindex.SourceRange.from_locations(cindex.SourceLocation.from_offset(unit, file, 0),
                                                  cindex.SourceLocation.from_offset(unit, file, path.stat().st_size))
        self.left = [Comment(t, self.lines) for t in unit.get_tokens(extent=whole) if t.kind == cindex.TokenKind.COMMENT]
        self.file_doc = self.take(lambda c: c.first == 1)

    def take(self, fits):
        for comment in self.left:
            if fits(comment):
                self.left.remove(comment)
                return comment.text
        return ""

    def before(self, line):
        return self.take(lambda c: c.last == line - 1 and c.alone)

    def after(self, line):
        return self.take(lambda c: c.first == line and not c.alone)

    def sections_before(self, line):
        """Those that stand alone before a line and belong to nothing."""
        found = [c for c in self.left if c.last < line and c.alone]
        self.left = [c for c in self.left if c not in found]
        return [c.text for c in found]


class Reader:
    def __init__(self, headers):
        """`headers`: {name as included: path}."""
        self.headers = {name: pathlib.Path(path).resolve() for name, path in headers.items()}
        self.folders = sorted({str(path.parents[name.count("/")]) for name, path in self.headers.items()})
        self.problems = []
        self.constants = {}
        self.number_types = {}

    # --- problems

    def problem(self, cursor, what, way_out):
        self.problems.append(f"{self.name_of(cursor.location)}:{cursor.location.line}: {what}. {way_out}")

    def name_of(self, location):
        path = pathlib.Path(location.file.name).resolve() if location.file else None
        return next((name for name, own in self.headers.items() if own == path), str(path))

    # --- parsing

    def order(self):
        """The headers, each after those that it includes."""
        ordered = []

        def visit(name):
            for included in re.findall(r"^#include <([^>]+)>", self.headers[name].read_text(encoding="utf-8"), re.MULTILINE):
                if included in self.headers and included not in ordered:
                    visit(included)
            if name not in ordered:
                ordered.append(name)

        for name in sorted(self.headers):
            visit(name)
        return ordered

    def parse(self, scratch, text):
        for name, stub in (("stdint.h", STDINT), ("stddef.h", STDDEF), ("main.c", text)):
            (pathlib.Path(scratch) / name).write_text("#pragma once\n" * name.endswith(".h") + stub)
        return cindex.Index.create().parse(
            os.path.join(scratch, "main.c"), [*ARGUMENTS, "-isystem", scratch, *(f"-I{folder}" for folder in self.folders)],
            options=cindex.TranslationUnit.PARSE_DETAILED_PROCESSING_RECORD)

    def read(self):
        includes = "".join(f"#include <{name}>\n" for name in self.order())
        with tempfile.TemporaryDirectory() as scratch:
            unit = self.parse(scratch, includes)
            errors = [d for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error]
            for error in errors:
                self.problems.append(f"{self.name_of(error.location)}:{error.location.line}: {error.spelling}. Make it compile as C11")
            if errors:
                return None
            cursors = {name: [] for name in self.headers}
            for cursor in unit.cursor.get_children():
                name = self.name_of(cursor.location) if cursor.location.file else None
                if name in cursors and cursor.kind not in (Kind.MACRO_INSTANTIATION, Kind.INCLUSION_DIRECTIVE):
                    cursors[name].append(cursor)
            self.evaluate_macros(scratch, includes, [c for found in cursors.values() for c in found
                                                     if c.kind == Kind.MACRO_DEFINITION])
            comments = {name: Comments(unit, path) for name, path in self.headers.items()}
            self.defaults = read_defaults("\n\n".join(c.file_doc for name, c in comments.items() if name.endswith("/common.h")))
            if set(DEFAULTS) - set(self.defaults):
                self.problems.append(f"common.h: its table of defaults lacks {', '.join(sorted(set(DEFAULTS) - set(self.defaults)))}. "
                                     "A row is the key as here, two spaces or more, and the statement")
            return {name: self.header(name, comments[name], cursors[name]) for name in self.order()}

    def evaluate_macros(self, scratch, includes, macros):
        """What the object-like macros are worth, as the compiler sees it."""
        names = sorted({m.spelling for m in macros})
        first = includes.count("\n") + 1
        lines = [f"enum {{ value_of_{n} = ({n}) }};\nextern __typeof__({n}) type_of_{n};\n" for n in names]
        unit = self.parse(scratch, includes + "".join(lines))
        bad = {d.location.line for d in unit.diagnostics if d.severity >= cindex.Diagnostic.Error}
        values, types = {}, {}
        for cursor in unit.cursor.get_children():
            if cursor.kind == Kind.ENUM_DECL:
                values.update((c.spelling, c.enum_value) for c in cursor.get_children())
            elif cursor.kind == Kind.VAR_DECL:
                types[cursor.spelling] = cursor.type.get_canonical()
        for number, name in enumerate(names):
            line, kind = first + 2 * number, types.get(f"type_of_{name}")
            if line + 1 in bad or kind is None:
                continue
            if kind.kind == Type.CONSTANTARRAY:
                text = "".join(t.spelling[1:-1] for m in macros if m.spelling == name for t in list(m.get_tokens())[1:])
                self.constants[name] = {"name": name, "type": "text", "value": text}
            elif line not in bad and kind.spelling in MACRO_TYPES:
                self.constants[name] = {"name": name, "type": MACRO_TYPES[kind.spelling], "value": values[f"value_of_{name}"]}

    # --- one header

    def header(self, name, comments, cursors):
        self.comments, self.items, structs = comments, [], {}
        cursors.sort(key=lambda c: c.extent.start.line)
        for cursor in cursors:
            if re.match(r"STRATAGEM_\w+_H$|stg_assert_", cursor.spelling):
                continue
            try:
                item = self.item(cursor, structs)
            except Problem as problem:
                where, what, way_out = problem.args
                self.problem(where, what, way_out)
                continue
            if item:
                self.items.append(item)
        self.items += [{"kind": "section", "doc": text} for text in comments.sections_before(len(comments.lines) + 1)]
        for comment in comments.left:
            self.problems.append(f"{name}:{comment.first}: a comment that belongs to nothing. "
                                 "Put it on the line before what it is about, or behind it on the same line")
        return {"doc": comments.file_doc.split("\n\n", 1)[-1] if "SPDX" in comments.file_doc[:30] else comments.file_doc,
                "items": self.items}

    def item(self, cursor, structs):
        if cursor.kind == Kind.MACRO_DEFINITION:
            return self.macro(cursor, structs)
        if cursor.kind == Kind.STRUCT_DECL:
            if not cursor.is_definition():
                return None  # told by its typedef, or by the definition that follows
            structs[cursor.spelling] = self.struct(cursor)
            return structs[cursor.spelling]
        if cursor.kind == Kind.TYPEDEF_DECL:
            return self.typedef(cursor)
        if cursor.kind == Kind.FUNCTION_DECL:
            if cursor.is_definition():
                raise Problem(cursor, f"{cursor.spelling} has a body", "A header declares; put the body into a source file")
            doc = self.doc(cursor)
            return {"kind": "function", "name": cursor.spelling, **self.signature(cursor, cursor.type, cursor.spelling, doc, ""), "doc": doc}
        if cursor.kind == Kind.ENUM_DECL:
            doc = self.doc(cursor)
            return {"kind": "constants", "doc": doc, "constants": [
                {"name": c.spelling, "type": "int32_t", "value": c.enum_value, "doc": self.comments.after(c.extent.end.line)}
                for c in cursor.get_children()]}
        raise Problem(cursor, f"{cursor.spelling or cursor.kind.name.lower()}: a form of declaration that the layout can't express",
                      "Headers have structs, functions, pointers to functions and constants")

    def doc(self, cursor):
        """The comments of a declaration: the one before it, and the one behind it."""
        before = self.comments.before(cursor.extent.start.line)
        after = self.comments.after(cursor.extent.end.line)
        self.items += [{"kind": "section", "doc": text} for text in self.comments.sections_before(cursor.extent.start.line)]
        return "\n".join(filter(None, [before, after]))

    # --- constants

    def macro(self, cursor, structs):
        tokens = list(cursor.get_tokens())
        constant = self.constants.get(cursor.spelling)
        if constant is None:
            doc = self.doc(cursor)
            call = len(tokens) > 1 and tokens[1].spelling == "(" and tokens[1].extent.start.offset == tokens[0].extent.end.offset
            names = [t.spelling for t in tokens[2:[t.spelling for t in tokens].index(")")] if t.spelling != ","] if call else None
            return {"kind": "macro", "name": cursor.spelling, "arguments": names, "doc": doc}
        owner = next((s for s in structs.values() if cursor.spelling == upper(s["name"]) + "_MIN_SIZE"), None)
        if owner:
            self.doc(cursor)
            owner["min_size"] = constant["value"]
            return None
        before = self.comments.before(cursor.extent.start.line)
        self.items += [{"kind": "section", "doc": text} for text in self.comments.sections_before(cursor.extent.start.line)]
        constant = {**constant, "doc": self.comments.after(cursor.extent.end.line)}
        last = self.items[-1] if self.items else {}
        if last.get("kind") == "constants" and not before and cursor.extent.start.line <= self.last_constant_line + 1:
            last["constants"].append(constant)
            group = None
        else:
            group = {"kind": "constants", "doc": before, "constants": [constant]}
        # A comment behind a constant may go on over several lines.
        self.last_constant_line = cursor.extent.end.line + constant["doc"].count("\n")
        return group

    # --- types

    def type_of(self, cursor, kind, place):
        """A type as it is written, and what kind of thing it is or points to."""
        spelling = re.sub(r"\bstruct ", "", kind.spelling)
        stars, base, const = 0, kind, False
        while base.get_canonical().kind == Type.POINTER:
            if self.signature_type(base):
                if base.kind == Type.POINTER:
                    raise Problem(cursor, f"{place}: a pointer to a function without a name", "Give it a typedef, with its thread tag")
                return {"type": spelling, "base": spelling, "stars": 0, "const": False, "of": "function"}
            stars, base = stars + 1, base.get_canonical().get_pointee() if base.kind != Type.POINTER else base.get_pointee()
            const = base.is_const_qualified()
        name = re.sub(r"\b(struct|const) ", "", base.spelling)
        canonical = base.get_canonical()
        if canonical.kind == Type.RECORD and canonical.get_declaration().kind == Kind.STRUCT_DECL:
            of = "struct" if canonical.get_declaration().get_definition() else "opaque"
        elif canonical.kind == Type.VOID:
            of = "void"
        elif name in NUMBERS or name in self.number_types:
            of = "number"
        else:
            raise Problem(cursor, f"{place}: the type {spelling} can't be expressed in the layout",
                          f"What crosses is {', '.join(NUMBERS)}, pointers, and structs of these (docs/abi.md, B2)")
        return {"type": spelling, "base": name, "stars": stars, "const": const, "of": of}

    @staticmethod
    def signature_type(kind):
        """The function type that a pointer points to, if it does."""
        pointee = kind.get_canonical().get_pointee()
        return pointee if pointee.kind in (Type.FUNCTIONPROTO, Type.FUNCTIONNOPROTO) else None

    def typedef(self, cursor):
        kind = cursor.underlying_typedef_type
        if kind.get_canonical().kind == Type.POINTER and self.signature_type(kind):
            doc = self.doc(cursor)
            return {"kind": "function_type", "name": cursor.spelling,
                    **self.signature(cursor, kind.get_pointee(), cursor.spelling, doc, ""), "doc": doc}
        declared = kind.get_canonical().get_declaration()
        if declared.kind == Kind.STRUCT_DECL and declared.spelling == cursor.spelling:
            return None if declared.get_definition() else {"kind": "opaque", "name": cursor.spelling, "doc": self.doc(cursor)}
        if kind.spelling in NUMBERS:
            self.number_types[cursor.spelling] = kind.spelling
            return {"kind": "number_type", "name": cursor.spelling, "type": kind.spelling, "doc": self.doc(cursor)}
        raise Problem(cursor, f"{cursor.spelling}: a typedef of {kind.spelling}, which the layout can't express",
                      "Typedefs name their own struct, a number, or a pointer to a function")

    def signature(self, cursor, kind, place, doc, table_doc):
        """Tag, result and parameters of a function, with what is said about each pointer."""
        bare = kind.get_canonical()
        if bare.kind == Type.FUNCTIONNOPROTO or bare.is_function_variadic():
            raise Problem(cursor, f"{place}: is variadic or has no prototype", "Give it fixed parameters, or (void)")
        tag = tag_of(doc)
        if not tag:
            self.problem(cursor, f"{place}: its comment does not end in a thread tag",
                         f"End it in [{'], ['.join(THREADS)}], with states behind a comma where they matter: {', '.join(STATES)}")
        names = [c for c in cursor.get_children() if c.kind == Kind.PARM_DECL]
        parameters = []
        for name in names:
            if not name.spelling:
                raise Problem(cursor, f"{place}: a parameter without a name", "Name it, so that comments can")
            parameter = self.type_of(cursor, name.type, f"{place}, parameter {name.spelling}")
            parameters.append(self.pointer(cursor, name.spelling, parameter, place, doc, table_doc))
        result = self.type_of(cursor, kind.get_result(), f"{place}, result")
        return {"thread": tag[0] if tag else "", "states": tag[1] if tag else [],
                "result": self.pointer(cursor, "", result, place, doc, table_doc), "parameters": parameters}

    def pointer(self, cursor, name, of_type, place, doc, table_doc):
        """A parameter or, without a name, a result."""
        entry = {**({"name": name} if name else {}), "type": of_type["type"]}
        if of_type["stars"]:
            said = ownership_of({"name": name, **of_type}, doc, table_doc, self.comments.file_doc, self.defaults)
            if not said:
                what = f"parameter `{name}`" if name else "result"
                self.problem(cursor, f"{place}: nobody says who owns the {what} ({of_type['type']}), or how long it lives",
                             f"Write a sentence with {f'`{name}`' if name else 'the words: the result'} and one of borrowed, moved, owned, "
                             "consumed, released, valid, lives into its comment, that of its table, or that of the header")
            entry["ownership"] = said or ""
        return entry

    # --- structs

    def struct(self, cursor):
        doc, name = self.doc(cursor), cursor.spelling
        struct = {"kind": "struct", "name": name, "size": cursor.type.get_size(), "alignment": cursor.type.get_align(),
                  "growing": False, "min_size": None, "fields": [], "doc": doc}
        for child in cursor.get_children():
            if child.kind == Kind.FIELD_DECL:
                struct["fields"].append(self.field(cursor, child, doc))
            elif child.kind == Kind.UNION_DECL:
                if not any(c.kind == Kind.FIELD_DECL and c.type.get_canonical().get_declaration() == child for c in cursor.get_children()):
                    raise Problem(child, f"{name}: a union without a name", "Give the member a name")
            else:
                raise Problem(child, f"{name}: a member that the layout can't express", "Declare it outside of the struct")
        struct["growing"] = bool(struct["fields"]) and struct["fields"][0]["name"] == "struct_size"
        return struct

    def field(self, owner, cursor, struct_doc):
        place = f"{owner.spelling}.{cursor.spelling}"
        before = self.comments.before(cursor.extent.start.line)
        sections = self.comments.sections_before(cursor.extent.start.line)
        if cursor.is_bitfield():
            raise Problem(cursor, f"{place}: a bitfield, which the layout can't express", "Use a number with named flags")
        bits = owner.type.get_offset(cursor.spelling)
        field = {"name": cursor.spelling, "offset": bits // 8, "size": cursor.type.get_size()}
        if sections:
            field["section"] = "\n\n".join(sections)
        declared = cursor.type.get_canonical().get_declaration()
        if declared.kind == Kind.UNION_DECL:
            field.update({"kind": "union", "members": self.union(declared, place, struct_doc)})
        signature = cursor.type.get_pointee() if cursor.type.kind == Type.POINTER and self.signature_type(cursor.type) else None
        doc = "\n".join(filter(None, [before, self.comments.after(cursor.extent.end.line)]))
        if signature:
            field.update({"kind": "function", **self.signature(cursor, signature, place, doc, struct_doc)})
        elif declared.kind != Kind.UNION_DECL:
            field.update({"kind": "value", **self.pointer_field(cursor, place, doc, struct_doc)})
        field["doc"] = doc
        return field

    def union(self, declared, place, struct_doc):
        members = []
        for cursor in declared.get_children():
            if cursor.kind != Kind.FIELD_DECL or cursor.is_bitfield() or cursor.type.get_size() != 8 or declared.type.get_size() != 8:
                raise Problem(cursor, f"{place}: a union that the layout can't express",
                              "Its members are numbers and pointers of 8 bytes each, so that every language can hold it as one number")
            doc = "\n".join(filter(None, [self.comments.before(cursor.extent.start.line), self.comments.after(cursor.extent.end.line)]))
            member = self.pointer_field(cursor, f"{place}.{cursor.spelling}", doc, struct_doc)
            if self.type_of(cursor, cursor.type, place)["of"] == "struct" and "*" not in member["type"]:
                raise Problem(cursor, f"{place}: a union that the layout can't express", "Its members are numbers and pointers")
            members.append({"name": cursor.spelling, **member, "doc": doc})
        return members

    def pointer_field(self, cursor, place, doc, struct_doc):
        of_type = self.type_of(cursor, cursor.type, place)
        entry = {"type": of_type["type"]}
        if of_type["stars"]:
            said = ownership_of_field(doc, struct_doc)
            if not said:
                self.problem(cursor, f"{place}: a pointer ({of_type['type']}) without a lifetime or an owner",
                             "Say in its comment: lifetime: ..., borrowed, moved, or owned by whom; or of all pointers in that of the struct")
            entry["ownership"] = said or ""
        return entry


def upper(name):
    return "STG_" + name[len("stg_"):].upper()


def read_headers(headers):
    """({the layout}, [problems]) of {name as included: path}."""
    reader = Reader(headers)
    contents = reader.read()
    for header in (contents or {}).values():
        for item in header["items"]:
            if item["kind"] == "struct" and item["growing"] and item["min_size"] is None:
                reader.problems.append(f"{item['name']}: a growing struct without {upper(item['name'])}_MIN_SIZE. Define it behind the struct")
    version = ".".join(str(reader.constants.get(f"STG_ABI_{part}", {}).get("value", 0)) for part in ("MAJOR", "MINOR"))
    return {"abi": version, "headers": contents or {}}, reader.problems
