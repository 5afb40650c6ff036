// attention_mla.cpp -- the order of the latent-attention sub-layer's operators, forward and backward.
#include "core/attention_mla.h"

#include <algorithm>
#include <cmath>

#include "core/projection.h"
#include "ops/attention.h"
#include "ops/elementwise.h"
#include "ops/indexer.h"
#include "ops/layernorm.h"
#include "ops/rmsnorm.h"
#include "ops/sparse_attention.h"

namespace moetrain::core {
namespace {
constexpr double kLatentNormEps = 1e-6;  // of q_a_layernorm and kv_a_layernorm, whatever rms_norm_eps is (the public model's code)
}

AttentionMla::AttentionMla(const ModelConfig& m, ParamTable& table, int layer, const std::string& prefix, int tensor_ranks)
    : N_(m.num_attention_heads / tensor_ranks),
      Ql_(m.q_lora_rank.value_or(0)),
      C_(m.kv_lora_rank),
      Hn_(m.qk_nope_head_dim),
      He_(m.qk_rope_head_dim),
      Hv_(m.v_head_dim),
      P_(N_ * Hv_),
      dsa_(m.dsa),
      scale_(1 / std::sqrt(double(Hn_ + He_))) {
  const std::int64_t D = m.hidden_size, N = m.num_attention_heads;  // of all ranks
  auto matrix = [&](const std::string& name, std::int64_t out, std::int64_t in, Cut cut = Cut::none) {
    return table.add({.name = prefix + name + ".weight", .shape = {out, in}, .layer = layer, .cut = cut});
  };
  auto vector = [&](const std::string& name, std::int64_t width, Init init) {
    return table.add({.name = prefix + name, .shape = {width}, .init = init, .decay = false, .layer = layer});
  };
  if (m.q_lora_rank) {
    q_a_ = matrix("q_a_proj", Ql_, D);
    q_a_norm_ = vector("q_a_layernorm.weight", Ql_, Init::one);
    q_ = matrix("q_b_proj", N * (Hn_ + He_), Ql_, Cut::rows);
  } else {
    q_ = matrix("q_proj", N * (Hn_ + He_), D, Cut::rows);
  }
  kv_a_ = matrix("kv_a_proj_with_mqa", C_ + He_, D);
  kv_a_norm_ = vector("kv_a_layernorm.weight", C_, Init::one);
  kv_b_ = matrix("kv_b_proj", N * (Hn_ + Hv_), C_, Cut::rows);
  if (m.mla_use_output_gate) g_ = matrix("g_proj", N * Hv_, D, Cut::rows);
  o_ = matrix("o_proj", D, N * Hv_, Cut::columns);
  if (dsa_) {
    const std::int64_t J = dsa_->index_n_heads, H = dsa_->index_head_dim;
    index_.wq_b = matrix("indexer.wq_b", J * H, Ql_);
    index_.wk = matrix("indexer.wk", H, D);
    index_.k_norm = vector("indexer.k_norm.weight", H, Init::one);
    if (dsa_->index_norm_bias) index_.k_norm_bias = vector("indexer.k_norm.bias", H, Init::zero);
    index_.weights_proj = matrix("indexer.weights_proj", J, D);
  }
}

bool AttentionMla::trained(const Pass& pass) const {
  const auto learns = [&](int id) { return id >= 0 && (pass.table[id].trainable || pass.table[id].adapter.present()); };
  return learns(index_.wq_b) || learns(index_.wk) || learns(index_.k_norm) || learns(index_.k_norm_bias) ||
         learns(index_.weights_proj);
}

bool AttentionMla::sparse(const Config& config) const { return dsa_ && config.loss.indexer_stage == IndexerStage::sparse; }

std::int64_t AttentionMla::selected(const Config& config, std::int64_t longest) const {
  return sparse(config) ? std::max<std::int64_t>(1, std::min(dsa_->index_topk, longest)) : 0;
}

std::int64_t AttentionMla::keys(const Pass& pass) const {
  return pass.sequence ? pass.sequence->gathered_rows(pass.batch->sequences) : pass.T();
}

// In scratch of the context where they are gathered: the caller holds a Scope.
AttentionMla::Keys AttentionMla::all_keys(Pass& pass, const Kept& k) const {
  if (!pass.sequence) return {k.c, k.k_extra};
  const auto gathered = [&](ConstTensor rows) {
    const Tensor all = pass.scratch({keys(pass), rows.shape[1]});
    pass.sequence->gather_rows(pass.ctx, pass.batch->sequences, rows, all);
    return all;
  };
  const Tensor c = gathered(k.c);
  return {c, gathered(k.k_extra)};
}

// For products whose rows are keys.
Pass AttentionMla::of_keys(const Pass& pass) const {
  Pass p = pass;
  if (pass.sequence) p.text = pass.batch->gathered_text;
  return p;
}

void AttentionMla::expand(Pass& pass, const Keys& all, Tensor kv) const {
  Pass p = of_keys(pass);
  project(p, kv_b_, all.c, kv.reshape({kv.shape[0], N_ * (Hn_ + Hv_)}));
}

// Keys that all queries meet, from those of the rows here.
ConstTensor AttentionMla::key_rows(Pass& pass, ConstTensor rows_here) const {
  const ConstTensor slice = pass.all_rows(rows_here);
  if (!pass.sequence) return slice;
  const Tensor all = pass.scratch(slice.shape.with_dim0(keys(pass)));
  pass.sequence->gather_rows(pass.ctx, pass.slice->sequences, slice, all);
  return all;
}

// The adjoint: rows_here = the sum over ranks.
void AttentionMla::sum_key_rows(Pass& pass, Tensor all, Tensor rows_here) const {
  Scope scope(pass.ctx.scratch);
  Tensor slice = all;
  if (pass.sequence) {
    const Shape rows = all.shape.with_dim0(pass.slice->T());
    slice = pass.tensor ? pass.tensor->take(pass.ctx.scratch, all.dtype, rows) : rows_here;
    pass.sequence->sum_rows(pass.ctx, pass.slice->sequences, all, slice);
  }
  if (pass.tensor) pass.tensor->sum(pass.ctx, slice, rows_here);
}

// The indexer sees x and cq, of all rows, as constants. Its key norm's input is kept for the loss gradient.
AttentionMla::IndexInputs AttentionMla::index_inputs(Pass& pass, ConstTensor x, Kept& k) const {
  const auto here = pass.rows_of_slice();
  const std::int64_t T = here.count(), J = dsa_->index_n_heads, H = dsa_->index_head_dim;
  Pass mine = pass.on_rows();
  x = x.rows(here.begin, here.end);
  k.ki_in = pass.keep({T, H});
  k.ki_mean = pass.keep_real({T});
  k.ki_r = pass.keep_real({T});
  IndexInputs in{pass.scratch({T, J, H}), {}, pass.scratch_real({T, J})};
  const Tensor key = pass.scratch({T, H});
  project(mine, index_.wq_b, k.cq.rows(here.begin, here.end), in.q.reshape({T, J * H}));
  project(mine, index_.wk, x, k.ki_in);
  ops::layernorm(pass.ctx,
                 ops::LayerNormForward{.x = k.ki_in,
                                       .w = pass.params.weight(index_.k_norm),
                                       .b = index_.k_norm_bias < 0 ? ConstTensor{} : pass.params.weight(index_.k_norm_bias),
                                       .y = key,
                                       .mean = k.ki_mean,
                                       .r = k.ki_r,
                                       .eps = dsa_->index_norm_eps});
  in.k = key_rows(pass, key);
  project(mine, index_.weights_proj, x, in.weights);
  ops::scale(pass.ctx, ops::Scale{.factor = 1 / std::sqrt(double(J * H)), .y = in.weights});
  return in;
}

void AttentionMla::select(Pass& pass, const IndexInputs& in, Tensor indices) const {
  Scope scope(pass.ctx.scratch);
  const std::int64_t rows = pass.rows_of_slice().count();
  const Tensor chosen = pass.tensor ? pass.ctx.scratch.take(indices.dtype, indices.shape.with_dim0(rows)) : indices;
  ops::indexer_select(
      pass.ctx,
      ops::IndexerSelect{.q = in.q, .k = in.k, .weights = in.weights, .documents = pass.rows_here->documents, .indices = chosen});
  if (!pass.tensor) return;
  const ConstTensor all = pass.all_rows(chosen);
  copy_to_device(pass.ctx.device(), indices.data, all.data, all.bytes());
}

// Of the rows here, the mean over all heads, from that over this rank's heads of all rows.
Tensor AttentionMla::target_here(Pass& pass, Tensor probability) const {
  if (!pass.tensor) return probability;
  const Tensor target = pass.scratch_real(probability.shape.with_dim0(pass.rows_of_slice().count()));
  pass.tensor->sum(pass.ctx, probability, target);
  ops::scale(pass.ctx, ops::Scale{.factor = 1 / double(pass.tensor->ranks()), .y = target});
  return target;
}

// The loss and, since nothing downstream changes it, its gradient in the same pass: in the one whose results backward finds.
void AttentionMla::index_loss(Pass& pass, const IndexInputs& in, ConstTensor target, ConstTensor indices, Kept& k) const {
  Scope scope(pass.ctx.scratch);
  const auto here = pass.rows_of_slice();
  const bool for_backward =
      trained(pass) && (pass.mode == PassMode::recompute || pass.config.memory.activation_checkpointing == Checkpointing::none);
  if (!for_backward && !pass.sums()) return;
  if (for_backward) {
    k.dqi = pass.keep(in.q.shape);
    k.dki = pass.keep(k.ki_in.shape);
    k.dwi = pass.keep_real(in.weights.shape);
  }
  Tensor dk = k.dki;
  if (for_backward && pass.sequence)
    dk = pass.scratch(in.k.shape);
  else if (for_backward && pass.tensor)
    dk = pass.tensor->take(pass.ctx.scratch, pass.dtype, in.k.shape);
  const Tensor unsummed = pass.ctx.scratch.zeros(pass.real(), {1});
  ops::indexer_loss(pass.ctx, ops::IndexerLoss{.q = in.q,
                                               .k = in.k,
                                               .weights = in.weights,
                                               .target = target,
                                               .indices = indices.present() ? indices.rows(here.begin, here.end) : indices,
                                               .documents = pass.rows_here->documents,
                                               .gradient_scale = pass.config.loss.indexer_coefficient * pass.scales.per_token,
                                               .loss = pass.sums() ? pass.losses.indexer : unsummed,
                                               .dq = k.dqi,
                                               .dk = dk,
                                               .dweights = k.dwi});
  if (for_backward) sum_key_rows(pass, dk, k.dki);
}

void AttentionMla::index_backward(Pass& pass, ConstTensor x, const Kept& k) const {
  Scope scope(pass.ctx.scratch);
  const auto here = pass.rows_of_slice();
  const std::int64_t T = here.count(), J = dsa_->index_n_heads, H = dsa_->index_head_dim;
  Pass mine = pass.on_rows();
  x = x.rows(here.begin, here.end);
  project_backward(mine, index_.wq_b, k.dqi.reshape({T, J * H}), k.cq.rows(here.begin, here.end), {});
  const Tensor dki_in = pass.scratch({T, H}), dw = pass.scratch_real({T, J});
  ops::layernorm(pass.ctx,
                 ops::LayerNormBackward{.dy = k.dki,
                                        .x = k.ki_in,
                                        .w = pass.params.weight(index_.k_norm),
                                        .mean = k.ki_mean,
                                        .r = k.ki_r,
                                        .dx = dki_in,
                                        .dw = pass.params.gradient(index_.k_norm),
                                        .db = index_.k_norm_bias < 0 ? Tensor{} : pass.params.gradient(index_.k_norm_bias)});
  project_backward(mine, index_.wk, dki_in, x, {});
  ops::copy(pass.ctx, ops::Copy{.x = k.dwi, .y = dw});
  ops::scale(pass.ctx, ops::Scale{.factor = 1 / std::sqrt(double(J * H)), .y = dw});
  project_backward(mine, index_.weights_proj, dw, x, {});
}

// What the attention makes for backward, and for the indexer's loss: `o` (T, N, C) or (T, P), lse and, where it is wanted,
// probability.
ResultCache::Result AttentionMla::attended(Pass& pass, Kept& k, Tensor& o, Tensor& probability) const {
  const Shape shape = &o == &k.o ? Shape{pass.T(), P_} : Shape{pass.T(), N_, C_};
  const ResultCache::Output values{&o, pass.dtype, shape}, lse{&k.lse, pass.real(), {pass.T(), N_}};
  if (!probability.present()) return pass.result(ResultOp::attention, {values, lse});
  return pass.result(ResultOp::attention, {values, lse, {&probability, probability.dtype, probability.shape}});
}

void AttentionMla::attend_dense(Pass& pass, Kept& k, Tensor probability) const {
  const Shape expanded{keys(pass), N_, Hn_ + Hv_};
  Scope scope(pass.ctx.scratch);
  const Keys all = all_keys(pass, k);
  Tensor kv;
  if (pass.sequence) {
    kv = pass.scratch(expanded);
    expand(pass, all, kv);
  } else {
    auto result = pass.result(ResultOp::linear, {{&k.kv, pass.dtype, expanded}});
    result.compute([&] { expand(pass, all, k.kv); });
    kv = k.kv;
  }
  auto result = attended(pass, k, k.o, probability);
  result.compute([&] {
    ops::attention(pass.ctx, ops::AttentionForward{.q = k.q,
                                                   .kv = kv,
                                                   .k_extra = all.extra,
                                                   .scale = scale_,
                                                   .documents = pass.batch->documents,
                                                   .o = k.o.reshape({pass.T(), N_, Hv_}),
                                                   .lse = k.lse,
                                                   .probability = probability});
  });
}

void AttentionMla::attend_sparse(Pass& pass, Kept& k, ConstTensor indices, Tensor probability) const {
  const Shape latent{pass.T(), N_, C_};
  {
    auto result = pass.result(ResultOp::linear, {{&k.q_latent, pass.dtype, latent}});
    result.compute([&] { project_heads(pass, kv_b_, {ops::HeadDirection::to_latent, N_, 0, Hn_, 0}, k.q, k.q_latent); });
  }
  {
    Scope scope(pass.ctx.scratch);
    const Keys all = all_keys(pass, k);
    auto result = attended(pass, k, k.o_latent, probability);
    result.compute([&] {
      ops::sparse_attention(pass.ctx, ops::SparseAttentionForward{.q_latent = k.q_latent,
                                                                  .q = k.q,
                                                                  .latent = all.c,
                                                                  .k_extra = all.extra,
                                                                  .indices = indices,
                                                                  .scale = scale_,
                                                                  .o_latent = k.o_latent,
                                                                  .lse = k.lse,
                                                                  .probability = probability,
                                                                  .pairs = pass.batch->documents.pairs(indices.shape[1])});
    });
  }
  auto result = pass.result(ResultOp::linear, {{&k.o, pass.dtype, {pass.T(), P_}}});
  result.compute([&] {
    project_heads(pass, kv_b_, {ops::HeadDirection::from_latent, N_, Hn_, Hv_, 0}, k.o_latent, k.o.reshape({pass.T(), N_, Hv_}));
  });
}

void AttentionMla::forward(Pass& pass, ConstTensor x, Kept& k, Tensor indices, Tensor y) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const std::int64_t T = pass.T();
  const Shape queries{T, N_, Hn_ + He_};
  k = {};
  if (q_a_ >= 0) {
    project_result(pass, q_a_, x, k.cq_in, {T, Ql_});
    k.cq = pass.keep({T, Ql_});
    k.cq_r = pass.keep_real({T});
    ops::rmsnorm(
        ctx, ops::RmsNormForward{.x = k.cq_in, .w = pass.params.weight(q_a_norm_), .y = k.cq, .r = k.cq_r, .eps = kLatentNormEps});
    project_result(pass, q_, k.cq, k.q, queries);
  } else {
    project_result(pass, q_, x, k.q, queries);
  }
  {
    auto result = pass.result(ResultOp::linear, {{&k.c_in, pass.dtype, {T, C_}}, {&k.k_extra, pass.dtype, {T, He_}}});
    result.compute([&] {
      Scope split(ctx.scratch);
      const Tensor both = pass.scratch({T, C_ + He_});
      project(pass, kv_a_, x, both);
      ops::copy_columns(ctx, ops::CopyColumns{.x = both, .x_column = 0, .y = k.c_in, .y_column = 0, .width = C_});
      ops::copy_columns(ctx, ops::CopyColumns{.x = both, .x_column = C_, .y = k.k_extra, .y_column = 0, .width = He_});
    });
  }
  k.c = pass.keep({T, C_});
  k.c_r = pass.keep_real({T});
  ops::rmsnorm(ctx,
               ops::RmsNormForward{.x = k.c_in, .w = pass.params.weight(kv_a_norm_), .y = k.c, .r = k.c_r, .eps = kLatentNormEps});

