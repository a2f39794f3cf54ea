# SPDX-License-Identifier: Apache-2.0
#
# The ABI's structs, constants and signatures for Julia. Made from the headers by `./run layout`; not to be edited.
#
# Structs are isbits and laid out as in C: check_layout compares each offset with the compiler's. A slot of a function table is a
# Ptr{Cvoid}; its signature is in SIGNATURES, under table_slot. A union is the UInt64 of its bits.

# --- stratagem/common.h

# What this copy of the headers describes. A host can use a plugin of the same major whose range of minors meets its own.
const STG_ABI_MAJOR = UInt32(1)
const STG_ABI_MINOR = UInt32(0)

# A struct_size above this is taken for uninitialised memory and refused.
const STG_MAX_STRUCT_SIZE_BYTES = UInt32(65536)

# --- stratagem/types.h

# UTF-8 text. Not NUL-terminated; `data` may be null when `size_bytes` is 0. Borrowed; a string that a getter returns lives as long
# as the object it was read from.
struct stg_string
    data::Ptr{UInt8} # lifetime: that of the object it was read from, or of the call
    size_bytes::UInt64 # without any terminator
end

# Device kinds: DLPack's codes, so that a tensor's device needs no translation.
const STG_DEVICE_NONE = UInt32(0)
const STG_DEVICE_CPU = UInt32(1)
const STG_DEVICE_CUDA = UInt32(2)
const STG_DEVICE_CUDA_HOST = UInt32(3) # pinned host memory; only in tensors
const STG_DEVICE_EXTENSION = UInt32(12) # LibTorch's PrivateUse1

# A device. {STG_DEVICE_NONE, -1} means none.
# Logical CPU devices (cpu:0, cpu:1, ...) are replicas on one CPU; a *tensor* on any of them says {STG_DEVICE_CPU, 0}.
struct stg_device
    kind::UInt32
    index::Int32
end

# How `handle` of a stream is read.
const STG_STREAM_HANDLE = UInt32(0) # as it stands; null is the legacy default stream
const STG_STREAM_PER_THREAD_DEFAULT = UInt32(1) # the calling thread's default stream; `handle` is ignored

# The stream on which a caller has queued, or will queue, its own work on a device. A CPU has none.
struct stg_stream
    device::stg_device
    handle::Ptr{Cvoid} # lifetime: the call; for CUDA a cudaStream_t
    kind::UInt32
    reserved::UInt32 # 0
end

# --- stratagem/error.h

# Codes: those of gRPC and Abseil, with their meanings.
const STG_OK = UInt32(0)
const STG_CANCELLED = UInt32(1)
const STG_UNKNOWN = UInt32(2)
const STG_INVALID_ARGUMENT = UInt32(3)
const STG_DEADLINE_EXCEEDED = UInt32(4)
const STG_NOT_FOUND = UInt32(5)
const STG_ALREADY_EXISTS = UInt32(6)
const STG_PERMISSION_DENIED = UInt32(7)
const STG_RESOURCE_EXHAUSTED = UInt32(8) # out of memory, on the host or a device; a full disk
const STG_FAILED_PRECONDITION = UInt32(9) # the call is not legal in this state, or from this thread
const STG_ABORTED = UInt32(10)
const STG_OUT_OF_RANGE = UInt32(11)
const STG_UNIMPLEMENTED = UInt32(12)
const STG_INTERNAL = UInt32(13)
const STG_UNAVAILABLE = UInt32(14)
const STG_DATA_LOSS = UInt32(15) # a truncated or damaged file
const STG_UNAUTHENTICATED = UInt32(16)

# Flags: what the caller can do next.
const STG_ERROR_RETRYABLE = UInt32(1) # the same call may succeed later
const STG_ERROR_INSTANCE_USABLE = UInt32(2) # the instance takes further calls
const STG_ERROR_INSTANCE_DRAINING = UInt32(4) # only abort and destroy are legal now

# One error. Fixed.
struct stg_error
    code::UInt32 # one of the codes above, never STG_OK
    flags::UInt32
    replica::Int32 # -1 if none
    rank::Int32 # -1 if none
    device::stg_device # {STG_DEVICE_NONE, -1} if none
    message::stg_string # lifetime: the error; what was wrong, where, and what would be right
    cause::Ptr{stg_error} # owned by this error, null if none; lifetime: the error
    release::Ptr{Cvoid} # (self::Ptr{stg_error}) -> Cvoid [any]
    owner::Ptr{Cvoid} # the maker's own; lifetime: the error
end

# --- stratagem/call.h

# Growing.
#
# At its deadline a call returns STG_DEADLINE_EXCEEDED within 100 ms (time in callbacks on the calling thread apart; a reduction or
# an update that has begun is finished first), names what it waited for, and flags the instance as usable or draining. The clock
# is read only when about to block.
struct stg_call
    struct_size::UInt64
    deadline_ns::UInt64 # CLOCK_MONOTONIC, in nanoseconds; 0: none
    cancel::Ptr{UInt32} # borrowed; read atomically; nonzero: return STG_CANCELLED as soon as possible; null: none
    streams::Ptr{stg_stream} # borrowed; the caller's stream on each device where it is not the default one
    num_streams::UInt64
end
const STG_CALL_MIN_SIZE = UInt32(40)

# --- stratagem/tensor.h

# DLPack's major that this ABI takes; another one is refused, minors are compatible.
const STG_DLPACK_MAJOR = UInt32(1)
const STG_DLPACK_MINOR = UInt32(0)

# Type codes of an element: DLPack's.
const STG_DTYPE_INT = UInt32(0)
const STG_DTYPE_UINT = UInt32(1)
const STG_DTYPE_FLOAT = UInt32(2)
const STG_DTYPE_BFLOAT = UInt32(4)
const STG_DTYPE_COMPLEX = UInt32(5)
const STG_DTYPE_BOOL = UInt32(6)

# An element's type: code, width in bits, lanes (1). {0,0,0} means none where a function says so.
struct stg_dtype
    code::UInt8
    bits::UInt8
    lanes::UInt16
end

# DLTensor.
struct stg_tensor_view
    data::Ptr{Cvoid} # lifetime: until the owning stg_tensor's deleter; null allowed for zero elements
    device::stg_device
    num_dims::Int32
    dtype::stg_dtype
    shape::Ptr{Int64} # lifetime: as data; num_dims sizes, each >= 0; null allowed when num_dims is 0
    strides::Ptr{Int64} # lifetime: as data; num_dims strides in elements, or null: row-major
    byte_offset::UInt64 # the first element lies at data + byte_offset
end

# Flags of a tensor.
const STG_TENSOR_READ_ONLY = UInt32(1) # whoever receives it must not write
const STG_TENSOR_IS_COPIED = UInt32(2)

# DLManagedTensorVersioned.
struct stg_tensor
    dlpack_major::UInt32
    dlpack_minor::UInt32
    owner::Ptr{Cvoid} # the maker's own; lifetime: until deleter
    deleter::Ptr{Cvoid} # (self::Ptr{stg_tensor}) -> Cvoid [any]
    flags::UInt64
    view::stg_tensor_view
end

# --- stratagem/value.h

const STG_MAX_TREE_DEPTH = UInt32(64)
const STG_MAX_TREE_NODES = UInt32(1048576)

# Types of a value, and which member of `as` holds it.
const STG_NONE = UInt32(0)
const STG_BOOL = UInt32(1) # as.i64: 0 or 1
const STG_INT64 = UInt32(2) # as.i64
const STG_DOUBLE = UInt32(3) # as.f64
const STG_STRING = UInt32(4) # as.utf8, `count` bytes
const STG_BYTES = UInt32(5) # as.bytes, `count` bytes
const STG_TENSOR = UInt32(6) # as.tensor, never null
const STG_LIST = UInt32(7) # as.items, `count` values
const STG_TUPLE = UInt32(8) # as.items, `count` values
const STG_DICT = UInt32(9) # as.entries, `count` entries with distinct keys, in order
const STG_OPAQUE = UInt32(10) # as.opaque, never null

# One value. Fixed. `count` is 0 for types that have none; `items` and `entries` may be null when it is 0. All pointers live until
# the tree's release; the memory of items and entries is writable, so that a leaf can be taken out.
struct stg_value
    type::UInt32
    count::UInt32
    as::UInt64 # one of i64::Int64, f64::Float64, utf8::Ptr{UInt8}, bytes::Ptr{UInt8}, tensor::Ptr{stg_tensor}, items::Ptr{stg_value}, entries::Ptr{Cvoid}, opaque::Ptr{Cvoid}
end

# One entry of a dict. Fixed.
struct stg_entry
    key::stg_string # lifetime: until the tree's release
    value::stg_value
end

