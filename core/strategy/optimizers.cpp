// SPDX-License-Identifier: Apache-2.0
#include "strategy/optimizers.hpp"

#include <ATen/ops/_fused_adagrad.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/_fused_sgd.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>

#include "strategy/elements.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

at::Tensor flat_slice(const stg_tensor& tensor, int64_t begin, int64_t end) {
  const stg_tensor_view& view = tensor.view;
  char* data = first_element<char>(view) + begin * static_cast<int64_t>(element_size_bytes(view.dtype));
  return at::from_blob(data, {end - begin}, at::TensorOptions().dtype(to_scalar_type(view.dtype)));
}

void check_updatable(const ReplicaSlot& root, size_t p) {
  const ParameterInfo& info = root.parameter_infos[p];
  if (!is_floating(info.dtype)) {
    throw unimplemented("parameter ", info.names[0], " is ", dtype_name(info.dtype),
                        "; the optimizers update real floating parameters");
  }
  if (!is_dense(root.parameters[p]->view)) {
    throw unimplemented("parameter ", info.names[0], " has gaps in memory (shape ", shape_text(root.parameters[p]->view),
                        "); the optimizers update dense parameters");
  }
}

}  // namespace

Optimizer::Optimizer(const OptimizerOptions& options, const ReplicaSlot& root, const Gradients& gradients)
    : options_(options), root_(root), present_(gradients), steps_(root.parameters.size()) {
  if (options.name == "sgd") {
    if (options.momentum != 0) slot_names_ = {"momentum_buffer"};
  } else if (options.name == "rmsprop") {
    slot_names_ = {"square_avg"};
    if (options.momentum != 0) slot_names_.emplace_back("momentum_buffer");
    if (options.centered) slot_names_.emplace_back("grad_avg");
  } else if (options.name == "adagrad") {
    slot_names_ = {"sum"};
  } else {
    slot_names_ = {"exp_avg", "exp_avg_sq"};
    if (options.amsgrad) slot_names_.emplace_back("max_exp_avg_sq");
  }
  for (size_t p = 0; p < root.parameters.size(); ++p) {
    if (root.parameter_infos[p].requires_grad) check_updatable(root, p);
  }
}

HostOptimizer::HostOptimizer(const OptimizerOptions& options, const ReplicaSlot& root, const ReducedGradients& gradients)
    : Optimizer(options, root, gradients), gradients_(gradients) {
  state_.resize(slots().size());
  for (size_t p = 0; p < root.parameters.size(); ++p) {
    const bool is_trained = root.parameter_infos[p].requires_grad;
    for (auto& slot : state_) {
      slot.push_back(is_trained ? flat_layout(root.parameters[p]->view).allocate() : nullptr);
      if (is_trained) fill_initial(*slot.back());
    }
  }
  const c10::InferenceMode normal(false);  // the host's thread may be in it, and tensors made there can't be updated elsewhere
  for (const std::vector<FlatRange>& ranges : gradients.ranges()) {
    WorkerSlices& mine = workers_.emplace_back();
    for (const FlatRange& range : ranges) {
      Slice slice;
      slice.range = range;
      slice.parameter = flat_slice(*root.parameters[range.parameter], range.begin, range.end);
      slice.gradient = flat_slice(*gradients.memory(range.parameter), range.begin, range.end);
      for (const auto& slot : state_) slice.state.push_back(flat_slice(*slot[range.parameter], range.begin, range.end));
      if (has_step()) slice.step = at::from_blob(new float(0), {}, [](void* step) { delete static_cast<float*>(step); });
      mine.slices.push_back(std::move(slice));
    }
    mine.listed.assign(mine.slices.size(), 0);
  }
}

void Optimizer::Lists::add(const at::Tensor& parameter, const at::Tensor& gradient, const std::vector<at::Tensor>& slots,
                           const at::Tensor& step) {
  parameters.push_back(parameter);
  gradients.push_back(gradient);
  if (step.defined()) steps.push_back(step);
  state.resize(slots.size());
  for (size_t s = 0; s < slots.size(); ++s) state[s].push_back(slots[s]);
}

void Optimizer::Lists::clear() {
  for (auto* list : {&parameters, &gradients, &steps}) list->clear();
  for (auto& list : state) list.clear();
}

