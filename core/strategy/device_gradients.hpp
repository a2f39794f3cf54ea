// SPDX-License-Identifier: Apache-2.0
//
// Gradients of replicas on an accelerator. Each replica's lie in buckets, flat memory of its own: parameters in reverse order, since
// backward comes to the last ones first; a small first bucket, so that the first reduction starts early. A bucket is reduced on the
// communication streams as soon as every replica has filled it, while the rest of backward runs. With one replica there is nothing to
// reduce: its gradients are kept as autograd made them.
//
//   in a bucket   sum over micro-batches of (weight / weight of the first) x gradient
//   factor        weight of the first / divisor / loss scale: applied as the bucket is reduced
//
// Where a step says what its shares weigh by tensors on their devices, the factors are made there, and the host knows them later: in that
// one backward, gradients that weigh nothing are left out as they come.
//
// All replicas' part of one bucket is launched by the thread that fills it last, so the order is the same everywhere.
//
// Complex gradients lie there as pairs of reals.
//
// For a sharded optimizer (sharded_optimizer.hpp) each device gets a part of each bucket's sum alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <unordered_set>
#include <vector>

#include "accelerator/lanes.hpp"
#include "strategy/device_reduction.hpp"
#include "strategy/device_weights.hpp"
#include "strategy/gradients.hpp"
#include "strategy/options.hpp"
#include "strategy/replicas.hpp"

namespace stratagem {

class DeviceGradients final : public Gradients {
 public:
  /// `lanes` must outlive this.
  DeviceGradients(const Replicas& replicas, const Lanes& lanes, const BucketOptions& options);

  struct Normalisation {
    double divisor = 1;
    double loss_scale = 1;
  };
  struct Backward {
    std::vector<double> weights;                 ///< of the gradients, by share; replicas beyond have none
    std::optional<Normalisation> normalisation;  ///< given: the window's last, reduced as it goes
    bool detects_anomalies = false;
    bool weighs_on_device = false;  ///< weights() has sent them; those above say only who has a backward
  };
  /// Serial: before the backward of a micro-batch.
  void begin_backward(Backward backward);
  /// By each worker, in its lane, before its backward.
  void take_weights(size_t replica);
  /// On whatever thread the model reports it; one at a time of a replica.
  void add(size_t replica, size_t parameter, TensorPtr gradient, const stg_stream* stream);
  /// By each worker, whether or not it had a share.
  void end_backward(size_t replica);
  DeviceWeights& weights() { return weights_; }
  /// Serial: the host knows now what the shares of a backward weighed that did so on their devices.
  void settle(const std::vector<double>& weights);
  /// After take_weights, by a leader: a float, 1 where there is to be no update for what the shares weigh; undefined: there is.
  const at::Tensor& left_out(size_t leader) const { return weighings_[leader].left_out; }
  /// Serial: reduces what the window has, where its last backward didn't.
  void reduce(const Normalisation& normalisation);

  /// Serial, after all have ended their backward.
  void note_present();
  /// By each leader's worker, after the reduction was launched: what it queues from here on comes after it.
  void receive(size_t replica) const;
  /// Of parameters that any replica has one for; reduced on leaders.
  /// Sharded: only what lies in the leader's part of the bucket, but after gather.
  const at::Tensor& gradient(size_t replica, size_t parameter) const { return views_[replica][parameter]; }

  struct Bucket : DeviceBucket {
    using DeviceBucket::DeviceBucket;
    std::vector<size_t> parameters;
    std::vector<int64_t> begins;      // in the flat memory, by parameter of it
    std::vector<size_t> num_missing;  // by replica, in this backward
    std::atomic<size_t> num_full{0};  // replicas
    bool is_launched = false;
  };
  bool is_sharded() const { return is_sharded_; }
  const std::vector<std::unique_ptr<Bucket>>& buckets() const { return buckets_; }
  DeviceReduction& reduction() { return reduction_; }
  /// Serial: sharded gradients that are reduced become whole on every leader, for what its lane does next.
  void gather();

  bool is_present(size_t parameter) const override { return is_present_[parameter]; }
  const stg_tensor* tensor(size_t parameter) override;
  void clear() override;

 private:
  void make_buckets(const Replicas& replicas, const BucketOptions& options);
  void make_bucket(std::vector<size_t> parameters, at::ScalarType dtype);
  double weight_of(size_t replica) const;
  void put(size_t replica, size_t parameter, at::Tensor gradient, double alpha);
  void put_weighed(size_t replica, size_t parameter, at::Tensor gradient);
  void forget_weighings();
  void fill(Bucket& bucket, size_t replica);
  double factor(size_t replica) const;

  // A replica's share of the backward that is under way, on its device.
  struct Weighing {
    at::Tensor is_nothing;  // it weighs nothing
    at::Tensor against;     // its weight against the window's first; undefined: it is the first
    at::Tensor factor;      // of the reduction
    at::Tensor left_out;
    std::map<at::ScalarType, at::Tensor> zeros;
  };

  const Lanes& lanes_;
  DeviceReduction reduction_;
  DeviceWeights weights_;
  std::vector<Weighing> weighings_;  // by replica
  const bool is_sharded_;
  bool is_gathered_ = false;
  std::vector<FlatLayout> layouts_;  // by parameter
  std::vector<std::unique_ptr<Bucket>> buckets_;
  std::vector<Bucket*> bucket_of_;              // by parameter; null: frozen, or there are no buckets
  std::vector<std::vector<at::Tensor>> views_;  // by replica, by parameter
  std::vector<std::vector<char>> has_;          // by replica, by parameter: in this window
  std::vector<double> first_weight_;            // by replica; 0: nothing yet
  std::vector<bool> is_present_;
  std::unordered_set<const void*> adopted_;  // memory of gradients that are kept as they came
  Backward backward_;
  std::optional<Normalisation> normalisation_;
  TensorPtr lent_;
};

}  // namespace stratagem
