// head_norm.h -- norms over the width of each head: L2 of q and k, and the gated RMSNorm of the KDA output.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct HeadL2Forward {
  ConstTensor x;  // (T, N, H)
  Tensor y;       // (T, N, H) = x r
  Tensor r;       // (T, N) real = (sum x^2 + eps)^-1/2; kept for backward
  double eps;
  void check_shapes() const;
};

struct HeadL2Backward {
  ConstTensor dy;  // (T, N, H)
  ConstTensor y;   // (T, N, H)
  ConstTensor r;   // (T, N) real
  Tensor dx;       // (T, N, H); may alias dy
  void check_shapes() const;
};

struct GatedHeadNormForward {
  ConstTensor o;     // (T, N, H)
  ConstTensor gate;  // (T, N, H), before the sigmoid
  ConstTensor w;     // (H) real, shared by all heads
  Tensor y;          // (T, N, H) = w rmsnorm(o) sigmoid(gate)
  Tensor r;          // (T, N) real; kept for backward
  double eps;
  void check_shapes() const;
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
  void check_shapes() const;
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
