// head_linear.h -- one slice of a matrix a head: between the heads' space and the shared latent (absorbed attention).
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

// to_latent:   y[t,n,c] = sum_i x[t,n,column+i] w[n,row+i,c]
// from_latent: y[t,n,column+i] = sum_c x[t,n,c] w[n,row+i,c]
enum class HeadDirection : std::uint8_t { to_latent, from_latent };

struct HeadLinearForward {
  HeadDirection direction;
  ConstTensor w;  // (N, A, C), used rows [row, row + width) of each head
  std::int64_t row, width;
  ConstTensor x;  // to_latent: (T, N, X), used columns [column, column + width); from_latent: (T, N, C)
  std::int64_t column;
  Tensor y;       // to_latent: (T, N, C); from_latent: (T, N, Y), written columns [column, column + width)
  void check_shapes() const;
};

struct HeadLinearBackward {
  HeadDirection direction;
  ConstTensor w;   // (N, A, C)
  std::int64_t row, width;
  ConstTensor x;   // as in forward
  std::int64_t column;
  ConstTensor dy;  // as y in forward
  Tensor dx;       // as x; to_latent writes only the used columns; absent: not wanted
  Tensor dw;       // (N, A, C) real; adds to the used rows; absent: frozen
  void check_shapes() const;
};

namespace cpu {
void head_linear(Context&, const HeadLinearForward&);
void head_linear(Context&, const HeadLinearBackward&);
}  // namespace cpu

inline void head_linear(Context& ctx, const HeadLinearForward& a) {
  dispatch(ctx, "head_linear forward", a, [&] { cpu::head_linear(ctx, a); });
}
inline void head_linear(Context& ctx, const HeadLinearBackward& a) {
  dispatch(ctx, "head_linear backward", a, [&] { cpu::head_linear(ctx, a); });
}

}  // namespace moetrain::ops
