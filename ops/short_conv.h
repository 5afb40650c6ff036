// short_conv.h -- causal depthwise convolution followed by SiLU, restarted at every document.
//
//   c[t,p]  = sum_i w[p,i] u[t-(k-1)+i, p]        i = 0..k-1; terms before the document's first token are 0; those before a slice
//                                                 that it entered are rows of history, whose last row is the token before
//   y[t,p]  = c sg,  sg = sigmoid(c)
//
//   dc[t,p] = dy[t,p] sg (1 + c (1 - sg))         c recomputed from u
//   du[t,p] = sum_i w[p,i] dc[t+(k-1)-i, p]       terms past the document's last token are 0
//   dw[p,i] += sum_t dc[t,p] u[t-(k-1)+i, p]      (adds)
//   dhistory likewise, 0 for a slice that no document enters
//
// y, du, dhistory are written. y may not alias u, du neither dy nor u. Arithmetic and sums in real. Repeatable; on the CPU also for any
// number of threads.
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

struct ShortConvForward {
  ConstTensor u;  // (T, P)
  ConstTensor w;  // (P, 1, k) real; tap k-1 multiplies the current token
  Tensor y;       // (T, P) = silu(conv)
  Documents documents;
  ConstTensor history = {};  // (documents.states(), k-1, P); absent: zeros
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    check(u.shape.rank() == 2, "short_conv: u is not (T, P)", {{"rank", u.shape.rank()}});
    const auto T = u.shape[0], P = u.shape[1];
    check(w.shape.rank() == 3 && w.shape == Shape{P, 1, w.shape[2]} && w.shape[2] >= 1, "short_conv: w is not (P, 1, k)",
          {{"P", P}, {"rank", w.shape.rank()}, {"w", w.count()}});
    check(y.shape == u.shape, "short_conv: y does not fit u", {{"T", T}, {"P", P}, {"y", y.count()}});
    check(y.dtype == u.dtype && w.dtype == real_of(u.dtype), "short_conv: dtypes of u, w, y do not fit",
          {{"u", std::int64_t(u.dtype)}, {"w", std::int64_t(w.dtype)}, {"y", std::int64_t(y.dtype)}});
    documents.check_cover(T);
    check(!history.present() || (history.shape == Shape{documents.states(), w.shape[2] - 1, P} && history.dtype == u.dtype),
          "short_conv: history is not (states, k-1, P)", {{"states", documents.states()}, {"k", w.shape[2]}, {"history", history.count()}});
  }
};

struct ShortConvBackward {
  ConstTensor dy;  // (T, P)
  ConstTensor u;   // (T, P)
  ConstTensor w;   // (P, 1, k) real
  Tensor du;       // (T, P); may not alias dy
  Tensor dw;       // (P, 1, k) real; adds; absent: frozen
  Documents documents;
  ConstTensor history = {};  // (documents.states(), k-1, P); absent: zeros
  Tensor dhistory = {};      // like history; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    ShortConvForward{u, w, du, documents, history}.check_shapes();
    if (dhistory.present()) ShortConvForward{u, w, du, documents, dhistory}.check_shapes();
    check(dy.shape == u.shape && dy.dtype == u.dtype, "short_conv: dy does not fit u", {{"u", u.count()}, {"dy", dy.count()}});
    check(!dw.present() || (dw.shape == w.shape && dw.dtype == w.dtype), "short_conv: dw does not fit w",
          {{"w", w.count()}, {"dw", dw.count()}});
  }
};

namespace cpu {
void short_conv(Context&, const ShortConvForward&);
void short_conv(Context&, const ShortConvBackward&);
}  // namespace cpu

inline void short_conv(Context& ctx, const ShortConvForward& a) {
  dispatch(ctx, "short_conv forward", a, [&] { cpu::short_conv(ctx, a); });
}
inline void short_conv(Context& ctx, const ShortConvBackward& a) {
  dispatch(ctx, "short_conv backward", a, [&] { cpu::short_conv(ctx, a); });
}

}  // namespace moetrain::ops
