/* SPDX-License-Identifier: Apache-2.0
 *
 * All of the ABI.
 */
#ifndef STRATAGEM_ABI_H
#define STRATAGEM_ABI_H

#include <stratagem/call.h>
#include <stratagem/common.h>
#include <stratagem/error.h>
#include <stratagem/extension.h>
#include <stratagem/host.h>
#include <stratagem/model.h>
#include <stratagem/plugin.h>
#include <stratagem/states.h>
#include <stratagem/strategy.h>
#include <stratagem/tensor.h>
#include <stratagem/types.h>
#include <stratagem/value.h>

#endif
