// SPDX-License-Identifier: Apache-2.0
//
// What a call costs beyond its work: the engine's own C++ function, the same through the table of a plugin as C calls it, and through a
// session of libstratagem, which looks its handle up first. By turns in one process, the fastest of many short rounds each: whatever
// else the machine does only adds. A training_step over two devices has a thread to wake, so the bare hand-off to a parked thread and
// back stands beside it. Rust, Julia and Python have benches of their own (host/*/README.md), beside the same table.
//
//   bench-overhead [folder of the plugins]
#include <stratagem/session.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <thread>
#include <vector>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/model.hpp"
#include "base/structs.hpp"
#include "strategy/engine.hpp"

using namespace stratagem;

namespace {

constexpr int num_rounds = 300;

// A model of one parameter whose step does nothing.
struct Empty {
  Empty() {
    table.replicate = [](void*, const stg_replicate_args*, stg_replica** out) {
      return guard([&] { *out = reinterpret_cast<stg_replica*>(new EmptyReplica); });
    };
    table.destroy_replica = [](void*, stg_replica* replica) { delete reinterpret_cast<EmptyReplica*>(replica); };
    table.describe = [](void*, stg_replica* replica, stg_model_description* out) -> stg_error* {
      out->parameters = &reinterpret_cast<EmptyReplica*>(replica)->shown;
      out->num_parameters = 1;
      return nullptr;
    };
    table.set_mode = [](void*, stg_replica*, uint32_t) -> stg_error* { return nullptr; };
    table.step = [](void*, stg_replica* replica, const stg_step_context*, stg_tree* batch, stg_model_step_result* result) {
      const Tree owned = Tree::receive(batch);
      return guard([&] {
        result->outputs = make_tree(Value(allocate_tensor(float32, {}))).give();
        result->graph = reinterpret_cast<stg_graph*>(replica);  // of which there is nothing to free
      });
    };
    table.backward = [](void*, stg_replica*, stg_graph*, double, uint32_t, const stg_gradient_sink* sink) {
      return sink->ready(sink->self, 0, nullptr, nullptr);
    };
    table.release_graph = [](void*, stg_replica*, stg_graph*) {};
    table.bind = [](void*, stg_replica* replica, uint64_t, const stg_tensor* storage, const stg_tensor*) -> stg_error* {
      reinterpret_cast<EmptyReplica*>(replica)->described.tensor = const_cast<stg_tensor*>(storage);
      return nullptr;
    };
  }

  struct EmptyReplica {
    EmptyReplica() {
      described.names = &name;
      described.num_names = 1;
      described.tensor = weight.get();
      described.flags = STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
    }
    TensorPtr weight = allocate_tensor(float32, {1});
    stg_string name = to_abi("weight");
    stg_parameter described = sized<stg_parameter>();
    const stg_parameter* shown = &described;
  };

