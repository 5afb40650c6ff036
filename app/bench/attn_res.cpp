// attn_res.cpp -- the mix over depth with the norm that follows, and its gradients.
#include "ops/attn_res.h"

#include "app/bench/bench.h"

namespace moetrain::app {

void bench_attn_res(const Ceilings& ceilings, const Report& report) {
  for (const auto& [T, D, Z] : {std::array<std::int64_t, 3>{8192, 2048, 3}, {8192, 7168, 5}, {8192, 7168, 9}}) {
    BenchCase b(ceilings);
    auto& ctx = b.context();
    std::vector<ConstTensor> sources;
    std::vector<Tensor> dsources;
    for (std::int64_t n = 0; n < Z; ++n) {
      sources.push_back(b.normal(DType::bf16, {T, D}));
      dsources.push_back(b.normal(DType::f32, {T, D}));
    }
    const Tensor gamma = b.normal(DType::bf16, {D}, 0.2, 1), query = b.normal(DType::bf16, {1, D}, 0.02),
                 y = b.empty(DType::bf16, {T, D}), weights = b.empty(DType::f32, {T, Z}), normed = b.empty(DType::bf16, {T, D}),
                 r = b.empty(DType::f32, {T}), dy = b.normal(DType::bf16, {T, D}), dgamma = b.zeros(DType::f32, {D}),
                 dquery = b.zeros(DType::f32, {1, D});
    const std::string shape = "T" + std::to_string(T) + " D" + std::to_string(D) + " sources" + std::to_string(Z);
    const double row = 2 * double(T * D), forward_bytes = row * double(Z + 2);
    const auto forward = [&] {
      ops::attn_res(ctx, {.sources = sources,
                          .gamma = gamma,
                          .query = query,
                          .eps = 1e-5,
                          .y = y,
                          .weights = weights,
                          .norm = ops::RmsNormForward{.x = y, .w = gamma, .y = normed, .r = r, .eps = 1e-5}});
    };
    report(b.time("attn_res + rmsnorm forward", shape, 0, forward_bytes, forward));
    report(b.time("attn_res + rmsnorm forward, attn_res backward", shape, 0, forward_bytes + row * double(5 * Z + 1), [&] {
      forward();
      ops::attn_res(ctx, ops::AttnResBackward{.dy = dy,
                                              .sources = sources,
                                              .gamma = gamma,
                                              .query = query,
                                              .eps = 1e-5,
                                              .weights = weights,
                                              .dsources = dsources,
                                              .dgamma = dgamma,
                                              .dquery = dquery});
    }));
  }
}

}  // namespace moetrain::app