  const bool learns = dsa_ && pass.config.loss.indexer_coefficient != 0 && pass.mode != PassMode::evaluate;
  IndexInputs in;
  if (learns || sparse(pass.config)) in = index_inputs(pass, x, k);
  Tensor probability;
  const auto wanted = [&](std::int64_t columns) {
    if (learns)
      probability = pass.tensor ? pass.tensor->take(ctx.scratch, pass.real(), {T, columns}) : pass.scratch_real({T, columns});
  };
  if (sparse(pass.config)) {
    if (!pass.decided()) select(pass, in, indices);
    wanted(indices.shape[1]);
    attend_sparse(pass, k, indices, probability);
  } else {
    wanted(pass.batch->documents.most_keys());
    attend_dense(pass, k, probability);
  }
  if (learns) index_loss(pass, in, target_here(pass, probability), indices, k);

  ConstTensor out = k.o;
  if (g_ >= 0) {
    project_result(pass, g_, x, k.gate, {T, P_});
    k.gated = pass.keep({T, P_});
    ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = k.o, .gate = k.gate, .y = k.gated});
    out = k.gated;
  }
  project_result(pass, o_, out, y, y.shape, y.dtype);
}

void AttentionMla::attend_dense_backward(Pass& pass, const Kept& k, ConstTensor do_, Tensor dq, Tensor dc, Tensor dk_extra) const {
  Scope scope(pass.ctx.scratch);
  const std::int64_t T = pass.T();
  const Keys all = all_keys(pass, k);
  ConstTensor kv = k.kv;
  if (pass.sequence) {
    const Tensor again = pass.scratch({keys(pass), N_, Hn_ + Hv_});
    expand(pass, all, again);
    kv = again;
  }
  const Tensor dkv = pass.scratch(kv.shape), dextra = pass.sequence ? pass.scratch(all.extra.shape) : dk_extra;
  ops::attention(pass.ctx, ops::AttentionBackward{.do_ = do_.reshape({T, N_, Hv_}),
                                                  .q = k.q,
                                                  .kv = kv,
                                                  .k_extra = all.extra,
                                                  .o = k.o.reshape({T, N_, Hv_}),
                                                  .lse = k.lse,
                                                  .scale = scale_,
                                                  .documents = pass.batch->documents,
                                                  .dq = dq,
                                                  .dkv = dkv,
                                                  .dk_extra = dextra});
  const Tensor dlatent = pass.sequence ? pass.scratch(all.c.shape) : dc;
  Pass of = of_keys(pass);
  project_backward(of, kv_b_, dkv.reshape({kv.shape[0], N_ * (Hn_ + Hv_)}), all.c, dlatent);
  sum_keys(pass, dlatent, dextra, dc, dk_extra);
}

