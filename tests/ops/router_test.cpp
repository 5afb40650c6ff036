// router_test.cpp -- holds the choice of experts and its gradient to hand-worked rows, a full sort, and slopes.
#include "ops/router.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"

using namespace moetrain;
using test::Bench;
using test::difference;

namespace {

const double kLog3 = std::log(3.0), kLog9 = std::log(9.0);  // sigmoid 0.75 and 0.9

}  // namespace

TEST_CASE("router chooses by biased score and weighs by the score without bias, worked by hand", "[ops][cpu]") {
  Bench b;
  const auto logits = b.of(DType::f64, {1, 4}, {0, kLog3, -kLog3, kLog9}), bias = b.of(DType::f64, {4}, {0, 0, 0.6, 0});
  const auto experts = b.empty(DType::i32, {1, 2}), weights = b.empty(DType::f64, {1, 2}), cutoff = b.empty(DType::f64, {1});
  SECTION("renormalised and scaled") {
    ops::router(
        b.context(),
        ops::RouterForward{
            .logits = logits, .bias = bias, .rule = {.scaling = 2}, .experts = experts, .weights = weights, .cutoff = cutoff});
    CHECK(difference(test::values_of(weights), {2 * 0.9 / 1.15, 2 * 0.25 / 1.15}, 1e-14) == "");
  }
  SECTION("not renormalised") {
    ops::router(b.context(), ops::RouterForward{.logits = logits,
                                                .bias = bias,
                                                .rule = {.renormalize = false, .scaling = 3},
                                                .experts = experts,
                                                .weights = weights,
                                                .cutoff = cutoff});
    CHECK(difference(test::values_of(weights), {2.7, 0.75}, 1e-14) == "");
  }
  CHECK(test::values_of(experts) == std::vector<double>{3, 2});
  CHECK(difference(test::values_of(cutoff), {0.75}, 1e-14) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("router gives ties to the lower expert and -infinity as cutoff when every expert is chosen", "[ops][cpu]") {
  Bench b;
  const auto logits = b.of(DType::f32, {2, 5}, {1, 1, 1, 1, 1, -1, 2, -1, 2, 2}), bias = b.zeros(DType::f32, {5});
  SECTION("three of five") {
    const auto experts = b.empty(DType::i32, {2, 3}), weights = b.empty(DType::f32, {2, 3}), cutoff = b.empty(DType::f32, {2});
    ops::router(
        b.context(),
        ops::RouterForward{.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights, .cutoff = cutoff});
    CHECK(test::values_of(experts) == std::vector<double>{0, 1, 2, 1, 3, 4});
    CHECK(difference(test::values_of(cutoff), {1 / (1 + std::exp(-1.0)), 1 / (1 + std::exp(1.0))}, 1e-6) == "");
  }
  SECTION("five of five") {
    const auto experts = b.empty(DType::i32, {2, 5}), weights = b.empty(DType::f32, {2, 5}), cutoff = b.empty(DType::f32, {2});
    ops::router(
        b.context(),
        ops::RouterForward{.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights, .cutoff = cutoff});
    CHECK(test::values_of(experts) == std::vector<double>{0, 1, 2, 3, 4, 1, 3, 4, 0, 2});
    for (const double c : test::values_of(cutoff)) CHECK((std::isinf(c) && c < 0));
  }
  CHECK(b.guards_hold());
}

TEST_CASE("router chooses only inside the groups whose two best experts sum highest", "[ops][cpu]") {
  Bench b;
  // biased scores: group 0 (0.9, 0.1), group 1 (0.6, 0.5), group 2 (0.7, 0.4 - 1e-3), so groups 1 and 2 are kept, expert 0 is not
  const std::vector<double> scores{0.9, 0.1, 0.6, 0.5, 0.7, 0.399};
  const auto logits = b.zeros(DType::f64, {1, 6});
  const auto bias = b.filled(DType::f64, {6}, [&](std::int64_t e) { return scores[std::size_t(e)] - 0.5; });
  const auto experts = b.empty(DType::i32, {1, 3}), weights = b.empty(DType::f64, {1, 3}), cutoff = b.empty(DType::f64, {1});
  ops::router(b.context(), ops::RouterForward{.logits = logits,
                                              .bias = bias,
                                              .rule = {.groups = 3, .top_groups = 2},
                                              .experts = experts,
                                              .weights = weights,
                                              .cutoff = cutoff});
  CHECK(test::values_of(experts) == std::vector<double>{4, 2, 3});
  CHECK(difference(test::values_of(cutoff), {0.399}, 1e-12) == "");
  SECTION("a full choice in the kept groups leaves no cutoff, and equal groups go to the lower") {
    const auto flat = b.zeros(DType::f64, {6});
    const auto all = b.empty(DType::i32, {1, 4}), w = b.empty(DType::f64, {1, 4});
    ops::router(b.context(), ops::RouterForward{.logits = logits,
                                                .bias = flat,
                                                .rule = {.groups = 3, .top_groups = 2},
                                                .experts = all,
                                                .weights = w,
                                                .cutoff = cutoff});
    CHECK(test::values_of(all) == std::vector<double>{0, 1, 2, 3});
    CHECK(Bench::get(cutoff, 0) == -std::numeric_limits<double>::infinity());
  }
  SECTION("groups of one expert") {
    const auto one = b.empty(DType::i32, {1, 2}), w = b.empty(DType::f64, {1, 2});
    ops::router(
        b.context(),
        ops::RouterForward{.logits = logits, .bias = bias, .rule = {.groups = 6, .top_groups = 2}, .experts = one, .weights = w});
    CHECK(test::values_of(one) == std::vector<double>{0, 4});
  }
  CHECK(b.guards_hold());
}

TEST_CASE("router agrees with a full stable sort at odd sizes", "[ops][cpu]") {
  struct Size {
    std::int64_t T, E, K;
  };
  for (const auto [T, E, K] : {Size{1, 1, 1}, Size{7, 13, 3}, Size{0, 5, 2}, Size{257, 129, 16}, Size{31, 31, 31}, Size{3, 8, 7}}) {
    CAPTURE(T, E, K);
    Bench b(3);
    // coarse values make ties frequent
    const auto logits =
        b.filled(DType::f64, {T, E}, [&](std::int64_t i) { return std::round(2 * ops::normal(5, 0, std::uint64_t(i))) / 2; });
    const auto bias = b.filled(DType::f64, {E}, [](std::int64_t e) { return double(e % 3) / 8; });
    const auto experts = b.empty(DType::i32, {T, K}), weights = b.empty(DType::f64, {T, K}), cutoff = b.empty(DType::f64, {T});
    ops::router(
        b.context(),
        ops::RouterForward{.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights, .cutoff = cutoff});
    for (std::int64_t t = 0; t < T; ++t) {
      std::vector<std::int64_t> order(static_cast<std::size_t>(E));
      std::iota(order.begin(), order.end(), 0);
      auto score = [&](std::int64_t e) { return 1 / (1 + std::exp(-Bench::get(logits, t * E + e))) + Bench::get(bias, e); };
      std::stable_sort(order.begin(), order.end(), [&](auto x, auto y) { return score(x) > score(y); });
      bool same = true;
      for (std::int64_t k = 0; k < K; ++k) same = same && std::int64_t(Bench::get(experts, t * K + k)) == order[std::size_t(k)];
      CHECK(same);
      if (K < E) CHECK(Bench::get(cutoff, t) == score(order[std::size_t(K)]));
      double sum = 0;
      for (std::int64_t k = 0; k < K; ++k) sum += Bench::get(weights, t * K + k);
      CHECK(std::abs(sum - 1) <= 1e-12);
    }
    CHECK(b.guards_hold());
  }
}

TEST_CASE("a dropped slot weighs nothing and leaves the weights of the others, worked by hand and by its slope", "[ops][cpu]") {
  Bench b;
  const auto logits = b.of(DType::f64, {1, 4}, {0, kLog3, -kLog3, kLog9});
  const auto experts = b.of(DType::i32, {1, 3}, {3, double(~1), 0}), weights = b.empty(DType::f64, {1, 3});
  const bool renormalize = GENERATE(true, false);
  const ops::RouterRule rule{.renormalize = renormalize, .scaling = 2};
  const auto forward = [&] {
    ops::router(
        b.context(),
        ops::RouterForward{.logits = logits, .bias = {}, .rule = rule, .decided = true, .experts = experts, .weights = weights});
  };
  forward();
  const double n = renormalize ? 0.9 + 0.75 + 0.5 : 1;
  CHECK(difference(test::values_of(weights), {2 * 0.9 / n, 0, 2 * 0.5 / n}, 1e-14) == "");
  const auto dweights = b.of(DType::f64, {1, 3}, {0.3, 1e9, -0.7}), dlogits = b.empty(DType::f64, {1, 4});
  ops::router(b.context(),
              ops::RouterBackward{.dweights = dweights, .logits = logits, .experts = experts, .rule = rule, .dlogits = dlogits});
  const auto loss = [&] {
    forward();
    return 0.3 * Bench::get(weights, 0) - 0.7 * Bench::get(weights, 2);
  };
  CHECK(test::slope_difference(loss, logits, dlogits, 1e-9) == "");
  CHECK((Bench::get(dlogits, 1) != 0) == renormalize);
  CHECK(Bench::get(dlogits, 2) == 0);
  experts.as<std::int32_t>()[1] = ~4;
  CHECK_THROWS_AS(forward(), Error);
  CHECK(b.guards_hold());
}

TEST_CASE("router backward is the slope of router forward with experts decided", "[ops][cpu]") {
  const bool renormalize = GENERATE(true, false);
  const std::int64_t T = 5, E = 7, K = GENERATE(2, 3, 7);
  CAPTURE(renormalize, K);
  Bench b(11);
  const ops::RouterRule rule{.renormalize = renormalize, .scaling = 2.446};
  const auto logits = b.normal(DType::f64, {T, E}, 1.5), bias = b.normal(DType::f64, {E}, 0.1);
  const auto experts = b.empty(DType::i32, {T, K}), weights = b.empty(DType::f64, {T, K}), dlogits = b.empty(DType::f64, {T, E});
  ops::router(b.context(),
              ops::RouterForward{.logits = logits, .bias = bias, .rule = rule, .experts = experts, .weights = weights});
  const auto first = test::values_of(weights);
  const auto dweights = b.normal(DType::f64, {T, K});
  ops::router(b.context(),
              ops::RouterBackward{.dweights = dweights, .logits = logits, .experts = experts, .rule = rule, .dlogits = dlogits});
  auto loss = [&] {
    ops::router(b.context(),
                ops::RouterForward{.logits = logits, .rule = rule, .decided = true, .experts = experts, .weights = weights});
    return test::weighted_sum(weights, dweights);
  };
  CHECK(test::slope_difference(loss, logits, dlogits, 1e-8) == "");
  loss();
  CHECK(test::values_of(weights) == first);  // the same bits whether experts are chosen or given
  CHECK(b.guards_hold());
}

TEST_CASE("router in f32 is within f32 rounding of f64 on the same inputs", "[ops][cpu]") {
  const std::int64_t T = 131, E = 67, K = 5;
  Bench b(4);
  const auto logits = b.normal(DType::f32, {T, E}, 2), bias = b.normal(DType::f32, {E}, 0.05),
             dweights = b.normal(DType::f32, {T, K});
  std::vector<Tensor> weights, dlogits, experts, cutoffs;
  for (const auto dtype : {DType::f32, DType::f64}) {
    const auto x = b.as(dtype, logits);
    experts.push_back(b.empty(DType::i32, {T, K}));
    weights.push_back(b.empty(dtype, {T, K}));
    cutoffs.push_back(b.empty(dtype, {T}));
    dlogits.push_back(b.empty(dtype, {T, E}));
    ops::router(b.context(), ops::RouterForward{.logits = x,
                                                .bias = b.as(dtype, bias),
                                                .rule = {.scaling = 2.5},
                                                .experts = experts.back(),
                                                .weights = weights.back(),
                                                .cutoff = cutoffs.back()});
    ops::router(b.context(), ops::RouterBackward{.dweights = b.as(dtype, dweights),
                                                 .logits = x,
                                                 .experts = experts.back(),
                                                 .rule = {.scaling = 2.5},
                                                 .dlogits = dlogits.back()});
  }
  CHECK(test::values_of(experts[0]) == test::values_of(experts[1]));
  CHECK(difference(weights[0], weights[1], 2e-6) == "");
  CHECK(difference(cutoffs[0], cutoffs[1], 1e-6) == "");
  CHECK(difference(dlogits[0], dlogits[1], 2e-5) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("router chooses experts that exist even from NaN and from scores that underflow", "[ops][cpu]") {
  Bench b;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto logits = b.of(DType::f32, {3, 4}, {nan, nan, nan, nan, nan, 1, nan, 2, -1e30, -1e30, -1e30, -1e30});
  const auto bias = b.zeros(DType::f32, {4}), dlogits = b.empty(DType::f32, {3, 4});
  const auto experts = b.empty(DType::i32, {3, 2}), weights = b.empty(DType::f32, {3, 2}), dweights = b.normal(DType::f32, {3, 2});
  ops::router(b.context(), ops::RouterForward{.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights});
  CHECK(test::values_of(experts) == std::vector<double>{0, 1, 3, 1, 0, 1});
  CHECK(Bench::get(weights, 4) == 0);
  ops::router(b.context(),
              ops::RouterBackward{.dweights = dweights, .logits = logits, .experts = experts, .rule = {}, .dlogits = dlogits});
  for (std::int64_t e = 0; e < 4; ++e) CHECK(Bench::get(dlogits, 8 + e) == 0);
}

TEST_CASE("router refuses what does not fit", "[ops][cpu]") {
  Bench b;
  const auto logits = b.normal(DType::f32, {2, 6}), bias = b.zeros(DType::f32, {6});
  const auto experts = b.empty(DType::i32, {2, 2}), weights = b.empty(DType::f32, {2, 2});
  const ops::RouterForward good{.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights};
  ops::router(b.context(), good);
  auto refused = [&](auto change) {
    auto bad = good;
    change(bad);
    CHECK_THROWS_AS(ops::router(b.context(), bad), Error);
  };
  refused([&](auto& a) { a.bias = b.zeros(DType::f32, {5}); });
  refused([&](auto& a) { a.bias = {}; });
  refused([&](auto& a) { a.logits = b.normal(DType::bf16, {2, 6}); });
  refused([&](auto& a) { a.weights = b.empty(DType::f64, {2, 2}); });
  refused([&](auto& a) { a.experts = b.empty(DType::i64, {2, 2}); });
  refused([&](auto& a) { a.cutoff = b.empty(DType::f32, {3}); });
  refused([&](auto& a) { a.rule.groups = 4; });
  refused([&](auto& a) { a.rule = {.groups = 3, .top_groups = 4}; });
  refused([&](auto& a) { a.rule = {.groups = 6, .top_groups = 1}; });
  refused([&](auto& a) { a.experts = b.empty(DType::i32, {2, 7}), a.weights = b.empty(DType::f32, {2, 7}); });
  refused([&](auto& a) { a.decided = true, a.cutoff = b.empty(DType::f32, {2}); });
  refused([&](auto& a) { a.decided = true, a.experts = b.of(DType::i32, {2, 2}, {0, 1, 2, 6}); });
  const auto dweights = b.normal(DType::f32, {2, 2}), dlogits = b.empty(DType::f32, {2, 6});
  CHECK_THROWS_AS(
      ops::router(b.context(), ops::RouterBackward{.dweights = dweights,
                                                   .logits = logits,
                                                   .experts = b.of(DType::i32, {2, 2}, {0, 1, -7, 2}),  // ~6: there is no expert 6
                                                   .rule = {},
                                                   .dlogits = dlogits}),
      Error);
  CHECK_THROWS_AS(
      ops::router(
          b.context(),
          ops::RouterBackward{
              .dweights = dweights, .logits = logits, .experts = experts, .rule = {}, .dlogits = b.empty(DType::f32, {2, 5})}),
      Error);
}

TEST_CASE("router on CUDA chooses as the CPU does, ties included, and weighs within f32 rounding of f64", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Case {
    std::int64_t T, E, K, groups, top_groups;
    bool renormalize;
  };
  for (const auto& c : {Case{1, 1, 1, 1, 1, true}, Case{0, 5, 2, 1, 1, true}, Case{7, 13, 3, 1, 1, false},
                        Case{257, 129, 16, 1, 1, true}, Case{31, 31, 31, 1, 1, true}, Case{40, 40, 33, 1, 1, true},
                        Case{300, 896, 16, 1, 1, true}, Case{300, 256, 8, 8, 4, true}, Case{64, 1024, 32, 4, 1, false},
                        Case{50, 12, 3, 12, 5, true}, Case{50, 12, 4, 6, 2, true}, Case{9, 500, 10, 100, 7, true}}) {
    CAPTURE(c.T, c.E, c.K, c.groups, c.top_groups);
    Bench b(3);
    // Coarse values make ties frequent, and what is not a tie differ by more than rounding; off zero, where two scores may sum
    // to 1.
    const auto logits = b.filled(DType::f32, {c.T, c.E},
                                 [](std::int64_t i) { return 0.03 + std::round(8 * ops::normal(5, 0, std::uint64_t(i))) / 8; });
    if (c.T > 5 && c.K < c.E / 2) Bench::set(logits, 5 * c.E + c.E / 2, NAN);
    const std::int64_t of_one_bias = c.groups > 1 ? c.E / c.groups : 1;
    const auto bias = b.filled(DType::f32, {c.E}, [&](std::int64_t e) { return double(e / of_one_bias % 3) / 8; });
    const ops::RouterRule rule{.groups = c.groups, .top_groups = c.top_groups, .renormalize = c.renormalize, .scaling = 2.5};
    const auto dweights = b.normal(DType::f32, {c.T, c.K});
    const auto run = [&](ops::Context& ctx, auto take, auto empty, DType real) {
      const auto x = take(logits, real);
      const std::vector<Tensor> out{empty(DType::i32, {c.T, c.K}), empty(real, {c.T, c.K}), empty(real, {c.T}),
                                    empty(real, {c.T, c.K}), empty(real, {c.T, c.E})};
      ops::router(ctx,
                  ops::RouterForward{
                      .logits = x, .bias = take(bias, real), .rule = rule, .experts = out[0], .weights = out[1], .cutoff = out[2]});
      ops::router(ctx,
                  ops::RouterForward{
                      .logits = x, .bias = {}, .rule = rule, .decided = true, .experts = out[0], .weights = out[3], .cutoff = {}});
      ops::router(ctx, ops::RouterBackward{
                           .dweights = take(dweights, real), .logits = x, .experts = out[0], .rule = rule, .dlogits = out[4]});
      return out;
    };
    test::DeviceBench d;
    const auto there = run(
        d.context(), [&](ConstTensor t, DType) { return d.copy(t); }, [&](DType type, Shape shape) { return d.empty(type, shape); },
        DType::f32);
    const auto want = run(
        b.context(), [&](ConstTensor t, DType real) { return b.as(real, t); },
        [&](DType type, Shape shape) { return b.empty(type, shape); }, DType::f64);
    CHECK(d.guards_hold());
    if (c.T == 0) continue;
    std::vector<Tensor> got;
    for (const auto& t : there) got.push_back(d.to_host(b, t));
    CHECK(test::values_of(got[0]) == test::values_of(want[0]));
    CHECK(test::values_of(got[3]) == test::values_of(got[1]));
    CHECK(difference(got[1], want[1], 1e-5) == "");
    for (std::int64_t t = 0; t < c.T; ++t) {
      const double cut = Bench::get(got[2], t), wanted = Bench::get(want[2], t);
      CHECK((cut == wanted || std::abs(cut - wanted) < 1e-6));
    }
    CHECK(difference(got[4], want[4], 1e-5, 1e-6) == "");  // one expert in all has a renormalised weight without slope

    // Every third slot is dropped, and all of a token.
    const auto dropped = b.filled(DType::i32, {c.T, c.K}, [&](std::int64_t i) {
      const auto e = std::int32_t(Bench::get(want[0], i));
      return double(i % 3 == 1 || i / c.K == 6 ? ~e : e);
    });
    const auto again = [&](ops::Context& ctx, auto take, Tensor experts, Tensor weights, Tensor dlogits) {
      const auto x = take(logits);
      ops::router(
          ctx, ops::RouterForward{.logits = x, .bias = {}, .rule = rule, .decided = true, .experts = experts, .weights = weights});
      ops::router(ctx, ops::RouterBackward{
                           .dweights = take(dweights), .logits = x, .experts = experts, .rule = rule, .dlogits = dlogits});
    };
    again(d.context(), [&](ConstTensor t) { return d.copy(t); }, d.copy(dropped), there[1], there[4]);
    again(b.context(), [&](ConstTensor t) { return b.as(DType::f64, t); }, dropped, want[1], want[4]);
    const auto weights = d.to_host(b, there[1]), dlogits = d.to_host(b, there[4]);
    CHECK(difference(weights, want[1], 1e-5) == "");
    CHECK(difference(dlogits, want[4], 1e-5, 1e-6) == "");
    bool weigh_nothing = true;
    for (std::int64_t i = 0; i < c.T * c.K; ++i) weigh_nothing &= Bench::get(dropped, i) >= 0 || Bench::get(weights, i) == 0;
    CHECK(weigh_nothing);
    CHECK(d.guards_hold());
  }
}
