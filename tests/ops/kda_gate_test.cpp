// kda_gate_test.cpp -- both forms of the gate by hand, by slope, at their extremes and against f64.
#include "ops/kda_gate.h"

#include <omp.h>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

using Bound = std::optional<double>;

struct Gate {
  Tensor f, a_log, dt_bias, b, dg, dbeta;
  Bound bound;
};
struct GateResults {
  Tensor g, beta, df, db, da_log, ddt_bias;
};

Gate random_gate(Bench& bench, DType dtype, Shape shape, Bound bound) {
  const auto real = real_of(dtype);
  const auto T = shape[0], N = shape[1], H = shape[2];
  return {bench.normal(dtype, shape),
          bench.uniform(real, {N}, 0, 1.5),
          bench.normal(real, {N, H}),
          bench.normal(dtype, {T, N}),
          bench.normal(real, shape),
          bench.normal(real, {T, N}),
          bound};
}
Gate widened(Bench& bench, Gate x) {
  for (Tensor* t : {&x.f, &x.a_log, &x.dt_bias, &x.b, &x.dg, &x.dbeta}) *t = bench.as(DType::f64, *t);
  return x;
}
void forward(Bench& bench, const Gate& x, const GateResults& r) {
  ops::kda_gate(bench.context(),
                ops::KdaGateForward{
                    .f = x.f, .a_log = x.a_log, .dt_bias = x.dt_bias, .b = x.b, .lower_bound = x.bound, .g = r.g, .beta = r.beta});
}
void backward(Bench& bench, const Gate& x, const GateResults& r) {
  ops::kda_gate(bench.context(), ops::KdaGateBackward{.dg = x.dg,
                                                      .dbeta = x.dbeta,
                                                      .f = x.f,
                                                      .a_log = x.a_log,
                                                      .dt_bias = x.dt_bias,
                                                      .beta = r.beta,
                                                      .lower_bound = x.bound,
                                                      .df = r.df,
                                                      .db = r.db,
                                                      .da_log = r.da_log,
                                                      .ddt_bias = r.ddt_bias});
}
GateResults run(Bench& bench, const Gate& x) {
  const auto real = x.a_log.dtype;
  const GateResults r{bench.empty(real, x.f.shape),      bench.empty(real, x.b.shape),     bench.empty(x.f.dtype, x.f.shape),
                      bench.empty(x.f.dtype, x.b.shape), bench.zeros(real, x.a_log.shape), bench.zeros(real, x.dt_bias.shape)};
  forward(bench, x, r);
  backward(bench, x, r);
  return r;
}

}  // namespace

