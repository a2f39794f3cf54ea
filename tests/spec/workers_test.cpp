// SPDX-License-Identifier: Apache-2.0
//
// The replicas' threads by themselves, without LibTorch, so that ThreadSanitizer can watch them.
#include "strategy/workers.hpp"

#include <chrono>
#include <ctime>
#include <numeric>

#include "base/error.hpp"
#include "support/catch.hpp"

using namespace stratagem;

namespace {

stg_call call_with_deadline(uint64_t from_now_ns) {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  stg_call call{};
  call.struct_size = sizeof call;
  call.deadline_ns = static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec) + from_now_ns;
  return call;
}

void sleep_ms(int count) { std::this_thread::sleep_for(std::chrono::milliseconds(count)); }

template <class Body>
Error error_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error;
  }
  throw std::runtime_error("no error was thrown");
}

}  // namespace

TEST_CASE("every phase ends on all workers before the next begins, and its serial part comes between") {
  for (const bool on_caller_thread : {false, true}) {
    for (const size_t num_workers : {1, 2, 5}) {
      Workers workers({num_workers, on_caller_thread});
      for (int round = 0; round < 300; ++round) {
        // No atomics: ThreadSanitizer sees a meeting that doesn't order memory.
        const auto parts = std::make_shared<std::vector<int>>(num_workers);
        const auto sum = std::make_shared<int>(0);
        const auto seen = std::make_shared<std::vector<int>>(num_workers);
        workers.run(Call{}, {{"write", [=](size_t worker) { (*parts)[worker] = round + static_cast<int>(worker); },
                              [=] { *sum = std::accumulate(parts->begin(), parts->end(), 0); }, true},
                             {"read", [=](size_t worker) { (*seen)[worker] = *sum; }}});
        const int expected = static_cast<int>(num_workers) * round + static_cast<int>(num_workers * (num_workers - 1) / 2);
        REQUIRE(*seen == std::vector<int>(num_workers, expected));
      }
    }
  }
}

TEST_CASE("a failure anywhere skips what follows on all workers, the first worker's is told") {
  for (const bool on_caller_thread : {false, true}) {
    Workers workers({4, on_caller_thread});
    std::atomic<int> num_first{0};
    std::atomic<int> num_later{0};
    for (int round = 0; round < 50; ++round) {
      const Error error = error_of([&] {
        workers.run(Call{}, {{"first",
                              [&](size_t worker) {
                                ++num_first;
                                if (worker == 1 || worker == 3) throw invalid_argument("worker ", worker);
                              },
                              [&] { ++num_later; }},
                             {"second", [&](size_t) { ++num_later; }}});
      });
      CHECK(error.message == "worker 1");
      CHECK(error_of([&] {
              workers.run(Call{}, {{"first", [](size_t) {}, [] { throw invalid_argument("serial"); }},
                                   {"second", [&](size_t) { ++num_later; }}});
            }).message == "serial");
    }
    CHECK(num_first == 200);
    CHECK(num_later == 0);
  }
}

TEST_CASE("a run that is given up ends for all, those that come back in time leave the workers usable") {
  Workers workers({3});
  std::atomic<int> num_later{0};
  const stg_call abi = call_with_deadline(5'000'000);
  const Error error = error_of([&] {
    workers.run(Call{&abi}, {{"work", [](size_t worker) { sleep_ms(worker == 2 ? 25 : 0); }, [&] { ++num_later; }, true},
                             {"later", [&](size_t) { ++num_later; }}});
  });
  CHECK(error.code == STG_DEADLINE_EXCEEDED);
  CHECK_THAT(error.message, Catch::Contains("replica 2 in work"));
  CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
  CHECK(num_later == 0);
  workers.run(Call{}, {{"again", [&](size_t) { ++num_later; }}});
  CHECK(num_later == 3);
}

TEST_CASE("a phase that runs no foreign code isn't given up") {
  Workers workers({2});
  const stg_call abi = call_with_deadline(5'000'000);
  int num_done = 0;
  workers.run(Call{&abi}, {{"update", [](size_t worker) { sleep_ms(worker == 1 ? 20 : 0); }, [&] { ++num_done; }}});
  CHECK(num_done == 1);
}

TEST_CASE("what was cancelled or aborted in a part ends the run at the meeting, before the serial part") {
  for (const bool on_caller_thread : {false, true}) {
    for (const size_t num_workers : {1, 3}) {
      for (const bool aborts : {false, true}) {
        Workers workers({num_workers, on_caller_thread});
        uint32_t cancel = 0;
        stg_call abi{};
        abi.struct_size = sizeof abi;
        abi.cancel = &cancel;
        std::atomic<int> num_later{0};
        const auto part = [&](size_t worker) {
          if (worker + 1 != num_workers) return;
          if (aborts) {
            workers.abort();
          } else {
            std::atomic_ref(cancel).store(1);
          }
        };
        const Error error = error_of([&] {
          workers.run(Call{&abi}, {{"work", part, [&] { ++num_later; }, true}, {"later", [&](size_t) { ++num_later; }}});
        });
        CHECK(error.code == (aborts ? STG_ABORTED : STG_CANCELLED));
        CHECK(((error.flags & STG_ERROR_INSTANCE_DRAINING) != 0) == aborts);
        CHECK(num_later == 0);
      }
    }
  }
}

TEST_CASE("serial parts run on the calling thread") {
  Workers workers({4});
  for (int round = 0; round < 20; ++round) {
    std::thread::id serial;
    workers.run(Call{}, {{"work", [&](size_t worker) { sleep_ms(worker == 3 ? 1 : 0); },
                          [&] { serial = std::this_thread::get_id(); }, true}});
    CHECK(serial == std::this_thread::get_id());
  }
}

TEST_CASE("a deadline that has passed before the work begins is told at once") {
  Workers workers({2});
  const stg_call abi = call_with_deadline(0);
  int num_runs = 0;
  CHECK(error_of([&] { workers.run(Call{&abi}, {{"work", [&](size_t) { ++num_runs; }}}); }).code == STG_DEADLINE_EXCEEDED);
  CHECK(num_runs == 0);
}

TEST_CASE("abort ends a run in progress and every later one") {
  Workers workers({2});
  std::atomic<bool> is_stuck{true};
  std::thread other([&] {
    sleep_ms(5);
    workers.abort();
  });
  const auto stuck = std::make_shared<std::atomic<bool>*>(&is_stuck);
  const Error error = error_of([&] {
    workers.run(Call{}, {{"work",
                          [stuck](size_t worker) {
                            while (worker == 1 && **stuck) sleep_ms(1);
                          },
                          {},
                          true}});
  });
  other.join();
  CHECK(error.code == STG_ABORTED);
  CHECK((error.flags & STG_ERROR_INSTANCE_DRAINING) != 0);
  CHECK(error_of([&] { workers.run(Call{}, {{"work", [](size_t) {}}}); }).code == STG_ABORTED);
  is_stuck = false;
}
