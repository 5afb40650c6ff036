// short_conv.h -- causal depthwise convolution followed by SiLU, restarted at every document.
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

struct ShortConvForward {
  ConstTensor u;  // (T, P)
  ConstTensor w;  // (P, 1, k) real; tap k-1 multiplies the current token
  Tensor y;       // (T, P) = silu(conv)
  Documents documents;
  void check_shapes() const;
};

struct ShortConvBackward {
  ConstTensor dy;  // (T, P)
  ConstTensor u;   // (T, P)
  ConstTensor w;   // (P, 1, k) real
  Tensor du;       // (T, P); may not alias dy
  Tensor dw;       // (P, 1, k) real; adds; absent: frozen
  Documents documents;
  void check_shapes() const;
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
