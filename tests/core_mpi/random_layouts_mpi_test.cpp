// random_layouts_mpi_test.cpp -- jobs and layouts drawn from a seed: each gives what one rank gives, in another accumulation.
// MOETRAIN_SEED is the first of the seeds, one a trial, else the clock says; MOETRAIN_TRIALS how many.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <random>

#include "core/model.h"
#include "io/token_file.h"
#include "tests/support/layouts.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::test;
using parallel::Sharding;

namespace {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : bits_(seed) {}
  std::int64_t between(std::int64_t low, std::int64_t high) { return low + std::int64_t(bits_() % std::uint64_t(high - low + 1)); }
  bool one_in(std::int64_t n) { return between(1, n) == 1; }
  template <class T>
  T of(std::initializer_list<T> values) {
    return values.begin()[between(0, std::int64_t(values.size()) - 1)];
  }
  std::int64_t divisor(std::int64_t n) {
    std::int64_t d = between(1, n);
    while (n % d != 0) --d;
    return d;
  }

 private:
  std::mt19937_64 bits_;
};

void draw_attention(Dice& dice, core::ModelConfig& m, std::int64_t S) {
  m.num_attention_heads = dice.between(1, 4);
  m.qk_rope_head_dim = dice.of<std::int64_t>({0, 4});
  m.mla_use_output_gate = dice.one_in(2);
  m.linear_attn.num_heads = dice.between(1, 4);
  m.linear_attn.head_dim = dice.of<std::int64_t>({5, 8, 9});
  m.linear_attn.short_conv_kernel_size = dice.between(1, 5);
  if (dice.one_in(2)) m.linear_attn.gate_lower_bound.reset();
  m.linear_attn.use_full_rank_gate = dice.one_in(2);
  m.linear_attn.full_attn_layers.clear();
  for (std::int64_t layer = 1; layer <= m.num_hidden_layers; ++layer)
    if (dice.one_in(2)) m.linear_attn.full_attn_layers.push_back(layer);
  m.dsa->index_n_heads = dice.between(1, 4);
  m.dsa->index_topk = dice.between(1, S);
  m.dsa->index_norm_bias = dice.one_in(2);
  if (dice.one_in(3)) m.dsa.reset();
  if (dice.one_in(3)) m.q_lora_rank.reset();
}

void draw_experts(Dice& dice, core::Config& c) {
  auto& m = c.model;
  m.num_experts = dice.of<std::int64_t>({0, 4, 8, 8, 8, 12});
  m.num_experts_per_token = dice.between(1, 4);
  m.num_shared_experts = dice.between(0, 2);
  m.num_expert_group = dice.of<std::int64_t>({1, 1, 2, 4});
  m.topk_group = dice.between(1, m.num_expert_group);
  m.moe_renormalize = dice.one_in(2);
  m.routed_scaling_factor = dice.of({1.0, 2.446});
  m.first_k_dense_replace = dice.between(0, 2);
  m.moe_layer_freq = dice.of<std::int64_t>({1, 1, 2});
  m.moe_intermediate_size = dice.of<std::int64_t>({5, 8, 11});
  m.latent_moe_use_norm = dice.one_in(2);
  if (dice.one_in(2)) m.routed_expert_hidden_size.reset();
  c.moe.balance = dice.of({core::Balance::none, core::Balance::quantile, core::Balance::sign, core::Balance::auxiliary});
  c.moe.auxiliary_scope =
      dice.of({core::AuxiliaryScope::micro_batch, core::AuxiliaryScope::sequence, core::AuxiliaryScope::global_batch});
  c.moe.auxiliary_coefficient = 0.05;
  c.moe.quantile_bins = dice.of<std::int64_t>({7, 1000});
  c.moe.sign_rate = dice.of({1e-3, 5e-2});
  c.moe.z_loss = dice.of({0.0, 1e-3});
  c.moe.capacity_factor = dice.of({0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.4});
  c.moe.overflow = dice.of({core::Overflow::reroute, core::Overflow::drop});
}

// Adapters, frozen parameters; of a model that is legal.
void draw_trained(Dice& dice, core::Config& c) {
  if (dice.one_in(4))
    c.lora = core::LoraConfig{
        .rank = dice.between(1, 4),
        .alpha = 6,
        .dropout = dice.of({0.0, 0.25}),
        .rslora = dice.one_in(2),
        .shared_a = dice.one_in(2),
        .target = dice.of<std::vector<std::string>>(
            {{"attention"}, {"expert_proj"}, {"latent", "shared"}, {"head", "*.mlp.*"}, {"*_proj.weight", "*.w?"}})};
  const core::ParamTable table = core::parameters_of(c.model);
  if (dice.one_in(4))
    for (const core::Param& p : table.all())
      if (dice.one_in(3)) c.training.trainable.push_back(p.name);
}

