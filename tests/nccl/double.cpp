// SPDX-License-Identifier: Apache-2.0
#include "nccl/double.hpp"

#include <climits>
#include <memory>
#include <thread>
#include <utility>

#include "base/text.hpp"

namespace stratagem::test {

namespace {

std::unique_ptr<NcclDouble> now;

struct Communicator {
  int rank;
  size_t num_ranks;
  size_t number;
  int looks_left = 0;
  bool is_finalized = false;
  bool is_over = false;
};
std::vector<std::unique_ptr<Communicator>> made;

// NCCL counts its groups by thread.
thread_local int group_depth = 0;
thread_local ncclResult_t group_error = ncclSuccess;
thread_local std::vector<Communicator*> in_group;

void rule(bool holds, const std::string& text) {
  if (!holds) now->broken_rules.insert(text);
}

// A call of the double: alone in it, noted, and perhaps the one to fail.
class Visit {
 public:
  explicit Visit(const std::string& text) : is_alone_(now->num_inside.fetch_add(1) == 0), lock_(now->mutex) {
    rule(is_alone_, "two threads at once");
    now->calls.push_back(text);
    fails_ = now->fail_at > 0 && --now->fail_at == 0;
    if (fails_) now->failed = text;
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  ~Visit() {
    lock_.unlock();
    std::this_thread::yield();  // so that another thread can be found in it
    now->num_inside.fetch_sub(1);
  }
  bool fails() const { return fails_; }
  ncclResult_t result() const {
    if (fails_ && group_depth > 0) group_error = ncclSystemError;
    return fails_ ? ncclSystemError : ncclSuccess;
  }

 private:
  bool is_alone_;
  bool fails_ = false;
  std::unique_lock<std::mutex> lock_;
};

Communicator& of(ncclComm_t communicator) {
  auto* its = reinterpret_cast<Communicator*>(communicator);
  rule(its != nullptr, "a communicator that was never made");
  static Communicator nobody{-1, 0, 0};
  if (its == nullptr) return nobody;
  rule(!its->is_over, "a communicator after its end");
  return *its;
}

std::string on(ncclComm_t communicator) {
  return std::to_string(communicator == nullptr ? -1 : reinterpret_cast<Communicator*>(communicator)->rank);
}

bool is_busy(const Communicator& its) { return its.looks_left > 0; }

void use(ncclComm_t communicator, bool needs_group) {
  Communicator& its = of(communicator);
  rule(!is_busy(its), "a communicator that is busy was used");
  rule(!needs_group || group_depth == 1, "several devices are used outside of a group");
  rule(!its.is_finalized, "a communicator was used after it was finalized");
  if (needs_group) in_group.push_back(&its);
}

template <class... Parts>
ncclResult_t collective(ncclComm_t communicator, const Parts&... parts) {
  const Visit visit(concat(parts...));
  use(communicator, true);
  return visit.result();
}

// Whether the rank's part lies in the whole, where NCCL wants it then.
const char* in_place(const void* whole, const void* part, size_t part_bytes, ncclComm_t communicator) {
  if (whole == nullptr || part == nullptr) return "";
  const auto rank = static_cast<size_t>(of(communicator).rank);
  const auto begin = reinterpret_cast<uintptr_t>(whole), at = reinterpret_cast<uintptr_t>(part);
  const bool overlaps = at + part_bytes > begin && at < begin + of(communicator).num_ranks * part_bytes;
  if (!overlaps) return "";
  rule(at == begin + rank * part_bytes, "a part lies in the whole, but not in the rank's place");
  return " in place";
}

size_t bytes_of(size_t count, ncclDataType_t dtype) { return count * (dtype == ncclFloat64 ? 8 : dtype == ncclFloat32 ? 4 : 2); }

const char* scaled(ncclRedOp_t op) { return op == ncclSum ? "" : " scaled"; }

ncclResult_t init_rank(ncclComm_t* out, int num_ranks, ncclUniqueId, int rank, ncclConfig_t* config) {
  const Visit visit(concat("init ", rank, " of ", num_ranks, config->blocking == 0 ? "" : " blocking"));
  rule(group_depth == 1, "communicators are made outside of a group");
  *out = nullptr;
  if (visit.fails()) return visit.result();
  made.push_back(std::make_unique<Communicator>(Communicator{rank, static_cast<size_t>(num_ranks), made.size()}));
  now->num_aborts.push_back(0);
  now->num_destroys.push_back(0);
  in_group.push_back(made.back().get());
  *out = reinterpret_cast<ncclComm_t>(made.back().get());
  return ncclInProgress;
}

ncclResult_t group_start() {
  const Visit visit("group_start");
  if (visit.fails()) return visit.result();
  ++group_depth;
  ++now->num_open_groups;
  rule(group_depth == 1, "a group in a group");
  return ncclSuccess;
}

ncclResult_t group_end() {
  const Visit visit("group_end");
  rule(group_depth > 0, "the end of a group that was not begun");
  --group_depth;
  --now->num_open_groups;
  const ncclResult_t error = visit.fails() ? ncclSystemError : group_error;
  group_error = ncclSuccess;
  bool becomes_busy = false;
  for (Communicator* its : std::exchange(in_group, {})) {
    if (its->is_over) continue;
    its->looks_left = now->never_ready.contains(its->rank) ? INT_MAX : now->looks_until_ready;
    becomes_busy = becomes_busy || is_busy(*its);
  }
  if (error != ncclSuccess) return error;
  return becomes_busy ? ncclInProgress : ncclSuccess;
}

ncclResult_t look(ncclComm_t communicator, ncclResult_t* out) {
  const Visit visit(concat("look ", on(communicator)));
  Communicator& its = of(communicator);
  *out = is_busy(its) ? ncclInProgress : ncclSuccess;
  if (its.looks_left > 0) --its.looks_left;
  if (!visit.fails()) return ncclSuccess;
  *out = ncclSystemError;
  return now->fails_late ? ncclSuccess : ncclSystemError;
}

ncclResult_t finalize(ncclComm_t communicator) {
  const Visit visit(concat("finalize ", on(communicator)));
  use(communicator, true);
  of(communicator).is_finalized = true;
  return visit.result();
}

ncclResult_t finish(ncclComm_t communicator, const char* how, std::vector<int> NcclDouble::*count) {
  const Visit visit(concat(how, " ", on(communicator)));
  rule(group_depth == 1, "devices of one process are given up outside of a group");
  Communicator& its = of(communicator);
  rule(count == &NcclDouble::num_aborts || its.is_finalized, "destroyed but not finalized");
  its.is_over = true;
  ++((*now).*count)[its.number];
  return visit.result();
}

}  // namespace

NcclDouble& begin_double() {
  now = std::make_unique<NcclDouble>();
  made.clear();
  group_depth = 0;
  group_error = ncclSuccess;
  in_group.clear();
  return *now;
}

const NcclFunctions& double_functions() {
  static constexpr NcclFunctions functions{
      [](ncclUniqueId*) { return Visit("get_unique_id").result(); },
      &init_rank,
      &group_start,
      &group_end,
      [](const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) {
        return collective(c, "all_reduce ", on(c), " count ", count, scaled(op));
      },
      [](const void* in, void* out, size_t count, ncclDataType_t dtype, ncclRedOp_t op, ncclComm_t c, cudaStream_t) {
        return collective(c, "reduce_scatter ", on(c), " count ", count, scaled(op),
                          in_place(in, out, bytes_of(count, dtype), c));
      },
      [](const void* in, void* out, size_t count, ncclDataType_t dtype, ncclComm_t c, cudaStream_t) {
        return collective(c, "all_gather ", on(c), " count ", count, in_place(out, in, bytes_of(count, dtype), c));
      },
      [](const void*, void*, size_t count, ncclDataType_t, int root, ncclComm_t c, cudaStream_t) {
        return collective(c, "broadcast ", on(c), " count ", count, " from ", root);
      },
      [](ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t, ncclComm_t c) {
        const double factor =
            dtype == ncclFloat32 ? static_cast<double>(*static_cast<float*>(scalar)) : *static_cast<double*>(scalar);
        const Visit visit(concat("scaled_sum ", on(c), " by ", factor));
        use(c, false);
        *op = static_cast<ncclRedOp_t>(ncclNumOps + 1);
        return visit.result();
      },
      [](ncclRedOp_t, ncclComm_t c) {
        const Visit visit(concat("destroy_op ", on(c)));
        use(c, false);
        return visit.result();
      },
      &look,
      &finalize,
      [](ncclComm_t c) { return finish(c, "destroy", &NcclDouble::num_destroys); },
      [](ncclComm_t c) { return finish(c, "abort", &NcclDouble::num_aborts); },
      [](ncclResult_t) { return "a made-up system error"; },
      [](ncclComm_t) { return "the cable was out"; },
      [](int device) { return Visit(concat("device ", device)).fails() ? cudaErrorInvalidDevice : cudaSuccess; },
      [](cudaError_t) { return "a made-up invalid device"; },
      [] {
        const std::lock_guard lock(now->mutex);
        return now->now_ns;
      },
      [] {
        {
          const std::lock_guard lock(now->mutex);
          now->now_ns += 1'000'000;
        }
        now->on_rest();
        std::this_thread::yield();
      }};
  return functions;
}

}  // namespace stratagem::test
