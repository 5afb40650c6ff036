// plan_test.cpp -- what a plan says is what the public models have, what a hand counts, and what a real step takes.
#include "core/plan.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

namespace moetrain::core {
namespace {

Config preset(const std::string& name) {
  std::vector<Fault> faults;
  const auto job =
      io::parse_yaml("model: {preset: " + name + "}\ndata: {train: [.], sequence_length: 4096}\ntraining: {steps: 1}\n", "job");
  const Config config = read_config(job, {}, "", faults);
  std::string found;
  for (const Fault& f : faults) found += f.key + ": " + f.text + "\n";
  INFO(found);
  REQUIRE(faults.empty());
  return config;
}

// One KDA layer and a dense MLP, every dim 0 even. Elements: embedding 32, head 32, last norm 4; in the layer 104 of KDA's
// matrices, 56 of its pinned tensors, 72 of the MLP, 8 of norms.
Config even_config(int ranks, parallel::Sharding sharding) {
  Config c;
  c.run.dtype = DType::bf16;
  auto& m = c.model;
  m.vocab_size = 8;
  m.hidden_size = 4;
  m.num_hidden_layers = 1;
  m.intermediate_size = 6;
  m.linear_attn = {.num_heads = 2,
                   .head_dim = 2,
                   .short_conv_kernel_size = 4,
                   .gate_lower_bound = -5.0,
                   .use_full_rank_gate = true,
                   .full_attn_layers = {},
                   .kda_layers = {}};
  c.data.sequence_length = 4;
  c.training.steps = 1;
  c.parallel.data_parallel = ranks;
  c.parallel.sharding = sharding;
  c.parallel.bucket_size.bytes = 0;  // a layer at a time
  return c;
}

std::int64_t bytes(const RankPlan& r, Category c) { return r.device_bytes[std::size_t(c)]; }

io::Batch full_sequence(const Config& c) {
  const auto S = std::size_t(c.data.sequence_length);
  return {std::vector<std::int32_t>(S, 1), std::vector<std::int32_t>(S, 2), {0, std::int64_t(S)}, {0, std::int64_t(S)}};
}

}  // namespace

TEST_CASE("the presets have the parameters of the public models, to the unit", "[core]") {
  const auto k3 = count_parameters(preset("kimi-k3"));
  CHECK(k3.total == 2'779'484'476'000);
  CHECK(k3.active_per_token == 104'189'612'640);
  CHECK(k3.routed_experts == 2'722'740'830'208);
  CHECK(k3.trunk == 56'743'645'792);
  CHECK(k3.trainable == 2'779'484'476'000 - 92 * 896);  // router biases follow a rule, not a gradient

  const auto k31 = count_parameters(preset("kimi-k3.1"));
  CHECK(k31.total == 2'779'663'002'208);
  CHECK(k31.active_per_token == 104'368'138'848);
  CHECK(k31.routed_experts == 2'722'740'830'208);

  const auto linear = count_parameters(preset("kimi-linear-48b"));
  CHECK(linear.total == 49'122'681'728);
  CHECK(linear.active_per_token == 3'106'972'544);
  CHECK(linear.routed_experts == 47'110'422'528);
}

TEST_CASE("parameters of a small model are those counted by hand", "[core]") {
  Config c = test::tiny_config();
  const auto n = count_parameters(c);
  CHECK(n.total == 3 * 2831 + 2 * (2412 + 318) + 4 * (200 + 637 + 792 + 8 * 429) + 2880 + 5 * 144 + 72 + 2 * 1464);
  CHECK(n.routed_experts == 4 * 8 * 429);
  CHECK(n.trunk == n.total - n.routed_experts);
  CHECK(n.active_per_token == n.trunk - 1464 + 4 * 2 * 429);
  CHECK(n.trainable == n.total - 4 * 8);

  c.model.tie_word_embeddings = true;  // then the one table is read as rows and multiplied as the head
  const auto tied = count_parameters(c);
  CHECK(tied.total == n.total - 1464);
  CHECK(tied.active_per_token == n.active_per_token);

  c.training.trainable = {"model.embed_tokens.weight"};
  CHECK(count_parameters(c).trainable == 1464);
}

TEST_CASE("FLOPs of a step by kind of layer are those counted by hand", "[core]") {
  Config c = test::tiny_config();
  const double tokens = 64, passes = 3 * tokens;
  const auto f = step_flops(c, 64);
  CHECK(f.kda == passes * 3 * (2 * 2586 + 2 * (6 * 81 + 3 * 64 * 9 + 64 * 64)));
  // Selected keys of 32 positions with 4 each: 1 + 2 + 3 + 29 * 4; products of widths 10 + 4 and 10 over 3 heads.
  CHECK(f.attention == passes * 2 * (2 * 2388 + 2 * 3 * 24 * 122.0 / 32.0));
  CHECK(f.indexer == passes * 2 * (2 * 308 + 2 * 10 * 16.5));
  CHECK(f.dense_mlp == passes * 2 * 2880);
  CHECK(f.experts == passes * 4 * 2 * 2 * 429);
  CHECK(f.shared_experts == passes * 4 * 2 * 792);
  CHECK(f.latent == passes * 4 * 2 * 624);
  CHECK(f.router == passes * 4 * 2 * 192);
  CHECK(f.head == passes * 2 * 1464);
  CHECK(f.total() == f.kda + f.attention + f.indexer + f.dense_mlp + f.experts + f.shared_experts + f.latent + f.router + f.head);

  SECTION("dense attention meets half of all pairs, at the widths of its heads") {
    c.loss.indexer_stage = IndexerStage::dense;
    CHECK(step_flops(c, 64).attention == passes * 2 * (2 * 2388 + 2 * 3 * 17 * 16.5));
    CHECK(step_flops(c, 64).indexer == f.indexer);
    c.loss.indexer_coefficient = 0;  // nobody asks it then
    CHECK(step_flops(c, 64).indexer == 0);
  }
  SECTION("a selection wider than the sequence meets every earlier position") {
    c.model.dsa->index_topk = 100;
    CHECK(step_flops(c, 64).attention == passes * 2 * (2 * 2388 + 2 * 3 * 24 * 16.5));
  }
  SECTION("a tied head costs what its own would") {
    c.model.tie_word_embeddings = true;
    CHECK(step_flops(c, 64).head == f.head);
  }
}

TEST_CASE("bytes of weights, gradients and optimizer are hand arithmetic under every sharding", "[core]") {
  using parallel::Sharding;
  constexpr std::int64_t kAll = 308, kPinned = 56, kTrunk = 240, kHead = 36, kHeld = 2 * (kAll - kPinned) + 4 * kPinned;
  constexpr std::int64_t kState = 4 * (kAll - kPinned) + 8 * kAll;  // masters of bf16 weights, two moments of all
  const auto of = [](int ranks, Sharding s) { return make_plan(even_config(ranks, s)); };

  const Plan one = of(1, Sharding::full);
  REQUIRE(one.ranks.size() == 1);
  CHECK(bytes(one.ranks[0], Category::weights) == kHeld);
  CHECK(bytes(one.ranks[0], Category::gradients) == 4 * kAll);
  CHECK(bytes(one.ranks[0], Category::optimizer) == kState);
  CHECK(one.bytes_gathered + one.bytes_exchanged == 0);

  const Plan none = of(2, Sharding::none);
  REQUIRE(none.ranks.size() == 1);
  CHECK(none.ranks[0].count == 2);
  CHECK(bytes(none.ranks[0], Category::weights) == kHeld);
  CHECK(bytes(none.ranks[0], Category::gradients) == 4 * kAll);
  CHECK(bytes(none.ranks[0], Category::optimizer) == kState);

  const Plan optimizer = of(2, Sharding::optimizer);
  CHECK(bytes(optimizer.ranks[0], Category::weights) == kHeld);
  CHECK(bytes(optimizer.ranks[0], Category::gradients) == 4 * kAll + 4 * kTrunk / 2);  // and the sums of the largest unit's shard
  CHECK(bytes(optimizer.ranks[0], Category::optimizer) == kState / 2);

  const Plan gradients = of(2, Sharding::gradients);
  CHECK(bytes(gradients.ranks[0], Category::weights) == kHeld);
  // and the largest unit's whole ones, while those of the unit above travel
  CHECK(bytes(gradients.ranks[0], Category::gradients) == 4 * kAll / 2 + 4 * (kTrunk + kHead));
  CHECK(bytes(gradients.ranks[0], Category::optimizer) == kState / 2);

  const Plan full = of(2, Sharding::full);
  CHECK(bytes(full.ranks[0], Category::weights) ==
        kHeld / 2 + 2 * (kTrunk - kPinned) + 4 * kPinned + 2 * kHead);  // and the largest unit, gathered, and the next, which comes
  CHECK(bytes(full.ranks[0], Category::gradients) == 4 * kAll / 2 + 4 * (kTrunk + kHead));
  CHECK(bytes(full.ranks[0], Category::optimizer) == kState / 2);
}

TEST_CASE("the peaks of phases make up those of the step, and each phase has its own", "[core]") {
  Config c = test::tiny_config();
  c.run.dtype = DType::bf16;
  c.memory.activation_checkpointing = GENERATE(Checkpointing::none, Checkpointing::full);
  c.training.gradient_accumulation = GENERATE(1, 3);
  c.checkpoint = {.every = 2, .keep = 2, .async = true};
  const Plan plan = make_plan(c);
  const RankPlan& r = plan.ranks[0];
  for (std::size_t k = 0; k < kCategories; ++k) {
    std::int64_t device = 0, host = 0;
    for (const PhaseBytes& p : r.device_phases) device = std::max(device, p.by_category[k]);
    for (const PhaseBytes& p : r.host_phases) host = std::max(host, p.by_category[k]);
    INFO(name_of(Category(k)));
    CHECK(device == r.device_bytes[k]);
    CHECK(host == r.host_bytes[k]);
  }
  std::int64_t total = 0;
  for (const PhaseBytes& p : r.device_phases) total = std::max(total, p.total);
  CHECK(total == r.device_total);
  const auto of = [&](MemoryPhase p, Category k) { return r.device_phases[std::size_t(p)].by_category[std::size_t(k)]; };
  CHECK(of(MemoryPhase::load, Category::activations) == 0);
  CHECK(of(MemoryPhase::load, Category::optimizer) == bytes(r, Category::optimizer));
  CHECK(of(MemoryPhase::forward, Category::activations) > 0);
  CHECK(of(MemoryPhase::forward, Category::loss) > 0);
  CHECK(of(MemoryPhase::backward, Category::activations) > 0);
  CHECK(of(MemoryPhase::backward, Category::loss) == 0);
  CHECK(of(MemoryPhase::backward, Category::workspace) > of(MemoryPhase::step, Category::workspace));
  CHECK(of(MemoryPhase::step, Category::activations) == 0);
  CHECK(of(MemoryPhase::save, Category::weights) == of(MemoryPhase::load, Category::weights));
  CHECK(r.host_phases[std::size_t(MemoryPhase::step)].total == 0);
  CHECK(r.host_phases[std::size_t(MemoryPhase::save)].total > 0);
}

TEST_CASE("ranks are told apart where shards are uneven, and only there", "[core]") {
  const Plan plan = make_plan(even_config(3, parallel::Sharding::full));
  REQUIRE(plan.ranks.size() == 2);  // 4 rows over 3 ranks are 2, 2 and none
  CHECK(plan.ranks[0].rank == 0);
  CHECK(plan.ranks[0].count == 2);
  CHECK(plan.ranks[1].rank == 2);
  CHECK(plan.ranks[1].count == 1);
  CHECK(bytes(plan.ranks[0], Category::optimizer) > bytes(plan.ranks[1], Category::optimizer));
  CHECK(plan.ranks[0].device_total > plan.ranks[1].device_total);
}

TEST_CASE("experts over ranks exchange what balanced routing sends", "[core]") {
  Config c = test::tiny_config();
  c.parallel.expert_parallel = 4;
  const Plan plan = make_plan(c);
  int ranks = 0;
  for (const RankPlan& r : plan.ranks) ranks += r.count;
  CHECK(ranks == 4);
  CHECK(plan.tokens == 4 * 32);
  // 32 tokens to 2 experts each: 48 of 64 rows leave, out and back, forward and backward, of 4 layers, 13 wide in f64; a number
  // for each comes back in backward, and each forward has the counts of 6 experts elsewhere.
  CHECK(plan.bytes_exchanged == 4 * (4 * 48 * 13 * 8 + 48 * 8 + 6 * 8));
}

TEST_CASE("a plan holds what a real step takes, to the byte and in every category", "[core]") {
  Config c = GENERATE(test::tiny_config(), test::tiny_linear_config());
  c.run.dtype = GENERATE(DType::f64, DType::f32, DType::bf16);
  c.memory.activation_checkpointing = GENERATE(Checkpointing::none, Checkpointing::selective, Checkpointing::full);
  c.moe.balance = Balance::sign;
  c.training.gradient_accumulation = 2;
  const Plan plan = make_plan(c);
  REQUIRE(plan.ranks.size() == 1);

  Trainer real(c, parallel::solo(), Device::cpu);
  real.initialize();
  const std::vector<io::Batch> batches(2, full_sequence(c));
  real.step(batches);
  for (int k = 0; k < kCategories; ++k) {
    INFO(name_of(Category(k)));
    CHECK(plan.ranks[0].device_bytes[std::size_t(k)] == real.memory().peaks()[std::size_t(k)]);
  }
  CHECK(plan.ranks[0].device_total == real.memory().peak());
  CHECK(plan.ranks[0].device_pool == real.memory().pool().high_water());
  real.enter(MemoryPhase::save);
  CHECK(plan.ranks[0].device_phases == real.memory().phases());
  for (const Category k : {Category::activations, Category::loss, Category::workspace}) CHECK(bytes(plan.ranks[0], k) > 0);
}

TEST_CASE("a job has enough with the memory of its plan, and with less it ends out of memory", "[core][cpu]") {
  Config c = test::tiny_config();
  c.memory.activation_checkpointing = GENERATE(Checkpointing::none, Checkpointing::full);
  const std::int64_t needed = make_plan(c).ranks.at(0).device_pool;
  const std::vector<io::Batch> batches(1, full_sequence(c));
  for (const std::int64_t limit : {needed, needed - Pool::kAlign, bytes(make_plan(c).ranks[0], Category::weights)}) {
    c.memory.device_limit = io::ByteCount{limit};
    CHECK(make_plan(c).ranks[0].device_pool == needed);
    const auto run = [&] {
      Trainer t(c, parallel::solo(), Device::cpu, /*poison=*/true);
      t.initialize();
      for (int s = 0; s < 2; ++s) t.step(batches);
      CHECK(t.memory().pool().high_water() == limit);
      CHECK(t.memory().pool().fragmentation() == 0);
    };
    if (limit == needed)
      run();
    else
      CHECK(test::contains(test::error_of(run), "out of host memory: "));
  }
}

TEST_CASE("ranks of a plan are those that a dry step of each tells apart", "[core]") {
  Config c = test::tiny_config();
  const bool cut = GENERATE(false, true);
  c.parallel.tensor_parallel = cut ? 3 : 1;  // 61 words, 40 and 11 columns, 27 tokens
  if (cut) c.model.linear_attn.num_heads = 3;
  c.parallel.data_parallel = cut ? 2 : 5;
  c.parallel.expert_parallel = cut ? 2 : GENERATE(1, 2, 4);
  c.parallel.expert_sharding = GENERATE(true, false);
  c.training.micro_batch_size = 3;
  c.data.sequence_length = 9;  // 54 slots to 8 experts
  std::vector<RankPlan> found;
  const int ranks = c.parallel.mesh().ranks();
  for (int r = 0; r < ranks; ++r) {
    Trainer one(c, parallel::dry(r, ranks), Device::dry);
    const std::vector<io::Batch> batches(1, {{}, {}, {0, 9, 18, 27}, {0, 9, 18, 27}});
    one.step(batches);
    one.enter(MemoryPhase::save);
    const auto same = std::find_if(found.begin(), found.end(), [&](const RankPlan& p) {
      return p.device_phases == one.memory().phases() && p.device_pool == one.memory().pool().high_water();
    });
    if (same == found.end())
      found.push_back({.rank = r,
                       .count = 1,
                       .device_bytes = one.memory().peaks(),
                       .device_pool = one.memory().pool().high_water(),
                       .device_phases = one.memory().phases()});
    else
      ++same->count;
  }
  REQUIRE(found.size() > 1);
  const Plan plan = make_plan(c);
  REQUIRE(plan.ranks.size() == found.size());
  for (std::size_t i = 0; i < found.size(); ++i) {
    CHECK(plan.ranks[i].rank == found[i].rank);
    CHECK(plan.ranks[i].count == found[i].count);
    CHECK(plan.ranks[i].device_bytes == found[i].device_bytes);
    CHECK(plan.ranks[i].device_pool == found[i].device_pool);
  }
}

TEST_CASE("a sequence over ranks is planned: an eighth of the activations on each, alike but for the keys they see", "[core]") {
  Config c = test::tiny_config();
  c.data.sequence_length = 4096;
  const Plan one = make_plan(c);
  c.parallel.sequence_parallel = 8;
  const Plan eight = make_plan(c);
  int ranks = 0;
  for (const RankPlan& r : eight.ranks) {
    ranks += r.count;
    CHECK(bytes(r, Category::activations) < 0.2 * double(bytes(one.ranks[0], Category::activations)));
  }
  CHECK(ranks == 8);
  CHECK(eight.tokens == one.tokens);
  CHECK(eight.flops.total() == one.flops.total());
  CHECK(eight.bytes_gathered > one.bytes_gathered);
}

TEST_CASE("any number of micro-batches is planned from a few", "[core]") {
  Config c = test::tiny_config();
  c.parallel.data_parallel = 2;
  c.parallel.expert_parallel = 2;
  c.parallel.sharding = GENERATE(parallel::Sharding::full, parallel::Sharding::gradients, parallel::Sharding::optimizer);
  c.parallel.reshard_after_use = GENERATE(true, false);
  c.training.gradient_accumulation = 5;
  const Plan plan = make_plan(c);
  Trainer all(c, parallel::dry(0, 4), Device::dry);
  const parallel::Traffic before = all.mesh().traffic();
  all.step(std::vector<io::Batch>(5, {{}, {}, {0, 32}, {0, 32}}));
  CHECK(plan.bytes_gathered == all.mesh().traffic().bytes_gathered - before.bytes_gathered);
  CHECK(plan.bytes_exchanged == all.mesh().traffic().bytes_exchanged - before.bytes_exchanged);
  CHECK(plan.ranks[0].device_bytes == all.memory().peaks());
  CHECK(plan.ranks[0].device_total == all.memory().peak());
  CHECK(plan.ranks[0].device_pool == all.memory().pool().high_water());

  c.training.gradient_accumulation = 2'000'000'000;
  const Plan most = make_plan(c);
  CHECK(most.tokens == std::int64_t(4) * 2'000'000'000 * 32);
  CHECK(most.ranks[0].device_bytes == plan.ranks[0].device_bytes);
}

TEST_CASE("a million ranks and the longest sequence are planned from a few dry steps", "[core]") {
  Config c = test::tiny_linear_config();
  c.parallel.data_parallel = 1 << 17;
  c.parallel.expert_parallel = 8;
  c.data.sequence_length = std::numeric_limits<std::int32_t>::max();
  const auto start = std::chrono::steady_clock::now();
  const Plan plan = make_plan(c);
  CHECK(std::chrono::steady_clock::now() - start < std::chrono::seconds(30));  // a layout a rank would take days
  int ranks = 0;
  for (const RankPlan& r : plan.ranks) ranks += r.count;
  CHECK(ranks == 1 << 20);
  CHECK(plan.ranks[0].device_total > 8 * c.data.sequence_length * c.model.hidden_size);
}

TEST_CASE("what is too large to count is one Error with its numbers", "[core]") {
  const auto message = [](const Config& c) {
    try {
      make_plan(c);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("planned");
  };
  constexpr std::int64_t kLargest = std::numeric_limits<std::int32_t>::max();
  Config c = test::tiny_config();
  SECTION("elements of a parameter") {
    c.model.vocab_size = c.model.hidden_size = kLargest;
    CHECK(message(c).find("2147483647, 2147483647") != std::string::npos);
  }
  SECTION("parameters of the model") {
    c.model.vocab_size = std::int64_t(1) << 30;
    c.model.hidden_size = std::int64_t(1) << 27;
    CHECK(message(c).find("more parameters than bytes can be counted") != std::string::npos);
    CHECK(message(c).find("[1073741824, 134217728]") != std::string::npos);
  }
  SECTION("activations") {
    c.model.dsa.reset();
    c.data.sequence_length = c.model.hidden_size = kLargest;
    CHECK(message(c).find("2147483647, 2147483647") != std::string::npos);
  }
  SECTION("tokens of a step") {
    c.data.sequence_length = c.training.gradient_accumulation = kLargest;
    c.parallel.data_parallel = 1 << 15;
    CHECK(message(c).find("tokens of a step") != std::string::npos);
  }
}

}  // namespace moetrain::core
