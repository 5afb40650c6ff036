// stack.cpp -- chunks, marks and the account of the stack.
#include "memory/stack.h"

#include <algorithm>

namespace moetrain {
namespace {
constexpr std::int64_t kAlign = 256;
constexpr std::int64_t kChunkBytes = 8 << 20;
}  // namespace

Tensor Stack::take(DType dtype, Shape shape) {
  const std::int64_t wanted = shape.count() * size_of(dtype);
  const std::int64_t bytes = (wanted + kAlign - 1) / kAlign * kAlign;
  if (memory_.device() == Device::dry) {
    memory_.add(category_, bytes);
    takes_.push_back({bytes, 0, 0, category_});
    return {nullptr, dtype, shape};
  }
  while (current_ < chunks_.size() && chunks_[current_].used + bytes > chunks_[current_].storage.bytes()) ++current_;
  if (current_ == chunks_.size()) chunks_.push_back({Buffer(storage_, category_, std::max(bytes, kChunkBytes)), 0});
  Chunk& c = chunks_[current_];
  void* data = static_cast<std::byte*>(c.storage.data()) + c.used;
  takes_.push_back({bytes, current_, c.used, category_});
  c.used += bytes;
  memory_.add(category_, bytes);
  if (poison_) fill(memory_.device(), data, 0xff, wanted);
  return {data, dtype, shape};
}

Tensor Stack::zeros(DType dtype, Shape shape) {
  const Tensor t = take(dtype, shape);
  fill(memory_.device(), t.data, 0, t.bytes());
  return t;
}

void Stack::release(std::size_t mark) {
  while (takes_.size() > mark) {
    const Take& t = takes_.back();
    if (memory_.device() != Device::dry) {
      chunks_[t.chunk].used = t.used_before;
      current_ = t.chunk;
    }
    memory_.add(t.category, -t.bytes);
    takes_.pop_back();
  }
}

}  // namespace moetrain
