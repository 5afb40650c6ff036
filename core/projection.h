// projection.h -- the one place where a named weight multiplies: what is done to a weight's product (an adapter, a tensor cut, a
// cached result) attaches here and nowhere else.
//
// The weight of parameter `id` must be gathered. Its gradient adds, or writes where it is the first of a step; a frozen parameter
// gets none, and an absent dx is not computed. Where the parameter has an adapter (core/lora.h), products are those of
// W + scale B A, and A and B get the gradient.
#pragma once
#include "core/pass.h"
#include "ops/cross_entropy.h"
#include "ops/head_linear.h"

namespace moetrain::core {

// y (T, O) = x (T, I) W^T; add: y +=. Leading dims of x and y beyond the last are rows.
void project(Pass& pass, int id, ConstTensor x, Tensor y, bool add = false);
void project_backward(Pass& pass, int id, ConstTensor dy, ConstTensor x, Tensor dx, bool add_dx = false);

// The same into a tensor that backward needs: made, or found again (core/result_cache.h). Absent: of `shape`; else there already.
void project_result(Pass& pass, int id, ConstTensor x, Tensor& y, Shape shape, DType dtype);
inline void project_result(Pass& pass, int id, ConstTensor x, Tensor& y, Shape shape) {
  project_result(pass, id, x, y, shape, pass.dtype);
}

// The rows of each expert of a part through its own matrix.
void project_grouped(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor x, Tensor y);
void project_grouped_backward(Pass& pass, int id, const parallel::ExchangePart& part, ConstTensor dy, Tensor dx);
// Of the whole parameters, asked for once for all parts.
struct GroupedGradient {
  parallel::ShardedParams::FirstGradient w, a, b;
  Tensor shared_a;  // adds
};
GroupedGradient grouped_gradient(Pass& pass, int id);
void project_grouped_gradient(Pass& pass, int id, const GroupedGradient& gradient, const parallel::ExchangePart& part,
                              ConstTensor dy, ConstTensor x);

// The same for two weights of one shape on the same rows; dx is the sum of both.
struct TwoWeights {
  int first, second;
};
void project_grouped(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor x, Tensor first_y,
                     Tensor second_y);
void project_grouped_backward(Pass& pass, TwoWeights ids, const parallel::ExchangePart& part, ConstTensor first_dy,
                              ConstTensor second_dy, Tensor dx);
struct TwoGradients {
  GroupedGradient first, second;
};
void project_grouped_gradient(Pass& pass, TwoWeights ids, const TwoGradients& gradients, const parallel::ExchangePart& part,
                              ConstTensor first_dy, ConstTensor second_dy, ConstTensor x);

// A slice of each head's rows of W (N (A), C), between heads and latent (ops/head_linear.h). The heads' side of from_latent is as
// wide as the slice.
struct HeadSlice {
  ops::HeadDirection direction;
  std::int64_t heads, row, width, column;
};
void project_heads(Pass& pass, int id, const HeadSlice& slice, ConstTensor x, Tensor y);
void project_heads_backward(Pass& pass, int id, const HeadSlice& slice, ConstTensor dy, ConstTensor x, Tensor dx);

// The loss of the logits x W^T and, where loss.dhidden is given, all gradients; weight and its gradient are filled in here. Where
// ranks have parts of the vocabulary, labels are those of all of it, dhidden is this part's share, and the loss is added by the
// first alone.
void project_loss(Pass& pass, int id, ops::CrossEntropy loss);

}  // namespace moetrain::core
