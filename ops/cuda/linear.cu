// linear.cu -- cuBLASLt products; f32 operands that meet bf16 ones, or become bf16, are cut into bf16 parts for the tensor cores.
#include <algorithm>

#include "ops/cuda/blas.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/linear.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256;

// grid (ceil(count / kThreads)): parts (parts, count) whose sum is x, largest first. An overflow stays in the first part.
__global__ void linear_split_kernel(const float* __restrict__ x, __nv_bfloat16* __restrict__ to, std::int64_t count, int parts) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= count) return;
  float rest = x[i];
  for (int part = 0; part < parts; ++part) {
    const __nv_bfloat16 rounded = __float2bfloat16_rn(rest);
    to[part * count + i] = rounded;
    rest = isfinite(to_float(rounded)) ? rest - to_float(rounded) : 0.0F;
  }
}

// grid (ceil(count / kThreads)): y = bf16(sums), or y += with add
__global__ void linear_round_kernel(const float* __restrict__ sums, __nv_bfloat16* __restrict__ y, std::int64_t count, bool add) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) y[i] = __float2bfloat16_rn(add ? to_float(y[i]) + sums[i] : sums[i]);
}

Tensor split(Context& ctx, ConstTensor x, Tensor parts) {
  launch(ctx, linear_split_kernel, {blocks(x.count(), kThreads), kThreads}, x.as<float>(), device_pointer<bf16>(parts), x.count(),
         int(parts.shape[0]));
  return parts;
}

// c = op(a) op(b), or c += , for dense tensors: a, b and c may each be f32 or bf16.
void multiply(Context& ctx, ConstTensor a, bool transpose_a, ConstTensor b, bool transpose_b, Tensor c, bool add) {
  Scope scope(ctx.scratch);
  const SplitProduct parts(ctx, a, b, c);
  const ConstTensor each_a = parts.a.present() ? ConstTensor(split(ctx, a, parts.a)) : a.reshape({1, a.shape[0], a.shape[1]});
  const ConstTensor each_b = parts.b.present() ? ConstTensor(split(ctx, b, parts.b)) : b.reshape({1, b.shape[0], b.shape[1]});
  const Tensor to = parts.sums.present() ? parts.sums : c;
  bool adds = add && !parts.sums.present();
  const std::int64_t most = std::max(each_a.shape[0], each_b.shape[0]);
  for (std::int64_t rank = most - 1; rank >= 0; --rank)  // small products first
    for (std::int64_t i = 0; i < each_a.shape[0]; ++i) {
      const std::int64_t j = rank - i;
      if (j < 0 || j >= each_b.shape[0]) continue;
      ctx.blas->run(ctx, {.m = c.shape[0],
                          .n = c.shape[1],
                          .k = transpose_a ? a.shape[0] : a.shape[1],
                          .a = each_a.rows(i, i + 1).data,
                          .b = each_b.rows(j, j + 1).data,
                          .c = to.data,
                          .a_type = each_a.dtype,
                          .b_type = each_b.dtype,
                          .c_type = to.dtype,
                          .lda = a.shape[1],
                          .ldb = b.shape[1],
                          .ldc = c.shape[1],
                          .transpose_a = transpose_a,
                          .transpose_b = transpose_b,
                          .beta = float(adds)});
      adds = true;
    }
  if (parts.sums.present())
    launch(ctx, linear_round_kernel, {blocks(c.count(), kThreads), kThreads}, to.as<float>(), device_pointer<bf16>(c), c.count(),
           add);
}

}  // namespace

void cuda::linear(Context& ctx, const LinearForward& a) { multiply(ctx, a.x, false, a.w, true, a.y, a.add); }

void cuda::linear(Context& ctx, const LinearBackward& a) {
  if (a.dx.present()) multiply(ctx, a.dy, false, a.w, false, a.dx, a.add_dx);
  if (a.dw.present()) multiply(ctx, a.dy, true, a.x, false, a.dw, !a.write_dw);
}

}  // namespace moetrain::ops
