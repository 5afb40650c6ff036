// layouts.h -- one job under different layouts: what ten steps of it give, and how near they are to those of one rank.
#pragma once
#include <algorithm>
#include <array>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tiny.h"

namespace moetrain::test {

inline constexpr int kSteps = 10;
inline constexpr std::array kTensorParallel = {1, 2, 4};  // what tensor_parallel may be in tests of all layouts

struct Curve {
  std::vector<double> losses, norms, balance_losses, indexer_losses;  // the last two empty where the job has none
  std::vector<std::int64_t> expert_tokens;                            // of all steps
  std::int64_t limited = 0;                                           // slots rerouted or dropped
};

// Ranks [first, first + ranks) of the job's, as a world of their own; collective over all.
inline std::unique_ptr<parallel::Communicator> world_of(int ranks) {
  auto all = parallel::mpi_world();
  REQUIRE(all->size() % ranks == 0);
  std::vector<int> members(static_cast<std::size_t>(ranks));
  std::iota(members.begin(), members.end(), all->rank() / ranks * ranks);
  return all->subgroup(members);
}

struct Layout {
  int data = 1, expert = 1;
  std::int64_t micro_batch = 1;  // sequences
  parallel::Sharding sharding = parallel::Sharding::full;
  bool reshard = true, expert_sharding = true, recompute = false;
  std::int64_t parts = 1;  // of the exchange
  int sequence = 1, tensor = 1;
  std::int64_t bucket = 0;  // bytes
  int ranks() const { return data * expert * sequence * tensor; }
};

// `global_sequences` a step.
inline core::Config config_of(const core::Config& base, const Layout& l, std::int64_t global_sequences) {
  core::Config c = base;
  c.parallel.data_parallel = l.data;
  c.parallel.expert_parallel = l.expert;
  c.parallel.sequence_parallel = l.sequence;
  c.parallel.tensor_parallel = l.tensor;
  c.parallel.bucket_size.bytes = l.bucket;
  c.parallel.sharding = l.sharding;
  c.parallel.reshard_after_use = l.reshard;
  c.parallel.expert_sharding = l.expert_sharding;
  c.moe.overlap_chunks = l.parts;
  c.training.micro_batch_size = l.micro_batch;
  c.training.gradient_accumulation = global_sequences / (l.data * l.expert * l.micro_batch);
  c.memory.activation_checkpointing = l.recompute ? core::Checkpointing::full : core::Checkpointing::none;
  return c;
}

// Steps with what `batches` gives for each.
template <class Batches>
Curve curve_of(core::Trainer& t, const Batches& batches) {
  t.initialize();
  disturb(t, 0.05);
  Curve curve;
  for (int s = 0; s < kSteps; ++s) {
    const std::vector<io::Batch> mine = batches(t);
    const auto r = t.step(mine);
    curve.losses.push_back(r.loss);
    curve.norms.push_back(r.grad_norm);
    if (r.balance_loss) curve.balance_losses.push_back(*r.balance_loss);
    if (r.indexer_loss) curve.indexer_losses.push_back(*r.indexer_loss);
    curve.limited += r.rerouted + r.dropped;
    curve.expert_tokens.insert(curve.expert_tokens.end(), r.expert_tokens.begin(), r.expert_tokens.end());
    // The same bits on every rank.
    std::vector<double> all(std::size_t(t.mesh().shape().ranks()));
    const parallel::Communicator::Gather piece{&r.grad_norm, all.data(), sizeof(double)};
    t.mesh().world().control->all_gather({&piece, 1});
    CHECK(std::all_of(all.begin(), all.end(), [&](double x) { return x == r.grad_norm; }));
  }
  return curve;
}

// The first rank's, on all.
inline void broadcast(Curve& c, parallel::Communicator& group) {
  const auto send = [&](auto& values) {
    auto count = std::int64_t(values.size());
    group.broadcast(&count, sizeof count, 0);
    values.resize(std::size_t(count));
    group.broadcast(values.data(), count * std::int64_t(sizeof values[0]), 0);
  };
  for (auto* values : {&c.losses, &c.norms, &c.balance_losses, &c.indexer_losses}) send(*values);
  send(c.expert_tokens);
  group.broadcast(&c.limited, sizeof c.limited, 0);
}

// Every broken rule of the job, a line each; empty: it is legal.
inline std::string faults_of(const core::Config& c) {
  const io::YamlNode job = core::config_to_yaml(c);
  std::vector<core::Fault> faults;
  const core::Config read = core::read_config(job, {}, "", faults);
  core::check_config(read, job, c.parallel.mesh().ranks(), faults);
  std::string text;
  for (const auto& f : faults) text += f.key + ": " + f.text + "\n";
  return text;
}

inline void check_curves(const Curve& got, const Curve& want, double bound) {
  CHECK(difference(got.losses, want.losses, bound) == "");
  CHECK(difference(got.norms, want.norms, bound) == "");
  CHECK(difference(got.balance_losses, want.balance_losses, bound, bound) == "");
  CHECK(difference(got.indexer_losses, want.indexer_losses, bound, bound) == "");
  CHECK(got.expert_tokens == want.expert_tokens);
  CHECK(got.limited == want.limited);
}

}  // namespace moetrain::test
