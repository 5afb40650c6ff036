// layouts_mpi_test.cpp -- any mesh, sharding and accumulation of the tiny model gives the losses and norms of one rank.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/support/layouts.h"

using namespace moetrain;
using namespace moetrain::test;
using parallel::Sharding;

namespace {

constexpr std::int64_t kGlobalSequences = 8;

core::Config config_of(const core::Config& base, const Layout& l) { return config_of(base, l, kGlobalSequences); }

// document_length: of every document; 0: uneven ones.
Curve run(const core::Config& c, std::unique_ptr<parallel::Communicator> world, std::int64_t document_length = 0) {
  core::Trainer t(c, std::move(world), Device::cpu, /*poison=*/true);
  return curve_of(t, [&](core::Trainer& of) { return synthetic_step(of, /*seed=*/7, document_length); });
}

void check_layout(const core::Config& base, const Curve& one, const Layout& l, std::int64_t document_length = 0) {
  CAPTURE(l.data, l.expert, l.sequence, l.tensor, l.bucket, l.micro_batch, int(l.sharding), l.reshard, l.expert_sharding,
          l.recompute, l.parts, document_length);
  check_curves(run(config_of(base, l), world_of(l.ranks()), document_length), one, 1e-9);
}

Curve one_rank(const core::Config& base, std::int64_t document_length = 0) {
  const Curve one = run(config_of(base, {.micro_batch = kGlobalSequences}), parallel::solo(), document_length);
  REQUIRE(*std::min_element(one.losses.begin(), one.losses.end()) < one.losses.front());
  return one;
}

core::Config balanced(core::Balance balance) {
  core::Config c = tiny_config();
  c.data.sequence_length = 24;
  c.optimizer.lr = 3e-3;  // steps of 1e-2 on this model amplify the rounding of a sum's order beyond the bound within ten steps
  c.moe.balance = balance;
  if (balance == core::Balance::auxiliary) {
    c.moe.auxiliary_coefficient = 0.05;
    c.moe.auxiliary_scope = core::AuxiliaryScope::sequence;
    c.moe.z_loss = 1e-3;
  }
  return c;
}

}  // namespace

TEST_CASE("every mesh and sharding gives the losses and norms of one rank under quantile balance") {
  const auto base = balanced(core::Balance::quantile);
  const Curve one = one_rank(base);
  for (const auto sharding : {Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none})
    for (const auto& [data, expert] : {std::pair{2, 1}, {4, 1}, {1, 2}, {1, 4}, {2, 2}})
      check_layout(base, one, {.data = data, .expert = expert, .micro_batch = 2, .sharding = sharding});
}

TEST_CASE("accumulation, recomputation, resharding and resident experts give the losses of one rank") {
  const auto base = balanced(core::Balance::quantile);
  const Curve one = one_rank(base);
  for (const std::int64_t micro_batch : {1, 2, 4})
    check_layout(base, one, {.micro_batch = micro_batch, .recompute = micro_batch == 2});
  check_layout(base, one, {.data = 2, .expert = 2, .micro_batch = 1, .reshard = false});
  check_layout(base, one, {.data = 2, .expert = 2, .micro_batch = 1, .sharding = Sharding::gradients, .recompute = true});
  check_layout(base, one, {.data = 2, .expert = 2, .micro_batch = 2, .expert_sharding = false});
  check_layout(base, one, {.data = 4, .micro_batch = 1, .expert_sharding = false, .recompute = true});
}

TEST_CASE("gradients that leave together, and weights that are gathered ahead, give the same bits as a layer at a time") {
  const auto base = balanced(core::Balance::quantile);
  for (Layout l : {Layout{.data = 2, .expert = 2, .micro_batch = 1},
                   Layout{.data = 4, .micro_batch = 1, .sharding = Sharding::gradients, .recompute = true},
                   Layout{.expert = 2, .micro_batch = 2, .sequence = 2}}) {
    const Curve apart = run(config_of(base, l), world_of(4));
    for (const std::int64_t bucket : {20000, 100000, 1 << 30}) {  // some layers, most, all; a layer has about 30 kB of gradients
      CAPTURE(l.data, l.expert, bucket);
      l.bucket = bucket;
      const Curve c = run(config_of(base, l), world_of(4));
      CHECK(c.losses == apart.losses);
      CHECK(c.norms == apart.norms);
    }
  }
}

