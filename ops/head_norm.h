// head_norm.h -- norms over the width of each head: L2 of q and k, and the gated RMSNorm of the KDA output.
//
//   head_l2           r = (sum_d x^2 + eps)^-1/2,  y = x r
//                     dx = r (dy - y sum_d dy y)
//
//   gated_head_norm   r = (mean_d o^2 + eps)^-1/2,  oh = o r,  sg = sigmoid(gate),  y = w oh sg
//                     e = dy w sg,  do = r (e - oh mean_d(e oh)),  dgate = dy w oh sg (1 - sg)
//                     dw[d] += sum over tokens and heads of dy oh sg        (adds)
//
// All but dw is written. dx and do_ may alias dy; nothing else may alias. Arithmetic and sums in real, rounded to storage once.
// Repeatable; on the CPU also for any number of threads (dw: sums of fixed groups of rows, added in order).
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct HeadL2Forward {
  ConstTensor x;  // (T, N, H)
  Tensor y;       // (T, N, H) = x r
  Tensor r;       // (T, N) real = (sum x^2 + eps)^-1/2; kept for backward
  double eps;
  void check_shapes() const {
    check(x.shape.rank() == 3, "head_l2: x is not (T, N, H)", {{"rank", x.shape.rank()}});
    const auto T = x.shape[0], N = x.shape[1], H = x.shape[2];
    check(y.shape == x.shape && y.dtype == x.dtype, "head_l2: y does not fit x", {{"T", T}, {"N", N}, {"H", H}, {"y", y.count()}});
    check(r.shape == Shape{T, N} && r.dtype == real_of(x.dtype), "head_l2: r is not (T, N) real",
          {{"T", T}, {"N", N}, {"r", r.count()}, {"dtype", std::int64_t(r.dtype)}});
  }
};

struct HeadL2Backward {
  ConstTensor dy;  // (T, N, H)
  ConstTensor y;   // (T, N, H)
  ConstTensor r;   // (T, N) real
  Tensor dx;       // (T, N, H); may alias dy
  void check_shapes() const {
    check(y.shape.rank() == 3, "head_l2: y is not (T, N, H)", {{"rank", y.shape.rank()}});
    check(dy.shape == y.shape && dy.dtype == y.dtype, "head_l2: dy does not fit y", {{"y", y.count()}, {"dy", dy.count()}});
    check(dx.shape == y.shape && dx.dtype == y.dtype, "head_l2: dx does not fit y", {{"y", y.count()}, {"dx", dx.count()}});
    check(r.shape == Shape{y.shape[0], y.shape[1]} && r.dtype == real_of(y.dtype), "head_l2: r is not (T, N) real",
          {{"T", y.shape[0]}, {"N", y.shape[1]}, {"r", r.count()}});
  }
};

struct GatedHeadNormForward {
  ConstTensor o;     // (T, N, H)
  ConstTensor gate;  // (T, N, H), before the sigmoid
  ConstTensor w;     // (H) real, shared by all heads
  Tensor y;          // (T, N, H) = w rmsnorm(o) sigmoid(gate)
  Tensor r;          // (T, N) real; kept for backward
  double eps;
  void check_shapes() const {
    check(o.shape.rank() == 3, "gated_head_norm: o is not (T, N, H)", {{"rank", o.shape.rank()}});
    const auto T = o.shape[0], N = o.shape[1], H = o.shape[2];
    check(gate.shape == o.shape && gate.dtype == o.dtype, "gated_head_norm: gate does not fit o",
          {{"T", T}, {"N", N}, {"H", H}, {"gate", gate.count()}});
    check(w.shape == Shape{H} && w.dtype == real_of(o.dtype), "gated_head_norm: w is not (H) real", {{"H", H}, {"w", w.count()}});
    check(y.shape == o.shape && y.dtype == o.dtype, "gated_head_norm: y does not fit o", {{"o", o.count()}, {"y", y.count()}});
    check(r.shape == Shape{T, N} && r.dtype == real_of(o.dtype), "gated_head_norm: r is not (T, N) real",
          {{"T", T}, {"N", N}, {"r", r.count()}});
  }
};

struct GatedHeadNormBackward {
  ConstTensor dy;    // (T, N, H)
  ConstTensor o;     // (T, N, H)
  ConstTensor gate;  // (T, N, H)
  ConstTensor w;     // (H) real
  ConstTensor r;     // (T, N) real
  Tensor do_;        // (T, N, H); may alias dy
  Tensor dgate;      // (T, N, H)
  Tensor dw;         // (H) real; adds; absent: frozen
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    check(o.shape.rank() == 3, "gated_head_norm: o is not (T, N, H)", {{"rank", o.shape.rank()}});
    for (const ConstTensor& t : {dy, gate, ConstTensor(do_), ConstTensor(dgate)})
      check(t.shape == o.shape && t.dtype == o.dtype, "gated_head_norm: dy, gate, do or dgate does not fit o",
            {{"o", o.count()}, {"it", t.count()}});
    check(w.shape == Shape{o.shape[2]} && w.dtype == real_of(o.dtype), "gated_head_norm: w is not (H) real",
          {{"H", o.shape[2]}, {"w", w.count()}});
    check(r.shape == Shape{o.shape[0], o.shape[1]} && r.dtype == w.dtype, "gated_head_norm: r is not (T, N) real",
          {{"T", o.shape[0]}, {"N", o.shape[1]}, {"r", r.count()}});
    check(!dw.present() || (dw.shape == w.shape && dw.dtype == w.dtype), "gated_head_norm: dw does not fit w",
          {{"w", w.count()}, {"dw", dw.count()}});
  }
};

namespace cpu {
void head_l2(Context&, const HeadL2Forward&);
void head_l2(Context&, const HeadL2Backward&);
void gated_head_norm(Context&, const GatedHeadNormForward&);
void gated_head_norm(Context&, const GatedHeadNormBackward&);
}  // namespace cpu

inline void head_l2(Context& ctx, const HeadL2Forward& a) {
  dispatch(ctx, "head_l2 forward", a, [&] { cpu::head_l2(ctx, a); });
}
inline void head_l2(Context& ctx, const HeadL2Backward& a) {
  dispatch(ctx, "head_l2 backward", a, [&] { cpu::head_l2(ctx, a); });
}
inline void gated_head_norm(Context& ctx, const GatedHeadNormForward& a) {
  dispatch(ctx, "gated_head_norm forward", a, [&] { cpu::gated_head_norm(ctx, a); });
}
inline void gated_head_norm(Context& ctx, const GatedHeadNormBackward& a) {
  dispatch(ctx, "gated_head_norm backward", a, [&] { cpu::gated_head_norm(ctx, a); });
}

}  // namespace moetrain::ops
