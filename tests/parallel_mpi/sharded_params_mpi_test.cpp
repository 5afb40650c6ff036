// sharded_params_mpi_test.cpp -- every sharding trains a small quadratic to the weights of one rank, and holds each row once.
#include <cstring>

#include "parallel/sharded_params.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;
using test::Bench;

namespace {

constexpr int kSteps = 3, kMicroBatches = 2;
constexpr Sharding kAll[] = {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::full};

// Rows that four ranks do not divide, fewer rows than ranks, and none at all; `tail` in a unit of its own, `base` frozen.
std::vector<ShardedTensor> tensors() {
  return {{"wide", {7, 3}, DType::f64, true}, {"one", {1, 5}, DType::f64, true},     {"flat", {8}, DType::f32, true},
          {"none", {0, 4}, DType::f32, true}, {"tail", {2, 2, 2}, DType::f64, true}, {"base", {5, 2}, DType::bf16, false}};
}
std::vector<Unit> units(Communicator& group, Sharding sharding) {
  return {{"trunk", {0, 1, 2, 3}, &group, sharding}, {"tail", {4}, &group, sharding}, {"base", {5}, &group, sharding}};
}

// The loss of rank r in micro-batch m is sum_i pull(r, m) / 2 (w_i - aim_i)^2, so its gradient is pull (w - aim). With whole pulls
// and aims and a rate of a power of two every number is exact, in any order of sums.
double pull(int rank, int micro_batch) { return 1 + (rank + micro_batch) % 2; }
double aim(int tensor, std::int64_t i) { return double((tensor * 5 + i * 3) % 11) - 5; }
double start(int tensor, std::int64_t i) { return double((tensor * 7 + i) % 13) - 6; }
// In the second micro-batch only the first rank uses `tail`, as if only it had rows for that expert.
bool uses(int tensor, int rank, int micro_batch) { return tensor != 4 || micro_batch == 0 || rank == 0; }

struct Run {
  double rate;
  std::vector<std::vector<double>> w;
};
Run on_one_rank(int ranks, double rate, int steps) {
  Run run{rate, {}};
  const auto all = tensors();
  for (int t = 0; t < int(all.size()); ++t) {
    run.w.emplace_back();
    for (std::int64_t i = 0; i < all[std::size_t(t)].shape.count(); ++i) run.w.back().push_back(start(t, i));
  }
  for (int step = 0; step < steps; ++step)
    for (int t = 0; t < int(all.size()); ++t) {
      if (!all[std::size_t(t)].trainable) continue;
      double pulls = 0;
      for (int m = 0; m < kMicroBatches; ++m)
        for (int r = 0; r < ranks; ++r)
          if (uses(t, r, m)) pulls += pull(r, m);
      for (std::size_t i = 0; i < run.w[std::size_t(t)].size(); ++i) {
        double& w = run.w[std::size_t(t)][i];
        w -= rate * pulls * (w - aim(t, std::int64_t(i)));
      }
    }
  return run;
}

void set_start(ShardedParams& params) {
  for (int t = 0; t < int(params.tensors().size()); ++t) {
    const Rows mine = params.update_rows(t);
    const Tensor w = params.stored(t, mine);
    for (std::int64_t i = 0; i < w.count(); ++i) Bench::set(w, i, start(t, mine.begin * w.shape.row() + i));
  }
  params.publish();
}

void one_step(ShardedParams& params, int rank, double rate) {
  const int units_count = int(params.units().size());
  params.begin_step();
  for (int m = 0; m < kMicroBatches; ++m) {
    for (int u = 0; u < units_count; ++u) {
      params.gather(u);
      params.release(u);
    }
    for (int u = units_count - 1; u >= 0; --u) {
      params.gather(u);
      for (const int t : params.units()[std::size_t(u)].tensors) {
        if (!params.tensors()[std::size_t(t)].trainable || !uses(t, rank, m)) continue;
        const ConstTensor w = params.weight(t);
        const Tensor g = params.gradient(t);
        for (std::int64_t i = 0; i < w.count(); ++i)
          Bench::set(g, i, Bench::get(g, i) + pull(rank, m) * (Bench::get(w, i) - aim(t, i)));
      }
      params.reduce(u);
      params.release(u);
    }
  }
  params.finish_gradients();
  for (int t = 0; t < int(params.tensors().size()); ++t) {
    if (!params.tensors()[std::size_t(t)].trainable) continue;
    const Rows mine = params.update_rows(t);
    const Tensor w = params.stored(t, mine), g = params.stored_gradient(t, mine);
    for (std::int64_t i = 0; i < w.count(); ++i) Bench::set(w, i, Bench::get(w, i) - rate * Bench::get(g, i));
  }
  params.publish();
}

// Whole weights as this rank sees them between gather and release.
std::vector<std::vector<double>> seen(ShardedParams& params) {
  std::vector<std::vector<double>> all(params.tensors().size());
  for (int u = 0; u < int(params.units().size()); ++u) {
    params.gather(u);
    for (const int t : params.units()[std::size_t(u)].tensors) all[std::size_t(t)] = test::values_of(params.weight(t));
    params.release(u);
  }
  return all;
}

}  // namespace

