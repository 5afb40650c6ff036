// host_values.h -- floating values in host memory, whichever of the three types they have.
#pragma once
#include <cstdint>

#include "memory/tensor.h"

namespace moetrain::core {

void convert(ConstTensor from, Tensor to);          // rounded to nearest where `to` is narrower
std::int64_t first_not_finite(ConstTensor values);  // its index; -1: all are numbers

}  // namespace moetrain::core
