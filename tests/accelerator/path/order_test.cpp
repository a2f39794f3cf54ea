// SPDX-License-Identifier: Apache-2.0
//
// Each wait of the accelerator path, and each memory that is kept for a stream, is needed: left out by its name, the detector reports it.
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <regex>
#include <set>
#include <sstream>

#include "accelerator/path/emulated_rig.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"(, "optimizer": {"name": "sgd", "momentum": 0.9})";

at::Device device(int index) { return {at::kPrivateUse1, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream other_stream(int index) {
  return c10::impl::VirtualGuardImpl(at::kPrivateUse1).getStreamFromGlobalPool(device(index), false);
}

stg_stream abi_stream(const c10::Stream& stream) {
  stg_stream out{};
  check(emulated::transport().native_stream(stream.pack3(), &out));
  return out;
}

// ---- what the path does

const std::string sharded = R"(, "options": {"optimizer_sharding": true, "first_bucket_mib": 0, "bucket_mib": 0})";

void train_on(const char* devices, const std::string& options = "") {
  const auto instance = on_accelerator("data_parallel", devices, sgd + options);
  instance->setup(model_of<Net>(R"({"norm": true})").get());
  for (int64_t step = 0; step < 3; ++step) {
    instance->accumulate(net_batch(8, step));
    instance->train(net_batch(9, 10 + step), 0.05, STG_CLIP_NORM, 0.5);
    instance->validate(net_batch(8, step));
    instance->training_step(net_batch(8, step));
    instance->backward(true);
    instance->gradients();
    instance->optimizer_step(0.05);
  }
  instance->export_state();
}

// The caller makes batches, and reads outputs, on a stream of its own, and lets them go at once.
void use_streams_of_the_caller() {
  const auto instance = on_accelerator("single_device", "[1]", sgd);
  instance->setup(model_of<Net>().get());
  const c10::Stream stream = other_stream(1);
  const stg_stream given = abi_stream(stream);
  stg_call call = sized<stg_call>();
  call.streams = &given;
  call.num_streams = 1;
  for (int64_t step = 0; step < 3; ++step) {
    Tree batch = net_batch(5, step);
    {
      const c10::StreamGuard guard(stream);
      for_each_leaf(batch.root(), [&](const KeyPath&, stg_value& leaf) {
        const TensorPtr before{leaf.as.tensor};
        const at::Tensor made = view_tensor(*before).to(device(1)).mul(2);
        if (step != 1) {
          leaf.as.tensor = to_dlpack(made).release();
          return;
        }
        at::Tensor pinned = at::empty_like(made, made.options().device(at::kCPU).pinned_memory(true));
        pinned.copy_(made, true);
        leaf.as.tensor = to_dlpack(pinned).release();
        leaf.as.tensor->view.device.kind = STG_DEVICE_CUDA_HOST;
      });
    }
    stg_step_args args = sized<stg_step_args>();
    args.batch = batch.argument();
    stg_step_result result = sized<stg_step_result>();
    check(instance->api.predict_step(instance->self, &call, &args, &result));
    Tree outputs{result.outputs};
    const c10::StreamGuard guard(stream);
    view_tensor(*outputs.root().as.tensor).mul(3);
  }
}

// Reads a parameter when every gradient is there already: of the input, whose own is asked for.
class Late : public TensorModel {
 public:
  explicit Late(const nlohmann::json&) : w_(register_parameter("w", at::ones({6}))) {}
  StepOutput training_step(const Batch& batch, const StepContext&) override {
    const at::Tensor x = batch["x"].tensor().detach().requires_grad_();
    return x.mul(w_.detach()).mul(w_).pow(2).mean();
  }

 private:
  at::Tensor w_;
};

void read_parameters_late() {
  const auto instance = on_accelerator("data_parallel", "[0, 0]", sgd);
  instance->setup(model_of<Late>().get());
  for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(8, step), 0.05);
}

// Replica 1 throws after its batch norm has run.
class Failing : public Net {
 public:
  using Net::Net;
  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    StepOutput made = Net::training_step(batch, context);
    if (context.batch_index == 1 && context.replica == 1) throw Error{STG_INTERNAL, "as it was told"};
    return made;
  }
};

