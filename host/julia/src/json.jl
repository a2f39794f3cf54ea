# SPDX-License-Identifier: Apache-2.0
#
# JSON, as far as configs, results and events need it: Julia has none in its standard library, and this package needs no other one.

module JSON

import ..TreeDict

"Julia's value of a JSON text; objects as TreeDict."
function parse(text::AbstractString)
    reader = Reader(String(text), 1)
    value = read_value(reader)
    peek_token(reader) == '\0' || fail(reader, "something behind the end")
    value
end

mutable struct Reader
    text::String
    place::Int
end
fail(reader, what) = throw(ArgumentError("JSON: $what at byte $(reader.place)"))
current(reader) = reader.place <= ncodeunits(reader.text) ? reader.text[reader.place] : '\0'
function advance!(reader)
    reader.place <= ncodeunits(reader.text) || fail(reader, "the end of the text")
    c = current(reader)
    reader.place = nextind(reader.text, reader.place)
    c
end
function peek_token(reader)
    while current(reader) in (' ', '\t', '\n', '\r')
        advance!(reader)
    end
    current(reader)
end
expect!(reader, c) = peek_token(reader) == c ? advance!(reader) : fail(reader, "$(repr(current(reader))) where $(repr(c)) must be")

const WORDS = ["true" => true, "false" => false, "null" => nothing, "NaN" => NaN, "-Infinity" => -Inf, "Infinity" => Inf]
const NUMBER = r"-?[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]+)?"

function read_value(reader)
    c = peek_token(reader)
    c == '{' && return read_object(reader)
    c == '[' && return read_array(reader)
    c == '"' && return read_string(reader)
    rest = SubString(reader.text, min(reader.place, ncodeunits(reader.text) + 1))
    for (word, value) in WORDS
        startswith(rest, word) && (reader.place += ncodeunits(word); return value)
    end
    found = match(NUMBER, rest)
    found !== nothing && found.offset == 1 || fail(reader, "$(repr(c)) begins no value")
    reader.place += ncodeunits(found.match)
    found[1] === nothing && found[2] === nothing || return Base.parse(Float64, found.match)
    something(tryparse(Int64, found.match), tryparse(Float64, found.match))
end

function read_items(read_item, reader, open, close)
    expect!(reader, open)
    peek_token(reader) == close && (advance!(reader); return)
    while true
        read_item()
        peek_token(reader) == close && (advance!(reader); return)
        expect!(reader, ',')
    end
end
function read_array(reader)
    items = Any[]
    read_items(() -> push!(items, read_value(reader)), reader, '[', ']')
    items
end
function read_object(reader)
    object = TreeDict()
    read_items(reader, '{', '}') do
        peek_token(reader)
        key = read_string(reader)
        expect!(reader, ':')
        object[key] = read_value(reader)
    end
    object
end

const ESCAPES = Dict('n' => '\n', 't' => '\t', 'r' => '\r', 'b' => '\b', 'f' => '\f', '"' => '"', '\\' => '\\', '/' => '/')
function read_string(reader)
    expect!(reader, '"')
    out = IOBuffer()
    while true
        c = advance!(reader)
        c == '"' && return String(take!(out))
        if c != '\\'
            print(out, c)
            continue
        end
        c = advance!(reader)
        c == 'u' ? print(out, read_unicode(reader)) :
        haskey(ESCAPES, c) ? print(out, ESCAPES[c]) : fail(reader, "the escape \\$c")
    end
end
function read_hexadecimal(reader)
    digits = String([advance!(reader) for _ in 1:4])
    code = tryparse(UInt32, digits; base = 16)
    code === nothing && fail(reader, "\\u$digits")
    code
end
function read_unicode(reader)
    code = read_hexadecimal(reader)
    if 0xd800 <= code < 0xdc00  # the first half of a pair
        advance!(reader) == '\\' && advance!(reader) == 'u' || fail(reader, "half a pair")
        code = 0x10000 + (code - 0xd800) << 10 + (read_hexadecimal(reader) - 0xdc00)
    end
    Char(code)
end

"The JSON text of a Julia value."
text(value) = sprint(write_value, value)

write_value(io, x::Union{Bool,Integer}) = print(io, x)
# A whole number is written as one: Julia makes floats of the integers in ["steps" => 5, "lr" => 0.1].
function write_value(io, x::AbstractFloat)
    isfinite(x) || throw(ArgumentError("JSON has no number $x"))
    isinteger(x) && abs(x) < 2^53 ? print(io, Int64(x)) : print(io, Float64(x))
end
write_value(io, ::Nothing) = print(io, "null")
write_value(io, x::Symbol) = write_value(io, String(x))
function write_value(io, x::AbstractString)
    print(io, '"')
    for c in x
        c in ('"', '\\') ? print(io, '\\', c) : c < ' ' ? print(io, "\\u", string(UInt32(c); base = 16, pad = 4)) : print(io, c)
    end
    print(io, '"')
end
function write_value(io, items::Union{AbstractVector,Tuple})
    print(io, '[')
    for (i, item) in enumerate(items)
        i > 1 && print(io, ',')
        write_value(io, item)
    end
    print(io, ']')
end
function write_value(io, object::Union{AbstractDict,NamedTuple})
    print(io, '{')
    for (i, (key, value)) in enumerate(pairs(object))
        i > 1 && print(io, ',')
        write_value(io, string(key))
        print(io, ':')
        write_value(io, value)
    end
    print(io, '}')
end
write_value(_, x) = throw(ArgumentError("a $(typeof(x)) has no form in JSON"))

end

"A config as text: a text stays, dicts and named tuples are written."
config_text(config::AbstractString) = String(config)
config_text(config) = JSON.text(config)
