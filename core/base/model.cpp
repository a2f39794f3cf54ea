// SPDX-License-Identifier: Apache-2.0
#include "base/model.hpp"

namespace stratagem {

Model::Model(const stg_model* model) {
  auto table = std::make_unique<stg_model>(read_table(model, STG_MODEL_MIN_SIZE, "stg_model"));
  const bool is_complete = table->replicate != nullptr && table->destroy_replica != nullptr && table->describe != nullptr &&
                           table->set_mode != nullptr && table->step != nullptr && table->backward != nullptr &&
                           table->release_graph != nullptr;
  if (!is_complete) {
    throw invalid_argument(
        "a model must have replicate, destroy_replica, describe, set_mode, step, backward and release_graph; one of them is null");
  }
  if (table->retain != nullptr) table->retain(table->self);
  table_ = {table.release(), [](const stg_model* owned) {
              if (owned->release != nullptr) owned->release(owned->self);
              delete owned;
            }};
}

}  // namespace stratagem
