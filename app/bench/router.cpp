// router.cpp -- the choice of experts, its gradient, and what balancing sees of it.
#include "ops/router.h"

#include "app/bench/bench.h"
#include "ops/balance.h"

namespace moetrain::app {

void bench_router(const Ceilings& ceilings, const Report& report) {
  for (const auto& [T, E, K] : {std::array<std::int64_t, 3>{8192, 64, 8}, {8192, 896, 16}}) {
    BenchCase b(ceilings);
    auto& ctx = b.context();
    const Tensor logits = b.normal(DType::f32, {T, E}), bias = b.normal(DType::f32, {E}, 0.1),
                 dweights = b.normal(DType::f32, {T, K}), experts = b.empty(DType::i32, {T, K}),
                 weights = b.empty(DType::f32, {T, K}), cutoff = b.empty(DType::f32, {T}), dlogits = b.empty(DType::f32, {T, E}),
                 counts = b.zeros(DType::i64, {E}), histogram = b.zeros(DType::i64, {E, 1000}), loss = b.zeros(DType::f32, {1});
    const std::vector<std::int64_t> whole{0, T};
    const std::string shape = "T" + std::to_string(T) + " E" + std::to_string(E) + " K" + std::to_string(K);
    const double scores = 4 * double(T * E), slots = double(T * K);
    const auto forward = [&] {
      ops::router(ctx, {.logits = logits, .bias = bias, .rule = {}, .experts = experts, .weights = weights, .cutoff = cutoff});
    };
    report(b.time("router forward", shape, 0, scores + 8 * slots, forward));
    report(b.time("router forward + backward", shape, 0, 2 * scores + 16 * slots, [&] {
      forward();
      ops::router(ctx,
                  ops::RouterBackward{.dweights = dweights, .logits = logits, .experts = experts, .rule = {}, .dlogits = dlogits});
    }));
    report(b.time("expert_count, quantile_histogram", shape, 0, scores + 4 * slots + 16e3 * double(E), [&] {
      ops::expert_count(ctx, {.experts = experts, .counts = counts});
      ops::quantile_histogram(ctx, {.logits = logits, .cutoff = cutoff, .bias = bias, .histogram = histogram});
    }));
    report(b.time("auxiliary_loss", shape, 0, 3 * scores + 4 * slots, [&] {
      ops::auxiliary_loss(
          ctx, {.logits = logits, .experts = experts, .groups = whole, .counts = {}, .scale = 1, .loss = loss, .dlogits = dlogits});
    }));
  }
}

}  // namespace moetrain::app
