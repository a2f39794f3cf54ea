# SPDX-License-Identifier: Apache-2.0
#
# Errors, both ways. A C error becomes a StratagemError with its causes. An exception in a Julia callback becomes a C error, and where that
# one comes back as a cause, it is the exception itself again, with its backtrace: nothing is ever thrown through C.

"A device: its kind (`:cpu`, `:cuda`, ...) and its index."
struct Device
    kind::Symbol
    index::Int
end
const DEVICE_KINDS = [STG_DEVICE_CPU => :cpu, STG_DEVICE_CUDA => :cuda, STG_DEVICE_CUDA_HOST => :cuda_host,
                      STG_DEVICE_EXTENSION => :extension]
Base.print(io::IO, device::Device) = print(io, device.kind, ":", device.index)
function Device(device::stg_device)
    found = findfirst(pair -> first(pair) == device.kind, DEVICE_KINDS)
    Device(found === nothing ? Symbol("kind", device.kind) : last(DEVICE_KINDS[found]), device.index)
end
function to_c(device::Device)
    found = findfirst(pair -> last(pair) === device.kind, DEVICE_KINDS)
    found === nothing && throw(ArgumentError("no device kind $(device.kind); there are $(join(map(last, DEVICE_KINDS), ", "))"))
    stg_device(first(DEVICE_KINDS[found]), device.index)
end
const NO_DEVICE = stg_device(STG_DEVICE_NONE, -1)

"""
What a C call failed with. `code` is one of `Stratagem.STG_INVALID_ARGUMENT` and so on; `replica` and `device` say where, `nothing` if
nowhere; `cause` is the exception behind it, `nothing` if none.
"""
struct StratagemError <: Exception
    code::UInt32
    message::String
    flags::UInt32
    replica::Union{Nothing,Int}
    rank::Union{Nothing,Int}
    device::Union{Nothing,Device}
    cause::Union{Nothing,Exception}
end
StratagemError(code, message; cause = nothing) = StratagemError(code, message, 0, nothing, nothing, nothing, cause)

const CODE_NAMES = ["cancelled", "unknown", "invalid argument", "deadline exceeded", "not found", "already exists", "permission denied",
                    "resource exhausted", "failed precondition", "aborted", "out of range", "unimplemented", "internal", "unavailable",
                    "data loss", "unauthenticated"]
code_name(code) = 1 <= code <= length(CODE_NAMES) ? CODE_NAMES[code] : "code $code"

retryable(error::StratagemError) = error.flags & STG_ERROR_RETRYABLE != 0

function Base.showerror(io::IO, error::StratagemError)
    print(io, code_name(error.code), ": ", error.message)
    error.replica === nothing || print(io, " [replica ", error.replica, "]")
    error.rank === nothing || print(io, " [rank ", error.rank, "]")
    error.device === nothing || print(io, " [", error.device, "]")
    error.cause === nothing || (print(io, "\n  caused by: "); show_cause(io, error.cause))
end
show_cause(io, cause) = showerror(io, cause)
function show_cause(io, cause::CapturedException)  # its whole backtrace is in `cause`
    showerror(io, cause.ex)
    isempty(cause.processed_bt) || print(io, "\n    at ", first(first(cause.processed_bt)))
end

# --- from C

function read_error(p::Ptr{stg_error}, depth = 0)
    error = unsafe_load(p)
    thrown = error.release == FREE[] ? take_thrown(UInt(error.owner)) : nothing
    thrown === nothing || return thrown
    cause = error.cause == C_NULL || depth >= 64 ? nothing : read_error(error.cause, depth + 1)
    place(n) = n < 0 ? nothing : Int(n)
    StratagemError(error.code, String(error.message), error.flags, place(error.replica), place(error.rank),
                   error.device.kind == STG_DEVICE_NONE ? nothing : Device(error.device), cause)
end