# A whole tree. Fixed.
#
# An owner calls `release` once; it releases every tensor and opaque still in the tree, then the tree's memory. A leaf is taken out
# by copying its pointer and setting its slot to {STG_NONE}: then it is the taker's. A null `release` marks a borrowed view.
#
# A function takes a tree as `stg_tree *`. With a release it is *moved*: the callee consumes it on every return, success or error,
# and sets the caller's struct to zeros; so releasing it again is harmless. With a null release it is borrowed for the call; an
# output that would alias a borrowed tree is copied.
struct stg_tree
    root::stg_value
    release::Ptr{Cvoid} # (self::Ptr{stg_tree}) -> Cvoid [any]
    owner::Ptr{Cvoid} # the maker's own; lifetime: until release
end

# An object of the host's that passes through unread: the same pointer comes back. Handed to replicas by retain, on the calling
# thread; never copied by content, never sent to another process. Growing.
struct stg_opaque
    struct_size::UInt64
    type_name::stg_string # lifetime: the object
    retain::Ptr{Cvoid} # (self::Ptr{stg_opaque}) -> Cvoid [any]
    release::Ptr{Cvoid} # (self::Ptr{stg_opaque}) -> Cvoid [any]
    reduce::Ptr{Cvoid} # (objects::Ptr{Ptr{stg_opaque}}, num_objects::UInt64, out::Ptr{Ptr{stg_opaque}}) -> Ptr{stg_error} [any]
end
const STG_OPAQUE_MIN_SIZE = UInt32(48)

# --- stratagem/host.h

# Levels of a log message.
const STG_LOG_DEBUG = UInt32(1)
const STG_LOG_INFO = UInt32(2)
const STG_LOG_WARNING = UInt32(3)
const STG_LOG_ERROR = UInt32(4)

# A checkpoint storage. A checkpoint is a folder of files, written in one transaction: nobody sees it before commit. Paths are UTF-8
# with '/', relative to whatever the storage calls its root. Growing; a function table.
struct stg_storage
    struct_size::UInt64
    self::Ptr{Cvoid} # lifetime: until the host table's release
    begin_::Ptr{Cvoid} # (self::Ptr{Cvoid}, path::stg_string, transaction::Ptr{Ptr{Cvoid}}) -> Ptr{stg_error} [any]
    write::Ptr{Cvoid} # (self::Ptr{Cvoid}, transaction::Ptr{Cvoid}, name::stg_string, offset_bytes::UInt64, data::Ptr{Cvoid}, size_bytes::UInt64) -> Ptr{stg_error} [any]
    commit::Ptr{Cvoid} # (self::Ptr{Cvoid}, transaction::Ptr{Cvoid}) -> Ptr{stg_error} [any]
    rollback::Ptr{Cvoid} # (self::Ptr{Cvoid}, transaction::Ptr{Cvoid}) -> Cvoid [any]
    open::Ptr{Cvoid} # (self::Ptr{Cvoid}, path::stg_string, file::Ptr{Ptr{Cvoid}}, size_bytes::Ptr{UInt64}) -> Ptr{stg_error} [any]
    read::Ptr{Cvoid} # (self::Ptr{Cvoid}, file::Ptr{Cvoid}, offset_bytes::UInt64, data::Ptr{Cvoid}, size_bytes::UInt64) -> Ptr{stg_error} [any]
    close::Ptr{Cvoid} # (self::Ptr{Cvoid}, file::Ptr{Cvoid}) -> Cvoid [any]
    list::Ptr{Cvoid} # (self::Ptr{Cvoid}, path::stg_string, names::Ptr{stg_tree}) -> Ptr{stg_error} [any]
    remove::Ptr{Cvoid} # (self::Ptr{Cvoid}, path::stg_string) -> Ptr{stg_error} [any]
    replace::Ptr{Cvoid} # (self::Ptr{Cvoid}, path::stg_string, data::Ptr{Cvoid}, size_bytes::UInt64) -> Ptr{stg_error} [any]
end
const STG_STORAGE_MIN_SIZE = UInt32(96)

# The services. Growing; a function table. With STG_CREATE_CALLER_THREAD_ONLY every function here is called only on the thread
# that is inside a call of the instance.
struct stg_host
    struct_size::UInt64
    self::Ptr{Cvoid} # lifetime: until release
    retain::Ptr{Cvoid} # (self::Ptr{Cvoid}) -> Cvoid [any]
    release::Ptr{Cvoid} # (self::Ptr{Cvoid}) -> Cvoid [any]
    log::Ptr{Cvoid} # (self::Ptr{Cvoid}, level::UInt32, message::stg_string, fields::Ptr{stg_tree}) -> Cvoid [any]
    progress::Ptr{Cvoid} # (self::Ptr{Cvoid}, what::stg_string, done::UInt64, total::UInt64) -> Cvoid [any]
    trace_begin::Ptr{Cvoid} # (self::Ptr{Cvoid}, phase::stg_string, replica::Int32) -> Cvoid [any]
    trace_end::Ptr{Cvoid} # (self::Ptr{Cvoid}, phase::stg_string, replica::Int32) -> Cvoid [any]
    allocate::Ptr{Cvoid} # (self::Ptr{Cvoid}, size_bytes::UInt64, alignment_bytes::UInt64) -> Ptr{Cvoid} [any]
    deallocate::Ptr{Cvoid} # (self::Ptr{Cvoid}, memory::Ptr{Cvoid}, size_bytes::UInt64) -> Cvoid [any]
    storage::Ptr{stg_storage} # null: safetensors files on the local disk; lifetime: as this table
end
const STG_HOST_MIN_SIZE = UInt32(88)

# --- stratagem/model.h

# Both are the model's own and opaque to everyone else.
mutable struct stg_replica end

mutable struct stg_graph end

# Stages.
const STG_STAGE_FIT = UInt32(0)
const STG_STAGE_VALIDATE = UInt32(1)
const STG_STAGE_TEST = UInt32(2)
const STG_STAGE_PREDICT = UInt32(3)

# What the loss of a step is over its share. It decides the share's weight when the step reports no denominator.
const STG_LOSS_MEAN = UInt32(0)
const STG_LOSS_SUM = UInt32(1)

# Flags of replicate.
const STG_REPLICATE_SKIP_INIT = UInt32(1) # every pinned parameter and persistent buffer is written before the first step: the model need not give them initial values

# How a replica is made. Growing.
struct stg_replicate_args
    struct_size::UInt64
    device::stg_device # where it lives; a logical CPU device is given with its own index
    replica::Int32 # 0 is the root
    num_replicas::Int32
    floating_dtype::stg_dtype # of its floating parameters and buffers; {0,0,0}: the model's own
    num_threads::UInt32 # intra-op threads for its thread; 0: as they are
    seed::UInt64 # initial weights depend on it alone; its generator on (seed, replica)
    flags::UInt64 # STG_REPLICATE_*; a model may pass over those that it doesn't know
end
const STG_REPLICATE_ARGS_MIN_SIZE = UInt32(48)

# Flags of a parameter or buffer.
const STG_PARAMETER_REQUIRES_GRAD = UInt32(1) # not frozen
const STG_PARAMETER_PERSISTENT = UInt32(2) # belongs in a checkpoint
const STG_PARAMETER_PINNED = UInt32(4) # may be written in place, and is valid for the replica's life; else: until the next call

# One parameter or buffer. Each storage stands once, with all its names (tied parameters have several; the first is the main one).
# Growing.
struct stg_parameter
    struct_size::UInt64
    names::Ptr{stg_string} # lifetime: the replica; at least one
    num_names::UInt64
    tensor::Ptr{stg_tensor} # borrowed, not to be released; lifetime: see STG_PARAMETER_PINNED
    flags::UInt64
end
const STG_PARAMETER_MIN_SIZE = UInt32(40)

# What a replica is made of. Growing.
struct stg_model_description
    struct_size::UInt64
    parameters::Ptr{Ptr{stg_parameter}} # lifetime: until the replica's next describe; the order is that of gradient indices
    num_parameters::UInt64
    buffers::Ptr{Ptr{stg_parameter}} # lifetime: as parameters
    num_buffers::UInt64
    loss_kind::UInt64 # STG_LOSS_MEAN or STG_LOSS_SUM
end
const STG_MODEL_DESCRIPTION_MIN_SIZE = UInt32(48)

# Flags of a step.
const STG_STEP_GRADIENT = UInt32(1) # keep a graph for backward
const STG_STEP_INFERENCE = UInt32(2) # outputs will not be differentiated: inference mode
const STG_STEP_DETECT_ANOMALY = UInt32(4) # a NaN in outputs or gradients is an error that names it; not set under loss scaling
const STG_STEP_DETERMINISTIC = UInt32(8) # the same numbers at each run, in the step and its backward; what can't be so is an error

