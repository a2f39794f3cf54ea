// SPDX-License-Identifier: Apache-2.0
//
// The tool: which checks there are for this plugin, run side by side, reported in the order of the table.
#include <fnmatch.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <filesystem>
#include <mutex>
#include <thread>

#include "base/error.hpp"
#include "base/json.hpp"
#include "base/note.hpp"
#include "conformance/conformance.hpp"
#include "conformance/elf.hpp"
#include "conformance/runner/child.hpp"
#include "conformance/runner/process.hpp"
#include "conformance/runner/report.hpp"

namespace stratagem::conformance {
namespace {

using Json = nlohmann::json;

// The first entry of every report: without it most others have nothing to stand on.
constexpr check_entry entering{
    "plugin-enters",
    "It opens with RTLD_NOW and RTLD_LOCAL, has stg_plugin_probe, accepts a host of ABI 1.0, and its tables can "
    "be followed",
    "A3", NEEDS_LIBRARY, nullptr};

bool matches(const std::vector<std::string>& patterns, const char* id) {
  return std::any_of(patterns.begin(), patterns.end(), [&](const std::string& one) { return fnmatch(one.c_str(), id, 0) == 0; });
}

std::vector<const check_entry*> chosen_checks(const Options& options) {
  std::vector<const check_entry*> all{&entering}, chosen;
  for (uint64_t i = 0; i < num_check_lists; ++i) {
    for (uint64_t k = 0; k < check_lists[i]->num_checks; ++k) all.push_back(&check_lists[i]->checks[k]);
  }
  for (const check_entry* one : all) {
    if ((options.only.empty() || matches(options.only, one->id)) && !matches(options.skip, one->id)) chosen.push_back(one);
  }
  return chosen;
}

// `--only nonsense` must not end as "it conforms".
void check_patterns(const Options& options) {
  for (const auto* patterns : {&options.only, &options.skip}) {
    for (const std::string& pattern : *patterns) {
      Options alone;
      alone.only = {pattern};
      if (chosen_checks(alone).empty()) throw invalid_argument("no check is called ", pattern, "; --list shows them all");
    }
  }
}

// What each instance's config begins with: the object's members, to be put in front of others.
std::string members_of(const std::string& config) {
  if (config.empty()) return "";
  const Json object = parse_json(config, "--config");
  if (!object.is_object()) throw invalid_argument("--config must be a JSON object, as {\"options\": {...}}");
  for (const char* key : {"devices", "accelerator", "optimizer"}) {
    if (object.contains(key)) throw invalid_argument("--config has \"", key, "\", which the checks set themselves");
  }
  const std::string text = object.dump();
  return object.empty() ? "" : text.substr(1, text.size() - 2) + ", ";
}

// Without loading it: is there something that means to be a plugin? Empty if so.
std::string why_no_plugin(const std::string& file) {
  try {
    read_note(file);
    return "";
  } catch (const Error& error) {
    try {  // a note that is missing or wrong is a finding where the symbol is there
      for (const ElfSymbol& symbol : read_elf_tables(file).exported) {
        if (symbol.name == STG_PLUGIN_PROBE_SYMBOL) return "";
      }
    } catch (const Error&) {
    }
    return error.what();
  }
}

struct Work {
  const check_entry* of = nullptr;
  std::string strategy;
  std::string skipped;  ///< why it isn't run
};

std::string missing_for(const check_entry& one, const StrategyFacts& strategy) {
  if (!strategy.has_cpu) return "it has no CPU devices";
  if ((one.needs & NEEDS_DEVICES) != 0 && (strategy.capabilities & STG_CAPABILITY_MULTIPLE_DEVICES) == 0)
    return "it has no STG_CAPABILITY_MULTIPLE_DEVICES";
  if ((one.needs & NEEDS_CALLER_THREAD) != 0 && (strategy.capabilities & STG_CAPABILITY_CALLER_THREAD_ONLY) == 0)
    return "it has no STG_CAPABILITY_CALLER_THREAD_ONLY";
  return "";
}

std::vector<Work> plan(const Options& options, const PluginFacts& facts, bool is_entered) {
  std::vector<Work> work;
  for (const check_entry* one : chosen_checks(options)) {
    const uint32_t needs = one->needs & NEEDS_MASK;
    if (one == &entering) continue;
    if (needs < NEEDS_STRATEGY || !is_entered || facts.strategies.empty()) {
      const char* why = needs < NEEDS_PLUGIN ? "" : !is_entered ? "the plugin could not be entered" : "it has no strategies";
      work.push_back({one, "", needs == NEEDS_PLUGIN && is_entered ? "" : why});
      continue;
    }
    for (const StrategyFacts& strategy : facts.strategies) {
      if (options.strategy.empty() || options.strategy == strategy.name)
        work.push_back({one, strategy.name, missing_for(*one, strategy)});
    }
  }
  return work;
}

class Runner {
 public:
  Runner(const Options& options, std::string config) : options_(options), config_(std::move(config)) {}

  Task task(const Work& work) const {
    return {work.of == nullptr ? "" : work.of->id, work.strategy, options_.file, config_, options_.run_path, options_.seed};
  }
  Limits limits() const { return {options_.timeout_s, options_.memory_mib << 20}; }

