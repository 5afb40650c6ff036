// linear.h -- y = x W^T for a matrix W, and its gradients.
//
//   y[t,o]   = sum_i x[t,i] w[o,i]                  or y += , with add
//   dx[t,i]  = sum_o dy[t,o] w[o,i]                 or dx += , with add_dx
//   dw[o,i] += sum_t dy[t,o] x[t,i]                 adds: weights gather over micro-batches; or dw = , with write_dw
//
// Each operand may have its own floating type (activations bf16, router weights and logits f32); only f64 does not mix. Sums in f32
// (f64 for f64), rounded once into a bf16 result. Nothing may alias. Repeatable for one number of threads. CUDA: no f64.
#pragma once
#include <utility>

#include "ops/context.h"

namespace moetrain::ops {

// What c = a b takes on CUDA, whose matrix units want two bf16 operands. An f32 operand beside a bf16 one is the sum of three bf16
// parts, and is so exactly; two f32 operands with a bf16 result are two parts each, which drops less than 2^-16 of a product; two
// f32 operands with an f32 result are multiplied as they are. The sum over the parts' products is rounded afterwards.
struct SplitProduct {
  Tensor a, b;  // (parts, rows, columns) bf16; absent: not split
  Tensor sums;  // like c, f32; absent: c gathers them itself
  SplitProduct(Context& ctx, ConstTensor of_a, ConstTensor of_b, ConstTensor c) {
    const bool a_real = of_a.dtype == DType::f32, b_real = of_b.dtype == DType::f32;
    if ((!a_real && !b_real) || (a_real && b_real && c.dtype != DType::bf16)) return;
    const auto parts = [&](ConstTensor t) {
      return ctx.scratch.take(DType::bf16, {a_real && b_real ? 2 : 3, t.shape[0], t.shape[1]});
    };
    if (a_real) a = parts(of_a);
    if (b_real) b = parts(of_b);
    if (c.dtype == DType::bf16) sums = ctx.scratch.take(DType::f32, c.shape);
  }
};

// c, of c.count() sums over `depth` summands: on CUDA in tiles of 64, by the parts' products where operands are split.
inline Work product_work(const Context& ctx, ConstTensor a, ConstTensor b, ConstTensor c, std::int64_t depth, bool adds) {
  const std::int64_t tile = ctx.plans_for == Device::cuda ? 64 : 1;
  const bool a_real = a.dtype == DType::f32, b_real = b.dtype == DType::f32;
  const bool split = tile > 1 && (a_real || b_real) && !(a_real && b_real && c.dtype != DType::bf16);
  const double sums = double(in_tiles(c.shape[0], tile) * in_tiles(c.shape[1], tile));
  return {.kind = WorkKind::linear,
          .dtype = split || a.dtype == DType::bf16 || b.dtype == DType::bf16 ? DType::bf16 : a.dtype,
          .flops = (split ? 3 : 1) * 2 * sums * double(depth),
          .bytes = (split ? 2 : 1) * bytes_of(a, b, c) + (adds ? bytes_of(c) : 0)};
}

struct LinearForward {
  ConstTensor x;                            // (T, I)
  ConstTensor w;                            // (O, I)
  Tensor y;                                 // (T, O), any floating type (logits of a router are real)
  bool add = false;                         // y += instead of y =
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void take_scratch(Context& ctx) const {
    if (ctx.plans_for == Device::cuda) SplitProduct(ctx, x, w, y);
  }
  Work work(const Context& ctx) const { return product_work(ctx, x, w, y, x.shape[1], add); }
  void check_shapes() const {
    check(x.shape.rank() == 2 && w.shape.rank() == 2 && x.shape[1] == w.shape[1], "linear: x is not (T, I) of w (O, I)",
          {{"I of x", x.shape[1]}, {"I of w", w.shape[1]}});
    check(y.shape == Shape{x.shape[0], w.shape[0]}, "linear: y is not (T, O)",
          {{"T", x.shape[0]}, {"O", w.shape[0]}, {"rows", y.shape[0]}, {"columns", y.shape[1]}});
    const DType real = real_of(x.dtype);
    check(is_floating(x.dtype) && is_floating(w.dtype) && is_floating(y.dtype) && real_of(w.dtype) == real &&
              real_of(y.dtype) == real,
          "linear: types are not floating, or mix f64 with others",
          {{"x", std::int64_t(x.dtype)}, {"w", std::int64_t(w.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct LinearBackward {
  ConstTensor dy;                           // (T, O), any floating type
  ConstTensor x;                            // (T, I); absent when dw is
  ConstTensor w;                            // (O, I); absent when dx is
  Tensor dx;                                // (T, I); absent: not wanted
  Tensor dw;                                // (O, I) real; adds; absent: frozen
  bool add_dx = false;                      // dx += instead of dx =
  bool write_dw = false;                    // dw = instead of dw +=: what it held does not matter, as in a first micro-batch
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void take_scratch(Context& ctx) const {
    if (ctx.plans_for != Device::cuda) return;
    for (const auto& [b, c] : {std::pair<ConstTensor, ConstTensor>{w, dx}, {x, dw}}) {
      Scope one_after_the_other(ctx.scratch);
      if (c.present()) SplitProduct(ctx, dy, b, c);
    }
  }
  void clear_dw(const Context& ctx) const {  // for backends that only add
    if (write_dw && dw.present() && !ctx.dry()) fill(ctx.device(), dw.data, 0, dw.bytes());
  }
  Work work(const Context& ctx) const {
    Work both{.kind = WorkKind::linear, .backward = true, .dtype = dy.dtype};
    if (dx.present()) both += product_work(ctx, dy, w, dx, dy.shape[1], add_dx);
    if (dw.present()) both += product_work(ctx, dy, x, dw, dy.shape[0], !write_dw);
    return both;
  }
  void check_shapes() const {
    check(dy.shape.rank() == 2 && is_floating(dy.dtype), "linear: dy is not a floating (T, O)",
          {{"rank", dy.shape.rank()}, {"dtype", std::int64_t(dy.dtype)}});
    const std::int64_t T = dy.shape[0], O = dy.shape[1];
    const DType real = real_of(dy.dtype);
    if (dx.present()) {
      check(w.shape.rank() == 2 && w.shape[0] == O, "linear: w is not (O, I) of dy (T, O)", {{"O", O}, {"rows of w", w.shape[0]}});
      check(dx.shape == Shape{T, w.shape[1]}, "linear: dx is not (T, I)",
            {{"T", T}, {"I", w.shape[1]}, {"rows", dx.shape[0]}, {"columns", dx.shape[1]}});
      check(is_floating(w.dtype) && is_floating(dx.dtype) && real_of(w.dtype) == real && real_of(dx.dtype) == real,
            "linear: types of w or dx are not floating, or mix f64 with others",
            {{"dy", std::int64_t(dy.dtype)}, {"w", std::int64_t(w.dtype)}, {"dx", std::int64_t(dx.dtype)}});
    }
    if (dw.present()) {
      check(x.shape.rank() == 2 && x.shape[0] == T, "linear: x is not (T, I) of dy (T, O)", {{"T", T}, {"rows of x", x.shape[0]}});
      check(dw.shape == Shape{O, x.shape[1]}, "linear: dw is not (O, I)",
            {{"O", O}, {"I", x.shape[1]}, {"rows", dw.shape[0]}, {"columns", dw.shape[1]}});
      check(is_floating(x.dtype) && real_of(x.dtype) == real && dw.dtype == real,
            "linear: x mixes f64 with others, or dw is not real",
            {{"dy", std::int64_t(dy.dtype)}, {"x", std::int64_t(x.dtype)}, {"dw", std::int64_t(dw.dtype)}});
    }
  }
};

namespace cpu {
void linear(Context&, const LinearForward&);
void linear(Context&, const LinearBackward&);
}  // namespace cpu
namespace cuda {
void linear(Context&, const LinearForward&);
void linear(Context&, const LinearBackward&);
}  // namespace cuda

inline void linear(Context& ctx, const LinearForward& a) {
  dispatch(
      ctx, "linear forward", a, [&] { cpu::linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::linear(ctx, a);
      });
}
inline void linear(Context& ctx, const LinearBackward& a) {
  dispatch(
      ctx, "linear backward", a, [&] { a.clear_dw(ctx), cpu::linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::linear(ctx, a);
      });
}

}  // namespace moetrain::ops