# What a step is told. Growing.
struct stg_step_context
    struct_size::UInt64
    device::stg_device
    replica::Int32
    num_replicas::Int32
    stage::UInt32
    flags::UInt32
    batch_index::Int64
    dataloader_index::Int64
    global_step::Int64 # optimizer steps done
    autocast_dtype::stg_dtype # {0,0,0}: autocast is off
    reserved::UInt32 # 0
    stream::stg_stream # the replica's, on an accelerator: the batch is ready on it, and the step and its backward queue their work on it; on a CPU zeros
end
const STG_STEP_CONTEXT_MIN_SIZE = UInt32(88)

# What a step gives back. The caller zeroes it, sets struct_size, and owns what is in it afterwards. Growing.
struct stg_model_step_result
    struct_size::UInt64
    outputs::stg_tree # in training: the loss, a 0-dim tensor, or a dict with one under "loss"
    denominator::stg_value # How much the share counts: none: its rows; 0: not at all; a number, or a 0-dim tensor on the device (then the caller releases it). A number overrides the loss kind: the loss is then a mean over this denominator.
    graph::Ptr{stg_graph} # null without STG_STEP_GRADIENT; owned by the caller until backward or release_graph consumes it
end
const STG_MODEL_STEP_RESULT_MIN_SIZE = UInt32(64)

# Where a model reports gradients: the strategy's functions. Growing; a function table.
struct stg_gradient_sink
    struct_size::UInt64
    self::Ptr{Cvoid} # lifetime: the backward call
    ready::Ptr{Cvoid} # (self::Ptr{Cvoid}, index::UInt64, gradient::Ptr{stg_tensor}, stream::Ptr{stg_stream}) -> Ptr{stg_error} [replica]
    ready_sparse::Ptr{Cvoid} # (self::Ptr{Cvoid}, index::UInt64, indices::Ptr{stg_tensor}, values::Ptr{stg_tensor}, shape::Ptr{Int64}, num_dims::UInt64, stream::Ptr{stg_stream}) -> Ptr{stg_error} [replica]
end
const STG_GRADIENT_SINK_MIN_SIZE = UInt32(32)

# A model. Growing; a function table. Functions after `release_graph` may be absent.
struct stg_model
    struct_size::UInt64
    self::Ptr{Cvoid} # lifetime: until release
    retain::Ptr{Cvoid} # (self::Ptr{Cvoid}) -> Cvoid [any]
    release::Ptr{Cvoid} # (self::Ptr{Cvoid}) -> Cvoid [any]
    replicate::Ptr{Cvoid} # (self::Ptr{Cvoid}, args::Ptr{stg_replicate_args}, out::Ptr{Ptr{stg_replica}}) -> Ptr{stg_error} [replica]
    destroy_replica::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}) -> Cvoid [replica]
    describe::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, out::Ptr{stg_model_description}) -> Ptr{stg_error} [replica]
    set_mode::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, train::UInt32) -> Ptr{stg_error} [replica]
    step::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, context::Ptr{stg_step_context}, batch::Ptr{stg_tree}, result::Ptr{stg_model_step_result}) -> Ptr{stg_error} [replica]
    backward::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, graph::Ptr{stg_graph}, scale::Float64, flags::UInt32, sink::Ptr{stg_gradient_sink}) -> Ptr{stg_error} [replica]
    release_graph::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, graph::Ptr{stg_graph}) -> Cvoid [replica]
    bind::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, index::UInt64, storage::Ptr{stg_tensor}, gradient::Ptr{stg_tensor}) -> Ptr{stg_error} [replica]
    parameters_changed::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}) -> Ptr{stg_error} [replica]
    split::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, batch::Ptr{stg_tree}, num_shares::UInt64, shares::Ptr{stg_tree}, num_filled::Ptr{UInt64}) -> Ptr{stg_error} [replica]
    transfer::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, batch::Ptr{stg_tree}, dataloader_index::Int64, out::Ptr{stg_tree}) -> Ptr{stg_error} [replica]
    synchronize::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}) -> Ptr{stg_error} [replica]
    get_generator_state::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, out::Ptr{stg_tree}) -> Ptr{stg_error} [replica]
    set_generator_state::Ptr{Cvoid} # (self::Ptr{Cvoid}, replica::Ptr{stg_replica}, state::Ptr{UInt8}, size_bytes::UInt64) -> Ptr{stg_error} [replica]
end
const STG_MODEL_MIN_SIZE = UInt32(88)

# A factory of models, offered by a plugin. Growing. All pointers live as long as the process.
struct stg_model_factory
    struct_size::UInt64
    name::stg_string # lifetime: the process
    summary::stg_string # lifetime: the process; one line
    options_schema::stg_string # lifetime: the process; the JSON Schema of `options`
    create::Ptr{Cvoid} # (options_json::stg_string, host::Ptr{stg_host}, out::Ptr{Ptr{stg_model}}) -> Ptr{stg_error} [any]
end
const STG_MODEL_FACTORY_MIN_SIZE = UInt32(64)

# --- stratagem/states.h

# States of an instance, as bits, so that a set of them is a number.
const STG_STATE_CREATED = UInt32(1)
const STG_STATE_FIT = UInt32(2)
const STG_STATE_EVALUATE = UInt32(4)
const STG_STATE_MODELLESS = UInt32(8)
const STG_STATE_DRAINING = UInt32(16)

# Who may call (see common.h).
const STG_THREAD_ANY = UInt32(1)
const STG_THREAD_OWNER = UInt32(2)
const STG_THREAD_REPLICA = UInt32(3)

const STG_STATES_ALL_ = UInt32(31)
const STG_STATES_LIVE_ = UInt32(15) # all but draining
const STG_STATES_MODEL_ = UInt32(6) # fit, evaluate

# --- stratagem/strategy.h

# an instance; the plugin's own
mutable struct stg_strategy end

# Flags of create.
const STG_CREATE_CALLER_THREAD_ONLY = UInt32(1) # replicas run one after the other on the calling thread, and every host function is called only there, inside a call; same results

# Growing.
struct stg_create_args
    struct_size::UInt64
    config_json::stg_string # Borrowed; one JSON object with "accelerator" ("cpu", "cuda", "auto"), "devices" (a count, "auto", or a list of indices whose first is the root), "precision", "optimizer" ({"name", "lr", ...} or absent: the host's own), "seed", "deterministic", "threads" (intra-op threads of all replicas together; absent: the process's), "options" (by the factory's schema). All optional.
    host::Ptr{stg_host} # borrowed, retained by the instance; null: no services
    flags::UInt64
end
const STG_CREATE_ARGS_MIN_SIZE = UInt32(40)

# What an instance is doing. Growing.
struct stg_status
    struct_size::UInt64
    state::UInt32 # one of STG_STATE_*
    stage::UInt32 # the stage of setup; STG_STAGE_FIT before it
    num_micro_batches::UInt64 # backward calls since the last update
    num_updates::UInt64 # optimizer steps done; part of the state
    has_graph::UInt64 # 1: a training_step waits for its backward
end
const STG_STATUS_MIN_SIZE = UInt32(40)

# Where this process stands among several. Growing.
struct stg_ranks
    struct_size::UInt64
    global_rank::Int32
    local_rank::Int32
    node_rank::Int32
    world_size::Int32 # processes, not devices
end
const STG_RANKS_MIN_SIZE = UInt32(24)

# Growing.
struct stg_setup_args
    struct_size::UInt64
    model::Ptr{stg_model} # borrowed, retained by the instance; null: reduce_gradients only
    state::Ptr{stg_tree} # a state to begin from, moved; null: the model's own weights
    stage::UInt64 # STG_STAGE_*; the optimizer exists only for STG_STAGE_FIT
end
const STG_SETUP_ARGS_MIN_SIZE = UInt32(32)

# Growing.
struct stg_transfer_args
    struct_size::UInt64
    batch::Ptr{stg_tree} # moved or borrowed
    device::stg_device # {STG_DEVICE_NONE, -1}: as the strategy chooses
    dataloader_index::Int64
end
const STG_TRANSFER_ARGS_MIN_SIZE = UInt32(32)

# Reductions.
const STG_REDUCE_MEAN = UInt32(0)
const STG_REDUCE_SUM = UInt32(1)
const STG_REDUCE_MIN = UInt32(2)
const STG_REDUCE_MAX = UInt32(3)

# How ranks' decisions become one.
const STG_DECIDE_ALL = UInt32(0)
const STG_DECIDE_ANY = UInt32(1)

# Gradient clipping.
const STG_CLIP_NONE = UInt32(0)
const STG_CLIP_NORM = UInt32(1) # scale the whole gradient so that its 2-norm is at most the limit
const STG_CLIP_VALUE = UInt32(2) # cut each element to [-limit, limit]

# What an update is to use. Growing.
struct stg_update_args
    struct_size::UInt64
    lr::Float64 # learning rate of this update
    clip_limit::Float64 # > 0 with clipping
    clip::UInt64 # STG_CLIP_*
