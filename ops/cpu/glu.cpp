// glu.cpp -- both gated units, value and slopes, one element at a time.
#include "ops/glu.h"

#include "ops/cpu/exp.h"
#include "ops/cpu/reals.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kWorthThreads = cpu::kWorthThreads / 8;  // exponentials: fewer elements are worth a thread

using cpu::sigmoid;

template <class T>
void forward(const GluForward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t n = a.y.count();
  const T *g = a.g.as<T>(), *u = a.u.as<T>();
  T* y = a.y.as<T>();
  const R b1 = R(a.beta), b2 = R(a.linear_beta);
  if (a.kind == GluKind::silu) {
#pragma omp parallel for simd schedule(static) if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(R(g[i]) * sigmoid(R(g[i])) * R(u[i]));
  } else {
#pragma omp parallel for simd schedule(static) if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(b1 * cpu::tanh(R(g[i]) / b1) * sigmoid(R(g[i])) * b2 * cpu::tanh(R(u[i]) / b2));
  }
}

template <class T>
void backward(const GluBackward& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t n = a.dy.count();
  const T *dy = a.dy.as<T>(), *gate = a.g.as<T>(), *up = a.u.as<T>();
  T *dg = a.dg.as<T>(), *du = a.du.as<T>();
  const R b1 = R(a.beta), b2 = R(a.linear_beta);
  if (a.kind == GluKind::silu) {
#pragma omp parallel for simd schedule(static) if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) {
      const R d = R(dy[i]), g = R(gate[i]), u = R(up[i]), s = sigmoid(g);
      dg[i] = T(d * u * s * (R(1) + g * (R(1) - s)));
      du[i] = T(d * g * s);
    }
  } else {
#pragma omp parallel for simd schedule(static) if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) {
      const R d = R(dy[i]), g = R(gate[i]), s = sigmoid(g), p = cpu::tanh(g / b1), q = cpu::tanh(R(up[i]) / b2);
      dg[i] = T(d * b2 * q * ((R(1) - p * p) * s + b1 * p * s * (R(1) - s)));
      du[i] = T(d * b1 * p * s * (R(1) - q * q));
    }
  }
}

}  // namespace

void cpu::glu(Context&, const GluForward& a) {
  with_storage(a.g.dtype, [&](auto storage) { forward<decltype(storage)>(a); });
}
void cpu::glu(Context&, const GluBackward& a) {
  with_storage(a.g.dtype, [&](auto storage) { backward<decltype(storage)>(a); });
}

}  // namespace moetrain::ops
