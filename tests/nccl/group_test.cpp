// SPDX-License-Identifier: Apache-2.0
//
// How a group uses NCCL, with a stand-in for it: order and grouping of calls, errors at each of them, ranks that are late.
#include "nccl/group.hpp"

#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <utility>

#include "base/dlpack.hpp"
#include "nccl/double.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;
using Catch::Contains;

namespace {

constexpr stg_dtype bfloat16{STG_DTYPE_BFLOAT, 16, 1};
constexpr stg_dtype float16{STG_DTYPE_FLOAT, 16, 1};
using Calls = std::vector<std::string>;
using Ints = std::vector<int>;
using Rules = std::set<std::string>;

std::vector<stg_device> devices(uint64_t count) {
  std::vector<stg_device> list;
  for (uint64_t i = 0; i < count; ++i) list.push_back({STG_DEVICE_CUDA, static_cast<int32_t>(i + 3)});
  return list;
}

std::unique_ptr<NcclGroup> open(uint64_t count, uint64_t deadline_ns = 0) {
  return std::make_unique<NcclGroup>(double_functions(), devices(count), NcclSettings("{}"), deadline_ns);
}

// The calls since, but for looks, of which there may be any number.
Calls take_calls(NcclDouble& nccl) {
  Calls calls = std::exchange(nccl.calls, {});
  std::erase_if(calls, [](const std::string& call) { return call.starts_with("look "); });
  return calls;
}

void reduce(NcclGroup& group, uint64_t count, stg_dtype dtype = float32, double factor = 0.25) {
  const TransportBuffer buffer{nullptr, 8, dtype};
  group.begin();
  for (uint64_t rank = 0; rank < count; ++rank) group.all_reduce(rank, buffer, factor, nullptr);
  group.end();
}

void scatter_and_gather(NcclGroup& group, uint64_t count) {
  const TransportBuffer whole{nullptr, static_cast<int64_t>(4 * count), float64}, part{nullptr, 4, float64};
  group.begin();
  for (uint64_t rank = 0; rank < count; ++rank) {
    group.reduce_scatter(rank, whole, part, 0.5, nullptr);
    group.all_gather(rank, part, whole, nullptr);
    group.broadcast(rank, whole, 1, nullptr);
  }
  group.end();
}

Calls for_each_rank(uint64_t count, const std::vector<std::function<std::string(uint64_t rank)>>& texts) {
  Calls calls;
  for (uint64_t rank = 0; rank < count; ++rank) {
    for (const auto& text : texts) calls.push_back(text(rank));
  }
  return calls;
}

Calls in_a_group(Calls calls) {
  calls.insert(calls.begin(), "group_start");
  calls.emplace_back("group_end");
  return calls;
}

Calls operator+(Calls calls, const Calls& more) {
  calls.insert(calls.end(), more.begin(), more.end());
  return calls;
}

Error error_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("no error was thrown");
}

}  // namespace

TEST_CASE("Communicators are made in one group, none of them blocking, each with its device the current one") {
  const uint64_t count = GENERATE(2, 4, 8);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 2;
  const auto group = open(count);
  CHECK(take_calls(nccl) ==
        Calls{"get_unique_id"} +
            in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("device ", rank + 3); },
                                             [&](uint64_t rank) { return concat("init ", rank, " of ", count); }})));
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("Collectives go to NCCL in one group, weights as scaled sums that are made before it and destroyed after it") {
  const uint64_t count = GENERATE(2, 4, 8);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 3;
  const auto group = open(count);
  take_calls(nccl);
  reduce(*group, count);
  CHECK(take_calls(nccl) ==
        for_each_rank(count, {[](uint64_t rank) { return concat("scaled_sum ", rank, " by 0.25"); }}) +
            in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("all_reduce ", rank, " count 8 scaled"); }})) +
            for_each_rank(count, {[](uint64_t rank) { return concat("destroy_op ", rank); }}));
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("A factor of 1 is a plain sum, which 16-bit types take too") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  for (const stg_dtype dtype : {float16, bfloat16, float32, float64}) {
    take_calls(nccl);
    reduce(*group, 2, dtype, 1);
    CHECK(take_calls(nccl) == Calls{"group_start", "all_reduce 0 count 8", "all_reduce 1 count 8", "group_end"});
  }
}

