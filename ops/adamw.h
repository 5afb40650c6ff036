// adamw.h -- AdamW with decoupled decay on one shard of one parameter.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct AdamW {
  ConstTensor gradient;  // (n) real or f64/f32
  Tensor master;         // (n) real
  Tensor exp_avg;        // (n) real
  Tensor exp_avg_sq;     // (n) real
  Tensor weight;         // (n) storage: rounded from master; absent: master is the weight
  double lr, beta1, beta2, eps, weight_decay;
  double gradient_scale;  // clipping
  std::int64_t step;      // 1 at the first update, for bias correction
  void check_shapes() const;
};

namespace cpu {
void adamw(Context&, const AdamW&);
}  // namespace cpu

inline void adamw(Context& ctx, const AdamW& a) {
  dispatch(ctx, "adamw forward", a, [&] { cpu::adamw(ctx, a); });
}

}  // namespace moetrain::ops
