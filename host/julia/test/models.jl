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
    @test S.status(strategy).state === :evaluate
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
    strategy = training_strategy(2)
    setup(strategy, Linear(at(:destroy_replica!, replica -> error("it stays"))))
    @test_logs (:error, r"can return no error") (:error, r"can return no error") destroy(strategy)
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

@testset "a thousand steps leave nothing behind, and neither does a strategy that is garbage, with its model and batch" begin
    strategy = training_strategy(2)
    setup(strategy, Linear())
    any_call() = S.barrier(strategy)
    collect_garbage(any_call)
    roots = S.num_roots()
    for i in 1:1000
        S.train_batch(strategy, linear_batch(); lr = 0.001)
    end
    collect_garbage(any_call)
    @test S.num_roots() == roots
    function use_and_drop()
        dropped = training_strategy(2)
        setup(dropped, Linear())
        S.training_step(dropped, linear_batch())
        nothing
    end
    use_and_drop()
    @test S.num_roots() > roots
    collect_garbage(any_call)
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

"A model with all that is optional: a frozen parameter, buffers, a loss over what is counted. It notes what it is told."
struct Whole <: Model
    seen::Vector{Pair{Symbol,Any}}
end
Whole() = Whole(Pair{Symbol,Any}[])
noticed(model::Whole, what) = [last(pair) for pair in model.seen if first(pair) === what]

mutable struct WholeReplica
    factor::Vector{Float64}
    frozen::Vector{Float64}
    mean::Vector{Float64}
    scratch::Vector{Float64}
    generator::Vector{UInt8}
end
function S.replicate(model::Whole, replication)
    push!(model.seen, :replicate => replication)
    WholeReplica([1.0], [2.0], [3.0], [4.0], [0x00, UInt8(replication.replica)])
end
function S.parameters(model::Whole, replica)
    any(==(replica), noticed(model, :replica)) || push!(model.seen, :replica => replica)
    [Parameter("factor", replica.factor), Parameter("frozen", replica.frozen; requires_grad = false)]
end
S.buffers(::Whole, replica) = [Parameter("mean", replica.mean), Parameter("scratch", replica.scratch; persistent = false)]
S.set_mode!(model::Whole, replica, train) = push!(model.seen, :mode => train)
S.parameters_changed!(model::Whole, replica) = push!(model.seen, :changed => replica)
S.destroy_replica!(model::Whole, replica) = push!(model.seen, :destroyed => replica)
S.generator_state(::Whole, replica) = replica.generator
S.set_generator_state!(::Whole, replica, state) = (replica.generator = state; nothing)
function S.step(model::Whole, replica, context, batch)
    push!(model.seen, :step => context)
    haskey(batch, "bare") && return 1.0
    counted = sum(batch["count"])
    StepOutput((loss = replica.factor[1] * sum(batch["count"] .* batch["x"]) / counted,); denominator = counted, graph = batch)
end
function S.backward(::Whole, replica, graph, scale, ready)
    ready(1, [scale * sum(graph["count"] .* graph["x"]) / sum(graph["count"])])
    haskey(graph, "thaw") && ready(2, [1.0])
end
const COUNTED = (x = [1.0, 2, 3, 4], count = [1.0, 1, 1, 5])  # a mean of 26 / 8; without the counts 2.5

function whole_strategy(num_devices = 2; log = nothing, config...)
    model = Whole()
    strategy = a_strategy(num_devices; log = log, config = (precision = "64-true", optimizer = (name = "sgd", lr = 1), config...))
    setup(strategy, model)
    strategy, model
end

@testset "a model is told what it is to make, and in which mode it is" begin
    strategy, model = whole_strategy(; seed = 7)
    made = noticed(model, :replicate)
    @test [(r.device, r.replica, r.num_replicas, r.floating_type, r.seed) for r in made] ==
          [(Device(:cpu, i), i, 2, Float64, 7) for i in 0:1]
    S.validation_step(strategy, COUNTED; batch_index = 4, dataloader_index = 1)
    @test noticed(model, :mode)[end] === false
    S.training_step(strategy, COUNTED; batch_index = 5, global_step = 9)
    @test noticed(model, :mode)[end] === true
    S.test_step(strategy, COUNTED)
    validation, training, test = noticed(model, :step)[[2, 4, 6]]
    @test (validation.stage, validation.gradient, validation.batch_index, validation.dataloader_index) == (:validate, false, 4, 1)
    @test (training.stage, training.gradient, training.batch_index, training.global_step) == (:fit, true, 5, 9)
    @test (training.device, training.replica, training.num_replicas) == (Device(:cpu, 1), 1, 2)
    @test test.stage === :test
    @test isempty(noticed(model, :destroyed))
    destroy(strategy)
    @test length(noticed(model, :destroyed)) == 2
end

@testset "shares are weighed by what they count, and what is frozen stays" begin
    strategy, model = whole_strategy()
    result, update = S.train_batch(strategy, COUNTED; lr = 1)
    @test result.outputs["loss"][] ≈ 26 / 8 && result.weights == [2, 6] && update.total_weight == 8
    state = S.export_state(strategy)["model"]
    @test collect(keys(state)) == ["factor", "frozen", "mean"]  # no scratch
    @test state["factor"] ≈ [1 - 26 / 8] && state["frozen"] == [2] && state["mean"] == [3]
    e = caught(() -> S.train_batch(strategy, merge(COUNTED, (thaw = true,)); lr = 1))
    @test e isa StratagemError && occursin("frozen", sprint(showerror, e))
    e = caught(() -> S.train_batch(strategy, merge(COUNTED, (bare = true,)); lr = 1))
    @test e isa StratagemError && occursin("returned a Float64, not a StepOutput", sprint(showerror, e))
    destroy(strategy)
