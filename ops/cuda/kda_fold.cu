// kda_fold.cu -- the states after the maps of several slices: a chain of products of matrices, in f32.
#include "ops/cuda/launch.cuh"
#include "ops/kda_attention.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kMostRows = 128, kColumns = 32, kWarps = 8, kStep = 16, kRowsOfWarp = kMostRows / kWarps;
constexpr int kThreads = kWarps * kColumns, kParts = kMostRows * kStep / kThreads;

struct FoldArgs {
  const float* maps;  // of the first map
  float* state;
  std::int64_t next;  // elements from a map to the one that follows it, be it before it
  int maps_count, H;
};

// grid (states N, ceil(H / 32)), block (32, 8): 32 columns of one state, a warp every eighth row; M comes 16 columns at a time, the
// next ones while these are multiplied. A sum is of N and then of M S in the order of M's columns.
__global__ void __launch_bounds__(kThreads) kda_fold_kernel(const FoldArgs a) {
  __shared__ float S[kMostRows][kColumns];
  __shared__ __align__(16) float M[kMostRows][kStep];
  const int lane = int(threadIdx.x), warp = int(threadIdx.y), thread = warp * kColumns + lane, H = a.H;
  const int column = int(blockIdx.y) * kColumns + lane;
  const std::int64_t elements = std::int64_t(H) * H;
  const float* first = a.maps + blockIdx.x * 2 * elements;
  const auto constant = [&](const float* map, int r) {  // of N: row r of this warp
    const int row = warp + kWarps * r;
    return row < H && column < H ? map[std::int64_t(row) * 2 * H + column] : 0.0F;
  };
  float sum[kRowsOfWarp], coming[kParts];
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) S[warp + kWarps * r][lane] = sum[r] = constant(first, r);

  const int steps = (H + kStep - 1) / kStep, all = (a.maps_count - 1) * steps;
  const auto fetch = [&](int i) {  // step i of all maps but the first
    const float* m = first + (i / steps + 1) * a.next + H;
#pragma unroll
    for (int x = 0; x < kParts; ++x) {
      const int row = (thread + kThreads * x) / kStep, k = i % steps * kStep + thread % kStep;
      coming[x] = row < H && k < H ? m[std::int64_t(row) * 2 * H + k] : 0.0F;
    }
  };
  if (all > 0) fetch(0);
#pragma unroll 1
  for (int i = 0; i < all; ++i) {
    const int step = i % steps;
    __syncthreads();  // waits for the readers of M, and for the state
#pragma unroll
    for (int x = 0; x < kParts; ++x) M[(thread + kThreads * x) / kStep][thread % kStep] = coming[x];
    __syncthreads();  // waits for M
    if (i + 1 < all) fetch(i + 1);
    if (step == 0)
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) sum[r] = constant(first + (i / steps + 1) * a.next, r);
#pragma unroll
    for (int k = 0; k < kStep; k += 4) {
      float s[4];
#pragma unroll
      for (int x = 0; x < 4; ++x) s[x] = S[step * kStep + k + x][lane];
#pragma unroll
      for (int r = 0; r < kRowsOfWarp; ++r) {
        const float4 m = *reinterpret_cast<const float4*>(&M[warp + kWarps * r][k]);
        sum[r] += m.x * s[0];
        sum[r] += m.y * s[1];
        sum[r] += m.z * s[2];
        sum[r] += m.w * s[3];
      }
    }
    if (step + 1 < steps) continue;
    __syncthreads();  // waits for the readers of the state
#pragma unroll
    for (int r = 0; r < kRowsOfWarp; ++r) S[warp + kWarps * r][lane] = sum[r];
  }
  float* to = a.state + blockIdx.x * elements;
#pragma unroll
  for (int r = 0; r < kRowsOfWarp; ++r) {
    const int row = warp + kWarps * r;
    if (row < H && column < H) to[std::int64_t(row) * H + column] = sum[r];
  }
}

}  // namespace

void cuda::kda_fold(Context& ctx, const KdaFold& a) {
  const std::int64_t heads = a.state.shape[0] * a.state.shape[1], H = a.state.shape[2], map = heads * H * 2 * H;
  check(H <= kMostRows, "kda_fold: CUDA has heads of up to 128", {{"H", H}});
  if (a.first == a.end) {
    if (a.state.bytes() > 0) cuda_ok(cudaMemsetAsync(a.state.data, 0, std::size_t(a.state.bytes()), ctx.stream));
    return;
  }
  const bool down = a.end < a.first;
  launch(ctx, kda_fold_kernel, {dim3(blocks(heads, 1), blocks(H, kColumns)), dim3(kColumns, kWarps)},
         FoldArgs{.maps = a.maps.as<float>() + a.first * map,
                  .state = a.state.as<float>(),
                  .next = down ? -map : map,
                  .maps_count = int(down ? a.first - a.end : a.end - a.first),
                  .H = int(H)});
}

}  // namespace moetrain::ops
