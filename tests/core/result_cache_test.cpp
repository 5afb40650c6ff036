// result_cache_test.cpp -- the choice by hand, and training whose bits do not tell what was found and what computed again.
#include "core/result_cache.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::core;
using namespace moetrain::test;

namespace {

struct Curve {
  std::vector<double> losses, norms;
  ResultCache::Figures figures;
  std::array<std::int64_t, kTiers> chosen{};
  std::int64_t host_bytes = 0, peak = 0;
};

Curve run(Config c, Checkpointing how, std::vector<std::string> ops = {}, std::int64_t device = 0, std::int64_t host = 0) {
  c.memory = {.activation_checkpointing = how, .cache = {.ops = std::move(ops), .device = {device}, .host = {host}}};
  c.training.gradient_accumulation = 2;
  Trainer t(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t.initialize();
  disturb(t, 0.05);
  Curve curve;
  for (int s = 0; s < 4; ++s) {
    const auto r = t.step(synthetic_step(t));
    curve.losses.push_back(r.loss);
    curve.norms.push_back(r.grad_norm);
  }
  curve.peak = t.memory().peak();
  if (!t.results()) return curve;
  curve.figures = t.results()->take_figures();
  curve.host_bytes = t.results()->host_bytes();
  for (const Candidate& candidate : t.results()->candidates()) ++curve.chosen[std::size_t(candidate.tier)];
  return curve;
}

std::vector<Tier> tiers_of(std::vector<Candidate> candidates, const CacheBudget& budget, double rate, double layer_seconds) {
  choose(candidates, budget, rate, layer_seconds);
  std::vector<Tier> tiers;
  for (const Candidate& c : candidates) tiers.push_back(c.tier);
  return tiers;
}

constexpr std::int64_t kAll = std::int64_t(1) << 40;

}  // namespace

TEST_CASE("results are chosen by seconds a byte: on the device as far as they fit, then on the host as far as its link has time",
          "[core][cpu]") {
  using enum Tier;
  const std::vector<Candidate> all{{.layer = 0, .op = ResultOp::linear, .bytes = 100, .seconds = 1},           // worth 0.01
                                   {.layer = 0, .op = ResultOp::attention, .bytes = 50, .seconds = 5},         // 0.1
                                   {.layer = 1, .op = ResultOp::kda, .bytes = 100, .seconds = 8},              // 0.08
                                   {.layer = 1, .op = ResultOp::grouped_linear, .bytes = 200, .seconds = 10},  // 0.05
                                   {.layer = 1, .op = ResultOp::exchange, .bytes = 0, .seconds = 3},
                                   {.layer = 1, .op = ResultOp::linear, .bytes = 10, .seconds = 0}};
  CacheBudget b{.ops = {ResultOp::linear, ResultOp::grouped_linear, ResultOp::kda, ResultOp::attention, ResultOp::exchange},
                .device_bytes = 160};
  CHECK(tiers_of(all, b, 1, 0) == std::vector<Tier>{none, device, device, none, none, none});
  b.device_bytes = 250;  // what does not fit lets smaller ones by
  CHECK(tiers_of(all, b, 1, 0) == std::vector<Tier>{device, device, device, none, none, none});
  b.device_bytes = 0;
  b.host_bytes = kAll;
  CHECK(tiers_of(all, b, 100, 1.5) ==
        std::vector<Tier>{none, host, host, none, none, none});  // 2 s of link for the large one in layer 1
  CHECK(tiers_of(all, b, 100, 3.0) ==
        std::vector<Tier>{none, host, host, host, none, none});  // the first saves no more than it costs
  CHECK(tiers_of(all, b, 20, 100) == std::vector<Tier>{none, host, host, none, none, none});  // 10 s of link for 10 s saved
  b.beside = true;
  CHECK(tiers_of(all, b, 20, 100) == std::vector<Tier>{host, host, host, host, none, none});
  CHECK(tiers_of(all, b, 100, 1.4) ==
        std::vector<Tier>{none, host, host, none, none, none});  // a second more in layer 0 is too much
  b.forced = true;
  CHECK(tiers_of(all, b, 1, 0) == std::vector<Tier>{host, host, host, host, none, none});
  b.host_bytes = 150;
  CHECK(tiers_of(all, b, 1, 0) == std::vector<Tier>{none, host, host, none, none, none});
  b.ops = {ResultOp::linear};
  CHECK(tiers_of(all, b, 1, 0) == std::vector<Tier>{host, none, none, none, none, none});
}

TEST_CASE("what is found instead of computed changes no bit: any tier, any operators, any type", "[core][cpu]") {
  Config c = GENERATE(tiny_config(), tiny_linear_config());
  c.run.dtype = GENERATE(DType::f32, DType::bf16);
  c.moe.balance = Balance::quantile;
  const Curve kept = run(c, Checkpointing::none), again = run(c, Checkpointing::full);
  CHECK(again.losses == kept.losses);
  CHECK(again.norms == kept.norms);
  CHECK(again.peak < kept.peak);
  const auto same = [&](const Curve& curve) {
    CHECK(curve.losses == kept.losses);
    CHECK(curve.norms == kept.norms);
  };
  const Curve selective = run(c, Checkpointing::selective);
  same(selective);
  CHECK(selective.figures.hits > 100);
  CHECK(selective.chosen[int(Tier::none)] == 0);

  const std::vector<std::string> all{"linear", "grouped_linear", "kda", "attention", "exchange"};
  const Curve device = run(c, Checkpointing::full, all, kAll), host = run(c, Checkpointing::full, all, 0, kAll),
              automatic = run(c, Checkpointing::full, {"auto"}, kAll);
  for (const Curve* curve : {&device, &host, &automatic}) {
    same(*curve);
    CHECK(curve->chosen[int(Tier::none)] == 0);
    CHECK(curve->figures.hits == selective.figures.hits / 4 * 2);  // the first two steps measure
    CHECK(curve->figures.late == 0);
    CHECK(curve->figures.saved_seconds > 0);
  }
  CHECK(device.host_bytes == 0);
  CHECK(host.host_bytes > 10000);
  CHECK(host.peak < device.peak);

  const Curve some = run(c, Checkpointing::full, all, 20000, 20000);
  same(some);
  for (const Tier tier : {Tier::none, Tier::device, Tier::host}) CHECK(some.chosen[std::size_t(tier)] > 0);
  CHECK(some.host_bytes <= 20000);
  for (const std::string& op : all) {
    const Curve one = run(c, Checkpointing::full, {op}, 5000, kAll);
    CAPTURE(op);
    same(one);
    CHECK(one.figures.hits > 0);
    CHECK(one.chosen[int(Tier::none)] > 0);
  }
}

TEST_CASE("the indexer's dense stage, adapters and frozen layers are found as they are computed", "[core][cpu]") {
  Config dense = tiny_config(), adapters = tiny_config(), frozen = tiny_config();
  dense.loss.indexer_stage = IndexerStage::dense;
  adapters.lora =
      LoraConfig{.rank = 3, .alpha = 6, .shared_a = true, .target = {"attention", "shared", "expert_proj", "latent", "head"}};
  frozen.training.trainable = {"model.layers.3.*", "lm_head.weight"};
  for (Config c : {dense, adapters, frozen}) {
    c.run.dtype = DType::f64;
    const Curve again = run(c, Checkpointing::full);
    for (const Curve& curve : {run(c, Checkpointing::selective), run(c, Checkpointing::full, {"auto"}, 30000, kAll),
                               run(c, Checkpointing::full, {"linear", "exchange"}, 0, kAll)}) {
      CHECK(curve.losses == again.losses);
      CHECK(curve.norms == again.norms);
      CHECK(curve.figures.hits > 0);
    }
  }
}
