// product.cu -- one tiled FFMA kernel over every mix of types; a block finds its ragged group by itself.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/product.h"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {
namespace {

constexpr int kTile = 64, kDepth = 16, kThreads = 256, kEach = 4;  // a thread has kEach x kEach elements of the tile

// Element (row, column) of a tile of an operand from `first`, in shared memory with the summand first. Threads run along whichever
// direction is contiguous in memory.
template <class T>
__device__ void load_tile(float (&tile)[kDepth][kTile + 4], const T* from, std::int64_t outer_stride, std::int64_t k_stride,
                          std::int64_t outer_left, std::int64_t k_left) {
  for (int i = int(threadIdx.x); i < kTile * kDepth; i += kThreads) {
    const int outer = k_stride == 1 ? i / kDepth : i % kTile, k = k_stride == 1 ? i % kDepth : i / kTile;
    tile[k][outer] = outer < outer_left && k < k_left ? to_float(from[outer * outer_stride + k * k_stride]) : 0.0F;
  }
}

// grid (tiles of m x tiles of n, 1, products; ragged rows: bounded tiles of all groups), block (kThreads)
template <class A, class B, class C>
__global__ void __launch_bounds__(kThreads) product_kernel(const Product p, std::int64_t n_tiles) {
  __shared__ float a_tile[kDepth][kTile + 4], b_tile[kDepth][kTile + 4];
  std::int64_t product = blockIdx.z, m_tile = blockIdx.x / n_tiles, m_begin = 0, m_end = p.m, k_begin = 0, k_end = p.k;
  if (p.ragged == Product::Ragged::rows) {
    for (product = 0; product < p.batch; ++product) {
      m_begin = p.offsets[product];
      m_end = p.offsets[product + 1];
      const std::int64_t tiles = (m_end - m_begin + kTile - 1) / kTile;
      if (m_tile < tiles) break;
      m_tile -= tiles;
    }
    if (product == p.batch) return;
  } else if (p.ragged == Product::Ragged::summands) {
    k_begin = p.offsets[product];
    k_end = p.offsets[product + 1];
  }
  const std::int64_t m = m_begin + m_tile * kTile, n = blockIdx.x % n_tiles * kTile;
  const A* a = static_cast<const A*>(p.a.data) + product * p.a.batch + m * p.a.row;
  const B* b = static_cast<const B*>(p.b.data) + product * p.b.batch + n * p.b.column;
  const int down = int(threadIdx.x) / (kTile / kEach) * kEach, across = int(threadIdx.x) % (kTile / kEach) * kEach;
  float sum[kEach][kEach] = {};
  for (std::int64_t k = k_begin; k < k_end; k += kDepth) {
    load_tile(a_tile, a + k * p.a.column, p.a.row, p.a.column, m_end - m, k_end - k);
    load_tile(b_tile, b + k * p.b.row, p.b.column, p.b.row, p.n - n, k_end - k);
    __syncthreads();  // waits for both tiles
    for (int kk = 0; kk < kDepth; ++kk) {
      float as[kEach], bs[kEach];
      for (int i = 0; i < kEach; ++i) as[i] = a_tile[kk][down + i], bs[i] = b_tile[kk][across + i];
      for (int i = 0; i < kEach; ++i)
        for (int j = 0; j < kEach; ++j) sum[i][j] += as[i] * bs[j];
    }
    __syncthreads();  // waits for the readers of both tiles
  }
  C* c = static_cast<C*>(p.c) + product * p.c_batch;
  for (int i = 0; i < kEach; ++i)
    for (int j = 0; j < kEach; ++j)
      if (m + down + i < m_end && n + across + j < p.n) {
        C& to = c[(m + down + i) * p.c_row + n + across + j];
        to = from_float<C>(p.beta == 0 ? p.alpha * sum[i][j] : p.alpha * sum[i][j] + p.beta * to_float(to));
      }
}

template <class Body>
void with_type(DType type, Body body) {
  check(type == DType::f32 || type == DType::bf16, "product: CUDA has f32 and bf16 only", {{"dtype", std::int64_t(type)}});
  type == DType::f32 ? body(float{}) : body(device_t<bf16>{});
}

}  // namespace

void product(Context& ctx, const Product& p) {
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  const bool ragged_rows = p.ragged == Product::Ragged::rows;
  const std::int64_t n_tiles = (p.n + kTile - 1) / kTile, m_tiles = (p.m + kTile - 1) / kTile + (ragged_rows ? p.batch : 0);
  const std::int64_t products = ragged_rows ? 1 : p.batch;
  check(products <= 65535, "product: more products than a grid may have", {{"products", products}});
  with_type(p.a.type, [&](auto a) {
    with_type(p.b.type, [&](auto b) {
      with_type(p.c_type, [&](auto c) {
        launch(ctx, product_kernel<decltype(a), decltype(b), decltype(c)>,
               {dim3(blocks(m_tiles * n_tiles, 1), 1, unsigned(products)), kThreads}, p, n_tiles);
      });
    });
  });
}

}  // namespace moetrain::ops::cuda
