// compare_test.cpp -- the tests' own measure: it must refuse NaN, zeros compared with zeros, and one bad element among many.
#include "tests/support/compare.h"

#include <limits>

#include "tests/support/catch.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

const double kNan = std::numeric_limits<double>::quiet_NaN(), kInfinity = std::numeric_limits<double>::infinity();

TEST_CASE("difference accepts values within its bound and no others", "[memory][cpu]") {
  CHECK(test::difference({1.0, 2.0}, {1.0, 2.0}, 0) == "");
  CHECK(test::difference({1.0, 2.001}, {1.0, 2.0}, 1e-3) == "");
  CHECK(test::difference({1.0, 2.003}, {1.0, 2.0}, 1e-3) != "");
  CHECK(test::difference({1.0, 1.997}, {1.0, 2.0}, 1e-3) != "");
  CHECK(test::difference({-1.0}, {1.0}, 1e-3) != "");
}

TEST_CASE("difference refuses NaN and infinity on either side", "[memory][cpu]") {
  for (const double bad : {kNan, kInfinity, -kInfinity}) {
    CHECK(test::difference({bad, 1.0}, {1.0, 1.0}, 1e9, 1e9) != "");
    CHECK(test::difference({1.0, 1.0}, {1.0, bad}, 1e-3) != "");
  }
  CHECK(test::difference({kNan}, {kNan}, 1, 1) != "");
}

TEST_CASE("difference refuses other sizes, zeros and nothing", "[memory][cpu]") {
  CHECK(test::difference({1.0}, {1.0, 1.0}, 1) != "");
  CHECK(test::difference({0.0, 0.0}, {0.0, 0.0}, 1) != "");
  CHECK(test::difference(std::vector<double>{}, std::vector<double>{}, 1) != "");
  CHECK(test::difference({0.0, 0.0}, {0.0, 0.0}, 1, 1e-12) == "");
  CHECK(test::difference({0.0, 1e-11}, {0.0, 0.0}, 1, 1e-12) != "");
}

TEST_CASE("difference finds the one bad element of many", "[memory][cpu]") {
  std::vector<double> want(1000, 1.0), got = want;
  got[777] = 1.1;
  CHECK(test::difference(got, want, 1e-2).find("[777]") == 0);
}

TEST_CASE("values_of widens every type", "[memory][cpu]") {
  test::Bench b;
  for (const DType type : {DType::f32, DType::f64, DType::bf16, DType::i32, DType::i64})
    CHECK(test::values_of(b.of(type, {3}, {1, -2, 3})) == std::vector<double>{1, -2, 3});
}

TEST_CASE("slope_difference accepts a true gradient and refuses a wrong sign, a zero and a NaN", "[memory][cpu]") {
  test::Bench b;
  const Tensor x = b.of(DType::f64, {3}, {0.5, -1, 2});
  const double* p = x.as<double>();
  const auto f = [&] { return p[0] * p[0] * p[0] + p[1] * p[2]; };
  CHECK(test::slope_difference(f, x, b.of(DType::f64, {3}, {0.75, 2, -1}), 1e-9) == "");
  CHECK(test::slope_difference(f, x, b.of(DType::f64, {3}, {0.75, 2, 1}), 1e-9) != "");
  CHECK(test::slope_difference(f, x, b.of(DType::f64, {3}, {0, 2, -1}), 1e-9) != "");
  CHECK(test::slope_difference(f, x, b.of(DType::f64, {3}, {kNan, 2, -1}), 1e-9) != "");
  CHECK(test::slope_difference([] { return 1.0; }, x, b.zeros(DType::f64, {3}), 1e-9) != "");
  CHECK(test::slope_difference([] { return kInfinity; }, x, b.zeros(DType::f64, {3}), 1e-9, 1) != "");
  CHECK(test::values_of(x) == std::vector<double>{0.5, -1, 2});
}

TEST_CASE("a bench notices a write past a tensor's end", "[memory][cpu]") {
  test::Bench b;
  const Tensor t = b.zeros(DType::f32, {3});
  CHECK(b.guards_hold());
  static_cast<float*>(t.data)[3] = 1;
  CHECK(!b.guards_hold());
}

}  // namespace
}  // namespace moetrain
