// SPDX-License-Identifier: Apache-2.0
//
// The C API: structs in, exceptions to errors, JSON out.
#include <stratagem/session.h>

#include <cstring>

#include "base/error.hpp"
#include "base/note.hpp"
#include "base/structs.hpp"
#include "base/value.hpp"
#include "libstratagem/config/paths.hpp"
#include "libstratagem/doctor/doctor.hpp"
#include "libstratagem/handles.hpp"
#include "libstratagem/plugins/search.hpp"
#include "libstratagem/session.hpp"
#include "libstratagem/version.hpp"

using namespace stratagem;

namespace {

void give_text(std::string text, stg_tree* out) { *out = make_tree(Value(std::move(text))).give(); }
void give_json(const Json& json, stg_tree* out) { give_text(json.dump(-1, ' ', false, Json::error_handler_t::replace), out); }

void require(const void* pointer, const char* name) {
  if (pointer == nullptr) throw invalid_argument(name, " is null");
}

stg_progress to_abi(const Progress& progress) {
  auto out = sized<stg_progress>();
  out.stage = progress.stage;
  out.epoch = progress.epoch;
  out.max_epochs = progress.max_epochs;
  out.batch = progress.batch;
  out.num_batches = progress.num_batches;
  out.step = progress.step;
  out.max_steps = progress.max_steps;
  out.loss = progress.loss;
  return out;
}

/// What an event's callback says ends the run, as the cause.
void check_event(const char* name, stg_error* given) {
  try {
    check(given);
  } catch (const Error& error) {
    throw error.within(concat("the event ", name), error.replica, error.device);
  }
}

Events events_of(const stg_session_events* given, const std::shared_ptr<Mailbox>& mailbox) {
  Events events;
  stg_session_events table{};
  if (given != nullptr) table = read_table(given, STG_SESSION_EVENTS_MIN_SIZE, "events");
  events.log = [table, mailbox](uint32_t level, const std::string& message) {
    mailbox->put_log(level, message);
    if (table.log != nullptr) table.log(table.self, level, stratagem::to_abi(message));
  };
  events.progress = [table, mailbox](const Progress& progress) {
    mailbox->put(progress);
    if (table.progress == nullptr) return;
    const stg_progress out = to_abi(progress);
    check_event("progress", table.progress(table.self, &out));
  };
  if (table.metrics != nullptr || mailbox->keeps_events()) {
    events.metrics = [table, mailbox](const std::string& line) {
      mailbox->put_metrics(line);
      if (table.metrics != nullptr) check_event("metrics", table.metrics(table.self, stratagem::to_abi(line)));
    };
  }
  if (table.batch_start != nullptr) {
    events.batch_start = [table](const Progress& progress) {
      const stg_progress out = to_abi(progress);
      check_event("batch_start", table.batch_start(table.self, &out));
    };
  }
  if (table.batch_end != nullptr) {
    events.batch_end = [table](const Progress& progress, const stg_value& outputs) {
      const stg_progress out = to_abi(progress);
      check_event("batch_end", table.batch_end(table.self, &out, &outputs));
    };
  }
  events.swap = [table, mailbox](int64_t step, const Json& strategy, const Error* error) {
    mailbox->put_swap(step, strategy, error);
    if (table.swap == nullptr) return;
    const std::string text = strategy.dump();
    const ErrorPtr why(error == nullptr ? nullptr : to_abi(*error));
    check_event("swap", table.swap(table.self, step, stratagem::to_abi(text), why.get()));
  };
  return events;
}

Command command_of(uint64_t stage) {
  switch (stage) {
    case STG_STAGE_FIT:
      return Command::fit;
    case STG_STAGE_VALIDATE:
      return Command::validate;
    case STG_STAGE_TEST:
      return Command::test;
    case STG_STAGE_PREDICT:
      return Command::predict;
    default:
      throw invalid_argument("stage is ", stage, "; a session can fit (0), validate (1), test (2) or predict (3)");
  }
}

/// Files are opened by C strings, which would end at the zero.
std::string path_of(stg_string given, const char* name) {
  std::string path(text_of(given));
  if (const size_t zero = path.find('\0'); zero != std::string::npos) {
    throw invalid_argument(name, " has a zero byte at ", zero, ", after \"", path.substr(0, zero),
                           "\"; a path has none (size_bytes doesn't count the one at the end)");
  }
  return path;
}

std::shared_ptr<const stg_model> retained(const stg_model* given) {
  if (given == nullptr) return nullptr;
  const auto table = read_table(given, STG_MODEL_MIN_SIZE, "model");
  check_references(table, "the model");
  if (table.retain != nullptr) table.retain(table.self);
  return {given, [table](const stg_model*) {
            if (table.release != nullptr) table.release(table.self);
          }};
}

SessionRequest request_of(const stg_session_args& args) {
  constexpr uint64_t known_flags = STG_SESSION_OWN_LOOP | STG_SESSION_QUEUE_EVENTS | STG_SESSION_CALLER_THREAD_ONLY;
  SessionRequest request;
  if ((args.flags & ~known_flags) != 0)
    throw invalid_argument("flags is ", args.flags, "; of these, ", args.flags & ~known_flags, " is unknown");
  std::vector<std::string> overrides;
  if (args.num_overrides != 0) require(args.overrides, "overrides");
  for (uint64_t i = 0; i < args.num_overrides; ++i) overrides.emplace_back(text_of(args.overrides[i]));
  request.command = command_of(args.stage);
  const std::string text(text_of(args.config_text));
  const std::string path = path_of(args.config_path, "config_path"), folder = path_of(args.config_folder, "config_folder");
  if (!path.empty() && !text.empty()) throw invalid_argument("config_path and config_text are both given; one is the config");
  if (path.empty() && !std::filesystem::path(folder).is_absolute())
    throw invalid_argument("config_folder is \"", folder,
                           "\"; it must be absolute, as the paths of config_text are relative to it");
  request.config = path.empty() ? read_config_text(text, folder, overrides) : read_config_file(path, overrides);
  request.checkpoint = path_of(args.checkpoint, "checkpoint");
  request.output = path_of(args.output, "output");
  request.own_loop = (args.flags & STG_SESSION_OWN_LOOP) != 0;
  request.caller_thread_only = (args.flags & STG_SESSION_CALLER_THREAD_ONLY) != 0;
  request.model = retained(args.model);
  return request;
}

Json to_json(const SearchFolder& folder) {
  return {{"path", folder.path.string()},
          {"origin", folder.origin},
          {"refused", folder.refused.empty() ? Json(nullptr) : Json(folder.refused)}};
}

Json to_json(const PluginFile& file) {
  const auto text_or_null = [](const std::string& text) { return text.empty() ? Json(nullptr) : Json(text); };
  const Json note = file.note.is_null() ? Json::object() : file.note;
  return {{"path", file.path.string()},
          {"name", note.value("name", Json())},
          {"version", note.value("version", Json())},
          {"strategies", file.names(Offer::strategy)},
          {"models", file.names(Offer::model)},
          {"abi", note.value("abi", Json())},
          {"problem", text_or_null(file.problem)},
          {"shadowed_by", text_or_null(file.shadowed)}};
}

Json to_json(const stg_strategy_factory& factory) {
  static constexpr std::pair<uint64_t, const char*> names[] = {{STG_CAPABILITY_MULTIPLE_DEVICES, "multiple_devices"},
                                                               {STG_CAPABILITY_MULTIPLE_PROCESSES, "multiple_processes"},
                                                               {STG_CAPABILITY_CALLER_THREAD_ONLY, "caller_thread_only"},
                                                               {STG_CAPABILITY_STREAMS, "streams"}};
  Json capabilities = Json::array();
  for (const auto& [bit, name] : names) {
    if ((factory.capabilities & bit) != 0) capabilities.push_back(name);
  }
  const std::string name(text_of(factory.name));
  return {{"name", name},
          {"summary", text_of(factory.summary)},
          {"devices", device_kinds(factory)},
          {"capabilities", capabilities},
          {"options_schema", options_schema(factory.options_schema, name)}};
}

Json to_json(const stg_model_factory& factory) {
  const std::string name(text_of(factory.name));
  return {
      {"name", name}, {"summary", text_of(factory.summary)}, {"options_schema", options_schema(factory.options_schema, name)}};
}

Json to_json(const Plugin& plugin) {
  Json strategies = Json::array(), models = Json::array();
  for (uint64_t i = 0; i < plugin.table.num_strategies; ++i) strategies.push_back(to_json(*plugin.table.strategies[i]));
  for (uint64_t i = 0; i < plugin.table.num_models; ++i) models.push_back(to_json(*plugin.table.models[i]));
  return {{"path", plugin.path.string()},
          {"name", text_of(plugin.table.name)},
          {"version", text_of(plugin.table.version)},
          {"strategies", strategies},
          {"models", models}};
}

std::vector<std::filesystem::path> plugin_path_of(const std::string& config_path) {
  if (config_path.empty()) return {};
  const ConfigText text = read_config_file(config_path, {});
  const Json folders = text.json.value("plugin_path", Json::array());
  std::vector<std::filesystem::path> paths;
  Problems problems;
  for (const Json& folder : folders) {
    if (folder.is_string())
      paths.push_back(stratagem::config_path(folder.get<std::string>(), text.folder, "/plugin_path", problems));
  }
  problems.raise(text.source);
  return paths;
}

}  // namespace

