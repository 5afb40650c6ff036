// layernorm.cu -- a warp a row; gradients of weights by columns, in parts of the rows that are then added up in their order.
#include <algorithm>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/layernorm.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr std::int64_t kParts = 128;  // of the rows, for dw and db

// grid (ceil(T / kWarps)), block (kThreads)
template <class X, int kCount>
__global__ void layernorm_forward_kernel(const X* __restrict__ x, const X* __restrict__ w, const X* __restrict__ b,
                                         X* __restrict__ y, float* __restrict__ mean, float* __restrict__ r, std::int64_t T,
                                         std::int64_t D, float eps) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  x += t * D;
  y += t * D;
  float sum = 0, squares = 0;
  for (std::int64_t d = lane * kCount; d < D; d += kWarp * kCount) {
    const auto xs = load_floats<kCount>(x + d);
    for (int i = 0; i < kCount; ++i) sum += xs.at[i];
  }
  const float m = warp_sum(sum) / float(D);
  for (std::int64_t d = lane * kCount; d < D; d += kWarp * kCount) {
    const auto xs = load_floats<kCount>(x + d);
    for (int i = 0; i < kCount; ++i) squares += (xs.at[i] - m) * (xs.at[i] - m);
  }
  const float rt = 1.0F / sqrtf(warp_sum(squares) / float(D) + eps);
  for (std::int64_t d = lane * kCount; d < D; d += kWarp * kCount) {
    auto xs = load_floats<kCount>(x + d);
    const auto ws = load_floats<kCount>(w + d);
    const auto bs = b ? load_floats<kCount>(b + d) : Floats<kCount>{};
    for (int i = 0; i < kCount; ++i) xs.at[i] = (xs.at[i] - m) * rt * ws.at[i] + bs.at[i];
    store_floats<kCount>(y + d, xs);
  }
  if (lane == 0) mean[t] = m, r[t] = rt;
}

// grid (ceil(T / kWarps)), block (kThreads). dy and dx are not __restrict__: they may be one.
template <class X, int kCount>
__global__ void layernorm_backward_dx_kernel(const X* dy, const X* __restrict__ x, const X* __restrict__ w,
                                             const float* __restrict__ mean, const float* __restrict__ r, X* dx, std::int64_t T,
                                             std::int64_t D) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  const float m = mean[t], rt = r[t];
  float sum = 0, along = 0;
  for (std::int64_t d = lane * kCount; d < D; d += kWarp * kCount) {
    const auto dys = load_floats<kCount>(dy + t * D + d), xs = load_floats<kCount>(x + t * D + d), ws = load_floats<kCount>(w + d);
    for (int i = 0; i < kCount; ++i) {
      const float g = dys.at[i] * ws.at[i];
      sum += g;
      along += g * (xs.at[i] - m) * rt;
    }
  }
  sum = warp_sum(sum) / float(D);
  along = warp_sum(along) / float(D);
  for (std::int64_t d = lane * kCount; d < D; d += kWarp * kCount) {
    auto dys = load_floats<kCount>(dy + t * D + d);
    const auto xs = load_floats<kCount>(x + t * D + d), ws = load_floats<kCount>(w + d);
    for (int i = 0; i < kCount; ++i) dys.at[i] = rt * (dys.at[i] * ws.at[i] - sum - (xs.at[i] - m) * rt * along);
    store_floats<kCount>(dx + t * D + d, dys);
  }
}

// grid (ceil(D / kWarp), parts), block (kWarp, kWarps): parts_of_dw[part, d], parts_of_db[part, d] of rows [T part / parts, ...)
template <class X>
__global__ void layernorm_backward_parts_kernel(const X* __restrict__ dy, const X* __restrict__ x, const float* __restrict__ mean,
                                                const float* __restrict__ r, float* __restrict__ parts_of_dw,
                                                float* __restrict__ parts_of_db, std::int64_t T, std::int64_t D) {
  __shared__ float dw_of[kWarps][kWarp], db_of[kWarps][kWarp];
  const std::int64_t d = std::int64_t(blockIdx.x) * kWarp + threadIdx.x, part = blockIdx.y;
  float dw = 0, db = 0;
  if (d < D)
    for (std::int64_t t = T * part / gridDim.y + threadIdx.y; t < T * (part + 1) / gridDim.y; t += kWarps) {
      const float g = to_float(dy[t * D + d]);
      dw += g * (to_float(x[t * D + d]) - mean[t]) * r[t];
      db += g;
    }
  dw_of[threadIdx.y][threadIdx.x] = dw;
  db_of[threadIdx.y][threadIdx.x] = db;
  __syncthreads();  // waits for the sums of the other rows of threads
  if (threadIdx.y != 0 || d >= D) return;
  for (int row = 1; row < kWarps; ++row) dw += dw_of[row][threadIdx.x], db += db_of[row][threadIdx.x];
  parts_of_dw[part * D + d] = dw;
  parts_of_db[part * D + d] = db;
}

