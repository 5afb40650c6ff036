// buffer_test.cpp -- the account of bytes: every buffer is in it once, while it lives, whoever holds it.
#include "memory/buffer.h"

#include "tests/support/catch.h"

namespace moetrain {
namespace {

TEST_CASE("memory counts a buffer from its birth to its death, through moves", "[memory][cpu]") {
  for (const Device device : {Device::cpu, Device::dry}) {
    Memory memory(device);
    {
      Buffer a(memory, Category::weights, 100);
      CHECK((a.data() == nullptr) == (device == Device::dry));
      Buffer b(memory, Category::gradients, 50);
      Buffer c(std::move(a));
      CHECK(memory.total() == 150);
      CHECK(a.bytes() == 0);
      b = std::move(c);  // what b held dies here
      CHECK(memory.total() == 100);
      CHECK(memory.now(Category::gradients) == 0);
      CHECK(b.bytes() == 100);
    }
    CHECK(memory.total() == 0);
    CHECK(memory.peak() == 150);
  }
}

TEST_CASE("memory keeps the split at the peak of the sum apart from each category's peak", "[memory][cpu]") {
  Memory memory(Device::dry);
  Buffer loss(memory, Category::loss, 70);
  loss = {};
  loss = Buffer(memory, Category::loss, 10);
  { const Buffer weights(memory, Category::weights, 80); }  // the peak: 10 + 80
  CHECK(memory.peak() == 90);
  CHECK(memory.at_peak()[std::size_t(Category::loss)] == 10);
  CHECK(memory.at_peak()[std::size_t(Category::weights)] == 80);
  CHECK(memory.peaks()[std::size_t(Category::loss)] == 70);
}

TEST_CASE("memory keeps the peaks of each phase, with what is held as it begins", "[memory][cpu]") {
  Memory memory(Device::dry);
  memory.add(Category::weights, 10);
  memory.enter(MemoryPhase::forward);
  memory.add(Category::activations, 30);
  memory.add(Category::workspace, 7);
  memory.add(Category::workspace, -7);
  memory.enter(MemoryPhase::backward);
  memory.add(Category::activations, -30);
  memory.add(Category::gradients, 5);
  memory.enter(MemoryPhase::forward);  // of the next micro-batch
  memory.add(Category::activations, 31);
  const auto of = [&](MemoryPhase p, Category c) { return memory.phases()[std::size_t(p)].by_category[std::size_t(c)]; };
  const auto total = [&](MemoryPhase p) { return memory.phases()[std::size_t(p)].total; };
  CHECK(of(MemoryPhase::load, Category::weights) == 10);
  CHECK(of(MemoryPhase::load, Category::activations) == 0);
  CHECK(of(MemoryPhase::forward, Category::weights) == 10);
  CHECK(of(MemoryPhase::forward, Category::activations) == 31);
  CHECK(of(MemoryPhase::forward, Category::workspace) == 7);
  CHECK(of(MemoryPhase::backward, Category::activations) == 30);
  CHECK(of(MemoryPhase::backward, Category::workspace) == 0);
  CHECK(of(MemoryPhase::forward, Category::gradients) == 5);
  CHECK(total(MemoryPhase::load) == 10);
  CHECK(total(MemoryPhase::forward) == 47);
  CHECK(total(MemoryPhase::backward) == 40);
  CHECK(total(MemoryPhase::save) == 0);
}

TEST_CASE("an owned tensor moves with its bytes and leaves an absent one", "[memory][cpu]") {
  Memory memory(Device::cpu);
  OwnedTensor a(memory, Category::weights, DType::f32, {2, 3});
  a.view().as<float>()[5] = 7;
  OwnedTensor b(std::move(a));
  CHECK(!a.present());
  CHECK(b.view().as<float>()[5] == 7);
  CHECK(memory.total() == 24);
  b = OwnedTensor();
  CHECK(memory.total() == 0);
}

TEST_CASE("copies and fills move bytes on the CPU and do nothing on dry", "[memory][cpu]") {
  const std::uint8_t from[3] = {1, 2, 3};
  std::uint8_t to[3] = {9, 9, 9};
  copy_to_device(Device::dry, to, from, 3);
  fill(Device::dry, to, 0, 3);
  CHECK(to[0] == 9);
  copy_to_device(Device::cpu, to, from, 2);
  CHECK((to[0] == 1 && to[1] == 2 && to[2] == 9));
  copy_to_host(Device::cpu, to, from, 3);
  CHECK(to[2] == 3);
  fill(Device::cpu, to, 0xff, 1);
  CHECK((to[0] == 255 && to[1] == 2));
}

}  // namespace
}  // namespace moetrain
