# SPDX-License-Identifier: Apache-2.0
#
# What a strategy does, by the names of the table's slots. A batch is lent for the call: it may be changed or dropped afterwards. What comes
# back is Julia's. Every call that can block takes `timeout` in seconds.

const STAGES = (fit = STG_STAGE_FIT, validate = STG_STAGE_VALIDATE, test = STG_STAGE_TEST, predict = STG_STAGE_PREDICT)
const REDUCTIONS = (mean = STG_REDUCE_MEAN, sum = STG_REDUCE_SUM, min = STG_REDUCE_MIN, max = STG_REDUCE_MAX)
const CLIPPINGS = (none = STG_CLIP_NONE, norm = STG_CLIP_NORM, value = STG_CLIP_VALUE)
const DECISIONS = (all = STG_DECIDE_ALL, any = STG_DECIDE_ANY)
const STATES = [STG_STATE_CREATED => :created, STG_STATE_FIT => :fit, STG_STATE_EVALUATE => :evaluate, STG_STATE_MODELLESS => :modelless,
                STG_STATE_DRAINING => :draining]
const OUTCOMES = (:none, :done, :skipped_overflow, :skipped_no_weight)

function choose(names::NamedTuple, name::Symbol)
    haskey(names, name) || throw(ArgumentError("there is no :$name here; there are $(join(map(repr, keys(names)), ", "))"))
    names[name]
end

# --- questions, of any task

abort(strategy::Strategy) = from_any(strategy, Val(:abort))

function status(strategy::Strategy)
    out = Ref(make(stg_status))
    from_any(strategy, Val(:status), out)
    state = findfirst(pair -> first(pair) == out[].state, STATES)
    (state = state === nothing ? :unknown : last(STATES[state]), num_micro_batches = Int(out[].num_micro_batches),
     num_updates = Int(out[].num_updates), has_graph = out[].has_graph != 0)
end

function devices(strategy::Strategy)
    first_device, count = Ref(Ptr{stg_device}(0)), Ref(UInt64(0))
    from_any(strategy, Val(:devices), first_device, count)
    [Device(unsafe_load(first_device[], i)) for i in 1:count[]]
end

function ranks(strategy::Strategy)
    out = Ref(make(stg_ranks))
    from_any(strategy, Val(:ranks), out)
    (global_rank = Int(out[].global_rank), local_rank = Int(out[].local_rank), node_rank = Int(out[].node_rank),
     world_size = Int(out[].world_size))
end

# --- life

"Sets a model up: one of Julia's, a library's, or none (then for reduce_gradients). `state`: what export_state gave."
function setup(strategy::Strategy, model = nothing; stage::Symbol = :fit, state = nothing, timeout = nothing)
    model isa Model && !strategy.caller_thread_only &&
        throw(ArgumentError("a model written in Julia needs a strategy with caller_thread_only = true: other threads can't call Julia"))
    lent = state === nothing ? nothing : lend(state)
    table = model_table(model)
    args = make(stg_setup_args, (model = pointer_of(table), state = lent === nothing ? C_NULL : pointer_of(lent), stage = choose(STAGES, stage)))
    GC.@preserve lent table model owner(strategy, Val(:setup), deadline(timeout), Ref(args))
end
pointer_of(::Nothing) = C_NULL

teardown(strategy::Strategy; timeout = nothing) = owner(strategy, Val(:teardown), deadline(timeout))
model_to_device(strategy::Strategy; timeout = nothing) = owner(strategy, Val(:model_to_device), deadline(timeout))

# --- data

"A call that takes a lent tree and gives one."
function tree_call(strategy, slot, timeout, value, arguments...)
    lent, out = lend(value), Ref(zero_of(stg_tree))
    GC.@preserve lent owner(strategy, slot, deadline(timeout), pointer_of(lent), arguments..., out)
    take_tree!(out)
end

function batch_to_device(strategy::Strategy, batch; device = nothing, dataloader_index::Integer = 0, timeout = nothing)
    lent, out = lend(batch), Ref(zero_of(stg_tree))
    args = make(stg_transfer_args, (batch = pointer_of(lent), device = device === nothing ? NO_DEVICE : to_c(device),
                                    dataloader_index = dataloader_index))
    GC.@preserve lent owner(strategy, Val(:batch_to_device), deadline(timeout), Ref(args), out)
    take_tree!(out)
end
broadcast(strategy::Strategy, object; src::Integer = 0, timeout = nothing) = tree_call(strategy, Val(:broadcast), timeout, object, Int32(src))
all_gather(strategy::Strategy, object; timeout = nothing) = tree_call(strategy, Val(:all_gather), timeout, object)
reduce(strategy::Strategy, object; op::Symbol = :mean, timeout = nothing) =
    tree_call(strategy, Val(:reduce), timeout, object, choose(REDUCTIONS, op))
