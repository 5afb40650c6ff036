// reduce_test.cpp -- the sum that decides about clipping: exact where it can be, and never finite over a NaN.
#include "ops/reduce.h"

#include <omp.h>

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

double sum_of_squares(Bench& b, ConstTensor x, double before = 0) {
  const Tensor sum = b.of(DType::f64, {1}, {before});
  ops::sum_of_squares(b.context(), ops::SumOfSquares{.x = x, .sum = sum});
  return sum.as<double>()[0];
}

TEST_CASE("sum_of_squares of (3, 4) adds 25", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    Bench b;
    CHECK(sum_of_squares(b, b.of(type, {2}, {3, 4}), 100) == 125);
    CHECK(sum_of_squares(b, b.empty(type, {0, 5}), 100) == 100);
    CHECK(sum_of_squares(b, b.of(type, {1, 1}, {-2})) == 4);
  }
}

TEST_CASE("sum_of_squares over many runs counts every element once", "[ops][cpu]") {
  // whole numbers: every partial sum is exact, so the order cannot show
  for (const std::int64_t n : {16383, 16384, 16385, 100003}) {
    CAPTURE(n);
    Bench b;
    const Tensor x = b.filled(DType::f32, {n}, [](std::int64_t i) { return i % 101 - 50; });
    double want = 0;
    for (const double v : test::values_of(x)) want += v * v;
    CHECK(sum_of_squares(b, x) == want);
    CHECK(b.guards_hold());
  }
}

TEST_CASE("sum_of_squares gives the same bits on one thread and on three", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.normal(DType::f32, {200001});
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const double one = sum_of_squares(b, x);
  omp_set_num_threads(3);
  const double three = sum_of_squares(b, x);
  omp_set_num_threads(threads);
  CHECK(one == three);
}

TEST_CASE("sum_of_squares does not overflow where f32 would", "[ops][cpu]") {
  Bench b;
  CHECK(test::difference({sum_of_squares(b, b.of(DType::f32, {2}, {3e30, 4e30}))}, {25e60}, 1e-6) == "");
}

TEST_CASE("sum_of_squares is not finite when one element is not", "[ops][cpu]") {
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType type : {DType::f32, DType::f64, DType::bf16})
    for (const double bad : {inf, -inf, nan}) {
      CAPTURE(name_of(type), bad);
      Bench b;
      const Tensor x = b.filled(type, {40000}, [&](std::int64_t i) { return i == 33333 ? bad : 1.0; });
      CHECK(!std::isfinite(sum_of_squares(b, x)));
    }
}

TEST_CASE("sum_of_squares refuses a sum that is not one f64 and an x that is not floating", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor x = b.normal(DType::f32, {3}), f32 = b.zeros(DType::f32, {1}), two = b.zeros(DType::f64, {2});
  const Tensor one = b.zeros(DType::f64, {1}), ids = b.zeros(DType::i32, {3});
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = x, .sum = f32}), Error);
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = x, .sum = two}), Error);
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = ids, .sum = one}), Error);
}

}  // namespace
}  // namespace moetrain
