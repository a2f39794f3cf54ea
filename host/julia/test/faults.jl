# SPDX-License-Identifier: Apache-2.0

include("linear_model.jl")

@testset "a file that is no plugin, or a faulty one, is refused in words" begin
    @test fails(() -> Plugin("/nowhere/x.so"), S.STG_NOT_FOUND, "/nowhere/x.so")
    @test fails(() -> Plugin(@__FILE__), S.STG_FAILED_PRECONDITION, "faults.jl")
    @test fails(() -> Plugin("libm.so.6"), S.STG_FAILED_PRECONDITION, "stg_plugin_probe", "no plugin") ||
          fails(() -> Plugin("libm.so.6"), S.STG_NOT_FOUND, "libm")
    bad(name) = joinpath(ENV["STRATAGEM_TEST_BAD_PLUGINS"], "$name.so")
    @test fails(() -> Plugin(bad("no_probe")), S.STG_FAILED_PRECONDITION, "stg_plugin_probe")
    @test fails(() -> Plugin(bad("missing_dependency")), S.STG_FAILED_PRECONDITION, "libdep")
    @test fails(() -> Plugin(bad("refuses")), S.STG_FAILED_PRECONDITION, "refuses")
    @test fails(() -> Plugin(bad("odd_answer")), S.STG_FAILED_PRECONDITION, "refuses")
    @test fails(() -> Plugin(bad("null_table")), S.STG_INVALID_ARGUMENT, "null")
    @test fails(() -> Plugin(bad("null_factory")), S.STG_INVALID_ARGUMENT, "null")
    @test fails(() -> Plugin(bad("small_table")), S.STG_INVALID_ARGUMENT, "bytes")
    @test fails(() -> Plugin(bad("huge_table")), S.STG_INVALID_ARGUMENT, "bytes")
end

@testset "a garbage config is refused" begin
    plugin = Plugin(ENV["STRATAGEM_TEST_PLUGIN"])
    create(config) = Strategy(plugin, ENV["STRATAGEM_TEST_STRATEGY"]; config = config)
    @test fails(() -> create("{\"devices\": "), S.STG_INVALID_ARGUMENT)
    @test fails(() -> create("\0\xff"), S.STG_INVALID_ARGUMENT)
    @test fails(() -> create((devices = -1,)), S.STG_INVALID_ARGUMENT, "devices")
    @test fails(() -> create((devices = 2, nonsense = 1)), S.STG_INVALID_ARGUMENT, "nonsense")
    @test caught(() -> create((devices = sin,))) isa ArgumentError
end

@testset "gradients that don't fit are refused, and nothing is written" begin
    strategy = a_strategy(2)
    setup(strategy)
    first_set = [1.0, 2]
    reduce(sets; options...) = caught(() -> reduce_gradients(strategy, sets; options...))
    @test reduce([Any[first_set], Any[Float32[1, 2]]]).code == S.STG_INVALID_ARGUMENT
    @test reduce([Any[first_set], Any[[1.0, 2, 3]]]).code == S.STG_INVALID_ARGUMENT
    @test reduce([Any[first_set], Any[first_set]]).code == S.STG_INVALID_ARGUMENT  # the same memory twice
    @test reduce([Any[first_set]]).code == S.STG_INVALID_ARGUMENT  # two devices
    @test reduce([Any[first_set], Any[[1.0, 2]]]; weights = [0, 0]).code == S.STG_INVALID_ARGUMENT
    @test reduce([Any[first_set], Any[[1.0, 2]]]; weights = [1]) isa DimensionMismatch
    @test reduce([Any[first_set], Any[[1.0, 2]]]; op = :product) isa ArgumentError
    @test reduce([Any[first_set], Any[1.0:2.0]]) isa ArgumentError  # can't be written
    @test reduce([Any[first_set], Any[['a', 'b']]]) isa ArgumentError
    @test first_set == [1, 2]
    destroy(strategy)
end

@testset "calls that come at the wrong time are refused" begin
    strategy = a_strategy(2)
    @test fails(() -> S.training_step(strategy, linear_batch()), S.STG_FAILED_PRECONDITION)
    setup(strategy)
    @test fails(() -> setup(strategy), S.STG_FAILED_PRECONDITION)
    destroy(strategy)
    destroy(strategy)
    for call in (s -> S.barrier(s), s -> S.status(s), s -> setup(s), s -> S.abort(s), s -> reduce_gradients(s, []))
        @test fails(() -> call(strategy), S.STG_FAILED_PRECONDITION, "destroyed")
    end
    @test !isopen(strategy)
    strategy = a_strategy(2)
    S.abort(strategy)
    @test fails(() -> setup(strategy), S.STG_FAILED_PRECONDITION) || fails(() -> setup(strategy), S.STG_ABORTED)
    destroy(strategy)
end

@testset "what needs Julia's own thread asks for it" begin
    strategy = try
        a_strategy(2; caller_thread_only = false)
    catch
        nothing  # a plugin may have no other way than the caller's thread
    end
    if strategy !== nothing
        @test caught(() -> setup(strategy, Linear())) isa ArgumentError
        setup(strategy)
        sets = [Any[[1.0]], Any[[3.0]]]
        reduce_gradients(strategy, sets)
        @test sets[1][1] == sets[2][1] == [2]
        destroy(strategy)
    end
    @test caught(() -> a_strategy(2; caller_thread_only = false, log = (l, m) -> nothing)) isa ArgumentError
end
