/* SPDX-License-Identifier: Apache-2.0
 *
 * A library that has a plugin's note and nothing else. */
#include <stratagem/plugin.h>

STG_PLUGIN_NOTE(
    "{\"name\": \"noted\", \"version\": \"1.2.3\", \"abi\": {\"major\": 1, \"min_minor\": 0, \"max_minor\": 4}, "
    "\"strategies\": [\"first\", \"second\"], \"models\": [], \"libtorch\": \"2.15.0\", \"later\": [1]}");
