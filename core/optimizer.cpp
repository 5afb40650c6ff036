// optimizer.cpp -- state over shards, the norm in rank order, the update.
#include "core/optimizer.h"

#include <cmath>

#include "ops/adamw.h"
#include "ops/reduce.h"

namespace moetrain::core {
namespace {

Tensor flat(Tensor t) { return t.present() ? t.reshape({t.count()}) : t; }

}  // namespace

Optimizer::Optimizer(Memory& memory, const OptimizerConfig& config, const ParamTable& table, parallel::ShardedParams& params)
    : config_(config), table_(table), params_(params), states_(std::size_t(table.size())) {
  for (int i = 0; i < table.size(); ++i) {
    if (!table[i].trainable) continue;
    const auto& t = params.tensors()[std::size_t(i)];
    const DType real = real_of(t.dtype);
    const Shape shape = t.shape.with_dim0(params.update_rows(i).count());
    State& s = states_[std::size_t(i)];
    if (t.dtype != real) s.master = OwnedTensor(memory, Category::optimizer, real, shape);
    s.exp_avg = OwnedTensor(memory, Category::optimizer, real, shape);
    s.exp_avg_sq = OwnedTensor(memory, Category::optimizer, real, shape);
    for (const Tensor m : {s.exp_avg.view(), s.exp_avg_sq.view()}) fill(memory.device(), m.data, 0, m.bytes());
  }
}

Tensor Optimizer::rows_of(const OwnedTensor& t, int i, parallel::Rows rows) const {
  if (!t.present()) return {};
  const auto held = params_.update_rows(i);
  return t.view().rows(rows.begin - held.begin, rows.end - held.begin);
}

Tensor Optimizer::master(int i, parallel::Rows rows) const {
  const State& s = states_[std::size_t(i)];
  if (!s.exp_avg.present()) return {};
  return s.master.present() ? rows_of(s.master, i, rows) : params_.stored(i, rows);
}

double Optimizer::norm(ops::Context& ctx, parallel::Communicator& everyone) {
  Scope scope(ctx.scratch);
  const Tensor sum = ctx.scratch.zeros(DType::f64, {1});
  std::vector<ConstTensor> gradients;
  for (int i = 0; i < table_.size(); ++i)
    if (table_[i].trainable) gradients.push_back(params_.stored_gradient(i, params_.shard(i)));
  ops::sum_of_squares(ctx, ops::SumOfSquares{.x = gradients, .sum = sum});
  double mine = 0;
  copy_to_host(ctx.device(), &mine, sum.data, sum.bytes());
  std::vector<double> parts(std::size_t(everyone.size()));
  const parallel::Communicator::Gather piece{&mine, parts.data(), sizeof mine};
  everyone.all_gather({&piece, 1});
  double total = 0;
  for (const double part : parts) total += part;  // rank order: the same bits everywhere
  return std::sqrt(total);
}

void Optimizer::update(ops::Context& ctx, double lr, double gradient_scale) {
  ++updates_;
  std::vector<ops::AdamWShard> shards;
  for (int i = 0; i < table_.size(); ++i) {
    if (!table_[i].trainable) continue;
    const auto rows = params_.update_rows(i);
    const Tensor stored = params_.stored(i, rows);
    shards.push_back({.gradient = flat(params_.stored_gradient(i, rows)),
                      .master = flat(master(i, rows)),
                      .exp_avg = flat(exp_avg(i, rows)),
                      .exp_avg_sq = flat(exp_avg_sq(i, rows)),
                      .weight = has_master(i) ? flat(stored) : Tensor{},
                      .weight_decay = table_[i].decay ? config_.weight_decay : 0});
  }
  ops::adamw(ctx, ops::AdamW{.shards = shards,
                             .lr = lr,
                             .beta1 = config_.beta1,
                             .beta2 = config_.beta2,
                             .eps = config_.eps,
                             .gradient_scale = gradient_scale,
                             .step = updates_});
}

}  // namespace moetrain::core
