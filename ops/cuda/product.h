// product.h -- products of any types, strides and sizes in plain f32 arithmetic: for what the tensor-core paths do not take.
#pragma once
#include <cstdint>

#include "ops/context.h"

namespace moetrain::ops::cuda {

// An operand where it lies: element (i, j) of product b is data[b * batch + i * row + j * column].
struct Operand {
  const void* data;
  DType type;  // f32 or bf16
  std::int64_t row, column, batch = 0;
};

// c = alpha a b + beta c for a (m, k), b (k, n) and c (m, n) with rows c_row apart; batch times, c c_batch apart. Repeatable.
// With offsets (batch + 1, on the device) the products are ragged: product g takes rows [offsets[g], offsets[g+1]) of the m rows of
// a and c, or these summands of the k; operands that are cut so have no batch of their own.
struct Product {
  std::int64_t m, n, k;
  Operand a, b;
  void* c;
  DType c_type;
  std::int64_t c_row, c_batch = 0;
  std::int64_t batch = 1;
  float alpha = 1, beta = 0;
  enum class Ragged : std::uint8_t { none, rows, summands } ragged = Ragged::none;
  const std::int64_t* offsets = nullptr;
};

void product(Context& ctx, const Product& p);

}  // namespace moetrain::ops::cuda
