// head_linear.cpp -- one BLAS product a head, on the slices where they lie.
#include "ops/head_linear.h"

#include "ops/cpu/gemm.h"
#include "ops/cpu/reals.h"

namespace moetrain::ops::cpu {
namespace {

// Columns of one head inside a (T, N, width) tensor: element (t, i) is data[t * stride + i].
template <class R>
struct Columns {
  R* data;
  std::int64_t first, stride, head;  // in data; to the next row, to the next head
  R* of(std::int64_t n) const { return data + first + n * head; }
};

template <class R>
Columns<const R> input(Context& ctx, ConstTensor t, std::int64_t column) {
  return {reals<R>(ctx, t), column, t.shape.row(), t.shape[2]};
}

// The columns [column, column + width) of every head of an output, in place or in scratch that round() copies out.
template <class T, class R>
struct Output {
  Tensor to;
  std::int64_t column, width;
  Columns<R> columns;
  Output(Context& ctx, Tensor t, std::int64_t first, std::int64_t count) : to(t), column(first), width(count) {
    if constexpr (std::is_same_v<T, R>)
      columns = {t.as<R>(), first, t.shape.row(), t.shape[2]};
    else
      columns = {ctx.scratch.take(DTypeOf<R>::value, {t.shape[0], t.shape[1], count}).template as<R>(), 0, t.shape[1] * count,
                 count};
  }
  void round() const {
    if constexpr (!std::is_same_v<T, R>)
      for (std::int64_t row = 0; row < to.shape[0] * to.shape[1]; ++row)
        for (std::int64_t i = 0; i < width; ++i) to.as<T>()[row * to.shape[2] + column + i] = T(columns.data[row * width + i]);
  }
};

template <class T>
void forward(Context& ctx, const HeadLinearForward& a) {
  using R = acc_t<T>;
  const std::int64_t rows = a.x.shape[0], N = a.w.shape[0], A = a.w.shape[1], C = a.w.shape[2];
  const bool to_latent = a.direction == HeadDirection::to_latent;
  const Scope scope(ctx.scratch);
  const R* all_w = reals<R>(ctx, a.w);
  const auto x = input<R>(ctx, a.x, to_latent ? a.column : 0);
  const Output<T, R> y(ctx, a.y, to_latent ? 0 : a.column, to_latent ? C : a.width);
  if (ctx.dry()) return;
  const R* w = all_w + a.row * C;
#pragma omp parallel for schedule(static) if (rows * N * C > kWorthThreads)
  for (std::int64_t n = 0; n < N; ++n)
    if (to_latent)
      gemm<R>(false, false, rows, C, a.width, R(1), x.of(n), x.stride, w + n * A * C, C, R(0), y.columns.of(n), y.columns.stride);
    else
      gemm<R>(false, true, rows, a.width, C, R(1), x.of(n), x.stride, w + n * A * C, C, R(0), y.columns.of(n), y.columns.stride);
  y.round();
}

template <class T, class R>
void backward_x(Context& ctx, const HeadLinearBackward& a, const Columns<const R>& dy) {
  const std::int64_t rows = a.x.shape[0], N = a.w.shape[0], A = a.w.shape[1], C = a.w.shape[2];
  const bool to_latent = a.direction == HeadDirection::to_latent;
  if (!a.dx.present()) return;
  const Scope scope(ctx.scratch);
  const R* all_w = reals<R>(ctx, a.w);
  const Output<T, R> dx(ctx, a.dx, to_latent ? a.column : 0, to_latent ? a.width : C);
  if (ctx.dry()) return;
  const R* w = all_w + a.row * C;
#pragma omp parallel for schedule(static) if (rows * N * C > kWorthThreads)
  for (std::int64_t n = 0; n < N; ++n)
    if (to_latent)
      gemm<R>(false, true, rows, a.width, C, R(1), dy.of(n), dy.stride, w + n * A * C, C, R(0), dx.columns.of(n),
              dx.columns.stride);
    else
      gemm<R>(false, false, rows, C, a.width, R(1), dy.of(n), dy.stride, w + n * A * C, C, R(0), dx.columns.of(n),
              dx.columns.stride);
  dx.round();
}

template <class R>
void backward_w(Context& ctx, const HeadLinearBackward& a, const Columns<const R>& dy) {
  const std::int64_t rows = a.x.shape[0], N = a.w.shape[0], A = a.w.shape[1], C = a.w.shape[2];
  const bool to_latent = a.direction == HeadDirection::to_latent;
  if (!a.dw.present()) return;
  const Scope scope(ctx.scratch);
  const auto x = input<R>(ctx, a.x, to_latent ? a.column : 0);
  if (ctx.dry()) return;
  const auto heads = to_latent ? x : dy, latent = to_latent ? dy : x;
  R* dw = a.dw.as<R>() + a.row * C;
#pragma omp parallel for schedule(static) if (rows * N * C > kWorthThreads)
  for (std::int64_t n = 0; n < N; ++n)
    gemm<R>(true, false, a.width, C, rows, R(1), heads.of(n), heads.stride, latent.of(n), latent.stride, R(1), dw + n * A * C, C);
}

template <class T>
void backward(Context& ctx, const HeadLinearBackward& a) {
  using R = acc_t<T>;
  const Scope scope(ctx.scratch);
  const auto dy = input<R>(ctx, a.dy, a.direction == HeadDirection::to_latent ? 0 : a.column);
  backward_w<R>(ctx, a, dy);
  backward_x<T, R>(ctx, a, dy);
}

}  // namespace

void head_linear(Context& ctx, const HeadLinearForward& a) {
  with_storage(a.x.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
}
void head_linear(Context& ctx, const HeadLinearBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops::cpu
