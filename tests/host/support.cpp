// SPDX-License-Identifier: Apache-2.0
#include "support.hpp"

#include <fcntl.h>
#include <linux/capability.h>
#include <pty.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <csignal>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "base/dlpack.hpp"
#include "base/npy.hpp"

namespace stratagem::test {

TemporaryFolder::TemporaryFolder() {
  std::string name = (fs::temp_directory_path() / "stratagem-XXXXXX").string();
  REQUIRE(mkdtemp(name.data()) != nullptr);
  path = fs::canonical(name);
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code error;
  fs::remove_all(path, error);
}

Unprivileged::Unprivileged(const fs::path& folder) : was_root_(geteuid() == 0) {
  constexpr uid_t nobody = 65534;
  if (!was_root_) return;
  REQUIRE(chown(folder.c_str(), nobody, nobody) == 0);
  REQUIRE(seteuid(nobody) == 0);
}

Unprivileged::~Unprivileged() {
  if (was_root_) seteuid(0);
}

void write_file(const fs::path& path, const std::string& content) {
  fs::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << content;
}

std::string read_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in);
  std::ostringstream content;
  content << in.rdbuf();
  return std::move(content).str();
}

std::string bytes(const std::string& hex) {
  std::istringstream in(hex);
  std::string out;
  for (std::string byte; in >> byte;) out += static_cast<char>(std::stoi(byte, nullptr, 16));
  return out;
}

std::string gzipped(const std::string& content) {
  const TemporaryFolder folder;
  const std::string file = (folder / "x.gz").string();
  gzFile out = gzopen(file.c_str(), "wb");
  gzwrite(out, content.data(), static_cast<unsigned>(content.size()));
  gzclose(out);
  return read_file(file);
}

void write_samples(const fs::path& path, const std::vector<float>& samples) {
  fs::create_directories(path.parent_path());
  const TensorPtr tensor = allocate_tensor(float32, {static_cast<int64_t>(samples.size()), 1});
  std::copy(samples.begin(), samples.end(), first_element<float>(tensor->view));
  write_npy(path, tensor->view);
}

Json Finished::json() const {
  INFO(out << err);
  REQUIRE(!out.empty());
  REQUIRE(out.back() == '\n');
  const size_t begin = out.rfind('\n', out.size() - 2);
  return Json::parse(out.substr(begin == std::string::npos ? 0 : begin + 1));
}

namespace {

/// All that is written to the other side of a terminal until that is closed.
std::string read_terminal(int terminal) {
  std::string text;
  char buffer[4096];
  for (ssize_t got; (got = read(terminal, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(got));
  close(terminal);
  return text;
}

}  // namespace

Finished run_stratagem(const std::vector<std::string>& arguments, const fs::path& folder,
                       const std::map<std::string, std::string>& environment, Surroundings surroundings) {
  const TemporaryFolder outputs;
  const std::string out = surroundings.out.empty() ? (outputs / "out").string() : surroundings.out;
  const std::string err = (outputs / "err").string();
  std::vector<std::string> words = {TEST_CLI};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const bool on_terminal = surroundings.on_terminal;
  int terminal = -1, terminal_of_child = -1;
  if (on_terminal) REQUIRE(openpty(&terminal, &terminal_of_child, nullptr, nullptr, nullptr) == 0);
  const pid_t child = fork();
  if (child == 0) {
    unsetenv("STRATAGEM_PLUGIN_PATH");
    unsetenv("NO_COLOR");
    for (const auto& [name, value] : environment) setenv(name.c_str(), value.c_str(), 1);
    dup2(open(out.c_str(), O_CREAT | O_WRONLY, 0600), STDOUT_FILENO);
    dup2(on_terminal ? terminal_of_child : open(err.c_str(), O_CREAT | O_WRONLY, 0600), STDERR_FILENO);
    if (on_terminal) close(terminal_of_child);
    if (surroundings.max_file_bytes != 0) {
      const rlimit limit{surroundings.max_file_bytes, surroundings.max_file_bytes};
      setrlimit(RLIMIT_FSIZE, &limit);
    }
    if (surroundings.obeys_modes && geteuid() == 0) {
      for (const int capability : {CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH}) prctl(PR_CAPBSET_DROP, capability);
    }
    signal(SIGINT, surroundings.ignores_sigint ? SIG_IGN : SIG_DFL);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    if (chdir(folder.c_str()) == 0) execv(TEST_CLI, argv.data());
    _exit(127);
  }
  std::string shown;
  if (on_terminal) {
    close(terminal_of_child);
    shown = read_terminal(terminal);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return {WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), surroundings.out.empty() ? read_file(out) : "",
          on_terminal ? shown : read_file(err)};
}

}  // namespace stratagem::test
