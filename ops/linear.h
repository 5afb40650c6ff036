// linear.h -- y = x W^T for a matrix W, and its gradients.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct LinearForward {
  ConstTensor x;  // (T, I)
  ConstTensor w;  // (O, I)
  Tensor y;       // (T, O), any floating type (logits of a router are real)
  bool add = false;  // y += instead of y =
  void check_shapes() const;
};

struct LinearBackward {
  ConstTensor dy;  // (T, O), any floating type
  ConstTensor x;   // (T, I); absent when dw is
  ConstTensor w;   // (O, I); absent when dx is
  Tensor dx;       // (T, I); absent: not wanted
  Tensor dw;       // (O, I) real; adds; absent: frozen
  bool add_dx = false;  // dx += instead of dx =
  void check_shapes() const;
};

namespace cpu {
void linear(Context&, const LinearForward&);
void linear(Context&, const LinearBackward&);
}  // namespace cpu

inline void linear(Context& ctx, const LinearForward& a) {
  dispatch(ctx, "linear forward", a, [&] { cpu::linear(ctx, a); });
}
inline void linear(Context& ctx, const LinearBackward& a) {
  dispatch(ctx, "linear backward", a, [&] { cpu::linear(ctx, a); });
}

}  // namespace moetrain::ops
