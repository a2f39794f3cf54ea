// SPDX-License-Identifier: Apache-2.0
//
// What LibTorch asks a backend for: devices, streams and events through c10's guard, the rest through ATen's hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "accelerator/emulated/detector.hpp"
#include "accelerator/emulated/event.hpp"
#include "accelerator/emulated/generator.hpp"
#include "accelerator/emulated/memory.hpp"

namespace emulated {

namespace {

int index_of(const c10::Device& device) { return device.index() < 0 ? current_device() : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::PrivateUse1; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(num_devices()); }

  c10::Device getDevice() const override { return device_of(current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < num_devices()) exchange_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override { return device_of(exchange_device(index_of(device))); }

  c10::Stream getStream(c10::Device device) const override { return current_queue(index_of(device)).stream(); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, device_of(index_of(device)));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return next_of_pool(index_of(device)); }
  c10::Stream getNewStream(c10::Device device, int) const override { return next_of_pool(index_of(device)); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const Queue& queue = queue_of(stream);
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), exchange_current(queue.device, queue.id));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    static_cast<Event*>(*event)->last = emulated::record(queue_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    order_after(queue_of(stream), static_cast<Event*>(event)->last);
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryEvent(void* event) const override { return ask(static_cast<Event*>(event)->last); }
  void synchronizeEvent(void* event) const override { synchronize(static_cast<Event*>(event)->last); }
  double elapsedTime(void* from, void* to, c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->last->time() -
                                                     static_cast<Event*>(from)->last->time())
        .count();
  }

  bool queryStream(const c10::Stream& stream) const override { return ask(queue_of(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(queue_of(stream)); }
  void synchronizeDevice(c10::DeviceIndex device) const override { synchronize_device(device < 0 ? current_device() : device); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data.get(), queue_of(stream));
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(num_devices()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(emulated::exchange_device(device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(device); }
  at::Device getDeviceFromPtr(void* data) const override {
    const int device = device_of_address(data);
    TORCH_CHECK(device >= 0, "emulated: the address is no device's");
    return device_of(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  void resizePrivateUse1Bytes(const c10::Storage&, size_t) const override {
    TORCH_CHECK(false, "emulated: a storage can't be resized by itself");
  }
};

// Before any tensor of the kind: LibTorch looks for these where it first sees one.
const bool is_registered = [] {
  c10::register_privateuse1_backend("emulated");
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &device_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace

}  // namespace emulated
