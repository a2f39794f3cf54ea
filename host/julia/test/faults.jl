# SPDX-License-Identifier: Apache-2.0

include("linear_model.jl")

@testset "a file that is no plugin, or a faulty one, is refused in words before any of it runs" begin
    refused(path, words...) = fails(() -> Plugin(path), S.STG_FAILED_PRECONDITION, path, words...)
    @test fails(() -> Plugin("/nowhere/x.so"), S.STG_NOT_FOUND, "/nowhere/x.so")
    @test fails(() -> Plugin("libm.so.6"), S.STG_NOT_FOUND, "libm.so.6")  # a path, not a name that the loader looks up
    @test refused(@__FILE__, "not an ELF file")
    @test refused(ENV["STRATAGEM_LIBRARY"], "is no Stratagem plugin")
    mktempdir() do folder
        @test refused(folder)
        whole = read(joinpath(ENV["STRATAGEM_TEST_PLUGINS"], "data_parallel.so"))
        for num_bytes in (0, 40, 4000, min(400000, length(whole) ÷ 2))
            path = joinpath(folder, "$num_bytes.so")
            write(path, whole[1:num_bytes])
            @test refused(path, num_bytes == 0 ? "not an ELF file" : "damaged or cut off")
        end
        path = joinpath(folder, "shared.so")
        write(path, whole)
        chmod(path, 0o777)
        @test fails(() -> Plugin(path), S.STG_PERMISSION_DENIED, path, "others can write to it")
    end
    for (name, words) in ("no_note" => "is no Stratagem plugin", "no_probe" => "no function stg_plugin_probe",
                          "missing_dependency" => "needs libdep.so, which is not found", "refuses" => "refuses this host: wants a host that was made on a Tuesday",
                          "odd_answer" => "its probe answered 77", "null_table" => "gave no table", "null_factory" => "is null",
                          "small_table" => "struct_size is 40", "huge_table" => "struct_size is 16045690981097406464", "other_major" => "ABI 2.3")
        @test refused(joinpath(ENV["STRATAGEM_TEST_BAD_PLUGINS"], "$name.so"), words)
    end
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
    @test !isopen(strategy) && endswith(sprint(show, strategy), ", ended)")
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
