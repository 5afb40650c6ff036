// glu.h -- gated unit of an MLP: SwiGLU silu(g) u, or SiTU-GLU b1 tanh(g/b1) sigmoid(g) b2 tanh(u/b2).
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

enum class GluKind : std::uint8_t { silu, situ };

struct GluForward {
  GluKind kind;
  double beta, linear_beta;  // b1, b2 of situ
  ConstTensor g;  // (R, F) gate
  ConstTensor u;  // (R, F) up
  Tensor y;       // (R, F)
  void check_shapes() const;
};

struct GluBackward {
  GluKind kind;
  double beta, linear_beta;
  ConstTensor dy;  // (R, F)
  ConstTensor g;   // (R, F)
  ConstTensor u;   // (R, F)
  Tensor dg;       // (R, F); may alias dy
  Tensor du;       // (R, F)
  void check_shapes() const;
};

namespace cpu {
void glu(Context&, const GluForward&);
void glu(Context&, const GluBackward&);
}  // namespace cpu

inline void glu(Context& ctx, const GluForward& a) {
  dispatch(ctx, "glu forward", a, [&] { cpu::glu(ctx, a); });
}
inline void glu(Context& ctx, const GluBackward& a) {
  dispatch(ctx, "glu backward", a, [&] { cpu::glu(ctx, a); });
}

}  // namespace moetrain::ops
