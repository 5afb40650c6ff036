// cross_entropy.cpp -- the loss beside its three products alone, both of its ways of cutting.
#include "ops/cross_entropy.h"

#include "app/bench/bench.h"
#include "ops/linear.h"

namespace moetrain::app {

void bench_cross_entropy(const Ceilings& ceilings, const Report& report) {
  constexpr std::int64_t T = 8192, V = 163840;
  for (const std::int64_t D : {7168, 2304}) {
    BenchCase b(ceilings);
    const Tensor hidden = b.normal(DType::bf16, {T, D}), weight = b.normal(DType::bf16, {V, D}, 0.02),
                 dhidden = b.empty(DType::bf16, {T, D}), dweight = b.zeros(DType::f32, {V, D}), loss = b.zeros(DType::f32, {1});
    std::vector<std::int32_t> ids(std::size_t(T), 0);
    for (std::size_t t = 0; t < ids.size(); ++t) ids[t] = std::int32_t(t * 7919 % V);
    const Tensor labels = b.of(ids, {T});
    const double products = 3 * 2.0 * double(T) * double(V) * double(D),
                 bytes = 2.0 * double(2 * T * D + V * D) + 8.0 * double(V * D);
    const std::string shape = "N" + std::to_string(T) + " V" + std::to_string(V) + " D" + std::to_string(D);
    {
      Scope scope(b.stack());
      const Tensor logits = b.normal(DType::bf16, {T, V});
      report(b.time("three products, f32 dW added", shape, products, bytes, [&] {
        ops::linear(b.context(), ops::LinearForward{.x = hidden, .w = weight, .y = logits});
        ops::linear(b.context(), ops::LinearBackward{.dy = logits, .x = hidden, .w = weight, .dx = dhidden, .dw = dweight});
      }));
    }
    struct Cut {
      std::int64_t seq, vocab;
    };
    for (const Cut& cut : {Cut{2048, V}, Cut{1024, V}, Cut{2048, 8192}})
      report(b.time("cross_entropy " + std::to_string(cut.seq) + " x " + std::to_string(cut.vocab), shape, products, bytes, [&] {
        ops::cross_entropy(b.context(), ops::CrossEntropy{.hidden = hidden,
                                                          .weight = weight,
                                                          .labels = labels,
                                                          .seq_chunk = cut.seq,
                                                          .vocab_chunk = cut.vocab,
                                                          .gradient_scale = 1.0 / double(T),
                                                          .loss = loss,
                                                          .dhidden = dhidden,
                                                          .dweight = dweight});
      }));
  }
}

}  // namespace moetrain::app
