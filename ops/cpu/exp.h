// exp.h -- exp, sigmoid and tanh in a form that a loop over them vectorises: the gated units call them for every element.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace moetrain::ops::cpu {

// x = n ln 2 + r with |r| <= ln 2 / 2: exp(x) = 2^n + 2^n (exp(r) - 1).
struct SplitExponent {
  float r;
  std::uint32_t n;  // its low bits; the bits of 2^n are (n + 127) << 23 while 2^n is a normal number
  float power() const { return std::bit_cast<float>((n + 127U) << 23); }
  // exp(r) - 1, to the last bits of r however small r is.
  float expm1() const {
    float p = 1.0F / 5040;  // Taylor: the eighth power of r is 5e-9
    p = p * r + 1.0F / 720;
    p = p * r + 1.0F / 120;
    p = p * r + 1.0F / 24;
    p = p * r + 1.0F / 6;
    p = p * r + 0.5F;
    return r + r * r * p;
  }
};

inline SplitExponent split_exponent(double x) {
  constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453, kToInteger = 0x1.8p52;
  const double shifted = x * kLog2E + kToInteger;  // the low bits of its mantissa are the rounded integer
  return {float(x - (shifted - kToInteger) * kLn2), std::uint32_t(std::bit_cast<std::uint64_t>(shifted))};
}
inline SplitExponent split_exponent(float x) {
  constexpr float kLog2E = 1.44269504F, kToInteger = 0x1.8p23F;
  constexpr float kLn2High = 0x1.62e4p-1F, kLn2Low = float(0.6931471805599453 - double(kLn2High));  // n times the first is exact
  const float shifted = x * kLog2E + kToInteger, n = shifted - kToInteger;
  return {(x - n * kLn2High) - n * kLn2Low, std::bit_cast<std::uint32_t>(shifted)};
}

// exp(x) as a float, within about one ulp; 0 below -87.33 (where normal numbers end), infinite above 88; NaN stays NaN.
// X = double: the difference of two long sums loses nothing. X = float: twice as many a vector.
template <class X>
inline float exp_as_float(X x) {
  const SplitExponent split = split_exponent(x);
  const auto y = std::bit_cast<std::uint32_t>((split.expm1() + 1.0F) * split.power());
  const auto tiny = std::uint32_t(0) - std::uint32_t(x < X(-87.33));  // masks of all bits: with a branch no loop vectorises
  const auto huge = std::uint32_t(0) - std::uint32_t(x > X(88.0));
  return std::bit_cast<float>((y & ~tiny & ~huge) | (huge & 0x7f800000U));
}

// exp of an exponent known in f64, as an R.
template <class R>
inline R exp_as(double x) {
  if constexpr (std::is_same_v<R, double>)
    return std::exp(x);
  else
    return exp_as_float(x);
}

inline double exp(double x) { return std::exp(x); }
inline float exp(float x) { return exp_as_float(x); }

template <class R>
inline R sigmoid(R x) {
  return R(1) / (R(1) + exp(-x));
}

inline double tanh(double x) { return std::tanh(x); }
// Within three ulps, also near 0; NaN stays NaN.
inline float tanh(float x) {
  const SplitExponent split = split_exponent(2 * x);
  const float expm1 = split.expm1() * split.power() + (split.power() - 1.0F);
  const auto y = std::bit_cast<std::uint32_t>(expm1 / (expm1 + 2.0F)), bits = std::bit_cast<std::uint32_t>(x);
  const auto one =
      std::uint32_t(0) - std::uint32_t(std::bit_cast<float>(bits & 0x7fffffffU) > 10.0F);  // all bits set where tanh is 1
  return std::bit_cast<float>((y & ~one) | (((bits & 0x80000000U) | 0x3f800000U) & one));
}

}  // namespace moetrain::ops::cpu
