// tensor_copy.cuh -- boxes of bf16 tensors copied to shared memory by sm_90's bulk copy engine, and the barriers that count them.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <initializer_list>

#include "memory/cuda_check.h"
#include "memory/tensor.h"

namespace moetrain::ops::cuda {

// A dense bf16 or f32 tensor in device memory, innermost dim first, and the box that one copy moves: lines of at most 128 bytes, in
// shared memory swizzled as such. What lies outside the tensor arrives as zeros. Address and strides must be multiples of 16 bytes.
inline CUtensorMap tensor_map(ConstTensor t, std::initializer_list<std::int64_t> dims, std::initializer_list<int> box) {
  check(t.dtype == DType::f32 || t.dtype == DType::bf16, "tensor_map: neither f32 nor bf16", {{"dtype", std::int64_t(t.dtype)}});
  void* entry = nullptr;  // asked of the runtime, so that nothing links to the driver
  cudaDriverEntryPointQueryResult found{};
  cuda_ok(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found));
  check(found == cudaDriverEntryPointSuccess, "tensor_map: the driver has no cuTensorMapEncodeTiled");
  constexpr int kMost = 3;
  cuuint64_t sizes[kMost], strides[kMost] = {};
  cuuint32_t boxes[kMost], steps[kMost] = {1, 1, 1};
  const auto rank = cuuint32_t(dims.size());
  cuuint64_t bytes = cuuint64_t(size_of(t.dtype));
  for (cuuint32_t i = 0; i < rank; ++i) {
    sizes[i] = cuuint64_t(dims.begin()[i]);
    boxes[i] = cuuint32_t(box.begin()[i]);
    strides[i] = bytes *= sizes[i];
  }
  CUtensorMap map;
  const auto status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(entry)(
      &map, t.dtype == DType::f32 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank,
      const_cast<void*>(t.data), sizes, strides, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, "tensor_map: the driver refuses the tensor", {{"status", std::int64_t(status)}});
  return map;
}

__device__ inline std::uint32_t shared_address(const void* p) { return std::uint32_t(__cvta_generic_to_shared(p)); }

// Barriers in shared memory, by address. A phase ends once all arrivals and all announced bytes have come.
__device__ inline void barrier_init(std::uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ inline void barrier_wait(std::uint32_t barrier, std::uint32_t parity) {  // for the end of the phase of this parity
  std::uint32_t done = 0;
  while (done == 0)
    asm volatile("{ .reg .pred ended; mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2; selp.u32 %0, 1, 0, ended; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
}
__device__ inline void barrier_arrive(std::uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void barrier_arrive_and_expect(std::uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void barrier_arrive_at(std::uint32_t barrier, std::uint32_t rank,
                                         int times) {  // the same barrier of a block of the cluster
  asm volatile(
      "{ .reg .b32 there; mapa.shared::cluster.u32 there, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [there], %2; }" ::"r"(
          barrier),
      "r"(rank), "r"(times)
      : "memory");
}

// Writes a value to another block of the cluster, and arrives at its barrier once it is there.
__device__ inline void tell(std::uint32_t to, std::uint32_t barrier, std::uint32_t rank, std::uint32_t value) {
  asm volatile(
      "{ .reg .b32 there, theirs; mapa.shared::cluster.u32 there, %0, %2; mapa.shared::cluster.u32 theirs, %1, %2; "
      "st.shared::cluster.u32 [there], %3; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [theirs]; }" ::"r"(to),
      "r"(barrier), "r"(rank), "r"(value)
      : "memory");
}
__device__ inline void barrier_wait_for_told(std::uint32_t barrier, std::uint32_t parity) {  // and for what was told before it
  std::uint32_t done = 0;
  while (done == 0)
    asm volatile(
        "{ .reg .pred ended; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 ended, [%1], %2; selp.u32 %0, 1, 0, ended; }"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

// Queues the copy of a box to this block, or to the same place of all blocks of the mask, whose barriers it counts down.
__device__ inline void copy_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ inline void copy_box(std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, int x, int y) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(x), "r"(y)
               : "memory");
}
__device__ inline void copy_box_to(std::uint16_t mask, std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, int x,
                                   int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5}], [%2], "
      "%3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y)
      : "memory");
}

__device__ inline void copy_box_to(std::uint16_t mask, std::uint32_t to, const CUtensorMap* map, std::uint32_t barrier, int x,
                                   int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%4, %5, %6}], "
      "[%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Queues a box to be written, as part of the next group of this thread.
__device__ inline void store_box(const CUtensorMap* map, std::uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}
// Queues a box to be added to what is there (f32: rounded once, by the L2 cache), likewise.
__device__ inline void add_box(const CUtensorMap* map, std::uint32_t from, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}
__device__ inline void store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
template <int kPending>
__device__ void store_wait_read() {  // until shared memory has been read but for so many groups
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Toward the L2 cache.
__device__ inline void prefetch_box(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}
__device__ inline void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Ordinary writes to shared memory before, reads of the tensor cores and the copy engine after.
__device__ inline void fence_shared_writes() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ inline std::uint32_t cluster_rank() {
  std::uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void cluster_sync() {  // of all threads of all blocks of the cluster
  asm volatile("barrier.cluster.arrive.release; barrier.cluster.wait.acquire;" ::: "memory");
}
__device__ inline void warpgroup_sync(int barrier) { asm volatile("bar.sync %0, 128;" ::"r"(barrier) : "memory"); }
// Of two warpgroups: one arrives and goes on, the other waits for it.
__device__ inline void warpgroups_arrive(int barrier) { asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory"); }
__device__ inline void warpgroups_sync(int barrier) { asm volatile("bar.sync %0, 256;" ::"r"(barrier) : "memory"); }

template <int kRegisters>
__device__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

}  // namespace moetrain::ops::cuda
