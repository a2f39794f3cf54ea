// SPDX-License-Identifier: Apache-2.0
//
// What find_gpus says, as JSON: the driver stays in a process, so each of a test's is asked in one of its own. print_gpus [LIBRARY]
#include <iostream>
#include <nlohmann/json.hpp>

#include "base/gpu.hpp"

int main(int argc, char** argv) {
  const stratagem::Gpus gpus = argc > 1 ? stratagem::find_gpus(argv[1]) : stratagem::find_gpus();
  std::cout << nlohmann::json{{"state", static_cast<int>(gpus.state)},
                              {"names", gpus.names},
                              {"cuda_version", gpus.cuda_version},
                              {"missing", gpus.missing}}
            << std::endl;
}
