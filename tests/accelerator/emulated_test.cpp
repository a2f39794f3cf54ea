// SPDX-License-Identifier: Apache-2.0
//
// Devices, streams, memory, faults and counting of the emulated accelerator.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

#include "accelerator/emulated_support.hpp"

using namespace std::chrono_literals;

TEST_CASE("emulated: Tensors go to a device and back, and know where they are") {
  const Fresh fresh;
  const at::Tensor host = at::arange(12, at::kFloat).view({3, 4});
  const at::Tensor there = host.to(device(2));
  REQUIRE(there.device() == device(2));
  REQUIRE(c10::Device("emulated:2") == there.device());
  REQUIRE(at::equal(on_host(there + 1), host + 1));
  REQUIRE(at::equal(on_host(there.t()), host.t()));
  REQUIRE(there[1][2].item<float>() == 6);
  REQUIRE(emulated::find().names.size() == 4);
  REQUIRE_THROWS_WITH(at::empty({1}, on(9)), Catch::Contains("there is no device 9"));
  REQUIRE(reports() == "");
}

TEST_CASE("emulated: A gate holds its stream, not the host and not another stream") {
  const Fresh fresh;
  const c10::Stream held = new_stream(0);
  at::Tensor x = at::zeros({4}, on(0));
  order(default_stream(0), held);
  emulated::Gate gate(held);
  {
    const c10::StreamGuard guard(held);
    x.add_(1);
  }
  gate.await_reached();
  REQUIRE_FALSE(emulated::is_idle(held));
  const at::Tensor other = at::ones({4}, on(0)) + 1;
  REQUIRE(other.sum().item<float>() == 8);
  REQUIRE_FALSE(emulated::is_idle(held));
  gate.open();
  held.synchronize();
  REQUIRE(emulated::is_idle(held));
  order(held, default_stream(0));
  REQUIRE(x.sum().item<float>() == 4);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated: Events order streams of one and of two devices") {
  const Fresh fresh;
  emulated::set_delays(7, 2000us);
  for (const int to : {0, 1}) {
    const c10::Stream a = new_stream(0);
    const c10::Stream b = new_stream(to);
    at::Tensor x;
    {
      const c10::StreamGuard guard(a);
      x = at::ones({64}, on(0));
      for (int i = 0; i < 4; ++i) x.mul_(2);
    }
    order(a, b);
    const c10::StreamGuard guard(b);
    const c10::MultiStreamGuard both(std::vector<c10::Stream>{b, a});
    const at::Tensor y = to == 0 ? x + 0 : x.to(device(to));
    REQUIRE(y.sum().item<float>() == 64 * 16);
  }
}

TEST_CASE("emulated: An event says no when it is first asked, and yes to who has waited") {
  const Fresh fresh;
  at::zeros({4}, on(0));
  c10::Event event(at::kPrivateUse1);
  REQUIRE(event.query());
  event.record(default_stream(0));
  emulated::drain();
  REQUIRE_FALSE(event.query());
  REQUIRE(event.query());
  event.record(default_stream(0));
  event.synchronize();
  REQUIRE(event.query());
  REQUIRE(default_stream(0).query());
}

TEST_CASE("emulated: The host can't touch a device's memory") {
  const Fresh fresh;
  const at::Tensor x = at::ones({4}, on(0));
  synchronize(0);
  const pid_t child = fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    _exit(*static_cast<volatile float*>(x.data_ptr()) == 1 ? 0 : 1);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  REQUIRE(WIFSIGNALED(status));
  REQUIRE(WTERMSIG(status) == SIGSEGV);
}

TEST_CASE("emulated: Memory that was freed is filled with 0xFF in the order of its stream, and reused on it") {
  const Fresh fresh;
  at::Tensor x = at::ones({1000}, on(0));
  void* const address = x.data_ptr();
  const at::Tensor seen = x + 0;
  x.reset();
  const emulated::Counters before = emulated::counters();
  const at::Tensor again = at::empty({1000}, on(0));
  REQUIRE(again.data_ptr() == address);
  REQUIRE(emulated::counters().new_blocks == before.new_blocks);
  REQUIRE(on_host(again).isnan().all().item<bool>());
  REQUIRE(on_host(seen).sum().item<float>() == 1000);
  const c10::StreamGuard guard(new_stream(0));
  REQUIRE(at::empty({1000}, on(0)).data_ptr() != address);
}

