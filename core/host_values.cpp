// host_values.cpp -- loops over the types.
#include "core/host_values.h"

#include <cmath>
#include <type_traits>

namespace moetrain::core {
namespace {

// body(pointer to the first element), of the tensor's own type.
template <class Body>
auto with_type(ConstTensor t, Body body) {
  switch (t.dtype) {
    case DType::f64:
      return body(static_cast<const double*>(t.data));
    case DType::f32:
      return body(static_cast<const float*>(t.data));
    case DType::bf16:
      return body(static_cast<const bf16*>(t.data));
    default:
      fail("host values: not a floating type", {{"dtype", std::int64_t(t.dtype)}});
  }
}

}  // namespace

void convert(ConstTensor from, Tensor to) {
  check(from.count() == to.count(), "host values: as many to convert as there is room for",
        {{"from", from.count()}, {"to", to.count()}});
  with_type(from, [&](const auto* x) {
    with_type(to, [&](const auto* y) {
      using Y = std::remove_const_t<std::remove_pointer_t<decltype(y)>>;
      Y* out = to.as<Y>();
      for (std::int64_t i = 0; i < to.count(); ++i) out[i] = Y(x[i]);
    });
  });
}

std::int64_t first_not_finite(ConstTensor values) {
  return with_type(values, [&](const auto* x) {
    for (std::int64_t i = 0; i < values.count(); ++i)
      if (!std::isfinite(double(x[i]))) return i;
    return std::int64_t{-1};
  });
}

}  // namespace moetrain::core
