// model.cpp -- the walk through the layers, forward and backward.
#include "core/model.h"

#include <string>

#include "core/lora.h"
#include "ops/embedding.h"

namespace moetrain::core {

Model::Model(const ModelConfig& m, ParamTable& table) : D_(m.hidden_size), tied_(m.tie_word_embeddings) {
  embedding_ = table.add({.name = "model.embed_tokens.weight", .shape = {m.vocab_size, D_}, .unit = UnitKind::embedding});
  for (int l = 0; l < int(m.num_hidden_layers); ++l) {
    blocks_.emplace_back(m, table, l, moe_layers_);
    moe_layers_ += blocks_.back().moe() != nullptr;
  }
  head_ = std::make_unique<Head>(m, table, embedding_);
}

std::vector<int> Model::router_biases() const {
  std::vector<int> ids;
  for (const Block& b : blocks_)
    if (b.moe()) ids.push_back(b.moe()->bias());
  return ids;
}

std::vector<Block::Decisions> Model::decisions() const {
  std::vector<Block::Decisions> all;
  for (const LayerState& s : layers_) all.push_back(s.decisions);
  return all;
}

void Model::prefetch_layer(Pass& pass, const Layout& layout, std::size_t l) const {
  pass.params.prefetch(layout.trunk[l]);
  if (layout.experts[l] >= 0) pass.params.prefetch(layout.experts[l]);
}
void Model::gather_layer(Pass& pass, const Layout& layout, std::size_t l) const {
  pass.params.gather(layout.trunk[l]);
  if (layout.experts[l] >= 0) pass.params.gather(layout.experts[l]);
}
void Model::release_layer(Pass& pass, const Layout& layout, std::size_t l) const {
  pass.params.release(layout.trunk[l]);
  if (layout.experts[l] >= 0) pass.params.release(layout.experts[l]);
}
void Model::reduce_layer(Pass& pass, const Layout& layout, std::size_t l) const {
  pass.params.end_reductions();  // of the block above: they had this one's backward to travel
  pass.params.reduce(layout.trunk[l]);
  if (layout.experts[l] >= 0) pass.params.reduce(layout.experts[l]);
}

void Model::forward(Pass& pass, const Layout& layout, Tensor logits, std::span<const Block::Decisions> held) {
  const bool training = pass.mode != PassMode::evaluate;
  const auto phase = training ? parallel::Phase::forward : parallel::Phase::evaluate;
  const bool keep_layers = training && pass.config.memory.activation_checkpointing == Checkpointing::none;
  auto& params = pass.params;
  pass.everyone.enter(phase);
  start_mark_ = pass.kept.mark();
  bank_ = {};
  layers_.assign(blocks_.size(), {});
  if (layout.router_bias >= 0) params.gather(layout.router_bias);

  Tensor p = pass.keep({pass.T(), D_});
  params.gather(layout.embedding);
  prefetch_layer(pass, layout, 0);
  ops::embedding(pass.ctx, ops::EmbeddingForward{.ids = pass.batch.tokens, .table = params.weight(embedding_), .y = p});
  params.release(layout.embedding);

  for (std::size_t l = 0; l < blocks_.size(); ++l) {
    const Range range(("layer " + std::to_string(l) + " forward").c_str());
    pass.everyone.enter(phase, int(l));
    LayerState& s = layers_[l];
    s.mark = pass.kept.mark();
    s.p_in = p;
    s.decisions = held.empty() ? blocks_[l].take_decisions(pass) : held[l];
    s.p_out = pass.keep({pass.T(), D_});
    const auto inside = pass.kept.mark();
    gather_layer(pass, layout, l);
    l + 1 < blocks_.size() ? prefetch_layer(pass, layout, l + 1) : params.prefetch(layout.head);
    blocks_[l].forward(pass, bank_, s.p_in, s.kept, s.decisions, s.p_out);
    release_layer(pass, layout, l);
    if (!keep_layers) pass.kept.release(inside);
    p = s.p_out;
  }

  pass.everyone.enter(phase);
  head_mark_ = pass.kept.mark();
  params.gather(layout.head);
  if (tied_) params.gather(layout.embedding);
  head_->forward(pass, bank_, p, head_kept_);
  if (logits.present()) head_->logits(pass, head_kept_, logits);
  if (!training) {
    params.release(layout.head);
    if (tied_) params.release(layout.embedding);
    if (layout.router_bias >= 0) params.release(layout.router_bias);
    pass.kept.release(start_mark_);
  }
}

// Nothing below it has a gradient: backward ends there.
std::size_t Model::lowest_trained(const parallel::ShardedParams& params, const Layout& layout) const {
  if (params.trains(layout.embedding)) return 0;
  for (std::size_t l = 0; l < blocks_.size(); ++l)
    if (params.trains(layout.trunk[l]) || (layout.experts[l] >= 0 && params.trains(layout.experts[l]))) return l;
  return blocks_.size();
}

void Model::backward(Pass& pass, const Layout& layout) {
  pass.everyone.enter(parallel::Phase::backward);
  Scope scope(pass.ctx.scratch);
  auto& params = pass.params;
  for (std::size_t n = 0; n < bank_.rows.size(); ++n) {
    bank_.gradients.push_back(pass.ctx.scratch.zeros(pass.real(), {pass.T(), D_}));
  }
  const Tensor dp = pass.scratch_real({pass.T(), D_});
  const std::size_t lowest = lowest_trained(params, layout);
  if (lowest < blocks_.size()) prefetch_layer(pass, layout, blocks_.size() - 1);
  head_->backward(pass, bank_, head_kept_, dp);
  params.reduce(layout.head);
  params.release(layout.head);
  pass.kept.release(head_mark_);

  Pass again = pass;
  again.mode = PassMode::recompute;
  for (std::size_t l = blocks_.size(); l-- > lowest;) {
    const Range range(("layer " + std::to_string(l) + " backward").c_str());
    pass.everyone.enter(parallel::Phase::backward, int(l));
    LayerState& s = layers_[l];
    gather_layer(pass, layout, l);
    if (l > lowest) prefetch_layer(pass, layout, l - 1);
    if (pass.config.memory.activation_checkpointing != Checkpointing::none)
      blocks_[l].forward(again, bank_, s.p_in, s.kept, s.decisions, s.p_out);
    blocks_[l].backward(pass, bank_, s.kept, s.decisions, dp);
    reduce_layer(pass, layout, l);
    release_layer(pass, layout, l);
    pass.kept.release(s.mark);
  }
  pass.everyone.enter(parallel::Phase::backward);
  if (!tied_) params.open(layout.embedding);
  const Tensor dtable = params.gradient(embedding_);
  if (dtable.present()) ops::embedding(pass.ctx, ops::EmbeddingBackward{.ids = pass.batch.tokens, .dy = dp, .dtable = dtable});
  params.end_reductions();
  params.reduce(layout.embedding);
  params.release(layout.embedding);
  if (layout.router_bias >= 0) params.release(layout.router_bias);
  pass.kept.release(start_mark_);
}

ParamTable parameters_of(const ModelConfig& model) {
  ParamTable table;
  Model(model, table);
  return table;
}

ParamTable parameters_of(const Config& config) {
  ParamTable table = parameters_of(config.model);
  choose_trained(config, table);
  return table;
}

}  // namespace moetrain::core
