// SPDX-License-Identifier: Apache-2.0
//
// The thread that copies an announced batch, without LibTorch, so that ThreadSanitizer can watch it.
#include <thread>
#include <utility>

#include "base/dlpack.hpp"
#include "base/error.hpp"
#include "strategy/announced.hpp"
#include "support/catch.hpp"

using namespace stratagem;

namespace {

// {"x": (n,) float32 that counts up from `first`}
Tree batch_from(float first, int64_t num_rows) {
  TensorPtr tensor = allocate_tensor(float32, {num_rows});
  for (int64_t i = 0; i < num_rows; ++i) first_element<float>(tensor->view)[i] = first + static_cast<float>(i);
  Dict dict;
  dict.emplace_back("x", std::move(tensor));
  return make_tree(std::move(dict));
}

}  // namespace

TEST_CASE("a batch is copied by a thread or by the step that comes before it, with the same shares") {
  const SplitOptions options{3, false, float64};
  AnnouncedBatches announced(true, 0);
  uint64_t latest = announced.announce(batch_from(0, 7), {0, 0}, options);
  for (int i = 0; i < 2000; ++i) {
    // As a host does: the next one is announced before the step of this one.
    const uint64_t next = announced.announce(batch_from(static_cast<float>(i + 1), 7), {0, i + 1}, options);
    const uint64_t ticket = std::exchange(latest, next);
    for (int pause = 0; pause < i % 64; ++pause) std::this_thread::yield();
    if (i % 5 == 0) continue;  // the next one but one replaces it, whatever the thread is at
    const AnnouncedBatches::Taken taken = announced.take(ticket, {0, i});
    REQUIRE(taken.shares.has_value());
    REQUIRE(taken.shares->num_rows == std::vector<double>{3, 2, 2});
    int row = 0;
    for (const Tree& share : taken.shares->trees) {
      const stg_tensor_view& view = find(share.root(), "x")->as.tensor->view;
      REQUIRE(same_dtype(view.dtype, float64));
      for (int64_t k = 0; k < view.shape[0]; ++k) REQUIRE(first_element<double>(view)[k] == i + row++);
    }
  }
}

TEST_CASE("a thread may end with a batch that it has not begun, is at, or has done") {
  const SplitOptions options{2, false, float64};
  for (int i = 0; i < 200; ++i) {
    AnnouncedBatches announced(true, 0);
    for (int k = 0; k <= i % 3; ++k) announced.announce(batch_from(0, 1000), {0, 0}, options);
    for (int pause = 0; pause < i; ++pause) std::this_thread::yield();
  }
}

TEST_CASE("what the thread finds wrong with a batch is thrown where it is taken") {
  AnnouncedBatches announced(true, 0);
  for (int i = 0; i < 200; ++i) {
    Dict dict;
    dict.emplace_back("x", allocate_tensor(float32, {3}));
    dict.emplace_back("y", allocate_tensor(float32, {2}));
    const uint64_t ticket = announced.announce(make_tree(std::move(dict)), {0, 0}, SplitOptions{2, false, float64});
    for (int pause = 0; pause < i; ++pause) std::this_thread::yield();
    CHECK_THROWS_WITH(announced.take(ticket, {0, 0}), Catch::Contains("[\"x\"]") && Catch::Contains("[\"y\"]"));
  }
}