// grid (ceil(D / kThreads)), block (kThreads): adds up the parts in their order
__global__ void layernorm_backward_sum_kernel(const float* __restrict__ parts_of_dw, const float* __restrict__ parts_of_db,
                                              float* __restrict__ dw, float* __restrict__ db, std::int64_t parts, std::int64_t D) {
  const std::int64_t d = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (d >= D) return;
  float w = 0, b = 0;
#pragma unroll 4
  for (std::int64_t part = 0; part < parts; ++part) w += parts_of_dw[part * D + d], b += parts_of_db[part * D + d];
  if (dw) dw[d] += w;
  if (db) db[d] += b;
}

template <class X>
void backward_weights(Context& ctx, const LayerNormBackward& a) {
  const std::int64_t T = a.x.shape[0], D = a.x.shape[1], parts = std::min(kParts, T);
  if (parts == 0) return;
  Scope scope(ctx.scratch);
  float* dw = ctx.scratch.take(DType::f32, {parts, D}).as<float>();
  float* db = ctx.scratch.take(DType::f32, {parts, D}).as<float>();
  launch(ctx, layernorm_backward_parts_kernel<device_t<X>>, {dim3(blocks(D, kWarp), blocks(parts, 1)), dim3(kWarp, kWarps)},
         device_pointer<X>(a.dy), device_pointer<X>(a.x), a.mean.as<float>(), a.r.as<float>(), dw, db, T, D);
  launch(ctx, layernorm_backward_sum_kernel, {blocks(D, kThreads), kThreads}, dw, db, device_pointer<float>(a.dw),
         device_pointer<float>(a.db), parts, D);
}

template <class X, int kCount>
void forward(Context& ctx, const LayerNormForward& a) {
  const std::int64_t T = a.x.shape[0], D = a.x.shape[1];
  launch(ctx, layernorm_forward_kernel<device_t<X>, kCount>, {blocks(T, kWarps), kThreads}, device_pointer<X>(a.x),
         device_pointer<X>(a.w), device_pointer<X>(a.b), device_pointer<X>(a.y), a.mean.as<float>(), a.r.as<float>(), T, D,
         float(a.eps));
}

template <class X, int kCount>
void backward_dx(Context& ctx, const LayerNormBackward& a) {
  const std::int64_t T = a.x.shape[0], D = a.x.shape[1];
  launch(ctx, layernorm_backward_dx_kernel<device_t<X>, kCount>, {blocks(T, kWarps), kThreads}, device_pointer<X>(a.dy),
         device_pointer<X>(a.x), device_pointer<X>(a.w), a.mean.as<float>(), a.r.as<float>(), device_pointer<X>(a.dx), T, D);
}

}  // namespace

void cuda::layernorm(Context& ctx, const LayerNormForward& a) {
  with_storage(a.x.dtype, [&](auto storage) {
    using X = decltype(storage);
    constexpr int kPack = 8 / sizeof(X);  // a head of 128 in one load of every lane, in bf16
    in_packs<kPack>(a.x.shape[1], {a.x, a.w, a.b, a.y}) ? forward<X, kPack>(ctx, a) : forward<X, 1>(ctx, a);
  });
}

void cuda::layernorm(Context& ctx, const LayerNormBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) {
    using X = decltype(storage);
    constexpr int kPack = 8 / sizeof(X);
    if (a.dw.present() || a.db.present()) backward_weights<X>(ctx, a);  // weights first: dx may alias dy
    if (!a.dx.present()) return;
    in_packs<kPack>(a.x.shape[1], {a.dy, a.x, a.w, a.dx}) ? backward_dx<X, kPack>(ctx, a) : backward_dx<X, 1>(ctx, a);
  });
}

}  // namespace moetrain::ops
