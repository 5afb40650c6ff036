// attn_res.cpp -- token by token: dots with every source, a softmax over depth, a weighted sum; and the same path back.
#include "ops/attn_res.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "ops/cpu/row_parts.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kColumns = 256;  // summed at once, in the first-level cache

// c = gamma * query, in scratch.
template <class R>
const R* product_of(Context& ctx, const R* gamma, const R* query, std::int64_t D) {
  R* c = ctx.scratch.take(DTypeOf<R>::value, {D}).template as<R>();
  if (ctx.dry()) return c;
#pragma omp simd
  for (std::int64_t d = 0; d < D; ++d) c[d] = gamma[d] * query[d];
  return c;
}

template <class R>
void softmax(R* score, std::int64_t Z) {
  const R top = *std::max_element(score, score + Z);
  R sum = 0;
  for (std::int64_t n = 0; n < Z; ++n) sum += score[n] = std::exp(score[n] - top);
  for (std::int64_t n = 0; n < Z; ++n) score[n] /= sum;
}

template <class T>
void forward(Context& ctx, const AttnResForward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t rows = a.y.shape[0], D = a.y.shape[1], Z = std::int64_t(a.sources.size());
  Scope scope(ctx.scratch);
  const R* c = product_of(ctx, cpu::reals<R>(ctx, a.gamma), cpu::reals<R>(ctx, a.query), D);
  if (ctx.dry()) return;
#pragma omp parallel for if (rows * D * Z > cpu::kWorthThreads)
  for (std::int64_t t = 0; t < rows; ++t) {
    R* weight = a.weights.as<R>() + t * Z;
    for (std::int64_t n = 0; n < Z; ++n) {
      const T* v = a.sources[std::size_t(n)].as<T>() + t * D;
      R square = 0, dot = 0;
#pragma omp simd reduction(+ : square, dot)
      for (std::int64_t d = 0; d < D; ++d) {
        square += R(v[d]) * R(v[d]);
        dot += R(v[d]) * c[d];
      }
      weight[n] = dot / std::sqrt(square / R(D) + R(a.eps));
    }
    softmax(weight, Z);
    for (std::int64_t begin = 0; begin < D; begin += kColumns) {
      const std::int64_t columns = std::min(kColumns, D - begin);
      std::array<R, kColumns> sum{};
      for (std::int64_t n = 0; n < Z; ++n) {
        const T* v = a.sources[std::size_t(n)].as<T>() + t * D + begin;
        const R part = weight[n];
#pragma omp simd
        for (std::int64_t d = 0; d < columns; ++d) sum[std::size_t(d)] += part * R(v[d]);
      }
      T* y = a.y.as<T>() + t * D + begin;
#pragma omp simd
      for (std::int64_t d = 0; d < columns; ++d) y[d] = T(sum[std::size_t(d)]);
    }
  }
}

template <class T>
void backward(Context& ctx, const AttnResBackward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t rows = a.dy.shape[0], D = a.dy.shape[1], Z = std::int64_t(a.sources.size());
  Scope scope(ctx.scratch);
  const R *gamma = cpu::reals<R>(ctx, a.gamma), *query = cpu::reals<R>(ctx, a.query);
  const R* c = product_of(ctx, gamma, query, D);
  // r, score and v . dy of each source, between the two passes over a token.
  R* dots_of_rows = ctx.scratch.take(DTypeOf<R>::value, {rows, Z, 3}).template as<R>();
  const bool trained = a.trained();
  const R* dc = cpu::sum_over_rows<R>(ctx, rows, trained ? D : 0, [&](std::int64_t begin, std::int64_t end, R* sum) {
    for (std::int64_t t = begin; t < end; ++t) {
      const R* weight = a.weights.as<R>() + t * Z;
      const T* dy = a.dy.as<T>() + t * D;
      R* dots = dots_of_rows + t * Z * 3;
      R y_dy = 0;
      for (std::int64_t n = 0; n < Z; ++n) {
        const T* v = a.sources[std::size_t(n)].as<T>() + t * D;
        R square = 0, dot = 0, pull = 0;
#pragma omp simd reduction(+ : square, dot, pull)
        for (std::int64_t d = 0; d < D; ++d) {
          square += R(v[d]) * R(v[d]);
          dot += R(v[d]) * c[d];
          pull += R(v[d]) * R(dy[d]);
        }
        const R r = R(1) / std::sqrt(square / R(D) + R(a.eps));
        dots[3 * n] = r, dots[3 * n + 1] = r * dot, dots[3 * n + 2] = pull;
        y_dy += weight[n] * pull;
      }
      for (std::int64_t n = 0; n < Z; ++n) {
        const T* v = a.sources[std::size_t(n)].as<T>() + t * D;
        R* dv = a.dsources[std::size_t(n)].as<R>() + t * D;
        const R r = dots[3 * n], score = dots[3 * n + 1], ds = weight[n] * (dots[3 * n + 2] - y_dy);
        const R by_dy = weight[n], by_c = ds * r, by_v = -ds * r * r * score / R(D);
#pragma omp simd
        for (std::int64_t d = 0; d < D; ++d) dv[d] += by_dy * R(dy[d]) + by_c * c[d] + by_v * R(v[d]);
        if (!trained) continue;
#pragma omp simd
        for (std::int64_t d = 0; d < D; ++d) sum[d] += by_c * R(v[d]);
      }
    }
  });
  if (!trained || ctx.dry()) return;
  R *dgamma = a.dgamma.present() ? a.dgamma.as<R>() : nullptr, *dquery = a.dquery.present() ? a.dquery.as<R>() : nullptr;
  for (std::int64_t d = 0; d < D; ++d) {
    if (dgamma) dgamma[d] += dc[d] * query[d];
    if (dquery) dquery[d] += dc[d] * gamma[d];
  }
}

}  // namespace

void cpu::attn_res(Context& ctx, const AttnResForward& a) {
  with_storage(a.y.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
  if (a.norm) cpu::rmsnorm(ctx, *a.norm);
}
void cpu::attn_res(Context& ctx, const AttnResBackward& a) {
  with_storage(a.dy.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops
