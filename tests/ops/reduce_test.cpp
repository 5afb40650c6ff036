// reduce_test.cpp -- the sum that decides about clipping: exact where it can be, and never finite over a NaN.
#include "ops/reduce.h"

#include <omp.h>

#include <cmath>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

double sum_of_squares(Bench& b, const ConstTensor& x, double before = 0) {
  const Tensor sum = b.of(DType::f64, {1}, {before});
  ops::sum_of_squares(b.context(), ops::SumOfSquares{.x = {&x, 1}, .sum = sum});
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
  const ConstTensor x = b.normal(DType::f32, {3}), ids = b.zeros(DType::i32, {3});
  const Tensor one = b.zeros(DType::f64, {1}), f32 = b.zeros(DType::f32, {1}), two = b.zeros(DType::f64, {2});
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = {&x, 1}, .sum = f32}), Error);
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = {&x, 1}, .sum = two}), Error);
  CHECK_THROWS_AS(ops::sum_of_squares(ctx, ops::SumOfSquares{.x = {&ids, 1}, .sum = one}), Error);
}

TEST_CASE("sum_of_squares of several tensors is the sum of theirs", "[ops][cpu]") {
  Bench b;
  const std::vector<ConstTensor> x{b.of(DType::f32, {2}, {3, 4}), b.empty(DType::bf16, {0}), b.of(DType::bf16, {1, 1}, {2})};
  const Tensor sum = b.of(DType::f64, {1}, {1});
  ops::sum_of_squares(b.context(), ops::SumOfSquares{.x = x, .sum = sum});
  CHECK(sum.as<double>()[0] == 30);
}

double sum_on_cuda(Bench& b, const std::vector<Tensor>& host, double before, std::int64_t off = 0) {
  test::DeviceBench d;
  std::vector<ConstTensor> x;
  for (const Tensor& t : host) {
    const Tensor all = d.empty(t.dtype, {t.count() + off});
    copy_to_device(Device::cuda, all.rows(off, all.count()).data, t.data, t.bytes());
    x.push_back(all.rows(off, all.count()));
  }
  const Tensor sum = d.copy(b.of(DType::f64, {1}, {before}));
  ops::sum_of_squares(d.context(), ops::SumOfSquares{.x = x, .sum = sum});
  CHECK(d.guards_hold());
  return test::values_of(d.to_host(b, sum))[0];
}

TEST_CASE("sum_of_squares on CUDA counts every element of many tensors once", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  // whole numbers: every partial sum is exact, so the order cannot show
  std::vector<std::int64_t> sizes{1, 0, 3, 32767, 32768, 32769, 200003};
  for (std::int64_t n = 0; n < 300; ++n) sizes.push_back(n * n % 53);
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t off : {0, 1}) {
      CAPTURE(name_of(type), off);
      Bench b;
      std::vector<Tensor> x;
      double want = 7;
      for (const std::int64_t n : sizes) {
        x.push_back(b.filled(type, {n}, [](std::int64_t i) { return i % 101 - 50; }));
        for (const double v : test::values_of(x.back())) want += v * v;
      }
      CHECK(sum_on_cuda(b, x, 7, off) == want);
    }
}

TEST_CASE("sum_of_squares on CUDA keeps f64 range, repeats its bits, and is not finite when one element is not", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  CHECK(test::difference({sum_on_cuda(b, {b.of(DType::f32, {2}, {3e30, 4e30})}, 0)}, {25e60}, 1e-6) == "");
  const std::vector<Tensor> x{b.normal(DType::f32, {300007}), b.normal(DType::bf16, {70001}), b.empty(DType::f32, {0})};
  double want = 0;
  for (const Tensor& t : x)
    for (const double v : test::values_of(t)) want += v * v;
  const double first = sum_on_cuda(b, x, 0);
  CHECK(test::difference({first}, {want}, 1e-12) == "");
  for (int run = 0; run < 20; ++run) CHECK(sum_on_cuda(b, x, 0) == first);
  const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
  for (const DType type : {DType::f32, DType::bf16})
    for (const double bad : {inf, -inf, nan}) {
      CAPTURE(name_of(type), bad);
      const Tensor broken = b.filled(type, {40000}, [&](std::int64_t i) { return i == 33333 ? bad : 1.0; });
      CHECK(!std::isfinite(sum_on_cuda(b, {broken, x[1]}, 0)));
    }
}

}  // namespace
}  // namespace moetrain
