// embedding.cu -- rows copied out; gradients of equal ids brought side by side by a stable sort and added up in their order.
#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "ops/cuda/copy_rows.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/embedding.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kThreads = 128;
constexpr int kTogether = 4;  // rows loaded before they are added

// grid (blocks of kThreads), block (kThreads)
__global__ void embedding_positions_kernel(std::int32_t* position, std::int64_t T) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (t < T) position[t] = std::int32_t(t);
}

// grid (T, blocks of kThreads packs of a row), block (kThreads): the block of the first of equal ids adds up all their rows
template <class X, int kCount>
__global__ void embedding_backward_kernel(const std::int32_t* __restrict__ ids, const std::int32_t* __restrict__ position,
                                          const X* __restrict__ dy, float* __restrict__ dtable, std::int64_t T, std::int64_t D) {
  const std::int64_t first = blockIdx.x, d = (std::int64_t(blockIdx.y) * kThreads + threadIdx.x) * kCount;
  const std::int32_t id = ids[first];
  if (id == kElsewhere || (first > 0 && ids[first - 1] == id) || d >= D) return;
  float* to = dtable + id * D + d;
  auto sum = load<kCount>(to);
  for (std::int64_t at = first;; at += kTogether) {
    int rows = 0;
    while (rows < kTogether && at + rows < T && ids[at + rows] == id) ++rows;
    Floats<kCount> dys[kTogether];
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
      if (r < rows) dys[r] = load_floats<kCount>(dy + position[at + r] * D + d);
#pragma unroll
    for (int r = 0; r < kTogether; ++r)
      if (r < rows)
        for (int i = 0; i < kCount; ++i) sum.at[i] += dys[r].at[i];
    if (rows < kTogether) break;
  }
  store<kCount>(to, sum);
}

// grid (T, blocks of kThreads units of a row), block (kThreads)
template <class Unit>
__global__ void embedding_forward_kernel(const std::int32_t* __restrict__ ids, const Unit* __restrict__ table, Unit* __restrict__ y,
                                         std::int64_t units) {
  const std::int64_t t = blockIdx.x, i = std::int64_t(blockIdx.y) * kThreads + threadIdx.x;
  if (i < units) y[t * units + i] = ids[t] == kElsewhere ? Unit{} : table[ids[t] * units + i];
}

template <class X, int kCount>
void gather(Context& ctx, const EmbeddingBackward& a, const std::int32_t* ids, const std::int32_t* position) {
  const std::int64_t T = a.dy.shape[0], D = a.dy.shape[1];
  launch(ctx, embedding_backward_kernel<device_t<X>, kCount>, {dim3(blocks(T, 1), blocks(D, kThreads * kCount)), kThreads}, ids,
         position, device_pointer<X>(a.dy), a.dtable.as<float>(), T, D);
}

}  // namespace

void cuda::embedding(Context& ctx, const EmbeddingForward& a) {
  const std::int64_t T = a.y.shape[0], row = a.y.shape[1] * size_of(a.y.dtype);
  if (T == 0 || row == 0) return;
  with_unit(address(a.table.data) | address(a.y.data) | std::uint64_t(row), [&](auto unit) {
    using Unit = decltype(unit);
    const std::int64_t units = row / std::int64_t(sizeof(Unit));
    launch(ctx, embedding_forward_kernel<Unit>, {dim3(blocks(T, 1), blocks(units, kThreads)), kThreads}, a.ids.as<std::int32_t>(),
           static_cast<const Unit*>(a.table.data), static_cast<Unit*>(a.y.data), units);
  });
}

void cuda::embedding(Context& ctx, const EmbeddingBackward& a) {
  const std::int64_t T = a.dy.shape[0], D = a.dy.shape[1], V = a.dtable.shape[0];
  if (T == 0 || D == 0) return;
  check(T <= 0x7fffffff, "embedding: more tokens than the sort counts", {{"T", T}});
  Scope scope(ctx.scratch);
  const auto scratch = [&] { return ctx.scratch.take(DType::i32, {T}).as<std::int32_t>(); };
  std::int32_t *ids = scratch(), *order = scratch(), *position = scratch();
  launch(ctx, embedding_positions_kernel, {blocks(T, kThreads), kThreads}, order, T);
  const int bits = std::max(1, int(std::bit_width(std::uint64_t(V))));  // of an id, and one more that is none
  std::size_t bytes = 0;
  const auto sort = [&](void* storage) {
    cuda_ok(cub::DeviceRadixSort::SortPairs(storage, bytes, a.ids.as<std::int32_t>(), ids, order, position, int(T), 0, bits,
                                            ctx.stream));
  };
  sort(nullptr);  // asks how much it takes
  sort(ctx.scratch.take(DType::u8, {std::int64_t(bytes)}).data);
  with_storage(a.dy.dtype, [&](auto storage) {
    using S = decltype(storage);
    constexpr int kPack = kPackOf<S>;
    in_packs<kPack>(D, {a.dy, a.dtable}) ? gather<S, kPack>(ctx, a, ids, position) : gather<S, 1>(ctx, a, ids, position);
  });
}

}  // namespace moetrain::ops
