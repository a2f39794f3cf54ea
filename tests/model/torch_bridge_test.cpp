// SPDX-License-Identifier: Apache-2.0
//
// Tensors between the ABI and LibTorch: nothing is copied, nothing is released twice or never, nothing bad gets through.
#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/full.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <numeric>
#include <thread>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "torch/bridge.hpp"
#include "torch/dtypes.hpp"
#include "torch/errors.hpp"
#include "torch/threads.hpp"
#include "torch/warnings.hpp"

// Last, since LibTorch has a CHECK, too.
#include "support/catch.hpp"

using namespace stratagem;
using Catch::Contains;

namespace {

const std::vector<stg_dtype> all_dtypes{
    {STG_DTYPE_BOOL, 8, 1},    {STG_DTYPE_INT, 8, 1},      {STG_DTYPE_INT, 16, 1},     {STG_DTYPE_INT, 32, 1},
    {STG_DTYPE_INT, 64, 1},    {STG_DTYPE_UINT, 8, 1},     {STG_DTYPE_UINT, 16, 1},    {STG_DTYPE_UINT, 32, 1},
    {STG_DTYPE_UINT, 64, 1},   {STG_DTYPE_FLOAT, 16, 1},   {STG_DTYPE_FLOAT, 32, 1},   {STG_DTYPE_FLOAT, 64, 1},
    {STG_DTYPE_BFLOAT, 16, 1}, {STG_DTYPE_COMPLEX, 32, 1}, {STG_DTYPE_COMPLEX, 64, 1}, {STG_DTYPE_COMPLEX, 128, 1},
};

// A foreign tensor over an array, which counts how often it is released.
struct Foreign {
  std::array<float, 12> data{};
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  int num_released = 0;
  stg_tensor tensor{};

  explicit Foreign(std::vector<int64_t> sizes, std::vector<int64_t> steps = {})
      : shape(std::move(sizes)), strides(std::move(steps)) {
    std::iota(data.begin(), data.end(), 10.0F);
    tensor = {STG_DLPACK_MAJOR,
              STG_DLPACK_MINOR,
              this,
              [](stg_tensor* self) { ++static_cast<Foreign*>(self->owner)->num_released; },
              0,
              {data.data(),
               {STG_DEVICE_CPU, 0},
               static_cast<int32_t>(shape.size()),
               float32,
               shape.empty() ? nullptr : shape.data(),
               strides.empty() ? nullptr : strides.data(),
               0}};
  }
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;

  TensorPtr handle() { return TensorPtr{&tensor}; }
};

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.message;
  }
  return "no error";
}

}  // namespace

TEST_CASE("Every element type that the ABI knows goes into LibTorch and out again unchanged") {
  for (stg_dtype dtype : all_dtypes) {
    INFO(dtype_name(dtype));
    const at::Tensor made = at::zeros({2, 3}, to_scalar_type(dtype));
    const TensorPtr exported = to_dlpack(made);
    CHECK(same_dtype(exported->view.dtype, dtype));
    const at::Tensor back = view_tensor(*exported);
    CHECK(back.scalar_type() == made.scalar_type());
    CHECK(back.data_ptr() == made.data_ptr());
    CHECK(back.sizes() == made.sizes());
  }
}

TEST_CASE("An element type without a word on the other side is an error that names it") {
  CHECK_THAT(error_of([] { to_scalar_type({STG_DTYPE_FLOAT, 8, 1}); }), Contains("code 2, 8 bits, 1 lanes"));
  CHECK_THAT(error_of([] { from_scalar_type(at::kQInt8); }), Contains("QInt8"));
  CHECK_THAT(error_of([] { from_scalar_type(at::kFloat8_e4m3fn); }), Contains("Float8_e4m3fn"));
}

TEST_CASE("Devices keep their kind and index, and a logical CPU device is LibTorch's one CPU") {
  CHECK(to_device({STG_DEVICE_CPU, 3}) == at::Device("cpu"));
  CHECK(to_device({STG_DEVICE_CUDA_HOST, 0}) == at::Device("cpu"));
  CHECK(to_device({STG_DEVICE_CUDA, 1}) == at::Device("cuda:1"));
  CHECK(from_device(at::Device("cuda:1")).index == 1);
  CHECK(from_device(at::Device("cpu")).index == 0);
  CHECK_THAT(error_of([] { to_device({STG_DEVICE_NONE, -1}); }), Contains("no device"));
  CHECK_THAT(error_of([] { to_device({STG_DEVICE_CUDA, 300}); }), Contains("cuda:300"));
  CHECK_THAT(error_of([] { from_device(at::Device("meta")); }), Contains("meta"));
}