// Lists the slices of parameters that have a gradient; usually the same ones as the last time.
void HostOptimizer::choose(WorkerSlices& mine) const {
  bool is_same = true;
  for (size_t s = 0; s < mine.slices.size(); ++s) {
    const size_t p = mine.slices[s].range.parameter;
    const char wanted = static_cast<char>(!gradients_.is_present(p) || gradients_.sparse(p) != nullptr ? 0 : is_begun(p) ? 1 : 2);
    is_same = is_same && mine.listed[s] == wanted;
    mine.listed[s] = wanted;
  }
  if (is_same) return;
  mine.lists.clear();
  mine.first.clear();
  for (size_t s = 0; s < mine.slices.size(); ++s) {
    const Slice& slice = mine.slices[s];
    if (mine.listed[s] != 0) {
      (mine.listed[s] == 1 ? mine.lists : mine.first).add(slice.parameter, slice.gradient, slice.state, slice.step);
    }
  }
}

void HostOptimizer::update(size_t worker, double lr) {
  WorkerSlices& mine = workers_[worker];
  choose(mine);
  for (size_t s = 0; s < mine.slices.size() && has_step(); ++s) {
    *static_cast<float*>(mine.slices[s].step.data_ptr()) = static_cast<float>(steps(mine.slices[s].range.parameter) + 1);
  }
  if (!mine.lists.parameters.empty()) run(mine.lists, false, lr);
  if (!mine.first.parameters.empty()) run(mine.first, true, lr);
  for (const FlatRange& range : gradients_.sparse_ranges()[worker]) update_sparse(range, lr);
}

void HostOptimizer::check_gradients() const {
  for (size_t p = 0; p < root_.parameters.size(); ++p) {
    if (!gradients_.comes_sparse(p)) continue;
    const bool takes_sparse = options_.name == "sgd" || options_.name == "adagrad";
    if (takes_sparse && options_.weight_decay == 0) continue;
    throw failed_precondition("parameter ", root_.parameter_infos[p].names[0], " has a sparse gradient, which ", options_.name,
                              takes_sparse ? concat(" with a weight_decay of ", options_.weight_decay) : "",
                              " doesn't take; make it dense in the model (sparse=False in an embedding), or use sgd or adagrad ",
                              "without weight_decay");
  }
}

// Elements [begin, end) of the values of a sparse gradient.
void HostOptimizer::update_sparse(const FlatRange& range, double lr) const {
  const size_t p = range.parameter;
  const SparseRows& rows = *gradients_.sparse(p);
  const int64_t row_numel = rows.row_numel();
  const auto bytes = static_cast<int64_t>(element_size_bytes(root_.parameter_infos[p].dtype));
  // Calls body with the place among the gathered elements, the place in the parameter, and a number of bytes.
  const auto for_each_row = [&](auto&& body) {
    for (int64_t at = range.begin; at < range.end;) {
      const int64_t row = at / row_numel;
      const int64_t end = std::min((row + 1) * row_numel, range.end);
      const int64_t in_parameter = rows.rows[static_cast<size_t>(row)] * row_numel + at % row_numel;
      body((at - range.begin) * bytes, in_parameter * bytes, static_cast<size_t>((end - at) * bytes));
      at = end;
    }
  };
  std::vector<std::pair<const stg_tensor*, at::Tensor>> gathered;  // and where it is from
  const auto gather = [&](const stg_tensor& whole) {
    at::Tensor& compact = gathered.emplace_back(&whole, flat_slice(*rows.values, range.begin, range.end).clone()).second;
    for_each_row([&](int64_t to, int64_t from, size_t size) {
      std::memcpy(static_cast<char*>(compact.mutable_data_ptr()) + to, first_element<char>(whole.view) + from, size);
    });
    return compact;
  };
  Slice slice;
  slice.range = range;
  slice.gradient = flat_slice(*rows.values, range.begin, range.end);
  slice.parameter = gather(*root_.parameters[p]);
  for (const auto& slot : state_) slice.state.push_back(gather(*slot[p]));
  if (has_step()) slice.step = at::scalar_tensor(static_cast<double>(steps(p) + 1), at::kFloat);
  Lists lists;
  lists.add(slice.parameter, slice.gradient, slice.state, slice.step);
  run(lists, false, lr);
  for (const auto& [whole, compact] : gathered) {
    for_each_row([&, view = whole->view](int64_t from, int64_t to, size_t size) {
      std::memcpy(first_element<char>(view) + to, static_cast<const char*>(compact.const_data_ptr()) + from, size);
    });
  }
}

