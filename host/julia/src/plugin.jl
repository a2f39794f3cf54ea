# SPDX-License-Identifier: Apache-2.0
#
# Opening a plugin. A library is never closed again: what it made may live on.

struct StrategyFactory
    name::String
    summary::String
    options_schema::String
    device_kinds::Vector{Symbol}
    capabilities::UInt64
    api::stg_strategy_api
end

struct ModelFactory
    name::String
    summary::String
    options_schema::String
    create::Ptr{Cvoid}
end

"""
    Plugin(path)

Opens a plugin file. libstratagem checks it before the loader maps it: that it is whole, its note, who can write to it, and its LibTorch against one that
is there already.
"""
struct Plugin
    path::String
    name::String
    version::String
    strategies::Vector{StrategyFactory}
    models::Vector{ModelFactory}
end

function Plugin(file::AbstractString)
    path, table = String(file), Ref(Ptr{stg_plugin}(0))
    release_pending()
    GC.@preserve path check(@library stg_load_plugin borrow(path) table)
    plugin = read_growing(table[])
    factories(first, count) = [unsafe_load(first, i) for i in 1:count]
    Plugin(path, String(plugin.name), String(plugin.version),
           [StrategyFactory(read_growing(Ptr{stg_strategy_factory}(p))) for p in factories(plugin.strategies, plugin.num_strategies)],
           [ModelFactory(read_growing(Ptr{stg_model_factory}(p))) for p in factories(plugin.models, plugin.num_models)])
end

function StrategyFactory(factory::stg_strategy_factory)
    kinds = [Device(stg_device(unsafe_load(factory.device_kinds, i), 0)).kind for i in 1:factory.num_device_kinds]
    StrategyFactory(String(factory.name), String(factory.summary), String(factory.options_schema), kinds, factory.capabilities,
                    read_growing(Ptr{stg_strategy_api}(factory.api)))
end
ModelFactory(factory::stg_model_factory) =
    ModelFactory(String(factory.name), String(factory.summary), String(factory.options_schema), factory.create)

Base.show(io::IO, plugin::Plugin) = print(io, "Plugin(\"", plugin.name, "\" ", plugin.version, ", strategies: ",
                                          join(map(f -> f.name, plugin.strategies), ", "), ", models: ",
                                          join(map(f -> f.name, plugin.models), ", "), ")")

function find_factory(factories, plugin::Plugin, name, kind)
    found = findfirst(factory -> factory.name == name, factories)
    found === nothing || return factories[found]
    throw(StratagemError(STG_NOT_FOUND, "$(plugin.path) offers no $kind \"$name\"; it offers: $(join(map(f -> f.name, factories), ", "))"))
end

# --- a library's model

"A model that a library made: `LibraryModel(plugin, \"fashion_cnn\", (channels = 8,))`."
mutable struct LibraryModel
    table::Ptr{stg_model}
end

function LibraryModel(plugin::Plugin, name::AbstractString, options = NamedTuple())
    factory = find_factory(plugin.models, plugin, name, "model")
    text = config_text(options)
    release_pending()
    table = Ref(Ptr{stg_model}(0))
    GC.@preserve text table check(@slot stg_model_factory_create factory.create borrow(text) C_NULL Base.unsafe_convert(Ptr{Ptr{stg_model}}, table))
    model = LibraryModel(table[])
    release_later(() -> release_model(table[]), model)
    model
end

function release_model(table::Ptr{stg_model})
    model = read_growing(table)
    model.release == C_NULL || @slot stg_model_release model.release model.self
    nothing
end
