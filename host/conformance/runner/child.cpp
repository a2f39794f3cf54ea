// SPDX-License-Identifier: Apache-2.0
//
// Both ends of the pipe between the tool and a child. What the child has to say goes through a pipe of its own as lines of JSON, each
// with a number that only the two know: what the plugin writes to whatever descriptor it finds can't be taken for a result, and a
// plugin that ends the process has not passed.
#include "conformance/runner/child.hpp"

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <random>
#include <sstream>

#include "base/text.hpp"
#include "conformance/conformance.hpp"
#include "conformance/runner/process.hpp"

namespace stratagem::conformance {
namespace {

using Json = nlohmann::json;

// ---- inside the child ----

// One has more to say at the end: leaks, races.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool has_sanitizer = true;
#elif defined(__has_feature)
constexpr bool has_sanitizer = __has_feature(address_sanitizer) || __has_feature(thread_sanitizer);
#else
constexpr bool has_sanitizer = false;
#endif

int record_fd = -1;
std::string nonce;
std::mutex record_lock;

void write_record(Json record) {
  record["nonce"] = nonce;
  const std::string line = record.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
  const std::lock_guard hold(record_lock);
  for (size_t at = 0; at < line.size();) {
    const ssize_t written = write(record_fd, line.data() + at, line.size() - at);
    if (written <= 0) return;  // then there will be no last record, either
    at += static_cast<size_t>(written);
  }
}

void tell_parent(Outcome outcome, const std::string& text) {
  write_record({{"outcome", static_cast<int>(outcome)}, {"text", text}});
}

std::string read_all(int fd) {
  std::string text;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(fd, buffer, sizeof buffer)) > 0;) text.append(buffer, static_cast<size_t>(got));
  return text;
}

Json take_request() {
  const Json request = Json::parse(read_all(STDIN_FILENO));
  const int nothing = open("/dev/null", O_RDONLY | O_CLOEXEC);
  dup2(nothing, STDIN_FILENO);
  close(nothing);
  record_fd = fcntl(child_record_fd, F_DUPFD_CLOEXEC, 200);  // away from where a plugin might look first
  close(child_record_fd);
  nonce = request.at("nonce");
  return request;
}

// ---- outside ----

std::string new_nonce() {
  std::random_device random;
  std::ostringstream text;
  text << std::hex << random() << random();
  return text.str();
}

std::string ending_of(const Ended& ended, const Limits& limits) {
  if (ended.is_timed_out) return concat("timed out after ", limits.timeout_s, " s");
  if (ended.is_too_big) return concat("took more than ", limits.memory_bytes >> 20, " MiB of memory");
  if (ended.signal != 0) return concat("ended by signal ", ended.signal, " (", strsignal(ended.signal), ")");
  return concat("ended with exit code ", ended.exit_code, " before it was done");
}

void read_records(const std::string& text, const std::string& expected, ChildReport& out) {
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    const Json record = Json::parse(line, nullptr, false);
    if (!record.is_object() || record.value("nonce", "") != expected) continue;
    if (record.contains("text")) out.messages.push_back(record["text"]);
    if (record.contains("facts")) out.facts = record["facts"];
    if (!record.contains("end")) continue;
    out.is_done = true;
    out.outcome = static_cast<Outcome>(record["end"].get<int>());
  }
}

}  // namespace

int run_child() {
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // should the tool be killed
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  Json request;
  try {
    request = take_request();
  } catch (const std::exception&) {
    std::fputs("conformance-child is how `stratagem conformance` starts itself; it is of no use alone\n", stderr);
    return bad_options;
  }
  const Task task = request.at("task");
  if (task.id.empty()) {
    write_record({{"facts", enter(task)}, {"end", static_cast<int>(Outcome::passed)}});
    _exit(0);
  }
  const check_entry& of = *find_check(task.id);
  const Outcome outcome = perform(task, of, tell_parent);
  write_record({{"end", static_cast<int>(outcome)}});
  if ((of.needs & ENDS_BY_EXIT) != 0 || has_sanitizer) std::exit(0);
  _exit(0);
}

ChildReport run_in_child(const Task& task, const Limits& limits) {
  const std::string secret = new_nonce();
  const Ended ended = run_process({"/proc/self/exe", child_command}, Json{{"nonce", secret}, {"task", task}}.dump(),
                                  limits.timeout_s, limits.memory_bytes);
  ChildReport report;
  read_records(ended.records, secret, report);
  report.output = ended.output;
  report.seconds = ended.seconds;
  if (ended.signal != 0 || ended.exit_code != 0 || ended.is_timed_out || ended.is_too_big) report.is_done = false;
  if (report.is_done) return report;
  report.outcome = Outcome::crashed;
  report.kind = ending_of(ended, limits);
  return report;
}

}  // namespace stratagem::conformance
