// plan.cpp -- counts from the parameter table, FLOPs from its matrices, bytes from one dry step of each kind of rank.
#include "core/plan.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "core/checkpoint_saver.h"
#include "core/trainer.h"
#include "ops/kda.h"

namespace moetrain::core {
namespace {

bool holds(const std::string& name, const char* part) { return name.find(part) != std::string::npos; }

// The sum that the products of this weight belong to; null for what never multiplies as a matrix. Those are the parameters that
// do not decay: norms, convolutions, gates, biases and the queries of attention residuals.
double* flops_of(StepFlops& f, const Param& p, const ModelConfig& m) {
  if (p.unit == UnitKind::experts || holds(p.name, ".block_sparse_moe.experts.")) return &f.experts;
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
double kda_core(const ModelConfig& m) { return double(m.linear_attn.num_heads) * ops::kda_row_flops(m.linear_attn.head_dim); }

double attention_core(const Config& c, bool sparse) {
  const ModelConfig& m = c.model;
  const std::int64_t S = c.data.sequence_length;
  // Selected keys are read as latents, so both products have the latent's width.
  const auto scores = double((sparse ? m.kv_lora_rank : m.qk_nope_head_dim) + m.qk_rope_head_dim);
  const auto values = double(sparse ? m.kv_lora_rank : m.v_head_dim);
  return 2 * double(m.num_attention_heads) * (scores + values) * keys_per_query(S, sparse ? m.dsa->index_topk : S);
}

// What distinguishes a rank: the rows it holds of every parameter, the rows of tokens its experts are given, the keys that its
// slices of sequences see, and its part of cut matrices. All follow from its place along the mesh's axes, where they change at a
// few places only: between those, ranks are alike.
class Kinds {
 public:
  using Kind = std::array<std::int64_t, 6>;
  Kinds(const Config& c, const ParamTable& table) : shape_(c.parallel.mesh()) {
    parallel::Mesh mesh(shape_, parallel::dry(0, shape_.ranks()));
    for (const Layout layout = make_layout(c, table, mesh); const parallel::Unit& unit : layout.units) {
      if (unit.sharding == parallel::Sharding::none) continue;
      auto& changes = unit.group == mesh.expert_data().data.get() ? of_experts_
                      : unit.group == mesh.dense().data.get()     ? of_dense_
                                                                  : of_all_;
      for (const int i : unit.tensors) {
        const std::int64_t rows = layout.tensors[std::size_t(i)].shape[0];
        const std::int64_t full = std::max<std::int64_t>(1, parallel::shard_rows(rows, unit.group->size()));
        changes.insert(changes.end(), {rows / full, (rows + full - 1) / full});  // a rank with fewer rows, ranks without any
      }
    }
    for (auto* changes : {&of_dense_, &of_all_, &of_experts_}) {
      std::sort(changes->begin(), changes->end());
      changes->erase(std::unique(changes->begin(), changes->end()), changes->end());
    }
    if (const std::int64_t E = c.model.num_experts; E > 0) {
      local_experts_ = E / shape_.expert;
      experts_ = E;
      experts_per_token_ = c.model.num_experts_per_token;
      tokens_ = c.training.micro_batch_size * (c.data.sequence_length / shape_.sequence);
    }
  }
  Kind of(int rank) const {
    const auto at = parallel::coordinates_of(shape_, rank);
    const auto part = [](const std::vector<std::int64_t>& changes, std::int64_t place) {
      return std::upper_bound(changes.begin(), changes.end(), place) - changes.begin();
    };
    const std::int64_t dense = (std::int64_t(at.data) * shape_.expert + at.expert) * shape_.sequence + at.sequence;
    const std::int64_t experts = (std::int64_t(at.data) * shape_.sequence + at.sequence) * shape_.tensor + at.tensor;
    // Balanced routing gives the slots that E does not divide to the first experts, one each.
    const std::int64_t rows = parallel::shard_of(tokens_, at.tensor, shape_.tensor).count();
    const std::int64_t uneven = experts_ > 0 ? rows * experts_per_token_ % experts_ : 0;
    return {part(of_dense_, dense),
            part(of_all_, rank),
            part(of_experts_, experts),
            std::clamp<std::int64_t>(uneven - at.expert * local_experts_, 0, local_experts_),
            at.sequence,
            at.tensor};
  }

 private:
  parallel::MeshShape shape_;
  std::vector<std::int64_t> of_dense_, of_all_, of_experts_;  // places along a group where the rows of some tensor change
  std::int64_t local_experts_ = 0, experts_ = 0, experts_per_token_ = 0, tokens_ = 0;
};

// a * b of what the job asks for, or one clear Error.
std::int64_t product(const char* of, std::int64_t a, std::int64_t b) {
  std::int64_t n = 0;
  if (__builtin_mul_overflow(a, b, &n))
    throw Error("plan: " + std::string(of) + " are more than can be counted: " + std::to_string(a) + " x " + std::to_string(b),
                ExitCode::bad_job);
  return n;
}

std::int64_t tokens_of_step(const Config& c) {
  const auto& t = c.training;
  std::int64_t tokens = c.data.sequence_length;
  for (const std::int64_t factor : {t.micro_batch_size, t.gradient_accumulation, std::int64_t(c.parallel.data_parallel),
                                    std::int64_t(c.parallel.expert_parallel)})
    tokens = product("tokens of a step", tokens, factor);
  return tokens;
}

// Sizes alone: a dry run looks at no token. A document a sequence, cut where the sequence is.
io::Batch full_batch(const Config& c, const io::Slice& slice) {
  io::Batch b;
  const std::int64_t share = c.data.sequence_length / slice.of;
  for (std::int64_t n = 0; n <= c.training.micro_batch_size; ++n) b.sequences.push_back(n * share);
  b.documents = b.sequences;
  if (slice.of > 1)
    b.pieces.assign(std::size_t(c.training.micro_batch_size), {slice.index * share, slice.index + 1 < slice.of, c.data.sequence_length});
  return b;
}

// What a step moves, and how long it takes where there is a clock.
struct Moved {
  parallel::Traffic traffic;
  StepTime time;
};

RankPlan held_by(Trainer& t) {
  RankPlan r;
  r.rank = t.mesh().world().control->rank();
  r.device_bytes = t.memory().peaks();
  r.device_total = t.memory().peak();
  r.device_pool = t.memory().pool().high_water();
  r.device_phases = t.memory().phases();
  r.host_bytes = t.host_memory().peaks();
  r.host_total = t.host_memory().peak();
  r.host_phases = t.host_memory().phases();
  return r;
}

bool alike(const RankPlan& a, const RankPlan& b) {
  return a.device_phases == b.device_phases && a.host_phases == b.host_phases && a.device_pool == b.device_pool;
}

}  // namespace

ParameterCounts count_parameters(const Config& config) {
  constexpr std::int64_t kMostParameters = std::int64_t(1) << 56;  // weights, gradients and moments are 18 bytes of each
  const ParamTable table = parameters_of(config);
  ParameterCounts n;
  std::int64_t read_only_as_rows = 0;
  for (const Param& p : table.all()) {
    const std::int64_t count = p.shape.count();
    if (count > kMostParameters - n.total)
      throw Error("the model has more parameters than bytes can be counted: " + std::to_string(n.total) + " and then " + p.name +
                  " " + p.shape.text() + " are more than " + std::to_string(kMostParameters));
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
  const ParamTable table = parameters_of(config);
  std::int64_t lowest = m.num_hidden_layers;  // layer that backward reaches
  bool indexer_learns = false;
  for (const Param& p : table.all()) {
    if (p.trainable && p.layer >= 0) lowest = std::min<std::int64_t>(lowest, p.layer);
    if (p.trainable && p.unit == UnitKind::embedding) lowest = 0;
    indexer_learns = indexer_learns || (p.trainable && holds(p.name, ".indexer."));
  }
  const auto reached = [&](std::int64_t layer) { return layer < 0 || layer >= lowest; };

  StepFlops f;  // of one token, until the end
  for (const Param& p : table.all()) {
    double* sum = flops_of(f, p, m);
    if (sum == nullptr) continue;
    double share = 1;
    if (sum == &f.experts) share = double(m.num_experts_per_token) / double(p.unit == UnitKind::experts ? m.num_experts : 1);
    const bool dx = sum == &f.indexer ? p.trainable : reached(p.layer);
    *sum += 2 * double(p.shape.count()) * share * (1 + dx + p.trainable);
  }
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    const double passes = reached(l) ? 3 : 1;
    if (!m.full_attention(l)) {
      f.kda += passes * kda_core(m);
      continue;
    }
    f.attention += passes * attention_core(config, sparse);
    if (m.dsa)
      f.indexer += (indexer_learns ? 3 : 1) * 2 * double(m.dsa->index_n_heads * m.dsa->index_head_dim) *
                   keys_per_query(config.data.sequence_length, config.data.sequence_length);
  }
  if (!indexes) f.indexer = 0;
  for (double* sum : {&f.kda, &f.attention, &f.indexer, &f.dense_mlp, &f.experts, &f.shared_experts, &f.latent, &f.router, &f.head})
    *sum *= double(tokens);
  return f;
}

// The second micro-batch of a step may differ from the first (gradients and gathered weights are there already), but each later
// one holds and moves what the second did. So two stand for all of them: the peaks are theirs, and each adds the second's traffic and time.
// Only where blocks lie may still change a little, so more are run until the pool's mark stays.
RankStep dry_step(const Config& c, int rank, const Machine* machine) {
  std::optional<StepClock> clock;
  if (machine) clock.emplace(*machine);
  Trainer trainer(c, parallel::dry(rank, c.parallel.mesh().ranks(), clock ? &clock->network() : nullptr), Device::dry);
  if (clock) clock->watch(trainer.context(), trainer.memory());
  std::vector<io::Batch> batches{full_batch(c, trainer.slice())};
  const auto so_far = [&] {
    Moved m{.traffic = trainer.mesh().traffic(), .time = {}};
    if (clock) m.time = clock->so_far(m.traffic);
    return m;
  };
  const auto one_step = [&] {
    const Moved before = so_far();
    trainer.step(batches);
    Moved m = so_far();
    m.traffic.bytes_gathered -= before.traffic.bytes_gathered;
    m.traffic.bytes_exchanged -= before.traffic.bytes_exchanged;
    m.time.add(before.time, -1);
    return m;
  };
  RankStep d;
  while (trainer.results() && !trainer.results()->decided()) {
    one_step();  // tells what there is to choose from, as two steps of a run do
    clock ? trainer.results()->decide(*trainer.mesh().world().control, machine->host_bytes_per_s) : trainer.results()->assume();
  }
  const Moved one = one_step();
  d.traffic = one.traffic, d.time = one.time;
  if (const std::int64_t micro_batches = c.training.gradient_accumulation; micro_batches > 1) {
    batches.push_back(batches[0]);
    const Moved two = one_step();
    const auto with_all = [&](std::int64_t& sum, std::int64_t both) {
      sum += product("bytes moved in a step", both - sum, micro_batches - 1);
    };
    with_all(d.traffic.bytes_gathered, two.traffic.bytes_gathered);
    with_all(d.traffic.bytes_exchanged, two.traffic.bytes_exchanged);
    d.time.add(two.time, double(micro_batches - 1));
    d.time.add(one.time, -double(micro_batches - 1));
    const Pool& pool = trainer.memory().pool();
    for (std::int64_t before = 0; std::int64_t(batches.size()) < micro_batches && pool.high_water() > before;) {
      before = pool.high_water();
      batches.push_back(batches[0]);
      trainer.step(batches);
    }
  }
  if (!std::isfinite(d.time.total()))
    throw Error("plan: on machine " + machine->name + " a step takes longer than can be counted", ExitCode::bad_job);
  trainer.enter(MemoryPhase::save);
  std::optional<HostCopy> copy;
  if (c.checkpoint.async && c.checkpoint.every > 0) copy.emplace(trainer.host_memory(), saved_rows(trainer));
  d.plan = held_by(trainer);
  return d;
}

RankPlan resting_rank(const Config& c, int rank) {
  Trainer trainer(c, parallel::dry(rank, c.parallel.mesh().ranks()), Device::dry);
  return held_by(trainer);
}

std::int64_t Plan::most_device() const {
  std::int64_t most = 0;
  for (const RankPlan& r : ranks) most = std::max(most, r.device_pool);
  return most;
}

std::int64_t Plan::most_host() const {
  std::int64_t most = 0;
  for (const RankPlan& r : ranks) most = std::max(most, r.host_total);
  return most;
}

Plan make_plan(const Config& config, const Machine* machine) {
  Plan plan;
  plan.parameters = count_parameters(config);
  plan.tokens = tokens_of_step(config);
  plan.flops = step_flops(config, plan.tokens);
  const Kinds kinds(config, parameters_of(config));
  std::map<Kinds::Kind, std::size_t> planned;  // which of plan.ranks
  for (int rank = 0; rank < config.parallel.mesh().ranks(); ++rank) {
    const auto [it, fresh] = planned.try_emplace(kinds.of(rank), plan.ranks.size());
    if (!fresh) {
      ++plan.ranks[it->second].count;
      continue;
    }
    RankStep d = dry_step(config, rank, machine);
    if (machine && (!plan.time || d.time.total() > plan.time->total())) plan.time = d.time;
    if (rank == 0) {
      plan.bytes_gathered = d.traffic.bytes_gathered;
      plan.bytes_exchanged = d.traffic.bytes_exchanged;
    }
    const auto same = std::find_if(plan.ranks.begin(), plan.ranks.end(), [&](const RankPlan& r) { return alike(r, d.plan); });
    it->second = std::size_t(same - plan.ranks.begin());
    if (same != plan.ranks.end()) {
      ++same->count;
      continue;
    }
    plan.ranks.push_back(d.plan);
  }
  return plan;
}

}  // namespace moetrain::core
