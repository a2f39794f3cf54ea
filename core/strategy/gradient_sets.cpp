// SPDX-License-Identifier: Apache-2.0
#include "strategy/gradient_sets.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <numeric>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "strategy/elements.hpp"
#include "strategy/gradients.hpp"
#include "strategy/kernels.hpp"

namespace stratagem {

namespace {

constexpr int64_t min_numel_for_threads = 32768;  // below, a hand-off costs more than it saves

// One gradient of all sets.
struct Slot {
  FlatLayout layout;
  int64_t numel = 0;
  std::vector<TensorPtr> made;    // by set: for those that had none
  std::vector<TensorPtr> copies;  // by set: in the layout, for those that have another one
  std::vector<void*> memory;      // by set: what is read and written
  std::vector<char> is_read;      // by set
};

std::string name_of(size_t set, uint64_t gradient) { return concat("set ", set, ", gradient ", gradient); }

class SetReduction {
 public:
  SetReduction(const std::vector<stg_gradient_set*>& sets, uint64_t op) : sets_(sets), is_mean_(op == STG_REDUCE_MEAN) {}

  void check(const std::vector<stg_device>& devices) {
    if (sets_.size() != devices.size()) {
      throw invalid_argument("reduce_gradients got ", sets_.size(), " sets; this instance has ", devices.size(),
                             " devices, one set each");
    }
    for (size_t s = 0; s < sets_.size(); ++s) check_set(s, devices[s]);
    if (is_mean_ && std::all_of(sets_.begin(), sets_.end(), [](const stg_gradient_set* set) { return set->weight == 0; }))
      throw invalid_argument("reduce_gradients: the weights of all sets are 0; a mean needs one over 0");
    for (uint64_t g = 0; g < sets_[0]->num_gradients; ++g) check_alike(g);
    check_apart();
  }

  // Weights may be larger or smaller than the gradients' type has numbers, and their sum than double has. Equal ones are 1 each; others
  // are divided by a power of two, which leaves the bits of sums as they are, so that their sum is at most 1.
  void normalise_weights() {
    double largest = 0;
    bool are_equal = true;
    for (const stg_gradient_set* set : sets_) {
      if (set->weight == 0) continue;
      are_equal = are_equal && (largest == 0 || set->weight == largest);
      largest = std::max(largest, set->weight);
    }
    const int exponent = std::ilogb(largest) + 1 + static_cast<int>(std::bit_width(sets_.size()));
    for (const stg_gradient_set* set : sets_)
      weights_.push_back(set->weight == 0 ? 0 : are_equal ? 1 : std::ldexp(set->weight, -exponent));
    total_weight_ = std::accumulate(weights_.begin(), weights_.end(), 0.0);
  }

  // By set: what its gradients count in the result.
  std::vector<double> factors() {
    if (!is_mean_) return std::vector<double>(sets_.size(), 1);
    normalise_weights();
    std::vector<double> factors;
    for (const double weight : weights_) factors.push_back(weight / total_weight_);
    return factors;
  }

  void prepare() {
    for (uint64_t g = 0; g < sets_[0]->num_gradients; ++g) {
      const auto first =
          std::find_if(sets_.begin(), sets_.end(), [g](const stg_gradient_set* set) { return set->gradients[g] != nullptr; });
      Slot& slot = slots_.emplace_back();
      if (first == sets_.end()) continue;
      slot.layout = flat_layout((*first)->gradients[g]->view);
      slot.numel = numel((*first)->gradients[g]->view) * (slot.layout.dtype.code == STG_DTYPE_COMPLEX ? 2 : 1);
      for (const stg_gradient_set* set : sets_) {
        const stg_tensor* tensor = set->gradients[g];
        slot.made.push_back(tensor == nullptr ? slot.layout.allocate() : nullptr);
        slot.copies.push_back(tensor != nullptr && !slot.layout.fits(tensor->view) ? slot.layout.copy(tensor->view) : nullptr);
        const TensorPtr& own = tensor == nullptr ? slot.made.back() : slot.copies.back();
        slot.memory.push_back(first_element<>(own ? own->view : tensor->view));
        slot.is_read.push_back(tensor != nullptr && !(is_mean_ && set->weight == 0));
      }
    }
  }

  void run(Workers& workers, const Call& call) {
    std::vector<int64_t> numels;
    for (const Slot& slot : slots_) numels.push_back(slot.numel);
    const bool is_small = std::accumulate(numels.begin(), numels.end(), int64_t{0}) < min_numel_for_threads;
    const auto ranges = partition(numels, is_small ? 1 : workers.size());
    const auto part = [&](size_t worker) {
      for (const FlatRange& range : ranges[worker]) reduce_range(range);
    };
    if (is_small) {
      part(0);
    } else {
      workers.run(call, {{"reduce", part}});
    }
  }

  void hand_out() {
    for (uint64_t g = 0; g < slots_.size(); ++g) {
      for (size_t s = 0; s < slots_[g].memory.size(); ++s) {
        Slot& slot = slots_[g];
        if (slot.copies[s]) copy_elements(sets_[s]->gradients[g]->view, slot.copies[s]->view);
        if (slot.made[s]) sets_[s]->gradients[g] = slot.made[s].release();
      }
    }
  }

 private:
  void check_set(size_t s, stg_device device) const {
    const stg_gradient_set& set = *sets_[s];
    if (set.device.kind != device.kind || set.device.index != device.index) {
      throw invalid_argument("set ", s, " is for ", device_name(set.device), "; device ", s, " of the instance is ",
                             device_name(device));
    }
    if (set.num_gradients != sets_[0]->num_gradients) {
      throw invalid_argument("set ", s, " has ", set.num_gradients, " gradients, set 0 has ", sets_[0]->num_gradients,
                             "; null stands for none");
    }
    for (uint64_t g = 0; g < set.num_gradients; ++g) {
      if (set.gradients[g] != nullptr) check_writable(*set.gradients[g], device, name_of(s, g));
    }
  }

