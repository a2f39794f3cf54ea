// SPDX-License-Identifier: Apache-2.0
#include "strategy/state.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <iterator>
#include <map>

#include "base/dlpack.hpp"
#include "strategy/elements.hpp"

namespace stratagem {

namespace {

// ---- out

Value lend(const std::shared_ptr<Training>& training, const stg_tensor& tensor, bool copies) {
  const stg_tensor_view& view = tensor.view;
  // From an accelerator always: whoever gets it may have another one, or none.
  if (copies || !is_in_host_memory(view.device)) return copy_to_host(view);
  TensorPtr lent = make_strided_tensor(training, view.data, view.dtype, {view.shape, view.shape + view.num_dims},
                                       strides_of(view), 0, view.device);
  lent->view.byte_offset = view.byte_offset;
  return lent;
}

bool has_floating_memory(const ReplicaSlot& root) {
  return std::find(root.pinned.begin(), root.pinned.end(), false) != root.pinned.end() ||
         std::find(root.buffer_pinned.begin(), root.buffer_pinned.end(), false) != root.buffer_pinned.end();
}

Value export_optimizer(const std::shared_ptr<Training>& training, bool copies) {
  if (!training->optimizer) return {};
  const Optimizer& optimizer = *training->optimizer;
  const ReplicaSlot& root = training->replicas.root();
  Dict per_parameter;
  for (size_t p = 0; p < root.parameters.size(); ++p) {
    if (!optimizer.is_begun(p)) continue;
    Dict slots;
    for (size_t s = 0; s < optimizer.slots().size(); ++s) {
      const stg_tensor* whole = optimizer.state(p, s);
      slots.emplace_back(optimizer.slots()[s],
                         whole != nullptr ? lend(training, *whole, copies) : Value(optimizer.copy_state(p, s)));
    }
    if (optimizer.has_step()) {
      TensorPtr step = allocate_tensor(float32, {});
      *first_element<float>(step->view) = static_cast<float>(optimizer.steps(p));
      slots.emplace_back("step", std::move(step));
    }
    if (!slots.empty()) per_parameter.emplace_back(root.parameter_infos[p].names[0], std::move(slots));
  }
  Dict dict;
  dict.emplace_back("name", optimizer.name());
  dict.emplace_back("step", static_cast<int64_t>(training->num_updates));
  dict.emplace_back("per_parameter", std::move(per_parameter));
  return dict;
}

Value export_scaler(const Training& training) {
  if (!training.scaler) return {};
  Dict dict;
  dict.emplace_back("scale", training.scaler->scale);
  dict.emplace_back("good_steps", training.scaler->good_steps);
  return dict;
}

Bytes generator_state(const ReplicaSlot& slot) {
  const Tree tree = slot.generator_state();
  return Bytes{{tree.root().as.bytes, tree.root().as.bytes + tree.root().count}};
}

void set_generator_state(const ReplicaSlot& slot, const Bytes& state) {
  slot.set_generator_state(state.data.data(), state.data.size());
}

List export_generators(Training& training) {
  List generators;
  for (size_t i = 0; i < training.replicas.size(); ++i) {
    const ReplicaSlot& slot = training.replicas[i];
    const stg_model& table = slot.model().model().table();
    if (table.get_generator_state == nullptr) return {};
    slot.guarded("the export of its generator", [&] { generators.push_back(generator_state(slot)); });
  }
  for (const Bytes& further : training.further_generators) generators.push_back(further);
  return generators;
}

// ---- in

// A tensor of the state, in the type of what it will be written to.
struct Source {
  Source(const stg_tensor& given, stg_dtype dtype) : tensor(&given) {
    if (same_dtype(dtype, given.view.dtype)) return;
    converted = cast_tensor(given.view, dtype);
    tensor = converted.get();
  }
  const stg_tensor* tensor;
  TensorPtr converted;  // where the types differ
};

// What is to be written, once everything has been looked at.
struct Copy {
  const stg_tensor* to;
  Source from;
};
struct SlotCopy {
  size_t parameter;
  size_t slot;
  Source from;
};

class Import {
 public:
  Import(Training& training, const stg_value& state, bool strict) : training_(training), state_(state), strict_(strict) {}

