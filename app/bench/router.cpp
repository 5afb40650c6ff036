// router.cpp -- the choice of experts, its gradient, what balancing sees of it, and a round of offers where places are few.
#include "ops/router.h"

#include <numeric>

#include "app/bench/bench.h"
#include "ops/balance.h"
#include "ops/capacity.h"

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

    std::vector<std::int64_t> every(std::size_t(E), 0);
    const Tensor key_of_one = b.of(std::vector<std::int64_t>(std::size_t(E), 0x80010000), {E}), none = b.of(every, {E}),
                 offered = b.empty(DType::i32, {T, K}), scores_offered = b.empty(DType::f32, {T, K}),
                 of_keys = b.empty(DType::i64, {E, ops::kKeyBins}), room = b.of(std::vector<std::int64_t>(std::size_t(E), T), {E});
    std::iota(every.begin(), every.end(), 0);
    const Tensor row_of = b.of(every, {E});
    ops::OfferSlots offer{.logits = logits,
                          .bias = bias,
                          .rule = {},
                          .chosen = experts,
                          .room = {},
                          .experts = offered,
                          .scores = scores_offered,
                          .counts = b.empty(DType::i64, {E})};
    const auto take = [&] {
      offer.room = {};
      ops::offer_slots(ctx, offer);
      ops::offer_histogram(ctx, {.experts = offered,
                                 .scores = scores_offered,
                                 .row_of = row_of,
                                 .leading = none,
                                 .known = 0,
                                 .histogram = of_keys});
      ops::take_offers(ctx, {.chosen = experts,
                             .scores = scores_offered,
                             .row_of = row_of,
                             .last = key_of_one,
                             .ties = none,
                             .experts = offered});
    };
    report(b.time("offer_slots, offer_histogram, take_offers", shape, 0, 40 * slots, take));
    report(b.time("those and offer_slots of dropped ones", shape, 0, scores + 48 * slots, [&] {
      take();
      offer.room = room;
      ops::offer_slots(ctx, offer);
    }));
  }
}

}  // namespace moetrain::app
