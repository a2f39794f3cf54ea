// SPDX-License-Identifier: Apache-2.0
//
// A communicator for each of several devices of this process, none of which blocks. Collectives are gathered between begin and end and
// then given to NCCL in one group, by one thread at a time; the host waits only for NCCL to have taken them, never for a device.
//
// After any error every communicator is aborted: a collective that one device has given up would hang the others.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "accelerator/transport.hpp"
#include "base/error.hpp"
#include "nccl/functions.hpp"
#include "nccl/settings.hpp"

namespace stratagem {

class NcclGroup {
 public:
  /// Waits until all communicators can be used, at most to `deadline_ns`; 0: for ever. The calling thread's current device stays.
  NcclGroup(const NcclFunctions& nccl, std::vector<stg_device> devices, const NcclSettings& settings, uint64_t deadline_ns);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup();

  /// A thread at a time from here to the end; `end` gives NCCL what was said in between.
  void begin();
  void end();
  void all_reduce(uint64_t rank, const TransportBuffer& buffer, TransportFactor factor, cudaStream_t stream);
  void reduce_scatter(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, TransportFactor factor,
                      cudaStream_t stream);
  void all_gather(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, cudaStream_t stream);
  void broadcast(uint64_t rank, const TransportBuffer& buffer, uint64_t source, cudaStream_t stream);

  /// Throws what has gone wrong since on a device. Any thread.
  void poll();
  /// Any thread, more than once.
  void abort() noexcept;

 private:
  struct Queued {
    const char* operation;
    uint64_t rank;
    ncclDataType_t dtype;
    TransportFactor factor;
    std::function<ncclResult_t(ncclComm_t, ncclRedOp_t)> call;
  };
  void queue(Queued queued, const TransportBuffer& buffer);
  ncclRedOp_t make_op(const Queued& queued);
  void send_queued();

  void start(ncclConfig_t config, uint64_t deadline_ns);
  void finish();
  void abort_all() noexcept;

  void in_nccl(const std::function<void()>& body);
  void in_one_group(const char* operation, const std::function<void()>& calls);
  void settle(const char* operation, uint64_t deadline_ns);
  void refuse_if_over() const;
  void check(ncclResult_t result, const char* operation, uint64_t rank) const;
  void check_all(ncclResult_t result, const std::string& operation) const;
  std::string text_of(ncclResult_t result, ncclComm_t communicator) const;
  Error failed_on(uint64_t rank, uint32_t code, const std::string& what) const;

  const NcclFunctions& nccl_;
  const std::vector<stg_device> devices_;
  std::vector<ncclComm_t> communicators_;  // null: none yet, or none any more
  std::vector<Queued> queued_;
  bool is_open_ = false;  // between begin and end
  std::mutex mutex_;      // one thread in NCCL
  std::atomic<bool> is_over_{false};
};

}  // namespace stratagem