end
const STG_UPDATE_ARGS_MIN_SIZE = UInt32(32)

# What became of an update.
const STG_UPDATE_NONE = UInt32(0) # no update was due (more micro-batches follow)
const STG_UPDATE_DONE = UInt32(1)
const STG_UPDATE_SKIPPED_OVERFLOW = UInt32(2) # 16-mixed: a gradient overflowed; the scale was lowered
const STG_UPDATE_SKIPPED_NO_WEIGHT = UInt32(3) # all denominators were 0

# Growing.
struct stg_update_result
    struct_size::UInt64
    outcome::UInt64 # STG_UPDATE_*
    gradient_norm::Float64 # 2-norm before clipping; NaN where it was not needed (no clipping by norm)
    total_weight::Float64 # sum of denominators over replicas and micro-batches
    loss_scale::Float64 # in force after the update; 1 without scaling
end
const STG_UPDATE_RESULT_MIN_SIZE = UInt32(40)

# Flags of training_step, backward and train_batch.
const STG_BATCH_LAST_MICRO_BATCH = UInt32(1) # the update follows this micro-batch: the reduction may start
const STG_BATCH_DETECT_ANOMALY = UInt32(2) # a NaN in loss or gradients is an error that names it; with loss scaling in the loss only

# Growing.
struct stg_step_args
    struct_size::UInt64
    batch::Ptr{stg_tree} # moved or borrowed; null with `announced`
    announced::UInt64 # a ticket of announce_batch, used up by this; 0: none
    batch_index::Int64
    dataloader_index::Int64
    global_step::Int64
    update::Ptr{stg_update_args} # borrowed; train_batch with STG_BATCH_LAST_MICRO_BATCH only, else null
    flags::UInt64
end
const STG_STEP_ARGS_MIN_SIZE = UInt32(64)

# The caller sets struct_size and zeroes the rest. Growing.
struct stg_step_result
    struct_size::UInt64
    outputs::stg_tree # gathered on the root device; owned by the caller
    weights::Ptr{Float64} # one per replica that ran: its rows or its denominator; lifetime: until the next step of the instance
    num_weights::UInt64
end
const STG_STEP_RESULT_MIN_SIZE = UInt32(56)

# One device's gradients. Growing.
struct stg_gradient_set
    struct_size::UInt64
    device::stg_device # a logical CPU device has its own index here; the tensors say cpu 0
    stream::stg_stream # on which the gradients are ready, and the results will be; zeros on a CPU
    weight::Float64 # >= 0; a set of weight 0 is not read under STG_REDUCE_MEAN
    gradients::Ptr{Ptr{stg_tensor}} # `num_gradients` tensors, null: none. Written in place; a slot that is null here but not in every set gets a new tensor, which the caller releases. Lifetime: the call, or until release.
    num_gradients::UInt64
    owner::Ptr{Cvoid} # the maker's own; lifetime: until release
    release::Ptr{Cvoid} # (self::Ptr{stg_gradient_set}) -> Cvoid [any]
end
const STG_GRADIENT_SET_MIN_SIZE = UInt32(80)

# Growing.
struct stg_reduce_gradients_args
    struct_size::UInt64
    sets::Ptr{Ptr{stg_gradient_set}} # one per device of the instance, in their order; lifetime: the call
    num_sets::UInt64
    op::UInt64 # STG_REDUCE_MEAN: sum of w_i g_i over sum of w_i, which must not be 0; STG_REDUCE_SUM: sum of g_i; others are refused
end
const STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE = UInt32(32)

# ---- state ----
#
# A state is a dict whose layout is part of the ABI, so that a swap works between authors:
#   format      int64, 1
#   model       dict: main name -> tensor (parameters and persistent buffers)
#   aliases     dict: other name -> main name
#   optimizer   dict: name (string), step (int64), per_parameter (dict: main name -> dict: slot -> tensor); none without an optimizer
#   scaler      dict: scale (double), good_steps (int64); none without loss scaling
#   generators  list of bytes, one per replica; more than there are replicas are kept and handed on
# Unknown keys are kept out and reported.
const STG_STATE_FORMAT = Int32(1)

# Flags of export_state, and of import_state and load.
const STG_EXPORT_COPY = UInt32(1) # export_state: copies; else views, valid until the next call that changes weights (copies too with STG_CREATE_CALLER_THREAD_ONLY). Views keep the model's replicas alive: see model.h
const STG_IMPORT_STRICT = UInt32(1) # import_state, load: a missing, unexpected or differently shaped tensor is an error that lists them all

# Growing.
struct stg_checkpoint_args
    struct_size::UInt64
    path::stg_string # the folder; borrowed
    host_json::stg_string # save: kept beside the state, given back by load (loop, loader, schedule); borrowed
    flags::UInt64 # load: STG_IMPORT_STRICT
end
const STG_CHECKPOINT_ARGS_MIN_SIZE = UInt32(48)

# The functions of a strategy. Growing; a function table. `self` is the instance. `call` is borrowed, null: no deadline.
# `batch`, `object` and `state` are moved or borrowed.
struct stg_strategy_api
    struct_size::UInt64
    create::Ptr{Cvoid} # (args::Ptr{stg_create_args}, out::Ptr{Ptr{stg_strategy}}) -> Ptr{stg_error} [any]
    destroy::Ptr{Cvoid} # (self::Ptr{stg_strategy}) -> Cvoid [owner, all]
    abort::Ptr{Cvoid} # (self::Ptr{stg_strategy}) -> Cvoid [any, all]
    status::Ptr{Cvoid} # (self::Ptr{stg_strategy}, out::Ptr{stg_status}) -> Ptr{stg_error} [any, all]
    devices::Ptr{Cvoid} # (self::Ptr{stg_strategy}, out::Ptr{Ptr{stg_device}}, num_devices::Ptr{UInt64}) -> Ptr{stg_error} [any, all]
    ranks::Ptr{Cvoid} # (self::Ptr{stg_strategy}, out::Ptr{stg_ranks}) -> Ptr{stg_error} [any, all]
    setup::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_setup_args}) -> Ptr{stg_error} [owner, created]
    teardown::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}) -> Ptr{stg_error} [owner, created fit evaluate modelless]
    describe_parameters::Ptr{Cvoid} # (self::Ptr{stg_strategy}, out::Ptr{stg_model_description}) -> Ptr{stg_error} [owner, fit evaluate]
    model_to_device::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}) -> Ptr{stg_error} [owner, fit evaluate]
    batch_to_device::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_transfer_args}, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, live]
    broadcast::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, object::Ptr{stg_tree}, src::Int32, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, live]
    all_gather::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, object::Ptr{stg_tree}, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, live]
    reduce::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, object::Ptr{stg_tree}, op::UInt32, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, live]
    reduce_boolean_decision::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, decision::UInt32, mode::UInt32, out::Ptr{UInt32}) -> Ptr{stg_error} [owner, live]
    barrier::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, name::stg_string) -> Ptr{stg_error} [owner, live]
    to_host::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, object::Ptr{stg_tree}, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, live]
    announce_batch::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_transfer_args}, stage::UInt32, ticket::Ptr{UInt64}) -> Ptr{stg_error} [owner, fit evaluate]
    training_step::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_step_args}, out::Ptr{stg_step_result}) -> Ptr{stg_error} [owner, fit]
    backward::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, flags::UInt64) -> Ptr{stg_error} [owner, fit]
    optimizer_step::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_update_args}, out::Ptr{stg_update_result}) -> Ptr{stg_error} [owner, fit]
    train_batch::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_step_args}, out::Ptr{stg_step_result}, update::Ptr{stg_update_result}) -> Ptr{stg_error} [owner, fit]
    zero_grad::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}) -> Ptr{stg_error} [owner, fit]
    gradients::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, fit]
    parameters_changed::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}) -> Ptr{stg_error} [owner, fit evaluate]
    validation_step::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_step_args}, out::Ptr{stg_step_result}) -> Ptr{stg_error} [owner, fit evaluate]
    test_step::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_step_args}, out::Ptr{stg_step_result}) -> Ptr{stg_error} [owner, fit evaluate]
    predict_step::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_step_args}, out::Ptr{stg_step_result}) -> Ptr{stg_error} [owner, fit evaluate]
    reduce_gradients::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_reduce_gradients_args}) -> Ptr{stg_error} [owner, modelless]
    export_state::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, flags::UInt64, out::Ptr{stg_tree}) -> Ptr{stg_error} [owner, fit evaluate]
    import_state::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, state::Ptr{stg_tree}, flags::UInt64, report::Ptr{stg_tree}) -> Ptr{stg_error} [owner, fit evaluate]
    save::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_checkpoint_args}) -> Ptr{stg_error} [owner, fit evaluate]
    load::Ptr{Cvoid} # (self::Ptr{stg_strategy}, call::Ptr{stg_call}, args::Ptr{stg_checkpoint_args}, host_json::Ptr{stg_tree}, report::Ptr{stg_tree}) -> Ptr{stg_error} [owner, fit evaluate]
