// expert_capacity_test.cpp -- limited experts without peers, worked by hand.
#include "parallel/expert_capacity.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;

TEST_CASE("places are the factor times the mean, rounded up, and never more than there are slots", "[parallel][cpu]") {
  CHECK(expert_places(1, 12, 4) == 3);
  CHECK(expert_places(1.25, 12, 4) == 4);
  CHECK(expert_places(1.1, 40, 4) == 11);  // 1.1 * 10 is a little more than 11 in f64
  CHECK(expert_places(1.1, 41, 4) == 12);
  CHECK(expert_places(0.01, 12, 4) == 1);
  CHECK(expert_places(1e300, 12, 4) == 12);
  CHECK(expert_places(2, 0, 4) == 0);
}

TEST_CASE("an expert keeps its best offers, earlier tokens first of equals; the rest is rerouted by score, or dropped",
          "[parallel][cpu]") {
  test::Bench b;
  const auto group = solo();
  // Five tokens of one slot, three experts: two places each at factor 1. Scores 0.9, 0.5, 0.25 in the orders below.
  const double high = std::log(9.0), even = 0, low = -std::log(3.0), hair = high + 1e-9;
  const auto logits =
      b.of(DType::f64, {5, 3}, {even, high, low, high, even, low, hair, low, even, high, even, low, even, high, low});
  const auto bias = b.of(DType::f64, {3}, {0.5, 0, 0});  // 1.4 and 1.0 at expert 0: all five choose it
  const auto chosen = b.of(DType::i32, {5, 1}, {0, 0, 0, 0, 0}), experts = b.empty(DType::i32, {5, 1});
  LimitExperts limit{
      .logits = logits, .bias = bias, .rule = {}, .factor = 1, .reroute = true, .chosen = chosen, .experts = experts};
  SECTION("dropped") {
    limit.reroute = false;
    const Limited limited = limit_experts(b.context(), *group, limit);
    CHECK(test::values_of(experts) == std::vector<double>{double(~0), 0, 0, double(~0), double(~0)});
    CHECK(limited.dropped == 3);
    CHECK(limited.rerouted == 0);
  }
  SECTION("rerouted: expert 1 is next for all three, has two places, and gives them to 0.9 twice") {
    const Limited limited = limit_experts(b.context(), *group, limit);
    CHECK(test::values_of(experts) == std::vector<double>{1, 0, 0, 2, 1});
    CHECK(limited.dropped == 0);
    CHECK(limited.rerouted == 3);
  }
  SECTION("one place each: what finds none is dropped") {
    limit.factor = 0.5;
    const Limited limited = limit_experts(b.context(), *group, limit);
    CHECK(test::values_of(experts) == std::vector<double>{1, 0, 2, double(~0), double(~0)});
    CHECK(limited.dropped == 2);
    CHECK(limited.rerouted == 2);
  }
  SECTION("room for all: the choice stands") {
    limit.factor = 3;
    const Limited limited = limit_experts(b.context(), *group, limit);
    CHECK(test::values_of(experts) == test::values_of(chosen));
    CHECK(limited.dropped + limited.rerouted == 0);
  }
  CHECK(b.guards_hold());
}
