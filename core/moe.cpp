// moe.cpp -- the order of a MoE layer's operators and exchanges, forward and backward.
#include "core/moe.h"

#include <algorithm>
#include <numeric>

#include "core/projection.h"
#include "ops/balance.h"
#include "ops/elementwise.h"
#include "ops/permute.h"
#include "ops/rmsnorm.h"
#include "parallel/expert_capacity.h"

namespace moetrain::core {
Moe::Moe(const ModelConfig& m, ParamTable& table, int layer, int moe_index)
    : moe_index_(moe_index),
      D_(m.hidden_size),
      E_(m.num_experts),
      K_(m.num_experts_per_token),
      F_(m.moe_intermediate_size),
      Z_(m.expert_width()),
      latent_(m.routed_expert_hidden_size.has_value()),
      norm_(latent_ && m.latent_moe_use_norm),
      norm_eps_(m.rms_norm_eps),
      rule_{m.num_expert_group, m.topk_group, m.moe_renormalize, m.routed_scaling_factor},
      act_(m.hidden_act),
      beta_(m.activation_situ_beta),
      linear_beta_(m.activation_situ_linear_beta) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".block_sparse_moe.";
  auto expert = [&](const char* name, std::int64_t out, std::int64_t in) {
    return table.add({.name = prefix + "experts." + name, .shape = {E_, out, in}, .layer = layer, .unit = UnitKind::experts});
  };
  router_ = table.add({.name = prefix + "gate.weight", .shape = {E_, D_}, .layer = layer});
  bias_ = table.add({.name = prefix + "gate.e_score_correction_bias",
                     .shape = {E_},
                     .init = Init::zero,
                     .decay = false,
                     .pinned = true,
                     .layer = layer,
                     .unit = UnitKind::router_bias,
                     .trainable = false});
  if (latent_) {
    down_ = table.add({.name = prefix + "routed_expert_down_proj.weight", .shape = {Z_, D_}, .layer = layer});
    up_ = table.add({.name = prefix + "routed_expert_up_proj.weight", .shape = {D_, Z_}, .layer = layer});
  }
  if (norm_)
    norm_id_ =
        table.add({.name = prefix + "routed_expert_norm.weight", .shape = {Z_}, .init = Init::one, .decay = false, .layer = layer});
  w1_ = expert("w1", F_, Z_);
  w2_ = expert("w2", Z_, F_);
  w3_ = expert("w3", F_, Z_);
  if (m.num_shared_experts > 0) shared_.emplace(m, table, layer, prefix + "shared_experts.", m.num_shared_experts * F_);
}

namespace {

// Decisions are one or two blocks of T rows (core/moe.h): the router's choice is the first, what slots got the last.
template <class AnyTensor>
AnyTensor chosen_of(AnyTensor decisions, std::int64_t T) {
  return decisions.rows(0, T);
}
template <class AnyTensor>
AnyTensor experts_of(AnyTensor decisions, std::int64_t T) {
  return decisions.rows(decisions.shape[0] - T, decisions.shape[0]);
}

}  // namespace

void Moe::route(Pass& pass, ConstTensor x, Kept& k, Tensor decisions) const {
  Scope scope(pass.ctx.scratch);
  const Tensor chosen = chosen_of(decisions, pass.T()), experts = experts_of(decisions, pass.T());
  project_result(pass, router_, x, k.logits, {pass.T(), E_}, pass.real());
  k.weights = pass.keep_real({pass.T(), K_});
  const Tensor cutoff = pass.decided() ? Tensor{} : pass.scratch_real({pass.T()});
  const auto weigh = [&](Tensor of, bool decided) {
    ops::router(pass.ctx, ops::RouterForward{.logits = k.logits,
                                             .bias = pass.params.weight(bias_),
                                             .rule = rule_,
                                             .decided = decided,
                                             .experts = of,
                                             .weights = k.weights,
                                             .cutoff = decided ? Tensor{} : cutoff});
  };
  if (pass.decided()) {
    weigh(experts, true);
  } else {
    weigh(chosen, false);
    if (pass.limits_experts()) {
      limit(pass, k, chosen, experts);
      weigh(experts, true);
    }
  }
  if (pass.sums()) count(pass, k, chosen, cutoff);
}

