// reduce.h -- sums over a whole tensor that decide about a step.
//
//   sum += sum_i x[i]^2          adds, so that the parameters of a run share one sum
//
// In f64 over runs of fixed length, added up in their order: repeatable, on the CPU for any number of threads. A NaN or infinity in
// x makes the sum non-finite; a finite f32 or bf16 cannot overflow it.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct SumOfSquares {
  ConstTensor x;  // any shape, floating
  Tensor sum;     // (1) f64; adds sum x^2 in f64 (a non-finite element makes it non-finite)
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    check(is_floating(x.dtype), "sum_of_squares: x is not floating", {{"x", std::int64_t(x.dtype)}});
    check(sum.shape == Shape{1} && sum.dtype == DType::f64, "sum_of_squares: sum is not (1) f64",
          {{"count", sum.count()}, {"dtype", std::int64_t(sum.dtype)}});
  }
};

namespace cpu {
void sum_of_squares(Context&, const SumOfSquares&);
}  // namespace cpu

inline void sum_of_squares(Context& ctx, const SumOfSquares& a) {
  dispatch(ctx, "sum_of_squares", a, [&] { cpu::sum_of_squares(ctx, a); });
}

}  // namespace moetrain::ops
