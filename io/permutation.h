// permutation.h -- a pseudo-random order of n things that needs no list of them: the place of any one is computed by itself.
#pragma once
#include <cstdint>

namespace moetrain::io {

inline std::uint64_t mixed(std::uint64_t x) {  // every output bit depends on every input bit; one to one
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ULL;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93ULL;
  return x ^ x >> 32;
}

// i -> the i-th thing of the order keyed by (seed, epoch); one to one on [0, n). A Feistel network on the smallest even number of
// bits that holds n, walked on until it lands inside [0, n): under four tries on average.
inline std::int64_t permuted(std::int64_t i, std::int64_t n, std::uint64_t seed, std::uint64_t epoch) {
  constexpr int kRounds = 8;
  int half_bits = 1;
  while (half_bits < 31 && (std::int64_t{1} << 2 * half_bits) < n) ++half_bits;
  const std::uint64_t half_mask = (std::uint64_t{1} << half_bits) - 1;
  const std::uint64_t key = mixed(mixed(seed + 0x9e3779b97f4a7c15ULL) ^ epoch);
  auto place = std::uint64_t(i);
  do {
    std::uint64_t left = place >> half_bits, right = place & half_mask;
    for (int round = 0; round < kRounds; ++round) {
      const std::uint64_t next = left ^ (mixed(key + std::uint64_t(round) * 0x9e3779b97f4a7c15ULL + mixed(right + 1)) & half_mask);
      left = right;
      right = next;
    }
    place = left << half_bits | right;
  } while (place >= std::uint64_t(n));
  return std::int64_t(place);
}

}  // namespace moetrain::io
