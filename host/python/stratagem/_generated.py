# SPDX-License-Identifier: Apache-2.0
"""The ABI's constants, structs and function types for ctypes. Made from the headers by `./run layout`; not to be edited.

The layout is compared with the C compiler's when this is imported. A union is anonymous: its members are the struct's.
"""
from ctypes import CFUNCTYPE, POINTER, Structure, Union, c_double, c_int32, c_int64, c_uint8, c_uint16, c_uint32, c_uint64, c_void_p, sizeof

STG_ABI_MAJOR = 1
STG_ABI_MINOR = 0
STG_MAX_STRUCT_SIZE_BYTES = 65536
STG_DEVICE_NONE = 0
STG_DEVICE_CPU = 1
STG_DEVICE_CUDA = 2
STG_DEVICE_CUDA_HOST = 3  # pinned host memory; only in tensors
STG_DEVICE_EXTENSION = 12  # LibTorch's PrivateUse1
STG_STREAM_HANDLE = 0  # as it stands; null is the legacy default stream
STG_STREAM_PER_THREAD_DEFAULT = 1  # the calling thread's default stream; `handle` is ignored
STG_OK = 0
STG_CANCELLED = 1
STG_UNKNOWN = 2
STG_INVALID_ARGUMENT = 3
STG_DEADLINE_EXCEEDED = 4
STG_NOT_FOUND = 5
STG_ALREADY_EXISTS = 6
STG_PERMISSION_DENIED = 7
STG_RESOURCE_EXHAUSTED = 8  # out of memory, on the host or a device; a full disk
STG_FAILED_PRECONDITION = 9  # the call is not legal in this state, or from this thread
STG_ABORTED = 10
STG_OUT_OF_RANGE = 11
STG_UNIMPLEMENTED = 12
STG_INTERNAL = 13
STG_UNAVAILABLE = 14
STG_DATA_LOSS = 15  # a truncated or damaged file
STG_UNAUTHENTICATED = 16
STG_ERROR_RETRYABLE = 1  # the same call may succeed later
STG_ERROR_INSTANCE_USABLE = 2  # the instance takes further calls
STG_ERROR_INSTANCE_DRAINING = 4  # only abort and destroy are legal now
STG_DLPACK_MAJOR = 1
STG_DLPACK_MINOR = 0
STG_DTYPE_INT = 0
STG_DTYPE_UINT = 1
STG_DTYPE_FLOAT = 2
STG_DTYPE_BFLOAT = 4
STG_DTYPE_COMPLEX = 5
STG_DTYPE_BOOL = 6
STG_TENSOR_READ_ONLY = 1  # whoever receives it must not write
STG_TENSOR_IS_COPIED = 2
STG_MAX_TREE_DEPTH = 64
STG_MAX_TREE_NODES = 1048576
STG_NONE = 0
STG_BOOL = 1  # as.i64: 0 or 1
STG_INT64 = 2  # as.i64
STG_DOUBLE = 3  # as.f64
STG_STRING = 4  # as.utf8, `count` bytes
STG_BYTES = 5  # as.bytes, `count` bytes
STG_TENSOR = 6  # as.tensor, never null
STG_LIST = 7  # as.items, `count` values
STG_TUPLE = 8  # as.items, `count` values
STG_DICT = 9  # as.entries, `count` entries with distinct keys, in order
STG_OPAQUE = 10  # as.opaque, never null
STG_LOG_DEBUG = 1
STG_LOG_INFO = 2
STG_LOG_WARNING = 3
STG_LOG_ERROR = 4
STG_STAGE_FIT = 0
STG_STAGE_VALIDATE = 1
STG_STAGE_TEST = 2
STG_STAGE_PREDICT = 3
STG_LOSS_MEAN = 0
STG_LOSS_SUM = 1
STG_REPLICATE_SKIP_INIT = 1  # every pinned parameter and persistent buffer is written before the first step: the model need not give them initial values
STG_PARAMETER_REQUIRES_GRAD = 1  # not frozen
STG_PARAMETER_PERSISTENT = 2  # belongs in a checkpoint
STG_PARAMETER_PINNED = 4  # may be written in place, and is valid for the replica's life; else: until the next call
STG_STEP_GRADIENT = 1  # keep a graph for backward
STG_STEP_INFERENCE = 2  # outputs will not be differentiated: inference mode
STG_STEP_DETECT_ANOMALY = 4  # a NaN in outputs or gradients is an error that names it; not set under loss scaling
STG_STEP_DETERMINISTIC = 8  # the same numbers at each run, in the step and its backward; what can't be so is an error
STG_STATE_CREATED = 1
STG_STATE_FIT = 2
STG_STATE_EVALUATE = 4
STG_STATE_MODELLESS = 8
STG_STATE_DRAINING = 16
STG_THREAD_ANY = 1
STG_THREAD_OWNER = 2
STG_THREAD_REPLICA = 3
STG_STATES_ALL_ = 31
STG_STATES_LIVE_ = 15  # all but draining
STG_STATES_MODEL_ = 6  # fit, evaluate
STG_CREATE_CALLER_THREAD_ONLY = 1  # replicas run one after the other on the calling thread, and every host function is called only there, inside a call; same results
STG_REDUCE_MEAN = 0
STG_REDUCE_SUM = 1
STG_REDUCE_MIN = 2
STG_REDUCE_MAX = 3
STG_DECIDE_ALL = 0
STG_DECIDE_ANY = 1
STG_CLIP_NONE = 0
STG_CLIP_NORM = 1  # scale the whole gradient so that its 2-norm is at most the limit
STG_CLIP_VALUE = 2  # cut each element to [-limit, limit]
STG_UPDATE_NONE = 0  # no update was due (more micro-batches follow)
STG_UPDATE_DONE = 1
STG_UPDATE_SKIPPED_OVERFLOW = 2  # 16-mixed: a gradient overflowed; the scale was lowered
STG_UPDATE_SKIPPED_NO_WEIGHT = 3  # all denominators were 0
STG_BATCH_LAST_MICRO_BATCH = 1  # the update follows this micro-batch: the reduction may start
STG_BATCH_DETECT_ANOMALY = 2  # a NaN in loss or gradients is an error that names it; with loss scaling in the loss only
STG_STATE_FORMAT = 1
STG_EXPORT_COPY = 1  # export_state: copies; else views, valid until the next call that changes weights (copies too with STG_CREATE_CALLER_THREAD_ONLY). Views keep the model's replicas alive: see model.h
STG_IMPORT_STRICT = 1  # import_state, load: a missing, unexpected or differently shaped tensor is an error that lists them all
STG_CAPABILITY_MULTIPLE_DEVICES = 1
STG_CAPABILITY_MULTIPLE_PROCESSES = 2
STG_CAPABILITY_CALLER_THREAD_ONLY = 4
STG_CAPABILITY_STREAMS = 8  # honours stg_call.streams
STG_PROBE_ACCEPTED = 0
STG_PROBE_REFUSED = 1
STG_PROBE_BAD_ARGUMENT = 2
STG_PLUGIN_PROBE_SYMBOL = 'stg_plugin_probe'
STG_NOTE_OWNER = 'Stratagem'
STG_NOTE_TYPE = 1
STG_NOTE_SECTION = '.note.stratagem'
STG_MAX_SESSIONS = 1024
STG_SOURCE_ANY_THREAD = 1  # `read` may be called on a thread of the session's own, ahead of its use; else: on the caller's
STG_SESSION_OWN_LOOP = 1  # the host brings batches and drives the strategy (stg_session_strategy); no data is needed, nor read; no run
STG_SESSION_QUEUE_EVENTS = 2  # events are kept for stg_session_poll, too
STG_SESSION_CALLER_THREAD_ONLY = 4  # STG_CREATE_CALLER_THREAD_ONLY: everything runs on the thread that is inside a call
STG_CALL_MIN_SIZE = 40
STG_OPAQUE_MIN_SIZE = 48
STG_STORAGE_MIN_SIZE = 96
STG_HOST_MIN_SIZE = 88
STG_REPLICATE_ARGS_MIN_SIZE = 48
STG_PARAMETER_MIN_SIZE = 40
STG_MODEL_DESCRIPTION_MIN_SIZE = 48
STG_STEP_CONTEXT_MIN_SIZE = 88
STG_MODEL_STEP_RESULT_MIN_SIZE = 64
STG_GRADIENT_SINK_MIN_SIZE = 32
STG_MODEL_MIN_SIZE = 88
STG_MODEL_FACTORY_MIN_SIZE = 64
STG_CREATE_ARGS_MIN_SIZE = 40
STG_STATUS_MIN_SIZE = 40
STG_RANKS_MIN_SIZE = 24
STG_SETUP_ARGS_MIN_SIZE = 32
STG_TRANSFER_ARGS_MIN_SIZE = 32
STG_UPDATE_ARGS_MIN_SIZE = 32
STG_UPDATE_RESULT_MIN_SIZE = 40
STG_STEP_ARGS_MIN_SIZE = 64
STG_STEP_RESULT_MIN_SIZE = 56
STG_GRADIENT_SET_MIN_SIZE = 80
STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE = 32
STG_CHECKPOINT_ARGS_MIN_SIZE = 48
STG_STRATEGY_API_MIN_SIZE = 272
STG_STRATEGY_FACTORY_MIN_SIZE = 88
STG_PLUGIN_MIN_SIZE = 80
STG_PROGRESS_MIN_SIZE = 72
STG_SESSION_EVENTS_MIN_SIZE = 40
STG_DATA_SOURCE_MIN_SIZE = 64
STG_SESSION_ARGS_MIN_SIZE = 104


