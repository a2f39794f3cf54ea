// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Errors inside a replica": a fault of each kind, at each place, in the middle of a run. After it the run goes on,
// bitwise as one that never had it. Every call has a deadline of 5 seconds: a hang is an error.
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <new>

#include "spec/watch.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

// What a model does wrong, and where. Replica and place are compared where it would happen.
struct Fault {
  std::string kind;
  std::string place;
  int32_t replica = 1;
};
std::atomic<bool> is_armed{false};
Fault fault;

void fail_where_told(const std::string& place, int32_t replica) {
  if (!is_armed || place != fault.place || replica != fault.replica) return;
  if (fault.kind == "std::exception") throw std::runtime_error("the mask is upside down");
  if (fault.kind == "no std::exception") throw 42;
  if (fault.kind == "bad_alloc") throw std::bad_alloc();
  Error error{STG_UNAVAILABLE, "the tokenizer's server is away"};
  error.flags = STG_ERROR_RETRYABLE;
  throw error;
}

uint32_t code_of(const Fault& f) {
  if (f.kind == "std::exception") return STG_INTERNAL;
  if (f.kind == "no std::exception") return STG_UNKNOWN;
  return f.kind == "bad_alloc" ? STG_RESOURCE_EXHAUSTED : STG_UNAVAILABLE;
}

std::string text_of_fault(const Fault& f) {
  if (f.kind == "std::exception") return "the mask is upside down";
  if (f.kind == "no std::exception") return "no std::exception";
  return f.kind == "bad_alloc" ? "out of memory" : "the tokenizer's server is away";
}

// A linear model with a buffer that each training step moves, a transfer hook and a splitter, and a fault in any of them.
class FaultyModel {
 public:
  explicit FaultyModel(bool has_splitter) : model_(linear_model(0.7)) {
    ToyParameter mean{{"mean"}, {1}, {0.5}};
    mean.flags = STG_PARAMETER_PERSISTENT | STG_PARAMETER_PINNED;
    model_->buffers.push_back(mean);
    const auto step = model_->on_step;
    model_->on_step = [this, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
      if (replica.is_training) {
        float& at = *first_element<float>(replica.buffers[0]->view);
        at = 0.9F * at + static_cast<float>(element(batch, "x", 0)) + static_cast<float>(context.replica);
      }
      {
        const std::lock_guard lock(mutex_);
        seen_[context.replica] = {replica.value(0, 0), read_element(replica.buffers[0]->view, 0)};
      }
      fail_where_told(context.stage == STG_STAGE_FIT ? "forward" : "evaluation", context.replica);
      return step(replica, context, batch);
    };
    model_->on_backward = [](ToyReplica& replica) { fail_where_told("backward", replica.args.replica); };
    model_->table.transfer = [](void*, stg_replica* handle, stg_tree* batch, int64_t, stg_tree* out) {
      Tree owned = Tree::receive(batch);
      return guard([&] {
        fail_where_told("transfer", reinterpret_cast<ToyReplica*>(handle)->args.replica);
        *out = owned.give();
      });
    };
    if (!has_splitter) return;
    model_->table.split = [](void*, stg_replica*, const stg_tree* batch, uint64_t num_shares, stg_tree* shares,
                             uint64_t* num_filled) {
      return guard([&] {
        fail_where_told("split", 0);
        const std::vector<double> x = numbers(*find(batch->root, "x"));
        for (uint64_t i = 0; i < num_shares; ++i) {
          std::vector<double> own;
          for (size_t row = i; row < x.size(); row += num_shares) own.push_back(x[row]);
          shares[i] = batch_of(own).give();
        }
        *num_filled = num_shares;
      });
    };
  }

  ToyModel& operator*() { return *model_; }
  ToyModel* operator->() { return model_.get(); }

  // Weight and buffer as each replica has them.
  std::map<int32_t, std::pair<double, double>> replicas(Instance& instance) {
    seen_.clear();
    instance.validate(batch_of(std::vector<double>(6, 1.0)));
    return seen_;
  }

 private:
  std::mutex mutex_;
  std::map<int32_t, std::pair<double, double>> seen_;
  std::unique_ptr<ToyModel> model_;
};

