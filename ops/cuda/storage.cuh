// storage.cuh -- how a CUDA backend is written once for f32 and bf16 storage: packs of either as f32.
#pragma once
#include <algorithm>

#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {

// Calls body(T{}) with the storage type of dtype: float or bf16.
template <class Body>
void with_storage(DType dtype, Body&& body) {
  if (dtype == DType::f32) return body(float{});
  check(dtype == DType::bf16, "op: CUDA has f32 and bf16 only", {{"dtype", std::int64_t(dtype)}});
  return body(bf16{});
}

// May all of these be moved in packs of 16 bytes from their start?
inline bool aligned(std::initializer_list<ConstTensor> tensors) { return in_packs<1>(0, tensors); }

// Elements of one 16-byte load of the widest of the types.
template <class... T>
inline constexpr int kPackOf = 16 / std::max({int(sizeof(T))...});

template <int kCount>
using Floats = Pack<float, kCount>;

template <int kCount, class T>
__device__ Floats<kCount> load_floats(const T* from) {
  const auto stored = load<kCount>(from);
  Floats<kCount> x;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x.at[i] = to_float(stored.at[i]);
  return x;
}

template <int kCount, class T>
__device__ void store_floats(T* to, const Floats<kCount>& x) {
  Pack<T, kCount> stored;
#pragma unroll
  for (int i = 0; i < kCount; ++i) stored.at[i] = from_float<T>(x.at[i]);
  store<kCount>(to, stored);
}

// The same bits in every op that calls it: routing and balancing have to see one score.
__device__ inline float sigmoid(float x) { return 1.0F / (1.0F + expf(-x)); }

}  // namespace moetrain::ops::cuda
