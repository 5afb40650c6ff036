// rmsnorm.h -- root-mean-square normalisation of each row.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct RmsNormForward {
  ConstTensor x;  // (T, D)
  ConstTensor w;  // (D)
  Tensor y;       // (T, D)
  Tensor r;       // (T) real; kept for backward
  double eps;
  void check_shapes() const;
};

struct RmsNormBackward {
  ConstTensor dy;  // (T, D)
  ConstTensor x;   // (T, D)
  ConstTensor w;   // (D)
  ConstTensor r;   // (T) real
  Tensor dx;       // (T, D); may alias dy; absent: not wanted
  Tensor dw;       // (D) real; adds; absent: frozen
  void check_shapes() const;
};

namespace cpu {
void rmsnorm(Context&, const RmsNormForward&);
void rmsnorm(Context&, const RmsNormBackward&);
}  // namespace cpu

inline void rmsnorm(Context& ctx, const RmsNormForward& a) {
  dispatch(ctx, "rmsnorm forward", a, [&] { cpu::rmsnorm(ctx, a); });
}
inline void rmsnorm(Context& ctx, const RmsNormBackward& a) {
  dispatch(ctx, "rmsnorm backward", a, [&] { cpu::rmsnorm(ctx, a); });
}

}  // namespace moetrain::ops
