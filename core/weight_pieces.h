// weight_pieces.h -- all rows of a parameter on their way from one place to another, in pieces that bound the memory they take.
#pragma once
#include <functional>

#include "core/params.h"

namespace moetrain::core {

struct WeightSource {
  std::string path;
  // Rows [first, first + to.shape[0]) of a parameter, converted to the floating type of `to` in host memory.
  std::function<void(int param, std::int64_t first, Tensor to)> read;
};
using UseRows = std::function<void(std::int64_t first, Tensor rows)>;

// Pieces of some tens of MiB, or of one row. Each starts as NaN, and one in which any value is still not finite is an Error.
void for_each_piece(const WeightSource& source, const Param& p, int param, parallel::Rows rows, DType dtype, const UseRows& use);

}  // namespace moetrain::core
