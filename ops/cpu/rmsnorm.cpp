// rmsnorm.cpp -- the equations as loops over rows.
#include "ops/rmsnorm.h"

#include <cmath>

#include "ops/cpu/row_parts.h"

namespace moetrain::ops {
namespace {

template <class T>
void forward(Context& ctx, const RmsNormForward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t rows = a.x.shape[0], D = a.x.shape[1];
  Scope scope(ctx.scratch);
  const R* w = cpu::reals<R>(ctx, a.w);
  if (ctx.dry()) return;
  R* r = a.r.as<R>();
#pragma omp parallel for if (rows * D > cpu::kWorthThreads)
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* x = a.x.as<T>() + t * D;
    T* y = a.y.as<T>() + t * D;
    R sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < D; ++d) sum += R(x[d]) * R(x[d]);
    const R rt = R(1) / std::sqrt(sum / R(D) + R(a.eps));
#pragma omp simd
    for (std::int64_t d = 0; d < D; ++d) y[d] = T(w[d] * R(T(R(x[d]) * rt)));
    r[t] = rt;
  }
}

template <class T>
void backward(Context& ctx, const RmsNormBackward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t rows = a.x.shape[0], D = a.x.shape[1];
  Scope scope(ctx.scratch);
  const R* w = cpu::reals<R>(ctx, a.w);
  const R* r = a.r.as<R>();
  // dw first: dx may alias dy.
  if (a.dw.present()) {
    const R* sums = cpu::sum_over_rows<R>(ctx, rows, D, [&](std::int64_t begin, std::int64_t end, R* sum) {
      for (std::int64_t t = begin; t < end; ++t) {
        const T *dy = a.dy.as<T>() + t * D, *x = a.x.as<T>() + t * D;
        const R rt = r[t];
#pragma omp simd
        for (std::int64_t d = 0; d < D; ++d) sum[d] += R(dy[d]) * R(x[d]) * rt;
      }
    });
    R* dw = a.dw.as<R>();
    for (std::int64_t d = 0; d < D && !ctx.dry(); ++d) dw[d] += sums[d];
  }
  if (!a.dx.present() || ctx.dry()) return;
#pragma omp parallel for if (rows * D > cpu::kWorthThreads)
  for (std::int64_t t = 0; t < rows; ++t) {
    const T *dy = a.dy.as<T>() + t * D, *x = a.x.as<T>() + t * D;
    T* dx = a.dx.as<T>() + t * D;
    R gx = 0;
#pragma omp simd reduction(+ : gx)
    for (std::int64_t d = 0; d < D; ++d) gx += R(dy[d]) * w[d] * R(x[d]);
    const R pull = r[t] * r[t] * gx / R(D), rt = r[t];
#pragma omp simd
    for (std::int64_t d = 0; d < D; ++d) dx[d] = T(rt * (R(dy[d]) * w[d] - R(x[d]) * pull));
  }
}

}  // namespace

void cpu::rmsnorm(Context& ctx, const RmsNormForward& a) {
  with_storage(a.x.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
}
void cpu::rmsnorm(Context& ctx, const RmsNormBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops
