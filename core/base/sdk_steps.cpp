// SPDX-License-Identifier: Apache-2.0
//
// The entries for steps and for the state.
#include <cmath>
#include <exception>

#include "base/dlpack.hpp"
#include "base/sdk_entry.hpp"

namespace stratagem::sdk {

namespace {

stg_update_args checked_update(const stg_update_args* args) {
  const stg_update_args update = read_argument(args, STG_UPDATE_ARGS_MIN_SIZE, "stg_update_args");
  if (!std::isfinite(update.lr)) throw invalid_argument("stg_update_args.lr is ", update.lr, "; it must be finite");
  check_enumerator(update.clip, STG_CLIP_VALUE, "stg_update_args.clip");
  if (update.clip != STG_CLIP_NONE && !(update.clip_limit > 0)) {
    throw invalid_argument("stg_update_args.clip_limit is ", update.clip_limit, "; it must be over 0 with clipping");
  }
  return update;
}

// The moved batch is taken over even if what comes after fails; so this is the first thing that a step does.
struct RawStep {
  explicit RawStep(const stg_step_args* args)
      : abi(read_argument(args, STG_STEP_ARGS_MIN_SIZE, "stg_step_args")), batch(Tree::receive(abi.batch)) {}
  stg_step_args abi;
  Tree batch;
};

StepArgs step_args(RawStep raw, bool with_update) {
  StepArgs args;
  check_flags(raw.abi.flags, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY, "stg_step_args.flags");
  if ((raw.abi.batch == nullptr) == (raw.abi.announced == 0)) {
    throw invalid_argument("stg_step_args needs either a batch or the ticket of an announced one");
  }
  const bool is_last = (raw.abi.flags & STG_BATCH_LAST_MICRO_BATCH) != 0;
  if (with_update && is_last) {
    args.update = checked_update(required(raw.abi.update, "stg_step_args.update (needed with STG_BATCH_LAST_MICRO_BATCH)"));
  } else if (raw.abi.update != nullptr) {
    throw invalid_argument("stg_step_args.update is for train_batch with STG_BATCH_LAST_MICRO_BATCH only; leave it null");
  }
  args.batch = checked(std::move(raw.batch), "batch");
  args.announced = raw.abi.announced;
  args.batch_index = raw.abi.batch_index;
  args.dataloader_index = raw.abi.dataloader_index;
  args.global_step = raw.abi.global_step;
  args.flags = raw.abi.flags;
  return args;
}

void write_step(Entry& entry, stg_step_result* out, StepResult result) {
  std::vector<double>& weights = entry.instance().weights;
  weights = std::move(result.weights);
  stg_step_result abi = sized<stg_step_result>();
  abi.outputs = result.outputs.give();
  abi.weights = weights.data();
  abi.num_weights = weights.size();
  write_result(out, abi);
}

void write_update(stg_update_result* out, const UpdateResult& update) {
  if (out == nullptr) return;
  stg_update_result abi = sized<stg_update_result>();
  abi.outcome = update.outcome;
  abi.gradient_norm = update.gradient_norm;
  abi.total_weight = update.total_weight;
  abi.loss_scale = update.loss_scale;
  write_result(out, abi);
}

void check_update_result(const stg_update_result* out) {
  if (out != nullptr) known_size_bytes(out, STG_UPDATE_RESULT_MIN_SIZE, "stg_update_result");
}

Tree report_tree(const ImportReport& report) {
  const auto names = [](const std::vector<std::string>& texts) { return List(texts.begin(), texts.end()); };
  Dict dict;
  dict.emplace_back("missing", names(report.missing));
  dict.emplace_back("unexpected", names(report.unexpected));
  dict.emplace_back("unknown_keys", names(report.unknown_keys));
  return make_tree(std::move(dict));
}

stg_error* evaluation_step(Function function, uint32_t stage, stg_strategy* self, const stg_call* call, const stg_step_args* args,
                           stg_step_result* out) {
  return guard([&] {
    RawStep raw(args);
    run(self, function, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      write_step(entry, out, entry->evaluation_step(Call{call}, step_args(std::move(raw), false), stage));
    });
  });
}

// The sets as far as they can be read. Those that were moved are released on every return; one that is refused for its size, or for a
// field that is newer than we are, stays the caller's, and the others are taken over all the same.
struct GradientSets {
  explicit GradientSets(const stg_reduce_gradients_args& args) {
    for (uint64_t i = 0; i < args.num_sets; ++i) {
      try {
        read_argument(args.sets[i], STG_GRADIENT_SET_MIN_SIZE, concat("set ", i).c_str());
        sets.push_back(args.sets[i]);
      } catch (...) {
        if (!refusal) refusal = std::current_exception();
      }
    }
  }
  GradientSets(const GradientSets&) = delete;
  GradientSets& operator=(const GradientSets&) = delete;