TEST_CASE("the exchange in parts gives the same bits as in one") {
  const auto base = balanced(core::Balance::quantile);
  for (Layout l : {Layout{.expert = 2, .micro_batch = 2}, Layout{.data = 2, .expert = 2, .micro_batch = 1, .recompute = true},
                   Layout{.expert = 4, .micro_batch = 2, .sharding = Sharding::none}}) {
    const Curve whole = run(config_of(base, l), world_of(l.data * l.expert));
    for (l.parts = 2; l.parts <= 4; ++l.parts) {  // of four or two experts a rank
      CAPTURE(l.data, l.expert, l.parts);
      const Curve c = run(config_of(base, l), world_of(l.data * l.expert));
      CHECK(c.losses == whole.losses);
      CHECK(c.norms == whole.norms);
    }
  }
}

TEST_CASE("sign, sequence-wise and no balance give the losses of one rank on every mesh") {
  for (const auto balance : {core::Balance::sign, core::Balance::auxiliary, core::Balance::none}) {
    const auto base = balanced(balance);
    const Curve one = one_rank(base);
    for (const auto& [data, expert] : {std::pair{2, 1}, {1, 2}, {1, 4}, {2, 2}})
      check_layout(base, one, {.data = data, .expert = expert, .micro_batch = 2});
  }
}

TEST_CASE("the auxiliary loss over the global batch gives the losses of one rank on every mesh") {
  auto base = balanced(core::Balance::auxiliary);
  base.moe.auxiliary_scope = core::AuxiliaryScope::global_batch;
  const Curve one = one_rank(base);
  for (const auto& [data, expert] : {std::pair{2, 1}, {1, 4}, {2, 2}})
    check_layout(base, one, {.data = data, .expert = expert, .micro_batch = kGlobalSequences / (data * expert)});
}

TEST_CASE("limited experts give the losses of one rank on every mesh: the micro-batch of all ranks decides") {
  for (const auto overflow : {core::Overflow::reroute, core::Overflow::drop}) {
    auto base = balanced(core::Balance::sign);
    base.moe.capacity_factor = 1.1;
    base.moe.overflow = overflow;
    const Curve one = one_rank(base);
    CHECK(one.limited > 0);
    for (const auto& [data, expert] : {std::pair{2, 1}, {4, 1}, {1, 2}, {1, 4}, {2, 2}})
      check_layout(base, one,
                   {.data = data, .expert = expert, .micro_batch = kGlobalSequences / (data * expert), .recompute = data == 2, .parts = 2});
    const Curve two = run(config_of(base, {.micro_batch = kGlobalSequences / 2}), parallel::solo());  // in two micro-batches
    check_layout(base, two, {.data = 2, .expert = 2, .micro_batch = 1});
    check_layout(base, two, {.data = 1, .expert = 4, .micro_batch = 1, .sharding = Sharding::none});
  }
}

TEST_CASE("chunks of the loss change nothing: primes, tails and single rows") {
  const auto base = balanced(core::Balance::none);
  const Curve one = one_rank(base);
  for (const auto& [seq, vocab] : {std::pair{1, 61}, {7, 17}, {1000, 1}, {31, 60}}) {
    auto c = base;
    c.loss.seq_chunk = seq;
    c.loss.vocab_chunk = vocab;
    check_layout(c, one, {.data = 2, .expert = 2, .micro_batch = 2});
  }
}

TEST_CASE("the Kimi-Linear kind with a tied head has the losses of one rank on every mesh") {
  core::Config base = tiny_linear_config();
  base.data.sequence_length = 24;
  base.optimizer.lr = 3e-3;
  base.moe.balance = core::Balance::quantile;
  const Curve one = one_rank(base);
  for (const auto sharding : {Sharding::full, Sharding::optimizer, Sharding::none})
    check_layout(base, one, {.data = 2, .expert = 2, .micro_batch = 2, .sharding = sharding});
  check_layout(base, one, {.data = 1, .expert = 4, .micro_batch = 1, .recompute = true});
}

