// cross_entropy.h -- the loss from hidden states, cut in tokens and vocabulary: logits of a block exist only while it is worked on.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct CrossEntropy {
  ConstTensor hidden;  // (T, D)
  ConstTensor weight;  // (V, D)
  ConstTensor labels;  // (T) i32, 0..V-1, or -100: ignored
  std::int64_t seq_chunk, vocab_chunk;  // tokens and vocabulary rows a block; any positive numbers
  double gradient_scale;  // 1 / label tokens of the global batch
  Tensor loss;         // (1) real; adds sum over labels of -log softmax(logits_t)[label_t] (not scaled)
  Tensor dhidden;      // (T, D), scaled; written, 0 for ignored rows; absent (with dweight): loss only
  Tensor dweight;      // (V, D) real, scaled; adds; absent: frozen head
  void check_shapes() const;
};

namespace cpu {
void cross_entropy(Context&, const CrossEntropy&);
}  // namespace cpu

inline void cross_entropy(Context& ctx, const CrossEntropy& a) {
  dispatch(ctx, "cross_entropy forward", a, [&] { cpu::cross_entropy(ctx, a); });
}

}  // namespace moetrain::ops
