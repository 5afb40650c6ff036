// attention.cuh -- what the kernels for any head widths and those of wgmma share: what a row sees, and the statistics that backward
// reads.
#pragma once
#include "ops/attention.h"
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {

// A block of rows, of queries or of keys, meets columns of the other: a query sees the keys of its document up to its own, a key
// the queries of its document from its own on. Both are consecutive.
struct Seen {
  int low, high;  // columns [low, high); read one by one, where registers are too few for a pair
};
struct TileSeen {
  Seen any, all;  // all that some of the rows see lies in `any`, and each of them sees `all`
};
constexpr int kSeenTile = 64;  // rows of a tile, of which there are pairs
struct Sight {
  Seen* rows;
  TileSeen* tiles;
  int count;  // rows that there are; those of the last tiles beyond them see nothing
  explicit Sight(const AttentionSight& s)
      : rows(static_cast<Seen*>(s.rows.data)), tiles(static_cast<TileSeen*>(s.tiles.data)), count(int(s.count)) {}
  __device__ Seen any_of_pair(int first) const {  // of the tiles from row `first` on
    const Seen a = tiles[first / kSeenTile].any, b = tiles[first / kSeenTile + 1].any;
    return {min(a.low, b.low), max(a.high, b.high)};
  }
};

// Over the four lanes that hold a row's columns, in each of them.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

// Fills what queries see, and where there are any what keys see.
void find_sight(Context& ctx, const Documents& documents, const AttentionSight& of_queries, const AttentionSight& of_keys = {});

// Fills lse (N, columns) with log2 of a row's sum, and delta (N, columns) with o.do; the columns past T so that they weigh nothing.
void row_statistics(Context& ctx, const AttentionBackward& a, Tensor lse, Tensor delta);

// dk_extra = the sum of parts (groups, keys, He) in their order.
void sum_extra_parts(Context& ctx, ConstTensor parts, Tensor dk_extra);

// The tensor cores' own kernels, for bf16 heads of widths that they take.
bool wgmma_takes(const AttentionForward& a);
bool wgmma_takes(const AttentionBackward& a);
void attention_wgmma(Context& ctx, const AttentionForward& a, const AttentionSight& of_queries);
void attention_wgmma(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch);

}  // namespace moetrain::ops::cuda
