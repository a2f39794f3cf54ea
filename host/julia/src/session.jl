# SPDX-License-Identifier: Apache-2.0
#
# libstratagem: runs from a config. The library is found by `library!(path)`, by the environment's STRATAGEM_LIBRARY, or under its own name
# where the system looks for libraries.

const LIBRARY = Ref{Ptr{Cvoid}}(C_NULL)

"Names libstratagem's file. Once: a process has one."
function library!(path::AbstractString)
    LIBRARY[] == C_NULL || throw(ArgumentError("libstratagem is loaded already, from $(dlpath(LIBRARY[]))"))
    LIBRARY[] = try
        dlopen(path, RTLD_NOW | RTLD_LOCAL)
    catch exception
        throw(StratagemError(STG_NOT_FOUND, "libstratagem: $(sprint(showerror, exception)). Name its file by Stratagem.library!(path) " *
                                            "or STRATAGEM_LIBRARY"))
    end
    nothing
end
function library_symbol(name::Symbol)
    LIBRARY[] == C_NULL && library!(get(ENV, "STRATAGEM_LIBRARY", "libstratagem.so.$STG_ABI_MAJOR"))
    symbol = dlsym(LIBRARY[], name; throw_error = false)
    symbol === nothing ? throw(StratagemError(STG_UNIMPLEMENTED, "$(dlpath(LIBRARY[])) has no $name")) : symbol
end

"The JSON that a function puts into a tree."
function json_of(call)
    release_pending()
    out = Ref(zero_of(stg_tree))
    check(call(out))
    text = take_tree!(out)
    text === nothing ? nothing : JSON.parse(text)
end

version() = String(@library stg_version)
list_plugins(config_path::String = "") = GC.@preserve config_path json_of(out -> @library stg_list_plugins borrow(config_path) out)
inspect_plugin(path::String) = GC.@preserve path json_of(out -> @library stg_inspect_plugin borrow(path) out)
describe_plugin(path::String) = GC.@preserve path json_of(out -> @library stg_describe_plugin borrow(path) out)
"What a run needs on this machine, what is wrong, and what to do: docs/doctor.md. With a config: its needs, too."
doctor(config_path::String = "") = GC.@preserve config_path json_of(out -> @library stg_doctor borrow(config_path) out)
config_schema() = json_of(out -> @library stg_config_schema out)
options_schema(name::String; is_model::Bool = false) =
    GC.@preserve name json_of(out -> @library stg_options_schema borrow(name) is_model out)

# --- what a session calls

"""
    DataSource(read, name, num_samples)

Data of Julia's: a config's `data.train` names it as `{"source": name, "batch_size": 64}`. `read(rows)`, with rows from 1, gives a batch: arrays whose
last index is the sample.
"""
struct DataSource
    read::Any
    name::String
    num_samples::Int
end

mutable struct SourceHandle
    table::stg_data_source
    source::DataSource
end
function SourceHandle(source::DataSource)
    handle = SourceHandle(zero_of(stg_data_source), source)
    handle.table = make(stg_data_source, (name = borrow(source.name), self = pointer_from_objref(handle), num_samples = source.num_samples,
                                          read = SOURCE_READ[], release = SOURCE_RELEASE[]))
    handle
end
const SOURCE_READ = Ref(C_NULL)
const SOURCE_RELEASE = Ref(C_NULL)
source_read(self::Ptr{Cvoid}, rows::Ptr{Int64}, num_rows::UInt64, batch::Ptr{stg_tree}) = guarded() do
    source = (unsafe_pointer_to_objref(self)::SourceHandle).source
    unsafe_store!(batch, give_tree(source.read([Int(unsafe_load(rows, i)) + 1 for i in 1:num_rows])))
end
source_release(self::Ptr{Cvoid}) = unroot!(self)

mutable struct EventsHandle
    table::stg_session_events
    functions::NamedTuple
    thrown::Vector{Exception}
end
function EventsHandle(functions::NamedTuple)
    handle = EventsHandle(zero_of(stg_session_events), functions, Exception[])
    given = NamedTuple{keys(functions)}(map(name -> EVENT_SLOTS[][name], keys(functions)))
    handle.table = make(stg_session_events, (self = pointer_from_objref(handle), given...))
    handle
end
const EVENTS = (:log, :progress, :metrics, :batch_start, :batch_end, :swap)
const EVENT_SLOTS = Ref{NamedTuple{EVENTS,NTuple{6,Ptr{Cvoid}}}}()

progress_of(p::Ptr{stg_progress}) = progress_of(read_growing(p))
progress_of(p::stg_progress) = (stage = keys(STAGES)[p.stage+1], epoch = Int(p.epoch), max_epochs = Int(p.max_epochs), batch = Int(p.batch),
                                num_batches = Int(p.num_batches), step = Int(p.step), max_steps = Int(p.max_steps), loss = p.loss)

