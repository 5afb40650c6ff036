// head_linear.cu -- the heads are one strided batch of cuBLASLt products, on the slices where they lie.
#include "ops/cuda/blas.h"
#include "ops/head_linear.h"

namespace moetrain::ops {
namespace {

using cuda::Gemm;

// A slice of each head, as a matrix whose rows are `between` apart and whose heads are `head` apart.
struct Slice {
  const void* data;
  DType type;
  std::int64_t between, head;
};

Slice columns_of(ConstTensor t, std::int64_t column) {  // (T, N, width)
  return {static_cast<const std::byte*>(t.data) + column * size_of(t.dtype), t.dtype, t.shape.row(), t.shape[2]};
}
Slice rows_of(ConstTensor w, std::int64_t row) {  // (N, A, C)
  return {static_cast<const std::byte*>(w.data) + row * w.shape[2] * size_of(w.dtype), w.dtype, w.shape[2], w.shape.row()};
}

struct Sizes {
  std::int64_t m, n, k;
};

void multiply(Context& ctx, std::int64_t heads, Sizes s, const Slice& a, bool transpose_a, const Slice& b, bool transpose_b,
              const Slice& c, bool add) {
  ctx.blas->run(ctx, {.m = s.m,
                      .n = s.n,
                      .k = s.k,
                      .a = a.data,
                      .b = b.data,
                      .c = const_cast<void*>(c.data),
                      .a_type = a.type,
                      .b_type = b.type,
                      .c_type = c.type,
                      .lda = a.between,
                      .ldb = b.between,
                      .ldc = c.between,
                      .transpose_a = transpose_a,
                      .transpose_b = transpose_b,
                      .beta = float(add),
                      .batch = heads,
                      .stride_a = a.head,
                      .stride_b = b.head,
                      .stride_c = c.head});
}

}  // namespace

void cuda::head_linear(Context& ctx, const HeadLinearForward& a) {
  const std::int64_t T = a.x.shape[0], N = a.w.shape[0], C = a.w.shape[2];
  const Slice w = rows_of(a.w, a.row);
  if (a.direction == HeadDirection::to_latent)
    multiply(ctx, N, {T, C, a.width}, columns_of(a.x, a.column), false, w, false, columns_of(a.y, 0), false);
  else
    multiply(ctx, N, {T, a.width, C}, columns_of(a.x, 0), false, w, true, columns_of(a.y, a.column), false);
}

void cuda::head_linear(Context& ctx, const HeadLinearBackward& a) {
  const std::int64_t T = a.x.shape[0], N = a.w.shape[0], C = a.w.shape[2];
  const bool to_latent = a.direction == HeadDirection::to_latent;
  const Slice dy = columns_of(a.dy, to_latent ? 0 : a.column);
  if (a.dx.present()) {
    const Slice w = rows_of(a.w, a.row), dx = columns_of(a.dx, to_latent ? a.column : 0);
    if (to_latent)
      multiply(ctx, N, {T, a.width, C}, dy, false, w, true, dx, false);
    else
      multiply(ctx, N, {T, C, a.width}, dy, false, w, false, dx, false);
  }
  if (a.dw.present()) {
    const Slice x = columns_of(a.x, to_latent ? a.column : 0);
    multiply(ctx, N, {a.width, C, T}, to_latent ? x : dy, true, to_latent ? dy : x, false, rows_of(a.dw, a.row), true);
  }
}

}  // namespace moetrain::ops
