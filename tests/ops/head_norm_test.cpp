// head_norm_test.cpp -- both head norms against numbers by hand, their slopes, and f64.
#include "ops/head_norm.h"

#include <omp.h>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

struct L2 {
  Tensor y, r, dx;
};
L2 l2(Bench& bench, Tensor x, Tensor dy, double eps) {
  const L2 out{bench.empty(x.dtype, x.shape), bench.empty(real_of(x.dtype), {x.shape[0], x.shape[1]}),
               bench.empty(x.dtype, x.shape)};
  ops::head_l2(bench.context(), ops::HeadL2Forward{.x = x, .y = out.y, .r = out.r, .eps = eps});
  ops::head_l2(bench.context(), ops::HeadL2Backward{.dy = dy, .y = out.y, .r = out.r, .dx = out.dx});
  return out;
}

struct Gated {
  Tensor y, r, do_, dgate, dw;
};
Gated gated(Bench& bench, Tensor o, Tensor gate, Tensor w, Tensor dy, double eps) {
  const Gated out{bench.empty(o.dtype, o.shape), bench.empty(w.dtype, {o.shape[0], o.shape[1]}), bench.empty(o.dtype, o.shape),
                  bench.empty(o.dtype, o.shape), bench.zeros(w.dtype, w.shape)};
  ops::gated_head_norm(bench.context(),
                       ops::GatedHeadNormForward{.o = o, .gate = gate, .w = w, .y = out.y, .r = out.r, .eps = eps});
  ops::gated_head_norm(bench.context(),
                       ops::GatedHeadNormBackward{
                           .dy = dy, .o = o, .gate = gate, .w = w, .r = out.r, .do_ = out.do_, .dgate = out.dgate, .dw = out.dw});
  return out;
}

}  // namespace

TEST_CASE("head_l2 of (3, 4) is (0.6, 0.8), each head by itself", "[ops][cpu]") {
  Bench bench;
  const Tensor x = bench.of(DType::f64, {1, 2, 2}, {3, 4, 0, 1}), dy = bench.of(DType::f64, {1, 2, 2}, {5, 0, 1, 1});
  const auto out = l2(bench, x, dy, 0);
  CHECK(difference(values_of(out.y), {0.6, 0.8, 0, 1}, 1e-15) == "");
  CHECK(difference(values_of(out.r), {0.2, 1}, 1e-15) == "");
  CHECK(difference(values_of(out.dx), {0.64, -0.48, 1, 0}, 1e-14) == "");  // 0.2 ((5, 0) - 3 (0.6, 0.8))
  const auto damped = l2(bench, x, dy, 75);                                // 25 + 75: the eps is inside the root
  CHECK(difference(values_of(damped.y.reshape({4}).rows(0, 2)), {0.3, 0.4}, 1e-15) == "");
}

TEST_CASE("gated_head_norm worked by hand", "[ops][cpu]") {
  // o = (3, 4): mean square 12.5, with eps 12.5 the root is 5. Gate 0 halves, a large gate lets through.
  Bench bench;
  const auto f64 = DType::f64;
  const Tensor o = bench.of(f64, {1, 1, 2}, {3, 4}), gate = bench.of(f64, {1, 1, 2}, {0, 800}), w = bench.of(f64, {2}, {1, 10}),
               dy = bench.of(f64, {1, 1, 2}, {1, 1});
  const auto out = gated(bench, o, gate, w, dy, 12.5);
  CHECK(difference(values_of(out.r), {0.2}, 1e-15) == "");
  CHECK(difference(values_of(out.y), {0.3, 8}, 1e-14) == "");
  CHECK(difference(values_of(out.dw), {0.3, 0.8}, 1e-14) == "");
  CHECK(difference(values_of(out.dgate), {0.15, 0}, 1e-14) == "");
  // e = (0.5, 10), oh = (0.6, 0.8), mean(e oh) = 4.15: do = 0.2 (e - 4.15 oh)
  CHECK(difference(values_of(out.do_), {0.2 * (0.5 - 2.49), 0.2 * (10 - 3.32)}, 1e-14) == "");
}

