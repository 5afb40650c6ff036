// attention.h -- the only switch over attention kinds.
#pragma once
#include <variant>

#include "core/attention_kda.h"
#include "core/attention_mla.h"

namespace moetrain::core {

class Attention {
 public:
  using Kept = std::variant<std::monostate, AttentionKda::Kept, AttentionMla::Kept>;
  Attention(const ModelConfig& model, ParamTable& table, int layer, int tensor_ranks);
  // What selection decides, kept also when the rest is recomputed: (T, columns) i32; absent where nothing is selected.
  Tensor take_decisions(Pass& pass) const;
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor decisions, Tensor y) const;  // x, y (T, D), y written
  void backward(Pass& pass, ConstTensor x, const Kept& kept, ConstTensor decisions, ConstTensor dy, Tensor dx) const;

 private:
  std::variant<AttentionKda, AttentionMla> kind_;
};

}  // namespace moetrain::core
