// bench.h -- how `moetrain bench` times an operator: random inputs on the device, a median over events, beside its floor.
#pragma once
#include <array>
#include <functional>
#include <string>
#include <vector>

#include "memory/stream.h"
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::app {

// What the device can do at most; measured once at the start of a bench (a large copy, a large bf16 product).
struct Ceilings {
  double copy_bytes_per_s = 0, bf16_flops_per_s = 0;
};

// One line of the table. The floor is the larger of bytes over copy bandwidth and FLOPs over the matrix rate.
struct Figure {
  std::string op, shape;
  double ms = 0;
  double flops = 0, bytes = 0;       // the least that must be done and moved
  std::int64_t scratch_bytes = 0;    // most the op took beside its arguments
};

// Owns the tensors and the context of one case; they die with it.
class BenchCase {
 public:
  explicit BenchCase(const Ceilings& ceilings);
  ops::Context& context() { return ctx_; }
  Stack& stack() { return tensors_; }
  Tensor empty(DType dtype, Shape shape) { return tensors_.take(dtype, shape); }
  Tensor zeros(DType dtype, Shape shape) { return tensors_.zeros(dtype, shape); }
  Tensor normal(DType dtype, Shape shape, double deviation = 1, double mean = 0);  // random; a large one repeats a block
  Tensor of(const std::vector<std::int32_t>& host, Shape shape);
  Tensor of(const std::vector<std::int64_t>& host, Shape shape);
  ops::Documents documents(std::vector<std::int64_t> starts);  // kept alive by the case
  // The median time of run(), which queues its work on the context's stream.
  Figure time(std::string op, std::string shape, double flops, double bytes, const std::function<void()>& run);

 private:
  Memory memory_{Device::cuda};
  Stack tensors_{memory_, Category::activations, /*poison=*/false, Area::high}, scratch_{memory_, Category::workspace};
  ops::OwnedBlas blas_;
  ops::Context ctx_;
  std::vector<std::vector<std::int64_t>> starts_;
  const Ceilings& ceilings_;
  std::uint64_t stream_ = 0;
};

using Report = std::function<void(const Figure&)>;
Ceilings measure_ceilings();

// One function an operator (app/bench/<op>.cpp); each reports its cases.
void bench_cross_entropy(const Ceilings&, const Report&);
void bench_linear(const Ceilings&, const Report&);
void bench_kda(const Ceilings&, const Report&);
void bench_sparse_attention(const Ceilings&, const Report&);
void bench_indexer(const Ceilings&, const Report&);
void bench_grouped_linear(const Ceilings&, const Report&);
void bench_attention(const Ceilings&, const Report&);
void bench_router(const Ceilings&, const Report&);
void bench_permute(const Ceilings&, const Report&);
void bench_adamw(const Ceilings&, const Report&);
void bench_attn_res(const Ceilings&, const Report&);

}  // namespace moetrain::app
