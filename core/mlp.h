// mlp.h -- the dense gated MLP: the first layers, and the shared experts of a MoE layer.   y = W_down glu(W_gate x, W_up x)
#pragma once
#include <string>

#include "core/params.h"
#include "core/pass.h"

namespace moetrain::core {

class Mlp {
 public:
  struct Kept {
    ConstTensor x;         // (T, D)
    Tensor gate, up, act;  // (T, F)
  };
  Mlp(const ModelConfig& model, ParamTable& table, int layer, const std::string& prefix, std::int64_t width);
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor y, bool add = false) const;  // y (T, D)
  void backward(Pass& pass, const Kept& kept, ConstTensor dy, Tensor dx) const;           // dx (T, D) written

 private:
  std::int64_t F_;
  ops::GluKind act_;
  double beta_, linear_beta_;
  int gate_, up_, down_;
};

}  // namespace moetrain::core
