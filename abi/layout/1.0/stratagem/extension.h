/* SPDX-License-Identifier: Apache-2.0
 *
 * Optional groups of functions, reached by stg_plugin.get_extension(id). An id reads "stratagem.<group>/<revision>"; a changed
 * meaning gets a new revision, and an id does not change when a draft becomes stable. Drafts are promised to
 * nobody. Version 1.0 defines none: a host asks, and null is the normal answer.
 */
#ifndef STRATAGEM_EXTENSION_H
#define STRATAGEM_EXTENSION_H

#include <stratagem/plugin.h>

#endif
