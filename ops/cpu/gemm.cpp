// gemm.cpp -- calls CBLAS on one thread a call and shares large products out itself, so that BLAS threads never fight OpenMP's.
#include "ops/cpu/gemm.h"

#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "memory/check.h"

extern "C" void openblas_set_num_threads(int) __attribute__((weak));  // absent in other BLAS libraries

namespace moetrain::ops::cpu {
namespace {

template <class R>
void one_thread(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, R alpha, const R* a,
                std::int64_t lda, const R* b, std::int64_t ldb, R beta, R* c, std::int64_t ldc) {
  const auto ta = transpose_a ? CblasTrans : CblasNoTrans, tb = transpose_b ? CblasTrans : CblasNoTrans;
  const int mi = int(m), ni = int(n), ki = int(k), ai = int(lda), bi = int(ldb), ci = int(ldc);
  if constexpr (std::is_same_v<R, double>)
    cblas_dgemm(CblasRowMajor, ta, tb, mi, ni, ki, alpha, a, ai, b, bi, beta, c, ci);
  else
    cblas_sgemm(CblasRowMajor, ta, tb, mi, ni, ki, alpha, a, ai, b, bi, beta, c, ci);
}

}  // namespace

template <class R>
void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, R alpha, const R* a, std::int64_t lda,
          const R* b, std::int64_t ldb, R beta, R* c, std::int64_t ldc) {
  if (m <= 0 || n <= 0) return;
  if (k <= 0) {
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == R(0) ? R(0) : beta * c[i * ldc + j];
    return;
  }
  // Here, since an Error does not get out of a parallel region.
  for (const std::int64_t size : {m, n, k, lda, ldb, ldc})
    check(size <= std::numeric_limits<int>::max(), "gemm: a size is beyond what BLAS can index", {{"size", size}});
  [[maybe_unused]] static const bool alone = [] {
    if (openblas_set_num_threads != nullptr) openblas_set_num_threads(1);
    return true;
  }();
  constexpr double kWorthThreads = 5e5;  // multiply-adds; below this the fork costs more than it saves
  constexpr std::int64_t kTile = 16;     // shares start at multiples of this, to keep BLAS on its full tiles
  const std::int64_t longer = std::max(m, n);
  const int threads = omp_in_parallel() || double(m) * double(n) * double(k) < kWorthThreads
                          ? 1
                          : int(std::min<std::int64_t>(omp_get_max_threads(), (longer + kTile - 1) / kTile));
  if (threads == 1) return one_thread(transpose_a, transpose_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
  const std::int64_t share = ((longer + threads - 1) / threads + kTile - 1) / kTile * kTile;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; ++i) {
    const std::int64_t begin = std::min(longer, i * share), size = std::min(longer, begin + share) - begin;
    if (size == 0) continue;
    if (m >= n)
      one_thread(transpose_a, transpose_b, size, n, k, alpha, a + begin * (transpose_a ? 1 : lda), lda, b, ldb, beta,
                 c + begin * ldc, ldc);
    else
      one_thread(transpose_a, transpose_b, m, size, k, alpha, a, lda, b + begin * (transpose_b ? ldb : 1), ldb, beta, c + begin,
                 ldc);
  }
}

template void gemm<float>(bool, bool, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t, const float*,
                          std::int64_t, float, float*, std::int64_t);
template void gemm<double>(bool, bool, std::int64_t, std::int64_t, std::int64_t, double, const double*, std::int64_t, const double*,
                           std::int64_t, double, double*, std::int64_t);

}  // namespace moetrain::ops::cpu
