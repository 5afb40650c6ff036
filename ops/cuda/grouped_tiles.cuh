// grouped_tiles.cuh -- which tile of which group a pair of blocks multiplies next; the bounds of the groups lie on the device.
#pragma once
#include <cstdint>

namespace moetrain::ops::cuda::grouped {

constexpr int kPair = 2;                    // blocks that share the columns of a tile
constexpr int kRows = 128, kColumns = 256;  // of a block's tile
constexpr int kWidthStep = 32;              // columns by which tiles of a group's rows are narrowed to what is needed
constexpr int kDepth = 64;                  // summands of a stage
constexpr int kBand = 8;                    // pairs of blocks side by side on the same columns: what stays in L2 is about square
constexpr int kMostSorted = 1024;           // groups: more are no longer worth sorting

struct Sizes {
  int groups, rows, columns, depth;  // of the outputs; columns of dw; summands, or 0 where they are the group's rows
  bool empty_groups = false;         // have tiles too
};

// A block's tile.
struct Tile {
  std::int32_t group, row;    // of the outputs
  std::int32_t column;        // of dw; else unused
  std::int32_t begin, count;  // rows of the group that take part: all of them for dw; count -1 ends the work
};

// Large groups first, so that none of their long sums begins late.
struct Order {
  int rows[kMostSorted];
  std::uint16_t group[kMostSorted];
};

// By all threads of a block; the next barrier waits for the order.
__device__ inline void sort_groups(const std::int64_t* offsets, int groups, Order& order) {
  for (int g = int(threadIdx.x); g < groups; g += int(blockDim.x)) order.rows[g] = int(offsets[g + 1] - offsets[g]);
  __syncthreads();  // waits for all rows
  for (int g = int(threadIdx.x); g < groups; g += int(blockDim.x)) {
    int rank = 0;
    for (int other = 0; other < groups; ++other)
      rank += order.rows[other] > order.rows[g] || (order.rows[other] == order.rows[g] && other < g);
    order.group[rank] = std::uint16_t(g);
  }
}

// Tiles in the order of groups; within a group in bands of kBand pairs of blocks, so that neighbours read the same operands.
class Schedule {
 public:
  __device__ Schedule(const std::int64_t* offsets, const Sizes& s, const Order* order)
      : offsets_(offsets), order_(order), s_(s), pairs_((s.rows + kPair * kRows - 1) / (kPair * kRows)) {}
  // Tile `index` of this block's pair. Indices must not fall from call to call.
  __device__ Tile tile(std::uint32_t index, std::uint32_t rank) {
    for (; place_ < s_.groups; ++place_) {
      const int group = order_ ? order_->group[place_] : place_;
      const auto begin = int(offsets_[group]), rows = int(offsets_[group + 1]) - begin;
      const int columns = s_.depth > 0 ? rows : rows > 0 || s_.empty_groups ? s_.columns : 0;
      const int across = (columns + kColumns - 1) / kColumns;
      const std::int64_t tiles = std::int64_t(across) * pairs_;
      if (index < before_ + tiles) {
        const int at = int(index - before_), band = at / (across * kBand), width = min(kBand, pairs_ - band * kBand);
        const int in_band = at - band * across * kBand, row = ((band * kBand + in_band % width) * kPair + int(rank)) * kRows;
        const int column = in_band / width * kColumns;
        if (s_.depth == 0) return {group, row, column, begin, rows};
        return {group, row, 0, begin + column, min(kColumns, rows - column)};
      }
      before_ += tiles;
    }
    return {.count = -1};
  }

 private:
  const std::int64_t* offsets_;
  const Order* order_;
  const Sizes& s_;
  int pairs_, place_ = 0;
  std::int64_t before_ = 0;  // tiles of earlier groups
};

// At least one, so that an empty group has sums: of lines that are cleared.
__device__ inline int blocks_of_depth(const Sizes& s, const Tile& t) {
  return max(1, ((s.depth > 0 ? s.depth : t.count) + kDepth - 1) / kDepth);
}
__device__ inline int width_of(const Sizes& s, const Tile& t) {
  return s.depth > 0 ? (t.count + kWidthStep - 1) / kWidthStep * kWidthStep : kColumns;
}

}  // namespace moetrain::ops::cuda::grouped