to_host(strategy::Strategy, object; timeout = nothing) = tree_call(strategy, Val(:to_host), timeout, object)

function reduce_boolean_decision(strategy::Strategy, decision::Bool; mode::Symbol = :all, timeout = nothing)
    out = Ref(UInt32(0))
    owner(strategy, Val(:reduce_boolean_decision), deadline(timeout), decision, choose(DECISIONS, mode), out)
    out[] != 0
end

barrier(strategy::Strategy, name::String = ""; timeout = nothing) =
    GC.@preserve name owner(strategy, Val(:barrier), deadline(timeout), borrow(name))

# --- steps

"What a step gives: the gathered outputs, and how much each replica that ran counted."
struct StepResult
    outputs::Any
    weights::Vector{Float64}
end

"What became of an update: :none, :done, :skipped_overflow or :skipped_no_weight; the norm is NaN where clipping did not need it."
struct UpdateResult
    outcome::Symbol
    gradient_norm::Float64
    total_weight::Float64
    loss_scale::Float64
end
UpdateResult(update::stg_update_result) =
    UpdateResult(update.outcome < length(OUTCOMES) ? OUTCOMES[update.outcome+1] : :unknown, update.gradient_norm, update.total_weight,
                 update.loss_scale)

step_args(lent, update, flags, batch_index, dataloader_index, global_step) =
    make(stg_step_args, (batch = pointer_of(lent), batch_index = batch_index, dataloader_index = dataloader_index, global_step = global_step,
                         update = update, flags = flags))
function take_step_result(out)
    result = out[]
    weights = [unsafe_load(result.weights, i) for i in 1:result.num_weights]
    StepResult(take_tree!(Ref(result.outputs)), weights)
end
update_args(lr, clip, clip_limit) = Ref(make(stg_update_args, (lr = lr, clip_limit = clip_limit, clip = choose(CLIPPINGS, clip))))

function training_step(strategy::Strategy, batch; batch_index::Integer = 0, dataloader_index::Integer = 0, global_step::Integer = 0,
                       detect_anomaly::Bool = false, timeout = nothing)
    one_step(strategy, Val(:training_step), batch, detect_anomaly ? STG_BATCH_DETECT_ANOMALY : 0, batch_index, dataloader_index, global_step, timeout)
end
function one_step(strategy, slot, batch, flags, batch_index, dataloader_index, global_step, timeout)
    lent, out = lend(batch), Ref(make(stg_step_result))
    args = step_args(lent, C_NULL, flags, batch_index, dataloader_index, global_step)
    GC.@preserve lent owner(strategy, slot, deadline(timeout), Ref(args), out)
    take_step_result(out)
end
for slot in (:validation_step, :test_step, :predict_step)
    @eval $slot(strategy::Strategy, batch; batch_index::Integer = 0, dataloader_index::Integer = 0, timeout = nothing) =
        one_step(strategy, Val($(QuoteNode(slot))), batch, 0, batch_index, dataloader_index, 0, timeout)
end

batch_flags(last, detect_anomaly) = (last ? STG_BATCH_LAST_MICRO_BATCH : UInt32(0)) | (detect_anomaly ? STG_BATCH_DETECT_ANOMALY : UInt32(0))

backward(strategy::Strategy; last::Bool = true, detect_anomaly::Bool = false, timeout = nothing) =
    owner(strategy, Val(:backward), deadline(timeout), batch_flags(last, detect_anomaly))

function optimizer_step(strategy::Strategy; lr::Real, clip::Symbol = :none, clip_limit::Real = 0, timeout = nothing)
    out = Ref(make(stg_update_result))
    owner(strategy, Val(:optimizer_step), deadline(timeout), update_args(lr, clip, clip_limit), out)
    UpdateResult(out[])
end

"training_step, backward and, if this is the `last` micro-batch, optimizer_step. Returns the step's result and the update's."
function train_batch(strategy::Strategy, batch; lr::Real, last::Bool = true, clip::Symbol = :none, clip_limit::Real = 0,
                     batch_index::Integer = 0, dataloader_index::Integer = 0, global_step::Integer = 0, detect_anomaly::Bool = false,
                     timeout = nothing)
    lent, out, updated = lend(batch), Ref(make(stg_step_result)), Ref(make(stg_update_result))
    update = update_args(lr, clip, clip_limit)
    GC.@preserve lent update begin
        args = step_args(lent, last ? Base.unsafe_convert(Ptr{stg_update_args}, update) : C_NULL, batch_flags(last, detect_anomaly),
                         batch_index, dataloader_index, global_step)
        owner(strategy, Val(:train_batch), deadline(timeout), Ref(args), out, updated)
    end
    take_step_result(out), UpdateResult(updated[])