  void check() const {
    if (refusal) std::rethrow_exception(refusal);
    for (size_t i = 0; i < sets.size(); ++i) {
      const stg_gradient_set& set = *sets[i];
      if (!std::isfinite(set.weight) || set.weight < 0) {
        throw invalid_argument("set ", i, ": the weight is ", set.weight, "; it must be finite and at least 0");
      }
      check_stream(set.stream, "set ", i, ".stream");
      if (set.gradients == nullptr && set.num_gradients != 0) throw invalid_argument("set ", i, ": gradients is null");
      for (uint64_t g = 0; g < set.num_gradients; ++g) {
        if (set.gradients[g] != nullptr) check_tensor(*set.gradients[g], "set ", i, ", gradient ", g);
      }
    }
  }

  std::vector<stg_gradient_set*> sets;
  std::exception_ptr refusal;
  ~GradientSets() {
    for (stg_gradient_set* set : sets) {
      if (set->release != nullptr) set->release(set);
    }
  }
};

}  // namespace

namespace entries {

// ---- steps

stg_error* training_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return guard([&] {
    RawStep raw(args);
    run(self, Function::training_step, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      write_step(entry, out, entry->training_step(Call{call}, step_args(std::move(raw), false)));
    });
  });
}

stg_error* backward(stg_strategy* self, const stg_call* call, uint64_t flags) {
  return guard([&] {
    run(self, Function::backward, [&](Entry& entry) {
      check_flags(flags, STG_BATCH_LAST_MICRO_BATCH | STG_BATCH_DETECT_ANOMALY, "flags");
      entry->backward(Call{call}, flags);
    });
  });
}

stg_error* optimizer_step(stg_strategy* self, const stg_call* call, const stg_update_args* args, stg_update_result* out) {
  return guard([&] {
    run(self, Function::optimizer_step, [&](Entry& entry) {
      check_update_result(out);
      write_update(out, entry->optimizer_step(Call{call}, checked_update(args)));
    });
  });
}

stg_error* train_batch(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out,
                       stg_update_result* update) {
  return guard([&] {
    RawStep raw(args);
    run(self, Function::train_batch, [&](Entry& entry) {
      known_size_bytes(out, STG_STEP_RESULT_MIN_SIZE, "stg_step_result");
      check_update_result(update);
      UpdateResult update_result;
      StepResult result = entry->train_batch(Call{call}, step_args(std::move(raw), true), update_result);
      write_step(entry, out, std::move(result));
      write_update(update, update_result);
    });
  });
}

stg_error* zero_grad(stg_strategy* self, const stg_call* call) {
  return guard([&] { run(self, Function::zero_grad, [&](Entry& entry) { entry->zero_grad(Call{call}); }); });
}

stg_error* gradients(stg_strategy* self, const stg_call* call, stg_tree* out) {
  return guard([&] {
    run(self, Function::gradients, [&](Entry& entry) {
      required(out, "out");
      Tree gradients = entry->gradients(Call{call});
      // A view's release could run the model's code, on whatever thread lets it go last.
      if (entry.instance().caller_thread_only) gradients = copy_tree(gradients.root());
      *out = gradients.give();
    });
  });
}

