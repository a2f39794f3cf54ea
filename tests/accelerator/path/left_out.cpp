// SPDX-License-Identifier: Apache-2.0
#include "accelerator/path/left_out.hpp"

#include <mutex>
#include <set>

namespace stratagem::test {

namespace {

std::mutex mutex;
std::string left_out_name;
std::set<std::string> places;

}  // namespace

void leave_out(const std::string& name) {
  const std::lock_guard lock(mutex);
  left_out_name = name;
}

bool is_left_out(const char* name) {
  const std::lock_guard lock(mutex);
  places.insert(name);
  return left_out_name == name;
}

std::vector<std::string> take_places() {
  const std::lock_guard lock(mutex);
  std::vector<std::string> taken(places.begin(), places.end());
  places.clear();
  return taken;
}

}  // namespace stratagem::test
