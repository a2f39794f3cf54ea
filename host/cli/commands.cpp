// SPDX-License-Identifier: Apache-2.0
#include "cli/commands.hpp"

#include <stratagem/session.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/output.hpp"
#include "cli/progress.hpp"

namespace stratagem::cli {
namespace {

using Json = nlohmann::json;

struct ErrorRelease {
  void operator()(stg_error* error) const { error->release(error); }
};
using Error = std::unique_ptr<stg_error, ErrorRelease>;

/// Closes a session at its end.
struct OpenSession {
  stg_session handle = 0;
  OpenSession() = default;
  OpenSession(const OpenSession&) = delete;
  OpenSession& operator=(const OpenSession&) = delete;
  ~OpenSession() { stg_session_close(handle); }
};

stg_string to_abi(const std::string& text) { return {text.data(), text.size()}; }

/// Takes the text out of a result.
std::string take_text(stg_tree& tree) {
  std::string text(tree.root.as.utf8, tree.root.count);
  tree.release(&tree);
  return text;
}

/// Prints a result. Returns the exit code: `code`, or that of a result that nobody got.
int print(const std::string& text, int code = fine) {
  write_above_progress("");
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fputc('\n', stdout);
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  say(STG_LOG_ERROR, std::string("can't write the result to stdout: ") + std::strerror(errno));
  return failed;
}

int report(const stg_error& error, int exit_code) {
  say(STG_LOG_ERROR, text_of(error));
  return exit_code;
}

// --- signals: the first one asks the run to stop, the second one ends at once. SIGUSR1 has it read its config again.

std::atomic<stg_session> running{0};
std::atomic<int> caught{0};

void on_signal(int signal) {
  const stg_session session = running.load();
  if (session == 0 || caught.exchange(signal) != 0) _exit(128 + signal);
  static const char text[] = "\nstopping after this step; once more to end at once\n";
  [[maybe_unused]] const auto written = write(STDERR_FILENO, text, sizeof text - 1);
  stg_session_request_stop(session);
}

std::atomic<bool> reload_waits{false};  // it came while the session was opened

void on_reload_signal(int) {
  const stg_session session = running.load();
  session == 0 ? void(reload_waits = true) : stg_session_request_reload(session);
}

/// While it lives, SIGINT, SIGTERM and, of a fit, SIGUSR1 go to the session.
class Signals {
 public:
  explicit Signals(stg_session session) {
    running = session;
    if (reload_waits) stg_session_request_reload(session);
  }
  ~Signals() { running = 0; }
  static void install(uint64_t stage) {
    install(SIGINT, on_signal);
    install(SIGTERM, on_signal);
    if (stage == STG_STAGE_FIT) install(SIGUSR1, on_reload_signal);
    // A write past the limit on a file's size is an error like that of a full disk, not the end.
    signal(SIGXFSZ, SIG_IGN);
  }