TEST_CASE("An imported tensor is not copied, and is released once, when LibTorch is done with it") {
  Foreign foreign({3, 4});
  at::Tensor tensor = to_tensor(foreign.handle());
  CHECK(tensor.data_ptr() == foreign.data.data());
  at::Tensor row = tensor.select(0, 2);
  tensor = at::Tensor();
  CHECK(foreign.num_released == 0);
  CHECK(row.const_data_ptr<float>()[3] == 21.0F);
  std::thread([last = std::move(row)] {}).join();
  CHECK(foreign.num_released == 1);
}

TEST_CASE("A null deleter is legal") {
  Foreign foreign({2});
  foreign.tensor.deleter = nullptr;
  CHECK(to_tensor(foreign.handle()).const_data_ptr<float>()[1] == 11.0F);
  CHECK(foreign.num_released == 0);
}

TEST_CASE("A byte offset is honoured on import and gone on export") {
  Foreign foreign({3});
  foreign.tensor.view.byte_offset = 4;
  const at::Tensor tensor = to_tensor(foreign.handle());
  CHECK(at::equal(tensor, at::arange(11.0F, 14.0F, at::kFloat)));
  const TensorPtr exported = to_dlpack(tensor.slice(0, 1));
  CHECK(first_element<float>(exported->view)[0] == 12.0F);
}

TEST_CASE("Strides are honoured, and those of dimensions of size 0 or 1 don't matter") {
  Foreign transposed({2, 3}, {1, 2});
  CHECK(to_tensor(transposed.handle()).select(0, 1).const_data_ptr<float>()[0] == 11.0F);
  Foreign row({1, 3}, {999, 1});
  CHECK(at::equal(to_tensor(row.handle()), at::arange(10.0F, 13.0F, at::kFloat).unsqueeze(0)));
  Foreign odd({1, 3}, {-7, 1});
  CHECK(to_tensor(odd.handle()).sum().item<float>() == 33.0F);
  Foreign repeated({4}, {0});
  CHECK(to_tensor(repeated.handle()).sum().item<float>() == 40.0F);
}

TEST_CASE("Tensors without elements, data, strides or dimensions are tensors") {
  Foreign empty({0, 3});
  empty.tensor.view.data = nullptr;
  at::Tensor none = to_tensor(empty.handle());
  CHECK(none.sizes() == at::IntArrayRef({0, 3}));
  CHECK(to_dlpack(none)->view.shape[1] == 3);
  Foreign scalar({});
  const at::Tensor number = to_tensor(scalar.handle());
  CHECK(number.dim() == 0);
  CHECK(number.item<float>() == 10.0F);
  CHECK(to_dlpack(number)->view.num_dims == 0);
  none = at::Tensor();
  CHECK(empty.num_released == 1);
}

TEST_CASE("A tensor that must not be imported is refused with the reason, and released all the same") {
  const auto refused = [](Foreign& foreign) {
    const std::string message = error_of([&] { to_tensor(foreign.handle(), "batch[\"x\"]"); });
    CHECK_THAT(message, Contains("batch[\"x\"]"));
    CHECK(foreign.num_released == 1);
    return message;
  };
  Foreign negative({2, 3}, {-3, 1});
  CHECK_THAT(refused(negative), Contains("negative stride -3"));
  Foreign major({2});
  major.tensor.dlpack_major = 2;
  CHECK_THAT(refused(major), Contains("DLPack 2"));
  Foreign huge({int64_t{1} << 62});
  CHECK_THAT(refused(huge), Contains("4611686018427387904"));
  Foreign fp8({2});
  fp8.tensor.view.dtype = {10, 8, 1};
  CHECK_THAT(refused(fp8), Contains("code 10"));
  Foreign unaligned({2});
  unaligned.tensor.view.byte_offset = 2;
  CHECK_THAT(refused(unaligned), Contains("aligned"));
  Foreign nowhere({2});
  nowhere.tensor.view.device = {99, 0};
  const std::string message = error_of([&] { to_tensor(nowhere.handle()); });
  CHECK_THAT(message, Contains("device kind 99"));
  CHECK(nowhere.num_released == 1);
}

TEST_CASE("A view owns nothing") {
  Foreign foreign({4});
  { const at::Tensor view = view_tensor(foreign.tensor); }
  CHECK(foreign.num_released == 0);
}

