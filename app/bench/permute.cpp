// permute.cpp -- slots sorted by expert, and rows to experts and back.
#include "ops/permute.h"

#include "app/bench/bench.h"
#include "ops/random.h"

namespace moetrain::app {

void bench_permute(const Ceilings& ceilings, const Report& report) {
  struct Case {
    std::int64_t T, K, E, D;
  };
  for (const auto& [T, K, E, D] : {Case{8192, 8, 64, 2048}, Case{8192, 16, 896, 3584}, Case{131072, 16, 896, 64}}) {
    BenchCase b(ceilings);
    auto& ctx = b.context();
    std::vector<std::int32_t> choice(std::size_t(T * K));
    for (std::size_t i = 0; i < choice.size(); ++i) choice[i] = std::int32_t(ops::uniform(11, 0, i) * double(E));
    const Tensor experts = b.of(choice, {T, K}), slot_row = b.empty(DType::i64, {T, K}), counts = b.empty(DType::i64, {E}),
                 offsets = b.empty(DType::i64, {E + 1}), x = b.normal(DType::bf16, {T, D}), y = b.empty(DType::bf16, {T, D}),
                 rows = b.normal(DType::bf16, {T * K, D}), drows = b.empty(DType::bf16, {T * K, D}),
                 weights = b.normal(DType::f32, {T, K});
    const std::string shape =
        "T" + std::to_string(T) + " K" + std::to_string(K) + " E" + std::to_string(E) + " D" + std::to_string(D);
    const double slots = double(T * K), row = 2 * double(D), tokens = double(T);
    report(b.time("sort_slots", shape, 0, 12 * slots,
                  [&] { ops::sort_slots(ctx, {.experts = experts, .slot_row = slot_row, .counts = counts, .offsets = offsets}); }));
    report(b.time("spread_rows", shape, 0, row * (tokens + slots),
                  [&] { ops::spread_rows(ctx, {.x = x, .slot_row = slot_row, .rows = drows}); }));
    report(b.time("collect_rows forward", shape, 0, row * (tokens + slots), [&] {
      ops::collect_rows(ctx, ops::CollectRows{.rows = rows, .slot_row = slot_row, .weights = weights, .y = y});
    }));
    report(b.time("collect_rows backward", shape, 0, row * (tokens + slots), [&] {
      ops::collect_rows(ctx, ops::CollectRowsBackward{.dy = x, .slot_row = slot_row, .weights = weights, .drows = drows});
    }));
  }
}

}  // namespace moetrain::app
