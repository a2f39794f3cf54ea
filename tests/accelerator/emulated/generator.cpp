// SPDX-License-Identifier: Apache-2.0
#include "accelerator/emulated/generator.hpp"

#include <array>
#include <utility>

#include "accelerator/emulated/queue.hpp"

namespace emulated {

namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(int device, at::Generator cpu)
      : GeneratorImpl(device_of(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_.set_offset(offset); }
  uint64_t get_offset() const override { return cpu_.get_offset(); }
  uint64_t current_seed() const override { return cpu_.current_seed(); }
  uint64_t seed() override { return const_cast<at::Generator&>(cpu_).seed(); }
  void set_state(const c10::TensorImpl& state) override { impl().set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl().get_state(); }

  const at::Generator& cpu() const { return cpu_; }

 private:
  c10::GeneratorImpl& impl() const { return *cpu_.unsafeGetGeneratorImpl(); }
  DeviceGenerator* clone_impl() const override { return new DeviceGenerator(device_.index(), cpu_.clone()); }

  at::Generator cpu_;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device < 0 ? current_device() : device, at::detail::createCPUGenerator());
}

const at::Generator& default_generator(int device) {
  static const auto* all = [] {
    auto* made = new std::array<at::Generator, max_devices>;
    for (int i = 0; i < max_devices; ++i) (*made)[i] = new_generator(i);
    return made;
  }();
  return (*all)[device < 0 ? current_device() : device];
}

at::Generator cpu_generator(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == c10::DeviceType::PrivateUse1,
              "Expected a generator of an emulated device, got one of ", generator.device());
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace emulated
