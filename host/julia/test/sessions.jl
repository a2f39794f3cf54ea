# SPDX-License-Identifier: Apache-2.0
#
# Runs through libstratagem: with a model and data of Julia's, so that callbacks of every kind are in it.

include("linear_model.jl")

const closing_ref = Ref{Session}()
const ROWS = linear_batch(20)
rows_of(rows) = (x = ROWS.x[:, rows], y = ROWS.y[:, rows])
a_source(read = rows_of) = DataSource(read, "rows", 20)

a_config(; options...) = merge(
    (strategy = (name = "data_parallel", accelerator = "cpu", devices = 2), precision = "64-true", model = (kind = "host",),
     optimizer = (name = "sgd", lr = 0.1), data = (train = (source = "rows", batch_size = 5),), trainer = (max_epochs = 2, log_every_n_steps = 1)),
    values(options))
a_session(config = a_config(); model = Linear(), sources = [a_source()], options...) = Session(config; model = model, sources = sources, options...)

"The losses of eight updates in Julia alone."
function losses_by_hand()
    replica = S.replicate(Linear(), nothing)
    map(1:8) do i
        batch = rows_of(5*((i-1)%4)+1:5*((i-1)%4)+5)
        distance = replica.weight * batch.x .+ replica.bias .- batch.y
        replica.weight .-= 0.1 * 2 / 5 .* distance * batch.x'
        replica.bias .-= 0.1 * 2 / 5 .* vec(sum(distance; dims = 2))
        sum(abs2, distance) / 5
    end
end

@testset "libstratagem says what it is and what there is" begin
    @test occursin(r"^1\.", S.version())
    @test haskey(S.config_schema(), "properties")
    listed = S.list_plugins()
    path = joinpath(ENV["STRATAGEM_TEST_PLUGINS"], "data_parallel.so")
    @test !isempty(listed["plugins"])
    @test S.inspect_plugin(path)["name"] == "data_parallel"
    @test S.describe_plugin(path)["strategies"][1]["name"] == "data_parallel"
    @test S.options_schema("data_parallel") isa TreeDict
    @test S.load_plugin(path).strategies[1].name == "data_parallel"
end

@testset "a run with a model and data of Julia's is what Julia alone computes" begin
    roots = S.num_roots()
    losses, ends = Float64[], []
    session = a_session(; events = (batch_end = (p, outputs) -> push!(losses, outputs[]),
                                    progress = p -> push!(ends, p.step)))
    result = S.run!(session)
    @test result["steps"] == 8
    @test losses ≈ losses_by_hand() rtol = 1e-12
    @test ends == 1:8
    @test (S.progress(session).step, S.progress(session).epoch, S.progress(session).batch) == (8, 1, 4)  # as of the last update
    close(session)
    session = nothing
    for _ in 1:3
        GC.gc()
        S.release_pending()
    end
    @test S.num_roots() == roots
end

@testset "step by step, with a strategy that is swapped in between" begin
    losses, swaps = Float64[], []
    session = a_session(; queue_events = true, events = (batch_end = (p, outputs) -> push!(losses, outputs[]),
                                                         swap = (step, strategy, error) -> push!(swaps, (step, strategy["name"], error))))
    @test !step!(session, 3)
    @test swap!(session, (name = "single_device", accelerator = "cpu")) === nothing
    @test !step!(session)
    @test fails(() -> swap!(session, (name = "no_such_strategy",)), S.STG_NOT_FOUND, "no_such_strategy") ||
          fails(() -> swap!(session, (name = "no_such_strategy",)), S.STG_INVALID_ARGUMENT, "no_such_strategy")
    S.request_swap(session, (name = "data_parallel", accelerator = "cpu", devices = 3))
    @test step!(session, 100)
    @test losses ≈ losses_by_hand() rtol = 1e-12
    @test swaps[1] == (3, "single_device", nothing) && swaps[end] == (4, "data_parallel", nothing)
    @test any(swap -> swap[3] isa StratagemError, swaps)
    @test S.run!(session)["steps"] == 8
    waiting = S.events(session)
    kinds = Set(event["event"] for event in waiting)
    @test issubset(["log", "progress", "metrics", "swap"], kinds)
    @test [event["line"]["loss"] for event in waiting if event["event"] == "metrics" && haskey(event["line"], "loss")] isa Vector
    @test S.poll(session; timeout = 0.01) === nothing
    close(session)
end

@testset "a strategy that a session lends is driven by hand, until the session goes on" begin
    session = a_session()
    lent = S.strategy(session)
    @test length(devices(lent)) == 2
    @test S.validation_step(lent, rows_of(1:5)).weights == [3, 2]
    @test fails(() -> destroy(lent), S.STG_FAILED_PRECONDITION, "session")
    step!(session)
    @test fails(() -> S.barrier(lent), S.STG_FAILED_PRECONDITION, "lent")
    lent = S.strategy(session)
    close(session)
    @test fails(() -> S.barrier(lent), S.STG_FAILED_PRECONDITION, "lent")
    session = a_session(; own_loop = true, sources = DataSource[])
    lent = S.strategy(session)
    @test S.train_batch(lent, rows_of(1:5); lr = 0.1)[1].outputs[] ≈ losses_by_hand()[1]
    close(session)
end

