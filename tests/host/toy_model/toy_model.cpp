// SPDX-License-Identifier: Apache-2.0
//
// The model of the loop's tests, without LibTorch, so small that every number is worked out by hand: one weight w, the loss of a sample
// is w * x, so the gradient of a batch is the mean of x. Options:
//
//   w          its first value
//   trace      a file to which each training step appends its samples
//   name       of its weight
//   raise_at   {"step": n, "signal": s, "times": t, "stage": u}: raises the signal in a step of the stage (0: fit) after n updates
//   farewell   a file to which each thread that created a model writes when it ends
//   predicts_loss  predict_step gives a loss, too, which has no row per sample
//   fails      "create" or "replicate": throws there; "replicate of 1": there is no memory for replica 1
//   scores     in evaluation, "score" is the entry of the number of updates done, past the end the last one; null is not a number
//   draws      each step, in whatever stage, draws from its generator and counts in a buffer, and both are part of the gradient
//   counts     the mean is over the samples that aren't 0, and each step reports how many those are as its denominator
//   num_classes  targets must lie below it, as a classifier would have it
#include <stratagem/plugin.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "base/structs.hpp"
#include "base/value.hpp"

using namespace stratagem;

// Of one replica; its memory may be lent by the strategy (bind).
struct stg_replica {
  TensorPtr weight;
  std::string name_text;
  stg_string name{};
  stg_parameter parameter = sized<stg_parameter>();
  const stg_parameter* parameters[1] = {&parameter};
  // With "draws".
  int64_t num_drawn = 0;
  TensorPtr count;
  stg_string count_name = to_abi("count");
  stg_parameter buffer = sized<stg_parameter>();
  const stg_parameter* buffers[1] = {&buffer};

  void add_buffer() {
    count = allocate_tensor(float32, {1});
    *first_element<float>(count->view) = 0;
    buffer.names = &count_name;
    buffer.num_names = 1;
    buffer.tensor = count.get();
    buffer.flags = STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
  }
  /// What one step draws and counts.
  double draw() {
    if (!count) return 0;
    float& counted = *first_element<float>(count->view);
    counted += 1;
    return static_cast<double>(++num_drawn) * 0.25 + static_cast<double>(counted) * 8;
  }

  void describe_as(TensorPtr tensor) {
    weight = std::move(tensor);
    name = to_abi(name_text);
    parameter.names = &name;
    parameter.num_names = 1;
    parameter.tensor = weight.get();
    parameter.flags = STG_PARAMETER_REQUIRES_GRAD | STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
  }
  double value() const { return read_element(weight->view, 0); }
};

struct stg_graph {
  double gradient;
};

namespace {

// What a plugin leaves in a thread that used it: it runs when that thread ends, though everything of the plugin was let go before.
struct Farewell {
  std::string file;
  ~Farewell() {
    if (!file.empty()) std::ofstream(file, std::ios::app) << "farewell\n";
  }
};
thread_local Farewell farewell;

void write_element(const stg_tensor_view& view, double value) {
  if (view.dtype.bits == 64) {
    *first_element<double>(view) = value;
  } else {
    *first_element<float>(view) = static_cast<float>(value);
  }
}

TensorPtr scalar(stg_dtype dtype, double value) {
  TensorPtr tensor = allocate_tensor(dtype, {});
  write_element(tensor->view, value);
  return tensor;
}

struct Toy {
  explicit Toy(nlohmann::json given) : options(std::move(given)) {}
  nlohmann::json options;
  std::atomic<int> num_references{1};
  stg_model table = sized<stg_model>();

