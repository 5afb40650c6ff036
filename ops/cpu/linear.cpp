// linear.cpp -- BLAS products; operands that BLAS cannot read are converted block by block, so scratch does not grow with the
// sizes.
#include "ops/linear.h"

#include <algorithm>

#include "ops/cpu/gemm.h"
#include "ops/cpu/linear_blocks.h"

namespace moetrain::ops {
namespace {

using cpu::Blocks;
using cpu::blocks_of;
using cpu::gemm;
using cpu::reals;
using cpu::scratch_for;
using cpu::write_reals;

template <class R>
void forward(Context& ctx, const LinearForward& a) {
  const std::int64_t T = a.x.shape[0], I = a.x.shape[1], O = a.w.shape[0];
  const Blocks most = blocks_of<R>({a.x, a.w, a.y}, T, O, I);
  Scope scope(ctx.scratch);
  R* x_scratch = scratch_for<R>(ctx, a.x, most.tokens, I);
  R* w_scratch = scratch_for<R>(ctx, a.w, most.outputs, I);
  R* y_scratch = scratch_for<R>(ctx, a.y, most.tokens, most.outputs);
  if (ctx.dry()) return;
  for (std::int64_t o = 0; o < O; o += most.outputs) {
    const std::int64_t outputs = std::min(most.outputs, O - o);
    const auto w = reals<R>(a.w, {o, outputs, 0, I}, w_scratch);
    for (std::int64_t t = 0; t < T; t += most.tokens) {
      const std::int64_t tokens = std::min(most.tokens, T - t);
      const auto x = reals<R>(a.x, {t, tokens, 0, I}, x_scratch);
      if (y_scratch == nullptr) {
        gemm<R>(false, true, tokens, outputs, I, 1, x.data, x.stride, w.data, w.stride, R(a.add), a.y.as<R>() + t * O + o, O);
      } else {
        gemm<R>(false, true, tokens, outputs, I, 1, x.data, x.stride, w.data, w.stride, 0, y_scratch, outputs);
        write_reals<R>(y_scratch, a.y, {t, tokens, o, outputs}, a.add);
      }
    }
  }
}

template <class R>
void backward_x(Context& ctx, const LinearBackward& a, std::int64_t most_tokens) {
  const std::int64_t T = a.dy.shape[0], O = a.dy.shape[1], I = a.w.shape[1];
  const Blocks most = blocks_of<R>({a.dy, a.w, a.dx}, most_tokens, O, I);
  Scope scope(ctx.scratch);
  R* dy_scratch = scratch_for<R>(ctx, a.dy, most.tokens, most.outputs);
  R* w_scratch = scratch_for<R>(ctx, a.w, most.outputs, I);
  R* dx_scratch = scratch_for<R>(ctx, a.dx, most.tokens, I);
  if (ctx.dry()) return;
  for (std::int64_t t = 0; t < T; t += most.tokens) {
    const std::int64_t tokens = std::min(most.tokens, T - t);
    R* dx = dx_scratch ? dx_scratch : a.dx.as<R>() + t * I;
    // At least one round, so that without outputs dx still becomes zero.
    for (std::int64_t o = 0; o == 0 || o < O; o += most.outputs) {
      const std::int64_t outputs = std::min(most.outputs, O - o);
      const auto dy = reals<R>(a.dy, {t, tokens, o, outputs}, dy_scratch);
      const auto w = reals<R>(a.w, {o, outputs, 0, I}, w_scratch);
      const bool adds = o > 0 || (a.add_dx && dx_scratch == nullptr);
      gemm<R>(false, false, tokens, I, outputs, 1, dy.data, dy.stride, w.data, w.stride, R(adds), dx, I);
    }
    if (dx_scratch) write_reals<R>(dx_scratch, a.dx, {t, tokens, 0, I}, a.add_dx);
  }
}

template <class R>
void backward_w(Context& ctx, const LinearBackward& a, std::int64_t most_tokens) {
  const std::int64_t T = a.dy.shape[0], O = a.dy.shape[1], I = a.x.shape[1];
  const Blocks most = blocks_of<R>({a.dy, a.x}, most_tokens, O, I);
  Scope scope(ctx.scratch);
  R* dy_scratch = scratch_for<R>(ctx, a.dy, most.tokens, most.outputs);
  R* x_scratch = scratch_for<R>(ctx, a.x, most.tokens, I);
  if (ctx.dry()) return;
  for (std::int64_t t = 0; t < T; t += most.tokens) {
    const std::int64_t tokens = std::min(most.tokens, T - t);
    const auto x = reals<R>(a.x, {t, tokens, 0, I}, x_scratch);
    for (std::int64_t o = 0; o < O; o += most.outputs) {
      const std::int64_t outputs = std::min(most.outputs, O - o);
      const auto dy = reals<R>(a.dy, {t, tokens, o, outputs}, dy_scratch);
      gemm<R>(true, false, outputs, I, tokens, 1, dy.data, dy.stride, x.data, x.stride, 1, a.dw.as<R>() + o * I, I);
    }
  }
}

template <class R>
void backward(Context& ctx, const LinearBackward& a, std::int64_t most_tokens) {
  if (a.dx.present()) backward_x<R>(ctx, a, most_tokens);
  if (a.dw.present()) backward_w<R>(ctx, a, most_tokens);
}

}  // namespace

void cpu::linear(Context& ctx, const LinearForward& a) {
  a.x.dtype == DType::f64 ? forward<double>(ctx, a) : forward<float>(ctx, a);
}
void cpu::linear(Context& ctx, const LinearBackward& a) { linear_part(ctx, a, a.dy.shape[0]); }
void cpu::linear_part(Context& ctx, const LinearBackward& a, std::int64_t most_tokens) {
  a.dy.dtype == DType::f64 ? backward<double>(ctx, a, most_tokens) : backward<float>(ctx, a, most_tokens);
}

}  // namespace moetrain::ops
