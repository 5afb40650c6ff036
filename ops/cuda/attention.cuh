// attention.cuh -- what the kernels for any head widths and those of wgmma share: where a row's document lies, and the statistics
// that backward reads.
#pragma once
#include "ops/attention.h"
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {

// A block of rows, of queries or of keys, meets columns of the other. Row r sees the columns [low, high): a query the keys of its
// document up to itself, a key the queries of its document from itself on.
struct Seen {
  int low, high;
};
template <bool kRowsAreKeys>
__device__ Seen columns_of(const int2* __restrict__ documents, std::int64_t row, std::int64_t T) {
  if (row >= T) return {0, 0};
  return kRowsAreKeys ? Seen{int(row), documents[row].y} : Seen{documents[row].x, int(row) + 1};
}

// Over the four lanes that hold a row's columns, in each of them.
__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

// Fills (T, 2) i32 with begin and end of each row's document.
void find_documents(Context& ctx, const Documents& documents, Tensor of_rows);

// Fills lse (N, columns) with log2 of a row's sum, and delta (N, columns) with o.do; the columns past T so that they weigh nothing.
void row_statistics(Context& ctx, const AttentionBackward& a, Tensor lse, Tensor delta);

// dk_extra = the sum of parts (groups, T, He) in their order.
void sum_extra_parts(Context& ctx, ConstTensor parts, Tensor dk_extra);

// The tensor cores' own kernels, for bf16 heads of widths that they take.
bool wgmma_takes(const AttentionForward& a);
bool wgmma_takes(const AttentionBackward& a);
void attention_wgmma(Context& ctx, const AttentionForward& a, ConstTensor documents);
void attention_wgmma(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch);

}  // namespace moetrain::ops::cuda
