// SPDX-License-Identifier: Apache-2.0
#include "strategy/training.hpp"

#include "accelerator/order.hpp"
#include "strategy/device_elements.hpp"
#include "strategy/sharded_optimizer.hpp"

namespace stratagem {

namespace {

void refuse_float16(const ReplicaSlot& root) {
  for (const ParameterInfo& info : root.parameter_infos) {
    if (!info.requires_grad || info.dtype.code != STG_DTYPE_FLOAT || info.dtype.bits != 16) continue;
    throw invalid_argument("parameter ", info.names[0], " is float16, whose gradient 16-mixed would multiply by the loss scale; ",
                           "keep it in float32: autocast computes in float16 all the same");
  }
}

}  // namespace

DeviceTraining::DeviceTraining(const Call& call, const Options& options, const TransportApi& transport)
    : lanes(options.devices, transport) {
  use_device_elements();
  for (size_t i = 0; i < lanes.size(); ++i) {
    check(transport.native_stream(lanes[i].compute.pack3(), &compute_streams.emplace_back()));
  }
  if (lanes.leaders().size() == 1) return;
  std::vector<stg_device> devices;
  for (const size_t leader : lanes.leaders()) devices.push_back(options.devices[leader]);
  TransportGroup* group = nullptr;
  check(transport.open(devices.data(), devices.size(), options.transport_settings.c_str(), call.deadline_ns(), &group));
  lanes.set_group(group);
}

void DeviceTraining::let_wait(const char* name, size_t reader, size_t writer) const {
  c10::Event written(lanes[writer].device.type());
  written.record(lanes[writer].compute);
  order::wait(name, lanes[reader].compute, written);
}

void DeviceTraining::wait_for_followers(const char* name, size_t leader) const {
  for (size_t i = leader + 1; i < lanes.size(); ++i) {
    if (lanes[i].leader == leader) let_wait(name, leader, i);
  }
}

void DeviceTraining::let_followers_go_on(const char* name, size_t leader) const {
  for (size_t i = leader + 1; i < lanes.size(); ++i) {
    if (lanes[i].leader == leader) let_wait(name, i, leader);
  }
}

void DeviceTraining::await(const Call& call, const char* waiting_for) const {
  for (size_t i = 0; i < lanes.size(); ++i) lanes.await(call, i, waiting_for);
}

Training::Training(const Model& model, const Options& options, uint32_t threads_per_replica, bool is_fit, bool state_follows,
                   std::shared_ptr<DeviceTraining> given)
    : device(std::move(given)),
      replicas(model, options, threads_per_replica, is_fit && options.optimizer.has_value(), state_follows) {
  if (!is_fit) return;
  if (options.scales_loss) {
    refuse_float16(replicas.root());
    scaler.emplace();
  }
  if (device != nullptr) {
    auto made = std::make_unique<DeviceGradients>(replicas, device->lanes, options.buckets);
    if (options.optimizer && made->is_sharded()) {
      optimizer = std::make_unique<ShardedOptimizer>(*options.optimizer, replicas, device->lanes, *made);
    } else if (options.optimizer) {
      optimizer = std::make_unique<ReplicatedOptimizer>(*options.optimizer, replicas, device->lanes, *made);
    }
    gradients = std::move(made);
    return;
  }
  // Momentum moves all rows that ever had a gradient.
  const bool has_momentum = options.optimizer && options.optimizer->name == "sgd" && options.optimizer->momentum != 0;
  auto made = std::make_unique<ReducedGradients>(replicas.root(), replicas.size(), has_momentum);
  if (options.optimizer) optimizer = std::make_unique<HostOptimizer>(*options.optimizer, replicas.root(), *made);
  gradients = std::move(made);
}

}  // namespace stratagem
