// arithmetic.cuh -- what the device does to f32 in one instruction: powers of two, reciprocals, pairs rounded to bf16.
#pragma once
#include <cuda_bf16.h>

namespace moetrain::ops::cuda {

inline constexpr float kLog2E = 1.44269504088896341F;

// To two units in the last place; results below 2^-126 become zero, 2^-inf among them.
__device__ __forceinline__ float power_of_2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two neighbours as operands of the tensor cores have them, the first in the lower half.
__device__ __forceinline__ unsigned packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}

}  // namespace moetrain::ops::cuda
