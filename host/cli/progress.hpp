// SPDX-License-Identifier: Apache-2.0
//
// The progress bar: on stderr, only on a terminal, redrawn a few times a second.
#pragma once

#include <stratagem/session.h>

#include <string>

namespace stratagem::cli {

/// The line without its escape sequences.
std::string progress_text(const stg_progress& progress, double seconds);

/// Draws it where that is due.
void show_progress(const stg_progress& progress);
/// What has to be written to stderr before other text: it takes the bar away.
std::string clear_progress();

}  // namespace stratagem::cli
