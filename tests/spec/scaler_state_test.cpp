// SPDX-License-Identifier: Apache-2.0
//
// The loss scale of 16-mixed as a part of states and checkpoints.
#include <cmath>

#include "spec/checkpoint_folder.hpp"
#include "spec/scaler.hpp"
#include "support/catch.hpp"

using namespace stratagem;
using namespace stratagem::test;
using Catch::Contains;

TEST_CASE("a count of good updates beyond what doubles the scale doubles it at the next") {
  const auto model = linear_model();
  Instance instance("single_device", sgd_config(1, mixed));
  instance.setup(*model);
  instance.import_state(with_scaler(instance.export_state(), 1024, INT64_MAX));
  CHECK(instance.train(batch_of({1})).update.loss_scale == 2048);
  CHECK(good_steps_in(instance.export_state()) == 0);
}

TEST_CASE("the scaler is part of the state: a run that goes on from it, under another strategy too, scales as an unbroken one") {
  const auto model = linear_model();
  Instance whole("single_device", sgd_config(1, mixed));
  whole.setup(*model);
  whole.train(batch_of({3e38, 1}));
  whole.train(batch_of({1, 2}));
  whole.train(batch_of({1, 2}));
  Tree state = whole.export_state();
  CHECK(scale_in(state) == 32768);
  CHECK(good_steps_in(state) == 2);  // good updates since, not attempts
  Instance other("data_parallel", sgd_config(2, mixed));
  other.setup(&model->table, STG_STAGE_FIT, std::move(state));
  CHECK(scale_in(other.export_state()) == 32768);
  for (Instance* instance : {&whole, &other}) CHECK(instance->train(batch_of({1, 4})).update.loss_scale == 32768);
  CHECK(good_steps_in(other.export_state()) == 3);
  CHECK(model_bytes(other.export_state()) == model_bytes(whole.export_state()));

  const TemporaryFolder folder;
  save(whole, folder.path / "checkpoint");
  Instance loaded("data_parallel", sgd_config(2, mixed));
  loaded.setup(*model);
  load(loaded, folder.path / "checkpoint");
  CHECK(scale_in(loaded.export_state()) == 32768);
  CHECK(good_steps_in(loaded.export_state()) == 3);
}

TEST_CASE("a state without a scaler, or with one that the run has no use for, is reported and taken") {
  const auto model = linear_model();
  Instance scaled("single_device", sgd_config(1, mixed));
  Instance plain("single_device", sgd_config(1));
  scaled.setup(*model);
  plain.setup(*model);
  scaled.import_state(with_scaler(scaled.export_state(), 8, 7));
  for (const uint64_t flags : {uint64_t{0}, uint64_t{STG_IMPORT_STRICT}}) {
    const Tree missing = scaled.import_state(plain.export_state(), flags);
    CHECK(text_of(find(missing.root(), "missing")->as.items[0]) == "scaler");
    CHECK(scale_in(scaled.export_state()) == 8);
  }

  const Tree unused = plain.import_state(scaled.export_state());
  CHECK(text_of(find(unused.root(), "unknown_keys")->as.items[0]) == "scaler");
  CHECK(find(unused.root(), "missing")->count == 0);
  CHECK(find(plain.export_state().root(), "scaler")->type == STG_NONE);
  // What evaluates has no use for an optimizer either, and says nothing.
  Instance evaluates("single_device", sgd_config(1, mixed));
  evaluates.setup(*model, STG_STAGE_VALIDATE);
  CHECK(find(evaluates.import_state(scaled.export_state()).root(), "unknown_keys")->count == 0);
  CHECK(find(evaluates.import_state(plain.export_state()).root(), "missing")->count == 0);
}

TEST_CASE("a scaler that can't be one is an error that says why, and changes nothing") {
  const auto model = linear_model();
  Instance instance("single_device", sgd_config(1, mixed));
  instance.setup(*model);
  const auto refusal = [&](double scale, int64_t good_steps) {
    return error_of([&] { instance.import_state(with_scaler(instance.export_state(), scale, good_steps), 0); }).message;
  };
  for (const double scale : {0.0, -1.0, HUGE_VAL, std::nan(""), 1e-9})
    CHECK_THAT(refusal(scale, 0), Contains("scaler.scale is "));
  CHECK_THAT(refusal(1, -1), Contains("good_steps"));
  CHECK(scale_in(instance.export_state()) == 65536);
}
