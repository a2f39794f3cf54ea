# SPDX-License-Identifier: Apache-2.0

@testset "a plugin tells what it offers" begin
    plugin = Plugin(ENV["STRATAGEM_TEST_PLUGIN"])
    factory = first(plugin.strategies)
    @test factory.name == ENV["STRATAGEM_TEST_STRATEGY"] && :cpu in factory.device_kinds && !isempty(factory.summary)
    @test S.JSON.parse(factory.options_schema) isa TreeDict
    @test fails(() -> Strategy(plugin, "nope"), S.STG_NOT_FOUND, "nope", factory.name)
end

@testset "gradients of Julia's arrays are reduced in place" begin
    strategy = a_strategy(2)
    @test devices(strategy) == [Device(:cpu, 0), Device(:cpu, 1)]
    @test isopen(strategy) && S.status(strategy).state == :created
    @test S.ranks(strategy) == (global_rank = 0, local_rank = 0, node_rank = 0, world_size = 1)
    setup(strategy)
    @test S.status(strategy).state == :modelless
    sets = [Any[[1.0 2 3; 4 5 6], nothing, nothing], Any[ones(2, 3), nothing, [4.0f0, 8]]]
    reduced = reduce_gradients(strategy, sets; weights = [3, 1])
    @test sets[1][1] == sets[2][1] == [1 1.75 2.5; 3.25 4 4.75]
    @test reduced[1][1] === sets[1][1] && reduced[1][2] === nothing && reduced[1][3] == reduced[2][3] == [1, 2]
    summed = [Any[[1.0, 2]], Any[[10.0, 20]]]
    reduce_gradients(strategy, summed; op = :sum)
    @test summed[1][1] == summed[2][1] == [11, 22]
    whole = reshape(collect(1.0:12), 4, 3)
    reduce_gradients(strategy, [Any[@view whole[:, 2]], Any[zeros(4)]])
    @test whole[:, 2] == [2.5, 3, 3.5, 4] && whole[:, 1] == [1, 2, 3, 4]  # a view is written, what is beside it is not
    S.teardown(strategy)
    @test S.status(strategy).state == :created
    destroy(strategy)
end

@testset "batches, numbers and decisions go through" begin
    strategy = a_strategy(2)
    batch = (image = rand(Float32, 4, 3, 2), label = [1, 2], note = "x")
    moved = S.batch_to_device(strategy, batch)
    @test collect(keys(moved)) == ["image", "label", "note"]
    @test moved["image"] == batch.image && moved["label"] == [1, 2] && pointer(moved["image"]) != pointer(batch.image)
    @test S.broadcast(strategy, (a = [1.0], b = (1, "x")))["b"] == (1, "x")
    @test S.all_gather(strategy, [1, 2]) == [1, 2]
    @test S.reduce_boolean_decision(strategy, true) && !S.reduce_boolean_decision(strategy, false; mode = :any)
    @test S.barrier(strategy, "here") === nothing && S.barrier(strategy; timeout = 5) === nothing
    @test S.to_host(strategy, (a = [1.5],))["a"] == [1.5]
    destroy(strategy)
end

@testset "what a destroyed strategy returned stays" begin
    strategy = a_strategy(2)
    kept = S.batch_to_device(strategy, rand(1000))
    again = copy(kept)
    destroy(strategy)
    strategy = nothing
    GC.gc()
    @test kept == again
end

@testset "arguments are kept while C reads them" begin
    strategy = a_strategy(2)
    for i in 1:200
        i % 20 == 0 && GC.gc(false)
        moved = S.batch_to_device(strategy, Dict("x$j" => fill(Float64(j), 100) for j in 1:10))
        @assert all(moved["x$j"] == fill(Float64(j), 100) for j in 1:10)
    end
    GC.gc()
    S.barrier(strategy)
    @test isempty(S.PENDING)
    destroy(strategy)
end
