// rows.cuh -- what kernels that walk along rows share: storage types as f32, loads of several elements, sums over a warp and a
// block.
#pragma once
#include <cuda_bf16.h>

#include <cstdint>
#include <initializer_list>

#include "memory/tensor.h"

namespace moetrain::ops::cuda {

inline constexpr int kWarp = 32;

// The type in which a kernel sees storage type T: the house's bf16 has the bits of the device's.
template <class T>
struct OnDevice {
  using type = T;
};
template <>
struct OnDevice<bf16> {
  using type = __nv_bfloat16;
};
template <class T>
using device_t = typename OnDevice<T>::type;

template <class T>
const device_t<T>* device_pointer(ConstTensor t) {
  return t.present() ? reinterpret_cast<const device_t<T>*>(t.as<T>()) : nullptr;
}
template <class T>
device_t<T>* device_pointer(Tensor t) {
  return t.present() ? reinterpret_cast<device_t<T>*>(t.as<T>()) : nullptr;
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
template <class T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// kCount consecutive elements, moved in pieces of at most 16 bytes, the largest load there is.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount < 16 ? sizeof(T) * kCount : 16) Pack {
  T at[kCount];
};
template <int kCount, class T>
__device__ Pack<T, kCount> load(const T* from) {
  return *reinterpret_cast<const Pack<T, kCount>*>(from);
}
template <int kCount, class T>
__device__ void store(T* to, const Pack<T, kCount>& values) {
  *reinterpret_cast<Pack<T, kCount>*>(to) = values;
}

// May rows of D elements of each tensor be moved in packs of kCount? Absent tensors may.
template <int kCount>
bool in_packs(std::int64_t D, std::initializer_list<ConstTensor> tensors) {
  if (D % kCount != 0) return false;
  for (const ConstTensor& t : tensors)
    if (t.present() && reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) return false;
  return true;
}

// The sum over the 32 lanes, in every lane.
__device__ inline float warp_sum(float x) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(0xffffffffU, x, lanes);
  return x;
}

// The sum over a one-dimensional block of whole warps, in every thread, in a fixed order.
__device__ inline float block_sum(float x) {
  __shared__ float of_warp[kWarp];
  x = warp_sum(x);
  if (blockDim.x == kWarp) return x;
  const unsigned int lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  __syncthreads();  // waits for the readers of the previous sum
  if (lane == 0) of_warp[threadIdx.x / kWarp] = x;
  __syncthreads();  // waits for every warp's sum
  return warp_sum(lane < warps ? of_warp[lane] : 0.0F);
}

}  // namespace moetrain::ops::cuda