  void trace(const stg_tensor_view& inputs) const {
    std::ofstream out(options["trace"].get<std::string>(), std::ios::app);
    for (int64_t i = 0; i < numel(inputs); ++i) out << (i == 0 ? "" : " ") << read_element(inputs, i);
    out << "\n";
  }
  double score(int64_t num_updates) const {
    const nlohmann::json& scores = options["scores"];
    const nlohmann::json& value = scores.at(std::min(static_cast<size_t>(num_updates), scores.size() - 1));
    return value.is_null() ? std::nan("") : value.get<double>();
  }
  void maybe_fail(const char* where) const {
    if (options.value("fails", "") == where) throw std::runtime_error("the toy was told to fail");
  }
  void maybe_raise(const stg_step_context& context) const {
    const nlohmann::json at = options.value("raise_at", nlohmann::json());
    if (at.is_null() || at.at("step") != context.global_step || at.value("stage", 0u) != context.stage) return;
    for (int i = 0; i < at.value("times", 1); ++i) std::raise(at.at("signal").get<int>());
  }
};

void check_targets(const stg_tensor_view& targets, int64_t num_classes) {
  for (int64_t i = 0; i < numel(targets); ++i) {
    const double label = read_element(targets, i);
    if (label >= static_cast<double>(num_classes))
      throw invalid_argument("[\"targets\"]: label ", label, " at row ", i, "; there are ", num_classes, " classes");
  }
}

void step(const Toy& toy, stg_replica& replica, const stg_step_context& context, const Tree& batch,
          stg_model_step_result* result) {
  const stg_value* inputs = find(batch.root(), "inputs");
  if (inputs == nullptr || inputs->type != STG_TENSOR) throw invalid_argument("the batch has no tensor [\"inputs\"]");
  const stg_tensor_view& view = inputs->as.tensor->view;
  const stg_value* targets = find(batch.root(), "targets");
  if (targets != nullptr && toy.options.contains("num_classes"))
    check_targets(targets->as.tensor->view, toy.options["num_classes"]);
  const bool counts = toy.options.value("counts", false);
  double sum = 0;
  double count = 0;
  for (int64_t i = 0; i < numel(view); ++i) {
    sum += read_element(view, i);
    count += !counts || read_element(view, i) != 0 ? 1 : 0;
  }
  if (counts) {
    result->denominator.type = STG_DOUBLE;
    result->denominator.as.f64 = count;
  }
  const double mean = sum / count + replica.draw();  // NaN of nothing
  const stg_dtype dtype = replica.weight->view.dtype;
  Dict outputs;
  outputs.emplace_back("loss", scalar(dtype, replica.value() * mean));
  if (context.stage == STG_STAGE_FIT) {
    if (toy.options.contains("trace")) toy.trace(view);
  } else if (context.stage == STG_STAGE_PREDICT) {
    if (!toy.options.value("predicts_loss", false)) outputs.clear();
    outputs.emplace_back("x", copy_tensor(view));
    List boxes;
    boxes.emplace_back(copy_tensor(view));
    outputs.emplace_back("boxes", std::move(boxes));
  } else {
    outputs.emplace_back("mean_x", scalar(dtype, mean));
    outputs.emplace_back("w", scalar(float64, replica.value()));
    if (toy.options.contains("scores")) outputs.emplace_back("score", scalar(float64, toy.score(context.global_step)));
    outputs.emplace_back("predictions", copy_tensor(view));
  }
  toy.maybe_raise(context);
  result->outputs = make_tree(std::move(outputs)).give();
  if ((context.flags & STG_STEP_GRADIENT) != 0) result->graph = new stg_graph{mean};
}

void fill_table(Toy* toy) {
  stg_model& table = toy->table;
  table.self = toy;
  table.retain = [](void* self) { ++static_cast<Toy*>(self)->num_references; };
  table.release = [](void* self) {
    if (--static_cast<Toy*>(self)->num_references == 0) delete static_cast<Toy*>(self);
  };
  table.replicate = [](void* self, const stg_replicate_args* args, stg_replica** out) {
    return guard([&] {
      const stg_dtype dtype = args->floating_dtype.bits == 0 ? float32 : args->floating_dtype;
      static_cast<Toy*>(self)->maybe_fail("replicate");
      if (static_cast<Toy*>(self)->options.value("fails", "") == concat("replicate of ", args->replica)) throw std::bad_alloc();
      auto replica = std::make_unique<stg_replica>();
      TensorPtr weight = allocate_tensor(dtype, {1, 1});
      write_element(weight->view, static_cast<Toy*>(self)->options.value("w", 0.0));
      replica->name_text = static_cast<Toy*>(self)->options.value("name", "weight");
      replica->describe_as(std::move(weight));
      if (static_cast<Toy*>(self)->options.value("draws", false)) replica->add_buffer();
      *out = replica.release();
    });
  };
  table.destroy_replica = [](void*, stg_replica* replica) { delete replica; };
  table.describe = [](void*, stg_replica* replica, stg_model_description* out) {
    return guard([&] {
      auto description = sized<stg_model_description>();
      description.parameters = replica->parameters;
      description.num_parameters = 1;
      description.buffers = replica->buffers;
      description.num_buffers = replica->count ? 1 : 0;
      description.loss_kind = STG_LOSS_MEAN;
      write_result(out, description);
    });
  };
  table.set_mode = [](void*, stg_replica*, uint32_t) -> stg_error* { return nullptr; };
  table.step = [](void* self, stg_replica* replica, const stg_step_context* context, stg_tree* batch,
                  stg_model_step_result* result) {
    return guard([&] { step(*static_cast<Toy*>(self), *replica, *context, Tree::receive(batch), result); });
  };
  table.backward = [](void*, stg_replica* replica, stg_graph* graph, double scale, uint32_t, const stg_gradient_sink* sink) {
    return guard([&] {
      const std::unique_ptr<stg_graph> owned(graph);
      TensorPtr gradient = allocate_tensor(replica->weight->view.dtype, {1, 1});
      write_element(gradient->view, owned->gradient * scale);
      check(sink->ready(sink->self, 0, gradient.release(), nullptr));
    });
  };
  table.release_graph = [](void*, stg_replica*, stg_graph* graph) { delete graph; };
  table.bind = [](void*, stg_replica* replica, uint64_t, const stg_tensor* storage, const stg_tensor*) {
    return guard([&] { replica->describe_as(make_tensor(nullptr, first_element(storage->view), storage->view.dtype, {1, 1})); });
  };
  // The state of a generator is how often it was drawn from.
  table.get_generator_state = [](void*, stg_replica* replica, stg_tree* out) {
    return guard([&] {
      Bytes state;
      const auto* drawn = reinterpret_cast<const uint8_t*>(&replica->num_drawn);
      if (replica->count) state.data.assign(drawn, drawn + sizeof replica->num_drawn);
      *out = make_tree(Value(std::move(state))).give();
    });
  };
  table.set_generator_state = [](void*, stg_replica* replica, const uint8_t* state, uint64_t size_bytes) -> stg_error* {
    if (size_bytes == sizeof replica->num_drawn) std::memcpy(&replica->num_drawn, state, size_bytes);
    return nullptr;
  };
}

stg_error* create(stg_string options, const stg_host*, const stg_model** out) {
  return guard([&] {
    auto toy = std::make_unique<Toy>(nlohmann::json::parse(text_of(options)));
    farewell.file = toy->options.value("farewell", "");
    toy->maybe_fail("create");
    fill_table(toy.get());
    *out = &toy.release()->table;
  });
}

constexpr const char* schema = R"({"type": "object", "additionalProperties": false, "properties": {
  "w": {"type": "number"}, "name": {"type": "string"}, "trace": {"type": "string"}, "num_classes": {"type": "integer", "minimum": 1},
  "scores": {"type": "array", "minItems": 1, "items": {"type": ["number", "null"]}}, "draws": {"type": "boolean"}, "counts": {"type": "boolean"},
  "farewell": {"type": "string"}, "predicts_loss": {"type": "boolean"}, "fails": {"type": "string"},
  "raise_at": {"type": "object", "additionalProperties": false, "required": ["step", "signal"],
               "properties": {"step": {"type": "integer"}, "signal": {"type": "integer"}, "times": {"type": "integer"}, "stage": {"type": "integer"}}}}})";

