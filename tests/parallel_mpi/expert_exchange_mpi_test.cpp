// expert_exchange_mpi_test.cpp -- rows reach the rank of their expert in expert order and come back unchanged.
#include <utility>

#include "ops/random.h"
#include "parallel/expert_exchange.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;

namespace {

enum class Load { all_to_one_expert, some_get_none, empty, one_empty_source, random };

// Rows of rank s for expert x.
std::int64_t count_of(Load load, int s, std::int64_t x, std::int64_t experts) {
  switch (load) {
    case Load::all_to_one_expert:
      return x == experts - 1 ? 9 + s : 0;
    case Load::some_get_none:
      return x % 3 == 0 ? s + x : 0;
    case Load::empty:
      return 0;
    case Load::one_empty_source:
      return s == 1 ? 0 : 2;
    case Load::random:
      return std::int64_t(8 * ops::uniform(3, std::uint64_t(s), std::uint64_t(x)));
  }
  return 0;
}

double origin(int source, std::int64_t expert, std::int64_t i, std::int64_t d) {
  return 1e5 * source + 1e3 * double(expert) + 10.0 * double(i) + double(d);
}

}  // namespace

TEST_CASE("rows arrive sorted by expert then source, and the way back undoes the way out", "[parallel][mpi]") {
  for (const Load load : {Load::all_to_one_expert, Load::some_get_none, Load::empty, Load::one_empty_source, Load::random})
    for (const auto& [dtype, parts] : {std::pair{DType::f32, 1}, {DType::f64, 2}, {DType::f32, 3}}) {
      CAPTURE(int(load), name_of(dtype), parts);
      const auto world = mpi_world();
      const int n = world->size(), me = world->rank();
      const std::int64_t local = 3, E = local * n, D = 5;
      test::Bench bench;
      Memory memory(Device::cpu);
      Stack kept(memory, Category::activations);
      std::vector<std::int64_t> counts, offsets{0};
      std::vector<double> sent, want;
      std::int64_t away = local * 8 * (n - 1), home = 0;  // the counts travel first
      for (std::int64_t x = 0; x < E; ++x) {
        counts.push_back(count_of(load, me, x, E));
        if (x / local != me) away += counts.back() * D * size_of(dtype);
        for (std::int64_t i = 0; i < counts.back(); ++i)
          for (std::int64_t d = 0; d < D; ++d) sent.push_back(origin(me, x, i, d));
      }
      for (std::int64_t x = me * local; x < (me + 1) * local; ++x) {
        offsets.push_back(offsets.back());
        for (int s = 0; s < n; ++s) {
          offsets.back() += count_of(load, s, x, E);
          if (s != me) home += count_of(load, s, x, E) * D * size_of(dtype);
          for (std::int64_t i = 0; i < count_of(load, s, x, E); ++i)
            for (std::int64_t d = 0; d < D; ++d) want.push_back(origin(s, x, i, d));
        }
      }

      ExpertExchange exchange(*world, *world, E, parts);
      const ExchangePlan plan = exchange.plan(bench.context(), kept, counts);
      REQUIRE(std::ssize(plan.parts) == (n == 1 ? 1 : parts));
      for (const auto& part : plan.parts)
        for (std::int64_t j = part.first_expert; j < part.last_expert; ++j)
          CHECK(part.first_row + part.offsets[std::size_t(j - part.first_expert)] == offsets[std::size_t(j)]);
      CHECK(plan.received == offsets.back());
      REQUIRE(plan.sent * D == std::int64_t(sent.size()));
      if (n == 1) continue;
      const Tensor rows = bench.of(dtype, {plan.sent, D}, sent), received = bench.empty(dtype, {plan.received, D}),
                   travelling = bench.empty(dtype, {plan.received, D}), returned = bench.empty(dtype, {plan.sent, D});
      for (const auto& part : plan.parts) exchange.begin_out(plan, part, rows, travelling);
      CHECK(world->traffic().bytes_exchanged == away);
      for (const auto& part : plan.parts) {
        exchange.finish_out(bench.context(), part, travelling, part.of(received));
        exchange.begin_back(bench.context(), part, part.of(received), travelling, returned);
      }
      exchange.finish_back();
      CHECK(test::values_of(received) == want);
      CHECK(world->traffic().bytes_exchanged == away + home);
      CHECK(test::values_of(returned) == sent);
      CHECK(bench.guards_hold());
    }
}
