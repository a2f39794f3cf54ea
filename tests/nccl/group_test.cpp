// SPDX-License-Identifier: Apache-2.0
//
// How a group uses NCCL, with a stand-in for it: order and grouping of calls, errors at each of them, ranks that are late.
#include "nccl/group.hpp"

#include <time.h>

#include <algorithm>
#include <memory>
#include <thread>

#include "base/dlpack.hpp"
#include "nccl/double.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::vector<stg_device> devices(uint64_t count) {
  std::vector<stg_device> list;
  for (uint64_t i = 0; i < count; ++i) list.push_back({STG_DEVICE_CUDA, static_cast<int32_t>(i + 3)});
  return list;
}

std::unique_ptr<NcclGroup> open(uint64_t count, uint64_t deadline_ns = 0) {
  return std::make_unique<NcclGroup>(double_functions(), devices(count), NcclSettings("{}"), deadline_ns);
}

// The calls since, but for looks, which depend on time.
std::vector<std::string> take_calls(NcclDouble& nccl) {
  std::vector<std::string> calls = std::exchange(nccl.calls, {});
  std::erase_if(calls, [](const std::string& call) { return call.starts_with("look "); });
  return calls;
}

void reduce(NcclGroup& group, uint64_t count, stg_dtype dtype = float32, double factor = 0.25) {
  const TransportBuffer buffer{nullptr, 8, dtype};
  group.begin();
  for (uint64_t rank = 0; rank < count; ++rank) group.all_reduce(rank, buffer, factor, nullptr);
  group.end();
}

uint64_t in_ms(uint64_t milliseconds) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec) + milliseconds * 1'000'000u;
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
  std::vector<std::string> expected{"get_unique_id", "group_start"};
  for (uint64_t rank = 0; rank < count; ++rank) {
    expected.push_back(concat("device ", rank + 3));
    expected.push_back(concat("init ", rank, " of ", count));
  }
  expected.emplace_back("group_end");
  CHECK(take_calls(nccl) == expected);
}

TEST_CASE("Collectives go to NCCL in one group, weights as scaled sums that are made before it and destroyed after it") {
  const uint64_t count = GENERATE(2, 4, 8);
  NcclDouble& nccl = begin_double();
  nccl.looks_until_ready = 3;
  const auto group = open(count);
  take_calls(nccl);
  reduce(*group, count);
  std::vector<std::string> expected, calls, after;
  for (uint64_t rank = 0; rank < count; ++rank) {
    expected.push_back(concat("scaled_sum ", rank, " by 0.25"));
    calls.push_back(concat("device ", rank + 3));
    calls.push_back(concat("all_reduce ", rank, " count 8 scaled"));
    after.push_back(concat("destroy_op ", rank));
  }
  expected.emplace_back("group_start");
  expected.insert(expected.end(), calls.begin(), calls.end());
  expected.emplace_back("group_end");
  expected.insert(expected.end(), after.begin(), after.end());
  expected.emplace_back("device 7");  // the one before
  CHECK(take_calls(nccl) == expected);
}

TEST_CASE("A factor of 1 is a plain sum, and other collectives are grouped alike") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  take_calls(nccl);
  reduce(*group, 2, {STG_DTYPE_BFLOAT, 16, 1}, 1);
  CHECK(take_calls(nccl) == std::vector<std::string>{"group_start", "device 3", "all_reduce 0 count 8", "device 4",
                                                     "all_reduce 1 count 8", "group_end", "device 7"});
  const TransportBuffer whole{nullptr, 8, float64}, part{nullptr, 4, float64};
  group->begin();
  for (uint64_t rank = 0; rank < 2; ++rank) {
    group->reduce_scatter(rank, whole, part, 1, nullptr);
    group->all_gather(rank, part, whole, nullptr);
    group->broadcast(rank, whole, 1, nullptr);
  }
  group->end();
  CHECK(take_calls(nccl) == std::vector<std::string>{"group_start", "device 3", "reduce_scatter 0 count 4", "device 3",
                                                     "all_gather 0 count 4", "device 3", "broadcast 0 count 8 from 1", "device 4",
                                                     "reduce_scatter 1 count 4", "device 4", "all_gather 1 count 4", "device 4",
                                                     "broadcast 1 count 8 from 1", "group_end", "device 7"});
}

TEST_CASE("A group that ends well is finalized and destroyed, never aborted") {
  NcclDouble& nccl = begin_double();
  open(4).reset();
  CHECK(nccl.num_destroys == std::vector<int>{1, 1, 1, 1});
  CHECK(nccl.num_aborts == std::vector<int>{0, 0, 0, 0});
}