TEST_CASE("kda_gate worked by hand in both forms", "[ops][cpu]") {
  // a = 2, z = f + dt_bias = (0, ln 3 / 2 or ln 3); sigmoid(0) = 1/2, sigmoid(ln 3) = 3/4.
  Bench bench;
  const auto f64 = DType::f64;
  const double ln2 = std::log(2.0), ln3 = std::log(3.0);
  Gate x{bench.of(f64, {1, 1, 2}, {1, ln3 / 2}),
         bench.of(f64, {1}, {ln2}),
         bench.of(f64, {1, 2}, {-1, 0}),
         bench.of(f64, {1, 1}, {ln3}),
         bench.of(f64, {1, 1, 2}, {1, 2}),
         bench.of(f64, {1, 1}, {16}),
         -5.0};
  const auto bounded = run(bench, x);
  CHECK(difference(values_of(bounded.g), {-2.5, -3.75}, 1e-14) == "");
  CHECK(difference(values_of(bounded.beta), {0.75}, 1e-14) == "");
  CHECK(difference(values_of(bounded.db), {3}, 1e-14) == "");                            // 16 * 3/4 * 1/4
  CHECK(difference(values_of(bounded.df), {-2.5, -2 * 5 * 2 * 3 / 16.0}, 1e-14) == "");  // dg lb a sg (1 - sg)
  CHECK(difference(values_of(bounded.ddt_bias), values_of(bounded.df), 0) == "");
  CHECK(difference(values_of(bounded.da_log), {-3.75 * ln3 / 2}, 1e-14) == "");  // sum dz z, and z = 0 for the first
  x.bound.reset();
  x.f = bench.of(f64, {1, 1, 2}, {1, ln3});
  const auto unbounded = run(bench, x);
  CHECK(difference(values_of(unbounded.g), {-2 * ln2, -4 * ln2}, 1e-14) == "");  // softplus(0) = ln 2, softplus(ln 3) = ln 4
  CHECK(difference(values_of(unbounded.df), {-1, -3}, 1e-14) == "");
  CHECK(difference(values_of(unbounded.da_log), {-2 * ln2 - 8 * ln2}, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("kda_gate backward is the slope of kda_gate forward", "[ops][cpu]") {
  const Bound bound = GENERATE(Bound{}, Bound{-5.0}, Bound{-1.5});
  Bench bench(2);
  const Gate x = random_gate(bench, DType::f64, {70, 3, 5}, bound);  // tokens past one group of sums
  const auto r = run(bench, x);
  const GateResults probe{bench.empty(DType::f64, x.f.shape), bench.empty(DType::f64, x.b.shape), {}, {}, {}, {}};
  const auto loss = [&] {
    forward(bench, x, probe);
    return weighted_sum(probe.g, x.dg) + weighted_sum(probe.beta, x.dbeta);
  };
  CHECK(slope_difference(loss, x.f, r.df) == "");
  CHECK(slope_difference(loss, x.b, r.db) == "");
  CHECK(slope_difference(loss, x.a_log, r.da_log) == "");
  CHECK(slope_difference(loss, x.dt_bias, r.ddt_bias) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("kda_gate adds to the gradients of its weights and does without them", "[ops][cpu]") {
  const Bound bound = GENERATE(Bound{}, Bound{-5.0});
  Bench bench(3);
  const Gate x = random_gate(bench, DType::f64, {9, 2, 3}, bound);
  const auto once = run(bench, x);
  auto again = once;
  again.da_log = bench.copy(once.da_log), again.ddt_bias = bench.copy(once.ddt_bias);
  backward(bench, x, again);
  for (auto [got, single] : {std::pair{again.da_log, once.da_log}, std::pair{again.ddt_bias, once.ddt_bias}}) {
    for (std::int64_t i = 0; i < got.count(); ++i) Bench::set(got, i, Bench::get(got, i) / 2);
    CHECK(difference(got, single, 1e-14) == "");
  }
  auto frozen = once;
  frozen.df = bench.empty(DType::f64, x.f.shape), frozen.da_log = {}, frozen.ddt_bias = {};
  backward(bench, x, frozen);
  CHECK(difference(frozen.df, once.df, 0) == "");
}

TEST_CASE("kda_gate in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const Bound bound = GENERATE(Bound{}, Bound{-5.0});
  const std::int64_t T = GENERATE(0, 1, 201), H = GENERATE(1, 33);
  Bench bench(4);
  const Gate x = random_gate(bench, dtype, {T, 2, H}, bound);
  const auto r = run(bench, x), want = run(bench, widened(bench, x));
  CHECK(bench.guards_hold());
  if (T == 0) {
    CHECK(difference(r.da_log, want.da_log, 0, 1e-300) == "");
    return;
  }
  const double rounding = dtype == DType::bf16 ? 5e-3 : 5e-6;
  CHECK(difference(r.g, want.g, 3e-6) == "");
  CHECK(difference(r.beta, want.beta, 1e-6) == "");
  CHECK(difference(r.df, want.df, rounding) == "");
  CHECK(difference(r.db, want.db, rounding) == "");
  CHECK(difference(r.da_log, want.da_log, 2e-5) == "");
  CHECK(difference(r.ddt_bias, want.ddt_bias, 2e-5) == "");
}

TEST_CASE("kda_gate stays finite and inside its bounds for any f", "[ops][cpu]") {
  const Bound bound = GENERATE(Bound{}, Bound{-5.0});
  Bench bench;
  const auto f32 = DType::f32;
  const std::int64_t count = 7;
  const Gate x{bench.of(f32, {1, 1, count}, {-1e30, -200, -1, 0, 1, 200, 1e4}),
               bench.of(f32, {1}, {2.5}),
               bench.zeros(f32, {1, count}),
               bench.of(f32, {1, 1}, {-1e30}),
               bench.of(f32, {1, 1, count}, {1, 1, 1, 1, 1, 1, 1}),
               bench.of(f32, {1, 1}, {1}),
               bound};
  const auto r = run(bench, x);
  for (std::int64_t i = 0; i < count; ++i) {
    CAPTURE(i);
    CHECK(Bench::get(r.g, i) <= 0);
    CHECK(Bench::get(r.g, i) >= (bound ? *bound : -2e5));
    CHECK(std::isfinite(Bench::get(r.df, i)));
    if (i > 0) CHECK(Bench::get(r.g, i) <= Bench::get(r.g, i - 1));
  }
  CHECK(Bench::get(r.g, 6) < -4.99);
  CHECK(Bench::get(r.beta, 0) == 0);
}

TEST_CASE("kda_gate gives the same bits with any number of threads", "[ops][cpu]") {
  const Bound bound = GENERATE(Bound{}, Bound{-5.0});
  Bench bench(5);
  const Gate x = random_gate(bench, DType::f32, {300, 2, 32}, bound);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = run(bench, x);
  omp_set_num_threads(3);
  const auto three = run(bench, x);
  omp_set_num_threads(threads);
  CHECK(difference(three.da_log, one.da_log, 0) == "");
  CHECK(difference(three.ddt_bias, one.ddt_bias, 0) == "");
}

TEST_CASE("kda_gate refuses tensors that do not fit", "[ops][cpu]") {
  Bench bench;
  const auto f32 = DType::f32;
  const Gate good = random_gate(bench, f32, {4, 2, 3}, -5.0);
  const auto refused = [&](auto&& spoil) {
    Gate x = good;
    spoil(x);
    CHECK_THROWS_AS(run(bench, x), Error);
  };
  refused([&](Gate& x) { x.a_log = bench.zeros(f32, {3}); });
  refused([&](Gate& x) { x.dt_bias = bench.zeros(f32, {3, 2}); });
  refused([&](Gate& x) { x.dt_bias = bench.zeros(DType::bf16, {2, 3}); });
  refused([&](Gate& x) { x.b = bench.zeros(f32, {4, 3}); });
  refused([&](Gate& x) { x.dg = bench.zeros(f32, {4, 2, 4}); });
  refused([&](Gate& x) { x.dbeta = bench.zeros(f32, {4}); });
  refused([&](Gate& x) { x.bound = 1.0; });
}

}  // namespace moetrain::test
