// tiered_cache.cpp -- stages of a tensor, and its copies: at once on the CPU, on a stream of their own on CUDA.
#include "memory/tiered_cache.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>

namespace moetrain {

const char* name_of(Tier tier) {
  constexpr const char* kNames[kTiers] = {"none", "device", "host"};
  return kNames[std::size_t(tier)];
}

double link_bytes_per_second(Device device) {
  constexpr std::int64_t kBytes = std::int64_t(64) << 20;
  Memory here(device), host(Device::cpu);
  const Buffer block(here, Category::cache, kBytes);
  Buffer room;
  cuda::Pinned pinned;
  fill(device, block.data(), 0, kBytes);
  if (device == Device::cuda) {
    if constexpr (kHasCuda) pinned = cuda::pinned(kBytes);
  } else {
    room = Buffer(host, Category::cache, kBytes);
    std::memset(room.data(), 0, std::size_t(kBytes));  // its pages are there
  }
  const auto start = std::chrono::steady_clock::now();
  copy_to_host(device, device == Device::cuda ? pinned.get() : room.data(), block.data(), kBytes);
  return double(kBytes) / std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

struct TieredCache::HostRoom {
  Buffer counted;       // ordinary memory; where the device copies by itself
  cuda::Pinned pinned;  // this instead
  std::optional<cuda::Event> done;  // of the last copy, on CUDA
  std::int64_t bytes = 0;
};

TieredCache::TieredCache(Memory& device, Memory& host) : device_(device), host_(host) {}
TieredCache::~TieredCache() {
  for (const auto& room : rooms_)
    if (room && room->pinned.get()) host_.add(Category::cache, -room->bytes);
}

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
  e = {.stage = Stage::written, .tier = tier, .device = OwnedTensor(device_, Category::cache, dtype, shape), .dtype = dtype, .shape = shape};
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
    wait_for(key);
    e.device = {};
    e.stage = Stage::away;
  }
  std::erase_if(leaving_, [&](int key) { return entry(key).stage == Stage::away; });
}

void TieredCache::leave(int key) {
  Entry& e = entry(key);
  auto& room = rooms_[std::size_t(key)];
  const std::int64_t bytes = e.device.view().bytes();
  counts_.bytes_down += bytes;
  if (!room) room = std::make_unique<HostRoom>();
  if (room->bytes < bytes) {
    const std::int64_t wanted = room->bytes == 0 ? bytes : std::max(bytes, room->bytes + room->bytes / 8);  // it grows, by shares
    room->counted = {};
    room->pinned = {};
    if (on_cuda()) {
      if constexpr (kHasCuda) room->pinned = cuda::pinned(wanted);
      host_.add(Category::cache, wanted - room->bytes);
    } else {
      room->counted = Buffer(host_, Category::cache, wanted);
    }
    room->bytes = wanted;
  }
  copy(key, on_cuda() ? room->pinned.get() : room->counted.data(), e.device.view().data, bytes);
}

// In host memory, or beside the default stream.
void TieredCache::copy(int key, void* to, const void* from, std::int64_t bytes) {
  if (clock_) entry(key).message = clock_->send(Timeline::Lane::link, double(bytes) / bytes_per_s_);
  if (!on_cuda()) return copy_to_host(device_.device(), to, from, bytes);
  if (!ferry_) ferry_ = std::make_unique<cuda::Ferry>();
  auto& done = rooms_[std::size_t(key)]->done;
  if (!done) done.emplace();
  if constexpr (kHasCuda) ferry_->copy(to, from, bytes, *done);
}

void TieredCache::wait_for(int key) {
  if (clock_) clock_->wait(entry(key).message);
  if constexpr (kHasCuda)
    if (on_cuda()) cuda::wait(nullptr, *rooms_[std::size_t(key)]->done);
}

void TieredCache::prefetch(int key) {
  Entry& e = entry(key);
  if (e.tier != Tier::host || e.stage != Stage::away) return;
  e.device = OwnedTensor(device_, Category::cache, e.dtype, e.shape);
  const Tensor to = e.device.view();
  HostRoom& room = *rooms_[std::size_t(key)];
  counts_.bytes_up += to.bytes();
  e.stage = Stage::coming;
  copy(key, to.data, on_cuda() ? room.pinned.get() : room.counted.data(), to.bytes());
}

Tensor TieredCache::recall(int key) {
  Entry& e = entry(key);
  ++counts_.recalled;
  if (e.stage == Stage::away) {
    ++counts_.late;
    prefetch(key);
  }
  if (e.stage == Stage::coming) {
    wait_for(key);
    e.stage = Stage::back;
  }
  return e.device.view();
}

void TieredCache::drop(int key) {
  Entry& e = entry(key);
  std::erase(leaving_, key);
  if (e.stage == Stage::leaving || e.stage == Stage::coming) wait_for(key);
  e = {};
}

TieredCache::Counts TieredCache::take_counts() { return std::exchange(counts_, {}); }

}  // namespace moetrain