end

zero_grad(strategy::Strategy; timeout = nothing) = owner(strategy, Val(:zero_grad), deadline(timeout))
parameters_changed(strategy::Strategy; timeout = nothing) = owner(strategy, Val(:parameters_changed), deadline(timeout))

"The reduced gradients, copied: a dict from parameter name to array, nothing where there is none."
function gradients(strategy::Strategy; timeout = nothing)
    out = Ref(zero_of(stg_tree))
    owner(strategy, Val(:gradients), deadline(timeout), out)
    take_tree!(out; copies = true)  # views are valid only until the next call
end

# --- gradients of one's own

"""
    reduce_gradients(strategy, sets; weights, op = :mean)

Reduces gradients in place: `sets[d]` are the arrays of device `d`, in the order of [`devices`](@ref), nothing where there is none. Mean: the sum
of `weights[d] * sets[d][i]` over the sum of weights. Returns the sets: a place that was nothing in some, not in all, has a new array there.
"""
function reduce_gradients(strategy::Strategy, sets::AbstractVector; weights = ones(length(sets)), op::Symbol = :mean, timeout = nothing)
    length(weights) == length(sets) || throw(DimensionMismatch("$(length(sets)) sets of gradients with $(length(weights)) weights"))
    handles = [[gradient_handle(array, d, i) for (i, array) in enumerate(set)] for (d, set) in enumerate(sets)]
    tensors = [[handle === nothing ? Ptr{stg_tensor}(0) : pointer_of(handle) for handle in set] for set in handles]
    lent = copy.(tensors)
    places = devices(strategy)
    set_refs = [Ref(make(stg_gradient_set, (device = to_c(d <= length(places) ? places[d] : Device(:cpu, d - 1)), weight = weights[d],
                                            gradients = pointer(tensors[d]), num_gradients = length(tensors[d])))) for d in 1:length(sets)]
    GC.@preserve handles tensors set_refs begin
        pointers = map(ref -> Base.unsafe_convert(Ptr{stg_gradient_set}, ref), set_refs)
        GC.@preserve pointers owner(strategy, Val(:reduce_gradients), deadline(timeout), Ref(make(
            stg_reduce_gradients_args, (sets = pointer(pointers), num_sets = length(pointers), op = choose(REDUCTIONS, op)))))
    end
    [Any[tensors[d][i] == lent[d][i] ? array : adopt(tensors[d][i]; owned = true) for (i, array) in enumerate(set)]
     for (d, set) in enumerate(sets)]
end

gradient_handle(::Nothing, _, _) = nothing
function gradient_handle(array::AbstractArray, d, i)
    dtype_of(eltype(array)) === nothing && throw(ArgumentError("gradient $i of set $d is an array of $(eltype(array)), for which there is no dtype"))
    has_strides(array) || throw(ArgumentError("gradient $i of set $d is a $(typeof(array)), which can't be written in place: use an Array or a view of one"))
    TensorHandle(array)
end

# --- state

"All that training goes on from, copied: see \"state\" in strategy.h."
function export_state(strategy::Strategy; timeout = nothing)
    out = Ref(zero_of(stg_tree))
    owner(strategy, Val(:export_state), deadline(timeout), STG_EXPORT_COPY, out)
    take_tree!(out)
end

"Takes a state; returns what did not fit (missing, unexpected, unknown_keys). `strict`: that is an error."
function import_state(strategy::Strategy, state; strict::Bool = true, timeout = nothing)
    lent, report = lend(state), Ref(zero_of(stg_tree))
    GC.@preserve lent owner(strategy, Val(:import_state), deadline(timeout), pointer_of(lent), strict ? STG_IMPORT_STRICT : 0, report)
    take_tree!(report)
end

"Writes a checkpoint folder, as a whole or not at all. `host_json` is kept beside the state."
function save(strategy::Strategy, path::String; host_json::String = "", timeout = nothing)
    args = make(stg_checkpoint_args, (path = borrow(path), host_json = borrow(host_json)))
    GC.@preserve path host_json owner(strategy, Val(:save), deadline(timeout), Ref(args))
end

"Reads a checkpoint; returns the `host_json` that it was saved with, and the report of import_state."
function load(strategy::Strategy, path::String; strict::Bool = true, timeout = nothing)
    args = make(stg_checkpoint_args, (path = borrow(path), flags = strict ? STG_IMPORT_STRICT : 0))
    host_json, report = Ref(zero_of(stg_tree)), Ref(zero_of(stg_tree))
    GC.@preserve path owner(strategy, Val(:load), deadline(timeout), Ref(args), host_json, report)
    take_tree!(host_json), take_tree!(report)
end
