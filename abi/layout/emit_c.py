# SPDX-License-Identifier: Apache-2.0
"""The layout as asserts in C: sizes, offsets and constants, for every compiler that builds us."""


def asserts(layout):
    lines = [
        "/* SPDX-License-Identifier: Apache-2.0",
        " *",
        f" * The layout of ABI {layout['abi']} as asserts: compiles where structs and constants are what libclang found.",
        " * Made from the headers by `./run layout`; not to be edited.",
        " */",
        *(f"#include <{name}>" for name in sorted(layout["headers"])),
        "",
        "#define SIZE(type, size_bytes) STG_ASSERT(sizeof(type) == (size_bytes), layout_size_of_##type)",
        "#define FIELD(type, name, offset_bytes, size_bytes) \\",
        "  STG_ASSERT(offsetof(type, name) == (offset_bytes) && sizeof(((type *)0)->name) == (size_bytes), layout_of_##type##_##name)",
        "#define VALUE(constant, value) STG_ASSERT((constant) == (value), layout_value_of_##constant)",
        "#define TEXT(constant, text) STG_ASSERT(sizeof(constant) == sizeof(text), layout_text_of_##constant)",
    ]
    for header in layout["headers"].values():
        for item in header["items"]:
            lines += {"struct": struct, "constants": constants}.get(item["kind"], lambda _: [])(item)
    return "\n".join(lines) + "\n"


def struct(item):
    minimum = [f"VALUE(STG_{item['name'][len('stg_'):].upper()}_MIN_SIZE, {item['min_size']}u);"] if item["growing"] else []
    return ["", f"SIZE({item['name']}, {item['size']});", *minimum,
            *(f"FIELD({item['name']}, {f['name']}, {f['offset']}, {f['size']});" for f in item["fields"])]


def constants(item):
    lines = [""]
    for constant in item["constants"]:
        if constant["type"] == "text":
            lines.append(f"TEXT({constant['name']}, \"{constant['value']}\");")
        else:
            lines.append(f"VALUE({constant['name']}, {constant['value']}{'u' if constant['type'].startswith('u') else ''});")
    return lines