void fail_a_step() {
  const auto instance = on_accelerator("data_parallel", "[0, 0, 1]", sgd);
  instance->setup(model_of<Failing>(R"({"norm": true})").get());
  instance->train(net_batch(9, 0), 0.05);
  stg_update_args update = sized<stg_update_args>();
  update.lr = 0.05;
  stg_step_args args = sized<stg_step_args>();
  Tree batch = net_batch(9, 1);
  args.batch = batch.argument();
  args.batch_index = 1;
  args.update = &update;
  args.flags = STG_BATCH_LAST_MICRO_BATCH;
  stg_step_result result = sized<stg_step_result>();
  const Error error = error_of([&] { check(instance->api.train_batch(instance->self, nullptr, &args, &result, nullptr)); });
  CHECK_THAT(error.message, Catch::Contains("as it was told") && Catch::Contains("replica 1"));
  instance->train(net_batch(9, 2), 0.05);
}

// Its denominator is on the device.
class Counted : public Net {
 public:
  using Net::Net;
  StepOutput training_step(const Batch& batch, const StepContext& context) override {
    return Net::training_step(batch, context).over(batch["y"].tensor().square().sum());
  }
};

void weigh_on_devices(const std::string& options) {
  const auto instance = on_accelerator("data_parallel", "[0, 1, 0]", sgd + options);
  instance->setup(model_of<Counted>().get());
  for (int64_t step = 0; step < 3; ++step) {
    instance->accumulate(net_batch(8, step));
    instance->train(net_batch(9, 10 + step), 0.05);
    instance->train(net_batch(2, 20 + step), 0.05, STG_CLIP_NORM, 0.5);
  }
}

// Hands gradients on from a stream of its own, and keeps none.
const stg_model* inner_model;

stg_error* ready_on_own_stream(void* self, uint64_t index, stg_tensor* gradient, const stg_stream*) {
  const auto* sink = static_cast<const stg_gradient_sink*>(self);
  if (gradient == nullptr) return sink->ready(sink->self, index, nullptr, nullptr);
  const at::Tensor given = to_tensor(TensorPtr{gradient});
  const c10::Stream stream = other_stream(given.get_device());
  c10::Event made(at::kPrivateUse1);
  made.record(c10::impl::VirtualGuardImpl(at::kPrivateUse1).getStream(given.device()));
  made.block(stream);
  const c10::StreamGuard guard(stream);
  const at::Tensor own = given.clone();
  given.record_stream(stream);
  const stg_stream told = abi_stream(stream);
  return sink->ready(sink->self, index, to_dlpack(own).release(), &told);
}

void report_gradients_from_another_stream() {
  const ModelPtr model = model_of<Net>();
  inner_model = model.get();
  stg_model table = *model;
  table.backward = [](void* self, stg_replica* replica, stg_graph* graph, double scale, uint32_t flags,
                      const stg_gradient_sink* sink) {
    stg_gradient_sink own = sized<stg_gradient_sink>();
    stg_gradient_sink its = *sink;
    own.self = &its;
    own.ready = &ready_on_own_stream;
    return inner_model->backward(self, replica, graph, scale, flags, &own);
  };
  for (const char* devices : {"[0]", "[0, 1]"}) {
    const auto instance = on_accelerator("data_parallel", devices, sgd);
    instance->setup(&table);
    for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(8, step), 0.05);
  }
}

// Replicas of one device that can't share their parameters.
void keep_weights_apart() {
  const ModelPtr model = model_of<Net>();
  stg_model table = *model;
  table.bind = nullptr;
  const auto instance = on_accelerator("data_parallel", "[0, 0]", sgd);
  instance->setup(&table);
  for (int64_t step = 0; step < 3; ++step) instance->train(net_batch(8, step), 0.05);
}