class stg_string(Structure):
    """UTF-8 text. Not NUL-terminated; `data` may be null when `size_bytes` is 0. Borrowed; a string that a getter returns lives as long
    as the object it was read from.
    """


class stg_device(Structure):
    """A device. {STG_DEVICE_NONE, -1} means none.
    Logical CPU devices (cpu:0, cpu:1, ...) are replicas on one CPU; a *tensor* on any of them says {STG_DEVICE_CPU, 0}.
    """


class stg_stream(Structure):
    """The stream on which a caller has queued, or will queue, its own work on a device. A CPU has none."""


class stg_error(Structure):
    """One error. Fixed."""


class stg_call(Structure):
    """Growing."""


class stg_dtype(Structure):
    """An element's type: code, width in bits, lanes (1). {0,0,0} means none where a function says so."""


class stg_tensor_view(Structure):
    """DLTensor."""


class stg_tensor(Structure):
    """DLManagedTensorVersioned."""


class _stg_value_as(Union):
    """What stg_value holds: one of these."""


class stg_value(Structure):
    """One value. Fixed. `count` is 0 for types that have none; `items` and `entries` may be null when it is 0. All pointers live until
    the tree's release; the memory of items and entries is writable, so that a leaf can be taken out.
    """


class stg_entry(Structure):
    """One entry of a dict. Fixed."""


