# SPDX-License-Identifier: Apache-2.0
"""The layout as Julia declarations, in syntax that Julia 1.5 has: struct mirrors, constants, a table of offsets, signatures.

A slot of a function table is a Ptr{Cvoid}. Its signature stands in SIGNATURES, from which host/julia/src/calls.jl makes the call and the
callback, so that no signature is written by hand.
"""
NUMBERS = {"int8_t": "Int8", "int16_t": "Int16", "int32_t": "Int32", "int64_t": "Int64", "uint8_t": "UInt8", "uint16_t": "UInt16",
           "uint32_t": "UInt32", "uint64_t": "UInt64", "double": "Float64", "char": "UInt8", "void": "Cvoid"}
RESERVED = {"baremodule", "begin", "break", "catch", "const", "continue", "do", "else", "elseif", "end", "export", "false", "finally",
            "for", "function", "global", "if", "import", "let", "local", "macro", "module", "quote", "return", "struct", "true", "try",
            "using", "while"}
HEAD = """# SPDX-License-Identifier: Apache-2.0
#
# The ABI's structs, constants and signatures for Julia. Made from the headers by `./run layout`; not to be edited.
#
# Structs are isbits and laid out as in C: check_layout compares each offset with the compiler's. A slot of a function table is a
# Ptr{Cvoid}; its signature is in SIGNATURES, under table_slot. A union is the UInt64 of its bits."""
TAIL = '''# Compares what Julia made of the structs with what the C compiler made of them.
function check_layout()
    for (type, size_bytes, fields) in LAYOUT
        isbitstype(type) || error("Stratagem: $type is not isbits")
        sizeof(type) == size_bytes || error("Stratagem: $type has $(sizeof(type)) bytes; the C header says $size_bytes")
        fieldcount(type) == length(fields) ||
            error("Stratagem: $type has $(fieldcount(type)) fields; the C header says $(length(fields))")
        for (index, (name, offset_bytes)) in enumerate(fields)
            (fieldname(type, index) === name && fieldoffset(type, index) == offset_bytes) || error(
                "Stratagem: field $index of $type is $(fieldname(type, index)) at $(fieldoffset(type, index)); " *
                "the C header says $name at $offset_bytes")
        end
    end
end
'''


class Declarations:
    def __init__(self):
        self.lines, self.structs, self.signatures, self.declared = [HEAD], [], [], set()

    def comment(self, text, indent=""):
        return [f"{indent}# {line}".rstrip() for line in text.split("\n")] if text else []

    def type_of(self, text):
        """A type of C, as it is written in the layout, in Julia's words. What is declared further down is a Ptr{Cvoid}."""
        words = text.replace("const", "").replace("*", " * ").split()
        base, stars = words[0], words.count("*")
        julia = NUMBERS.get(base, base if base in self.declared else "Cvoid" if stars else "Ptr{Cvoid}")
        return "Ptr{" * stars + julia + "}" * stars

    def signature(self, name, function):
        types = [self.type_of(p["type"]) for p in function["parameters"]]
        result = self.type_of(function["result"]["type"])
        if any(line.startswith(f"    :{name} =>") for line in self.signatures):
            raise SystemExit(f"two functions would be called {name} in Julia; rename one of them in the headers")
        self.signatures.append(f"    :{name} => ({result}, ({', '.join(types)}{',' if len(types) == 1 else ''})),")
        named = ", ".join(f"{p['name']}::{t}" for p, t in zip(function["parameters"], types))
        return f"({named}) -> {result} [{', '.join(filter(None, [function['thread'], ' '.join(function['states'])]))}]"

    def constants(self, item):
        for constant in item["constants"]:
            value = f'"{constant["value"]}"' if constant["type"] == "text" else f"{NUMBERS[constant['type']]}({constant['value']})"
            doc = " ".join(constant["doc"].split())
            self.lines.append(f"const {constant['name']} = {value}" + (f" # {doc}" if doc else ""))

    def opaque(self, item):
        self.declared.add(item["name"])
        self.lines.append(f"mutable struct {item['name']} end")

    def number_type(self, item):
        self.declared.add(item["name"])
        self.lines.append(f"const {item['name']} = {NUMBERS[item['type']]}")

    def function(self, item):
        self.lines.append(f"# {item['name']}{self.signature(item['name'], item)}")

    function_type = function

    def struct(self, item):
        name = item["name"]
        self.declared.add(name)  # a struct may point to itself
        self.lines.append(f"struct {name}")
        offsets = []
        for field in item["fields"]:
            own = field["name"] + ("_" if field["name"] in RESERVED else "")
            offsets.append(f"(:{own}, {field['offset']})")
            if field["kind"] == "function":
                self.lines.append(f"    {own}::Ptr{{Cvoid}} # {self.signature(name + '_' + field['name'], field)}")
            elif field["kind"] == "union":
                members = ", ".join(f"{m['name']}::{self.type_of(m['type'])}" for m in field["members"])
                self.lines.append(f"    {own}::UInt64 # one of {members}")
            else:
                doc = " ".join(field["doc"].split())
                self.lines.append(f"    {own}::{self.type_of(field['type'])}" + (f" # {doc}" if doc else ""))
        self.lines.append("end")
        if item["growing"]:
            self.lines.append(f"const STG_{name[len('stg_'):].upper()}_MIN_SIZE = UInt32({item['min_size']})")
        self.structs.append(f"    ({name}, {item['size']}, ({', '.join(offsets)}{',' if len(offsets) == 1 else ''})),")

    def header(self, name, header):
        self.lines += ["", f"# --- {name}"]
        for item in header["items"]:
            if item["kind"] in ("section", "macro"):
                continue
            self.lines += ["", *self.comment(item["doc"])]
            getattr(self, item["kind"])(item)


def declarations(layout):
    made = Declarations()
    for name, header in layout["headers"].items():
        made.header(name, header)
    return "\n".join([*made.lines, "", "# Each struct with its size and the offsets of its fields, in bytes.", "const LAYOUT = (",
                      *made.structs, ")", "", "# Result and arguments of each function.", "const SIGNATURES = Dict{Symbol,Tuple{Any,Tuple}}(",
                      *made.signatures, ")", "", TAIL])
