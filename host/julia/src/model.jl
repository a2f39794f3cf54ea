# SPDX-License-Identifier: Apache-2.0
#
# Models written in Julia. A model is a type below `Model` with methods for the functions here; the table that C sees calls them, on the
# thread that is inside a call of the strategy. What a method throws is that call's error.

"""
A model written in Julia. It needs methods for

    replicate(model, replication)                                 a replica: whatever you like
    parameters(model, replica)                                    [Parameter("weight", array), ...], the same arrays each time
    step(model, replica, context, batch)                          StepOutput(loss or outputs; denominator, graph)
    backward(model, replica, graph, scale, ready)                 calls ready(i, gradient) once for each parameter

and may have them for `buffers`, `loss_kind`, `set_mode!`, `parameters_changed!`, `destroy_replica!`, `generator_state` and
`set_generator_state!`. The strategy writes parameters in place. A gradient's array is the strategy's once it is handed to `ready`: use a new one for each.
"""
abstract type Model end

"What a replica is to be: its device, its number from 0, the dtype of floating parameters (nothing: the model's own), the seed."
struct Replication
    device::Device
    replica::Int
    num_replicas::Int
    floating_type::Union{Nothing,DataType}
    seed::UInt64
end

"What a step is told; `gradient`: a graph is wanted."
struct StepContext
    device::Device
    replica::Int
    num_replicas::Int
    stage::Symbol
    gradient::Bool
    batch_index::Int
    dataloader_index::Int
    global_step::Int
end

"A parameter or buffer: its names (tied ones have several), its array, and whether it has a gradient and belongs in a checkpoint."
struct Parameter
    names::Vector{String}
    array::Array
    requires_grad::Bool
    persistent::Bool
end
Parameter(names, array::Array; requires_grad::Bool = true, persistent::Bool = true) =
    Parameter(names isa AbstractString ? [String(names)] : collect(String, names), array, requires_grad, persistent)

"""
What a step gives. `outputs`: in training the loss, a number or 0-dimensional array, or a dict with one under \"loss\". `denominator`: what the share counts, nothing for
its rows. `graph`: what `backward` needs.
"""
struct StepOutput
    outputs::Any
    denominator::Union{Nothing,Float64}
    graph::Any
end
StepOutput(outputs; denominator = nothing, graph = nothing) = StepOutput(outputs, denominator, graph)

function replicate end
function parameters end
function step end
# `backward` is a strategy's, too: steps.jl.
buffers(::Model, replica) = Parameter[]
loss_kind(::Model) = :mean
set_mode!(::Model, replica, train) = nothing
parameters_changed!(::Model, replica) = nothing
destroy_replica!(::Model, replica) = nothing
generator_state(::Model, replica) = UInt8[]
set_generator_state!(::Model, replica, state) = nothing

# --- what C holds

# The table first: a pointer to this is a pointer to it.
mutable struct ModelHandle
    table::stg_model
    model::Model
    count::Threads.Atomic{Int}
end
mutable struct ReplicaHandle
    replica::Any
    described::Vector{Any}  # memory of the last description
end
mutable struct GraphHandle
    graph::Any
end

const MODEL_SLOTS = Ref(zero_of(stg_model))

model_table(::Nothing) = nothing
model_table(model::LibraryModel) = model
pointer_of(model::LibraryModel) = model.table
function model_table(model::Model)
    handle = ModelHandle(MODEL_SLOTS[], model, Threads.Atomic{Int}(0))
    table = handle.table
    handle.table = stg_model(table.struct_size, pointer_from_objref(handle), (getfield(table, i) for i in 3:fieldcount(stg_model))...)
    handle
end
pointer_of(handle::ModelHandle) = Ptr{stg_model}(pointer_from_objref(handle))

model_of(self) = (unsafe_pointer_to_objref(self)::ModelHandle).model
handle_of(replica) = unsafe_pointer_to_objref(replica)::ReplicaHandle
replica_of(replica) = handle_of(replica).replica

# --- callbacks

function model_replicate(self::Ptr{Cvoid}, args::Ptr{stg_replicate_args}, out::Ptr{Ptr{stg_replica}})
    guarded() do
        given = read_growing(args)
        floating = given.floating_dtype === zero_of(stg_dtype) ? nothing : type_of(given.floating_dtype)
        replica = replicate(model_of(self), Replication(Device(given.device), given.replica, given.num_replicas, floating, given.seed))
        unsafe_store!(out, root!(ReplicaHandle(replica, Any[])))
    end
end

function model_destroy_replica(self::Ptr{Cvoid}, replica::Ptr{stg_replica})
    guarded_quietly(() -> destroy_replica!(model_of(self), replica_of(replica)))
    unroot!(replica)
end

# For callbacks that can return no error: it is logged in Julia.
function guarded_quietly(body)
    try
        body()
    catch exception
        @error "a callback that can return no error has thrown" exception = (exception, catch_backtrace())
    end
    nothing
end

function model_describe(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, out::Ptr{stg_model_description})
    guarded() do
        model, handle = model_of(self), handle_of(replica)
        kept = Any[]
        trained = describe_list(kept, parameters(model, handle.replica))
        others = describe_list(kept, buffers(model, handle.replica))
        kind = choose((mean = STG_LOSS_MEAN, sum = STG_LOSS_SUM), loss_kind(model))
        handle.described = kept
        store!(out, :parameters, pointer(trained))
        store!(out, :num_parameters, length(trained))
        store!(out, :buffers, pointer(others))
        store!(out, :num_buffers, length(others))
        store!(out, :loss_kind, kind)
    end