core::Config draw_job(Dice& dice) {
  core::Config c = tiny_config();
  auto& m = c.model;
  const std::int64_t S = dice.of<std::int64_t>({4, 8, 12, 16, 24});
  c.run.seed = std::uint64_t(dice.between(1, 1000));
  c.run.dtype = dice.one_in(5) ? DType::f32 : DType::f64;
  m.vocab_size = dice.of<std::int64_t>({29, 61, 64});
  m.hidden_size = dice.of<std::int64_t>({16, 21, 24});
  m.num_hidden_layers = dice.between(1, 4);
  m.attn_res_block_size = dice.between(1, 3);
  if (dice.one_in(2)) m.attn_res_block_size.reset();
  m.hidden_act = dice.of({ops::GluKind::situ, ops::GluKind::silu});
  m.tie_word_embeddings = dice.one_in(3);
  m.initializer_range = 0.1;
  draw_attention(dice, m, S);
  draw_experts(dice, c);
  c.data = {.train = {"/"},
            .format = io::DataFormat::tokens,
            .sequence_length = S,
            .packing = !dice.one_in(3),
            .shuffle = dice.one_in(2)};
  c.training.grad_clip = dice.of({0.0, 1.0});
  c.optimizer.lr = 1e-3;
  // With 1e-5 norms of small values carry rounding to 4e-11 of the norm in ten steps, and in f32 past 1e-4.
  m.rms_norm_eps = dice.of({1e-3, 1e-2});
  c.loss.indexer_coefficient = dice.of({1.0, 0.3, 0.0});
  c.loss.indexer_stage = dice.of({core::IndexerStage::dense, core::IndexerStage::sparse});
  if (c.run.dtype == DType::f32) {  // near a tie f32 selects another expert or key, by the order of a sum
    m.num_experts_per_token = m.num_experts;
    m.topk_group = m.num_expert_group;
    if (m.dsa) m.dsa->index_topk = S;
    c.moe.capacity_factor = 0;
    m.rms_norm_eps = 1e-2;
    c.optimizer.eps = 1e-5;  // beside 1e-8 a gradient that is nothing but rounding moves its weight by the whole rate
  }
  return c;
}

struct Drawn {
  core::Config one, many;  // the same steps, of one rank and of all
  io::TokenData text;
};

bool legal(const core::Config& c) {
  return faults_of(c).empty() && error_of([&] { core::parameters_of(c); }) == "nothing was thrown";
}

// Documents of one kind of length, about thirty sequences of tokens, a seventh of them without a label.
io::TokenData draw_text(Dice& dice, const core::Config& c) {
  const std::int64_t S = c.data.sequence_length;
  const auto [shortest, longest] = dice.of<std::pair<std::int64_t, std::int64_t>>(
      {{1, 2 * S}, {1, 4}, {1, 2}, {S, S}, {S / 2, S / 2}, {S - 1, S + 1}, {3 * S, 9 * S}});
  io::TokenData text{.vocab_size = c.model.vocab_size};
  for (std::int64_t left = 0, t = 0; t < 30 * S + 3; ++t, --left) {
    if (left == 0) {
      text.documents.push_back(t);
      left = dice.between(shortest, longest);
    }
    // Something to learn: the next token mostly follows from the last.
    const std::int64_t any = dice.between(0, c.model.vocab_size - 1), last = t > 0 ? text.tokens.back() : 0;
    text.tokens.push_back(dice.one_in(4) ? any : (last * 5 + 3) % c.model.vocab_size);
    text.labels.push_back(dice.one_in(7) ? io::kIgnored : text.tokens.back());
  }
  return text;
}

