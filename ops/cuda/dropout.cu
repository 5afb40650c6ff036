// dropout.cu -- a thread draws the four words of a counter and decides about the elements that they are for.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/dropout.h"
#include "ops/random.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256, kWords = 4;

// grid (ceil(counters / kThreads)), block (kThreads); element i of x has place `first` + i
template <class T>
__global__ void dropout_kernel(const T* x, T* y, std::int64_t count, std::int64_t first, std::uint64_t seed, std::uint64_t stream,
                               std::uint64_t least, float kept) {
  const std::int64_t counter = first / kWords + std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const auto words = philox(seed, stream, std::uint64_t(counter));
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const std::int64_t i = counter * kWords + k - first;
    if (0 <= i && i < count) y[i] = from_float<T>(words[k] >= least ? to_float(x[i]) * kept : 0.0F);
  }
}

// grid (ceil(count / kThreads)), block (kThreads); rows of I elements, between the places of which are `gap` others
template <class T>
__global__ void dropout_columns_kernel(const T* x, T* y, std::int64_t count, std::int64_t first, std::int64_t I, std::int64_t gap,
                                       std::uint64_t seed, std::uint64_t stream, std::uint64_t least, float kept) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  const auto n = std::uint64_t(first + i + i / I * gap);
  y[i] = from_float<T>(philox(seed, stream, n / kWords)[n % kWords] >= least ? to_float(x[i]) * kept : 0.0F);
}

template <class T>
void drop(Context& ctx, const Dropout& a) {
  const std::int64_t count = a.x.count(), I = a.x.shape[1], width = a.whole_width(), first = a.first_token * width + a.column;
  if (count == 0) return;
  if (width != I) {
    launch(ctx, dropout_columns_kernel<device_t<T>>, Grid(blocks(count, kThreads), kThreads), device_pointer<T>(a.x),
           device_pointer<T>(a.y), count, first, I, width - I, a.seed, a.stream, std::uint64_t(a.share * 0x1p32),
           float(1 / (1 - a.share)));
    return;
  }
  const std::int64_t counters = (first + count - 1) / kWords - first / kWords + 1;
  launch(ctx, dropout_kernel<device_t<T>>, Grid(blocks(counters, kThreads), kThreads), device_pointer<T>(a.x),
         device_pointer<T>(a.y), count, first, a.seed, a.stream, std::uint64_t(a.share * 0x1p32), float(1 / (1 - a.share)));
}

}  // namespace

void cuda::dropout(Context& ctx, const Dropout& a) {
  if (a.x.dtype == DType::f32)
    drop<float>(ctx, a);
  else if (a.x.dtype == DType::bf16)
    drop<bf16>(ctx, a);
  else
    fail("dropout: on CUDA x is f32 or bf16", {{"dtype", std::int64_t(a.x.dtype)}});
}

}  // namespace moetrain::ops
