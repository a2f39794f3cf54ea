// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Errors inside a replica"; deadlines, cancelling and abort (abi/stratagem/call.h).
#include <atomic>
#include <chrono>
#include <cmath>
#include <ctime>
#include <mutex>
#include <thread>

#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

std::string config(size_t num_devices) {
  return concat("{\"devices\": ", num_devices, R"(, "optimizer": {"name": "sgd", "momentum": 0.9}})");
}

// A running mean of x as a buffer, which each training step moves.
std::unique_ptr<ToyModel> counting_model(std::function<void(const stg_step_context&)> before_step) {
  auto model = linear_model(1);
  ToyParameter count{{"count"}, {}, {0}};
  count.flags = STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
  count.dtype = int64;
  model->buffers.push_back(count);
  const auto step = model->on_step;
  model->on_step = [step, before_step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    if (replica.is_training) *first_element<int64_t>(replica.buffers[0]->view) += 1 + context.replica;
    before_step(context);
    ToyStep made = step(replica, context, batch);
    return made;
  };
  return model;
}

uint64_t now_ns() {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

Error train_with(Instance& instance, const stg_call& call, Tree batch) {
  stg_update_args update = sized<stg_update_args>();
  update.lr = 1;
  stg_step_args args = sized<stg_step_args>();
  args.batch = batch.argument();
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  args.update = &update;
  stg_step_result result = sized<stg_step_result>();
  return error_of([&] { check(instance.api.train_batch(instance.self, &call, &args, &result, nullptr)); });
}

}  // namespace

TEST_CASE("a model that throws on replica 1 of 2: its error, replica and device are told, and the next batch works") {
  std::atomic<bool> fails{false};
  const auto model = counting_model([&](const stg_step_context& context) {
    if (fails && context.replica == 1) throw Error{STG_RESOURCE_EXHAUSTED, "no memory for the attention mask"};
  });
  Instance instance("data_parallel", R"({"devices": [4, 2], "optimizer": {"name": "sgd", "momentum": 0.9}})");
  Instance reference("data_parallel", R"({"devices": [4, 2], "optimizer": {"name": "sgd", "momentum": 0.9}})");
  instance.setup(*model);
  reference.setup(*model);
  instance.train(batch_of({1, 2, 3}));
  reference.train(batch_of({1, 2, 3}));
  instance.accumulate(batch_of({5, 5}));
  const std::string before = model_bytes(instance.export_state());

  fails = true;
  const Error error = error_of([&] { instance.train(batch_of({7, 8})); });
  fails = false;
  CHECK(error.code == STG_RESOURCE_EXHAUSTED);
  CHECK(error.replica == 1);
  CHECK(error.device.kind == STG_DEVICE_CPU);
  CHECK(error.device.index == 2);
  CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
  REQUIRE(error.cause != nullptr);
  CHECK(text_of(error.cause->message) == "no memory for the attention mask");
  CHECK_THAT(error.message, Catch::Contains("replica 1 on cpu:2") && Catch::Contains("forward"));

  // Buffers that the failed step moved are put back, and nothing of the window is left.
  CHECK(model_bytes(instance.export_state()) == before);
  CHECK(instance.status().num_micro_batches == 0);
  CHECK(instance.status().has_graph == 0);
  CHECK(model->num_graphs == 0);
  reference.accumulate(batch_of({5, 5}));
  check(reference.api.zero_grad(reference.self, nullptr));
  instance.train(batch_of({1, 4}));
  reference.train(batch_of({1, 4}));
  CHECK(model_bytes(instance.export_state()) == model_bytes(reference.export_state()));
}

