# SPDX-License-Identifier: Apache-2.0
#
# Value trees and Julia values:
#   nothing, Bool, integers, reals     none, bool, int64, double
#   strings and symbols, Bytes         string, bytes
#   arrays of numbers                  tensors (tensors.jl)
#   other vectors, tuples              list, tuple
#   named tuples, dicts                dict; a Dict has no order of its own: its keys are sorted. Read back as TreeDict

"Bytes as such; a `Vector{UInt8}` is a tensor."
struct Bytes
    data::Vector{UInt8}
end
Base.:(==)(a::Bytes, b::Bytes) = a.data == b.data

# --- to C

# What a tree is made of. `give_tensors`: each tensor is released by its own deleter, since the tree's taker may take them out.
mutable struct Packing
    kept::Vector{Any}
    given::Vector{Ptr{stg_tensor}}
    give_tensors::Bool
    num_nodes::Int
    path::Vector{Union{String,Int}}  # where it is at
end
Packing(give_tensors) = Packing(Any[], Ptr{stg_tensor}[], give_tensors, 0, Union{String,Int}[])

"A tree that is lent to C: while it is preserved, and for one call."
mutable struct LentTree
    tree::stg_tree
    packing::Packing
end
function lend(value)
    packing = Packing(false)
    LentTree(stg_tree(pack(packing, value), C_NULL, C_NULL), packing)
end
pointer_of(tree::LentTree) = Ptr{stg_tree}(pointer_from_objref(tree))

"A tree that C owns from now on, with all that is in it."
function give_tree(value)
    packing = Packing(true)
    root = try
        pack(packing, value)
    catch
        foreach(unroot!, packing.given)
        rethrow()
    end
    stg_tree(root, TREE_RELEASE[], root!(packing))
end

const TREE_RELEASE = Ref{Ptr{Cvoid}}(C_NULL)
function tree_release(self::Ptr{stg_tree})
    tree = unsafe_load(self)
    release_tensors(tree.root)
    unroot!(tree.owner)
    unsafe_store!(self, zero_of(stg_tree))
    nothing
end
function release_tensors(value::stg_value)
    if value.type == STG_TENSOR
        release_tensor(Ptr{stg_tensor}(value.as))
    elseif value.type in (STG_LIST, STG_TUPLE)
        foreach(i -> release_tensors(unsafe_load(Ptr{stg_value}(value.as), i)), 1:value.count)
    elseif value.type == STG_DICT
        foreach(i -> release_tensors(unsafe_load(Ptr{stg_entry}(value.as), i).value), 1:value.count)
    end
    nothing
end
init_trees() = (TREE_RELEASE[] = @callback stg_tree_release tree_release; nothing)

function refuse(packing, what)
    place = isempty(packing.path) ? "the value" : "the value at $(join(packing.path, "/"))"
    throw(ArgumentError("$place $what"))
end

function keep_data(packing, object)
    push!(packing.kept, object)
    UInt64(UInt(pointer(object)))
end

function pack(packing::Packing, value)::stg_value
    length(packing.path) < STG_MAX_TREE_DEPTH || refuse(packing, "lies deeper than $STG_MAX_TREE_DEPTH levels, or contains itself")
    (packing.num_nodes += 1) <= STG_MAX_TREE_NODES || refuse(packing, "is one too many: a tree has at most $STG_MAX_TREE_NODES")
    pack_value(packing, value)
end
function pack_at(packing, key, value)
    push!(packing.path, key)
    packed = pack(packing, value)
    pop!(packing.path)
    packed
end

pack_value(_, ::Nothing) = stg_value(STG_NONE, 0, 0)
pack_value(_, x::Bool) = stg_value(STG_BOOL, 0, x)
pack_value(_, x::Float64) = stg_value(STG_DOUBLE, 0, reinterpret(UInt64, x))
pack_value(_, x::Union{Float16,Float32,Rational}) = stg_value(STG_DOUBLE, 0, reinterpret(UInt64, Float64(x)))
function pack_value(packing, x::Integer)
    typemin(Int64) <= x <= typemax(Int64) || refuse(packing, "is $x, which does not fit into 64 bits")
    stg_value(STG_INT64, 0, reinterpret(UInt64, Int64(x)))
end
pack_value(packing, x::Symbol) = pack_value(packing, String(x))
function pack_value(packing, x::AbstractString)
    text = String(x)
    isvalid(text) || refuse(packing, "is a text that is not UTF-8")
    stg_value(STG_STRING, sizeof(text), keep_data(packing, text))
