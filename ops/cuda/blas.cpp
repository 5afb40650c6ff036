// blas.cpp -- row-major products as cuBLASLt sees them: column-major, operands exchanged.
#include "ops/cuda/blas.h"

#include <array>
#include <memory>
#include <string>
#include <type_traits>

#include "memory/cuda_check.h"
#include "ops/blas_room.h"
#include "ops/cuda/product.h"

namespace moetrain::ops::cuda {
namespace {

void blas_ok(cublasStatus_t status, std::source_location where = std::source_location::current()) {
  if (status == CUBLAS_STATUS_SUCCESS) [[likely]]
    return;
  throw Error(std::string(where.file_name()) + ":" + std::to_string(where.line()) +
              ": cuBLASLt: " + cublasLtGetStatusString(status));
}

cudaDataType_t type_of(DType t) {
  check(t == DType::f32 || t == DType::bf16, "blas: an operand is neither f32 nor bf16", {{"dtype", std::int64_t(t)}});
  return t == DType::f32 ? CUDA_R_32F : CUDA_R_16BF;
}

template <class T, cublasStatus_t (*kDestroy)(T)>
struct Destroy {
  void operator()(std::remove_pointer_t<T>* t) const { kDestroy(t); }
};
using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDesc_t, cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayout_t, cublasLtMatrixLayoutDestroy>>;
using Preference =
    std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreference_t, cublasLtMatmulPreferenceDestroy>>;

// rows x columns, row-major, seen as columns x rows, column-major.
Layout layout_of(DType type, std::int64_t rows, std::int64_t columns, std::int64_t between, std::int64_t batch,
                 std::int64_t stride) {
  cublasLtMatrixLayout_t l = nullptr;
  blas_ok(cublasLtMatrixLayoutCreate(&l, type_of(type), std::uint64_t(columns), std::uint64_t(rows), between));
  Layout layout(l);
  if (batch > 1) {
    const auto count = std::int32_t(batch);
    blas_ok(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &count, sizeof count));
    blas_ok(cublasLtMatrixLayoutSetAttribute(l, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride));
  }
  return layout;
}

// The widest load that a pointer allows: with the strides, what decides which algorithms may run.
std::uint32_t alignment_of(const void* p) {
  const auto address = reinterpret_cast<std::uintptr_t>(p);
  std::uint32_t bytes = 16;
  while (address % bytes != 0) bytes /= 2;
  return bytes;
}

void run_plain(Context& ctx, const Gemm& g) {
  product(ctx, {.m = g.m,
                .n = g.n,
                .k = g.k,
                .a = {g.a, g.a_type, g.transpose_a ? 1 : g.lda, g.transpose_a ? g.lda : 1, g.stride_a},
                .b = {g.b, g.b_type, g.transpose_b ? 1 : g.ldb, g.transpose_b ? g.ldb : 1, g.stride_b},
                .c = g.c,
                .c_type = g.c_type,
                .c_row = g.ldc,
                .c_batch = g.stride_c,
                .batch = g.batch,
                .alpha = g.alpha,
                .beta = g.beta});
}

}  // namespace

Blas::Blas(Memory& memory)
    : workspace_(memory, Category::workspace, kBlasWorkspaceBytes), counters_(memory, Category::workspace, kBlasCounterBytes) {
  blas_ok(cublasLtCreate(&handle_));
  fill(memory.device(), counters_.data(), 0, counters_.bytes());
  int device = 0;
  cuda_ok(cudaGetDevice(&device));
  cuda_ok(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount, device));
}
Blas::~Blas() { cublasLtDestroy(handle_); }

void Blas::run(Context& ctx, const Gemm& g) {
  if (g.m == 0 || g.n == 0 || g.batch == 0) return;
  if (g.k == 0) return g.beta == 1 ? void() : run_plain(ctx, g);
  cublasLtMatmulDesc_t d = nullptr;
  blas_ok(cublasLtMatmulDescCreate(&d, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  const Operation operation(d);
  const cublasOperation_t first = g.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, second = g.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
  blas_ok(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first));
  blas_ok(cublasLtMatmulDescSetAttribute(d, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second));
  const Layout a = g.transpose_a ? layout_of(g.a_type, g.k, g.m, g.lda, g.batch, g.stride_a)
                                 : layout_of(g.a_type, g.m, g.k, g.lda, g.batch, g.stride_a);
  const Layout b = g.transpose_b ? layout_of(g.b_type, g.n, g.k, g.ldb, g.batch, g.stride_b)
                                 : layout_of(g.b_type, g.k, g.n, g.ldb, g.batch, g.stride_b);
  const Layout c = layout_of(g.c_type, g.m, g.n, g.ldc, g.batch, g.stride_c);

  const std::array<std::uint32_t, 3> aligned{alignment_of(g.b), alignment_of(g.a), alignment_of(g.c)};
  const Key key{g.m,   g.n,           g.k,           int(g.a_type), int(g.b_type), int(g.c_type), g.lda,      g.ldb,
                g.ldc, g.transpose_a, g.transpose_b, g.batch,       g.stride_a,    g.stride_b,    g.stride_c, aligned};
  auto found = chosen_.find(key);
  if (found == chosen_.end()) {
    cublasLtMatmulPreference_t p = nullptr;
    blas_ok(cublasLtMatmulPreferenceCreate(&p));
    const Preference preference(p);
    const auto bytes = std::uint64_t(workspace_.bytes());
    blas_ok(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes));
    blas_ok(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned[0], sizeof aligned[0]));
    blas_ok(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned[1], sizeof aligned[1]));
    blas_ok(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned[2], sizeof aligned[2]));
    blas_ok(cublasLtMatmulPreferenceSetAttribute(p, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned[2], sizeof aligned[2]));
    cublasLtMatmulHeuristicResult_t result{};
    int results = 0;
    const auto status = cublasLtMatmulAlgoGetHeuristic(handle_, d, b.get(), a.get(), c.get(), c.get(), p, 1, &result, &results);
    const bool has_one = status == CUBLAS_STATUS_SUCCESS && results > 0;
    found = chosen_.emplace(key, has_one ? std::optional(result.algo) : std::nullopt).first;
  }
  if (!found->second) return run_plain(ctx, g);
  blas_ok(cublasLtMatmul(handle_, d, &g.alpha, g.b, b.get(), g.a, a.get(), &g.beta, g.c, c.get(), g.c, c.get(), &*found->second,
                         workspace_.data(), std::size_t(workspace_.bytes()), ctx.stream));
}

}  // namespace moetrain::ops::cuda
