// SPDX-License-Identifier: Apache-2.0
//
// The command line: what can be typed, and nothing else.
#include <stratagem/session.h>

#include <CLI/CLI.hpp>

#include "cli/commands.hpp"
#include "cli/output.hpp"
#include "conformance/conformance.hpp"

using namespace stratagem::cli;

namespace {

void add_run_options(CLI::App& command, RunOptions& options) {
  command.add_option("config", options.config, "The config, a JSON file")->required();
  // One value per --set, so that the config may stand after it.
  command
      .add_option("--set", options.overrides,
                  "Sets a key of the config: key.key=value; the last one wins; paths are relative to the config")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false)
      ->delimiter('\0');
  command.add_flag("--json", options.json, "Print one JSON object as the last line of stdout");
}

CLI::App* add_conformance(CLI::App& app, stratagem::conformance::Options& options) {
  CLI::App* command = app.add_subcommand("conformance", "Try a plugin against the promises of the ABI, in child processes");
  CLI::Option* file = command->add_option("file", options.file, "A plugin");
  command->add_flag("--list", options.list, "List the checks, and run none");
  command->add_option("--only", options.only, "Run the checks whose id fits this pattern, as of a shell")
      ->allow_extra_args(false);
  command->add_option("--skip", options.skip, "Don't run those")->allow_extra_args(false);
  command->add_option("--strategy", options.strategy, "Check this one of the plugin's strategies");
  command->add_option("--config", options.config, "What each instance's config begins with, as {\"options\": {...}}");
  command->add_option("--run-path", options.run_path, "A folder that its RUNPATH may name: tells of all others")
      ->allow_extra_args(false);
  command->add_option("--seed", options.seed, "Of batches")->capture_default_str();
  command->add_option("--jobs", options.jobs, "Checks side by side; 0: one per CPU")->capture_default_str();
  command->add_option("--timeout", options.timeout_s, "Seconds that a check may take")->capture_default_str();
  command->add_option("--memory", options.memory_mib, "MiB that it may hold")->capture_default_str();
  command->add_flag("--in-process", options.in_process, "Load the plugin into this process, for a debugger");
  command->add_flag("--json", options.json, "Print one JSON object");
  command->callback([&options, file] {
    if (!options.list && file->empty()) throw CLI::RequiredError("file");
  });
  return command;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains models through strategy plugins.", "stratagem");
  app.require_subcommand(1);
  const stg_string version = stg_version();
  app.set_version_flag("--version", "stratagem " + std::string(version.data, version.size_bytes) + " (ABI " +
                                        std::to_string(STG_ABI_MAJOR) + "." + std::to_string(STG_ABI_MINOR) + ")");

  RunOptions options;
  CLI::App* fit = app.add_subcommand("fit", "Train");
  add_run_options(*fit, options);
  // An empty one, as of a variable that isn't set, must not train or evaluate other weights than those that were meant.
  const CLI::Validator is_given([](const std::string& text) { return text.empty() ? "it is empty; name a folder" : ""; }, "DIR");
  fit->add_option("--resume", options.checkpoint, "Go on from this checkpoint, or from the newest in this folder")
      ->check(is_given);
  CLI::App* validate = app.add_subcommand("validate", "Evaluate a checkpoint on data.validation");
  CLI::App* test = app.add_subcommand("test", "Evaluate a checkpoint on data.test");
  CLI::App* predict = app.add_subcommand("predict", "Write what a checkpoint predicts for data.predict");
  predict->add_option("--output", options.output, "The file to write: .npz or .safetensors")->required();
  for (CLI::App* command : {validate, test, predict}) {
    add_run_options(*command, options);
    command->add_option("--checkpoint", options.checkpoint, "A checkpoint, or a folder whose newest is meant")
        ->required()
        ->check(is_given);
  }

  std::string file, strategy, model;
  CLI::App* plugins_command = app.add_subcommand("plugins", "List what is in the search folders, without loading it");
  plugins_command->add_option("config", file, "A config whose plugin_path is searched, too");
  plugins_command->add_flag("--json", options.json, "Print one JSON object");
  CLI::App* doctor_command =
      app.add_subcommand("doctor", "Look at what a run needs on this machine: what is wrong, and what to do");
  doctor_command->add_option("config", file, "A config whose needs are looked at");
  doctor_command->add_flag("--json", options.json, "Print one JSON object");
  CLI::App* inspect_command = app.add_subcommand("inspect", "Show a plugin file's note, without loading it");
  inspect_command->add_option("file", file, "A plugin or model library")->required();
  inspect_command->add_flag("--json", options.json, "Print one JSON object on one line");
  CLI::App* schema_command = app.add_subcommand("schema", "Print the config's JSON Schema, or that of the options of a plugin");
  schema_command->add_option("--strategy", strategy, "Of this strategy's options");
  schema_command->add_option("--model", model, "Of this model's options")->excludes("--strategy");
  stratagem::conformance::Options conformance;
  CLI::App* conformance_command = add_conformance(app, conformance);
  CLI::App* child_command = app.add_subcommand(stratagem::conformance::child_command)->group("");

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? fine : bad_input;
  }
  try {
    if (*fit) return run(STG_STAGE_FIT, options);
    if (*validate) return run(STG_STAGE_VALIDATE, options);
    if (*test) return run(STG_STAGE_TEST, options);
    if (*predict) return run(STG_STAGE_PREDICT, options);
    if (*plugins_command) return plugins(file, options.json);
    if (*doctor_command) return doctor(file, options.json);
    if (*conformance_command) return stratagem::conformance::run(conformance);
    if (*child_command) return stratagem::conformance::run_child();
    if (*inspect_command) return inspect(file, options.json);
    return schema(strategy, model);
  } catch (const std::exception& error) {
    say(STG_LOG_ERROR, error.what());
    return failed;
  }
}