TEST_CASE("Different collectives go to NCCL in one group, in the order in which they came") {
  const uint64_t count = GENERATE(2, 4, 8);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 1;
  const auto group = open(count);
  take_calls(nccl);
  scatter_and_gather(*group, count);
  const auto is_scale = [](const std::string& call) { return call.starts_with("scaled_sum") || call.starts_with("destroy_op"); };
  Calls calls = take_calls(nccl);
  CHECK(static_cast<uint64_t>(std::count_if(calls.begin(), calls.end(), is_scale)) == 2 * count);
  std::erase_if(calls, is_scale);
  CHECK(calls == in_a_group(for_each_rank(
                     count, {[](uint64_t rank) { return concat("reduce_scatter ", rank, " count 4 scaled"); },
                             [](uint64_t rank) { return concat("all_gather ", rank, " count 4"); },
                             [&](uint64_t rank) { return concat("broadcast ", rank, " count ", 4 * count, " from 1"); }})));
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("A sharded bucket is scattered and gathered in its own memory, each rank's part in its place") {
  const uint64_t count = GENERATE(2, 4, 8);
  const stg_dtype dtype = GENERATE(float32, bfloat16, float64);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 1;
  const auto group = open(count);
  take_calls(nccl);
  std::vector<std::vector<char>> memory(count, std::vector<char>(count * 4 * 8));
  const auto whole = [&](uint64_t rank) { return TransportBuffer{memory[rank].data(), static_cast<int64_t>(4 * count), dtype}; };
  const auto part = [&](uint64_t rank) { return TransportBuffer{memory[rank].data() + rank * 4 * dtype.bits / 8, 4, dtype}; };
  group->begin();
  for (uint64_t rank = 0; rank < count; ++rank) group->reduce_scatter(rank, whole(rank), part(rank), 1, nullptr);
  group->end();
  group->begin();
  for (uint64_t rank = 0; rank < count; ++rank) group->all_gather(rank, part(rank), whole(rank), nullptr);
  group->end();
  CHECK(take_calls(nccl) ==
        in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("reduce_scatter ", rank, " count 4 in place"); }})) +
            in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("all_gather ", rank, " count 4 in place"); }})));
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("A group that ends well is finalized and then destroyed, each in one group, and never aborted") {
  const uint64_t count = GENERATE(2, 4, 8);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 2;
  auto group = open(count);
  take_calls(nccl);
  group.reset();
  CHECK(take_calls(nccl) == in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("finalize ", rank); }})) +
                                in_a_group(for_each_rank(count, {[](uint64_t rank) { return concat("destroy ", rank); }})));
  CHECK(nccl.num_aborts == Ints(count, 0));
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("An error at any call names it and a device, aborts every communicator once, and another group can be made") {
  const uint64_t count = GENERATE(2, 4);
  const bool fails_late = GENERATE(false, true);
  for (int fail_at = 1;; ++fail_at) {
    NcclDouble& nccl = begin_double();
    nccl.looks_until_ready = 1;
    nccl.fail_at = fail_at;
    nccl.fails_late = fails_late;
    std::unique_ptr<NcclGroup> group;
    std::optional<Error> error;
    try {
      group = open(count);
      reduce(*group, count);
      scatter_and_gather(*group, count);
      group->poll();
    } catch (const Error& thrown) {
      error = thrown;
    }
    CHECK(error.has_value() == !nccl.failed.empty());
    CHECK(nccl.num_open_groups == 0);
    if (error && group) CHECK(error_of([&] { group->begin(); }).code == STG_ABORTED);
    group.reset();
    if (nccl.failed.empty()) {  // fewer calls than that
      CHECK(fail_at > 50);
      break;
    }
    CAPTURE(fail_at, nccl.failed);
    if (error) {
      CAPTURE(error->message);
      CHECK_THAT(error->message, Contains("made-up") && Contains("on cuda:"));
      const bool is_of_all = nccl.failed.starts_with("group") || nccl.failed == "get_unique_id";
      CHECK((error->device.kind == STG_DEVICE_CUDA) == !is_of_all);
      const std::string rank = nccl.failed.substr(nccl.failed.find(' ') + 1);
      if (nccl.failed.starts_with("device")) CHECK_THAT(error->message, Contains("cuda:" + rank + ": cudaSetDevice"));
      if (nccl.failed.starts_with("look ")) CHECK_THAT(error->message, Contains("rank " + rank + " on cuda:"));
      if (nccl.failed.starts_with("all_reduce 1 ")) CHECK_THAT(error->message, Contains("rank 1 on cuda:4: ncclAllReduce"));
      if (!nccl.failed.starts_with("device"))
        CHECK_THAT(error->message, Contains("the cable was out") && (Contains("nccl") || Contains("a collective")));
    }
    const bool was_destroyed = !error && (nccl.failed.starts_with("destroy ") || nccl.num_destroys.front() == 1);
    CHECK(nccl.num_aborts == Ints(nccl.num_aborts.size(), was_destroyed ? 0 : 1));
    CHECK(nccl.num_destroys == Ints(nccl.num_aborts.size(), was_destroyed ? 1 : 0));
    CHECK(nccl.broken_rules == Rules{});
    CHECK(nccl.num_open_groups == 0);
    nccl.num_aborts.clear();
    CHECK_NOTHROW(reduce(*open(count), count));
  }
}

