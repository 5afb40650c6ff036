// capacity_test.cpp -- holds offers, the counting of their keys and the taking of the best to cases worked by hand.
#include "ops/capacity.h"

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using test::Bench;
using test::difference;
using test::values_of;

namespace {

const double kNone = std::numeric_limits<double>::quiet_NaN();

// Logits whose sigmoids are 0.9, 0.75, 0.5, 0.25.
const double kA = std::log(9.0), kB = std::log(3.0), kC = 0, kD = -std::log(3.0);

bool is_none(double score) { return std::isnan(score); }

}  // namespace

TEST_CASE("slots offer themselves to their expert, dropped ones to the next-best with room that their token does not hold",
          "[ops][cpu]") {
  Bench b;
  const auto logits = b.of(DType::f64, {3, 4}, {kA, kB, kC, kD, kA, kC, kB, kD, kD, kA, kB, kC});
  const auto bias = b.of(DType::f64, {4}, {0, 0, 0, 0.1});
  const auto chosen = b.of(DType::i32, {3, 2}, {0, 1, 0, 2, 1, 2});
  const auto experts = b.empty(DType::i32, {3, 2}), scores = b.empty(DType::f64, {3, 2}), counts = b.empty(DType::i64, {4});
  const auto offer = [&](ConstTensor room, const ops::RouterRule& rule = {}) {
    ops::offer_slots(b.context(), ops::OfferSlots{.logits = logits,
                                                  .bias = bias,
                                                  .rule = rule,
                                                  .chosen = chosen,
                                                  .room = room,
                                                  .experts = experts,
                                                  .scores = scores,
                                                  .counts = counts});
  };
  offer({});
  CHECK(values_of(experts) == values_of(chosen));
  CHECK(values_of(counts) == std::vector<double>{2, 2, 2, 0});
  CHECK(difference(values_of(scores), {0.9, 0.75, 0.9, 0.75, 0.9, 0.75}, 1e-14) == "");

  auto* e = experts.as<std::int32_t>();
  e[1] = ~1, e[2] = ~0, e[3] = ~2;  // token 0 lost its second slot, token 1 both
  SECTION("two experts have room") {
    offer(b.of(DType::i64, {4}, {0, 0, 3, 1}));
    CHECK(values_of(experts) == std::vector<double>{0, 2, 2, 3, 1, 2});
    CHECK(values_of(counts) == std::vector<double>{0, 0, 2, 1});
    const auto s = values_of(scores);
    CHECK(difference({s[1], s[2], s[3]}, {0.5, 0.75, 0.35}, 1e-14) == "");
    CHECK((is_none(s[0]) && is_none(s[4]) && is_none(s[5])));
  }
  SECTION("one expert is left for two slots") {
    offer(b.of(DType::i64, {4}, {0, 0, 0, 1}));
    CHECK(values_of(experts) == std::vector<double>{0, 3, 3, double(~2), 1, 2});
    CHECK(values_of(counts) == std::vector<double>{0, 0, 0, 2});
    CHECK(is_none(values_of(scores)[3]));
  }
  SECTION("no expert outside the best group of the token") {
    offer(b.of(DType::i64, {4}, {0, 1, 1, 1}), {.groups = 2, .top_groups = 1});  // {0, 1} is the best of tokens 0 and 1
    CHECK(values_of(experts) == std::vector<double>{0, 1, 1, double(~2), 1, 2});
  }
  CHECK(b.guards_hold());
}

