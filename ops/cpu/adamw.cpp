// adamw.cpp -- one pass over gradient, moments and master; the weight is rounded after it.
#include "ops/adamw.h"

#include "ops/cpu/reals.h"
#include "ops/elementwise.h"

namespace moetrain::ops {
namespace {

template <class R, class G>
void update(const AdamW& a, const AdamWShard& s, double gradient_scale) {
  const std::int64_t n = s.master.count();
  const G* gradient = s.gradient.as<G>();
  R *master = s.master.as<R>(), *exp_avg = s.exp_avg.as<R>(), *exp_avg_sq = s.exp_avg_sq.as<R>();
  const R scale = R(gradient_scale), beta1 = R(a.beta1), beta2 = R(a.beta2), rest1 = R(1 - a.beta1), rest2 = R(1 - a.beta2);
  const R correct1 = R(a.correction1()), correct2 = R(a.correction2());
  const R lr = R(a.lr), eps = R(a.eps), decay = R(s.weight_decay);
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
  const double scale = a.gradient_scale * (a.scale.present() ? *a.scale.as<double>() : 1);
  for (const AdamWShard& s : a.shards) {
    with_storage(s.gradient.dtype, [&](auto storage) {
      using G = decltype(storage);
      s.master.dtype == DType::f64 ? update<double, G>(a, s, scale) : update<float, G>(a, s, scale);
    });
    if (s.weight.present()) cpu::copy(ctx, Copy{.x = s.master, .y = s.weight});
  }
}

}  // namespace moetrain::ops
