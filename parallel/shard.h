// shard.h -- which rows of dim 0 a rank of a group holds.
#pragma once
#include <algorithm>
#include <cstdint>

namespace moetrain::parallel {

struct Rows {
  std::int64_t begin = 0, end = 0;
  std::int64_t count() const { return end - begin; }
  bool operator==(const Rows&) const = default;
};

// Rows a shard is padded to, so that shards are equal when gathered.
constexpr std::int64_t shard_rows(std::int64_t rows, int ranks) { return (rows + ranks - 1) / ranks; }

// Rank r of n holds [r c, min(R, (r+1) c)), c = ceil(R / n): one hyperslab of the whole, contiguous when gathered.
constexpr Rows shard_of(std::int64_t rows, int rank, int ranks) {
  const std::int64_t c = shard_rows(rows, ranks);
  return {std::min(rows, rank * c), std::min(rows, (rank + 1) * c)};
}

// Rank r of n has [r R / n, (r + 1) R / n): parts that differ by one at most, none empty where R >= n.
constexpr Rows part_of(std::int64_t rows, int rank, int ranks) { return {rows * rank / ranks, rows * (rank + 1) / ranks}; }

}  // namespace moetrain::parallel
