// dropout.cpp -- one word of random bits an element.
#include "ops/dropout.h"

#include <algorithm>

#include "ops/cpu/types.h"
#include "ops/random.h"

namespace moetrain::ops {
namespace {

template <class T>
void drop(const Dropout& a) {
  using R = cpu::acc_t<T>;
  const std::int64_t I = std::max<std::int64_t>(1, a.x.shape[1]), width = a.whole_width(), first = a.first_token * width + a.column;
  const auto least = std::uint64_t(a.share * 0x1p32);
  const R kept = R(1 / (1 - a.share));
  const T* x = a.x.as<T>();
  T* y = a.y.as<T>();
#pragma omp parallel for schedule(static) if (a.x.count() > 10000)
  for (std::int64_t i = 0; i < a.x.count(); ++i) {
    const auto n = std::uint64_t(first + i / I * width + i % I);
    y[i] = philox(a.seed, a.stream, n / 4)[n % 4] >= least ? T(R(x[i]) * kept) : T(R(0));
  }
}

}  // namespace

void cpu::dropout(Context&, const Dropout& a) {
  with_storage(a.x.dtype, [&](auto type) { drop<decltype(type)>(a); });
}

}  // namespace moetrain::ops
