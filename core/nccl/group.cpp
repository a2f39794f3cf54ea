// SPDX-License-Identifier: Apache-2.0
#include "nccl/group.hpp"

#include <future>
#include <utility>

#include "base/dlpack.hpp"

namespace stratagem {

namespace {

constexpr uint64_t longest_taking_ns = 300'000'000'000;  // for NCCL to take a group; the first one connects the devices
constexpr uint64_t longest_closing_ns = 60'000'000'000;  // of a group whose work is done

ncclDataType_t type_of(stg_dtype dtype) {
  if (same_dtype(dtype, float32)) return ncclFloat32;
  if (same_dtype(dtype, float64)) return ncclFloat64;
  if (same_dtype(dtype, {STG_DTYPE_FLOAT, 16, 1})) return ncclFloat16;
  if (same_dtype(dtype, {STG_DTYPE_BFLOAT, 16, 1})) return ncclBfloat16;
  throw invalid_argument("NCCL is not given ", dtype_name(dtype), "; float16, bfloat16, float32 and float64 are possible");
}

bool is_error(ncclResult_t result) { return result != ncclSuccess && result != ncclInProgress; }

uint32_t code_of(ncclResult_t result) { return result == ncclInvalidArgument ? STG_INVALID_ARGUMENT : STG_INTERNAL; }

}  // namespace

// ---- life

// In a thread of its own, since each communicator is made for the thread's current device: to set back the caller's would make a context
// on it where there was none.
NcclGroup::NcclGroup(const NcclFunctions& nccl, std::vector<stg_device> devices, const NcclSettings& settings,
                     uint64_t deadline_ns)
    : nccl_(nccl), devices_(std::move(devices)), communicators_(devices_.size()) {
  std::async(std::launch::async, [&] {
    const std::lock_guard lock(mutex_);
    in_nccl([&] { start(settings.config(), deadline_ns); });
  }).get();
}

void NcclGroup::start(ncclConfig_t config, uint64_t deadline_ns) {
  constexpr const char* operation = "ncclCommInitRankConfig";
  ncclUniqueId id{};
  check_all(nccl_.get_unique_id(&id), "ncclGetUniqueId");
  in_one_group(operation, [&] {
    for (uint64_t rank = 0; rank < devices_.size(); ++rank) {
      const cudaError_t result = nccl_.set_device(devices_[rank].index);
      if (result != cudaSuccess) throw failed_on(rank, STG_INTERNAL, concat("cudaSetDevice: ", nccl_.cuda_error_string(result)));
      check(nccl_.init_rank(&communicators_[rank], static_cast<int>(devices_.size()), id, static_cast<int>(rank), &config),
            operation, rank);
    }
  });
  settle(operation, deadline_ns);
}

NcclGroup::~NcclGroup() {
  const std::lock_guard lock(mutex_);
  if (is_over_.load()) {
    abort_all();
    return;
  }
  try {
    in_nccl([&] { finish(); });
  } catch (...) {  // aborted by it; nobody is left who could be told
  }
}

void NcclGroup::finish() {
  in_one_group("ncclCommFinalize", [&] {
    for (uint64_t rank = 0; rank < devices_.size(); ++rank) check(nccl_.finalize(communicators_[rank]), "ncclCommFinalize", rank);
  });
  settle("ncclCommFinalize", nccl_.now_ns() + longest_closing_ns);
  in_one_group("ncclCommDestroy", [&] {  // each waits for the others
    for (ncclComm_t& communicator : communicators_) nccl_.destroy(std::exchange(communicator, nullptr));
  });
}

void NcclGroup::abort() noexcept {
  is_over_.store(true);  // whoever waits in settle sees it, and leaves
  const std::lock_guard lock(mutex_);
  abort_all();
}

void NcclGroup::abort_all() noexcept {
  is_over_.store(true);
  std::vector<ncclComm_t> communicators;
  std::swap(communicators, communicators_);
  std::erase(communicators, nullptr);
  if (communicators.empty()) return;
  nccl_.group_start();  // each waits for the others
  for (ncclComm_t communicator : communicators) nccl_.abort(communicator);
  nccl_.group_end();
}

// ---- collectives

void NcclGroup::begin() {
  refuse_if_over();
  queued_.clear();
  is_open_ = true;
}

void NcclGroup::queue(Queued queued, const TransportBuffer& buffer) {
  if (!is_open_) throw failed_precondition(queued.operation, ": no group was begun");
  if (queued.rank >= devices_.size())
    throw invalid_argument(queued.operation, ": rank ", queued.rank, "; there are ", devices_.size(), ", from 0");
  queued.dtype = type_of(buffer.dtype);
  const bool has_factor = queued.factor.number != 1 || queued.factor.on_device != nullptr;
  if (has_factor && queued.dtype != ncclFloat32 && queued.dtype != ncclFloat64)
    throw invalid_argument(queued.operation, ": a factor ",
                           queued.factor.on_device != nullptr ? "on its device" : concat("of ", queued.factor.number), " for ",
                           dtype_name(buffer.dtype), "; only float32 and float64 take one");
  queued_.push_back(std::move(queued));
}

void NcclGroup::all_reduce(uint64_t rank, const TransportBuffer& buffer, TransportFactor factor, cudaStream_t stream) {
  const auto call = [=, this](ncclComm_t communicator, ncclRedOp_t op) {
    return nccl_.all_reduce(buffer.data, buffer.data, static_cast<size_t>(buffer.numel), type_of(buffer.dtype), op, communicator,
                            stream);
  };
  queue({"ncclAllReduce", rank, {}, factor, call}, buffer);
}

void NcclGroup::reduce_scatter(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, TransportFactor factor,
                               cudaStream_t stream) {
  const auto call = [=, this](ncclComm_t communicator, ncclRedOp_t op) {
    return nccl_.reduce_scatter(in.data, out.data, static_cast<size_t>(out.numel), type_of(in.dtype), op, communicator, stream);
  };
  queue({"ncclReduceScatter", rank, {}, factor, call}, in);
}

void NcclGroup::all_gather(uint64_t rank, const TransportBuffer& in, const TransportBuffer& out, cudaStream_t stream) {
  const auto call = [=, this](ncclComm_t communicator, ncclRedOp_t) {
    return nccl_.all_gather(in.data, out.data, static_cast<size_t>(in.numel), type_of(in.dtype), communicator, stream);
  };
  queue({"ncclAllGather", rank, {}, 1, call}, in);
}

void NcclGroup::broadcast(uint64_t rank, const TransportBuffer& buffer, uint64_t source, cudaStream_t stream) {
  if (source >= devices_.size())
    throw invalid_argument("ncclBroadcast: from rank ", source, "; there are ", devices_.size(), ", from 0");
  const auto call = [=, this](ncclComm_t communicator, ncclRedOp_t) {
    return nccl_.broadcast(buffer.data, buffer.data, static_cast<size_t>(buffer.numel), type_of(buffer.dtype),
                           static_cast<int>(source), communicator, stream);
  };
  queue({"ncclBroadcast", rank, {}, 1, call}, buffer);
}

void NcclGroup::end() {
  if (!std::exchange(is_open_, false)) throw failed_precondition("the end of a group that was not begun");
  const std::lock_guard lock(mutex_);
  in_nccl([&] {
    if (!queued_.empty()) send_queued();
  });
}

void NcclGroup::send_queued() {
  const char* operation = queued_.front().operation;
  std::vector<ncclRedOp_t> ops;
  for (const Queued& one : queued_) ops.push_back(make_op(one));
  in_one_group(operation, [&] {
    for (size_t i = 0; i < queued_.size(); ++i) {
      check(queued_[i].call(communicators_[queued_[i].rank], ops[i]), queued_[i].operation, queued_[i].rank);
    }
  });
  settle(operation, nccl_.now_ns() + longest_taking_ns);
  for (size_t i = 0; i < queued_.size(); ++i) {  // NCCL has read them
    if (ops[i] != ncclSum) check(nccl_.destroy_op(ops[i], communicators_[queued_[i].rank]), "ncclRedOpDestroy", queued_[i].rank);
  }
}

ncclRedOp_t NcclGroup::make_op(const Queued& queued) {
  const TransportFactor& factor = queued.factor;
  if (factor.number == 1 && factor.on_device == nullptr) return ncclSum;
  ncclRedOp_t op = ncclSum;
  auto as_float = static_cast<float>(factor.number);
  double as_double = factor.number;
  void* scalar = queued.dtype == ncclFloat32 ? static_cast<void*>(&as_float) : static_cast<void*>(&as_double);
  ncclScalarResidence_t residence = ncclScalarHostImmediate;
  if (factor.on_device != nullptr) {
    scalar = const_cast<void*>(factor.on_device);
    residence = ncclScalarDevice;
  }
  check(nccl_.create_scaled_sum(&op, scalar, queued.dtype, residence, communicators_[queued.rank]), "ncclRedOpCreatePreMulSum",
        queued.rank);
  return op;
}

void NcclGroup::poll() {
  const std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || is_over_.load()) return;  // who is at work there finds it
  in_nccl([&] {
    for (uint64_t rank = 0; rank < communicators_.size(); ++rank) {
      ncclResult_t state = ncclSuccess;
      check(nccl_.get_async_error(communicators_[rank], &state), "ncclCommGetAsyncError", rank);
      check(state, "a collective", rank);
    }
  });
}