void Moe::limit(Pass& pass, const Kept& k, ConstTensor chosen, Tensor experts) const {
  const MoeConfig& moe = pass.config.moe;
  const auto limited = parallel::limit_experts(pass.ctx, pass.everyone_on_host,
                                               {.logits = k.logits,
                                                .bias = pass.params.weight(bias_),
                                                .rule = rule_,
                                                .factor = moe.capacity_factor,
                                                .reroute = moe.overflow == Overflow::reroute,
                                                .chosen = chosen,
                                                .experts = experts,
                                                .data = &pass.everyone});
  pass.rows.rerouted += limited.rerouted;
  pass.rows.dropped += limited.dropped;
}

void Moe::count(Pass& pass, const Kept& k, ConstTensor chosen, ConstTensor cutoff) const {
  const auto& sums = pass.balance;
  const Tensor counts = sums.counts.rows(moe_index_, moe_index_ + 1).reshape({E_});
  ops::expert_count(pass.ctx, ops::ExpertCount{.experts = chosen, .counts = counts});
  if (sums.histogram.present() && cutoff.present())
    ops::quantile_histogram(
        pass.ctx, ops::QuantileHistogram{
                      .logits = k.logits,
                      .cutoff = cutoff,
                      .bias = pass.params.weight(bias_),
                      .histogram = sums.histogram.rows(moe_index_, moe_index_ + 1).reshape({E_, sums.histogram.shape[2]})});
  if (sums.shared.present()) {
    const Tensor shared = sums.shared.rows(moe_index_, moe_index_ + 1);
    fill(pass.ctx.device(), shared.data, 0, shared.bytes());
    const auto groups = balanced_groups(pass);
    for (std::size_t g = 1; g < groups.size(); ++g)
      ops::expert_count(pass.ctx, ops::ExpertCount{.experts = chosen.rows(groups[g - 1], groups[g]),
                                                   .counts = shared_counts(pass).rows(std::int64_t(g) - 1, std::int64_t(g)).reshape({E_})});
    pass.balanced.all_reduce(shared, parallel::Reduction::sum);
  }
  balance_losses(pass, k, chosen, pass.losses.balance, {});
}

// Offsets of the groups of tokens here whose load the auxiliary loss takes.
std::vector<std::int64_t> Moe::balanced_groups(const Pass& pass) const {
  if (pass.config.moe.auxiliary_scope == AuxiliaryScope::sequence)
    return {pass.batch->sequences.begin(), pass.batch->sequences.end()};
  return {0, pass.T()};
}

// (groups, E), of all ranks that share the groups; absent where none is shared.
Tensor Moe::shared_counts(const Pass& pass) const {
  const Tensor all = pass.balance.shared;
  if (!all.present()) return {};
  const auto groups = std::int64_t(balanced_groups(pass).size()) - 1;
  return all.rows(moe_index_, moe_index_ + 1).reshape({all.shape[1], E_}).rows(0, groups);
}

// Adds the scaled auxiliary and z losses to `loss`, and their gradients to dlogits when it is given.
void Moe::balance_losses(Pass& pass, const Kept& k, ConstTensor chosen, Tensor loss, Tensor dlogits) const {
  const MoeConfig& moe = pass.config.moe;
  if (moe.balance == Balance::auxiliary) {
    const bool by_sequence = moe.auxiliary_scope == AuxiliaryScope::sequence;
    const auto groups = balanced_groups(pass);
    const Tensor shared = shared_counts(pass);
    const ConstTensor counts = shared.present() && !by_sequence ? shared.reshape({E_}) : shared;
    ops::auxiliary_loss(
        pass.ctx, ops::AuxiliaryLoss{.logits = k.logits,
                                     .experts = chosen,
                                     .groups = groups,
                                     .counts = counts,
                                     .scale = moe.auxiliary_coefficient *
                                              (by_sequence ? pass.scales.per_sequence : pass.scales.per_token * double(pass.T())),
                                     .loss = loss,
                                     .dlogits = dlogits,
                                     .tokens = by_sequence ? std::span<const std::int64_t>(pass.batch->lengths)
                                                           : std::span<const std::int64_t>{}});
  }
  if (moe.z_loss != 0)
    ops::z_loss(pass.ctx,
                ops::ZLoss{.logits = k.logits, .scale = moe.z_loss * pass.scales.per_token, .loss = loss, .dlogits = dlogits});
}

