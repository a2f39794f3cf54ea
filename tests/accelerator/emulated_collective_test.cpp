// SPDX-License-Identifier: Apache-2.0
//
// The emulated transport: right sums, what it refuses, and what the detector sees of it.
#include <cstring>
#include <ctime>

#include "accelerator/emulated_support.hpp"
#include "torch/dtypes.hpp"

namespace {

using stratagem::TransportBuffer;
using stratagem::TransportGroup;

std::string text_of(stg_error* error) {
  if (error == nullptr) return "";
  std::string text(error->message.data, error->message.size_bytes);
  error->release(error);
  return text;
}

const stratagem::TransportApi& api() { return emulated::transport(); }

uint64_t in_ms(uint64_t ms) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec) + ms * 1'000'000;
}

std::vector<stg_device> devices(int num) {
  std::vector<stg_device> all;
  for (int i = 0; i < num; ++i) all.push_back({STG_DEVICE_EXTENSION, i});
  return all;
}

TransportBuffer buffer(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.numel(), stratagem::from_scalar_type(tensor.scalar_type())};
}

struct Group {
  TransportGroup* group = nullptr;
  explicit Group(int num) {
    const auto list = devices(num);
    REQUIRE(text_of(api().open(list.data(), list.size(), "{}", 0, &group)) == "");
  }
  ~Group() {
    api().abort(group);
    api().close(group);
  }
};

void all_reduce(TransportGroup* group, const std::vector<at::Tensor>& tensors, const std::vector<c10::Stream>& streams,
                double factor) {
  REQUIRE(text_of(api().begin(group)) == "");
  for (size_t rank = 0; rank < tensors.size(); ++rank) {
    const TransportBuffer its = buffer(tensors[rank]);
    REQUIRE(text_of(api().all_reduce(group, rank, &its, factor, streams[rank].pack3())) == "");
  }
  REQUIRE(text_of(api().end(group)) == "");
}

std::vector<at::Tensor> ranks(int num, int64_t numel, at::ScalarType dtype) {
  std::vector<at::Tensor> all;
  for (int i = 0; i < num; ++i) all.push_back((at::arange(numel, on(i).dtype(at::kDouble)) * 0.3 + i).to(dtype));
  return all;
}

}  // namespace

TEST_CASE("emulated transport: Sums are those of all ranks, the same bits on each") {
  const Fresh fresh;
  emulated::set_delays(3, std::chrono::microseconds(500));
  const int num = GENERATE(1, 2, 4);
  const at::ScalarType dtype = GENERATE(at::kFloat, at::kDouble, at::kHalf, at::kBFloat16);
  const Group group(num);
  const auto tensors = ranks(num, 100, dtype);
  std::vector<c10::Stream> streams;
  for (int i = 0; i < num; ++i) streams.push_back(default_stream(i));
  at::Tensor expected = at::zeros({100}, at::kDouble);
  for (const at::Tensor& tensor : tensors) expected += on_host(tensor).to(at::kDouble);
  const double factor = dtype == at::kFloat || dtype == at::kDouble ? 0.25 : 1;
  all_reduce(group.group, tensors, streams, factor);
  for (const at::Tensor& tensor : tensors) {
    REQUIRE(at::allclose(on_host(tensor).to(at::kDouble), expected * factor, dtype == at::kBFloat16 ? 1e-2 : 1e-3));
    REQUIRE(at::equal(on_host(tensor), on_host(tensors[0])));
  }
  REQUIRE(reports() == "");
}