const std::string three_devices = R"({"devices": [4, 2, 7], "threads": 3, "optimizer": {"name": "adamw", "lr": 0.1}})";

Tree batch_at(int step) { return batch_of({0.1 * step, 0.7, -0.3, 0.9, 1.1, 0.2}); }

void check_all_alike(FaultyModel& model, Instance& instance) {
  const auto seen = model.replicas(instance);
  CHECK(seen.size() == 3);
  for (const auto& [replica, values] : seen) CHECK(values == seen.begin()->second);
}

}  // namespace

TEST_CASE(
    "a fault of any kind on replica 1 at step 3, anywhere in a step: told in full, and the run goes on as if nothing had been") {
  const size_t num_threads_before = num_threads();
  for (const bool has_bind : {true, false}) {
    for (const std::string place : {"forward", "backward", "transfer", "split"}) {
      for (const std::string kind : {"std::exception", "no std::exception", "stg_error", "bad_alloc"}) {
        for (const bool in_one : {true, false}) {
          fault = {kind, place, place == "split" ? 0 : 1};
          INFO(kind << " in " << place << (in_one ? ", train_batch" : ", training_step and backward"));
          FaultyModel model(place == "split");
          if (!has_bind) model->table.bind = nullptr;
          {
            Instance instance("data_parallel", three_devices);
            Instance undisturbed("data_parallel", three_devices);
            instance.setup(*model);
            undisturbed.setup(*model);
            for (int step = 0; step < 6; ++step) {
              if (step == 3) {
                const std::string before = state_bytes(instance.export_state());
                is_armed = true;
                const Error error = error_of([&] { train_by(instance, batch_at(step), in_one, 0.1); });
                is_armed = false;
                CHECK(error.code == code_of(fault));
                CHECK(error.replica == fault.replica);
                CHECK(error.device.kind == STG_DEVICE_CPU);
                CHECK(error.device.index == (fault.replica == 1 ? 2 : 4));
                const std::string where = place == "transfer" ? "forward" : place;  // the hook is called at its beginning
                CHECK_THAT(error.message, Catch::Contains(fault.replica == 1 ? "replica 1 on cpu:2, in " + where
                                                                             : "replica 0 on cpu:4, in " + where));
                CHECK_THAT(error.message, Catch::Contains(text_of_fault(fault)));
                CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
                CHECK(((error.flags & STG_ERROR_RETRYABLE) != 0) == (kind == "stg_error"));
                REQUIRE(error.cause != nullptr);
                CHECK_THAT(std::string(text_of(error.cause->message)), Catch::Contains(text_of_fault(fault)));
                CHECK((state_bytes(instance.export_state()) == before));  // buffers that the step moved are put back
                CHECK(instance.status().num_micro_batches == 0);
                CHECK(instance.status().has_graph == 0);
                CHECK(model->num_graphs == 0);
                CHECK(error_of([&] { instance.optimizer_step(); }).code == STG_FAILED_PRECONDITION);  // no gradient is left
                check_all_alike(model, instance);
                check_all_alike(model, undisturbed);
              }
              train_by(instance, batch_at(step), in_one, 0.1);
              train_by(undisturbed, batch_at(step), in_one, 0.1);
            }
            CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
            check_all_alike(model, instance);
            instance.teardown();
            undisturbed.teardown();
            CHECK(num_threads_becomes(num_threads_before));
            CHECK(model->num_replicas == 0);
          }
          CHECK(model->num_references == 0);
        }
      }
    }
  }
}

