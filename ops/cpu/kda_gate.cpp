// ops/cpu/kda_gate.cpp -- both gate forms, a row of one head at a time.
#include "ops/kda_gate.h"

#include <algorithm>

#include "ops/cpu/exp.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kWorthThreads = 1 << 13;
constexpr std::int64_t kGroup = 64;  // tokens whose part of a weight's gradient is summed by one thread; fixed

template <class R>
R softplus(R z) {
  return std::max(z, R(0)) + std::log1p(std::exp(-std::abs(z)));
}

template <class T>
void forward(const KdaGateForward& a) {
  using R = cpu::acc_t<T>;
  const auto tokens = a.f.shape[0], N = a.f.shape[1], H = a.f.shape[2];
  const T *all_f = a.f.as<T>(), *b = a.b.as<T>();
  const R *a_log = a.a_log.as<R>(), *dt_bias = a.dt_bias.as<R>();
  R *all_g = a.g.as<R>(), *beta = a.beta.as<R>();
  const R bound = R(a.lower_bound.value_or(0));
#pragma omp parallel for if (a.f.count() > kWorthThreads)
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t n = 0; n < N; ++n) {
      const auto row = t * N + n;
      const T* f = all_f + row * H;
      const R* bias = dt_bias + n * H;
      R* g = all_g + row * H;
      const R rate = std::exp(a_log[n]);
      if (a.lower_bound) {
#pragma omp simd
        for (std::int64_t d = 0; d < H; ++d) g[d] = bound * cpu::sigmoid(rate * (R(f[d]) + bias[d]));
      } else {
        for (std::int64_t d = 0; d < H; ++d) g[d] = -rate * softplus(R(f[d]) + bias[d]);
      }
      beta[row] = cpu::sigmoid(R(b[row]));
    }
  }
}

template <class T>
void backward(Context& ctx, const KdaGateBackward& a) {
  using R = cpu::acc_t<T>;
  const auto tokens = a.f.shape[0], N = a.f.shape[1], H = a.f.shape[2], groups = (tokens + kGroup - 1) / kGroup;
  const T* all_f = a.f.as<T>();
  const R *all_dg = a.dg.as<R>(), *dbeta = a.dbeta.as<R>(), *a_log = a.a_log.as<R>(), *dt_bias = a.dt_bias.as<R>(),
          *beta = a.beta.as<R>();
  T *all_df = a.df.as<T>(), *db = a.db.as<T>();
  R* sums_a = ctx.scratch.zeros(a.a_log.dtype, {groups, N}).template as<R>();
  R* sums_bias = ctx.scratch.zeros(a.a_log.dtype, {groups, N, H}).template as<R>();
  if (ctx.dry()) return;
  const R bound = R(a.lower_bound.value_or(0));
#pragma omp parallel for if (a.f.count() > kWorthThreads)
  for (std::int64_t group = 0; group < groups; ++group) {
    for (std::int64_t t = group * kGroup; t < std::min(tokens, (group + 1) * kGroup); ++t) {
      for (std::int64_t n = 0; n < N; ++n) {
        const auto row = t * N + n;
        const T* f = all_f + row * H;
        const R *dg = all_dg + row * H, *bias = dt_bias + n * H;
        T* df = all_df + row * H;
        R* sum_bias = sums_bias + (group * N + n) * H;
        const R rate = std::exp(a_log[n]);
        R sum_a = 0;
        if (a.lower_bound) {
#pragma omp simd reduction(+ : sum_a)
          for (std::int64_t d = 0; d < H; ++d) {
            const R z = R(f[d]) + bias[d], s = cpu::sigmoid(rate * z), dz = dg[d] * bound * rate * s * (1 - s);
            sum_a += dz * z;
            sum_bias[d] += dz;
            df[d] = T(dz);
          }
        } else {
          for (std::int64_t d = 0; d < H; ++d) {
            const R z = R(f[d]) + bias[d], dz = -rate * cpu::sigmoid(z) * dg[d];
            sum_a -= dg[d] * rate * softplus(z);
            sum_bias[d] += dz;
            df[d] = T(dz);
          }
        }
        sums_a[group * N + n] += sum_a;
        db[row] = T(dbeta[row] * beta[row] * (1 - beta[row]));
      }
    }
  }
  auto add = [&](Tensor to, const R* sums) {
    if (!to.present()) return;
    R* out = to.as<R>();
    for (std::int64_t group = 0; group < groups; ++group)
      for (std::int64_t i = 0; i < to.count(); ++i) out[i] += sums[group * to.count() + i];
  };
  add(a.da_log, sums_a);
  add(a.ddt_bias, sums_bias);
}

}  // namespace

void cpu::kda_gate(Context&, const KdaGateForward& a) {
  with_storage(a.f.dtype, [&](auto storage) { forward<decltype(storage)>(a); });
}
void cpu::kda_gate(Context& ctx, const KdaGateBackward& a) {
  Scope scope(ctx.scratch);
  with_storage(a.f.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops
