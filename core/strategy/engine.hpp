// SPDX-License-Identifier: Apache-2.0
//
// One process, N replicas on its devices: what single_device and data_parallel have in common, which is nearly everything. A plugin
// derives from it and says how many devices there may be and whether outputs are gathered.
//
//   share        what one replica gets of a batch
//   weight       a share's rows, or the denominator that its step reported
//   window       the micro-batches since the last update; their gradients are kept unnormalised by each replica and divided by the
//                window's divisor (the sum of its weights; 1 for a loss that is a sum) in the one reduction that precedes the update
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "base/strategy.hpp"
#include "strategy/announced.hpp"
#include "strategy/options.hpp"
#include "strategy/split.hpp"
#include "strategy/training.hpp"
#include "strategy/workers.hpp"

namespace stratagem {

class Engine : public Strategy {
 public:
  Engine(const CreateArgs& args, Topology topology);
  ~Engine() override;

  const std::vector<stg_device>& devices() const override { return options_.devices; }
  void abort() noexcept override;
  bool is_own_thread() const noexcept override;

  void setup(const Call& call, Model model, Tree state, uint32_t stage) override;
  void teardown(const Call& call) override;
  stg_model_description describe_parameters() override;
  void fill_status(stg_status& status) const override;

  void model_to_device(const Call& call) override;
  Tree batch_to_device(const Call& call, Tree batch, stg_device target, int64_t dataloader_index) override;
  Tree reduce(const Call& call, Tree object, uint32_t op) override;
  void barrier(const Call& call, std::string_view name) override;
  Tree to_host(const Call& call, Tree object) override;
  uint64_t announce_batch(const Call& call, Tree batch, int64_t dataloader_index, uint32_t stage) override;

  StepResult training_step(const Call& call, StepArgs args) override;
  void backward(const Call& call, uint64_t flags) override;
  UpdateResult optimizer_step(const Call& call, const stg_update_args& args) override;
  StepResult train_batch(const Call& call, StepArgs args, UpdateResult& update) override;
  void zero_grad(const Call& call) override;
  Tree gradients(const Call& call) override;
  void parameters_changed(const Call& call) override;
  StepResult evaluation_step(const Call& call, StepArgs args, uint32_t stage) override;
  void reduce_gradients(const Call& call, const std::vector<stg_gradient_set*>& sets, uint64_t op) override;

  Tree export_state(const Call& call, uint64_t flags) override;
  ImportReport import_state(const Call& call, Tree state, uint64_t flags) override;
  void save(const Call& call, const std::string& path, const std::string& host_json) override;
  ImportReport load(const Call& call, const std::string& path, uint64_t flags, std::string& host_json) override;

 private:
  struct Step;
  struct Update;
  using StepPtr = std::shared_ptr<Step>;
  using UpdatePtr = std::shared_ptr<Update>;
  using Phases = std::vector<Workers::Phase>;

  // Weights of the micro-batches since the last update.
  struct Window {
    uint64_t num_micro_batches = 0;
    double total_weight = 0;
    double divisor = 0;
    bool is_sum = false;
  };

  // The steps of a step, each for one worker or serial.
  StepPtr begin_step(const Call& call, StepArgs args, uint32_t stage, uint64_t context_flags);
  Shares split(const Call& call, Tree batch);
  Shares split_by_model(Tree batch, const stg_model& table);
  SplitOptions split_options() const {
    return {options_.devices.size(), options_.split_in_chunks, options_.floating_dtype, options_.accelerator != nullptr};
  }
  void forward(Step& step, size_t worker);
  Tree place(Step& step, size_t worker);
  void weigh(Step& step);
  void backward_replica(Step& step, size_t worker);
  void add_to_window(Step& step);
  void begin_reduction();
  void skip_overflow(Update& update) const;
  void apply_update(Update& update, size_t worker);
  void finish_update(Update& update);
  void gather(Step& step);
  double resolve_weight(Step& step, size_t worker, const ModelStep& model_step) const;

  // On an accelerator (engine_device.cpp).
  void send_device_weights(Step& step);
  void settle_device_weights(const Call& call, Step& step, Update* update);
  TensorPtr combine_device_losses(const std::vector<const stg_value*>& losses) const;
  void begin_device_backward(const Step& step, bool is_last);
  void backward_on_device(Step& step, size_t worker);
  void add_device_reduction_phase(Phases& phases);
  void add_device_update_phase(Phases& phases, const UpdatePtr& update);
  void update_on_device(Update& update, size_t worker);
  DeviceOptimizer::Wish wish_of(const Update& update) const;
  void finish_device_update(const Call& call, Update& update);
  bool have_overflow_on_device(const Call& call);
  Tree move_batch(const Call& call, Tree batch, size_t replica);
  template <class Body>
  void for_each_leader(Body&& body) const {
    if (!device_) return;
    for (const size_t leader : device_->lanes.leaders()) body(leader);
  }
  void in_root_lane(const Call& call, const std::function<void()>& body) const;

  // Lists of them.
  void run(const Call& call, Phases phases);
  bool have_overflow(const Call& call);
  StepResult result_of(const Call& call, Step& step);
  void restore_and_forget(const Call& call);
  void add_buffer_phase(Phases& phases);
  void add_reduction_phases(Phases& phases, const UpdatePtr& update);
  void add_update_phases(Phases& phases, const UpdatePtr& update);
  void add_refresh_phase(Phases& phases);
  template <class Body>
  void irrevocably(Body&& body);
  template <class Body>
  void run_or_clean_up(const Call& call, Body&& body);

  static AnnouncedBatches::Send sender(const std::shared_ptr<DeviceTraining>& device, const Model& model);
  void refresh_replicas();
  void drop_training();
  void set_device(std::shared_ptr<DeviceTraining> device);
  void replace_workers(std::unique_ptr<Workers> workers);
  UpdatePtr begin_update(const stg_update_args& args) const;
  void end_window(Update& update);
  void drop_waiting_step();
  void forget_window();
  void check_optimizer() const;

  Options options_;
  const TransportApi* transport_ = nullptr;  // null on the CPU
  Host host_;
  const Host silent_host_;
  bool gathers_outputs_;
  bool on_caller_thread_;
  bool warned_of_unsplit_batch_ = false;
  uint32_t threads_per_replica_ = 0;  // 0: as they are

  std::shared_ptr<DeviceTraining> device_;  // from setup to teardown, of an accelerator
  std::shared_ptr<Training> training_;
  mutable std::mutex workers_mutex_;  // guards the pointers to workers and device, which abort reads on any thread
  std::unique_ptr<Workers> workers_;
  std::unique_ptr<AnnouncedBatches> announced_;  // from setup to teardown
  uint64_t last_ticket_ = 0;                     // of those before
  StepPtr waiting_step_;                         // a training_step that waits for its backward
  Window window_;

  std::atomic<uint64_t> num_micro_batches_{0};  // copies for status, which any thread may ask for
  std::atomic<uint64_t> num_updates_{0};
  std::atomic<bool> has_graph_{false};
};

}  // namespace stratagem
