// linear.cpp -- dense products of the model's widths.
#include "ops/linear.h"

#include "app/bench/bench.h"

namespace moetrain::app {

void bench_linear(const Ceilings& ceilings, const Report& report) {
  for (const auto [T, I, O] : {std::array<std::int64_t, 3>{8192, 7168, 12288}, {8192, 2048, 2048}, {8192, 7168, 7168}}) {
    BenchCase b(ceilings);
    const Tensor x = b.normal(DType::bf16, {T, I}), w = b.normal(DType::bf16, {O, I}), y = b.empty(DType::bf16, {T, O}),
                 dx = b.empty(DType::bf16, {T, I}), dw = b.zeros(DType::f32, {O, I});
    const double flops = 2 * double(T) * double(I) * double(O), bytes = 2 * double(T * I + O * I + T * O);
    const std::string shape = "T" + std::to_string(T) + " I" + std::to_string(I) + " O" + std::to_string(O);
    report(b.time("linear forward", shape, flops, bytes,
                  [&] { ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y}); }));
    report(b.time("linear backward", shape, 2 * flops, 2 * bytes + 8 * double(O * I), [&] {
      ops::linear(b.context(), ops::LinearBackward{.dy = y, .x = x, .w = w, .dx = dx, .dw = dw});
    }));
  }
}

}  // namespace moetrain::app
