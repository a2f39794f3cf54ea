# SPDX-License-Identifier: Apache-2.0

through_c(value) = (tree = S.lend(value); GC.@preserve tree S.unpack(Ptr{S.stg_value}(S.pointer_of(tree)), false))
given_to_c(value) = S.take_tree!(Ref(S.give_tree(value)))
view_of(handle) = handle.tensor.view
shape_of(handle) = handle.sizes[1:end÷2]
strides_of(handle) = handle.sizes[end÷2+1:end]

@testset "the declarations have the layout of C" begin
    @test S.check_layout() === nothing
    @test length(S.LAYOUT) > 30
    @test sizeof(S.stg_error) == 64 && fieldoffset(S.stg_tensor, 6) == 32
    args = S.make(S.stg_create_args, (flags = 1,))
    @test args.struct_size == sizeof(S.stg_create_args) && args.flags == 1 && args.host == C_NULL
    @test_throws ErrorException S.make(S.stg_create_args, (flag = 1,))
end

@testset "a struct of another minor is read as far as both know it" begin
    longer = vcat([S.make(S.stg_plugin, (num_models = 3,))], [S.make(S.stg_plugin)])
    bytes = collect(reinterpret(UInt64, longer))
    GC.@preserve bytes begin
        p = Ptr{S.stg_plugin}(pointer(bytes))
        bytes[1] = 2sizeof(S.stg_plugin)
        @test S.read_growing(p).num_models == 3
        bytes[1] = sizeof(S.stg_plugin) - 8
        @test fails(() -> S.read_growing(p), S.STG_INVALID_ARGUMENT, "72 bytes")
        bytes[1] = 0xffffffffffff
        @test fails(() -> S.read_growing(p), S.STG_INVALID_ARGUMENT)
    end
    @test fails(() -> S.read_growing(Ptr{S.stg_plugin}(0)), S.STG_INVALID_ARGUMENT, "null")
end

@testset "an array is a tensor over the same memory with its dimensions reversed" begin
    array = reshape(collect(1.0f0:24), 2, 3, 4)
    handle = S.TensorHandle(array)
    @test view_of(handle).data == pointer(array)
    @test shape_of(handle) == [4, 3, 2] && strides_of(handle) == [6, 2, 1]
    @test view_of(handle).dtype === S.stg_dtype(S.STG_DTYPE_FLOAT, 32, 1)
    part = @view array[1, 2:3, :]
    handle = S.TensorHandle(part)
    @test view_of(handle).data == pointer(array, 3) && shape_of(handle) == [4, 2] && strides_of(handle) == [6, 2]
    handle = S.TensorHandle(PermutedDimsArray(array, (3, 2, 1)))
    @test view_of(handle).data == pointer(array) && shape_of(handle) == [2, 3, 4] && strides_of(handle) == [1, 2, 6]
    backwards = @view array[:, :, end:-1:1]
    handle = S.TensorHandle(backwards)
    @test handle.array == backwards && view_of(handle).data != pointer(array)  # negative strides don't cross
    @test S.TensorHandle(1.0:3.0).array == [1, 2, 3]
    @test S.TensorHandle(trues(3)).array == [true, true, true] && S.TensorHandle(trues(3)).array isa Array{Bool}
end

@testset "what is read is what was written" begin
    array = reshape(collect(1:24), 2, 3, 4)
    for T in map(first, filter(pair -> first(pair) !== S.BFloat16, S.DTYPES))
        @test through_c(T.(array .% 2))::Array{T,3} == T.(array .% 2)
    end
    @test Float32(through_c([S.BFloat16(0x3fc0)])[1]) === 1.5f0 && Float32[S.BFloat16(0xbf80)] == [-1]
    for other in (@view(array[1, 2:3, :]), PermutedDimsArray(array, (3, 1, 2)), array[:, :, end:-1:1], 1:5, fill(7), zeros(3, 0, 2), zeros(0))
        @test through_c(other) == other && size(through_c(other)) == size(other)
    end
    value = (a = nothing, b = true, c = typemin(Int), d = 0.5, e = "grün", f = (1, ("x",)), g = Any[1, "y", Any[]], h = S.Bytes([1, 2]),
             i = NamedTuple(), j = "")
    read_back = through_c(value)
    @test read_back isa TreeDict && collect(keys(read_back)) == ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j"]
    for name in keys(value)
        @test name == :i ? isempty(read_back["i"]) : read_back[string(name)] == value[name]
    end
    @test through_c(read_back) == read_back
    @test collect(keys(through_c(Dict("b" => 1, :a => 2)))) == ["a", "b"]
    @test through_c(1.5f0) === 1.5 && through_c(0x05) === 5 && through_c(:name) == "name"
