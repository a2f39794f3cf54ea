// SPDX-License-Identifier: Apache-2.0
#include "strategy/announced.hpp"

#include <stratagem/strategy.h>

#include <algorithm>
#include <array>
#include <system_error>

#include "base/error.hpp"
#include "strategy/workers.hpp"

namespace stratagem {

namespace {

bool has_opaque(const stg_value& root) {
  bool found = false;
  for_each_leaf(root, [&](const KeyPath&, const stg_value& leaf) { found = found || leaf.type == STG_OPAQUE; });
  return found;
}

const char* stage_name(uint32_t stage) {
  constexpr std::array names{"fit", "validate", "test", "predict"};
  return names.at(stage);
}

}  // namespace

struct AnnouncedBatches::Entry {
  enum class Progress { waiting, in_work, done };

  uint64_t ticket = 0;
  Use use;
  Tree whole;                         // where nothing is split here
  std::shared_ptr<const Tree> batch;  // of the thread, which doesn't let it go
  SplitOptions options;
  std::optional<Shares> shares;
  std::optional<Error> failure;  // not an exception: its object ends on the thread that threw it
  Progress progress = Progress::waiting;

  std::any sent;

  void split(const Send& send) noexcept {
    try {
      shares = batch ? split_batch(batch, options) : split_batch(std::move(whole), options);
      if (send) sent = send(*shares);
    } catch (...) {
      failure = describe_exception(std::current_exception());
    }
  }
};

AnnouncedBatches::~AnnouncedBatches() {
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

uint64_t AnnouncedBatches::announce(Tree batch, Use use, const std::optional<SplitOptions>& options) {
  if (entries_.size() == 2) {
    withdraw(entries_.front());
    entries_.pop_front();
  }
  const auto entry = std::make_shared<Entry>();
  entries_.push_back(entry);
  entry->ticket = ++last_ticket_;
  entry->use = use;
  if (options) entry->options = *options;
  if (options && (options->floating_dtype.bits != 0 || send_) && has_thread_ && !has_opaque(batch.root())) {
    entry->batch = std::make_shared<const Tree>(std::move(batch));
    hand_to_thread(entry);
  } else {
    entry->whole = std::move(batch);
    if (options) entry->split(send_);
  }
  return last_ticket_;
}

AnnouncedBatches::Taken AnnouncedBatches::take(uint64_t ticket, Use use) {
  const auto found = std::find_if(entries_.begin(), entries_.end(), [&](const auto& entry) { return entry->ticket == ticket; });
  if (found == entries_.end()) {
    throw not_found(
        "there is no announced batch with the ticket ", ticket, ": ",
        ticket > last_ticket_ ? "no announcement gave it" : "a step has used it up, or later announcements took its place");
  }
  const std::shared_ptr<Entry> entry = std::move(*found);
  entries_.erase(found);
  if (entry->batch) {
    withdraw(entry);
    if (entry->progress == Entry::Progress::waiting) entry->split(send_);
  }
  if (use.stage != entry->use.stage || use.dataloader_index != entry->use.dataloader_index) {
    throw invalid_argument("the batch with the ticket ", ticket, " was announced for the stage ", stage_name(entry->use.stage),
                           " and dataloader_index ", entry->use.dataloader_index, "; this step is of the stage ",
                           stage_name(use.stage), " and has dataloader_index ", use.dataloader_index);
  }
  if (entry->failure) throw Error(*entry->failure);
  return {std::move(entry->whole), std::move(entry->shares), std::move(entry->sent)};
}

void AnnouncedBatches::hand_to_thread(const std::shared_ptr<Entry>& entry) {
  if (!thread_.joinable()) {
    try {
      thread_ = start_thread("announced-batch", [this] { work(); });
    } catch (const std::system_error&) {
      return;  // its step does the work
    }
  }
  {
    const std::lock_guard lock(mutex_);
    handed_.push_back(entry);
  }
  changed_.notify_all();
}

// From the thread: if that has begun, it ends it first.
void AnnouncedBatches::withdraw(const std::shared_ptr<Entry>& entry) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return entry->progress != Entry::Progress::in_work; });
  std::erase(handed_, entry);
}

void AnnouncedBatches::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return is_ending_ || !handed_.empty(); });
    if (is_ending_) return;
    Entry& entry = *handed_.front();  // the caller has it too, and waits for us before it lets it go
    handed_.pop_front();
    entry.progress = Entry::Progress::in_work;
    lock.unlock();
    entry.split(send_);
    lock.lock();
    entry.progress = Entry::Progress::done;
    changed_.notify_all();
  }
}

}  // namespace stratagem
