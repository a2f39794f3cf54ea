// SPDX-License-Identifier: Apache-2.0
//
// The detector: each wrong case is reported, with the names of both sides, and its right twin isn't. No delay is set: reports don't depend
// on when anything runs.
#include <thread>

#include "accelerator/emulated_support.hpp"

namespace {

at::Tensor pinned(int64_t numel) { return at::zeros({numel}, at::TensorOptions().pinned_memory(true)); }

struct OnSide {
  c10::Stream side = new_stream(0);
  c10::StreamGuard guard{side};
};

}  // namespace

TEST_CASE("emulated detector: A missing wait is reported, and a wait is enough") {
  const Fresh fresh;
  const bool waits = GENERATE(true, false);
  const c10::Stream side = new_stream(0);
  at::Tensor x = at::ones({100}, on(0));
  x.mul_(2);
  if (waits) order(default_stream(0), side);
  {
    const c10::StreamGuard guard(side);
    const at::Tensor y = x + 1;
  }
  const std::string found = reports();
  if (waits) {
    REQUIRE(found == "");
  } else {
    const std::string name = "emulated:0 stream " + std::to_string(side.id());
    REQUIRE_THAT(found, Catch::Contains("race: add on " + name + " reads bytes 0 to 400"));
    REQUIRE_THAT(found, Catch::Contains("not ordered after mul on emulated:0 stream 0 writes it"));
  }
}

TEST_CASE("emulated detector: A write after a read needs a wait as well, a read after a read doesn't") {
  const Fresh fresh;
  const at::Tensor x = at::ones({100}, on(0));
  const c10::Stream side = new_stream(0);
  order(default_stream(0), side);
  {
    const c10::StreamGuard guard(side);
    x.sum();
  }
  const at::Tensor y = x + 1;
  REQUIRE(reports() == "");
  x.zero_();
  REQUIRE_THAT(reports(), Catch::Contains("race: zero_ on emulated:0 stream 0 writes"));
  order(side, default_stream(0));
  x.zero_();
  REQUIRE(reports() == "");
}

TEST_CASE("emulated detector: Parts of one buffer are apart") {
  const Fresh fresh;
  const at::Tensor x = at::ones({100}, on(0));
  const c10::Stream side = new_stream(0);
  order(default_stream(0), side);
  x.narrow(0, 0, 50).mul_(2);
  const c10::StreamGuard guard(side);
  x.narrow(0, 50, 50).mul_(2);
  REQUIRE(reports() == "");
  x.narrow(0, 49, 2).mul_(2);
  REQUIRE_THAT(reports(), Catch::Contains("bytes 196 to 204"));
}

TEST_CASE("emulated detector: An event orders what was queued before it, not what came after") {
  const Fresh fresh;
  at::Tensor x = at::ones({100}, on(0));
  const c10::Stream side = new_stream(0);
  c10::Event event(at::kPrivateUse1);
  event.record(default_stream(0));
  x.mul_(2);
  event.block(side);
  const c10::StreamGuard guard(side);
  x.add_(1);
  REQUIRE_THAT(reports(), Catch::Contains("not ordered after mul on"));
}

TEST_CASE("emulated detector: Memory from a stream is used on another only after a wait, even if nobody has written it") {
  const Fresh fresh;
  const at::Tensor x = at::empty({123}, on(0));
  const OnSide on_side;
  x.zero_();
  REQUIRE_THAT(reports(), Catch::Contains("not ordered after allocation on emulated:0 stream 0"));
}

TEST_CASE("emulated detector: A missing record_stream is reported when the tensor is freed") {
  const Fresh fresh;
  const bool is_recorded = GENERATE(true, false);
  const bool is_waited_for = GENERATE(true, false);
  at::Tensor x = at::ones({100}, on(0));
  const c10::Stream side = new_stream(0);
  order(default_stream(0), side);
  {
    const c10::StreamGuard guard(side);
    x.sum();
  }
  if (is_recorded) x.record_stream(side);
  if (is_waited_for) order(side, default_stream(0));
  x.reset();
  const std::string found = reports();
  if (is_recorded || is_waited_for) {
    REQUIRE(found == "");
  } else {
    REQUIRE_THAT(found, Catch::Contains("use after free: "));
    REQUIRE_THAT(found, Catch::Contains("allocated on emulated:0 stream 0, is freed while sum on emulated:0 stream"));
  }
}

TEST_CASE("emulated detector: A view of memory that was freed is reported where it is used") {
  const Fresh fresh;
  at::Tensor x = at::ones({100}, on(0));
  const at::Tensor view = at::from_blob(x.data_ptr(), {100}, on(0));
  view.add_(1);
  REQUIRE(reports() == "");
  x.reset();
  view.add_(1);
  REQUIRE_THAT(reports(), Catch::Contains("use after free: add on emulated:0 stream 0"));
}

