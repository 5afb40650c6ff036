// cross_entropy_tiles.h -- the loss's products of dense bf16 on tensor cores: logits become statistics or gradients before they
// leave a multiprocessor, and gradients of both operands are made in the same launch.
#pragma once
#include <cstdint>

#include "ops/context.h"

namespace moetrain::ops::cuda {

// What the loss knows of the tokens of a block.
struct LossRows {
  const std::int32_t* labels;
  float *top, *sum, *label_logit;
};
struct LossBlock {
  ConstTensor hidden, weight;  // (s, D), (V, D)
  LossRows rows;
};

// Of each 256 words the maximum and the sum of exponentials below it: parts (s, ceil(V / 256), 2). The label's logit. `kept`, where
// present, is (s, V rounded up to 8) of storage: the logits, from whose rounded values the rest is then made, and zeros past V.
void loss_logits(Context& ctx, const LossBlock& l, float* parts, Tensor kept);

// g = scale (exp(logit - top) / sum - [is the label]); dhidden = g weight; dweight (+)= g^T hidden.
struct LossGradients {
  Tensor g;            // (s, V rounded up to 8): given; with `done` (2 s, chunk rounded up to 8): room for two blocks of words
  Tensor done;         // (blocks of words, 3) i32: counts between them; absent where g is given
  std::int64_t chunk;  // words a block
  float scale;
  Tensor dhidden, dweight;  // (s, D), (V, D) f32; dweight may be absent
  bool add_dweight;
};
void loss_gradients(Context& ctx, const LossBlock& l, const LossGradients& to);

}  // namespace moetrain::ops::cuda