void reduce_gradients_of_a_host() {
  const auto instance = on_accelerator("data_parallel", "[0, 1, 0]", "");
  instance->setup(static_cast<const stg_model*>(nullptr));
  for (int round = 0; round < 2; ++round) {
    std::vector<stg_gradient_set> sets(3, sized<stg_gradient_set>());
    std::vector<std::vector<stg_tensor*>> gradients(3);
    std::vector<TensorPtr> owned;
    std::vector<at::Tensor> results;
    for (size_t i = 0; i < 3; ++i) {
      const int on = i == 1 ? 1 : 0;
      const c10::Stream stream = other_stream(on);
      const c10::StreamGuard guard(stream);
      results.push_back(at::ones({7}, at::TensorOptions().device(device(on))).mul(static_cast<double>(i + 1)));
      owned.push_back(to_dlpack(results.back()));
      gradients[i] = {owned.back().get()};
      sets[i].device = {STG_DEVICE_EXTENSION, on};
      sets[i].stream = abi_stream(stream);
      sets[i].weight = 1;
      sets[i].gradients = gradients[i].data();
      sets[i].num_gradients = 1;
    }
    std::vector<stg_gradient_set*> list{&sets[0], &sets[1], &sets[2]};
    stg_reduce_gradients_args args = sized<stg_reduce_gradients_args>();
    args.sets = list.data();
    args.num_sets = list.size();
    args.op = STG_REDUCE_MEAN;
    check(instance->api.reduce_gradients(instance->self, nullptr, &args));
    for (size_t i = 0; i < 3; ++i) {
      const c10::Stream stream =
          c10::Stream::unpack3(reinterpret_cast<intptr_t>(sets[i].stream.handle), results[i].device().index(), at::kPrivateUse1);
      const c10::StreamGuard guard(stream);
      if (!results[i].mul(1).cpu().equal(at::full({7}, 2.0)))
        throw std::runtime_error("the gradients of a host aren't their mean");
    }
  }
}

const std::vector<std::function<void()>> scenarios{[] { train_on("[0, 1]"); },
                                                   [] { train_on("[0, 1, 0, 1]"); },
                                                   [] { train_on("[0, 1, 0]", sharded); },
                                                   [] { weigh_on_devices(""); },
                                                   [] { weigh_on_devices(sharded); },
                                                   use_streams_of_the_caller,
                                                   read_parameters_late,
                                                   fail_a_step,
                                                   report_gradients_from_another_stream,
                                                   keep_weights_apart,
                                                   reduce_gradients_of_a_host};

// The names that stand in the sources.
std::set<std::string> places_in_sources() {
  std::set<std::string> names;
  const std::regex place(R"re((?:order::wait|order::keep|let_wait|wait_for_followers|let_followers_go_on)\s*\(\s*"([^"]+)")re");
  for (const char* folder : {SOURCES "/core/accelerator", SOURCES "/core/strategy"}) {
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() != ".cpp") continue;
      std::stringstream text;
      text << std::ifstream(entry.path()).rdbuf();
      const std::string content = text.str();
      for (std::sregex_iterator at(content.begin(), content.end(), place), end; at != end; ++at) {
        INFO((*at)[1]);
        CHECK(names.insert((*at)[1]).second);  // at one place each
      }
    }
  }
  return names;
}

}  // namespace

namespace {

// 3 runs, or as many as STRATAGEM_NUM_RUNS says.
int num_runs() {
  const char* told = std::getenv("STRATAGEM_NUM_RUNS");
  return told == nullptr ? 3 : std::atoi(told);
}

}  // namespace

TEST_CASE("The accelerator path runs without a report, with and without delays") {
  for (int run = 0; run < num_runs(); ++run) {
    for (const auto& scenario : scenarios) {
      begin_test();
      emulated::set_delays(static_cast<uint64_t>(run), std::chrono::microseconds(run == 0 ? 0 : 200));
      scenario();
      emulated::drain();
      CHECK(reports() == "");
    }
  }
}

TEST_CASE("Every wait of the accelerator path is missed when it is left out, and all memory that it keeps") {
  const std::set<std::string> names = places_in_sources();
  CHECK(names.size() > 12);
  for (const std::string& name : names) {
    bool is_come_by = false;
    std::string found;
    for (const auto& scenario : scenarios) {
      begin_test();
      leave_out(name);
      try {
        scenario();
      } catch (const std::exception&) {
        // what isn't there yet may be an error, too
      }
      emulated::drain();
      const std::vector<std::string> places = take_places();
      is_come_by = is_come_by || std::find(places.begin(), places.end(), name) != places.end();
      found += reports();
      if (!found.empty()) break;
    }
    leave_out("");
    INFO(name);
    CHECK(is_come_by);
    CHECK(found != "");
  }
}
