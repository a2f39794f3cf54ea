// SPDX-License-Identifier: Apache-2.0
#include "base/host.hpp"

#include <ctime>
#include <string>
#include <vector>

#include "base/structs.hpp"
#include "unit/support.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// A host that writes down what it is told.
struct Recorder {
  Recorder() {
    table.self = this;
    table.retain = [](void* self) { ++of(self).num_references; };
    table.release = [](void* self) { --of(self).num_references; };
    table.log = [](void* self, uint32_t level, stg_string message, const stg_tree*) {
      of(self).calls.push_back(concat("log ", level, " ", text_of(message)));
    };
    table.progress = [](void* self, stg_string what, uint64_t done, uint64_t total) {
      of(self).calls.push_back(concat("progress ", text_of(what), " ", done, "/", total));
    };
    table.trace_begin = [](void* self, stg_string phase, int32_t replica) {
      of(self).calls.push_back(concat("begin ", text_of(phase), " ", replica));
    };
    table.trace_end = [](void* self, stg_string phase, int32_t replica) {
      of(self).calls.push_back(concat("end ", text_of(phase), " ", replica));
    };
  }
  static Recorder& of(void* self) { return *static_cast<Recorder*>(self); }

  stg_host table = sized<stg_host>();
  int num_references = 0;
  std::vector<std::string> calls;
};

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

TEST_CASE("a host's services are called with what was said") {
  Recorder recorder;
  const Host host{&recorder.table};
  host.log(STG_LOG_INFO, "hello");
  host.warn("careful");
  host.progress("saving", 3, 10);
  host.trace_begin("forward", 1);
  host.trace_end("forward", 1);
  CHECK(recorder.calls ==
        std::vector<std::string>{"log 2 hello", "log 3 careful", "progress saving 3/10", "begin forward 1", "end forward 1"});
}

TEST_CASE("copies of a host hold a reference each, and drop it once") {
  Recorder recorder;
  Recorder other;
  {
    const Host host{&recorder.table};
    CHECK(recorder.num_references == 1);
    const Host copy{host};  // NOLINT: the copy is the test
    CHECK(recorder.num_references == 2);
    Host assigned{&other.table};
    CHECK(other.num_references == 1);
    assigned = copy;
    CHECK(recorder.num_references == 3);
    CHECK(other.num_references == 0);
    assigned = Host{};
    CHECK(recorder.num_references == 2);
  }
  CHECK(recorder.num_references == 0);
}

TEST_CASE("services that are absent do nothing, and so does an absent host") {
  stg_host empty = sized<stg_host>();
  const Host without_services{&empty};
  for (const Host& host : {Host{}, Host{nullptr}, without_services}) {
    host.warn("nobody hears");
    host.progress("x", 1, 2);
    host.trace_begin("x", 0);
    host.trace_end("x", 0);
    CHECK(host.storage() == nullptr);
  }
}

TEST_CASE("a host table of an impossible size is refused before anything of it is used") {
  Recorder recorder;
  recorder.table.struct_size = STG_HOST_MIN_SIZE - 1;
  check_error(error_of([&] { Host{&recorder.table}; }), STG_INVALID_ARGUMENT, {"stg_host.struct_size is 87"});
  CHECK(recorder.num_references == 0);
}

TEST_CASE("an absent call has no deadline, no cancel flag and no streams") {
  const Call call{nullptr};
  CHECK_FALSE(call.has_deadline());
  CHECK_FALSE(call.past_deadline());
  CHECK_FALSE(call.cancelled());
  CHECK(call.streams().empty());
  call.check("anything");
}

TEST_CASE("a deadline that has passed is an error that names what was waited for") {
  stg_call raw = sized<stg_call>();
  raw.deadline_ns = now_ns() - 1;
  const Call call{&raw};
  CHECK(call.past_deadline());
  check_error(error_of([&] { call.check("replica 1"); }), STG_DEADLINE_EXCEEDED, {"replica 1"});

  raw.deadline_ns = now_ns() + 3'600'000'000'000;
  CHECK_FALSE(Call{&raw}.past_deadline());
  Call{&raw}.check("replica 1");
  raw.deadline_ns = UINT64_MAX;
  CHECK_FALSE(Call{&raw}.past_deadline());
}

TEST_CASE("a cancel flag is seen as soon as it is set, and comes before the deadline") {
  uint32_t cancel = 0;
  stg_call raw = sized<stg_call>();
  raw.cancel = &cancel;
  raw.deadline_ns = 1;
  const Call call{&raw};
  CHECK_FALSE(call.cancelled());
  cancel = 7;
  CHECK(call.cancelled());
  check_error(error_of([&] { call.check("the barrier"); }), STG_CANCELLED, {"the barrier"});
}

TEST_CASE("the streams of a call are those that were given") {
  const stg_stream streams[2] = {{{STG_DEVICE_CUDA, 0}, nullptr, STG_STREAM_HANDLE, 0},
                                 {{STG_DEVICE_CUDA, 1}, nullptr, STG_STREAM_HANDLE, 0}};
  stg_call raw = sized<stg_call>();
  raw.streams = streams;
  raw.num_streams = 2;
  const Call call{&raw};
  REQUIRE(call.streams().size() == 2);
  CHECK(call.streams()[1].device.index == 1);
  raw.streams = nullptr;
  check_error(error_of([&] { Call{&raw}; }), STG_INVALID_ARGUMENT, {"stg_call.streams is null with 2 streams"});
}
