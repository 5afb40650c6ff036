// capacity_test.cpp -- holds offers, the counting of their keys and the taking of the best to cases worked by hand.
#include "ops/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"

using namespace moetrain;
using test::Bench;
using test::difference;
using test::values_of;

namespace {

const double kNone = std::numeric_limits<double>::quiet_NaN();

// Logits whose sigmoids are 0.9, 0.75, 0.5, 0.25.
const double kA = std::log(9.0), kB = std::log(3.0), kC = 0, kD = -std::log(3.0);

bool is_none(double score) { return std::isnan(score); }

// The same numbers, and none at the same places.
bool same(const std::vector<double>& a, const std::vector<double>& b, double bound = 0) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [&](double x, double y) {
    return x == y || std::abs(x - y) <= bound || (is_none(x) && is_none(y));
  });
}

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

TEST_CASE("offers on CUDA are those of the CPU, and of the same scores the same are counted and taken", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Case {
    std::int64_t T, E, K, groups, top_groups;
  };
  double offered_again = 0;
  int some_of_equals = 0;
  for (const auto& c : {Case{1, 1, 1, 1, 1}, Case{0, 5, 2, 1, 1}, Case{7, 13, 3, 1, 1}, Case{31, 31, 31, 1, 1},
                        Case{40, 40, 33, 1, 1}, Case{257, 129, 16, 1, 1}, Case{300, 256, 8, 8, 4}, Case{50, 12, 3, 12, 5},
                        Case{9, 500, 10, 100, 7}, Case{5000, 896, 16, 1, 1}, Case{700, 1024, 32, 4, 2}, Case{131072, 24, 16, 1, 1}}) {
    CAPTURE(c.T, c.E, c.K, c.groups, c.top_groups);
    Bench b(3);
    test::DeviceBench d;
    // Coarse values, as in router_test.cpp: many ties, and what is none is more than a rounding apart.
    const auto logits = b.filled(DType::f32, {c.T, c.E},
                                 [](std::int64_t i) { return 0.03 + std::round(8 * ops::normal(5, 0, std::uint64_t(i))) / 8; });
    if (c.T > 5) Bench::set(logits, 5 * c.E + c.E / 2, NAN);
    const std::int64_t of_one_bias = c.groups > 1 ? c.E / c.groups : 1;
    const auto bias = b.filled(DType::f32, {c.E}, [&](std::int64_t e) { return double(e / of_one_bias % 3) / 8; });
    const ops::RouterRule rule{.groups = c.groups, .top_groups = c.top_groups};
    const auto chosen = b.empty(DType::i32, {c.T, c.K}), weights = b.empty(DType::f32, {c.T, c.K});
    ops::router(b.context(),
                ops::RouterForward{.logits = logits, .bias = bias, .rule = rule, .experts = chosen, .weights = weights});
    const auto experts = b.empty(DType::i32, {c.T, c.K}), scores = b.empty(DType::f32, {c.T, c.K}),
               counts = b.empty(DType::i64, {c.E});
    const auto logits_there = d.copy(logits), bias_there = d.copy(bias), chosen_there = d.copy(chosen),
               experts_there = d.empty(DType::i32, {c.T, c.K}), scores_there = d.empty(DType::f32, {c.T, c.K}),
               counts_there = d.empty(DType::i64, {c.E});
    std::vector<double> room(std::size_t(c.E));
    for (std::size_t e = 0; e < room.size(); ++e) room[e] = double(c.T * c.K) / double(c.E) * double(e % 4) / 2;
    for (int round = 0; round < 4; ++round) {
      CAPTURE(round);
      const auto room_here = b.of(DType::i64, {c.E}, room), room_there = d.copy(room_here);
      ops::offer_slots(b.context(), ops::OfferSlots{.logits = logits,
                                                    .bias = bias,
                                                    .rule = rule,
                                                    .chosen = chosen,
                                                    .room = round > 0 ? room_here : Tensor{},
                                                    .experts = experts,
                                                    .scores = scores,
                                                    .counts = counts});
      ops::offer_slots(d.context(), ops::OfferSlots{.logits = logits_there,
                                                    .bias = bias_there,
                                                    .rule = rule,
                                                    .chosen = chosen_there,
                                                    .room = round > 0 ? room_there : Tensor{},
                                                    .experts = experts_there,
                                                    .scores = scores_there,
                                                    .counts = counts_there});
      CHECK(values_of(d.to_host(b, experts_there)) == values_of(experts));
      CHECK(values_of(d.to_host(b, counts_there)) == values_of(counts));
      const auto from_there = d.to_host(b, scores_there);
      CHECK(same(values_of(from_there), values_of(scores), 1e-6));

      // From here on the scores are the device's. Experts with more offers than room take some: the last key is that of the offer
      // in the last place, but for every other row, where it is one that most have.
      const auto offers = values_of(counts), score = values_of(from_there), mine = values_of(experts);
      std::vector<double> row_of(std::size_t(c.E), -1), last, ties;
      for (std::size_t e = 0; e < row_of.size(); ++e) {
        if (!(offers[e] > std::floor(room[e]))) continue;
        std::vector<double> keys;
        for (std::size_t i = 0; i < mine.size(); ++i)
          if (!is_none(score[i]) && mine[i] == double(e))
            keys.push_back(std::clamp(std::floor(score[i] * 65536 + 0.5), -0x1p31, 0x1p31 - 1) + 0x1p31);
        std::sort(keys.begin(), keys.end(), std::greater<>());
        row_of[e] = double(last.size());
        last.push_back(keys[std::size_t(std::max(std::floor(room[e]) - 1, 0.0)) / (last.size() % 2 + 1)]);
        const auto above = std::count_if(keys.begin(), keys.end(), [&](double key) { return key > last.back(); });
        ties.push_back(std::floor(room[e]) - double(above));
        some_of_equals += ties.back() > 0 && ties.back() < double(std::count(keys.begin(), keys.end(), last.back()));
        if (round > 0) offered_again += offers[e];
      }
      const auto n = std::int64_t(last.size());
      const auto rows = b.of(DType::i64, {c.E}, row_of), rows_there = d.copy(rows);
      for (std::int64_t known = 0; known < ops::kKeyBytes; ++known) {
        const auto leading = b.filled(DType::i64, {n}, [&](std::int64_t i) {
          return double(std::int64_t(last[std::size_t(i)]) >> 8 * (ops::kKeyBytes - known));
        });
        const auto want = b.empty(DType::i64, {n, ops::kKeyBins}), there = d.empty(DType::i64, {n, ops::kKeyBins});
        ops::offer_histogram(b.context(), ops::OfferHistogram{.experts = experts,
                                                              .scores = from_there,
                                                              .row_of = rows,
                                                              .leading = leading,
                                                              .known = known,
                                                              .histogram = want});
        ops::offer_histogram(d.context(), ops::OfferHistogram{.experts = experts_there,
                                                              .scores = scores_there,
                                                              .row_of = rows_there,
                                                              .leading = d.copy(leading),
                                                              .known = known,
                                                              .histogram = there});
        CHECK(values_of(d.to_host(b, there)) == values_of(want));
      }
      const auto last_here = b.of(DType::i64, {n}, last), ties_here = b.of(DType::i64, {n}, ties);
      const auto again = d.copy(experts), last_there = d.copy(last_here), ties_there = d.copy(ties_here);
      ops::take_offers(b.context(), ops::TakeOffers{.chosen = chosen,
                                                    .scores = from_there,
                                                    .row_of = rows,
                                                    .last = last_here,
                                                    .ties = ties_here,
                                                    .experts = experts});
      for (const Tensor to : {experts_there, again})
        ops::take_offers(d.context(), ops::TakeOffers{.chosen = chosen_there,
                                                      .scores = scores_there,
                                                      .row_of = rows_there,
                                                      .last = last_there,
                                                      .ties = ties_there,
                                                      .experts = to});
      CHECK(values_of(d.to_host(b, experts_there)) == values_of(experts));
      CHECK(values_of(d.to_host(b, again)) == values_of(experts));
      const auto left = values_of(experts);
      for (std::size_t i = 0; i < left.size(); ++i)
        if (!is_none(score[i]) && left[i] >= 0) --room[std::size_t(left[i])];
      for (double& places : room) places = std::max(std::floor(places), 0.0);
    }
    CHECK((b.guards_hold() && d.guards_hold()));
  }
  CHECK((offered_again > 0 && some_of_equals > 100));
}
