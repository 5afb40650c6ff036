// key_sums.cuh -- gradients of keys: for each key the sum over the queries that read it, in ascending order of the queries, without
// atomics. Plain arithmetic in f32, for any width and either storage; key_tiles.h does it on tensor cores.
#pragma once
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {

// sum[s, from + c] += sum over rows and n of weight[row, n, slot] * value[row, n, c], slot: where row lists key s
template <class T>
struct KeyTerm {
  const float* weight;  // (rows, N, K)
  const T* value;       // (rows, N), elements `stride` apart
  std::int64_t stride, from, columns;
};
template <class T>
struct KeySums {
  static constexpr int kTerms = 3;
  KeyTerm<T> terms[kTerms];
  const std::int32_t* slots;  // (keys, rows) slot of the key in the row, -1: not there
  float* sums;                // (keys, width)
  std::int64_t keys, rows, N, K, width;
  bool first;  // write the sums, else add
};

namespace key_sums {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// grid (rows), any block: slots[s, row] = k where indices[row, k] = s; slots comes filled with -1
static __global__ void invert_kernel(const std::int32_t* __restrict__ indices, std::int32_t* __restrict__ slots, std::int64_t rows,
                                     std::int64_t K, std::int64_t keys) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t k = threadIdx.x; k < K; k += blockDim.x) {
    const std::int64_t s = indices[row * K + k];
    if (s < 0) continue;
    if (s >= keys) __trap();  // no position: as the CPU, refuse rather than read what is not there
    slots[s * rows + row] = std::int32_t(k);
  }
}

// grid (keys, ceil(width / kThreads)), block (kThreads): a thread a column
template <class T>
__global__ void sum_kernel(KeySums<T> a) {
  __shared__ std::int32_t row_of[kThreads], slot_of[kThreads], filled[kWarps];
  const std::int64_t s = blockIdx.x, c = std::int64_t(blockIdx.y) * kThreads + threadIdx.x;
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float sum = a.first || c >= a.width ? 0.0F : a.sums[s * a.width + c];
  for (std::int64_t base = 0; base < a.rows; base += kThreads) {
    const std::int64_t row = base + threadIdx.x;
    const std::int32_t slot = row < a.rows ? a.slots[s * a.rows + row] : -1;
    const unsigned int there = __ballot_sync(0xffffffffU, slot >= 0);
    if (lane == 0) filled[warp] = __popc(there);
    __syncthreads();  // waits for the counts of all warps
    int at = __popc(there & ((1U << lane) - 1)), total = 0;
    for (unsigned int w = 0; w < kWarps; ++w) {
      at += w < warp ? filled[w] : 0;
      total += filled[w];
    }
    if (slot >= 0) row_of[at] = std::int32_t(row), slot_of[at] = slot;
    __syncthreads();  // waits for the list
    for (int i = 0; i < total; ++i)
      for (const KeyTerm<T>& term : a.terms) {
        if (c < term.from || c >= term.from + term.columns) continue;
        const float* weight = term.weight + row_of[i] * a.N * a.K + slot_of[i];
        const T* value = term.value + row_of[i] * a.N * term.stride + c - term.from;
        for (std::int64_t n = 0; n < a.N; ++n) sum += weight[n * a.K] * to_float(value[n * term.stride]);
      }
    __syncthreads();  // waits for the readers of the list
  }
  if (c < a.width) a.sums[s * a.width + c] = sum;
}

// grid (rows), any block: to[row, c] = the sum over parts of sums[part, row, from + c], in their order
template <class T>
__global__ void store_kernel(const float* __restrict__ sums, T* __restrict__ to, std::int64_t parts, std::int64_t part_size,
                             std::int64_t width, std::int64_t from, std::int64_t columns) {
  const std::int64_t row = blockIdx.x;
  for (std::int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
    float sum = 0;
    for (std::int64_t part = 0; part < parts; ++part) sum += sums[part * part_size + row * width + from + c];
    to[row * columns + c] = from_float<T>(sum);
  }
}

}  // namespace key_sums

// Where each key stands in each row.
inline void invert(Context& ctx, const std::int32_t* indices, std::int32_t* slots, std::int64_t rows, std::int64_t K,
                   std::int64_t keys) {
  cuda_ok(cudaMemsetAsync(slots, 0xff, std::size_t(rows * keys) * sizeof *slots, ctx.stream));
  launch(ctx, key_sums::invert_kernel, {blocks(rows, 1), dim3(256)}, indices, slots, rows, K, keys);
}
template <class T>
void sum_keys(Context& ctx, const KeySums<T>& a) {
  launch(ctx, key_sums::sum_kernel<T>, {dim3(blocks(a.keys, 1), blocks(a.width, key_sums::kThreads)), dim3(key_sums::kThreads)}, a);
}
// Columns [from, from + columns) of f32 sums (parts, rows, width), added over the parts and rounded once.
template <class T>
void store_sums(Context& ctx, const float* sums, T* to, std::int64_t parts, std::int64_t rows, std::int64_t width,
                std::int64_t from, std::int64_t columns) {
  if (columns > 0)
    launch(ctx, key_sums::store_kernel<T>, {blocks(rows, 1), dim3(128)}, sums, to, parts, rows * width, width, from, columns);
}

}  // namespace moetrain::ops::cuda
