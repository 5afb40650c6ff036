// sharded_params_test.cpp -- what one rank and a dry rank show of sharded parameters: memory figures, refusals, no copies.
#include "parallel/sharded_params.h"

#include "tests/support/catch.h"

using namespace moetrain;
using namespace moetrain::parallel;

namespace {

std::vector<ShardedTensor> two_tensors() {  // 7 rows of 3 f32; frozen: 5 rows of 2 bf16
  return {{"weight", {7, 3}, DType::f32, true}, {"base", {5, 2}, DType::bf16, false}};
}
constexpr Sharding kAll[] = {Sharding::none, Sharding::optimizer, Sharding::gradients, Sharding::full};

}  // namespace

TEST_CASE("a group of one hands out its stored tensors and holds nothing twice", "[parallel][cpu]") {
  for (const Sharding sharding : kAll) {
    Memory memory(Device::cpu);
    const auto group = solo();
    ShardedParams params(memory, two_tensors(), {{"block", {0, 1}, group.get(), sharding}}, {});
    CHECK(memory.now(Category::weights) == 7 * 3 * 4 + 5 * 2 * 2);
    CHECK(memory.now(Category::gradients) == 7 * 3 * 4);
    CHECK(params.update_rows(0) == Rows{0, 7});
    const auto before = memory.peak();
    params.begin_step();
    params.gather(0);
    CHECK(params.weight(0).data == params.stored(0, {0, 7}).data);
    CHECK(params.gradient(0).data == params.stored_gradient(0, {0, 7}).data);
    CHECK(params.gradient(0).as<float>()[20] == 0);
    CHECK(!params.gradient(1).present());
    params.gradient(0).as<float>()[20] = 2.5F;
    params.reduce(0);
    params.release(0);
    params.finish_gradients();
    CHECK(params.stored_gradient(0, {6, 7}).as<float>()[2] == 2.5F);
    params.publish();
    CHECK(memory.peak() == before);
    CHECK(group->traffic().bytes_gathered == 0);
  }
}

TEST_CASE("a dry rank of four counts the memory and traffic of every sharding", "[parallel][cpu]") {
  // Of 4 ranks a shard of 7 rows has c = 2, of 5 rows c = 2: whole tensors are padded to 8 rows where they are gathered.
  constexpr std::int64_t kRow = 3 * 4, kBaseRow = 2 * 2;
  struct Figures {
    Sharding sharding;
    std::int64_t weights, gradients, weights_used, gradients_used, gathered_in_step;
  };
  const std::vector<Figures> expected = {
      {Sharding::none, 7 * kRow + 5 * kBaseRow, 7 * kRow, 7 * kRow + 5 * kBaseRow, 7 * kRow, 2 * 3 * 6 * 4},
      {Sharding::optimizer, 8 * (kRow + kBaseRow), 8 * kRow, 8 * (kRow + kBaseRow), 8 * kRow, 3 * 2 * kRow * 2},
      {Sharding::gradients, 8 * (kRow + kBaseRow), 2 * kRow, 8 * (kRow + kBaseRow), 10 * kRow, 3 * 2 * kRow * 2},
      {Sharding::full, 2 * (kRow + kBaseRow), 2 * kRow, 10 * (kRow + kBaseRow), 10 * kRow,
       3 * 2 * (kRow + kBaseRow) + 3 * 2 * kRow},
  };
  for (const auto& want : expected) {
    CAPTURE(int(want.sharding));
    Memory memory(Device::dry);
    const auto group = dry(1, 4);
    ShardedParams params(memory, two_tensors(), {{"block", {0, 1}, group.get(), want.sharding}}, {});
    CHECK(memory.now(Category::weights) == want.weights);
    CHECK(memory.now(Category::gradients) == want.gradients);
    params.begin_step();
    params.gather(0);
    CHECK(params.weight(0).shape == Shape{7, 3});
    CHECK(params.gradient(0).shape == Shape{7, 3});
    CHECK(memory.now(Category::weights) == want.weights_used);
    CHECK(memory.now(Category::gradients) == want.gradients_used);
    params.reduce(0);
    params.release(0);
    CHECK(memory.now(Category::weights) == want.weights);
    CHECK(memory.now(Category::gradients) == want.gradients_used);  // on their way
    params.finish_gradients();
    CHECK(memory.now(Category::gradients) == want.gradients);
    params.publish();
    CHECK(memory.now(Category::gradients) == want.gradients);
    CHECK(group->traffic().bytes_gathered == want.gathered_in_step);
  }
}

