# SPDX-License-Identifier: Apache-2.0
#
# Tensors and arrays share memory. Julia's arrays are column-major, tensors row-major: an array of size (28, 28, 64) is a tensor of shape
# (64, 28, 28), the same bytes in the same order. So the batch is Julia's last index. An array with other strides is handed over with
# them; what has no strides is copied. A tensor that is not row-major is copied when it is read.

"Brain floating point: memory for those who get it from a model; `Float32(x)` gives its value."
struct BFloat16
    bits::UInt16
end
Base.Float32(x::BFloat16) = reinterpret(Float32, UInt32(x.bits) << 16)
Base.convert(::Type{Float32}, x::BFloat16) = Float32(x)

const DTYPES = [Bool => stg_dtype(STG_DTYPE_BOOL, 8, 1), BFloat16 => stg_dtype(STG_DTYPE_BFLOAT, 16, 1),
                (T => stg_dtype(STG_DTYPE_INT, 8sizeof(T), 1) for T in (Int8, Int16, Int32, Int64))...,
                (T => stg_dtype(STG_DTYPE_UINT, 8sizeof(T), 1) for T in (UInt8, UInt16, UInt32, UInt64))...,
                (T => stg_dtype(STG_DTYPE_FLOAT, 8sizeof(T), 1) for T in (Float16, Float32, Float64))...,
                (T => stg_dtype(STG_DTYPE_COMPLEX, 8sizeof(T), 1) for T in (ComplexF16, ComplexF32, ComplexF64))...]
for (T, dtype) in DTYPES
    @eval dtype_of(::Type{$T}) = $dtype
end
dtype_of(::Type) = nothing
const TYPES = Dict{stg_dtype,DataType}(dtype => T for (T, dtype) in DTYPES)

function type_of(dtype::stg_dtype)
    get(TYPES, dtype) do
        throw(StratagemError(STG_UNIMPLEMENTED, "Julia has no type for a tensor's dtype of code $(dtype.code), $(dtype.bits) bits and " *
                                                "$(dtype.lanes) lanes"))
    end
end

# --- from an array

# Its first field is what C sees, so that a pointer to this is a pointer to a tensor.
mutable struct TensorHandle
    tensor::stg_tensor
    sizes::Vector{Int64}  # shape, then strides
    array::Any
end

has_strides(::DenseArray) = true
has_strides(array::SubArray) = array isa StridedArray && all(>(0), strides(array))
has_strides(array::PermutedDimsArray) = has_strides(parent(array))
has_strides(array::Base.ReshapedArray) = array isa StridedArray && has_strides(parent(array))
has_strides(::AbstractArray) = false

"""
A tensor over an array's memory, which the handle keeps. `deleter` is null for one that is only lent.
"""
function TensorHandle(array::AbstractArray{T,N}, deleter::Ptr{Cvoid} = C_NULL) where {T,N}
    dtype_of(T) === nothing && throw(ArgumentError("there is no dtype for an array of $T; there are: $(join(map(first, DTYPES), ", "))"))
    has_strides(array) || (array = Array(array))
    sizes = Vector{Int64}(undef, 2N)
    for dim in 1:N
        sizes[N+1-dim] = size(array, dim)
        sizes[2N+1-dim] = stride(array, dim)
    end
    view = make(stg_tensor_view, (data = Ptr{Cvoid}(pointer(array)), device = stg_device(STG_DEVICE_CPU, 0), num_dims = N,
                                  dtype = dtype_of(T), shape = pointer(sizes), strides = pointer(sizes, N + 1)))
    TensorHandle(make(stg_tensor, (dlpack_major = STG_DLPACK_MAJOR, dlpack_minor = STG_DLPACK_MINOR, deleter = deleter, view = view)),
                 sizes, array)
end

"The tensor of a handle that is preserved by its maker."
pointer_of(handle::TensorHandle) = Ptr{stg_tensor}(pointer_from_objref(handle))

"A tensor that C owns from now on: its deleter lets go of the array."
give(array::AbstractArray) = Ptr{stg_tensor}(root!(TensorHandle(array, DELETER[])))

const DELETER = Ref{Ptr{Cvoid}}(C_NULL)
tensor_deleter(tensor::Ptr{stg_tensor}) = unroot!(tensor)
init_tensors() = (DELETER[] = @callback stg_tensor_deleter tensor_deleter; nothing)

# --- to an array

function release_tensor(tensor::Ptr{stg_tensor})
    deleter = unsafe_load(tensor).deleter
    deleter == C_NULL || @slot stg_tensor_deleter deleter tensor
    nothing
end

"""
The array of a tensor. `owned`: the tensor is ours now; it is released with the array, or at once where the array is a copy. A borrowed one
is copied.
"""
function adopt(tensor::Ptr{stg_tensor}; owned::Bool)
    view = unsafe_load(tensor).view
    array = try
        view.device.kind in (STG_DEVICE_CPU, STG_DEVICE_CUDA_HOST) ||
            throw(StratagemError(STG_UNIMPLEMENTED, "a tensor on $(Device(view.device)) can't be read here; `to_host` brings it"))
        wrap_or_copy(type_of(view.dtype), rank_of(view.num_dims), tensor, owned)
    catch
        owned && release_tensor(tensor)
        rethrow()
    end
    array
end

# Making a Val at run time takes 8 us.
const RANKS = Any[Val(rank) for rank in 0:8]
rank_of(num_dims) = num_dims < length(RANKS) ? RANKS[num_dims+1] : Val(Int(num_dims))

function wrap_or_copy(::Type{T}, ::Val{N}, tensor::Ptr{stg_tensor}, owned::Bool) where {T,N}
    view = unsafe_load(tensor).view
    dims = ntuple(dim -> Int(unsafe_load(view.shape, N + 1 - dim)), Val(N))
    contiguous = ntuple(dim -> prod(ntuple(inner -> inner < dim ? dims[inner] : 1, Val(N))), Val(N))
    steps = view.strides == C_NULL ? contiguous : ntuple(dim -> Int(unsafe_load(view.strides, N + 1 - dim)), Val(N))
    data = Ptr{T}(view.data + view.byte_offset)
    in_order = all(dim -> dims[dim] <= 1 || steps[dim] == contiguous[dim], 1:N)
    writable = unsafe_load(tensor).flags & STG_TENSOR_READ_ONLY == 0
    if owned && writable && in_order && N > 0 && prod(dims) > 0 && UInt(data) % Base.datatype_alignment(T) == 0
        array = unsafe_wrap(Array, data, dims)
        release_later(() -> release_tensor(tensor), memory_of(array))
        return array
    end
    array = Array{T,N}(undef, dims)
    if in_order
        GC.@preserve array unsafe_copyto!(Ptr{UInt8}(pointer(array)), Ptr{UInt8}(data), sizeof(array))
    else
        for (place, index) in enumerate(CartesianIndices(array))
            array[place] = load_unaligned(data + foldl(+, (Tuple(index) .- 1) .* steps) * sizeof(T))
        end
    end
    owned && release_tensor(tensor)
    array
end

# What lives as long as the last array over the same memory: before Julia 1.11 the array itself, which those that share it keep.
@static if VERSION >= v"1.11"
    memory_of(array) = array.ref.mem
else
    memory_of(array) = array
end

function load_unaligned(p::Ptr{T}) where {T}
    value = Ref{T}()
    GC.@preserve value unsafe_copyto!(Ptr{UInt8}(Base.unsafe_convert(Ptr{T}, value)), Ptr{UInt8}(p), sizeof(T))
    value[]
end
