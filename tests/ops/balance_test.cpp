// balance_test.cpp -- holds counts, quantile and sign updates and the router's losses to hand-worked cases, slopes and a
// simulation.
#include "ops/balance.h"

#include <algorithm>
#include <cmath>

#include "ops/router.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"

using namespace moetrain;
using test::Bench;
using test::difference;

namespace {

const double kLog3 = std::log(3.0);  // sigmoid 0.75

Tensor routed(Bench& b, ConstTensor logits, ConstTensor bias, std::int64_t K, Tensor cutoff = {}) {
  const auto T = logits.shape[0];
  const auto experts = b.empty(DType::i32, {T, K});
  ops::router(b.context(), ops::RouterForward{.logits = logits,
                                              .bias = bias,
                                              .rule = {},
                                              .experts = experts,
                                              .weights = b.empty(logits.dtype, {T, K}),
                                              .cutoff = cutoff});
  return experts;
}

double imbalance(Bench& b, ConstTensor experts, std::int64_t E) {
  const auto counts = b.zeros(DType::i64, {E});
  ops::expert_count(b.context(), ops::ExpertCount{.experts = experts, .counts = counts});
  const auto v = test::values_of(counts);
  return *std::max_element(v.begin(), v.end()) * double(E) / double(experts.count());
}

// What one optimizer step with quantile balancing does, its tokens cut at `cuts` (first 0, last T).
void quantile_step(Bench& b, ConstTensor logits, Tensor bias, std::int64_t K, std::int64_t bins,
                   const std::vector<std::int64_t>& cuts) {
  const auto histogram = b.zeros(DType::i64, {logits.shape[1], bins});
  for (std::size_t i = 1; i < cuts.size(); ++i) {
    const auto part = logits.rows(cuts[i - 1], cuts[i]);
    const auto cutoff = b.empty(logits.dtype, {part.shape[0]});
    routed(b, part, bias, K, cutoff);
    ops::quantile_histogram(b.context(),
                            ops::QuantileHistogram{.logits = part, .cutoff = cutoff, .bias = bias, .histogram = histogram});
  }
  ops::quantile_update(b.context(), ops::QuantileUpdate{.histogram = histogram, .experts_per_token = K, .bias = bias});
}

}  // namespace

TEST_CASE("expert_count adds exactly one a slot", "[ops][cpu]") {
  Bench b;
  const auto counts = b.of(DType::i64, {4}, {10, 0, 0, 5});
  ops::expert_count(b.context(), ops::ExpertCount{.experts = b.of(DType::i32, {3, 2}, {0, 2, 2, 3, 0, 2}), .counts = counts});
  CHECK(test::values_of(counts) == std::vector<double>{12, 0, 3, 6});
  ops::expert_count(b.context(), ops::ExpertCount{.experts = b.empty(DType::i32, {0, 2}), .counts = counts});
  CHECK(test::values_of(counts) == std::vector<double>{12, 0, 3, 6});
  const std::int64_t T = 1013, E = 17, K = 3;
  const auto experts = routed(b, b.normal(DType::f32, {T, E}), b.zeros(DType::f32, {E}), K), all = b.zeros(DType::i64, {E});
  ops::expert_count(b.context(), ops::ExpertCount{.experts = experts, .counts = all});
  double sum = 0;
  for (const double c : test::values_of(all)) sum += c;
  CHECK(sum == double(T * K));
  CHECK(b.guards_hold());
}

