# SPDX-License-Identifier: Apache-2.0
#
# A model written in Julia: y = weight * x .+ bias, with the squared distance as loss.

"`hook(where, ...)` is called in each function, so that a test may throw there, or look."
struct Linear <: Model
    hook::Any
    kind::Symbol
end
Linear(hook = (where, arguments...) -> nothing; kind = :mean) = Linear(hook, kind)

mutable struct LinearReplica
    weight::Matrix{Float64}
    bias::Vector{Float64}
    is_training::Bool
    generator::Vector{UInt8}
end

function S.replicate(model::Linear, replication)
    model.hook(:replicate, replication)
    LinearReplica([i * j / 10 for i in 1:2, j in 1:3], zeros(2), false, [0x07])
end
function S.parameters(model::Linear, replica)
    model.hook(:parameters, replica)
    [Parameter("weight", replica.weight), Parameter(["bias", "also_bias"], replica.bias)]
end
S.loss_kind(model::Linear) = model.kind
S.set_mode!(model::Linear, replica, train) = (model.hook(:set_mode!, replica); replica.is_training = train)
S.generator_state(::Linear, replica) = replica.generator
S.set_generator_state!(::Linear, replica, state) = (replica.generator = state; nothing)
S.destroy_replica!(model::Linear, replica) = model.hook(:destroy_replica!, replica)

function S.step(model::Linear, replica, context, batch)
    model.hook(:step, context, batch)
    distance = replica.weight * batch["x"] .+ replica.bias .- batch["y"]
    num_rows = size(distance, 2)
    divisor = model.kind === :mean ? num_rows : 1
    context.stage === :predict && return StepOutput(distance .+ batch["y"])
    StepOutput(sum(abs2, distance) / divisor; graph = (batch["x"], distance, divisor))
end

function S.backward(model::Linear, replica, graph, scale, ready)
    model.hook(:backward, ready)
    x, distance, divisor = graph
    ready(1, 2scale / divisor .* distance * x')
    ready(2, vec(2scale / divisor .* sum(distance; dims = 2)))
end

linear_batch(num_rows = 7) = (x = [sin(i * j) for i in 1:3, j in 1:num_rows], y = [cos(i + j) for i in 1:2, j in 1:num_rows])