// ---- how NCCL is called

// With the mutex held.
void NcclGroup::in_nccl(const std::function<void()>& body) {
  refuse_if_over();
  try {
    body();
  } catch (...) {
    abort_all();
    throw;
  }
}

// NCCL counts groups by thread: one that an error left open would keep all that the thread gives NCCL afterwards, the aborts first.
void NcclGroup::in_one_group(const char* operation, const std::function<void()>& calls) {
  check_all(nccl_.group_start(), concat("ncclGroupStart of ", operation));
  try {
    calls();
  } catch (...) {
    nccl_.group_end();
    throw;
  }
  check_all(nccl_.group_end(), concat("ncclGroupEnd of ", operation));
}

// Waits until no communicator is at work on what it was given.
void NcclGroup::settle(const char* operation, uint64_t deadline_ns) {
  while (true) {
    std::vector<uint64_t> busy;
    for (uint64_t rank = 0; rank < communicators_.size(); ++rank) {
      ncclResult_t state = ncclSuccess;
      check(nccl_.get_async_error(communicators_[rank], &state), "ncclCommGetAsyncError", rank);
      check(state, operation, rank);
      if (state == ncclInProgress) busy.push_back(rank);
    }
    if (busy.empty()) return;
    refuse_if_over();
    if (deadline_ns != 0 && nccl_.now_ns() >= deadline_ns) {
      std::vector<std::string> names;
      for (const uint64_t rank : busy) names.push_back(device_name(devices_[rank]));
      throw failed_on(busy.front(), STG_DEADLINE_EXCEEDED,
                      concat(operation, ": the deadline has passed; not ready yet: ", join(names)));
    }
    nccl_.rest();
  }
}

