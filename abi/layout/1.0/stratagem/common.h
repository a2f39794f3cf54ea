/* SPDX-License-Identifier: Apache-2.0
 *
 * What every header of the ABI builds on: the version, the limits, and the words that the comments use.
 *
 * Words. A *host* is the program that trains a model; a *plugin* is the shared library that it loads. Who *owns* memory releases
 * it, through the function that came with it. A *borrowed* pointer is read during the call only. A *moved* argument is consumed by
 * the callee on every return, success or error.
 *
 * Two kinds of struct cross the ABI. *Fixed* ones (stg_string, stg_device, stg_stream, stg_dtype, stg_tensor_view, stg_tensor,
 * stg_value, stg_entry, stg_tree, stg_error, stg_probe_request, stg_probe_reply) never change in this major; only they nest by
 * value. *Growing* ones start with `struct_size`, set by whoever owns the memory to the size that it was compiled with, and grow
 * only at the end. STG_<NAME>_MIN_SIZE is the smallest size ever released: less is refused, so is more than
 * STG_MAX_STRUCT_SIZE_BYTES (an uninitialised size). Of an argument struct, bytes past what the callee knows must be zero. Of a
 * result struct, the callee fills what both know and lowers `struct_size` to what it honoured. Of a function table, slots past
 * what the caller knows are not called; a null slot and a slot past the size, or half past it, are the same: the function is absent
 * (STG_HAS). Of a struct that is refused for its size, or for a byte past what the callee knows, nothing else is read: what it would
 * have moved stays the caller's. Of several structs the others are consumed all the same.
 *
 * Only fixed-width integers, double, pointers and structs of these cross. Enumerations are uint32_t; a field that stands alone is
 * uint64_t, so that there is no padding behind it. An unknown value is an error. No struct has padding.
 *
 * Pointers. Each has an owner and a lifetime, and something says so: the comment of a field, or that of its struct for `all pointers` of
 * it. A parameter is named in backquotes, and what a function returns is called `the result`, by a sentence of the function's comment,
 * else of its table's, else of its header's; else the first of these holds that fits:
 *   `self`                 borrowed: the object whose function it is; release, deleter and destroy end it
 *   `out`                  the caller's memory, filled on success; what is in it is then owned by the caller
 *   const T *              borrowed
 *   number *               the caller's memory, written on success
 *   handle *               borrowed; a handle, of a type that only its maker knows, lives until the function that ends it
 *   stg_error * as result  owned by the caller; null is success
 *
 * Thread and state tags. The comment of every function ends in a tag in square brackets. Its first word says who may call:
 *   [any]      any thread, at any time, several at once.
 *   [owner]    one caller at a time; which thread does not matter. A second caller, or a call from inside one of the instance's
 *              own callbacks, gets STG_FAILED_PRECONDITION.
 *   [replica]  called by a strategy, for one replica at a time; different replicas on different threads at the same time. With
 *              STG_CREATE_CALLER_THREAD_ONLY: only on the thread that is inside a call of the instance.
 * The words after it are the states (see states.h) in which the call is legal: created, fit, evaluate, modelless, draining; `live` is
 * all but draining, `all` is all of them, and so is none.
 */
#ifndef STRATAGEM_COMMON_H
#define STRATAGEM_COMMON_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
#define STG_EXTERN_C_BEGIN extern "C" {
#define STG_EXTERN_C_END }
#define STG_ASSERT(condition, name) static_assert(condition, #name)
#else
#define STG_EXTERN_C_BEGIN
#define STG_EXTERN_C_END
/* C99 has no _Static_assert: an array of negative size is refused by every compiler. */
#define STG_ASSERT(condition, name) typedef char stg_assert_##name[(condition) ? 1 : -1]
#endif

/* The size is part of the contract: a change of layout must not compile unnoticed. */
#define STG_ASSERT_SIZE(type, size_bytes) STG_ASSERT(sizeof(type) == (size_bytes), size_of_##type)

/* What this copy of the headers describes. A host can use a plugin of the same major whose range of minors meets its own. */
#define STG_ABI_MAJOR 1u
#define STG_ABI_MINOR 0u

/* A struct_size above this is taken for uninitialised memory and refused. */
#define STG_MAX_STRUCT_SIZE_BYTES 65536u

/* Whether the function table `table`, of struct type `type`, has the function `slot`: its size reaches so far and the slot is not
 * null. STG_HAS(stg_model, model, bind). */
#define STG_HAS(type, table, slot) ((table)->struct_size >= offsetof(type, slot) + sizeof((table)->slot) && (table)->slot != 0)

/* The ABI is defined for 64-bit platforms only. */
STG_ASSERT(sizeof(void *) == 8, pointers_have_64_bits);

#endif
