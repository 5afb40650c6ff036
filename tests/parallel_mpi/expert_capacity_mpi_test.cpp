// expert_capacity_mpi_test.cpp -- limited experts over ranks give every slot what one list of all tokens, sorted, gives it.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "ops/cpu/expert_choice.h"
#include "ops/random.h"
#include "parallel/expert_capacity.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;
using test::Bench;

namespace {

struct Case {
  std::int64_t E, K;
  ops::RouterRule rule;
  double factor;
  bool reroute;
  double steps;  // logits are multiples of 1 / steps: few steps, many equal scores
  double skew;   // of the bias towards the first experts
  DType dtype;
};

// All tokens at once: offers sorted as a whole, round after round.
struct Reference {
  std::vector<double> experts;
  Limited limited;
};
Reference reference(const Case& c, ConstTensor logits, ConstTensor bias, ConstTensor chosen) {
  const std::int64_t T = logits.shape[0], E = c.E, K = c.K;
  const auto score = [&](std::int64_t t, std::int64_t e) {
    const double logit = Bench::get(logits, t * E + e), b = Bench::get(bias, e);
    return c.dtype == DType::f64 ? ops::cpu::biased_score(logit, b) : double(ops::cpu::biased_score(float(logit), float(b)));
  };
  const auto groups_of = [&](std::int64_t t) {
    std::vector<std::pair<double, std::int64_t>> groups;
    for (std::int64_t g = 0; g < c.rule.groups; ++g) {
      std::vector<double> s;
      for (std::int64_t e = g * E / c.rule.groups; e < (g + 1) * E / c.rule.groups; ++e) s.push_back(-score(t, e));
      std::sort(s.begin(), s.end());
      groups.emplace_back(s[0] + (s.size() > 1 ? s[1] : 0), g);
    }
    std::sort(groups.begin(), groups.end());
    std::vector<std::int64_t> kept;
    for (std::int64_t i = 0; i < c.rule.top_groups; ++i) kept.push_back(groups[std::size_t(i)].second);
    return kept;
  };
  struct Offer {
    double score;
    std::int64_t slot, expert;
  };
  std::vector<Offer> offers;
  std::vector<double> got(std::size_t(T * K), -1);
  for (std::int64_t i = 0; i < T * K; ++i) {
    const auto e = std::int64_t(Bench::get(chosen, i));
    offers.push_back({score(i / K, e), i, e});
  }
  std::vector<std::int64_t> room(std::size_t(E), std::int64_t(std::ceil(c.factor * double(T * K) / double(E) - 1e-9)));
  Limited limited;
  for (bool first = true; !offers.empty(); first = false) {
    std::sort(offers.begin(), offers.end(), [](const Offer& a, const Offer& b) {
      const double x = std::floor(a.score * 65536 + 0.5), y = std::floor(b.score * 65536 + 0.5);
      return x > y || (x == y && a.slot < b.slot);
    });
    for (const Offer& o : offers)
      if (room[std::size_t(o.expert)] > 0) {
        --room[std::size_t(o.expert)];
        got[std::size_t(o.slot)] = double(o.expert);
        limited.rerouted += !first;
      }
    offers.clear();
    if (!c.reroute) break;
    for (std::int64_t t = 0; t < T; ++t) {
      const auto kept = groups_of(t);
      std::vector<std::pair<double, std::int64_t>> next;
      for (std::int64_t e = 0; e < E; ++e) {
        const auto* mine = &got[std::size_t(t * K)];
        const bool in_group = std::find(kept.begin(), kept.end(), e / (E / c.rule.groups)) != kept.end();
        if (in_group && room[std::size_t(e)] > 0 && std::find(mine, mine + K, double(e)) == mine + K)
          next.emplace_back(-score(t, e), e);
      }
      std::sort(next.begin(), next.end());
      std::size_t n = 0;
      for (std::int64_t k = 0; k < K && n < next.size(); ++k)
        if (got[std::size_t(t * K + k)] < 0) {
          offers.push_back({-next[n].first, t * K + k, next[n].second});
          ++n;
        }
    }
  }
  for (std::int64_t i = 0; i < T * K; ++i)
    if (got[std::size_t(i)] < 0) {
      got[std::size_t(i)] = double(~std::int32_t(Bench::get(chosen, i)));
      ++limited.dropped;
    }
  return {got, limited};
}

}  // namespace

