// dropout.h -- some of the inputs left out, the others enlarged; which ones is a function of (seed, stream, place in the run's
// text).
//
//   y[t,i] = x[t,i] / (1 - share) where r(t,i) >= share 2^32, else 0
//   r(t,i)   32 of the bits of philox(seed, stream, n / 4), the (n mod 4)-th word, n = (first_token + t) width + column + i
//                                                                                                                   ops/random.h
//
// Its own adjoint: dx is y for x = dy. y may be x. Rounded once. Repeatable, however tokens and columns are cut over ranks and
// micro-batches.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct Dropout {
  std::uint64_t seed, stream;
  std::int64_t first_token;
  double share;   // dropped, [0, 1)
  ConstTensor x;  // (T, I), f64 on the CPU only
  Tensor y;       // (T, I), of x's type
  std::int64_t column = 0, width = 0;  // of x among columns that ranks share; width 0: x has them all
  std::int64_t whole_width() const { return width > 0 ? width : x.shape[1]; }
  Work work(const Context&) const { return {.bytes = bytes_of(x, y)}; }
  void check_shapes() const {
    check(x.shape.rank() == 2 && x.shape == y.shape && x.dtype == y.dtype && is_floating(x.dtype),
          "dropout: y is not like x (T, I)", {{"x", x.count()}, {"y", y.count()}, {"dtype", std::int64_t(x.dtype)}});
    check(column >= 0 && column + x.shape[1] <= whole_width(), "dropout: columns are not inside the width",
          {{"column", column}, {"I", x.shape[1]}, {"width", width}});
    check(share >= 0 && share < 1 && first_token >= 0, "dropout: the share is not in [0, 1), or the place is negative",
          {{"first_token", first_token}});
  }
};

namespace cpu {
void dropout(Context&, const Dropout&);
}  // namespace cpu
namespace cuda {
void dropout(Context&, const Dropout&);
}  // namespace cuda

inline void dropout(Context& ctx, const Dropout& a) {
  dispatch(
      ctx, "dropout", a, [&] { cpu::dropout(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::dropout(ctx, a);
      });
}

}  // namespace moetrain::ops
