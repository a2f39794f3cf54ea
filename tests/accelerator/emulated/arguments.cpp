// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/arguments.hpp"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>

#include <sstream>

#include "base/text.hpp"

namespace emulated {

using stratagem::concat;

namespace {

const c10::Argument& argument(const c10::OperatorHandle& op, size_t i) { return op.schema().arguments()[i]; }

// LibTorch's schema doesn't say that batch norm updates its running statistics.
bool is_silently_written(const c10::OperatorHandle& op, size_t i) {
  return op.schema().name() == "aten::native_batch_norm" && (i == 3 || i == 4);
}

void each_tensor(const c10::IValue& value, const std::function<void(const at::Tensor&)>& see) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    see(tensor);
    return tensor;
  });
}

}  // namespace

c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace) {
  const auto mapped = [&](const at::Tensor& tensor) { return tensor.defined() ? replace(tensor) : tensor; };
  if (value.isTensor()) return mapped(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(mapped(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
      list.push_back(tensor ? std::optional(mapped(*tensor)) : std::nullopt);
    return list;
  }
  return value;
}

Arguments::Arguments(const c10::OperatorHandle& op, Values values) : op_(op), values_(std::move(values)) {
  find_device();
  for (size_t i = 0; i < values_.size(); ++i) {
    const c10::TypePtr& type = argument(op, i).type();
    const auto optional = type->cast<c10::OptionalType>();
    if ((optional ? optional->getElementType() : type)->kind() == c10::TypeKind::GeneratorType) generator_index_ = i;
  }
}

void Arguments::find_device() {
  for (const c10::IValue& value : values_) {
    each_tensor(value, [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return;
      TORCH_CHECK(device_ < 0 || device_ == tensor.get_device(), op_.schema().name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", name_of(device_), " and ",
                  name_of(tensor.get_device()));
      device_ = tensor.get_device();
    });
  }
  for (const c10::IValue& value : values_) {
    if (device_ < 0 && value.isDevice()) device_ = value.toDevice().has_index() ? value.toDevice().index() : current_device();
    each_tensor(value, [&](const at::Tensor& tensor) {
      TORCH_CHECK(is_on_device(tensor) || (tensor.is_cpu() && tensor.dim() == 0), op_.schema().name(),
                  ": Expected all tensors to be on the same device, but found at least two devices, ", name_of(device_), " and ",
                  tensor.device());
    });
  }
  if (device_ < 0) device_ = current_device();
}

bool Arguments::is_out(size_t i) const { return argument(op_, i).is_out(); }

bool Arguments::is_written(size_t i) const {
  const c10::AliasInfo* alias = argument(op_, i).alias_info();
  return (alias != nullptr && alias->isWrite()) || is_silently_written(op_, i);
}

std::vector<Span> Arguments::spans() const {
  std::vector<Span> all;
  for (size_t i = 0; i < values_.size(); ++i) {
    each_tensor(values_[i], [&](const at::Tensor& tensor) {
      if (is_on_device(tensor)) all.push_back(span(tensor, is_written(i)));
    });
  }
  return all;
}

// By value, as a launch takes scalars. A wrapped number is nobody else's.
at::Tensor Arguments::on_host(const at::Tensor& tensor) const {
  return tensor.unsafeGetTensorImpl()->is_wrapped_number() ? tensor : tensor.clone();
}

Arguments::Late Arguments::late() const {
  Late late;
  late.generator_index_ = generator_index_;
  for (size_t i = 0; i < values_.size(); ++i) {
    std::vector<Plain> tensors;
    late.values_.push_back(map_tensors(values_[i], [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return on_host(tensor);
      tensors.push_back(plain(tensor));
      return at::Tensor();
    }));
    if (values_[i].isDevice()) late.values_.back() = c10::Device(c10::kCPU);
    late.tensors_.push_back(std::move(tensors));
    late.is_out_.push_back(is_out(i));
  }
  return late;
}

Values Arguments::Late::make() const {
  Values made;
  for (size_t i = 0; i < values_.size(); ++i) {
    auto next = tensors_[i].begin();
    const auto fill = [&]() -> at::Tensor {
      const Plain& one = *next++;
      return is_out_[i] ? at::empty({0}, at::TensorOptions().dtype(one.dtype)) : one.tensor();
    };
    const c10::IValue& value = values_[i];
    if (tensors_[i].empty()) {
      made.push_back(value);
    } else if (value.isTensor()) {
      made.emplace_back(fill());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? tensor : fill());
      made.emplace_back(list);
    } else {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor && !tensor->defined() && next != tensors_[i].end() ? std::optional(fill()) : tensor);
      made.emplace_back(list);
    }
  }
  if (generator_index_ && generator) made[*generator_index_] = *generator;
  return made;
}

Values Arguments::like(c10::DeviceType device, double fill) const {
  Values made;
  for (size_t i = 0; i < values_.size(); ++i) {
    made.push_back(map_tensors(values_[i], [&](const at::Tensor& tensor) {
      if (!is_on_device(tensor)) return tensor;
      const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(device);
      if (is_out(i)) return at::empty({0}, options);
      at::Tensor same = at::empty_strided(tensor.sizes(), tensor.strides(), options);
      return device == c10::kMeta ? same : same.fill_(fill);
    }));
    if (values_[i].isDevice()) made.back() = c10::Device(device);
  }
  return made;
}

std::string Arguments::shape_key() const {
  std::ostringstream key;
  key << op_.schema().name() << '.' << op_.schema().overload_name();
  for (const c10::IValue& value : values_) {
    key << '|';
    bool has_tensors = value.isTensor() || value.isTensorList() || value.isOptionalTensorList();
    each_tensor(value, [&](const at::Tensor& tensor) {
      key << tensor.scalar_type() << tensor.sizes() << tensor.strides() << tensor.unsafeGetTensorImpl()->is_wrapped_number()
          << ',';
    });
    if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) key << (tensor && tensor->defined());
    } else if (value.isTensor()) {
      key << value.toTensor().defined();
    } else if (!has_tensors && !value.isGenerator()) {
      key << value;
    }
  }
  return std::move(key).str();
}

}  // namespace emulated
