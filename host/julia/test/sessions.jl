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
    @test "plugin-folders" in [check["id"] for check in S.doctor()["checks"]]
    @test fails(() -> S.doctor("/nowhere.json"), S.STG_NOT_FOUND, "/nowhere.json")
    @test S.inspect_plugin(path)["name"] == "data_parallel"
    @test S.describe_plugin(path)["strategies"][1]["name"] == "data_parallel"
    @test haskey(S.options_schema("fashion_cnn"; is_model = true)["properties"], "channels")
    @test S.options_schema("data_parallel")["type"] == "object"
    @test fails(() -> S.options_schema("fashion_cnn"), S.STG_NOT_FOUND, "fashion_cnn")
    mktempdir() do folder
        config = joinpath(folder, "config.json")
        write(config, S.JSON.text(a_config(; plugin_path = [folder])))
        listed = S.list_plugins(config)
        @test listed["folders"][1]["path"] == folder
    end
end

@testset "a run with a model and data of Julia's is what Julia alone computes" begin
    roots = S.num_roots()
    losses, ends, logged = Float64[], [], Float64[]
    session = a_session(; events = (batch_end = (p, outputs) -> push!(losses, outputs[]), progress = p -> push!(ends, p.step),
                                    metrics = line -> haskey(line, "loss") && push!(logged, line["loss"])))
    result = S.run!(session)
    @test result["steps"] == 8
    @test losses ≈ losses_by_hand() rtol = 1e-12
    @test ends == 1:8 && logged == losses
    p = S.progress(session)  # as of the last update
    @test p == (stage = :fit, epoch = 1, max_epochs = 2, batch = 4, num_batches = 4, step = 8, max_steps = -1, loss = p.loss)
    @test p.loss ≈ losses[end] && startswith(sprint(show, session), "Session(") && occursin(r"[1-9]", sprint(show, session))
    close(session)
    session = nothing
    collect_garbage()
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
    @test [event["line"]["loss"] for event in waiting if event["event"] == "metrics" && haskey(event["line"], "loss")] ≈ losses_by_hand() rtol = 1e-12
    @test @elapsed(@test S.poll(session; timeout = 0.05) === nothing) >= 0.05
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

@testset "an own loop swaps between updates, not while gradients wait" begin
    session = a_session(; own_loop = true, sources = DataSource[])
    swap() = swap!(session, (name = "single_device", accelerator = "cpu"))
    S.train_batch(S.strategy(session), rows_of(1:5); lr = 0.1, last = false)
    @test fails(swap, S.STG_FAILED_PRECONDITION, "gradients of 1 micro-batches", "zero_grad")
    lent = S.strategy(session)
    @test S.train_batch(lent, rows_of(6:10); lr = 0.1)[2].total_weight == 10  # none is lost
    S.training_step(lent, rows_of(1:5))
    @test fails(swap, S.STG_FAILED_PRECONDITION, "training_step without its backward")
    S.zero_grad(S.strategy(session))
    @test swap() === nothing && length(devices(S.strategy(session))) == 1
    @test fails(() -> S.request_swap(session, (name = "single_device",)), S.STG_FAILED_PRECONDITION, "STG_SESSION_OWN_LOOP")
    @test fails(() -> step!(session), S.STG_FAILED_PRECONDITION)
    close(session)
end

thrown(e) = e isa CapturedException ? e.ex : e isa StratagemError ? thrown(e.cause) : nothing
const BROKEN = ErrorException("it is broken")

@testset "what a callback throws ends the run at that update, as the cause, and the run goes on from what was saved" begin
    # Who throws when it is called for the third time, and how many updates are done by then.
    for (name, num_done) in (:batch_start => 2, :batch_end => 3, :progress => 3, :metrics => 3, :swap => 3, :read => 2, :step => 2)
        mktempdir() do folder
            num_calls, losses = Ref(name === :swap ? 2 : name === :step ? -3 : 0), Float64[]  # a step on each of two devices
            third_throws(arguments...) = (num_calls[] += 1) == 3 && throw(BROKEN)
            record(p, outputs) = push!(losses, outputs[])
            config = a_config(; checkpoint = (dir = folder,), trainer = (max_epochs = 2, log_every_n_steps = 1))
            events = name in S.EVENTS ? NamedTuple{(name,)}((third_throws,)) : NamedTuple()
            session = a_session(config; events = merge((batch_end = record,), events),
                                sources = [a_source(rows -> (name === :read && third_throws(); rows_of(rows)))],
                                model = Linear((place, arguments...) -> name === :step && place === :step && third_throws()))
            if name === :swap
                step!(session, 3)
                S.request_swap(session, (name = "single_device", accelerator = "cpu"))
            end
            e = caught(() -> S.run!(session))
            @test (name, thrown(e)) == (name, BROKEN)
            name in S.EVENTS && @test occursin(string(name), sprint(showerror, e))
            @test (name, num_calls[]) == (name, 3)  # no update was begun after it
            close(session)
            session = a_session(config; checkpoint = folder, events = (batch_end = record,))
            @test (name, S.progress(session).step) == (name, num_done)  # where it goes on, before it does
            @test S.run!(session)["steps"] == 8
            @test losses[end-7+num_done:end] ≈ losses_by_hand()[num_done+1:8] rtol = 1e-12
            close(session)
        end
    end
    @test caught(() -> S.fit(a_config(); model = Linear(), sources = [a_source(rows -> "no tensors")])) isa StratagemError
    @test caught(() -> S.fit(a_config(); model = Linear(), sources = [a_source(rows -> (x = ['a'],))])) isa StratagemError
end

