// exp_test.cpp -- the vectorised exp, sigmoid and tanh of the CPU backend against those of the library, over all magnitudes of a
// float.
#include "ops/cpu/exp.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/catch.h"

using namespace moetrain::ops;

namespace {

// Floats of both signs from 0 to most, every magnitude among them.
std::vector<float> floats_up_to(float most) {
  std::vector<float> all;
  for (auto bits = std::uint32_t(0); bits < std::bit_cast<std::uint32_t>(most); bits += 9973)
    for (const float x : {std::bit_cast<float>(bits), -std::bit_cast<float>(bits)}) all.push_back(x);
  return all;
}

// The largest |got - want| in units of the last place of want, over normal numbers.
template <class Got, class Want>
double worst_ulps(const std::vector<float>& xs, Got got, Want want) {
  std::vector<float> y(xs.size());
#pragma omp simd
  for (std::size_t i = 0; i < xs.size(); ++i) y[i] = got(xs[i]);
  double worst = 0;
  for (std::size_t i = 0; i < xs.size(); ++i) {
    const double w = want(double(xs[i]));
    if (std::abs(w) < double(std::numeric_limits<float>::min())) continue;
    const double ulps = std::abs(double(y[i]) - w) / std::ldexp(1.0, std::ilogb(w) - 23);
    if (!(ulps <= worst)) worst = ulps;
  }
  return worst;
}

}  // namespace

TEST_CASE("exp of a float, reduced in f32 or in f64, is within an ulp, and tanh within three down to the smallest numbers",
          "[ops][cpu]") {
  const auto xs = floats_up_to(87.3F);
  CHECK(worst_ulps(
            xs, [](float x) { return cpu::exp(x); }, [](double x) { return std::exp(x); }) < 1);
  CHECK(worst_ulps(
            xs, [](float x) { return cpu::exp_as<float>(double(x)); }, [](double x) { return std::exp(x); }) < 1);
  CHECK(worst_ulps(
            xs, [](float x) { return cpu::tanh(x); }, [](double x) { return std::tanh(x); }) < 3);
  CHECK(worst_ulps(
            xs, [](float x) { return cpu::sigmoid(x); }, [](double x) { return 1 / (1 + std::exp(-x)); }) < 3);
}

TEST_CASE("exp, sigmoid and tanh of a float end where theirs end, and NaN stays NaN", "[ops][cpu]") {
  constexpr float infinity = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  for (const float far : {1e3F, 3e38F, infinity}) {
    CAPTURE(far);
    CHECK(cpu::exp(far) == infinity);
    CHECK(cpu::exp(-far) == 0);
    CHECK(cpu::exp_as<float>(double(far)) == infinity);
    CHECK(cpu::exp_as<float>(-double(far)) == 0);
    CHECK(cpu::sigmoid(far) == 1);
    CHECK(cpu::sigmoid(-far) == 0);
    CHECK(cpu::tanh(far) == 1);
    CHECK(cpu::tanh(-far) == -1);
  }
  CHECK(cpu::exp(0.0F) == 1);
  CHECK(std::isnan(cpu::exp(nan)));
  CHECK(std::isnan(cpu::exp_as<float>(double(nan))));
  CHECK(std::isnan(cpu::sigmoid(nan)));
  CHECK(std::isnan(cpu::tanh(nan)));
}
