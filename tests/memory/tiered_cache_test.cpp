// tiered_cache_test.cpp -- what is laid aside comes back as it was, in the memory that its tier says, when it says.
#include "memory/tiered_cache.h"

#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/on_device.h"

using namespace moetrain;

namespace {

std::vector<float> numbers(std::int64_t count, float first) {
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + float(i);
  return values;
}
void write(Device device, Tensor to, const std::vector<float>& values) {
  copy_to_device(device, to.data, values.data(), to.bytes());
}
std::vector<float> read(Device device, Tensor from) {
  std::vector<float> values(std::size_t(from.count()));
  copy_to_host(device, values.data(), from.data, from.bytes());
  return values;
}

void comes_back(Device kind) {
  Memory device(kind), host(Device::cpu);
  {
    TieredCache cache(device, host);
    constexpr std::int64_t kBytes = 4 * 1000;
    const auto a = numbers(1000, 1), b = numbers(1000, 5000), c = numbers(1000, -3);
    write(kind, cache.put(0, Tier::device, DType::f32, {10, 100}), a);
    write(kind, cache.put(3, Tier::host, DType::f32, {1000}), b);
    CHECK(device.now(Category::cache) == 2 * kBytes);
    CHECK(cache.host_bytes() == 0);
    cache.step();
    CHECK(cache.host_bytes() == kBytes);
    CHECK(device.now(Category::cache) == 2 * kBytes);  // it may still travel
    write(kind, cache.put(4, Tier::host, DType::f32, {1000}), c);
    cache.step();
    CHECK(device.now(Category::cache) == 2 * kBytes);  // the first is away, the second leaves
    cache.step();
    CHECK(device.now(Category::cache) == kBytes);
    cache.prefetch(4);
    cache.prefetch(0);
    CHECK(device.now(Category::cache) == 2 * kBytes);
    CHECK(read(kind, cache.recall(4)) == c);
    CHECK(cache.recall(0).shape == Shape{10, 100});
    CHECK(read(kind, cache.recall(0)) == a);
    CHECK(read(kind, cache.recall(3)) == b);  // not prefetched
    const auto counts = cache.take_counts();
    CHECK((counts.recalled == 4 && counts.late == 1 && counts.bytes_down == 2 * kBytes && counts.bytes_up == 2 * kBytes));
    CHECK(cache.take_counts().recalled == 0);
    for (const int key : {0, 3, 4}) cache.drop(key);
    CHECK(device.now(Category::cache) == 0);
    CHECK_FALSE(cache.holds(3));
    CHECK(cache.host_bytes() == 2 * kBytes);  // its room is kept

    write(kind, cache.put(3, Tier::host, DType::f32, {1001}), numbers(1001, 7));  // and grows by an eighth
    cache.step();
    CHECK(cache.host_bytes() == 2 * kBytes + kBytes / 8);
    CHECK(read(kind, cache.recall(3)) == numbers(1001, 7));  // while it leaves
    cache.drop(3);
    write(kind, cache.put(3, Tier::host, DType::f32, {0}), {});
    cache.step();
    cache.step();
    CHECK(cache.recall(3).shape == Shape{0});
  }
  CHECK(device.now(Category::cache) == 0);
  CHECK(host.total() == 0);
}

}  // namespace

TEST_CASE("a tiered cache gives back what was laid aside, from the device and from host memory", "[memory][cpu]") {
  comes_back(Device::cpu);
}

TEST_CASE("a tiered cache on a dry device takes as much and moves nothing", "[memory][cpu]") {
  Memory device(Device::dry), host(Device::dry);
  TieredCache cache(device, host);
  cache.put(0, Tier::host, DType::bf16, {1 << 20, 1 << 20});
  cache.step();
  cache.step();
  CHECK(device.now(Category::cache) == 0);
  CHECK(cache.host_bytes() == std::int64_t(1) << 41);
  CHECK(cache.recall(0).shape == Shape{1 << 20, 1 << 20});
}

TEST_CASE("a tiered cache refuses a key that is taken, and one with nothing under it", "[memory][cpu]") {
  Memory device(Device::cpu), host(Device::cpu);
  TieredCache cache(device, host);
  cache.put(2, Tier::device, DType::f32, {3});
  CHECK_THROWS_AS(cache.put(2, Tier::device, DType::f32, {3}), Error);
  CHECK_THROWS_AS(cache.recall(1), Error);
  CHECK_THROWS_AS(cache.drop(7), Error);
}

TEST_CASE("a tiered cache on CUDA gives back what was laid aside", "[memory][cuda]") {
  if (!test::cuda_device_here()) return;
  comes_back(Device::cuda);
}
