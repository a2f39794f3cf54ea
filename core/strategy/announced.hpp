// SPDX-License-Identifier: Apache-2.0
//
// Batches that a host has announced: split, and copied where the precision needs another type, before their step asks for them. Two may
// wait, since the one of a step is still there when the next is announced, before that step runs.
//
// Splitting alone makes views and costs less than waking a thread: it is done in the announcing call. Copying is done by a thread, from
// the first batch that needs it to the end of this object; a step that comes before the thread has begun does it itself. Without a core
// to spare the announcing call copies: a thread would only push the step's own aside, which meet at barriers. The thread runs
// nothing of the host's: a batch with opaque values, which are retained on the calling thread, is copied there, and what is to be
// released is released by the step. A batch that the model splits itself only waits here.
//
// Requires: one caller at a time. Guarantees: the shares are those that the step itself would have made, and so are the errors.
#pragma once

#include <any>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>

#include "base/value.hpp"
#include "strategy/split.hpp"

namespace stratagem {

class AnnouncedBatches {
 public:
  /// How a step is to use the batch: with what was said when it was announced.
  struct Use {
    uint32_t stage = 0;
    int64_t dataloader_index = 0;
  };

  /// `has_thread`: there may be one, since a core is free beside a step. `last_ticket`: of an earlier setup, or 0.
  /// `send`: starts to copy the shares to where their step wants them; what it gives comes back with them. Empty: they stay where they are.
  using Send = std::function<std::any(Shares& shares)>;
  AnnouncedBatches(bool has_thread, uint64_t last_ticket, Send send = {})
      : has_thread_(has_thread), last_ticket_(last_ticket), send_(std::move(send)) {}
  AnnouncedBatches(const AnnouncedBatches&) = delete;
  AnnouncedBatches& operator=(const AnnouncedBatches&) = delete;
  /// Joins.
  ~AnnouncedBatches();

  /// Takes an owned batch and gives its ticket. A third one releases the oldest. `options`: none keeps it whole.
  uint64_t announce(Tree batch, Use use, const std::optional<SplitOptions>& options);
  uint64_t last_ticket() const { return last_ticket_; }

  /// The batch of this ticket, which is used up: either shares, or the batch as a whole. Throws for an unknown ticket, for another use
  /// than the announced one, and what was wrong with the batch.
  struct Taken {
    Tree batch;
    std::optional<Shares> shares;
    std::any sent;
  };
  Taken take(uint64_t ticket, Use use);

 private:
  struct Entry;
  void hand_to_thread(const std::shared_ptr<Entry>& entry);
  void withdraw(const std::shared_ptr<Entry>& entry);
  void work();

  const bool has_thread_;
  uint64_t last_ticket_;
  const Send send_;
  std::deque<std::shared_ptr<Entry>> entries_;  // until a step takes them

  std::mutex mutex_;  // guards the rest, and Entry::progress
  std::condition_variable changed_;
  std::deque<std::shared_ptr<Entry>> handed_;  // to the thread
  bool is_ending_ = false;
  std::thread thread_;
};

}  // namespace stratagem