events_of(self) = unsafe_pointer_to_objref(self)::EventsHandle
functions_of(self) = events_of(self).functions
event_log(self::Ptr{Cvoid}, level::UInt32, message::stg_string) =
    kept(() -> functions_of(self).log(LOG_LEVELS[level], String(message)), events_of(self).thrown)
event_progress(self::Ptr{Cvoid}, p::Ptr{stg_progress}) = guarded(() -> functions_of(self).progress(progress_of(p)))
event_metrics(self::Ptr{Cvoid}, line::stg_string) = guarded(() -> functions_of(self).metrics(JSON.parse(String(line))))
event_swap(self::Ptr{Cvoid}, step::Int64, strategy::stg_string, error::Ptr{stg_error}) = guarded() do
    functions_of(self).swap(Int(step), JSON.parse(String(strategy)), error == C_NULL ? nothing : read_error(error))
end
event_batch_start(self::Ptr{Cvoid}, p::Ptr{stg_progress}) = guarded(() -> functions_of(self).batch_start(progress_of(p)))
event_batch_end(self::Ptr{Cvoid}, p::Ptr{stg_progress}, outputs::Ptr{stg_value}) =
    guarded(() -> functions_of(self).batch_end(progress_of(p), outputs == C_NULL ? nothing : unpack(outputs, false)))

function init_sessions()
    SOURCE_READ[] = @callback stg_data_source_read source_read
    SOURCE_RELEASE[] = @callback stg_data_source_release source_release
    EVENT_SLOTS[] = (log = (@callback stg_session_events_log event_log), progress = (@callback stg_session_events_progress event_progress),
                     metrics = (@callback stg_session_events_metrics event_metrics),
                     batch_start = (@callback stg_session_events_batch_start event_batch_start),
                     batch_end = (@callback stg_session_events_batch_end event_batch_end),
                     swap = (@callback stg_session_events_swap event_swap))
    nothing
end

# --- sessions

"""
    Session(config; folder = pwd(), overrides = [], stage = :fit, ...)

A run from a config: the path of a file (a text that ends in .json), JSON text, a dict or a named tuple; paths in it are relative to the file, else to `folder`.

  - `overrides`: `["trainer.max_steps" => 10]`; `checkpoint`: what to go on from; `output`: the file that `stage = :predict` writes
  - `model`: a [`Model`](@ref) for `{"kind": "host"}`; `sources`: [`DataSource`](@ref)s
  - `events`: functions, as in `(progress = p -> ..., batch_end = (p, outputs) -> ...)`, of log, progress, metrics, batch_start, batch_end and swap, called in a call of the session
  - `queue_events`: they are kept for [`poll`](@ref)
  - `own_loop`: the host brings the batches, and drives [`strategy`](@ref)
  - `caller_thread_only = false` lets replicas run on threads of their own; then nothing of Julia's may be called: no model, no `log` event

Close it with `close`; one that is garbage is closed by a later call.
"""
mutable struct Session
    handle::UInt64
    events::Union{Nothing,EventsHandle}
    lent::Union{Nothing,Strategy}
end

function Session(config; folder::AbstractString = pwd(), overrides = [], stage::Symbol = :fit, checkpoint::AbstractString = "",
                 output::AbstractString = "", events::NamedTuple = NamedTuple(), queue_events::Bool = false, own_loop::Bool = false,
                 caller_thread_only::Bool = true, model::Union{Nothing,Model} = nothing, sources = DataSource[])
    unknown = setdiff(keys(events), EVENTS)
    isempty(unknown) || throw(ArgumentError("no event $(join(unknown, ", ")); there are $(join(EVENTS, ", "))"))
    caller_thread_only || (model === nothing && !haskey(events, :log)) ||
        throw(ArgumentError("a model or a log event of Julia's needs caller_thread_only = true: other threads can't call Julia"))
    stage_number = choose(STAGES, stage)
    is_file = config isa AbstractString && endswith(config, ".json")
    texts = [is_file ? String(config) : "", is_file ? "" : config_text(config), abspath(folder), String(checkpoint), String(output)]
    overriding = String[string(key, "=", value isa AbstractString ? value : JSON.text(value)) for (key, value) in overrides]
    flags = (own_loop ? STG_SESSION_OWN_LOOP : UInt32(0)) | (queue_events ? STG_SESSION_QUEUE_EVENTS : UInt32(0)) |
            (caller_thread_only ? STG_SESSION_CALLER_THREAD_ONLY : UInt32(0))
    handle = isempty(keys(events)) ? nothing : EventsHandle(events)
    table = model_table(model)
    source_handles = map(SourceHandle, collect(DataSource, sources))
    override_strings = map(borrow, overriding)
    source_pointers = Ptr{stg_data_source}[root!(source) for source in source_handles]  # until their release
    out = Ref(UInt64(0))
    release_pending()
    GC.@preserve texts overriding override_strings handle table source_pointers begin
        args = make(stg_session_args, (
            config_path = borrow(texts[1]), config_text = borrow(texts[2]), config_folder = is_file ? zero_of(stg_string) : borrow(texts[3]),
            overrides = pointer(override_strings), num_overrides = length(overriding), stage = stage_number,
            checkpoint = borrow(texts[4]), events = handle === nothing ? C_NULL : pointer_from_objref(handle), output = borrow(texts[5]),
            flags = flags, model = pointer_of(table), sources = pointer(source_pointers), num_sources = length(source_pointers)))
        error = @library stg_session_open Ref(args) out
    end
    session = Session(out[], handle, nothing)
    finalizer(queue_close, session)
    check(error, thrown_by(handle))  # a log event may have thrown, though it is open
    session