const stg_plugin* plugin() {
  static const stg_model_factory factory = [] {
    auto made = sized<stg_model_factory>();
    made.name = to_abi("toy");
    made.summary = to_abi("one weight");
    made.options_schema = to_abi(schema);
    made.create = create;
    return made;
  }();
  static const stg_model_factory* const factories[] = {&factory};
  static const stg_plugin table = [] {
    auto made = sized<stg_plugin>();
    made.name = to_abi("toy_model");
    made.version = to_abi("1.0.0");
    made.models = factories;
    made.num_models = 1;
    return made;
  }();
  return &table;
}

}  // namespace

#ifdef TOY_LIBTORCH
#define TOY_BUILT_WITH ", \"libtorch\": \"" TOY_LIBTORCH "\""
#else
#define TOY_BUILT_WITH ""
#endif
STG_PLUGIN_NOTE(
    R"({"name": "toy_model", "version": "1.0.0", "abi": {"major": 1, "min_minor": 0, "max_minor": 0}, "strategies": [], "models": ["toy"])" TOY_BUILT_WITH
    "}");

extern "C" STG_EXPORT uint32_t stg_plugin_probe(const stg_probe_request*, stg_probe_reply* reply) {
  reply->abi_major = STG_ABI_MAJOR;
  reply->min_minor = 0;
  reply->max_minor = STG_ABI_MINOR;
  reply->minor = STG_ABI_MINOR;
  reply->plugin = plugin();
  reply->text_size_bytes = 0;
  return STG_PROBE_ACCEPTED;
}
