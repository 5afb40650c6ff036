// grouped_linear.h -- one matrix a group of rows: y[r] = x[r] W[group of r]^T (the experts).
#pragma once
#include "ops/context.h"
#include <span>

namespace moetrain::ops {

struct GroupedLinearForward {
  ConstTensor x;  // (R, I), rows of group g are [offsets[g], offsets[g+1])
  ConstTensor w;  // (e, O, I)
  Tensor y;       // (R, O)
  std::span<const std::int64_t> offsets;  // (e+1) on the host; empty groups are normal
  void check_shapes() const;
};

struct GroupedLinearBackward {
  ConstTensor dy;  // (R, O)
  ConstTensor x;   // (R, I); absent when dw is
  ConstTensor w;   // (e, O, I); absent when dx is
  Tensor dx;       // (R, I); absent: not wanted
  Tensor dw;       // (e, O, I) real; adds; absent: frozen
  std::span<const std::int64_t> offsets;  // (e+1)
  bool add_dx = false;  // dx += instead of dx =
  void check_shapes() const;
};

namespace cpu {
void grouped_linear(Context&, const GroupedLinearForward&);
void grouped_linear(Context&, const GroupedLinearBackward&);
}  // namespace cpu

inline void grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  dispatch(ctx, "grouped_linear forward", a, [&] { cpu::grouped_linear(ctx, a); });
}
inline void grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  dispatch(ctx, "grouped_linear backward", a, [&] { cpu::grouped_linear(ctx, a); });
}

}  // namespace moetrain::ops
