// dtype.h -- element types, and bf16 as a storage type that computes in f32 on any backend.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "memory/check.h"

namespace moetrain {

enum class DType : std::uint8_t { none, f32, f64, bf16, i32, i64, u8 };

constexpr std::int64_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16: return 2;
    case DType::u8: return 1;
    case DType::none: return 0;
  }
  return 0;
}

constexpr const char* name_of(DType t) {
  switch (t) {
    case DType::f64: return "fp64";
    case DType::f32: return "fp32";
    case DType::bf16: return "bf16";
    case DType::i64: return "int64";
    case DType::i32: return "int32";
    case DType::u8: return "uint8";
    case DType::none: return "none";
  }
  return "none";
}

constexpr bool is_floating(DType t) { return t == DType::f32 || t == DType::f64 || t == DType::bf16; }

// The type in which values of t are summed, kept as statistics and given gradients: f64 for f64, else f32.
constexpr DType real_of(DType t) { return t == DType::f64 ? DType::f64 : DType::f32; }

// Upper half of an f32, rounded to nearest even. Same bits as __nv_bfloat16.
struct bf16 {
  std::uint16_t bits = 0;
  bf16() = default;
  explicit bf16(float x) {
    const auto u = std::bit_cast<std::uint32_t>(x);
    bits = std::isnan(x) ? std::uint16_t(u >> 16 | 0x40U) : std::uint16_t((u + 0x7fffU + (u >> 16 & 1U)) >> 16);
  }
  explicit bf16(double x) : bf16(float(x)) {}
  operator float() const { return std::bit_cast<float>(std::uint32_t(bits) << 16); }  // NOLINT: implicit on purpose
};

template <class T>
struct DTypeOf;
template <> struct DTypeOf<float> { static constexpr DType value = DType::f32; };
template <> struct DTypeOf<double> { static constexpr DType value = DType::f64; };
template <> struct DTypeOf<bf16> { static constexpr DType value = DType::bf16; };
template <> struct DTypeOf<std::int32_t> { static constexpr DType value = DType::i32; };
template <> struct DTypeOf<std::int64_t> { static constexpr DType value = DType::i64; };
template <> struct DTypeOf<std::uint8_t> { static constexpr DType value = DType::u8; };

}  // namespace moetrain