TEST_CASE("adapters, an A shared by experts among them, have the losses and norms of one rank on every mesh, sharding and cut") {
  for (const bool shared_a : {false, true}) {
    auto base = balanced(core::Balance::quantile);
    base.lora = core::LoraConfig{
        .rank = 3, .alpha = 6, .shared_a = shared_a, .target = {"attention", "shared", "expert_proj", "latent", "head", "*.mlp.*"}};
    const Curve one = one_rank(base);
    for (const auto sharding : {Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none})
      for (const auto& [data, expert] : {std::pair{2, 1}, {1, 4}, {2, 2}})
        check_layout(base, one, {.data = data, .expert = expert, .micro_batch = 2, .sharding = sharding});
    check_layout(base, one, {.data = 2, .expert = 2, .micro_batch = 1, .expert_sharding = false, .recompute = true, .parts = 2});
    check_layout(base, one, {.data = 1, .expert = 2, .micro_batch = 2, .reshard = false, .parts = 4});
  }
}

namespace {

// Adapters of all that may drop inputs.
core::Config with_dropout() {
  core::Config base = balanced(core::Balance::none);
  base.optimizer.lr = 1e-2;
  base.loss.indexer_stage = core::IndexerStage::dense;
  base.lora = core::LoraConfig{
      .rank = 8, .alpha = 16, .dropout = 0.25, .target = {"attention", "shared", "latent", "head", "*.mlp.*"}};
  return base;
}

}  // namespace

TEST_CASE("dropout of adapters falls on the same inputs on every mesh and accumulation") {
  const auto base = with_dropout();
  const Curve one = one_rank(base);
  for (const auto& [data, expert] : {std::pair{2, 1}, {1, 4}, {2, 2}})
    for (const std::int64_t micro_batch : {1, 2})
      check_layout(base, one, {.data = data, .expert = expert, .micro_batch = micro_batch});
}

TEST_CASE("f32 gives the losses of one f64 rank within 1e-4 where nothing is selected, and bf16 storage follows them within 2 percent") {
  core::Config base = balanced(core::Balance::none);
  base.model.initializer_range = 0.1;
  const auto four = [&](core::Config c, DType dtype, const Layout& layout = {.data = 2, .expert = 2, .micro_batch = 2}) {
    c = config_of(c, layout);
    c.run.dtype = dtype;
    return run(c, world_of(4));
  };
  const auto one = [&](const core::Config& c) { return run(config_of(c, {.micro_batch = kGlobalSequences}), parallel::solo()); };
  // Every expert and every key: near a tie f32 selects another, by the machine's BLAS, and ten steps carry that to percents.
  core::Config smooth = base;
  smooth.model.num_experts_per_token = smooth.model.num_experts;
  smooth.model.dsa->index_topk = smooth.data.sequence_length;
  smooth.optimizer.lr = 1e-3;  // at 3e-3 some texts and machines carry the rounding of f32 to 4e-4 in ten steps, at 1e-3 to 6e-6
  const Curve apart = one(smooth), f32 = four(smooth, DType::f32);
  CHECK(difference(f32.losses, apart.losses, 1e-4) == "");
  CHECK(f32.expert_tokens == apart.expert_tokens);
  for (const Layout& cut : {Layout{.expert = 2, .micro_batch = 2, .sequence = 2}, Layout{.micro_batch = 2, .sequence = 4}}) {
    const Curve sliced = four(smooth, DType::f32, cut);
    CHECK(difference(sliced.losses, apart.losses, 1e-4) == "");
    CHECK(difference(sliced.norms, apart.norms, 1e-4) == "");
    CHECK(sliced.expert_tokens == apart.expert_tokens);
  }
  const auto mean = [](const Curve& c) { return std::accumulate(c.losses.begin(), c.losses.end(), 0.0) / double(c.losses.size()); };
  const double want = mean(one(base));  // means, since some tokens route otherwise in bf16
  CHECK(std::abs(mean(four(base, DType::bf16)) - want) <= 2e-2 * want);
  CHECK(std::abs(mean(four(base, DType::bf16, {.micro_batch = 2, .sequence = 4})) - want) <= 2e-2 * want);
}

