// expert_exchange_test.cpp -- the exchange without peers: one rank copies, a dry rank assumes that all have its counts.
#include "parallel/expert_exchange.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;

TEST_CASE("with one rank rows are in their place, in one part", "[parallel][cpu]") {
  test::Bench bench;
  Memory memory(Device::cpu);
  Stack kept(memory, Category::activations);
  const auto group = solo();
  ExpertExchange exchange(*group, *group, 3, 2);
  exchange.fetch(bench.context(), bench.of(DType::i64, {3}, {2, 0, 1}));
  const ExchangePlan plan = exchange.plan(bench.context(), kept, exchange.fetched(*group));
  REQUIRE(plan.parts.size() == 1);
  CHECK(plan.parts[0].offsets == std::vector<std::int64_t>{0, 2, 2, 3});
  CHECK(plan.parts[0].last_expert == 3);
  CHECK(plan.sent == 3);
  CHECK(plan.received == 3);
  CHECK(!plan.parts[0].to.present());
}

TEST_CASE("a dry rank plans for peers with its own counts and counts what would move", "[parallel][cpu]") {
  Memory memory(Device::dry);
  Stack kept(memory, Category::activations), scratch(memory, Category::workspace);
  ops::Context ctx{scratch};
  const auto group = dry(1, 2);
  const std::int64_t counts[] = {1, 2, 3, 4};
  for (const std::int64_t parts : {1, 2, 3}) {  // a rank has two experts: no third part
    CAPTURE(parts);
    const auto before = group->traffic().bytes_exchanged;
    Scope scope(kept);
    ExpertExchange exchange(*group, *group, 4, parts);
    const ExchangePlan plan = exchange.plan(ctx, kept, counts);
    CHECK(plan.sent == 10);
    CHECK(plan.received == 14);
    {
      Scope fuller(kept);
      const ExchangePlan full = exchange.plan(ctx, kept, counts, 19);  // 7 from here, 12 from the other
      CHECK(full.sent == 10);
      CHECK(full.received == 19);
      CHECK(full.parts.back().offsets.back() == (parts == 1 ? 19 : 10));
    }
    if (parts == 1) {
      REQUIRE(plan.parts.size() == 1);
      CHECK(plan.parts[0].receive_rows == std::vector<std::int64_t>{7, 7});
      CHECK(plan.parts[0].offsets == std::vector<std::int64_t>{0, 6, 14});
    } else {
      REQUIRE(plan.parts.size() == 2);
      CHECK(plan.parts[1].receive_rows == std::vector<std::int64_t>{4, 4});
      CHECK(plan.parts[1].offsets == std::vector<std::int64_t>{0, 8});
      CHECK(plan.parts[1].first_row == 6);
      CHECK(plan.parts[1].send[0].first == 1);
      CHECK(plan.parts[1].send[1].first == 6);
    }
    // i64: where 14 rows go; five begins and four places of runs; bounds of the experts of each part.
    CHECK(memory.now(Category::activations) == 8 * (14 + 5 + 4 + (parts == 1 ? 3 : 4)));
    const auto counted = group->traffic().bytes_exchanged;
    CHECK(counted == before + 2 * 2 * 8);
    const Tensor rows(nullptr, DType::f32, {10, 5}), travelling(nullptr, DType::f32, {14, 5});
    for (const auto& part : plan.parts) exchange.begin_out(plan, part, rows, travelling);
    CHECK(group->traffic().bytes_exchanged == counted + 3 * 5 * 4);
    for (const auto& part : plan.parts) exchange.finish_out(ctx, part, travelling, part.of(travelling));
    for (const auto& part : plan.parts) exchange.begin_back(ctx, part, part.of(travelling), travelling, rows);
    exchange.finish_back();
    CHECK(group->traffic().bytes_exchanged == counted + 3 * 5 * 4 + 7 * 5 * 4);
    CHECK(memory.now(Category::workspace) == 0);
  }
}

TEST_CASE("experts that ranks do not divide, and rows that do not fit the plan, are refused", "[parallel][cpu]") {
  Memory memory(Device::dry);
  Stack kept(memory, Category::activations), scratch(memory, Category::workspace);
  ops::Context ctx{scratch};
  const auto group = dry(0, 2);
  CHECK_THROWS_AS(ExpertExchange(*group, *group, 3, 1), Error);
  CHECK_THROWS_AS(ExpertExchange(*group, *group, 2, 0), Error);
  ExpertExchange exchange(*group, *group, 2, 1);
  const std::int64_t counts[] = {1, 2}, few[] = {1}, negative[] = {-1, 1};
  CHECK_THROWS_AS(exchange.plan(ctx, kept, few), Error);
  CHECK_THROWS_AS(exchange.plan(ctx, kept, negative), Error);
  const ExchangePlan plan = exchange.plan(ctx, kept, counts);
  CHECK_THROWS_AS(exchange.begin_out(plan, plan.parts[0], ConstTensor(nullptr, DType::f32, {2, 4}), Tensor(nullptr, DType::f32, {2, 4})), Error);
  CHECK_THROWS_AS(exchange.begin_out(plan, plan.parts[0], ConstTensor(nullptr, DType::f32, {3, 4}), Tensor(nullptr, DType::f32, {3, 4})), Error);
  const Tensor none(nullptr, DType::f32, {3, 4});
  CHECK_THROWS_AS(exchange.finish_out(ctx, plan.parts[0], none, none), Error);  // nothing left
}