TEST_CASE("every sharding trains to exactly the weights of one rank", "[parallel][mpi]") {
  for (const Sharding sharding : kAll)
    for (const bool reshard : {true, false}) {
      CAPTURE(int(sharding), reshard);
      const auto world = mpi_world();
      Memory memory(Device::cpu);
      ShardedParams params(memory, tensors(), units(*world, sharding), {.reshard_after_use = reshard});
      const auto weights = memory.now(Category::weights), gradients = memory.now(Category::gradients);
      set_start(params);
      REQUIRE(seen(params) == on_one_rank(world->size(), 1.0 / 32, 0).w);
      params.publish();
      for (int step = 1; step <= kSteps; ++step) {
        one_step(params, world->rank(), 1.0 / 32);
        CHECK(memory.now(Category::weights) == weights);
        CHECK(memory.now(Category::gradients) == gradients);
        CHECK(seen(params) == on_one_rank(world->size(), 1.0 / 32, step).w);
        params.publish();
      }
    }
}

TEST_CASE("replicated weights stay bit-equal on all ranks when sums round", "[parallel][mpi]") {
  for (const Sharding sharding : kAll) {
    CAPTURE(int(sharding));
    const auto world = mpi_world();
    Memory memory(Device::cpu);
    ShardedParams params(memory, tensors(), units(*world, sharding), {});
    set_start(params);
    const double rate = 0.0123456789;
    for (int step = 0; step < kSteps; ++step) one_step(params, world->rank(), rate);
    const auto mine = seen(params), want = on_one_rank(world->size(), rate, kSteps).w;
    for (std::size_t t = 0; t < mine.size(); ++t) {
      if (mine[t].empty()) continue;
      CHECK(test::difference(mine[t], want[t], params.tensors()[t].dtype == DType::f64 ? 1e-14 : 1e-6) == "");
      std::vector<double> all(mine[t].size() * std::size_t(world->size()));
      const Communicator::Gather piece{mine[t].data(), all.data(), std::int64_t(mine[t].size() * sizeof(double))};
      world->all_gather({&piece, 1});
      for (int r = 0; r < world->size(); ++r)
        CHECK(std::memcmp(all.data() + std::size_t(r) * mine[t].size(), mine[t].data(), mine[t].size() * sizeof(double)) == 0);
    }
  }
}

TEST_CASE("every row is in exactly one rank's shard, whatever the sharding", "[parallel][mpi]") {
  for (const Sharding sharding : kAll) {
    const auto world = mpi_world();
    Memory memory(Device::cpu);
    ShardedParams params(memory, tensors(), units(*world, sharding), {});
    for (int t = 0; t < int(params.tensors().size()); ++t) {
      std::vector<std::int64_t> owners(std::size_t(params.tensors()[std::size_t(t)].shape[0]), 0);
      for (std::int64_t row = params.shard(t).begin; row < params.shard(t).end; ++row) ++owners[std::size_t(row)];
      world->all_reduce(Tensor(owners.data(), DType::i64, {std::int64_t(owners.size())}), Reduction::sum);
      CHECK(owners == std::vector<std::int64_t>(owners.size(), 1));
      CHECK(params.update_rows(t) == (sharding == Sharding::none ? Rows{0, std::int64_t(owners.size())} : params.shard(t)));
    }
  }
}

TEST_CASE("frozen tensors take no gradient memory and move no gradients", "[parallel][mpi]") {
  for (const Sharding sharding : kAll) {
    const auto world = mpi_world();
    Memory memory(Device::cpu);
    ShardedParams params(memory, {{"base", {6, 2}, DType::f32, false}}, {{"base", {0}, world.get(), sharding}}, {});
    set_start(params);
    const auto moved = world->traffic().bytes_gathered;
    params.begin_step();
    params.gather(0);
    const auto gathered = world->traffic().bytes_gathered;
    CHECK(gathered - moved == (sharding == Sharding::full ? (world->size() - 1) * 2 * 2 * 4 : 0));
    CHECK(!params.gradient(0).present());
    params.reduce(0);
    params.release(0);
    params.finish_gradients();
    params.publish();
    CHECK(world->traffic().bytes_gathered == gathered);
    CHECK(memory.peaks()[std::size_t(Category::gradients)] == 0);
  }
}
