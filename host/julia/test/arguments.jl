# SPDX-License-Identifier: Apache-2.0
#
# What each call hands to its slot, seen from the other side: a table whose functions note what they get. So that shows, too, of which a strategy in
# one process makes nothing.

is_growing(T) = hasmethod(S.min_size, Tuple{Type{T}})
look(x) = x
look(text::S.stg_string) = String(text)
look(p::Ptr{S.stg_tree}) = p == C_NULL ? nothing : S.unpack(Ptr{S.stg_value}(p), false)
look(p::Ptr{T}) where {T} = is_growing(T) && T !== S.stg_model ? (p == C_NULL ? nothing : look(S.read_growing(p))) : p
look(x::T) where {T<:Union{S.stg_call,S.stg_create_args,S.stg_transfer_args,S.stg_step_args,S.stg_update_args,S.stg_setup_args,S.stg_checkpoint_args}} =
    NamedTuple{fieldnames(T)}(map(name -> look(getfield(x, name)), fieldnames(T)))

const noted = Ref{Any}()
note(slot, arguments, ::Type{Cvoid}) = (noted[] = (slot, map(look, arguments)); nothing)
note(slot, arguments, ::Type{Ptr{S.stg_error}}) = (note(slot, arguments, Cvoid); Ptr{S.stg_error}(0))

const SPY_SLOTS = Pair{Symbol,Ptr{Cvoid}}[]
for slot in fieldnames(S.stg_strategy_api)[2:end]
    result, types = S.SIGNATURES[Symbol(:stg_strategy_api_, slot)]
    name = Symbol(:spy_, slot)
    @eval $name(arguments...) = note($(QuoteNode(slot)), arguments, $result)
    push!(SPY_SLOTS, slot => @eval @cfunction($name, $result, ($(types...),)))
end
const SPY = Strategy(S.make(S.stg_strategy_api, (; SPY_SLOTS...)), Ptr{S.stg_strategy}(8), "spy", true, false, Threads.Atomic{Int}(0), ReentrantLock(),
                     Exception[])
"The slot that a call reaches, and what it gets behind the instance."
function handed(call)
    noted[] = nothing
    call(SPY)
    slot, arguments = noted[]
    @test arguments[1] == SPY.self
    slot, arguments[2:end]
end

const ROWS_OF_TWO = [1.0 2 3; 4 5 6]
# One call of each function that can block.
const CALLS = [
    :setup => (s; o...) -> setup(s; o...), :teardown => (s; o...) -> S.teardown(s; o...), :model_to_device => (s; o...) -> S.model_to_device(s; o...),
    :batch_to_device => (s; o...) -> S.batch_to_device(s, 1; o...), :broadcast => (s; o...) -> S.broadcast(s, 1; o...),
    :all_gather => (s; o...) -> S.all_gather(s, 1; o...), :reduce => (s; o...) -> S.reduce(s, 1; o...), :to_host => (s; o...) -> S.to_host(s, 1; o...),
    :reduce_boolean_decision => (s; o...) -> S.reduce_boolean_decision(s, true; o...), :barrier => (s; o...) -> S.barrier(s; o...),
    :training_step => (s; o...) -> S.training_step(s, 1; o...), :validation_step => (s; o...) -> S.validation_step(s, 1; o...),
    :test_step => (s; o...) -> S.test_step(s, 1; o...), :predict_step => (s; o...) -> S.predict_step(s, 1; o...),
    :backward => (s; o...) -> S.backward(s; o...), :optimizer_step => (s; o...) -> S.optimizer_step(s; lr = 1, o...),
    :train_batch => (s; o...) -> S.train_batch(s, 1; lr = 1, o...), :zero_grad => (s; o...) -> S.zero_grad(s; o...),
    :gradients => (s; o...) -> S.gradients(s; o...), :parameters_changed => (s; o...) -> S.parameters_changed(s; o...),
    :reduce_gradients => (s; o...) -> reduce_gradients(s, []; o...), :export_state => (s; o...) -> S.export_state(s; o...),
    :import_state => (s; o...) -> S.import_state(s, 1; o...), :save => (s; o...) -> S.save(s, "x"; o...), :load => (s; o...) -> S.load(s, "x"; o...)]

