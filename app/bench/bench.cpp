// bench.cpp -- the clock and the inputs of `moetrain bench`.
#include "app/bench/bench.h"

#include <algorithm>

#include "ops/elementwise.h"
#include "ops/linear.h"
#include "ops/random.h"

namespace moetrain::app {

BenchCase::BenchCase(const Ceilings& ceilings)
    : blas_(ops::make_blas(memory_)), ctx_{.scratch = scratch_, .blas = blas_.get()}, ceilings_(ceilings) {}

Tensor BenchCase::normal(DType dtype, Shape shape, double deviation, double mean) {
  constexpr std::int64_t kBlock = (1 << 20) + 7;  // elements; a prime, so that no two rows of a large tensor are alike
  const Tensor t = tensors_.take(dtype, shape);
  std::vector<std::byte> host(std::size_t(std::min(kBlock, t.count()) * size_of(dtype)));
  for (std::int64_t i = 0; i < std::min(kBlock, t.count()); ++i) {
    const double v = mean + deviation * ops::normal(7, stream_, std::uint64_t(i));
    if (dtype == DType::bf16)
      reinterpret_cast<bf16*>(host.data())[i] = bf16(v);
    else
      reinterpret_cast<float*>(host.data())[i] = float(v);
  }
  ++stream_;
  for (std::int64_t at = 0; at < t.bytes(); at += std::int64_t(host.size()))
    copy_to_device(Device::cuda, static_cast<std::byte*>(t.data) + at, host.data(),
                   std::min(std::int64_t(host.size()), t.bytes() - at));
  return t;
}

Tensor BenchCase::of(const std::vector<std::int32_t>& host, Shape shape) {
  const Tensor t = tensors_.take(DType::i32, shape);
  copy_to_device(Device::cuda, t.data, host.data(), t.bytes());
  return t;
}
Tensor BenchCase::of(const std::vector<std::int64_t>& host, Shape shape) {
  const Tensor t = tensors_.take(DType::i64, shape);
  copy_to_device(Device::cuda, t.data, host.data(), t.bytes());
  return t;
}

ops::Documents BenchCase::documents(std::vector<std::int64_t> starts) {
  starts_.push_back(std::move(starts));
  return {starts_.back(), of(starts_.back(), {std::int64_t(starts_.back().size())})};
}

Figure BenchCase::time(std::string op, std::string shape, double flops, double bytes, const std::function<void()>& run) {
  constexpr int kWarmUps = 3, kRuns = 15;
  for (int i = 0; i < kWarmUps; ++i) run();
  std::vector<float> ms;
  cuda::Event before(true), after(true);
  for (int i = 0; i < kRuns; ++i) {
    before.record(ctx_.stream);
    run();
    after.record(ctx_.stream);
    after.synchronize();
    ms.push_back(after.ms_since(before));
  }
  std::sort(ms.begin(), ms.end());
  return {std::move(op),
          std::move(shape),
          double(ms[ms.size() / 2]),
          flops,
          bytes,
          memory_.peaks()[std::size_t(Category::workspace)] - memory_.now(Category::workspace)};
}

Ceilings measure_ceilings() {
  Ceilings c;
  BenchCase b(c);
  const std::int64_t elements = std::int64_t(1) << 31, n = 8192;
  {
    Scope scope(b.stack());
    const Tensor x = b.normal(DType::bf16, {elements}), y = b.empty(DType::bf16, {elements});
    const Figure f = b.time("copy", "", 0, 0, [&] { ops::copy(b.context(), ops::Copy{.x = x, .y = y}); });
    c.copy_bytes_per_s = 4 * double(elements) / (f.ms * 1e-3);
  }
  const Tensor x = b.normal(DType::bf16, {n, n}), w = b.normal(DType::bf16, {n, n}), y = b.empty(DType::bf16, {n, n});
  const Figure f = b.time("product", "", 0, 0, [&] { ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y}); });
  c.bf16_flops_per_s = 2 * double(n) * double(n) * double(n) / (f.ms * 1e-3);
  return c;
}

}  // namespace moetrain::app
