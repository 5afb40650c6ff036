// real_output.h -- a result computed in f32 or f64 and rounded once: in place where the tensor holds reals, else through scratch.
#pragma once
#include "ops/cpu/reals.h"

namespace moetrain::ops::cpu {

template <class R>
struct RealOutput {
  Tensor to;
  R* data;  // as many elements as `to`, dense
  RealOutput(Context& ctx, Tensor t)
      : to(t), data(t.dtype == DTypeOf<R>::value ? t.as<R>() : ctx.scratch.take(DTypeOf<R>::value, {t.count()}).template as<R>()) {}
  void round() const {
    if (to.dtype != DTypeOf<R>::value) write_reals(data, to.reshape({1, to.count()}), {0, 1, 0, to.count()}, /*add=*/false);
  }
};

}  // namespace moetrain::ops::cpu