"C's clock, in nanoseconds."
function monotonic_clock()
    time = Ref((Int64(0), Int64(0)))
    ccall(:clock_gettime, Cint, (Cint, Ptr{Cvoid}), 1, time)
    1000000000time[][1] + time[][2]
end

@testset "every function reaches its slot, with its timeout as a deadline by C's clock" begin
    for (slot, call) in CALLS
        reached, arguments = handed(call)
        @test (slot, reached, arguments[1]) == (slot, slot, nothing)
        began = monotonic_clock()
        deadline = handed(s -> call(s; timeout = 5))[2][1].deadline_ns
        @test began + 5000000000 <= deadline <= monotonic_clock() + 5000000000
        @test caught(() -> call(SPY; timeout = 0)) isa ArgumentError
    end
    for (slot, call) in (:abort => S.abort, :status => S.status, :devices => devices, :ranks => S.ranks)
        @test handed(call)[1] == slot
    end
    blocking = [slot for (slot, _) in SPY_SLOTS if Ptr{S.stg_call} in S.SIGNATURES[Symbol(:stg_strategy_api_, slot)][2]]
    @test setdiff(blocking, first.(CALLS)) == [:announce_batch]
end

@testset "every argument arrives in its place" begin
    arguments(call) = handed(call)[2][2:end]
    state = (format = 1, model = (weight = [1.0],))
    @test arguments(s -> setup(s; stage = :test, state = state))[1].stage == S.STG_STAGE_TEST
    @test arguments(s -> setup(s; state = state))[1].state["model"]["weight"] == [1.0]
    transfer = arguments(s -> S.batch_to_device(s, ROWS_OF_TWO; device = Device(:cuda, 3), dataloader_index = 4))[1]
    @test transfer.batch == ROWS_OF_TWO && transfer.device == S.stg_device(S.STG_DEVICE_CUDA, 3) && transfer.dataloader_index == 4
    @test arguments(s -> S.batch_to_device(s, 1))[1].device == S.stg_device(S.STG_DEVICE_NONE, -1)
    @test arguments(s -> S.broadcast(s, "x"; src = 3))[1:2] == ("x", 3)
    @test arguments(s -> S.all_gather(s, "x"))[1] == "x" && arguments(s -> S.to_host(s, "x"))[1] == "x"
    for (op, number) in (:mean => S.STG_REDUCE_MEAN, :sum => S.STG_REDUCE_SUM, :min => S.STG_REDUCE_MIN, :max => S.STG_REDUCE_MAX)
        @test arguments(s -> S.reduce(s, "x"; op = op))[1:2] == ("x", number)
    end
    @test arguments(s -> S.reduce_boolean_decision(s, true))[1:2] == (1, S.STG_DECIDE_ALL)
    @test arguments(s -> S.reduce_boolean_decision(s, false; mode = :any))[1:2] == (0, S.STG_DECIDE_ANY)
    @test arguments(s -> S.barrier(s, "here")) == ("here",)
    place(args) = (args.batch, args.batch_index, args.dataloader_index, args.global_step)
    step = arguments(s -> S.training_step(s, "x"; batch_index = 5, dataloader_index = 6, global_step = 7, detect_anomaly = true))[1]
    @test place(step) == ("x", 5, 6, 7) && step.flags == S.STG_BATCH_DETECT_ANOMALY && step.update === nothing
    @test arguments(s -> S.training_step(s, "x"))[1].flags == 0
    for call in (S.validation_step, S.test_step, S.predict_step)
        @test place(arguments(s -> call(s, "x"; batch_index = 5, dataloader_index = 6))[1]) == ("x", 5, 6, 0)
    end
    @test arguments(S.backward) == (S.STG_BATCH_LAST_MICRO_BATCH,)
    @test arguments(s -> S.backward(s; last = false, detect_anomaly = true)) == (S.STG_BATCH_DETECT_ANOMALY,)
    update_of(args) = (args.lr, args.clip, args.clip_limit)
    @test update_of(arguments(s -> S.optimizer_step(s; lr = 0.5))[1]) == (0.5, S.STG_CLIP_NONE, 0)
    @test update_of(arguments(s -> S.optimizer_step(s; lr = 0.5, clip = :value, clip_limit = 2))[1]) == (0.5, S.STG_CLIP_VALUE, 2)
    step = arguments(s -> S.train_batch(s, "x"; lr = 0.5, clip = :norm, clip_limit = 2, batch_index = 5, dataloader_index = 6, global_step = 7,
                                        detect_anomaly = true))[1]
    @test place(step) == ("x", 5, 6, 7) && step.flags == S.STG_BATCH_LAST_MICRO_BATCH | S.STG_BATCH_DETECT_ANOMALY
    @test update_of(step.update) == (0.5, S.STG_CLIP_NORM, 2)
    step = arguments(s -> S.train_batch(s, "x"; lr = 0.5, last = false))[1]
    @test step.flags == 0 && step.update === nothing
    @test arguments(S.export_state)[1] == S.STG_EXPORT_COPY
    @test arguments(s -> S.import_state(s, "x"))[1:2] == ("x", S.STG_IMPORT_STRICT) && arguments(s -> S.import_state(s, "x"; strict = false))[2] == 0
    @test (a = arguments(s -> S.save(s, "folder"; host_json = "{}"))[1]; (a.path, a.host_json)) == ("folder", "{}")
    @test (a = arguments(s -> S.load(s, "folder"))[1]; (a.path, a.flags)) == ("folder", S.STG_IMPORT_STRICT)
    @test arguments(s -> S.load(s, "folder"; strict = false))[1].flags == 0
    @test caught(() -> S.reduce(SPY, 1; op = :product)) isa ArgumentError && caught(() -> S.optimizer_step(SPY; lr = 1, clip = :all)) isa ArgumentError
