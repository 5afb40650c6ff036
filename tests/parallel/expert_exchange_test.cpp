// expert_exchange_test.cpp -- the exchange without peers: one rank copies, a dry rank assumes that all have its counts.
#include "parallel/expert_exchange.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;

TEST_CASE("with one rank the exchange is a copy and needs no permutation", "[parallel][cpu]") {
  test::Bench bench;
  Memory memory(Device::cpu);
  Stack kept(memory, Category::activations);
  const auto group = solo();
  ExpertExchange exchange(*group, *group, 3);
  const std::int64_t counts[] = {2, 0, 1};
  const ExchangePlan plan = exchange.plan(kept, counts);
  CHECK(plan.offsets == std::vector<std::int64_t>{0, 2, 2, 3});
  CHECK(plan.sent() == 3);
  CHECK(!plan.to.present());
  const Tensor rows = bench.normal(DType::f32, {3, 4}), received = bench.empty(DType::f32, {3, 4}),
               returned = bench.empty(DType::f32, {3, 4});
  exchange.out(bench.context(), plan, rows, received);
  exchange.back(bench.context(), plan, received, returned);
  CHECK(test::values_of(received) == test::values_of(rows));
  CHECK(test::values_of(returned) == test::values_of(rows));
  CHECK(group->traffic().bytes_exchanged == 0);
}

TEST_CASE("a dry rank plans for peers with its own counts and counts what would move", "[parallel][cpu]") {
  Memory memory(Device::dry);
  Stack kept(memory, Category::activations), scratch(memory, Category::workspace);
  ops::Context ctx{scratch};
  const auto group = dry(1, 2);
  ExpertExchange exchange(*group, *group, 4);
  const std::int64_t counts[] = {1, 2, 3, 4};
  const ExchangePlan plan = exchange.plan(kept, counts);
  CHECK(plan.send_rows == std::vector<std::int64_t>{3, 7});
  CHECK(plan.receive_rows == std::vector<std::int64_t>{7, 7});
  CHECK(plan.offsets == std::vector<std::int64_t>{0, 6, 14});
  CHECK(memory.now(Category::activations) == 256);  // 14 i64, in lines of 256 bytes
  const auto counted = group->traffic().bytes_exchanged;
  CHECK(counted == 2 * 8);
  exchange.out(ctx, plan, ConstTensor(nullptr, DType::f32, {10, 5}), Tensor(nullptr, DType::f32, {14, 5}));
  CHECK(group->traffic().bytes_exchanged == counted + 3 * 5 * 4);
  exchange.back(ctx, plan, ConstTensor(nullptr, DType::f32, {14, 5}), Tensor(nullptr, DType::f32, {10, 5}));
  CHECK(group->traffic().bytes_exchanged == counted + 3 * 5 * 4 + 7 * 5 * 4);
  CHECK(memory.peaks()[std::size_t(Category::workspace)] == 512);  // 14 rows of 5 f32
  CHECK(memory.now(Category::workspace) == 0);
}

TEST_CASE("experts that ranks do not divide, and rows that do not fit the plan, are refused", "[parallel][cpu]") {
  Memory memory(Device::dry);
  Stack kept(memory, Category::activations), scratch(memory, Category::workspace);
  ops::Context ctx{scratch};
  const auto group = dry(0, 2);
  CHECK_THROWS_AS(ExpertExchange(*group, *group, 3), Error);
  ExpertExchange exchange(*group, *group, 2);
  const std::int64_t counts[] = {1, 2}, few[] = {1}, negative[] = {-1, 1};
  CHECK_THROWS_AS(exchange.plan(kept, few), Error);
  CHECK_THROWS_AS(exchange.plan(kept, negative), Error);
  const ExchangePlan plan = exchange.plan(kept, counts);
  CHECK_THROWS_AS(exchange.out(ctx, plan, ConstTensor(nullptr, DType::f32, {2, 4}), Tensor(nullptr, DType::f32, {2, 4})), Error);
  CHECK_THROWS_AS(exchange.out(ctx, plan, ConstTensor(nullptr, DType::f32, {3, 4}), Tensor(nullptr, DType::f32, {3, 4})), Error);
}