TEST_CASE("emulated: Memory that another stream was recorded on isn't reused before that stream is done") {
  const Fresh fresh;
  const c10::Stream side = new_stream(0);
  at::Tensor x = at::ones({3000}, on(0));
  void* const address = x.data_ptr();
  order(default_stream(0), side);
  emulated::Gate gate(side);
  at::Tensor sum;
  {
    const c10::StreamGuard guard(side);
    sum = x.sum();
  }
  x.record_stream(side);
  x.reset();
  REQUIRE(at::empty({3000}, on(0)).data_ptr() != address);
  gate.open();
  side.synchronize();
  const at::Tensor first = at::empty({3000}, on(0));
  const at::Tensor second = at::empty({3000}, on(0));
  REQUIRE((first.data_ptr() == address || second.data_ptr() == address));
  REQUIRE(sum.item<float>() == 3000);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated: Pinned memory is known, and copies from and to it don't wait") {
  const Fresh fresh;
  const at::Tensor pinned = at::empty({100}, at::TensorOptions().pinned_memory(true)).fill_(3);
  REQUIRE(pinned.is_pinned());
  REQUIRE_FALSE(at::empty({100}).is_pinned());
  const at::Tensor back = at::empty({100}, at::TensorOptions().pinned_memory(true));
  emulated::Gate gate(default_stream(0));
  const emulated::Counters before = emulated::counters();
  const at::Tensor there = pinned.to(device(0), true);
  back.copy_(there, true);
  REQUIRE(emulated::counters().synchronisations == before.synchronisations);
  gate.open();
  default_stream(0).synchronize();
  REQUIRE(back.sum().item<float>() == 300);
  REQUIRE(emulated::counters().synchronisations == before.synchronisations + 1);
  REQUIRE(reports() == "");
}

TEST_CASE("emulated: A copy from pageable memory has read it when it returns") {
  const Fresh fresh;
  emulated::Gate gate(default_stream(0));
  at::Tensor host = at::ones({100});
  const at::Tensor there = at::empty({100}, on(0));
  there.copy_(host, true);
  host.zero_();
  gate.open();
  REQUIRE(there.sum().item<float>() == 100);
}

TEST_CASE("emulated: Waiting, new memory and reading by the host are counted") {
  const Fresh fresh;
  const at::Tensor x = at::ones({777, 3}, on(1));
  const auto step = [&] { return (x * 2).relu_().sum(); };
  step();
  const emulated::Counters before = emulated::counters();
  const at::Tensor sum = step();
  emulated::Counters after = emulated::counters();
  REQUIRE(after.synchronisations == before.synchronisations);
  REQUIRE(after.new_blocks == before.new_blocks);
  REQUIRE(after.host_reads == before.host_reads);
  REQUIRE(after.operations > before.operations);
  REQUIRE(sum.item<float>() == 777 * 6);
  after = emulated::counters();
  REQUIRE(after.host_reads == before.host_reads + 1);
  REQUIRE(after.synchronisations == before.synchronisations + 1);
  x.nonzero();
  REQUIRE(emulated::counters().synchronisations == before.synchronisations + 2);
}

TEST_CASE("emulated: A device that fails says so from then on, and others go on") {
  const Fresh fresh;
  at::Tensor x = at::ones({4}, on(1));
  synchronize(1);
  emulated::fail_device(1, "fell off the bus");
  x.add_(1);
  REQUIRE_THROWS_WITH(synchronize(1), Catch::Contains("emulated:1: fell off the bus (in add"));
  REQUIRE_THROWS_WITH(x.add_(1), Catch::Contains("fell off the bus"));
  REQUIRE(at::ones({4}, on(0)).sum().item<float>() == 4);
  emulated::heal();
  x.fill_(2);
  REQUIRE(x.sum().item<float>() == 8);
}

TEST_CASE("emulated: What a kernel throws comes out where the host waits") {
  const Fresh fresh;
  const at::Tensor x = at::ones({4}, on(0));
  x.index_select(0, at::full({1}, 9, at::kLong).to(device(0)));
  REQUIRE_THROWS_WITH(synchronize(0), Catch::Contains("index_select"));
}

TEST_CASE("emulated: A device has as much memory as it is given") {
  const Fresh fresh;
  synchronize(3);
  emulated::limit_memory(3, emulated::used_bytes(3) + 10'000);
  const at::Tensor x = at::empty({2000}, on(3));
  REQUIRE_THROWS_AS(at::empty({2000}, on(3)), c10::OutOfMemoryError);
  REQUIRE_THROWS_WITH(at::empty({2000}, on(3)), Catch::Contains("emulated:3 is out of memory"));
  emulated::limit_memory(3, 0);
  REQUIRE(at::empty({2000}, on(3)).numel() == 2000);
}

TEST_CASE("emulated: Tensors of two devices aren't mixed") {
  const Fresh fresh;
  const at::Tensor a = at::ones({4}, on(0));
  const at::Tensor b = at::ones({4}, on(1));
  REQUIRE_THROWS_WITH(a + b, Catch::Contains("emulated:1"));
  REQUIRE_THROWS_WITH(at::mm(a.view({2, 2}), at::ones({2, 2})), Catch::Contains("same device"));
  REQUIRE_THROWS_WITH(at::embedding(a.view({2, 2}), at::zeros({3}, at::kLong)), Catch::Contains("same device"));
}
