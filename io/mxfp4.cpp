// mxfp4.cpp -- a table of sixteen values, times a power of two.
#include "io/mxfp4.h"

#include <cmath>

namespace moetrain::io {
namespace {

constexpr float kValues[16] = {0, .5F, 1, 1.5F, 2, 3, 4, 6, -0.F, -.5F, -1, -1.5F, -2, -3, -4, -6};

template <class R>
void decode(const std::uint8_t* packed, const std::uint8_t* scale, R* to, std::int64_t rows, std::int64_t columns) {
  for (std::int64_t group = 0; group < rows * columns / kMxfp4Group; ++group) {
    const float factor = scale[group] == 255 ? std::nanf("") : std::ldexp(1.F, int(scale[group]) - 127);
    for (std::int64_t i = group * kMxfp4Group; i < (group + 1) * kMxfp4Group; ++i)
      to[i] = R(kValues[packed[i / 2] >> (i % 2 * 4) & 15] * factor);
  }
}

}  // namespace

void decode_mxfp4(const std::uint8_t* packed, const std::uint8_t* scale, Tensor to) {
  const std::int64_t rows = to.shape[0], columns = to.shape[1];
  check(to.shape.rank() == 2 && columns % kMxfp4Group == 0, "mxfp4: columns are not whole groups", {{"columns", columns}});
  switch (to.dtype) {
    case DType::f64:
      return decode(packed, scale, to.as<double>(), rows, columns);
    case DType::f32:
      return decode(packed, scale, to.as<float>(), rows, columns);
    case DType::bf16:
      return decode(packed, scale, to.as<bf16>(), rows, columns);
    default:
      fail("mxfp4: decodes to floating types", {{"asked", std::int64_t(to.dtype)}});
  }
}

}  // namespace moetrain::io
