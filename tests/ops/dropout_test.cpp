// dropout_test.cpp -- the share that is dropped, its independence of cuts, and that it is its own adjoint.
#include "ops/dropout.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::test;

TEST_CASE("dropout zeroes its share, enlarges the rest, and is the same however tokens are cut", "[ops][cpu]") {
  Bench bench;
  constexpr std::int64_t T = 400, I = 53;
  const Tensor x = bench.uniform(DType::f64, {T, I}, -1, 1), whole = bench.empty(DType::f64, {T, I}),
               cut = bench.empty(DType::f64, {T, I});
  const auto drop = [&](std::int64_t first, std::int64_t last, Tensor y) {
    ops::dropout(
        bench.context(),
        ops::Dropout{
            .seed = 3, .stream = 4, .first_token = 1000 + first, .share = 0.3, .x = x.rows(first, last), .y = y.rows(first, last)});
  };
  drop(0, T, whole);
  std::int64_t zeros = 0;
  for (std::int64_t i = 0; i < T * I; ++i) {
    const double y = Bench::get(whole, i);
    zeros += y == 0;
    if (y != 0) CHECK(std::abs(y - Bench::get(x, i) / 0.7) <= 1e-14);
  }
  CHECK(std::abs(double(zeros) / double(T * I) - 0.3) < 0.01);  // three deviations are 0.0095
  for (const auto& [first, last] : {std::pair{0, 1}, {1, 130}, {130, 400}}) drop(first, last, cut);
  CHECK(values_of(cut) == values_of(whole));
  drop(0, T, x);  // in place
  CHECK(values_of(x) == values_of(whole));
}

TEST_CASE("dropout of some columns is that of all columns", "[ops][cpu]") {
  Bench bench;
  constexpr std::int64_t T = 40, I = 53, first = 9, width = 21;
  const Tensor ones = bench.filled(DType::f64, {T, I}, [](std::int64_t) { return 1.0; }), whole = bench.empty(DType::f64, {T, I}),
               some = bench.filled(DType::f64, {T, width}, [](std::int64_t) { return 1.0; });
  ops::Dropout d{.seed = 3, .stream = 4, .first_token = 1000, .share = 0.3, .x = ones, .y = whole};
  ops::dropout(bench.context(), d);
  d.x = d.y = some, d.column = first, d.width = I;
  ops::dropout(bench.context(), d);
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < width; ++i) CHECK(Bench::get(some, t * width + i) == Bench::get(whole, t * I + first + i));
  d.column = 40;
  CHECK_THROWS_AS(ops::dropout(bench.context(), d), Error);
}

TEST_CASE("dropout of nothing copies, and a share of all is refused", "[ops][cpu]") {
  Bench bench;
  const Tensor x = bench.uniform(DType::bf16, {3, 5}, -1, 1), y = bench.empty(DType::bf16, {3, 5});
  ops::Dropout d{.seed = 1, .stream = 1, .first_token = 0, .share = 0, .x = x, .y = y};
  ops::dropout(bench.context(), d);
  CHECK(values_of(x) == values_of(y));
  d.share = 1;
  CHECK_THROWS_AS(ops::dropout(bench.context(), d), Error);
}

TEST_CASE("dropout on CUDA leaves out and enlarges what the CPU does, from any place on", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench;
  DeviceBench there;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [T, I, first] : {std::tuple<std::int64_t, std::int64_t, std::int64_t>{400, 53, 1001}, {1, 1, 0}, {0, 7, 3},
                                      {9, 1024, std::int64_t(1) << 33}}) {
      CAPTURE(dtype, T, I, first);
      const Tensor x = bench.uniform(dtype, {T, I}, -1, 1), y = bench.empty(dtype, {T, I});
      for (const std::int64_t width : {I, I + 5}) {  // all columns, and the last of more
        const Tensor dx = there.copy(x), dy = there.empty(dtype, {T, I});
        ops::Dropout d{
            .seed = 3, .stream = 4, .first_token = first, .share = 0.3, .x = x, .y = y, .column = width - I, .width = width};
        ops::dropout(bench.context(), d);
        d.x = dx, d.y = dy;
        ops::dropout(there.context(), d);
        CHECK(values_of(there.to_host(bench, dy)) == values_of(y));
        d.y = dx;
        ops::dropout(there.context(), d);  // in place
        CHECK(values_of(there.to_host(bench, dx)) == values_of(y));
      }
    }
  CHECK(there.guards_hold());
}
