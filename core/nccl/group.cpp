// SPDX-License-Identifier: Apache-2.0
#include "nccl/group.hpp"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "base/dlpack.hpp"

namespace stratagem {

namespace {

using nlohmann::json;

constexpr uint64_t longest_settling_ns = 300'000'000'000;  // for NCCL to take a group; the first one connects the devices
constexpr auto pause = std::chrono::microseconds(50);

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

ncclDataType_t type_of(stg_dtype dtype) {
  if (same_dtype(dtype, float32)) return ncclFloat32;
  if (same_dtype(dtype, float64)) return ncclFloat64;
  if (same_dtype(dtype, {STG_DTYPE_FLOAT, 16, 1})) return ncclFloat16;
  if (same_dtype(dtype, {STG_DTYPE_BFLOAT, 16, 1})) return ncclBfloat16;
  throw invalid_argument("NCCL is not given ", dtype_name(dtype), "; float16, bfloat16, float32 and float64 are possible");
}

// The whole numbers that both NCCL 2.28 and 2.30 have.
struct Setting {
  const char* name;
  int ncclConfig_t::*field;
  int smallest, largest;
};
constexpr Setting settings[] = {{"cga_cluster_size", &ncclConfig_t::cgaClusterSize, 0, 8},
                                {"min_ctas", &ncclConfig_t::minCTAs, 1, 64},
                                {"max_ctas", &ncclConfig_t::maxCTAs, 1, 64},
                                {"traffic_class", &ncclConfig_t::trafficClass, 0, INT32_MAX},
                                {"collnet_enable", &ncclConfig_t::collnetEnable, 0, 1},
                                {"cta_policy", &ncclConfig_t::CTAPolicy, 0, 2},
                                {"nvls_ctas", &ncclConfig_t::nvlsCTAs, 1, 64}};

int read_setting(const json& value, const Setting& setting) {
  if (!value.is_number_integer() || value.get<int64_t>() < setting.smallest || value.get<int64_t>() > setting.largest) {
    throw invalid_argument("/options/nccl/", setting.name, " is ", value.dump(), "; it must be a whole number from ",
                           setting.smallest, " to ", setting.largest);
  }
  return value.get<int>();
}

}  // namespace

NcclSettings::NcclSettings(const std::string& settings_json) : config_(NCCL_CONFIG_INITIALIZER) {
  config_.blocking = 0;
  std::vector<std::string> known{"net_name"};
  for (const Setting& setting : settings) known.emplace_back(setting.name);
  const json object = json::parse(settings_json);
  for (const auto& [key, value] : object.items()) {
    if (key == "net_name") {
      if (!value.is_string()) throw invalid_argument("/options/nccl/net_name is ", value.dump(), "; it must be a text");
      net_name_ = value.get<std::string>();
      config_.netName = net_name_.c_str();
      continue;
    }
    const auto found =
        std::find_if(std::begin(settings), std::end(settings), [&](const Setting& one) { return key == one.name; });
    if (found == std::end(settings)) throw invalid_argument("/options/nccl/", key, " is unknown; known are ", join(known));
    config_.*(found->field) = read_setting(value, *found);
  }
}

// ---- life

NcclGroup::NcclGroup(const NcclFunctions& nccl, std::vector<stg_device> devices, const NcclSettings& made_of,
                     uint64_t deadline_ns)
    : nccl_(nccl), devices_(std::move(devices)), communicators_(devices_.size()) {
  const std::lock_guard lock(mutex_);
  ncclUniqueId id{};
  check(nccl_.get_unique_id(&id), "ncclGetUniqueId", 0);
  check(nccl_.group_start(), "ncclGroupStart", 0);
  for (uint64_t rank = 0; rank < devices_.size(); ++rank) {
    use_device(rank);
    ncclConfig_t config = made_of.config();
    check(nccl_.init_rank(&communicators_[rank], static_cast<int>(devices_.size()), id, static_cast<int>(rank), &config),
          "ncclCommInitRankConfig", rank);
  }
  check(nccl_.group_end(), "ncclGroupEnd", 0);
  settle("the start of NCCL", deadline_ns);
}

NcclGroup::~NcclGroup() {
  if (is_aborted_.load()) return;
  try {
    const std::lock_guard lock(mutex_);
    for (uint64_t rank = 0; rank < communicators_.size(); ++rank)
      check(nccl_.finalize(communicators_[rank]), "ncclCommFinalize", rank);
    settle("the end of NCCL", 0);
    for (ncclComm_t& communicator : communicators_) nccl_.destroy(std::exchange(communicator, nullptr));
  } catch (const Error&) {
    // aborted by it
  }
}

void NcclGroup::use_device(uint64_t rank) {
  const cudaError_t result = nccl_.set_device(devices_[rank].index);
  if (result != cudaSuccess) fail(STG_INTERNAL, concat("cudaSetDevice: ", nccl_.cuda_error_string(result)), rank);
}

// ---- collectives

void NcclGroup::refuse_if_over() const {
  if (is_aborted_.load()) throw Error{STG_ABORTED, "NCCL's communicators were aborted; make the strategy anew"};
}

void NcclGroup::begin() {
  const std::lock_guard lock(mutex_);
  refuse_if_over();
  queued_.clear();
  is_open_ = true;
}

void NcclGroup::queue(const char* operation, uint64_t rank, const TransportBuffer& buffer, double factor,
                      std::function<ncclResult_t(ncclComm_t, ncclRedOp_t)> call) {
  if (!is_open_) throw failed_precondition(operation, ": no group was begun");
  if (rank >= devices_.size()) throw invalid_argument(operation, ": rank ", rank, " of ", devices_.size());
  const ncclDataType_t dtype = type_of(buffer.dtype);
  if (factor != 1 && dtype != ncclFloat32 && dtype != ncclFloat64)
    throw invalid_argument(operation, ": a factor of ", factor, " for ", dtype_name(buffer.dtype),
                           "; only float32 and float64 take one");
  queued_.push_back({operation, rank, dtype, factor, std::move(call)});
}

void NcclGroup::all_reduce(uint64_t rank, const TransportBuffer& buffer, double factor, cudaStream_t stream) {
  queue("ncclAllReduce", rank, buffer, factor, [=, this](ncclComm_t communicator, ncclRedOp_t op) {
    return nccl_.all_reduce(buffer.data, buffer.data, static_cast<size_t>(buffer.numel), type_of(buffer.dtype), op, communicator,
                            stream);
  });
}

void NcclGroup::reduce_scatter(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, double factor,
                               cudaStream_t stream) {
  queue("ncclReduceScatter", rank, in, factor, [=, this](ncclComm_t communicator, ncclRedOp_t op) {
    return nccl_.reduce_scatter(in.data, out.data, static_cast<size_t>(out.numel), type_of(in.dtype), op, communicator, stream);
  });
}

void NcclGroup::all_gather(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, cudaStream_t stream) {
  queue("ncclAllGather", rank, in, 1, [=, this](ncclComm_t communicator, ncclRedOp_t) {
    return nccl_.all_gather(in.data, out.data, static_cast<size_t>(in.numel), type_of(in.dtype), communicator, stream);
  });
}

void NcclGroup::broadcast(uint64_t rank, const TransportBuffer& buffer, uint64_t source, cudaStream_t stream) {
  queue("ncclBroadcast", rank, buffer, 1, [=, this](ncclComm_t communicator, ncclRedOp_t) {
    return nccl_.broadcast(buffer.data, buffer.data, static_cast<size_t>(buffer.numel), type_of(buffer.dtype),
                           static_cast<int>(source), communicator, stream);
  });
}

ncclRedOp_t NcclGroup::make_op(const Queued& queued) {
  if (queued.factor == 1) return ncclSum;
  ncclRedOp_t op = ncclSum;
  auto as_float = static_cast<float>(queued.factor);
  double as_double = queued.factor;
  void* scalar = queued.dtype == ncclFloat32 ? static_cast<void*>(&as_float) : static_cast<void*>(&as_double);
  check(nccl_.create_scaled_sum(&op, scalar, queued.dtype, ncclScalarHostImmediate, communicators_[queued.rank]),
        "ncclRedOpCreatePreMulSum", queued.rank);
  return op;
}

void NcclGroup::end() {
  const std::lock_guard lock(mutex_);
  if (!std::exchange(is_open_, false)) throw failed_precondition("the end of a group that was not begun");
  refuse_if_over();
  int device_before = 0;
  nccl_.get_device(&device_before);
  std::vector<ncclRedOp_t> ops;
  for (const Queued& one : queued_) ops.push_back(make_op(one));
  check(nccl_.group_start(), "ncclGroupStart", 0);
  for (size_t i = 0; i < queued_.size(); ++i) {
    use_device(queued_[i].rank);
    check(queued_[i].call(communicators_[queued_[i].rank], ops[i]), queued_[i].operation, queued_[i].rank);
  }
  check(nccl_.group_end(), "ncclGroupEnd", 0);
  settle("a group of collectives", now_ns() + longest_settling_ns);
  for (size_t i = 0; i < queued_.size(); ++i) {
    if (ops[i] != ncclSum) check(nccl_.destroy_op(ops[i], communicators_[queued_[i].rank]), "ncclRedOpDestroy", queued_[i].rank);
  }
  nccl_.set_device(device_before);
}

// ---- errors

// Waits until no communicator is at work on what it was given.
void NcclGroup::settle(const char* operation, uint64_t deadline_ns) {
  while (true) {
    std::vector<std::string> busy;
    uint64_t first_busy = 0;
    for (uint64_t rank = 0; rank < communicators_.size(); ++rank) {
      ncclResult_t state = ncclSuccess;
      check(nccl_.get_async_error(communicators_[rank], &state), "ncclCommGetAsyncError", rank);
      if (state == ncclInProgress) {
        if (busy.empty()) first_busy = rank;
        busy.push_back(device_name(devices_[rank]));
      } else {
        check(state, operation, rank);
      }
    }
    if (busy.empty()) return;
    refuse_if_over();
    if (deadline_ns != 0 && now_ns() >= deadline_ns) {
      fail(STG_DEADLINE_EXCEEDED, concat(operation, ": the deadline passed while ", join(busy), " was not ready"), first_busy);
    }
    std::this_thread::sleep_for(pause);
  }
}

void NcclGroup::check(ncclResult_t result, const char* operation, uint64_t rank) {
  if (result == ncclSuccess || result == ncclInProgress) return;
  const char* last = nccl_.last_error(communicators_[rank]);
  const std::string more = last == nullptr || *last == '\0' ? "" : concat(" (", last, ")");
  fail(result == ncclInvalidArgument ? STG_INVALID_ARGUMENT : STG_INTERNAL,
       concat(operation, ": ", nccl_.error_string(result), more), rank);
}

void NcclGroup::fail(uint32_t code, const std::string& what, uint64_t rank) {
  abort();
  Error error{code, concat("rank ", rank, " on ", device_name(devices_[rank]), ": ", what)};
  error.device = devices_[rank];
  throw error;
}

void NcclGroup::poll() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_aborted_.load()) return;  // who is at work there finds it
  for (uint64_t rank = 0; rank < communicators_.size(); ++rank) {
    ncclResult_t state = ncclSuccess;
    check(nccl_.get_async_error(communicators_[rank], &state), "ncclCommGetAsyncError", rank);
    check(state, "a collective", rank);
  }
}

void NcclGroup::abort() noexcept {
  if (is_aborted_.exchange(true)) return;
  const std::lock_guard lock(mutex_);  // who settles sees the flag, and leaves
  abort_all();
}

void NcclGroup::abort_all() noexcept {
  nccl_.group_start();
  for (ncclComm_t& communicator : communicators_) {
    if (communicator != nullptr) nccl_.abort(std::exchange(communicator, nullptr));
  }
  nccl_.group_end();
}

}  // namespace stratagem