// Slices of 12 and 6 tokens, of documents of about 9; of one document a sequence, so that every slice but the first and the last is all
// of its middle; of documents that begin at every border, at every second, and at none.
TEST_CASE("sequences cut over ranks give the losses and norms of one rank, wherever documents begin") {
  const auto base = balanced(core::Balance::quantile);
  for (const std::int64_t document_length : {0, 24, 6, 12, 5}) {
    const Curve one = one_rank(base, document_length);
    check_layout(base, one, {.micro_batch = 2, .sequence = 2}, document_length);
    check_layout(base, one, {.micro_batch = 2, .sequence = 4}, document_length);
    check_layout(base, one, {.data = 2, .micro_batch = 2, .sequence = 2}, document_length);
    check_layout(base, one, {.expert = 2, .micro_batch = 2, .sequence = 2}, document_length);
  }
}

TEST_CASE("cut sequences with every sharding, accumulation, recomputation and exchange in parts give the losses of one rank") {
  const auto base = balanced(core::Balance::quantile);
  const Curve one = one_rank(base);
  for (const auto sharding : {Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none}) {
    check_layout(base, one, {.expert = 2, .micro_batch = 4, .sharding = sharding, .sequence = 2});
    check_layout(base, one, {.data = 2, .micro_batch = 1, .sharding = sharding, .recompute = true, .sequence = 2});
  }
  check_layout(base, one, {.micro_batch = 1, .recompute = true, .sequence = 4});
  check_layout(base, one, {.micro_batch = 8, .reshard = false, .expert_sharding = false, .sequence = 4});
  check_layout(base, one, {.expert = 2, .micro_batch = 2, .reshard = false, .parts = 3, .sequence = 2});
}

TEST_CASE("every balance gives the losses of one rank where sequences are cut") {
  for (const auto balance : {core::Balance::sign, core::Balance::auxiliary, core::Balance::none}) {
    const auto base = balanced(balance);
    const Curve one = one_rank(base);
    check_layout(base, one, {.micro_batch = 2, .sequence = 4});
    check_layout(base, one, {.expert = 2, .micro_batch = 2, .sequence = 2});
    check_layout(base, one, {.data = 2, .micro_batch = 2, .recompute = true, .sequence = 2});
  }
  auto base = balanced(core::Balance::auxiliary);
  base.moe.auxiliary_scope = core::AuxiliaryScope::global_batch;
  const Curve one = one_rank(base);
  check_layout(base, one, {.expert = 2, .micro_batch = 4, .sequence = 2});
  check_layout(base, one, {.micro_batch = 8, .sequence = 4});
  base.moe.auxiliary_scope = core::AuxiliaryScope::micro_batch;
  const Curve by_two = run(config_of(base, {.micro_batch = 2}), parallel::solo());
  check_layout(base, by_two, {.micro_batch = 2, .sequence = 4});
  check_layout(base, by_two, {.data = 2, .micro_batch = 2, .sequence = 2});
}

TEST_CASE("a dense indexer stage, and the Kimi-Linear kind, have the losses of one rank where sequences are cut") {
  auto dense = balanced(core::Balance::none);
  dense.loss.indexer_stage = core::IndexerStage::dense;
  core::Config linear = tiny_linear_config();
  linear.data.sequence_length = 24;
  linear.optimizer.lr = 3e-3;
  linear.moe.balance = core::Balance::quantile;
  for (const auto& base : {dense, linear})
    for (const std::int64_t document_length : {0, 24}) {
      const Curve one = one_rank(base, document_length);
      check_layout(base, one, {.micro_batch = 2, .sequence = 4}, document_length);
      check_layout(base, one, {.expert = 2, .micro_batch = 1, .recompute = true, .sequence = 2}, document_length);
    }
}

TEST_CASE("adapters and their dropout fall on the same tokens where sequences are cut") {
  auto base = with_dropout();
  const Curve one = one_rank(base);
  for (const std::int64_t micro_batch : {1, 2}) {
    check_layout(base, one, {.micro_batch = micro_batch, .sequence = 4});
    check_layout(base, one, {.expert = 2, .micro_batch = micro_batch, .sequence = 2});
  }
  base.lora = core::LoraConfig{.rank = 3, .alpha = 6, .shared_a = true, .target = {"attention", "shared", "expert_proj", "latent", "head"}};
  base.loss.indexer_stage = core::IndexerStage::sparse;
  const Curve with_experts = one_rank(base);
  check_layout(base, with_experts, {.micro_batch = 2, .sequence = 4});
  check_layout(base, with_experts, {.expert = 2, .micro_batch = 2, .recompute = true, .sequence = 2});
}

