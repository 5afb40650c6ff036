// head_linear_test.cpp -- both directions of head_linear against numbers worked by hand, their own slopes, and f64.
#include "ops/head_linear.h"

#include <cmath>
#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

using ops::HeadDirection;

TEST_CASE("head_linear takes the named rows and columns in both directions", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  // one head, rows 1..2 of three, latent of two: the slice is ((1, 2), (3, 4))
  const auto w = bench.of(f64, {1, 3, 2}, {99, 99, 1, 2, 3, 4});
  const auto x = bench.of(f64, {1, 1, 3}, {77, 10, 1}), latent = bench.empty(f64, {1, 1, 2});
  ops::head_linear(bench.context(),
                   ops::HeadLinearForward{
                       .direction = HeadDirection::to_latent, .w = w, .row = 1, .width = 2, .x = x, .column = 1, .y = latent});
  CHECK(difference(values_of(latent), {13, 24}, 1e-15) == "");
  const auto y = bench.of(f64, {1, 1, 3}, {-7, 0, 0});
  ops::head_linear(bench.context(),
                   ops::HeadLinearForward{
                       .direction = HeadDirection::from_latent, .w = w, .row = 1, .width = 2, .x = latent, .column = 1, .y = y});
  CHECK(difference(values_of(y), {-7, 13 + 48, 39 + 96}, 1e-15) == "");
  CHECK(bench.guards_hold());
}

struct Case {
  HeadDirection direction;
  std::int64_t T, N, A, C, row, width, X, column;
  bool to() const { return direction == HeadDirection::to_latent; }
  Shape x() const { return to() ? Shape{T, N, X} : Shape{T, N, C}; }
  Shape y() const { return to() ? Shape{T, N, C} : Shape{T, N, X}; }
  bool in_slice(std::int64_t i) const { return i % X >= column && i % X < column + width; }  // element i on the heads' side
};