end
pack_value(packing, x::Bytes) = stg_value(STG_BYTES, length(x.data), keep_data(packing, x.data))

function pack_value(packing, array::AbstractArray{T}) where {T}
    if dtype_of(T) === nothing
        T <: Number && isconcretetype(T) &&
            refuse(packing, "is an array of $T, for which there is no dtype; there are: $(join(map(first, DTYPES), ", "))")
        ndims(array) == 1 || refuse(packing, "is an array of $T with $(ndims(array)) dimensions: neither a tensor nor a list")
        return pack_items(packing, STG_LIST, array)
    end
    if packing.give_tensors
        tensor = give(array)
        push!(packing.given, tensor)
    else
        handle = TensorHandle(array)
        push!(packing.kept, handle)
        tensor = pointer_of(handle)
    end
    stg_value(STG_TENSOR, 0, UInt64(UInt(tensor)))
end
pack_value(packing, items::Tuple) = pack_items(packing, STG_TUPLE, items)

function pack_items(packing, type, items)
    values = Vector{stg_value}(undef, length(items))
    for (i, item) in enumerate(items)
        values[i] = pack_at(packing, i, item)
    end
    stg_value(type, length(values), keep_data(packing, values))
end

pack_value(packing, dict::NamedTuple) = pack_entries(packing, map(String, keys(dict)), values(dict))
pack_value(packing, dict::TreeDict) = pack_entries(packing, dict.names, dict.values)
function pack_value(packing, dict::AbstractDict)
    all(key -> key isa Union{AbstractString,Symbol}, keys(dict)) || refuse(packing, "is a dict with keys that are not strings")
    sorted = sort!([String(string(key)) => value for (key, value) in dict]; by = first)
    pack_entries(packing, map(first, sorted), map(last, sorted))
end
function pack_entries(packing, names, values)
    entries = Vector{stg_entry}(undef, length(names))
    for (i, (name, value)) in enumerate(zip(names, values))
        push!(packing.kept, name)
        entries[i] = stg_entry(borrow(name), pack_at(packing, name, value))
    end
    stg_value(STG_DICT, length(entries), keep_data(packing, entries))
end
pack_value(packing, x) = refuse(packing, "is a $(typeof(x)), which can't cross; see ?Stratagem for what can")

# --- from C

"The Julia value of a tree that is ours: its tensors are taken out, or copied, the rest is released. The caller's struct is empty then."
function take_tree!(tree::Ptr{stg_tree}; copies::Bool = false)
    content = unsafe_load(tree)
    owned = content.release != C_NULL
    try
        return unpack(Ptr{stg_value}(tree), owned && !copies)
    finally
        owned && @slot stg_tree_release content.release tree
        unsafe_store!(tree, zero_of(stg_tree))
    end
end
take_tree!(tree::Ref{stg_tree}; options...) = GC.@preserve tree take_tree!(Base.unsafe_convert(Ptr{stg_tree}, tree); options...)

"The Julia value at `p`. `owned`: its tensors are moved to Julia, and their slots emptied; else they are copied."
function unpack(p::Ptr{stg_value}, owned::Bool)
    value = unsafe_load(p)
    type = value.type
    if type == STG_TENSOR
        owned && unsafe_store!(p, zero_of(stg_value))
        return adopt(Ptr{stg_tensor}(value.as); owned = owned)
    elseif type == STG_DOUBLE
        return reinterpret(Float64, value.as)
    elseif type == STG_INT64
        return reinterpret(Int64, value.as)
    elseif type == STG_BOOL
        return value.as != 0
    elseif type == STG_NONE
        return nothing
    elseif type == STG_STRING
        return String(stg_string(Ptr{UInt8}(value.as), value.count))
    elseif type == STG_BYTES
        return Bytes(copy(unsafe_wrap(Array, Ptr{UInt8}(value.as), value.count)))
    elseif type == STG_DICT
        dict = TreeDict()
        for i in 1:value.count
            entry = Ptr{stg_entry}(value.as) + (i - 1) * sizeof(stg_entry)
            dict[String(unsafe_load(entry).key)] = unpack(Ptr{stg_value}(entry + fieldoffset(stg_entry, 2)), owned)
        end
        return dict
    elseif type == STG_LIST || type == STG_TUPLE
        items = Any[unpack(Ptr{stg_value}(value.as) + (i - 1) * sizeof(stg_value), owned) for i in 1:value.count]
        return type == STG_LIST ? items : Tuple(items)
    end
    throw(StratagemError(STG_UNIMPLEMENTED, "a value of type $type can't be read in Julia"))
end
