// tensors.h -- tensors of a test: random, poisoned with NaN, and guarded against writes past their ends; on the CPU.
#pragma once
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "memory/stack.h"
#include "ops/context.h"
#include "ops/random.h"

namespace moetrain::test {

// Owns the tensors of one test and the context its ops run in. Scratch is poisoned. Guard bytes after every tensor are looked at
// when the bench dies or guards_hold() is asked.
class Bench {
 public:
  explicit Bench(std::uint64_t seed = 1) : seed_(seed) {}
  ops::Context& context() { return context_; }

  Tensor empty(DType dtype, Shape shape) {  // NaN (floating) or all bits one
    const auto bytes = std::size_t(shape.count() * size_of(dtype));
    blocks_.push_back(std::make_unique<std::vector<std::byte>>(bytes + kGuard + 64, std::byte(0xff)));
    auto* base = blocks_.back()->data();
    base += (64 - reinterpret_cast<std::uintptr_t>(base) % 64) % 64;
    std::memset(base + bytes, 0xA5, kGuard);
    ends_.push_back(base + bytes);
    return {base, dtype, shape};
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor t = empty(dtype, shape);
    if (t.bytes() > 0) std::memset(t.data, 0, std::size_t(t.bytes()));
    return t;
  }
  Tensor normal(DType dtype, Shape shape, double deviation = 1, double mean = 0) {
    return filled(dtype, shape, [&](std::int64_t i) { return mean + deviation * ops::normal(seed_, stream_, std::uint64_t(i)); });
  }
  Tensor uniform(DType dtype, Shape shape, double low, double high) {
    return filled(dtype, shape, [&](std::int64_t i) { return low + (high - low) * ops::uniform(seed_, stream_, std::uint64_t(i)); });
  }
  template <class F>
  Tensor filled(DType dtype, Shape shape, F value) {  // value(i) as f64
    const Tensor t = empty(dtype, shape);
    for (std::int64_t i = 0; i < t.count(); ++i) set(t, i, double(value(i)));
    ++stream_;
    return t;
  }
  Tensor of(DType dtype, Shape shape, const std::vector<double>& v) {
    check(std::int64_t(v.size()) == shape.count(), "bench: values do not fill the shape");
    return filled(dtype, shape, [&](std::int64_t i) { return v[std::size_t(i)]; });
  }
  Tensor copy(ConstTensor x) { return as(x.dtype, x); }
  Tensor as(DType dtype, ConstTensor x) {  // converted
    return filled(dtype, x.shape, [&](std::int64_t i) { return get(x, i); });
  }

  static double get(ConstTensor t, std::int64_t i) {
    switch (t.dtype) {
      case DType::f64: return static_cast<const double*>(t.data)[i];
      case DType::f32: return double(static_cast<const float*>(t.data)[i]);
      case DType::bf16: return double(float(static_cast<const bf16*>(t.data)[i]));
      case DType::i32: return static_cast<const std::int32_t*>(t.data)[i];
      case DType::i64: return double(static_cast<const std::int64_t*>(t.data)[i]);
      default: fail("bench: dtype");
    }
  }
  static void set(Tensor t, std::int64_t i, double v) {
    switch (t.dtype) {
      case DType::f64: static_cast<double*>(t.data)[i] = v; break;
      case DType::f32: static_cast<float*>(t.data)[i] = float(v); break;
      case DType::bf16: static_cast<bf16*>(t.data)[i] = bf16(v); break;
      case DType::i32: static_cast<std::int32_t*>(t.data)[i] = std::int32_t(v); break;
      case DType::i64: static_cast<std::int64_t*>(t.data)[i] = std::int64_t(v); break;
      default: fail("bench: dtype");
    }
  }
  bool guards_hold() const {
    for (const auto* end : ends_)
      for (std::size_t i = 0; i < kGuard; ++i)
        if (end[i] != std::byte(0xA5)) return false;
    return true;
  }

 private:
  static constexpr std::size_t kGuard = 64;
  std::uint64_t seed_, stream_ = 0;
  Memory memory_{Device::cpu};
  Stack scratch_{memory_, Category::workspace, /*poison=*/true};
  ops::Context context_{scratch_};
  std::vector<std::unique_ptr<std::vector<std::byte>>> blocks_;
  std::vector<std::byte*> ends_;
};

}  // namespace moetrain::test