  Result run(const Work& work) const {
    Result result;
    result.of = work.of;
    result.strategy = work.strategy;
    if (!work.skipped.empty()) {
      result.outcome = Outcome::skipped;
      result.messages = {work.skipped};
      return result;
    }
    if (options_.in_process) {
      static std::vector<std::string>* messages = nullptr;
      messages = &result.messages;
      result.outcome = perform(task(work), *work.of, [](Outcome, const std::string& text) { messages->push_back(text); });
      return result;
    }
    ChildReport report = run_in_child(task(work), limits());
    result.outcome = report.outcome;
    result.kind = std::move(report.kind);
    result.messages = std::move(report.messages);
    result.output = std::move(report.output);
    result.seconds = report.seconds;
    return result;
  }

  /// All, side by side; `show` gets each, in order, as soon as those before it are there.
  template <class Show>
  std::vector<Result> run_all(const std::vector<Work>& work, Show show) const {
    std::vector<Result> results(work.size());
    std::vector<bool> is_there(work.size());
    std::mutex lock;
    std::condition_variable done;
    std::atomic<size_t> next{0};
    const auto take = [&] {
      for (size_t at = next++; at < work.size(); at = next++) {
        Result result = run(work[at]);
        const std::lock_guard hold(lock);
        results[at] = std::move(result);
        is_there[at] = true;
        done.notify_one();
      }
    };
    std::vector<std::jthread> threads;
    const unsigned num_cpus = std::max(1u, std::thread::hardware_concurrency());
    const unsigned num_threads = options_.in_process ? 1 : options_.jobs == 0 ? num_cpus : options_.jobs;
    for (unsigned i = 0; i < num_threads; ++i) threads.emplace_back(take);
    for (size_t at = 0; at < work.size(); ++at) {
      std::unique_lock hold(lock);
      done.wait(hold, [&] { return is_there[at]; });
      hold.unlock();
      show(results[at]);
    }
    return results;
  }

 private:
  const Options& options_;
  std::string config_;
};

/// While it lives no process of a plugin's can escape.
class OrphanKeeper {
 public:
  explicit OrphanKeeper(bool in_process) : in_process_(in_process) {
    if (!in_process_) adopt_orphans();
  }
  OrphanKeeper(const OrphanKeeper&) = delete;
  OrphanKeeper& operator=(const OrphanKeeper&) = delete;
  ~OrphanKeeper() {
    if (!in_process_) end_orphans();
  }

 private:
  bool in_process_;
};

Result entered(const Runner& runner, const Options& options, Report& report) {
  Result result;
  result.of = &entering;
  if (options.in_process) {
    report.facts = enter(runner.task({}));
  } else {
    ChildReport child = run_in_child(runner.task({}), runner.limits());
    report.facts = std::move(child.facts);
    result.seconds = child.seconds;
    result.output = std::move(child.output);
    result.kind = std::move(child.kind);
    if (!child.is_done) result.outcome = Outcome::crashed;
  }
  if (!report.facts.broken.empty()) {
    result.outcome = Outcome::failed;
    result.messages = {report.facts.broken};
  }
  return result;
}

void print(const Options& options, const std::string& text) {
  if (!options.json) std::printf("%s\n", text.c_str());
}

int finish(const Options& options, const Report& report) {
  print(options, (report.no_plugin.empty() ? "\n" : "") + summary(report));
  if (options.json) std::printf("%s\n", json_of(report).dump(-1, ' ', false, Json::error_handler_t::replace).c_str());
  std::fflush(stdout);
  return !report.no_plugin.empty() ? no_plugin : is_conforming(report) ? conforms : does_not_conform;
}

int run_all(const Options& options) {
  check_patterns(options);
  if (options.list) {
    const auto checks = chosen_checks(options);
    std::printf("%s\n", (options.json ? list_json(checks).dump(2) : list_text(checks)).c_str());
    return conforms;
  }
  const auto start = std::chrono::steady_clock::now();
  Report report;
  report.options = options;
  report.options.file = std::filesystem::absolute(options.file).lexically_normal();
  const Runner runner(report.options, members_of(options.config));
  const OrphanKeeper orphans(options.in_process);
  report.no_plugin = why_no_plugin(report.options.file);
  if (!report.no_plugin.empty()) return finish(options, report);
  const Result first = entered(runner, options, report);
  report.no_plugin = report.facts.no_library;
  if (!report.no_plugin.empty()) return finish(options, report);
  const bool is_entered = first.outcome == Outcome::passed;
  if (is_entered && !options.strategy.empty() &&
      std::none_of(report.facts.strategies.begin(), report.facts.strategies.end(),
                   [&](const StrategyFacts& one) { return one.name == options.strategy; })) {
    throw invalid_argument("the plugin has no strategy called ", options.strategy);
  }
  print(options, heading(report) + "\n");
  const auto show = [&](const Result& result) {
    print(options, text_of(result));
    std::fflush(stdout);
  };
  const auto checks = chosen_checks(options);
  const bool is_wanted = std::find(checks.begin(), checks.end(), &entering) != checks.end();
  if (is_wanted || !is_entered) show(first);
  report.results = runner.run_all(plan(options, report.facts, is_entered), show);
  if (is_wanted || !is_entered) report.results.insert(report.results.begin(), first);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return finish(options, report);
}

}  // namespace

int run(const Options& options) {
  try {
    return run_all(options);
  } catch (const Error& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return bad_options;
  }
}

}  // namespace stratagem::conformance