// ---- errors

void NcclGroup::refuse_if_over() const {
  if (is_over_.load()) throw Error{STG_ABORTED, "NCCL's communicators were aborted; make the strategy anew"};
}

void NcclGroup::check(ncclResult_t result, const char* operation, uint64_t rank) const {
  if (is_error(result)) throw failed_on(rank, code_of(result), concat(operation, ": ", text_of(result, communicators_[rank])));
}

// Of a call for all ranks.
void NcclGroup::check_all(ncclResult_t result, const std::string& operation) const {
  if (!is_error(result)) return;
  std::vector<std::string> names;
  for (const stg_device& device : devices_) names.push_back(device_name(device));
  throw Error{code_of(result), concat("on ", join(names), ": ", operation, ": ", text_of(result, communicators_.front()))};
}

std::string NcclGroup::text_of(ncclResult_t result, ncclComm_t communicator) const {
  const char* last = nccl_.last_error(communicator);
  return concat(nccl_.error_string(result), last == nullptr || *last == '\0' ? "" : concat(" (", last, ")"));
}

Error NcclGroup::failed_on(uint64_t rank, uint32_t code, const std::string& what) const {
  Error error{code, concat("rank ", rank, " on ", device_name(devices_[rank]), ": ", what)};
  error.device = devices_[rank];
  return error;
}

}  // namespace stratagem
