// SPDX-License-Identifier: Apache-2.0
#include "strategy/device_gradients.hpp"

#include <ATen/ops/_foreach_mul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>

#include "accelerator/order.hpp"
#include "strategy/elements.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

// Where parameters begin in a sharded bucket, and its parts: vectors of elements, of whatever type, are never cut.
constexpr int64_t shard_alignment = 64;

int64_t round_up(int64_t number, int64_t to) { return (number + to - 1) / to * to; }

// Autograd's threads come in modes of their own.
struct PlainMode {
  c10::InferenceMode inference{false};
  c10::AutoGradMode gradient{false};
};

}  // namespace

// ---- buckets

DeviceGradients::DeviceGradients(const Replicas& replicas, const Lanes& lanes, const BucketOptions& options)
    : lanes_(lanes),
      reduction_(lanes, options.compress),
      weights_(lanes, reduction_),
      weighings_(lanes.size()),
      is_sharded_(options.shards_optimizer && lanes.leaders().size() > 1),
      bucket_of_(replicas.root().parameters.size()),
      views_(lanes.size(), std::vector<at::Tensor>(replicas.root().parameters.size())),
      has_(lanes.size(), std::vector<char>(replicas.root().parameters.size())),
      first_weight_(lanes.size()),
      is_present_(replicas.root().parameters.size()) {
  for (const TensorPtr& parameter : replicas.root().parameters) layouts_.push_back(flat_layout(parameter->view));
  if (lanes.size() > 1) make_buckets(replicas, options);
}

void DeviceGradients::make_buckets(const Replicas& replicas, const BucketOptions& options) {
  std::vector<std::pair<at::ScalarType, std::vector<size_t>>> open;  // by dtype: one that isn't full yet
  std::vector<int64_t> open_bytes;
  for (size_t p = layouts_.size(); p-- > 0;) {
    if (!replicas.root().parameter_infos[p].requires_grad) continue;
    const at::ScalarType dtype = c10::toRealValueType(to_scalar_type(layouts_[p].dtype));
    auto found = std::find_if(open.begin(), open.end(), [&](const auto& entry) { return entry.first == dtype; });
    if (found == open.end()) {
      open.emplace_back(dtype, std::vector<size_t>{});
      open_bytes.push_back(0);
      found = std::prev(open.end());
    }
    int64_t& bytes = open_bytes[static_cast<size_t>(found - open.begin())];
    const auto size_bytes = static_cast<int64_t>(*checked_size_bytes(layouts_[p].dtype, layouts_[p].shape));
    const int64_t limit_bytes = buckets_.empty() ? options.first_bytes : options.size_bytes;
    if (bytes > 0 && bytes + size_bytes > limit_bytes) {
      make_bucket(std::exchange(found->second, {}), dtype);
      bytes = 0;
    }
    found->second.push_back(p);
    bytes += size_bytes;
  }
  for (auto& [dtype, parameters] : open) {
    if (!parameters.empty()) make_bucket(std::move(parameters), dtype);
  }
}

void DeviceGradients::make_bucket(std::vector<size_t> parameters, at::ScalarType dtype) {
  const auto is_complex = [&](size_t p) { return layouts_[p].dtype.code == STG_DTYPE_COMPLEX; };
  const bool has_complex = std::any_of(parameters.begin(), parameters.end(), is_complex);
  const int64_t alignment = is_sharded_ ? shard_alignment : has_complex ? 2 : 1;
  const int64_t num_parts = is_sharded_ ? static_cast<int64_t>(lanes_.leaders().size()) : 1;
  int64_t numel = 0;
  std::vector<int64_t> begins;
  for (const size_t p : parameters) {
    begins.push_back(numel);
    numel = round_up(numel + c10::multiply_integers(layouts_[p].shape) * (is_complex(p) ? 2 : 1), alignment);
  }
  auto bucket = std::make_unique<Bucket>(lanes_, dtype, round_up(numel, alignment * num_parts), is_sharded_);
  bucket->num_missing.resize(lanes_.size());
  for (size_t r = 0; r < lanes_.size(); ++r) {
    for (size_t i = 0; i < parameters.size(); ++i) {
      const FlatLayout& layout = layouts_[parameters[i]];
      at::Tensor flat = bucket->flat[r].narrow(0, begins[i], numel - begins[i]);
      if (is_complex(parameters[i])) flat = at::view_as_complex(flat.view({-1, 2}));
      views_[r][parameters[i]] = flat.as_strided(layout.shape, layout.strides);
    }
  }
  for (const size_t p : parameters) bucket_of_[p] = bucket.get();
  bucket->parameters = std::move(parameters);
  bucket->begins = std::move(begins);
  buckets_.push_back(std::move(bucket));
}