class stg_tree(Structure):
    """A whole tree. Fixed."""


class stg_opaque(Structure):
    """An object of the host's that passes through unread: the same pointer comes back. Handed to replicas by retain, on the calling
    thread; never copied by content, never sent to another process. Growing.
    """


class stg_storage(Structure):
    """A checkpoint storage. A checkpoint is a folder of files, written in one transaction: nobody sees it before commit. Paths are UTF-8
    with '/', relative to whatever the storage calls its root. Growing; a function table.
    """


class stg_host(Structure):
    """The services. Growing; a function table. With STG_CREATE_CALLER_THREAD_ONLY every function here is called only on the thread
    that is inside a call of the instance.
    """


class stg_replicate_args(Structure):
    """How a replica is made. Growing."""


class stg_parameter(Structure):
    """One parameter or buffer. Each storage stands once, with all its names (tied parameters have several; the first is the main one).
    Growing.
    """


class stg_model_description(Structure):
    """What a replica is made of. Growing."""


class stg_step_context(Structure):
    """What a step is told. Growing."""


class stg_model_step_result(Structure):
    """What a step gives back. The caller zeroes it, sets struct_size, and owns what is in it afterwards. Growing."""


class stg_gradient_sink(Structure):
    """Where a model reports gradients: the strategy's functions. Growing; a function table."""


class stg_model(Structure):
    """A model. Growing; a function table. Functions after `release_graph` may be absent."""


class stg_model_factory(Structure):
    """A factory of models, offered by a plugin. Growing. All pointers live as long as the process."""


class stg_create_args(Structure):
    """Growing."""


class stg_status(Structure):
    """What an instance is doing. Growing."""


class stg_ranks(Structure):
    """Where this process stands among several. Growing."""


class stg_setup_args(Structure):
    """Growing."""


class stg_transfer_args(Structure):
    """Growing."""


class stg_update_args(Structure):
    """What an update is to use. Growing."""


class stg_update_result(Structure):
    """Growing."""


class stg_step_args(Structure):
    """Growing."""


class stg_step_result(Structure):
    """The caller sets struct_size and zeroes the rest. Growing."""


class stg_gradient_set(Structure):
    """One device's gradients. Growing."""


class stg_reduce_gradients_args(Structure):
    """Growing."""


class stg_checkpoint_args(Structure):
    """Growing."""


class stg_strategy_api(Structure):
    """The functions of a strategy. Growing; a function table. `self` is the instance. `call` is borrowed, null: no deadline.
    `batch`, `object` and `state` are moved or borrowed.
    """


class stg_strategy_factory(Structure):
    """A factory of strategies, offered by a plugin. Growing. All pointers live as long as the process."""


class stg_plugin(Structure):
    """What a plugin offers. Growing. It and all that it points to live as long as the process."""


class stg_probe_request(Structure):
    """What the host says. Fixed for ever, across all majors."""


class stg_probe_reply(Structure):
    """What the plugin answers. Fixed for ever, across all majors. The host sets `text` and `text_capacity_bytes`; the plugin the rest."""


class stg_progress(Structure):
    """How far a run is. Growing."""


class stg_session_events(Structure):
    """What a run tells. Every function may be null; all are called on the thread that is inside a call of the session, but `log`, which a
    plugin may call from its own threads (not with STG_SESSION_CALLER_THREAD_ONLY). A function that returns an error ends the run with it, as the
    cause of the error that the run returns; what was trained is saved as after every error. Growing; a function table.
    """


class stg_data_source(Structure):
    """A data set of the host's own. A config's data.train, .validation, .test or .predict names it in the place of files:
    {"source": "name", "batch_size": 64, "shuffle": true}. Shuffling, limits, batches and resuming are the session's. Growing; a function
    table.
    """


class stg_session_args(Structure):
    """Growing. All strings are borrowed."""


