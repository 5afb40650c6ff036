// search_test.cpp -- what a search proposes is allowed, fits, is what its --set lines say, and is the best of a space small enough
// to try all of it.
#include "core/search.h"

#include <algorithm>
#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/tiny.h"

namespace moetrain::core {
namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b)); }

constexpr std::int64_t kPlenty = std::int64_t(1) << 40;

// A CPU on which arithmetic, bytes, launches and messages all count.
Machine small_machine() {
  Machine m{.name = "small",
            .device = Device::cpu,
            .memory_bytes = kPlenty,
            .memory_bytes_per_s = 1e9,
            .rows_bytes_per_s = 1e9,
            .launch_s = 1e-5,
            .host_bytes_per_s = 1e9};
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64})
    for (auto& passes : m.flops_per_s[dtype]) passes = {2e9, 1e9};
  m.network = {.near = {1e8, 1e-4}, .far = {1e7, 1e-3}, .ranks_a_host = 2};
  m.beside = true;
  return m;
}

Config job(int ranks) {
  Config c = test::tiny_config();
  c.run.dtype = DType::f32;
  c.model.num_attention_heads = 4;
  c.data.train = {"/"};
  c.data.format = io::DataFormat::tokens;
  c.parallel.data_parallel = ranks;
  c.training.micro_batch_size = 2;
  return c;
}

// The least time of every combination of `ranks` ranks that is allowed and fits.
double least_of_all(const Config& base, const Machine& m, int ranks, std::int64_t memory) {
  double least = 1e300;
  std::int64_t readers = 0;
  for (int tp = 1; tp <= ranks; ++tp)
    for (int sp = 1; tp * sp <= ranks; ++sp)
      for (int ep = 1; tp * sp * ep <= ranks; ++ep) {
        if (ranks % (tp * sp * ep) != 0) continue;
        Config c = base;
        c.parallel.tensor_parallel = tp, c.parallel.sequence_parallel = sp, c.parallel.expert_parallel = ep;
        c.parallel.data_parallel = ranks / (tp * sp * ep);
        readers = std::int64_t(c.parallel.data_parallel) * ep;
        if (base.sequences_per_step() % readers != 0) continue;
        for (std::int64_t size = 1; size <= base.sequences_per_step() / readers; ++size) {
          if (base.sequences_per_step() / readers % size != 0) continue;
          c.training.micro_batch_size = size;
          c.training.gradient_accumulation = base.sequences_per_step() / readers / size;
          for (const auto sharding :
               {parallel::Sharding::none, parallel::Sharding::optimizer, parallel::Sharding::gradients, parallel::Sharding::full})
            for (const bool reshard : {true, false})
              for (const bool cut_experts : {true, false})
                for (const auto kept : {Checkpointing::none, Checkpointing::selective, Checkpointing::full}) {
                  c.parallel.sharding = sharding;
                  c.parallel.reshard_after_use = reshard;
                  c.parallel.expert_sharding = cut_experts;
                  c.memory.activation_checkpointing = kept;
                  if (!allowed(c, ranks)) continue;
                  const Plan plan = make_plan(c, &m);
                  if (plan.most_device() <= memory) least = std::min(least, 1e3 * plan.time->total());
                }
        }
      }
  return least;
}

}  // namespace

TEST_CASE("a search finds the best of a space that is small enough to try all of it", "[core]") {
  const Machine m = small_machine();
  const int ranks = GENERATE(1, 2, 4);
  const Config base = job(ranks);
  const auto all = search(base, m, {.ranks = ranks, .device_memory = kPlenty});
  REQUIRE(!all.best.empty());
  const double least = least_of_all(base, m, ranks, kPlenty);
  CHECK(near(all.best[0].ms, least));
  CHECK(std::is_sorted(all.best.begin(), all.best.end(), [](const Proposal& a, const Proposal& b) { return a.ms < b.ms; }));

  const std::int64_t less = all.best[0].device_bytes - 1;  // what does not fit now is not proposed
  const auto some = search(base, m, {.ranks = ranks, .device_memory = less});
  for (const Proposal& p : some.best) CHECK(p.device_bytes <= less);
  if (!some.best.empty()) CHECK(some.best[0].ms >= least);
}

