// grouped_tiles.cuh -- which tile of which group a pair of blocks multiplies next; the bounds of the groups lie on the device.
#pragma once
#include <cstdint>

#include "ops/cuda/pair_tiles.cuh"

namespace moetrain::ops::cuda::grouped {

using namespace pair;

constexpr int kWidthStep = 32;     // columns by which tiles of a group's rows are narrowed to what is needed
constexpr int kMostSorted = 1024;  // groups: more are no longer worth sorting

struct Sizes {
  int groups, rows, columns, depth;  // of the outputs; columns of dw; summands, or 0 where they are the group's rows
  bool empty_groups = false;         // have tiles too
  int stacked = 1;                   // matrices of so many rows one below the other,
  int summed = 1;                    // and products of so many summands one after another
};

// A block's tile.
struct Tile {
  std::int32_t group, matrix, row;  // of the outputs
  std::int32_t column;              // of dw; else unused
  std::int32_t begin, count;        // rows of the group that take part: all of them for dw; count -1 ends the work
};

// Large groups first, so that none of their long sums begins late.
struct Order {
  std::uint16_t group[kMostSorted];
};

// By all threads of a block, with room for a count a group; the next barrier waits for the order.
__device__ inline void sort_groups(const std::int64_t* offsets, int groups, int* rows, Order& order) {
  for (int g = int(threadIdx.x); g < groups; g += int(blockDim.x)) rows[g] = int(offsets[g + 1] - offsets[g]);
  __syncthreads();  // waits for all rows
  for (int g = int(threadIdx.x); g < groups; g += int(blockDim.x)) {
    int rank = 0;
    for (int other = 0; other < groups; ++other) rank += rows[other] > rows[g] || (rows[other] == rows[g] && other < g);
    order.group[rank] = std::uint16_t(g);
  }
}

// Tiles in the order of groups.
class Schedule {
 public:
  __device__ Schedule(const std::int64_t* offsets, const Sizes& s, const Order* order)
      : offsets_(offsets), order_(order), s_(s), pairs_(s.stacked * pairs_of(s.rows)) {}
  // Tile `index` of this block's pair. Indices must not fall from call to call.
  __device__ Tile tile(std::uint32_t index, std::uint32_t rank) {
    for (; place_ < s_.groups; ++place_) {
      const int group = order_ ? order_->group[place_] : place_;
      const auto begin = int(offsets_[group]), rows = int(offsets_[group + 1]) - begin;
      const int columns = s_.depth > 0 ? rows : rows > 0 || s_.empty_groups ? s_.columns : 0;
      const int across = tiles_across(columns), tiles = across * pairs_;
      if (int(index) < before_ + tiles) {
        const auto [pair, column] = InBands(int(index) - before_, pairs_, across);
        const int matrix = s_.stacked > 1 ? pair / pairs_of(s_.rows) : 0;
        const int row = ((pair - matrix * pairs_of(s_.rows)) * kPair + int(rank)) * kRows;
        if (s_.depth == 0) return {group, matrix, row, column, begin, rows};
        return {group, matrix, row, 0, begin + column, min(kColumns, rows - column)};
      }
      before_ += tiles;
    }
    return {.count = -1};
  }

 private:
  const std::int64_t* offsets_;
  const Order* order_;
  const Sizes& s_;
  int pairs_, place_ = 0, before_ = 0;  // tiles of earlier groups
};

}  // namespace moetrain::ops::cuda::grouped
