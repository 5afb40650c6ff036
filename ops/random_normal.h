// random_normal.h -- fresh weights: normal numbers that are a function of (seed, stream, index).
//
//   y[i] = deviation * normal(seed, stream, first + i)        ops/random.h
//
// In f64, rounded to f32 and from there to bf16. Repeatable, whatever part of a tensor y is. CUDA has its own logarithm and cosine:
// about one element in 10^8 is the neighbouring f32.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct RandomNormal {
  std::uint64_t seed, stream;
  std::int64_t first;  // index of y's first element
  double deviation;
  Tensor y;  // any shape, any floating type (f64 on the CPU only); written
  void check_shapes() const {
    check(is_floating(y.dtype), "random_normal: y is not floating", {{"dtype", std::int64_t(y.dtype)}});
    check(first >= 0, "random_normal: a negative index", {{"first", first}});
  }
};

namespace cpu {
void random_normal(Context&, const RandomNormal&);
}  // namespace cpu
namespace cuda {
void random_normal(Context&, const RandomNormal&);
}  // namespace cuda

inline void random_normal(Context& ctx, const RandomNormal& a) {
  dispatch(
      ctx, "random_normal", a, [&] { cpu::random_normal(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::random_normal(ctx, a);
      });
}

}  // namespace moetrain::ops
