// vocabulary.cu -- one token a thread.
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/vocabulary.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256;

// grid (ceil(T / kThreads)), block (kThreads)
__global__ void local_ids_kernel(const std::int32_t* ids, std::int32_t* y, std::int64_t T, std::int32_t first, std::int32_t count) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= T) return;
  const std::int32_t id = ids[t];
  y[t] = id == kIgnored ? kIgnored : first <= id && id - first < count ? id - first : kElsewhere;
}

// grid (ceil(s / kThreads)), block (kThreads)
__global__ void merge_sums_kernel(const float* __restrict__ parts, float* __restrict__ all, std::int64_t ranks, std::int64_t s) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t >= s) return;
  float top = parts[t], sum = 0, label = 0;
  for (std::int64_t r = 1; r < ranks; ++r) top = fmaxf(top, parts[r * 3 * s + t]);
  for (std::int64_t r = 0; r < ranks; ++r) {
    sum += parts[(r * 3 + 1) * s + t] * exp2f((parts[r * 3 * s + t] - top) * kLog2E);
    label += parts[(r * 3 + 2) * s + t];
  }
  all[t] = top;
  all[s + t] = sum;
  all[2 * s + t] = label;
}

}  // namespace

void cuda::local_ids(Context& ctx, const LocalIds& a) {
  const std::int64_t T = a.ids.count();
  if (T > 0)
    launch(ctx, local_ids_kernel, Grid(blocks(T, kThreads), kThreads), a.ids.as<std::int32_t>(), a.y.as<std::int32_t>(), T,
           std::int32_t(a.first), std::int32_t(a.count));
}

void cuda::merge_sums(Context& ctx, const MergeSums& a) {
  const std::int64_t s = a.parts.shape[2];
  if (s > 0)
    launch(ctx, merge_sums_kernel, Grid(blocks(s, kThreads), kThreads), a.parts.as<float>(), a.all.as<float>(), a.parts.shape[0], s);
}

}  // namespace moetrain::ops