end
thrown_by(::Nothing) = Exception[]
thrown_by(events::EventsHandle) = events.thrown

# The events stay until the handle is closed: closing may still log.
function queue_close(session::Session)
    handle, events = session.handle, session.events
    handle == 0 && return nothing
    if trylock(PENDING_LOCK)
        push!(PENDING, () -> GC.@preserve events @library stg_session_close handle)
        unlock(PENDING_LOCK)
    else
        finalizer(queue_close, session)
    end
    nothing
end

function session_call(call, session::Session; goes_on = true)
    release_pending()
    goes_on && end_lent(session)
    GC.@preserve session check(call(session.handle), thrown_by(session.events))
end
end_lent(session) = session.lent === nothing ? nothing : (session.lent.self = C_NULL; session.lent = nothing)

Base.show(io::IO, session::Session) = print(io, "Session(", session.handle, ")")

"Ends a session. One that is inside a call is asked to stop, and ends when that returns. Once is enough, more does no harm."
function Base.close(session::Session)
    release_pending()
    end_lent(session)
    GC.@preserve session @library stg_session_close session.handle
    nothing
end

"Trains `num_updates` updates more; true when the run is over: `run!` then gives its result."
function step!(session::Session, num_updates::Integer = 1)
    is_over = Ref(UInt32(0))
    session_call(handle -> (@library stg_session_step handle num_updates is_over), session)
    is_over[] != 0
end

"Runs to the end, and gives the result."
function run!(session::Session)
    out = Ref(zero_of(stg_tree))
    session_call(handle -> (@library stg_session_run handle out), session)
    JSON.parse(take_tree!(out))
end

"Opens a session, runs it and closes it: the result."
function fit(config; options...)
    session = Session(config; options...)
    try
        return run!(session)
    finally
        close(session)
    end
end

function progress(session::Session)
    out = Ref(make(stg_progress))
    session_call(handle -> (@library stg_session_progress handle out), session; goes_on = false)
    progress_of(out[])
end

"The strategy that is set up now, to be driven by hand. It is lent: until the session's next step!, run!, swap! or close."
function strategy(session::Session)
    api, instance = Ref(Ptr{stg_strategy_api}(0)), Ref(Ptr{stg_strategy}(0))
    session_call(handle -> (@library stg_session_strategy handle api instance), session)
    session.lent = Strategy(read_growing(api[]), instance[], "of a session", true, true, Threads.Atomic{Int}(0), ReentrantLock(), Exception[])
end

"Exchanges the strategy, as in `swap!(session, (name = \"data_parallel\", devices = 2))`. On an error the old one goes on."
function swap!(session::Session, strategy)
    text = config_text(strategy)
    GC.@preserve text session_call(handle -> (@library stg_session_swap handle borrow(text)), session)
end

"The same, before the next update; how it went is told by the event swap."
function request_swap(session::Session, strategy)
    text = config_text(strategy)
    GC.@preserve text session_call(handle -> (@library stg_session_request_swap handle borrow(text)), session; goes_on = false)
end

request_reload(session::Session) = GC.@preserve session @library stg_session_request_reload session.handle
request_stop(session::Session) = GC.@preserve session @library stg_session_request_stop session.handle
cancel(session::Session) = GC.@preserve session @library stg_session_cancel session.handle

"The next event of a session with `queue_events`, a dict; nothing if there is none within `timeout` seconds."
function poll(session::Session; timeout::Real = 0)
    out = Ref(zero_of(stg_tree))
    session_call(handle -> (@library stg_session_poll handle round(UInt64, 1e9 * timeout) out), session; goes_on = false)
    text = take_tree!(out)
    text === nothing ? nothing : JSON.parse(text)
end

"All events that wait."
function events(session::Session)
    found = Any[]
    while (event = poll(session)) !== nothing
        push!(found, event)
    end
    found
end