end
const STG_STRATEGY_API_MIN_SIZE = UInt32(272)

# What a strategy can do, beyond its functions.
const STG_CAPABILITY_MULTIPLE_DEVICES = UInt32(1)
const STG_CAPABILITY_MULTIPLE_PROCESSES = UInt32(2)
const STG_CAPABILITY_CALLER_THREAD_ONLY = UInt32(4)
const STG_CAPABILITY_STREAMS = UInt32(8) # honours stg_call.streams

# A factory of strategies, offered by a plugin. Growing. All pointers live as long as the process.
struct stg_strategy_factory
    struct_size::UInt64
    name::stg_string # lifetime: the process
    summary::stg_string # lifetime: the process; one line
    options_schema::stg_string # lifetime: the process; the JSON Schema of "options"
    device_kinds::Ptr{UInt32} # lifetime: the process; STG_DEVICE_* that it can use
    num_device_kinds::UInt64
    capabilities::UInt64 # STG_CAPABILITY_*; unknown bits are to be passed over
    api::Ptr{stg_strategy_api} # lifetime: the process
end
const STG_STRATEGY_FACTORY_MIN_SIZE = UInt32(88)

# --- stratagem/plugin.h

# What a plugin offers. Growing. It and all that it points to live as long as the process.
struct stg_plugin
    struct_size::UInt64
    name::stg_string # lifetime: the process; as in the note
    version::stg_string # lifetime: the process; as in the note
    strategies::Ptr{Ptr{stg_strategy_factory}} # lifetime: the process
    num_strategies::UInt64
    models::Ptr{Ptr{stg_model_factory}} # lifetime: the process
    num_models::UInt64
    get_extension::Ptr{Cvoid} # (id::stg_string) -> Ptr{Cvoid} [any]
end
const STG_PLUGIN_MIN_SIZE = UInt32(80)

# Answers of the probe.
const STG_PROBE_ACCEPTED = UInt32(0)
const STG_PROBE_REFUSED = UInt32(1)
const STG_PROBE_BAD_ARGUMENT = UInt32(2)

# What the host says. Fixed for ever, across all majors.
struct stg_probe_request
    abi_major::UInt32
    min_minor::UInt32 # lowest minor that the host can use
    max_minor::UInt32 # highest
    reserved::UInt32 # 0
    host_name::stg_string # lifetime: the call; for messages
end

# What the plugin answers. Fixed for ever, across all majors. The host sets `text` and `text_capacity_bytes`; the plugin the rest.
struct stg_probe_reply
    abi_major::UInt32
    min_minor::UInt32
    max_minor::UInt32
    minor::UInt32 # the one chosen: the highest that both know; 0 if refused
    plugin::Ptr{Cvoid} # accepted: a const stg_plugin * of that major and minor; lifetime: the process; refused: null
    text::Ptr{UInt8} # lifetime: the call; the host's buffer for a refusal in words, NUL-terminated, cut to fit; may be null
    text_capacity_bytes::UInt64
    text_size_bytes::UInt64 # what the whole text needs, with its NUL; 0 if accepted
end

# The one exported symbol. Allocates nothing and starts nothing; may be called any number of times. `reply` is the
# caller's memory. [any]
# stg_plugin_probe_fn(request::Ptr{stg_probe_request}, reply::Ptr{stg_probe_reply}) -> UInt32 [any]

const STG_PLUGIN_PROBE_SYMBOL = "stg_plugin_probe"

# The ELF note: owner "Stratagem", type 1, description: JSON text, filled up with one to four NULs to a multiple of 4 bytes (a reader
# cuts at the first). Keys: "name", "version", "abi": {"major", "min_minor",
# "max_minor"}, "strategies": [names], "models": [names], and what it was built with, where it links them: "libtorch", "cuda", "nccl"
# (version texts). Read from the file's PT_NOTE segments, without running anything.
const STG_NOTE_OWNER = "Stratagem"
const STG_NOTE_TYPE = UInt32(1)
const STG_NOTE_SECTION = ".note.stratagem"

# --- stratagem/extension.h

# --- stratagem/abi.h

# --- stratagem/session.h

# One run: a checked config with its strategy, model and data. A handle (index and generation), never memory: with one that is closed
# a function answers STG_FAILED_PRECONDITION, with one that was never given STG_INVALID_ARGUMENT. 0 is none.
#
# A session takes one caller at a time, on whatever thread: a second one, or a call of an [owner] function from inside one of the session's
# events, gets STG_FAILED_PRECONDITION.
const stg_session = UInt64

# How many sessions may be open at once.
const STG_MAX_SESSIONS = UInt32(1024)

# How far a run is. Growing.
struct stg_progress
    struct_size::UInt64
    stage::UInt64 # STG_STAGE_* of what is going on: validation is a part of fit
    epoch::Int64 # completed
    max_epochs::Int64 # -1: no limit
    batch::Int64 # of the epoch or the evaluation, completed
    num_batches::Int64
    step::Int64 # updates done
    max_steps::Int64 # -1: no limit
    loss::Float64 # the last one that was logged; NaN before the first
end
const STG_PROGRESS_MIN_SIZE = UInt32(72)

# What a run tells. Every function may be null; all are called on the thread that is inside a call of the session, but `log`, which a
# plugin may call from its own threads (not with STG_SESSION_CALLER_THREAD_ONLY). A function that returns an error ends the run with it, as the
# cause of the error that the run returns; what was trained is saved as after every error. Growing; a function table.
struct stg_session_events
    struct_size::UInt64
    self::Ptr{Cvoid} # lifetime: the session
    log::Ptr{Cvoid} # (self::Ptr{Cvoid}, level::UInt32, message::stg_string) -> Cvoid [any]
    progress::Ptr{Cvoid} # (self::Ptr{Cvoid}, progress::Ptr{stg_progress}) -> Ptr{stg_error} [any]
    metrics::Ptr{Cvoid} # (self::Ptr{Cvoid}, line::stg_string) -> Ptr{stg_error} [any]
    batch_start::Ptr{Cvoid} # (self::Ptr{Cvoid}, progress::Ptr{stg_progress}) -> Ptr{stg_error} [any]
    batch_end::Ptr{Cvoid} # (self::Ptr{Cvoid}, progress::Ptr{stg_progress}, outputs::Ptr{stg_value}) -> Ptr{stg_error} [any]
    swap::Ptr{Cvoid} # (self::Ptr{Cvoid}, step::Int64, strategy::stg_string, error::Ptr{stg_error}) -> Ptr{stg_error} [any]
end
const STG_SESSION_EVENTS_MIN_SIZE = UInt32(40)

# The functions of a source. Flags:
const STG_SOURCE_ANY_THREAD = UInt32(1) # `read` may be called on a thread of the session's own, ahead of its use; else: on the caller's

# A data set of the host's own. A config's data.train, .validation, .test or .predict names it in the place of files:
# {"source": "name", "batch_size": 64, "shuffle": true}. Shuffling, limits, batches and resuming are the session's. Growing; a function
# table.
struct stg_data_source
    struct_size::UInt64
    name::stg_string # lifetime: until release
    self::Ptr{Cvoid} # lifetime: until release
    num_samples::Int64
    flags::UInt64 # STG_SOURCE_*
    read::Ptr{Cvoid} # (self::Ptr{Cvoid}, rows::Ptr{Int64}, num_rows::UInt64, batch::Ptr{stg_tree}) -> Ptr{stg_error} [any]
    release::Ptr{Cvoid} # (self::Ptr{Cvoid}) -> Cvoid [any]
end
const STG_DATA_SOURCE_MIN_SIZE = UInt32(64)

# Flags of stg_session_args.
const STG_SESSION_OWN_LOOP = UInt32(1) # the host brings batches and drives the strategy (stg_session_strategy); no data is needed, nor read; no run
const STG_SESSION_QUEUE_EVENTS = UInt32(2) # events are kept for stg_session_poll, too
const STG_SESSION_CALLER_THREAD_ONLY = UInt32(4) # STG_CREATE_CALLER_THREAD_ONLY: everything runs on the thread that is inside a call

