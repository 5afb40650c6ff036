// gemm.h -- the one door of the CPU backend to BLAS, so that threads and empty sizes are dealt with once.
#pragma once
#include <cstdint>

namespace moetrain::ops::cpu {

// c = alpha op(a) op(b) + beta c, all row-major; op(a) is (m, k), op(b) is (k, n), c is (m, n); op transposes when its flag says
// so. R is float or double. beta = 0 never reads c; k = 0 leaves c = beta c; m or n = 0 does nothing. A large product is split over
// OpenMP threads by rows or columns of c, so sums are never split; inside a parallel region it runs on the calling thread.
template <class R>
void gemm(bool transpose_a, bool transpose_b, std::int64_t m, std::int64_t n, std::int64_t k, R alpha, const R* a, std::int64_t lda,
          const R* b, std::int64_t ldb, R beta, R* c, std::int64_t ldc);

extern template void gemm<float>(bool, bool, std::int64_t, std::int64_t, std::int64_t, float, const float*, std::int64_t,
                                 const float*, std::int64_t, float, float*, std::int64_t);
extern template void gemm<double>(bool, bool, std::int64_t, std::int64_t, std::int64_t, double, const double*, std::int64_t,
                                  const double*, std::int64_t, double, double*, std::int64_t);

}  // namespace moetrain::ops::cpu
