// SPDX-License-Identifier: Apache-2.0
//
// What goes where: results to stdout, everything else to stderr; colour only on a terminal and without NO_COLOR.
#pragma once

#include <stratagem/error.h>

#include <string>
#include <string_view>

namespace stratagem::cli {

/// Exit codes. An interrupted run ends with 128 + the signal's number: 130, 143.
enum Exit : int { fine = 0, failed = 1, bad_input = 2, bad_plugin = 3 };

/// Whether stderr is a terminal that understands escape sequences.
bool stderr_is_terminal();
/// Whether they may be colours.
bool stderr_has_colour();

/// "warning: text" on a line of its own, above the progress bar if there is one.
void say(uint32_t level, std::string_view text);

/// The error and its causes, as one text.
std::string text_of(const stg_error& error);

/// The exit code for an error from before training started (see stg_session_open).
int exit_code_of_opening(uint32_t code);

}  // namespace stratagem::cli