  ImportReport run() {
    check_format();
    plan_model();
    plan_optimizer();
    plan_scaler();
    plan_generators();
    if (strict_) refuse();
    // A state of another precision: the run scales as it would from its beginning, so that is no reason to refuse.
    if (training_.scaler && !scaler_) report_.missing.emplace_back("scaler");
    apply();
    return std::move(report_);
  }

 private:
  void check_format() {
    if (state_.type != STG_DICT) throw invalid_argument("the state is a ", type_name(state_.type), "; it must be a dict");
    const stg_value* format = find(state_, "format");
    if (format == nullptr || format->type != STG_INT64)
      throw invalid_argument("the state has no int64 under \"format\"; this ABI's states have ", STG_STATE_FORMAT);
    if (format->as.i64 != STG_STATE_FORMAT) {
      throw unimplemented("the state has the format ", format->as.i64, "; this plugin knows ", STG_STATE_FORMAT);
    }
    static const std::vector<std::string> known{"format", "model", "aliases", "optimizer", "scaler", "generators"};
    for (uint32_t e = 0; e < state_.count; ++e) {
      const std::string key(text_of(state_.as.entries[e].key));
      if (std::find(known.begin(), known.end(), key) == known.end()) report_.unknown_keys.push_back(key);
    }
  }

  const stg_value* dict_at(const stg_value& parent, const char* key, const char* what) const {
    const stg_value* value = find(parent, key);
    if (value == nullptr || value->type == STG_NONE) return nullptr;
    if (value->type != STG_DICT)
      throw invalid_argument("the state's ", what, " is a ", type_name(value->type), "; it must be a dict");
    return value;
  }

  const stg_tensor& tensor_at(const stg_value& value, const std::string& name) {
    if (value.type != STG_TENSOR)
      throw invalid_argument("the state's ", name, " is a ", type_name(value.type), "; it must be a tensor");
    const stg_tensor& tensor = *value.as.tensor;
    check_reachable(tensor.view, "the state's ", name);
    if (is_in_host_memory(tensor.view.device)) return tensor;
    return *in_host_memory_.emplace_back(copy_to_host(tensor.view));
  }

  // Whether `from` can be put into `to`; else notes why not.
  bool fits(const stg_tensor& to, const stg_tensor& from, const std::string& name) {
    const bool same_shape = std::ranges::equal(shape_of(to.view), shape_of(from.view));
    const bool same_kind =
        same_dtype(to.view.dtype, from.view.dtype) || (is_floating(to.view.dtype) && is_floating(from.view.dtype));
    if (same_shape && same_kind) return true;
    misfits_.push_back(concat(name, " (", dtype_name(from.view.dtype), " ", shape_text(from.view), " in the state, ",
                              dtype_name(to.view.dtype), " ", shape_text(to.view), " here)"));
    report_.missing.push_back(name);
    report_.unexpected.push_back(name);
    return false;
  }

  // The model's names are looked up under any name of a parameter; each of them must be there, as main name or as alias.
  void plan_model() {
    const stg_value* model = dict_at(state_, "model", "model");
    const stg_value* aliases = dict_at(state_, "aliases", "aliases");
    if (model == nullptr) throw invalid_argument("the state has no \"model\"");
    ReplicaSlot& root = training_.replicas.root();
    for (size_t p = 0; p < root.parameters.size(); ++p) {
      plan_parameter(*model, aliases, root.parameter_infos[p], *root.parameters[p], root.pinned[p]);
    }
    for (size_t b = 0; b < root.buffers.size(); ++b) {
      if (root.buffer_infos[b].persistent)
        plan_parameter(*model, aliases, root.buffer_infos[b], *root.buffers[b], root.buffer_pinned[b]);
    }
    for (uint32_t e = 0; e < model->count; ++e) note_unexpected(std::string(text_of(model->as.entries[e].key)));
    for (uint32_t e = 0; aliases != nullptr && e < aliases->count; ++e)
      note_unexpected(std::string(text_of(aliases->as.entries[e].key)));
  }