stg_error* stg_session_open(const stg_session_args* args, stg_session* out) {
  return guard([&] {
    // First: sources are ours, whatever else is wrong.
    stg_session_args known{};
    std::memcpy(&known, args, known_size_bytes(args, STG_SESSION_ARGS_MIN_SIZE, "args"));
    DataSources sources = take_sources(known.sources, known.num_sources);
    const auto read = read_argument(args, STG_SESSION_ARGS_MIN_SIZE, "args");
    SessionRequest request = request_of(read);
    request.sources = std::move(sources);
    require(out, "out");
    const auto mailbox = std::make_shared<Mailbox>((read.flags & STG_SESSION_QUEUE_EVENTS) != 0, read.stage);
    request.events = events_of(read.events, mailbox);
    *out = open_handle(mailbox, [&](Requests& requests) {
      request.events.requests = &requests;
      auto session = std::make_unique<Session>(std::move(request));
      mailbox->begin_at(session->beginning());
      return session;
    });
  });
}

stg_error* stg_session_step(stg_session session, uint64_t num_updates, uint32_t* is_over) {
  return guard([&] {
    const SessionCall call(session);
    const bool over = call->step(num_updates);
    if (is_over != nullptr) *is_over = over ? 1 : 0;
  });
}

stg_error* stg_session_run(stg_session session, stg_tree* result) {
  return guard([&] {
    const SessionCall call(session);
    require(result, "result");
    give_json(call->run(), result);
  });
}

