// SPDX-License-Identifier: Apache-2.0
#include "nccl/double.hpp"

#include <memory>

#include "base/text.hpp"

namespace stratagem::test {

namespace {

std::unique_ptr<NcclDouble> now;

struct Communicator {
  int rank;
  size_t number;
  int looks_left = 0;
};
std::vector<std::unique_ptr<Communicator>> made;

Communicator& of(ncclComm_t communicator) { return *reinterpret_cast<Communicator*>(communicator); }

// Notes a call, and says whether it is the one to fail.
class Visit {
 public:
  explicit Visit(const std::string& text) {
    if (now->num_inside.fetch_add(1) != 0) now->was_crowded = true;
    now->calls.push_back(text);
    fails_ = now->fail_at > 0 && --now->fail_at == 0;
  }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;
  ~Visit() { now->num_inside.fetch_sub(1); }
  ncclResult_t result() const { return fails_ ? ncclSystemError : ncclSuccess; }

 private:
  bool fails_;
};

void make_busy() {
  for (const auto& one : made) one->looks_left = now->looks_until_ready;
}

std::string on(ncclComm_t communicator) { return std::to_string(of(communicator).rank); }

ncclResult_t init_rank(ncclComm_t* out, int num_ranks, ncclUniqueId, int rank, ncclConfig_t* config) {
  const Visit visit(concat("init ", rank, " of ", num_ranks, config->blocking == 0 ? "" : " blocking"));
  made.push_back(std::make_unique<Communicator>(Communicator{rank, made.size()}));
  now->num_aborts.push_back(0);
  now->num_destroys.push_back(0);
  *out = reinterpret_cast<ncclComm_t>(made.back().get());
  return visit.result() == ncclSuccess ? ncclInProgress : visit.result();
}

}  // namespace

NcclDouble& begin_double() {
  now = std::make_unique<NcclDouble>();
  made.clear();
  return *now;
}

const NcclFunctions& double_functions() {
  static constexpr NcclFunctions functions{
      [](ncclUniqueId*) { return Visit("get_unique_id").result(); },
      &init_rank,
      [] { return Visit("group_start").result(); },
      [] {
        const Visit visit("group_end");
        make_busy();
        return visit.result() == ncclSuccess && now->looks_until_ready > 0 ? ncclInProgress : visit.result();
      },
      [](const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) {
        return Visit(concat("all_reduce ", on(c), " count ", count, op == ncclSum ? "" : " scaled")).result();
      },
      [](const void*, void*, size_t count, ncclDataType_t, ncclRedOp_t op, ncclComm_t c, cudaStream_t) {
        return Visit(concat("reduce_scatter ", on(c), " count ", count, op == ncclSum ? "" : " scaled")).result();
      },
      [](const void*, void*, size_t count, ncclDataType_t, ncclComm_t c, cudaStream_t) {
        return Visit(concat("all_gather ", on(c), " count ", count)).result();
      },
      [](const void*, void*, size_t count, ncclDataType_t, int root, ncclComm_t c, cudaStream_t) {
        return Visit(concat("broadcast ", on(c), " count ", count, " from ", root)).result();
      },
      [](ncclRedOp_t* op, void* scalar, ncclDataType_t dtype, ncclScalarResidence_t, ncclComm_t c) {
        const double factor =
            dtype == ncclFloat32 ? static_cast<double>(*static_cast<float*>(scalar)) : *static_cast<double*>(scalar);
        *op = static_cast<ncclRedOp_t>(ncclNumOps + 1);
        return Visit(concat("scaled_sum ", on(c), " by ", factor)).result();
      },
      [](ncclRedOp_t, ncclComm_t c) { return Visit(concat("destroy_op ", on(c))).result(); },
      [](ncclComm_t c, ncclResult_t* out) {
        const Visit visit(concat("look ", on(c)));
        Communicator& its = of(c);
        *out = now->never_ready.contains(its.rank) || its.looks_left-- > 0 ? ncclInProgress : ncclSuccess;
        return visit.result();
      },
      [](ncclComm_t c) { return Visit(concat("finalize ", on(c))).result(); },
      [](ncclComm_t c) {
        const Visit visit(concat("destroy ", on(c)));
        ++now->num_destroys[of(c).number];
        return visit.result();
      },
      [](ncclComm_t c) {
        const Visit visit(concat("abort ", on(c)));
        ++now->num_aborts[of(c).number];
        return visit.result();
      },
      [](ncclResult_t) { return "a made-up system error"; },
      [](ncclComm_t) { return "the cable was out"; },
      [](int* device) {
        *device = 7;
        return cudaSuccess;
      },
      [](int device) { return Visit(concat("device ", device)).result() == ncclSuccess ? cudaSuccess : cudaErrorInvalidDevice; },
      [](cudaError_t) { return "a made-up invalid device"; }};
  return functions;
}

}  // namespace stratagem::test
