// permute.cpp -- tokens to rows sorted by expert, and back.
#include "ops/permute.h"

#include <numeric>

#include "app/verify/routing.h"
#include "app/verify/verify.h"

namespace moetrain::app {

std::vector<std::int32_t> random_experts(OpCase& c, std::int64_t T, std::int64_t E, std::int64_t K) {
  std::vector<std::int32_t> experts(std::size_t(T * K));
  for (std::int64_t t = 0; t < T; ++t) {
    const auto low = std::int64_t(c.random(std::uint64_t(E))), high = std::int64_t(c.random(std::uint64_t(E)));
    std::int64_t at = std::min(low, high), step = E > 1 ? 1 + std::int64_t(c.random(std::uint64_t(E - 1))) : 1;
    while (std::gcd(step, E) != 1) ++step;
    for (std::int64_t k = 0; k < K; ++k, at = (at + step) % E) experts[std::size_t(t * K + k)] = std::int32_t(at);
  }
  return experts;
}

void verify_permute(const Verification& v) {
  OpCase c(v);
  const auto& m = c.model();
  const std::int64_t T = c.T(), E = m.num_experts, K = m.num_experts_per_token, R = T * K, D = m.expert_width();
  const std::vector<std::int32_t> chosen = random_experts(c, T, E, K);
  const Tensor experts = c.put(chosen, {T, K}), slot_row = c.empty(DType::i64, {T, K}), counts = c.empty(DType::i64, {E}),
               offsets = c.empty(DType::i64, {E + 1});
  const Tensor chosen_there = c.host_of(chosen, {T, K}), slot_row_want = c.host_tensors().take(DType::i64, {T, K}),
               counts_want = c.host_tensors().take(DType::i64, {E}), offsets_want = c.host_tensors().take(DType::i64, {E + 1});
  const auto as_f64 = [&](ConstTensor t) {
    const std::vector<double> values(t.as<std::int64_t>(), t.as<std::int64_t>() + t.count());
    return c.host_of(values, t.shape);
  };
  c.run("sort_slots", sizes({{"T", T}, {"E", E}, {"K", K}}), [&](ops::Context& ctx) {
    ops::sort_slots(ctx, ops::SortSlots{.experts = experts, .slot_row = slot_row, .counts = counts, .offsets = offsets});
  });
  ops::sort_slots(
      c.host(), ops::SortSlots{.experts = chosen_there, .slot_row = slot_row_want, .counts = counts_want, .offsets = offsets_want});
  c.compare("slot_row", slot_row, as_f64(slot_row_want), OpCase::exact());
  c.compare("counts", counts, as_f64(counts_want), OpCase::exact());
  c.compare("offsets", offsets, as_f64(offsets_want), OpCase::exact());
  c.tell();

  const Places tokens = c.sample(T, 64);
  const auto n = std::int64_t(tokens.size());
  const Tensor slots =
      c.put(std::vector<std::int64_t>(slot_row_want.as<std::int64_t>(), slot_row_want.as<std::int64_t>() + R), {T, K});
  Places rows_of_tokens, nth(std::size_t(n * K));  // row of every slot of those tokens
  std::iota(nth.begin(), nth.end(), 0);
  for (const std::int64_t t : tokens)
    for (std::int64_t k = 0; k < K; ++k) rows_of_tokens.push_back(slot_row_want.as<std::int64_t>()[t * K + k]);
  const Tensor few_slots = c.host_of(nth, {n, K});
  const std::string shape = sizes({{"T", T}, {"K", K}, {"D", D}});
  const Tensor x = c.normal(c.storage(), {T, D}), rows = c.empty(c.storage(), {R, D}), weights = c.normal(c.real(), {T, K}),
               y = c.empty(c.storage(), {T, D}), returned = c.normal(c.storage(), {R, D}), drows = c.empty(c.storage(), {R, D}),
               dots = c.normal(c.real(), {R, 1}), dweights = c.empty(c.real(), {T, K});
  const Tensor x64 = c.wide(x, tokens), rows64 = c.host_zeros({n * K, D}), weights64 = c.wide(weights, tokens),
               returned64 = c.wide(returned, rows_of_tokens), y64 = c.host_zeros({n, D});

  c.run("spread_rows", shape,
        [&](ops::Context& ctx) { ops::spread_rows(ctx, ops::SpreadRows{.x = x, .slot_row = slots, .rows = rows}); });
  ops::spread_rows(c.host(), ops::SpreadRows{.x = x64, .slot_row = few_slots, .rows = rows64});
  c.compare("rows", rows, rows_of_tokens, rows64, OpCase::exact());
  c.tell();

  c.run("collect_rows forward", shape, [&](ops::Context& ctx) {
    ops::collect_rows(ctx, ops::CollectRows{.rows = returned, .slot_row = slots, .weights = weights, .y = y});
  });
  ops::collect_rows(c.host(), ops::CollectRows{.rows = returned64, .slot_row = few_slots, .weights = weights64, .y = y64});
  c.compare("y", y, tokens, y64, c.stored());
  c.tell();

  c.run("collect_rows backward", shape, [&](ops::Context& ctx) {
    ops::collect_rows(ctx, ops::CollectRowsBackward{.dy = x, .slot_row = slots, .weights = weights, .drows = drows});
  });
  ops::collect_rows(c.host(), ops::CollectRowsBackward{.dy = x64, .slot_row = few_slots, .weights = weights64, .drows = rows64});
  c.compare("drows", drows, rows_of_tokens, rows64, c.stored());
  c.tell();

  c.run("weight_gradients", sizes({{"T", T}, {"K", K}}), [&](ops::Context& ctx) {
    ops::weight_gradients(
        ctx, ops::WeightGradients{.dots = dots.reshape({R}), .slot_row = slots, .weights = weights, .dweights = dweights});
  });
  const Tensor dweights64 = c.host_zeros({n, K});
  ops::weight_gradients(c.host(), ops::WeightGradients{.dots = c.wide(dots, rows_of_tokens).reshape({n * K}),
                                                       .slot_row = few_slots,
                                                       .weights = weights64,
                                                       .dweights = dweights64});
  c.compare("dweights", dweights, tokens, dweights64, OpCase::summed());
  c.tell();

  c.run("collect_rows forward, without weights", shape, [&](ops::Context& ctx) {
    ops::collect_rows(ctx, ops::CollectRows{.rows = returned, .slot_row = slots, .weights = {}, .y = y});
  });
  ops::collect_rows(c.host(), ops::CollectRows{.rows = returned64, .slot_row = few_slots, .weights = {}, .y = y64});
  c.compare("y", y, tokens, y64, c.stored());
  c.tell();
}

}  // namespace moetrain::app
