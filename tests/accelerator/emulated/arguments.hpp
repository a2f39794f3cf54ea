// SPDX-License-Identifier: Apache-2.0
//
// The arguments of an operator as a job keeps them: device tensors as plain memory, small CPU tensors by value, devices as the CPU.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <functional>
#include <optional>
#include <vector>

#include "accelerator/emulated/plain.hpp"

namespace emulated {

using Values = std::vector<c10::IValue>;

/// Calls `replace` for each defined tensor in `value`, also in lists, and puts what it returns in its place.
c10::IValue map_tensors(const c10::IValue& value, const std::function<at::Tensor(const at::Tensor&)>& replace);

class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, Values values);

  const Values& values() const { return values_; }
  int device() const { return device_; }
  /// What the kernel reads and writes: from the schema, and where that is known to be silent.
  std::vector<Span> spans() const;

  /// Arguments over the jobs' memory; those that the operator only writes to (out=) are fresh, empty tensors, since kernels resize them.
  class Late {
   public:
    Values make() const;
    std::optional<at::Generator> generator;  ///< in place of the operator's

   private:
    friend Arguments;
    Values values_;  // without device tensors
    std::vector<std::vector<Plain>> tensors_;
    std::vector<bool> is_out_;
    std::optional<size_t> generator_index_;
  };
  Late late() const;

  /// Arguments with tensors of the same shapes: on `device`, full of `fill` where that is memory.
  Values like(c10::DeviceType device, double fill) const;
  /// Shapes, types and other arguments, as a key.
  std::string shape_key() const;

  std::optional<size_t> generator_index() const { return generator_index_; }
  bool is_out(size_t i) const;
  bool is_written(size_t i) const;

 private:
  void find_device();
  at::Tensor on_host(const at::Tensor& tensor) const;

  const c10::OperatorHandle& op_;
  Values values_;
  int device_ = -1;
  std::optional<size_t> generator_index_;
};

}  // namespace emulated
