# SPDX-License-Identifier: Apache-2.0
#
# What a call from Julia costs, with a model in Julia whose step does nothing: the median of seven rounds, in nanoseconds. Beside each call as the
# package makes it, the bare call of the same slot, with arguments that were made before the loop: what it costs from C (the step of the model is Julia's in both).
#
#     julia --project=host/julia host/julia/bench/overhead.jl PLUGINS [CALLS]

using Stratagem
const S = Stratagem

struct Empty <: Model end
const WEIGHT = zeros(Float32, 1)
const LOSS = fill(0.0f0)
S.replicate(::Empty, replication) = nothing
S.parameters(::Empty, replica) = [Parameter("weight", WEIGHT)]
S.step(::Empty, replica, context, batch) = StepOutput(LOSS)
S.backward(::Empty, replica, graph, scale, ready) = ready(1, nothing)

function nanoseconds(call, num_calls)
    began = time_ns()
    for _ in 1:num_calls
        call()
    end
    (time_ns() - began) / num_calls
end

# Of both calls, in turn: what else the machine does hits both.
function medians(num_calls, calls...)
    foreach(call -> call(), calls)
    rounds = [map(call -> nanoseconds(call, num_calls), calls) for _ in 1:7]
    map(figures -> sort!(collect(figures))[4], zip(rounds...))
end

function measure(plugins, name, num_devices, num_calls)
    strategy = Strategy(Plugin(joinpath(plugins, "$name.so")), name; config = (accelerator = "cpu", devices = num_devices, optimizer = (name = "sgd", lr = 0.1)))
    setup(strategy, Empty())
    batch = (a = zeros(Float32, 4, 8), b = zeros(Float32, 8), c = zeros(Int64, 8))
    lent = S.lend(batch)
    transfer = Ref(S.make(S.stg_transfer_args, (batch = S.pointer_of(lent), device = S.NO_DEVICE)))
    step_args = Ref(S.step_args(lent, C_NULL, 0, 0, 0, 0))
    tree, result = Ref(S.zero_of(S.stg_tree)), Ref(S.make(S.stg_step_result))
    empty_name = S.zero_of(S.stg_string)
    function bare_transfer()
        S.check(S.raw(strategy, Val(:batch_to_device), C_NULL, transfer, tree))
        S.@slot stg_tree_release tree[].release tree
    end
    function bare_step()
        S.check(S.raw(strategy, Val(:training_step), C_NULL, step_args, result))
        outputs = Ref(result[].outputs)
        S.@slot stg_tree_release outputs[].release outputs
    end
    function report(what, call, bare)
        figures = map(figure -> lpad(round(Int, figure), 9), medians(num_calls, call, bare))
        println(rpad("$name($num_devices)", 18), rpad(what, 36), figures[1], " ns", figures[2], " ns bare")
    end
    GC.@preserve lent begin
        report("barrier", () -> S.barrier(strategy), () -> S.check(S.raw(strategy, Val(:barrier), C_NULL, empty_name)))
        report("batch_to_device, a dict of 3 tensors", () -> S.batch_to_device(strategy, batch), bare_transfer)
        report("training_step, empty, same batch", () -> S.training_step(strategy, batch), bare_step)
    end
    destroy(strategy)
end

function main(plugins, num_calls = "10000")
    println("Julia ", VERSION, ", each call with all that the package does around it")
    for (name, num_devices) in (("single_device", 1), ("data_parallel", 2))
        measure(plugins, name, num_devices, parse(Int, num_calls))
    end
end

main(ARGS...)
