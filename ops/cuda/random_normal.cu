// random_normal.cu -- the numbers of ops/random.h, an element a thread.
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/random.h"
#include "ops/random_normal.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256;

// grid (ceil(count / kThreads)), block (kThreads)
template <class T>
__global__ void random_normal_kernel(T* __restrict__ y, std::int64_t count, std::uint64_t seed, std::uint64_t stream,
                                     std::int64_t first, std::int64_t row, std::int64_t gap, double deviation) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto r = philox(seed, stream, std::uint64_t(first + i + i / row * gap));
  const double u = detail::open_unit(r[0], r[1]), v = detail::open_unit(r[2], r[3]);
  y[i] = from_float<T>(float(deviation * (sqrt(-2 * log(u)) * cos(2 * std::numbers::pi * v))));
}

template <class T>
void fill_normal(Context& ctx, const RandomNormal& a) {
  launch(ctx, random_normal_kernel<device_t<T>>, Grid(blocks(a.y.count(), kThreads), kThreads), device_pointer<T>(a.y), a.y.count(),
         a.seed, a.stream, a.first, std::max<std::int64_t>(1, a.y.shape.row()), a.gap(), a.deviation);
}

}  // namespace

void cuda::random_normal(Context& ctx, const RandomNormal& a) {
  if (a.y.dtype == DType::f32)
    fill_normal<float>(ctx, a);
  else if (a.y.dtype == DType::bf16)
    fill_normal<bf16>(ctx, a);
  else
    fail("random_normal: on CUDA y is f32 or bf16", {{"dtype", std::int64_t(a.y.dtype)}});
}

}  // namespace moetrain::ops
