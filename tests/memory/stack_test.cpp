// stack_test.cpp -- what a scope takes it gives back, places never overlap, and a dry stack counts what a real one does.
#include "memory/stack.h"

#include <algorithm>
#include <cmath>

#include "tests/support/catch.h"

namespace moetrain {
namespace {

TEST_CASE("a scope gives back what was taken in it and nothing else", "[memory][cpu]") {
  Memory memory(Device::cpu);
  Stack stack(memory, Category::workspace);
  const Tensor kept = stack.zeros(DType::f32, {10});
  const auto before = memory.total();
  void* first = nullptr;
  {
    Scope scope(stack);
    first = stack.take(DType::f64, {100}).data;
    stack.take(DType::bf16, {7});
    CHECK(memory.total() == before + 814);
  }
  CHECK(memory.total() == before);
  CHECK(kept.as<float>()[9] == 0);
  Scope scope(stack);
  CHECK(stack.take(DType::f64, {100}).data == first);
}

TEST_CASE("takes of a stack do not overlap, whatever their sizes", "[memory][cpu]") {
  Memory memory(Device::cpu);
  Stack stack(memory, Category::workspace);
  std::vector<Tensor> takes;
  for (const std::int64_t n : {1, 3000000, 5, 9000000, 64, 0, 2})
    takes.push_back(stack.take(DType::i32, {n}));
  for (std::size_t i = 0; i < takes.size(); ++i) std::fill_n(takes[i].as<std::int32_t>(), takes[i].count(), std::int32_t(i));
  for (std::size_t i = 0; i < takes.size(); ++i) {
    const auto* p = takes[i].as<std::int32_t>();
    CHECK(std::all_of(p, p + takes[i].count(), [&](std::int32_t v) { return v == std::int32_t(i); }));
    CHECK(reinterpret_cast<std::uintptr_t>(p) % 512 == 0);
  }
}

TEST_CASE("a dry stack counts what a real one does and stores nothing", "[memory][cpu]") {
  Memory real(Device::cpu), dry(Device::dry);
  Stack real_stack(real, Category::activations), dry_stack(dry, Category::activations);
  for (Stack* stack : {&real_stack, &dry_stack}) {
    stack->zeros(DType::f32, {3, 5});
    Scope scope(*stack);
    stack->set_category(Category::cache);
    stack->take(DType::bf16, {100000});
  }
  CHECK(dry.peak() == real.peak());
  CHECK(dry.peaks() == real.peaks());
  CHECK(dry.total() == real.total());
  CHECK(dry.now(Category::activations) == 60);
  CHECK(dry.now(Category::cache) == 0);
  CHECK(dry_stack.take(DType::f32, {2}).data == nullptr);
}

TEST_CASE("a poisoned stack hands out NaN, again after every scope", "[memory][cpu]") {
  Memory memory(Device::cpu);
  Stack stack(memory, Category::workspace, true);
  for (int i = 0; i < 2; ++i) {
    Scope scope(stack);
    const Tensor t = stack.take(DType::f32, {33});
    CHECK(std::all_of(t.as<float>(), t.as<float>() + 33, [](float v) { return std::isnan(v); }));
    std::fill_n(t.as<float>(), 33, 1.0F);
  }
}

}  // namespace
}  // namespace moetrain
