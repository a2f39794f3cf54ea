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

namespace stratagem {

/// The settings of `settings_json`, an object; what they point to lives as long as this.
class NcclSettings {
 public:
  explicit NcclSettings(const std::string& settings_json);
  ncclConfig_t config() const { return config_; }

 private:
  ncclConfig_t config_;
  std::string net_name_;
};

class NcclGroup {
 public:
  /// Waits until all communicators can be used, at most to `deadline_ns`; 0: for ever.
  NcclGroup(const NcclFunctions& nccl, std::vector<stg_device> devices, const NcclSettings& settings, uint64_t deadline_ns);
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;
  ~NcclGroup();

  void begin();
  void end();
  /// Each between begin and end; `op` says what it is in errors.
  void all_reduce(uint64_t rank, const TransportBuffer& buffer, double factor, cudaStream_t stream);
  void reduce_scatter(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, double factor, cudaStream_t stream);
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
    double factor;
    std::function<ncclResult_t(ncclComm_t, ncclRedOp_t)> call;
  };
  void queue(const char* operation, uint64_t rank, const TransportBuffer& buffer, double factor,
             std::function<ncclResult_t(ncclComm_t, ncclRedOp_t)> call);
  void start(uint64_t deadline_ns);
  void send(const Queued& queued, ncclRedOp_t op);
  ncclRedOp_t make_op(const Queued& queued);
  void check(ncclResult_t result, const char* operation, uint64_t rank);
  void settle(const char* operation, uint64_t deadline_ns);
  void use_device(uint64_t rank);
  void refuse_if_over() const;
  [[noreturn]] void fail(uint32_t code, const std::string& what, uint64_t rank);
  void abort_all() noexcept;

  const NcclFunctions& nccl_;
  std::vector<stg_device> devices_;
  std::vector<ncclComm_t> communicators_;
  std::vector<Queued> queued_;
  bool is_open_ = false;        // between begin and end
  std::recursive_mutex mutex_;  // one thread in NCCL
  std::atomic<bool> is_aborted_{false};
};

}  // namespace stratagem