  static void check_writable(const stg_tensor& tensor, stg_device device, const std::string& name) {
    const stg_tensor_view& view = tensor.view;
    if ((tensor.flags & STG_TENSOR_READ_ONLY) != 0) throw invalid_argument(name, " is read-only; a gradient is reduced in place");
    const bool fits = device.kind == STG_DEVICE_CPU ? is_in_host_memory(view.device)
                                                    : view.device.kind == device.kind && view.device.index == device.index;
    if (!fits) {
      throw invalid_argument(name, " is on ", device_name(view.device), "; its set is for ",
                             device.kind == STG_DEVICE_CPU ? "a cpu" : device_name(device));
    }
    if (!is_floating(view.dtype) && view.dtype.code != STG_DTYPE_COMPLEX) {
      throw invalid_argument(name, " is ", dtype_name(view.dtype), "; gradients are of a floating or complex type");
    }
    if (!has_distinct_elements(view)) {
      throw invalid_argument(name, " has elements that share memory (a stride of 0, or overlapping strides); copy it first");
    }
  }

  void check_alike(uint64_t g) const {
    const stg_tensor_view* first = nullptr;
    size_t first_set = 0;
    for (size_t s = 0; s < sets_.size(); ++s) {
      if (sets_[s]->gradients[g] == nullptr) continue;
      const stg_tensor_view& view = sets_[s]->gradients[g]->view;
      if (first == nullptr) {
        first = &view;
        first_set = s;
      } else if (!same_dtype(first->dtype, view.dtype) || !std::ranges::equal(shape_of(*first), shape_of(view))) {
        throw invalid_argument(name_of(s, g), " is ", dtype_name(view.dtype), " ", shape_text(view), ", in set ", first_set,
                               " it is ", dtype_name(first->dtype), " ", shape_text(*first));
      }
    }
  }

  // No gradient lies in the memory of another one.
  void check_apart() const {
    struct Range {
      MemoryRange memory;
      size_t set;
      uint64_t gradient;
    };
    std::vector<Range> ranges;
    for (size_t s = 0; s < sets_.size(); ++s) {
      for (uint64_t g = 0; g < sets_[s]->num_gradients; ++g) {
        const stg_tensor* tensor = sets_[s]->gradients[g];
        if (tensor != nullptr && numel(tensor->view) > 0) ranges.push_back({memory_range(tensor->view), s, g});
      }
    }
    std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.memory.begin < b.memory.begin; });
    for (size_t i = 1; i < ranges.size(); ++i) {
      if (ranges[i].memory.begin < ranges[i - 1].memory.end) {
        throw invalid_argument(name_of(ranges[i].set, ranges[i].gradient), " overlaps ",
                               name_of(ranges[i - 1].set, ranges[i - 1].gradient), " in memory; each gradient needs its own");
      }
    }
  }

  void reduce_range(const FlatRange& range) const {
    const stg_dtype dtype = slots_[range.parameter].layout.dtype;
    const int bits = dtype.code == STG_DTYPE_COMPLEX ? dtype.bits / 2 : dtype.bits;
    if (bits == 64) return reduce_range_as<double, double>(range);
    if (bits == 32) return reduce_range_as<float, float>(range);
    return dtype.code == STG_DTYPE_BFLOAT ? reduce_range_as<BFloat16, float>(range) : reduce_range_as<Half, float>(range);
  }

  // sum of w_i g_i over sum of w_i; or the plain sum. In the order of the sets.
  template <class T, class Number>
  void reduce_range_as(const FlatRange& range) const {
    const Slot& slot = slots_[range.parameter];
    Number sums[kernels::block_numel];
    Number values[kernels::block_numel];
    for (int64_t at = range.begin; at < range.end; at += kernels::block_numel) {
      const int64_t count = std::min(kernels::block_numel, range.end - at);
      std::fill_n(sums, count, Number{0});
      for (size_t s = 0; s < sets_.size(); ++s) {
        if (!slot.is_read[s]) continue;
        kernels::load(values, static_cast<const T*>(slot.memory[s]) + at, count);
        kernels::add_scaled(sums, values, count, is_mean_ ? static_cast<Number>(weights_[s]) : Number{1});
      }
      if (is_mean_) kernels::divide(sums, count, static_cast<Number>(total_weight_));
      for (void* memory : slot.memory) {
        for (int64_t i = 0; i < count; ++i) static_cast<T*>(memory)[at + i] = as_element<T>(sums[i]);
      }
    }
  }

  const std::vector<stg_gradient_set*>& sets_;
  bool is_mean_;
  std::vector<double> weights_;  // by set: their share of total_weight_
  double total_weight_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace

std::vector<double> check_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op,
                                        const std::vector<stg_device>& devices) {
  SetReduction reduction(sets, op);
  reduction.check(devices);
  return reduction.factors();
}

void reduce_gradient_sets(const std::vector<stg_gradient_set*>& sets, uint64_t op, const std::vector<stg_device>& devices,
                          Workers& workers, const Call& call) {
  SetReduction reduction(sets, op);
  reduction.check(devices);
  if (op == STG_REDUCE_MEAN) reduction.normalise_weights();
  reduction.prepare();
  reduction.run(workers, call);
  reduction.hand_out();
}

}  // namespace stratagem