end

@testset "an instance is made from its config, with what it may call" begin
    plugin = Plugin("x.so", "x", "1", [S.StrategyFactory("spy", "", "", [:cpu], 0, SPY.api)], [])
    function created(; options...)
        Strategy(plugin, "spy"; options...)
        slot, (args, _) = noted[]
        @test slot === :create
        args
    end
    args = created(; config = (devices = 2, optimizer = (name = "sgd",)))
    @test args.config_json == "{\"devices\":2,\"optimizer\":{\"name\":\"sgd\"}}" && args.host === nothing && args.flags == S.STG_CREATE_CALLER_THREAD_ONLY
    @test created(; config = "{}", caller_thread_only = false).flags == 0
    @test created(; log = println).host !== nothing
    @test fails(() -> Strategy(plugin, "spi"), S.STG_NOT_FOUND, "x.so offers no strategy \"spi\"; it offers: spy")
    @test sprint(show, plugin) == "Plugin(\"x\" 1, strategies: spy, models: )" && sprint(show, SPY) == "Strategy(\"spy\")"
end

@testset "a table without a function says so" begin
    bare = Strategy(S.make(S.stg_strategy_api), SPY.self, "bare", true, false, Threads.Atomic{Int}(0), ReentrantLock(), Exception[])
    for (slot, call) in CALLS[2:end]
        slot === :reduce_gradients || @test fails(() -> call(bare), S.STG_UNIMPLEMENTED, "strategy bare has no $slot")
    end
    @test fails(() -> S.abort(bare), S.STG_UNIMPLEMENTED, "abort")
end

@testset "what a log function throws is told by the call that it was called in" begin
    seen = []
    thrown = Exception[]
    host = S.HostServices((level, message) -> (push!(seen, (level, message)); error("not a word")), thrown)
    text = "it is late"
    GC.@preserve host text S.@slot stg_host_log host.table.log host.table.self S.STG_LOG_WARNING S.borrow(text) Ptr{S.stg_tree}(0)
    @test seen == [(:warning, "it is late")]
    e = caught(() -> S.check(Ptr{S.stg_error}(0), thrown))
    @test e isa CapturedException && e.ex == ErrorException("not a word") && isempty(thrown)
    push!(thrown, e, e)
    @test fails(() -> S.check(S.guarded(() -> throw(StratagemError(S.STG_ABORTED, "first"))), thrown), S.STG_ABORTED, "first") && isempty(thrown)
end
