// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/loop/feed.hpp"

#include <utility>

namespace stratagem {

BatchFeed::BatchFeed(StrategyInstance& strategy, uint64_t stage, const Dataset& dataset,
                     std::optional<std::vector<int64_t>> order, int64_t batch_size, int64_t first_batch, int64_t end_batch)
    : strategy_(strategy),
      stage_(stage),
      dataset_(dataset),
      order_(std::move(order)),
      batch_size_(batch_size),
      next_batch_(first_batch),
      end_batch_(end_batch) {
  open();
}

void BatchFeed::open() { stream_.emplace(dataset_, order_, batch_size_, next_batch_, end_batch_); }

std::optional<StepBatch> BatchFeed::next() {
  std::optional<StepBatch> given;
  if (announced_ != 0) {
    given.emplace(StepBatch{{}, std::exchange(announced_, 0)});
  } else if (auto batch = stream_->next()) {
    given.emplace(StepBatch{std::move(*batch), 0});
  }
  if (!given) return given;
  ++next_batch_;
  announce();
  return given;
}

void BatchFeed::announce() {
  if (!strategy_.takes_announcements()) return;
  auto batch = stream_->next_if_ready();
  if (!batch) return;
  announced_ = strategy_.announce(std::move(*batch), stage_);
  if (announced_ == 0) open();  // it takes none after all
}

void BatchFeed::take_back() {
  if (std::exchange(announced_, 0) != 0) open();
}

}  // namespace stratagem
