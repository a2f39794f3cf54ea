// SPDX-License-Identifier: Apache-2.0
//
// stratagem doctor about CPUs, threads, memory and where to write: control groups as files, limits of a child process.
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>

#include "doctor.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

constexpr uint64_t gib = uint64_t{1} << 30;

Machine machine_with(size_t num_cpus) {
  Machine machine;
  machine.num_cpus = num_cpus;
  return machine;
}

/// What `tell` says in a child that is held to `limit`.
std::string in_child(__rlimit_resource resource, uint64_t bound, bool as_nobody, const std::function<std::string()>& tell) {
  int ends[2];
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  if (child == 0) {
    constexpr uid_t nobody = 65534;
    const rlimit limit{bound, bound};
    const bool is_set = setrlimit(resource, &limit) == 0 && (!as_nobody || getuid() != 0 || setuid(nobody) == 0);
    const std::string text = is_set ? tell() : "the limit can't be set";
    [[maybe_unused]] const auto written = write(ends[1], text.data(), text.size());
    _exit(0);
  }
  close(ends[1]);
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(ends[0], buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(got));
  close(ends[0]);
  REQUIRE(waitpid(child, nullptr, 0) == child);
  return text;
}

/// A tree of control groups; the own one is /a/b.
struct FakeGroups {
  explicit FakeGroups(const std::string& lines) { write_file(folder / "own", lines); }
  void write(const std::string& file, const std::string& content) const { write_file(folder / ("root/" + file), content); }
  Cgroups groups() const { return Cgroups(folder / "root", folder / "own"); }
  TemporaryFolder folder;
};

}  // namespace

TEST_CASE("The tightest limit from the own control group to the top counts, in version 2") {
  const FakeGroups fake("0::/a/b\n");
  fake.write("cgroup.controllers", "cpu memory pids");
  for (const char* file : {"memory.max", "pids.max"}) fake.write(std::string("a/b/") + file, "max\n");
  fake.write("a/b/cpu.max", "max 100000\n");
  CHECK(!fake.groups().memory_bytes());
  CHECK(!fake.groups().tasks());
  CHECK(!fake.groups().cpus());
  fake.write("a/b/memory.max", "4294967296\n");
  fake.write("a/b/memory.current", "1073741824\n");
  fake.write("a/b/memory.stat", "anon 5\nfile 536870912\ninactive_file 268435456\n");
  fake.write("a/memory.max", "2147483648\n");
  fake.write("a/memory.current", "1073741824\n");
  CHECK(fake.groups().memory_bytes()->free() == gib);
  CHECK(fake.groups().memory_bytes()->file == fake.folder / "root/a/memory.max");
  fake.write("a/memory.max", "17179869184\n");
  CHECK(fake.groups().memory_bytes()->limit == 4 * gib);
  CHECK(fake.groups().memory_bytes()->used == 3 * gib / 4);  // pages of files that are not used don't count
  fake.write("a/pids.max", "100\n");
  fake.write("a/pids.current", "40\n");
  CHECK(fake.groups().tasks()->free() == 60);
  fake.write("a/b/cpu.max", "250000 100000\n");
  fake.write("a/cpu.max", "400000 100000\n");
  CHECK(fake.groups().cpus() == std::optional<double>(2.5));
}