stg_string._fields_ = [
    ("data", c_void_p),
    ("size_bytes", c_uint64),
]
stg_device._fields_ = [
    ("kind", c_uint32),
    ("index", c_int32),
]
stg_stream._fields_ = [
    ("device", stg_device),
    ("handle", c_void_p),
    ("kind", c_uint32),
    ("reserved", c_uint32),
]
stg_error._fields_ = [
    ("code", c_uint32),
    ("flags", c_uint32),
    ("replica", c_int32),
    ("rank", c_int32),
    ("device", stg_device),
    ("message", stg_string),
    ("cause", POINTER(stg_error)),
    ("release", CFUNCTYPE(None, POINTER(stg_error))),
    ("owner", c_void_p),
]
stg_call._fields_ = [
    ("struct_size", c_uint64),
    ("deadline_ns", c_uint64),
    ("cancel", POINTER(c_uint32)),
    ("streams", POINTER(stg_stream)),
    ("num_streams", c_uint64),
]
stg_dtype._fields_ = [
    ("code", c_uint8),
    ("bits", c_uint8),
    ("lanes", c_uint16),
]
stg_tensor_view._fields_ = [
    ("data", c_void_p),
    ("device", stg_device),
    ("num_dims", c_int32),
    ("dtype", stg_dtype),
    ("shape", POINTER(c_int64)),
    ("strides", POINTER(c_int64)),
    ("byte_offset", c_uint64),
]
stg_tensor._fields_ = [
    ("dlpack_major", c_uint32),
    ("dlpack_minor", c_uint32),
    ("owner", c_void_p),
    ("deleter", CFUNCTYPE(None, POINTER(stg_tensor))),
    ("flags", c_uint64),
    ("view", stg_tensor_view),
]
_stg_value_as._fields_ = [("i64", c_int64), ("f64", c_double), ("utf8", c_void_p), ("bytes", POINTER(c_uint8)), ("tensor", POINTER(stg_tensor)), ("items", POINTER(stg_value)), ("entries", POINTER(stg_entry)), ("opaque", POINTER(stg_opaque))]
stg_value._anonymous_ = ('as_',)
stg_value._fields_ = [
    ("type", c_uint32),
    ("count", c_uint32),
    ("as_", _stg_value_as),
]
stg_entry._fields_ = [
    ("key", stg_string),
    ("value", stg_value),
]
stg_tree._fields_ = [
    ("root", stg_value),
    ("release", CFUNCTYPE(None, POINTER(stg_tree))),
    ("owner", c_void_p),
]
stg_opaque._fields_ = [
    ("struct_size", c_uint64),
    ("type_name", stg_string),
    ("retain", CFUNCTYPE(None, POINTER(stg_opaque))),
    ("release", CFUNCTYPE(None, POINTER(stg_opaque))),
    ("reduce", CFUNCTYPE(c_void_p, POINTER(POINTER(stg_opaque)), c_uint64, POINTER(POINTER(stg_opaque)))),
]
stg_storage._fields_ = [
    ("struct_size", c_uint64),
    ("self", c_void_p),
    ("begin", CFUNCTYPE(c_void_p, c_void_p, stg_string, POINTER(c_void_p))),
    ("write", CFUNCTYPE(c_void_p, c_void_p, c_void_p, stg_string, c_uint64, c_void_p, c_uint64)),
    ("commit", CFUNCTYPE(c_void_p, c_void_p, c_void_p)),
    ("rollback", CFUNCTYPE(None, c_void_p, c_void_p)),
    ("open", CFUNCTYPE(c_void_p, c_void_p, stg_string, POINTER(c_void_p), POINTER(c_uint64))),
    ("read", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_uint64, c_void_p, c_uint64)),
    ("close", CFUNCTYPE(None, c_void_p, c_void_p)),
    ("list", CFUNCTYPE(c_void_p, c_void_p, stg_string, POINTER(stg_tree))),
    ("remove", CFUNCTYPE(c_void_p, c_void_p, stg_string)),
    ("replace", CFUNCTYPE(c_void_p, c_void_p, stg_string, c_void_p, c_uint64)),
]
stg_host._fields_ = [
    ("struct_size", c_uint64),
    ("self", c_void_p),
    ("retain", CFUNCTYPE(None, c_void_p)),
    ("release", CFUNCTYPE(None, c_void_p)),
    ("log", CFUNCTYPE(None, c_void_p, c_uint32, stg_string, POINTER(stg_tree))),
    ("progress", CFUNCTYPE(None, c_void_p, stg_string, c_uint64, c_uint64)),
    ("trace_begin", CFUNCTYPE(None, c_void_p, stg_string, c_int32)),
    ("trace_end", CFUNCTYPE(None, c_void_p, stg_string, c_int32)),
    ("allocate", CFUNCTYPE(c_void_p, c_void_p, c_uint64, c_uint64)),
    ("deallocate", CFUNCTYPE(None, c_void_p, c_void_p, c_uint64)),
    ("storage", POINTER(stg_storage)),
]
stg_replicate_args._fields_ = [
    ("struct_size", c_uint64),
    ("device", stg_device),
    ("replica", c_int32),
    ("num_replicas", c_int32),
    ("floating_dtype", stg_dtype),
    ("num_threads", c_uint32),
    ("seed", c_uint64),
    ("flags", c_uint64),
]
stg_parameter._fields_ = [
    ("struct_size", c_uint64),
    ("names", POINTER(stg_string)),
    ("num_names", c_uint64),
    ("tensor", POINTER(stg_tensor)),
    ("flags", c_uint64),
]
stg_model_description._fields_ = [
    ("struct_size", c_uint64),
    ("parameters", POINTER(POINTER(stg_parameter))),
    ("num_parameters", c_uint64),
    ("buffers", POINTER(POINTER(stg_parameter))),
    ("num_buffers", c_uint64),
    ("loss_kind", c_uint64),
]
stg_step_context._fields_ = [
    ("struct_size", c_uint64),
    ("device", stg_device),
    ("replica", c_int32),
    ("num_replicas", c_int32),
    ("stage", c_uint32),
    ("flags", c_uint32),
    ("batch_index", c_int64),
    ("dataloader_index", c_int64),
    ("global_step", c_int64),
    ("autocast_dtype", stg_dtype),
    ("reserved", c_uint32),
    ("stream", stg_stream),
]
stg_model_step_result._fields_ = [
    ("struct_size", c_uint64),
    ("outputs", stg_tree),
    ("denominator", stg_value),
    ("graph", c_void_p),
]
stg_gradient_sink._fields_ = [
    ("struct_size", c_uint64),
    ("self", c_void_p),
    ("ready", CFUNCTYPE(c_void_p, c_void_p, c_uint64, POINTER(stg_tensor), POINTER(stg_stream))),
    ("ready_sparse", CFUNCTYPE(c_void_p, c_void_p, c_uint64, POINTER(stg_tensor), POINTER(stg_tensor), POINTER(c_int64), c_uint64, POINTER(stg_stream))),
]
stg_model._fields_ = [
    ("struct_size", c_uint64),
    ("self", c_void_p),
    ("retain", CFUNCTYPE(None, c_void_p)),
    ("release", CFUNCTYPE(None, c_void_p)),
    ("replicate", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_replicate_args), POINTER(c_void_p))),
    ("destroy_replica", CFUNCTYPE(None, c_void_p, c_void_p)),
    ("describe", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(stg_model_description))),
    ("set_mode", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_uint32)),
    ("step", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(stg_step_context), POINTER(stg_tree), POINTER(stg_model_step_result))),
    ("backward", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_void_p, c_double, c_uint32, POINTER(stg_gradient_sink))),
    ("release_graph", CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)),
    ("bind", CFUNCTYPE(c_void_p, c_void_p, c_void_p, c_uint64, POINTER(stg_tensor), POINTER(stg_tensor))),
    ("parameters_changed", CFUNCTYPE(c_void_p, c_void_p, c_void_p)),
    ("split", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(stg_tree), c_uint64, POINTER(stg_tree), POINTER(c_uint64))),
    ("transfer", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(stg_tree), c_int64, POINTER(stg_tree))),
    ("synchronize", CFUNCTYPE(c_void_p, c_void_p, c_void_p)),
    ("get_generator_state", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(stg_tree))),
    ("set_generator_state", CFUNCTYPE(c_void_p, c_void_p, c_void_p, POINTER(c_uint8), c_uint64)),
]
stg_model_factory._fields_ = [
    ("struct_size", c_uint64),
    ("name", stg_string),
    ("summary", stg_string),
    ("options_schema", stg_string),
    ("create", CFUNCTYPE(c_void_p, stg_string, POINTER(stg_host), POINTER(POINTER(stg_model)))),
]
stg_create_args._fields_ = [
    ("struct_size", c_uint64),
    ("config_json", stg_string),
    ("host", POINTER(stg_host)),
    ("flags", c_uint64),
]
stg_status._fields_ = [
    ("struct_size", c_uint64),
    ("state", c_uint32),
    ("stage", c_uint32),
    ("num_micro_batches", c_uint64),
    ("num_updates", c_uint64),
    ("has_graph", c_uint64),
]
stg_ranks._fields_ = [
    ("struct_size", c_uint64),
    ("global_rank", c_int32),
    ("local_rank", c_int32),
    ("node_rank", c_int32),
    ("world_size", c_int32),
]
stg_setup_args._fields_ = [
    ("struct_size", c_uint64),
    ("model", POINTER(stg_model)),
    ("state", POINTER(stg_tree)),
    ("stage", c_uint64),
]
stg_transfer_args._fields_ = [
    ("struct_size", c_uint64),
    ("batch", POINTER(stg_tree)),
    ("device", stg_device),
    ("dataloader_index", c_int64),
]
stg_update_args._fields_ = [
    ("struct_size", c_uint64),
    ("lr", c_double),
    ("clip_limit", c_double),
    ("clip", c_uint64),
]
stg_update_result._fields_ = [
    ("struct_size", c_uint64),
    ("outcome", c_uint64),
    ("gradient_norm", c_double),
    ("total_weight", c_double),
    ("loss_scale", c_double),
]
stg_step_args._fields_ = [
    ("struct_size", c_uint64),
    ("batch", POINTER(stg_tree)),
    ("announced", c_uint64),
    ("batch_index", c_int64),
    ("dataloader_index", c_int64),
    ("global_step", c_int64),
    ("update", POINTER(stg_update_args)),
    ("flags", c_uint64),
]
stg_step_result._fields_ = [
    ("struct_size", c_uint64),
    ("outputs", stg_tree),
    ("weights", POINTER(c_double)),
    ("num_weights", c_uint64),
]
stg_gradient_set._fields_ = [
    ("struct_size", c_uint64),
    ("device", stg_device),
    ("stream", stg_stream),
    ("weight", c_double),
    ("gradients", POINTER(POINTER(stg_tensor))),
    ("num_gradients", c_uint64),
    ("owner", c_void_p),
    ("release", CFUNCTYPE(None, POINTER(stg_gradient_set))),
]
stg_reduce_gradients_args._fields_ = [
    ("struct_size", c_uint64),
    ("sets", POINTER(POINTER(stg_gradient_set))),
    ("num_sets", c_uint64),
    ("op", c_uint64),
]
stg_checkpoint_args._fields_ = [
    ("struct_size", c_uint64),
    ("path", stg_string),
    ("host_json", stg_string),
    ("flags", c_uint64),
]
stg_strategy_api._fields_ = [
    ("struct_size", c_uint64),
    ("create", CFUNCTYPE(c_void_p, POINTER(stg_create_args), POINTER(c_void_p))),
    ("destroy", CFUNCTYPE(None, c_void_p)),
    ("abort", CFUNCTYPE(None, c_void_p)),
    ("status", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_status))),
    ("devices", CFUNCTYPE(c_void_p, c_void_p, POINTER(POINTER(stg_device)), POINTER(c_uint64))),
    ("ranks", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_ranks))),
    ("setup", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_setup_args))),
    ("teardown", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call))),
    ("describe_parameters", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_model_description))),
    ("model_to_device", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call))),
    ("batch_to_device", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_transfer_args), POINTER(stg_tree))),
    ("broadcast", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree), c_int32, POINTER(stg_tree))),
    ("all_gather", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree), POINTER(stg_tree))),
    ("reduce", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree), c_uint32, POINTER(stg_tree))),
    ("reduce_boolean_decision", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), c_uint32, c_uint32, POINTER(c_uint32))),
    ("barrier", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), stg_string)),
    ("to_host", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree), POINTER(stg_tree))),
    ("announce_batch", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_transfer_args), c_uint32, POINTER(c_uint64))),
    ("training_step", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_step_args), POINTER(stg_step_result))),
    ("backward", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), c_uint64)),
    ("optimizer_step", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_update_args), POINTER(stg_update_result))),
    ("train_batch", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_step_args), POINTER(stg_step_result), POINTER(stg_update_result))),
    ("zero_grad", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call))),
    ("gradients", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree))),
    ("parameters_changed", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call))),
    ("validation_step", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_step_args), POINTER(stg_step_result))),
    ("test_step", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_step_args), POINTER(stg_step_result))),
    ("predict_step", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_step_args), POINTER(stg_step_result))),
    ("reduce_gradients", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_reduce_gradients_args))),
    ("export_state", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), c_uint64, POINTER(stg_tree))),
    ("import_state", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_tree), c_uint64, POINTER(stg_tree))),
    ("save", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_checkpoint_args))),
    ("load", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_call), POINTER(stg_checkpoint_args), POINTER(stg_tree), POINTER(stg_tree))),
]
stg_strategy_factory._fields_ = [
    ("struct_size", c_uint64),
    ("name", stg_string),
    ("summary", stg_string),
    ("options_schema", stg_string),
    ("device_kinds", POINTER(c_uint32)),
    ("num_device_kinds", c_uint64),
    ("capabilities", c_uint64),
    ("api", POINTER(stg_strategy_api)),
]
stg_plugin._fields_ = [
    ("struct_size", c_uint64),
    ("name", stg_string),
    ("version", stg_string),
    ("strategies", POINTER(POINTER(stg_strategy_factory))),
    ("num_strategies", c_uint64),
    ("models", POINTER(POINTER(stg_model_factory))),
    ("num_models", c_uint64),
    ("get_extension", CFUNCTYPE(c_void_p, stg_string)),
]
stg_probe_request._fields_ = [
    ("abi_major", c_uint32),
    ("min_minor", c_uint32),
    ("max_minor", c_uint32),
    ("reserved", c_uint32),
    ("host_name", stg_string),
]
stg_probe_reply._fields_ = [
    ("abi_major", c_uint32),
    ("min_minor", c_uint32),
    ("max_minor", c_uint32),
    ("minor", c_uint32),
    ("plugin", c_void_p),
    ("text", c_void_p),
    ("text_capacity_bytes", c_uint64),
    ("text_size_bytes", c_uint64),
]
stg_progress._fields_ = [
    ("struct_size", c_uint64),
    ("stage", c_uint64),
    ("epoch", c_int64),
    ("max_epochs", c_int64),
    ("batch", c_int64),
    ("num_batches", c_int64),
    ("step", c_int64),
    ("max_steps", c_int64),
    ("loss", c_double),
]
stg_session_events._fields_ = [
    ("struct_size", c_uint64),
    ("self", c_void_p),
    ("log", CFUNCTYPE(None, c_void_p, c_uint32, stg_string)),
    ("progress", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_progress))),
    ("metrics", CFUNCTYPE(c_void_p, c_void_p, stg_string)),
    ("batch_start", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_progress))),
    ("batch_end", CFUNCTYPE(c_void_p, c_void_p, POINTER(stg_progress), POINTER(stg_value))),
    ("swap", CFUNCTYPE(c_void_p, c_void_p, c_int64, stg_string, POINTER(stg_error))),
]
stg_data_source._fields_ = [
    ("struct_size", c_uint64),
    ("name", stg_string),
    ("self", c_void_p),
    ("num_samples", c_int64),
    ("flags", c_uint64),
    ("read", CFUNCTYPE(c_void_p, c_void_p, POINTER(c_int64), c_uint64, POINTER(stg_tree))),
    ("release", CFUNCTYPE(None, c_void_p)),
]
stg_session_args._fields_ = [
    ("struct_size", c_uint64),
    ("config_path", stg_string),
    ("config_text", stg_string),
    ("config_folder", stg_string),
    ("overrides", POINTER(stg_string)),
    ("num_overrides", c_uint64),
    ("stage", c_uint64),
    ("checkpoint", stg_string),
    ("events", POINTER(stg_session_events)),
    ("output", stg_string),
    ("flags", c_uint64),
    ("model", POINTER(stg_model)),
    ("sources", POINTER(POINTER(stg_data_source))),
    ("num_sources", c_uint64),
]

