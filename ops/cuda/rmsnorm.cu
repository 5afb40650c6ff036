// rmsnorm.cu -- one block a row, several elements a load; dw gathers in shared memory over the rows of a block, then over the
// blocks.
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/rmsnorm.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr std::int64_t kMaxThreads = 256;
constexpr std::int64_t kParts = 528;              // blocks of backward, and rows of partial dw: four a multiprocessor of an H200
constexpr std::int64_t kSharedBytes = 220 << 10;  // of one block on sm_90, less what block_sum and the system take

// grid (T), block (up to 256): a thread owns the packs threadIdx.x, threadIdx.x + blockDim.x, ... of its row
template <class X, class W, int kCount>
__global__ void rmsnorm_forward_kernel(const X* __restrict__ x, const W* __restrict__ w, X* __restrict__ y, float* __restrict__ r,
                                       std::int64_t D, float eps) {
  const std::int64_t t = blockIdx.x, first = std::int64_t(threadIdx.x) * kCount, step = std::int64_t(blockDim.x) * kCount;
  x += t * D;
  y += t * D;
  float sum = 0;
  for (std::int64_t d = first; d < D; d += step) {
    const auto xs = load<kCount>(x + d);
    for (int i = 0; i < kCount; ++i) sum += to_float(xs.at[i]) * to_float(xs.at[i]);
  }
  const float rt = 1.0F / sqrtf(block_sum(sum) / float(D) + eps);
  for (std::int64_t d = first; d < D; d += step) {
    const auto xs = load<kCount>(x + d);
    const auto ws = load<kCount>(w + d);
    Pack<X, kCount> ys;
    for (int i = 0; i < kCount; ++i)
      ys.at[i] = from_float<X>(to_float(ws.at[i]) * to_float(from_float<X>(to_float(xs.at[i]) * rt)));
    store<kCount>(y + d, ys);
  }
  if (threadIdx.x == 0) r[t] = rt;
}

// grid (up to kParts), block (up to 256), shared D floats when dw_parts is wanted: block b takes rows b, b + gridDim.x, ... and
// writes row b of dw_parts (gridDim.x, D). dy and dx are not __restrict__: they may be one.
template <class X, class W, int kCount>
__global__ void rmsnorm_backward_kernel(const X* dy, const X* __restrict__ x, const W* __restrict__ w, const float* __restrict__ r,
                                        X* dx, float* __restrict__ dw_parts, std::int64_t T, std::int64_t D) {
  extern __shared__ float dw[];  // each element has one owning thread: no barrier
  const std::int64_t first = std::int64_t(threadIdx.x) * kCount, step = std::int64_t(blockDim.x) * kCount;
  if (dw_parts)
    for (std::int64_t d = first; d < D; d += step)
      for (int i = 0; i < kCount; ++i) dw[d + i] = 0;
  for (std::int64_t t = blockIdx.x; t < T; t += gridDim.x) {
    const X *dy_row = dy + t * D, *x_row = x + t * D;
    const float rt = r[t];
    float gx = 0;
    for (std::int64_t d = first; d < D; d += step) {
      const auto dys = load<kCount>(dy_row + d);
      const auto xs = load<kCount>(x_row + d);
      const auto ws = load<kCount>(w + d);
      for (int i = 0; i < kCount; ++i) {
        const float product = to_float(dys.at[i]) * to_float(xs.at[i]);
        gx += product * to_float(ws.at[i]);
        if (dw_parts) dw[d + i] += product * rt;
      }
    }
    if (!dx) continue;
    const float pull = rt * rt * block_sum(gx) / float(D);
    for (std::int64_t d = first; d < D; d += step) {
      const auto dys = load<kCount>(dy_row + d);
      const auto xs = load<kCount>(x_row + d);
      const auto ws = load<kCount>(w + d);
      Pack<X, kCount> dxs;
      for (int i = 0; i < kCount; ++i)
        dxs.at[i] = from_float<X>(rt * (to_float(dys.at[i]) * to_float(ws.at[i]) - to_float(xs.at[i]) * pull));
      store<kCount>(dx + t * D + d, dxs);
    }
  }
  if (dw_parts)
    for (std::int64_t d = first; d < D; d += step)
      for (int i = 0; i < kCount; ++i) dw_parts[std::int64_t(blockIdx.x) * D + d + i] = dw[d + i];
}

