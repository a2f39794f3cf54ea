# SPDX-License-Identifier: Apache-2.0
"""The layout as ctypes declarations for Python: constants, structs, function types, and what libstratagem exports.

A pointer to a struct or a number is a POINTER, one to text, void or an opaque type a c_void_p. A function's result that points is a
c_void_p, too: ctypes takes no other one from a callback, and makes no object for it.
"""
import keyword

NUMBERS = {"int8_t": "c_int8", "int16_t": "c_int16", "int32_t": "c_int32", "int64_t": "c_int64", "uint8_t": "c_uint8",
           "uint16_t": "c_uint16", "uint32_t": "c_uint32", "uint64_t": "c_uint64", "double": "c_double"}
HEAD = '''# SPDX-License-Identifier: Apache-2.0
"""The ABI's constants, structs and function types for ctypes. Made from the headers by `./run layout`; not to be edited.

The layout is compared with the C compiler's when this is imported. A union is anonymous: its members are the struct's.
"""
from ctypes import CFUNCTYPE, POINTER, Structure, Union, c_double, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, sizeof
'''
TAIL = '''
for _struct, (_size_bytes, _offsets) in LAYOUT.items():
    _found = {name: getattr(_struct, name).offset for name in _offsets}
    if sizeof(_struct) != _size_bytes or _found != _offsets:
        raise ImportError(f"{_struct.__name__} has {sizeof(_struct)} bytes here, and fields at {_found}; "
                          f"the C headers say {_size_bytes} bytes, and {_offsets}")
'''


class Declarations:
    def __init__(self):
        self.constants, self.classes, self.fields, self.layout, self.functions = [], [], [], [], []
        self.structs, self.numbers = set(), dict(NUMBERS)

    def type_of(self, text):
        """A type of C, as it is written in the layout, in the words of ctypes."""
        words = text.replace("const", "").replace("*", " * ").split()
        base, stars = words[0], words.count("*")
        python = base if base in self.structs else self.numbers.get(base)
        if python is None:  # void, char, an opaque type
            python, stars = ("c_void_p", stars - 1) if stars else ("None", 0)
        return "POINTER(" * stars + python + ")" * stars

    def function_of(self, function, kind="CFUNCTYPE"):
        result = self.type_of(function["result"]["type"])
        arguments = ["c_void_p" if "*" in function["result"]["type"] else result,
                     *(self.type_of(p["type"]) for p in function["parameters"])]
        return f"{kind}({', '.join(arguments)})"

    def field(self, struct, field):
        name = field["name"]
        if field["kind"] == "function":
            return f'    ("{name}", {self.function_of(field)}),'
        if field["kind"] == "union":
            members = ", ".join(f'("{m["name"]}", {self.type_of(m["type"])})' for m in field["members"])
            self.fields.append(f"_{struct}_{name}._fields_ = [{members}]")
            return f'    ("{self.own(name)}", _{struct}_{name}),'
        return f'    ("{name}", {self.type_of(field["type"])}),'

    @staticmethod
    def own(name):
        return f"{name}_" if keyword.iskeyword(name) else name

    def struct_class(self, item):
        for union in (f for f in item["fields"] if f["kind"] == "union"):
            self.classes += ["", "", f"class _{item['name']}_{union['name']}(Union):", f'    """What {item["name"]} holds: one of these."""']
        summary = item["doc"].split("\n\n")[0].replace("\\", "\\\\").split("\n")
        self.classes += ["", "", f"class {item['name']}(Structure):"]
        rest = [f"    {line}".rstrip() for line in summary[1:]]
        self.classes += [f'    """{summary[0]}', *rest, '    """'] if rest else [f'    """{summary[0]}"""']

    def struct_fields(self, item):
        name = item["name"]
        unions = [self.own(f["name"]) for f in item["fields"] if f["kind"] == "union"]
        lines = [self.field(name, field) for field in item["fields"]]
        if unions:
            self.fields.append(f"{name}._anonymous_ = {tuple(unions)!r}")
        self.fields += [f"{name}._fields_ = [", *lines, "]"]
        if item["growing"]:
            self.constants.append(f"STG_{name[len('stg_'):].upper()}_MIN_SIZE = {item['min_size']}")
        offsets = ", ".join(f'"{self.own(f["name"])}": {f["offset"]}' for f in item["fields"])
        self.layout.append(f"    {name}: ({item['size']}, {{{offsets}}}),")

    def add_constants(self, item):
        for constant in item["constants"]:
            doc = " ".join(constant["doc"].split())
            self.constants.append(f"{constant['name']} = {constant['value']!r}" + (f"  # {doc}" if doc else ""))


def declarations(layout):
    made = Declarations()
    items = [item for header in layout["headers"].values() for item in header["items"]]
    of_kind = lambda kind: [item for item in items if item["kind"] == kind]  # noqa: E731
    made.structs.update(item["name"] for item in of_kind("struct"))
    made.numbers.update((item["name"], NUMBERS[item["type"]]) for item in of_kind("number_type"))
    for item in of_kind("constants"):
        made.add_constants(item)
    for item in of_kind("struct"):
        made.struct_class(item)
        made.struct_fields(item)
    types = [f"{item['name']} = {made.function_of(item)}" for item in of_kind("function_type")]
    exported = [f'    "{item["name"]}": {made.function_of(item)},' for item in of_kind("function")]
    return "\n".join([HEAD, *made.constants, *made.classes, "", "", *made.fields, "", *types, "",
                      "# Each struct with its size and the offsets of its fields, in bytes.", "LAYOUT = {", *made.layout, "}", "",
                      "# What libstratagem exports.", "EXPORTED = {", *exported, "}", TAIL])
