// SPDX-License-Identifier: Apache-2.0
//
// The parts that steps are made of (engine_steps.cpp puts them together). Those with a `worker` run on all workers at once, each on
// its replica or its range; the others are serial.
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cmath>

#include "base/dlpack.hpp"
#include "strategy/elements.hpp"
#include "strategy/engine_step.hpp"
#include "strategy/gather.hpp"
#include "torch/bridge.hpp"

namespace stratagem {

namespace {

// Of a share that the model made; NaN where its tensors disagree, as those of a packed batch do.
double rows_of_own_share(const stg_value& share) {
  bool disagree = false;
  std::optional<int64_t> rows;
  for_each_leaf(share, [&](const KeyPath&, const stg_value& leaf) {
    if (leaf.type != STG_TENSOR || leaf.as.tensor->view.num_dims == 0) return;
    const int64_t size = leaf.as.tensor->view.shape[0];
    disagree = disagree || (rows && *rows != size);
    rows = size;
  });
  return disagree ? std::nan("") : static_cast<double>(rows.value_or(1));
}

}  // namespace

// The model's own split, on the root's replica.
Shares Engine::split_by_model(Tree batch, const stg_model& table) {
  ReplicaSlot& root = training_->replicas.root();
  Shares shares;
  std::vector<stg_tree> filled(options_.devices.size());
  uint64_t num_filled = 0;
  root.guarded("split", [&] {
    check(table.split(root.model().model().self(), root.model().get(), batch.argument(), filled.size(), filled.data(),
                      &num_filled));
    // All of them are owned before any is looked at.
    std::vector<Tree> trees;
    for (const stg_tree& tree : filled) trees.emplace_back(tree);
    if (num_filled == 0 || num_filled > filled.size()) {
      throw invalid_argument("the model's split filled ", num_filled, " shares; 1 to ", filled.size(), " are possible");
    }
    for (uint64_t i = 0; i < num_filled; ++i) {
      validate(trees[i].root(), concat("share ", i));
      shares.num_rows.push_back(rows_of_own_share(trees[i].root()));
      shares.trees.push_back(cast_floating(std::move(trees[i]), options_.floating_dtype));
    }
  });
  return shares;
}

Shares Engine::split(const Call& call, Tree batch) {
  // A graph reads its batch until backward, and a model may keep a tensor of it, or write to it: none of that in the host's memory.
  const bool is_copied = batch.borrowed();
  if (is_copied) in_root_lane(call, [&] { batch = copy_tree(batch.root(), device_ ? &clone_tensor : &copy_tensor); });
  if (device_) batch = device_->lanes.hold(is_copied ? nullptr : &call, std::move(batch));
  const stg_model& table = training_->replicas.root().model().model().table();
  return table.split != nullptr ? split_by_model(std::move(batch), table) : split_batch(std::move(batch), split_options());
}

Engine::StepPtr Engine::begin_step(const Call& call, StepArgs args, uint32_t stage, uint64_t context_flags) {
  auto step = std::make_shared<Step>();
  ReplicaSlot& root = training_->replicas.root();
  // A split may draw numbers: a failed step puts back what they were before it.
  if (stage == STG_STAGE_FIT && root.model().model().table().split != nullptr) {
    root.guarded("split", [&] { training_->replicas.save(0); });
  }
  if (args.announced != 0) {
    AnnouncedBatches::Taken taken = announced_->take(args.announced, {stage, args.dataloader_index});
    step->shares = taken.shares ? std::move(*taken.shares) : split(call, std::move(taken.batch));
    if (taken.sent.has_value()) step->arrivals = std::move(*std::any_cast<std::shared_ptr<std::vector<Arrival>>>(taken.sent));
  } else {
    step->shares = split(call, std::move(args.batch));
  }
  if (stage == STG_STAGE_FIT && step->shares.has_rows && step->shares.num_rows[0] == 0) {
    throw invalid_argument("the batch has no rows; training needs at least one");
  }
  if (!step->shares.has_rows && options_.devices.size() > 1 && !std::exchange(warned_of_unsplit_batch_, true)) {
    host_.warn("a batch without a tensor to split runs on the root alone (said once)");
  }
  step->num_shares = step->shares.trees.size();
  step->weights.resize(step->num_shares);
  step->scales.resize(step->num_shares);
  step->has_denominator.resize(step->num_shares);
  step->device_weights.resize(step->num_shares);
  step->weighs_gradients.resize(step->num_shares);
  step->context = sized<stg_step_context>();
  step->context.num_replicas = static_cast<int32_t>(options_.devices.size());
  step->context.stage = stage;
  step->context.flags = static_cast<uint32_t>(context_flags);
  step->detects_anomalies = (args.flags & STG_BATCH_DETECT_ANOMALY) != 0;
  // A model that is told looks into gradients, too.
  if (step->detects_anomalies && !training_->scaler) step->context.flags |= STG_STEP_DETECT_ANOMALY;
  if (options_.deterministic) step->context.flags |= STG_STEP_DETERMINISTIC;
  step->context.batch_index = args.batch_index;
  step->context.dataloader_index = args.dataloader_index;
  step->context.global_step = args.global_step;
  step->context.autocast_dtype = options_.autocast_dtype;
  return step;
}

void Engine::forward(Step& step, size_t worker) {
  if (worker >= step.num_shares) return;
  const PartScope scope(host_, "forward", worker);
  Replicas& replicas = training_->replicas;
  ReplicaSlot& slot = replicas[worker];
  const bool is_training = step.context.stage == STG_STAGE_FIT;
  slot.guarded("forward", [&] {
    if (is_training) replicas.save(worker);
    stg_step_context context = step.context;
    if (device_) context.stream = device_->compute_streams[worker];
    slot.forward(context, place(step, worker));
    step.weights[worker] = resolve_weight(step, worker, slot.step);
    if (!is_training) return;
    const stg_value& loss = find_loss(slot.step.outputs.root());
    step.weighs_gradients[worker] = options_.autocast_dtype.bits != 0 || loss.as.tensor->view.dtype.bits == 16 ? 1 : 0;
    if (step.detects_anomalies && has_nan(loss.as.tensor->view)) throw Error{STG_OUT_OF_RANGE, "the loss is NaN"};
    if (!slot.step.graph) throw invalid_argument("the model's step kept no graph though STG_STEP_GRADIENT was set");
  });
}

void check_denominator(double weight) {
  if (std::isfinite(weight) && weight >= 0) return;
  throw invalid_argument("the denominator is ", weight, "; it must be finite and at least 0");
}

double Engine::resolve_weight(Step& step, size_t worker, const ModelStep& model_step) const {
  const stg_value& denominator = model_step.denominator;
  double weight = step.shares.num_rows[worker];
  step.has_denominator[worker] = denominator.type != STG_NONE;
  switch (denominator.type) {
    case STG_NONE:
      if (!std::isnan(weight)) break;
      if (step.context.stage != STG_STAGE_PREDICT && training_->replicas.root().description.loss_kind != STG_LOSS_SUM) {
        throw invalid_argument("the tensors of this share of the model's own split disagree about its rows, so the step must ",
                               "report a denominator: how much the share counts");
      }
      weight = 1;
      break;
    case STG_INT64:
    case STG_BOOL:
      weight = static_cast<double>(denominator.as.i64);
      break;
    case STG_DOUBLE:
      weight = denominator.as.f64;
      break;
    case STG_TENSOR:
      check_reachable(denominator.as.tensor->view, "the denominator");
      if (numel(denominator.as.tensor->view) != 1) {
        throw invalid_argument("the denominator has the shape ", shape_text(denominator.as.tensor->view), "; it must be 0-dim");
      }
      if (step.reads_late && !is_in_host_memory(denominator.as.tensor->view.device)) {
        step.device_weights[worker] = view_tensor(*denominator.as.tensor);
        step.scales[worker] = 1;  // it has a backward
        return std::nan("");
      }
      weight = is_in_host_memory(denominator.as.tensor->view.device)
                   ? read_element(denominator.as.tensor->view, 0)
                   : read_element(copy_to_host(denominator.as.tensor->view)->view, 0);
      break;
    default:
      throw invalid_argument("the denominator is a ", type_name(denominator.type),
                             "; it must be none, a number or a 0-dim tensor");
  }
  check_denominator(weight);
  const bool is_sum = training_->replicas.root().description.loss_kind == STG_LOSS_SUM && denominator.type == STG_NONE;
  step.scales[worker] = options_.lightning ? 1.0 / static_cast<double>(step.num_shares) : is_sum ? 1 : weight;
  return weight;
}

// What the losses of this step add up to, by docs/semantics.md, "Gradients".
void Engine::weigh(Step& step) {
  const bool has_sum_loss = training_->replicas.root().description.loss_kind == STG_LOSS_SUM;
  if (has_sum_loss && !options_.lightning) {
    step.is_sum = step.has_denominator[0] == 0;
    for (size_t i = 1; i < step.num_shares; ++i) {
      if ((step.has_denominator[i] == 0) != step.is_sum) {
        throw invalid_argument(
            "replica ", i, step.is_sum ? " reported a denominator, replica 0 none" : " reported no denominator, replica 0 one",
            "; with a loss that is a sum all shares must do alike");
      }
    }
  }
  step.weighs_on_device = std::any_of(step.device_weights.begin(), step.device_weights.end(),
                                      [](const at::Tensor& weight) { return weight.defined(); });
  if (step.weighs_on_device) {
    send_device_weights(step);
    step.divisor = std::nan("");  // known later
    return;
  }
  step.divisor = 0;
  for (const double scale : step.scales) step.divisor += scale;
  if (step.is_sum || options_.lightning) step.divisor = 1;  // lightning: each micro-batch counts alike
}

void Engine::gather(Step& step) {
  std::vector<Tree> outputs;
  for (size_t i = 0; i < step.num_shares; ++i) outputs.push_back(std::move(training_->replicas[i].step.outputs));
  if (!gathers_outputs_) {
    step.outputs = std::move(outputs[0]);
    return;
  }
  for_each_leader([&](size_t leader) { device_->wait_for_followers("outputs made before they are gathered", leader); });
  const auto let_go = c10::make_scope_exit([&] {  // before the outputs go, whatever happens
    for_each_leader(
        [&](size_t leader) { device_->let_followers_go_on("outputs gathered before their memory is used again", leader); });
  });
  TensorPtr loss;
  if (step.context.stage == STG_STAGE_FIT) {
    std::vector<const stg_value*> losses;
    for (const Tree& tree : outputs) losses.push_back(&find_loss(tree.root()));
    loss = step.weighs_on_device ? combine_device_losses(losses) : combine_losses(losses, step.scales, step.divisor);
  }
  step.outputs = gather_outputs(outputs, {options_.lightning});
  if (loss) step.outputs = with_loss(std::move(step.outputs), std::move(loss));
}

void Engine::backward_replica(Step& step, size_t worker) {
  if (worker >= step.num_shares) return;
  const PartScope scope(host_, "backward", worker);
  ReplicaSlot& slot = training_->replicas[worker];
  const bool is_late = step.weighs_gradients[worker] != 0;
  const double scale = is_late ? training_->loss_scale() : step.scales[worker];
  const double weight = is_late ? step.scales[worker] : 1;
  slot.guarded("backward", [&] { slot.backward(scale, weight, step.detects_anomalies && !training_->scaler); });
}

void Engine::add_to_window(Step& step) {
  if (window_.num_micro_batches > 0 && window_.is_sum != step.is_sum) {
    throw invalid_argument("this micro-batch reported ", step.is_sum ? "no denominators" : "denominators",
                           ", the earlier ones of the window did otherwise");
  }
  window_.is_sum = step.is_sum;
  window_.num_micro_batches += 1;
  step.divisor_before = window_.divisor;
  step.total_weight_before = window_.total_weight;
  window_.divisor = step.is_sum ? 1 : window_.divisor + step.divisor;
  for (const double weight : step.weights) window_.total_weight += weight;
  num_micro_batches_.store(window_.num_micro_batches);
}

void Engine::begin_reduction() {
  training_->host_gradients().begin(training_->replicas, window_.divisor, training_->loss_scale());
}

// After the reduction: what is not finite came from float16, or from the model; a smaller scale can help against the first.
void Engine::skip_overflow(Update& update) const {
  if (!training_->host_gradients().have_overflow()) return;
  update.is_skipped = true;
  update.result.outcome = STG_UPDATE_SKIPPED_OVERFLOW;
}

void Engine::apply_update(Update& update, size_t worker) {
  if (update.is_skipped) return;
  const PartScope scope(worker == 0 ? host_ : silent_host_, "update", worker);
  ReducedGradients& gradients = training_->host_gradients();
  if (update.args.clip == STG_CLIP_NORM && !(update.result.gradient_norm <= update.args.clip_limit)) {
    gradients.scale(worker, update.args.clip_limit / update.result.gradient_norm);
  } else if (update.args.clip == STG_CLIP_VALUE) {
    gradients.clamp(worker, update.args.clip_limit);
  }
  training_->host_optimizer().update(worker, update.args.lr);
}

void Engine::finish_update(Update& update) {
  if (update.result.outcome == STG_UPDATE_SKIPPED_OVERFLOW) training_->scaler->back_off();
  if (update.is_skipped) return;
  if (training_->scaler) training_->scaler->count_good();
  training_->optimizer->finish_update();
  training_->replicas.mark_parameters_dirty();
  training_->num_updates += 1;
  update.result.outcome = STG_UPDATE_DONE;
}

}  // namespace stratagem