  stg_model table = sized<stg_model>();
};

Tree batch_of_three() {
  Dict dict;
  for (const char* name : {"inputs", "targets", "weights"}) dict.emplace_back(name, allocate_tensor(float32, {8}));
  return make_tree(std::move(dict));
}

using Calls = std::function<void(int count)>;

// By turns. Returns the fastest of each, in ns per call.
std::vector<double> fastest_ns(int num_calls, const std::vector<Calls>& ways) {
  std::vector<double> fastest(ways.size(), std::numeric_limits<double>::infinity());
  for (int round = 0; round < num_rounds; ++round) {
    for (size_t way = 0; way < ways.size(); ++way) {
      const auto begin = std::chrono::steady_clock::now();
      ways[way](num_calls);
      const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
      fastest[way] = std::min(fastest[way], took.count() / num_calls);
    }
  }
  return fastest;
}

// A thread that sleeps until its turn, and gives it back.
class Parked {
 public:
  ~Parked() {
    stop_ = true;
    hand_over();
  }
  void hand_over() {
    std::unique_lock lock(mutex_);
    is_its_turn_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return !is_its_turn_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_its_turn_ = false, stop_ = false;
  std::jthread other_{[this] {
    std::unique_lock lock(mutex_);
    while (!stop_) {
      changed_.wait(lock, [&] { return is_its_turn_; });
      is_its_turn_ = false;
      changed_.notify_all();
    }
  }};
};

struct Direct : Engine {
  using Engine::Engine;
};

struct Subject {
  const char* name;
  Topology topology;
  int num_devices;
};

void show(const Subject& subject, const char* call, const std::vector<double>& ns) {
  std::printf("%-14s %-16s %10.0f %10.0f %+8.0f %12.0f %+8.0f", subject.name, call, ns[0], ns[1], ns[1] - ns[0], ns[2],
              ns[2] - ns[0]);
  if (ns.size() > 3) std::printf(" %12.0f %+8.0f", ns[3], ns[1] - ns[3]);
  std::printf("\n");
}

void measure(const Subject& subject, const std::string& folder) {
  const Empty empty;
  const nlohmann::json strategy = {{"name", subject.name},
                                   {"path", folder + "/" + subject.name + ".so"},
                                   {"accelerator", "cpu"},
                                   {"devices", subject.num_devices}};
  const nlohmann::json config = {
      {"strategy", strategy}, {"model", {{"kind", "host"}}}, {"optimizer", {{"name", "sgd"}, {"lr", 1}}}};
  const std::string text = config.dump();
  auto session_args = sized<stg_session_args>();
  session_args.config_text = to_abi(text);
  session_args.config_folder = to_abi("/");
  session_args.flags = STG_SESSION_OWN_LOOP;
  session_args.model = &empty.table;
  stg_session session = 0;
  check(stg_session_open(&session_args, &session));
  const stg_strategy_api* api = nullptr;
  stg_strategy* instance = nullptr;
  check(stg_session_strategy(session, &api, &instance));
  const auto through_session = [&](const auto& body) {
    check(stg_session_strategy(session, &api, &instance));
    body(api, instance);
  };

  CreateArgs create_args;
  create_args.config = {{"accelerator", "cpu"}, {"devices", subject.num_devices}, {"optimizer", {{"name", "sgd"}}}};
  Direct engine(create_args, subject.topology);
  const Call call(nullptr);
  engine.setup(call, Model(&empty.table), Tree(), STG_STAGE_FIT);

  const auto times = [](auto body) {
    return [body](int count) mutable {
      for (int i = 0; i < count; ++i) body();
    };
  };

  const auto barrier = [](const stg_strategy_api* table, stg_strategy* self) {
    check(table->barrier(self, nullptr, stg_string{"step", 4}));
  };
  show(subject, "barrier",
       fastest_ns(1000, {times([&] { engine.barrier(call, "step"); }), times([&] { barrier(api, instance); }),
                         times([&] { through_session(barrier); })}));

  Tree moved = batch_of_three();
  const auto transfer = [&](const stg_strategy_api* table, stg_strategy* self) {
    auto args = sized<stg_transfer_args>();
    args.batch = moved.argument();
    args.device = no_device;
    stg_tree out{};
    check(table->batch_to_device(self, nullptr, &args, &out));
    moved = Tree(out);
  };
  show(subject, "batch_to_device",
       fastest_ns(300, {times([&] { moved = engine.batch_to_device(call, std::move(moved), no_device, 0); }),
                        times([&] { transfer(api, instance); }), times([&] { through_session(transfer); })}));

  const Tree lent = batch_of_three();
  const auto step = [&](const stg_strategy_api* table, stg_strategy* self) {
    Tree view = Tree::view(lent.root());
    auto args = sized<stg_step_args>();
    args.batch = view.argument();
    auto result = sized<stg_step_result>();
    check(table->training_step(self, nullptr, &args, &result));
    const Tree outputs(result.outputs);
  };
  std::vector<Calls> ways = {times([&] {
                               StepArgs args;
                               args.batch = Tree::view(lent.root());
                               engine.training_step(call, std::move(args));
                             }),
                             times([&] { step(api, instance); }), times([&] { through_session(step); })};
  Parked parked;
  if (subject.num_devices > 1) ways.emplace_back(times([&] { parked.hand_over(); }));
  show(subject, "training_step", fastest_ns(50, ways));
  stg_session_close(session);
}

}  // namespace

int main(int argc, char** argv) try {
  const std::string folder = argc > 1 ? argv[1] : BENCH_PLUGINS;
  std::printf("%-14s %-16s %10s %10s %8s %12s %8s %12s %8s\n", "ns per call", "", "C++", "C table", "", "session", "", "hand-off",
              "");
  measure({"single_device", Topology::single_device, 1}, folder);
  measure({"data_parallel", Topology::data_parallel, 2}, folder);
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench-overhead: %s\n", error.what());
  return 1;
}