TEST_CASE("where the root's generator can't be saved before its step, what the other replicas' steps moved is put back") {
  fault = {"stg_error", "generator", 0};
  for (const bool in_one : {true, false}) {
    FaultyModel model(false);
    model->table.get_generator_state = [](void*, stg_replica* handle, stg_tree* out) {
      return guard([&] {
        fail_where_told("generator", reinterpret_cast<ToyReplica*>(handle)->args.replica);
        *out = make_tree(Value(Bytes{{1, 2}})).give();
      });
    };
    model->table.set_generator_state = [](void*, stg_replica*, const uint8_t*, uint64_t) -> stg_error* { return nullptr; };
    Instance instance("data_parallel", three_devices);
    Instance undisturbed("data_parallel", three_devices);
    instance.setup(*model);
    undisturbed.setup(*model);
    for (int step = 0; step < 4; ++step) {
      is_armed = step == 2;
      if (is_armed) {
        const Error error = error_of([&] { train_by(instance, batch_at(step), in_one, 0.1); });
        CHECK(error.replica == 0);
        CHECK_THAT(error.message, Catch::Contains("replica 0 on cpu:4, in forward") && Catch::Contains(text_of_fault(fault)));
      }
      is_armed = false;
      check_all_alike(model, instance);
      train_by(instance, batch_at(step), in_one, 0.1);
      train_by(undisturbed, batch_at(step), in_one, 0.1);
    }
    CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
  }
}

TEST_CASE("a fault in a later micro-batch clears the gradients of the whole window, and puts back that step's buffers alone") {
  for (const std::string place : {"forward", "backward"}) {
    fault = {"std::exception", place};
    FaultyModel model(false);
    Instance instance("data_parallel", three_devices);
    Instance reference("data_parallel", three_devices);
    instance.setup(*model);
    reference.setup(*model);
    for (Instance* each : {&instance, &reference}) {
      train_by(*each, batch_at(0), true, 0.1);
      each->accumulate(batch_at(1));
      each->accumulate(batch_at(2));
    }
    is_armed = true;
    error_of([&] { train_by(instance, batch_at(3), true, 0.1); });
    is_armed = false;
    check(reference.api.zero_grad(reference.self, nullptr));
    CHECK((state_bytes(instance.export_state()) == state_bytes(reference.export_state())));
    for (int step = 4; step < 6; ++step) {
      train_by(instance, batch_at(step), true, 0.1);
      train_by(reference, batch_at(step), true, 0.1);
    }
    CHECK((state_bytes(instance.export_state()) == state_bytes(reference.export_state())));
  }
}

TEST_CASE("the error of the smallest replica is told where several fail, the others finish first") {
  std::atomic<int> num_finished{0};
  const auto model = linear_model();
  const auto step = model->on_step;
  std::atomic<bool> fails{true};
  model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
    ToyStep made = step(replica, context, batch);
    if (context.replica % 2 == 0) ++num_finished;
    if (fails && context.replica % 2 == 1) throw std::runtime_error(concat("failed on ", context.replica));
    return made;
  };
  Instance instance("data_parallel", sgd_config(6));
  instance.setup(*model);
  const Error error = error_of([&] { instance.train(batch_of(std::vector<double>(6, 1.0))); });
  CHECK(error.replica == 1);
  CHECK_THAT(error.message, Catch::Contains("failed on 1"));
  CHECK(num_finished == 3);
  fails = false;
  instance.train(batch_of({1, 1}));
  CHECK(instance.value("weight") == -1);
}

TEST_CASE("a fault in an evaluation is told as its own, and changes neither weights nor the window of a training in progress") {
  for (const std::string place : {"evaluation", "transfer", "split"}) {
    for (const std::string kind : {"std::exception", "no std::exception", "stg_error", "bad_alloc"}) {
      fault = {kind, place, place == "split" ? 0 : 1};
      FaultyModel model(place == "split");
      Instance instance("data_parallel", three_devices);
      Instance undisturbed("data_parallel", three_devices);
      instance.setup(*model);
      undisturbed.setup(*model);
      for (Instance* each : {&instance, &undisturbed}) {
        each->accumulate(batch_at(0));
        each->training_step(batch_at(1));
        for (const auto function : {each->api.validation_step, each->api.test_step, each->api.predict_step}) {
          is_armed = each == &instance;
          if (is_armed) {
            const Error error = error_of([&] { each->evaluate(function, batch_at(2)); });
            CHECK(error.code == code_of(fault));
            CHECK(error.replica == fault.replica);
            CHECK_THAT(error.message, Catch::Contains(concat("replica ", fault.replica, " on cpu:")) &&
                                          Catch::Contains(place == "split" ? "in split" : "in forward") &&
                                          Catch::Contains(text_of_fault(fault)));
          }
          is_armed = false;
          each->evaluate(function, batch_at(2));
        }
        CHECK(each->status().num_micro_batches == 1);
        each->backward(true);
        each->optimizer_step(0.1);
      }
      CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
    }
  }
}

