// SPDX-License-Identifier: Apache-2.0
#include "strategy/checkpoint.hpp"

#include <stratagem/strategy.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>

#include "base/checksum.hpp"
#include "base/error.hpp"
#include "base/json.hpp"
#include "base/safetensors.hpp"

namespace stratagem {

namespace {

using json = nlohmann::ordered_json;

constexpr int checkpoint_format = 1;
constexpr const char* weights_file = "weights.safetensors";
constexpr const char* optimizer_file = "optimizer.safetensors";
constexpr const char* state_file = "state.json";

std::string to_hex(const stg_value& bytes) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(size_t{bytes.count} * 2);
  for (uint32_t i = 0; i < bytes.count; ++i) {
    text.push_back(digits[bytes.as.bytes[i] >> 4]);
    text.push_back(digits[bytes.as.bytes[i] & 15]);
  }
  return text;
}

Bytes from_hex(const std::string& text, const std::string& where) {
  const auto digit = [&](char c) -> int {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    throw data_loss(where, " is no hexadecimal text");
  };
  if (text.size() % 2 != 0) throw data_loss(where, " has an odd number of hexadecimal digits");
  Bytes bytes;
  for (size_t i = 0; i < text.size(); i += 2)
    bytes.data.push_back(static_cast<uint8_t>(digit(text[i]) * 16 + digit(text[i + 1])));
  return bytes;
}

// Of all of state.json but its own entry.
std::string checksum_of_rest(json document) {
  document.erase("checksum");
  const std::string text = document.dump();
  Checksum checksum;
  checksum.add(text.data(), text.size());
  return checksum.text();
}

// ---- save

std::vector<NamedTensor> model_tensors(const stg_value& state) {
  std::vector<NamedTensor> tensors;
  const stg_value& model = *find(state, "model");
  for (uint32_t e = 0; e < model.count; ++e) {
    tensors.push_back({std::string(text_of(model.as.entries[e].key)), &model.as.entries[e].value.as.tensor->view});
  }
  return tensors;
}

std::vector<NamedTensor> optimizer_tensors(const stg_value& optimizer) {
  std::vector<NamedTensor> tensors;
  const stg_value& per_parameter = *find(optimizer, "per_parameter");
  for (uint32_t p = 0; p < per_parameter.count; ++p) {
    const stg_entry& parameter = per_parameter.as.entries[p];
    for (uint32_t s = 0; s < parameter.value.count; ++s) {
      const stg_entry& slot = parameter.value.as.entries[s];
      tensors.push_back({concat(text_of(parameter.key), ".", text_of(slot.key)), &slot.value.as.tensor->view});
    }
  }
  return tensors;
}

json describe_file(const WrittenFile& file) { return {{"size_bytes", file.size_bytes}, {"checksum", file.checksum}}; }

json parse_host_json(const std::string& text) {
  if (text.empty()) return nullptr;
  return parse_json<json>(text, "stg_checkpoint_args.host_json");
}

// What a folder holds is gone once a checkpoint has its name, so that must be an older checkpoint. Where nothing can be listed (there is
// none, it is a file, the storage lists nothing), the storage itself says what it replaces.
void check_replaces_checkpoint(const Storage& storage, const std::string& path) {
  std::vector<std::string> names;
  try {
    names = storage.list(path);
  } catch (const Error& error) {
    if (error.code != STG_NOT_FOUND && error.code != STG_INVALID_ARGUMENT && error.code != STG_UNIMPLEMENTED) throw;
  }
  if (names.empty() || std::find(names.begin(), names.end(), state_file) != names.end()) return;
  throw Error{STG_ALREADY_EXISTS,
              concat("can't save to ", path, ": what is in it would be removed (", shortened(join(names)),
                     "), and it is no checkpoint, for it has no ", state_file, "; give another path, or move that away")};
}

// ---- load

class Loader {
 public:
  Loader(const Storage& storage, const std::string& path) : storage_(storage), path_(path), where_(path + "/" + state_file) {}

