// attn_res.h -- attention residual: softmax-weighted sum over depth of bank rows, scored by a learned query on their RMS-normalised values.
#pragma once
#include "ops/context.h"
#include <span>

namespace moetrain::ops {

struct AttnResForward {
  std::span<const ConstTensor> sources;  // Z of (T, D)
  ConstTensor gamma;  // (D)
  ConstTensor query;  // (1, D)
  double eps;
  Tensor y;           // (T, D)
  Tensor weights;     // (T, Z) real, the softmax; kept for backward
  void check_shapes() const;
};

struct AttnResBackward {
  ConstTensor dy;     // (T, D)
  std::span<const ConstTensor> sources;  // Z of (T, D)
  ConstTensor gamma;  // (D)
  ConstTensor query;  // (1, D)
  double eps;
  ConstTensor weights;  // (T, Z) real
  std::span<const Tensor> dsources;  // Z of (T, D) real; add
  Tensor dgamma;      // (D) real; adds; absent (with dquery): frozen
  Tensor dquery;      // (1, D) real; adds
  void check_shapes() const;
};

namespace cpu {
void attn_res(Context&, const AttnResForward&);
void attn_res(Context&, const AttnResBackward&);
}  // namespace cpu

inline void attn_res(Context& ctx, const AttnResForward& a) {
  dispatch(ctx, "attn_res forward", a, [&] { cpu::attn_res(ctx, a); });
}
inline void attn_res(Context& ctx, const AttnResBackward& a) {
  dispatch(ctx, "attn_res backward", a, [&] { cpu::attn_res(ctx, a); });
}

}  // namespace moetrain::ops