end

@testset "what is given to C comes back without a copy, and is let go of once" begin
    roots = S.num_roots()
    array = rand(3, 4)
    function round_trip()
        back = given_to_c((x = array, y = [1, 2]))
        @test pointer(back["x"]) == pointer(array) && back["x"] == array
        @test S.num_roots() == roots + 2  # the handles of two tensors; the tree itself is released
        back = nothing
    end
    round_trip()
    collect_garbage(() -> nothing)
    @test S.num_roots() == roots + 2  # finalizers only queue
    S.release_pending()
    @test S.num_roots() == roots
    @test_throws ArgumentError S.give_tree((array, 'c'))
    @test S.num_roots() == roots
    tree = Ref(S.give_tree((array, [array])))
    GC.@preserve tree S.tree_release(Base.unsafe_convert(Ptr{S.stg_tree}, tree))  # as C does with what it doesn't read
    @test S.num_roots() == roots && tree[].release == C_NULL
end

@testset "what can't cross is refused with its place" begin
    refused(value, words...) = (e = caught(() -> S.lend(value)); e isa ArgumentError && all(word -> occursin(word, e.msg), words))
    @test refused((x = [1, (y = Int128[1],)],), "x/2/y", "Int128", "Float32")
    @test refused((x = ['a'],), "x/1", "Char")
    @test refused(Dict(1 => 2), "keys")
    @test refused((big = big(2)^64,), "big", "64 bits")
    @test refused("\xff", "UTF-8")
    @test refused((f = sin,), "f", "sin")
    @test refused(["a" "b"], "2 dimensions")
    cycle = Any[1]
    push!(cycle, cycle)
    @test refused(cycle, "64 levels")
    @test refused(fill!(Vector{Any}(undef, S.STG_MAX_TREE_NODES), 1), "one too many")
    foreign = S.TensorHandle([1.0])
    t = foreign.tensor
    v = t.view
    on_cuda = S.stg_tensor_view(v.data, S.stg_device(S.STG_DEVICE_CUDA, 0), v.num_dims, v.dtype, v.shape, v.strides, 0)
    foreign.tensor = S.stg_tensor(t.dlpack_major, 0, C_NULL, C_NULL, 0, on_cuda)
    @test fails(() -> S.adopt(S.pointer_of(foreign); owned = false), S.STG_UNIMPLEMENTED, "cuda:0", "to_host")
end

