// SPDX-License-Identifier: Apache-2.0
#include "strategy/options.hpp"

#include <algorithm>
#include <cmath>
#include <thread>

#include "accelerator/accelerators.hpp"
#include "base/dlpack.hpp"
#include "base/error.hpp"

namespace stratagem {

namespace {

using nlohmann::json;

constexpr size_t max_devices = 1024;
constexpr uint64_t max_threads = 1024;  // far more than help; a process that can't start one is ended by its OpenMP library

// One JSON object, read key by key; what was not asked for is unknown.
class Section {
 public:
  Section(const json& object, std::string pointer, std::vector<std::string> keys)
      : object_(object), pointer_(std::move(pointer)) {
    if (!object.is_object()) throw invalid_argument(place(), " is ", object.dump(), "; it must be an object");
    for (const auto& [key, value] : object.items()) {
      if (std::find(keys.begin(), keys.end(), key) != keys.end()) continue;
      const std::string near = nearest(key, keys);
      throw invalid_argument(pointer_, "/", key, " is unknown; ", near.empty() ? "" : concat("did you mean \"", near, "\"? "),
                             "known are ", join(keys));
    }
  }

  // Null if the key is absent.
  const json* find(const char* key) const {
    const auto found = object_.find(key);
    return found == object_.end() ? nullptr : &*found;
  }

  std::string text(const char* key, std::string value, const std::vector<std::string>& known) const {
    if (const json* given = find(key)) {
      if (!given->is_string()) fail(key, "one of " + join(known));
      value = given->get<std::string>();
      if (std::find(known.begin(), known.end(), value) == known.end()) fail(key, "one of " + join(known));
    }
    return value;
  }

  bool boolean(const char* key, bool value) const {
    if (const json* given = find(key)) {
      if (!given->is_boolean()) fail(key, "true or false");
      value = given->get<bool>();
    }
    return value;
  }

  uint64_t count(const char* key, uint64_t value, uint64_t smallest, uint64_t largest) const {
    if (const json* given = find(key)) {
      const std::string wanted = concat("a whole number from ", smallest, " to ", largest);
      if (!given->is_number_integer() ||
          (given->is_number_integer() && !given->is_number_unsigned() && given->get<int64_t>() < 0)) {
        fail(key, wanted);
      }
      value = given->get<uint64_t>();
      if (value < smallest || value > largest) fail(key, wanted);
    }
    return value;
  }

  // In [smallest, limit), or [smallest, infinity) where limit is 0.
  double number(const char* key, double value, double smallest = 0, double limit = 0) const {
    if (const json* given = find(key)) value = checked_number(*given, key, smallest, limit);
    return value;
  }

  double checked_number(const json& given, const std::string& key, double smallest, double limit) const {
    const std::string wanted = limit == 0 ? concat("a number of at least ", smallest)
                                          : concat("a number of at least ", smallest, " and less than ", limit);
    if (!given.is_number()) fail_value(key, given, wanted);
    const auto value = given.get<double>();
    if (!std::isfinite(value) || value < smallest || (limit != 0 && value >= limit)) fail_value(key, given, wanted);
    return value;
  }

  [[noreturn]] void fail(const char* key, const std::string& wanted) const { fail_value(key, *find(key), wanted); }
  [[noreturn]] void fail_value(const std::string& key, const json& value, const std::string& wanted) const {
    throw invalid_argument(pointer_, "/", key, " is ", value.dump(), "; it must be ", wanted);
  }

 private:
  std::string place() const { return pointer_.empty() ? "the config" : pointer_; }

  const json& object_;
  std::string pointer_;
};

// What a list or a count of devices may name.
struct KindOfDevice {
  const Accelerator* accelerator = nullptr;  // null: logical CPU devices, of which there are as many as one likes
  Accelerator::Found found;