# Growing. All strings are borrowed.
struct stg_session_args
    struct_size::UInt64
    config_path::stg_string # the config's file; empty: config_text is the config, not both
    config_text::stg_string # JSON with comments
    config_folder::stg_string # what the paths of config_text are relative to; must be absolute
    overrides::Ptr{stg_string} # lifetime: the call; "a.b=value" texts, the last one wins
    num_overrides::UInt64
    stage::UInt64 # STG_STAGE_*: what stg_session_run does
    checkpoint::stg_string # a checkpoint, or the folder of a run; fit goes on from it; empty: none
    events::Ptr{stg_session_events} # borrowed, copied; null: no events
    output::stg_string # STG_STAGE_PREDICT: the file to write, .npz or .safetensors; else unused
    flags::UInt64 # STG_SESSION_*
    model::Ptr{stg_model} # borrowed, retained: what {"kind": "host"} in the config's model means; null: none
    sources::Ptr{Ptr{stg_data_source}} # borrowed, copied; consumed (their release called) on every return of open but a refused size
    num_sources::UInt64
end
const STG_SESSION_ARGS_MIN_SIZE = UInt32(104)

# Checks the config, loads plugins and data, sets up strategy and model, reads the checkpoint. What the code of an error says here:
#   STG_INVALID_ARGUMENT, STG_NOT_FOUND, STG_OUT_OF_RANGE, STG_DATA_LOSS, STG_UNIMPLEMENTED
#       the config or an input file is wrong; the message lists all that is
#   STG_FAILED_PRECONDITION, STG_PERMISSION_DENIED, STG_UNAVAILABLE
#       a plugin that was found can't be loaded or is refused, or a device is missing
# `out` is owned by the caller until stg_session_close. [any]
# stg_session_open(args::Ptr{stg_session_args}, out::Ptr{stg_session}) -> Ptr{stg_error} [any]

# Trains `num_updates` updates more, with what falls between them (validation, checkpoints, swaps), or to the end of the run, which writes
# the last checkpoint. `is_over`, which may be null, is then 1: stg_session_run gives the result. Only of a session for fit. [owner]
# stg_session_step(session::stg_session, num_updates::UInt64, is_over::Ptr{UInt32}) -> Ptr{stg_error} [owner]

# Trains (what stg_session_step has left of it), validates, tests or predicts, once. `result`: one JSON object. An interrupted run (see
# stg_session_request_stop) is no error: its result says "interrupted": true. [owner]
# stg_session_run(session::stg_session, result::Ptr{stg_tree}) -> Ptr{stg_error} [owner]

# How far the run is: what the last `progress` event said, before the first one where it begins or goes on. Fills `out`. [any]
# stg_session_progress(session::stg_session, out::Ptr{stg_progress}) -> Ptr{stg_error} [any]

# The strategy that is set up now, for a host's own steps, predictions or state: `api` lives as long as the process, `instance` until
# the next swap, or the end of the session. What it is asked for between updates of stg_session_step, the run doesn't know of. [owner]
# stg_session_strategy(session::stg_session, api::Ptr{Ptr{stg_strategy_api}}, instance::Ptr{Ptr{stg_strategy}}) -> Ptr{stg_error} [owner]

# Exchanges the strategy now, between updates. `strategy` is what the config's "strategy" is: {"name": "data_parallel", "devices": 2}. Weights,
# optimizer, generators and the position in the run are handed over in memory. On an error the old strategy goes on, as it was. Only of a
# session for fit; in an own loop only where no gradients wait for an optimizer_step. [owner]
# stg_session_swap(session::stg_session, strategy::stg_string) -> Ptr{stg_error} [owner]

# The same before the run's next update, wherever it is called from; a later request takes the place of one that waits. An error here is one
# in the handle or the text; how it went is told by the event `swap`, and the log. Not in an own loop, which has no updates. [any]
# stg_session_request_swap(session::stg_session, strategy::stg_string) -> Ptr{stg_error} [any]

# Asks the run to read its config file again before its next update, and to swap to the strategy in it. Other changes are
# told (log) and left; a file that can't be read, or is wrong, changes nothing. Safe in a signal handler. [any]
# stg_session_request_reload(session::stg_session) -> Cvoid [any]

# Asks a run to end soon: it finishes its update and writes a checkpoint. Safe in a signal handler. [any]
# stg_session_request_stop(session::stg_session) -> Cvoid [any]

# Asks a run to end now: the call of the strategy that is going on is given up (stg_call.cancel; a step on the caller's own thread ends
# first) and the run returns STG_CANCELLED, saved as of the last update where the strategy is usable. Safe in a signal handler. [any]
# stg_session_cancel(session::stg_session) -> Cvoid [any]

# The next event of a session opened with STG_SESSION_QUEUE_EVENTS, waited for at most `timeout_ns` nanoseconds; none (STG_NONE) if there was
# none. One JSON object, owned by the caller:
#   {"event": "log", "level": 2, "message": "..."}
#   {"event": "progress", "stage": 0, "epoch": 0, ...}   the members of stg_progress; "loss" is null before the first
#   {"event": "metrics", "line": {...}}
#   {"event": "swap", "step": 10, "strategy": {...}, "error": null}   or {"code": 5, "message": "..."}
#   {"event": "dropped", "count": 7}
# At most 4096 are kept: then progress is dropped first, the oldest of all next. [any]
# stg_session_poll(session::stg_session, timeout_ns::UInt64, event::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# Ends a session: the handle is closed at once, for everyone. Where a call of the session is going on (in another thread, or around the event
# that calls this), it is asked to stop and what the session holds is freed when it returns. A closed handle is allowed. [any]
# stg_session_close(session::stg_session) -> Cvoid [any]

# What there is in the search folders, without loading it: {"folders": [...], "plugins": [...]}. `config_path`: a config whose
# plugin_path is searched too; may be empty. [any]
# stg_list_plugins(config_path::stg_string, result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# The note of one plugin file, without loading it. [any]
# stg_inspect_plugin(path::stg_string, result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# Looks at what a run needs on this machine, and says what is wrong and what to do: {"schema_version": 1, "status": "fault", "checks":
# [{"id", "status", "found", "problems": [{"status", "wrong", "remedy"}]}]}; a status is "ok", "warning", "fault" or "skipped", that of
# all is its worst. Where there is an NVIDIA driver, it is initialised; no plugin and no LibTorch is loaded. `config_path`: a config whose
# needs are looked at; may be empty. [any]
# stg_doctor(config_path::stg_string, result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# Loads a plugin file with every check, and gives its table, `out`, which lives as long as the process: for hosts that use the ABI without a
# session. [any]
# stg_load_plugin(path::stg_string, out::Ptr{Ptr{stg_plugin}}) -> Ptr{stg_error} [any]

# Loads a plugin file and tells what it offers: {"path", "name", "version", "strategies": [{"name", "summary", "devices", "capabilities",
# "options_schema"}], "models": [{"name", "summary", "options_schema"}]}. [any]
# stg_describe_plugin(path::stg_string, result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# The config's JSON Schema. [any]
# stg_config_schema(result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# The JSON Schema of the options of a strategy (`is_model` 0) or a model (1), by name. Loads its plugin. [any]
# stg_options_schema(name::stg_string, is_model::UInt32, result::Ptr{stg_tree}) -> Ptr{stg_error} [any]

# libstratagem's version; lives as long as the process. [any]
# stg_version() -> stg_string [any]

