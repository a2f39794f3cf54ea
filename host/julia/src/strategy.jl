# SPDX-License-Identifier: Apache-2.0
#
# A strategy instance: its life, and how each call of it is guarded. The calls themselves are in steps.jl.

"""
    Strategy(plugin, name; config = (accelerator = "cpu", devices = 2), caller_thread_only = true, log = nothing)

An instance of a plugin's strategy. `config` is JSON, a dict or a named tuple: accelerator, devices, precision, optimizer, seed, options.

With `caller_thread_only` its replicas run one after the other on the thread that calls, and so do all callbacks into Julia: models written in
Julia and `log(level, message)` need it. Without it, replicas run on threads of their own.

One task at a time may call it; `abort` may come from any. `destroy` ends it, or a later call does after it has become garbage.
"""
mutable struct Strategy
    api::stg_strategy_api
    self::Ptr{stg_strategy}
    name::String
    caller_thread_only::Bool
    is_lent::Bool              # a session's: not ours to destroy
    busy::Threads.Atomic{Int}  # 1: an [owner] call is going on
    ending::ReentrantLock      # held by [any] calls, and by destroy
    thrown::Vector{Exception}  # by callbacks that have no error to return: told by the call that it happened in
end

function Strategy(plugin::Plugin, name::AbstractString; config = NamedTuple(), caller_thread_only::Bool = true, log = nothing)
    factory = find_factory(plugin.strategies, plugin, name, "strategy")
    log === nothing || caller_thread_only ||
        throw(ArgumentError("log would be called on threads that Julia doesn't know: use caller_thread_only = true"))
    has_slot(factory.api.create, name, :create)
    text = config_text(config)
    thrown = Exception[]
    host = log === nothing ? nothing : HostServices(log, thrown)
    args = make(stg_create_args, (config_json = borrow(text), host = host === nothing ? C_NULL : pointer_of(host),
                                  flags = caller_thread_only ? STG_CREATE_CALLER_THREAD_ONLY : 0))
    out = Ref(Ptr{stg_strategy}(0))
    release_pending()
    GC.@preserve text host check(@slot stg_strategy_api_create factory.api.create Ref(args) out)
    strategy = Strategy(factory.api, out[], name, caller_thread_only, false, Threads.Atomic{Int}(0), ReentrantLock(), thrown)
    finalizer(queue_destroy, strategy)
    strategy
end

# Not release_later: one that was destroyed has nothing to release.
function queue_destroy(strategy::Strategy)
    api, self = strategy.api, strategy.self
    self == C_NULL && return nothing
    if trylock(PENDING_LOCK)
        push!(PENDING, () -> @slot stg_strategy_api_destroy api.destroy self)
        unlock(PENDING_LOCK)
    else
        finalizer(queue_destroy, strategy)
    end
    nothing
end

Base.isopen(strategy::Strategy) = strategy.self != C_NULL
Base.show(io::IO, strategy::Strategy) = print(io, "Strategy(\"", strategy.name, "\"", isopen(strategy) ? ")" : ", ended)")

"Ends an instance; what it returned stays valid. Once is enough, more does no harm."
function destroy(strategy::Strategy)
    strategy.is_lent && throw(StratagemError(STG_FAILED_PRECONDITION, "this strategy is a session's; close the session"))
    Threads.atomic_cas!(strategy.busy, 0, 1) == 0 || is_busy(strategy)
    lock(strategy.ending) do
        self, strategy.self = strategy.self, C_NULL
        self == C_NULL || @slot stg_strategy_api_destroy strategy.api.destroy self
    end
    strategy.busy[] = 0
    release_pending()
end

# --- calls

is_busy(strategy) = throw(StratagemError(STG_FAILED_PRECONDITION, "strategy $(strategy.name) is inside a call, of another task or around this one"))
is_ended(strategy) = throw(StratagemError(
    STG_FAILED_PRECONDITION, strategy.is_lent ? "this strategy was lent by a session that has gone on: ask the session again" : "this strategy is destroyed"))
has_slot(slot, name, what) = slot == C_NULL ? throw(StratagemError(STG_UNIMPLEMENTED, "strategy $name has no $what")) : nothing

# raw(strategy, Val(:barrier), ...) calls a slot.
for slot in fieldnames(stg_strategy_api)[2:end]
    slot in (:create, :destroy) && continue
    name = Symbol(:stg_strategy_api_, slot)
    arguments = [Symbol(:argument, i) for i in 2:length(SIGNATURES[name][2])]
    @eval @inline raw(strategy::Strategy, ::Val{$(QuoteNode(slot))}, $(arguments...)) =
        @slot $name strategy.api.$slot strategy.self $(arguments...)
end

"A call of which there is one at a time. Memory that its arguments point to must be preserved by the caller."
@inline function owner(strategy::Strategy, slot::Val{name}, arguments...) where {name}
    has_slot(getfield(strategy.api, name), strategy.name, name)
    Threads.atomic_cas!(strategy.busy, 0, 1) == 0 || is_busy(strategy)
    if strategy.self == C_NULL
        strategy.busy[] = 0
        is_ended(strategy)
    end
    release_pending()
    error = raw(strategy, slot, arguments...)
    strategy.busy[] = 0
    check(error, strategy.thrown)
end

"A call that may come from any task at any time."
function from_any(strategy::Strategy, slot::Val{name}, arguments...) where {name}
    has_slot(getfield(strategy.api, name), strategy.name, name)
    lock(strategy.ending) do
        strategy.self == C_NULL && is_ended(strategy)
        result = raw(strategy, slot, arguments...)
        result isa Ptr{stg_error} && check(result)
        nothing
    end
end

"When a call must be back: `timeout` in seconds, nothing for never."
function deadline(timeout)
    timeout === nothing && return Ptr{stg_call}(C_NULL)
    timeout > 0 || throw(ArgumentError("a timeout is a number of seconds above 0, not $timeout"))
    Ref(make(stg_call, (deadline_ns = time_ns() + round(UInt64, 1e9 * timeout),)))
end

# --- services for the plugin

# Its first field is what C sees.
mutable struct HostServices
    table::stg_host
    log::Any
    thrown::Vector{Exception}
    count::Threads.Atomic{Int}
end
const HOST_SLOTS = Ref(zero_of(stg_host))
function HostServices(log, thrown)
    host = HostServices(HOST_SLOTS[], log, thrown, Threads.Atomic{Int}(0))
    table = host.table
    host.table = stg_host(table.struct_size, pointer_from_objref(host), (getfield(table, i) for i in 3:fieldcount(stg_host))...)
    host
end
pointer_of(host::HostServices) = Ptr{stg_host}(pointer_from_objref(host))

function host_log(self::Ptr{Cvoid}, level::UInt32, message::stg_string, ::Ptr{stg_tree})
    host = unsafe_pointer_to_objref(self)::HostServices
    kept(() -> host.log(LOG_LEVELS[level], String(message)), host.thrown)
end
const LOG_LEVELS = [:debug, :info, :warning, :error]

function init_strategies()
    HOST_SLOTS[] = make(stg_host, (retain = (@callback stg_host_retain counted_retain), release = (@callback stg_host_release counted_release),
                                   log = (@callback stg_host_log host_log)))
    nothing
end
