// copy_rows.cuh -- rows of bytes from here to there, by a list of rows on either side: what gathers, scatters and column slices
// are.
#pragma once
#include <bit>

#include "ops/cuda/launch.cuh"

namespace moetrain::ops::cuda {

struct RowCopy {
  const void* from;
  void* to;
  std::int64_t rows, bytes;             // bytes of a row that are copied
  std::int64_t from_stride, to_stride;  // bytes between rows
};

struct alignas(16) Bytes16 {
  std::uint64_t half[2];
};

// Calls body(Unit{}) with the largest unit of at most 16 bytes that divides `bits`, an OR of addresses, sizes and strides.
template <class Body>
void with_unit(std::uint64_t bits, Body&& body) {
  if (bits % 16 == 0) return body(Bytes16{});
  if (bits % 8 == 0) return body(std::uint64_t{});
  if (bits % 4 == 0) return body(std::uint32_t{});
  return bits % 2 == 0 ? body(std::uint16_t{}) : body(std::uint8_t{});
}
inline std::uint64_t address(const void* p) { return reinterpret_cast<std::uintptr_t>(p); }

constexpr unsigned int kRowThreads = 256;
// Threads of a block that share rows of so many units: a unit a thread in a warp's width, then up to four: (a row, rows of a
// block).
inline dim3 threads_for_rows(std::int64_t units) {
  const std::int64_t wanted = std::min<std::int64_t>(units, std::max<std::int64_t>(32, units / 4));
  const unsigned int of_row = std::bit_ceil(static_cast<unsigned int>(std::clamp<std::int64_t>(wanted, 1, kRowThreads / 2)));
  return {of_row, kRowThreads / of_row};
}

// grid (ceil(rows / blockDim.y)), block (threads_for_rows)
template <class Unit, class Index>
__global__ void copy_rows_kernel(RowCopy c, const Index* __restrict__ from_row, const Index* __restrict__ to_row) {
  const std::int64_t r = std::int64_t(blockIdx.x) * blockDim.y + threadIdx.y, units = c.bytes / std::int64_t(sizeof(Unit));
  if (r >= c.rows) return;
  const auto* __restrict__ from =
      reinterpret_cast<const Unit*>(static_cast<const char*>(c.from) + (from_row ? std::int64_t(from_row[r]) : r) * c.from_stride);
  auto* __restrict__ to = reinterpret_cast<Unit*>(static_cast<char*>(c.to) + (to_row ? std::int64_t(to_row[r]) : r) * c.to_stride);
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < units; i += blockDim.x) to[i] = from[i];
}

// Row to_row[r] = row from_row[r], r < rows; a list that is null stands for r itself.
template <class Index>
void copy_rows(Context& ctx, const RowCopy& c, const Index* from_row, const Index* to_row) {
  if (c.rows == 0 || c.bytes == 0) return;
  const std::uint64_t bits = address(c.from) | address(c.to) | std::uint64_t(c.bytes | c.from_stride | c.to_stride);
  with_unit(bits, [&](auto unit) {
    using Unit = decltype(unit);
    const dim3 threads = threads_for_rows(c.bytes / std::int64_t(sizeof(Unit)));
    launch(ctx, copy_rows_kernel<Unit, Index>, {blocks(c.rows, threads.y), threads}, c, from_row, to_row);
  });
}

}  // namespace moetrain::ops::cuda