# Each struct with its size and the offsets of its fields, in bytes.
const LAYOUT = (
    (stg_string, 16, ((:data, 0), (:size_bytes, 8))),
    (stg_device, 8, ((:kind, 0), (:index, 4))),
    (stg_stream, 24, ((:device, 0), (:handle, 8), (:kind, 16), (:reserved, 20))),
    (stg_error, 64, ((:code, 0), (:flags, 4), (:replica, 8), (:rank, 12), (:device, 16), (:message, 24), (:cause, 40), (:release, 48), (:owner, 56))),
    (stg_call, 40, ((:struct_size, 0), (:deadline_ns, 8), (:cancel, 16), (:streams, 24), (:num_streams, 32))),
    (stg_dtype, 4, ((:code, 0), (:bits, 1), (:lanes, 2))),
    (stg_tensor_view, 48, ((:data, 0), (:device, 8), (:num_dims, 16), (:dtype, 20), (:shape, 24), (:strides, 32), (:byte_offset, 40))),
    (stg_tensor, 80, ((:dlpack_major, 0), (:dlpack_minor, 4), (:owner, 8), (:deleter, 16), (:flags, 24), (:view, 32))),
    (stg_value, 16, ((:type, 0), (:count, 4), (:as, 8))),
    (stg_entry, 32, ((:key, 0), (:value, 16))),
    (stg_tree, 32, ((:root, 0), (:release, 16), (:owner, 24))),
    (stg_opaque, 48, ((:struct_size, 0), (:type_name, 8), (:retain, 24), (:release, 32), (:reduce, 40))),
    (stg_storage, 96, ((:struct_size, 0), (:self, 8), (:begin_, 16), (:write, 24), (:commit, 32), (:rollback, 40), (:open, 48), (:read, 56), (:close, 64), (:list, 72), (:remove, 80), (:replace, 88))),
    (stg_host, 88, ((:struct_size, 0), (:self, 8), (:retain, 16), (:release, 24), (:log, 32), (:progress, 40), (:trace_begin, 48), (:trace_end, 56), (:allocate, 64), (:deallocate, 72), (:storage, 80))),
    (stg_replicate_args, 48, ((:struct_size, 0), (:device, 8), (:replica, 16), (:num_replicas, 20), (:floating_dtype, 24), (:num_threads, 28), (:seed, 32), (:flags, 40))),
    (stg_parameter, 40, ((:struct_size, 0), (:names, 8), (:num_names, 16), (:tensor, 24), (:flags, 32))),
    (stg_model_description, 48, ((:struct_size, 0), (:parameters, 8), (:num_parameters, 16), (:buffers, 24), (:num_buffers, 32), (:loss_kind, 40))),
    (stg_step_context, 88, ((:struct_size, 0), (:device, 8), (:replica, 16), (:num_replicas, 20), (:stage, 24), (:flags, 28), (:batch_index, 32), (:dataloader_index, 40), (:global_step, 48), (:autocast_dtype, 56), (:reserved, 60), (:stream, 64))),
    (stg_model_step_result, 64, ((:struct_size, 0), (:outputs, 8), (:denominator, 40), (:graph, 56))),
    (stg_gradient_sink, 32, ((:struct_size, 0), (:self, 8), (:ready, 16), (:ready_sparse, 24))),
    (stg_model, 144, ((:struct_size, 0), (:self, 8), (:retain, 16), (:release, 24), (:replicate, 32), (:destroy_replica, 40), (:describe, 48), (:set_mode, 56), (:step, 64), (:backward, 72), (:release_graph, 80), (:bind, 88), (:parameters_changed, 96), (:split, 104), (:transfer, 112), (:synchronize, 120), (:get_generator_state, 128), (:set_generator_state, 136))),
    (stg_model_factory, 64, ((:struct_size, 0), (:name, 8), (:summary, 24), (:options_schema, 40), (:create, 56))),
    (stg_create_args, 40, ((:struct_size, 0), (:config_json, 8), (:host, 24), (:flags, 32))),
    (stg_status, 40, ((:struct_size, 0), (:state, 8), (:stage, 12), (:num_micro_batches, 16), (:num_updates, 24), (:has_graph, 32))),
    (stg_ranks, 24, ((:struct_size, 0), (:global_rank, 8), (:local_rank, 12), (:node_rank, 16), (:world_size, 20))),
    (stg_setup_args, 32, ((:struct_size, 0), (:model, 8), (:state, 16), (:stage, 24))),
    (stg_transfer_args, 32, ((:struct_size, 0), (:batch, 8), (:device, 16), (:dataloader_index, 24))),
    (stg_update_args, 32, ((:struct_size, 0), (:lr, 8), (:clip_limit, 16), (:clip, 24))),
    (stg_update_result, 40, ((:struct_size, 0), (:outcome, 8), (:gradient_norm, 16), (:total_weight, 24), (:loss_scale, 32))),
    (stg_step_args, 64, ((:struct_size, 0), (:batch, 8), (:announced, 16), (:batch_index, 24), (:dataloader_index, 32), (:global_step, 40), (:update, 48), (:flags, 56))),
    (stg_step_result, 56, ((:struct_size, 0), (:outputs, 8), (:weights, 40), (:num_weights, 48))),
    (stg_gradient_set, 80, ((:struct_size, 0), (:device, 8), (:stream, 16), (:weight, 40), (:gradients, 48), (:num_gradients, 56), (:owner, 64), (:release, 72))),
    (stg_reduce_gradients_args, 32, ((:struct_size, 0), (:sets, 8), (:num_sets, 16), (:op, 24))),
    (stg_checkpoint_args, 48, ((:struct_size, 0), (:path, 8), (:host_json, 24), (:flags, 40))),
    (stg_strategy_api, 272, ((:struct_size, 0), (:create, 8), (:destroy, 16), (:abort, 24), (:status, 32), (:devices, 40), (:ranks, 48), (:setup, 56), (:teardown, 64), (:describe_parameters, 72), (:model_to_device, 80), (:batch_to_device, 88), (:broadcast, 96), (:all_gather, 104), (:reduce, 112), (:reduce_boolean_decision, 120), (:barrier, 128), (:to_host, 136), (:announce_batch, 144), (:training_step, 152), (:backward, 160), (:optimizer_step, 168), (:train_batch, 176), (:zero_grad, 184), (:gradients, 192), (:parameters_changed, 200), (:validation_step, 208), (:test_step, 216), (:predict_step, 224), (:reduce_gradients, 232), (:export_state, 240), (:import_state, 248), (:save, 256), (:load, 264))),
    (stg_strategy_factory, 88, ((:struct_size, 0), (:name, 8), (:summary, 24), (:options_schema, 40), (:device_kinds, 56), (:num_device_kinds, 64), (:capabilities, 72), (:api, 80))),
    (stg_plugin, 80, ((:struct_size, 0), (:name, 8), (:version, 24), (:strategies, 40), (:num_strategies, 48), (:models, 56), (:num_models, 64), (:get_extension, 72))),
    (stg_probe_request, 32, ((:abi_major, 0), (:min_minor, 4), (:max_minor, 8), (:reserved, 12), (:host_name, 16))),
    (stg_probe_reply, 48, ((:abi_major, 0), (:min_minor, 4), (:max_minor, 8), (:minor, 12), (:plugin, 16), (:text, 24), (:text_capacity_bytes, 32), (:text_size_bytes, 40))),
    (stg_progress, 72, ((:struct_size, 0), (:stage, 8), (:epoch, 16), (:max_epochs, 24), (:batch, 32), (:num_batches, 40), (:step, 48), (:max_steps, 56), (:loss, 64))),
    (stg_session_events, 64, ((:struct_size, 0), (:self, 8), (:log, 16), (:progress, 24), (:metrics, 32), (:batch_start, 40), (:batch_end, 48), (:swap, 56))),
    (stg_data_source, 64, ((:struct_size, 0), (:name, 8), (:self, 24), (:num_samples, 32), (:flags, 40), (:read, 48), (:release, 56))),
    (stg_session_args, 152, ((:struct_size, 0), (:config_path, 8), (:config_text, 24), (:config_folder, 40), (:overrides, 56), (:num_overrides, 64), (:stage, 72), (:checkpoint, 80), (:events, 96), (:output, 104), (:flags, 120), (:model, 128), (:sources, 136), (:num_sources, 144))),
)