// Where every expert is here and rows are counted on a device, the host never learns the counts, unless slots may be dropped. Else
// they start for the host here, and are waited for by plan_exchange.
void Moe::sort(Pass& pass, Kept& k, ConstTensor experts, Tensor counts) const {
  auto& ctx = pass.ctx;
  k.slot_row = pass.kept.take(DType::i64, {pass.T(), K_});
  const bool stay = ctx.device() == Device::cuda && pass.exchange->ranks() == 1;
  const Tensor offsets = stay ? pass.kept.take(DType::i64, {E_ + 1}) : Tensor{};
  ops::sort_slots(ctx, ops::SortSlots{.experts = experts, .slot_row = k.slot_row, .counts = counts, .offsets = offsets});
  if (stay) k.plan = parallel::ExpertExchange::stay(offsets, pass.T() * K_);
  if (!ctx.dry() && (!stay || pass.limits_experts())) pass.exchange->fetch(ctx, counts);
}

void Moe::plan_exchange(Pass& pass, Kept& k) const {
  const bool stay = !k.plan.parts.empty();
  if (stay && !pass.limits_experts()) return;
  if (!pass.ctx.dry()) {
    const auto counts = pass.exchange->fetched(pass.everyone);
    const std::int64_t rows = std::accumulate(counts.begin(), counts.end(), std::int64_t(0));  // fewer where slots were dropped
    k.plan = stay ? parallel::ExpertExchange::stay(k.plan.parts[0].device_offsets, rows)
                  : pass.exchange->plan(pass.ctx, pass.kept, counts);
    return;
  }
  const std::int64_t slots = pass.T() * K_;
  std::vector<std::int64_t> balanced(std::size_t(E_), slots / E_);
  for (std::int64_t e = 0; e < slots % E_; ++e) ++balanced[std::size_t(e)];
  std::int64_t most = 0;  // with a limit a plan is for the fullest rank there can be
  if (pass.limits_experts()) {
    const std::int64_t n = pass.exchange->ranks(), local = E_ / n;
    const auto places = parallel::expert_places(pass.config.moe.capacity_factor, slots * pass.everyone.size(), E_);
    most = std::min(places * local, n * pass.T() * std::min(K_, local));
  }
  k.plan = pass.exchange->plan(pass.ctx, pass.kept, balanced, most);
}