TEST_CASE("of units that follow each other two are gathered and one is summed at a time", "[parallel][cpu]") {
  for (const bool reshard : {true, false})
    for (const Sharding sharding : {Sharding::gradients, Sharding::full}) {
      CAPTURE(reshard, int(sharding));
      constexpr int kUnits = 5;
      constexpr std::int64_t kBytes = 8 * 3 * 4;  // of a whole tensor, over two ranks
      Memory memory(Device::dry);
      const auto group = dry(0, 2);
      std::vector<ShardedTensor> tensors;
      std::vector<Unit> units;
      for (int u = 0; u < kUnits; ++u) {
        tensors.push_back({"weight", {8, 3}, DType::f32, true});
        units.push_back({"block", {u}, group.get(), sharding});
      }
      ShardedParams params(memory, tensors, units, {.reshard_after_use = reshard});
      const bool full = sharding == Sharding::full;
      const std::int64_t stored = kUnits * kBytes / (full ? 2 : 1), shards = kUnits * kBytes / 2;
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        if (micro_batch == 0) params.begin_step();
        for (int u = kUnits - 1; u >= 0; --u) {
          params.gather(u);
          if (u > 0) params.prefetch(u - 1);
          params.gradient(u);
          if (full && reshard) CHECK(memory.now(Category::weights) == stored + (u > 0 ? 2 : 1) * kBytes);
          params.end_reductions();
          params.reduce(u);
          params.release(u);
          CHECK(memory.now(Category::gradients) == shards + kBytes);
        }
      }
      CHECK(memory.peaks()[std::size_t(Category::gradients)] == shards + 2 * kBytes);
      CHECK_THROWS_AS(params.publish(), Error);  // a sum still travels
      CHECK_THROWS_AS(params.stored_gradient(0, {0, 4}), Error);
      params.finish_gradients();
      CHECK(memory.now(Category::gradients) == shards);
      params.publish();
      if (!full) continue;
      params.prefetch(0);
      params.open(0);
      CHECK_THROWS_AS(params.weight(0), Error);  // it has not come
      CHECK_THROWS_AS(params.release(0), Error);
      params.gather(0);
      CHECK(params.weight(0).shape == Shape{8, 3});
    }
}

TEST_CASE("frozen rows are published after a load but not in a step", "[parallel][cpu]") {
  Memory memory(Device::dry);
  const auto group = dry(0, 4);
  ShardedParams params(memory, two_tensors(), {{"block", {0, 1}, group.get(), Sharding::gradients}}, {});
  params.publish();
  const auto all = 3 * 2 * (3 * 4 + 2 * 2);
  CHECK(group->traffic().bytes_gathered == all);
  params.begin_step();
  params.publish();
  CHECK(group->traffic().bytes_gathered == all + 3 * 2 * 3 * 4);
}

TEST_CASE("weights kept after use stay until publish and are gathered once", "[parallel][cpu]") {
  Memory memory(Device::dry);
  const auto group = dry(0, 4);
  ShardedParams params(memory, two_tensors(), {{"block", {0, 1}, group.get(), Sharding::full}}, {.reshard_after_use = false});
  const auto resident = memory.now(Category::weights);
  params.gather(0);
  params.gather(0);
  params.release(0);
  CHECK(params.holds(0));
  params.release(0);
  CHECK(!params.holds(0));
  params.gather(0);
  params.release(0);
  CHECK(memory.now(Category::weights) == resident + 8 * (3 * 4 + 2 * 2));
  CHECK(group->traffic().bytes_gathered == 3 * 2 * (3 * 4 + 2 * 2));
  params.publish();
  CHECK(memory.now(Category::weights) == resident);
}

TEST_CASE("weights and gradients out of their turn are refused", "[parallel][cpu]") {
  Memory memory(Device::dry);
  const auto group = dry(1, 4);
  ShardedParams params(memory, two_tensors(), {{"block", {0, 1}, group.get(), Sharding::full}}, {});
  CHECK_THROWS_AS(params.weight(0), Error);
  CHECK_THROWS_AS(params.gradient(0), Error);
  CHECK_THROWS_AS(params.release(0), Error);
  CHECK_THROWS_AS(params.reduce(0), Error);
  CHECK_THROWS_AS(params.stored(0, {0, 2}), Error);  // rank 1 has rows 2 and 3
  CHECK_THROWS_AS(params.stored_gradient(0, {2, 5}), Error);
  CHECK_THROWS_AS(params.unit_of(2), Error);
  params.gather(0);
  CHECK_THROWS_AS(params.publish(), Error);
  params.gradient(0);
  CHECK_THROWS_AS(params.release(0), Error);  // would lose the gradient
}

TEST_CASE("a tensor in two units, in none or without a group is refused", "[parallel][cpu]") {
  Memory memory(Device::dry);
  const auto group = dry(0, 2);
  const auto make = [&](std::vector<Unit> units) { ShardedParams(memory, two_tensors(), std::move(units), {}); };
  CHECK_THROWS_AS(make({{"a", {0}, group.get(), Sharding::full}}), Error);
  CHECK_THROWS_AS(make({{"a", {0, 1}, group.get(), Sharding::full}, {"b", {1}, group.get(), Sharding::full}}), Error);
  CHECK_THROWS_AS(make({{"a", {0, 1}, nullptr, Sharding::full}}), Error);
  CHECK_THROWS_AS(make({{"a", {0, 1, 2}, group.get(), Sharding::full}}), Error);
}
