// softmax.h -- one row of attention's scores into probabilities, in loops that vectorise.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/cpu/exp.h"

namespace moetrain::ops::cpu {

// Turns n scores into probabilities and returns their lse, the log of the sum of exp; of no scores it is -inf.
template <class R>
R softmax(R* z, std::int64_t n) {
  if (n == 0) return -std::numeric_limits<R>::infinity();
  R top = z[0];
#pragma omp simd reduction(max : top)
  for (std::int64_t s = 0; s < n; ++s) top = std::max(top, z[s]);
#pragma omp simd
  for (std::int64_t s = 0; s < n; ++s) z[s] = exp(z[s] - top);
  R sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t s = 0; s < n; ++s) sum += z[s];
  const R share = R(1) / sum;
#pragma omp simd
  for (std::int64_t s = 0; s < n; ++s) z[s] *= share;
  return top + std::log(sum);
}

}  // namespace moetrain::ops::cpu