  Checkpoint run() {
    document_ = read_document();
    const json& format = at(document_, "format", "");
    if (format != checkpoint_format)
      throw unimplemented(where_, " has the format ", shortened(format.dump()), "; this version reads ", checkpoint_format);
    if (const std::string found = checksum_of_rest(document_); text_at(document_, "checksum", "") != found) {
      throw data_loss(where_, ": its checksum is ", found, ", it says ", text_at(document_, "checksum", ""),
                      "; the file is damaged");
    }
    Dict state;
    state.emplace_back("format", int64_t{STG_STATE_FORMAT});
    state.emplace_back("model", read_model());
    state.emplace_back("aliases", read_aliases());
    state.emplace_back("optimizer", read_optimizer());
    state.emplace_back("scaler", read_scaler());
    state.emplace_back("generators", read_generators());
    Checkpoint checkpoint;
    checkpoint.state = make_tree(std::move(state));
    const json& host = at(document_, "host", "");
    if (!host.is_null()) checkpoint.host_json = host.dump();
    return checkpoint;
  }

 private:
  // It was written as JSON: what is none now is damage, not somebody's mistake.
  json read_document() const {
    const std::string text = storage_.read_text(where_);
    try {
      return parse_json<json>(text, where_);
    } catch (const Error& error) {
      throw data_loss(error.message);
    }
  }
  const json& at(const json& object, const std::string& key, const std::string& pointer) const {
    const auto found = object.is_object() ? object.find(key) : object.end();
    if (found == object.end()) throw data_loss(where_, ": ", pointer, "/", key, " is missing");
    return *found;
  }
  std::string text_at(const json& object, const std::string& key, const std::string& pointer) const {
    const json& value = at(object, key, pointer);
    if (!value.is_string())
      throw data_loss(where_, ": ", pointer, "/", key, " is ", shortened(value.dump()), "; it must be a string");
    return value.get<std::string>();
  }

  SafetensorsFile open(const char* name) const {
    const std::string pointer = concat("/files/", name);
    const std::string file = path_ + "/" + name;
    const json& described = at(at(document_, "files", ""), name, "/files");
    verify_checksum(storage_.open(file), text_at(described, "checksum", pointer));
    return SafetensorsFile(storage_.open(file));
  }

  Dict read_model() const {
    const SafetensorsFile file = open(weights_file);
    Dict model;
    for (const SafetensorsFile::Entry& entry : file.entries()) model.emplace_back(entry.name, file.read(entry));
    return model;
  }

  Dict read_aliases() const {
    const json& aliases = at(document_, "aliases", "");
    Dict dict;
    if (!aliases.is_object()) throw data_loss(where_, ": /aliases is no object");
    for (const auto& [name, target] : aliases.items()) dict.emplace_back(name, text_at(aliases, name, "/aliases"));
    return dict;
  }

  Value read_optimizer() const {
    const json& described = at(document_, "optimizer", "");
    if (described.is_null()) return {};
    const json& step = at(described, "step", "/optimizer");
    if (!step.is_number_integer())
      throw data_loss(where_, ": /optimizer/step is ", shortened(step.dump()), "; it must be a whole number");
    const SafetensorsFile file = open(optimizer_file);
    Dict per_parameter;
    for (const SafetensorsFile::Entry& entry : file.entries()) {
      const size_t dot = entry.name.rfind('.');
      if (dot == std::string::npos)
        throw data_loss(file.path(), ": the tensor ", entry.name, " has no name of a slot (<parameter>.<slot>)");
      const std::string name = entry.name.substr(0, dot);
      if (per_parameter.empty() || per_parameter.back().first != name) per_parameter.emplace_back(name, Dict{});
      std::get<Dict>(per_parameter.back().second.data).emplace_back(entry.name.substr(dot + 1), file.read(entry));
    }
    Dict optimizer;
    optimizer.emplace_back("name", text_at(described, "name", "/optimizer"));
    optimizer.emplace_back("step", step.get<int64_t>());
    optimizer.emplace_back("per_parameter", std::move(per_parameter));
    return optimizer;
  }

