// SPDX-License-Identifier: Apache-2.0
//
// The transport's collectives through NCCL itself: with one rank, and with one on every GPU where there are several.
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <functional>

#include "accelerator/path/cuda_rig.hpp"
#include "base/error.hpp"
#include "gpu/transport.hpp"
#include "support/catch.hpp"
#include "torch/dtypes.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

class Group {
 public:
  explicit Group(uint64_t size, const char* settings = "{}") : size_(size) {
    std::vector<stg_device> devices;
    for (uint64_t rank = 0; rank < size; ++rank) devices.push_back({STG_DEVICE_CUDA, static_cast<int32_t>(rank)});
    check(cuda_transport().open(devices.data(), devices.size(), settings, in_ms(60000), &self));
  }
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;
  ~Group() { cuda_transport().close(self); }

  uint64_t size() const { return size_; }

  /// One collective: `queue` for each rank, with the default stream of its device.
  void each(const std::function<stg_error*(uint64_t rank, c10::StreamData3 stream)>& queue) const {
    check(cuda_transport().begin(self));
    for (uint64_t rank = 0; rank < size_; ++rank) {
      const c10::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(rank));
      check(queue(rank, c10::impl::VirtualGuardImpl(at::kCUDA).getDefaultStream(device).pack3()));
    }
    check(cuda_transport().end(self));
  }

  TransportGroup* self = nullptr;

 private:
  uint64_t size_;
};

at::TensorOptions on(uint64_t rank, at::ScalarType dtype = at::kFloat) {
  return at::TensorOptions().device(at::kCUDA, static_cast<c10::DeviceIndex>(rank)).dtype(dtype);
}

TransportBuffer buffer_of(const at::Tensor& tensor) {
  return {tensor.data_ptr(), tensor.numel(), from_scalar_type(tensor.scalar_type())};
}

double number(uint64_t rank) { return static_cast<double>(rank + 1); }

std::vector<uint64_t> sizes() {
  std::vector<uint64_t> all{1};
  if (num_gpus() > 1) all.push_back(num_gpus());
  return all;
}

}  // namespace

TEST_CASE("NCCL sums what each rank has, times the rank's own factor") {
  begin_test();
  if (!is_on_gpus()) return;
  for (const uint64_t size : sizes()) {
    const Group group(size);
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
      const bool has_factors = dtype == at::kFloat || dtype == at::kDouble;
      std::vector<at::Tensor> values;
      double expected = 0;
      for (uint64_t rank = 0; rank < size; ++rank) {
        values.push_back(at::full({100'003}, number(rank), on(rank, dtype)));
        expected += number(rank) * (has_factors ? 0.5 * number(rank) : 1);
      }
      group.each([&](uint64_t rank, c10::StreamData3 stream) {
        const TransportBuffer buffer = buffer_of(values[rank]);
        return cuda_transport().all_reduce(group.self, rank, &buffer, has_factors ? 0.5 * number(rank) : 1, stream);
      });
      INFO(size << " ranks, " << c10::toString(dtype));
      for (const at::Tensor& value : values) CHECK(value.cpu().equal(at::full({100'003}, expected, dtype)));
    }
  }
}

TEST_CASE("NCCL hands out parts of the sum, gathers parts, and hands on what one rank has") {
  begin_test();
  if (!is_on_gpus()) return;
  for (const uint64_t size : sizes()) {
    const Group group(size, R"({"max_ctas": 4})");
    const int64_t part = 1000, whole = part * static_cast<int64_t>(size);
    std::vector<at::Tensor> whole_of, part_of;
    double factors = 0;
    for (uint64_t rank = 0; rank < size; ++rank) {
      whole_of.push_back(at::arange(whole, on(rank)));
      part_of.push_back(at::zeros({part}, on(rank)));
      factors += 0.25 * number(rank);
    }
    group.each([&](uint64_t rank, c10::StreamData3 stream) {
      const TransportBuffer in = buffer_of(whole_of[rank]), out = buffer_of(part_of[rank]);
      return cuda_transport().reduce_scatter(group.self, rank, &in, &out, 0.25 * number(rank), stream);
    });
    group.each([&](uint64_t rank, c10::StreamData3 stream) {
      const TransportBuffer in = buffer_of(part_of[rank]), out = buffer_of(whole_of[rank]);
      return cuda_transport().all_gather(group.self, rank, &in, &out, stream);
    });
    const at::Tensor expected = at::arange(whole, at::kFloat).mul(factors);
    for (const at::Tensor& gathered : whole_of) CHECK(gathered.cpu().allclose(expected));

    for (uint64_t rank = 0; rank < size; ++rank) part_of[rank].fill_(number(rank));
    group.each([&](uint64_t rank, c10::StreamData3 stream) {
      const TransportBuffer buffer = buffer_of(part_of[rank]);
      return cuda_transport().broadcast(group.self, rank, &buffer, size - 1, stream);
    });
    for (const at::Tensor& got : part_of) CHECK(got.cpu().equal(at::full({part}, number(size - 1), at::kFloat)));
  }
}

TEST_CASE("After an abort a group of NCCL's takes nothing more, and another one can be made") {
  begin_test();
  if (!is_on_gpus()) return;
  for (const uint64_t size : sizes()) {
    for (int round = 0; round < 2; ++round) {
      const Group group(size);
      std::vector<at::Tensor> values;
      for (uint64_t rank = 0; rank < size; ++rank) values.push_back(at::full({5}, 1.0, on(rank)));
      const auto reduce = [&] {
        group.each([&](uint64_t rank, c10::StreamData3 stream) {
          const TransportBuffer buffer = buffer_of(values[rank]);
          return cuda_transport().all_reduce(group.self, rank, &buffer, 1, stream);
        });
      };
      reduce();
      CHECK(values.back().cpu().equal(at::full({5}, static_cast<double>(size), at::kFloat)));
      cuda_transport().abort(group.self);
      CHECK(error_of(reduce).code == STG_ABORTED);
    }
  }
}
