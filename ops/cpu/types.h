// types.h -- how a CPU backend is written once for f32, f64 and bf16 storage.
#pragma once
#include <type_traits>
#include <utility>

#include "memory/tensor.h"

namespace moetrain::ops::cpu {

template <class T>
using acc_t = std::conditional_t<std::is_same_v<T, double>, double, float>;  // arithmetic and statistics of storage type T

// Calls body(T{}) with the storage type of dtype: float, double or bf16.
template <class Body>
void with_storage(DType dtype, Body&& body) {
  switch (dtype) {
    case DType::f32: return std::forward<Body>(body)(float{});
    case DType::f64: return std::forward<Body>(body)(double{});
    case DType::bf16: return std::forward<Body>(body)(bf16{});
    default: fail("op: not a floating type", {{"dtype", std::int64_t(dtype)}});
  }
}

}  // namespace moetrain::ops::cpu
