// launch.cuh -- the only place that launches a kernel, so that no launch goes unchecked and no size is cut to 32 bits.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <source_location>
#include <utility>

#include "memory/cuda_check.h"
#include "ops/context.h"

namespace moetrain::ops::cuda {

// How many blocks of `per_block` items cover `items`.
inline unsigned int blocks(std::int64_t items, std::int64_t per_block) {
  const std::int64_t count = (items + per_block - 1) / per_block;
  check(0 <= count && count <= 0x7fffffff, "launch: more blocks than a grid may have", {{"blocks", count}});
  return static_cast<unsigned int>(count);
}

struct Grid {
  dim3 blocks, threads;
  std::size_t shared_bytes;
  std::source_location where;
  Grid(dim3 b, dim3 t, std::size_t shared = 0, std::source_location w = std::source_location::current())
      : blocks(b), threads(t), shared_bytes(shared), where(w) {}
};

// Queues the kernel on the context's stream. An empty grid is not an error: an expert may get no token.
template <class... Params, class... Args>
void launch(Context& ctx, void (*kernel)(Params...), const Grid& grid, Args&&... args) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
  constexpr std::size_t kWithoutAsking = 32 << 10;  // more than 48 KB is opted into, and what a kernel declares itself counts
  if (grid.shared_bytes > kWithoutAsking)
    cuda_ok(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared_bytes)),
            grid.where);
  kernel<<<grid.blocks, grid.threads, grid.shared_bytes, ctx.stream>>>(std::forward<Args>(args)...);
  cuda_ok(cudaGetLastError(), grid.where);
}

// Queues zeros where tensors have elements.
inline void set_zero(Context& ctx, std::initializer_list<Tensor> tensors) {
  for (const Tensor& t : tensors)
    if (t.bytes() > 0) cuda_ok(cudaMemsetAsync(t.data, 0, std::size_t(t.bytes()), ctx.stream));
}

}  // namespace moetrain::ops::cuda
