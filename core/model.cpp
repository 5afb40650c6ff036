// model.cpp -- the walk through the layers, forward and backward.
#include "core/model.h"

#include <algorithm>
#include <string>

#include "core/lora.h"
#include "ops/embedding.h"

namespace moetrain::core {

Model::Model(const ModelConfig& m, ParamTable& table, int tensor_ranks) : D_(m.hidden_size), tied_(m.tie_word_embeddings) {
  embedding_ =
      table.add({.name = "model.embed_tokens.weight", .shape = {m.vocab_size, D_}, .unit = UnitKind::embedding, .cut = Cut::rows});
  for (int l = 0; l < int(m.num_hidden_layers); ++l) {
    blocks_.emplace_back(m, table, l, moe_layers_, tensor_ranks);
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

namespace {

// What lies in host memory starts a layer before its gather, which may have to wait for it.
void fetch(Pass& pass, const std::vector<int>& units) {
  for (const int u : units) pass.params.fetch(u);
}

std::int64_t begin_gathers(Pass& pass, const std::vector<int>& units) {
  std::int64_t bytes = 0;
  for (const int u : units) {
    pass.params.prefetch(u);
    bytes += pass.params.units()[std::size_t(u)].weight_bytes;
  }
  return bytes;
}

}  // namespace

void Model::prefetch(Pass& pass, const Layout& layout, std::size_t l) const {
  std::int64_t bytes = 0;
  do bytes += begin_gathers(pass, l < blocks_.size() ? layout.layers[l] : layout.head);
  while (bytes < pass.config.parallel.bucket_size.bytes && ++l <= blocks_.size());
  if (l + 1 < blocks_.size()) fetch(pass, layout.layers[l + 1]);
}

void Model::prefetch_below(Pass& pass, const Layout& layout, std::size_t l, std::size_t lowest) const {
  for (std::int64_t bytes = 0; l > lowest && bytes < std::max<std::int64_t>(1, pass.config.parallel.bucket_size.bytes);)
    bytes += begin_gathers(pass, layout.layers[--l]);
  if (l > lowest) fetch(pass, layout.layers[l - 1]);
}

void Model::reduce(Pass& pass, const std::vector<int>& units) const {
  pass.params.end_reductions();  // of what was reduced before: they had this one's backward to travel
  for (const int u : units) pass.params.reduce(u);
}

// p (T, D) = rows of the table. Each rank looks up its words for the tokens of all, zeros for others.
void Model::embed(Pass& pass, Tensor p) const {
  const ConstTensor table = pass.params.weight(embedding_);
  if (!pass.tensor) return ops::embedding(pass.ctx, ops::EmbeddingForward{.ids = pass.batch->tokens, .table = table, .y = p});
  Scope scope(pass.ctx.scratch);
  const Tensor all = pass.tensor->take(pass.ctx.scratch, p.dtype, {pass.slice->T(), D_});
  ops::embedding(pass.ctx, ops::EmbeddingForward{.ids = words_here(pass), .table = table, .y = all});
  pass.tensor->sum(pass.ctx, all, p);
}

void Model::embed_backward(Pass& pass, ConstTensor dp, Tensor dtable) const {
  Scope scope(pass.ctx.scratch);
  const ConstTensor ids = pass.tensor ? words_here(pass) : pass.batch->tokens;
  const ConstTensor all = pass.all_rows(dp);
  ops::embedding(pass.ctx, ops::EmbeddingBackward{.ids = ids, .dy = all, .dtable = dtable});
}

ConstTensor Model::words_here(Pass& pass) const {
  const std::int64_t V = pass.table[embedding_].shape[0];
  const auto words = parallel::part_of(V, pass.tensor->rank(), pass.tensor->ranks());
  const Tensor ids = pass.ctx.scratch.take(DType::i32, {pass.slice->T()});
  ops::local_ids(pass.ctx,
                 ops::LocalIds{.ids = pass.slice->tokens, .first = words.begin, .count = words.count(), .words = V, .y = ids});
  return ids;
}

void Model::forward(Pass& pass, const Layout& layout, Tensor logits, std::span<const Block::Decisions> held) {
  auto& params = pass.params;
  const bool training = pass.mode != PassMode::evaluate;
  const auto phase = training ? parallel::Phase::forward : parallel::Phase::evaluate;
  const bool keep_layers = training && pass.config.memory.activation_checkpointing == Checkpointing::none;
  pass.everyone.enter(phase);
  start_mark_ = pass.kept.mark();
  bank_ = {};
  layers_.assign(blocks_.size(), {});
  gather(pass, layout.router_bias);

  Tensor p = pass.keep({pass.T(), D_});
  gather(pass, layout.embedding);
  prefetch(pass, layout, 0);
  embed(pass, p);
  release(pass, layout.embedding);

  Pass below = pass;  // of layers that backward does not reach
  below.results = nullptr;
  const std::size_t lowest = pass.results ? lowest_trained(params, layout) : 0;
  for (std::size_t l = 0; l < blocks_.size(); ++l) {
    const Range range(("layer " + std::to_string(l) + " forward").c_str());
    pass.everyone.enter(phase, int(l));
    LayerState& s = layers_[l];
    s.mark = pass.kept.mark();
    s.p_in = p;
    s.decisions = held.empty() ? blocks_[l].take_decisions(pass) : held[l];
    s.p_out = pass.keep({pass.T(), D_});
    const auto inside = pass.kept.mark();
    gather(pass, layout.layers[l]);
    prefetch(pass, layout, l + 1);
    Pass& here = l < lowest ? below : pass;
    if (here.results) here.results->begin(int(l), /*again=*/false);
    blocks_[l].forward(here, bank_, s.p_in, s.kept, s.decisions, s.p_out);
    if (here.results) here.results->end_forward();
    release(pass, layout.layers[l]);
    if (!keep_layers) pass.kept.release(inside);
    p = s.p_out;
  }

  pass.everyone.enter(phase);
  head_mark_ = pass.kept.mark();
  gather(pass, layout.head);
  if (tied_) gather(pass, layout.embedding);
  head_->forward(pass, bank_, p, head_kept_);
  if (logits.present()) head_->logits(pass, head_kept_, logits);
  if (!training) {
    release(pass, layout.head);
    if (tied_) release(pass, layout.embedding);
    release(pass, layout.router_bias);
    pass.kept.release(start_mark_);
  }
}

// Nothing below it has a gradient: backward ends there.
std::size_t Model::lowest_trained(const parallel::ShardedParams& params, const Layout& layout) const {
  const auto trains = [&](const std::vector<int>& units) {
    return std::any_of(units.begin(), units.end(), [&](int u) { return params.trains(u); });
  };
  if (trains(layout.embedding)) return 0;
  for (std::size_t l = 0; l < blocks_.size(); ++l)
    if (trains(layout.layers[l])) return l;
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
  prefetch_below(pass, layout, blocks_.size(), lowest);
  if (pass.results && lowest < blocks_.size()) pass.results->prefetch(int(blocks_.size()) - 1);
  head_->backward(pass, bank_, head_kept_, dp);
  reduce(pass, layout.head);
  release(pass, layout.head);
  pass.kept.release(head_mark_);

  Pass again = pass;
  again.mode = PassMode::recompute;
  for (std::size_t l = blocks_.size(); l-- > lowest;) {
    const Range range(("layer " + std::to_string(l) + " backward").c_str());
    pass.everyone.enter(parallel::Phase::backward, int(l));
    LayerState& s = layers_[l];
    gather(pass, layout.layers[l]);
    prefetch_below(pass, layout, l, lowest);
    if (pass.results) {
      pass.results->begin(int(l), /*again=*/true);
      if (l > lowest) pass.results->prefetch(int(l) - 1);
    }
    if (pass.config.memory.activation_checkpointing != Checkpointing::none)
      blocks_[l].forward(again, bank_, s.p_in, s.kept, s.decisions, s.p_out);
    blocks_[l].backward(pass, bank_, s.kept, s.decisions, dp);
    if (pass.results) pass.results->drop(int(l));
    reduce(pass, layout.layers[l]);
    release(pass, layout.layers[l]);
    pass.kept.release(s.mark);
  }
  pass.everyone.enter(parallel::Phase::backward);
  if (!tied_)
    for (const int u : layout.embedding) params.open(u);
  if (const Tensor dtable = params.gradient(embedding_); dtable.present()) embed_backward(pass, dp, dtable);
  reduce(pass, layout.embedding);
  release(pass, layout.embedding);
  release(pass, layout.router_bias);
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
