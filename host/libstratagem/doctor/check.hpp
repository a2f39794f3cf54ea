// SPDX-License-Identifier: Apache-2.0
//
// What `stratagem doctor` says of one thing that it looked at.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace stratagem {

enum class Health { skipped, ok, warning, fault };

struct Complaint {
  Health health;       // warning or fault
  std::string wrong;   // the value, and why it is wrong
  std::string remedy;  // what to do
};

struct Check {
  explicit Check(std::string name) : id(std::move(name)) {}

  std::string id;     // in kebab-case; part of the JSON, so it stays
  std::string found;  // what is there, in a line
  bool is_skipped = false;
  std::vector<Complaint> complaints;

  void warn(std::string wrong, std::string remedy) { add(Health::warning, std::move(wrong), std::move(remedy)); }
  void fault(std::string wrong, std::string remedy) { add(Health::fault, std::move(wrong), std::move(remedy)); }
  void add(Health health, std::string wrong, std::string remedy) {
    complaints.push_back({health, std::move(wrong), std::move(remedy)});
  }
  Health health() const {
    Health worst = is_skipped ? Health::skipped : Health::ok;
    for (const Complaint& complaint : complaints) worst = std::max(worst, complaint.health);
    return worst;
  }
};

}  // namespace stratagem
