// SPDX-License-Identifier: Apache-2.0
//
// The progress bar: on stderr, only on a terminal, redrawn a few times a second.
#pragma once

#include <stratagem/session.h>

#include <string>

namespace stratagem::cli {

/// The line without its escape sequences.
std::string progress_text(const stg_progress& progress, double seconds);

/// Draws it where that is due. Any thread.
void show_progress(const stg_progress& progress);
/// Writes to stderr, above the bar, which comes back when it is next drawn. Any thread.
void write_above_progress(const std::string& text);

}  // namespace stratagem::cli