TEST_CASE("emulated detector: A host that has waited orders what it queues next, on any stream") {
  const Fresh fresh;
  at::Tensor x = at::ones({100}, on(0));
  SECTION("for a stream") { default_stream(0).synchronize(); }
  SECTION("for an event") {
    c10::Event event(at::kPrivateUse1);
    event.record(default_stream(0));
    event.synchronize();
  }
  SECTION("for the device") { synchronize(0); }
  SECTION("by asking again and again") {
    c10::Event event(at::kPrivateUse1);
    event.record(default_stream(0));
    while (!event.query()) std::this_thread::yield();
  }
  const OnSide on_side;
  x.add_(1);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated detector: Another host thread's waiting doesn't count, unless they share a clock") {
  const Fresh fresh;
  const bool is_shared = GENERATE(true, false);
  emulated::share_host_clock(is_shared);
  at::Tensor x = at::ones({100}, on(0));
  std::thread([] { default_stream(0).synchronize(); }).join();
  {
    const OnSide on_side;
    x.add_(1);
  }
  emulated::share_host_clock(false);
  REQUIRE((reports() == "") == is_shared);
}

TEST_CASE("emulated detector: A host that reads pinned memory without waiting for the copy to it is reported") {
  const Fresh fresh;
  const bool waits = GENERATE(true, false);
  const at::Tensor x = at::ones({100}, on(0));
  const at::Tensor to = pinned(100);
  to.copy_(x, true);
  if (waits) default_stream(0).synchronize();
  const float sum = to.sum().item<float>();
  const std::string found = reports();
  if (waits) {
    REQUIRE(found == "");
    REQUIRE(sum == 100);
  } else {
    REQUIRE_THAT(found, Catch::Contains(
                            "race: the host reads pinned memory while copy to pinned memory on emulated:0 stream 0 writes it"));
  }
}

TEST_CASE("emulated detector: A host that writes pinned memory while it is copied from is reported, one that reads isn't") {
  const Fresh fresh;
  const at::Tensor from = pinned(100);
  const at::Tensor x = at::zeros({100}, on(0));
  x.copy_(from, true);
  REQUIRE(from.sum().item<float>() == 0);
  REQUIRE(reports() == "");
  from.fill_(1);
  REQUIRE_THAT(reports(),
               Catch::Contains("race: the host writes pinned memory while copy from pinned memory on emulated:0 stream 0 reads"));
  default_stream(0).synchronize();
  from.fill_(2);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated detector: Pinned memory that is let go while it is copied isn't given to anybody") {
  const Fresh fresh;
  emulated::Gate gate(default_stream(0));
  at::Tensor from = pinned(100).fill_(5);
  void* const address = from.data_ptr();
  const at::Tensor x = at::zeros({100}, on(0));
  x.copy_(from, true);
  from.reset();
  const at::Tensor other = pinned(100).fill_(6);
  REQUIRE(other.data_ptr() != address);
  gate.open();
  REQUIRE(x.sum().item<float>() == 500);
  const at::Tensor again = pinned(100).fill_(7);
  REQUIRE(again.data_ptr() == address);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated detector: Reading a value by item needs what the stream needs") {
  const Fresh fresh;
  const at::Tensor x = at::ones({}, on(0));
  const c10::Stream side = new_stream(0);
  const bool waits = GENERATE(true, false);
  if (waits) order(default_stream(0), side);
  const c10::StreamGuard guard(side);
  x.item();
  REQUIRE((reports() == "") == waits);
}

TEST_CASE("emulated detector: A copy between devices is ordered with both current streams, not with others") {
  const Fresh fresh;
  const at::Tensor x = at::ones({100}, on(0));
  at::Tensor y = x.to(device(1));
  y.add_(1);
  y = y.to(device(0));
  REQUIRE(y.sum().item<float>() == 200);
  x.mul_(2);
  REQUIRE(reports() == "");
  const c10::StreamGuard guard(new_stream(0));
  x.to(device(1));
  REQUIRE_THAT(reports(), Catch::Contains("race: copy to another device on emulated:0 stream"));
}

TEST_CASE("emulated detector: What batch norm writes without saying so is known") {
  const Fresh fresh;
  const at::Tensor x = at::randn({4, 3, 2, 2}, on(0));
  const at::Tensor mean = at::zeros({3}, on(0));
  const at::Tensor var = at::ones({3}, on(0));
  at::batch_norm(x, {}, {}, mean, var, true, 0.1, 1e-5, false);
  const OnSide on_side;
  mean.sum();
  REQUIRE_THAT(reports(), Catch::Contains("native_batch_norm on emulated:0 stream 0 writes"));
}
