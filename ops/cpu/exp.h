// exp.h -- exp and sigmoid in a form that a loop over them vectorises: KDA and its gates call them for every channel.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

namespace moetrain::ops::cpu {

// exp(x) as an R. f64: the library's. f32: x is reduced in f64, so differences of long sums lose nothing; within about one ulp;
// 0 below -87.33 (where normal numbers end), infinite above 88; NaN stays NaN.
template <class R>
inline R exp_as(double x) {
  if constexpr (std::is_same_v<R, double>) {
    return std::exp(x);
  } else {
    constexpr double kLog2E = 1.4426950408889634, kLn2 = 0.6931471805599453, kToInteger = 0x1.8p52;
    constexpr std::uint32_t kInfinity = 0x7f800000U;
    const double shifted = x * kLog2E + kToInteger;  // the low bits of its mantissa are the rounded integer
    const float r = float(x - (shifted - kToInteger) * kLn2);
    float p = 1.0F / 5040;  // Taylor: |r| <= ln 2 / 2, so the eighth power is 5e-9
    p = p * r + 1.0F / 720;
    p = p * r + 1.0F / 120;
    p = p * r + 1.0F / 24;
    p = p * r + 1.0F / 6;
    p = p * r + 0.5F;
    p = p * r + 1.0F;
    p = p * r + 1.0F;
    const auto power = std::uint32_t(std::bit_cast<std::uint64_t>(shifted)) + 127U;
    const auto y = std::bit_cast<std::uint32_t>(p * std::bit_cast<float>(power << 23));
    const auto tiny = std::uint32_t(0) - std::uint32_t(x < -87.33);  // masks of all bits: with a branch no loop vectorises
    const auto huge = std::uint32_t(0) - std::uint32_t(x > 88.0);
    return std::bit_cast<float>((y & ~tiny & ~huge) | (huge & kInfinity));
  }
}

template <class R>
inline R sigmoid(R x) {
  return R(1) / (R(1) + exp_as<R>(-double(x)));
}

}  // namespace moetrain::ops::cpu
