// optimizer.cpp -- the update of a large and a small shard, and the sum that decides about clipping.
#include "app/verify/verify.h"
#include "ops/adamw.h"
#include "ops/reduce.h"

namespace moetrain::app {
namespace {

struct Shard {
  Tensor gradient, master, exp_avg, exp_avg_sq, weight;
};

ops::AdamW update_of(const core::OptimizerConfig& o, std::span<const ops::AdamWShard> shards) {
  return {.shards = shards,
          .lr = o.lr,
          .beta1 = o.beta1,
          .beta2 = o.beta2,
          .eps = o.eps,
          .gradient_scale = 0.7,
          .scale = {},
          .step = 3};
}

}  // namespace

void verify_optimizer(const Verification& v) {
  OpCase c(v);
  const auto& o = c.config().optimizer;
  const std::int64_t D = c.model().hidden_size;
  const bool has_master = c.storage() != c.real();
  std::vector<Shard> shards, starts;
  for (const std::int64_t rows : {D, std::int64_t(1)}) {
    const Shape shape{rows, D};
    const auto real = c.real();
    starts.push_back({c.normal(real, shape, 1e-3),
                      c.normal(real, shape, 0.02),
                      c.normal(real, shape, 1e-4),
                      c.normal(real, shape, 1e-7, 1e-6),
                      {}});
    shards.push_back({starts.back().gradient, c.empty(real, shape), c.empty(real, shape), c.empty(real, shape),
                      has_master ? c.empty(c.storage(), shape) : Tensor{}});
  }
  const auto as_argument = [&](const Shard& s, double decay) {
    return ops::AdamWShard{.gradient = s.gradient,
                           .master = s.master,
                           .exp_avg = s.exp_avg,
                           .exp_avg_sq = s.exp_avg_sq,
                           .weight = s.weight,
                           .weight_decay = decay};
  };
  const std::vector<ops::AdamWShard> arguments{as_argument(shards[0], o.weight_decay), as_argument(shards[1], 0)};
  const auto restore = [&] {
    Scope scope(c.host_tensors());
    for (std::size_t i = 0; i < shards.size(); ++i)
      for (Tensor Shard::*t : {&Shard::master, &Shard::exp_avg, &Shard::exp_avg_sq})
        copy_to_device(v.device, (shards[i].*t).data, c.fetch(starts[i].*t).data, (shards[i].*t).bytes());
  };
  c.run("adamw", sizes({{"n", D * D + D}}), restore, [&](ops::Context& ctx) { ops::adamw(ctx, update_of(o, arguments)); });
  for (std::size_t i = 0; i < shards.size(); ++i) {
    const Places rows = c.sample(shards[i].master.shape[0], 64);
    const Shard s{c.wide(starts[i].gradient, rows),
                  c.wide(starts[i].master, rows),
                  c.wide(starts[i].exp_avg, rows),
                  c.wide(starts[i].exp_avg_sq, rows),
                  {}};
    const std::vector<ops::AdamWShard> one{as_argument(s, arguments[i].weight_decay)};
    ops::adamw(c.host(), update_of(o, one));
    c.compare("exp_avg", shards[i].exp_avg, rows, s.exp_avg, {1e-5, 1e-6});
    c.compare("exp_avg_sq", shards[i].exp_avg_sq, rows, s.exp_avg_sq, {1e-5, 1e-6});
    c.compare("master", shards[i].master, rows, s.master, {1e-6, 3e-7});
    if (has_master) c.compare("weight", shards[i].weight, rows, s.master, c.stored());
  }
  c.tell();

  const std::vector<ConstTensor> gradients{shards[0].gradient, shards[1].gradient};
  const Tensor sum = c.zeros(DType::f64, {1}), sum64 = c.host_zeros({1});
  c.run(
      "sum_of_squares", sizes({{"n", D * D + D}}), [&] { c.clear({sum}); },
      [&](ops::Context& ctx) { ops::sum_of_squares(ctx, ops::SumOfSquares{.x = gradients, .sum = sum}); });
  const std::vector<ConstTensor> gradients64{c.wide(gradients[0]), c.wide(gradients[1])};
  ops::sum_of_squares(c.host(), ops::SumOfSquares{.x = gradients64, .sum = sum64});
  c.compare("sum", sum, sum64, {1e-6, 1e-6});
  c.tell();
}

}  // namespace moetrain::app
