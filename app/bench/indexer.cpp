// indexer.cpp -- the indexer of the model's sparse attention: 32 heads of 128, the best 2048 of 8192 causal keys, and its loss.
#include "ops/indexer.h"

#include "app/bench/bench.h"

namespace moetrain::app {

void bench_indexer(const Ceilings& ceilings, const Report& report) {
  const std::int64_t T = 8192, J = 32, H = 128, K = 2048;
  BenchCase b(ceilings);
  const auto bf16 = DType::bf16, f32 = DType::f32;
  const Tensor q = b.normal(bf16, {T, J, H}), k = b.normal(bf16, {T, H}), weights = b.normal(f32, {T, J}, 1 / 64.0);
  const Tensor indices = b.empty(DType::i32, {T, K}), target = b.normal(f32, {T, K}, 0, 1.0 / 2048), loss = b.zeros(f32, {1});
  const Tensor dq = b.empty(bf16, q.shape), dk = b.empty(bf16, k.shape), dweights = b.empty(f32, weights.shape);
  const ops::Documents documents = b.documents({0, T});
  const double causal = double(T) * double(T + 1) / 2, kept = double(T) * double(K) - double(K) * double(K - 1) / 2;
  const double bytes = 2 * double(T * J * H + T * H) + 4 * double(T * J);
  const std::string shape = "T8192 J32 H128 top-2048";
  report(b.time("indexer select", shape, 2 * causal * double(J * H), bytes + 4 * double(T * K), [&] {
    ops::indexer_select(b.context(),
                        ops::IndexerSelect{.q = q, .k = k, .weights = weights, .documents = documents, .indices = indices});
  }));
  report(b.time("indexer loss", shape, 6 * kept * double(J * H), 2 * bytes + 8 * double(T * K), [&] {
    ops::indexer_loss(b.context(), ops::IndexerLoss{.q = q,
                                                    .k = k,
                                                    .weights = weights,
                                                    .target = target,
                                                    .indices = indices,
                                                    .documents = documents,
                                                    .gradient_scale = 1,
                                                    .loss = loss,
                                                    .dq = dq,
                                                    .dk = dk,
                                                    .dweights = dweights});
  }));
}

}  // namespace moetrain::app