stg_error* parameters_changed(stg_strategy* self, const stg_call* call) {
  return guard([&] { run(self, Function::parameters_changed, [&](Entry& entry) { entry->parameters_changed(Call{call}); }); });
}

stg_error* validation_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluation_step(Function::validation_step, STG_STAGE_VALIDATE, self, call, args, out);
}

stg_error* test_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluation_step(Function::test_step, STG_STAGE_TEST, self, call, args, out);
}

stg_error* predict_step(stg_strategy* self, const stg_call* call, const stg_step_args* args, stg_step_result* out) {
  return evaluation_step(Function::predict_step, STG_STAGE_PREDICT, self, call, args, out);
}

stg_error* reduce_gradients(stg_strategy* self, const stg_call* call, const stg_reduce_gradients_args* args) {
  return guard([&] {
    const stg_reduce_gradients_args abi = read_argument(args, STG_REDUCE_GRADIENTS_ARGS_MIN_SIZE, "stg_reduce_gradients_args");
    if (abi.sets == nullptr && abi.num_sets != 0) throw invalid_argument("stg_reduce_gradients_args.sets is null");
    const GradientSets moved(abi);
    run(self, Function::reduce_gradients, [&](Entry& entry) {
      check_enumerator(abi.op, STG_REDUCE_SUM, "stg_reduce_gradients_args.op (mean or sum)");
      moved.check();
      entry->reduce_gradients(Call{call}, moved.sets, abi.op);
    });
  });
}

// ---- state

stg_error* export_state(stg_strategy* self, const stg_call* call, uint64_t flags, stg_tree* out) {
  return guard([&] {
    run(self, Function::export_state, [&](Entry& entry) {
      check_flags(flags, STG_EXPORT_COPY, "flags");
      required(out, "out");
      *out = entry->export_state(Call{call}, entry.instance().caller_thread_only ? flags | STG_EXPORT_COPY : flags).give();
    });
  });
}

stg_error* import_state(stg_strategy* self, const stg_call* call, stg_tree* state, uint64_t flags, stg_tree* report) {
  return guard([&] {
    Tree tree = Tree::receive(required(state, "state"));
    run(self, Function::import_state, [&](Entry& entry) {
      check_flags(flags, STG_IMPORT_STRICT, "flags");
      const ImportReport told = entry->import_state(Call{call}, checked(std::move(tree), "state"), flags);
      if (report != nullptr) *report = report_tree(told).give();
    });
  });
}

stg_error* save(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args) {
  return guard([&] {
    run(self, Function::save, [&](Entry& entry) {
      const stg_checkpoint_args abi = read_argument(args, STG_CHECKPOINT_ARGS_MIN_SIZE, "stg_checkpoint_args");
      check_flags(abi.flags, 0, "stg_checkpoint_args.flags");
      entry->save(Call{call}, std::string(checked_text(abi.path, "stg_checkpoint_args.path")),
                  std::string(checked_text(abi.host_json, "stg_checkpoint_args.host_json")));
    });
  });
}

stg_error* load(stg_strategy* self, const stg_call* call, const stg_checkpoint_args* args, stg_tree* host_json,
                stg_tree* report) {
  return guard([&] {
    run(self, Function::load, [&](Entry& entry) {
      const stg_checkpoint_args abi = read_argument(args, STG_CHECKPOINT_ARGS_MIN_SIZE, "stg_checkpoint_args");
      check_flags(abi.flags, STG_IMPORT_STRICT, "stg_checkpoint_args.flags");
      std::string text;
      const ImportReport told =
          entry->load(Call{call}, std::string(checked_text(abi.path, "stg_checkpoint_args.path")), abi.flags, text);
      // Both are made before either is written.
      Tree text_tree = make_tree(std::move(text));
      Tree told_tree = report_tree(told);
      if (host_json != nullptr) *host_json = text_tree.give();
      if (report != nullptr) *report = told_tree.give();
    });
  });
}

}  // namespace entries
}  // namespace stratagem::sdk
