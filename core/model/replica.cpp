// SPDX-License-Identifier: Apache-2.0
#include "model/replica.hpp"

#include <ATen/ops/empty_strided.h>

#include <algorithm>
#include <map>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "model/autocast.hpp"
#include "model/scope.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"
#include "torch/runtime/skip_init.hpp"

namespace stratagem::sdk {

namespace {

void check_usable(const NamedTensor& named, const char* model_name) {
  const char* kind = named.is_parameter ? "parameter" : "buffer";
  const auto refuse = [&](auto... why) {
    throw invalid_argument(kind, " '", named.name, "' of model '", model_name, "' ", why...);
  };
  if (!named.tensor.defined() || named.tensor.is_meta()) {
    refuse("has no shape yet: give it one in the model's constructor");
  }
  if (named.tensor.layout() != at::kStrided) refuse("is ", c10::str(named.tensor.layout()), "; only dense ones can be trained");
  if (!named.tensor.is_leaf()) refuse("was computed from other tensors; register what it was computed from, or detach it");
}

// Two tensors over the same memory would be updated twice. Ties are made by registering one tensor under two names.
void check_apart(const std::vector<ReplicaTensor>& parameters, const std::vector<ReplicaTensor>& buffers) {
  struct Range {
    const char* begin;
    const char* end;
    const std::string* name;
  };
  std::vector<Range> ranges;
  for (const auto* tensors : {&parameters, &buffers}) {
    for (const ReplicaTensor& entry : *tensors) {
      const at::Tensor& tensor = entry.tensor;
      if (tensor.numel() == 0) continue;
      int64_t last = 0;
      for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
      const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
      ranges.push_back({begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size()), &entry.names.front()});
    }
  }
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return std::less<>()(a.begin, b.begin); });
  for (size_t i = 1; i < ranges.size(); ++i) {
    if (std::less<>()(ranges[i].begin, ranges[i - 1].end)) {
      throw invalid_argument("'", *ranges[i - 1].name, "' and '", *ranges[i].name,
                             "' share memory but are two tensors; to tie them, register the same tensor under both names");
    }
  }
}

void show(ReplicaTensor& entry, uint64_t kind_flags) {
  entry.shown_names.clear();
  for (const std::string& name : entry.names) entry.shown_names.push_back(to_abi(std::string_view(name)));
  entry.shown_tensor = to_dlpack(entry.tensor);
  entry.shown = sized<stg_parameter>();
  entry.shown.names = entry.shown_names.data();
  entry.shown.num_names = entry.shown_names.size();
  entry.shown.tensor = entry.shown_tensor.get();
  entry.shown.flags = STG_PARAMETER_PINNED | kind_flags | (entry.persistent ? STG_PARAMETER_PERSISTENT : 0u);
}

void check_binding(const ReplicaTensor& entry, const stg_tensor& given, const std::string& what) {
  const at::Tensor view = view_tensor(given, what);
  if (view.scalar_type() != entry.tensor.scalar_type() || view.sizes() != entry.tensor.sizes() ||
      view.device() != entry.tensor.device()) {
    throw invalid_argument(what, " is ", dtype_name(given.view.dtype), " ", shape_text(given.view), " on ",
                           device_name(given.view.device), "; expected ",
                           dtype_name(from_scalar_type(entry.tensor.scalar_type())), " ", c10::str(entry.tensor.sizes()), " on ",
                           entry.tensor.device().str());
  }
  if ((given.flags & STG_TENSOR_READ_ONLY) != 0) throw invalid_argument(what, " is read-only");
}

}  // namespace

ModelReplica::ModelReplica(const char* model_name, ConstructModel construct, const nlohmann::json& options, const Host& host,
                           const stg_replicate_args& args)
    : host_(host), args_(args), device_(to_device(args.device)) {
  if (!same_dtype(args.floating_dtype, {})) {
    if (!is_floating(args.floating_dtype)) {
      throw invalid_argument("floating_dtype is ", dtype_name(args.floating_dtype), ", which is no floating type");
    }
    floating_dtype_ = to_scalar_type(args.floating_dtype);
  }
  const ThreadScope thread(host_, num_threads());
  generators_.emplace(device_, args.seed, args.replica);
  const GradientScope gradients(GradientScope::Mode::record);
  const AutocastScope autocast(device_.type(), std::nullopt, false);
  const auto initial_generator = [&] { return make_generator(at::Device(at::kCPU), args.seed); };
  const bool skips = (args.flags & STG_REPLICATE_SKIP_INIT) != 0;
  if (!skips || !construct_without_values(construct, options, initial_generator())) {
    const ThreadGenerator initial(initial_generator());
    model_ = construct(options);
  }
  collect(model_name);
}

