// linear.cpp -- dense products of the model's widths, and the router's, whose weights and logits are f32.
#include "ops/linear.h"

#include "app/bench/bench.h"

namespace moetrain::app {

void bench_linear(const Ceilings& ceilings, const Report& report) {
  struct Case {
    std::int64_t T, I, O;
    DType w, y;
  };
  for (const Case& c : {Case{8192, 7168, 12288, DType::bf16, DType::bf16}, Case{8192, 2048, 2048, DType::bf16, DType::bf16},
                        Case{8192, 7168, 7168, DType::bf16, DType::bf16}, Case{8192, 7168, 896, DType::f32, DType::f32}}) {
    BenchCase b(ceilings);
    const Tensor x = b.normal(DType::bf16, {c.T, c.I}), w = b.normal(c.w, {c.O, c.I}), y = b.normal(c.y, {c.T, c.O}),
                 dx = b.empty(DType::bf16, {c.T, c.I}), dw = b.zeros(DType::f32, {c.O, c.I});
    const double flops = 2 * double(c.T) * double(c.I) * double(c.O);
    const double once = double(x.bytes() + w.bytes() + y.bytes()), back = once + double(y.bytes() + dx.bytes() + 2 * dw.bytes());
    const std::string shape = "T" + std::to_string(c.T) + " I" + std::to_string(c.I) + " O" + std::to_string(c.O) +
                              (c.w == DType::f32 ? ", f32 w and y" : "");
    const auto forward = [&] { ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y}); };
    report(b.time("linear forward", shape, flops, once, forward));
    report(b.time("linear forward + backward", shape, 3 * flops, once + back, [&] {
      forward();
      ops::linear(b.context(), ops::LinearBackward{.dy = y, .x = x, .w = w, .dx = dx, .dw = dw});
    }));
  }
}

}  // namespace moetrain::app