TEST_CASE(
    "The limits of control groups are read in version 1, side by side with version 2, and where the own path is not to be seen") {
  const FakeGroups fake("12:memory:/a/b\n5:cpu,cpuacct:/a\n4:pids:/not/here\n1:name=systemd:/x\n0::/\n");
  fake.write("memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  fake.write("memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK(!fake.groups().memory_bytes());
  fake.write("memory/a/memory.limit_in_bytes", "3221225472\n");
  fake.write("memory/a/memory.usage_in_bytes", "2147483648\n");
  fake.write("memory/a/memory.stat", "cache 5\ntotal_inactive_file 1073741824\n");
  CHECK(fake.groups().memory_bytes()->free() == 2 * gib);
  fake.write("cpu,cpuacct/a/cpu.cfs_quota_us", "-1\n");
  fake.write("cpu,cpuacct/a/cpu.cfs_period_us", "100000\n");
  CHECK(!fake.groups().cpus());
  fake.write("cpu,cpuacct/a/cpu.cfs_quota_us", "50000\n");
  CHECK(fake.groups().cpus() == std::optional<double>(0.5));
  fake.write("pids/pids.max", "64\n");
  fake.write("pids/pids.current", "70\n");
  CHECK(fake.groups().tasks()->free() == 0);
  CHECK(!Cgroups(fake.folder / "nowhere", fake.folder / "none").tasks());
}

TEST_CASE("doctor warns where more threads are asked for than there are CPUs, and says by whom") {
  Machine machine = machine_with(4);
  CHECK(is_fine(check_cpus(machine, no_gpus(), {})));
  CHECK(check_cpus(machine, no_gpus(), {}).found == "4 CPUs; 4 threads by default");
  machine.omp_num_threads = "8,2";
  check_complaint(check_cpus(machine, no_gpus(), {}), Health::warning,
                  {"8 threads asked for by OMP_NUM_THREADS, and 4 CPUs to run on", "(or OMP_NUM_THREADS) to 4"});
  Wanted wanted;
  wanted.threads = 3;
  CHECK(is_fine(check_cpus(machine, no_gpus(), wanted)));
  wanted.threads = 5;
  check_complaint(check_cpus(machine, no_gpus(), wanted), Health::warning, {"5 threads asked for by the config's threads"});
  for (const char* text : {"many", "0", "-1", "1e3", "99999999999999999999"}) {
    machine.omp_num_threads = text;
    check_complaint(check_cpus(machine, no_gpus(), {}), Health::warning,
                    {std::string("OMP_NUM_THREADS is \"") + text + "\", which is no number of threads"});
  }
  machine.omp_num_threads = "";
  CHECK(is_fine(check_cpus(machine, no_gpus(), {})));
}

TEST_CASE("doctor warns where a control group gives less time than the CPUs that LibTorch counts") {
  Machine machine = machine_with(16);
  machine.cgroup_cpus = 1.5;
  check_complaint(check_cpus(machine, no_gpus(), {}), Health::warning, {"16 threads by default, and 2 CPUs to run on"});
  CHECK(check_cpus(machine, no_gpus(), {}).found == "16 CPUs, of their time a control group gives 1.5; 16 threads by default");
  machine.omp_num_threads = "2";
  CHECK(is_fine(check_cpus(machine, no_gpus(), {})));
}

TEST_CASE("doctor warns of more replicas than CPUs, but not of those on GPUs") {
  Wanted wanted;
  wanted.num_devices = 4;
  check_complaint(check_cpus(machine_with(2), no_gpus(), wanted), Health::warning,
                  {"/strategy/devices makes 4 replicas on 2 CPUs"});
  CHECK(is_fine(check_cpus(machine_with(2), gpus_with(4), wanted)));
  wanted.accelerator = "cpu";
  CHECK(check_cpus(machine_with(2), gpus_with(4), wanted).health() == Health::warning);
}

TEST_CASE("doctor finds a fault where the threads of a run are not to be had") {
  Machine machine = machine_with(8);
  CHECK(check_threads(machine, no_gpus(), {}).found == "no limit");
  machine.cgroup_tasks = Limit{100, 60, "/groups/pids.max"};
  CHECK(is_fine(check_threads(machine, no_gpus(), {})));
  check_complaint(check_threads(machine, gpus_with(1), {}), Health::fault,
                  {"the limit of /groups/pids.max is 100, and 60 are in use; a run here takes about 48", "--pids-limit"});
  Wanted wanted;
  wanted.threads = 2;
  CHECK(is_fine(check_threads(machine, gpus_with(1), wanted)));
  machine.cgroup_tasks.reset();
  machine.max_user_threads = 50;
  machine.num_user_threads = 50;
  check_complaint(check_threads(machine, no_gpus(), {}), Health::fault,
                  {"your limit on threads (ulimit -u) is 50, and 50 are in use", "ulimit -u"});
}

TEST_CASE("doctor reads a user's limit on threads, and how many that user has") {
  const std::string said = in_child(RLIMIT_NPROC, 7, true, [] {
    const Machine machine = Machine::own();
    return std::to_string(machine.max_user_threads) + (machine.num_user_threads > 0 ? " of some" : " of none") + " " +
           complaints(check_threads(machine, no_gpus(), {}));
  });
  CHECK(said == Contains{"7 of some your limit on threads (ulimit -u) is 7, and "});
}

TEST_CASE("doctor tells how much memory is left, of the machine and under a control group's limit") {
  Machine machine;
  CHECK(is_fine(check_memory(machine, no_gpus(), {})));
  machine.available_bytes = 3 * gib;
  machine.cgroup_memory = Limit{8 * gib, 5 * gib, "/groups/memory.max"};
  CHECK(is_fine(check_memory(machine, no_gpus(), {})));
  CHECK(check_memory(machine, no_gpus(), {}).found ==
        "3.0 GiB free; 3.0 GiB left under the limit of 8.0 GiB in /groups/memory.max");
  machine.cgroup_memory->used = 7 * gib;
  check_complaint(check_memory(machine, no_gpus(), {}), Health::warning, {"1.0 GiB left under the limit of 8.0 GiB", "--memory"});
  machine.cgroup_memory->used = 8 * gib - gib / 2;
  check_complaint(check_memory(machine, no_gpus(), {}), Health::fault,
                  {"512 MiB left under the limit of 8.0 GiB in /groups/memory.max"});
  machine.cgroup_memory.reset();
  machine.available_bytes = gib / 4;
  check_complaint(check_memory(machine, no_gpus(), {}), Health::fault, {"256 MiB free; LibTorch alone takes"});
}

TEST_CASE("doctor finds a fault in a limit on address space that LibTorch, or CUDA, can't live with") {
  Machine machine;
  machine.max_address_space = 64 * gib;
  CHECK(is_fine(check_memory(machine, no_gpus(), {})));
  check_complaint(check_memory(machine, gpus_with(1), {}), Health::fault,
                  {"the limit on address space (ulimit -v) is 64.0 GiB; CUDA reserves more"});
  Wanted cpu;
  cpu.accelerator = "cpu";
  CHECK(is_fine(check_memory(machine, gpus_with(1), cpu)));
  machine.max_address_space = 2 * gib;
  check_complaint(check_memory(machine, no_gpus(), {}), Health::warning, {"(ulimit -v) is 2.0 GiB"});
  machine.max_address_space = gib / 2;
  check_complaint(check_memory(machine, no_gpus(), {}), Health::fault, {"(ulimit -v) is 512 MiB"});
}

#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)  // they have mapped far more
TEST_CASE("doctor reads the limit on address space") {
  const std::string said =
      in_child(RLIMIT_AS, 3 * gib, false, [] { return complaints(check_memory(Machine::own(), no_gpus(), {})); });
  CHECK(said == Contains{"the limit on address space (ulimit -v) is 3.0 GiB"});
}
#endif

TEST_CASE("doctor knows this process's CPUs and the memory that is free") {
  const Machine machine = Machine::own();
  CHECK(machine.num_cpus >= 1);
  CHECK(machine.num_cpus <= static_cast<size_t>(sysconf(_SC_NPROCESSORS_CONF)));
  REQUIRE(machine.available_bytes);
  CHECK(*machine.available_bytes > gib / 1024);
}

TEST_CASE("doctor looks at the folders that a config's run writes to, else at the current one") {
  const TemporaryFolder folder;
  Wanted wanted;
  wanted.outputs = {folder / "new/run", folder / "new/run"};
  const Check made = check_outputs(wanted, "/nowhere");
  CHECK(made.health() != Health::fault);
  CHECK(made.found == Contains{(folder / "new/run").string() + " (to be made in " + folder.path.string() + "): "});
  CHECK(made.found == Contains{" free"});
  CHECK(check_outputs({}, folder.path).found == Contains{folder.path.string() + ": "});
  write_file(folder / "file", "");
  wanted.outputs = {folder / "file/run"};
  check_complaint(check_outputs(wanted, folder.path), Health::fault,
                  {"can't be made: " + (folder / "file").string() + " is a file"});
}

TEST_CASE("doctor reads from a config what its run wants, however wrong the rest is") {
  const TemporaryFolder folder;
  write_file(folder / "c.json", R"({
    "plugin_path": ["plugins", 3], "strategy": {"name": "data_parallel", "accelerator": "cuda", "devices": [0, 2, "x"]},
    "model": {"kind": "library", "path": "m.so"}, "threads": 6, "nonsense": 1,
    "checkpoint": {"dir": "runs/a"}, "metrics": {"path": "logs/m.jsonl"}})");
  const Wanted wanted = read_wanted(folder / "c.json");
  CHECK(wanted.strategy == "data_parallel");
  CHECK(wanted.model.empty());
  CHECK(wanted.plugin_files == std::vector<fs::path>{folder / "m.so"});
  CHECK(wanted.plugin_path == std::vector<fs::path>{folder / "plugins"});
  CHECK(wanted.needs_gpu());
  CHECK(wanted.devices == std::vector<int64_t>{0, 2});
  CHECK(wanted.num_devices == std::optional<int64_t>(2));
  CHECK(wanted.threads == std::optional<int64_t>(6));
  CHECK(wanted.outputs == std::vector<fs::path>{folder / "runs/a", folder / "logs"});
  write_file(folder / "c.json",
             R"({"strategy": [1], "model": {"kind": "torchscript", "path": "m.pt"}, "threads": "x", "checkpoint": 5})");
  const Wanted nothing = read_wanted(folder / "c.json");
  CHECK(nothing.strategy.empty());
  CHECK(nothing.plugin_files.empty());
  CHECK(!nothing.threads);
  CHECK(nothing.outputs.empty());
  CHECK(nothing.accelerator == "auto");
  write_file(folder / "c.json", R"({"strategy": {"name": "./own.so", "devices": 3}})");
  CHECK(read_wanted(folder / "c.json").plugin_files == std::vector<fs::path>{folder / "own.so"});
  CHECK(read_wanted(folder / "c.json").num_devices == std::optional<int64_t>(3));
  write_file(folder / "c.json", R"({"checkpoint": {"dir": "~/runs"}})");
  CHECK(error_of([&] { read_wanted(folder / "c.json"); }).message ==
        Contains{"/checkpoint/dir: \"~/runs\": \"~\" is not expanded"});
}
