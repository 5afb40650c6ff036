// random_normal.cpp -- one number an element, on all threads.
#include "ops/random_normal.h"

#include <algorithm>

#include "ops/random.h"

namespace moetrain::ops {
namespace {

template <class T>
void fill_normal(const RandomNormal& a) {
  T* y = a.y.as<T>();
  const std::int64_t row = std::max<std::int64_t>(1, a.y.shape.row()), gap = a.gap();
#pragma omp parallel for schedule(static) if (a.y.count() > 10000)
  for (std::int64_t i = 0; i < a.y.count(); ++i)
    y[i] = T(a.deviation * normal(a.seed, a.stream, std::uint64_t(a.first + i + i / row * gap)));
}

}  // namespace

void cpu::random_normal(Context&, const RandomNormal& a) {
  if (a.y.dtype == DType::f64) fill_normal<double>(a);
  else if (a.y.dtype == DType::f32) fill_normal<float>(a);
  else fill_normal<bf16>(a);
}

}  // namespace moetrain::ops