  stg_device device(size_t index) const {
    return {accelerator == nullptr ? uint32_t{STG_DEVICE_CPU} : accelerator->device_kind, static_cast<int32_t>(index)};
  }
  std::string all() const {
    std::vector<std::string> texts;
    for (size_t i = 0; i < found.names.size(); ++i) texts.push_back(concat(i, " (", found.names[i], ")"));
    return join(texts);
  }
};

std::vector<stg_device> listed_devices(const Section& config, const json& list, const KindOfDevice& kind) {
  std::vector<stg_device> devices;
  for (size_t i = 0; i < list.size(); ++i) {
    const json& item = list[i];
    const std::string key = concat("devices/", i);
    if (!item.is_number_integer() || item.get<int64_t>() < 0 || item.get<int64_t>() >= INT32_MAX) {
      config.fail_value(key, item, "the index of a device (0, 1, ...)");
    }
    const stg_device device = kind.device(item.get<uint64_t>());
    if (kind.accelerator != nullptr && item.get<uint64_t>() >= kind.found.names.size()) {
      throw Error{STG_NOT_FOUND,
                  concat("/", key, " is ", item.dump(), "; the ", kind.accelerator->name, " devices here are ", kind.all())};
    }
    for (const stg_device& other : devices) {
      if (kind.accelerator == nullptr && other.index == device.index) {
        throw invalid_argument("/", key, ": ", device_name(device),
                               " stands twice; each logical CPU device is one replica, list others");
      }
    }
    devices.push_back(device);
  }
  return devices;
}

// The accelerator of the config. "auto" takes the first that has devices and can be opened.
KindOfDevice choose_kind(const Section& config, std::string& fallback) {
  std::vector<std::string> names{"auto", "cpu"};
  for (const Accelerator& accelerator : accelerators()) names.emplace_back(accelerator.name);
  const std::string name = config.text("accelerator", "auto", names);
  std::vector<std::string> reasons;
  for (const Accelerator& accelerator : accelerators()) {
    if (name != "auto" && name != accelerator.name) continue;
    Accelerator::Found found = accelerator.find();
    if (found.missing.empty()) {
      try {
        accelerator.open();
        return {&accelerator, std::move(found)};
      } catch (const Error& error) {
        if (name != "auto") throw error.within(concat("/accelerator is \"", name, "\""), -1, {STG_DEVICE_NONE, -1});
        found.missing = error.message;
      }
    }
    if (name != "auto") {
      throw Error{STG_FAILED_PRECONDITION, concat("/accelerator is \"", name, "\", and there is none: ", found.missing,
                                                  " (\"cpu\" and \"auto\" run without)")};
    }
    reasons.push_back(concat(accelerator.name, ": ", found.missing));
  }
  if (name == "auto" && !reasons.empty()) fallback = concat("accelerator \"auto\" is the cpu here; ", join(reasons, "; "));
  return {};
}

std::vector<stg_device> read_devices(const Section& config, Topology topology, const KindOfDevice& kind) {
  const size_t num_there =
      kind.accelerator == nullptr ? std::max(1u, std::thread::hardware_concurrency()) : kind.found.names.size();
  size_t count = topology == Topology::data_parallel ? num_there : 1;
  std::vector<stg_device> devices;
  const json* given = config.find("devices");
  if (given != nullptr && given->is_array()) {
    devices = listed_devices(config, *given, kind);
    if (devices.empty())
      throw invalid_argument("/devices is an empty list; a strategy needs a root device, the first of the list");
  } else {
    if (given != nullptr && *given != "auto") {
      if (!given->is_number_integer()) config.fail("devices", "a count, \"auto\", or a list of indices");
      count = config.count("devices", 1, 1, max_devices);
    }
    if (kind.accelerator != nullptr && count > num_there) {
      throw Error{STG_NOT_FOUND, concat("/devices is ", count, "; the ", kind.accelerator->name, " devices here are ", kind.all(),
                                        " (one that is listed twice holds two replicas)")};
    }
    for (size_t i = 0; i < count; ++i) devices.push_back(kind.device(i));
  }
  if (devices.size() > max_devices)
    throw invalid_argument("/devices lists ", devices.size(), " devices; at most ", max_devices, " are possible");
  return devices;
}

void read_precision(const Section& config, Options& options) {
  const std::string precision = config.text("precision", "32-true", {"32-true", "64-true", "16-mixed", "bf16-mixed"});
  if (precision == "64-true") options.floating_dtype = float64;
  if (precision == "bf16-mixed") options.autocast_dtype = {STG_DTYPE_BFLOAT, 16, 1};
  if (precision == "16-mixed") options.autocast_dtype = {STG_DTYPE_FLOAT, 16, 1};
  options.scales_loss = precision == "16-mixed";
}

void read_sgd(const json& object, OptimizerOptions& options) {
  const Section section(object, "/optimizer", {"name", "lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"});
  options.momentum = section.number("momentum", 0);
  options.dampening = section.number("dampening", 0);
  options.nesterov = section.boolean("nesterov", false);
  options.weight_decay = section.number("weight_decay", 0);
  if (options.nesterov && (options.momentum == 0 || options.dampening != 0)) {
    throw invalid_argument("/optimizer/nesterov is true; it needs a momentum over 0 and no dampening, here ", options.momentum,
                           " and ", options.dampening);
  }
}

void read_adam(const json& object, OptimizerOptions& options) {
  const Section section(object, "/optimizer", {"name", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize"});
  if (const json* betas = section.find("betas")) {
    if (!betas->is_array() || betas->size() != 2) section.fail("betas", "a list of two numbers");
    options.beta1 = section.checked_number((*betas)[0], "betas/0", 0, 1);
    options.beta2 = section.checked_number((*betas)[1], "betas/1", 0, 1);
  }
  options.eps = section.number("eps", options.eps);
  options.weight_decay = section.number("weight_decay", options.name == "adamw" ? 1e-2 : 0.0);
  options.amsgrad = section.boolean("amsgrad", false);
}

void read_rmsprop(const json& object, OptimizerOptions& options) {
  const Section section(object, "/optimizer", {"name", "lr", "alpha", "eps", "momentum", "centered", "weight_decay", "maximize"});
  options.alpha = section.number("alpha", options.alpha);
  options.eps = section.number("eps", options.eps);
  options.momentum = section.number("momentum", 0);
  options.centered = section.boolean("centered", false);
  options.weight_decay = section.number("weight_decay", 0);
}

void read_adagrad(const json& object, OptimizerOptions& options) {
  const Section section(object, "/optimizer",
                        {"name", "lr", "lr_decay", "eps", "initial_accumulator_value", "weight_decay", "maximize"});
  options.lr_decay = section.number("lr_decay", 0);
  options.eps = section.number("eps", 1e-10);
  options.initial_accumulator_value = section.number("initial_accumulator_value", 0);
  options.weight_decay = section.number("weight_decay", 0);
}

std::optional<OptimizerOptions> read_optimizer(const json* given) {
  if (given == nullptr || given->is_null()) return std::nullopt;
  const std::vector<std::string> names{"sgd", "adam", "adamw", "rmsprop", "adagrad"};
  if (!given->is_object()) throw invalid_argument("/optimizer is ", given->dump(), "; it must be an object with a \"name\"");
  const auto name = given->find("name");
  if (name == given->end()) throw invalid_argument("/optimizer has no \"name\"; it must be one of ", join(names));
  OptimizerOptions options;
  options.name = name->is_string() ? name->get<std::string>() : "";
  if (options.name == "sgd") {
    read_sgd(*given, options);
  } else if (options.name == "adam" || options.name == "adamw") {
    read_adam(*given, options);
  } else if (options.name == "rmsprop") {
    read_rmsprop(*given, options);
  } else if (options.name == "adagrad") {
    read_adagrad(*given, options);
  } else {
    const std::string near = nearest(options.name, names);
    throw invalid_argument("/optimizer/name is ", name->dump(), "; it must be one of ", join(names),
                           near.empty() ? "" : concat("; did you mean \"", near, "\"?"));
  }
  // The learning rate of each update comes with the update; here it is only checked.
  if (const auto lr = given->find("lr"); lr != given->end() && (!lr->is_number() || !(lr->get<double>() >= 0))) {
    throw invalid_argument("/optimizer/lr is ", lr->dump(), "; it must be a number of at least 0");
  }
  if (const auto maximize = given->find("maximize"); maximize != given->end()) {
    if (!maximize->is_boolean())
      throw invalid_argument("/optimizer/maximize is ", maximize->dump(), "; it must be true or false");
    options.maximize = maximize->get<bool>();
  }
  return options;
}

int64_t mebibytes(const Section& section, const char* key, int64_t bytes) {
  constexpr double mebibyte = 1 << 20;
  return static_cast<int64_t>(section.number(key, static_cast<double>(bytes) / mebibyte, 0, 1 << 20) * mebibyte);
}

void read_strategy_options(const json* given, Topology topology, Options& options) {
  const json none = json::object();
  std::vector<std::string> keys{"compat"};
  if (topology == Topology::data_parallel) {
    for (const char* key : {"split", "bucket_mib", "first_bucket_mib", "compress", "optimizer_sharding", "nccl"})
      keys.emplace_back(key);
  }
  const Section section(given == nullptr ? none : *given, "/options", keys);
  options.buckets.size_bytes = mebibytes(section, "bucket_mib", options.buckets.size_bytes);
  options.buckets.first_bytes = mebibytes(section, "first_bucket_mib", options.buckets.first_bytes);
  options.buckets.compress = section.text("compress", "none", {"none", "bf16"}) == "bf16";
  options.buckets.shards_optimizer = section.boolean("optimizer_sharding", false);
  if (options.buckets.shards_optimizer && !options.optimizer) {
    throw invalid_argument(
        "/options/optimizer_sharding is true, and there is no /optimizer to shard; configure one, or leave it "
        "out: a host's own optimizer gets whole gradients");
  }
  if (const json* settings = section.find("nccl")) {
    if (!settings->is_object()) section.fail("nccl", "an object of NCCL's settings");
    options.transport_settings = settings->dump();
  }
  if (section.find("compat") != nullptr) options.lightning = !section.text("compat", "", {"lightning"}).empty();
  const std::string split = section.text("split", options.lightning ? "chunk" : "balanced", {"balanced", "chunk"});
  options.split_in_chunks = split == "chunk";
  if (options.lightning && !options.split_in_chunks) {
    throw invalid_argument("/options/split is \"balanced\"; \"compat\": \"lightning\" implies \"chunk\"");
  }
}

}  // namespace

std::array<uint32_t, 4> device_kinds() {
  std::array<uint32_t, 4> kinds{STG_DEVICE_CPU};
  size_t count = 1;
  for (const Accelerator& accelerator : accelerators()) kinds.at(count++) = accelerator.device_kind;
  return kinds;
}

Options read_options(const json& config, Topology topology) {
  const Section section(config, "",
                        {"accelerator", "devices", "precision", "optimizer", "seed", "deterministic", "threads", "options"});
  Options options;
  KindOfDevice kind = choose_kind(section, options.fallback);
  options.accelerator = kind.accelerator;
  options.devices = read_devices(section, topology, kind);
  options.num_devices_given = options.devices.size();
  if (topology == Topology::single_device) options.devices.resize(1);
  read_precision(section, options);
  options.optimizer = read_optimizer(section.find("optimizer"));
  options.seed = section.count("seed", 0, 0, UINT64_MAX);
  options.deterministic = section.boolean("deterministic", false);
  options.num_threads = static_cast<uint32_t>(section.count("threads", 0, 1, max_threads));
  read_strategy_options(section.find("options"), topology, options);
  return options;
}

}  // namespace stratagem
