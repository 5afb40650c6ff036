// grouped_linear.cpp -- the two products of a layer of experts: gate and up in one call, then down; forward, dgrad and wgrad apart.
#include "ops/grouped_linear.h"

#include <cmath>

#include "app/bench/bench.h"

namespace moetrain::app {
namespace {

// Rows of each group; skewed: the share of group g falls as 1 / (1 + 4 g / groups), in an order that is not sorted.
std::vector<std::int64_t> bounds(std::int64_t groups, std::int64_t rows, bool skewed) {
  std::vector<double> share;
  double sum = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const std::int64_t rank = (g * 5 + 3) % groups;
    share.push_back(skewed ? 1 / (1 + 4 * double(rank) / double(groups)) : 1);
    sum += share.back();
  }
  std::vector<std::int64_t> offsets{0};
  double reached = 0;
  for (const double s : share) {
    reached += s / sum;
    offsets.push_back(std::int64_t(std::llround(reached * double(rows))));
  }
  offsets.back() = rows;
  return offsets;
}

struct Case {
  std::int64_t D, F, groups, R;
  bool skewed;
};

}  // namespace

void bench_grouped_linear(const Ceilings& ceilings, const Report& report) {
  for (const Case& c : {Case{2048, 1024, 14, 16384, false}, Case{2048, 1024, 14, 131072, true}, Case{7168, 2048, 14, 131072, true},
                        Case{2048, 1024, 896, 131072, true}}) {
    BenchCase b(ceilings);
    const Tensor offsets = b.of(bounds(c.groups, c.R, c.skewed), {c.groups + 1});
    const Tensor x = b.normal(DType::bf16, {c.R, c.D}), y = b.normal(DType::bf16, {c.R, c.D}),
                 inner = b.normal(DType::bf16, {c.R, c.F}), gate = b.normal(DType::bf16, {c.R, c.F}),
                 up = b.normal(DType::bf16, {c.R, c.F}), w1 = b.normal(DType::bf16, {c.groups, c.F, c.D}, 0.02),
                 w3 = b.normal(DType::bf16, {c.groups, c.F, c.D}, 0.02), w2 = b.normal(DType::bf16, {c.groups, c.D, c.F}, 0.02);
    const Tensor dw1 = b.zeros(DType::f32, w1.shape), dw2 = b.zeros(DType::f32, w2.shape), dw3 = b.zeros(DType::f32, w3.shape);
    const double flops = 2 * double(c.R) * double(c.D) * 3 * double(c.F);
    const double rows_bytes = 2 * double(x.count() + y.count() + 3 * inner.count()), weights = 3 * double(w1.count());
    const std::string shape = "D" + std::to_string(c.D) + " F" + std::to_string(c.F) + " " + std::to_string(c.groups) +
                              " groups, " + std::to_string(c.R) + " rows" + (c.skewed ? ", skewed" : "");
    report(b.time("grouped_linear forward", shape, flops, rows_bytes + 2 * weights, [&] {
      ops::grouped_linear(
          b.context(),
          ops::GroupedLinearForward{.x = x, .w = w1, .y = gate, .w2 = w3, .y2 = up, .offsets = {}, .device_offsets = offsets});
      ops::grouped_linear(b.context(),
                          ops::GroupedLinearForward{.x = inner, .w = w2, .y = y, .offsets = {}, .device_offsets = offsets});
    }));
    report(b.time("grouped_linear dgrad", shape, flops, rows_bytes + 2 * weights, [&] {
      ops::grouped_linear(b.context(),
                          ops::GroupedLinearBackward{.dy = y, .w = w2, .dx = inner, .offsets = {}, .device_offsets = offsets});
      ops::grouped_linear(
          b.context(),
          ops::GroupedLinearBackward{.dy = gate, .w = w1, .dx = x, .dy2 = up, .w2 = w3, .offsets = {}, .device_offsets = offsets});
    }));
    for (const bool write : {false, true})
      report(b.time(write ? "grouped_linear wgrad, written" : "grouped_linear wgrad", shape, flops,
                    rows_bytes + (write ? 4 : 8) * weights, [&] {
                      ops::grouped_linear(
                          b.context(),
                          ops::GroupedLinearBackward{
                              .dy = y, .x = inner, .dw = dw2, .offsets = {}, .device_offsets = offsets, .write_dw = write});
                      ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = gate,
                                                                                  .x = x,
                                                                                  .dw = dw1,
                                                                                  .dy2 = up,
                                                                                  .dw2 = dw3,
                                                                                  .offsets = {},
                                                                                  .device_offsets = offsets,
                                                                                  .write_dw = write});
                    }));
  }
}

}  // namespace moetrain::app