TEST_CASE("An exported tensor keeps the memory but not the graph, and has strides of its own") {
  at::Tensor leaf = at::zeros({2, 3}, at::kFloat).requires_grad_();
  at::Tensor tensor = leaf.mul(2).add(1);
  const void* data = tensor.data_ptr();
  TensorPtr exported = to_dlpack(tensor.t());
  tensor.detach_().resize_({0});
  tensor = at::Tensor();
  CHECK(exported->view.data == data);
  CHECK(strides_of(exported->view) == std::vector<int64_t>{1, 3});
  CHECK(leaf.use_count() == 1);
  CHECK(to_tensor(std::move(exported)).sum().item<float>() == 6.0F);
}

TEST_CASE("Conjugate and negative views are resolved on export") {
  const at::Tensor number = at::full({2}, c10::complex<float>(1, 2), at::kComplexFloat);
  const at::Tensor back = to_tensor(to_dlpack(number.conj()));
  CHECK(back.select(0, 0).item<c10::complex<float>>() == c10::complex<float>(1, -2));
  const at::Tensor imaginary = at::view_as_real(number.conj().resolve_conj()).select(1, 1);
  CHECK(to_tensor(to_dlpack(imaginary)).select(0, 0).item<float>() == -2.0F);
  const at::Tensor negative = at::imag(number.conj());
  REQUIRE(negative.is_neg());
  CHECK(to_tensor(to_dlpack(negative)).select(0, 0).item<float>() == -2.0F);
}

TEST_CASE("Sparse and undefined tensors are refused by name") {
  CHECK_THAT(error_of([] { to_dlpack(at::zeros({2, 2}).to_sparse()); }), Contains("Sparse"));
  CHECK_THAT(error_of([] { to_dlpack(at::Tensor()); }), Contains("undefined"));
}

TEST_CASE("LibTorch's exceptions become errors with a code and without a backtrace") {
  initialise_torch();
  const auto told = [](const std::function<void()>& call) {
    try {
      call();
    } catch (...) {
      return describe_exception(std::current_exception());
    }
    return Error{STG_OK, ""};
  };
  const Error shapes = told([] { at::zeros({2}).add(at::zeros({3})); });
  CHECK(shapes.code == STG_INTERNAL);
  CHECK_THAT(shapes.message, Contains("size of tensor a (2)") && !Contains("frame #"));
  CHECK(told([] { at::zeros({2}).select(0, 7); }).code == STG_INVALID_ARGUMENT);
  CHECK(told([] { at::zeros({int64_t{1} << 50}, at::kByte); }).code == STG_RESOURCE_EXHAUSTED);
  CHECK(told([] { TORCH_CHECK_NOT_IMPLEMENTED(false, "no"); }).code == STG_UNIMPLEMENTED);
  CHECK(told([] { TORCH_CHECK_VALUE(false, "no"); }).code == STG_INVALID_ARGUMENT);
  CHECK(told([] { TORCH_CHECK_TYPE(false, "no"); }).code == STG_INVALID_ARGUMENT);
  CHECK(told([] { throw std::runtime_error("plain"); }).message == "plain");
  CHECK(told([] { throw 42; }).code == STG_UNKNOWN);
}

TEST_CASE("The thread count of one thread leaves that of later threads alone") {
  const auto in_thread = [](const std::function<void()>& prepare) {
    int seen = 0;
    std::thread([&] {
      prepare();
      seen = at::get_num_threads();
    }).join();
    return seen;
  };
  const int before = in_thread([] {});
  CHECK(in_thread([] { set_thread_intra_op(7); }) == 7);
  CHECK(in_thread([] {}) == before);
  CHECK(in_thread([] { set_thread_intra_op(1); }) == 1);
  CHECK(in_thread([] {}) == before);
}

TEST_CASE("LibTorch's warnings go to the host's log of this thread, and to nobody else's") {
  std::string logged;
  stg_host table{};
  table.struct_size = sizeof(table);
  table.self = &logged;
  table.log = [](void* self, uint32_t level, stg_string message, const stg_tree*) {
    *static_cast<std::string*>(self) += std::to_string(level) + ":" + std::string(text_of(message)) + ";";
  };
  const Host host(&table);
  {
    const WarningScope scope(host);
    TORCH_WARN("mind the gap");
    std::thread([] {
      const Host silent;
      const WarningScope other(silent);
      TORCH_WARN("elsewhere");
    }).join();
  }
  CHECK(logged == "3:LibTorch: mind the gap;");
}