TEST_CASE("detect_anomaly names what is NaN on which replica, without it nobody looks, and an infinity is no NaN") {
  enum { in_loss, in_gradient };
  for (const int place : {in_loss, in_gradient}) {
    for (const double value : {std::nan(""), std::numeric_limits<double>::infinity()}) {
      for (const bool in_one : {true, false}) {
        const auto model = linear_model(1);
        std::atomic<bool> spoils{true};
        const auto step = model->on_step;
        model->on_step = [&, step](ToyReplica& replica, const stg_step_context& context, const stg_value& batch) {
          ToyStep made = step(replica, context, batch);
          if (!spoils || context.replica != 1) return made;
          if (place == in_loss) {
            made.outputs = [&] {
              Dict outputs;
              outputs.emplace_back("loss", scalar(value));
              return outputs;
            }();
          } else {
            made.gradients = {{value}};
          }
          return made;
        };
        Instance instance("data_parallel", R"({"devices": [6, 3], "optimizer": {"name": "sgd"}})");
        instance.setup(*model);
        const auto run = [&] { train_by(instance, batch_of({1, 2}), in_one, 1, STG_BATCH_DETECT_ANOMALY); };
        if (std::isnan(value)) {
          const Error error = error_of(run);
          CHECK(error.code == STG_OUT_OF_RANGE);
          CHECK(error.replica == 1);
          CHECK(error.device.index == 3);
          CHECK_THAT(error.message,
                     Catch::Contains("replica 1 on cpu:3") && Catch::Contains("NaN") &&
                         Catch::Contains(place == in_loss ? "in forward: the loss" : "in backward: the gradient of weight"));
          CHECK(instance.value("weight") == 1);
          CHECK(model->num_graphs == 0);
        } else {
          run();
        }
        Instance careless("data_parallel", sgd_config(2));
        careless.setup(*model);
        careless.train(batch_of({1, 2}));
        CHECK(std::isfinite(careless.value("weight")) == (place == in_loss));
        if (!std::isnan(value)) continue;
        spoils = false;
        instance.train(batch_of({1, 1}));
        CHECK(instance.value("weight") == 0);
      }
    }
  }
}

namespace {

// A storage of the host's, in memory, whose call number `fails_at` returns an error.
struct FailingStorage {
  using Files = std::map<std::string, std::string>;
  struct Open {
    std::string path;
    Files files;
  };

  FailingStorage() {
    table.self = this;
    table.begin = [](void* self, stg_string path, void** transaction) {
      return of(self).call("begin", [&] { *transaction = new Open{std::string(text_of(path)), {}}, ++of(self).num_open; });
    };
    table.write = [](void* self, void* transaction, stg_string name, uint64_t offset, const void* data, uint64_t size) {
      return of(self).call("write", [&] {
        std::string& file = static_cast<Open*>(transaction)->files[std::string(text_of(name))];
        file.resize(std::max<size_t>(file.size(), offset + size));
        file.replace(offset, size, static_cast<const char*>(data), size);
      });
    };
    table.commit = [](void* self, void* transaction) {
      const std::unique_ptr<Open> open{static_cast<Open*>(transaction)};
      --of(self).num_open;
      return of(self).call("commit", [&] {
        for (auto& [name, content] : open->files) of(self).files[open->path + "/" + name] = content;
      });
    };
    table.rollback = [](void* self, void* transaction) {
      --of(self).num_open;
      delete static_cast<Open*>(transaction);
    };
    table.open = [](void* self, stg_string path, void** file, uint64_t* size) {
      return of(self).call("open", [&] {
        const auto found = of(self).files.find(std::string(text_of(path)));
        if (found == of(self).files.end()) throw not_found("no file ", text_of(path));
        *file = &found->second;
        *size = found->second.size();
        ++of(self).num_open;
      });
    };
    table.read = [](void* self, void* file, uint64_t offset, void* data, uint64_t size) {
      return of(self).call("read", [&] { static_cast<std::string*>(file)->copy(static_cast<char*>(data), size, offset); });
    };
    table.close = [](void* self, void*) { --of(self).num_open; };
    table.list = [](void* self, stg_string, stg_tree* names) {
      return of(self).call("list", [&] { *names = make_tree(List{}).give(); });
    };
    table.remove = [](void* self, stg_string) { return of(self).call("remove", [] {}); };
    table.replace = [](void* self, stg_string, const void*, uint64_t) { return of(self).call("replace", [] {}); };
  }