stg_error* stg_session_progress(stg_session session, stg_progress* out) {
  return guard([&] {
    const auto mailbox = mailbox_of(session);
    known_size_bytes(out, STG_PROGRESS_MIN_SIZE, "out");
    write_result(out, to_abi(mailbox->progress()));
  });
}

stg_error* stg_session_strategy(stg_session session, const stg_strategy_api** api, stg_strategy** instance) {
  return guard([&] {
    const SessionCall call(session);
    require(api, "api");
    require(instance, "instance");
    *api = call->strategy().table();
    *instance = call->strategy().handle();
  });
}

stg_error* stg_session_swap(stg_session session, stg_string strategy) {
  return guard([&] {
    const SessionCall call(session);
    call->swap(strategy_of(std::string(text_of(strategy))));
  });
}

stg_error* stg_session_request_swap(stg_session session, stg_string strategy) {
  return guard([&] { request_swap(session, [&] { return strategy_of(std::string(text_of(strategy))); }); });
}

stg_error* stg_session_poll(stg_session session, uint64_t timeout_ns, stg_tree* event) {
  return guard([&] {
    const auto mailbox = mailbox_of(session);
    require(event, "event");
    const Json next = mailbox->next(timeout_ns);
    next.is_null() ? void(*event = stg_tree{}) : give_json(next, event);
  });
}

void stg_session_request_reload(stg_session session) {
  with_requests(session, [](Requests& requests) { requests.reload = true; });
}

void stg_session_request_stop(stg_session session) {
  with_requests(session, [](Requests& requests) { requests.stop = true; });
}

void stg_session_cancel(stg_session session) {
  with_requests(session, [](Requests& requests) { requests.cancel = 1; });
}

void stg_session_close(stg_session session) { close_handle(session); }

stg_error* stg_list_plugins(stg_string config_path, stg_tree* result) {
  return guard([&] {
    require(result, "result");
    const Catalogue catalogue(plugin_path_of(std::string(text_of(config_path))));
    Json folders = Json::array(), plugins = Json::array();
    for (const SearchFolder& folder : catalogue.folders()) folders.push_back(to_json(folder));
    for (const PluginFile& file : catalogue.files()) plugins.push_back(to_json(file));
    give_json({{"folders", folders}, {"plugins", plugins}}, result);
  });
}

stg_error* stg_inspect_plugin(stg_string path, stg_tree* result) {
  return guard([&] {
    require(result, "result");
    give_json(read_note(std::string(text_of(path))), result);
  });
}

stg_error* stg_doctor(stg_string config_path, stg_tree* result) {
  return guard([&] {
    require(result, "result");
    give_json(doctor(path_of(config_path, "config_path")), result);
  });
}

stg_error* stg_load_plugin(stg_string path, const stg_plugin** out) {
  return guard([&] {
    require(out, "out");
    *out = load_plugin(std::string(text_of(path))).address;
  });
}

stg_error* stg_describe_plugin(stg_string path, stg_tree* result) {
  return guard([&] {
    require(result, "result");
    give_json(to_json(load_plugin(std::string(text_of(path)))), result);
  });
}

stg_error* stg_config_schema(stg_tree* result) {
  return guard([&] {
    require(result, "result");
    give_text(config_schema_text(), result);
  });
}

stg_error* stg_options_schema(stg_string name, uint32_t is_model, stg_tree* result) {
  return guard([&] {
    require(result, "result");
    const Catalogue catalogue({});
    LibraryConfig library;
    library.name = text_of(name);
    const stg_string schema =
        is_model != 0 ? load_model(library, catalogue).options_schema : load_strategy(library, catalogue).options_schema;
    give_json(options_schema(schema, library.name), result);
  });
}

stg_string stg_version() { return stratagem::to_abi(version_text); }
