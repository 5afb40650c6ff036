// adamw.h -- AdamW with decoupled decay, for all the shards of a rank in one call.
//
//   g  = gradient_scale * scale * gradient
//   m  = beta1 m + (1 - beta1) g                exp_avg
//   v  = beta2 v + (1 - beta2) g^2              exp_avg_sq
//   master -= lr ( (m / (1 - beta1^step)) / ( sqrt( v / (1 - beta2^step) ) + eps ) + weight_decay master )
//   weight  = master rounded to its type
//
// Computed in the master's type; the corrections by step in f64. Nothing may alias. Repeatable, for any sharding: an element
// depends on itself alone.
#pragma once
#include <cmath>
#include <span>

#include "ops/context.h"

namespace moetrain::ops {

struct AdamWShard {
  ConstTensor gradient;  // (n), any floating type
  Tensor master;         // (n) real
  Tensor exp_avg;        // (n) real
  Tensor exp_avg_sq;     // (n) real
  Tensor weight;         // (n) storage: rounded from master; absent: master is the weight
  double weight_decay;
  void check_shapes() const {
    const std::int64_t n = master.count();
    check(gradient.count() == n && exp_avg.count() == n && exp_avg_sq.count() == n && (!weight.present() || weight.count() == n),
          "adamw: gradient, moments or weight do not fit master",
          {{"master", n},
           {"gradient", gradient.count()},
           {"exp_avg", exp_avg.count()},
           {"exp_avg_sq", exp_avg_sq.count()},
           {"weight", weight.present() ? weight.count() : n}});
    check((master.dtype == DType::f32 || master.dtype == DType::f64) && exp_avg.dtype == master.dtype &&
              exp_avg_sq.dtype == master.dtype,
          "adamw: master and moments are not of one real type",
          {{"master", std::int64_t(master.dtype)},
           {"exp_avg", std::int64_t(exp_avg.dtype)},
           {"exp_avg_sq", std::int64_t(exp_avg_sq.dtype)}});
    check(is_floating(gradient.dtype) && (!weight.present() || is_floating(weight.dtype)),
          "adamw: gradient or weight is not floating",
          {{"gradient", std::int64_t(gradient.dtype)}, {"weight", std::int64_t(weight.dtype)}});
  }
};

struct AdamW {
  std::span<const AdamWShard> shards;
  double lr, beta1, beta2, eps;
  double gradient_scale;  // clipping, where the host knows it
  ConstTensor scale;      // (1) f64 on the device: clipping, where only the device knows it; absent: 1
  std::int64_t step;      // 1 at the first update, for bias correction
  Work work(const Context&) const {
    Work w{.kind = WorkKind::optimizer};
    for (const AdamWShard& s : shards)
      w.bytes += bytes_of(s.gradient, s.master, s.exp_avg, s.exp_avg_sq, s.master, s.exp_avg, s.exp_avg_sq, s.weight);
    return w;
  }
  void check_shapes() const {
    for (const AdamWShard& s : shards) s.check_shapes();
    check(!scale.present() || (scale.shape == Shape{1} && scale.dtype == DType::f64), "adamw: scale is not (1) f64",
          {{"count", scale.count()}, {"dtype", std::int64_t(scale.dtype)}});
    check(step >= 1, "adamw: steps count from 1", {{"step", step}});
  }
  double correction1() const { return 1 / (1 - std::pow(beta1, double(step))); }
  double correction2() const { return 1 / (1 - std::pow(beta2, double(step))); }
};

namespace cpu {
void adamw(Context&, const AdamW&);
}  // namespace cpu
namespace cuda {
void adamw(Context&, const AdamW&);
}  // namespace cuda

inline void adamw(Context& ctx, const AdamW& a) {
  dispatch(
      ctx, "adamw", a, [&] { cpu::adamw(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::adamw(ctx, a);
      });
}

}  // namespace moetrain::ops