// `spread(rows)` makes the slots' rows, `meanwhile` runs while the first travel. A part leaves while the one before the last that
// left is worked on: two are on their way at most, and the host is not held up before the first products. What backward finds
// (core/result_cache.h) neither travels nor is computed: rows that came, the products of w1 and w3, and the sum of what came back.
// Backward needs neither what w2 made nor its input, which is had again on the way (ops/glu.h): where nobody asks for the sum, both
// are left out.
template <class Spread, class Meanwhile>
void Moe::run_experts(Pass& pass, const Spread& spread, Kept& k, Tensor y, const Meanwhile& meanwhile) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const bool alone = pass.exchange->ranks() == 1;  // rows are then in their place already
  const std::int64_t slots = pass.T() * K_;
  const DType dtype = pass.dtype;
  Tensor rows;
  if (!alone && !(pass.results && pass.results->next_is_here())) {
    rows = pass.scratch({slots, Z_});
    spread(rows);
  }
  plan_exchange(pass, k);
  const std::int64_t R = k.plan.received;
  if (pass.sums()) pass.rows.received[std::size_t(moe_index_)] += R;
  auto came = pass.result(ResultOp::exchange, {{&k.received, dtype, {alone ? slots : R, Z_}}});
  if (alone) came.compute([&] { spread(k.received); });
  k.received = k.received.rows(0, R);
  auto products = pass.result(ResultOp::grouped_linear, {{&k.gate, dtype, {R, F_}}, {&k.up, dtype, {R, F_}}});
  std::optional<ResultCache::Result> sum;
  if (latent_) {
    const ResultCache::Output combined{&k.combined, dtype, {pass.T(), Z_}};
    sum.emplace(pass.results, pass.kept, ResultOp::exchange, std::span(&combined, 1));
    y = k.combined;
  }
  const auto towards_sum = [&](auto&& part) {
    if (sum)
      sum->compute(part);
    else if (y.present())
      part();
  };
  const Tensor travelling = alone ? Tensor{} : pass.scratch({R, Z_});
  Tensor act, out, returned;
  if (sum ? sum->missing() : y.present()) {
    act = pass.scratch({R, F_});
    returned = pass.scratch({slots, Z_});
    out = alone ? returned : pass.scratch({R, Z_});
  }
  const auto send = [&](std::size_t c) {
    if (!alone && came.missing() && c < k.plan.parts.size())
      pass.exchange->begin_out(k.plan, k.plan.parts[c], rows.rows(0, k.plan.sent), travelling);
  };
  send(0);
  meanwhile();
  send(1);
  for (std::size_t c = 0; c < k.plan.parts.size(); ++c) {
    const auto& part = k.plan.parts[c];
    const Tensor received = part.of(k.received), gate = part.of(k.gate), up = part.of(k.up);
    if (!alone) came.compute([&] { pass.exchange->finish_out(ctx, part, travelling, received); });
    products.compute([&] { project_grouped(pass, TwoWeights{w1_, w3_}, part, received, gate, up); });
    towards_sum([&] {
      ops::glu(ctx,
               ops::GluForward{.kind = act_, .beta = beta_, .linear_beta = linear_beta_, .g = gate, .u = up, .y = part.of(act)});
      project_grouped(pass, w2_, part, part.of(act), part.of(out));
    });
    send(c + 2);
    if (!alone) towards_sum([&] { pass.exchange->begin_back(ctx, part, part.of(out), travelling, returned.rows(0, k.plan.sent)); });
  }
  towards_sum([&] {
    if (!alone) pass.exchange->finish_back();
    ops::collect_rows(
        ctx, ops::CollectRows{
                 .rows = returned, .slot_row = k.slot_row, .weights = k.weights, .y = y, .add = !latent_ && shared_.has_value()});
  });
}

void Moe::forward(Pass& pass, ConstTensor x, Kept& k, Tensor decisions, Tensor y) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  k = {};
  k.x = x;
  route(pass, x, k, decisions);
  const Tensor counts = ctx.scratch.take(DType::i64, {E_});  // held until they have arrived
  sort(pass, k, experts_of(decisions, pass.T()), counts);
  const auto spread = [&](Tensor rows) {
    Scope narrow(ctx.scratch);
    ConstTensor z = x;
    if (latent_) {
      const Tensor down = pass.scratch({pass.T(), Z_});
      project(pass, down_, x, down);
      z = down;
    }
    ops::spread_rows(ctx, ops::SpreadRows{.x = z, .slot_row = k.slot_row, .rows = rows});
  };
  run_experts(pass, spread, k, y, [&] {
    if (shared_) shared_->forward(pass, x, k.shared, y);
  });
  if (!latent_) return;
  ConstTensor latent = k.combined;
  if (norm_) {
    k.combined_r = pass.keep_real({pass.T()});
    k.normed = pass.keep({pass.T(), Z_});
    ops::rmsnorm(ctx, ops::RmsNormForward{
                          .x = k.combined, .w = pass.params.weight(norm_id_), .y = k.normed, .r = k.combined_r, .eps = norm_eps_});
    latent = k.normed;
  }
  if (y.present()) project(pass, up_, latent, y, shared_.has_value());
}