TEST_CASE("limited experts over ranks with unequal tokens give every slot what one sorted list of all gives it",
          "[parallel][mpi]") {
  const auto world = mpi_world();
  const int n = world->size(), me = world->rank();
  std::vector<std::int64_t> first{0};  // tokens of the ranks: 13, 0, 29, 5, ...
  for (int r = 0; r < n; ++r) first.push_back(first.back() + std::vector<std::int64_t>{13, 0, 29, 5}[std::size_t(r % 4)]);
  const std::int64_t T = first.back();
  std::int64_t rerouted = 0, dropped_despite = 0, ties = 0;
  for (const Case& c : {Case{8, 2, {}, 1, true, 1e6, 0, DType::f64}, Case{8, 2, {}, 1, false, 1e6, 0.3, DType::f64},
                        Case{8, 3, {}, 1.25, true, 2, 0.5, DType::f32}, Case{8, 3, {}, 0.7, true, 1, 2, DType::f32},
                        Case{12, 4, {.groups = 4, .top_groups = 2}, 1, true, 3, 1, DType::f64},
                        Case{5, 5, {}, 0.5, true, 2, 0, DType::f64}, Case{6, 1, {}, 1, true, 0.01, 9, DType::f32},
                        Case{16, 2, {}, 0.01, false, 4, 9, DType::f64}, Case{9, 2, {}, 50, true, 4, 9, DType::f64}}) {
    CAPTURE(c.E, c.K, c.factor, c.reroute, c.skew, me);
    Bench b(11);
    const auto logits = b.filled(
        c.dtype, {T, c.E}, [&](std::int64_t i) { return std::round(c.steps * ops::normal(5, 1, std::uint64_t(i))) / c.steps; });
    const auto bias = b.filled(c.dtype, {c.E}, [&](std::int64_t e) { return c.skew / double(e + 1); });
    const auto chosen = b.empty(DType::i32, {T, c.K}), weights = b.empty(c.dtype, {T, c.K});
    ops::router(b.context(),
                ops::RouterForward{.logits = logits, .bias = bias, .rule = c.rule, .experts = chosen, .weights = weights});
    const Reference want = reference(c, logits, bias, chosen);
    const auto limited = [&](Communicator& group, std::int64_t begin, std::int64_t end, Tensor experts) {
      return limit_experts(b.context(), group,
                           {.logits = logits.rows(begin, end),
                            .bias = bias,
                            .rule = c.rule,
                            .factor = c.factor,
                            .reroute = c.reroute,
                            .chosen = chosen.rows(begin, end),
                            .experts = experts});
    };
    const auto alone = b.empty(DType::i32, {T, c.K});
    const auto group = solo();
    const Limited by_one = limited(*group, 0, T, alone);
    CHECK(test::values_of(alone) == want.experts);
    CHECK((by_one.dropped == want.limited.dropped && by_one.rerouted == want.limited.rerouted));

    const std::int64_t begin = first[std::size_t(me)], end = first[std::size_t(me) + 1];
    const auto mine = b.empty(DType::i32, {end - begin, c.K});
    const Limited by_all = limited(*world, begin, end, mine);
    CHECK(test::values_of(mine) == test::values_of(ConstTensor(alone).rows(begin, end)));
    CHECK((by_all.dropped == by_one.dropped && by_all.rerouted == by_one.rerouted));
    CHECK(b.guards_hold());
    rerouted += by_one.rerouted;
    if (c.reroute && c.factor >= 1) dropped_despite += by_one.dropped;
    ties += c.steps < 1 && by_one.rerouted > 0;
  }
  CHECK((rerouted > 0 && ties > 0));
  CHECK(dropped_despite > 0);  // groups leave a token fewer experts than there is room for
}