  static FailingStorage& of(void* self) { return *static_cast<FailingStorage*>(self); }

  template <class Body>
  stg_error* call(const char* name, Body&& body) {
    if (num_calls++ == fails_at) {
      failed = name;
      return to_abi(Error{STG_UNAVAILABLE, concat("bucket 7 gave 503 to ", name)});
    }
    return guard(std::forward<Body>(body));
  }

  stg_storage table = sized<stg_storage>();
  Files files;
  int fails_at = -1;
  int num_calls = 0;
  int num_open = 0;
  std::string failed;
};

}  // namespace

TEST_CASE("a storage of the host's that returns an error, at whichever call: told, nothing left open, and the run goes on") {
  FailingStorage storage;
  stg_host host = sized<stg_host>();
  host.storage = &storage.table;
  const auto model = linear_model(0.7);
  const std::string config = R"({"devices": 2, "optimizer": {"name": "adamw"}})";
  Instance instance("data_parallel", config, &host);
  Instance undisturbed("data_parallel", config);
  instance.setup(*model);
  undisturbed.setup(*model);
  stg_checkpoint_args args = sized<stg_checkpoint_args>();
  args.path = to_abi("run/step-1");
  args.host_json = to_abi("{}");
  std::map<std::string, int> num_failures;
  const auto fails_until_it_works = [&](const std::function<stg_error*()>& run) {
    for (storage.fails_at = 0;; ++storage.fails_at) {
      storage.num_calls = 0;
      const std::string before = state_bytes(instance.export_state());
      stg_error* failure = run();
      if (storage.num_calls <= storage.fails_at) {
        check(failure);
        storage.fails_at = -1;
        return;
      }
      const Error error = error_of([&] { check(failure); });
      CHECK(error.code == STG_UNAVAILABLE);
      CHECK((error.flags & STG_ERROR_INSTANCE_USABLE) != 0);
      CHECK_THAT(error.message, Catch::Contains("bucket 7 gave 503 to " + storage.failed));
      CHECK(storage.num_open == 0);
      CHECK((state_bytes(instance.export_state()) == before));
      ++num_failures[storage.failed];
    }
  };
  for (int step = 0; step < 3; ++step) {
    for (Instance* each : {&instance, &undisturbed}) each->train(batch_of({0.1 * step, 0.4, 0.7}), 0.1);
    storage.files.clear();
    fails_until_it_works([&] { return instance.api.save(instance.self, nullptr, &args); });
    fails_until_it_works([&] { return instance.api.load(instance.self, nullptr, &args, nullptr, nullptr); });
  }
  for (const char* name : {"begin", "write", "commit", "open", "read"}) CHECK(num_failures[name] >= 3);
  for (Instance* each : {&instance, &undisturbed}) each->train(batch_of({0.3, 0.4, 0.7}), 0.1);
  CHECK((state_bytes(instance.export_state()) == state_bytes(undisturbed.export_state())));
}

TEST_CASE("a failed run leaves no thread of ours, also when it is destroyed right after the error") {
  const size_t before = num_threads();
  for (const std::string place : {"forward", "backward", "transfer"}) {
    fault = {"std::exception", place};
    FaultyModel model(false);
    {
      Instance instance("data_parallel", three_devices);
      instance.setup(*model);
      CHECK(num_threads() == before + 2);
      is_armed = true;
      error_of([&] { train_by(instance, batch_at(0), true, 0.1); });
      is_armed = false;
    }
    CHECK(num_threads_becomes(before));
    CHECK(model->num_replicas == 0);
    CHECK(model->num_references == 0);
  }
}