TEST_CASE("numbers that the model's own split drew are put back after a failed step, which keeps nothing of the model's") {
  static std::atomic<uint8_t> num_drawn;
  static std::atomic<int> num_states;  // generator states that are not released
  static bool fails;
  static int num_states_at_end;
  num_drawn = 0;
  num_states = 0;
  const auto model = linear_model();
  model->table.get_generator_state = [](void*, stg_replica*, stg_tree* out) {
    return guard([&] {
      auto* bytes = new uint8_t(num_drawn);
      ++num_states;
      *out = {};
      out->root.type = STG_BYTES;
      out->root.count = 1;
      out->root.as.bytes = bytes;
      out->owner = bytes;
      out->release = [](stg_tree* self) {
        delete static_cast<uint8_t*>(self->owner);
        --num_states;
      };
    });
  };
  model->table.set_generator_state = [](void*, stg_replica*, const uint8_t* state, uint64_t) -> stg_error* {
    num_drawn = *state;
    return nullptr;
  };
  model->table.split = [](void*, stg_replica*, const stg_tree* batch, uint64_t, stg_tree* shares, uint64_t* num_filled) {
    return guard([&] {
      ++num_drawn;
      if (fails) throw invalid_argument("these rows can't be packed");
      shares[0] = copy_tree(batch->root).give();
      *num_filled = 1;
    });
  };
  static decltype(stg_model::destroy_replica) destroy;
  destroy = model->table.destroy_replica;
  model->table.destroy_replica = [](void* self, stg_replica* replica) {
    num_states_at_end = num_states;
    destroy(self, replica);
  };
  const auto step = model->on_step;
  bool step_fails = true;
  model->on_step = [&](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    if (step_fails) throw std::runtime_error("the mask is upside down");
    return step(replica, context, batch);
  };
  Instance instance("data_parallel", sgd_config(2));
  instance.setup(*model);
  fails = false;
  error_of([&] { instance.train(batch_of({1})); });
  CHECK(num_drawn == 0);
  fails = true;
  error_of([&] { instance.training_step(batch_of({1})); });
  CHECK(num_drawn == 0);
  fails = step_fails = false;
  instance.train(batch_of({1}));
  CHECK(num_drawn == 1);
  CHECK(num_states == 0);
  instance.training_step(batch_of({1}));
  CHECK(num_states == 1);  // until its backward
  num_states_at_end = -1;
  instance.teardown();
  CHECK(num_states_at_end == 0);
}

TEST_CASE("an error in backward is told as one, and buffers are put back to before the step") {
  std::atomic<bool> fails{true};
  const auto model = counting_model([](const stg_step_context&) {});
  model->on_backward = [&](ToyReplica& replica) {
    if (fails && replica.args.replica == 0) throw std::runtime_error("lost");
  };
  Instance instance("data_parallel", config(2));
  instance.setup(*model);
  for (const bool in_one : {true, false}) {
    fails = true;
    const Error error = error_of([&] {
      if (in_one) instance.train(batch_of({1, 2}));
      instance.training_step(batch_of({1, 2}));
      instance.backward(true);
    });
    CHECK(error.replica == 0);
    CHECK_THAT(error.message, Catch::Contains("backward") && Catch::Contains("lost"));
    CHECK(instance.value("count") == 0);
    CHECK(instance.value("weight") == 1);
  }
  fails = false;
  instance.train(batch_of({1, 1}));
  CHECK(instance.value("count") == 1);
  CHECK(instance.value("weight") == 0);
}

TEST_CASE("buffers are replica 0's, on every replica") {
  std::mutex mutex;
  std::map<int32_t, double> seen;
  const auto model = counting_model([](const stg_step_context&) {});
  const auto step = model->on_step;
  model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    {
      const std::lock_guard lock(mutex);
      seen[context.replica] = read_element(replica.buffers[0]->view, 0);
    }
    return step(replica, context, batch);
  };
  Instance instance("data_parallel", config(3));
  instance.setup(*model);
  instance.train(batch_of({1, 2, 3}));
  instance.accumulate(batch_of({1, 2, 3}));
  instance.training_step(batch_of({1, 2, 3}));
  instance.backward(true);
  instance.optimizer_step();
  instance.validate(batch_of({1, 2, 3}));
  CHECK(seen == std::map<int32_t, double>{{0, 3}, {1, 3}, {2, 3}});
}

