// SPDX-License-Identifier: Apache-2.0
//
// `stratagem doctor`: what is wrong with this machine for a run, and what to do about it.
#pragma once

#include <string>

#include "libstratagem/doctor/checks.hpp"

namespace stratagem {

/// Of the JSON that `doctor` gives: a key may come, none changes its meaning without another number here.
inline constexpr int doctor_schema_version = 1;

/// Runs every check, for a config's run if one is named. See stg_doctor.
Json doctor(const std::string& config_path);

/// The checks as JSON.
Json to_json(const std::vector<Check>& checks);

}  // namespace stratagem
