// block.cpp -- the residual wiring, forward and backward.
#include "core/block.h"

#include "ops/attn_res.h"
#include "ops/elementwise.h"
#include "ops/rmsnorm.h"

namespace moetrain::core {
namespace {

std::string layer_prefix(int layer) { return "model.layers." + std::to_string(layer) + "."; }

int norm_param(const ModelConfig& m, ParamTable& table, int layer, const std::string& name) {
  return table.add({.name = layer_prefix(layer) + name + ".weight",
                    .shape = {m.hidden_size},
                    .init = Init::one,
                    .decay = false,
                    .layer = layer});
}

std::variant<Mlp, Moe> make_feed_forward(const ModelConfig& m, ParamTable& table, int layer, int moe_index) {
  if (m.moe_layer(layer)) return Moe(m, table, layer, moe_index);
  return Mlp(m, table, layer, layer_prefix(layer) + "mlp.", m.intermediate_size);
}

}  // namespace

Mix::Mix(const ModelConfig& m, ParamTable& table, int layer, UnitKind unit, const std::string& prefix)
    : eps_(m.rms_norm_eps),
      gamma_(table.add({.name = prefix + "_norm.weight",
                        .shape = {m.hidden_size},
                        .init = Init::one,
                        .decay = false,
                        .layer = layer,
                        .unit = unit})),
      query_(table.add({.name = prefix + "_proj.weight",
                        .shape = {1, m.hidden_size},
                        .init = Init::zero,
                        .decay = false,
                        .layer = layer,
                        .unit = unit})) {}

void Mix::forward(Pass& pass, std::span<const ConstTensor> sources, Tensor y, Tensor weights,
                  const std::optional<ops::RmsNormForward>& norm) const {
  ops::attn_res(pass.ctx, ops::AttnResForward{.sources = sources,
                                              .gamma = pass.params.weight(gamma_),
                                              .query = pass.params.weight(query_),
                                              .eps = eps_,
                                              .y = y,
                                              .weights = weights,
                                              .norm = norm});
}

void Mix::backward(Pass& pass, ConstTensor dy, std::span<const ConstTensor> sources, ConstTensor weights,
                   std::span<const Tensor> dsources) const {
  ops::attn_res(pass.ctx, ops::AttnResBackward{.dy = dy,
                                               .sources = sources,
                                               .gamma = pass.params.weight(gamma_),
                                               .query = pass.params.weight(query_),
                                               .eps = eps_,
                                               .weights = weights,
                                               .dsources = dsources,
                                               .dgamma = pass.params.gradient(gamma_),
                                               .dquery = pass.params.gradient(query_)});
}

Block::Block(const ModelConfig& m, ParamTable& table, int layer, int moe_index, int tensor_ranks)
    : eps_(m.rms_norm_eps),
      residual_bank_(m.attn_res_block_size.has_value()),
      starts_block_(residual_bank_ && layer % *m.attn_res_block_size == 0),
      bank_before_(residual_bank_ ? (layer + *m.attn_res_block_size - 1) / *m.attn_res_block_size : 0),
      attn_sub_{residual_bank_
                    ? std::optional<Mix>(Mix(m, table, layer, UnitKind::trunk, layer_prefix(layer) + "self_attention_res"))
                    : std::nullopt,
                norm_param(m, table, layer, "input_layernorm")},
      ffn_sub_{residual_bank_ ? std::optional<Mix>(Mix(m, table, layer, UnitKind::trunk, layer_prefix(layer) + "mlp_res"))
                              : std::nullopt,
               norm_param(m, table, layer, "post_attention_layernorm")},
      attention_(m, table, layer, tensor_ranks),
      feed_forward_(make_feed_forward(m, table, layer, moe_index)) {}

Block::Decisions Block::take_decisions(Pass& pass) const {
  return {attention_.take_decisions(pass), moe() ? moe()->take_decisions(pass) : Tensor{}};
}

// in = mix(bank + [p]) (p itself without a bank), normed = RMSNorm(in).
void Block::enter(Pass& pass, const Sub& sub, std::span<const ConstTensor> bank, ConstTensor p, SubKept& k) const {
  std::vector<ConstTensor> sources;
  k.in = p;
  if (sub.mix && !bank.empty()) {
    sources.assign(bank.begin(), bank.end());
    sources.push_back(p);
    k.mixed = pass.keep(p.shape);
    k.mix_weights = pass.keep_real({p.shape[0], std::int64_t(sources.size())});
    k.in = k.mixed;
  }
  k.normed = pass.keep(p.shape);
  k.in_r = pass.keep_real({p.shape[0]});
  const ops::RmsNormForward norm{.x = k.in, .w = pass.params.weight(sub.norm), .y = k.normed, .r = k.in_r, .eps = eps_};
  sources.empty() ? ops::rmsnorm(pass.ctx, norm) : sub.mix->forward(pass, sources, k.mixed, k.mix_weights, norm);
}

// The adjoint of enter: dnormed is overwritten, its share of p is added to dp and that of the bank to dbank.
void Block::leave(Pass& pass, const Sub& sub, std::span<const ConstTensor> bank, std::span<const Tensor> dbank, ConstTensor p,
                  const SubKept& k, Tensor dnormed, Tensor dp) const {
  ops::rmsnorm(pass.ctx, ops::RmsNormBackward{.dy = dnormed,
                                              .x = k.in,
                                              .w = pass.params.weight(sub.norm),
                                              .r = k.in_r,
                                              .dx = dnormed,
                                              .dw = pass.params.gradient(sub.norm)});
  if (!k.mixed.present()) return ops::add(pass.ctx, ops::Add{.x = dnormed, .y = dp});
  std::vector<ConstTensor> sources(bank.begin(), bank.end());
  std::vector<Tensor> dsources(dbank.begin(), dbank.end());
  sources.push_back(p);
  dsources.push_back(dp);
  sub.mix->backward(pass, dnormed, sources, k.mix_weights, dsources);
}

void Block::forward(Pass& pass, Bank& bank, ConstTensor p_in, Kept& k, const Decisions& decisions, Tensor p_out) const {
  Scope scope(pass.ctx.scratch);
  const Tensor y = pass.scratch(p_in.shape);
  const auto before = std::span(bank.rows).first(std::size_t(bank_before_));
  k.p_in = p_in;
  enter(pass, attn_sub_, before, p_in, k.attn);
  attention_.forward(pass, k.attn.normed, k.attention, decisions.attention, y);
  k.p_mid = pass.keep(p_in.shape);
  if (starts_block_)
    ops::copy(pass.ctx, ops::Copy{.x = y, .y = k.p_mid});
  else
    ops::sum(pass.ctx, ops::Sum{.a = p_in, .b = y, .y = k.p_mid});

  // A recomputed layer finds the bank as it left it and does not append twice.
  if (starts_block_ && std::int64_t(bank.rows.size()) == bank_before_) bank.rows.push_back(p_in);
  const auto after = std::span(bank.rows).first(std::size_t(bank_before_ + starts_block_));
  enter(pass, ffn_sub_, after, k.p_mid, k.ffn);
  const Tensor last = pass.mode == PassMode::recompute ? Tensor{} : y;  // p_out is known by then
  if (const Moe* m = moe())
    m->forward(pass, k.ffn.normed, k.feed_forward.emplace<Moe::Kept>(), decisions.experts, last);
  else
    std::get<Mlp>(feed_forward_).forward(pass, k.ffn.normed, k.feed_forward.emplace<Mlp::Kept>(), last);
  if (last.present()) ops::sum(pass.ctx, ops::Sum{.a = k.p_mid, .b = last, .y = p_out});
}

void Block::backward(Pass& pass, Bank& bank, const Kept& k, const Decisions& decisions, Tensor dp) const {
  Scope scope(pass.ctx.scratch);
  const Tensor dy = pass.scratch(dp.shape), dx = pass.scratch(dp.shape);
  const auto rows = std::span<const ConstTensor>(bank.rows);
  const auto drows = std::span<const Tensor>(bank.gradients);
  const auto before = std::size_t(bank_before_), after = std::size_t(bank_before_ + starts_block_);

  ops::copy(pass.ctx, ops::Copy{.x = dp, .y = dy});
  if (const Moe* m = moe())
    m->backward(pass, std::get<Moe::Kept>(k.feed_forward), decisions.experts, dy, dx);
  else
    std::get<Mlp>(feed_forward_).backward(pass, std::get<Mlp::Kept>(k.feed_forward), dy, dx);
  leave(pass, ffn_sub_, residual_bank_ ? rows.first(after) : rows, residual_bank_ ? drows.first(after) : drows, k.p_mid, k.ffn, dx,
        dp);

  ops::copy(pass.ctx, ops::Copy{.x = dp, .y = dy});
  attention_.backward(pass, k.attn.normed, k.attention, decisions.attention, dy, dx);
  // Where a block starts, p_mid holds no p_in; p_in went into the bank, whose gradient is complete: every later mix has run.
  if (starts_block_) ops::copy(pass.ctx, ops::Copy{.x = drows[before], .y = dp});
  leave(pass, attn_sub_, residual_bank_ ? rows.first(before) : rows, residual_bank_ ? drows.first(before) : drows, k.p_in, k.attn,
        dx, dp);
}

}  // namespace moetrain::core
