// on_device.h -- the tensors of a test on the CUDA device: copies of a bench's, poisoned and guarded as there.
#pragma once
#include <array>
#include <vector>

#include "memory/buffer.h"
#include "memory/cuda_memory.h"
#include "memory/stack.h"
#include "ops/context.h"
#include "ops/documents.h"
#include "tests/support/tensors.h"

namespace moetrain::test {

// Is there something to run a [cuda] test on? Without, the test ends at once: it is compiled everywhere and run where a device is.
inline bool cuda_device_here() {
  if constexpr (kHasCuda) return cuda::devices() > 0;
  return false;
}

// Owns device tensors and the context of the ops that run on them. Scratch is poisoned.
class DeviceBench {
 public:
  ops::Context& context() { return context_; }
  Tensor empty(DType dtype, Shape shape) {  // NaN (floating) or all bits one
    const std::int64_t bytes = shape.count() * size_of(dtype);
    blocks_.push_back({Buffer(memory_, Category::activations, bytes + kGuard), bytes});
    auto* base = static_cast<std::byte*>(blocks_.back().storage.data());
    fill(Device::cuda, base, 0xff, bytes);
    fill(Device::cuda, base + bytes, 0xA5, kGuard);
    return {base, dtype, shape};
  }
  Tensor copy(ConstTensor host) {
    const Tensor t = empty(host.dtype, host.shape);
    copy_to_device(Device::cuda, t.data, host.data, host.bytes());
    return t;
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor t = empty(dtype, shape);
    fill(Device::cuda, t.data, 0, t.bytes());
    return t;
  }
  // The same documents with their lists on the device too; the spans must outlive their users.
  ops::Documents documents(std::span<const std::int64_t> starts) { return documents(ops::Documents{starts}); }
  ops::Documents documents(ops::Documents d) {
    const auto put = [&](const void* list, Shape shape) {
      const Tensor t = empty(DType::i64, shape);
      copy_to_device(Device::cuda, t.data, list, t.bytes());
      return t;
    };
    d.on_device = put(d.starts.data(), {d.count() + 1});
    if (!d.whole()) d.pieces_on_device = put(d.pieces.data(), {d.count(), 4});
    return d;
  }
  // The tensor's elements in a tensor of the host bench; waits for all work queued on the default stream.
  Tensor to_host(Bench& bench, ConstTensor device) const {
    const Tensor t = bench.empty(device.dtype, device.shape);
    copy_to_host(Device::cuda, t.data, device.data, device.bytes());
    return t;
  }
  bool guards_hold() const {
    for (const Block& block : blocks_) {
      std::array<std::byte, kGuard> end;
      copy_to_host(Device::cuda, end.data(), static_cast<const std::byte*>(block.storage.data()) + block.bytes, kGuard);
      for (const std::byte g : end)
        if (g != std::byte(0xA5)) return false;
    }
    return true;
  }

 private:
  static constexpr std::int64_t kGuard = 64;
  struct Block {
    Buffer storage;
    std::int64_t bytes;
  };
  Memory memory_{Device::cuda};
  Stack scratch_{memory_, Category::workspace, /*poison=*/true};
  ops::OwnedBlas blas_ = ops::make_blas(memory_);
  ops::Context context_{.scratch = scratch_, .blas = blas_.get()};
  std::vector<Block> blocks_;
};

}  // namespace moetrain::test
