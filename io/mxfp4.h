// mxfp4.h -- matrices in MXFP4 as compressed-tensors packs them, decoded to their values.
//
// A byte holds two E2M1 codes, the lower four bits first: a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6. Each 32 columns of a row
// share a scale, one byte s for 2^(s - 127). Every value that is finite is exact in bf16; s = 255 stands for NaN.
#pragma once
#include <cstdint>

#include "memory/tensor.h"

namespace moetrain::io {

inline constexpr std::int64_t kMxfp4Group = 32;  // columns of a scale

// packed (rows, columns / 2), scale (rows, columns / 32), to (rows, columns) of any floating type in host memory.
void decode_mxfp4(const std::uint8_t* packed, const std::uint8_t* scale, Tensor to);

}  // namespace moetrain::io
