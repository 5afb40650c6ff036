// blas.h -- matrix products of this backend: row-major tensors handed to cuBLASLt.
#pragma once
#include <cublasLt.h>

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <tuple>

#include "memory/buffer.h"
#include "ops/context.h"

namespace moetrain::ops::cuda {

// One product, or a batch of them at equal strides: c = alpha op(a) op(b) + beta c, all row-major. Transposed operands are stored
// the other way round: a is (m, k), or (k, m) with transpose_a; b is (k, n), or (n, k) with transpose_b; c is (m, n).
struct Gemm {
  std::int64_t m, n, k;
  const void* a;
  const void* b;
  void* c;
  DType a_type, b_type, c_type;  // f32 or bf16; sums are f32 (f32 operands: no tf32)
  std::int64_t lda, ldb, ldc;    // elements between rows
  bool transpose_a = false, transpose_b = false;
  float alpha = 1, beta = 0;
  std::int64_t batch = 1, stride_a = 0, stride_b = 0, stride_c = 0;  // elements between products
};

// The library's handle, its workspace, and the algorithm chosen for each kind of product: chosen once, so that a product's bits do
// not depend on when it runs.
class Blas {
 public:
  explicit Blas(Memory& memory);
  ~Blas();
  Blas(const Blas&) = delete;
  Blas& operator=(const Blas&) = delete;
  void run(Context& ctx, const Gemm& g);  // an empty sum with beta 0 writes zeros
  // Two on the device that are zero between kernels: a kernel that counts with them leaves them so.
  std::uint32_t* counters() const { return static_cast<std::uint32_t*>(counters_.data()); }
  int multiprocessors() const { return multiprocessors_; }  // of the device, asked once

 private:
  cublasLtHandle_t handle_ = nullptr;
  Buffer workspace_, counters_;
  int multiprocessors_ = 0;
  using Key = std::tuple<std::int64_t, std::int64_t, std::int64_t, int, int, int, std::int64_t, std::int64_t, std::int64_t, bool,
                         bool, std::int64_t, std::int64_t, std::int64_t, std::int64_t, std::array<std::uint32_t, 3>>;
  std::map<Key, std::optional<cublasLtMatmulAlgo_t>> chosen_;  // none: ops/cuda/product.h takes it
};

}  // namespace moetrain::ops::cuda