TEST_CASE("keys are counted byte by byte in the order of scores, and the best offers are taken, earlier ones first", "[ops][cpu]") {
  Bench b;
  // To expert 2: 0.5, 2, 0.5, -1, 0.5; to expert 0: 3; slot (1, 0) offers nothing.
  const auto experts = b.of(DType::i32, {4, 2}, {2, 0, 1, 2, 2, 2, 2, double(~1)});
  const auto chosen = b.of(DType::i32, {4, 2}, {2, 0, 1, 3, 2, 3, 2, 1});
  const auto scores = b.of(DType::f32, {4, 2}, {0.5, 3, kNone, 2, 0.5, -1, 0.5, kNone});
  const auto row_of = b.of(DType::i64, {4}, {-1, -1, 0, -1}), leading = b.of(DType::i64, {1}, {0});
  const auto histogram = b.empty(DType::i64, {1, 256});
  const auto count = [&](std::int64_t known) {
    ops::offer_histogram(
        b.context(),
        ops::OfferHistogram{
            .experts = experts, .scores = scores, .row_of = row_of, .leading = leading, .known = known, .histogram = histogram});
  };
  count(0);  // the keys of 0.5, 2 and -1: 80008000, 80020000, 7fff0000
  auto bins = values_of(histogram);
  CHECK((bins[0x7f] == 1 && bins[0x80] == 4));
  double sum = 0;
  for (const double n : bins) sum += n;
  CHECK(sum == 5);
  leading.as<std::int64_t>()[0] = 0x80;
  count(1);
  bins = values_of(histogram);
  sum = 0;
  for (const double n : bins) sum += n;
  CHECK((bins[0x00] == 3 && bins[0x02] == 1 && sum == 4));

  const auto last = b.of(DType::i64, {1}, {double(0x80008000)}), ties = b.of(DType::i64, {1}, {2});
  ops::take_offers(
      b.context(),
      ops::TakeOffers{.chosen = chosen, .scores = scores, .row_of = row_of, .last = last, .ties = ties, .experts = experts});
  CHECK(values_of(experts) == std::vector<double>{2, 0, 1, 2, 2, double(~3), double(~2), double(~1)});
  CHECK(values_of(ties) == std::vector<double>{2});
  CHECK(b.guards_hold());
}

TEST_CASE("offers of no token and of wrong shapes: nothing happens, and each is refused", "[ops][cpu]") {
  Bench b;
  const auto bias = b.zeros(DType::f32, {3});
  ops::OfferSlots offer{.logits = b.empty(DType::f32, {0, 3}),
                        .bias = bias,
                        .rule = {},
                        .chosen = b.empty(DType::i32, {0, 2}),
                        .room = {},
                        .experts = b.empty(DType::i32, {0, 2}),
                        .scores = b.empty(DType::f32, {0, 2}),
                        .counts = b.empty(DType::i64, {3})};
  ops::offer_slots(b.context(), offer);
  CHECK(values_of(offer.counts) == std::vector<double>{0, 0, 0});

  auto wrong = offer;
  wrong.counts = b.empty(DType::i64, {4});
  CHECK_THROWS_AS(ops::offer_slots(b.context(), wrong), Error);
  wrong = offer;
  wrong.scores = b.empty(DType::f64, {0, 2});
  CHECK_THROWS_AS(ops::offer_slots(b.context(), wrong), Error);
  wrong = offer;
  wrong.room = b.empty(DType::i64, {2});
  CHECK_THROWS_AS(ops::offer_slots(b.context(), wrong), Error);
  wrong = offer;
  wrong.logits = b.zeros(DType::f32, {1, 3});
  wrong.chosen = b.of(DType::i32, {1, 2}, {0, 3});
  wrong.experts = b.empty(DType::i32, {1, 2});
  wrong.scores = b.empty(DType::f32, {1, 2});
  CHECK_THROWS_AS(ops::offer_slots(b.context(), wrong), Error);  // there is no expert 3

  ops::OfferHistogram histogram{.experts = offer.experts,
                                .scores = offer.scores,
                                .row_of = b.zeros(DType::i64, {3}),
                                .leading = b.zeros(DType::i64, {2}),
                                .known = 4,
                                .histogram = b.empty(DType::i64, {2, 256})};
  CHECK_THROWS_AS(ops::offer_histogram(b.context(), histogram), Error);  // a key has four bytes
  histogram.known = 3;
  ops::offer_histogram(b.context(), histogram);
  CHECK(values_of(histogram.histogram) == std::vector<double>(512, 0));
}