TEST_CASE("Ranks that are late end the opening at its deadline, by their devices' names, and are aborted with the others") {
  NcclDouble& nccl = begin_double();
  nccl.never_ready = {2, 3};
  const Error error = error_of([&] { open(4, nccl.now_ns + 20'000'000); });
  CHECK(error.code == STG_DEADLINE_EXCEEDED);
  CHECK_THAT(error.message, Contains("not ready yet: cuda:5, cuda:6") && !Contains("cuda:4"));
  CHECK(error.device.index == 5);
  CHECK(nccl.now_ns < 25'000'000);
  CHECK(nccl.num_aborts == Ints{1, 1, 1, 1});
  CHECK(nccl.num_destroys == Ints{0, 0, 0, 0});
  CHECK(nccl.num_open_groups == 0);
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("A rank that never takes a collective ends it in minutes, and one that never ends is aborted at closing") {
  NcclDouble& nccl = begin_double();
  auto group = open(2);
  nccl.never_ready = {1};
  SECTION("in a collective") {
    const Error error = error_of([&] { reduce(*group, 2, float32, 1); });
    CHECK(error.code == STG_DEADLINE_EXCEEDED);
    CHECK_THAT(error.message, Contains("ncclAllReduce") && Contains("not ready yet: cuda:4"));
    CHECK(nccl.now_ns < 400'000'000'000);
  }
  SECTION("in closing") {
    group.reset();
    CHECK(nccl.now_ns < 100'000'000'000);
  }
  CHECK(nccl.num_aborts == Ints{1, 1});
  CHECK(nccl.num_destroys == Ints{0, 0});
}

TEST_CASE("An abort from another thread ends who waits for NCCL, and no two threads are in it at once") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  std::promise<void> waits;
  nccl.never_ready = {1};
  nccl.on_rest = [&, has_told = false]() mutable {
    if (!std::exchange(has_told, true)) waits.set_value();
  };
  const auto aborting = std::async(std::launch::async, [&] {
    waits.get_future().wait();
    group->poll();
    group->abort();
    group->abort();
  });
  CHECK(error_of([&] { reduce(*group, 2, float32, 1); }).code == STG_ABORTED);
  aborting.wait();
  CHECK(nccl.num_aborts == Ints{1, 1});
  CHECK(nccl.broken_rules == Rules{});
  CHECK(nccl.num_open_groups == 0);
  CHECK(error_of([&] { group->begin(); }).code == STG_ABORTED);
}

TEST_CASE("Threads that poll while another reduces are never in NCCL with it, and an abort in the midst of it is the end") {
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 2;
  const auto group = open(4);
  std::atomic<bool> is_over{false};
  std::vector<std::future<void>> pollers;
  for (int i = 0; i < 2; ++i) {
    pollers.push_back(std::async(std::launch::async, [&] {
      while (!is_over) group->poll();
    }));
  }
  for (int i = 0; i < 100; ++i) reduce(*group, 4);
  const auto aborting = std::async(std::launch::async, [&] { group->abort(); });
  const Error error = error_of([&] {
    while (true) reduce(*group, 4);
  });
  is_over = true;
  for (const auto& poller : pollers) poller.wait();
  aborting.wait();
  CHECK(error.code == STG_ABORTED);
  CHECK(nccl.num_aborts == Ints{1, 1, 1, 1});
  CHECK(nccl.broken_rules == Rules{});
}

TEST_CASE("Poll tells what has gone wrong since, by the device, and ends the group") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  CHECK_NOTHROW(group->poll());
  nccl.fails_late = true;
  nccl.fail_at = 2;
  const Error error = error_of([&] { group->poll(); });
  CHECK_THAT(error.message, Contains("rank 1 on cuda:4: a collective: a made-up system error (the cable was out)"));
  CHECK(nccl.num_aborts == Ints{1, 1});
  CHECK_NOTHROW(group->poll());
}

TEST_CASE("What NCCL can't be given is refused before it is asked") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  take_calls(nccl);
  const TransportBuffer short_floats{nullptr, 8, float16};
  CHECK_THAT(error_of([&] { group->all_reduce(0, short_floats, 1, nullptr); }).message, Contains("no group was begun"));
  CHECK_THAT(error_of([&] { group->end(); }).message, Contains("not begun"));
  group->begin();
  CHECK_THAT(error_of([&] { group->all_reduce(0, short_floats, 0.5, nullptr); }).message, Contains("0.5") && Contains("float16"));
  CHECK_THAT(error_of([&] { group->all_reduce(2, short_floats, 1, nullptr); }).message, Contains("rank 2; there are 2"));
  CHECK_THAT(error_of([&] { group->broadcast(0, short_floats, 2, nullptr); }).message, Contains("rank 2; there are 2"));
  CHECK_THAT(error_of([&] { group->all_reduce(0, {nullptr, 8, int64}, 1, nullptr); }).message, Contains("int64"));
  CHECK(take_calls(nccl) == Calls{});
}

