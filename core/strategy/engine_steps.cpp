// SPDX-License-Identifier: Apache-2.0
//
// Training and evaluation steps. train_batch is one hand-off to the workers:
//
//   each   forward and backward on its share      then   outputs gathered, weights added up
//   each   reduce a range, update it              then   the update counted
//
// With clipping by norm, and with a scaled loss, the second line ends with the norm, and whether all is finite, and the update is a
// third. training_step, backward and optimizer_step are made of the same parts, so that both ways give the same bits.
#include "base/dlpack.hpp"
#include "strategy/engine_step.hpp"
#include "torch/threads.hpp"

namespace stratagem {

// ---- lists of parts

void Engine::run(const Call& call, Phases phases) {
  if (!device_) return workers_->run(call, std::move(phases));
  for (Workers::Phase& phase : phases) {
    phase.each = [device = device_, each = std::move(phase.each)](size_t worker) {
      const Lanes::Scope scope(device->lanes, worker);
      each(worker);
    };
    if (!phase.then) continue;
    phase.then = [device = device_, then = std::move(phase.then)] {
      const Lanes::Scope scope(device->lanes, 0);
      then();
    };
  }
  in_root_lane(call, [&] {
    try {
      workers_->run(call, std::move(phases));
    } catch (const Error& error) {
      // A model that passes on what a gradient met with may have lost the flag.
      if (!device_->lanes.is_broken()) throw;
      throw device_->lanes.broken(error);
    }
  });
}

void Engine::add_buffer_phase(Phases& phases) {
  if (!training_->replicas.has_buffers() || training_->replicas.size() == 1) return;
  // On an accelerator: between devices LibTorch copies on the root's own stream, which this thread has as that device's current one; on
  // one device on the replica's, which comes after the gathering, and so after the root's forward.
  phases.push_back({"buffers", [this](size_t worker) { training_->replicas.copy_buffers(worker); }});
}

// Reduce, measure where the norm is wanted, and look for overflows where the loss is scaled. Without `update` the reduction alone.
void Engine::add_reduction_phases(Phases& phases, const UpdatePtr& update) {
  if (device_) {
    add_device_reduction_phase(phases);
    if (update) add_device_update_phase(phases, update);
    return;
  }
  const bool measures = update && update->args.clip == STG_CLIP_NORM;
  const auto reduce = [this, measures](size_t worker) {
    if (window_.divisor == 0) return;
    const PartScope scope(worker == 0 ? host_ : silent_host_, "reduce", worker);
    training_->host_gradients().reduce(worker, measures);
    if (training_->scaler) training_->host_gradients().look_for_overflow(worker);
  };
  if (update && !measures && !training_->scaler) {
    phases.push_back({"reduce",
                      [this, update, reduce](size_t worker) {
                        irrevocably([&] {
                          reduce(worker);
                          apply_update(*update, worker);
                        });
                      },
                      [this, update] {
                        training_->gradients->mark_complete();
                        finish_update(*update);
                      }});
    return add_refresh_phase(phases);
  }
  phases.push_back({"reduce", reduce, [this, update, measures] {
                      training_->gradients->mark_complete();
                      if (update) skip_overflow(*update);
                      if (measures && !update->is_skipped) update->result.gradient_norm = training_->host_gradients().norm();
                    }});
  if (update) add_update_phases(phases, update);
}

// The update of gradients that are reduced already, and measured where the norm is wanted.
void Engine::add_update_phases(Phases& phases, const UpdatePtr& update) {
  phases.push_back({"update", [this, update](size_t worker) { irrevocably([&] { apply_update(*update, worker); }); },
                    [this, update] { finish_update(*update); }});
  add_refresh_phase(phases);
}

void Engine::add_refresh_phase(Phases& phases) {
  if (training_->replicas.all_follow()) return;
  phases.push_back({"refresh", [this](size_t worker) {
                      irrevocably([&] {
                        const size_t leader = training_->replicas[worker].leader;
                        if (device_ && leader != worker)
                          device_->let_wait("update before its weights are copied", worker, leader);
                        training_->replicas.refresh_parameters(worker);
                      });
                    }});
}

// After an error nothing of the window is left: no half-reduced gradient reaches an optimizer.
template <class Body>
void Engine::run_or_clean_up(const Call& call, Body&& body) {
  // The calling thread is replica 0: it has a replica's intra-op threads during a call, and its own before and after.
  const IntraOpScope threads(static_cast<int>(threads_per_replica_));
  try {
    body();
  } catch (...) {
    Error error = describe_exception(std::current_exception());
    if ((error.own_flags() & STG_ERROR_INSTANCE_DRAINING) != 0) throw error;
    try {
      restore_and_forget(call);
    } catch (const std::exception&) {
      if (!device_) throw;
      throw device_->lanes.broken(error);  // the device that it is about
    }
    throw error;
  }
}

void Engine::restore_and_forget(const Call& call) {
  in_root_lane(call, [&] {
    training_->replicas.restore();
    forget_window();
  });
}

// A training_step that waits for its backward, if there is one. Its buffers stay as they are.
void Engine::drop_waiting_step() {
  waiting_step_.reset();
  has_graph_.store(false);
  training_->replicas.drop_graphs();
  training_->replicas.forget_saved();
}

void Engine::forget_window() {
  drop_waiting_step();
  training_->replicas.drop_gradients();
  if (training_->gradients) training_->gradients->clear();
  window_ = {};
  num_micro_batches_.store(0);
}

// ---- the members

StepResult Engine::evaluation_step(const Call& call, StepArgs args, uint32_t stage) {
  const StepPtr step = begin_step(call, std::move(args), stage, STG_STEP_INFERENCE);
  const IntraOpScope threads(static_cast<int>(threads_per_replica_));
  run(call, {{"forward", [this, step](size_t worker) { forward(*step, worker); }, [this, step] { gather(*step); }, true}});
  return result_of(call, *step);
}

StepResult Engine::training_step(const Call& call, StepArgs args) {
  drop_waiting_step();
  StepPtr step;
  run_or_clean_up(call, [&] {
    step = begin_step(call, std::move(args), STG_STAGE_FIT, STG_STEP_GRADIENT);
    Phases phases{{"forward", [this, step](size_t worker) { forward(*step, worker); },
                   [this, step] {
                     weigh(*step);
                     gather(*step);
                   },
                   true}};
    add_buffer_phase(phases);
    run(call, std::move(phases));
  });
  waiting_step_ = step;
  has_graph_.store(true);
  return result_of(call, *step);
}

void Engine::backward(const Call& call, uint64_t flags) {
  if (!waiting_step_) throw failed_precondition("backward without a graph: call training_step first");
  if (training_->gradients->are_complete()) {
    throw failed_precondition(
        "backward after the window's gradients were reduced: call optimizer_step, parameters_changed or zero_grad first");
  }
  const StepPtr step = waiting_step_;
  if ((flags & STG_BATCH_DETECT_ANOMALY) != 0) step->detects_anomalies = true;
  const bool is_last = (flags & STG_BATCH_LAST_MICRO_BATCH) != 0;
  run_or_clean_up(call, [&] {
    add_to_window(*step);
    Phases phases;
    if (device_) {
      begin_device_backward(*step, is_last);
      phases.push_back({"backward", [this, step](size_t worker) { backward_on_device(*step, worker); }, {}, true});
    } else {
      phases.push_back({"backward", [this, step](size_t worker) { backward_replica(*step, worker); },
                        [this, is_last] {
                          if (is_last && window_.divisor != 0) begin_reduction();
                        },
                        true});
    }
    if (is_last) add_reduction_phases(phases, nullptr);
    run(call, std::move(phases));
    if (is_last) training_->replicas.drop_gradients();
  });
  drop_waiting_step();
}

Engine::UpdatePtr Engine::begin_update(const stg_update_args& args) const {
  auto update = std::make_shared<Update>();
  update->args = args;
  return update;
}

void Engine::check_optimizer() const {
  if (!training_->optimizer) {
    throw failed_precondition(
        "an update without an \"optimizer\" in the config: use gradients and parameters_changed with the host's own, or "
        "configure one");
  }
}

UpdateResult Engine::optimizer_step(const Call& call, const stg_update_args& args) {
  check_optimizer();
  if (window_.num_micro_batches == 0) throw failed_precondition("optimizer_step without a backward since the last update");
  const UpdatePtr update = begin_update(args);
  run_or_clean_up(call, [&] {
    update->result.total_weight = window_.total_weight;
    update->is_skipped = window_.divisor == 0;
    Phases phases;
    if (update->is_skipped) {
      update->result.outcome = STG_UPDATE_SKIPPED_NO_WEIGHT;
    } else if (device_) {
      if (!training_->gradients->are_complete()) {
        in_root_lane(call, [&] { training_->device_gradients().reduce({window_.divisor, training_->loss_scale()}); });
        add_device_reduction_phase(phases);
      }
      add_device_update_phase(phases, update);
    } else if (training_->gradients->are_complete()) {
      training_->optimizer->check_gradients();
      skip_overflow(*update);
      if (args.clip == STG_CLIP_NORM && !update->is_skipped) {
        phases.push_back({"norm", [this](size_t worker) { training_->host_gradients().measure(worker); },
                          [this, update] { update->result.gradient_norm = training_->host_gradients().norm(); }});
      }
      add_update_phases(phases, update);
    } else {
      begin_reduction();
      training_->optimizer->check_gradients();
      add_reduction_phases(phases, update);
    }
    if (!phases.empty()) run(call, std::move(phases));
    if (device_ && !update->is_skipped) finish_device_update(call, *update);
  });
  end_window(*update);
  return update->result;
}

void Engine::end_window(Update& update) {
  if (update.result.outcome == STG_UPDATE_SKIPPED_NO_WEIGHT) host_.warn("no update: all denominators of the window were 0");
  update.result.loss_scale = training_->loss_scale();
  forget_window();
  num_updates_.store(training_->num_updates);
}

StepResult Engine::train_batch(const Call& call, StepArgs args, UpdateResult& update_result) {
  const bool is_last = args.update.has_value();
  if (is_last) check_optimizer();
  if (training_->gradients->are_complete()) {
    throw failed_precondition(
        "train_batch after the window's gradients were reduced: call optimizer_step, parameters_changed or zero_grad first");
  }
  drop_waiting_step();
  const UpdatePtr update = is_last ? begin_update(*args.update) : nullptr;
  StepPtr step;
  run_or_clean_up(call, [&] {
    step = begin_step(call, std::move(args), STG_STAGE_FIT, STG_STEP_GRADIENT);
    step->reads_late = device_ != nullptr && !options_.lightning;
    Phases phases;
    const auto begin_update = [this, update] {
      if (!update) return;
      update->result.total_weight = window_.total_weight;
      update->is_skipped = window_.divisor == 0;
      if (update->is_skipped) update->result.outcome = STG_UPDATE_SKIPPED_NO_WEIGHT;
    };
    if (device_) {
      // A reduction begins in the midst of backward, so what the shares weigh must be known before.
      phases.push_back({"forward", [this, step](size_t worker) { forward(*step, worker); },
                        [this, step, begin_update, is_last] {
                          weigh(*step);
                          add_to_window(*step);
                          begin_update();
                          begin_device_backward(*step, is_last);
                        },
                        true});
      phases.push_back({"backward", [this, step](size_t worker) { backward_on_device(*step, worker); },
                        [this, step] { gather(*step); }, true});
    } else {
      phases.push_back({"forward and backward",
                        [this, step](size_t worker) {
                          forward(*step, worker);
                          backward_replica(*step, worker);
                        },
                        [this, step, update, begin_update] {
                          weigh(*step);
                          gather(*step);
                          add_to_window(*step);
                          begin_update();
                          if (!update || update->is_skipped) return;
                          begin_reduction();
                          training_->optimizer->check_gradients();
                        },
                        true});
    }
    // Before anything is written: a failure here still leaves all as it was.
    add_buffer_phase(phases);
    if (is_last) add_reduction_phases(phases, update);
    run(call, std::move(phases));
    if (step->weighs_on_device) settle_device_weights(call, *step, update.get());
    if (device_ && is_last && !update->is_skipped) finish_device_update(call, *update);
  });
  training_->replicas.forget_saved();
  if (is_last) {
    end_window(*update);
    update_result = update->result;
  } else {
    update_result.loss_scale = training_->loss_scale();
  }
  return result_of(call, *step);
}

void Engine::zero_grad(const Call&) { forget_window(); }

bool Engine::have_overflow(const Call& call) {
  if (!training_->scaler) return false;
  return device_ ? have_overflow_on_device(call) : training_->host_gradients().have_overflow();
}

StepResult Engine::result_of(const Call& call, Step& step) {
  StepResult result = step.result();
  if (device_) result.outputs = device_->lanes.lend(call, std::move(result.outputs));
  return result;
}

Tree Engine::gradients(const Call& call) {
  if (window_.num_micro_batches == 0) throw failed_precondition("gradients without a backward since the last update");
  Gradients& reduced = *training_->gradients;
  if (!reduced.are_complete()) {
    run_or_clean_up(call, [&] {
      if (window_.divisor != 0 && device_) {
        in_root_lane(call, [&] { training_->device_gradients().reduce({window_.divisor, training_->loss_scale()}); });
      } else if (window_.divisor != 0) {
        begin_reduction();
      }
      Phases phases;
      add_reduction_phases(phases, nullptr);
      run(call, std::move(phases));
      training_->replicas.drop_gradients();
    });
    if (window_.divisor == 0) host_.warn("no gradients: all denominators of the window were 0");
  }
  if (device_) in_root_lane(call, [&] { training_->device_gradients().gather(); });
  if (have_overflow(call)) {
    const double before = training_->loss_scale();
    training_->scaler->back_off();
    forget_window();
    throw Error{STG_OUT_OF_RANGE, concat("a gradient overflowed under the loss scale ", before, ", which is ",
                                         training_->loss_scale(), " now; there is no update: go on with the next batch")};
  }
  Dict dict;
  const ReplicaSlot& root = training_->replicas.root();
  for (size_t p = 0; p < root.parameters.size(); ++p) {
    Value gradient;
    if (const stg_tensor* tensor = reduced.tensor(p)) {
      const stg_tensor_view& view = tensor->view;
      gradient = make_strided_tensor(training_, view.data, view.dtype, {view.shape, view.shape + view.num_dims}, strides_of(view),
                                     0, view.device);
    }
    dict.emplace_back(root.parameter_infos[p].names[0], std::move(gradient));
  }
  return make_tree(std::move(dict));
}

void Engine::parameters_changed(const Call& call) {
  in_root_lane(call, [&] { refresh_replicas(); });
  training_->replicas.mark_parameters_dirty();
  // The host's own update, where the window's gradients are reduced.
  if (training_->scaler && training_->gradients->are_complete() && window_.divisor != 0) {
    have_overflow(call) ? training_->scaler->back_off() : training_->scaler->count_good();
  }
  forget_window();
}

}  // namespace stratagem