 private:
  static void install(int signal, void (*handler)(int)) {
    struct sigaction action {};
    action.sa_handler = handler;
    action.sa_flags = SA_RESTART;
    // Whoever started us may have had it ignored, as a shell does for what runs in the background.
    struct sigaction before {};
    if (sigaction(signal, nullptr, &before) == 0 && before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);
  }
};

stg_session_events terminal_events() {
  stg_session_events events{};
  events.struct_size = sizeof events;
  events.log = [](void*, uint32_t level, stg_string message) { say(level, {message.data, message.size_bytes}); };
  events.progress = [](void*, const stg_progress* progress) -> stg_error* {
    show_progress(*progress);
    return nullptr;
  };
  events.metrics = nullptr;
  return events;
}

// --- results for people

std::string number(const Json& value) {
  if (!value.is_number()) return value.is_null() ? "not a number" : value.dump();
  char text[32];
  std::snprintf(text, sizeof text, "%.6g", value.get<double>());
  return text;
}

std::string metrics_text(const Json& metrics) {
  std::string text;
  for (const auto& [name, value] : metrics.items()) text += (text.empty() ? "" : ", ") + name + " " + number(value);
  return text.empty() ? "none" : text;
}

std::string summary(const Json& result) {
  std::string devices;
  for (const Json& device : result["devices"]) devices += (devices.empty() ? "" : ", ") + device.get<std::string>();
  std::string text = "strategy    " + result["strategy"].get<std::string>() + " on " + devices;
  if (result.contains("nothing_to_do")) return text + "\nnothing to do: " + result["nothing_to_do"].get<std::string>();
  if (result.contains("steps")) {
    text += "\ntrained     " + std::to_string(result["steps"].get<int64_t>()) + " steps, " +
            std::to_string(result["epochs"].get<int64_t>()) + " epochs in " + number(result["seconds"]) + " s (" +
            number(result["step_ms_median"]) + " ms per step)" + "\ntrain loss  " + number(result["train_loss"]);
  }
  for (const char* stage : {"validation", "test"}) {
    if (result.contains(stage) && !result[stage].empty())
      text += std::string("\n") + stage + std::string(12 - std::strlen(stage), ' ') + metrics_text(result[stage]);
  }
  if (result.contains("predictions") && result["predictions"].is_string())
    text += "\npredictions " + result["predictions"].get<std::string>() + " " + result["arrays"].dump();
  if (result["checkpoint"].is_string()) text += "\ncheckpoint  " + result["checkpoint"].get<std::string>();
  if (const Json best = result.value("best", Json()); best.is_object()) {
    text += "\nbest        " + best["checkpoint"].get<std::string>() + " (" + best["monitor"].get<std::string>() + " " +
            number(best["value"]) + ")";
  }
  if (const Json reason = result.value("ended_by", Json()); reason.is_string())
    text += "\nended by    " + reason.get<std::string>();
  return text;
}

std::string plugins_text(const Json& found) {
  std::string text;
  for (const Json& plugin : found["plugins"]) {
    const auto names = [&](const char* key) {
      std::string list;
      for (const Json& name : plugin[key]) list += (list.empty() ? "" : ", ") + name.get<std::string>();
      return list;
    };
    const bool usable = plugin["problem"].is_null();
    text += plugin["path"].get<std::string>() + "\n";
    if (plugin["name"].is_string())
      text += "  " + plugin["name"].get<std::string>() + " " + plugin["version"].get<std::string>() + "\n";
    if (!plugin["strategies"].empty()) text += "  strategies: " + names("strategies") + "\n";
    if (!plugin["models"].empty()) text += "  models: " + names("models") + "\n";
    if (!usable) text += "  can't be used: " + plugin["problem"].get<std::string>() + "\n";
    if (plugin["shadowed_by"].is_string()) text += "  shadowed by " + plugin["shadowed_by"].get<std::string>() + "\n";
  }
  if (text.empty()) text = "no plugins found\n";
  text += "searched:";
  for (const Json& folder : found["folders"]) {
    text += "\n  " + folder["path"].get<std::string>() + " (" + folder["origin"].get<std::string>() + ")";
    if (folder["refused"].is_string()) text += ", refused: " + folder["refused"].get<std::string>();
  }
  return text;
}

std::string padded(std::string text, size_t width) {
  text.resize(std::max(text.size() + 1, width), ' ');
  return text;
}

/// A line for each check, then what is wrong.
std::string doctor_text(const Json& report) {
  std::string lines, problems;
  std::map<std::string, int> counts;
  for (const Json& check : report["checks"]) {
    const auto id = check["id"].get<std::string>();
    lines += padded(check["status"], 9) + padded(id, 16) + check["found"].get<std::string>() + "\n";
    for (const Json& problem : check["problems"]) {
      const auto status = problem["status"].get<std::string>();
      ++counts[status];
      problems += "\n" + status + ": " + id + ": " + problem["wrong"].get<std::string>() +
                  "\n  to do: " + problem["remedy"].get<std::string>() + "\n";
    }
  }
  const auto counted = [&](const char* word) {
    return std::to_string(counts[word]) + " " + word + (counts[word] == 1 ? "" : "s");
  };
  return lines + problems + "\n" + counted("fault") + ", " + counted("warning");
}

}  // namespace

int run(uint64_t stage, const RunOptions& options) {
  Signals::install(stage);
  std::vector<stg_string> overrides;
  for (const std::string& text : options.overrides) overrides.push_back(to_abi(text));
  const stg_session_events events = terminal_events();
  stg_session_args args{};
  args.struct_size = sizeof args;
  args.config_path = to_abi(options.config);
  args.overrides = overrides.data();
  args.num_overrides = overrides.size();
  args.stage = stage;
  args.checkpoint = to_abi(options.checkpoint);
  args.output = to_abi(options.output);
  args.events = &events;
  OpenSession session;
  if (const Error error{stg_session_open(&args, &session.handle)}) return report(*error, exit_code_of_opening(error->code));
  stg_tree tree{};
  {
    const Signals signals(session.handle);
    if (const Error error{stg_session_run(session.handle, &tree)}) return report(*error, failed);
  }
  const Json result = Json::parse(take_text(tree));
  return print(options.json ? result.dump() : summary(result), result["interrupted"].get<bool>() ? 128 + caught.load() : fine);
}

int plugins(const std::string& config, bool json) {
  stg_tree tree{};
  if (const Error error{stg_list_plugins(to_abi(config), &tree)}) return report(*error, bad_input);
  const std::string text = take_text(tree);
  return print(json ? text : plugins_text(Json::parse(text)));
}

int doctor(const std::string& config, bool json) {
  stg_tree tree{};
  if (const Error error{stg_doctor(to_abi(config), &tree)}) return report(*error, bad_input);
  const std::string text = take_text(tree);
  const Json found = Json::parse(text);
  return print(json ? text : doctor_text(found), found["status"] == "fault" ? failed : fine);
}

int inspect(const std::string& file, bool json) {
  stg_tree tree{};
  if (const Error error{stg_inspect_plugin(to_abi(file), &tree)}) return report(*error, bad_input);
  const std::string text = take_text(tree);
  return print(json ? text : Json::parse(text).dump(2));
}

int schema(const std::string& strategy, const std::string& model) {
  stg_tree tree{};
  const bool of_options = !strategy.empty() || !model.empty();
  const Error error{of_options ? stg_options_schema(to_abi(model.empty() ? strategy : model), model.empty() ? 0 : 1, &tree)
                               : stg_config_schema(&tree)};
  if (error) return report(*error, exit_code_of_opening(error->code));
  const std::string text = take_text(tree);
  return print(of_options ? Json::parse(text).dump(2) : text);
}

}  // namespace stratagem::cli