constexpr int kSumRows = 8;

// grid (ceil(D / 32)), block (32, kSumRows): dw[d] += the sum of column d of dw_parts, in a fixed order
__global__ void rmsnorm_backward_dw_kernel(const float* __restrict__ dw_parts, float* __restrict__ dw, std::int64_t parts,
                                           std::int64_t D) {
  __shared__ float sums[kSumRows][kWarp];
  const std::int64_t d = std::int64_t(blockIdx.x) * kWarp + threadIdx.x;
  float sum = 0;
  if (d < D)
    for (std::int64_t part = threadIdx.y; part < parts; part += kSumRows) sum += dw_parts[part * D + d];
  sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();  // waits for the sums of the other rows of threads
  if (threadIdx.y != 0 || d >= D) return;
  for (int row = 1; row < kSumRows; ++row) sum += sums[row][threadIdx.x];
  dw[d] += sum;
}

unsigned int threads_for(std::int64_t D, int count) {
  const std::int64_t packs = (D + count - 1) / count;
  return static_cast<unsigned int>(std::clamp<std::int64_t>((packs + kWarp - 1) / kWarp * kWarp, kWarp, kMaxThreads));
}

// Calls body(X{}, W{}) with the storage types of x and w on the device.
template <class Body>
void with_types(DType x, DType w, Body body) {
  if (x == DType::f32) return body(float{}, float{});
  check(x == DType::bf16, "rmsnorm: CUDA has f32 and bf16 only", {{"dtype", std::int64_t(x)}});
  return w == DType::bf16 ? body(bf16{}, bf16{}) : body(bf16{}, float{});
}

template <class X, class W, int kCount>
void forward(Context& ctx, const RmsNormForward& a) {
  const std::int64_t T = a.x.shape[0], D = a.x.shape[1];
  launch(ctx, rmsnorm_forward_kernel<device_t<X>, device_t<W>, kCount>, {blocks(T, 1), threads_for(D, kCount)},
         device_pointer<X>(a.x), device_pointer<W>(a.w), device_pointer<X>(a.y), a.r.as<float>(), D, float(a.eps));
}

template <class X, class W, int kCount>
void backward(Context& ctx, const RmsNormBackward& a) {
  const std::int64_t T = a.x.shape[0], D = a.x.shape[1], parts = std::min(T, kParts);
  if (parts == 0) return;
  std::size_t shared = 0;
  float* dw_parts = nullptr;
  Scope scope(ctx.scratch);
  if (a.dw.present()) {
    shared = std::size_t(D) * sizeof(float);
    check(shared <= std::size_t(kSharedBytes), "rmsnorm: a row of dw does not fit a block's shared memory",
          {{"D", D}, {"most", kSharedBytes / 4}});
    dw_parts = ctx.scratch.take(DType::f32, {parts, D}).as<float>();
  }
  launch(ctx, rmsnorm_backward_kernel<device_t<X>, device_t<W>, kCount>, {blocks(parts, 1), threads_for(D, kCount), shared},
         device_pointer<X>(a.dy), device_pointer<X>(a.x), device_pointer<W>(a.w), a.r.as<float>(), device_pointer<X>(a.dx),
         dw_parts, T, D);
  if (dw_parts)
    launch(ctx, rmsnorm_backward_dw_kernel, {blocks(D, kWarp), dim3(kWarp, kSumRows)}, dw_parts, a.dw.as<float>(), parts, D);
}

}  // namespace

void cuda::rmsnorm(Context& ctx, const RmsNormForward& a) {
  with_types(a.x.dtype, a.w.dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    constexpr int kPack = 16 / sizeof(X);
    in_packs<kPack>(a.x.shape[1], {a.x, a.w, a.y}) ? forward<X, W, kPack>(ctx, a) : forward<X, W, 1>(ctx, a);
  });
}

void cuda::rmsnorm(Context& ctx, const RmsNormBackward& a) {
  with_types(a.x.dtype, a.w.dtype, [&](auto x, auto w) {
    using X = decltype(x);
    using W = decltype(w);
    constexpr int kPack = 16 / sizeof(X);
    in_packs<kPack>(a.x.shape[1], {a.dy, a.x, a.w, a.dx}) ? backward<X, W, kPack>(ctx, a) : backward<X, W, 1>(ctx, a);
  });
}

}  // namespace moetrain::ops
