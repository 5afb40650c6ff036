// reduce.h -- sums over a whole tensor that decide about a step.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct SumOfSquares {
  ConstTensor x;   // any shape, floating
  Tensor sum;      // (1) f64; adds sum x^2 in f64 (a non-finite element makes it non-finite)
  void check_shapes() const;
};

namespace cpu {
void sum_of_squares(Context&, const SumOfSquares&);
}  // namespace cpu

inline void sum_of_squares(Context& ctx, const SumOfSquares& a) {
  dispatch(ctx, "sum_of_squares forward", a, [&] { cpu::sum_of_squares(ctx, a); });
}

}  // namespace moetrain::ops
