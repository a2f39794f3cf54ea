// SPDX-License-Identifier: Apache-2.0
#include "libstratagem/doctor/doctor.hpp"

#include <algorithm>

namespace stratagem {
namespace {

const char* word_for(Health health) {
  switch (health) {
    case Health::skipped:
      return "skipped";
    case Health::ok:
      return "ok";
    case Health::warning:
      return "warning";
    case Health::fault:
      return "fault";
  }
  return "fault";
}

Json to_json(const Check& check) {
  Json problems = Json::array();
  for (const Complaint& complaint : check.complaints)
    problems.push_back({{"status", word_for(complaint.health)}, {"wrong", complaint.wrong}, {"remedy", complaint.remedy}});
  return {{"id", check.id}, {"status", word_for(check.health())}, {"found", check.found}, {"problems", problems}};
}

}  // namespace

Json to_json(const std::vector<Check>& checks) {
  Json list = Json::array();
  Health worst = Health::ok;
  for (const Check& check : checks) {
    list.push_back(to_json(check));
    worst = std::max(worst, check.health());
  }
  return {{"schema_version", doctor_schema_version}, {"status", word_for(worst)}, {"checks", list}};
}

Json doctor(const std::string& config_path) {
  const Wanted wanted = read_wanted(config_path);
  const Catalogue catalogue(wanted.plugin_path);
  const LoaderPlaces places = LoaderPlaces::own();
  const std::vector<LibTorchCopy> copies = find_libtorch(find_plugins(catalogue, wanted), places);
  const Gpus gpus = find_gpus();
  const Machine machine = Machine::own();
  return to_json(std::vector<Check>{
      check_plugin_folders(catalogue, wanted), check_libtorch_copies(copies, places), check_driver(gpus, wanted),
      check_devices(gpus, wanted), check_cuda_versions(gpus, copies, wanted, places), check_nccl(gpus, copies, wanted, places),
      check_shared_memory("/dev/shm", gpus, wanted), check_cpus(machine, gpus, wanted), check_threads(machine, gpus, wanted),
      check_memory(machine, gpus, wanted), check_outputs(wanted, std::filesystem::current_path())});
}

}  // namespace stratagem
