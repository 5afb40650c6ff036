// mlp.h -- the dense gated MLP: the first layers, and the shared experts of a MoE layer.   y = W_down glu(W_gate x, W_up x)
#pragma once
#include <string>

#include "core/params.h"
#include "core/pass.h"

namespace moetrain::core {

class Mlp {
 public:
  struct Kept {
    ConstTensor x;         // (T, D), of the rows here
    Tensor gate, up, act;  // (T, F), of all rows, F of those here
  };
  Mlp(const ModelConfig& model, ParamTable& table, int layer, const std::string& prefix, std::int64_t width);
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor y) const;  // y (T, D) written; absent: only what backward needs
  void backward(Pass& pass, const Kept& kept, ConstTensor dy, Tensor dx) const;  // dx (T, D) written

 private:
  std::int64_t width_here(const Pass& pass) const { return pass.params.weight(gate_).shape[0]; }
  ops::GluKind act_;
  double beta_, linear_beta_;
  int gate_, up_, down_;
};

}  // namespace moetrain::core
