// tiered_cache.cpp -- stages of a tensor, and its copies: at once on the CPU, on a stream of their own on CUDA.
#include "memory/tiered_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>

namespace moetrain {

const char* name_of(Tier tier) {
  constexpr const char* kNames[kTiers] = {"none", "device", "host"};
  return kNames[std::size_t(tier)];
}

double link_bytes_per_second(Device device) {
  constexpr std::int64_t kBytes = std::int64_t(64) << 20;
  Memory here(device), host(Device::cpu);
  const Buffer block(here, Category::cache, kBytes);
  const HostBuffer room(host, device, Category::cache, kBytes);
  fill(device, block.data(), 0, kBytes);
  std::memset(room.data(), 0, std::size_t(kBytes));  // its pages are there
  const auto start = std::chrono::steady_clock::now();
  copy_to_host(device, room.data(), block.data(), kBytes);
  return double(kBytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

TieredCache::TieredCache(Memory& device, Memory& host) : device_(device), host_(host), transfer_(device) {}

TieredCache::Entry& TieredCache::entry(int key) {
  check(holds(key), "tiered cache: nothing lies under this key", {{"key", key}});
  return entries_[std::size_t(key)];
}

Tensor TieredCache::put(int key, Tier tier, DType dtype, Shape shape) {
  check(key >= 0 && !holds(key) && tier != Tier::none, "tiered cache: a key is taken, or there is no tier for it",
        {{"key", key}, {"tier", std::int64_t(tier)}});
  if (std::size_t(key) >= entries_.size()) {
    entries_.resize(std::size_t(key) + 1);
    rooms_.resize(std::size_t(key) + 1);
  }
  Entry& e = entries_[std::size_t(key)];
  e = {.stage = Stage::written,
       .tier = tier,
       .device = OwnedTensor(device_, Category::cache, dtype, shape),
       .dtype = dtype,
       .shape = shape};
  if (tier == Tier::host) leaving_.push_back(key);
  return e.device.view();
}

// The room on the device is used by later work of the default stream, which has to wait for the copy out of it.
void TieredCache::step() {
  constexpr int kSteps = 2;
  for (const int key : leaving_) {
    Entry& e = entry(key);
    if (e.stage == Stage::written) {
      leave(key);
      e.stage = Stage::leaving;
    }
    if (++e.age < kSteps) continue;
    transfer_.wait(room(key).done);
    e.device = {};
    e.stage = Stage::away;
  }
  std::erase_if(leaving_, [&](int key) { return entry(key).stage == Stage::away; });
}

void TieredCache::leave(int key) {
  const Tensor from = entry(key).device.view();
  HostRoom& to = room(key);
  counts_.bytes_down += from.bytes();
  if (const std::int64_t had = to.memory.bytes(); had < from.bytes()) {  // it grows, by shares
    to.memory = {};
    to.memory =
        HostBuffer(host_, device_.device(), Category::cache, had == 0 ? from.bytes() : std::max(from.bytes(), had + had / 8));
  }
  transfer_.copy(Transfer::Way::to_host, to.memory.data(), from.data, from.bytes(), to.done);
}

void TieredCache::prefetch(int key) {
  Entry& e = entry(key);
  if (e.tier != Tier::host || e.stage != Stage::away) return;
  e.device = OwnedTensor(device_, Category::cache, e.dtype, e.shape);
  const Tensor to = e.device.view();
  counts_.bytes_up += to.bytes();
  e.stage = Stage::coming;
  transfer_.copy(Transfer::Way::to_device, to.data, room(key).memory.data(), to.bytes(), room(key).done);
}

Tensor TieredCache::recall(int key) {
  Entry& e = entry(key);
  ++counts_.recalled;
  if (e.stage == Stage::away) {
    ++counts_.late;
    prefetch(key);
  }
  if (e.stage == Stage::coming) {
    transfer_.wait(room(key).done);
    e.stage = Stage::back;
  }
  return e.device.view();
}

void TieredCache::drop(int key) {
  Entry& e = entry(key);
  std::erase(leaving_, key);
  if (e.stage == Stage::leaving || e.stage == Stage::coming) transfer_.wait(room(key).done);
  e = {};
}

TieredCache::Counts TieredCache::take_counts() { return std::exchange(counts_, {}); }

}  // namespace moetrain
