// head.cpp -- last mix, last norm, loss.
#include "core/head.h"

#include "core/projection.h"
#include "ops/elementwise.h"
#include "ops/rmsnorm.h"

namespace moetrain::core {

// On a GPU a block of tokens keeps its logits over the whole vocabulary, which saves a product, where that takes no more than
// kDeviceBytes (2048 tokens of 163840 words in bf16: 640 MiB). On the CPU a block's logits are real: 64 MiB in f32.
LossBlocks chosen_blocks(const LossConfig& asked, const ops::Context& ctx, DType dtype, std::int64_t V) {
  constexpr std::int64_t kDeviceBytes = 768 << 20, kHostElements = 16 << 20;
  const bool cuda = ctx.device() == Device::cuda || (ctx.dry() && ctx.plans_for == Device::cuda);
  const std::int64_t seq = asked.seq_chunk > 0 ? asked.seq_chunk : cuda ? 2048 : 1024;
  const std::int64_t elements = cuda ? kDeviceBytes / size_of(dtype) : kHostElements;
  return {seq, asked.vocab_chunk > 0 ? asked.vocab_chunk : std::min(V, std::max<std::int64_t>(1, elements / seq))};
}

Head::Head(const ModelConfig& m, ParamTable& table, int embedding)
    : eps_(m.rms_norm_eps),
      mix_(m.attn_res_block_size ? std::optional<Mix>(Mix(m, table, -1, UnitKind::head, "model.output_attn_res")) : std::nullopt),
      norm_(table.add(
          {.name = "model.norm.weight", .shape = {m.hidden_size}, .init = Init::one, .decay = false, .unit = UnitKind::head})),
      weight_(
          m.tie_word_embeddings
              ? embedding
              : table.add(
                    {.name = "lm_head.weight", .shape = {m.vocab_size, m.hidden_size}, .unit = UnitKind::head, .cut = Cut::rows})) {
}

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
  if (pass.mode != PassMode::evaluate) k.dhidden = pass.keep(p.shape);
  Scope scope(pass.ctx.scratch);
  const LossBlocks blocks = chosen_blocks(pass.config.loss, pass.ctx, pass.dtype, pass.params.weight(weight_).shape[0]);
  const auto category = pass.ctx.scratch.set_category(Category::loss);
  const auto loss = [&](Pass& all, ConstTensor hidden, Tensor dhidden) {
    project_loss(all, weight_,
                 ops::CrossEntropy{.hidden = hidden,
                                   .weight = {},
                                   .labels = all.batch->labels,
                                   .seq_chunk = blocks.seq,
                                   .vocab_chunk = blocks.vocab,
                                   .gradient_scale = pass.scales.per_label,
                                   .loss = pass.losses.lm,
                                   .dhidden = dhidden});
  };
  if (k.dhidden.present()) {
    on_all_rows(pass, k.hidden, k.dhidden, loss);
  } else {
    Pass all = pass.on_slice();
    loss(all, pass.all_rows(k.hidden), {});
  }
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

void Head::logits(Pass& pass, const Kept& k, Tensor logits) const {
  check(!pass.tensor, "head: logits of a vocabulary that is cut over ranks");
  project(pass, weight_, k.hidden, logits);
}

}  // namespace moetrain::core