void AttentionMla::sum_keys(Pass& pass, Tensor dlatent, Tensor dextra, Tensor dc, Tensor dk_extra) const {
  if (!pass.sequence) return;
  pass.sequence->sum_rows(pass.ctx, pass.batch->sequences, dlatent, dc);
  pass.sequence->sum_rows(pass.ctx, pass.batch->sequences, dextra, dk_extra);
}

void AttentionMla::attend_sparse_backward(Pass& pass, const Kept& k, ConstTensor indices, ConstTensor do_, Tensor dq, Tensor dc,
                                          Tensor dk_extra) const {
  Scope scope(pass.ctx.scratch);
  const Tensor do_latent = pass.scratch(k.o_latent.shape), dq_latent = pass.scratch(k.q_latent.shape);
  project_heads_backward(pass, kv_b_, {ops::HeadDirection::from_latent, N_, Hn_, Hv_, 0}, do_.reshape({pass.T(), N_, Hv_}),
                         k.o_latent, do_latent);
  const Keys all = all_keys(pass, k);
  const Tensor dlatent = pass.sequence ? pass.scratch(all.c.shape) : dc, dextra = pass.sequence ? pass.scratch(all.extra.shape) : dk_extra;
  ops::sparse_attention(pass.ctx, ops::SparseAttentionBackward{.do_latent = do_latent,
                                                               .q_latent = k.q_latent,
                                                               .q = k.q,
                                                               .latent = all.c,
                                                               .k_extra = all.extra,
                                                               .indices = indices,
                                                               .o_latent = k.o_latent,
                                                               .lse = k.lse,
                                                               .scale = scale_,
                                                               .dq_latent = dq_latent,
                                                               .dq = dq,
                                                               .dlatent = dlatent,
                                                               .dk_extra = dextra,
                                                               .pairs = pass.batch->documents.pairs(indices.shape[1])});
  sum_keys(pass, dlatent, dextra, dc, dk_extra);
  project_heads_backward(pass, kv_b_, {ops::HeadDirection::to_latent, N_, 0, Hn_, 0}, dq_latent, k.q, dq);
}

