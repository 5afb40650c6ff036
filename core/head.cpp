// head.cpp -- last mix, last norm, loss.
#include "core/head.h"

#include "core/projection.h"
#include "ops/cross_entropy.h"
#include "ops/elementwise.h"
#include "ops/rmsnorm.h"

namespace moetrain::core {
namespace {

// Blocks of the loss when the job leaves them open: logits of a block within 64 MiB.
std::int64_t chosen_seq_chunk(std::int64_t asked) { return asked > 0 ? asked : 1024; }
std::int64_t chosen_vocab_chunk(std::int64_t asked, std::int64_t seq_chunk, std::int64_t V) {
  constexpr std::int64_t kBlockElements = 16 << 20;
  return asked > 0 ? asked : std::min(V, std::max<std::int64_t>(1, kBlockElements / seq_chunk));
}

}  // namespace

Head::Head(const ModelConfig& m, ParamTable& table, int embedding)
    : eps_(m.rms_norm_eps),
      mix_(m.attn_res_block_size ? std::optional<Mix>(Mix(m, table, -1, UnitKind::head, "model.output_attn_res")) : std::nullopt),
      norm_(table.add(
          {.name = "model.norm.weight", .shape = {m.hidden_size}, .init = Init::one, .decay = false, .unit = UnitKind::head})),
      weight_(m.tie_word_embeddings
                  ? embedding
                  : table.add({.name = "lm_head.weight", .shape = {m.vocab_size, m.hidden_size}, .unit = UnitKind::head})) {}

void Head::forward(Pass& pass, const Bank& bank, ConstTensor p, Kept& k) const {
  k = {};
  k.p = k.in = p;
  if (mix_) {
    std::vector<ConstTensor> sources(bank.rows);
    sources.push_back(p);
    k.mixed = pass.keep(p.shape);
    k.mix_weights = pass.keep_real({p.shape[0], std::int64_t(sources.size())});
    mix_->forward(pass, sources, k.mixed, k.mix_weights);
    k.in = k.mixed;
  }
  k.in_r = pass.keep_real({p.shape[0]});
  k.hidden = pass.keep(p.shape);
  ops::rmsnorm(pass.ctx, ops::RmsNormForward{.x = k.in, .w = pass.params.weight(norm_), .y = k.hidden, .r = k.in_r, .eps = eps_});
  const bool training = pass.mode != PassMode::evaluate;
  if (training) k.dhidden = pass.keep(p.shape);
  const ConstTensor w = pass.params.weight(weight_);
  const std::int64_t seq_chunk = chosen_seq_chunk(pass.config.loss.seq_chunk);
  const auto category = pass.ctx.scratch.set_category(Category::loss);
  ops::cross_entropy(pass.ctx,
                     ops::CrossEntropy{.hidden = k.hidden,
                                       .weight = w,
                                       .labels = pass.batch.labels,
                                       .seq_chunk = seq_chunk,
                                       .vocab_chunk = chosen_vocab_chunk(pass.config.loss.vocab_chunk, seq_chunk, w.shape[0]),
                                       .gradient_scale = pass.scales.per_label,
                                       .loss = pass.losses.lm,
                                       .dhidden = k.dhidden,
                                       .dweight = training ? pass.params.gradient(weight_) : Tensor{}});
  pass.ctx.scratch.set_category(category);
}

void Head::backward(Pass& pass, Bank& bank, const Kept& k, Tensor dp) const {
  Scope scope(pass.ctx.scratch);
  const Tensor din = pass.scratch(k.p.shape);
  ops::rmsnorm(
      pass.ctx,
      ops::RmsNormBackward{
          .dy = k.dhidden, .x = k.in, .w = pass.params.weight(norm_), .r = k.in_r, .dx = din, .dw = pass.params.gradient(norm_)});
  if (!mix_) return ops::copy(pass.ctx, ops::Copy{.x = din, .y = dp});
  fill(pass.ctx.device(), dp.data, 0, dp.bytes());
  std::vector<ConstTensor> sources(bank.rows);
  std::vector<Tensor> dsources(bank.gradients);
  sources.push_back(k.p);
  dsources.push_back(dp);
  mix_->backward(pass, din, sources, k.mix_weights, dsources);
}

void Head::logits(Pass& pass, const Kept& k, Tensor logits) const { project(pass, weight_, k.hidden, logits); }

}  // namespace moetrain::core