TEST_CASE("gradients that a model must not report are errors that name the parameter") {
  const auto run = [](const std::function<stg_error*(const stg_gradient_sink*)>& report) {
    static std::function<stg_error*(const stg_gradient_sink*)> current;
    current = report;
    const auto model = linear_model(1);
    model->table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double, uint32_t,
                               const stg_gradient_sink* sink) {
      static_cast<ToyModel*>(self)->table.release_graph(self, replica, graph);
      return current(sink);
    };
    Instance instance("single_device", R"({"optimizer": {"name": "sgd"}})");
    instance.setup(*model);
    const Error error = error_of([&] { instance.train(batch_of({1})); });
    CHECK(instance.value("weight") == 1);
    return error.message;
  };
  const auto send = [](const stg_gradient_sink* sink, uint64_t index, TensorPtr gradient) {
    return sink->ready(sink->self, index, gradient.release(), nullptr);
  };
  CHECK_THAT(run([&](auto* sink) { return send(sink, 7, nullptr); }), Catch::Contains("parameter 7"));
  CHECK_THAT(run([&](auto* sink) {
               return send(sink, 0, tensor_of({1, 2}, {2}));
             }),
             Catch::Contains("weight") && Catch::Contains("(2)"));
  CHECK_THAT(run([&](auto* sink) { return send(sink, 0, tensor_of({1}, {1}, float64)); }), Catch::Contains("float64"));
  CHECK_THAT(run([](auto*) -> stg_error* { return nullptr; }), Catch::Contains("weight") && Catch::Contains("neither"));
  CHECK_THAT(run([&](auto* sink) {
               if (stg_error* error = send(sink, 0, nullptr)) return error;
               return send(sink, 0, nullptr);
             }),
             Catch::Contains("twice"));
}

TEST_CASE("detect_anomaly names a NaN in the loss or in a gradient") {
  for (const bool in_loss : {true, false}) {
    const auto model = linear_model(1);
    const auto step = model->on_step;
    model->on_step = [step, in_loss](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      if ((context.flags & STG_STEP_DETECT_ANOMALY) == 0) throw internal("the flag didn't arrive");
      ToyStep made = step(replica, context, batch);
      if (in_loss) {
        made.outputs = scalar(std::nan(""));
      } else {
        made.gradients = {{std::nan("")}};
      }
      return made;
    };
    Instance instance("data_parallel", config(2));
    instance.setup(*model);
    const Error error = error_of([&] { instance.run_batch(batch_of({1, 2}), nullptr, STG_BATCH_DETECT_ANOMALY); });
    CHECK_THAT(error.message, Catch::Contains("NaN") && Catch::Contains(in_loss ? "loss" : "weight"));
  }
}