TEST_CASE("proposals are allowed, keep the global batch, and are what their --set lines make of the job", "[core]") {
  const Machine m = small_machine();
  const int ranks = GENERATE(4, 6, 8);
  Config base = job(1);
  base.training.micro_batch_size = 24;
  const io::YamlNode before = config_to_yaml(base);
  const std::int64_t memory = GENERATE(kPlenty, 1'500'000);
  const auto found = search(base, m, {.ranks = ranks, .device_memory = memory, .host_memory = 1 << 30, .best = 20});
  REQUIRE(found.best.size() > 2);
  for (const Proposal& p : found.best) {
    std::vector<Fault> faults;
    check_config(p.config, io::YamlNode{}, ranks, faults);
    CHECK(faults.empty());
    CHECK(p.config.sequences_per_step() == 24);
    CHECK(p.device_bytes <= memory);
    const Config again = read_config(before, p.set, "", faults);
    CHECK(faults.empty());
    CHECK(config_to_yaml(again) == config_to_yaml(p.config));
    const Plan plan = make_plan(p.config, &m);
    CHECK(near(p.ms, 1e3 * plan.time->total()));
  }
  const auto twice = search(base, m, {.ranks = ranks, .device_memory = memory, .host_memory = 1 << 30, .best = 20});
  REQUIRE(twice.best.size() == found.best.size());
  for (std::size_t i = 0; i < found.best.size(); ++i) CHECK(twice.best[i].set == found.best[i].set);
}

TEST_CASE("a GPU is offered what runs on it, and nothing in fp64", "[core]") {
  Machine m = small_machine();
  m.device = Device::cuda;
  Config base = job(4);
  base.run.device = DeviceChoice::cuda;
  base.run.dtype = DType::bf16;
  const auto found = search(base, m, {.ranks = 4, .device_memory = kPlenty, .best = 100});
  CHECK(!found.best.empty());
  for (const Proposal& p : found.best) CHECK(allowed(p.config, 4));
  base.run.dtype = DType::f64;
  const auto none = search(base, m, {.ranks = 4, .device_memory = kPlenty});
  CHECK(none.best.empty());
  CHECK(none.tried == 0);
}

TEST_CASE("where nothing fits, the smallest is named", "[core]") {
  const auto none = search(job(2), small_machine(), {.ranks = 2, .device_memory = 1000});
  CHECK(none.best.empty());
  REQUIRE(none.smallest);
  CHECK(none.smallest->device_bytes > 1000);
  CHECK(allowed(none.smallest->config, 2));
  CHECK(none.tried == 0);  // what is held at rest says so
  Config odd = job(1);
  odd.training.micro_batch_size = 3;
  CHECK(search(odd, small_machine(), {.ranks = 2, .device_memory = kPlenty}).best.size() > 0);  // a cut sequence or matrix
  odd.model.num_attention_heads = 3;
  odd.data.sequence_length = 31;
  const auto refused = search(odd, small_machine(), {.ranks = 2, .device_memory = kPlenty});
  CHECK(refused.best.empty());
  CHECK(!refused.smallest);
}

TEST_CASE("what fits only with state in host memory is found where there is some", "[core]") {
  Config base = job(1);
  base.training.micro_batch_size = 1;
  base.memory.offload.slice = {4096};
  Config least = base;
  least.memory.activation_checkpointing = Checkpointing::full;
  const std::int64_t memory = make_plan(least).most_device() - 1;
  CHECK(search(base, small_machine(), {.ranks = 1, .device_memory = memory}).best.empty());
  const auto found = search(base, small_machine(), {.ranks = 1, .device_memory = memory, .host_memory = kPlenty});
  REQUIRE(!found.best.empty());
  for (const Proposal& p : found.best) {
    CHECK(p.config.memory.offload.optimizer);
    CHECK(p.device_bytes <= memory);
    CHECK(p.host_bytes > 0);
  }
}

TEST_CASE("a rank at rest holds what a step of it begins with", "[core]") {
  Config c = job(2);
  c.memory.offload.optimizer = GENERATE(false, true);
  const RankPlan resting = resting_rank(c, 0), stepped = dry_step(c, 0).plan;
  CHECK(resting.device_phases[std::size_t(MemoryPhase::load)] == stepped.device_phases[std::size_t(MemoryPhase::load)]);
  CHECK(resting.host_phases[std::size_t(MemoryPhase::load)] == stepped.host_phases[std::size_t(MemoryPhase::load)]);
  CHECK(resting.device_total < stepped.device_total);
}

}  // namespace moetrain::core
