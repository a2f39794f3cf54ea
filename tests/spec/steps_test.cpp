// SPDX-License-Identifier: Apache-2.0
//
// docs/semantics.md, "Gradients": weights, accumulation, clipping.
#include "spec/instance.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;

namespace {

const std::string sgd = R"("optimizer": {"name": "sgd", "lr": 1})";

std::string config(size_t num_devices, const std::string& more = "") {
  return "{\"devices\": " + std::to_string(num_devices) + ", " + sgd + more + "}";
}

}  // namespace

TEST_CASE("the gradient of unequal shares is that of the whole batch") {
  const auto model = linear_model();
  Instance instance("data_parallel", config(2));
  instance.setup(*model);
  const StepOutcome outcome = instance.train(batch_of({0, 0, 3}));
  CHECK(instance.value("weight") == -1.0);
  CHECK(outcome.weights == std::vector<double>{2, 1});
  CHECK(outcome.update.total_weight == 3);
  CHECK(outcome.update.outcome == STG_UPDATE_DONE);
  CHECK(shape(*find(outcome.outputs.root(), "loss")).empty());
}

TEST_CASE("with compat lightning it is the mean over the shares") {
  const auto model = linear_model();
  Instance instance("data_parallel", config(2, R"(, "options": {"compat": "lightning"})"));
  instance.setup(*model);
  instance.train(batch_of({0, 0, 3}));
  CHECK(instance.value("weight") == -1.5);
}
