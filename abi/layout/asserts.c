/* SPDX-License-Identifier: Apache-2.0
 *
 * The layout of ABI 1.0 as asserts: compiles where structs and constants are what libclang found.
 * Made from the headers by `./run layout`; not to be edited.
 */
#include <stratagem/abi.h>
#include <stratagem/call.h>
#include <stratagem/common.h>
#include <stratagem/error.h>
#include <stratagem/extension.h>
#include <stratagem/host.h>
#include <stratagem/model.h>
#include <stratagem/plugin.h>
#include <stratagem/session.h>
#include <stratagem/states.h>
#include <stratagem/strategy.h>
#include <stratagem/tensor.h>
#include <stratagem/types.h>
#include <stratagem/value.h>

#define SIZE(type, size_bytes) STG_ASSERT(sizeof(type) == (size_bytes), layout_size_of_##type)
#define FIELD(type, name, offset_bytes, size_bytes) \
  STG_ASSERT(offsetof(type, name) == (offset_bytes) && sizeof(((type *)0)->name) == (size_bytes), layout_of_##type##_##name)
#define VALUE(constant, value) STG_ASSERT((constant) == (value), layout_value_of_##constant)
#define TEXT(constant, text) STG_ASSERT(sizeof(constant) == sizeof(text), layout_text_of_##constant)

VALUE(STG_ABI_MAJOR, 1u);
VALUE(STG_ABI_MINOR, 0u);

VALUE(STG_MAX_STRUCT_SIZE_BYTES, 65536u);

SIZE(stg_string, 16);
FIELD(stg_string, data, 0, 8);
FIELD(stg_string, size_bytes, 8, 8);

VALUE(STG_DEVICE_NONE, 0u);
VALUE(STG_DEVICE_CPU, 1u);
VALUE(STG_DEVICE_CUDA, 2u);
VALUE(STG_DEVICE_CUDA_HOST, 3u);
VALUE(STG_DEVICE_EXTENSION, 12u);

SIZE(stg_device, 8);
FIELD(stg_device, kind, 0, 4);
FIELD(stg_device, index, 4, 4);

VALUE(STG_STREAM_HANDLE, 0u);
VALUE(STG_STREAM_PER_THREAD_DEFAULT, 1u);

SIZE(stg_stream, 24);
FIELD(stg_stream, device, 0, 8);
FIELD(stg_stream, handle, 8, 8);
FIELD(stg_stream, kind, 16, 4);
FIELD(stg_stream, reserved, 20, 4);

VALUE(STG_OK, 0u);
VALUE(STG_CANCELLED, 1u);
VALUE(STG_UNKNOWN, 2u);
VALUE(STG_INVALID_ARGUMENT, 3u);
VALUE(STG_DEADLINE_EXCEEDED, 4u);
VALUE(STG_NOT_FOUND, 5u);
VALUE(STG_ALREADY_EXISTS, 6u);
VALUE(STG_PERMISSION_DENIED, 7u);
VALUE(STG_RESOURCE_EXHAUSTED, 8u);
VALUE(STG_FAILED_PRECONDITION, 9u);
VALUE(STG_ABORTED, 10u);
VALUE(STG_OUT_OF_RANGE, 11u);
VALUE(STG_UNIMPLEMENTED, 12u);
VALUE(STG_INTERNAL, 13u);
VALUE(STG_UNAVAILABLE, 14u);
VALUE(STG_DATA_LOSS, 15u);
VALUE(STG_UNAUTHENTICATED, 16u);

VALUE(STG_ERROR_RETRYABLE, 1u);
VALUE(STG_ERROR_INSTANCE_USABLE, 2u);
VALUE(STG_ERROR_INSTANCE_DRAINING, 4u);

SIZE(stg_error, 64);
FIELD(stg_error, code, 0, 4);
FIELD(stg_error, flags, 4, 4);
FIELD(stg_error, replica, 8, 4);
FIELD(stg_error, rank, 12, 4);
FIELD(stg_error, device, 16, 8);
FIELD(stg_error, message, 24, 16);
FIELD(stg_error, cause, 40, 8);
FIELD(stg_error, release, 48, 8);
FIELD(stg_error, owner, 56, 8);

SIZE(stg_call, 40);
VALUE(STG_CALL_MIN_SIZE, 40u);
FIELD(stg_call, struct_size, 0, 8);
FIELD(stg_call, deadline_ns, 8, 8);
FIELD(stg_call, cancel, 16, 8);
FIELD(stg_call, streams, 24, 8);
FIELD(stg_call, num_streams, 32, 8);

VALUE(STG_DLPACK_MAJOR, 1u);
VALUE(STG_DLPACK_MINOR, 0u);

VALUE(STG_DTYPE_INT, 0u);
VALUE(STG_DTYPE_UINT, 1u);
VALUE(STG_DTYPE_FLOAT, 2u);
VALUE(STG_DTYPE_BFLOAT, 4u);
VALUE(STG_DTYPE_COMPLEX, 5u);
VALUE(STG_DTYPE_BOOL, 6u);

SIZE(stg_dtype, 4);
FIELD(stg_dtype, code, 0, 1);
FIELD(stg_dtype, bits, 1, 1);
FIELD(stg_dtype, lanes, 2, 2);

SIZE(stg_tensor_view, 48);
FIELD(stg_tensor_view, data, 0, 8);
FIELD(stg_tensor_view, device, 8, 8);
FIELD(stg_tensor_view, num_dims, 16, 4);
FIELD(stg_tensor_view, dtype, 20, 4);
FIELD(stg_tensor_view, shape, 24, 8);
FIELD(stg_tensor_view, strides, 32, 8);
FIELD(stg_tensor_view, byte_offset, 40, 8);

VALUE(STG_TENSOR_READ_ONLY, 1u);
VALUE(STG_TENSOR_IS_COPIED, 2u);

SIZE(stg_tensor, 80);
FIELD(stg_tensor, dlpack_major, 0, 4);
FIELD(stg_tensor, dlpack_minor, 4, 4);
FIELD(stg_tensor, owner, 8, 8);
FIELD(stg_tensor, deleter, 16, 8);
FIELD(stg_tensor, flags, 24, 8);
FIELD(stg_tensor, view, 32, 48);

VALUE(STG_MAX_TREE_DEPTH, 64u);
VALUE(STG_MAX_TREE_NODES, 1048576u);

VALUE(STG_NONE, 0u);
VALUE(STG_BOOL, 1u);
VALUE(STG_INT64, 2u);
VALUE(STG_DOUBLE, 3u);
VALUE(STG_STRING, 4u);
VALUE(STG_BYTES, 5u);
VALUE(STG_TENSOR, 6u);
VALUE(STG_LIST, 7u);
VALUE(STG_TUPLE, 8u);
VALUE(STG_DICT, 9u);
VALUE(STG_OPAQUE, 10u);

SIZE(stg_value, 16);
FIELD(stg_value, type, 0, 4);
FIELD(stg_value, count, 4, 4);
FIELD(stg_value, as, 8, 8);

SIZE(stg_entry, 32);
FIELD(stg_entry, key, 0, 16);
FIELD(stg_entry, value, 16, 16);

SIZE(stg_tree, 32);
FIELD(stg_tree, root, 0, 16);
FIELD(stg_tree, release, 16, 8);
FIELD(stg_tree, owner, 24, 8);

SIZE(stg_opaque, 48);
VALUE(STG_OPAQUE_MIN_SIZE, 48u);
FIELD(stg_opaque, struct_size, 0, 8);
FIELD(stg_opaque, type_name, 8, 16);
FIELD(stg_opaque, retain, 24, 8);
FIELD(stg_opaque, release, 32, 8);
FIELD(stg_opaque, reduce, 40, 8);

VALUE(STG_LOG_DEBUG, 1u);
VALUE(STG_LOG_INFO, 2u);
VALUE(STG_LOG_WARNING, 3u);
VALUE(STG_LOG_ERROR, 4u);

SIZE(stg_storage, 96);
VALUE(STG_STORAGE_MIN_SIZE, 96u);
FIELD(stg_storage, struct_size, 0, 8);
FIELD(stg_storage, self, 8, 8);
FIELD(stg_storage, begin, 16, 8);
FIELD(stg_storage, write, 24, 8);
FIELD(stg_storage, commit, 32, 8);
FIELD(stg_storage, rollback, 40, 8);
FIELD(stg_storage, open, 48, 8);
FIELD(stg_storage, read, 56, 8);
FIELD(stg_storage, close, 64, 8);
FIELD(stg_storage, list, 72, 8);
FIELD(stg_storage, remove, 80, 8);
FIELD(stg_storage, replace, 88, 8);

SIZE(stg_host, 88);
VALUE(STG_HOST_MIN_SIZE, 88u);
FIELD(stg_host, struct_size, 0, 8);
FIELD(stg_host, self, 8, 8);
FIELD(stg_host, retain, 16, 8);
FIELD(stg_host, release, 24, 8);
FIELD(stg_host, log, 32, 8);
FIELD(stg_host, progress, 40, 8);
FIELD(stg_host, trace_begin, 48, 8);
FIELD(stg_host, trace_end, 56, 8);
FIELD(stg_host, allocate, 64, 8);
FIELD(stg_host, deallocate, 72, 8);
FIELD(stg_host, storage, 80, 8);

VALUE(STG_STAGE_FIT, 0u);
VALUE(STG_STAGE_VALIDATE, 1u);
VALUE(STG_STAGE_TEST, 2u);
VALUE(STG_STAGE_PREDICT, 3u);

VALUE(STG_LOSS_MEAN, 0u);
VALUE(STG_LOSS_SUM, 1u);

VALUE(STG_REPLICATE_SKIP_INIT, 1u);

SIZE(stg_replicate_args, 48);
VALUE(STG_REPLICATE_ARGS_MIN_SIZE, 48u);
FIELD(stg_replicate_args, struct_size, 0, 8);
FIELD(stg_replicate_args, device, 8, 8);
FIELD(stg_replicate_args, replica, 16, 4);
FIELD(stg_replicate_args, num_replicas, 20, 4);
FIELD(stg_replicate_args, floating_dtype, 24, 4);
FIELD(stg_replicate_args, num_threads, 28, 4);
FIELD(stg_replicate_args, seed, 32, 8);
FIELD(stg_replicate_args, flags, 40, 8);

VALUE(STG_PARAMETER_REQUIRES_GRAD, 1u);
VALUE(STG_PARAMETER_PERSISTENT, 2u);
VALUE(STG_PARAMETER_PINNED, 4u);

SIZE(stg_parameter, 40);
VALUE(STG_PARAMETER_MIN_SIZE, 40u);
FIELD(stg_parameter, struct_size, 0, 8);
FIELD(stg_parameter, names, 8, 8);
FIELD(stg_parameter, num_names, 16, 8);
FIELD(stg_parameter, tensor, 24, 8);
FIELD(stg_parameter, flags, 32, 8);

SIZE(stg_model_description, 48);
VALUE(STG_MODEL_DESCRIPTION_MIN_SIZE, 48u);
FIELD(stg_model_description, struct_size, 0, 8);
FIELD(stg_model_description, parameters, 8, 8);
FIELD(stg_model_description, num_parameters, 16, 8);
FIELD(stg_model_description, buffers, 24, 8);
FIELD(stg_model_description, num_buffers, 32, 8);
FIELD(stg_model_description, loss_kind, 40, 8);

VALUE(STG_STEP_GRADIENT, 1u);
VALUE(STG_STEP_INFERENCE, 2u);
VALUE(STG_STEP_DETECT_ANOMALY, 4u);
VALUE(STG_STEP_DETERMINISTIC, 8u);

SIZE(stg_step_context, 88);
VALUE(STG_STEP_CONTEXT_MIN_SIZE, 88u);
FIELD(stg_step_context, struct_size, 0, 8);
FIELD(stg_step_context, device, 8, 8);
FIELD(stg_step_context, replica, 16, 4);
FIELD(stg_step_context, num_replicas, 20, 4);
FIELD(stg_step_context, stage, 24, 4);
FIELD(stg_step_context, flags, 28, 4);
FIELD(stg_step_context, batch_index, 32, 8);
FIELD(stg_step_context, dataloader_index, 40, 8);
FIELD(stg_step_context, global_step, 48, 8);
FIELD(stg_step_context, autocast_dtype, 56, 4);
FIELD(stg_step_context, reserved, 60, 4);
FIELD(stg_step_context, stream, 64, 24);

SIZE(stg_model_step_result, 64);
VALUE(STG_MODEL_STEP_RESULT_MIN_SIZE, 64u);
FIELD(stg_model_step_result, struct_size, 0, 8);
FIELD(stg_model_step_result, outputs, 8, 32);
FIELD(stg_model_step_result, denominator, 40, 16);
FIELD(stg_model_step_result, graph, 56, 8);

SIZE(stg_gradient_sink, 32);
VALUE(STG_GRADIENT_SINK_MIN_SIZE, 32u);
FIELD(stg_gradient_sink, struct_size, 0, 8);
FIELD(stg_gradient_sink, self, 8, 8);
FIELD(stg_gradient_sink, ready, 16, 8);
FIELD(stg_gradient_sink, ready_sparse, 24, 8);

SIZE(stg_model, 144);
VALUE(STG_MODEL_MIN_SIZE, 88u);
FIELD(stg_model, struct_size, 0, 8);
FIELD(stg_model, self, 8, 8);
FIELD(stg_model, retain, 16, 8);
FIELD(stg_model, release, 24, 8);
FIELD(stg_model, replicate, 32, 8);
FIELD(stg_model, destroy_replica, 40, 8);
FIELD(stg_model, describe, 48, 8);
FIELD(stg_model, set_mode, 56, 8);
FIELD(stg_model, step, 64, 8);
FIELD(stg_model, backward, 72, 8);
FIELD(stg_model, release_graph, 80, 8);
FIELD(stg_model, bind, 88, 8);
FIELD(stg_model, parameters_changed, 96, 8);
FIELD(stg_model, split, 104, 8);
FIELD(stg_model, transfer, 112, 8);
FIELD(stg_model, synchronize, 120, 8);
FIELD(stg_model, get_generator_state, 128, 8);
FIELD(stg_model, set_generator_state, 136, 8);

SIZE(stg_model_factory, 64);
VALUE(STG_MODEL_FACTORY_MIN_SIZE, 64u);
FIELD(stg_model_factory, struct_size, 0, 8);
FIELD(stg_model_factory, name, 8, 16);
FIELD(stg_model_factory, summary, 24, 16);
FIELD(stg_model_factory, options_schema, 40, 16);
FIELD(stg_model_factory, create, 56, 8);

VALUE(STG_STATE_CREATED, 1u);
VALUE(STG_STATE_FIT, 2u);
VALUE(STG_STATE_EVALUATE, 4u);
VALUE(STG_STATE_MODELLESS, 8u);
VALUE(STG_STATE_DRAINING, 16u);

VALUE(STG_THREAD_ANY, 1u);
VALUE(STG_THREAD_OWNER, 2u);
VALUE(STG_THREAD_REPLICA, 3u);

VALUE(STG_STATES_ALL_, 31u);
VALUE(STG_STATES_LIVE_, 15u);
VALUE(STG_STATES_MODEL_, 6u);

VALUE(STG_CREATE_CALLER_THREAD_ONLY, 1u);

SIZE(stg_create_args, 40);
VALUE(STG_CREATE_ARGS_MIN_SIZE, 40u);
FIELD(stg_create_args, struct_size, 0, 8);
FIELD(stg_create_args, config_json, 8, 16);
FIELD(stg_create_args, host, 24, 8);
FIELD(stg_create_args, flags, 32, 8);

SIZE(stg_status, 40);
VALUE(STG_STATUS_MIN_SIZE, 40u);
FIELD(stg_status, struct_size, 0, 8);
FIELD(stg_status, state, 8, 4);
FIELD(stg_status, stage, 12, 4);
FIELD(stg_status, num_micro_batches, 16, 8);
FIELD(stg_status, num_updates, 24, 8);
FIELD(stg_status, has_graph, 32, 8);

SIZE(stg_ranks, 24);
VALUE(STG_RANKS_MIN_SIZE, 24u);
FIELD(stg_ranks, struct_size, 0, 8);
FIELD(stg_ranks, global_rank, 8, 4);
FIELD(stg_ranks, local_rank, 12, 4);
FIELD(stg_ranks, node_rank, 16, 4);
FIELD(stg_ranks, world_size, 20, 4);

SIZE(stg_setup_args, 32);
VALUE(STG_SETUP_ARGS_MIN_SIZE, 32u);
FIELD(stg_setup_args, struct_size, 0, 8);
FIELD(stg_setup_args, model, 8, 8);
FIELD(stg_setup_args, state, 16, 8);
FIELD(stg_setup_args, stage, 24, 8);

SIZE(stg_transfer_args, 32);
VALUE(STG_TRANSFER_ARGS_MIN_SIZE, 32u);
FIELD(stg_transfer_args, struct_size, 0, 8);
FIELD(stg_transfer_args, batch, 8, 8);
FIELD(stg_transfer_args, device, 16, 8);
FIELD(stg_transfer_args, dataloader_index, 24, 8);

VALUE(STG_REDUCE_MEAN, 0u);
VALUE(STG_REDUCE_SUM, 1u);
VALUE(STG_REDUCE_MIN, 2u);
VALUE(STG_REDUCE_MAX, 3u);

VALUE(STG_DECIDE_ALL, 0u);
VALUE(STG_DECIDE_ANY, 1u);

VALUE(STG_CLIP_NONE, 0u);
VALUE(STG_CLIP_NORM, 1u);
VALUE(STG_CLIP_VALUE, 2u);

SIZE(stg_update_args, 32);
VALUE(STG_UPDATE_ARGS_MIN_SIZE, 32u);
FIELD(stg_update_args, struct_size, 0, 8);
FIELD(stg_update_args, lr, 8, 8);
FIELD(stg_update_args, clip_limit, 16, 8);
FIELD(stg_update_args, clip, 24, 8);

VALUE(STG_UPDATE_NONE, 0u);
VALUE(STG_UPDATE_DONE, 1u);
VALUE(STG_UPDATE_SKIPPED_OVERFLOW, 2u);
VALUE(STG_UPDATE_SKIPPED_NO_WEIGHT, 3u);

SIZE(stg_update_result, 40);
VALUE(STG_UPDATE_RESULT_MIN_SIZE, 40u);
FIELD(stg_update_result, struct_size, 0, 8);
FIELD(stg_update_result, outcome, 8, 8);
FIELD(stg_update_result, gradient_norm, 16, 8);
FIELD(stg_update_result, total_weight, 24, 8);
FIELD(stg_update_result, loss_scale, 32, 8);

VALUE(STG_BATCH_LAST_MICRO_BATCH, 1u);
VALUE(STG_BATCH_DETECT_ANOMALY, 2u);

SIZE(stg_step_args, 64);
VALUE(STG_STEP_ARGS_MIN_SIZE, 64u);
FIELD(stg_step_args, struct_size, 0, 8);
FIELD(stg_step_args, batch, 8, 8);
FIELD(stg_step_args, announced, 16, 8);
FIELD(stg_step_args, batch_index, 24, 8);
FIELD(stg_step_args, dataloader_index, 32, 8);
FIELD(stg_step_args, global_step, 40, 8);
FIELD(stg_step_args, update, 48, 8);
FIELD(stg_step_args, flags, 56, 8);

SIZE(stg_step_result, 56);
VALUE(STG_STEP_RESULT_MIN_SIZE, 56u);
FIELD(stg_step_result, struct_size, 0, 8);
FIELD(stg_step_result, outputs, 8, 32);
FIELD(stg_step_result, weights, 40, 8);
FIELD(stg_step_result, num_weights, 48, 8);

SIZE(stg_gradient_set, 80);
VALUE(STG_GRADIENT_SET_MIN_SIZE, 80u);
FIELD(stg_gradient_set, struct_size, 0, 8);
FIELD(stg_gradient_set, device, 8, 8);
FIELD(stg_gradient_set, stream, 16, 24);
FIELD(stg_gradient_set, weight, 40, 8);
FIELD(stg_gradient_set, gradients, 48, 8);
FIELD(stg_gradient_set, num_gradients, 56, 8);
FIELD(stg_gradient_set, owner, 64, 8);
FIELD(stg_gradient_set, release, 72, 8);

SIZE(stg_reduce_gradients_args, 32);
VALUE(STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, 32u);
FIELD(stg_reduce_gradients_args, struct_size, 0, 8);
FIELD(stg_reduce_gradients_args, sets, 8, 8);
FIELD(stg_reduce_gradients_args, num_sets, 16, 8);
FIELD(stg_reduce_gradients_args, op, 24, 8);

VALUE(STG_STATE_FORMAT, 1);

VALUE(STG_EXPORT_COPY, 1u);
VALUE(STG_IMPORT_STRICT, 1u);

SIZE(stg_checkpoint_args, 48);
VALUE(STG_CHECKPOINT_ARGS_MIN_SIZE, 48u);
FIELD(stg_checkpoint_args, struct_size, 0, 8);
FIELD(stg_checkpoint_args, path, 8, 16);
FIELD(stg_checkpoint_args, host_json, 24, 16);
FIELD(stg_checkpoint_args, flags, 40, 8);

SIZE(stg_strategy_api, 272);
VALUE(STG_STRATEGY_API_MIN_SIZE, 272u);
FIELD(stg_strategy_api, struct_size, 0, 8);
FIELD(stg_strategy_api, create, 8, 8);
FIELD(stg_strategy_api, destroy, 16, 8);
FIELD(stg_strategy_api, abort, 24, 8);
FIELD(stg_strategy_api, status, 32, 8);
FIELD(stg_strategy_api, devices, 40, 8);
FIELD(stg_strategy_api, ranks, 48, 8);
FIELD(stg_strategy_api, setup, 56, 8);
FIELD(stg_strategy_api, teardown, 64, 8);
FIELD(stg_strategy_api, describe_parameters, 72, 8);
FIELD(stg_strategy_api, model_to_device, 80, 8);
FIELD(stg_strategy_api, batch_to_device, 88, 8);
FIELD(stg_strategy_api, broadcast, 96, 8);
FIELD(stg_strategy_api, all_gather, 104, 8);
FIELD(stg_strategy_api, reduce, 112, 8);
FIELD(stg_strategy_api, reduce_boolean_decision, 120, 8);
FIELD(stg_strategy_api, barrier, 128, 8);
FIELD(stg_strategy_api, to_host, 136, 8);
FIELD(stg_strategy_api, announce_batch, 144, 8);
FIELD(stg_strategy_api, training_step, 152, 8);
FIELD(stg_strategy_api, backward, 160, 8);
FIELD(stg_strategy_api, optimizer_step, 168, 8);
FIELD(stg_strategy_api, train_batch, 176, 8);
FIELD(stg_strategy_api, zero_grad, 184, 8);
FIELD(stg_strategy_api, gradients, 192, 8);
FIELD(stg_strategy_api, parameters_changed, 200, 8);
FIELD(stg_strategy_api, validation_step, 208, 8);
FIELD(stg_strategy_api, test_step, 216, 8);
FIELD(stg_strategy_api, predict_step, 224, 8);
FIELD(stg_strategy_api, reduce_gradients, 232, 8);
FIELD(stg_strategy_api, export_state, 240, 8);
FIELD(stg_strategy_api, import_state, 248, 8);
FIELD(stg_strategy_api, save, 256, 8);
FIELD(stg_strategy_api, load, 264, 8);

VALUE(STG_CAPABILITY_MULTIPLE_DEVICES, 1u);
VALUE(STG_CAPABILITY_MULTIPLE_PROCESSES, 2u);
VALUE(STG_CAPABILITY_CALLER_THREAD_ONLY, 4u);
VALUE(STG_CAPABILITY_STREAMS, 8u);

SIZE(stg_strategy_factory, 88);
VALUE(STG_STRATEGY_FACTORY_MIN_SIZE, 88u);
FIELD(stg_strategy_factory, struct_size, 0, 8);
FIELD(stg_strategy_factory, name, 8, 16);
FIELD(stg_strategy_factory, summary, 24, 16);
FIELD(stg_strategy_factory, options_schema, 40, 16);
FIELD(stg_strategy_factory, device_kinds, 56, 8);
FIELD(stg_strategy_factory, num_device_kinds, 64, 8);
FIELD(stg_strategy_factory, capabilities, 72, 8);
FIELD(stg_strategy_factory, api, 80, 8);

SIZE(stg_plugin, 80);
VALUE(STG_PLUGIN_MIN_SIZE, 80u);
FIELD(stg_plugin, struct_size, 0, 8);
FIELD(stg_plugin, name, 8, 16);
FIELD(stg_plugin, version, 24, 16);
FIELD(stg_plugin, strategies, 40, 8);
FIELD(stg_plugin, num_strategies, 48, 8);
FIELD(stg_plugin, models, 56, 8);
FIELD(stg_plugin, num_models, 64, 8);
FIELD(stg_plugin, get_extension, 72, 8);

VALUE(STG_PROBE_ACCEPTED, 0u);
VALUE(STG_PROBE_REFUSED, 1u);
VALUE(STG_PROBE_BAD_ARGUMENT, 2u);

SIZE(stg_probe_request, 32);
FIELD(stg_probe_request, abi_major, 0, 4);
FIELD(stg_probe_request, min_minor, 4, 4);
FIELD(stg_probe_request, max_minor, 8, 4);
FIELD(stg_probe_request, reserved, 12, 4);
FIELD(stg_probe_request, host_name, 16, 16);

SIZE(stg_probe_reply, 48);
FIELD(stg_probe_reply, abi_major, 0, 4);
FIELD(stg_probe_reply, min_minor, 4, 4);
FIELD(stg_probe_reply, max_minor, 8, 4);
FIELD(stg_probe_reply, minor, 12, 4);
FIELD(stg_probe_reply, plugin, 16, 8);
FIELD(stg_probe_reply, text, 24, 8);
FIELD(stg_probe_reply, text_capacity_bytes, 32, 8);
FIELD(stg_probe_reply, text_size_bytes, 40, 8);

TEXT(STG_PLUGIN_PROBE_SYMBOL, "stg_plugin_probe");

TEXT(STG_NOTE_OWNER, "Stratagem");
VALUE(STG_NOTE_TYPE, 1u);
TEXT(STG_NOTE_SECTION, ".note.stratagem");

VALUE(STG_MAX_SESSIONS, 1024u);

SIZE(stg_progress, 72);
VALUE(STG_PROGRESS_MIN_SIZE, 72u);
FIELD(stg_progress, struct_size, 0, 8);
FIELD(stg_progress, stage, 8, 8);
FIELD(stg_progress, epoch, 16, 8);
FIELD(stg_progress, max_epochs, 24, 8);
FIELD(stg_progress, batch, 32, 8);
FIELD(stg_progress, num_batches, 40, 8);
FIELD(stg_progress, step, 48, 8);
FIELD(stg_progress, max_steps, 56, 8);
FIELD(stg_progress, loss, 64, 8);

SIZE(stg_session_events, 64);
VALUE(STG_SESSION_EVENTS_MIN_SIZE, 40u);
FIELD(stg_session_events, struct_size, 0, 8);
FIELD(stg_session_events, self, 8, 8);
FIELD(stg_session_events, log, 16, 8);
FIELD(stg_session_events, progress, 24, 8);
FIELD(stg_session_events, metrics, 32, 8);
FIELD(stg_session_events, batch_start, 40, 8);
FIELD(stg_session_events, batch_end, 48, 8);
FIELD(stg_session_events, swap, 56, 8);

VALUE(STG_SOURCE_ANY_THREAD, 1u);

SIZE(stg_data_source, 64);
VALUE(STG_DATA_SOURCE_MIN_SIZE, 64u);
FIELD(stg_data_source, struct_size, 0, 8);
FIELD(stg_data_source, name, 8, 16);
FIELD(stg_data_source, self, 24, 8);
FIELD(stg_data_source, num_samples, 32, 8);
FIELD(stg_data_source, flags, 40, 8);
FIELD(stg_data_source, read, 48, 8);
FIELD(stg_data_source, release, 56, 8);

VALUE(STG_SESSION_OWN_LOOP, 1u);
VALUE(STG_SESSION_QUEUE_EVENTS, 2u);
VALUE(STG_SESSION_CALLER_THREAD_ONLY, 4u);

SIZE(stg_session_args, 152);
VALUE(STG_SESSION_ARGS_MIN_SIZE, 104u);
FIELD(stg_session_args, struct_size, 0, 8);
FIELD(stg_session_args, config_path, 8, 16);
FIELD(stg_session_args, config_text, 24, 16);
FIELD(stg_session_args, config_folder, 40, 16);
FIELD(stg_session_args, overrides, 56, 8);
FIELD(stg_session_args, num_overrides, 64, 8);
FIELD(stg_session_args, stage, 72, 8);
FIELD(stg_session_args, checkpoint, 80, 16);
FIELD(stg_session_args, events, 96, 8);
FIELD(stg_session_args, output, 104, 16);
FIELD(stg_session_args, flags, 120, 8);
FIELD(stg_session_args, model, 128, 8);
FIELD(stg_session_args, sources, 136, 8);
FIELD(stg_session_args, num_sources, 144, 8);