  void plan_parameter(const stg_value& model, const stg_value* aliases, const ParameterInfo& info, const stg_tensor& to,
                      bool is_pinned) {
    const stg_value* found = nullptr;
    for (const std::string& name : info.names) {
      used_names_[name] = true;
      if (const stg_value* value = find(model, name)) {
        if (found == nullptr) found = value;
        continue;
      }
      const stg_value* alias = aliases == nullptr ? nullptr : find(*aliases, name);
      const stg_value* target = alias != nullptr && alias->type == STG_STRING ? find(model, text_of(*alias)) : nullptr;
      if (target == nullptr) {
        report_.missing.push_back(name);
      } else if (found == nullptr) {
        found = target;
      }
    }
    if (found == nullptr) return;
    const stg_tensor& from = tensor_at(*found, info.names[0]);
    if (!fits(to, from, info.names[0])) return;
    if (!is_pinned) {
      throw failed_precondition("the model's ", info.names[0],
                                " can't be written in place (it is floating or read-only), so no state can be imported");
    }
    copies_.push_back({&to, Source(from, to.view.dtype)});
  }

  void note_unexpected(const std::string& name) {
    if (!used_names_.contains(name)) report_.unexpected.push_back(name);
  }

  void plan_optimizer() {
    if (!training_.optimizer) return;
    const Optimizer& optimizer = *training_.optimizer;
    const stg_value* given = dict_at(state_, "optimizer", "optimizer");
    if (given == nullptr) {
      report_.missing.emplace_back("optimizer");
      return;
    }
    const stg_value* name = find(*given, "name");
    if (name == nullptr || name->type != STG_STRING) throw invalid_argument("the state's optimizer has no \"name\"");
    if (text_of(*name) != optimizer.name()) {
      misfits_.push_back(concat("optimizer (", text_of(*name), " in the state, ", optimizer.name(), " here)"));
      report_.unexpected.emplace_back("optimizer");
      return;
    }
    const stg_value* step = find(*given, "step");
    if (step == nullptr || step->type != STG_INT64 || step->as.i64 < 0)
      throw invalid_argument("the state's optimizer has no \"step\" of at least 0");
    num_updates_ = static_cast<uint64_t>(step->as.i64);
    takes_optimizer_ = true;
    for (uint32_t e = 0; e < given->count; ++e) {
      const std::string_view key = text_of(given->as.entries[e].key);
      if (key != "name" && key != "step" && key != "per_parameter") report_.unknown_keys.push_back(concat("optimizer.", key));
    }
    if (const stg_value* per_parameter = dict_at(*given, "per_parameter", "optimizer.per_parameter")) plan_slots(*per_parameter);
  }

  void plan_slots(const stg_value& per_parameter) {
    const ReplicaSlot& root = training_.replicas.root();
    std::map<std::string_view, size_t> by_name;
    for (size_t p = 0; p < root.parameters.size(); ++p) {
      for (const std::string& name : root.parameter_infos[p].names) {
        if (root.parameter_infos[p].requires_grad) by_name.emplace(name, p);
      }
    }
    for (uint32_t e = 0; e < per_parameter.count; ++e) {
      const std::string name(text_of(per_parameter.as.entries[e].key));
      const stg_value& slots = per_parameter.as.entries[e].value;
      const auto found = by_name.find(name);
      if (found == by_name.end()) {
        report_.unexpected.push_back("optimizer." + name);
        continue;
      }
      if (slots.type != STG_DICT)
        throw invalid_argument("the state's optimizer.per_parameter.", name, " is a ", type_name(slots.type),
                               "; it must be a dict");
      plan_parameter_slots(found->second, name, slots);
    }
  }

  void plan_parameter_slots(size_t p, const std::string& name, const stg_value& slots) {
    const Optimizer& optimizer = *training_.optimizer;
    const stg_tensor& parameter = *training_.replicas.root().parameters[p];  // a slot is like it
    std::vector<SlotCopy> copies;
    bool is_whole = true;
    for (size_t s = 0; s < optimizer.slots().size(); ++s) {
      const std::string place = concat("optimizer.", name, ".", optimizer.slots()[s]);
      const stg_value* value = find(slots, optimizer.slots()[s]);
      if (value == nullptr) report_.missing.push_back(place);
      const stg_tensor* from = value == nullptr ? nullptr : &tensor_at(*value, place);
      if (from == nullptr || !fits(parameter, *from, place)) {
        is_whole = false;
      } else {
        copies.push_back({p, s, Source(*from, parameter.view.dtype)});
      }
    }
    int64_t steps = 1;  // SGD counts none, but its momentum has begun
    if (optimizer.has_step()) {
      const stg_value* step = find(slots, "step");
      if (step == nullptr) {
        report_.missing.push_back(concat("optimizer.", name, ".step"));
        is_whole = false;
      } else {
        steps = read_step(*step, name);
      }
    }
    for (uint32_t e = 0; e < slots.count; ++e) {
      const std::string slot(text_of(slots.as.entries[e].key));
      const bool is_known =
          std::ranges::find(optimizer.slots(), slot) != optimizer.slots().end() || (slot == "step" && optimizer.has_step());
      if (!is_known) report_.unexpected.push_back(concat("optimizer.", name, ".", slot));
    }
    if (!is_whole) return;
    std::ranges::move(copies, std::back_inserter(slot_copies_));
    steps_[p] = steps;
  }