// ---- a backward

void DeviceGradients::begin_backward(Backward backward) {
  backward_ = std::move(backward);
  backward_.weights.resize(lanes_.size());
  for (size_t r = 0; r < lanes_.size() && !backward_.weighs_on_device; ++r) {
    if (first_weight_[r] == 0) first_weight_[r] = backward_.weights[r];
  }
  normalisation_ = backward_.normalisation;
  for (const auto& bucket : buckets_) {
    std::fill(bucket->num_missing.begin(), bucket->num_missing.end(), bucket->parameters.size());
    bucket->num_full = 0;
    bucket->is_launched = false;
  }
}

void DeviceGradients::add(size_t r, size_t p, TensorPtr gradient, const stg_stream* stream) {
  const PlainMode plain;
  const Lane& lane = lanes_[r];
  const c10::StreamGuard guard(lane.compute);
  std::optional<c10::Stream> its_own;
  if (stream != nullptr) {
    its_own = lanes_.wrap(*stream);
    c10::Event made(lane.device.type());
    made.record(*its_own);
    order::wait("gradient of a model's own stream before it is read", lane.compute, made);
  }
  if (backward_.detects_anomalies && has_nan(gradient->view)) throw Error{STG_OUT_OF_RANGE, "the gradient has a NaN"};
  // It will be scaled and clipped in place: so not what is still the model's, or another gradient's, too.
  const bool may_adopt = !its_own && gradient->deleter != nullptr && layouts_[p].fits(gradient->view) &&
                         (bucket_of_[p] != nullptr || adopted_.insert(first_element<>(gradient->view)).second);
  at::Tensor values = to_tensor(std::move(gradient), "gradient");
  if (!has_[r][p] && bucket_of_[p] == nullptr && !may_adopt) {
    values = at::empty_strided(layouts_[p].shape, layouts_[p].strides, values.options()).copy_(values);
  }
  if (backward_.weighs_on_device) {
    put_weighed(r, p, std::move(values));
  } else {
    put(r, p, std::move(values), weight_of(r));
  }
  if (its_own) {
    c10::Event taken(lane.device.type());
    taken.record(lane.compute);
    order::wait("gradient taken before its memory is used again", *its_own, taken);
  }
  Bucket* bucket = bucket_of_[p];
  if (bucket != nullptr && normalisation_ && --bucket->num_missing[r] == 0) fill(*bucket, r);
}

// Against the window's first.
double DeviceGradients::weight_of(size_t r) const { return backward_.weights[r] / first_weight_[r]; }

void DeviceGradients::put(size_t r, size_t p, at::Tensor gradient, double alpha) {
  at::Tensor& sum = views_[r][p];
  if (has_[r][p]) {
    sum.add_(gradient, alpha);
    return;
  }
  has_[r][p] = 1;
  if (bucket_of_[p] == nullptr) {
    sum = std::move(gradient);
  } else {
    sum.copy_(gradient);
  }
  if (alpha != 1) sum.mul_(alpha);
}

// A window's first and only replica needs no look at it: what weighs nothing is forgotten, or no update is made.
void DeviceGradients::put_weighed(size_t r, size_t p, at::Tensor gradient) {
  const at::Tensor& is_nothing = weighings_[r].is_nothing;
  const at::Tensor& against = weighings_[r].against;
  at::Tensor& sum = views_[r][p];
  const bool is_first = std::exchange(has_[r][p], char{1}) == 0;
  if (is_first && bucket_of_[p] == nullptr) {
    sum = std::move(gradient);
    if (against.defined()) sum.masked_fill_(is_nothing, 0);
  } else {
    at::Tensor& zero = weighings_[r].zeros[gradient.scalar_type()];
    if (!zero.defined()) zero = at::zeros({}, gradient.options());
    if (is_first) {
      at::where_out(sum, is_nothing, zero, gradient);
    } else {
      const at::Tensor counted = at::where(is_nothing, zero, gradient);
      multiply(counted, against);
      sum.add_(counted);
    }
  }
  if (is_first && against.defined()) multiply(sum, against);
}

void DeviceGradients::take_weights(size_t r) {
  if (!backward_.weighs_on_device) return;
  const at::Tensor& all = weights_.receive(r);
  const at::Tensor own = all.select(0, static_cast<int64_t>(r));
  Weighing& mine = weighings_[r];
  mine.is_nothing = own.eq(0);
  mine.against = first_weight_[r] == 0 ? at::Tensor() : own.div(first_weight_[r]);
  if (!normalisation_) return;
  const at::Tensor total = all.sum().add(normalisation_->divisor);
  const at::Tensor first = first_weight_[r] == 0 ? own : at::full({}, first_weight_[r], own.options());
  mine.factor = first.div(total).div(normalisation_->loss_scale);
  mine.left_out = at::isfinite(all).logical_and(all.ge(0)).all().logical_and(total.gt(0)).logical_not().to(at::kFloat);
}