end

function describe_list(kept, list)
    described = map(list) do parameter
        dtype_of(eltype(parameter.array)) === nothing &&
            throw(ArgumentError("parameter $(first(parameter.names)) is an array of $(eltype(parameter.array)), for which there is no dtype"))
        names = map(borrow, parameter.names)
        handle = TensorHandle(parameter.array)
        flags = STG_PARAMETER_PINNED | (parameter.requires_grad ? STG_PARAMETER_REQUIRES_GRAD : UInt32(0)) |
                (parameter.persistent ? STG_PARAMETER_PERSISTENT : UInt32(0))
        entry = Ref(make(stg_parameter, (names = pointer(names), num_names = length(names), tensor = pointer_of(handle), flags = flags)))
        push!(kept, parameter, names, handle, entry)
        Base.unsafe_convert(Ptr{stg_parameter}, entry)
    end
    described = collect(Ptr{stg_parameter}, described)
    push!(kept, described)
    described
end

model_set_mode(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, train::UInt32) =
    guarded(() -> set_mode!(model_of(self), replica_of(replica), train != 0))

function model_step(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, context::Ptr{stg_step_context}, batch::Ptr{stg_tree},
                    result::Ptr{stg_model_step_result})
    guarded() do
        share = take_tree!(batch)
        c = read_growing(context)
        wants_graph = c.flags & STG_STEP_GRADIENT != 0
        output = step(model_of(self), replica_of(replica),
                      StepContext(Device(c.device), c.replica, c.num_replicas, keys(STAGES)[c.stage+1], wants_graph, c.batch_index,
                                  c.dataloader_index, c.global_step), share)
        output isa StepOutput || throw(ArgumentError("step of $(typeof(model_of(self))) returned a $(typeof(output)), not a StepOutput"))
        outputs = give_tree(tensors_for_numbers(output.outputs))
        store!(result, :outputs, outputs)
        output.denominator === nothing ||
            store!(result, :denominator, stg_value(STG_DOUBLE, 0, reinterpret(UInt64, output.denominator)))
        wants_graph && store!(result, :graph, root!(GraphHandle(output.graph)))
    end
end

# A loss is a tensor for C, a number for Julia.
tensors_for_numbers(outputs) = outputs
tensors_for_numbers(loss::AbstractFloat) = fill(loss)
tensors_for_numbers(outputs::NamedTuple) = map(tensors_for_numbers, outputs)

function take_graph(graph::Ptr{stg_graph})
    handle = unsafe_pointer_to_objref(graph)::GraphHandle
    unroot!(graph)
    handle.graph
end

function model_backward(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, graph::Ptr{stg_graph}, scale::Float64, ::UInt32, sink::Ptr{stg_gradient_sink})
    guarded() do
        to = read_growing(sink)
        backward(model_of(self), replica_of(replica), take_graph(graph), scale, (i, gradient) -> report(to, i, gradient))
    end
end

function report(sink::stg_gradient_sink, i::Integer, gradient)
    i >= 1 || throw(ArgumentError("there is no parameter $i; the first is 1"))
    tensor = gradient === nothing ? Ptr{stg_tensor}(0) : give(gradient::AbstractArray)
    check(@slot stg_gradient_sink_ready sink.ready sink.self (i - 1) tensor C_NULL)
end

model_release_graph(::Ptr{Cvoid}, ::Ptr{stg_replica}, graph::Ptr{stg_graph}) = (take_graph(graph); nothing)

model_parameters_changed(self::Ptr{Cvoid}, replica::Ptr{stg_replica}) =
    guarded(() -> parameters_changed!(model_of(self), replica_of(replica)))

model_get_generator_state(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, out::Ptr{stg_tree}) =
    guarded(() -> unsafe_store!(out, give_tree(Bytes(generator_state(model_of(self), replica_of(replica))))))

function model_set_generator_state(self::Ptr{Cvoid}, replica::Ptr{stg_replica}, state::Ptr{UInt8}, size_bytes::UInt64)
    guarded() do
        bytes = size_bytes == 0 ? UInt8[] : copy(unsafe_wrap(Array, state, Int(size_bytes)))
        set_generator_state!(model_of(self), replica_of(replica), bytes)
    end
end

function init_models()
    MODEL_SLOTS[] = make(stg_model, (
        retain = (@callback stg_model_retain counted_retain), release = (@callback stg_model_release counted_release),
        replicate = (@callback stg_model_replicate model_replicate),
        destroy_replica = (@callback stg_model_destroy_replica model_destroy_replica),
        describe = (@callback stg_model_describe model_describe), set_mode = (@callback stg_model_set_mode model_set_mode),
        step = (@callback stg_model_step model_step), backward = (@callback stg_model_backward model_backward),
        release_graph = (@callback stg_model_release_graph model_release_graph),
        parameters_changed = (@callback stg_model_parameters_changed model_parameters_changed),
        get_generator_state = (@callback stg_model_get_generator_state model_get_generator_state),
        set_generator_state = (@callback stg_model_set_generator_state model_set_generator_state)))
    nothing
end
