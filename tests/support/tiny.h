// tiny.h -- small models of each kind, and synthetic sequences that are a function of their number, for tests of core.
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "core/trainer.h"
#include "ops/random.h"

namespace moetrain::test {

// KDA, KDA, KDA, sparse attention over an eighth of the sequence, sparse attention; dense first layer, then latent MoE; attention
// residuals in blocks of 2; no two sizes alike where they may differ.
inline core::Config tiny_config() {
  core::Config c;
  c.run.dtype = DType::f64;
  c.run.device = core::DeviceChoice::cpu;
  auto& m = c.model;
  m.vocab_size = 61;
  m.hidden_size = 24;
  m.num_hidden_layers = 5;
  m.num_attention_heads = 3;
  m.intermediate_size = 40;
  m.q_lora_rank = 14;
  m.kv_lora_rank = 10;
  m.qk_nope_head_dim = 7;
  m.qk_rope_head_dim = 4;
  m.v_head_dim = 6;
  m.mla_use_output_gate = true;
  m.linear_attn = {.num_heads = 2,
                   .head_dim = 9,
                   .short_conv_kernel_size = 4,
                   .gate_lower_bound = -5.0,
                   .use_full_rank_gate = true,
                   .full_attn_layers = {4, 5},
                   .kda_layers = {}};
  m.dsa = core::IndexerConfig{.index_n_heads = 2, .index_head_dim = 5, .index_topk = 4};
  m.num_experts = 8;
  m.num_experts_per_token = 2;
  m.num_shared_experts = 1;
  m.moe_intermediate_size = 11;
  m.routed_expert_hidden_size = 13;
  m.latent_moe_use_norm = true;
  m.first_k_dense_replace = 1;
  m.hidden_act = ops::GluKind::situ;
  m.attn_res_block_size = 2;
  m.initializer_range = 0.2;
  c.data.sequence_length = 32;
  c.training.steps = 10;
  c.optimizer.lr = 1e-2;
  c.schedule.name = core::ScheduleKind::constant;
  c.moe.balance = core::Balance::none;
  return c;
}

// The Kimi-Linear kind: softplus gate, low-rank output gate, dense attention without a query latent, SwiGLU, plain residuals, tied
// head.
inline core::Config tiny_linear_config() {
  core::Config c = tiny_config();
  auto& m = c.model;
  m.q_lora_rank.reset();
  m.dsa.reset();
  m.mla_use_output_gate = false;
  m.linear_attn.gate_lower_bound.reset();
  m.linear_attn.use_full_rank_gate = false;
  m.routed_expert_hidden_size.reset();
  m.latent_moe_use_norm = false;
  m.hidden_act = ops::GluKind::silu;
  m.attn_res_block_size.reset();
  m.routed_scaling_factor = 2.446;
  m.tie_word_embeddings = true;
  return c;
}

// Sequences first .. first + count - 1: S tokens each, documents of uneven lengths (one of a single token now and then) or of a given
// length, labels the next token of the document, some ignored.
inline io::Batch synthetic_batch(const core::Config& c, std::int64_t first, std::int64_t count, std::uint64_t seed = 7,
                                 std::int64_t document_length = 0) {
  io::Batch b;
  b.sequences = {0};
  b.documents = {0};
  const std::int64_t S = c.data.sequence_length;
  for (std::int64_t n = first; n < first + count; ++n) {
    const auto stream = std::uint64_t(n);
    const std::int64_t base = std::int64_t(b.tokens.size());
    std::vector<bool> starts(std::size_t(S) + 1);
    for (std::int64_t t = 0; t < S; ++t) {
      const auto r = ops::philox(seed, stream, std::uint64_t(t));
      // A language with something to learn: the next token mostly follows from the last.
      const auto last = t > 0 ? b.tokens.back() : 0;
      b.tokens.push_back(std::int32_t(r[0] % 4 != 0 ? (last * 5 + 3 + r[1] % 2) % c.model.vocab_size : r[2] % c.model.vocab_size));
      starts[std::size_t(t)] = t == 0 || (document_length > 0 ? t % document_length == 0 : r[3] % 9 == 0);
    }
    for (std::int64_t t = 0; t < S; ++t) {
      const bool ends = t + 1 == S || starts[std::size_t(t) + 1];
      const bool ignored = ops::philox(seed + 1, stream, std::uint64_t(t))[0] % 7 == 0;
      b.labels.push_back(ends || ignored ? -100 : b.tokens[std::size_t(base + t + 1)]);
      if (ends) b.documents.push_back(base + t + 1);
    }
    b.sequences.push_back(std::int64_t(b.tokens.size()));
  }
  return b;
}

// A slice of each sequence: io::BatchSource::read's, token by token.
inline io::Batch slice_of(const io::Batch& whole, io::Slice slice, std::int64_t S) {
  if (slice.of == 1) return whole;
  io::Batch b;
  b.sequences = {0};
  const auto starts_at = [&](std::int64_t t) { return std::binary_search(whole.documents.begin(), whole.documents.end(), t); };
  for (std::size_t n = 0; n + 1 < whole.sequences.size(); ++n) {
    const std::int64_t begin = whole.sequences[n], end = whole.sequences[n + 1], share = S / slice.of;
    io::Batch::Piece piece{.length = end - begin};
    b.documents.push_back(std::int64_t(b.tokens.size()));
    for (std::int64_t t = begin; t < end; ++t) {
      if ((t - begin) / share != slice.index) continue;
      const bool first = b.documents.back() == std::int64_t(b.tokens.size());
      if (first)
        for (std::int64_t s = t; !starts_at(s); --s) ++piece.before;
      else if (starts_at(t))
        b.documents.push_back(std::int64_t(b.tokens.size()));
      b.tokens.push_back(whole.tokens[std::size_t(t)]);
      b.labels.push_back(whole.labels[std::size_t(t)]);
      piece.goes_on = t + 1 < end && !starts_at(t + 1);
    }
    b.sequences.push_back(std::int64_t(b.tokens.size()));
    b.pieces.push_back(piece);
  }
  b.documents.push_back(b.sequences.back());
  return b;
}

// The micro-batches of this rank for its next step, as Trainer::next_batches orders them.
inline std::vector<io::Batch> synthetic_step(core::Trainer& t, std::uint64_t seed = 7, std::int64_t document_length = 0) {
  const auto& c = t.config();
  const std::int64_t C = t.mesh().data_coordinates(), d = t.mesh().data_coordinate(), size = c.training.micro_batch_size;
  std::vector<io::Batch> batches;
  for (std::int64_t m = 0; m < c.training.gradient_accumulation; ++m)
    batches.push_back(slice_of(synthetic_batch(c, t.progress().sequences + (m * C + d) * size, size, seed, document_length), t.slice(),
                               c.data.sequence_length));
  return batches;
}

// Makes every parameter alive: fresh values plus noise, so that norms, queries, biases and gates are not at their special points.
inline void disturb(core::Trainer& t, double deviation = 0.1) {
  for (int i = 0; i < t.table().size(); ++i) {
    const auto& p = t.table()[i];
    const auto rows = t.params().update_rows(i);
    const Tensor w = t.params().stored(i, rows);
    const std::int64_t first =
        (t.layout().first_row[std::size_t(i)] + rows.begin) * p.shape.row() + t.layout().first_column[std::size_t(i)];
    const std::int64_t row = w.shape.row(), gap = p.shape.row() - row;  // columns that other ranks have
    for (std::int64_t k = 0; k < w.count(); ++k) {
      const double noise = deviation * ops::normal(99, ops::stream_of(p.name), std::uint64_t(first + k + k / row * gap));
      if (w.dtype == DType::f64)
        w.as<double>()[k] += noise;
      else if (w.dtype == DType::f32)
        w.as<float>()[k] += float(noise);
    }
  }
  t.params().publish();
}

}  // namespace moetrain::test
