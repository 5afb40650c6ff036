// mlp.cpp -- three products and a gated unit.
#include "core/mlp.h"

#include "core/projection.h"

namespace moetrain::core {

Mlp::Mlp(const ModelConfig& m, ParamTable& table, int layer, const std::string& prefix, std::int64_t width)
    : act_(m.hidden_act), beta_(m.activation_situ_beta), linear_beta_(m.activation_situ_linear_beta) {
  const std::int64_t D = m.hidden_size;
  gate_ = table.add({.name = prefix + "gate_proj.weight", .shape = {width, D}, .layer = layer, .cut = Cut::rows});
  up_ = table.add({.name = prefix + "up_proj.weight", .shape = {width, D}, .layer = layer, .cut = Cut::rows});
  down_ = table.add({.name = prefix + "down_proj.weight", .shape = {D, width}, .layer = layer, .cut = Cut::columns});
}

void Mlp::forward(Pass& pass, ConstTensor x_here, Kept& k, Tensor y_here) const {
  k = {.x = x_here};
  on_all_rows(pass, x_here, y_here, [&](Pass& all, ConstTensor x, Tensor y) {
    const Shape wide{all.T(), width_here(pass)};
    project_result(all, gate_, x, k.gate, wide);
    project_result(all, up_, x, k.up, wide);
    k.act = all.keep(wide);
    ops::glu(all.ctx,
             ops::GluForward{.kind = act_, .beta = beta_, .linear_beta = linear_beta_, .g = k.gate, .u = k.up, .y = k.act});
    if (y.present()) project(all, down_, k.act, y);
  });
}

void Mlp::backward(Pass& pass, const Kept& k, ConstTensor dy_here, Tensor dx_here) const {
  on_all_rows(pass, dy_here, dx_here, [&](Pass& all, ConstTensor dy, Tensor dx) {
    Scope scope(all.ctx.scratch);
    const ConstTensor x = all.all_rows(k.x);
    const Tensor dgate = all.scratch(k.gate.shape), dup = all.scratch(k.up.shape);
    project_backward(all, down_, dy, k.act, dgate);
    ops::glu(
        all.ctx,
        ops::GluBackward{
            .kind = act_, .beta = beta_, .linear_beta = linear_beta_, .dy = dgate, .g = k.gate, .u = k.up, .dg = dgate, .du = dup});
    project_backward(all, gate_, dgate, x, dx);
    project_backward(all, up_, dup, x, dx, true);
  });
}

}  // namespace moetrain::core