TEST_CASE("An error at any call names operation and device, aborts every communicator once, and another group can be made") {
  const uint64_t count = GENERATE(2, 4);
  for (int fail_at = 1;; ++fail_at) {
    NcclDouble& nccl = begin_double();
    nccl.fail_at = fail_at;
    std::unique_ptr<NcclGroup> group;
    bool has_failed = false;
    try {
      group = open(count);
      reduce(*group, count);
    } catch (const Error& error) {
      has_failed = true;
      INFO(error.message);
      CHECK_THAT(error.message, Catch::Contains("on cuda:") && (Catch::Contains("nccl") || Catch::Contains("cudaSetDevice") ||
                                                                Catch::Contains("NCCL") || Catch::Contains("collective")));
      CHECK_THAT(error.message, Catch::Contains("made-up"));
      CHECK(error.device.kind == STG_DEVICE_CUDA);
    }
    const bool is_over = nccl.fail_at > 0;  // it made fewer calls than that
    nccl.fail_at = 0;
    group.reset();
    if (is_over) {
      CHECK_FALSE(has_failed);
      CHECK(fail_at > 20);
      break;
    }
    INFO("call " << fail_at);
    CHECK((has_failed || nccl.calls.back().starts_with("destroy")));  // the device is set back without a look
    for (size_t i = 0; i < nccl.num_aborts.size(); ++i) {
      CHECK(nccl.num_aborts[i] == (has_failed ? 1 : 0));
      CHECK(nccl.num_destroys[i] == (has_failed ? 0 : 1));
    }
    CHECK_NOTHROW(reduce(*open(count), count));
  }
}

TEST_CASE("A rank that is late ends the opening at its deadline, by its device's name, and is aborted with the others") {
  NcclDouble& nccl = begin_double();
  nccl.never_ready = {2, 3};
  const Error error = error_of([] { open(4, in_ms(20)); });
  CHECK(error.code == STG_DEADLINE_EXCEEDED);
  CHECK_THAT(error.message, Catch::Contains("cuda:5, cuda:6") && !Catch::Contains("cuda:4"));
  CHECK(nccl.num_aborts == std::vector<int>{1, 1, 1, 1});
  CHECK(nccl.num_destroys == std::vector<int>{0, 0, 0, 0});
}

TEST_CASE("An abort from another thread ends who waits for NCCL, and no two threads are in it at once") {
  NcclDouble& nccl = begin_double();
  const auto group = open(2);
  nccl.never_ready = {1};
  std::thread aborting([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    group->poll();
    group->abort();
    group->abort();
  });
  const Error error = error_of([&] { reduce(*group, 2); });
  aborting.join();
  CHECK(error.code == STG_ABORTED);
  CHECK(nccl.num_aborts == std::vector<int>{1, 1});
  CHECK_FALSE(nccl.was_crowded);
  CHECK(error_of([&] { group->begin(); }).code == STG_ABORTED);
}

TEST_CASE("What NCCL can't be given is refused before it is asked") {
  begin_double();
  const auto group = open(2);
  const TransportBuffer halves{nullptr, 8, {STG_DTYPE_FLOAT, 16, 1}};
  CHECK_THAT(error_of([&] { group->all_reduce(0, halves, 1, nullptr); }).message, Catch::Contains("no group was begun"));
  group->begin();
  CHECK_THAT(error_of([&] { group->all_reduce(0, halves, 0.5, nullptr); }).message,
             Catch::Contains("0.5") && Catch::Contains("float16"));
  CHECK_THAT(error_of([&] { group->all_reduce(2, halves, 1, nullptr); }).message, Catch::Contains("rank 2 of 2"));
  CHECK_THAT(error_of([&] { group->all_reduce(0, {nullptr, 8, int64}, 1, nullptr); }).message, Catch::Contains("int64"));
}

TEST_CASE("Settings are NCCL's, and a wrong one is told with those that there are") {
  CHECK(NcclSettings(R"({"min_ctas": 2, "max_ctas": 8, "net_name": "Socket"})").config().maxCTAs == 8);
  CHECK(std::string(NcclSettings(R"({"net_name": "Socket"})").config().netName) == "Socket");
  CHECK_THAT(error_of([] { NcclSettings(R"({"ctas": 2})"); }).message,
             Catch::Contains("/options/nccl/ctas") && Catch::Contains("max_ctas"));
  CHECK_THAT(error_of([] { NcclSettings(R"({"max_ctas": 1000})"); }).message,
             Catch::Contains("1000") && Catch::Contains("1 to 64"));
  CHECK_THAT(error_of([] { NcclSettings(R"({"net_name": 3})"); }).message, Catch::Contains("text"));
}