Drawn draw(Dice& dice, int ranks) {
  for (;;) {
    core::Config base = draw_job(dice);
    if (!faults_of(base).empty()) continue;
    draw_trained(dice, base);
    const std::int64_t sequences = dice.of({4, 8});
    const auto axis = [&] { return dice.of({1, 2, 4}); };
    Layout l{.data = axis(), .expert = axis()};
    l.sequence = axis();
    l.tensor = kTensorParallel[std::size_t(dice.between(0, std::int64_t(kTensorParallel.size()) - 1))];
    if (l.ranks() != ranks) continue;
    const std::int64_t coordinates = l.data * l.expert;
    l.micro_batch = dice.divisor(sequences / coordinates);
    l.sharding = dice.of({Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none});
    l.reshard = dice.one_in(2);
    l.expert_sharding = dice.one_in(2);
    l.recompute = dice.one_in(2);
    l.parts = dice.between(1, 4);
    l.bucket = dice.of<std::int64_t>({0, 20000, 1 << 30});
    Drawn d{.many = config_of(base, l, sequences)};
    if (dice.one_in(3)) d.many.memory.activation_checkpointing = core::Checkpointing::selective;
    if (l.recompute && dice.one_in(2)) {
      d.many.memory.activation_checkpointing = core::Checkpointing::full;
      d.many.memory.cache = {.ops = {dice.one_in(2) ? "auto" : "exchange"},
                             .device = {dice.of<std::int64_t>({3000, 1 << 30})},
                             .host = {dice.of<std::int64_t>({0, 1 << 30})}};
    }
    d.many.memory.offload = {.optimizer = dice.one_in(3), .experts = dice.one_in(3), .slice = {20000}};
    d.many.loss.seq_chunk = dice.of<std::int64_t>({0, 1, 7, 1000});
    d.many.loss.vocab_chunk = dice.of<std::int64_t>({0, 1, 17, 60});

    // What a micro-batch decides wants the same micro-batches: those of a rank, or of all together.
    const auto scope = base.moe.balance == core::Balance::auxiliary ? base.moe.auxiliary_scope : core::AuxiliaryScope::sequence;
    const bool of_a_rank = scope == core::AuxiliaryScope::micro_batch, of_all = base.moe.capacity_factor > 0;
    if (of_a_rank && of_all && coordinates > 1) continue;
    const std::int64_t any = dice.divisor(sequences);
    const std::int64_t micro_batch = of_all                                        ? l.micro_batch * coordinates
                                     : of_a_rank                                   ? l.micro_batch
                                     : scope == core::AuxiliaryScope::global_batch ? sequences
                                                                                   : any;
    d.one = config_of(base, {.micro_batch = micro_batch}, sequences);
    d.one.run.dtype = DType::f64;
    if (!legal(d.many) || !legal(d.one)) continue;
    d.text = draw_text(dice, base);
    return d;
  }
}

Curve run(const core::Config& c, std::unique_ptr<parallel::Communicator> world, const io::BatchSource& text) {
  core::Trainer t(c, std::move(world), Device::cpu, /*poison=*/true);
  Curve curve = curve_of(t, [&](core::Trainer& of) { return of.next_batches(text); });
  // One more: of weights after the last update, in a pass that teaches nothing.
  curve.losses.push_back(t.evaluate(t.evaluation_batches(text, 1)).value_or(0));
  return curve;
}

void check_drawn(const Drawn& d, std::unique_ptr<parallel::Communicator> group) {
  const TempFolder folder;
  io::write_token_file(folder / "text.h5", d.text);
  const auto& c = d.many;
  const io::BatchSource text({.paths = {folder / "text.h5"},
                              .format = c.data.format,
                              .sequence_length = c.data.sequence_length,
                              .packing = c.data.packing,
                              .shuffle = c.data.shuffle,
                              .seed = c.run.seed,
                              .exclude = {},
                              .vocab_size = c.model.vocab_size});
  Curve one;
  if (group->rank() == 0) one = run(d.one, parallel::solo(), text);  // the others wait: all would only slow each other down
  broadcast(one, *group);
  REQUIRE(*std::max_element(one.norms.begin(), one.norms.end()) > 0);
  check_curves(run(c, std::move(group), text), one, c.run.dtype == DType::f64 ? 1e-9 : 1e-4);
}

// Rank 0's value of the environment variable, or what it has instead.
std::int64_t told(const char* variable, std::int64_t otherwise, parallel::Communicator& world) {
  const char* text = std::getenv(variable);
  std::int64_t value = text ? std::atoll(text) : otherwise;
  world.broadcast(&value, sizeof value, 0);
  return value;
}

}  // namespace

TEST_CASE("jobs and layouts drawn at random give the losses and norms of one rank") {
  auto world = parallel::mpi_world();
  const std::int64_t now = std::chrono::system_clock::now().time_since_epoch() / std::chrono::milliseconds(1) % 1'000'000'000;
  const std::int64_t first = told("MOETRAIN_SEED", now, *world), trials = told("MOETRAIN_TRIALS", 40, *world);
  for (std::int64_t seed = first; seed < first + trials; ++seed) {
    if (world->rank() == 0) {  // at once: of a crash or a hang Catch2 would tell nothing
      std::printf("random layouts: MOETRAIN_SEED=%lld MOETRAIN_TRIALS=1\n", static_cast<long long>(seed));
      std::fflush(stdout);
    }
    Dice of_all{std::uint64_t(seed)};
    const int ranks = of_all.of({1, 2, 2, 4, 4, 4}), which = world->rank() / ranks;  // smaller worlds run beside each other
    auto group = world_of(ranks);
    Dice dice(ops::philox(std::uint64_t(seed), 0, std::uint64_t(which))[0]);
    const Drawn drawn = draw(dice, ranks);
    INFO("again: MOETRAIN_SEED=" << seed << " MOETRAIN_TRIALS=1; layout " << which << " of this seed, against micro-batches of "
                                 << drawn.one.training.micro_batch_size << " on one rank:\n"
                                 << io::to_yaml(core::config_to_yaml(drawn.many)));
    check_drawn(drawn, std::move(group));
  }
}