@testset "an exception comes back from C as it was thrown" begin
    p = S.guarded(() -> error("it is broken"))
    e = caught(() -> S.check(p))
    @test e isa CapturedException && e.ex == ErrorException("it is broken") && !isempty(e.processed_bt)
    own = StratagemError(S.STG_DATA_LOSS, "gone")
    @test caught(() -> S.check(S.guarded(() -> throw(own)))) === own
    @test S.guarded(() -> 1) == C_NULL
    for (exception, code) in (OutOfMemoryError() => S.STG_RESOURCE_EXHAUSTED, InterruptException() => S.STG_CANCELLED,
                              ArgumentError("x") => S.STG_INVALID_ARGUMENT, "not an exception" => S.STG_UNKNOWN)
        p = S.guarded(() -> throw(exception))
        @test unsafe_load(p).code == code
        @test caught(() -> S.check(p)) isa CapturedException
    end
    for _ in 1:1000  # released unread
        p = S.guarded(() -> error("unread"))
        ccall(S.FREE[], Cvoid, (Ptr{Cvoid},), p)
    end
    @test length(S.THROWN) <= 64
    @test S.retryable(StratagemError(S.STG_UNAVAILABLE, "busy", S.STG_ERROR_RETRYABLE, nothing, nothing, nothing, nothing)) && !S.retryable(own)
    @test sprint(showerror, StratagemError(77, "odd")) == "code 77: odd"
    text = sprint(showerror, StratagemError(S.STG_NOT_FOUND, "no such thing", 0, 1, 3, Device(:cpu, 1), own))
    @test text == "not found: no such thing [replica 1] [rank 3] [cpu:1]\n  caused by: data loss: gone"
    text = sprint(showerror, StratagemError(S.STG_UNKNOWN, "failed"; cause = e))
    @test startswith(text, "unknown: failed\n  caused by: it is broken\n    at ")
end

@testset "an error of C's is read with all that it says" begin
    foreign(code, text) = S.c_error(code, text, UInt(0), S.FREE[])
    p, cause = foreign(S.STG_UNAVAILABLE, "it is busy"), foreign(S.STG_DATA_LOSS, "gone")
    for (field, value) in (:flags => S.STG_ERROR_RETRYABLE, :replica => 2, :device => S.stg_device(S.STG_DEVICE_CUDA, 1), :cause => cause)
        S.store!(p, field, value)
    end
    e = caught(() -> S.check(p))
    ccall(S.FREE[], Cvoid, (Ptr{Cvoid},), cause)
    @test (e.code, e.message, e.replica, e.rank, e.device) == (S.STG_UNAVAILABLE, "it is busy", 2, nothing, Device(:cuda, 1)) && S.retryable(e)
    @test (e.cause.code, e.cause.message, e.cause.device) == (S.STG_DATA_LOSS, "gone", nothing)
    @test S.to_c(e.device) == S.stg_device(S.STG_DEVICE_CUDA, 1) && Device(S.stg_device(77, 1)) == Device(:kind77, 1)
    @test caught(() -> S.to_c(Device(:fpga, 0))) isa ArgumentError
end

@testset "a TreeDict keeps its order, and is a dict" begin
    dict = TreeDict("b" => 1, :a => 2)
    dict["c"], dict[:b] = 3, 4
    @test collect(dict) == ["b" => 4, "a" => 2, "c" => 3] && length(dict) == 3
    @test haskey(dict, :a) && !haskey(dict, "d") && get(dict, "d", 5) == 5 && get(dict, "a", 5) == 2
    @test_throws KeyError dict["d"]
end

@testset "JSON is read and written" begin
    text = """{"b": [1, -2.5e3, true, false, null, "a\\u00fc\\n\\"\\ud83d\\ude00"], "a": {}, "c": [], "big": 99999999999999999999}"""
    value = S.JSON.parse(text)
    @test collect(keys(value)) == ["b", "a", "c", "big"]
    @test value["b"] == Any[1, -2500.0, true, false, nothing, "aü\n\"😀"] && value["big"] == 1e20
    @test S.JSON.parse(S.JSON.text(value)) == value
    @test S.JSON.text((a = 1, b = [1.5, nothing], c = Dict(:x => "\t"))) == "{\"a\":1,\"b\":[1.5,null],\"c\":{\"x\":\"\\u0009\"}}"
    @test S.JSON.text(["a" => 5, "b" => 0.1][1].second) == "5"  # Julia made 5.0 of it
    for bad in ("", "{", "[1,]", "{\"a\" 1}", "\"", "nul", "1 2", "[\"\\x\"]", "\"\\u12\"", "-", "[1e]")
        @test_throws ArgumentError S.JSON.parse(bad)
    end
    @test_throws ArgumentError S.JSON.text((a = NaN,))
    @test_throws ArgumentError S.JSON.text(sin)
end