TEST_CASE("emulated transport: Scatter, gather and broadcast do what they are called") {
  const Fresh fresh;
  const Group group(2);
  const auto whole = ranks(2, 6, at::kFloat);
  const std::vector<at::Tensor> part{at::empty({3}, on(0)), at::empty({3}, on(1))};
  const std::vector<at::Tensor> gathered{at::empty({6}, on(0)), at::empty({6}, on(1))};
  REQUIRE(text_of(api().begin(group.group)) == "");
  for (uint64_t rank : {0u, 1u}) {
    const TransportBuffer in = buffer(whole[rank]);
    const TransportBuffer out = buffer(part[rank]);
    const TransportBuffer all = buffer(gathered[rank]);
    const auto stream = default_stream(static_cast<int>(rank)).pack3();
    REQUIRE(text_of(api().reduce_scatter(group.group, rank, &in, &out, 2, stream)) == "");
    REQUIRE(text_of(api().all_gather(group.group, rank, &out, &all, stream)) == "");
    REQUIRE(text_of(api().broadcast(group.group, rank, &in, 1, stream)) == "");
  }
  REQUIRE(text_of(api().end(group.group)) == "");
  const at::Tensor first = at::arange(6, at::kDouble) * 0.3;
  const at::Tensor sum = ((first + first + 1) * 2).to(at::kFloat);
  for (const at::Tensor& all : gathered) REQUIRE(at::allclose(on_host(all), sum));
  for (const at::Tensor& all : whole) REQUIRE(at::allclose(on_host(all), (first + 1).to(at::kFloat)));
  REQUIRE(reports() == "");
  const auto log = emulated::take_transport_log();
  REQUIRE(log.size() == 9);
  REQUIRE(log[0] == "open 2");
  REQUIRE(log[2] == "reduce_scatter rank 0 numel 6 dtype 2/32 factor 2 stream 0");
  REQUIRE(log.back() == "end");
}

TEST_CASE("emulated transport: A wait that is missing before or after is reported") {
  const Fresh fresh;
  const bool before = GENERATE(true, false);
  const bool after = GENERATE(true, false);
  const Group group(2);
  const auto tensors = ranks(2, 10, at::kFloat);
  const std::vector<c10::Stream> streams{new_stream(0), new_stream(1)};
  if (before)
    for (int i = 0; i < 2; ++i) order(default_stream(i), streams[i]);
  all_reduce(group.group, tensors, streams, 1);
  const std::string found_before = reports();
  if (after)
    for (int i = 0; i < 2; ++i) order(streams[i], default_stream(i));
  for (const at::Tensor& tensor : tensors) tensor.add_(1);
  const std::string found_after = reports();
  REQUIRE((found_before == "") == before);
  REQUIRE((found_after == "") == after);
  if (!before) REQUIRE_THAT(found_before, Catch::Contains("race: all_reduce (rank 1) on " + std::string("emulated:1 stream")));
  if (!after) REQUIRE_THAT(found_after, Catch::Contains("not ordered after all_reduce (rank 0)"));
  for (int i = 0; i < 2; ++i) streams[i].synchronize();
}

TEST_CASE("emulated transport: A rank that doesn't come holds the others until the group is aborted") {
  const Fresh fresh;
  const Group group(2);
  const auto tensors = ranks(2, 10, at::kFloat);
  emulated::hold_rank(1);
  all_reduce(group.group, tensors, {default_stream(0), default_stream(1)}, 1);
  REQUIRE_FALSE(emulated::is_idle(default_stream(0)));
  REQUIRE_FALSE(emulated::is_idle(default_stream(1)));
  REQUIRE(text_of(api().poll(group.group)) == "");
  api().abort(group.group);
  synchronize(0);
  synchronize(1);
  TransportGroup* late = nullptr;
  const auto list = devices(2);
  REQUIRE_THAT(text_of(api().open(list.data(), 2, "{}", in_ms(10), &late)),
               Catch::Contains("rank 1 on emulated:1 was not ready"));
  REQUIRE(late == nullptr);
}

TEST_CASE("emulated transport: A device or rank that fails is what poll says") {
  const Fresh fresh;
  const Group group(2);
  const auto tensors = ranks(2, 10, at::kFloat);
  synchronize(1);
  emulated::fail_device(1, "no power");
  all_reduce(group.group, tensors, {default_stream(0), default_stream(1)}, 1);
  std::string said;
  while (said.empty()) said = text_of(api().poll(group.group));
  REQUIRE_THAT(said, Catch::Contains("emulated:1: no power (in all_reduce (rank 1))"));
  emulated::heal();
  REQUIRE(text_of(api().poll(group.group)) == "");
  emulated::fail_transport(0, "no link");
  REQUIRE_THAT(text_of(api().poll(group.group)), Catch::Contains("rank 0 on emulated:0: no link"));
  api().abort(group.group);
  synchronize(0);
}