stg_plugin_probe_fn = CFUNCTYPE(c_uint32, POINTER(stg_probe_request), POINTER(stg_probe_reply))

# Each struct with its size and the offsets of its fields, in bytes.
LAYOUT = {
    stg_string: (16, {"data": 0, "size_bytes": 8}),
    stg_device: (8, {"kind": 0, "index": 4}),
    stg_stream: (24, {"device": 0, "handle": 8, "kind": 16, "reserved": 20}),
    stg_error: (64, {"code": 0, "flags": 4, "replica": 8, "rank": 12, "device": 16, "message": 24, "cause": 40, "release": 48, "owner": 56}),
    stg_call: (40, {"struct_size": 0, "deadline_ns": 8, "cancel": 16, "streams": 24, "num_streams": 32}),
    stg_dtype: (4, {"code": 0, "bits": 1, "lanes": 2}),
    stg_tensor_view: (48, {"data": 0, "device": 8, "num_dims": 16, "dtype": 20, "shape": 24, "strides": 32, "byte_offset": 40}),
    stg_tensor: (80, {"dlpack_major": 0, "dlpack_minor": 4, "owner": 8, "deleter": 16, "flags": 24, "view": 32}),
    stg_value: (16, {"type": 0, "count": 4, "as_": 8}),
    stg_entry: (32, {"key": 0, "value": 16}),
    stg_tree: (32, {"root": 0, "release": 16, "owner": 24}),
    stg_opaque: (48, {"struct_size": 0, "type_name": 8, "retain": 24, "release": 32, "reduce": 40}),
    stg_storage: (96, {"struct_size": 0, "self": 8, "begin": 16, "write": 24, "commit": 32, "rollback": 40, "open": 48, "read": 56, "close": 64, "list": 72, "remove": 80, "replace": 88}),
    stg_host: (88, {"struct_size": 0, "self": 8, "retain": 16, "release": 24, "log": 32, "progress": 40, "trace_begin": 48, "trace_end": 56, "allocate": 64, "deallocate": 72, "storage": 80}),
    stg_replicate_args: (48, {"struct_size": 0, "device": 8, "replica": 16, "num_replicas": 20, "floating_dtype": 24, "num_threads": 28, "seed": 32, "flags": 40}),
    stg_parameter: (40, {"struct_size": 0, "names": 8, "num_names": 16, "tensor": 24, "flags": 32}),
    stg_model_description: (48, {"struct_size": 0, "parameters": 8, "num_parameters": 16, "buffers": 24, "num_buffers": 32, "loss_kind": 40}),
    stg_step_context: (88, {"struct_size": 0, "device": 8, "replica": 16, "num_replicas": 20, "stage": 24, "flags": 28, "batch_index": 32, "dataloader_index": 40, "global_step": 48, "autocast_dtype": 56, "reserved": 60, "stream": 64}),
    stg_model_step_result: (64, {"struct_size": 0, "outputs": 8, "denominator": 40, "graph": 56}),
    stg_gradient_sink: (32, {"struct_size": 0, "self": 8, "ready": 16, "ready_sparse": 24}),
    stg_model: (144, {"struct_size": 0, "self": 8, "retain": 16, "release": 24, "replicate": 32, "destroy_replica": 40, "describe": 48, "set_mode": 56, "step": 64, "backward": 72, "release_graph": 80, "bind": 88, "parameters_changed": 96, "split": 104, "transfer": 112, "synchronize": 120, "get_generator_state": 128, "set_generator_state": 136}),
    stg_model_factory: (64, {"struct_size": 0, "name": 8, "summary": 24, "options_schema": 40, "create": 56}),
    stg_create_args: (40, {"struct_size": 0, "config_json": 8, "host": 24, "flags": 32}),
    stg_status: (40, {"struct_size": 0, "state": 8, "stage": 12, "num_micro_batches": 16, "num_updates": 24, "has_graph": 32}),
    stg_ranks: (24, {"struct_size": 0, "global_rank": 8, "local_rank": 12, "node_rank": 16, "world_size": 20}),
    stg_setup_args: (32, {"struct_size": 0, "model": 8, "state": 16, "stage": 24}),
    stg_transfer_args: (32, {"struct_size": 0, "batch": 8, "device": 16, "dataloader_index": 24}),
    stg_update_args: (32, {"struct_size": 0, "lr": 8, "clip_limit": 16, "clip": 24}),
    stg_update_result: (40, {"struct_size": 0, "outcome": 8, "gradient_norm": 16, "total_weight": 24, "loss_scale": 32}),
    stg_step_args: (64, {"struct_size": 0, "batch": 8, "announced": 16, "batch_index": 24, "dataloader_index": 32, "global_step": 40, "update": 48, "flags": 56}),
    stg_step_result: (56, {"struct_size": 0, "outputs": 8, "weights": 40, "num_weights": 48}),
    stg_gradient_set: (80, {"struct_size": 0, "device": 8, "stream": 16, "weight": 40, "gradients": 48, "num_gradients": 56, "owner": 64, "release": 72}),
    stg_reduce_gradients_args: (32, {"struct_size": 0, "sets": 8, "num_sets": 16, "op": 24}),
    stg_checkpoint_args: (48, {"struct_size": 0, "path": 8, "host_json": 24, "flags": 40}),
    stg_strategy_api: (272, {"struct_size": 0, "create": 8, "destroy": 16, "abort": 24, "status": 32, "devices": 40, "ranks": 48, "setup": 56, "teardown": 64, "describe_parameters": 72, "model_to_device": 80, "batch_to_device": 88, "broadcast": 96, "all_gather": 104, "reduce": 112, "reduce_boolean_decision": 120, "barrier": 128, "to_host": 136, "announce_batch": 144, "training_step": 152, "backward": 160, "optimizer_step": 168, "train_batch": 176, "zero_grad": 184, "gradients": 192, "parameters_changed": 200, "validation_step": 208, "test_step": 216, "predict_step": 224, "reduce_gradients": 232, "export_state": 240, "import_state": 248, "save": 256, "load": 264}),
    stg_strategy_factory: (88, {"struct_size": 0, "name": 8, "summary": 24, "options_schema": 40, "device_kinds": 56, "num_device_kinds": 64, "capabilities": 72, "api": 80}),
    stg_plugin: (80, {"struct_size": 0, "name": 8, "version": 24, "strategies": 40, "num_strategies": 48, "models": 56, "num_models": 64, "get_extension": 72}),
    stg_probe_request: (32, {"abi_major": 0, "min_minor": 4, "max_minor": 8, "reserved": 12, "host_name": 16}),
    stg_probe_reply: (48, {"abi_major": 0, "min_minor": 4, "max_minor": 8, "minor": 12, "plugin": 16, "text": 24, "text_capacity_bytes": 32, "text_size_bytes": 40}),
    stg_progress: (72, {"struct_size": 0, "stage": 8, "epoch": 16, "max_epochs": 24, "batch": 32, "num_batches": 40, "step": 48, "max_steps": 56, "loss": 64}),
    stg_session_events: (64, {"struct_size": 0, "self": 8, "log": 16, "progress": 24, "metrics": 32, "batch_start": 40, "batch_end": 48, "swap": 56}),
    stg_data_source: (64, {"struct_size": 0, "name": 8, "self": 24, "num_samples": 32, "flags": 40, "read": 48, "release": 56}),
    stg_session_args: (152, {"struct_size": 0, "config_path": 8, "config_text": 24, "config_folder": 40, "overrides": 56, "num_overrides": 64, "stage": 72, "checkpoint": 80, "events": 96, "output": 104, "flags": 120, "model": 128, "sources": 136, "num_sources": 144}),
}