TEST_CASE("quantile histogram and update, worked by hand", "[ops][cpu]") {
  Bench b;
  // Bias (0, 0): bins span [-1, 1] in four of 0.5. Scores: expert 0 always 0.75, expert 1 always 0.5. Cutoffs 0.5, 0.5, 0.75, 3.
  const auto logits = b.of(DType::f64, {4, 2}, {kLog3, 0, kLog3, 0, kLog3, 0, kLog3, 0}),
             cutoff = b.of(DType::f64, {4}, {0.5, 0.5, 0.8, 3});
  const auto bias = b.zeros(DType::f64, {2}), histogram = b.zeros(DType::i64, {2, 4});
  ops::quantile_histogram(b.context(),
                          ops::QuantileHistogram{.logits = logits, .cutoff = cutoff, .bias = bias, .histogram = histogram});
  // needed biases: expert 0: -0.25 -0.25 0.05 2.25; expert 1: 0 0 0.3 2.5 (past the end: last bin)
  CHECK(test::values_of(histogram) == std::vector<double>{0, 2, 1, 1, 0, 0, 3, 1});
  // rank 1 * 4 / 2 = 2: expert 0 at the upper edge of its bin, 0; expert 1 at two thirds of [0, 0.5], 1/3; mean 1/6
  ops::quantile_update(b.context(), ops::QuantileUpdate{.histogram = histogram, .experts_per_token = 1, .bias = bias});
  CHECK(difference(test::values_of(bias), {-1.0 / 6, 1.0 / 6}, 1e-14) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("quantile update leaves the bias alone without tokens and finds the last bin when all experts are used", "[ops][cpu]") {
  Bench b;
  const auto bias = b.of(DType::f32, {3}, {0.5, -0.25, 0}), before = b.copy(bias);
  const auto histogram = b.zeros(DType::i64, {3, 7});
  ops::quantile_histogram(
      b.context(),
      ops::QuantileHistogram{
          .logits = b.empty(DType::f32, {0, 3}), .cutoff = b.empty(DType::f32, {0}), .bias = bias, .histogram = histogram});
  ops::quantile_update(b.context(), ops::QuantileUpdate{.histogram = histogram, .experts_per_token = 2, .bias = bias});
  CHECK(test::values_of(bias) == test::values_of(before));
  quantile_step(b, b.normal(DType::f32, {9, 3}), bias, 3, 7, {0, 9});  // cutoff -infinity: every expert in the first bin
  CHECK(difference(test::values_of(bias), {0, 0, 0}, 0, 1e-6) == "");
  const auto one = b.of(DType::f32, {1}, {4});
  quantile_step(b, b.normal(DType::f32, {3, 1}), one, 1, 5, {0, 3});
  CHECK(difference(test::values_of(one), {0}, 0, 1e-6) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("quantile balancing evens the load of frozen skewed scores at the first update", "[ops][cpu]") {
  const std::int64_t m = 4096, E = 32, K = 4;
  const auto dtype = GENERATE(DType::f32, DType::f64);
  CAPTURE(int(dtype));
  Bench b(21);
  const auto skew = b.normal(DType::f64, {E}, 0.8);
  const auto noise = b.normal(DType::f64, {m, E}, 1.0);
  const auto logits = b.filled(dtype, {m, E}, [&](std::int64_t i) { return Bench::get(noise, i) + Bench::get(skew, i % E); });
  const auto bias = b.zeros(dtype, {E});
  const double first = imbalance(b, routed(b, logits, bias, K), E);
  CAPTURE(first);
  CHECK(first > 4);
  double load = first;
  for (int update = 0; update < 3; ++update) {
    quantile_step(b, logits, bias, K, 1000, {0, m});
    const double next = imbalance(b, routed(b, logits, bias, K), E);
    CAPTURE(update, load, next);
    CHECK(next < 1.3);
    load = next;
    double mean = 0;
    for (const double v : test::values_of(bias)) mean += v;
    CHECK(std::abs(mean) < 1e-5);
  }
  CHECK(load < 1.12);
}

TEST_CASE("quantile update is within a bin of the quantile of the sorted scores", "[ops][cpu]") {
  const std::int64_t T = 1201, E = 12, K = 3, bins = 500;
  Bench b(23);
  const auto logits = b.normal(DType::f64, {T, E}, 1.5), bias = b.normal(DType::f64, {E}, 0.2), cutoff = b.empty(DType::f64, {T});
  routed(b, logits, bias, K, cutoff);
  const auto old = test::values_of(bias);
  const double width = (*std::max_element(old.begin(), old.end()) - *std::min_element(old.begin(), old.end()) + 2) / double(bins);
  std::vector<double> want;
  double mean = 0;
  for (std::int64_t e = 0; e < E; ++e) {
    std::vector<double> needed;
    for (std::int64_t t = 0; t < T; ++t)
      needed.push_back(Bench::get(cutoff, t) - 1 / (1 + std::exp(-Bench::get(logits, t * E + e))));
    std::sort(needed.begin(), needed.end());
    want.push_back(needed[std::size_t(T * K / E)]);
    mean += want.back() / double(E);
  }
  for (double& w : want) w -= mean;
  quantile_step(b, logits, bias, K, bins, {0, T});
  CHECK(difference(test::values_of(bias), want, 0, 2 * width) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("quantile update is the same to the bit however tokens are cut into micro-batches", "[ops][cpu]") {
  const std::int64_t m = 1000, E = 19, K = 3;
  Bench b(22);
  const auto logits = b.normal(DType::f32, {m, E}, 2), start = b.normal(DType::f32, {E}, 0.1);
  const auto whole = b.copy(start);
  quantile_step(b, logits, whole, K, 1000, {0, m});
  CHECK(test::values_of(whole) != test::values_of(start));
  for (const auto& cuts : {std::vector<std::int64_t>{0, 500, m}, {0, 1, 1, 17, 998, m}, {0, 0, 250, 251, 777, m, m}}) {
    const auto cut = b.copy(start);
    quantile_step(b, logits, cut, K, 1000, cuts);
    CHECK(test::values_of(cut) == test::values_of(whole));
  }
  CHECK(b.guards_hold());
}

TEST_CASE("sign_update lifts what is below the mean load and lowers what is above", "[ops][cpu]") {
  Bench b;
  const auto bias = b.of(DType::f32, {4}, {1, 1, 1, 1});
  ops::sign_update(b.context(), ops::SignUpdate{.counts = b.of(DType::i64, {4}, {3, 1, 2, 2}), .rate = 0.25, .bias = bias});
  CHECK(test::values_of(bias) == std::vector<double>{0.75, 1.25, 1, 1});
  ops::sign_update(b.context(), ops::SignUpdate{.counts = b.of(DType::i64, {4}, {1, 0, 0, 0}), .rate = 0.25, .bias = bias});
  CHECK(test::values_of(bias) == std::vector<double>{0.5, 1.5, 1.25, 1.25});
  for (int step = 0; step < 1000; ++step)
    ops::sign_update(b.context(), ops::SignUpdate{.counts = b.of(DType::i64, {4}, {0, 4, 4, 0}), .rate = 1e-3, .bias = bias});
  CHECK(difference(test::values_of(bias), {1.5, 0.5, 0.25, 2.25}, 1e-4) == "");  // a thousand small steps are one large one
  CHECK(b.guards_hold());
}

TEST_CASE("auxiliary_loss, worked by hand, adds to what is there", "[ops][cpu]") {
  Bench b;
  // scores 0.75, 0.5, 0.75 | 0.5, 0.5, 1.0 (nearly): P = (3/8, 2/8, 3/8) and (1/4, 1/4, 1/2); slots (0, 2) and (2, 1)
  const auto logits = b.of(DType::f64, {2, 3}, {kLog3, 0, kLog3, 0, 0, 60}), experts = b.of(DType::i32, {2, 2}, {0, 2, 2, 1});
  const auto loss = b.of(DType::f64, {1}, {100});
  const std::vector<std::int64_t> one{0, 2}, each{0, 1, 2}, gaps{0, 0, 1, 1, 2, 2};
  auto added = [&](const std::vector<std::int64_t>& groups, ConstTensor counts) {
    Bench::set(loss, 0, 100);
    ops::auxiliary_loss(
        b.context(),
        ops::AuxiliaryLoss{
            .logits = logits, .experts = experts, .groups = groups, .counts = counts, .scale = 2, .loss = loss, .dlogits = {}});
    return Bench::get(loss, 0) - 100;
  };
  // one group: f = (1/4, 1/4, 1/2), mean P = (5/16, 4/16, 7/16): 2 * 3 * (5 + 4 + 14) / 64
  CHECK(std::abs(added(one, {}) - 6 * 23.0 / 64) < 1e-12);
  // each alone: f = (1/2, 0, 1/2): 3/8; f = (0, 1/2, 1/2): 3/8
  CHECK(std::abs(added(each, {}) - 6 * (3.0 / 8 + 3.0 / 8)) < 1e-12);
  CHECK(std::abs(added(gaps, {}) - 6 * (3.0 / 8 + 3.0 / 8)) < 1e-12);
  // counts of a global batch: f = (1/2, 1/2, 0): (5 + 4) / 32
  CHECK(std::abs(added(one, b.of(DType::i64, {3}, {7, 7, 0})) - 6 * 9.0 / 32) < 1e-12);
  CHECK(added(one, b.zeros(DType::i64, {3})) == 0);
  CHECK(b.guards_hold());
}

TEST_CASE("the gradients of the auxiliary and the z-loss are their slopes, added to what is there", "[ops][cpu]") {
  const std::int64_t T = 11, E = 7, K = 3;
  const bool global = GENERATE(false, true);
  CAPTURE(global);
  Bench b(31);
  const auto logits = b.normal(DType::f64, {T, E}, 1.5), bias = b.zeros(DType::f64, {E}), loss = b.zeros(DType::f64, {1});
  const auto experts = routed(b, logits, bias, K);
  const std::vector<std::int64_t> groups{0, 4, 4, 5, T};
  const auto counts = global ? b.of(DType::i64, {E}, {5, 0, 2, 9, 1, 1, 30}) : Tensor{};
  auto check_slope = [&](auto run) {
    const auto filled = b.filled(DType::f64, {T, E}, [](std::int64_t) { return 0.5; });
    run(filled);
    for (std::int64_t i = 0; i < T * E; ++i) Bench::set(filled, i, Bench::get(filled, i) - 0.5);
    auto value = [&] {
      Bench::set(loss, 0, 0);
      run(Tensor{});
      return Bench::get(loss, 0);
    };
    CHECK(test::slope_difference(value, logits, filled, 1e-7, 0, T * E) == "");
  };
  check_slope([&](Tensor dlogits) {
    ops::auxiliary_loss(b.context(), ops::AuxiliaryLoss{.logits = logits,
                                                        .experts = experts,
                                                        .groups = groups,
                                                        .counts = counts,
                                                        .scale = 0.7,
                                                        .loss = loss,
                                                        .dlogits = dlogits});
  });
  check_slope([&](Tensor dlogits) {
    ops::z_loss(b.context(), ops::ZLoss{.logits = logits, .scale = 0.3, .loss = loss, .dlogits = dlogits});
  });
  CHECK(b.guards_hold());
}

TEST_CASE("z_loss, worked by hand, stays finite for logits far from zero", "[ops][cpu]") {
  Bench b;
  const auto loss = b.of(DType::f64, {1}, {1}), dlogits = b.zeros(DType::f64, {1, 2});
  ops::z_loss(b.context(),
              ops::ZLoss{.logits = b.of(DType::f64, {1, 2}, {0, kLog3}), .scale = 0.5, .loss = loss, .dlogits = dlogits});
  const double z = std::log(4.0);
  CHECK(difference(test::values_of(loss), {1 + 0.5 * z * z}, 1e-14) == "");
  CHECK(difference(test::values_of(dlogits), {z / 4, z * 3 / 4}, 1e-14) == "");
  const auto far = b.of(DType::f32, {2, 2}, {-900, -900, 900, -900}), sum = b.zeros(DType::f32, {1}),
             slope = b.zeros(DType::f32, {2, 2});
  ops::z_loss(b.context(), ops::ZLoss{.logits = far, .scale = 1, .loss = sum, .dlogits = slope});
  CHECK(difference(test::values_of(slope), {-899.3069, -899.3069, 1800, 0}, 1e-5) == "");
}

TEST_CASE("the router's losses in f32 are within f32 rounding of f64 on the same inputs", "[ops][cpu]") {
  const std::int64_t T = 129, E = 37, K = 4;
  Bench b(8);
  const auto logits = b.normal(DType::f32, {T, E}, 2);
  const auto experts = routed(b, logits, b.zeros(DType::f32, {E}), K);
  const std::vector<std::int64_t> groups{0, 100, T};
  std::vector<Tensor> loss, dlogits;
  for (const auto dtype : {DType::f32, DType::f64}) {
    const auto x = b.as(dtype, logits);
    for (int i = 0; i < 2; ++i) loss.push_back(b.zeros(dtype, {1})), dlogits.push_back(b.zeros(dtype, {T, E}));
    const auto n = loss.size();
    ops::auxiliary_loss(b.context(), ops::AuxiliaryLoss{.logits = x,
                                                        .experts = experts,
                                                        .groups = groups,
                                                        .counts = {},
                                                        .scale = 1,
                                                        .loss = loss[n - 2],
                                                        .dlogits = dlogits[n - 2]});
    ops::z_loss(b.context(), ops::ZLoss{.logits = x, .scale = 1, .loss = loss[n - 1], .dlogits = dlogits[n - 1]});
  }
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(difference(loss[i], loss[i + 2], 1e-6) == "");
    CHECK(difference(dlogits[i], dlogits[i + 2], 1e-5) == "");
  }
  CHECK(b.guards_hold());
}

TEST_CASE("the router's losses of no tokens are nothing", "[ops][cpu]") {
  Bench b;
  const auto logits = b.empty(DType::f32, {0, 3}), loss = b.of(DType::f32, {1}, {2});
  const std::vector<std::int64_t> none{0}, empty{0, 0};
  for (const auto& groups : {none, empty})
    ops::auxiliary_loss(b.context(), ops::AuxiliaryLoss{.logits = logits,
                                                        .experts = b.empty(DType::i32, {0, 2}),
                                                        .groups = groups,
                                                        .counts = {},
                                                        .scale = 1,
                                                        .loss = loss,
                                                        .dlogits = b.empty(DType::f32, {0, 3})});
  ops::z_loss(b.context(), ops::ZLoss{.logits = logits, .scale = 1, .loss = loss, .dlogits = {}});
  CHECK(Bench::get(loss, 0) == 2);
}

TEST_CASE("balance refuses what does not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const auto logits = b.normal(DType::f32, {3, 4}), bias = b.zeros(DType::f32, {4}), loss = b.zeros(DType::f32, {1});
  const auto experts = b.of(DType::i32, {3, 1}, {0, 1, 2}), counts = b.zeros(DType::i64, {4}),
             histogram = b.zeros(DType::i64, {4, 5});
  const auto cutoff = b.zeros(DType::f32, {3});
  CHECK_THROWS_AS(ops::expert_count(ctx, ops::ExpertCount{experts, b.zeros(DType::i32, {4})}), Error);
  CHECK_THROWS_AS(ops::expert_count(ctx, ops::ExpertCount{b.of(DType::i32, {1, 1}, {4}), counts}), Error);
  CHECK_THROWS_AS(ops::quantile_histogram(ctx, ops::QuantileHistogram{logits, cutoff, bias, b.zeros(DType::i64, {5, 5})}), Error);
  CHECK_THROWS_AS(ops::quantile_histogram(ctx, ops::QuantileHistogram{logits, bias, bias, histogram}), Error);
  CHECK_THROWS_AS(ops::quantile_histogram(ctx, ops::QuantileHistogram{logits, cutoff, b.zeros(DType::f64, {4}), histogram}), Error);
  CHECK_THROWS_AS(ops::quantile_update(ctx, ops::QuantileUpdate{histogram, 5, bias}), Error);
  CHECK_THROWS_AS(ops::quantile_update(ctx, ops::QuantileUpdate{b.of(DType::i64, {4, 1}, {2, 2, 1, 2}), 2, bias}), Error);
  CHECK_THROWS_AS(ops::quantile_update(ctx, ops::QuantileUpdate{histogram, 2, b.zeros(DType::f32, {3})}), Error);
  CHECK_THROWS_AS(ops::sign_update(ctx, ops::SignUpdate{counts, 1, b.zeros(DType::f32, {3})}), Error);
  CHECK_THROWS_AS(ops::sign_update(ctx, ops::SignUpdate{bias, 1, bias}), Error);
  const std::vector<std::int64_t> all{0, 3}, part{0, 2}, back{0, 2, 1, 3};
  auto auxiliary = [&](const std::vector<std::int64_t>& groups, ConstTensor ids, ConstTensor given, Tensor dlogits) {
    ops::auxiliary_loss(ctx, ops::AuxiliaryLoss{logits, ids, groups, given, 1, loss, dlogits});
  };
  auxiliary(all, experts, {}, {});
  CHECK_THROWS_AS(auxiliary(part, experts, {}, {}), Error);
  CHECK_THROWS_AS(auxiliary(back, experts, {}, {}), Error);
  CHECK_THROWS_AS(auxiliary({}, experts, {}, {}), Error);
  CHECK_THROWS_AS(auxiliary(all, b.of(DType::i32, {3, 1}, {0, 1, 4}), {}, {}), Error);
  CHECK_THROWS_AS(auxiliary(all, experts, b.zeros(DType::i64, {3}), {}), Error);
  CHECK_THROWS_AS(auxiliary(all, experts, {}, b.zeros(DType::f32, {3, 3})), Error);
  CHECK_THROWS_AS(ops::z_loss(ctx, ops::ZLoss{logits, 1, b.zeros(DType::f32, {2}), {}}), Error);
  CHECK_THROWS_AS(ops::z_loss(ctx, ops::ZLoss{b.normal(DType::bf16, {3, 4}), 1, loss, {}}), Error);
}

TEST_CASE("expert counts and quantile histograms on CUDA are the CPU's, and so are the biases that follow", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Case {
    std::int64_t T, E, K, bins;
  };
  for (const auto& c : {Case{1, 1, 1, 1}, Case{0, 5, 2, 10}, Case{1013, 17, 3, 1000}, Case{700, 896, 16, 1000},
                        Case{90, 9, 2, 30000}, Case{33, 3, 1, 60000}, Case{9000, 8, 2, 7}}) {
    CAPTURE(c.T, c.E, c.K, c.bins);
    Bench b(12);
    const auto skew = b.normal(DType::f64, {c.E}, 0.8), noise = b.normal(DType::f64, {c.T, c.E});
    const auto logits =
        b.filled(DType::f32, {c.T, c.E}, [&](std::int64_t i) { return Bench::get(noise, i) + Bench::get(skew, i % c.E); });
    const auto bias = b.normal(DType::f32, {c.E}, 0.1), cutoff = b.empty(DType::f32, {c.T});
    const auto experts = routed(b, logits, bias, c.K, cutoff);
    const auto counts = b.filled(DType::i64, {c.E}, [](std::int64_t e) { return e; }),
               histogram = b.zeros(DType::i64, {c.E, c.bins});
    test::DeviceBench d;
    const auto counts_there = d.copy(counts), histogram_there = d.copy(histogram), bias_there = d.copy(bias);
    const auto count = [&](ops::Context& ctx, auto put, Tensor n, Tensor h, ConstTensor with) {
      ops::expert_count(ctx, ops::ExpertCount{.experts = put(experts), .counts = n});
      ops::quantile_histogram(ctx,
                              ops::QuantileHistogram{.logits = put(logits), .cutoff = put(cutoff), .bias = with, .histogram = h});
    };
    const auto update = [&](ops::Context& ctx, ConstTensor n, ConstTensor h, Tensor to) {
      ops::quantile_update(ctx, ops::QuantileUpdate{.histogram = h, .experts_per_token = c.K, .bias = to});
      ops::sign_update(ctx, ops::SignUpdate{.counts = n, .rate = 0.125, .bias = to});
    };
    count(
        d.context(), [&](ConstTensor t) { return d.copy(t); }, counts_there, histogram_there, bias_there);
    count(
        b.context(), [](ConstTensor t) { return t; }, counts, histogram, bias);
    CHECK(test::values_of(d.to_host(b, counts_there)) == test::values_of(counts));
    // A score an ulp off may lie on the other side of an edge: it is counted one bin away.
    const auto got = test::values_of(d.to_host(b, histogram_there)), want = test::values_of(histogram);
    double moved = 0, before = 0, most = 0, tokens = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      before += got[i] - want[i], tokens += got[i], moved += std::abs(got[i] - want[i]);
      most = std::max(most, std::abs(before));
    }
    CHECK(tokens == double(c.T * c.E));
    CHECK(before == 0);
    CHECK(most <= 2);
    CHECK(moved <= 2 + 1e-3 * double(c.T * c.E));
    update(d.context(), d.copy(counts), d.copy(histogram), bias_there);
    update(b.context(), counts, histogram, bias);
    CHECK(difference(test::values_of(d.to_host(b, bias_there)), test::values_of(bias), 0, 1e-6) == "");
    CHECK(d.guards_hold());
  }
}

TEST_CASE("quantile_update on CUDA makes NaN of biases whose experts have seen different numbers of tokens", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  test::DeviceBench d;
  const auto bias = d.copy(b.zeros(DType::f32, {2}));
  ops::quantile_update(
      d.context(),
      ops::QuantileUpdate{.histogram = d.copy(b.of(DType::i64, {2, 2}, {1, 1, 2, 1})), .experts_per_token = 1, .bias = bias});
  for (const double v : test::values_of(d.to_host(b, bias))) CHECK(std::isnan(v));
}

TEST_CASE("the router's losses on CUDA are within f32 rounding of f64 and repeat their bits", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  enum class Counts { own, of_all, by_group };
  const Counts counted = GENERATE(Counts::own, Counts::of_all, Counts::by_group);
  struct Case {
    std::int64_t T, E, K, groups;
  };
  for (const auto& c : {Case{1, 1, 1, 1}, Case{129, 37, 4, 2}, Case{600, 896, 16, 1}, Case{1000, 64, 2, 150}}) {
    CAPTURE(c.T, c.E, c.groups, int(counted));
    Bench b(8);
    const auto logits = b.normal(DType::f32, {c.T, c.E}, 2);
    const auto experts = routed(b, logits, b.zeros(DType::f32, {c.E}), c.K);
    std::vector<std::int64_t> groups;
    for (std::int64_t g = 0; g <= c.groups; ++g) groups.push_back(c.T * g * g / (c.groups * c.groups));  // some empty
    const bool by_group = counted == Counts::by_group;  // with the tokens of other ranks
    const auto given =
        b.filled(DType::i64, by_group ? Shape{c.groups, c.E} : Shape{c.E}, [](std::int64_t i) { return i * i % 11 + 1; });
    std::vector<std::int64_t> tokens;
    for (std::int64_t g = 0; by_group && g < c.groups; ++g)
      tokens.push_back(3 * (groups[std::size_t(g) + 1] - groups[std::size_t(g)]) + g % 5);
    const auto run = [&](ops::Context& ctx, auto put, auto zeros, DType real) {
      const auto x = put(logits, real), ids = put(experts, DType::i32),
                 counts = counted == Counts::own ? Tensor{} : put(given, DType::i64);
      const std::vector<Tensor> out{zeros(real, {1}), zeros(real, {c.T, c.E}), zeros(real, {1}), zeros(real, {c.T, c.E}),
                                    zeros(real, {1})};
      ops::auxiliary_loss(ctx, ops::AuxiliaryLoss{.logits = x,
                                                  .experts = ids,
                                                  .groups = groups,
                                                  .counts = counts,
                                                  .scale = 0.7,
                                                  .loss = out[0],
                                                  .dlogits = out[1],
                                                  .tokens = tokens});
      ops::z_loss(ctx, ops::ZLoss{.logits = x, .scale = 0.3, .loss = out[2], .dlogits = out[3]});
      ops::z_loss(ctx, ops::ZLoss{.logits = x, .scale = 0.3, .loss = out[4], .dlogits = {}});
      return out;
    };
    const auto on_cuda = [&] {
      test::DeviceBench d;
      const auto there = run(
          d.context(), [&](ConstTensor t, DType) { return d.copy(t); },
          [&](DType type, Shape shape) { return d.copy(b.filled(type, shape, [](std::int64_t) { return 0.5; })); }, DType::f32);
      std::vector<Tensor> host;
      for (const auto& t : there) host.push_back(d.to_host(b, t));
      CHECK(d.guards_hold());
      return host;
    };
    const auto want = run(
        b.context(), [&](ConstTensor t, DType type) { return b.as(type, t); },
        [&](DType type, Shape shape) { return b.filled(type, shape, [](std::int64_t) { return 0.5; }); }, DType::f64);
    const auto got = on_cuda();
    for (std::size_t i = 0; i < got.size(); ++i) {
      CAPTURE(i);
      CHECK(difference(got[i], want[i], 1e-5) == "");
    }
    for (int again = 0; again < 20; ++again) {
      const auto other = on_cuda();
      for (std::size_t i = 0; i < got.size(); ++i) CHECK(test::values_of(other[i]) == test::values_of(got[i]));
    }
  }
}

TEST_CASE("groups cut over ranks, with counts and tokens of all of each, have the auxiliary loss of whole groups", "[ops][cpu]") {
  const std::int64_t T = 30, E = 7, K = 2;
  Bench b(9);
  const auto logits = b.normal(DType::f64, {T, E}, 2), experts = routed(b, logits, b.zeros(DType::f64, {E}), K);
  const std::vector<std::int64_t> groups{0, 18, T}, tokens{18, 12};
  const auto counts = b.zeros(DType::i64, {2, E});
  for (std::int64_t g = 0; g < 2; ++g)
    ops::expert_count(b.context(), ops::ExpertCount{.experts = experts.rows(groups[std::size_t(g)], groups[std::size_t(g) + 1]),
                                                    .counts = counts.rows(g, g + 1).reshape({E})});
  const auto run = [&](std::int64_t begin, std::int64_t end, const std::vector<std::int64_t>& here, ConstTensor given,
                       std::span<const std::int64_t> of_all, Tensor loss, Tensor dlogits) {
    ops::auxiliary_loss(b.context(), ops::AuxiliaryLoss{.logits = logits.rows(begin, end),
                                                        .experts = experts.rows(begin, end),
                                                        .groups = here,
                                                        .counts = given,
                                                        .scale = 0.7,
                                                        .loss = loss,
                                                        .dlogits = dlogits.rows(begin, end),
                                                        .tokens = of_all});
  };
  const auto whole = b.zeros(DType::f64, {1}), sum = b.zeros(DType::f64, {1});
  const auto dwhole = b.zeros(DType::f64, {T, E}), dparts = b.zeros(DType::f64, {T, E});
  run(0, T, groups, {}, {}, whole, dwhole);
  run(0, 10, {0, 10, 10}, counts, tokens, sum, dparts);  // a rank without a token of the second group, and one with a part of both
  run(10, T, {0, 8, 20}, counts, tokens, sum, dparts);
  CHECK(difference(sum, whole, 1e-13) == "");
  CHECK(difference(dparts, dwhole, 1e-12, 1e-15) == "");
  CHECK(b.guards_hold());
}