end

@testset "gradients are gathered over micro-batches, dropped by zero_grad, and clipped" begin
    strategy, model = whole_strategy()
    factor() = S.export_state(strategy)["model"]["factor"][1]
    result, update = S.train_batch(strategy, COUNTED; lr = 1, last = false)
    @test update.outcome === :none && S.status(strategy).num_micro_batches == 1
    S.zero_grad(strategy)
    @test S.status(strategy).num_micro_batches == 0
    S.train_batch(strategy, COUNTED; lr = 1, last = false)
    update = S.train_batch(strategy, (x = [10.0, 10], count = [4.0, 4]); lr = 1)[2]
    @test update.outcome === :done && update.total_weight == 16 && S.status(strategy).num_updates == 1
    @test factor() ≈ 1 - (26 + 80) / 16
    before = factor()
    S.training_step(strategy, COUNTED)
    S.backward(strategy; last = false)
    update = S.optimizer_step(strategy; lr = 0.5, clip = :value, clip_limit = 2)
    @test factor() ≈ before - 0.5 * 2 && isnan(update.gradient_norm) && update.loss_scale == 1
    @test S.train_batch(strategy, COUNTED; lr = 0.5, clip = :norm, clip_limit = 2)[2].gradient_norm ≈ 26 / 8
    @test factor() ≈ before - 2 * 0.5 * 2
    e = caught(() -> S.train_batch(strategy, (x = [NaN, 1], count = [1.0, 1]); lr = 1, detect_anomaly = true))
    @test e isa StratagemError && occursin("NaN", sprint(showerror, e))
    destroy(strategy)
end

@testset "what a host writes into the root's parameters goes to every replica" begin
    for refresh in (S.parameters_changed, S.model_to_device)
        strategy, model = whole_strategy()
        root, other = noticed(model, :replica)
        root.factor[1] = 5
        refresh(strategy)
        @test other.factor == [5]
        empty!(model.seen)
        S.validation_step(strategy, COUNTED)
        @test other in noticed(model, :changed)  # so that what it derives from them is made anew
        destroy(strategy)
    end
end

@testset "each replica has its own generator in the state" begin
    strategy, model = whole_strategy()
    state = S.export_state(strategy)
    @test state["generators"] == [S.Bytes([0x00, 0x00]), S.Bytes([0x00, 0x01])]
    state["generators"] = [S.Bytes([0x05]), S.Bytes([0x06])]
    state["model"]["more"] = [1.0]
    report = S.import_state(strategy, state; strict = false)
    @test report["unexpected"] == ["more"]
    @test [replica.generator for replica in noticed(model, :replica)] == [[0x05], [0x06]]
    @test fails(() -> S.import_state(strategy, state), S.STG_INVALID_ARGUMENT, "more")
    destroy(strategy)
end

@testset "a strategy's log reaches Julia, and what it throws is told" begin
    logged = []
    strategy, model = whole_strategy(; log = (level, message) -> push!(logged, (level, message)))
    S.train_batch(strategy, (x = [1.0], count = [0.0]); lr = 1)
    @test length(logged) == 1 && logged[1][1] === :warning && occursin("denominators", logged[1][2])
    destroy(strategy)
    strategy, model = whole_strategy(; log = (level, message) -> error("not a word"))
    e = caught(() -> S.train_batch(strategy, (x = [1.0], count = [0.0]); lr = 1))
    @test e isa CapturedException && e.ex == ErrorException("not a word")
    @test S.train_batch(strategy, COUNTED; lr = 1)[2].outcome === :done
    destroy(strategy)
end

"A factory of models that makes one of Julia's, with the one reference that is the caller's."
function make_ours(options::S.stg_string, host::Ptr{S.stg_host}, out::Ptr{Ptr{S.stg_model}})
    handle = S.model_table(Linear())
    S.counted_retain(handle.table.self)
    unsafe_store!(out, S.pointer_of(handle))
    Ptr{S.stg_error}(0)
end

@testset "a library's model is used by its name and options, and released once" begin
    plugin = Plugin(joinpath(ENV["STRATAGEM_TEST_PLUGINS"], "fashion_cnn.so"))
    @test plugin.models[1].name == "fashion_cnn" && S.JSON.parse(plugin.models[1].options_schema) isa TreeDict
    strategy = a_strategy(2; config = (optimizer = (name = "sgd", lr = 0.1),))
    setup(strategy, S.LibraryModel(plugin, "fashion_cnn", (channels = 3,)))
    images = (inputs = rand(UInt8, 28, 28, 5), targets = collect(0:4))
    @test S.train_batch(strategy, images; lr = 0.1)[1].weights == [3, 2]
    @test any(array -> array isa Array && size(array)[end] == 3, values(S.export_state(strategy)["model"]))
    @test fails(() -> S.LibraryModel(plugin, "fashion_cnm"), S.STG_NOT_FOUND, "fashion_cnm", "it offers: fashion_cnn")
    destroy(strategy)
    ours = Plugin("", "", "", [], [S.ModelFactory("ours", "", "", S.@callback stg_model_factory_create make_ours)])
    drop() = (S.LibraryModel(ours, "ours"); nothing)
    roots = S.num_roots()
    drop()
    @test S.num_roots() == roots + 1
    collect_garbage()
    @test S.num_roots() == roots
end
