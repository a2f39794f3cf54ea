# SPDX-License-Identifier: Apache-2.0
#
# What a call from Julia costs, with a model whose step does nothing: the median of seven rounds, in nanoseconds. The plain C loop's figures, to
# stand beside these, are those of the program bench-overhead, where it is built.
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
    call()
    rounds = map(1:7) do _
        began = time_ns()
        for _ in 1:num_calls
            call()
        end
        (time_ns() - began) / num_calls
    end
    sort!(rounds)[4]
end

function measure(plugins, name, num_devices, num_calls)
    strategy = Strategy(Plugin(joinpath(plugins, "$name.so")), name; config = (accelerator = "cpu", devices = num_devices, optimizer = (name = "sgd", lr = 0.1)))
    setup(strategy, Empty())
    batch = (a = zeros(Float32, 4, 8), b = zeros(Float32, 8), c = zeros(Int64, 8))
    report(what, call) = println(rpad("$name($num_devices)", 18), rpad(what, 36), lpad(round(Int, nanoseconds(call, num_calls)), 9), " ns")
    report("barrier", () -> S.barrier(strategy))
    report("batch_to_device, a dict of 3 tensors", () -> S.batch_to_device(strategy, batch))
    report("training_step, empty, same batch", () -> S.training_step(strategy, batch))
    destroy(strategy)
end

function main(plugins, num_calls = "10000")
    println("Julia ", VERSION, ", each call with all that the package does around it")
    for (name, num_devices) in (("single_device", 1), ("data_parallel", 2))
        measure(plugins, name, num_devices, parse(Int, num_calls))
    end
end

main(ARGS...)
