// head_linear.h -- one slice of a matrix a head: between the heads' space and the shared latent (absorbed attention).
//
//   i runs over the width rows of the slice
//   to_latent:   y[t,n,c]         = sum_i x[t,n,column+i] w[n,row+i,c]
//                dx[t,n,column+i] = sum_c dy[t,n,c] w[n,row+i,c]           dw[n,row+i,c] += sum_t x[t,n,column+i] dy[t,n,c]
//   from_latent: y[t,n,column+i]  = sum_c x[t,n,c] w[n,row+i,c]
//                dx[t,n,c]        = sum_i dy[t,n,column+i] w[n,row+i,c]    dw[n,row+i,c] += sum_t dy[t,n,column+i] x[t,n,c]
//
// y and dx are written, only in the columns named above; dw adds, only to the rows of the slice. Nothing may alias. Sums are real,
// y and dx are rounded once. Repeatable: a sum is never split over threads.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

enum class HeadDirection : std::uint8_t { to_latent, from_latent };

struct HeadLinearForward {
  HeadDirection direction;
  ConstTensor w;  // (N, A, C), used rows [row, row + width) of each head
  std::int64_t row, width;
  ConstTensor x;  // to_latent: (T, N, X), used columns [column, column + width); from_latent: (T, N, C)
  std::int64_t column;
  Tensor y;  // to_latent: (T, N, C); from_latent: (T, N, Y), written columns [column, column + width)
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    return {.kind = WorkKind::linear,
            .dtype = x.dtype,
            .flops = 2 * double(x.shape[0] * w.shape[0] * width * w.shape[2]),
            .bytes = bytes_of(x, w, y)};
  }
  void check_shapes() const {
    check(w.shape.rank() == 3 && x.shape.rank() == 3 && y.shape.rank() == 3, "head_linear: w, x, y are not of rank 3",
          {{"w", w.shape.rank()}, {"x", x.shape.rank()}, {"y", y.shape.rank()}});
    const auto T = x.shape[0], N = w.shape[0], C = w.shape[2];
    const bool to = direction == HeadDirection::to_latent;
    const Shape heads = to ? x.shape : y.shape, latent = to ? y.shape : x.shape;
    check(N >= 1 && C >= 1, "head_linear: w is empty", {{"N", N}, {"C", C}});
    check(0 <= row && width >= 1 && row + width <= w.shape[1], "head_linear: rows are not in w",
          {{"row", row}, {"width", width}, {"A", w.shape[1]}});
    check(heads[0] == T && heads[1] == N && 0 <= column && column + width <= heads[2],
          "head_linear: the heads' side does not fit or lacks the columns",
          {{"T", T}, {"N", N}, {"column", column}, {"width", width}, {"columns", heads[2]}});
    check(latent == Shape{T, N, C}, "head_linear: the latent side is not (T, N, C)",
          {{"T", T}, {"N", N}, {"C", C}, {"count", latent.count()}});
    check(w.dtype == x.dtype && y.dtype == x.dtype, "head_linear: w, x, y are not of one type",
          {{"w", int(w.dtype)}, {"x", int(x.dtype)}, {"y", int(y.dtype)}});
  }
};

struct HeadLinearBackward {
  HeadDirection direction;
  ConstTensor w;  // (N, A, C)
  std::int64_t row, width;
  ConstTensor x;  // as in forward
  std::int64_t column;
  ConstTensor dy;                           // as y in forward
  Tensor dx;                                // as x; to_latent writes only the used columns; absent: not wanted
  Tensor dw;                                // (N, A, C) real; adds to the used rows; absent: frozen
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    const double product = 2 * double(x.shape[0] * w.shape[0] * width * w.shape[2]);
    return {.kind = WorkKind::linear,
            .backward = true,
            .dtype = x.dtype,
            .flops = (dx.present() + dw.present()) * product,
            .bytes = bytes_of(dy, x, w, dx) + 2 * bytes_of(dw)};
  }
  void check_shapes() const {
    check(w.shape.rank() == 3 && x.shape.rank() == 3 && dy.shape.rank() == 3, "head_linear: w, x, dy are not of rank 3",
          {{"w", w.shape.rank()}, {"x", x.shape.rank()}, {"dy", dy.shape.rank()}});
    const auto T = x.shape[0], N = w.shape[0], C = w.shape[2];
    const bool to = direction == HeadDirection::to_latent;
    const Shape heads = to ? x.shape : dy.shape, latent = to ? dy.shape : x.shape;
    check(N >= 1 && C >= 1, "head_linear: w is empty", {{"N", N}, {"C", C}});
    check(0 <= row && width >= 1 && row + width <= w.shape[1], "head_linear: rows are not in w",
          {{"row", row}, {"width", width}, {"A", w.shape[1]}});
    check(heads[0] == T && heads[1] == N && 0 <= column && column + width <= heads[2],
          "head_linear: the heads' side does not fit or lacks the columns",
          {{"T", T}, {"N", N}, {"column", column}, {"width", width}, {"columns", heads[2]}});
    check(latent == Shape{T, N, C}, "head_linear: the latent side is not (T, N, C)",
          {{"T", T}, {"N", N}, {"C", C}, {"count", latent.count()}});
    check(w.dtype == x.dtype && dy.dtype == x.dtype, "head_linear: w, x, dy are not of one type",
          {{"w", int(w.dtype)}, {"x", int(x.dtype)}, {"dy", int(dy.dtype)}});
    if (dx.present())
      check(dx.shape == x.shape && dx.dtype == x.dtype, "head_linear: dx is not like x",
            {{"x", x.count()}, {"dx", dx.count()}, {"dtype", int(dx.dtype)}});
    if (dw.present())
      check(dw.shape == w.shape && dw.dtype == real_of(x.dtype), "head_linear: dw is not (N, A, C) real",
            {{"w", w.count()}, {"dw", dw.count()}, {"dtype", int(dw.dtype)}});
  }
};

namespace cpu {
void head_linear(Context&, const HeadLinearForward&);
void head_linear(Context&, const HeadLinearBackward&);
}  // namespace cpu
namespace cuda {
void head_linear(Context&, const HeadLinearForward&);
void head_linear(Context&, const HeadLinearBackward&);
}  // namespace cuda

inline void head_linear(Context& ctx, const HeadLinearForward& a) {
  dispatch(
      ctx, "head_linear forward", a, [&] { cpu::head_linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::head_linear(ctx, a);
      });
}
inline void head_linear(Context& ctx, const HeadLinearBackward& a) {
  dispatch(
      ctx, "head_linear backward", a, [&] { cpu::head_linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::head_linear(ctx, a);
      });
}

}  // namespace moetrain::ops
