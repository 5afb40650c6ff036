// layernorm.h -- layer normalisation of each row, with weight and optional bias (the indexer's key norm).
//
//   mean[t]  = mean_d x[t,d]                               r[t] = 1 / sqrt( mean_d (x[t,d] - mean[t])^2 + eps )
//   n[t,d]   = (x[t,d] - mean[t]) * r[t]                   y[t,d] = n[t,d] * w[d] + b[d]
//
//   g[t,d]   = dy[t,d] * w[d]
//   dx[t,d]  = r[t] * ( g[t,d] - mean_d g[t,d] - n[t,d] * mean_d( g[t,d] n[t,d] ) )
//   dw[d]   += sum_t dy[t,d] * n[t,d]                      db[d] += sum_t dy[t,d]
//
// dx may alias dy, y may not alias x; dw and db add. Sums are real, y and dx are rounded once. Repeatable, and for any number of
// threads the same bits.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct LayerNormForward {
  ConstTensor x;  // (T, D)
  ConstTensor w;  // (D)
  ConstTensor b;  // (D); absent: none
  Tensor y;       // (T, D)
  Tensor mean;    // (T) real; kept for backward
  Tensor r;       // (T) real, 1 / standard deviation; kept for backward
  double eps;
  Work work(const Context&) const { return {.bytes = bytes_of(x, y, mean, r)}; }
  void check_shapes() const {
    check(x.shape.rank() == 2 && x.shape[1] >= 1, "layernorm: x is not (T, D)", {{"rank", x.shape.rank()}, {"x", x.count()}});
    const auto T = x.shape[0], D = x.shape[1];
    check(w.shape == Shape{D} && (!b.present() || b.shape == Shape{D}), "layernorm: w or b is not (D)",
          {{"D", D}, {"w", w.count()}, {"b", b.count()}});
    check(y.shape == x.shape, "layernorm: y is not (T, D)", {{"T", T}, {"D", D}, {"y", y.count()}});
    check(mean.shape == Shape{T} && r.shape == Shape{T}, "layernorm: mean or r is not (T)",
          {{"T", T}, {"mean", mean.count()}, {"r", r.count()}});
    const auto type = x.dtype, real = real_of(type);
    check(w.dtype == type && y.dtype == type && (!b.present() || b.dtype == type), "layernorm: x, w, b, y are not of one type",
          {{"x", int(type)}, {"w", int(w.dtype)}, {"b", int(b.dtype)}, {"y", int(y.dtype)}});
    check(mean.dtype == real && r.dtype == real, "layernorm: mean or r is not real",
          {{"x", int(type)}, {"mean", int(mean.dtype)}, {"r", int(r.dtype)}});
  }
};

struct LayerNormBackward {
  ConstTensor dy;    // (T, D)
  ConstTensor x;     // (T, D)
  ConstTensor w;     // (D)
  ConstTensor mean;  // (T) real
  ConstTensor r;     // (T) real
  Tensor dx;         // (T, D); may alias dy; absent: not wanted
  Tensor dw;         // (D) real; adds; absent: frozen
  Tensor db;         // (D) real; adds; absent: frozen
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dy, x, mean, r, dx)}; }
  void check_shapes() const {
    check(x.shape.rank() == 2 && x.shape[1] >= 1, "layernorm: x is not (T, D)", {{"rank", x.shape.rank()}, {"x", x.count()}});
    const auto T = x.shape[0], D = x.shape[1];
    check(w.shape == Shape{D}, "layernorm: w is not (D)", {{"D", D}, {"w", w.count()}});
    check(dy.shape == x.shape && (!dx.present() || dx.shape == x.shape), "layernorm: dy or dx is not (T, D)",
          {{"T", T}, {"D", D}, {"dy", dy.count()}, {"dx", dx.count()}});
    check(mean.shape == Shape{T} && r.shape == Shape{T}, "layernorm: mean or r is not (T)",
          {{"T", T}, {"mean", mean.count()}, {"r", r.count()}});
    check((!dw.present() || dw.shape == Shape{D}) && (!db.present() || db.shape == Shape{D}), "layernorm: dw or db is not (D)",
          {{"D", D}, {"dw", dw.count()}, {"db", db.count()}});
    const auto type = x.dtype, real = real_of(type);
    check(w.dtype == type && dy.dtype == type && (!dx.present() || dx.dtype == type), "layernorm: dy, x, w, dx are not of one type",
          {{"x", int(type)}, {"w", int(w.dtype)}, {"dy", int(dy.dtype)}, {"dx", int(dx.dtype)}});
    check(mean.dtype == real && r.dtype == real && (!dw.present() || dw.dtype == real) && (!db.present() || db.dtype == real),
          "layernorm: mean, r, dw or db is not real",
          {{"x", int(type)}, {"mean", int(mean.dtype)}, {"r", int(r.dtype)}, {"dw", int(dw.dtype)}, {"db", int(db.dtype)}});
  }
};

namespace cpu {
void layernorm(Context&, const LayerNormForward&);
void layernorm(Context&, const LayerNormBackward&);
}  // namespace cpu
namespace cuda {
void layernorm(Context&, const LayerNormForward&);
void layernorm(Context&, const LayerNormBackward&);
}  // namespace cuda

inline void layernorm(Context& ctx, const LayerNormForward& a) {
  dispatch(
      ctx, "layernorm forward", a, [&] { cpu::layernorm(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::layernorm(ctx, a);
      });
}
inline void layernorm(Context& ctx, const LayerNormBackward& a) {
  dispatch(
      ctx, "layernorm backward", a, [&] { cpu::layernorm(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::layernorm(ctx, a);
      });
}

}  // namespace moetrain::ops
