# SPDX-License-Identifier: Apache-2.0

include("linear_model.jl")

training_strategy(num_devices = 2) = a_strategy(num_devices; config = (precision = "64-true", optimizer = (name = "sgd", lr = 0.1)))

"Weights and losses after five updates on a number of devices."
function trained(num_devices, model = Linear(); num_rows = 7)
    strategy = training_strategy(num_devices)
    setup(strategy, model)
    losses = [S.train_batch(strategy, linear_batch(num_rows); lr = 0.1, clip = :norm, clip_limit = 2)[1].outputs[] for _ in 1:5]
    weight = S.export_state(strategy)["model"]["weight"]
    destroy(strategy)
    losses, weight
end

# The same in Julia alone.
function trained_by_hand()
    replica = S.replicate(Linear(), nothing)
    batch = linear_batch()
    losses = map(1:5) do _
        distance = replica.weight * batch.x .+ replica.bias .- batch.y
        loss = sum(abs2, distance) / 7
        gradients = [2 / 7 .* distance * batch.x', vec(2 / 7 .* sum(distance; dims = 2))]
        factor = min(1, 2 / sqrt(sum(g -> sum(abs2, g), gradients)))
        replica.weight .-= 0.1factor .* gradients[1]
        replica.bias .-= 0.1factor .* gradients[2]
        loss
    end
    losses, replica.weight
end

@testset "a model written in Julia trains as the same lines without a strategy do, on one device and on several" begin
    losses, weight = trained_by_hand()
    for num_devices in 1:3
        got_losses, got_weight = trained(num_devices)
        @test got_losses ≈ losses rtol = 1e-12
        @test got_weight ≈ weight rtol = 1e-12
    end
    @test trained(3; num_rows = 2)[1] ≈ trained(1; num_rows = 2)[1] rtol = 1e-12  # a device without a share
    @test trained(2, Linear(kind = :sum))[1] ≈ trained(1, Linear(kind = :sum))[1] rtol = 1e-12
end

@testset "step, backward and update one by one are what train_batch does" begin
    strategy = training_strategy(2)
    setup(strategy, Linear())
    result = S.training_step(strategy, linear_batch())
    @test S.status(strategy).has_graph && sum(result.weights) == 7
    S.backward(strategy)
    gradients = S.gradients(strategy)
    @test collect(keys(gradients)) == ["weight", "bias"] && size(gradients["weight"]) == (2, 3)
    update = S.optimizer_step(strategy; lr = 0.1, clip = :norm, clip_limit = 2)
    @test update.outcome === :done && update.total_weight == 7
    @test gradients["bias"] ≈ vec(sum(2 / 7 .* (S.replicate(Linear(), nothing).weight * linear_batch().x .- linear_batch().y); dims = 2))
    first_weight = S.export_state(strategy)["model"]["weight"]
    destroy(strategy)
    strategy = training_strategy(2)
    setup(strategy, Linear())
    S.train_batch(strategy, linear_batch(); lr = 0.1, clip = :norm, clip_limit = 2)
    @test S.export_state(strategy)["model"]["weight"] == first_weight
    destroy(strategy)
end

@testset "evaluation gathers outputs, and says to the model what it is" begin
    contexts = []
    model = Linear((place, arguments...) -> place === :step && push!(contexts, arguments[1]))
    strategy = training_strategy(2)
    setup(strategy, model; stage = :predict)
    result = S.predict_step(strategy, linear_batch(); batch_index = 4)
    @test size(result.outputs) == (2, 7)  # joined over the rows, Julia's last index
    @test result.outputs ≈ S.replicate(Linear(), nothing).weight * linear_batch().x
    @test length(contexts) == 2 && contexts[2].replica == 1 && contexts[1].stage === :predict && contexts[1].batch_index == 4
    @test !contexts[1].gradient
    destroy(strategy)
end

@testset "a state goes out and in, generators with it, and through a checkpoint" begin
    strategy = training_strategy(2)
    setup(strategy, Linear())
    S.train_batch(strategy, linear_batch(); lr = 0.1)
    state = S.export_state(strategy)
    @test state["aliases"]["also_bias"] == "bias" && state["generators"][1] == S.Bytes([0x07])
    mktempdir() do folder
        S.save(strategy, joinpath(folder, "here"); host_json = "{\"at\": 1}")
        S.train_batch(strategy, linear_batch(); lr = 0.1)
        host_json, report = S.load(strategy, joinpath(folder, "here"))
        @test S.JSON.parse(host_json) == TreeDict("at" => 1) && isempty(report["missing"])
        @test S.export_state(strategy)["model"] == state["model"]
        @test fails(() -> S.load(strategy, joinpath(folder, "nowhere")), S.STG_NOT_FOUND, "nowhere")
    end
    other = training_strategy(1)
    setup(other, Linear(); state = state)
    @test S.export_state(other)["model"] == state["model"]
    @test fails(() -> S.import_state(other, TreeDict("format" => 1, "model" => TreeDict("weight" => [1.0]))), S.STG_INVALID_ARGUMENT, "bias")
    destroy(strategy)
    destroy(other)
end

@testset "what a callback throws is the call's error, with the exception and its place, and the strategy goes on" begin
    broken = Ref(:nothing)
    model = Linear((place, arguments...) -> place === broken[] && error("broken in $place"))
    thrown(e) = e isa CapturedException ? e : e isa StratagemError ? thrown(e.cause) : nothing
    for place in (:replicate, :parameters)
        broken[] = place
        strategy = training_strategy(2)
        e = thrown(caught(() -> setup(strategy, model)))
        @test e.ex == ErrorException("broken in $place") && !isempty(e.processed_bt)
        broken[] = :nothing
        setup(strategy, model)
        destroy(strategy)
    end
    strategy = training_strategy(2)
    setup(strategy, model)
    for (place, call) in (:step => () -> S.training_step(strategy, linear_batch()), :step => () -> S.train_batch(strategy, linear_batch(); lr = 0.1),
                          :backward => () -> S.train_batch(strategy, linear_batch(); lr = 0.1))
        broken[] = place
        e = caught(call)
        @test e isa StratagemError && occursin("broken in $place", sprint(showerror, e))
        @test thrown(e).ex == ErrorException("broken in $place")
        broken[] = :nothing
        S.zero_grad(strategy)
        @test S.train_batch(strategy, linear_batch(); lr = 0.1)[2].outcome === :done
    end
    destroy(strategy)
end

@testset "what a model gets wrong is told" begin
    told(hook, words...) = begin
        strategy = training_strategy(2)
        e = caught() do
            setup(strategy, Linear(hook))
            S.train_batch(strategy, linear_batch(); lr = 0.1)
        end
        destroy(strategy)
        e isa StratagemError && all(word -> occursin(word, sprint(showerror, e)), words)
    end
    at(place, body) = (where, arguments...) -> where === place ? body(arguments...) : nothing
    @test told(at(:backward, ready -> ready(0, zeros(2))), "no parameter 0")
    @test told(at(:backward, ready -> ready(1, zeros(2, 2))), "weight")
    @test told(at(:backward, ready -> ready(1, zeros(Float32, 2, 3))), "weight")
    @test told(at(:backward, ready -> ready(1, ['a' 'b'])), "Char")
    @test told(at(:parameters, replica -> (replica.bias = zeros(3))), "DimensionMismatch")
end

@testset "a strategy is not called from inside its own callbacks" begin
    seen = []
    strategy = training_strategy(2)
    model = Linear((place, arguments...) -> place === :step && push!(seen, caught(() -> S.barrier(strategy)), caught(() -> destroy(strategy)),
                                                                     caught(() -> S.status(strategy))))
    setup(strategy, model)
    S.training_step(strategy, linear_batch())
    @test seen[1] isa StratagemError && seen[1].code == S.STG_FAILED_PRECONDITION && seen[2].code == S.STG_FAILED_PRECONDITION
    @test seen[3] === nothing  # asking is allowed
    destroy(strategy)
end

@testset "a strategy, its model and batches that are garbage are freed by a later call" begin
    function use_and_drop()
        strategy = training_strategy(2)
        setup(strategy, Linear())
        S.training_step(strategy, linear_batch())
        nothing
    end
    roots = S.num_roots()
    use_and_drop()
    @test S.num_roots() > roots
    other = training_strategy(1)
    for _ in 1:4
        GC.gc()
        S.barrier(other)
    end
    @test S.num_roots() == roots
    destroy(other)
end

@testset "a thousand steps leave nothing behind" begin
    strategy = training_strategy(2)
    setup(strategy, Linear())
    GC.gc()
    S.barrier(strategy)
    roots = S.num_roots()
    for i in 1:1000
        S.train_batch(strategy, linear_batch(); lr = 0.001)
    end
    for _ in 1:3
        GC.gc()
        S.barrier(strategy)
    end
    @test S.num_roots() == roots
    destroy(strategy)
end

@testset "a wrong batch is refused" begin
    strategy = training_strategy(2)
    setup(strategy, Linear())
    @test caught(() -> S.training_step(strategy, (x = Char['a'],))) isa ArgumentError
    @test caught(() -> S.training_step(strategy, (x = zeros(3, 4), y = zeros(2, 5)))) isa StratagemError  # rows differ
    @test occursin("KeyError", sprint(showerror, caught(() -> S.training_step(strategy, (z = zeros(3, 4),)))))
    @test caught(() -> S.training_step(strategy, linear_batch(); timeout = 0)) isa ArgumentError
    destroy(strategy)
end

@testset "two tasks on one strategy are told" begin
    strategy = training_strategy(2)
    inside, go_on = Channel{Nothing}(1), Channel{Nothing}(1)
    setup(strategy, Linear((place, arguments...) -> place === :step && (put!(inside, nothing); take!(go_on))))
    first_task = @async S.training_step(strategy, linear_batch(); timeout = 60)
    take!(inside)  # the other task is inside its step
    @test fails(() -> S.barrier(strategy), S.STG_FAILED_PRECONDITION, "another task")
    @test fails(() -> destroy(strategy), S.STG_FAILED_PRECONDITION, "another task")
    put!(go_on, nothing)
    take!(inside)
    put!(go_on, nothing)
    @test fetch(first_task) isa S.StepResult
    destroy(strategy)
end

@testset "a view with strides is reduced in place, a tensor to a number" begin
    strategy = a_strategy(2)
    setup(strategy)
    whole = reshape(collect(1.0:12), 3, 4)
    reduce_gradients(strategy, [Any[@view whole[2, :]], Any[zeros(4)]])
    @test whole[2, :] == [1, 2.5, 4, 5.5] && whole[1, :] == [1, 4, 7, 10]  # what is beside it stays
    @test S.reduce(strategy, [1.0 2; 3 6]; op = :mean)[] == 3 && S.reduce(strategy, [1.0 2; 3 6]; op = :max)[] == 6
    destroy(strategy)
end
