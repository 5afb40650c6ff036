// elementwise.cpp -- the loops that only stream: their cost is the memory they touch.
#include "ops/elementwise.h"

#include <cstring>

#include "ops/cpu/exp.h"
#include "ops/cpu/reals.h"

namespace moetrain::ops {
namespace {

using cpu::kWorthThreads;
using cpu::sigmoid;

template <class A, class B>
using wider_t = std::conditional_t<std::is_same_v<A, double> || std::is_same_v<B, double>, double, float>;

template <class X, class Y>
void add_to(const X* x, Y* y, std::int64_t n) {
  using R = wider_t<X, Y>;
#pragma omp parallel for simd if (parallel : n > kWorthThreads)
  for (std::int64_t i = 0; i < n; ++i) y[i] = Y(R(y[i]) + R(x[i]));
}

template <class X, class Y>
void copy_to(const X* x, Y* y, std::int64_t n) {
#pragma omp parallel for simd if (parallel : n > kWorthThreads)
  for (std::int64_t i = 0; i < n; ++i) y[i] = Y(x[i]);
}

}  // namespace

void cpu::add(Context&, const Add& a) {
  with_storage(a.x.dtype, [&](auto x) {
    with_storage(a.y.dtype, [&](auto y) { add_to(a.x.as<decltype(x)>(), a.y.as<decltype(y)>(), a.y.count()); });
  });
}

void cpu::copy(Context&, const Copy& a) {
  with_storage(a.x.dtype, [&](auto x) {
    with_storage(a.y.dtype, [&](auto y) { copy_to(a.x.as<decltype(x)>(), a.y.as<decltype(y)>(), a.y.count()); });
  });
}

void cpu::sum(Context&, const Sum& args) {
  with_storage(args.y.dtype, [&](auto storage) {
    using T = decltype(storage);
    using R = acc_t<T>;
    const std::int64_t n = args.y.count();
    const T *a = args.a.as<T>(), *b = args.b.as<T>();
    T* y = args.y.as<T>();
#pragma omp parallel for simd if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(R(a[i]) + R(b[i]));
  });
}

void cpu::scale(Context&, const Scale& a) {
  with_storage(a.y.dtype, [&](auto storage) {
    using T = decltype(storage);
    using R = acc_t<T>;
    const std::int64_t n = a.y.count();
    const R factor = R(a.factor);
    T* y = a.y.as<T>();
#pragma omp parallel for simd if (parallel : n > kWorthThreads)
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(R(y[i]) * factor);
  });
}

void cpu::copy_columns(Context&, const CopyColumns& a) {
  const std::int64_t T = a.x.shape[0], size = size_of(a.x.dtype), from_stride = a.x.shape[1] * size,
                     to_stride = a.y.shape[1] * size;
  const auto* from = static_cast<const std::byte*>(a.x.data) + a.x_column * size;
  auto* to = static_cast<std::byte*>(a.y.data) + a.y_column * size;
  const auto bytes = std::size_t(a.width * size);
#pragma omp parallel for if (T * a.width > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) std::memcpy(to + t * to_stride, from + t * from_stride, bytes);
}

void cpu::sigmoid_gate(Context&, const SigmoidGateForward& a) {
  with_storage(a.y.dtype, [&](auto storage) {
    using T = decltype(storage);
    using R = acc_t<T>;
    const std::int64_t n = a.y.count();
    const T *x = a.x.as<T>(), *gate = a.gate.as<T>();
    T* y = a.y.as<T>();
#pragma omp parallel for simd if (parallel : n > kWorthThreads / 8)
    for (std::int64_t i = 0; i < n; ++i) y[i] = T(R(x[i]) * sigmoid(R(gate[i])));
  });
}

void cpu::sigmoid_gate(Context&, const SigmoidGateBackward& a) {
  with_storage(a.x.dtype, [&](auto storage) {
    using T = decltype(storage);
    using R = acc_t<T>;
    const std::int64_t n = a.x.count();
    const T *dy = a.dy.as<T>(), *x = a.x.as<T>(), *gate = a.gate.as<T>();
    T *dx = a.dx.as<T>(), *dgate = a.dgate.as<T>();
#pragma omp parallel for simd if (parallel : n > kWorthThreads / 8)
    for (std::int64_t i = 0; i < n; ++i) {
      const R d = R(dy[i]), v = R(x[i]), s = sigmoid(R(gate[i]));
      dx[i] = T(d * s);
      dgate[i] = T(d * v * s * (R(1) - s));
    }
  });
}

}  // namespace moetrain::ops
