// layernorm.cpp -- the equations as loops over rows; gradients of weights by columns, so that threads never share a sum.
#include "ops/layernorm.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/reals.h"

namespace moetrain::ops::cpu {
namespace {

constexpr std::int64_t kColumns = 64;  // of weight gradients a thread takes at a time

template <class T>
void forward(const LayerNormForward& a) {
  using R = acc_t<T>;
  const std::int64_t rows = a.x.shape[0], D = a.x.shape[1];
  const T *x = a.x.as<T>(), *w = a.w.as<T>(), *b = a.b.present() ? a.b.as<T>() : nullptr;
  T* y = a.y.as<T>();
  R *mean = a.mean.as<R>(), *r = a.r.as<R>();
#pragma omp parallel for schedule(static) if (rows * D > kWorthThreads)
  for (std::int64_t t = 0; t < rows; ++t) {
    const T* xt = x + t * D;
    T* yt = y + t * D;
    R sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < D; ++d) sum += R(xt[d]);
    const R m = sum / R(D);
#pragma omp simd reduction(+ : squares)
    for (std::int64_t d = 0; d < D; ++d) squares += (R(xt[d]) - m) * (R(xt[d]) - m);
    const R rt = R(1) / std::sqrt(squares / R(D) + R(a.eps));
    for (std::int64_t d = 0; d < D; ++d) yt[d] = T((R(xt[d]) - m) * rt * R(w[d]) + (b ? R(b[d]) : R(0)));
    mean[t] = m;
    r[t] = rt;
  }
}

template <class T>
void backward(const LayerNormBackward& a) {
  using R = acc_t<T>;
  const std::int64_t rows = a.x.shape[0], D = a.x.shape[1];
  const T *dy = a.dy.as<T>(), *x = a.x.as<T>(), *w = a.w.as<T>();
  const R *mean = a.mean.as<R>(), *r = a.r.as<R>();
  R *dw = a.dw.present() ? a.dw.as<R>() : nullptr, *db = a.db.present() ? a.db.as<R>() : nullptr;
  // weights first: dx may alias dy
  if (dw || db)
#pragma omp parallel for schedule(static) if (rows * D > kWorthThreads)
    for (std::int64_t first = 0; first < D; first += kColumns) {
      const std::int64_t last = std::min(first + kColumns, D);
      for (std::int64_t t = 0; t < rows; ++t)
        for (std::int64_t d = first; d < last; ++d) {
          const R g = R(dy[t * D + d]);
          if (dw) dw[d] += g * (R(x[t * D + d]) - mean[t]) * r[t];
          if (db) db[d] += g;
        }
    }
  if (!a.dx.present()) return;
  T* dx = a.dx.as<T>();
#pragma omp parallel for schedule(static) if (rows * D > kWorthThreads)
  for (std::int64_t t = 0; t < rows; ++t) {
    const T *xt = x + t * D, *dyt = dy + t * D;
    const R m = mean[t], rt = r[t];
    R sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (std::int64_t d = 0; d < D; ++d) {
      const R g = R(dyt[d]) * R(w[d]);
      sum += g;
      along += g * (R(xt[d]) - m) * rt;
    }
    sum /= R(D);
    along /= R(D);
    for (std::int64_t d = 0; d < D; ++d) dx[t * D + d] = T(rt * (R(dyt[d]) * R(w[d]) - sum - (R(xt[d]) - m) * rt * along));
  }
}

}  // namespace

void layernorm(Context&, const LayerNormForward& a) {
  with_storage(a.x.dtype, [&](auto storage) { forward<decltype(storage)>(a); });
}
void layernorm(Context&, const LayerNormBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) { backward<decltype(storage)>(a); });
}

}  // namespace moetrain::ops::cpu