  int64_t read_step(const stg_value& value, const std::string& name) {
    double step = std::nan("");
    if (value.type == STG_INT64) step = static_cast<double>(value.as.i64);
    if (value.type == STG_DOUBLE) step = value.as.f64;
    if (value.type == STG_TENSOR) {
      const stg_tensor& tensor = tensor_at(value, "optimizer." + name + ".step");
      if (numel(tensor.view) == 1) step = read_element(tensor.view, 0);
    }
    if (!(step >= 0) || step > 9e15) throw invalid_argument("the state's optimizer.", name, ".step is no number of at least 0");
    return static_cast<int64_t>(step);
  }

  void plan_scaler() {
    const stg_value* given = dict_at(state_, "scaler", "scaler");
    if (!training_.scaler) {
      // Nothing is lost without it, but whoever changes the precision may want to know.
      if (given != nullptr && training_.gradients) report_.unknown_keys.emplace_back("scaler");
      return;
    }
    if (given == nullptr) return;
    const stg_value* scale = find(*given, "scale");
    if (scale == nullptr || scale->type != STG_DOUBLE) throw invalid_argument("the state's scaler has no double under \"scale\"");
    if (!(scale->as.f64 >= LossScaler::smallest && scale->as.f64 <= LossScaler::largest))
      throw invalid_argument("the state's scaler.scale is ", scale->as.f64, "; it must be from 2^-24 to 2^127");
    const stg_value* good_steps = find(*given, "good_steps");
    if (good_steps == nullptr || good_steps->type != STG_INT64 || good_steps->as.i64 < 0)
      throw invalid_argument("the state's scaler has no \"good_steps\" of at least 0");
    for (uint32_t e = 0; e < given->count; ++e) {
      const std::string_view key = text_of(given->as.entries[e].key);
      if (key != "scale" && key != "good_steps") report_.unknown_keys.push_back(concat("scaler.", key));
    }
    // Another author's may count further.
    scaler_ = LossScaler{scale->as.f64, std::min(good_steps->as.i64, LossScaler::growth_interval - 1)};
  }

  void plan_generators() {
    const stg_value* given = find(state_, "generators");
    if (given == nullptr || given->type == STG_NONE) return;
    if (given->type != STG_LIST)
      throw invalid_argument("the state's generators are a ", type_name(given->type), "; they must be a list of bytes");
    for (uint32_t i = 0; i < given->count; ++i) {
      const stg_value& item = given->as.items[i];
      if (item.type != STG_BYTES)
        throw invalid_argument("the state's generators[", i, "] is a ", type_name(item.type), "; it must be bytes");
      generators_.push_back(Bytes{{item.as.bytes, item.as.bytes + item.count}});
    }
  }

  void refuse() const {
    if (report_.missing.empty() && report_.unexpected.empty() && misfits_.empty()) return;
    // What doesn't fit stands in both lists of the report; here it is told once, with both shapes.
    const auto others = [&](const std::vector<std::string>& names) {
      std::vector<std::string> rest;
      for (const std::string& name : names) {
        const bool is_misfit =
            std::any_of(misfits_.begin(), misfits_.end(), [&](const std::string& text) { return text.starts_with(name + " ("); });
        if (!is_misfit) rest.push_back(name);
      }
      return rest;
    };
    std::vector<std::string> parts;
    if (const auto missing = others(report_.missing); !missing.empty()) parts.push_back("missing: " + join(missing));
    if (const auto unexpected = others(report_.unexpected); !unexpected.empty())
      parts.push_back("unexpected: " + join(unexpected));
    if (!misfits_.empty()) parts.push_back("different: " + join(misfits_));
    throw invalid_argument(
        "the state doesn't fit the model; ", join(parts, "; "),
        "; use the model and the optimizer that it comes from (a host takes what fits by an import without STG_IMPORT_STRICT)");
  }

