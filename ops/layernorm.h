// layernorm.h -- layer normalisation of each row, with weight and optional bias (the indexer's key norm).
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
  void check_shapes() const;
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
  void check_shapes() const;
};

namespace cpu {
void layernorm(Context&, const LayerNormForward&);
void layernorm(Context&, const LayerNormBackward&);
}  // namespace cpu

inline void layernorm(Context& ctx, const LayerNormForward& a) {
  dispatch(ctx, "layernorm forward", a, [&] { cpu::layernorm(ctx, a); });
}
inline void layernorm(Context& ctx, const LayerNormBackward& a) {
  dispatch(ctx, "layernorm backward", a, [&] { cpu::layernorm(ctx, a); });
}

}  // namespace moetrain::ops