namespace {

// Heads that two and four ranks share, and nothing else that they do: a vocabulary of 61, widths of 40 and 11, texts of 27.
core::Config with_heads(core::Config c) {
  c.model.num_attention_heads = c.model.linear_attn.num_heads = 4;
  c.data.sequence_length = 27;
  c.optimizer.lr =
      1e-3;  // norms of these texts go up and down by two: at 3e-3 any layout's rounding may grow to 2e-9 of one in ten steps
  return c;
}

}  // namespace

TEST_CASE("matrices cut over ranks give the losses and norms of one rank, with every sharding, axis and recomputation") {
  const auto base = with_heads(balanced(core::Balance::quantile));
  const Curve one = one_rank(base);
  for (const auto sharding : {Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none}) {
    check_layout(base, one, {.micro_batch = 1, .sharding = sharding, .tensor = 4});
    check_layout(base, one, {.data = 2, .micro_batch = 2, .sharding = sharding, .recompute = true, .tensor = 2});
    check_layout(base, one, {.expert = 2, .micro_batch = 2, .sharding = sharding, .parts = 2, .tensor = 2});
  }
  check_layout(base, one, {.micro_batch = 4, .reshard = false, .expert_sharding = false, .tensor = 4, .bucket = 50000});
  auto even = base;
  even.data.sequence_length = 24;
  const Curve whole = one_rank(even);
  for (const std::int64_t document_length : {0, 24, 5}) {
    const Curve of_one = one_rank(even, document_length);
    check_layout(even, of_one, {.micro_batch = 2, .sequence = 2, .tensor = 2}, document_length);
  }
  check_layout(even, whole, {.micro_batch = 1, .recompute = true, .sequence = 2, .tensor = 2});
}

TEST_CASE("every balance, a limit of the experts among them, gives the losses of one rank where matrices are cut") {
  for (const auto balance : {core::Balance::sign, core::Balance::auxiliary, core::Balance::none}) {
    const auto base = with_heads(balanced(balance));
    const Curve one = one_rank(base);
    check_layout(base, one, {.micro_batch = 2, .tensor = 4});
    check_layout(base, one, {.expert = 2, .micro_batch = 2, .tensor = 2});
  }
  auto base = with_heads(balanced(core::Balance::auxiliary));
  base.moe.auxiliary_scope = core::AuxiliaryScope::global_batch;
  const Curve one = one_rank(base);
  check_layout(base, one, {.data = 2, .micro_batch = 4, .tensor = 2});
  base.moe.auxiliary_scope = core::AuxiliaryScope::micro_batch;
  const Curve by_two = run(config_of(base, {.micro_batch = 2}), parallel::solo());
  check_layout(base, by_two, {.data = 2, .micro_batch = 2, .tensor = 2});
  base = with_heads(balanced(core::Balance::auxiliary));
  base.data.sequence_length = 24;
  const Curve even = one_rank(base);
  check_layout(base, even, {.micro_batch = 2, .sequence = 2, .tensor = 2});
  base = with_heads(balanced(core::Balance::sign));
  base.moe.capacity_factor = 1.1;
  const Curve limited = one_rank(base);
  CHECK(limited.limited > 0);
  check_layout(base, limited, {.data = 2, .micro_batch = kGlobalSequences / 2, .tensor = 2});
  check_layout(base, limited, {.micro_batch = kGlobalSequences, .tensor = 4});
}

