// random_normal.h -- fresh weights: normal numbers that are a function of (seed, stream, index).
//
//   y[r,c] = deviation * normal(seed, stream, first + r stride + c)        ops/random.h
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
  Tensor y;                 // rows of dim 0 by all other dims, any shape, any floating type (f64 on the CPU only); written
  std::int64_t stride = 0;  // between the indices of rows; 0: that of dense rows
  std::int64_t gap() const { return stride == 0 ? 0 : stride - y.shape.row(); }
  void check_shapes() const {
    check(stride == 0 || stride >= y.shape.row(), "random_normal: rows overlap", {{"stride", stride}, {"row", y.shape.row()}});
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
