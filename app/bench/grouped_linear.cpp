// grouped_linear.cpp -- the two products of a layer of experts: gate and up as one, then down; forward, dgrad and wgrad apart.
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
    const Tensor x = b.normal(DType::bf16, {c.R, c.D}), up = b.normal(DType::bf16, {c.groups, 2 * c.F, c.D}, 0.02),
                 both = b.normal(DType::bf16, {c.R, 2 * c.F}), inner = b.normal(DType::bf16, {c.R, c.F}),
                 down = b.normal(DType::bf16, {c.groups, c.D, c.F}, 0.02), y = b.normal(DType::bf16, {c.R, c.D});
    const Tensor dup = b.zeros(DType::f32, up.shape), ddown = b.zeros(DType::f32, down.shape);
    const double flops = 2 * double(c.R) * double(c.D) * 3 * double(c.F);
    const double rows_bytes = 2 * double(x.count() + both.count() + inner.count() + y.count());
    const double weights = double(up.count() + down.count());
    const std::string shape = "D" + std::to_string(c.D) + " F" + std::to_string(c.F) + " " + std::to_string(c.groups) +
                              " groups, " + std::to_string(c.R) + " rows" + (c.skewed ? ", skewed" : "");
    const auto forward = [&](ConstTensor in, ConstTensor w, Tensor out) {
      ops::grouped_linear(b.context(),
                          ops::GroupedLinearForward{.x = in, .w = w, .y = out, .offsets = {}, .device_offsets = offsets});
    };
    report(b.time("grouped_linear forward", shape, flops, rows_bytes + 2 * weights, [&] {
      forward(x, up, both);
      forward(inner, down, y);
    }));
    const auto dgrad = [&](ConstTensor out, ConstTensor w, Tensor in, bool add) {
      ops::grouped_linear(b.context(), ops::GroupedLinearBackward{
                                           .dy = out, .w = w, .dx = in, .offsets = {}, .device_offsets = offsets, .add_dx = add});
    };
    for (const bool add : {false, true})
      report(b.time(add ? "grouped_linear dgrad, added" : "grouped_linear dgrad", shape, flops,
                    rows_bytes + 2 * weights + (add ? double(inner.bytes() + x.bytes()) : 0), [&] {
                      dgrad(y, down, inner, add);
                      dgrad(both, up, x, add);
                    }));
    for (const bool write : {false, true})
      report(b.time(
          write ? "grouped_linear wgrad, written" : "grouped_linear wgrad", shape, flops, rows_bytes + (write ? 4 : 8) * weights,
          [&] {
            ops::grouped_linear(b.context(),
                                ops::GroupedLinearBackward{
                                    .dy = y, .x = inner, .dw = ddown, .offsets = {}, .device_offsets = offsets, .write_dw = write});
            ops::grouped_linear(b.context(),
                                ops::GroupedLinearBackward{
                                    .dy = both, .x = x, .dw = dup, .offsets = {}, .device_offsets = offsets, .write_dw = write});
          }));
  }
}

}  // namespace moetrain::app
