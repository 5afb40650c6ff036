// reduce.cu -- sums of squares of many tensors in f64: a block a run of fixed length, then one block over the sums of the runs.
#include <array>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/reduce.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256, kSumThreads = 1024;
constexpr std::int64_t kRun = 1 << 15;  // elements
constexpr int kMost = 600;              // tensors of a launch, in 16 KB of its parameters

struct Source {
  const void* data;
  std::int64_t count;
  std::int32_t first_run;
  bool half, packed;  // bf16; may be read in packs
};
struct Sources {
  std::array<Source, kMost> at;
  int count;
};

// The sum over a block, in thread 0, in a fixed order.
__device__ double block_sum_f64(double x) {
  __shared__ double of_warp[kWarp];
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffU, x, lanes);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // waits for every warp's sum
  if (threadIdx.x >= kWarp) return 0;
  x = threadIdx.x < blockDim.x / kWarp ? of_warp[threadIdx.x] : 0;
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffU, x, lanes);
  return x;
}

template <int kCount, class T>
__device__ double sum_of_squares(const T* x, std::int64_t n) {
  double sum = 0;
  const std::int64_t packs = n / kCount;
#pragma unroll 4
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const auto xs = load_floats<kCount>(x + p * kCount);
    for (int i = 0; i < kCount; ++i) sum += double(xs.at[i]) * double(xs.at[i]);
  }
  if (const std::int64_t i = packs * kCount + threadIdx.x; i < n) sum += double(to_float(x[i])) * double(to_float(x[i]));
  return sum;
}

template <class T>
__device__ double sum_of_squares(const Source& s, std::int64_t begin) {
  const T* x = static_cast<const T*>(s.data) + begin;
  const std::int64_t n = min(kRun, s.count - begin);
  return s.packed ? sum_of_squares<16 / sizeof(T)>(x, n) : sum_of_squares<1>(x, n);
}

// grid (runs of all sources), block (kThreads): sums[run]. Bound by the bytes of x.
__global__ void __launch_bounds__(kThreads)
    sum_of_squares_kernel(const __grid_constant__ Sources sources, double* __restrict__ sums) {
  int low = 0, high = sources.count - 1;  // the last source that begins at or before this run
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (sources.at[middle].first_run <= int(blockIdx.x))
      low = middle;
    else
      high = middle - 1;
  }
  const Source& s = sources.at[low];
  const std::int64_t begin = std::int64_t(int(blockIdx.x) - s.first_run) * kRun;
  const double sum = block_sum_f64(s.half ? sum_of_squares<__nv_bfloat16>(s, begin) : sum_of_squares<float>(s, begin));
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// one block (kSumThreads)
__global__ void sum_of_squares_sum_kernel(const double* __restrict__ sums, double* __restrict__ sum, std::int64_t runs) {
  double mine = 0;
#pragma unroll 4
  for (std::int64_t run = threadIdx.x; run < runs; run += kSumThreads) mine += sums[run];
  mine = block_sum_f64(mine);
  if (threadIdx.x == 0) *sum += mine;
}

}  // namespace

void cuda::sum_of_squares(Context& ctx, const SumOfSquares& a) {
  std::int64_t runs = 0;
  for (const ConstTensor& x : a.x) runs += blocks(x.count(), kRun);
  if (runs == 0) return;
  Scope scope(ctx.scratch);
  double* sums = ctx.scratch.take(DType::f64, {runs}).as<double>();
  Sources sources{};
  std::int64_t launched = 0, pending = 0;
  const auto flush = [&] {
    launch(ctx, sum_of_squares_kernel, {blocks(pending, 1), kThreads}, sources, sums + launched);
    launched += pending;
    pending = sources.count = 0;
  };
  for (const ConstTensor& x : a.x) {
    check(x.dtype != DType::f64, "sum_of_squares: CUDA has f32 and bf16 only");
    if (x.count() == 0) continue;
    sources.at[std::size_t(sources.count++)] = {x.data, x.count(), std::int32_t(pending), x.dtype == DType::bf16, aligned({x})};
    pending += blocks(x.count(), kRun);
    if (sources.count == kMost) flush();
  }
  if (pending > 0) flush();
  launch(ctx, sum_of_squares_sum_kernel, {1, kSumThreads}, sums, a.sum.as<double>(), runs);
}

}  // namespace moetrain::ops
