// plan.cpp -- counts from the parameter table, FLOPs from its matrices, bytes from one dry step of each kind of rank.
#include "core/plan.h"

#include <algorithm>
#include <map>
#include <memory>

#include "core/trainer.h"

namespace moetrain::core {
namespace {

struct Declared {
  ParamTable table;
  Model model;
  explicit Declared(const ModelConfig& m) : model(m, table) {}
};

bool holds(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

// The sum that the products of this weight belong to; null for what never multiplies as a matrix. Those are the parameters that
// do not decay: norms, convolutions, gates, biases and the queries of attention residuals.
double* flops_of(StepFlops& f, const Param& p, const ModelConfig& m) {
  if (p.unit == UnitKind::experts) return &f.experts;
  if (!p.decay) return nullptr;
  if (p.unit == UnitKind::embedding) return m.tie_word_embeddings ? &f.head : nullptr;
  if (p.unit == UnitKind::head) return &f.head;
  if (holds(p.name, ".indexer.")) return &f.indexer;
  if (holds(p.name, ".self_attn.")) return m.full_attention(p.layer) ? &f.attention : &f.kda;
  if (holds(p.name, ".shared_experts.")) return &f.shared_experts;
  if (holds(p.name, ".routed_expert_")) return &f.latent;
  if (holds(p.name, ".block_sparse_moe.gate.")) return &f.router;
  return &f.dense_mlp;
}

// Keys a query meets on average in a full sequence: itself and all before it, or the selected ones among those.
double keys_per_query(std::int64_t S, std::int64_t most) {
  const auto n = double(S), k = double(std::min(S, most));
  return (k * (k + 1) / 2 + (n - k) * k) / n;
}

// What a query of one layer costs beyond the projections, forward.
double kda_core(const ModelConfig& m) {
  constexpr double kChunk = 64;  // rows that the chunked form joins
  const auto d = double(m.linear_attn.head_dim);
  return double(m.linear_attn.num_heads) * (6 * d * d + 3 * kChunk * d + kChunk * kChunk);
}

double attention_core(const Config& c, bool sparse) {
  const ModelConfig& m = c.model;
  const std::int64_t S = c.data.sequence_length;
  // Selected keys are read as latents, so both products have the latent's width.
  const auto scores = double((sparse ? m.kv_lora_rank : m.qk_nope_head_dim) + m.qk_rope_head_dim);
  const auto values = double(sparse ? m.kv_lora_rank : m.v_head_dim);
  return 2 * double(m.num_attention_heads) * (scores + values) * keys_per_query(S, sparse ? m.dsa->index_topk : S);
}

// What distinguishes a rank: the rows it holds of every parameter, and the rows of tokens its experts are given.
std::vector<std::int64_t> kind_of(const Config& c, const ParamTable& table, int rank) {
  parallel::Mesh mesh(c.parallel.mesh(), parallel::dry(rank, c.parallel.mesh().ranks()));
  const Layout layout = make_layout(c, table, mesh);
  std::vector<std::int64_t> kind;
  for (const parallel::Unit& unit : layout.units)
    for (const int i : unit.tensors)
      kind.push_back(parallel::shard_of(layout.tensors[std::size_t(i)].shape[0], unit.group->rank(), unit.group->size()).count());
  if (const std::int64_t E = c.model.num_experts; E > 0) {
    // Balanced routing gives the slots that E does not divide to the first experts, one each.
    const std::int64_t slots = c.training.micro_batch_size * c.data.sequence_length * c.model.num_experts_per_token;
    const std::int64_t local = E / mesh.shape().expert;
    kind.push_back(std::clamp<std::int64_t>(slots % E - mesh.here().expert * local, 0, local));
  }
  return kind;
}

std::vector<io::Batch> full_batches(const Config& c) {
  const std::int64_t S = c.data.sequence_length, B = c.training.micro_batch_size;
  io::Batch b;
  b.tokens.assign(std::size_t(B * S), 0);
  b.labels.assign(std::size_t(B * S), 0);
  for (std::int64_t n = 0; n <= B; ++n) b.sequences.push_back(n * S);
  b.documents = b.sequences;
  return std::vector<io::Batch>(std::size_t(c.training.gradient_accumulation), b);
}

struct DryStep {
  RankPlan plan;
  parallel::Traffic traffic;
};

DryStep run_dry(const Config& c, int rank, std::span<const io::Batch> batches) {
  Trainer trainer(c, parallel::dry(rank, c.parallel.mesh().ranks()), Device::dry);
  const parallel::Traffic before = trainer.mesh().traffic();
  trainer.step(batches);
  const parallel::Traffic after = trainer.mesh().traffic();
  DryStep d;
  d.plan.device_bytes = trainer.memory().peaks();
  d.plan.device_total = trainer.memory().peak();
  d.traffic.bytes_gathered = after.bytes_gathered - before.bytes_gathered;
  d.traffic.bytes_exchanged = after.bytes_exchanged - before.bytes_exchanged;
  return d;
}

bool alike(const RankPlan& a, const RankPlan& b) {
  return a.device_bytes == b.device_bytes && a.device_total == b.device_total && a.host_bytes == b.host_bytes;
}

}  // namespace

ParameterCounts count_parameters(const Config& config) {
  Declared d(config.model);
  d.table.freeze_all_but(config.training.trainable);
  ParameterCounts n;
  std::int64_t read_only_as_rows = 0;
  for (const Param& p : d.table.all()) {
    const std::int64_t count = p.shape.count();
    n.total += count;
    if (p.unit == UnitKind::experts) n.routed_experts += count;
    if (p.trainable) n.trainable += count;
    if (p.unit == UnitKind::embedding && !config.model.tie_word_embeddings) read_only_as_rows += count;
  }
  n.trunk = n.total - n.routed_experts;
  n.active_per_token = n.trunk - read_only_as_rows;
  if (const std::int64_t E = config.model.num_experts; E > 0)
    n.active_per_token += n.routed_experts / E * config.model.num_experts_per_token;
  return n;
}

StepFlops step_flops(const Config& config, std::int64_t tokens) {
  const ModelConfig& m = config.model;
  const bool sparse = m.dsa && config.loss.indexer_stage == IndexerStage::sparse;
  const bool indexes = sparse || (m.dsa && config.loss.indexer_coefficient != 0);
  const Declared d(m);
  StepFlops f;  // of one token's forward, until the end
  for (const Param& p : d.table.all()) {
    double* sum = flops_of(f, p, m);
    if (sum == nullptr) continue;
    const double share = p.unit == UnitKind::experts ? double(m.num_experts_per_token) / double(m.num_experts) : 1;
    *sum += 2 * double(p.shape.count()) * share;
  }
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    if (!m.full_attention(l)) {
      f.kda += kda_core(m);
      continue;
    }
    f.attention += attention_core(config, sparse);
    if (m.dsa)
      f.indexer += 2 * double(m.dsa->index_n_heads * m.dsa->index_head_dim) *
                   keys_per_query(config.data.sequence_length, config.data.sequence_length);
  }
  if (!indexes) f.indexer = 0;
  constexpr double kForwardAndBackward = 3;
  for (double* sum : {&f.kda, &f.attention, &f.indexer, &f.dense_mlp, &f.experts, &f.shared_experts, &f.latent, &f.router, &f.head})
    *sum *= kForwardAndBackward * double(tokens);
  return f;
}

Plan make_plan(const Config& config) {
  Plan plan;
  plan.parameters = count_parameters(config);
  plan.tokens = config.sequences_per_step() * config.data.sequence_length;
  plan.flops = step_flops(config, plan.tokens);
  const Declared declared(config.model);
  const auto batches = full_batches(config);
  std::map<std::vector<std::int64_t>, RankPlan> kinds;
  for (int rank = 0; rank < config.parallel.mesh().ranks(); ++rank) {
    const auto [it, fresh] = kinds.try_emplace(kind_of(config, declared.table, rank));
    if (fresh) {
      const DryStep d = run_dry(config, rank, batches);
      it->second = d.plan;
      if (rank == 0) {
        plan.bytes_gathered = d.traffic.bytes_gathered;
        plan.bytes_exchanged = d.traffic.bytes_exchanged;
      }
    }
    const auto same = std::find_if(plan.ranks.begin(), plan.ranks.end(), [&](const RankPlan& r) { return alike(r, it->second); });
    if (same != plan.ranks.end()) {
      ++same->count;
      continue;
    }
    plan.ranks.push_back(it->second);
    plan.ranks.back().rank = rank;
  }
  return plan;
}

}  // namespace moetrain::core