TEST_CASE("emulated transport: Calls that would hang or crash are errors, after which the group is of no use") {
  const Fresh fresh;
  const Group group(2);
  const auto tensors = ranks(2, 10, at::kFloat);
  const TransportBuffer zero = buffer(tensors[0]);
  const TransportBuffer one = buffer(tensors[1].narrow(0, 0, 5));
  const auto stream = [](int i) { return default_stream(i).pack3(); };
  const auto call = [&](uint64_t rank, const TransportBuffer& its, int on_stream) {
    return text_of(api().all_reduce(group.group, rank, &its, 1, stream(on_stream)));
  };
  SECTION("outside of begin and end") { REQUIRE_THAT(call(0, zero, 0), Catch::Contains("begun no group")); }
  SECTION("of different lengths") {
    api().begin(group.group);
    REQUIRE(call(0, zero, 0) == "");
    REQUIRE(call(1, one, 1) == "");
    REQUIRE_THAT(text_of(api().end(group.group)), Catch::Contains("rank 1 asks for all_reduce of 5"));
  }
  SECTION("of one rank only") {
    api().begin(group.group);
    REQUIRE(call(0, zero, 0) == "");
    REQUIRE_THAT(text_of(api().end(group.group)), Catch::Contains("rank 1 asks for 0 collectives, rank 0 for 1"));
  }
  SECTION("with another rank's memory") {
    api().begin(group.group);
    REQUIRE_THAT(call(0, one, 0), Catch::Contains("isn't in memory of emulated:0"));
  }
  SECTION("on another rank's stream") {
    api().begin(group.group);
    REQUIRE_THAT(call(0, zero, 1), Catch::Contains("its stream isn't"));
  }
  SECTION("that a test lets fail") {
    emulated::fail_transport_call(2, "unlucky");
    REQUIRE(text_of(api().begin(group.group)) == "");
    REQUIRE_THAT(call(0, zero, 0), Catch::Contains("unlucky"));
  }
  REQUIRE_THAT(text_of(api().begin(group.group)), Catch::Contains("can be aborted and closed"));
}

TEST_CASE("emulated transport: A group is closed after its work was waited for") {
  const Fresh fresh;
  const bool waits = GENERATE(true, false);
  TransportGroup* group = nullptr;
  const auto list = devices(2);
  REQUIRE(text_of(api().open(list.data(), 2, R"({"label": "gradients"})", 0, &group)) == "");
  const auto tensors = ranks(2, 10, at::kFloat);
  all_reduce(group, tensors, {default_stream(0), default_stream(1)}, 1);
  if (waits)
    for (int i = 0; i < 2; ++i) synchronize(i);
  api().close(group);
  REQUIRE((reports() == "") == waits);
  REQUIRE(emulated::take_transport_log()[0] == "open gradients 2");
}

TEST_CASE("emulated transport: Settings and devices that it doesn't know are refused by name") {
  const Fresh fresh;
  TransportGroup* group = nullptr;
  auto list = devices(2);
  REQUIRE_THAT(text_of(api().open(list.data(), 2, R"({"lable": "x"})", 0, &group)),
               Catch::Contains("no setting 'lable'; it has: label"));
  list[1].index = 0;
  REQUIRE_THAT(text_of(api().open(list.data(), 2, "{}", 0, &group)), Catch::Contains("emulated:0 is in the group twice"));
  list[1].index = 17;
  REQUIRE_THAT(text_of(api().open(list.data(), 2, "{}", 0, &group)), Catch::Contains("index 17"));
}

TEST_CASE("emulated transport: A stream's handle goes both ways") {
  const Fresh fresh;
  const c10::Stream stream = new_stream(1);
  stg_stream native{};
  REQUIRE(text_of(api().native_stream(stream.pack3(), &native)) == "");
  REQUIRE(native.device.index == 1);
  c10::StreamData3 wrapped{};
  REQUIRE(text_of(api().wrap_stream(&native, &wrapped)) == "");
  REQUIRE(c10::Stream::unpack3(wrapped.stream_id, wrapped.device_index, wrapped.device_type) == stream);
  native.kind = STG_STREAM_PER_THREAD_DEFAULT;
  REQUIRE_THAT(text_of(api().wrap_stream(&native, &wrapped)), Catch::Contains("no default stream per thread"));
  native = {{STG_DEVICE_CUDA, 0}, nullptr, STG_STREAM_HANDLE, 0};
  REQUIRE_THAT(text_of(api().wrap_stream(&native, &wrapped)), Catch::Contains("not an emulated device's"));
}
