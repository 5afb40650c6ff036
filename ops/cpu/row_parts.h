// row_parts.h -- sums over all rows in a fixed number of parts, so that their bits do not depend on the number of threads.
#pragma once
#include <algorithm>

#include "ops/cpu/reals.h"

namespace moetrain::ops::cpu {

inline constexpr std::int64_t kRowParts = 32;

// Calls body(begin, end, sums) for runs of consecutive rows that cover [0, rows), each with its own zeroed sums of `width`, side by
// side; then returns the sums added up in the order of the runs. The memory is the context's scratch: the caller holds a Scope. On
// Device::dry it is taken and nothing runs.
template <class R, class Body>
const R* sum_over_rows(Context& ctx, std::int64_t rows, std::int64_t width, Body body) {
  const std::int64_t parts = std::clamp<std::int64_t>(rows, 1, kRowParts);
  R* sums = ctx.scratch.zeros(DTypeOf<R>::value, {parts, width}).template as<R>();
  if (ctx.dry()) return sums;
#pragma omp parallel for schedule(static) if (rows * width > kWorthThreads)
  for (std::int64_t part = 0; part < parts; ++part) body(rows * part / parts, rows * (part + 1) / parts, sums + part * width);
  for (std::int64_t part = 1; part < parts; ++part) {
    const R* more = sums + part * width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) sums[i] += more[i];
  }
  return sums;
}

}  // namespace moetrain::ops::cpu
