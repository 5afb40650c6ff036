// adamw.cpp -- one pass over gradient, moments and master; the weight is rounded after it.
#include "ops/adamw.h"

#include <cmath>

#include "ops/cpu/reals.h"
#include "ops/elementwise.h"

namespace moetrain::ops {
namespace {

template <class R, class G>
void update(const AdamW& a) {
  const std::int64_t n = a.master.count();
  const G* gradient = a.gradient.as<G>();
  R *master = a.master.as<R>(), *exp_avg = a.exp_avg.as<R>(), *exp_avg_sq = a.exp_avg_sq.as<R>();
  const R scale = R(a.gradient_scale), beta1 = R(a.beta1), beta2 = R(a.beta2), rest1 = R(1 - a.beta1), rest2 = R(1 - a.beta2);
  const R correct1 = R(1 / (1 - std::pow(a.beta1, double(a.step)))), correct2 = R(1 / (1 - std::pow(a.beta2, double(a.step))));
  const R lr = R(a.lr), eps = R(a.eps), decay = R(a.weight_decay);
#pragma omp parallel for simd if (parallel : n > cpu::kWorthThreads)
  for (std::int64_t i = 0; i < n; ++i) {
    const R g = scale * R(gradient[i]);
    const R m = beta1 * exp_avg[i] + rest1 * g;
    const R v = beta2 * exp_avg_sq[i] + rest2 * g * g;
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    master[i] -= lr * (m * correct1 / (std::sqrt(v * correct2) + eps) + decay * master[i]);
  }
}

}  // namespace

void cpu::adamw(Context& ctx, const AdamW& a) {
  with_storage(a.gradient.dtype, [&](auto storage) {
    using G = decltype(storage);
    a.master.dtype == DType::f64 ? update<double, G>(a) : update<float, G>(a);
  });
  if (a.weight.present()) cpu::copy(ctx, Copy{.x = a.master, .y = a.weight});
}

}  // namespace moetrain::ops
