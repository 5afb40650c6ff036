// projection.h -- the one place where a named weight multiplies: what is done to a weight's product (an adapter, a tensor cut, a
// cached result) attaches here and nowhere else.
//
// The weight of parameter `id` must be gathered. Its gradient adds, or writes where it is the first of a step; a frozen parameter
// gets none, and an absent dx is not computed.
#pragma once
#include <span>

#include "core/pass.h"
#include "ops/head_linear.h"

namespace moetrain::core {

// y (T, O) = x (T, I) W^T; add: y +=. Leading dims of x and y beyond the last are rows.
void project(Pass& pass, int id, ConstTensor x, Tensor y, bool add = false);
void project_backward(Pass& pass, int id, ConstTensor dy, ConstTensor x, Tensor dx, bool add_dx = false);

// Rows of each local expert through its own matrix.
struct GroupRows {
  std::span<const std::int64_t> offsets;  // (e+1)
  ConstTensor device_offsets;             // as ops/grouped_linear.h
};
void project_grouped(Pass& pass, int id, const GroupRows& groups, ConstTensor x, Tensor y);
void project_grouped_backward(Pass& pass, int id, const GroupRows& groups, ConstTensor dy, ConstTensor x, Tensor dx, bool add_dx = false);

// A slice of each head's rows of W (N (A), C), between heads and latent (ops/head_linear.h).
struct HeadSlice {
  ops::HeadDirection direction;
  std::int64_t heads, row, width, column;
};
void project_heads(Pass& pass, int id, const HeadSlice& slice, ConstTensor x, Tensor y);
void project_heads_backward(Pass& pass, int id, const HeadSlice& slice, ConstTensor dy, ConstTensor x, Tensor dx);

}  // namespace moetrain::core
