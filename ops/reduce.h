// reduce.h -- sums over whole tensors that decide about a step.
//
//   sum += sum over tensors x of sum_i x[i]^2          adds
//
// In f64 over runs of fixed length, added up in their order: repeatable, on the CPU for any number of threads. A NaN or infinity in
// an x makes the sum non-finite; finite f32 or bf16 elements cannot overflow it: the sum is also the flag that all are finite.
#pragma once
#include <span>

#include "ops/context.h"

namespace moetrain::ops {

struct SumOfSquares {
  std::span<const ConstTensor> x;           // of any shape and floating type each
  Tensor sum;                               // (1) f64; adds
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    Work w{.kind = WorkKind::optimizer};
    for (const ConstTensor& t : x) w.bytes += bytes_of(t);
    return w;
  }
  void check_shapes() const {
    for (const ConstTensor& t : x) check(is_floating(t.dtype), "sum_of_squares: x is not floating", {{"x", std::int64_t(t.dtype)}});
    check(sum.shape == Shape{1} && sum.dtype == DType::f64, "sum_of_squares: sum is not (1) f64",
          {{"count", sum.count()}, {"dtype", std::int64_t(sum.dtype)}});
  }
};

namespace cpu {
void sum_of_squares(Context&, const SumOfSquares&);
}  // namespace cpu
namespace cuda {
void sum_of_squares(Context&, const SumOfSquares&);
}  // namespace cuda

inline void sum_of_squares(Context& ctx, const SumOfSquares& a) {
  dispatch(
      ctx, "sum_of_squares", a, [&] { cpu::sum_of_squares(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sum_of_squares(ctx, a);
      });
}

}  // namespace moetrain::ops