# What libstratagem exports.
EXPORTED = {
    "stg_session_open": CFUNCTYPE(c_void_p, POINTER(stg_session_args), POINTER(c_uint64)),
    "stg_session_step": CFUNCTYPE(c_void_p, c_uint64, c_uint64, POINTER(c_uint32)),
    "stg_session_run": CFUNCTYPE(c_void_p, c_uint64, POINTER(stg_tree)),
    "stg_session_progress": CFUNCTYPE(c_void_p, c_uint64, POINTER(stg_progress)),
    "stg_session_strategy": CFUNCTYPE(c_void_p, c_uint64, POINTER(POINTER(stg_strategy_api)), POINTER(c_void_p)),
    "stg_session_swap": CFUNCTYPE(c_void_p, c_uint64, stg_string),
    "stg_session_request_swap": CFUNCTYPE(c_void_p, c_uint64, stg_string),
    "stg_session_request_reload": CFUNCTYPE(None, c_uint64),
    "stg_session_request_stop": CFUNCTYPE(None, c_uint64),
    "stg_session_cancel": CFUNCTYPE(None, c_uint64),
    "stg_session_poll": CFUNCTYPE(c_void_p, c_uint64, c_uint64, POINTER(stg_tree)),
    "stg_session_close": CFUNCTYPE(None, c_uint64),
    "stg_list_plugins": CFUNCTYPE(c_void_p, stg_string, POINTER(stg_tree)),
    "stg_inspect_plugin": CFUNCTYPE(c_void_p, stg_string, POINTER(stg_tree)),
    "stg_doctor": CFUNCTYPE(c_void_p, stg_string, POINTER(stg_tree)),
    "stg_load_plugin": CFUNCTYPE(c_void_p, stg_string, POINTER(POINTER(stg_plugin))),
    "stg_describe_plugin": CFUNCTYPE(c_void_p, stg_string, POINTER(stg_tree)),
    "stg_config_schema": CFUNCTYPE(c_void_p, POINTER(stg_tree)),
    "stg_options_schema": CFUNCTYPE(c_void_p, stg_string, c_uint32, POINTER(stg_tree)),
    "stg_version": CFUNCTYPE(stg_string),
}

for _struct, (_size_bytes, _offsets) in LAYOUT.items():
    _found = {name: getattr(_struct, name).offset for name in _offsets}
    if sizeof(_struct) != _size_bytes or _found != _offsets:
        raise ImportError(f"{_struct.__name__} has {sizeof(_struct)} bytes here, and fields at {_found}; "
                          f"the C headers say {_size_bytes} bytes, and {_offsets}")