TEST_CASE("Settings are NCCL's, and a wrong one is told with what is possible") {
  CHECK(NcclSettings(R"({"min_ctas": 2, "max_ctas": 8, "net_name": "Socket"})").config().maxCTAs == 8);
  CHECK(NcclSettings("{}").config().maxCTAs == NCCL_CONFIG_UNDEF_INT);
  CHECK(NcclSettings("{}").config().blocking == 0);
  const NcclSettings named(R"({"net_name": "Socket"})");
  CHECK(std::string(named.config().netName) == "Socket");
  const auto message = [](const char* settings) { return error_of([&] { NcclSettings{settings}; }).message; };
  CHECK_THAT(message(R"({"ctas": 2})"),
             Contains("/options/nccl/ctas is unknown") && Contains("max_ctas") && Contains("net_name"));
  CHECK_THAT(message(R"({"max_ctas": 1000})"), Contains("1000") && Contains("1 to 64"));
  CHECK_THAT(message(R"({"traffic_class": 18446744073709551615})"), Contains("18446744073709551615"));
  CHECK_THAT(message(R"({"traffic_class": -9223372036854775808})"), Contains("-9223372036854775808"));
  CHECK_THAT(message(R"({"cga_cluster_size": 2.5})"), Contains("2.5") && Contains("whole number"));
  CHECK_THAT(message(R"({"collnet_enable": true})"), Contains("true") && Contains("0 to 1"));
  CHECK_THAT(message(R"({"net_name": 3})"), Contains("text"));
  CHECK_THAT(message(R"({"min_ctas": 8, "max_ctas": 4})"), Contains("min_ctas is 8") && Contains("which is 4"));
  CHECK_THAT(message("[]"), Contains("object"));
  CHECK_THAT(message("{"), Contains("/options/nccl"));
}
