// glu_test.cpp -- SwiGLU and SiTU-GLU by hand, as slope, at their bounds, and in every storage type.
#include "ops/glu.h"

#include <cmath>
#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using ops::GluKind;
using test::Bench;

TEST_CASE("glu of g = ln 3 is 0.75 g u for silu, and bounded by tanh for situ", "[ops][cpu]") {
  Bench b;
  const double g0 = std::log(3.0);  // sigmoid 3/4, and tanh(g / 2) = 1/2
  const Tensor g = b.of(DType::f64, {1, 1}, {g0}), u = b.of(DType::f64, {1, 1}, {2 * g0}), y = b.empty(DType::f64, {1, 1});
  ops::glu(b.context(), ops::GluForward{.kind = GluKind::silu, .beta = 0, .linear_beta = 0, .g = g, .u = u, .y = y});
  CHECK(test::difference(test::values_of(y), {1.5 * g0 * g0}, 1e-15) == "");
  // b1 = 2: 2 (1/2) (3/4); b2 = 4: 4 tanh(g / 2) = 2
  ops::glu(b.context(), ops::GluForward{.kind = GluKind::situ, .beta = 2, .linear_beta = 4, .g = g, .u = u, .y = y});
  CHECK(test::difference(test::values_of(y), {1.5}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("glu backward is the slope of glu forward", "[ops][cpu]") {
  for (const GluKind kind : {GluKind::silu, GluKind::situ}) {
    CAPTURE(int(kind));
    Bench b;
    const Tensor g = b.normal(DType::f64, {4, 5}, 2), u = b.normal(DType::f64, {4, 5}, 2), c = b.normal(DType::f64, {4, 5});
    const Tensor y = b.empty(DType::f64, {4, 5}), dg = b.copy(c), du = b.empty(DType::f64, {4, 5}),  // dg aliases dy
        again = b.empty(DType::f64, {4, 5}), dots = b.empty(DType::f64, {4});
    const auto f = [&] {
      ops::glu(b.context(), ops::GluForward{.kind = kind, .beta = 1.5, .linear_beta = 2.5, .g = g, .u = u, .y = y});
      return test::weighted_sum(y, c);
    };
    ops::glu(
        b.context(),
        ops::GluBackward{
            .kind = kind, .beta = 1.5, .linear_beta = 2.5, .dy = dg, .g = g, .u = u, .dg = dg, .du = du, .y = again, .dots = dots});
    f();
    CHECK(test::difference(test::values_of(again), test::values_of(y), 1e-15) == "");
    for (std::int64_t r = 0; r < 4; ++r)
      CHECK(std::abs(Bench::get(dots, r) - test::weighted_sum(y.rows(r, r + 1), c.rows(r, r + 1))) <= 1e-13);
    CHECK(test::slope_difference(f, g, dg, 1e-8) == "");
    CHECK(test::slope_difference(f, u, du, 1e-8) == "");
    CHECK(b.guards_hold());
  }
}

TEST_CASE("glu stays finite where the exponential overflows, and situ within its bounds", "[ops][cpu]") {
  for (const GluKind kind : {GluKind::silu, GluKind::situ}) {
    CAPTURE(int(kind));
    Bench b;
    const Tensor g = b.of(DType::f32, {1, 4}, {-200, 200, -200, 200}), u = b.of(DType::f32, {1, 4}, {300, 300, -300, -300});
    const Tensor y = b.empty(DType::f32, {1, 4}), dg = b.empty(DType::f32, {1, 4}), du = b.empty(DType::f32, {1, 4});
    ops::glu(b.context(), ops::GluForward{.kind = kind, .beta = 4, .linear_beta = 25, .g = g, .u = u, .y = y});
    const double most = kind == GluKind::silu ? 60000 : 100;
    CHECK(test::difference(test::values_of(y), {0, most, 0, -most}, 1e-6) == "");
    ops::glu(b.context(),
             ops::GluBackward{.kind = kind, .beta = 4, .linear_beta = 25, .dy = u, .g = g, .u = u, .dg = dg, .du = du});
    for (const Tensor& t : {dg, du})
      for (const double v : test::values_of(t)) CHECK(std::isfinite(v));
  }
}

TEST_CASE("glu in f32 and bf16 is within rounding of f64 on the same operands", "[ops][cpu]") {
  struct Sizes {
    std::int64_t R, F;
  };
  for (const GluKind kind : {GluKind::silu, GluKind::situ})
    for (const DType type : {DType::f32, DType::bf16})
      for (const Sizes& s : {Sizes{1, 1}, Sizes{3, 7}, Sizes{101, 211}}) {
        CAPTURE(int(kind), name_of(type), s.R, s.F);
        Bench b;
        const double bound = type == DType::bf16 ? 4e-3 : 1e-5;  // the slope of g is a difference of two terms
        const Tensor g = b.normal(type, {s.R, s.F}, 3), u = b.normal(type, {s.R, s.F}, 3), dy = b.normal(type, {s.R, s.F});
        const Tensor y = b.empty(type, g.shape), dg = b.empty(type, g.shape), du = b.empty(type, g.shape);
        const Tensor y64 = b.empty(DType::f64, g.shape), dg64 = b.empty(DType::f64, g.shape), du64 = b.empty(DType::f64, g.shape);
        const Tensor g64 = b.as(DType::f64, g), u64 = b.as(DType::f64, u), dy64 = b.as(DType::f64, dy);
        ops::glu(b.context(), ops::GluForward{.kind = kind, .beta = 4, .linear_beta = 25, .g = g, .u = u, .y = y});
        ops::glu(b.context(), ops::GluForward{.kind = kind, .beta = 4, .linear_beta = 25, .g = g64, .u = u64, .y = y64});
        CHECK(test::difference(y, y64, bound) == "");
        ops::glu(b.context(),
                 ops::GluBackward{.kind = kind, .beta = 4, .linear_beta = 25, .dy = dy, .g = g, .u = u, .dg = dg, .du = du});
        ops::glu(
            b.context(),
            ops::GluBackward{.kind = kind, .beta = 4, .linear_beta = 25, .dy = dy64, .g = g64, .u = u64, .dg = dg64, .du = du64});
        CHECK(test::difference(dg, dg64, bound) == "");
        CHECK(test::difference(du, du64, bound) == "");
        CHECK(b.guards_hold());
      }
}

TEST_CASE("glu takes zero rows and refuses tensors that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor none = b.empty(DType::f32, {0, 4});
  ops::glu(ctx, ops::GluForward{.kind = GluKind::silu, .beta = 0, .linear_beta = 0, .g = none, .u = none, .y = none});
  CHECK(b.guards_hold());
  const Tensor g = b.normal(DType::f32, {2, 3}), u = b.normal(DType::f32, {3, 2}), half = b.empty(DType::bf16, {2, 3});
  CHECK_THROWS_AS(ops::glu(ctx, ops::GluForward{.kind = GluKind::silu, .beta = 1, .linear_beta = 1, .g = g, .u = u, .y = g}),
                  Error);
  CHECK_THROWS_AS(ops::glu(ctx, ops::GluForward{.kind = GluKind::silu, .beta = 1, .linear_beta = 1, .g = g, .u = g, .y = half}),
                  Error);
  CHECK_THROWS_AS(ops::glu(ctx, ops::GluForward{.kind = GluKind::situ, .beta = 0, .linear_beta = 1, .g = g, .u = g, .y = g}),
                  Error);
  CHECK_THROWS_AS(
      ops::glu(ctx,
               ops::GluBackward{.kind = GluKind::silu, .beta = 1, .linear_beta = 1, .dy = g, .g = g, .u = g, .dg = g, .du = u}),
      Error);
}

struct GluResults {
  Tensor y, dg, du, again, dots;
};

GluResults glu_on_cuda(Bench& b, GluKind kind, ConstTensor g, ConstTensor u, ConstTensor dy) {
  test::DeviceBench d;
  const Tensor gate = d.copy(g), up = d.copy(u), y = d.empty(g.dtype, g.shape), dg = d.copy(dy),  // dg aliases dy, and du u
      again = d.empty(g.dtype, g.shape), dots = d.empty(DType::f32, {g.shape[0]});
  ops::glu(d.context(), ops::GluForward{.kind = kind, .beta = 4, .linear_beta = 25, .g = gate, .u = up, .y = y});
  ops::glu(
      d.context(),
      ops::GluBackward{
          .kind = kind, .beta = 4, .linear_beta = 25, .dy = dg, .g = gate, .u = up, .dg = dg, .du = up, .y = again, .dots = dots});
  const GluResults host{d.to_host(b, y), d.to_host(b, dg), d.to_host(b, up), d.to_host(b, again), d.to_host(b, dots)};
  CHECK(d.guards_hold());
  return host;
}

TEST_CASE("glu on CUDA is within rounding of the f64 reference, and the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const GluKind kind : {GluKind::silu, GluKind::situ})
    for (const DType type : {DType::f32, DType::bf16})
      for (const auto& [R, F] : {std::pair<std::int64_t, std::int64_t>{1, 1}, {3, 7}, {101, 211}, {300, 1024}, {0, 8}}) {
        CAPTURE(int(kind), name_of(type), R, F);
        Bench b;
        const double bound = type == DType::bf16 ? 4e-3 : 1e-5;
        const Tensor g = b.normal(type, {R, F}, 3), u = b.normal(type, {R, F}, 3), dy = b.normal(type, {R, F});
        const GluResults got = glu_on_cuda(b, kind, g, u, dy);
        if (R == 0) continue;
        const Tensor y64 = b.empty(DType::f64, g.shape), dg64 = b.empty(DType::f64, g.shape), du64 = b.empty(DType::f64, g.shape),
                     dots64 = b.empty(DType::f64, {R});
        const Tensor g64 = b.as(DType::f64, g), u64 = b.as(DType::f64, u), dy64 = b.as(DType::f64, dy);
        ops::glu(b.context(), ops::GluForward{.kind = kind, .beta = 4, .linear_beta = 25, .g = g64, .u = u64, .y = y64});
        ops::glu(b.context(), ops::GluBackward{.kind = kind,
                                               .beta = 4,
                                               .linear_beta = 25,
                                               .dy = dy64,
                                               .g = g64,
                                               .u = u64,
                                               .dg = dg64,
                                               .du = du64,
                                               .dots = dots64});
        CHECK(test::difference(got.y, y64, bound) == "");
        CHECK(std::memcmp(got.again.data, got.y.data, std::size_t(got.y.bytes())) == 0);
        CHECK(test::difference(got.dots, dots64, 1e-5) == "");
        CHECK(test::difference(got.dg, dg64, bound) == "");
        CHECK(test::difference(got.du, du64, bound) == "");
        for (int run = 0; run < 20; ++run) {
          const GluResults again = glu_on_cuda(b, kind, g, u, dy);
          for (const auto& [one, other] : {std::pair(again.y, got.y), std::pair(again.dg, got.dg), std::pair(again.du, got.du),
                                           std::pair(again.dots, got.dots)})
            CHECK(std::memcmp(one.data, other.data, std::size_t(one.bytes())) == 0);
        }
      }
}

TEST_CASE("glu on CUDA stays finite where the exponential overflows, and situ within its bounds", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const GluKind kind : {GluKind::silu, GluKind::situ}) {
    CAPTURE(int(kind));
    Bench b;
    const Tensor g = b.of(DType::f32, {1, 4}, {-200, 200, -200, 200}), u = b.of(DType::f32, {1, 4}, {300, 300, -300, -300});
    const GluResults got = glu_on_cuda(b, kind, g, u, u);
    const double most = kind == GluKind::silu ? 60000 : 100;
    CHECK(test::difference(test::values_of(got.y), {0, most, 0, -most}, 1e-6) == "");
    for (const Tensor& t : {got.dg, got.du})
      for (const double v : test::values_of(t)) CHECK(std::isfinite(v));
  }
}

}  // namespace
}  // namespace moetrain
