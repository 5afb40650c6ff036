// glu.h -- gated unit of an MLP, element by element.
//
//   silu (SwiGLU)    y = g s u                                         s = sigmoid(g)
//                    dg = dy u s (1 + g (1 - s))                       du = dy g s
//   situ (SiTU-GLU)  y = b1 p s b2 q                                   p = tanh(g / b1), q = tanh(u / b2)
//                    dg = dy b2 q ((1 - p^2) s + b1 p s (1 - s))       du = dy b1 p s (1 - q^2)
//   backward has y again, and dots[r] = sum_f dy[r,f] y[r,f], on its way
//
// Computed in f32 (f64 for f64) and rounded once; dots are sums of what is not rounded. Forward's y may alias g or u; dg may alias
// dy, du may alias g or u. Repeatable.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

enum class GluKind : std::uint8_t { silu, situ };

struct GluForward {
  GluKind kind;
  double beta, linear_beta;  // b1, b2 of situ
  ConstTensor g;             // (R, F) gate
  ConstTensor u;             // (R, F) up
  Tensor y;                  // (R, F)
  Work work(const Context&) const { return {.bytes = bytes_of(g, u, y)}; }
  void check_shapes() const {
    check(is_floating(g.dtype) && u.dtype == g.dtype && y.dtype == g.dtype, "glu: g, u and y are not of one floating type",
          {{"g", std::int64_t(g.dtype)}, {"u", std::int64_t(u.dtype)}, {"y", std::int64_t(y.dtype)}});
    check(g.shape.rank() == 2 && u.shape == g.shape && y.shape == g.shape, "glu: g, u and y are not (R, F)",
          {{"R", g.shape[0]}, {"F", g.shape[1]}, {"u", u.shape.count()}, {"y", y.shape.count()}});
    check(kind == GluKind::silu || (beta > 0 && linear_beta > 0), "glu: a bound of situ is not positive");
  }
};

struct GluBackward {
  GluKind kind;
  double beta, linear_beta;
  ConstTensor dy;  // (R, F)
  ConstTensor g;   // (R, F)
  ConstTensor u;   // (R, F)
  Tensor dg;       // (R, F); may alias dy
  Tensor du;       // (R, F)
  Tensor y = {};   // (R, F); absent: not wanted
  Tensor dots = {};  // (R) real; absent: not wanted
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dy, g, u, dg, du, y, dots)}; }
  void check_shapes() const {
    check(is_floating(g.dtype) && u.dtype == g.dtype && dy.dtype == g.dtype && dg.dtype == g.dtype && du.dtype == g.dtype,
          "glu: dy, g, u, dg and du are not of one floating type",
          {{"g", std::int64_t(g.dtype)},
           {"u", std::int64_t(u.dtype)},
           {"dy", std::int64_t(dy.dtype)},
           {"dg", std::int64_t(dg.dtype)},
           {"du", std::int64_t(du.dtype)}});
    check(g.shape.rank() == 2 && u.shape == g.shape && dy.shape == g.shape && dg.shape == g.shape && du.shape == g.shape,
          "glu: dy, g, u, dg and du are not (R, F)",
          {{"R", g.shape[0]},
           {"F", g.shape[1]},
           {"u", u.shape.count()},
           {"dy", dy.shape.count()},
           {"dg", dg.shape.count()},
           {"du", du.shape.count()}});
    check(!y.present() || (y.shape == g.shape && y.dtype == g.dtype), "glu: y is not (R, F) as g",
          {{"R", g.shape[0]}, {"y", y.count()}, {"dtype", std::int64_t(y.dtype)}});
    check(!dots.present() || (dots.shape == Shape{g.shape[0]} && dots.dtype == real_of(g.dtype)), "glu: dots are not (R) real",
          {{"R", g.shape[0]}, {"dots", dots.count()}, {"dtype", std::int64_t(dots.dtype)}});
    check(kind == GluKind::silu || (beta > 0 && linear_beta > 0), "glu: a bound of situ is not positive");
  }
};

namespace cpu {
void glu(Context&, const GluForward&);
void glu(Context&, const GluBackward&);
}  // namespace cpu
namespace cuda {
void glu(Context&, const GluForward&);
void glu(Context&, const GluBackward&);
}  // namespace cuda

inline void glu(Context& ctx, const GluForward& a) {
  dispatch(
      ctx, "glu forward", a, [&] { cpu::glu(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::glu(ctx, a);
      });
}
inline void glu(Context& ctx, const GluBackward& a) {
  dispatch(
      ctx, "glu backward", a, [&] { cpu::glu(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::glu(ctx, a);
      });
}

}  // namespace moetrain::ops
