// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/collective.hpp"

#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>

#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::all_reduce:
      return "all_reduce";
    case Kind::reduce_scatter:
      return "reduce_scatter";
    case Kind::all_gather:
      return "all_gather";
    case Kind::broadcast:
      return "broadcast";
  }
  return "?";
}

Meeting& meeting() {
  static auto* instance = new Meeting;
  return *instance;
}

namespace {

struct Round {
  std::vector<Part> parts;
  size_t num_arrived = 0;
  bool is_done = false;
};

// In the order of ranks; small types are added in float32 and rounded once.
at::Tensor sum(const std::vector<Part>& parts) {
  const at::ScalarType dtype = parts.front().dtype == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor total;
  for (const Part& part : parts) {
    const double factor = part.factor_on_device ? part.factor_on_device->tensor().item<double>() : part.factor;
    const at::Tensor term = part.in.tensor().to(dtype).mul(factor);
    total = total.defined() ? total.add_(term) : term;
  }
  return total.to(parts.front().dtype);
}

void do_work(const std::vector<Part>& parts) {
  const Running running;
  switch (parts.front().kind) {
    case Kind::all_reduce: {
      const at::Tensor total = sum(parts);
      for (const Part& part : parts) part.out.tensor().copy_(total);
      return;
    }
    case Kind::reduce_scatter: {
      const at::Tensor total = sum(parts);
      int64_t begin = 0;
      for (const Part& part : parts) {
        const at::Tensor out = part.out.tensor();
        out.copy_(total.narrow(0, begin, out.numel()));
        begin += out.numel();
      }
      return;
    }
    case Kind::all_gather: {
      std::vector<at::Tensor> all;
      for (const Part& part : parts) all.push_back(part.in.tensor());
      const at::Tensor gathered = at::cat(all);
      for (const Part& part : parts) part.out.tensor().copy_(gathered);
      return;
    }
    case Kind::broadcast: {
      const at::Tensor source = parts[parts.front().source].in.tensor();
      for (size_t rank = 0; rank < parts.size(); ++rank)
        if (rank != parts.front().source) parts[rank].out.tensor().copy_(source);
      return;
    }
  }
}

void arrive(const Ranks& ranks, Round& round, uint64_t rank) {
  Meeting& all = meeting();
  std::unique_lock lock(all.mutex);
  all.changed.wait(lock, [&] { return ranks.is_aborted || !all.held.contains(rank); });
  if (ranks.is_aborted) return;
  if (++round.num_arrived == round.parts.size()) {
    do_work(round.parts);
    round.is_done = true;
    all.changed.notify_all();
  }
  all.changed.wait(lock, [&] { return ranks.is_aborted || round.is_done; });
}

}  // namespace

std::vector<Launched> launch_collective(const std::shared_ptr<Ranks>& ranks, std::vector<Part> parts) {
  const auto round = std::make_shared<Round>();
  round->parts = std::move(parts);
  std::vector<Launched> launched;
  for (uint64_t rank = 0; rank < round->parts.size(); ++rank) {
    const Part& part = round->parts[rank];
    launched.push_back({part.queue, launch(*part.queue, concat(name_of(part.kind), " (rank ", rank, ")"), part.spans,
                                           [ranks, round, rank] { arrive(*ranks, *round, rank); })});
  }
  return launched;
}

}  // namespace emulated
