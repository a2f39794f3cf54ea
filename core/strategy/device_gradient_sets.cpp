// SPDX-License-Identifier: Apache-2.0
//
// reduce_gradients on an accelerator: the gradients of each set are copied into flat memory of their type, which is reduced, and copied
// back.
#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_real.h>

#include <map>

#include "accelerator/order.hpp"
#include "base/error.hpp"
#include "strategy/device_reduction.hpp"
#include "strategy/gradient_sets.hpp"
#include "strategy/gradients.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"

namespace stratagem {

namespace {

// One gradient of all sets, as rows of a bucket.
struct Row {
  uint64_t gradient;
  FlatLayout layout;
  int64_t begin;
  int64_t numel;
};

// Those that any set has, by type. Complex ones are pairs of reals.
std::map<at::ScalarType, std::vector<Row>> rows_of(const std::vector<stg_gradient_set*>& sets) {
  std::map<at::ScalarType, std::vector<Row>> rows;
  for (uint64_t g = 0; g < sets[0]->num_gradients; ++g) {
    for (const stg_gradient_set* set : sets) {
      if (set->gradients[g] == nullptr) continue;
      const stg_tensor_view& view = set->gradients[g]->view;
      std::vector<Row>& list = rows[c10::toRealValueType(to_scalar_type(view.dtype))];
      const int64_t begin = list.empty() ? 0 : list.back().begin + list.back().numel;
      list.push_back({g, flat_layout(view), begin, flat_numel(view)});
      break;
    }
  }
  return rows;
}

at::Tensor real_view(const at::Tensor& tensor) { return tensor.is_complex() ? at::view_as_real(tensor) : tensor; }

class DeviceSets {
 public:
  DeviceSets(const std::vector<stg_gradient_set*>& sets, const Lanes& lanes) : sets_(sets), lanes_(lanes) {}

  void enter() const {
    for (size_t i = 0; i < sets_.size(); ++i) {
      c10::Event made(lanes_[i].device.type());
      made.record(stream(i));
      order::wait("gradients of a set before they are read", lanes_[i].compute, made);
    }
  }

  void fill(DeviceBucket& bucket, const std::vector<Row>& rows, const std::vector<double>& factors) const {
    for (size_t i = 0; i < sets_.size(); ++i) {
      const Lanes::Scope scope(lanes_, i);
      bucket.factors[i] = factors[i];
      for (const Row& row : rows) {
        at::Tensor flat = bucket.flat[i].narrow(0, row.begin, row.numel);
        if (const stg_tensor* given = sets_[i]->gradients[row.gradient]) {
          const at::Tensor gradient = real_view(view_tensor(*given));
          flat.view(gradient.sizes()).copy_(gradient);
        } else {
          flat.zero_();
        }
      }
      bucket.mark_full(lanes_, i);
    }
  }

  // The leaders have the sums; the others of a device read their leader's.
  void hand_out(const DeviceBucket& bucket, const std::vector<Row>& rows, const DeviceReduction& reduction) const {
    for (size_t i = 0; i < sets_.size(); ++i) {
      const Lanes::Scope scope(lanes_, i);
      reduction.receive(bucket, i);
      const at::Tensor& sum = bucket.flat[lanes_[i].leader];
      for (const Row& row : rows) {
        stg_tensor*& place = sets_[i]->gradients[row.gradient];
        if (place == nullptr) {
          const at::ScalarType dtype = to_scalar_type(row.layout.dtype);
          place = to_dlpack(at::empty(row.layout.shape, at::TensorOptions().dtype(dtype).device(lanes_[i].device))).release();
        }
        const at::Tensor to = real_view(view_tensor(*place));
        to.copy_(sum.narrow(0, row.begin, row.numel).view(to.sizes()));
      }
    }
  }

  void leave() const {
    for (size_t i = 0; i < sets_.size(); ++i) {
      c10::Event done(lanes_[i].device.type());
      done.record(lanes_[i].compute);
      order::wait("gradients of a set written before the caller goes on", stream(i), done);
    }
  }

 private:
  c10::Stream stream(size_t i) const {
    const stg_stream& given = sets_[i]->stream;
    return given.device.kind == lanes_[i].abi_device.kind ? lanes_.wrap(given)
                                                          : Lanes::default_stream(lanes_[i]);  // else all zeros
  }

  const std::vector<stg_gradient_set*>& sets_;
  const Lanes& lanes_;
};

}  // namespace

void reduce_device_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op, const std::vector<stg_device>& devices,
                                 const Lanes& lanes, DeviceReduction& reduction) {
  const std::vector<double> factors = check_gradient_sets(sets, op, devices);
  const DeviceSets all(sets, lanes);
  all.enter();
  for (const auto& [dtype, rows] : rows_of(sets)) {
    DeviceBucket bucket(lanes, dtype, rows.back().begin + rows.back().numel);
    all.fill(bucket, rows, factors);
    reduction.launch(bucket);
    all.hand_out(bucket, rows, reduction);
    // A leader's memory goes now, while the others of its device read it.
    for (size_t i = 0; i < lanes.size(); ++i) {
      if (lanes.is_leader(i)) continue;
      order::keep("the sum until each replica of its device has it", bucket.flat[lanes[i].leader], lanes[i].compute);
    }
  }
  all.leave();
}

}  // namespace stratagem
