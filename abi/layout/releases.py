# SPDX-License-Identifier: Apache-2.0
"""Kept releases: what of the headers a release has promised, and what today's headers may not do to it (docs/abi.md, B1 to B4).

A release is kept as its headers, abi/layout/<version>/, and as what they promise, abi/layout/<version>.json: sizes, offsets, types,
signatures with their thread tags, constants. No prose: a comment may be put better at any time.
"""
import hashlib
import json
import re

UNFIXED = ("STG_ABI_MINOR",)  # what a minor is there to change


# --- what the headers promise


def signature(item):
    """A function's type and tag, in one line. Names of parameters are no promise: C has calls by place."""
    parameters = ", ".join(p["type"] for p in item["parameters"]) or "void"
    states = f", {' '.join(item['states'])}" if item["states"] else ""
    return f"{item['result']['type']} ({parameters}) [{item['thread']}{states}]"


def field_type(field):
    if field["kind"] == "function":
        return signature(field)
    if field["kind"] == "union":
        return "union {" + "; ".join(f"{m['type']} {m['name']}" for m in field["members"]) + "}"
    return field["type"]


def promises(layout):
    """The promises of what read_headers gave."""
    made = {"abi": layout["abi"], "structs": {}, "functions": {}, "types": {}, "constants": {}, "macros": {}}
    for header in layout["headers"].values():
        for item in header["items"]:
            kind, name = item["kind"], item.get("name")
            if kind == "struct":
                made["structs"][name] = {
                    "growing": item["growing"], "size": item["size"], "alignment": item["alignment"], "min_size": item["min_size"],
                    "fields": [{"name": f["name"], "offset": f["offset"], "size": f["size"], "type": field_type(f)}
                               for f in item["fields"]]}
            elif kind == "function":
                made["functions"][name] = signature(item)
            elif kind in ("function_type", "number_type", "opaque"):
                made["types"][name] = {"function_type": lambda: signature(item), "number_type": lambda: item["type"],
                                       "opaque": lambda: "opaque"}[kind]()
            elif kind == "constants":
                made["constants"].update((c["name"], f"{c['type']} {c['value']}") for c in item["constants"] if c["name"] not in UNFIXED)
            elif kind == "macro":
                made["macros"][name] = "" if item["arguments"] is None else f"({', '.join(item['arguments'])})"
    return made


# --- comparing


def compare(kept, now):
    """([what breaks the kept promises], [what is new]), each with its place."""
    breaks, news = [], []
    version = kept["abi"]
    for name, old in kept["structs"].items():
        if name in now["structs"]:
            compare_struct(version, name, old, now["structs"][name], breaks, news)
    for kind, way_out in (("structs", "keep it"), ("functions", "a changed meaning gets a new function (B3)"),
                          ("types", "keep it, and add another"), ("constants", "a value keeps its number for ever; add a new one (B2)"),
                          ("macros", "programs are written with it; keep it, and add another")):
        for name, old in kept[kind].items():
            if name not in now[kind]:
                breaks.append(f"{name}: is gone; {version} has it: {way_out}")
            elif kind != "structs" and now[kind][name] != old:
                breaks.append(f"{name}: is {now[kind][name] or 'without arguments'}; in {version} {old or 'without arguments'}: {way_out}")
        news += [f"{name}: new" for name in now[kind] if name not in kept[kind]]
    return breaks, news


def compare_struct(version, name, old, new, breaks, news):
    if old["growing"] != new["growing"]:
        breaks.append(f"{name}: is {'growing' if new['growing'] else 'fixed'}; in {version} it isn't, and other structs rely on it (B1)")
    if old["min_size"] != new["min_size"]:
        breaks.append(f"{name}: its _MIN_SIZE is {new['min_size']}; {version} released {old['min_size']}, so callers with that size are "
                      "out there: it never changes (B1)")
    if old["alignment"] != new["alignment"]:
        breaks.append(f"{name}: is aligned to {new['alignment']} bytes; in {version} to {old['alignment']}")
    for index, field in enumerate(old["fields"]):
        place, found = f"{name}.{field['name']}", new["fields"][index] if index < len(new["fields"]) else None
        if found is None or found["name"] != field["name"]:
            breaks.append(f"{place}: {version} has it as member {index}, at offset {field['offset']}; "
                          + (f"there is {found['name']} now" if found else "the struct ends before it now")
                          + ". A field keeps its name and place; new ones go to the end (B1)")
            return  # all that follows is shifted, which needs no telling
        for key in ("offset", "size", "type"):
            if field[key] != found[key]:
                breaks.append(f"{place}: its {key} is {found[key]}; in {version} {field[key]}. Keep it, and append another field (B1, B3)")
    added = [f["name"] for f in new["fields"][len(old["fields"]):]]
    if added and old["growing"]:
        news.append(f"{name}: grows by {', '.join(added)}, from {old['size']} to {new['size']} bytes")
    elif added:
        breaks.append(f"{name}: has {', '.join(added)} at its end; a fixed struct never changes, since others hold it by value (B1). "
                      "Make a struct of its own")
    elif old["size"] != new["size"]:
        breaks.append(f"{name}: has {new['size']} bytes; in {version} {old['size']}")


# --- the files


def text_of(release):
    """As JSON, a promise per line, so that a difference can be read."""
    def lines(value, indent):
        if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()) or isinstance(value, dict) and indent == "  ":
            parts = [f"{indent}{json.dumps(k)}: {lines(v, indent + ' ')}" for k, v in value.items()]
            return "{\n" + ",\n".join(parts) + "\n" + indent[1:] + "}"
        if isinstance(value, list):
            return "[\n" + ",\n".join(indent + json.dumps(v) for v in value) + "]"
        return json.dumps(value, ensure_ascii=False)
    return lines(release, " ") + "\n"


def digest_of(release):
    """Eight letters that stand for the promises; whether they are frozen is no part of it."""
    promised = {key: value for key, value in release.items() if key != "frozen"}
    return hashlib.sha256(json.dumps(promised, sort_keys=True).encode()).hexdigest()[:8]


def line_for(release):
    return f"- `{release['abi']}` `{digest_of(release)}`: "


def has_line(page, release):
    """Whether docs/versioning.md says why this layout is what it is, in at least a few words."""
    return re.search(rf"^{re.escape(line_for(release))}\S.{{9,}}", page, re.MULTILINE) is not None
