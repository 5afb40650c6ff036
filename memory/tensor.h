// tensor.h -- a view of dense row-major elements somewhere; owns nothing (memory/buffer.h and memory/stack.h own).
#pragma once
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory/check.h"
#include "memory/dtype.h"
#include "memory/shape.h"

namespace moetrain {

// A default-made view is absent: an optional argument of an op that was not given. On Device::dry data is null though present.
template <bool kConst>
struct BasicTensor {
  using Void = std::conditional_t<kConst, const void, void>;
  using Byte = std::conditional_t<kConst, const std::byte, std::byte>;
  Void* data = nullptr;
  DType dtype = DType::none;
  Shape shape;

  BasicTensor() = default;
  BasicTensor(Void* p, DType t, Shape s) : data(p), dtype(t), shape(s) {}
  BasicTensor(const BasicTensor<false>& o) requires kConst : data(o.data), dtype(o.dtype), shape(o.shape) {}  // NOLINT
  BasicTensor(const BasicTensor&) = default;
  BasicTensor& operator=(const BasicTensor&) = default;

  bool present() const { return dtype != DType::none; }
  std::int64_t count() const { return shape.count(); }
  std::int64_t bytes() const { return present() ? count() * size_of(dtype) : 0; }

  template <class T>
  std::conditional_t<kConst, const T, T>* as() const {
    check(dtype == DTypeOf<T>::value, "tensor: read as another type than it holds",
          {{"holds", std::int64_t(dtype)}, {"asked", std::int64_t(DTypeOf<T>::value)}});
    return static_cast<std::conditional_t<kConst, const T, T>*>(data);
  }
  // Rows [begin, end) of dim 0, the same storage.
  BasicTensor rows(std::int64_t begin, std::int64_t end) const {
    check(0 <= begin && begin <= end && end <= shape[0], "tensor: rows out of range",
          {{"begin", begin}, {"end", end}, {"rows", shape[0]}});
    return {data ? static_cast<Byte*>(data) + begin * shape.row() * size_of(dtype) : nullptr, dtype, shape.with_dim0(end - begin)};
  }
  BasicTensor reshape(Shape s) const {
    check(s.count() == shape.count(), "tensor: reshape changes the number of elements",
          {{"from", shape.count()}, {"to", s.count()}});
    return {data, dtype, s};
  }
};
using Tensor = BasicTensor<false>;
using ConstTensor = BasicTensor<true>;

}  // namespace moetrain