void AttentionMla::backward(Pass& pass, ConstTensor x, const Kept& k, ConstTensor indices, ConstTensor dy, Tensor dx) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const std::int64_t T = pass.T(), q_width = N_ * (Hn_ + He_);
  const Tensor do_ = pass.scratch({T, P_});
  if (g_ >= 0) {
    const Tensor dgate = pass.scratch({T, P_});
    project_backward(pass, o_, dy, k.gated, do_);
    ops::sigmoid_gate(ctx, ops::SigmoidGateBackward{.dy = do_, .x = k.o, .gate = k.gate, .dx = do_, .dgate = dgate});
    project_backward(pass, g_, dgate, x, dx);
  } else {
    project_backward(pass, o_, dy, k.o, do_);
    fill(ctx.device(), dx.data, 0, dx.bytes());
  }
  const Tensor dq = pass.scratch(k.q.shape), dc = pass.scratch({T, C_}), dk_extra = pass.scratch({T, He_});
  if (sparse(pass.config))
    attend_sparse_backward(pass, k, indices, do_, dq, dc, dk_extra);
  else
    attend_dense_backward(pass, k, do_, dq, dc, dk_extra);
  if (k.dqi.present()) index_backward(pass, x, k);

  ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = dc,
                                         .x = k.c_in,
                                         .w = pass.params.weight(kv_a_norm_),
                                         .r = k.c_r,
                                         .dx = dc,
                                         .dw = pass.params.gradient(kv_a_norm_)});
  const Tensor both = pass.scratch({T, C_ + He_});
  ops::copy_columns(ctx, ops::CopyColumns{.x = dc, .x_column = 0, .y = both, .y_column = 0, .width = C_});
  ops::copy_columns(ctx, ops::CopyColumns{.x = dk_extra, .x_column = 0, .y = both, .y_column = C_, .width = He_});
  project_backward(pass, kv_a_, both, x, dx, true);
  if (q_a_ >= 0) {
    const Tensor dcq = pass.scratch({T, Ql_});
    project_backward(pass, q_, dq.reshape({T, q_width}), k.cq, dcq);
    ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = dcq,
                                           .x = k.cq_in,
                                           .w = pass.params.weight(q_a_norm_),
                                           .r = k.cq_r,
                                           .dx = dcq,
                                           .dw = pass.params.gradient(q_a_norm_)});
    project_backward(pass, q_a_, dcq, x, dx, true);
  } else {
    project_backward(pass, q_, dq.reshape({T, q_width}), x, dx, true);
  }
}

}  // namespace moetrain::core
