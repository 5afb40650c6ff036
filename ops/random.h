// random.h -- counter-based random numbers: a value is a function of (seed, stream, index), so every layout sees the same bits.
#pragma once
#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <string_view>

namespace moetrain::ops {

// Philox 4x32 with 10 rounds (Salmon et al., SC 2011): 128 random bits a counter.
constexpr std::array<std::uint32_t, 4> philox(std::uint64_t key, std::uint64_t stream, std::uint64_t index) {
  std::array<std::uint32_t, 4> c{std::uint32_t(index), std::uint32_t(index >> 32), std::uint32_t(stream),
                                 std::uint32_t(stream >> 32)};
  std::uint32_t k0 = std::uint32_t(key), k1 = std::uint32_t(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t(0xD2511F53U) * c[0], p1 = std::uint64_t(0xCD9E8D57U) * c[2];
    c = {std::uint32_t(p1 >> 32) ^ c[1] ^ k0, std::uint32_t(p1), std::uint32_t(p0 >> 32) ^ c[3] ^ k1, std::uint32_t(p0)};
    k0 += 0x9E3779B9U;
    k1 += 0xBB67AE85U;
  }
  return c;
}

// 64-bit FNV-1a: the stream of a name.
constexpr std::uint64_t stream_of(std::string_view name) {
  std::uint64_t h = 0xcbf29ce484222325U;
  for (const char c : name) h = (h ^ std::uint8_t(c)) * 0x100000001b3U;
  return h;
}

namespace detail {
constexpr double open_unit(std::uint32_t high, std::uint32_t low) {
  return (double((std::uint64_t(high) << 32 | low) >> 12) + 0.5) * 0x1p-52;
}
}  // namespace detail

// Uniform in (0, 1), never an end: 52 bits and a half, since 53 and a half would round up to 1.
inline double uniform(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto r = philox(seed, stream, index);
  return detail::open_unit(r[0], r[1]);
}

// Standard normal by Box-Muller.
inline double normal(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  const auto r = philox(seed, stream, index);
  const double u = detail::open_unit(r[0], r[1]), v = detail::open_unit(r[2], r[3]);
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * v);
}

}  // namespace moetrain::ops