TEST_CASE("head_linear backward is the slope of forward, in the slice only, and dw adds", "[ops][cpu]") {
  const auto direction = GENERATE(HeadDirection::to_latent, HeadDirection::from_latent);
  const Case c{direction, 6, 3, 9, 5, 2, 4, 7, 1};
  Bench bench(4);
  const auto f64 = DType::f64;
  const auto w = bench.normal(f64, {c.N, c.A, c.C}), x = bench.normal(f64, c.x()), y = bench.zeros(f64, c.y()),
             dy = bench.normal(f64, c.y());
  const auto f = [&] {
    ops::head_linear(
        bench.context(),
        ops::HeadLinearForward{.direction = direction, .w = w, .row = c.row, .width = c.width, .x = x, .column = c.column, .y = y});
    return weighted_sum(y, dy);
  };
  const auto dx = bench.empty(f64, c.x()), dw = bench.zeros(f64, w.shape);
  ops::HeadLinearBackward backward{
      .direction = direction, .w = w, .row = c.row, .width = c.width, .x = x, .column = c.column, .dy = dy, .dx = dx, .dw = dw};
  ops::head_linear(bench.context(), backward);
  if (c.to())
    for (std::int64_t i = 0; i < dx.count(); ++i) {
      CHECK(std::isnan(Bench::get(dx, i)) != c.in_slice(i));
      if (!c.in_slice(i)) Bench::set(dx, i, 0);  // its slope is zero
    }
  CHECK(slope_difference(f, x, dx, 1e-8, 0, 200) == "");
  CHECK(slope_difference(f, w, dw, 1e-8, 0, 200) == "");

  const auto again = bench.copy(dw);
  backward.dw = again;
  backward.dx = {};
  ops::head_linear(bench.context(), backward);
  auto doubled = values_of(dw);
  for (auto& v : doubled) v *= 2;
  CHECK(difference(values_of(again), doubled, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("head_linear from the latent leaves the other columns of y as they were", "[ops][cpu]") {
  const auto type = GENERATE(DType::f64, DType::f32, DType::bf16);
  Bench bench(5);
  const Case c{HeadDirection::from_latent, 4, 2, 6, 3, 3, 3, 8, 4};
  const auto w = bench.normal(type, {c.N, c.A, c.C}), x = bench.normal(type, c.x()), y = bench.empty(type, c.y());
  ops::head_linear(
      bench.context(),
      ops::HeadLinearForward{.direction = c.direction, .w = w, .row = c.row, .width = c.width, .x = x, .column = c.column, .y = y});
  for (std::int64_t i = 0; i < y.count(); ++i) CHECK(std::isnan(Bench::get(y, i)) != c.in_slice(i));
  CHECK(bench.guards_hold());
}

TEST_CASE("head_linear in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto direction = GENERATE(HeadDirection::to_latent, HeadDirection::from_latent);
  const auto T = GENERATE(std::int64_t(1), std::int64_t(131));
  CAPTURE(name_of(type), int(direction), T);
  const Case c{direction, T, 3, 40, 33, 17, 19, 31, 5};
  Bench bench(6);
  const auto w = bench.normal(type, {c.N, c.A, c.C}), x = bench.normal(type, c.x()), dy = bench.normal(type, c.y());
  const auto run = [&](DType storage) {
    std::vector<Tensor> out{bench.zeros(storage, c.y()), bench.zeros(storage, c.x()), bench.zeros(real_of(storage), w.shape)};
    const auto ws = bench.as(storage, w), xs = bench.as(storage, x), dys = bench.as(storage, dy);
    ops::head_linear(
        bench.context(),
        ops::HeadLinearForward{
            .direction = direction, .w = ws, .row = c.row, .width = c.width, .x = xs, .column = c.column, .y = out[0]});
    ops::head_linear(bench.context(), ops::HeadLinearBackward{.direction = direction,
                                                              .w = ws,
                                                              .row = c.row,
                                                              .width = c.width,
                                                              .x = xs,
                                                              .column = c.column,
                                                              .dy = dys,
                                                              .dx = out[1],
                                                              .dw = out[2]});
    return out;
  };
  const auto got = run(type), want = run(DType::f64);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(difference(got[i], want[i], got[i].dtype == DType::bf16 ? 4e-3 : 3e-6) == "");
  }
  CHECK(bench.guards_hold());
}

struct Operands {
  Tensor w, x, dy, dw;
};

// y, dx and dw; y and dx start as zeros, dw from values: the columns and rows outside the slice are told apart.
std::vector<Tensor> results(ops::Context& ctx, const Case& c, const Operands& o, std::vector<Tensor> out) {
  ops::head_linear(
      ctx, ops::HeadLinearForward{
               .direction = c.direction, .w = o.w, .row = c.row, .width = c.width, .x = o.x, .column = c.column, .y = out[0]});
  ops::head_linear(ctx, ops::HeadLinearBackward{.direction = c.direction,
                                                .w = o.w,
                                                .row = c.row,
                                                .width = c.width,
                                                .x = o.x,
                                                .column = c.column,
                                                .dy = o.dy,
                                                .dx = out[1],
                                                .dw = out[2]});
  return out;
}

std::vector<Tensor> on_cuda(Bench& bench, const Case& c, const Operands& o) {
  DeviceBench d;
  const auto zeros = [&](const Shape& s) { return d.copy(bench.zeros(o.x.dtype, s)); };
  std::vector<Tensor> host;
  const Operands there{d.copy(o.w), d.copy(o.x), d.copy(o.dy), d.copy(o.dw)};
  for (const Tensor& t : results(d.context(), c, there, {zeros(c.y()), zeros(c.x()), there.dw}))
    host.push_back(d.to_host(bench, t));
  CHECK(d.guards_hold());
  return host;
}

TEST_CASE("head_linear on CUDA is within rounding of the f64 reference, and the same bits in 20 runs", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto direction : {HeadDirection::to_latent, HeadDirection::from_latent})
      for (const Case& c : {Case{direction, 1, 3, 40, 33, 17, 19, 31, 5}, Case{direction, 131, 3, 40, 33, 17, 19, 31, 5},
                            Case{direction, 200, 5, 256, 512, 128, 128, 192, 0}, Case{direction, 77, 2, 9, 5, 2, 4, 7, 1}}) {
        CAPTURE(name_of(type), int(direction), c.T, c.C);
        Bench bench(7);
        const Operands o{bench.normal(type, {c.N, c.A, c.C}), bench.normal(type, c.x()), bench.normal(type, c.y()),
                         bench.normal(DType::f32, {c.N, c.A, c.C})};
        const auto wide = [&](ConstTensor t) { return bench.as(DType::f64, t); };
        const auto got = on_cuda(bench, c, o);
        const auto want = results(bench.context(), c, {wide(o.w), wide(o.x), wide(o.dy), {}},
                                  {bench.zeros(DType::f64, c.y()), bench.zeros(DType::f64, c.x()), wide(o.dw)});
        for (std::size_t i = 0; i < got.size(); ++i) {
          CAPTURE(i);
          CHECK(difference(got[i], want[i], got[i].dtype == DType::bf16 ? 1e-2 : 2e-5) == "");
        }
        for (int run = 0; run < 20; ++run) {
          const auto again = on_cuda(bench, c, o);
          for (std::size_t i = 0; i < got.size(); ++i)
            CHECK(std::memcmp(again[i].data, got[i].data, std::size_t(got[i].bytes())) == 0);
        }
      }
}

TEST_CASE("head_linear on CUDA takes zero rows", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench;
  const Case c{HeadDirection::to_latent, 0, 2, 4, 3, 0, 4, 5, 1};
  const Operands o{bench.normal(DType::bf16, {2, 4, 3}), bench.empty(DType::bf16, c.x()), bench.empty(DType::bf16, c.y()),
                   bench.normal(DType::f32, {2, 4, 3})};
  CHECK(values_of(on_cuda(bench, c, o)[2]) == values_of(o.dw));
}

TEST_CASE("head_linear takes zero rows and refuses what does not fit", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  const auto w = bench.normal(f64, {2, 4, 3}), x = bench.empty(f64, {0, 2, 5}), y = bench.empty(f64, {0, 2, 3}),
             dw = bench.filled(f64, {2, 4, 3}, [](auto) { return 1; });
  ops::HeadLinearForward forward{.direction = HeadDirection::to_latent, .w = w, .row = 0, .width = 4, .x = x, .column = 1, .y = y};
  ops::head_linear(bench.context(), forward);
  ops::HeadLinearBackward backward{
      .direction = HeadDirection::to_latent, .w = w, .row = 0, .width = 4, .x = x, .column = 1, .dy = y, .dx = x, .dw = dw};
  ops::head_linear(bench.context(), backward);
  CHECK(values_of(dw) == std::vector<double>(24, 1.0));
  forward.column = 2;  // columns [2, 6) of 5
  CHECK_THROWS_AS(ops::head_linear(bench.context(), forward), Error);
  forward.column = 0;
  forward.row = 1;  // rows [1, 5) of 4
  CHECK_THROWS_AS(ops::head_linear(bench.context(), forward), Error);
  forward.row = 0;
  forward.direction = HeadDirection::from_latent;
  CHECK_THROWS_AS(ops::head_linear(bench.context(), forward), Error);
  backward.dw = bench.zeros(DType::f32, {2, 4, 3});
  CHECK_THROWS_AS(ops::head_linear(bench.context(), backward), Error);
}

}  // namespace
}  // namespace moetrain::test