// A part's rows leave for home before the gradients of its weights are summed, and travel while they are.
template <class Meanwhile>
void Moe::run_experts_backward(Pass& pass, const Kept& k, ConstTensor dcombined, Tensor dz, Tensor dweights,
                               const Meanwhile& meanwhile) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const bool alone = pass.exchange->ranks() == 1;
  const std::int64_t slots = pass.T() * K_, R = k.plan.received;
  const Tensor dslots = pass.scratch({slots, Z_}), dreceived = alone ? dslots : pass.scratch({R, Z_});
  const Tensor travelling = alone ? Tensor{} : pass.scratch({R, Z_});
  const Tensor slot_dots = pass.scratch_real({slots, 1}), dots = alone ? slot_dots : pass.scratch_real({R, 1}),
               travelling_dots = alone ? Tensor{} : pass.scratch_real({R, 1});
  ops::collect_rows(ctx, ops::CollectRowsBackward{.dy = dcombined, .slot_row = k.slot_row, .weights = k.weights, .drows = dslots});
  const auto send = [&](std::size_t c) {
    if (!alone && c < k.plan.parts.size())
      pass.exchange->begin_out(k.plan, k.plan.parts[c], dslots.rows(0, k.plan.sent), travelling);
  };
  send(0);
  meanwhile();
  send(1);
  const Tensor dgates = pass.scratch({R, F_}), dups = pass.scratch({R, F_}), acts = pass.scratch({R, F_});
  const auto dw1 = grouped_gradient(pass, w1_), dw2 = grouped_gradient(pass, w2_), dw3 = grouped_gradient(pass, w3_);
  for (std::size_t c = 0; c < k.plan.parts.size(); ++c) {
    const auto& part = k.plan.parts[c];
    const Tensor d = part.of(dreceived), dgate = part.of(dgates), dup = part.of(dups), act = part.of(acts), dot = part.of(dots);
    const Tensor received = part.of(k.received);
    if (!alone) pass.exchange->finish_out(ctx, part, travelling, d);
    project_grouped_backward(pass, w2_, part, d, dgate);
    ops::glu(ctx, ops::GluBackward{.kind = act_,
                                   .beta = beta_,
                                   .linear_beta = linear_beta_,
                                   .dy = dgate,
                                   .g = part.of(k.gate),
                                   .u = part.of(k.up),
                                   .dg = dgate,
                                   .du = dup,
                                   .y = act,
                                   .dots = dot.reshape({dot.count()})});
    project_grouped_gradient(pass, w2_, dw2, part, d, act);
    project_grouped_backward(pass, TwoWeights{w1_, w3_}, part, dgate, dup, d);
    send(c + 2);
    if (!alone) {
      pass.exchange->begin_back(ctx, part, d, travelling, dslots.rows(0, k.plan.sent));
      pass.exchange->begin_back(ctx, part, dot, travelling_dots, slot_dots.rows(0, k.plan.sent));
    }
    project_grouped_gradient(pass, TwoWeights{w1_, w3_}, TwoGradients{dw1, dw3}, part, dgate, dup, received);
  }
  if (!alone) pass.exchange->finish_back();
  ops::collect_rows(ctx, ops::CollectRows{.rows = dslots, .slot_row = k.slot_row, .weights = {}, .y = dz});
  ops::weight_gradients(
      ctx,
      ops::WeightGradients{.dots = slot_dots.reshape({slots}), .slot_row = k.slot_row, .weights = k.weights, .dweights = dweights});
}

void Moe::backward(Pass& pass, const Kept& k, ConstTensor decisions, ConstTensor dy, Tensor dx) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  ConstTensor dcombined = dy;
  if (latent_) {
    const Tensor dlatent = pass.scratch({pass.T(), Z_});
    project_backward(pass, up_, dy, norm_ ? k.normed : k.combined, dlatent);
    if (norm_)
      ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = dlatent,
                                             .x = k.combined,
                                             .w = pass.params.weight(norm_id_),
                                             .r = k.combined_r,
                                             .dx = dlatent,
                                             .dw = pass.params.gradient(norm_id_)});
    dcombined = dlatent;
  }
  const Tensor dweights = pass.scratch_real({pass.T(), K_}), dz = pass.scratch({pass.T(), Z_});
  run_experts_backward(pass, k, dcombined, dz, dweights, [&] {
    if (shared_)
      shared_->backward(pass, k.shared, dy, dx);
    else
      fill(ctx.device(), dx.data, 0, dx.bytes());
  });
  if (latent_)
    project_backward(pass, down_, dz, k.x, dx, true);
  else
    ops::add(ctx, ops::Add{.x = dz, .y = dx});

  const Tensor dlogits = pass.scratch_real({pass.T(), E_}), counted = ctx.scratch.zeros(pass.real(), {1});
  ops::router(
      ctx,
      ops::RouterBackward{
          .dweights = dweights, .logits = k.logits, .experts = experts_of(decisions, pass.T()), .rule = rule_, .dlogits = dlogits});
  balance_losses(pass, k, chosen_of(decisions, pass.T()), counted, dlogits);
  project_backward(pass, router_, dlogits, k.x, dx, true);
}

}  // namespace moetrain::core
