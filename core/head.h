// head.h -- the end of the model: last mix, last norm and the loss cut in tokens and vocabulary.
#pragma once
#include <optional>

#include "core/block.h"

namespace moetrain::core {

// Tokens and vocabulary rows of a block of the loss: as asked, chosen for the device where the job leaves them open.
struct LossBlocks {
  std::int64_t seq, vocab;
};
LossBlocks chosen_blocks(const LossConfig& asked, const ops::Context& ctx, DType dtype, std::int64_t V);

class Head {
 public:
  struct Kept {
    ConstTensor p;                 // (T, D) the last layer's sum
    Tensor mixed, mix_weights;     // (T, D), (T, sources) real; absent without attention residuals
    ConstTensor in;                // (T, D) what the norm reads
    Tensor in_r, hidden, dhidden;  // (T) real, (T, D), (T, D)
  };
  // embedding: the table's index, used as head weight when tied.
  Head(const ModelConfig& model, ParamTable& table, int embedding);
  // Adds the loss; when the pass trains, dhidden and the head weight's gradient come from the same pass over the logits.
  void forward(Pass& pass, const Bank& bank, ConstTensor p, Kept& kept) const;
  void backward(Pass& pass, Bank& bank, const Kept& kept, Tensor dp) const;  // dp (T, D) real, written
  // Logits (T, V) of what forward kept; for tests and tools, not for training.
  void logits(Pass& pass, const Kept& kept, Tensor logits) const;

 private:
  double eps_;
  std::optional<Mix> mix_;
  int norm_, weight_;
};

}  // namespace moetrain::core