void DeviceGradients::settle(const std::vector<double>& weights) {
  for (size_t r = 0; r < lanes_.size(); ++r) {
    if (first_weight_[r] != 0) continue;
    first_weight_[r] = weights[r];
    if (weights[r] == 0) std::fill(has_[r].begin(), has_[r].end(), char{0});
  }
  forget_weighings();
}

void DeviceGradients::forget_weighings() {
  backward_.weighs_on_device = false;
  for (Weighing& one : weighings_) one.is_nothing = one.against = one.factor = one.left_out = at::Tensor();
}

void DeviceGradients::end_backward(size_t r) {
  if (!normalisation_) return;
  const Lanes::Scope scope(lanes_, r);
  for (const auto& bucket : buckets_) {
    if (bucket->num_missing[r] == 0) continue;
    for (const size_t p : bucket->parameters) {
      if (!has_[r][p]) views_[r][p].zero_();
    }
    bucket->num_missing[r] = 0;
    fill(*bucket, r);
  }
}

// The bucket has all that the replica gives to it.
void DeviceGradients::fill(Bucket& bucket, size_t r) {
  bucket.mark_full(lanes_, r);
  bucket.factors[r] = backward_.weighs_on_device ? 1 : factor(r);
  bucket.device_factors[r] = weighings_[r].factor;
  if (bucket.num_full.fetch_add(1, std::memory_order_acq_rel) + 1 != lanes_.size()) return;
  bucket.is_launched = true;
  reduction_.launch(bucket);
}

void DeviceGradients::reduce(const Normalisation& normalisation) {
  normalisation_ = normalisation;
  for (const auto& bucket : buckets_) {
    bucket->num_full = 0;
    bucket->is_launched = false;
    for (size_t r = 0; r < lanes_.size(); ++r) bucket->num_missing[r] = 1;
  }
  for (size_t r = 0; r < lanes_.size(); ++r) end_backward(r);
}

// ---- the reduction

double DeviceGradients::factor(size_t r) const { return first_weight_[r] / normalisation_->divisor / normalisation_->loss_scale; }

void DeviceGradients::receive(size_t r) const {
  for (const auto& bucket : buckets_) {
    if (bucket->is_launched) reduction_.receive(*bucket, r);
  }
  if (!buckets_.empty() || r != 0) return;
  const Weighing& weighing = weighings_[0];
  const double by = backward_.weighs_on_device ? 1 / normalisation_->loss_scale : factor(0);
  if (by == 1 && !weighing.against.defined()) return;
  std::vector<at::Tensor> present;
  for (size_t p = 0; p < layouts_.size(); ++p) {
    if (has_[0][p]) present.push_back(views_[0][p]);
  }
  if (weighing.against.defined()) {
    for (const at::Tensor& gradient : present) multiply(gradient, weighing.factor);
  } else if (!present.empty()) {
    at::_foreach_mul_(present, by);
  }
}

void DeviceGradients::gather() {
  if (!is_sharded_ || std::exchange(is_gathered_, true)) return;
  for (const auto& bucket : buckets_) {
    if (!bucket->is_launched) continue;
    reduction_.gather(*bucket);
    for (const size_t leader : lanes_.leaders()) reduction_.receive_gathered(*bucket, leader);
  }
}

void DeviceGradients::note_present() {
  for (size_t p = 0; p < is_present_.size(); ++p) {
    is_present_[p] = std::any_of(has_.begin(), has_.end(), [&](const std::vector<char>& has) { return has[p] != 0; });
  }
}

const stg_tensor* DeviceGradients::tensor(size_t p) {
  if (!is_present_[p]) return nullptr;
  lent_ = to_dlpack(views_[0][p]);
  return lent_.get();
}

void DeviceGradients::clear() {
  // What was launched and never received, after an error, still reads and writes the buckets.
  for (size_t r = 0; r < lanes_.size() && !are_complete() && !buckets_.empty(); ++r) receive(r);
  for (const auto& bucket : buckets_) bucket->is_launched = false;
  for (auto& has : has_) std::fill(has.begin(), has.end(), char{0});
  std::fill(first_weight_.begin(), first_weight_.end(), 0.0);
  std::fill(is_present_.begin(), is_present_.end(), false);
  for (size_t p = 0; p < layouts_.size() && buckets_.empty(); ++p) views_[0][p] = at::Tensor();
  adopted_.clear();
  normalisation_.reset();
  is_gathered_ = false;
  forget_weighings();
  Gradients::clear();
}

}  // namespace stratagem
