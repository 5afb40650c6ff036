// reduce.cpp -- sums of squares over runs of fixed length, so that the number of threads does not show in the result.
#include "ops/reduce.h"

#include <algorithm>

#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kRun = 1 << 14;

template <class T>
double sum_of(Context& ctx, const T* x, std::int64_t n) {
  const std::int64_t runs = (n + kRun - 1) / kRun;
  Scope scope(ctx.scratch);
  double* sums = ctx.scratch.take(DType::f64, {runs}).as<double>();
  if (ctx.dry()) return 0;
#pragma omp parallel for if (runs > 1)
  for (std::int64_t run = 0; run < runs; ++run) {
    const std::int64_t end = std::min(n, (run + 1) * kRun);
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t i = run * kRun; i < end; ++i) sum += double(x[i]) * double(x[i]);
    sums[run] = sum;
  }
  double sum = 0;
  for (std::int64_t run = 0; run < runs; ++run) sum += sums[run];
  return sum;
}

}  // namespace

void cpu::sum_of_squares(Context& ctx, const SumOfSquares& a) {
  for (const ConstTensor& x : a.x)
    with_storage(x.dtype, [&](auto storage) {
      const double sum = sum_of(ctx, x.as<decltype(storage)>(), x.count());
      if (!ctx.dry()) *a.sum.as<double>() += sum;
    });
}

}  // namespace moetrain::ops