TEST_CASE("a deadline that passes while a replica computes returns in time, and the instance drains") {
  std::atomic<bool> is_stuck{true};
  const auto model = counting_model([&](const stg_step_context& context) {
    while (context.replica == 1 && is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  Instance instance("data_parallel", config(2));
  instance.setup(*model);
  stg_call call = sized<stg_call>();
  const uint64_t begin_ns = now_ns();
  call.deadline_ns = begin_ns + 50'000'000;
  const Error error = train_with(instance, call, batch_of({1, 2}));
  CHECK(error.code == STG_DEADLINE_EXCEEDED);
  CHECK((error.flags & STG_ERROR_INSTANCE_DRAINING) != 0);
  CHECK_THAT(error.message, Catch::Contains("replica 1"));
  CHECK(instance.status().state == STG_STATE_DRAINING);
  CHECK(error_of([&] { instance.train(batch_of({1})); }).code == STG_FAILED_PRECONDITION);
  is_stuck = false;  // destroy joins
}

TEST_CASE("a lent batch is the host's again at a deadline too, whatever a late replica still reads") {
  std::atomic<bool> is_slow{true};
  std::atomic<double> seen{0};
  const auto model = counting_model([&](const stg_step_context& context) {
    while (context.replica == 1 && is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const auto step = model->on_step;
  model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    ToyStep made = step(replica, context, batch);
    if (context.replica == 1) seen = element(batch, "x", 0);
    return made;
  };
  {
    Instance instance("data_parallel", config(2));
    instance.setup(*model);
    stg_call call = sized<stg_call>();
    call.deadline_ns = now_ns() + 20'000'000;
    Tree batch = batch_of({1, 2});
    const Error error = train_with(instance, call, Tree::view(batch.root()));
    CHECK(error.code == STG_DEADLINE_EXCEEDED);
    CHECK(instance.status().state == STG_STATE_DRAINING);
    first_element<float>(find(batch.root(), "x")->as.tensor->view)[1] = 1000;
    is_slow = false;
  }
  CHECK(seen == 2);
}

TEST_CASE("a replica that is late, but back within the grace period, leaves the instance as before the step") {
  std::atomic<bool> is_slow{true};
  const auto model = counting_model([&](const stg_step_context& context) {
    if (context.replica == 1 && is_slow) std::this_thread::sleep_for(std::chrono::milliseconds(40));
  });
  Instance instance("data_parallel", config(2));
  instance.setup(*model);
  stg_call call = sized<stg_call>();
  call.deadline_ns = now_ns() + 20'000'000;
  const Error error = train_with(instance, call, batch_of({1, 2}));
  CHECK(error.code == STG_DEADLINE_EXCEEDED);
  CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
  CHECK(instance.value("count") == 0);
  CHECK(instance.value("weight") == 1);
  is_slow = false;
  instance.train(batch_of({1, 1}));
  CHECK(instance.value("weight") == 0);
  CHECK(instance.value("count") == 1);
}

TEST_CASE("where nobody is waited for, the cancel flag and abort end a step before its update") {
  for (const std::string strategy : {"single_device", "data_parallel"}) {
    for (const bool aborts : {false, true}) {
      uint32_t cancel = 0;
      Instance* aborted = nullptr;
      const auto model = counting_model([&](const stg_step_context&) {
        if (aborts) {
          aborted->api.abort(aborted->self);
        } else {
          std::atomic_ref(cancel).store(1);
        }
      });
      Instance instance(strategy, config(1));
      aborted = &instance;
      instance.setup(*model);
      stg_call call = sized<stg_call>();
      call.cancel = &cancel;
      const Error error = train_with(instance, call, batch_of({1, 2}));
      CHECK(error.code == (aborts ? STG_ABORTED : STG_CANCELLED));
      CHECK(model->num_graphs == 0);
      if (aborts) continue;
      CHECK(instance.value("weight") == 1);
      CHECK(instance.value("count") == 0);
      CHECK(instance.status().num_updates == 0);
    }
  }
}

namespace {

// What a callback waits for: the host holds it around train_batch.
std::recursive_mutex host_lock;

// A metric whose reduction takes the host's lock. Never freed.
stg_opaque& locking_metric() {
  static stg_opaque metric = [] {
    stg_opaque made = sized<stg_opaque>();
    made.type_name = to_abi("metric");
    made.retain = [](stg_opaque*) {};
    made.release = [](stg_opaque*) {};
    made.reduce = [](stg_opaque* const* objects, uint64_t, stg_opaque** out) -> stg_error* {
      const std::lock_guard lock(host_lock);
      *out = objects[0];
      return nullptr;
    };
    return made;
  }();
  return metric;
}

}  // namespace

TEST_CASE("a lock that the host holds around a step is no trap for what is called back") {
  struct Tracing {
    bool in_all_phases;
    stg_host table = sized<stg_host>();
  };
  for (const bool in_all_phases : {false, true}) {
    Tracing tracing{in_all_phases};
    tracing.table.self = &tracing;
    tracing.table.trace_begin = [](void* self, stg_string phase, int32_t) {
      const bool is_of_model = text_of(phase) == "forward" || text_of(phase) == "backward";
      if (static_cast<Tracing*>(self)->in_all_phases || !is_of_model) const std::lock_guard lock(host_lock);
    };
    const auto model = linear_model(1);
    const auto step = model->on_step;
    model->on_step = [step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      ToyStep made = step(replica, context, batch);
      std::get<Dict>(made.outputs.data).emplace_back("metric", OpaquePtr{&locking_metric()});
      return made;
    };
    Instance instance("data_parallel", config(2), &tracing.table);
    instance.setup(*model);
    stg_update_args update = sized<stg_update_args>();
    update.lr = 1;
    Tree batch = batch_of({1, 1});
    stg_step_args args = sized<stg_step_args>();
    args.batch = batch.argument();
    args.flags = STG_BATCH_LAST_MICRO_BATCH;
    args.update = &update;
    stg_step_result result = sized<stg_step_result>();
    stg_call call = sized<stg_call>();
    call.deadline_ns = now_ns() + (in_all_phases ? 50'000'000u : 60'000'000'000u);
    const std::lock_guard lock(host_lock);
    stg_error* failure = instance.api.train_batch(instance.self, &call, &args, &result, nullptr);
    if (in_all_phases) {
      // Replica 1 can't even begin: that is told at the deadline.
      const Error error = error_of([&] { check(failure); });
      CHECK(error.code == STG_DEADLINE_EXCEEDED);
      CHECK_THAT(error.message, Catch::Contains("replica 1"));
    } else {
      check(failure);
      const Tree outputs{result.outputs};
      CHECK(find(outputs.root(), "metric")->type == STG_OPAQUE);
      CHECK(instance.value("weight") == 0);
    }
  }
}

TEST_CASE("the cancel flag and abort end a step that waits") {
  for (const bool aborts : {false, true}) {
    std::atomic<bool> is_stuck{true};
    std::atomic<bool> has_begun{false};
    const auto model = counting_model([&](const stg_step_context& context) {
      if (context.replica == 1) has_begun = true;
      while (context.replica == 1 && is_stuck) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    Instance instance("data_parallel", config(2));
    instance.setup(*model);
    uint32_t cancel = 0;
    stg_call call = sized<stg_call>();
    call.cancel = &cancel;
    std::thread other([&] {
      while (!has_begun) std::this_thread::yield();
      if (aborts) {
        instance.api.abort(instance.self);
      } else {
        std::atomic_ref(cancel).store(1);
      }
    });
    const Error error = train_with(instance, call, batch_of({1, 2}));
    other.join();
    CHECK(error.code == (aborts ? STG_ABORTED : STG_CANCELLED));
    CHECK(instance.status().state == STG_STATE_DRAINING);
    is_stuck = false;
  }
}

TEST_CASE("with caller_thread_only replicas run one after the other on the calling thread, with the same results") {
  std::mutex mutex;
  std::vector<std::thread::id> threads;
  const auto model = counting_model([&](const stg_step_context&) {
    const std::lock_guard lock(mutex);
    threads.push_back(std::this_thread::get_id());
  });
  Instance sequential("data_parallel", config(3), nullptr, STG_CREATE_CALLER_THREAD_ONLY);
  sequential.setup(*model);
  for (int i = 0; i < 3; ++i) sequential.train(batch_of({0.1, 0.5, 0.7, 0.2 * i}), 0.1, STG_CLIP_NORM, 0.3);
  for (const std::thread::id thread : threads) CHECK(thread == std::this_thread::get_id());
  CHECK(threads.size() == 9);
  Instance parallel("data_parallel", config(3));
  parallel.setup(*model);
  for (int i = 0; i < 3; ++i) parallel.train(batch_of({0.1, 0.5, 0.7, 0.2 * i}), 0.1, STG_CLIP_NORM, 0.3);
  CHECK(model_bytes(sequential.export_state()) == model_bytes(parallel.export_state()));
}