  Value read_scaler() const {
    const auto described = document_.find("scaler");
    if (described == document_.end() || described->is_null()) return {};
    const json& scale = at(*described, "scale", "/scaler");
    const json& good_steps = at(*described, "good_steps", "/scaler");
    if (!scale.is_number()) throw data_loss(where_, ": /scaler/scale is ", shortened(scale.dump()), "; it must be a number");
    if (!good_steps.is_number_integer())
      throw data_loss(where_, ": /scaler/good_steps is ", shortened(good_steps.dump()), "; it must be a whole number");
    Dict scaler;
    scaler.emplace_back("scale", scale.get<double>());
    scaler.emplace_back("good_steps", good_steps.get<int64_t>());
    return scaler;
  }

  List read_generators() const {
    const json& given = at(document_, "generators", "");
    if (!given.is_array()) throw data_loss(where_, ": /generators is no list");
    List generators;
    for (size_t i = 0; i < given.size(); ++i) {
      const std::string place = concat(where_, ": /generators/", i);
      if (!given[i].is_string()) throw data_loss(place, " is no string");
      generators.push_back(from_hex(given[i].get<std::string>(), place));
    }
    return generators;
  }

  const Storage& storage_;
  std::string path_;
  std::string where_;
  json document_;
};

}  // namespace

void save_checkpoint(const Tree& state, const Host& host, const std::string& path, const std::string& host_json) {
  const stg_value& root = state.root();
  json document;
  document["format"] = checkpoint_format;
  document["versions"] = {{"stratagem_abi", concat(STG_ABI_MAJOR, ".", STG_ABI_MINOR)}, {"libtorch", TORCH_VERSION}};
  document["host"] = parse_host_json(host_json);
  const Storage storage(host.storage());
  Transaction transaction = storage.begin(path);
  check_replaces_checkpoint(storage, path);
  document["files"][weights_file] =
      describe_file(write_safetensors(transaction, weights_file, model_tensors(root), {{"format", "pt"}}));
  document["aliases"] = json::object();
  const stg_value& aliases = *find(root, "aliases");
  for (uint32_t e = 0; e < aliases.count; ++e) {
    document["aliases"][std::string(text_of(aliases.as.entries[e].key))] = std::string(text_of(aliases.as.entries[e].value));
  }
  document["optimizer"] = nullptr;
  if (const stg_value& optimizer = *find(root, "optimizer"); optimizer.type == STG_DICT) {
    document["files"][optimizer_file] =
        describe_file(write_safetensors(transaction, optimizer_file, optimizer_tensors(optimizer), {{"format", "pt"}}));
    document["optimizer"] = {{"name", std::string(text_of(*find(optimizer, "name")))}, {"step", find(optimizer, "step")->as.i64}};
  }
  document["scaler"] = nullptr;
  if (const stg_value& scaler = *find(root, "scaler"); scaler.type == STG_DICT) {
    document["scaler"] = {{"scale", find(scaler, "scale")->as.f64}, {"good_steps", find(scaler, "good_steps")->as.i64}};
  }
  document["generators"] = json::array();
  const stg_value& generators = *find(root, "generators");
  for (uint32_t i = 0; i < generators.count; ++i) document["generators"].push_back(to_hex(generators.as.items[i]));
  document["checksum"] = checksum_of_rest(document);
  transaction.write(state_file, document.dump(2) + "\n");
  transaction.commit();
}

Checkpoint load_checkpoint(const Host& host, const std::string& path) {
  const Storage storage(host.storage());
  return Loader(storage, path).run();
}

}  // namespace stratagem
