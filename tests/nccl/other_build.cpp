// SPDX-License-Identifier: Apache-2.0
//
// A transport of another build, and one of a time when the table was shorter.
#include "accelerator/transport.hpp"

extern "C" __attribute__((visibility("default"))) const stratagem::TransportApi* stratagem_transport() {
  static const stratagem::TransportApi api = [] {
    stratagem::TransportApi made{};
    made.struct_size = sizeof(made) - SHORTER_BY;
    made.build_id = SHORTER_BY == 0 ? "another" : STRATAGEM_BUILD_ID;
    return made;
  }();
  return &api;
}