// Returns whether it could. Then all parameters and persistent buffers that would have been drawn have memory of their own, unwritten.
bool ModelReplica::construct_without_values(ConstructModel construct, const nlohmann::json& options, at::Generator generator) {
  const ThreadGenerator initial(std::move(generator));  // for what is drawn all the same
  const SkipInit scope;
  try {
    model_ = construct(options);
  } catch (...) {
    return false;  // it read what isn't there; whatever else it was comes again
  }
  std::vector<at::Tensor> written;
  for (const NamedTensor& named : model_->named_tensors()) {
    if (!named.is_parameter && !named.persistent) continue;
    if (std::none_of(written.begin(), written.end(), [&](const at::Tensor& other) { return other.is_same(named.tensor); }))
      written.push_back(named.tensor);
  }
  if (!scope.is_covered_by(written)) return false;
  for (at::Tensor& tensor : written) {
    if (!scope.has_skipped(tensor)) continue;
    const bool is_mapped = tensor.is_contiguous() && tensor.nbytes() >= large_memory_bytes;
    tensor.set_data(is_mapped ? to_tensor(allocate_tensor(from_scalar_type(tensor.scalar_type()), tensor.sizes().vec()))
                              : at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options()));
  }
  return true;
}

void ModelReplica::collect(const char* model_name) {
  std::map<const void*, std::pair<bool, size_t>> known;
  std::map<std::string, const void*> names;
  for (NamedTensor& named : model_->named_tensors()) {
    check_usable(named, model_name);
    const void* identity = named.tensor.unsafeGetTensorImpl();
    if (!names.emplace(named.name, identity).second)
      throw invalid_argument("model '", model_name, "' has '", named.name, "' twice");
    const auto [at, is_new] =
        known.try_emplace(identity, named.is_parameter, (named.is_parameter ? parameters_ : buffers_).size());
    auto& tensors = at->second.first ? parameters_ : buffers_;
    if (is_new) {
      ReplicaTensor& entry = tensors.emplace_back();
      entry.tensor = named.tensor;
      entry.persistent = named.persistent;
    }
    tensors[at->second.second].names.push_back(std::move(named.name));
  }
  check_apart(parameters_, buffers_);
  for (auto* tensors : {&parameters_, &buffers_}) {
    for (ReplicaTensor& entry : *tensors) convert(entry.tensor);
  }
}

// In place, so that whoever holds the tensor, a module or the author's member, sees it; names stay tied.
void ModelReplica::convert(at::Tensor& tensor) const {
  const at::ScalarType dtype =
      floating_dtype_.has_value() && tensor.is_floating_point() ? *floating_dtype_ : tensor.scalar_type();
  if (dtype == tensor.scalar_type() && device_ == tensor.device()) return;
  const at::Tensor moved = tensor.detach().to(at::TensorOptions().dtype(dtype).device(device_));
  if (tensor.unsafeGetTensorImpl()->has_compatible_shallow_copy_type(moved.key_set())) {
    tensor.set_data(moved);
  } else {
    // LibTorch refuses that for accelerators that others have added, since a graph may know the tensor already; here none does.
    tensor.unsafeGetTensorImpl()->shallow_copy_from(moved.getIntrusivePtr());
  }
}

stg_model_description ModelReplica::describe() {
  shown_parameters_.clear();
  shown_buffers_.clear();
  for (ReplicaTensor& entry : parameters_) {
    show(entry, entry.tensor.requires_grad() ? STG_PARAMETER_REQUIRES_GRAD : 0u);
    shown_parameters_.push_back(&entry.shown);
  }
  for (ReplicaTensor& entry : buffers_) {
    show(entry, 0);
    shown_buffers_.push_back(&entry.shown);
  }
  auto description = sized<stg_model_description>();
  description.parameters = shown_parameters_.data();
  description.num_parameters = shown_parameters_.size();
  description.buffers = shown_buffers_.data();
  description.num_buffers = shown_buffers_.size();
  description.loss_kind = model_->loss_kind();
  return description;
}

void ModelReplica::bind(uint64_t index, const stg_tensor& storage, const stg_tensor* gradient) {
  if (index >= parameters_.size() + buffers_.size()) {
    throw invalid_argument("index ", index, "; this model has ", parameters_.size(), " parameters and ", buffers_.size(),
                           " buffers");
  }
  ReplicaTensor& entry = index < parameters_.size() ? parameters_[index] : buffers_[index - parameters_.size()];
  check_binding(entry, storage, concat("the storage for '", entry.names.front(), "'"));
  if (gradient != nullptr) check_binding(entry, *gradient, concat("the gradient for '", entry.names.front(), "'"));
  entry.tensor.set_data(view_tensor(storage));
  entry.bound_gradient = gradient == nullptr ? at::Tensor() : view_tensor(*gradient);
}

void ModelReplica::set_training(bool training) { model_->set_training(training); }

}  // namespace stratagem::sdk
