# SPDX-License-Identifier: Apache-2.0
"""The layout as reference pages: one per header, from the text of its comments, with layouts, signatures, threads and owners."""
import re

MADE = "<!-- Made from the headers by `./run layout`; not to be edited. -->"


def pages(layout):
    """{file name: text}."""
    linked = links(layout)
    made = {f"{stem(name)}.md": page(name, header, linked) for name, header in layout["headers"].items() if header["items"]}
    made["README.md"] = index(layout)
    return made


def stem(name):
    return name.split("/")[-1][:-len(".h")]


def links(layout):
    return {item["name"]: f"{stem(name)}.md#{item['name']}" for name, header in layout["headers"].items()
            for item in header["items"] if item["kind"] in ("struct", "opaque", "number_type", "function_type")}


def index(layout):
    rows = [f"| [{stem(name)}.h]({stem(name)}.md) | {cell(header['doc'].split('. ')[0].split('.' + chr(10))[0]).rstrip('.')} |"
            for name, header in layout["headers"].items() if header["items"]]
    return "\n".join([MADE, f"# Reference of the headers: ABI {layout['abi']}", "",
                      "What the headers say, one page each, in the order in which they include each other. Words, kinds of struct, thread tags and "
                      "the defaults of ownership are explained in [common.h](common.md).", "",
                      "| header | what |", "|---|---|", *rows]) + "\n"


def prose(text):
    """A comment's text. Lines that are set in (tables, lists, diagrams) stay as they are."""
    lines, fenced = [], False
    for line in text.split("\n"):
        set_in = line.startswith("  ")
        if set_in != fenced:
            lines += ["```text"] if set_in and lines and not lines[-1] else ["", "```text"] if set_in else ["```", ""]
            fenced = set_in
        lines.append(line if set_in else escape(line))
    return lines + ["```"] * fenced


def escape(text):
    """`<` and the `*` behind a name's beginning are no markup; *word* is."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(p if p.startswith("`") else re.sub(r"(?<=_)\*", r"\\*", p.replace("<", "&lt;")) for p in parts)


def cell(text):
    return escape(" ".join(text.split())).replace("|", "\\|")


def page(name, header, linked):
    lines = [MADE, f"# {name}", "", *prose(header["doc"])]
    for item in header["items"]:
        lines += [""] + {"section": section, "constants": constants, "macro": macro, "struct": struct, "opaque": opaque, "number_type": opaque,
                         "function": function, "function_type": function}[item["kind"]](item, linked)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip("\n") + "\n"


def titled(doc):
    """A comment's text; "---- steps ----" at its top is a heading."""
    title = re.match(r"-+ (.*?) -+$", doc, re.MULTILINE)
    return prose(doc) if not title else [f"## {title.group(1)[0].upper()}{title.group(1)[1:]}", *prose(doc[title.end():])]


def section(item, _):
    return titled(item["doc"])


def constants(item, _):
    rows = [f"| `{c['name']}` | {'`' + chr(34) + c['value'] + chr(34) + '`' if c['type'] == 'text' else c['value']} | {cell(c['doc'])} |"
            for c in item["constants"]]
    return [*(titled(item["doc"]) + [""] if item["doc"] else []), "| constant | value | meaning |", "|---|---|---|", *rows]


def macro(item, _):
    parameters = f"({', '.join(item['arguments'])})" if item["arguments"] is not None else ""
    return [f"**`{item['name']}{parameters}`**", "", *prose(item["doc"])] if item["doc"] else []


def opaque(item, _):
    what = f"A number, `{item['type']}`." if "type" in item else "Opaque: only its maker knows what is in it."
    return [f"### {item['name']}", "", what, *(["", *prose(item["doc"])] if item["doc"] else [])]


def type_cell(text, linked):
    base = text.replace("const ", "").split(" ")[0].split("*")[0]
    return f"[`{text}`]({linked[base]})" if base in linked else f"`{text}`"


def struct(item, linked):
    kind = f"Growing, {item['size']} bytes, at least {item['min_size']}." if item["growing"] else f"Fixed, {item['size']} bytes."
    lines = [f"### {item['name']}", "", kind, "", *prose(item["doc"]), "", "| offset | field | type | meaning |", "|---|---|---|---|"]
    for field in item["fields"]:
        if field["kind"] == "function":
            lines.append(f"| {field['offset']} | [`{field['name']}`](#{item['name']}{field['name']}) | function | |")
            continue
        kind = "union" if field["kind"] == "union" else type_cell(field["type"], linked)
        lines.append(f"| {field['offset']} | `{field['name']}` | {kind} | {cell(told(field))} |")
        for member in field.get("members", []):
            lines.append(f"| {field['offset']} | `{field['name']}.{member['name']}` | {type_cell(member['type'], linked)} | {cell(told(member))} |")
    for field in item["fields"]:
        if "section" in field:
            lines += ["", *prose(field["section"])]
        if field["kind"] == "function":
            lines += ["", *signature(f"{item['name']}.{field['name']}", field, f"(*{field['name']})")]
    return lines


def told(field):
    """A field's text; what its struct says of all pointers is added where the field says nothing of it."""
    own, said = " ".join(field["doc"].split()), field.get("ownership", "")
    return own if not said or said in own else f"{own} ({said})".strip()


def function(item, _):
    return signature(item["name"], item, f"(*{item['name']})" if item["kind"] == "function_type" else item["name"])


def declared(type_name, name):
    return type_name + ("" if type_name.endswith("*") else " ") + name


def signature(title, item, name):
    parameters = ", ".join(declared(p["type"], p["name"]) for p in item["parameters"]) or "void"
    states = f", in the states {', '.join(item['states'])}" if item["states"] else ""
    text = re.sub(r"\s*\[[a-z, ]*\]$", "", item["doc"])
    lines = [f"#### {title}", "", "```c", f"{declared(item['result']['type'], name)}({parameters});", "```", "", *prose(text), "",
             f"- thread: {item['thread']}{states}"]
    for pointer in [*item["parameters"], {"name": "", **item["result"]}]:
        if "ownership" in pointer:
            lines.append(f"- {'`' + pointer['name'] + '`' if pointer['name'] else 'result'}: {cell(pointer['ownership'])}")
    return lines
