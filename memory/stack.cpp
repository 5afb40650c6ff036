// stack.cpp -- takes and marks of a stack.
#include "memory/stack.h"

namespace moetrain {

Tensor Stack::take(DType dtype, Shape shape) {
  const std::int64_t bytes = shape.count() * size_of(dtype);
  const Memory::Block block = memory_.take(category_, bytes, area_);
  takes_.push_back({bytes, block.place, category_});
  if (poison_) fill(memory_.device(), block.data, 0xff, bytes);
  return {block.data, dtype, shape};
}

Tensor Stack::zeros(DType dtype, Shape shape) {
  const Tensor t = take(dtype, shape);
  fill(memory_.device(), t.data, 0, t.bytes());
  return t;
}

void Stack::release(std::size_t mark) {
  for (; takes_.size() > mark; takes_.pop_back()) memory_.give_back(takes_.back().category, takes_.back().bytes, takes_.back().place, area_);
}

}  // namespace moetrain