void Optimizer::run(Lists& lists, bool is_first, double lr, const at::Tensor& found_overflow) const {
  const OptimizerOptions& o = options_;
  const std::optional<at::Tensor> found = found_overflow.defined() ? std::optional(found_overflow) : std::nullopt;
  if (o.name == "sgd") {
    const at::TensorList momentum = lists.state.empty() ? at::TensorList{} : at::TensorList{lists.state[0]};
    at::_fused_sgd_(lists.parameters, lists.gradients, momentum, o.weight_decay, o.momentum, lr, o.dampening, o.nesterov,
                    o.maximize, is_first, std::nullopt, found);
    return;
  }
  if (o.name == "rmsprop") return run_rmsprop(lists, lr);
  if (o.name == "adagrad") {
    at::_fused_adagrad_(lists.parameters, lists.gradients, lists.state[0], lists.steps, lr, o.lr_decay, o.weight_decay, o.eps,
                        o.maximize, std::nullopt, found);
    return;
  }
  const at::TensorList max_squares = o.amsgrad ? at::TensorList{lists.state[2]} : at::TensorList{};
  if (o.name == "adam") {
    at::_fused_adam_(lists.parameters, lists.gradients, lists.state[0], lists.state[1], max_squares, lists.steps, lr, o.beta1,
                     o.beta2, o.weight_decay, o.eps, o.amsgrad, o.maximize, std::nullopt, found);
  } else {
    at::_fused_adamw_(lists.parameters, lists.gradients, lists.state[0], lists.state[1], max_squares, lists.steps, lr, o.beta1,
                      o.beta2, o.weight_decay, o.eps, o.amsgrad, o.maximize, std::nullopt, found);
  }
}

// As torch.optim.RMSprop: v = alpha v + (1 - alpha) g^2, d = sqrt(v - m^2) + eps with m = alpha m + (1 - alpha) g where centered (else 0),
// w -= lr g / d, or with momentum w -= lr b with b = momentum b + g / d.
void Optimizer::run_rmsprop(Lists& lists, double lr) const {
  const OptimizerOptions& o = options_;
  for (size_t i = 0; i < lists.parameters.size(); ++i) {
    at::Tensor& weight = lists.parameters[i];
    at::Tensor gradient = o.maximize ? lists.gradients[i].neg() : lists.gradients[i];
    if (o.weight_decay != 0) gradient = gradient.add(weight, o.weight_decay);
    at::Tensor& square_mean = lists.state[0][i];
    square_mean.mul_(o.alpha).addcmul_(gradient, gradient, 1 - o.alpha);
    at::Tensor divisor;
    if (o.centered) {
      at::Tensor& mean = lists.state.back()[i];
      mean.lerp_(gradient, 1 - o.alpha);
      divisor = square_mean.addcmul(mean, mean, -1).sqrt_().add_(o.eps);
    } else {
      divisor = square_mean.sqrt().add_(o.eps);
    }
    if (o.momentum != 0) {
      at::Tensor& buffer = lists.state[1][i];
      buffer.mul_(o.momentum).addcdiv_(gradient, divisor);
      weight.add_(buffer, -lr);
    } else {
      weight.addcdiv_(gradient, divisor, -lr);
    }
  }
}

void Optimizer::finish_update() {
  for (size_t p = 0; p < steps_.size(); ++p) {
    if (present_.is_present(p)) ++steps_[p];
  }
}

TensorPtr Optimizer::copy_state(size_t parameter, size_t slot) const { return copy_to_host(state(parameter, slot)->view); }

void Optimizer::write_state(size_t parameter, size_t slot, const stg_tensor& values) {
  copy_elements(state(parameter, slot)->view, values.view);
}

void Optimizer::set_steps(size_t parameter, int64_t steps) {
  steps_[parameter] = steps;
  if (root_.parameter_infos[parameter].requires_grad) spread_state(parameter, steps != 0);
}

void HostOptimizer::spread_state(size_t parameter, bool is_begun) {
  for (auto& slot : state_) {
    if (is_begun) continue;
    const stg_tensor_view& view = slot[parameter]->view;
    std::memset(first_element<>(view), 0, static_cast<size_t>(numel(view)) * element_size_bytes(view.dtype));
    fill_initial(*slot[parameter]);
  }
}

void HostOptimizer::fill_initial(const stg_tensor& zeros) const {
  if (options_.initial_accumulator_value == 0) return;
  flat_slice(zeros, 0, numel(zeros.view)).fill_(options_.initial_accumulator_value);
}

}  // namespace stratagem
