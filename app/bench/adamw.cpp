// adamw.cpp -- the update of all shards of a rank, and the sum that decides about clipping.
#include "ops/adamw.h"

#include "app/bench/bench.h"
#include "ops/reduce.h"

namespace moetrain::app {

void bench_adamw(const Ceilings& ceilings, const Report& report) {
  struct Case {
    std::int64_t large, small;  // tensors of 2^24 and of 2^12 elements
  };
  for (const auto& [large, small] : {Case{64, 128}, Case{0, 2000}}) {
    BenchCase b(ceilings);
    auto& ctx = b.context();
    std::vector<ops::AdamWShard> shards;
    std::vector<ConstTensor> gradients;
    double elements = 0;
    for (std::int64_t i = 0; i < large + small; ++i) {
      const Shape shape{std::int64_t(1) << (i < large ? 24 : 12)};
      gradients.push_back(b.normal(DType::f32, shape));
      shards.push_back({.gradient = gradients.back(),
                        .master = b.normal(DType::f32, shape),
                        .exp_avg = b.zeros(DType::f32, shape),
                        .exp_avg_sq = b.zeros(DType::f32, shape),
                        .weight = b.empty(DType::bf16, shape),
                        .weight_decay = 0.1});
      elements += double(shape.count());
    }
    const std::string shape = std::to_string(large + small) + " shards, " + std::to_string(std::int64_t(elements)) + " elements";
    const ops::AdamW update{
        .shards = shards, .lr = 1e-4, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .gradient_scale = 1, .scale = {}, .step = 1};
    report(b.time("adamw", shape, 0, 30 * elements, [&] { ops::adamw(ctx, update); }));
    const Tensor sum = b.zeros(DType::f64, {1});
    report(b.time("sum_of_squares", shape, 0, 4 * elements, [&] { ops::sum_of_squares(ctx, {.x = gradients, .sum = sum}); }));
  }
}

}  // namespace moetrain::app
