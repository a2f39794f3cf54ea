# SPDX-License-Identifier: Apache-2.0
#
# How calls cross. The types of every call and callback come from SIGNATURES (generated.jl), so none is written twice.

# From Julia 1.12 on, other threads may collect garbage while a call is in C; before, they wait until it is back. Callbacks are safe in both.
const CCALL_OPTIONS = VERSION >= v"1.12" ? Any[:(gc_safe = true)] : Any[]

function ccall_expression(name, target, arguments)
    result, types = signature(name)
    length(arguments) == length(types) || error("$name takes $(length(types)) arguments, not $(length(arguments))")
    call = Expr(:call, Expr(:$, target), (Expr(:(::), argument, type) for (argument, type) in zip(arguments, types))...)
    esc(Expr(:macrocall, Symbol("@ccall"), LineNumberNode(@__LINE__, Symbol(@__FILE__)), CCALL_OPTIONS..., Expr(:(::), call, result)))
end

signature(name::Symbol) = haskey(SIGNATURES, name) ? SIGNATURES[name] : error("there is no function $name in the headers")

"`@slot stg_strategy_api_barrier pointer arguments...`: calls a function of a table; `pointer` is the slot's content."
macro slot(name, pointer, arguments...)
    ccall_expression(name, pointer, arguments)
end

"`@library stg_session_open arguments...`: calls a function of libstratagem."
macro library(name, arguments...)
    ccall_expression(name, :(library_symbol($(QuoteNode(name)))), arguments)
end

"`@callback stg_model_step f`: a C pointer to a Julia function."
macro callback(name, f)
    result, types = signature(name)
    esc(:(@cfunction($f, $result, ($(types...),))))
end

# --- structs

zero_of(::Type{T}) where {T<:Number} = zero(T)
zero_of(::Type{Ptr{T}}) where {T} = Ptr{T}(0)
@generated zero_of(::Type{T}) where {T} = :(T($((:(zero_of($F)) for F in fieldtypes(T))...)))

"A struct of the ABI from the fields that are given; the others are zero, `struct_size` is set."
@generated function make(::Type{T}, given::NamedTuple{names} = NamedTuple()) where {T,names}
    unknown = setdiff(names, fieldnames(T))
    isempty(unknown) || error("$T has no $(join(unknown, ", "))")
    fields = map(fieldnames(T), fieldtypes(T)) do name, F
        name in names ? :(convert($F, given.$name)) : name === :struct_size ? sizeof(T) : :(zero_of($F))
    end
    :(T($(fields...)))
end

# min_size(stg_plugin): the smallest size ever released of a growing struct.
for (T, _, fields) in LAYOUT
    fields[1][1] === :struct_size && @eval min_size(::Type{$T}) = $(Symbol("STG_", uppercase(string(nameof(T))[5:end]), "_MIN_SIZE"))
end

"A growing struct that somebody else made: what both know of it, the rest zero."
function read_growing(p::Ptr{T}) where {T}
    p == C_NULL && throw(StratagemError(STG_INVALID_ARGUMENT, "a null pointer where a $T must be"))
    size_bytes = unsafe_load(Ptr{UInt64}(p))
    min_size(T) <= size_bytes <= STG_MAX_STRUCT_SIZE_BYTES ||
        throw(StratagemError(STG_INVALID_ARGUMENT, "a $T says that it has $size_bytes bytes; this package knows $(min_size(T)) " *
                                                   "to $STG_MAX_STRUCT_SIZE_BYTES"))
    known = Ref(zero_of(T))
    GC.@preserve known unsafe_copyto!(Ptr{UInt8}(Base.unsafe_convert(Ptr{T}, known)), Ptr{UInt8}(p), min(size_bytes, sizeof(T)))
    known[]
end

"Writes one field of a struct in C's memory."
function store!(p::Ptr{T}, field::Symbol, value) where {T}
    index = Base.fieldindex(T, field)
    unsafe_store!(Ptr{fieldtype(T, index)}(p + fieldoffset(T, index)), convert(fieldtype(T, index), value))
end

# --- text

"A Julia string as C's, valid while `text` is preserved."
borrow(text::String) = stg_string(pointer(text), sizeof(text))
Base.String(text::stg_string) = text.size_bytes == 0 ? "" : unsafe_string(text.data, text.size_bytes)
