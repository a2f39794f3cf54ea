// SPDX-License-Identifier: Apache-2.0
#include "cli/progress.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <mutex>

#include "cli/output.hpp"

namespace stratagem::cli {
namespace {

using Clock = std::chrono::steady_clock;
constexpr auto redraw_interval = std::chrono::milliseconds(100);
constexpr int64_t bar_width = 24;

// A plugin may log from its own threads. `mutex` guards the rest, and stderr.
struct State {
  std::mutex mutex;
  Clock::time_point begin = Clock::now();
  Clock::time_point drawn{};
  bool on_screen = false;
};
State& state() {
  static State value;
  return value;
}

}  // namespace

std::string progress_text(const stg_progress& progress, double seconds) {
  const int64_t total = std::max<int64_t>(progress.num_batches, 1);
  const int64_t filled = std::clamp<int64_t>(progress.batch * bar_width / total, 0, bar_width);
  std::string text = progress.stage == STG_STAGE_FIT        ? "epoch " + std::to_string(progress.epoch + 1)
                     : progress.stage == STG_STAGE_VALIDATE ? "validation"
                     : progress.stage == STG_STAGE_TEST     ? "test"
                                                            : "predict";
  if (progress.stage == STG_STAGE_FIT && progress.max_epochs > 0) text += "/" + std::to_string(progress.max_epochs);
  text += " [" + std::string(static_cast<size_t>(filled), '#') + std::string(static_cast<size_t>(bar_width - filled), '.') + "] ";
  text += std::to_string(progress.batch) + "/" + std::to_string(progress.num_batches);
  if (progress.stage == STG_STAGE_FIT) text += "  step " + std::to_string(progress.step);
  char number[64];
  if (std::isfinite(progress.loss)) {
    std::snprintf(number, sizeof number, "  loss %.4f", progress.loss);
    text += number;
  }
  std::snprintf(number, sizeof number, "  %.0f s", seconds);
  return text + number;
}

void show_progress(const stg_progress& progress) {
  State& now = state();
  if (!stderr_is_terminal()) return;
  const std::lock_guard lock(now.mutex);
  const Clock::time_point time = Clock::now();
  if (time - now.drawn < redraw_interval && progress.batch != progress.num_batches) return;
  now.drawn = time;
  now.on_screen = true;
  const std::string line = "\r\033[K" + progress_text(progress, std::chrono::duration<double>(time - now.begin).count());
  std::fwrite(line.data(), 1, line.size(), stderr);
  std::fflush(stderr);
}

void write_above_progress(const std::string& text) {
  State& now = state();
  const std::lock_guard lock(now.mutex);
  const std::string all = (now.on_screen ? "\r\033[K" : "") + text;
  now.on_screen = false;
  std::fwrite(all.data(), 1, all.size(), stderr);
  std::fflush(stderr);
}

}  // namespace stratagem::cli
