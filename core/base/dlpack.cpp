// SPDX-License-Identifier: Apache-2.0
#include "base/dlpack.hpp"

#include <sys/mman.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <utility>

#include "base/error.hpp"

namespace stratagem {

namespace {

// A tensor of ours: one allocation for the struct, its shape and its strides.
struct OwnedTensor {
  stg_tensor abi{};
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;
  std::shared_ptr<const void> storage;
};

std::vector<int64_t> row_major_strides(std::span<const int64_t> shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t d = shape.size(); d-- > 0;) {
    strides[d] = step;
    step *= std::max<int64_t>(shape[d], 1);
  }
  return strides;
}

std::shared_ptr<void> allocate_host(uint64_t size_bytes, bool zeros) {
  const auto out_of_memory = [&] {
    return Error{STG_RESOURCE_EXHAUSTED, concat("out of memory on the host: ", size_bytes, " bytes wanted")};
  };
  // Where malloc would ask the system, too: zeros that cost nothing until they are used, and then, where it can, two megabytes at a time.
  if (size_bytes >= large_memory_bytes) {
    void* memory = mmap(nullptr, size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw out_of_memory();
    madvise(memory, size_bytes, MADV_HUGEPAGE);
    return {memory, [size_bytes](void* mapped) { munmap(mapped, size_bytes); }};
  }
  const uint64_t rounded = std::max<uint64_t>((size_bytes + 63) / 64 * 64, 64);
  void* memory = std::aligned_alloc(64, rounded);
  if (memory == nullptr) throw out_of_memory();
  if (zeros) std::memset(memory, 0, rounded);
  return {memory, std::free};
}

double half_to_double(uint16_t bits) {
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  double magnitude;
  if (exponent == 0) {
    magnitude = std::ldexp(mantissa, -24);
  } else if (exponent == 31) {
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity() : std::numeric_limits<double>::quiet_NaN();
  } else {
    magnitude = std::ldexp(1024 + mantissa, exponent - 25);
  }
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

template <class T>
T load(const void* address) {
  T value;
  std::memcpy(&value, address, sizeof(T));
  return value;
}

double element_as_double(const void* at, stg_dtype dtype) {
  switch (dtype.code * 256 + dtype.bits) {
    case STG_DTYPE_BOOL * 256 + 8:
    case STG_DTYPE_UINT * 256 + 8:
      return load<uint8_t>(at);
    case STG_DTYPE_UINT * 256 + 16:
      return load<uint16_t>(at);
    case STG_DTYPE_UINT * 256 + 32:
      return load<uint32_t>(at);
    case STG_DTYPE_UINT * 256 + 64:
      return static_cast<double>(load<uint64_t>(at));
    case STG_DTYPE_INT * 256 + 8:
      return load<int8_t>(at);
    case STG_DTYPE_INT * 256 + 16:
      return load<int16_t>(at);
    case STG_DTYPE_INT * 256 + 32:
      return load<int32_t>(at);
    case STG_DTYPE_INT * 256 + 64:
      return static_cast<double>(load<int64_t>(at));
    case STG_DTYPE_FLOAT * 256 + 16:
      return half_to_double(load<uint16_t>(at));
    case STG_DTYPE_FLOAT * 256 + 32:
      return static_cast<double>(load<float>(at));
    case STG_DTYPE_FLOAT * 256 + 64:
      return load<double>(at);
    case STG_DTYPE_BFLOAT * 256 + 16:
      return static_cast<double>(std::bit_cast<float>(uint32_t{load<uint16_t>(at)} << 16));
    default:
      throw invalid_argument("an element of type ", dtype_name(dtype), " can't be read as a number");
  }
}

bool is_known(stg_dtype dtype) {
  if (dtype.lanes != 1) return false;
  const bool is_integer_width = dtype.bits == 8 || dtype.bits == 16 || dtype.bits == 32 || dtype.bits == 64;
  switch (dtype.code) {
    case STG_DTYPE_INT:
    case STG_DTYPE_UINT:
      return is_integer_width;
    case STG_DTYPE_FLOAT:
      return is_integer_width && dtype.bits != 8;
    case STG_DTYPE_BFLOAT:
      return dtype.bits == 16;
    case STG_DTYPE_COMPLEX:
      return dtype.bits == 32 || dtype.bits == 64 || dtype.bits == 128;
    case STG_DTYPE_BOOL:
      return dtype.bits == 8;
    default:
      return false;
  }
}

// The address alignment that loads of this type need (complex: that of its parts).
uint64_t alignment_bytes(stg_dtype dtype) { return element_size_bytes(dtype) / (dtype.code == STG_DTYPE_COMPLEX ? 2 : 1); }

// Copies a strided host tensor into row-major memory, dimension by dimension.
void copy_rows(char* destination, const char* source, std::span<const int64_t> shape, const int64_t* strides,
               uint64_t element_bytes) {
  if (shape.empty()) {
    std::memcpy(destination, source, element_bytes);
    return;
  }
  if (shape.size() == 1 && strides[0] == 1) {
    std::memcpy(destination, source, static_cast<uint64_t>(shape[0]) * element_bytes);
    return;
  }
  uint64_t row_bytes = element_bytes;
  for (int64_t size : shape.subspan(1)) row_bytes *= static_cast<uint64_t>(size);
  for (int64_t i = 0; i < shape[0]; ++i) {
    copy_rows(destination + static_cast<uint64_t>(i) * row_bytes, source + i * strides[0] * static_cast<int64_t>(element_bytes),
              shape.subspan(1), strides + 1, element_bytes);
  }
}

Value copy_value(const stg_value& value, const KeyPath& path, CopyTensor copy) {
  switch (value.type) {
    case STG_TENSOR:
      if (copy == &copy_tensor) check_in_host_memory(value.as.tensor->view, "the tensor at ", path);
      return copy(value.as.tensor->view);
    case STG_LIST:
    case STG_TUPLE: {
      List items;
      items.reserve(value.count);
      for (uint32_t i = 0; i < value.count; ++i) items.push_back(copy_value(value.as.items[i], {&path, uint64_t{i}}, copy));
      if (value.type == STG_TUPLE) return Tuple{std::move(items)};
      return items;
    }
    case STG_DICT: {
      Dict dict;
      dict.reserve(value.count);
      for (uint32_t i = 0; i < value.count; ++i) {
        const std::string_view key = text_of(value.as.entries[i].key);
        dict.emplace_back(key, copy_value(value.as.entries[i].value, {&path, key}, copy));
      }
      return dict;
    }
    default:
      return take(Tree::view(value));
  }
}

// A tensor whose dimension 0 is the batch.
bool is_batched(const stg_value& leaf) { return leaf.type == STG_TENSOR && leaf.as.tensor->view.num_dims > 0; }

}  // namespace

std::string dtype_name(stg_dtype dtype) {
  static constexpr const char* names[] = {"int", "uint", "float", "", "bfloat", "complex", "bool"};
  if (!is_known(dtype)) return concat("code ", int{dtype.code}, ", ", int{dtype.bits}, " bits, ", dtype.lanes, " lanes");
  return dtype.code == STG_DTYPE_BOOL ? "bool" : concat(names[dtype.code], int{dtype.bits});
}

std::string shape_text(const stg_tensor_view& view) {
  std::string out = "(";
  for (int32_t d = 0; d < view.num_dims; ++d) out += (d == 0 ? "" : ", ") + std::to_string(view.shape[d]);
  return out + ")";
}

std::string device_name(stg_device device) {
  std::string kind;
  switch (device.kind) {
    case STG_DEVICE_NONE:
      return "no device";
    case STG_DEVICE_CPU:
      kind = "cpu";
      break;
    case STG_DEVICE_CUDA:
      kind = "cuda";
      break;
    case STG_DEVICE_CUDA_HOST:
      kind = "pinned cpu";
      break;
    default:
      kind = concat("device kind ", device.kind);
  }
  return concat(kind, ":", device.index);
}

int64_t numel(const stg_tensor_view& view) noexcept {
  int64_t product = 1;
  for (int64_t size : shape_of(view)) product *= size;
  return product;
}

std::optional<uint64_t> checked_size_bytes(stg_dtype dtype, std::span<const int64_t> shape) noexcept {
  uint64_t size_bytes = element_size_bytes(dtype);
  bool is_empty = false;
  for (int64_t size : shape) {
    is_empty = is_empty || size == 0;
    if (size != 0 && __builtin_mul_overflow(size_bytes, static_cast<uint64_t>(size), &size_bytes)) return {};
    if (size_bytes > uint64_t{1} << 62) return {};
  }
  return is_empty ? 0 : size_bytes;
}

std::vector<int64_t> strides_of(const stg_tensor_view& view) {
  if (view.strides == nullptr) return row_major_strides(shape_of(view));
  return {view.strides, view.strides + view.num_dims};
}

bool is_contiguous(const stg_tensor_view& view) noexcept {
  if (view.strides == nullptr) return true;
  int64_t expected = 1;
  for (int32_t d = view.num_dims; d-- > 0;) {
    if (view.shape[d] == 0) return true;
    if (view.shape[d] != 1) {
      if (view.strides[d] != expected) return false;
      expected *= view.shape[d];
    }
  }
  return true;
}

std::optional<std::string> tensor_fault(const stg_tensor& tensor) {
  const stg_tensor_view& view = tensor.view;
  if (tensor.dlpack_major != STG_DLPACK_MAJOR) {
    return concat("a tensor of DLPack ", tensor.dlpack_major, ".", tensor.dlpack_minor, "; this ABI takes 1.x");
  }
  if (view.num_dims < 0 || view.num_dims > 64) return concat("", view.num_dims, " dimensions; 0 to 64 are possible");
  if (view.num_dims > 0 && view.shape == nullptr) return concat("a null shape with ", view.num_dims, " dimensions");
  if (!is_known(view.dtype)) {
    return concat("elements of type ", dtype_name(view.dtype),
                  "; known are bool, (u)int8 to 64, float16/32/64, bfloat16 and complex32/64/128");
  }
  for (int64_t size : shape_of(view)) {
    if (size < 0) return concat("the shape ", shape_text(view), " has a negative size");
  }
  const std::optional<uint64_t> size_bytes = checked_size_bytes(view.dtype, shape_of(view));
  if (!size_bytes) return concat("the shape ", shape_text(view), " needs more than 2^62 bytes");
  constexpr uint64_t most_bytes = uint64_t{1} << 62;
  if (view.byte_offset > most_bytes) return concat("byte_offset ", view.byte_offset, " is over 2^62 bytes");
  if (*size_bytes == 0) return {};
  uint64_t span_bytes = *size_bytes;
  if (view.strides != nullptr) {
    span_bytes = element_size_bytes(view.dtype);
    for (int32_t d = 0; d < view.num_dims; ++d) {
      if (view.shape[d] <= 1) continue;
      if (view.strides[d] < 0) return concat("negative stride ", view.strides[d], " in dimension ", d);
      uint64_t reach = 0;
      if (__builtin_mul_overflow(static_cast<uint64_t>(view.shape[d] - 1), static_cast<uint64_t>(view.strides[d]), &reach) ||
          __builtin_mul_overflow(reach, element_size_bytes(view.dtype), &reach) ||
          __builtin_add_overflow(span_bytes, reach, &span_bytes) || span_bytes > most_bytes) {
        return concat("stride ", view.strides[d], " in dimension ", d, " reaches over 2^62 bytes");
      }
    }
  }
  if (view.data == nullptr) return concat("null data for the shape ", shape_text(view));
  const auto data = reinterpret_cast<uintptr_t>(view.data);
  if (span_bytes > most_bytes - view.byte_offset || view.byte_offset + span_bytes > UINTPTR_MAX - data) {
    return concat("byte_offset ", view.byte_offset, " and the ", span_bytes, " bytes after it reach over 2^62 bytes");
  }
  const uint64_t address = data + view.byte_offset;
  if (address % alignment_bytes(view.dtype) != 0) {
    return concat("data + byte_offset (", view.byte_offset, ") is not aligned for ", dtype_name(view.dtype));
  }
  return {};
}

TensorPtr make_strided_tensor(std::shared_ptr<const void> storage, void* data, stg_dtype dtype, std::vector<int64_t> shape,
                              std::vector<int64_t> strides, uint64_t flags, stg_device device) {
  auto owned = std::make_unique<OwnedTensor>();
  owned->shape = std::move(shape);
  owned->strides = std::move(strides);
  owned->storage = std::move(storage);
  owned->abi.dlpack_major = STG_DLPACK_MAJOR;
  owned->abi.dlpack_minor = STG_DLPACK_MINOR;
  owned->abi.owner = owned.get();
  owned->abi.deleter = [](stg_tensor* self) { delete static_cast<OwnedTensor*>(self->owner); };
  owned->abi.flags = flags;
  owned->abi.view = {data, device, static_cast<int32_t>(owned->shape.size()), dtype, owned->shape.data(), owned->strides.data(),
                     0};
  return TensorPtr{&owned.release()->abi};
}

TensorPtr make_tensor(std::shared_ptr<const void> storage, void* data, stg_dtype dtype, std::vector<int64_t> shape,
                      uint64_t flags, stg_device device) {
  std::vector<int64_t> strides = row_major_strides(shape);
  return make_strided_tensor(std::move(storage), data, dtype, std::move(shape), std::move(strides), flags, device);
}

TensorPtr allocate_tensor(stg_dtype dtype, std::vector<int64_t> shape) {
  uint64_t size_bytes = element_size_bytes(dtype);
  for (int64_t size : shape) size_bytes *= static_cast<uint64_t>(size);
  std::shared_ptr<void> memory = allocate_host(size_bytes, true);
  void* data = memory.get();
  return make_tensor(std::move(memory), data, dtype, std::move(shape));
}

TensorPtr copy_tensor(const stg_tensor_view& source) {
  check_in_host_memory(source, "a tensor to be copied");
  const uint64_t element_bytes = element_size_bytes(source.dtype);
  const int64_t num_elements = numel(source);
  std::shared_ptr<void> memory = allocate_host(static_cast<uint64_t>(num_elements) * element_bytes, false);
  if (num_elements > 0 && is_contiguous(source)) {
    std::memcpy(memory.get(), first_element<>(source), static_cast<uint64_t>(num_elements) * element_bytes);
  } else if (num_elements > 0) {
    copy_rows(static_cast<char*>(memory.get()), first_element<char>(source), shape_of(source), source.strides, element_bytes);
  }
  void* data = memory.get();
  const auto shape = shape_of(source);
  return make_tensor(std::move(memory), data, source.dtype, {shape.begin(), shape.end()});
}

TensorPtr narrow_rows(std::shared_ptr<const void> keep, const stg_tensor& source, int64_t begin, int64_t num_rows) {
  std::vector<int64_t> strides = strides_of(source.view);
  std::vector<int64_t> shape(source.view.shape, source.view.shape + source.view.num_dims);
  shape[0] = num_rows;
  const int64_t offset_bytes = begin * strides[0] * static_cast<int64_t>(element_size_bytes(source.view.dtype));
  TensorPtr rows = make_strided_tensor(std::move(keep), source.view.data, source.view.dtype, std::move(shape), std::move(strides),
                                       source.flags, source.view.device);
  rows->view.byte_offset = source.view.byte_offset + static_cast<uint64_t>(offset_bytes);
  return rows;
}

double read_element(const stg_tensor_view& view, int64_t index) {
  int64_t offset = index;
  if (view.strides != nullptr) {
    offset = 0;
    for (int32_t d = view.num_dims; d-- > 0;) {
      offset += index % view.shape[d] * view.strides[d];
      index /= view.shape[d];
    }
  }
  return element_as_double(first_element<char>(view) + offset * static_cast<int64_t>(element_size_bytes(view.dtype)), view.dtype);
}

Tree copy_tree(const stg_value& root, CopyTensor copy) { return make_tree(copy_value(root, {}, copy)); }

std::optional<int64_t> batch_rows(const stg_value& root) {
  std::optional<int64_t> rows;
  std::string first_path;
  for_each_leaf(root, [&](const KeyPath& path, const stg_value& leaf) {
    if (!is_batched(leaf)) return;
    const int64_t size = leaf.as.tensor->view.shape[0];
    if (!rows) {
      rows = size;
    } else if (*rows != size) {
      // The first batched leaf is found again: its path is needed only here.
      for_each_leaf(root, [&](const KeyPath& other, const stg_value& candidate) {
        if (first_path.empty() && is_batched(candidate)) first_path = other.text();
      });
      throw invalid_argument("the batch's tensors disagree about its rows: ", first_path, " has ", *rows, ", ", path.text(),
                             " has ", size,
                             "; dimension 0 of every tensor is the batch (a model with packed batches brings its own split)");
    }
  });
  return rows;
}

}  // namespace stratagem
