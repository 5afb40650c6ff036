// mlp.cpp -- three products and a gated unit.
#include "core/mlp.h"

#include "core/projection.h"

namespace moetrain::core {

Mlp::Mlp(const ModelConfig& m, ParamTable& table, int layer, const std::string& prefix, std::int64_t width)
    : F_(width), act_(m.hidden_act), beta_(m.activation_situ_beta), linear_beta_(m.activation_situ_linear_beta) {
  const std::int64_t D = m.hidden_size;
  gate_ = table.add({.name = prefix + "gate_proj.weight", .shape = {F_, D}, .layer = layer});
  up_ = table.add({.name = prefix + "up_proj.weight", .shape = {F_, D}, .layer = layer});
  down_ = table.add({.name = prefix + "down_proj.weight", .shape = {D, F_}, .layer = layer});
}

void Mlp::forward(Pass& pass, ConstTensor x, Kept& k, Tensor y, bool add) const {
  k.x = x;
  k.gate = pass.keep({pass.T(), F_});
  k.up = pass.keep({pass.T(), F_});
  k.act = pass.keep({pass.T(), F_});
  project(pass, gate_, x, k.gate);
  project(pass, up_, x, k.up);
  ops::glu(pass.ctx, ops::GluForward{.kind = act_, .beta = beta_, .linear_beta = linear_beta_, .g = k.gate, .u = k.up, .y = k.act});
  project(pass, down_, k.act, y, add);
}

void Mlp::backward(Pass& pass, const Kept& k, ConstTensor dy, Tensor dx) const {
  Scope scope(pass.ctx.scratch);
  const Tensor dgate = pass.scratch({pass.T(), F_}), dup = pass.scratch({pass.T(), F_});
  project_backward(pass, down_, dy, k.act, dgate);
  ops::glu(
      pass.ctx,
      ops::GluBackward{
          .kind = act_, .beta = beta_, .linear_beta = linear_beta_, .dy = dgate, .g = k.gate, .u = k.up, .dg = dgate, .du = dup});
  project_backward(pass, gate_, dgate, k.x, dx);
  project_backward(pass, up_, dup, k.x, dx, true);
}

}  // namespace moetrain::core
