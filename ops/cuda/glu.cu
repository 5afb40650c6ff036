// glu.cu -- both gated units; in packs of 16 bytes of each tensor, or one element after another where they do not fit.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/glu.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kWarps = 8, kThreads = kWarps * kWarp;

__device__ float sigmoid(float x) { return 1.0F / (1.0F + __expf(-x)); }

// grid (ceil(packs / kThreads)), block (kThreads); 6 bytes an element in bf16. Tensors may alias: a thread reads all, then writes.
template <class X, int kCount>
__global__ void glu_forward_kernel(const X* g, const X* u, X* y, std::int64_t packs, GluKind kind, float b1, float b2) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= packs) return;
  const auto gs = load<kCount>(g + i * kCount), us = load<kCount>(u + i * kCount);
  Pack<X, kCount> ys;
  for (int j = 0; j < kCount; ++j) {
    const float gate = to_float(gs.at[j]), up = to_float(us.at[j]);
    ys.at[j] = from_float<X>(kind == GluKind::silu ? gate * sigmoid(gate) * up
                                                   : b1 * tanhf(gate / b1) * sigmoid(gate) * b2 * tanhf(up / b2));
  }
  store<kCount>(y + i * kCount, ys);
}

// grid (ceil(R / kWarps)), block (kThreads), a warp a row; 10 bytes an element in bf16, 12 with y
template <class X, int kCount>
__global__ void glu_backward_kernel(const X* dy, const X* g, const X* u, X* dg, X* du, X* __restrict__ y, float* __restrict__ dots,
                                    std::int64_t R, std::int64_t F, GluKind kind, float b1, float b2) {
  const std::int64_t r = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (r >= R) return;
  float dot = 0;
#pragma unroll 2
  for (std::int64_t f = threadIdx.x % kWarp * kCount; f < F; f += kWarp * kCount) {
    const std::int64_t i = r * F + f;
    const auto dys = load<kCount>(dy + i), gs = load<kCount>(g + i), us = load<kCount>(u + i);
    Pack<X, kCount> dgs, dus, ys;
    for (int j = 0; j < kCount; ++j) {
      const float d = to_float(dys.at[j]), gate = to_float(gs.at[j]), up = to_float(us.at[j]), s = sigmoid(gate);
      float value;
      if (kind == GluKind::silu) {
        value = gate * s * up;
        dgs.at[j] = from_float<X>(d * up * s * (1.0F + gate * (1.0F - s)));
        dus.at[j] = from_float<X>(d * gate * s);
      } else {
        const float p = tanhf(gate / b1), q = tanhf(up / b2);
        value = b1 * p * s * b2 * q;
        dgs.at[j] = from_float<X>(d * b2 * q * ((1.0F - p * p) * s + b1 * p * s * (1.0F - s)));
        dus.at[j] = from_float<X>(d * b1 * p * s * (1.0F - q * q));
      }
      ys.at[j] = from_float<X>(value);
      dot += d * value;
    }
    store<kCount>(dg + i, dgs);
    store<kCount>(du + i, dus);
    if (y) store<kCount>(y + i, ys);
  }
  if (!dots) return;
  dot = warp_sum(dot);
  if (threadIdx.x % kWarp == 0) dots[r] = dot;
}

template <class X, int kCount>
void run(Context& ctx, const GluForward& a) {
  const std::int64_t packs = a.y.count() / kCount;
  launch(ctx, glu_forward_kernel<device_t<X>, kCount>, {blocks(packs, kThreads), kThreads}, device_pointer<X>(a.g),
         device_pointer<X>(a.u), device_pointer<X>(a.y), packs, a.kind, float(a.beta), float(a.linear_beta));
}
template <class X, int kCount>
void run(Context& ctx, const GluBackward& a) {
  const std::int64_t R = a.g.shape[0];
  launch(ctx, glu_backward_kernel<device_t<X>, kCount>, {blocks(R, kWarps), kThreads}, device_pointer<X>(a.dy),
         device_pointer<X>(a.g), device_pointer<X>(a.u), device_pointer<X>(a.dg), device_pointer<X>(a.du), device_pointer<X>(a.y),
         device_pointer<float>(a.dots), R, a.g.shape[1], a.kind, float(a.beta), float(a.linear_beta));
}

// packed: elements that packs may not run across the end of.
template <class Args>
void run(Context& ctx, const Args& a, std::int64_t packed, std::initializer_list<ConstTensor> tensors) {
  if (a.g.dtype == DType::f32) return in_packs<4>(packed, tensors) ? run<float, 4>(ctx, a) : run<float, 1>(ctx, a);
  check(a.g.dtype == DType::bf16, "glu: CUDA has f32 and bf16 only", {{"dtype", std::int64_t(a.g.dtype)}});
  in_packs<8>(packed, tensors) ? run<bf16, 8>(ctx, a) : run<bf16, 1>(ctx, a);
}

}  // namespace

void cuda::glu(Context& ctx, const GluForward& a) { run(ctx, a, a.g.count(), {a.g, a.u, a.y}); }
void cuda::glu(Context& ctx, const GluBackward& a) { run(ctx, a, a.g.shape[1], {a.dy, a.g, a.u, a.dg, a.du, a.y}); }

}  // namespace moetrain::ops
