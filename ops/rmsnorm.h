// rmsnorm.h -- root-mean-square normalisation of each row.
//
//   r[t]    = 1 / sqrt( mean_d x[t,d]^2 + eps )
//   y[t,d]  = w[d] * stored( x[t,d] * r[t] )          stored: rounded to y's type before the weight multiplies
//
//   g[t,d]  = dy[t,d] * w[d]
//   dx[t,d] = r[t] * ( g[t,d] - x[t,d] * r[t]^2 * mean_d( g[t,d] * x[t,d] ) )
//   dw[d]  += sum_t dy[t,d] * x[t,d] * r[t]           adds: weights gather over micro-batches
//
// Sums are kept in f32 (f64 for f64). dx may alias dy; y may not alias x. No atomics and no order that depends on timing:
// repeatable, on the CPU for any number of threads.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct RmsNormForward {
  ConstTensor x;  // (T, D)
  ConstTensor w;  // (D), x's type or real
  Tensor y;       // (T, D)
  Tensor r;       // (T) real; kept for backward
  double eps;
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const { return {.bytes = bytes_of(x, w, y, r)}; }
  void check_shapes() const {
    check(x.shape.rank() == 2, "rmsnorm: x is not (T, D)", {{"rank", x.shape.rank()}});
    const std::int64_t T = x.shape[0], D = x.shape[1];
    check(w.shape == Shape{D}, "rmsnorm: w is not (D)", {{"D", D}, {"w", w.shape.count()}});
    check(y.shape == x.shape && r.shape == Shape{T}, "rmsnorm: y or r does not fit x",
          {{"T", T}, {"D", D}, {"y", y.shape.count()}, {"r", r.shape.count()}});
    check(is_floating(x.dtype) && y.dtype == x.dtype && (w.dtype == x.dtype || w.dtype == real_of(x.dtype)),
          "rmsnorm: y is not of x's floating type, or w neither that nor real",
          {{"x", std::int64_t(x.dtype)}, {"y", std::int64_t(y.dtype)}, {"w", std::int64_t(w.dtype)}});
    check(r.dtype == real_of(x.dtype), "rmsnorm: r is not real", {{"x", std::int64_t(x.dtype)}, {"r", std::int64_t(r.dtype)}});
  }
};

struct RmsNormBackward {
  ConstTensor dy;  // (T, D)
  ConstTensor x;   // (T, D)
  ConstTensor w;   // (D), x's type or real
  ConstTensor r;   // (T) real
  Tensor dx;       // (T, D); may alias dy; absent: not wanted
  Tensor dw;       // (D) real; adds; absent: frozen
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dy, x, w, r, dx)}; }
  void check_shapes() const {
    check(x.shape.rank() == 2, "rmsnorm: x is not (T, D)", {{"rank", x.shape.rank()}});
    const std::int64_t T = x.shape[0], D = x.shape[1];
    check(dy.shape == x.shape && r.shape == Shape{T} && w.shape == Shape{D}, "rmsnorm: dy, r or w does not fit x",
          {{"T", T}, {"D", D}, {"dy", dy.shape.count()}, {"r", r.shape.count()}, {"w", w.shape.count()}});
    check(
        is_floating(x.dtype) && dy.dtype == x.dtype && (w.dtype == x.dtype || w.dtype == real_of(x.dtype)) &&
            r.dtype == real_of(x.dtype),
        "rmsnorm: dy is not of x's floating type, w neither that nor real, or r not real",
        {{"x", std::int64_t(x.dtype)}, {"dy", std::int64_t(dy.dtype)}, {"w", std::int64_t(w.dtype)}, {"r", std::int64_t(r.dtype)}});
    if (dx.present())
      check(dx.shape == x.shape && dx.dtype == x.dtype, "rmsnorm: dx does not fit x",
            {{"x", x.shape.count()}, {"dx", dx.shape.count()}, {"dtype", std::int64_t(dx.dtype)}});
    if (dw.present())
      check(dw.shape == Shape{D} && dw.dtype == real_of(x.dtype), "rmsnorm: dw is not (D) real",
            {{"D", D}, {"dw", dw.shape.count()}, {"dtype", std::int64_t(dw.dtype)}});
  }
};

namespace cpu {
void rmsnorm(Context&, const RmsNormForward&);
void rmsnorm(Context&, const RmsNormBackward&);
}  // namespace cpu
namespace cuda {
void rmsnorm(Context&, const RmsNormForward&);
void rmsnorm(Context&, const RmsNormBackward&);
}  // namespace cuda

inline void rmsnorm(Context& ctx, const RmsNormForward& a) {
  dispatch(ctx, "rmsnorm forward", a, [&] { cpu::rmsnorm(ctx, a); }, [&] { if constexpr (kHasCuda) cuda::rmsnorm(ctx, a); });
}
inline void rmsnorm(Context& ctx, const RmsNormBackward& a) {
  dispatch(ctx, "rmsnorm backward", a, [&] { cpu::rmsnorm(ctx, a); }, [&] { if constexpr (kHasCuda) cuda::rmsnorm(ctx, a); });
}

}  // namespace moetrain::ops
