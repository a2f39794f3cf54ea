# SPDX-License-Identifier: Apache-2.0

"""
A dict of C's: string keys, in an order that stays. What calls return as dicts; given back, it is as it came.
"""
struct TreeDict <: AbstractDict{String,Any}
    names::Vector{String}
    values::Vector{Any}
    places::Dict{String,Int}
end
TreeDict() = TreeDict(String[], Any[], Dict{String,Int}())
function TreeDict(pairs::Pair...)
    dict = TreeDict()
    foreach(((key, value),) -> dict[string(key)] = value, pairs)
    dict
end

Base.length(dict::TreeDict) = length(dict.names)
Base.iterate(dict::TreeDict, place = 1) = place > length(dict) ? nothing : (dict.names[place] => dict.values[place], place + 1)
Base.haskey(dict::TreeDict, key) = haskey(dict.places, string(key))
Base.get(dict::TreeDict, key, default) = haskey(dict, key) ? dict.values[dict.places[string(key)]] : default
Base.getindex(dict::TreeDict, key) = haskey(dict, key) ? dict.values[dict.places[string(key)]] : throw(KeyError(key))
function Base.setindex!(dict::TreeDict, value, key)
    place = get!(dict.places, string(key)) do
        push!(dict.names, string(key))
        push!(dict.values, nothing)
        length(dict.names)
    end
    dict.values[place] = value
    dict
end