TEST_CASE(
    "chunks of the loss, a dense indexer stage, and the tied Kimi-Linear kind have the losses of one rank where matrices are cut") {
  auto base = with_heads(balanced(core::Balance::none));
  const Curve one = one_rank(base);
  for (const auto& [seq, vocab] : {std::pair{1, 61}, {7, 5}, {1000, 1}, {31, 15}}) {
    auto c = base;
    c.loss.seq_chunk = seq;
    c.loss.vocab_chunk = vocab;
    check_layout(c, one, {.data = 2, .micro_batch = 2, .tensor = 2});
  }
  base.loss.indexer_stage = core::IndexerStage::dense;
  core::Config linear = with_heads(tiny_linear_config());
  linear.moe.balance = core::Balance::quantile;
  for (const auto& kind : {base, linear}) {
    const Curve of_one = one_rank(kind);
    check_layout(kind, of_one, {.micro_batch = 2, .tensor = 4});
    check_layout(kind, of_one, {.expert = 2, .micro_batch = 1, .recompute = true, .tensor = 2});
  }
}

TEST_CASE("adapters and their dropout fall on the same inputs where matrices are cut") {
  auto base = with_heads(with_dropout());
  const Curve one = one_rank(base);
  check_layout(base, one, {.micro_batch = 1, .tensor = 4});
  check_layout(base, one, {.expert = 2, .micro_batch = 2, .tensor = 2});
  base.lora = core::LoraConfig{
      .rank = 3, .alpha = 6, .shared_a = true, .target = {"attention", "shared", "expert_proj", "latent", "head", "*.indexer.*"}};
  base.loss.indexer_stage = core::IndexerStage::sparse;
  const Curve with_experts = one_rank(base);
  check_layout(base, with_experts, {.micro_batch = 2, .tensor = 4});
  check_layout(base, with_experts, {.expert = 2, .micro_batch = 2, .recompute = true, .tensor = 2});
}

TEST_CASE("results that backward finds have the bits of computing them again, whatever is cut over ranks") {
  const auto base = with_heads(balanced(core::Balance::quantile));
  auto even = base;
  even.data.sequence_length = 24;
  for (const Layout& l : {Layout{.expert = 4, .micro_batch = 2, .recompute = true, .parts = 2},
                          Layout{.data = 2, .expert = 2, .micro_batch = 1, .recompute = true},
                          Layout{.expert = 2, .micro_batch = 2, .recompute = true, .tensor = 2},
                          Layout{.expert = 2, .micro_batch = 2, .recompute = true, .sequence = 2}}) {
    CAPTURE(l.data, l.expert, l.sequence, l.tensor);
    core::Config c = config_of(l.sequence > 1 ? even : base, l);
    const Curve again = run(c, world_of(4));
    const std::vector<std::string> all{"linear", "grouped_linear", "kda", "attention", "exchange"};
    for (const auto& cache : {core::CacheConfig{all, {}, {1 << 30}}, core::CacheConfig{{"auto"}, {40000}, {60000}},
                              core::CacheConfig{{"exchange"}, {5000}, {}}}) {
      c.memory.cache = cache;
      const Curve found = run(c, world_of(4));
      CHECK(found.losses == again.losses);
      CHECK(found.norms == again.norms);
      CHECK(found.expert_tokens == again.expert_tokens);
    }
  }
}

TEST_CASE(
    "experts and optimizer state in host memory give the bits of the device's, with any sharding, adapters or recomputation") {
  auto base = balanced(core::Balance::quantile);
  for (const bool adapters : {false, true}) {
    if (adapters) base.lora = core::LoraConfig{.rank = 3, .alpha = 6, .target = {"attention", "expert_proj"}};
    for (const Layout& l : {Layout{.data = 2, .expert = 2, .micro_batch = 1},
                            Layout{.data = 2, .expert = 2, .micro_batch = 2, .sharding = Sharding::none, .recompute = true},
                            Layout{.expert = 4, .micro_batch = 2, .reshard = false, .parts = 2},
                            Layout{.data = 4, .micro_batch = 1, .sharding = Sharding::optimizer, .expert_sharding = false}}) {
      CAPTURE(adapters, l.data, l.expert, int(l.sharding));
      core::Config c = config_of(base, l);
      const Curve here = run(c, world_of(4));
      c.memory.offload = {.optimizer = true, .experts = true, .slice = {20000}};
      const Curve there = run(c, world_of(4));
      CHECK(there.losses == here.losses);
      CHECK(there.norms == here.norms);
    }
  }
}