"Throws what a call returned, unless it is success."
check(error::Ptr{stg_error}) = error == C_NULL ? nothing : throw_error(error)

@noinline function throw_error(p::Ptr{stg_error})
    exception = read_error(p)
    @slot stg_error_release unsafe_load(p).release p
    throw(exception)
end

# --- to C
#
# An error of ours is one block of malloc's, and its release is `free`: so any thread may release it, one that Julia doesn't know, too.

const FREE = Ref{Ptr{Cvoid}}(C_NULL)
const OUT_OF_MEMORY = Ref{Ptr{stg_error}}(C_NULL)
# What was thrown last, for when it comes back: (number, exception, backtrace). An error may be released unread, so their number is bounded.
# Making frames of a backtrace takes 40 ms: only of one that does come back.
const THROWN = Tuple{UInt,Any,Any}[]
const THROWN_LOCK = Threads.SpinLock()
const NUM_THROWN = Ref{UInt}(0)

function remember_thrown(exception, backtrace)
    lock(THROWN_LOCK)
    number = NUM_THROWN[] += 1
    push!(THROWN, (number, exception, backtrace))
    length(THROWN) > 64 && popfirst!(THROWN)
    unlock(THROWN_LOCK)
    number
end

function take_thrown(number)
    lock(THROWN_LOCK)
    place = findfirst(thrown -> thrown[1] == number, THROWN)
    found = place === nothing ? nothing : THROWN[place]
    place === nothing || deleteat!(THROWN, place)
    unlock(THROWN_LOCK)
    found === nothing ? nothing : found[2] isa StratagemError ? found[2] : CapturedException(found[2], found[3])
end

function c_error(code::UInt32, message::String, number::UInt, release::Ptr{Cvoid})
    block = Ptr{stg_error}(Libc.malloc(sizeof(stg_error) + sizeof(message)))
    block == C_NULL && return OUT_OF_MEMORY[]
    text = Ptr{UInt8}(block + sizeof(stg_error))
    GC.@preserve message unsafe_copyto!(text, pointer(message), sizeof(message))
    unsafe_store!(block, stg_error(code, 0, -1, -1, NO_DEVICE, stg_string(text, sizeof(message)), C_NULL, release, Ptr{Cvoid}(number)))
    block
end

code_of(error::StratagemError) = error.code
code_of(::OutOfMemoryError) = STG_RESOURCE_EXHAUSTED
code_of(::InterruptException) = STG_CANCELLED
code_of(::Union{ArgumentError,DimensionMismatch}) = STG_INVALID_ARGUMENT
code_of(::Exception) = STG_UNKNOWN

function c_error(exception, backtrace)
    message = try
        sprint(showerror, exception)
    catch
        "a $(typeof(exception)), whose message can't be shown"
    end
    c_error(exception isa Exception ? code_of(exception) : STG_UNKNOWN, message, remember_thrown(exception, backtrace), FREE[])
end

"Runs a callback's body: what it throws is the callback's error."
function guarded(body)
    try
        body()
        return Ptr{stg_error}(C_NULL)
    catch exception
        return c_error(exception, catch_backtrace())
    end
end

"Runs the body of a callback that can return no error: what it throws is kept for the call that it happened in."
function kept(body, thrown)
    try
        body()
    catch exception
        push!(thrown, CapturedException(exception, catch_backtrace()))
    end
    nothing
end

"Throws what a call returned; where that is success, the first of what was `kept` in it."
function check(error::Ptr{stg_error}, thrown::Vector{Exception})
    isempty(thrown) && return check(error)
    first_thrown = first(thrown)
    empty!(thrown)
    check(error)
    throw(first_thrown)
end

nothing_to_release(::Ptr{stg_error}) = nothing

function init_errors()
    FREE[] = cglobal(:free)
    OUT_OF_MEMORY[] = c_error(STG_RESOURCE_EXHAUSTED, "out of memory for an error", UInt(0), @callback stg_error_release nothing_to_release)
end
