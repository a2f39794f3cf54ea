// SPDX-License-Identifier: Apache-2.0
//
// The table of functions over the emulated collectives. It is as strict as NCCL is where NCCL would hang, crash or be silent: what ranks
// ask for in a group must match, buffers must be in the rank's own memory, and a group must be idle when it is closed.
#include <optional>
#include <utility>

#include "accelerator/emulated/collective.hpp"
#include "accelerator/emulated/memory.hpp"
#include "base/error.hpp"
#include "base/json.hpp"

#ifndef STRATAGEM_BUILD_ID
#define STRATAGEM_BUILD_ID "test"
#endif

namespace stratagem {

struct TransportGroup {
  std::shared_ptr<emulated::Ranks> ranks;
  std::string label;
  std::vector<std::vector<emulated::Part>> queued;  // since begin, by rank
  std::optional<std::thread::id> thread;            // that is between begin and end
  std::vector<emulated::Launched> launched;
  bool is_broken = false;
};

}  // namespace stratagem

namespace emulated {

using stratagem::concat;
using stratagem::Error;
using stratagem::TransportBuffer;
using stratagem::TransportGroup;

namespace {

struct Calls {
  std::mutex mutex;
  std::vector<std::string> log;
  uint64_t until_failure = 0;
  std::string why;
};

Calls& calls() {
  static auto* instance = new Calls;
  return *instance;
}

Error transport_error(uint32_t code, int device, const std::string& text) {
  Error error(code, text);
  if (device >= 0) error.device = {STG_DEVICE_EXTENSION, device};
  return error;
}

void note(const std::string& call) {
  const std::lock_guard lock(calls().mutex);
  calls().log.push_back(call);
  if (calls().until_failure > 0 && --calls().until_failure == 0)
    throw transport_error(STG_INTERNAL, -1, concat(call, " of the emulated transport: ", calls().why));
}

// A function of the table that works on a group: after an error nothing but abort and close is left.
template <class Body>
stg_error* in_group(TransportGroup* group, Body&& body) {
  return stratagem::guard([&] {
    if (group->is_broken) throw stratagem::failed_precondition("the group had an error; it can be aborted and closed");
    try {
      body();
    } catch (const c10::Error& error) {
      group->is_broken = true;
      throw Error(STG_INTERNAL, error.what_without_backtrace());
    } catch (...) {
      group->is_broken = true;
      throw;
    }
  });
}

std::string read_label(const char* settings_json) {
  const nlohmann::json settings = stratagem::parse_json(settings_json, "settings of the emulated transport");
  std::string label;
  for (const auto& [key, value] : settings.items()) {
    if (key != "label") throw stratagem::invalid_argument("the emulated transport has no setting '", key, "'; it has: label");
    label = value.get<std::string>();
  }
  return label;
}

std::vector<int> read_devices(const stg_device* devices, uint64_t num) {
  std::vector<int> all;
  for (uint64_t i = 0; i < num; ++i) {
    const stg_device& device = devices[i];
    if (device.kind != STG_DEVICE_EXTENSION || device.index < 0 || device.index >= num_devices())
      throw stratagem::invalid_argument("there is no emulated device of kind ", device.kind, " and index ", device.index);
    if (std::find(all.begin(), all.end(), device.index) != all.end())
      throw stratagem::invalid_argument(name_of(device.index), " is in the group twice");
    all.push_back(device.index);
  }
  if (all.empty()) throw stratagem::invalid_argument("a group of no devices");
  return all;
}

void await_ranks(const std::vector<int>& devices, uint64_t deadline_ns) {
  Meeting& all = meeting();
  std::unique_lock lock(all.mutex);
  const auto missing = [&]() -> std::optional<uint64_t> {
    for (uint64_t rank = 0; rank < devices.size(); ++rank)
      if (all.held.contains(rank)) return rank;
    return {};
  };
  const auto is_complete = [&] { return !missing(); };
  if (deadline_ns == 0) return all.changed.wait(lock, is_complete);
  const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
  if (all.changed.wait_until(lock, deadline, is_complete)) return;
  const int device = devices[*missing()];
  throw transport_error(STG_DEADLINE_EXCEEDED, device,
                        concat("rank ", *missing(), " on ", name_of(device), " was not ready in time"));
}

// ---- the table

stg_error* open_group(const stg_device* devices, uint64_t num, const char* settings_json, uint64_t deadline_ns,
                      TransportGroup** out) {
  return stratagem::guard([&] {
    auto made = std::make_unique<TransportGroup>();
    made->label = read_label(settings_json);
    made->ranks = std::make_shared<Ranks>(read_devices(devices, num));
    note(concat("open ", made->label, made->label.empty() ? "" : " ", num));
    await_ranks(made->ranks->devices, deadline_ns);
    made->queued.resize(num);
    *out = made.release();
  });
}

void abort_group(TransportGroup* group) {
  const std::lock_guard lock(meeting().mutex);
  group->ranks->is_aborted = true;
  meeting().changed.notify_all();
}

void close_group(TransportGroup* group) {
  const std::unique_ptr<TransportGroup> own(group);
  {
    const std::lock_guard lock(meeting().mutex);
    if (group->ranks->is_aborted) return;
  }
  const std::lock_guard lock(world());
  for (const Launched& one : group->launched)
    if (all_hosts().at(one.queue->number) < one.time)
      report(concat("close of a group: nobody has waited for its collectives on ", one.queue->name()));
}

stg_error* poll_group(TransportGroup* group) {
  return stratagem::guard([&] {
    const std::vector<int>& devices = group->ranks->devices;
    for (uint64_t rank = 0; rank < devices.size(); ++rank) {
      const std::string why = failure(devices[rank]);
      if (!why.empty()) throw transport_error(STG_INTERNAL, devices[rank], concat(name_of(devices[rank]), ": ", why));
      const std::lock_guard lock(meeting().mutex);
      const auto failed = meeting().failed.find(rank);
      if (failed == meeting().failed.end()) continue;
      throw transport_error(STG_INTERNAL, devices[rank],
                            concat("rank ", rank, " on ", name_of(devices[rank]), ": ", failed->second));
    }
  });
}

stg_error* begin(TransportGroup* group) {
  return in_group(group, [&] {
    note("begin");
    if (group->thread) throw stratagem::failed_precondition("begin: a group was begun already");
    group->thread = std::this_thread::get_id();
  });
}

void check_same(const Part& first, const Part& other, uint64_t rank) {
  if (first.kind == other.kind && first.dtype == other.dtype && first.in.sizes == other.in.sizes &&
      first.out.sizes == other.out.sizes && first.source == other.source)
    return;
  const auto describe = [](const Part& part) {
    return concat(name_of(part.kind), " of ", part.in.sizes[0], " ", c10::toString(part.dtype), " from ", part.source);
  };
  throw stratagem::invalid_argument("rank ", rank, " asks for ", describe(other), ", rank 0 for ", describe(first));
}

stg_error* end(TransportGroup* group) {
  return in_group(group, [&] {
    note("end");
    if (group->thread != std::this_thread::get_id()) throw stratagem::failed_precondition("end: this thread has begun no group");
    group->thread.reset();
    auto queued = std::exchange(group->queued, std::vector<std::vector<Part>>(group->ranks->devices.size()));
    for (uint64_t rank = 1; rank < queued.size(); ++rank) {
      if (queued[rank].size() != queued[0].size())
        throw stratagem::invalid_argument("rank ", rank, " asks for ", queued[rank].size(), " collectives, rank 0 for ",
                                          queued[0].size());
      for (size_t i = 0; i < queued[0].size(); ++i) check_same(queued[0][i], queued[rank][i], rank);
    }
    std::erase_if(group->launched, [](const Launched& one) {
      const std::lock_guard lock(world());
      return all_hosts().at(one.queue->number) >= one.time;
    });
    for (size_t i = 0; i < queued[0].size(); ++i) {
      std::vector<Part> parts;
      for (auto& of_rank : queued) parts.push_back(std::move(of_rank[i]));
      for (const Launched& one : launch_collective(group->ranks, std::move(parts))) group->launched.push_back(one);
    }
  });
}

at::ScalarType read_dtype(stg_dtype dtype) {
  if (dtype.code == STG_DTYPE_FLOAT && dtype.bits == 16) return at::kHalf;
  if (dtype.code == STG_DTYPE_BFLOAT && dtype.bits == 16) return at::kBFloat16;
  if (dtype.code == STG_DTYPE_FLOAT && dtype.bits == 32) return at::kFloat;
  if (dtype.code == STG_DTYPE_FLOAT && dtype.bits == 64) return at::kDouble;
  throw stratagem::invalid_argument("the emulated transport has no elements of code ", int{dtype.code}, " and ", int{dtype.bits},
                                    " bits");
}

Plain read_buffer(const TransportBuffer& buffer, int device, at::ScalarType dtype, bool is_write, std::vector<Span>& spans) {
  if (buffer.numel < 0 || (buffer.numel > 0 && device_of_address(buffer.data) != device))
    throw transport_error(STG_INVALID_ARGUMENT, device,
                          concat("a buffer of ", buffer.numel, " elements isn't in memory of ", name_of(device)));
  spans.push_back({buffer.data, static_cast<size_t>(buffer.numel) * c10::elementSize(dtype), is_write});
  return {memory_of(buffer.data), {buffer.numel}, {1}, dtype};
}

struct Wish {
  Kind kind;
  const TransportBuffer& in;
  const TransportBuffer& out;
  double factor = 1;
  uint64_t source = 0;
};

// As NCCL: buffers that overlap are one buffer, the rank's part in its place.
void check_in_place(const Wish& wish, uint64_t rank, int64_t element_bytes) {
  if (wish.kind != Kind::reduce_scatter && wish.kind != Kind::all_gather) return;
  const bool scatters = wish.kind == Kind::reduce_scatter;
  const TransportBuffer& whole = scatters ? wish.in : wish.out;
  const TransportBuffer& part = scatters ? wish.out : wish.in;
  const int64_t offset_bytes = static_cast<const char*>(part.data) - static_cast<const char*>(whole.data);
  const bool overlaps = offset_bytes > -part.numel * element_bytes && offset_bytes < whole.numel * element_bytes;
  const int64_t place_bytes = static_cast<int64_t>(rank) * part.numel * element_bytes;
  if (overlaps && offset_bytes != place_bytes)
    throw stratagem::invalid_argument(name_of(wish.kind), ": the part of rank ", rank, " is ", offset_bytes,
                                      " bytes into its whole; in place it must be ", place_bytes);
}

stg_error* add(TransportGroup* group, uint64_t rank, const Wish& wish, c10::StreamData3 stream) {
  return in_group(group, [&] {
    note(concat(name_of(wish.kind), " rank ", rank, " numel ", wish.in.numel, " dtype ", int{wish.in.dtype.code}, "/",
                int{wish.in.dtype.bits}, " factor ", wish.factor, " stream ", stream.stream_id));
    if (group->thread != std::this_thread::get_id())
      throw stratagem::failed_precondition(name_of(wish.kind), ": this thread has begun no group");
    if (rank >= group->queued.size())
      throw stratagem::invalid_argument("there is no rank ", rank, " in a group of ", group->queued.size());
    if (wish.source >= group->queued.size())
      throw stratagem::invalid_argument("there is no rank ", wish.source, " to broadcast from");
    const int device = group->ranks->devices[rank];
    Part part{wish.kind, read_dtype(wish.in.dtype), {}, {}, {}, wish.factor, wish.source, nullptr};
    if (part.dtype != read_dtype(wish.out.dtype))
      throw stratagem::invalid_argument("elements that come in aren't those that go out");
    if (wish.factor != 1 && part.dtype != at::kFloat && part.dtype != at::kDouble)
      throw stratagem::invalid_argument("a factor of ", wish.factor, " for elements of ", c10::toString(part.dtype));
    if (stream.device_type != c10::DeviceType::PrivateUse1 || stream.device_index != device)
      throw transport_error(STG_INVALID_ARGUMENT, device,
                            concat("rank ", rank, " is on ", name_of(device), ", its stream isn't"));
    const auto ranks = static_cast<int64_t>(group->queued.size());
    if ((wish.kind == Kind::reduce_scatter && wish.in.numel != ranks * wish.out.numel) ||
        (wish.kind == Kind::all_gather && wish.out.numel != ranks * wish.in.numel))
      throw stratagem::invalid_argument(name_of(wish.kind), ": ", wish.in.numel, " elements in and ", wish.out.numel, " out for ",
                                        ranks, " ranks");
    check_in_place(wish, rank, static_cast<int64_t>(c10::elementSize(part.dtype)));
    part.in = read_buffer(wish.in, device, part.dtype, false, part.spans);
    part.out = read_buffer(wish.out, device, part.dtype, true, part.spans);
    if (wish.kind == Kind::broadcast) part.spans.erase(part.spans.begin() + (rank == wish.source ? 1 : 0));
    part.queue = &queue_of(c10::Stream::unpack3(stream.stream_id, stream.device_index, stream.device_type));
    group->queued[rank].push_back(std::move(part));
  });
}

stg_error* all_reduce(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, double factor,
                      c10::StreamData3 stream) {
  return add(group, rank, {Kind::all_reduce, *buffer, *buffer, factor}, stream);
}

stg_error* reduce_scatter(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                          double factor, c10::StreamData3 stream) {
  return add(group, rank, {Kind::reduce_scatter, *in, *out, factor}, stream);
}

stg_error* all_gather(TransportGroup* group, uint64_t rank, const TransportBuffer* in, const TransportBuffer* out,
                      c10::StreamData3 stream) {
  return add(group, rank, {Kind::all_gather, *in, *out}, stream);
}

stg_error* broadcast(TransportGroup* group, uint64_t rank, const TransportBuffer* buffer, uint64_t source,
                     c10::StreamData3 stream) {
  return add(group, rank, {Kind::broadcast, *buffer, *buffer, 1, source}, stream);
}

// ---- streams: the handle is the number; null, as with CUDA, the default one

stg_error* wrap_stream(const stg_stream* stream, c10::StreamData3* out) {
  return stratagem::guard([&] {
    if (stream->device.kind != STG_DEVICE_EXTENSION || stream->device.index < 0 || stream->device.index >= num_devices())
      throw stratagem::invalid_argument("a stream of kind ", stream->device.kind, " and index ", stream->device.index,
                                        " is not an emulated device's");
    if (stream->kind != STG_STREAM_HANDLE)
      throw stratagem::unimplemented("emulated devices have no default stream per thread; give the handle of a stream");
    const auto id = static_cast<int64_t>(reinterpret_cast<intptr_t>(stream->handle));
    if (id < 0 || id > streams_per_pool) throw stratagem::invalid_argument("there is no stream ", id, " of an emulated device");
    *out = {id, static_cast<c10::DeviceIndex>(stream->device.index), c10::DeviceType::PrivateUse1};
  });
}

stg_error* native_stream(c10::StreamData3 stream, stg_stream* out) {
  return stratagem::guard([&] {
    if (stream.device_type != c10::DeviceType::PrivateUse1)
      throw stratagem::invalid_argument("a stream of another kind of device");
    *out = {{STG_DEVICE_EXTENSION, stream.device_index}, reinterpret_cast<void*>(stream.stream_id), STG_STREAM_HANDLE, 0};
  });
}

}  // namespace

const stratagem::TransportApi& transport() {
  static const stratagem::TransportApi table{sizeof(stratagem::TransportApi),
                                             STRATAGEM_BUILD_ID,
                                             "emulated transport",
                                             &open_group,
                                             &close_group,
                                             &abort_group,
                                             &poll_group,
                                             &begin,
                                             &end,
                                             &all_reduce,
                                             &reduce_scatter,
                                             &all_gather,
                                             &broadcast,
                                             &wrap_stream,
                                             &native_stream};
  return table;
}

void hold_rank(uint64_t rank) {
  const std::lock_guard lock(meeting().mutex);
  meeting().held.insert(rank);
}

void release_ranks() {
  const std::lock_guard lock(meeting().mutex);
  meeting().held.clear();
  meeting().failed.clear();
  meeting().changed.notify_all();
}

void fail_transport(uint64_t rank, std::string why) {
  const std::lock_guard lock(meeting().mutex);
  meeting().failed[rank] = std::move(why);
}

void fail_transport_call(uint64_t n, std::string why) {
  const std::lock_guard lock(calls().mutex);
  calls().until_failure = n;
  calls().why = std::move(why);
}

std::vector<std::string> take_transport_log() {
  const std::lock_guard lock(calls().mutex);
  return std::exchange(calls().log, {});
}

stratagem::Accelerator::Found find() {
  stratagem::Accelerator::Found found;
  for (int i = 0; i < num_devices(); ++i) found.names.push_back(concat("emulated device ", i));
  return found;
}

const stratagem::TransportApi& open() { return transport(); }

}  // namespace emulated
