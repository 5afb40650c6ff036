// router.cpp -- the choice of experts, and the weights of the chosen.
#include "ops/router.h"

#include <cmath>

#include "app/verify/verify.h"

namespace moetrain::app {

// Scores that rounding cannot tell apart may change places, so what is compared are the scores of the chosen, one after another.
void verify_router(const Verification& v) {
  OpCase c(v);
  const auto& m = c.model();
  const std::int64_t T = c.T(), E = m.num_experts, K = m.num_experts_per_token;
  const ops::RouterRule rule{m.num_expert_group, m.topk_group, m.moe_renormalize, m.routed_scaling_factor};
  const Tensor logits = c.normal(c.real(), {T, E}), bias = c.normal(c.real(), {E}, 0.05), experts = c.empty(DType::i32, {T, K}),
               weights = c.empty(c.real(), {T, K}), cutoff = c.empty(c.real(), {T}), dweights = c.normal(c.real(), {T, K}),
               dlogits = c.empty(c.real(), {T, E});
  const Places rows = c.sample(T, 256);
  const auto n = std::int64_t(rows.size());
  const std::string shape = sizes({{"T", T}, {"E", E}, {"K", K}});
  const Tensor logits64 = c.wide(logits, rows), bias64 = c.wide(bias), weights64 = c.host_zeros({n, K}),
               cutoff64 = c.host_zeros({n}), chosen = c.host_tensors().take(DType::i32, {n, K}), got = c.host_zeros({n, K}),
               want = c.host_zeros({n, K});
  const auto score = [&](std::int64_t r, std::int64_t e) {
    return 1 / (1 + std::exp(-logits64.as<double>()[r * E + e])) + bias64.as<double>()[e];
  };

  c.run("router forward", shape, [&](ops::Context& ctx) {
    ops::router(ctx, ops::RouterForward{
                         .logits = logits, .bias = bias, .rule = rule, .experts = experts, .weights = weights, .cutoff = cutoff});
  });
  ops::router(c.host(),
              ops::RouterForward{
                  .logits = logits64, .bias = bias64, .rule = rule, .experts = chosen, .weights = weights64, .cutoff = cutoff64});
  const Tensor given = c.fetch(experts, rows);
  bool all_experts = true;
  for (std::int64_t r = 0; r < n; ++r)
    for (std::int64_t k = 0; k < K; ++k) {
      const std::int32_t* row = given.as<std::int32_t>() + r * K;
      const bool expert = row[k] >= 0 && row[k] < E && std::find(row, row + k, row[k]) == row + k;
      all_experts = all_experts && expert;
      got.as<double>()[r * K + k] = expert ? score(r, row[k]) : std::nan("");
      want.as<double>()[r * K + k] = score(r, chosen.as<std::int32_t>()[r * K + k]);
    }
  c.judge("chosen scores", got, want, {1e-5, 1e-6});
  if (all_experts) {
    ops::router(
        c.host(),
        ops::RouterForward{
            .logits = logits64, .bias = {}, .rule = rule, .decided = true, .experts = given, .weights = weights64, .cutoff = {}});
    c.compare("weights", weights, rows, weights64, {1e-4, 1e-5});
  }
  c.compare("cutoff", cutoff, rows, cutoff64, {1e-5, 1e-6});
  c.tell();
  if (!all_experts) return;

  c.run("router backward", shape, [&](ops::Context& ctx) {
    ops::router(ctx,
                ops::RouterBackward{.dweights = dweights, .logits = logits, .experts = experts, .rule = rule, .dlogits = dlogits});
  });
  const Tensor dlogits64 = c.host_zeros({n, E});
  ops::router(c.host(),
              ops::RouterBackward{
                  .dweights = c.wide(dweights, rows), .logits = logits64, .experts = given, .rule = rule, .dlogits = dlogits64});
  c.compare("dlogits", dlogits, rows, dlogits64, {1e-3, 1e-4});
  c.tell();
}

}  // namespace moetrain::app