TEST_CASE("head_norm backward is the slope of head_norm forward", "[ops][cpu]") {
  Bench bench(2);
  const auto f64 = DType::f64;
  const Shape shape{5, 3, 7};
  const Tensor x = bench.normal(f64, shape), gate = bench.normal(f64, shape), w = bench.normal(f64, {7}),
               dy = bench.normal(f64, shape), y = bench.empty(f64, shape), r = bench.empty(f64, {5, 3});
  const auto norm = l2(bench, x, dy, 1e-2);
  const auto norm_loss = [&] {
    ops::head_l2(bench.context(), ops::HeadL2Forward{x, y, r, 1e-2});
    return weighted_sum(y, dy);
  };
  CHECK(slope_difference(norm_loss, x, norm.dx) == "");

  const auto out = gated(bench, x, gate, w, dy, 1e-2);
  const auto loss = [&] {
    ops::gated_head_norm(bench.context(), ops::GatedHeadNormForward{x, gate, w, y, r, 1e-2});
    return weighted_sum(y, dy);
  };
  CHECK(slope_difference(loss, x, out.do_) == "");
  CHECK(slope_difference(loss, gate, out.dgate) == "");
  CHECK(slope_difference(loss, w, out.dw) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("head_norm gradients may overwrite dy, dw adds, and a frozen w needs none", "[ops][cpu]") {
  Bench bench(3);
  const auto f64 = DType::f64;
  const Shape shape{300, 2, 3};  // rows past one group of sums
  const Tensor o = bench.normal(f64, shape), gate = bench.normal(f64, shape), w = bench.normal(f64, {3}),
               dy = bench.normal(f64, shape);
  const auto out = gated(bench, o, gate, w, dy, 1e-5);
  const Tensor over = bench.copy(dy), dgate = bench.empty(f64, shape), dw = bench.copy(out.dw);
  ops::gated_head_norm(bench.context(), ops::GatedHeadNormBackward{over, o, gate, w, out.r, over, dgate, dw});
  CHECK(difference(over, out.do_, 0) == "");
  CHECK(difference(dgate, out.dgate, 0) == "");
  for (std::int64_t i = 0; i < 3; ++i) CHECK(std::abs(Bench::get(dw, i) - 2 * Bench::get(out.dw, i)) <= 1e-12);
  const Tensor frozen = bench.empty(f64, shape);
  ops::gated_head_norm(bench.context(), ops::GatedHeadNormBackward{dy, o, gate, w, out.r, frozen, dgate, {}});
  CHECK(difference(frozen, out.do_, 0) == "");

  const auto norm = l2(bench, o, dy, 1e-6);
  const Tensor dx = bench.copy(dy);
  ops::head_l2(bench.context(), ops::HeadL2Backward{dx, norm.y, norm.r, dx});
  CHECK(difference(dx, norm.dx, 0) == "");
}

TEST_CASE("head_norm in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const std::int64_t T = GENERATE(0, 1, 333), H = GENERATE(1, 33, 128);
  Bench bench(4);
  const Shape shape{T, 2, H};
  const Tensor x = bench.normal(dtype, shape), gate = bench.normal(dtype, shape), w = bench.normal(DType::f32, {H}),
               dy = bench.normal(dtype, shape);
  const auto wide = [&](Tensor t) { return bench.as(DType::f64, t); };
  const auto norm = l2(bench, x, dy, 1e-6), norm64 = l2(bench, wide(x), wide(dy), 1e-6);
  const auto out = gated(bench, x, gate, w, dy, 1e-5), out64 = gated(bench, wide(x), wide(gate), wide(w), wide(dy), 1e-5);
  CHECK(bench.guards_hold());
  if (T == 0) {
    CHECK(difference(out.dw, out64.dw, 0, 1e-300) == "");
    return;
  }
  const double rounding = dtype == DType::bf16 ? 6e-3 : 5e-6;
  CHECK(difference(norm.y, norm64.y, rounding) == "");
  CHECK(difference(norm.r, norm64.r, 2e-6) == "");
  CHECK(difference(out.y, out64.y, rounding) == "");
  CHECK(difference(out.r, out64.r, 2e-6) == "");
  CHECK(difference(out.dgate, out64.dgate, rounding) == "");
  CHECK(difference(out.dw, out64.dw, 2e-5) == "");
  if (H > 1) {  // one channel's norm is its sign: nothing but rounding is left of the gradient
    CHECK(difference(norm.dx, norm64.dx, 2 * rounding) == "");
    CHECK(difference(out.do_, out64.do_, rounding) == "");
  }
}

TEST_CASE("head_norm of zeros is zero with finite gradients", "[ops][cpu]") {
  Bench bench(5);
  const Shape shape{2, 1, 4};
  const Tensor zero = bench.zeros(DType::f32, shape), dy = bench.normal(DType::f32, shape), w = bench.normal(DType::f32, {4});
  const auto norm = l2(bench, zero, dy, 1e-6);
  CHECK(difference(norm.y, zero, 0, 1e-300) == "");
  const Tensor want = bench.filled(DType::f32, shape, [&](std::int64_t i) { return 1e3 * Bench::get(dy, i); });  // eps^-1/2 dy
  CHECK(difference(norm.dx, want, 1e-5) == "");
  CHECK(difference(gated(bench, zero, zero, w, dy, 1e-5).y, zero, 0, 1e-300) == "");
}

TEST_CASE("head_norm gives the same bits with any number of threads", "[ops][cpu]") {
  Bench bench(6);
  const Shape shape{600, 2, 32};
  const Tensor o = bench.normal(DType::f32, shape), gate = bench.normal(DType::f32, shape), w = bench.normal(DType::f32, {32}),
               dy = bench.normal(DType::f32, shape);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = gated(bench, o, gate, w, dy, 1e-5);
  omp_set_num_threads(3);
  const auto three = gated(bench, o, gate, w, dy, 1e-5);
  omp_set_num_threads(threads);
  CHECK(difference(three.dw, one.dw, 0) == "");
  CHECK(difference(three.do_, one.do_, 0) == "");
}

TEST_CASE("head_norm refuses tensors that do not fit", "[ops][cpu]") {
  Bench bench;
  const auto f32 = DType::f32;
  const Tensor x = bench.zeros(f32, {4, 2, 3}), r = bench.zeros(f32, {4, 2}), w = bench.zeros(f32, {3});
  auto& ctx = bench.context();
  CHECK_THROWS_AS(ops::head_l2(ctx, ops::HeadL2Forward{x, bench.zeros(f32, {4, 3, 2}), r, 0}), Error);
  CHECK_THROWS_AS(ops::head_l2(ctx, ops::HeadL2Forward{x, x, bench.zeros(f32, {4}), 0}), Error);
  CHECK_THROWS_AS(ops::head_l2(ctx, ops::HeadL2Backward{x, x, bench.zeros(DType::bf16, {4, 2}), x}), Error);
  CHECK_THROWS_AS(ops::head_l2(ctx, ops::HeadL2Backward{bench.zeros(f32, {4, 2}), x, r, x}), Error);
  CHECK_THROWS_AS(ops::gated_head_norm(ctx, ops::GatedHeadNormForward{x, x, bench.zeros(f32, {2}), x, r, 0}), Error);
  CHECK_THROWS_AS(ops::gated_head_norm(ctx, ops::GatedHeadNormForward{x, bench.zeros(f32, {4, 2, 4}), w, x, r, 0}), Error);
  CHECK_THROWS_AS(ops::gated_head_norm(ctx, ops::GatedHeadNormBackward{x, x, x, w, r, x, bench.zeros(f32, {4, 2, 4}), {}}), Error);
  CHECK_THROWS_AS(ops::gated_head_norm(ctx, ops::GatedHeadNormBackward{x, x, x, w, r, x, x, bench.zeros(f32, {4})}), Error);
}

}  // namespace moetrain::test
