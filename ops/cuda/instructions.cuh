// instructions.cuh -- copies of consecutive bytes to shared memory by sm_90's copy engine, and barriers by pointer that count them.
#pragma once
#include <cstdint>

#include "ops/cuda/tensor_copy.cuh"

namespace moetrain::ops::cuda {

__device__ inline void barrier_init(std::uint64_t* barrier, int arrivals) { barrier_init(shared_address(barrier), arrivals); }
__device__ inline void barriers_are_initialised() { fence_barrier_init(); }
__device__ inline void arrive_and_expect(std::uint64_t* barrier, int bytes) { barrier_arrive_and_expect(shared_address(barrier), bytes); }
// Waits for the end of the barrier's phase of this parity; the first phase has parity 0, and the one before it, over at once, 1.
__device__ inline void wait(std::uint64_t* barrier, unsigned parity) { barrier_wait(shared_address(barrier), parity); }

// Queues the copy of a multiple of 16 bytes, aligned to 16 at both ends; the barrier hears of them.
__device__ inline void copy_bytes(std::uint32_t to, const void* from, int bytes, std::uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ inline void copy_bytes(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  copy_bytes(shared_address(to), from, bytes, shared_address(barrier));
}

}  // namespace moetrain::ops::cuda