@testset "what a callback throws ends the run, as the cause" begin
    thrown(e) = e isa CapturedException ? e.ex : e isa StratagemError ? thrown(e.cause) : nothing
    broken = ErrorException("it is broken")
    for (name, options) in (:batch_start => (events = (batch_start = p -> throw(broken),),),
                            :batch_end => (events = (batch_end = (p, o) -> throw(broken),),),
                            :progress => (events = (progress = p -> throw(broken),),),
                            :read => (sources = [a_source(rows -> throw(broken))],),
                            :step => (model = Linear((place, arguments...) -> place === :step && throw(broken)),))
        e = caught() do
            session = a_session(; options...)
            try
                S.run!(session)
            finally
                close(session)
            end
        end
        @test (name, thrown(e)) == (name, broken)
    end
    session = a_session(; events = (log = (level, message) -> throw(broken),))  # which can return no error: told when the call is back
    S.request_swap(session, (name = "no_such_strategy",))
    @test thrown(caught(() -> step!(session))) == broken
    @test S.run!(session)["steps"] == 8
    close(session)
    @test caught(() -> S.fit(a_config(); model = Linear(), sources = [a_source(rows -> "no tensors")])) isa StratagemError
    @test caught(() -> S.fit(a_config(); model = Linear(), sources = [a_source(rows -> (x = ['a'],))])) isa StratagemError
end

@testset "a session that is closed, or garbage, or none, is refused" begin
    session = a_session()
    close(session)
    close(session)
    for call in (step!, S.run!, S.progress, S.strategy, s -> swap!(s, (name = "single_device",)), S.poll)
        @test fails(() -> call(session), S.STG_FAILED_PRECONDITION)
    end
    @test (S.cancel(session); S.request_stop(session); S.request_reload(session)) === nothing
    closing = a_session(; events = (batch_start = p -> close(closing_ref[]),))
    closing_ref[] = closing
    @test caught(() -> S.run!(closing)) isa Union{Nothing,StratagemError}
    @test fails(() -> step!(closing), S.STG_FAILED_PRECONDITION)
    drop() = (a_session(); nothing)
    for _ in 1:20
        drop()
    end
    for _ in 1:3
        GC.gc()
        S.version()
        S.release_pending()
    end
    @test isempty(S.PENDING)
end

@testset "a run is stopped and cancelled by its own events" begin
    session_ref = Ref{Session}()
    session_ref[] = a_session(; events = (progress = p -> p.step == 3 && S.request_stop(session_ref[]),))
    result = S.run!(session_ref[])
    @test result["interrupted"] == true && result["steps"] == 3
    close(session_ref[])
    session_ref[] = a_session(; events = (progress = p -> p.step == 3 && S.cancel(session_ref[]),))
    @test fails(() -> S.run!(session_ref[]), S.STG_CANCELLED)
    close(session_ref[])
end

@testset "two tasks, or two threads, on one session are told" begin
    inside, go_on = Channel{Nothing}(1), Channel{Nothing}(1)
    first_time = Ref(true)
    hook(p) = first_time[] && (first_time[] = false; put!(inside, nothing); take!(go_on))
    session = a_session(; events = (batch_start = hook,))
    task = @async S.run!(session)
    take!(inside)
    @test fails(() -> step!(session), S.STG_FAILED_PRECONDITION)
    @test fails(() -> S.run!(session), S.STG_FAILED_PRECONDITION)
    @test S.progress(session).step == 0  # asking is allowed
    put!(go_on, nothing)
    @test fetch(task)["steps"] == 8
    close(session)
    if Threads.nthreads() > 1
        started, may_end = Threads.Atomic{Bool}(false), Threads.Atomic{Bool}(false)
        session = a_session(; events = (batch_start = p -> (started[] = true; while !may_end[]; GC.safepoint(); end),))
        other = Threads.@spawn S.run!(session)
        while !started[]
            GC.safepoint()
            yield()
        end
        @test fails(() -> step!(session), S.STG_FAILED_PRECONDITION)
        may_end[] = true
        @test fetch(other)["steps"] == 8
        close(session)
    end
end

@testset "a wrong config is refused with all that is wrong in it" begin
    open(config; options...) = caught(() -> Session(config; options...))
    @test open("{\"strategy\": ").code == S.STG_INVALID_ARGUMENT
    @test open("\0\xff\xfe") isa StratagemError
    @test open("/nowhere/config.json").code == S.STG_NOT_FOUND
    e = open(a_config(; strategy = (name = "data_parallel", devices = -1), nonsense = 1); model = Linear(), sources = [a_source()])
    @test e.code == S.STG_INVALID_ARGUMENT && occursin("devices", e.message) && occursin("nonsense", e.message)
    @test open(a_config(); sources = [a_source()]) isa StratagemError  # no model
    @test open(a_config(); model = Linear()) isa StratagemError        # no such source
    @test open((a = NaN,)) isa ArgumentError
    @test open(a_config(); stage = :fly) isa ArgumentError
    @test open(a_config(); events = (noise = () -> 1,)) isa ArgumentError
    @test open(a_config(); model = Linear(), caller_thread_only = false) isa ArgumentError
    for _ in 1:3
        GC.gc()
        S.release_pending()
    end
    @test fails(() -> S.library_symbol(:stg_no_such_function), S.STG_UNIMPLEMENTED, "stg_no_such_function")
    @test fails(() -> S.load_plugin(@__FILE__), S.STG_FAILED_PRECONDITION) || fails(() -> S.load_plugin(@__FILE__), S.STG_INVALID_ARGUMENT)
    @test fails(() -> S.load_plugin("/nowhere.so"), S.STG_NOT_FOUND)
    @test caught(() -> S.library!("/nowhere/libstratagem.so")) isa ArgumentError  # there is one already
end