# Result and arguments of each function.
const SIGNATURES = Dict{Symbol,Tuple{Any,Tuple}}(
    :stg_error_release => (Cvoid, (Ptr{stg_error},)),
    :stg_tensor_deleter => (Cvoid, (Ptr{stg_tensor},)),
    :stg_tree_release => (Cvoid, (Ptr{stg_tree},)),
    :stg_opaque_retain => (Cvoid, (Ptr{stg_opaque},)),
    :stg_opaque_release => (Cvoid, (Ptr{stg_opaque},)),
    :stg_opaque_reduce => (Ptr{stg_error}, (Ptr{Ptr{stg_opaque}}, UInt64, Ptr{Ptr{stg_opaque}})),
    :stg_storage_begin => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string, Ptr{Ptr{Cvoid}})),
    :stg_storage_write => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{Cvoid}, stg_string, UInt64, Ptr{Cvoid}, UInt64)),
    :stg_storage_commit => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{Cvoid})),
    :stg_storage_rollback => (Cvoid, (Ptr{Cvoid}, Ptr{Cvoid})),
    :stg_storage_open => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string, Ptr{Ptr{Cvoid}}, Ptr{UInt64})),
    :stg_storage_read => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{Cvoid}, UInt64, Ptr{Cvoid}, UInt64)),
    :stg_storage_close => (Cvoid, (Ptr{Cvoid}, Ptr{Cvoid})),
    :stg_storage_list => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string, Ptr{stg_tree})),
    :stg_storage_remove => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string)),
    :stg_storage_replace => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string, Ptr{Cvoid}, UInt64)),
    :stg_host_retain => (Cvoid, (Ptr{Cvoid},)),
    :stg_host_release => (Cvoid, (Ptr{Cvoid},)),
    :stg_host_log => (Cvoid, (Ptr{Cvoid}, UInt32, stg_string, Ptr{stg_tree})),
    :stg_host_progress => (Cvoid, (Ptr{Cvoid}, stg_string, UInt64, UInt64)),
    :stg_host_trace_begin => (Cvoid, (Ptr{Cvoid}, stg_string, Int32)),
    :stg_host_trace_end => (Cvoid, (Ptr{Cvoid}, stg_string, Int32)),
    :stg_host_allocate => (Ptr{Cvoid}, (Ptr{Cvoid}, UInt64, UInt64)),
    :stg_host_deallocate => (Cvoid, (Ptr{Cvoid}, Ptr{Cvoid}, UInt64)),
    :stg_gradient_sink_ready => (Ptr{stg_error}, (Ptr{Cvoid}, UInt64, Ptr{stg_tensor}, Ptr{stg_stream})),
    :stg_gradient_sink_ready_sparse => (Ptr{stg_error}, (Ptr{Cvoid}, UInt64, Ptr{stg_tensor}, Ptr{stg_tensor}, Ptr{Int64}, UInt64, Ptr{stg_stream})),
    :stg_model_retain => (Cvoid, (Ptr{Cvoid},)),
    :stg_model_release => (Cvoid, (Ptr{Cvoid},)),
    :stg_model_replicate => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replicate_args}, Ptr{Ptr{stg_replica}})),
    :stg_model_destroy_replica => (Cvoid, (Ptr{Cvoid}, Ptr{stg_replica})),
    :stg_model_describe => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_model_description})),
    :stg_model_set_mode => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, UInt32)),
    :stg_model_step => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_step_context}, Ptr{stg_tree}, Ptr{stg_model_step_result})),
    :stg_model_backward => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_graph}, Float64, UInt32, Ptr{stg_gradient_sink})),
    :stg_model_release_graph => (Cvoid, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_graph})),
    :stg_model_bind => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, UInt64, Ptr{stg_tensor}, Ptr{stg_tensor})),
    :stg_model_parameters_changed => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica})),
    :stg_model_split => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_tree}, UInt64, Ptr{stg_tree}, Ptr{UInt64})),
    :stg_model_transfer => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_tree}, Int64, Ptr{stg_tree})),
    :stg_model_synchronize => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica})),
    :stg_model_get_generator_state => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{stg_tree})),
    :stg_model_set_generator_state => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_replica}, Ptr{UInt8}, UInt64)),
    :stg_model_factory_create => (Ptr{stg_error}, (stg_string, Ptr{stg_host}, Ptr{Ptr{stg_model}})),
    :stg_gradient_set_release => (Cvoid, (Ptr{stg_gradient_set},)),
    :stg_strategy_api_create => (Ptr{stg_error}, (Ptr{stg_create_args}, Ptr{Ptr{stg_strategy}})),
    :stg_strategy_api_destroy => (Cvoid, (Ptr{stg_strategy},)),
    :stg_strategy_api_abort => (Cvoid, (Ptr{stg_strategy},)),
    :stg_strategy_api_status => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_status})),
    :stg_strategy_api_devices => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{Ptr{stg_device}}, Ptr{UInt64})),
    :stg_strategy_api_ranks => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_ranks})),
    :stg_strategy_api_setup => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_setup_args})),
    :stg_strategy_api_teardown => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call})),
    :stg_strategy_api_describe_parameters => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_model_description})),
    :stg_strategy_api_model_to_device => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call})),
    :stg_strategy_api_batch_to_device => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_transfer_args}, Ptr{stg_tree})),
    :stg_strategy_api_broadcast => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree}, Int32, Ptr{stg_tree})),
    :stg_strategy_api_all_gather => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree}, Ptr{stg_tree})),
    :stg_strategy_api_reduce => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree}, UInt32, Ptr{stg_tree})),
    :stg_strategy_api_reduce_boolean_decision => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, UInt32, UInt32, Ptr{UInt32})),
    :stg_strategy_api_barrier => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, stg_string)),
    :stg_strategy_api_to_host => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree}, Ptr{stg_tree})),
    :stg_strategy_api_announce_batch => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_transfer_args}, UInt32, Ptr{UInt64})),
    :stg_strategy_api_training_step => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_step_args}, Ptr{stg_step_result})),
    :stg_strategy_api_backward => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, UInt64)),
    :stg_strategy_api_optimizer_step => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_update_args}, Ptr{stg_update_result})),
    :stg_strategy_api_train_batch => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_step_args}, Ptr{stg_step_result}, Ptr{stg_update_result})),
    :stg_strategy_api_zero_grad => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call})),
    :stg_strategy_api_gradients => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree})),
    :stg_strategy_api_parameters_changed => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call})),
    :stg_strategy_api_validation_step => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_step_args}, Ptr{stg_step_result})),
    :stg_strategy_api_test_step => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_step_args}, Ptr{stg_step_result})),
    :stg_strategy_api_predict_step => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_step_args}, Ptr{stg_step_result})),
    :stg_strategy_api_reduce_gradients => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_reduce_gradients_args})),
    :stg_strategy_api_export_state => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, UInt64, Ptr{stg_tree})),
    :stg_strategy_api_import_state => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_tree}, UInt64, Ptr{stg_tree})),
    :stg_strategy_api_save => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_checkpoint_args})),
    :stg_strategy_api_load => (Ptr{stg_error}, (Ptr{stg_strategy}, Ptr{stg_call}, Ptr{stg_checkpoint_args}, Ptr{stg_tree}, Ptr{stg_tree})),
    :stg_plugin_get_extension => (Ptr{Cvoid}, (stg_string,)),
    :stg_plugin_probe_fn => (UInt32, (Ptr{stg_probe_request}, Ptr{stg_probe_reply})),
    :stg_session_events_log => (Cvoid, (Ptr{Cvoid}, UInt32, stg_string)),
    :stg_session_events_progress => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_progress})),
    :stg_session_events_metrics => (Ptr{stg_error}, (Ptr{Cvoid}, stg_string)),
    :stg_session_events_batch_start => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_progress})),
    :stg_session_events_batch_end => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{stg_progress}, Ptr{stg_value})),
    :stg_session_events_swap => (Ptr{stg_error}, (Ptr{Cvoid}, Int64, stg_string, Ptr{stg_error})),
    :stg_data_source_read => (Ptr{stg_error}, (Ptr{Cvoid}, Ptr{Int64}, UInt64, Ptr{stg_tree})),
    :stg_data_source_release => (Cvoid, (Ptr{Cvoid},)),
    :stg_session_open => (Ptr{stg_error}, (Ptr{stg_session_args}, Ptr{stg_session})),
    :stg_session_step => (Ptr{stg_error}, (stg_session, UInt64, Ptr{UInt32})),
    :stg_session_run => (Ptr{stg_error}, (stg_session, Ptr{stg_tree})),
    :stg_session_progress => (Ptr{stg_error}, (stg_session, Ptr{stg_progress})),
    :stg_session_strategy => (Ptr{stg_error}, (stg_session, Ptr{Ptr{stg_strategy_api}}, Ptr{Ptr{stg_strategy}})),
    :stg_session_swap => (Ptr{stg_error}, (stg_session, stg_string)),
    :stg_session_request_swap => (Ptr{stg_error}, (stg_session, stg_string)),
    :stg_session_request_reload => (Cvoid, (stg_session,)),
    :stg_session_request_stop => (Cvoid, (stg_session,)),
    :stg_session_cancel => (Cvoid, (stg_session,)),
    :stg_session_poll => (Ptr{stg_error}, (stg_session, UInt64, Ptr{stg_tree})),
    :stg_session_close => (Cvoid, (stg_session,)),
    :stg_list_plugins => (Ptr{stg_error}, (stg_string, Ptr{stg_tree})),
    :stg_inspect_plugin => (Ptr{stg_error}, (stg_string, Ptr{stg_tree})),
    :stg_doctor => (Ptr{stg_error}, (stg_string, Ptr{stg_tree})),
    :stg_load_plugin => (Ptr{stg_error}, (stg_string, Ptr{Ptr{stg_plugin}})),
    :stg_describe_plugin => (Ptr{stg_error}, (stg_string, Ptr{stg_tree})),
    :stg_config_schema => (Ptr{stg_error}, (Ptr{stg_tree},)),
    :stg_options_schema => (Ptr{stg_error}, (stg_string, UInt32, Ptr{stg_tree})),
    :stg_version => (stg_string, ()),
)

# Compares what Julia made of the structs with what the C compiler made of them.
function check_layout()
    for (type, size_bytes, fields) in LAYOUT
        isbitstype(type) || error("Stratagem: $type is not isbits")
        sizeof(type) == size_bytes || error("Stratagem: $type has $(sizeof(type)) bytes; the C header says $size_bytes")
        fieldcount(type) == length(fields) ||
            error("Stratagem: $type has $(fieldcount(type)) fields; the C header says $(length(fields))")
        for (index, (name, offset_bytes)) in enumerate(fields)
            (fieldname(type, index) === name && fieldoffset(type, index) == offset_bytes) || error(
                "Stratagem: field $index of $type is $(fieldname(type, index)) at $(fieldoffset(type, index)); " *
                "the C header says $name at $offset_bytes")
        end
    end
end
