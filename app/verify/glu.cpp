// glu.cpp -- the gated unit of experts, shared experts and dense layers.
#include "ops/glu.h"

#include <set>

#include "app/verify/verify.h"

namespace moetrain::app {
namespace {

void verify_width(const Verification& v, std::int64_t R, std::int64_t F) {
  OpCase c(v);
  const auto& m = c.model();
  const auto normal = [&] { return c.normal(c.storage(), {R, F}, 2); };
  const auto empty = [&] { return c.empty(c.storage(), {R, F}); };
  const Tensor g = normal(), u = normal(), dy = normal(), y = empty(), dg = empty(), du = empty(), dots = c.empty(c.real(), {R, 1});
  const Places rows = c.sample(R, 64);
  const std::string shape = sizes({{"R", R}, {"F", F}});
  const Tensor g64 = c.wide(g, rows), u64 = c.wide(u, rows), y64 = c.host_zeros(g64.shape), dg64 = c.host_zeros(g64.shape),
               du64 = c.host_zeros(g64.shape), dots64 = c.host_zeros({g64.shape[0], 1});
  const auto forward = [&](ops::Context& ctx, ConstTensor gate, ConstTensor up, Tensor to) {
    ops::glu(ctx, ops::GluForward{.kind = m.hidden_act,
                                  .beta = m.activation_situ_beta,
                                  .linear_beta = m.activation_situ_linear_beta,
                                  .g = gate,
                                  .u = up,
                                  .y = to});
  };
  const auto backward = [&](ops::Context& ctx, ConstTensor slope, ConstTensor gate, ConstTensor up, Tensor dgate, Tensor dup,
                            Tensor again, Tensor dot) {
    ops::glu(ctx, ops::GluBackward{.kind = m.hidden_act,
                                   .beta = m.activation_situ_beta,
                                   .linear_beta = m.activation_situ_linear_beta,
                                   .dy = slope,
                                   .g = gate,
                                   .u = up,
                                   .dg = dgate,
                                   .du = dup,
                                   .y = again,
                                   .dots = dot.reshape({dot.count()})});
  };
  c.run("glu forward", shape, [&](ops::Context& ctx) { forward(ctx, g, u, y); });
  forward(c.host(), g64, u64, y64);
  c.compare("y", y, rows, y64, c.stored());
  c.tell();

  c.run("glu backward", shape, [&](ops::Context& ctx) { backward(ctx, dy, g, u, dg, du, y, dots); });
  backward(c.host(), c.wide(dy, rows), g64, u64, dg64, du64, y64, dots64);
  c.compare("dg", dg, rows, dg64, c.stored());
  c.compare("du", du, rows, du64, c.stored());
  c.compare("y", y, rows, y64, c.stored());
  c.compare("dots", dots, rows, dots64, OpCase::summed());
  c.tell();
}

}  // namespace

void verify_glu(const Verification& v) {
  const auto& m = v.config.model;
  const std::int64_t T = v.config.training.micro_batch_size * v.config.data.sequence_length;
  std::set<std::pair<std::int64_t, std::int64_t>> shapes;
  bool moe = false;
  for (std::int64_t layer = 0; layer < m.num_hidden_layers; ++layer) {
    moe = moe || m.moe_layer(layer);
    if (!m.moe_layer(layer)) shapes.insert({T, m.intermediate_size});
  }
  if (moe) shapes.insert({T * m.num_experts_per_token, m.moe_intermediate_size});
  if (moe && m.num_shared_experts > 0) shapes.insert({T, m.num_shared_experts * m.moe_intermediate_size});
  for (const auto& [R, F] : shapes) verify_width(v, R, F);
}

}  // namespace moetrain::app