  // Generators first: a model may refuse one. Nothing after that can fail.
  void apply() {
    apply_generators();
    for (const Copy& copy : copies_) copy_elements(copy.to->view, copy.from.tensor->view);
    if (takes_optimizer_) {
      for (const SlotCopy& copy : slot_copies_) training_.optimizer->write_state(copy.parameter, copy.slot, *copy.from.tensor);
      training_.num_updates = num_updates_;
      for (size_t p = 0; p < training_.replicas.root().parameters.size(); ++p) {
        const auto begun = steps_.find(p);
        training_.optimizer->set_steps(p, begun == steps_.end() ? 0 : begun->second);
      }
    }
    if (scaler_) training_.scaler = scaler_;
    for (size_t i = 1; i < training_.replicas.size(); ++i) {
      training_.replicas.copy_parameters(i);
      training_.replicas.copy_buffers(i);
    }
    training_.replicas.mark_parameters_dirty();
  }

  // All, or none: those that were set have their old states back after an error.
  void apply_generators() {
    if (generators_.empty()) return;
    const size_t num_own = std::min(training_.replicas.size(), generators_.size());
    std::vector<Bytes> further(generators_.begin() + static_cast<ptrdiff_t>(num_own), generators_.end());
    const stg_model& table = training_.replicas.root().model().model().table();
    std::vector<Bytes> before;
    for (size_t i = 0; i < num_own && table.set_generator_state != nullptr; ++i) {
      const ReplicaSlot& slot = training_.replicas[i];
      try {
        slot.guarded("the import of its generator", [&] {
          if (table.get_generator_state != nullptr) before.push_back(generator_state(slot));
          set_generator_state(slot, generators_[i]);
        });
      } catch (...) {
        for (size_t done = 0; done < before.size(); ++done) set_generator_state(training_.replicas[done], before[done]);
        throw;
      }
    }
    training_.further_generators = std::move(further);
  }

  Training& training_;
  const stg_value& state_;
  bool strict_;
  ImportReport report_;
  std::vector<std::string> misfits_;
  std::map<std::string, bool> used_names_;
  std::vector<Copy> copies_;
  std::vector<SlotCopy> slot_copies_;
  std::deque<TensorPtr> in_host_memory_;  // of tensors that came on an accelerator
  bool takes_optimizer_ = false;
  uint64_t num_updates_ = 0;
  std::map<size_t, int64_t> steps_;
  std::optional<LossScaler> scaler_;
  std::vector<Bytes> generators_;
};

}  // namespace

Tree export_training_state(const std::shared_ptr<Training>& training, bool copies) {
  ReplicaSlot& root = training->replicas.root();
  // Floating memory is valid until the model's next call only, so it is asked for again.
  if (has_floating_memory(root)) root.describe();
  Dict model;
  Dict aliases;
  const auto add = [&](const ParameterInfo& info, const stg_tensor& tensor) {
    model.emplace_back(info.names[0], lend(training, tensor, copies));
    for (size_t n = 1; n < info.names.size(); ++n) aliases.emplace_back(info.names[n], info.names[0]);
  };
  for (size_t p = 0; p < root.parameters.size(); ++p) add(root.parameter_infos[p], *root.parameters[p]);
  for (size_t b = 0; b < root.buffers.size(); ++b) {
    if (root.buffer_infos[b].persistent) add(root.buffer_infos[b], *root.buffers[b]);
  }
  Dict state;
  state.emplace_back("format", int64_t{STG_STATE_FORMAT});
  state.emplace_back("model", std::move(model));
  state.emplace_back("aliases", std::move(aliases));
  state.emplace_back("optimizer", export_optimizer(training, copies));
  state.emplace_back("scaler", export_scaler(*training));
  state.emplace_back("generators", export_generators(*training));
  return make_tree(std::move(state));
}

ImportReport import_training_state(Training& training, const stg_value& state, bool strict) {
  return Import(training, state, strict).run();
}

}  // namespace stratagem
