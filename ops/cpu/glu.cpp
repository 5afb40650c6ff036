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

// Of one row; returns the dot of dy and y.
template <class T>
cpu::acc_t<T> backward_row(const GluBackward& a, const T* dy, const T* gate, const T* up, T* dg, T* du, T* y) {
  using R = cpu::acc_t<T>;
  const std::int64_t F = a.g.shape[1];
  const R b1 = R(a.beta), b2 = R(a.linear_beta);
  R dot = 0;
  if (a.kind == GluKind::silu) {
#pragma omp simd reduction(+ : dot)
    for (std::int64_t i = 0; i < F; ++i) {
      const R d = R(dy[i]), g = R(gate[i]), u = R(up[i]), s = sigmoid(g), value = g * s * u;
      dg[i] = T(d * u * s * (R(1) + g * (R(1) - s)));
      du[i] = T(d * g * s);
      if (y) y[i] = T(value);
      dot += d * value;
    }
  } else {
#pragma omp simd reduction(+ : dot)
    for (std::int64_t i = 0; i < F; ++i) {
      const R d = R(dy[i]), g = R(gate[i]), s = sigmoid(g), p = cpu::tanh(g / b1), q = cpu::tanh(R(up[i]) / b2);
      const R value = b1 * p * s * b2 * q;
      dg[i] = T(d * b2 * q * ((R(1) - p * p) * s + b1 * p * s * (R(1) - s)));
      du[i] = T(d * b1 * p * s * (R(1) - q * q));
      if (y) y[i] = T(value);
      dot += d * value;
    }
  }
  return dot;
}

template <class T>
void backward(const GluBackward& a) {
  const std::int64_t rows = a.g.shape[0], F = a.g.shape[1];
  T* y = a.y.present() ? a.y.as<T>() : nullptr;
#pragma omp parallel for schedule(static) if (rows * F > kWorthThreads)
  for (std::int64_t r = 0; r < rows; ++r) {
    const std::int64_t at = r * F;
    const auto dot = backward_row(a, a.dy.as<T>() + at, a.g.as<T>() + at, a.u.as<T>() + at, a.dg.as<T>() + at, a.du.as<T>() + at,
                                  y ? y + at : nullptr);
    if (a.dots.present()) a.dots.as<cpu::acc_t<T>>()[r] = dot;
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