@testset "what a log event throws, which can return no error, is told by the call that it comes in; the run goes on" begin
    session = a_session(; events = (log = (level, message) -> throw(BROKEN),))
    S.request_swap(session, (name = "no_such_strategy",))
    @test thrown(caught(() -> step!(session))) == BROKEN
    @test S.run!(session)["steps"] == 8
    close(session)
    collect_garbage()
    roots, logged = S.num_roots(), []
    late = a_config(; trainer = (max_steps = 2,), swap = [(at_step = 5, strategy = (name = "single_device", accelerator = "cpu"))])
    open(log) = caught(() -> close(a_session(late; events = (log = log,))))
    @test open((level, message) -> push!(logged, level => message)) === nothing
    @test any(pair -> first(pair) === :warning && occursin("at_step is 5", last(pair)), logged)
    @test thrown(open((level, message) -> throw(BROKEN))) == BROKEN
    collect_garbage()
    @test S.num_roots() == roots  # the session was open; it is garbage, and closed
end

@testset "a session that is closed, or garbage, or none, is refused" begin
    session = a_session()
    close(session)
    close(session)
    for call in (step!, S.run!, S.progress, S.strategy, s -> swap!(s, (name = "single_device",)), S.poll)
        @test fails(() -> call(session), S.STG_FAILED_PRECONDITION)
    end
    @test (S.cancel(session); S.request_stop(session); S.request_reload(session)) === nothing
    roots = S.num_roots()
    close_it(arguments...) = (close(closing_ref[]); nothing)
    for options in ((events = (batch_start = close_it,),), (events = (progress = close_it,),), (sources = [a_source(rows -> (close_it(); rows_of(rows)))],))
        closing_ref[] = a_session(; options...)
        @test S.run!(closing_ref[])["interrupted"] == true  # it finishes its update
        @test fails(() -> step!(closing_ref[]), S.STG_FAILED_PRECONDITION)
    end
    collect_garbage()
    @test S.num_roots() == roots
    drop() = (a_session(); nothing)
    for _ in 1:20
        drop()
    end
    collect_garbage()
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

@testset "a config's file is read again, and its strategy taken" begin
    mktempdir() do folder
        path, swaps = joinpath(folder, "config.json"), []
        write(path, S.JSON.text(a_config()))
        session = a_session(path; events = (swap = (step, strategy, error) -> push!(swaps, (step, strategy["name"], error)),))
        step!(session, 2)
        write(path, S.JSON.text(a_config(; strategy = (name = "single_device", accelerator = "cpu"))))
        S.request_reload(session)
        @test S.run!(session)["steps"] == 8 && swaps == [(2, "single_device", nothing)]
        close(session)
    end
end

@testset "fit opens, runs and closes" begin
    collect_garbage()
    num_sources() = count(object -> object isa S.SourceHandle, values(S.ROOTS))
    @test num_sources() == 0
    @test S.fit(a_config(); model = Linear(), sources = [a_source()])["steps"] == 8 && num_sources() == 0
    @test thrown(caught(() -> S.fit(a_config(); model = Linear(), sources = [a_source(rows -> throw(BROKEN))]))) == BROKEN && num_sources() == 0
end

@testset "every option of a session is heard" begin
    mktempdir() do folder
        data = (train = (source = "rows", batch_size = 5), validation = (source = "rows", batch_size = 5), test = (source = "rows", batch_size = 20),
                predict = (source = "rows", batch_size = 5))
        config = a_config(; data = data, checkpoint = (dir = "run",))
        fit(stage; options...) = S.fit(config; model = Linear(), sources = [a_source()], folder = folder, stage = stage, options...)
        @test fit(:fit; overrides = ["trainer.max_steps" => 3, "trainer.max_epochs" => -1])["steps"] == 3
        saved = joinpath(folder, "run", "step-00000003")
        @test isdir(saved)
        seen = []
        note(p) = push!(seen, (p.stage, p.batch, p.num_batches))
        trained, fresh = (fit(:validate; options..., events = (progress = note,)) for options in ((checkpoint = saved,), NamedTuple()))
        @test seen[1:4] == [(:validate, i, 4) for i in 1:4]
        @test trained != fresh
        empty!(seen)
        fit(:test; checkpoint = saved, events = (progress = note,))
        @test seen == [(:test, 1, 1)]
        fit(:predict; checkpoint = saved, output = joinpath(folder, "out.npz"))
        @test isfile(joinpath(folder, "out.npz"))
    end
    config = a_config(; strategy = (name = "data_parallel", accelerator = "cpu", devices = 3), model = (kind = "library", name = "fashion_cnn"))
    on_callers, on_theirs = map((true, false)) do caller_thread_only
        session = Session(config; own_loop = true, caller_thread_only = caller_thread_only)
        S.validation_step(S.strategy(session), (inputs = zeros(UInt8, 28, 28, 4), targets = zeros(Int, 4)))
        num_threads = length(readdir("/proc/self/task"))
        close(session)
        num_threads
    end
    @test on_theirs >= on_callers + 2
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
    roots = S.num_roots()
    @test open(a_config(); model = Linear(), sources = [a_source()], stage = :fly) isa ArgumentError
    @test S.num_roots() == roots
    @test open(a_config(); events = (noise = () -> 1,)) isa ArgumentError
    @test open(a_config(); model = Linear(), caller_thread_only = false) isa ArgumentError
    collect_garbage()
    @test fails(() -> S.library_symbol(:stg_no_such_function), S.STG_UNIMPLEMENTED, "stg_no_such_function")
    @test caught(() -> S.library!("/nowhere/libstratagem.so")) isa ArgumentError  # there is one already
    here, S.LIBRARY[] = S.LIBRARY[], C_NULL
    @test fails(() -> S.library!("/nowhere/libstratagem.so"), S.STG_NOT_FOUND, "/nowhere/libstratagem.so", "STRATAGEM_LIBRARY")
    S.LIBRARY[] = here
end
