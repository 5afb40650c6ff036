// pool.cpp -- cuts and merges blocks, and asks the system for what they lie in.
#include "memory/pool.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>

#include "memory/check.h"
#include "memory/cuda_memory.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace moetrain {
namespace {

std::int64_t rounded(std::int64_t bytes, std::int64_t to = Pool::kAlign) { return (bytes + to - 1) / to * to; }

// The sanitizer is told which bytes of a reservation are somebody's.
void forbid([[maybe_unused]] const void* data, [[maybe_unused]] std::int64_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_poison_memory_region(data, std::size_t(bytes));
#endif
}
void allow([[maybe_unused]] const void* data, [[maybe_unused]] std::int64_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  __asan_unpoison_memory_region(data, std::size_t(bytes));
#endif
}

}  // namespace

std::optional<std::int64_t> Pool::Places::take(std::int64_t bytes, std::int64_t behind) {
  const auto hole = std::find_if(holes_.begin(), holes_.end(), [&](const Hole& h) { return h.bytes >= bytes; });
  if (hole == holes_.end()) {
    if (bytes > behind) return {};
    reach_ += bytes;
    return reach_ - bytes;
  }
  const std::int64_t begin = hole->begin;
  hole->begin += bytes;
  hole->bytes -= bytes;
  if (hole->bytes == 0) holes_.erase(hole);
  return begin;
}

void Pool::Places::give_back(std::int64_t begin, std::int64_t bytes) {
  auto hole = std::upper_bound(holes_.begin(), holes_.end(), begin, [](std::int64_t b, const Hole& h) { return b < h.begin; });
  if (hole != holes_.begin() && std::prev(hole)->begin + std::prev(hole)->bytes == begin) {
    --hole;
    hole->bytes += bytes;
  } else {
    hole = holes_.insert(hole, {begin, bytes});
  }
  if (const auto next = std::next(hole); next != holes_.end() && hole->begin + hole->bytes == next->begin) {
    hole->bytes += next->bytes;
    holes_.erase(next);
  }
  if (holes_.back().begin + holes_.back().bytes == reach_) {
    reach_ = holes_.back().begin;
    holes_.pop_back();
  }
}

std::int64_t Pool::Places::largest_hole() const {
  std::int64_t most = 0;
  for (const Hole& hole : holes_) most = std::max(most, hole.bytes);
  return most;
}

Pool::~Pool() {
  if (base_ == nullptr) return;
  for (int a = 0; a < kAreas; ++a) unmap(Area(a), 0);
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) cuda::release_addresses(base_, kAreas * span_);
  if (device_ == Device::cpu) munmap(base_, std::size_t(kAreas * span_));
}

void Pool::reserve() {
  // What the device has, what it gives at the least, and what a step has at the most.
  std::int64_t has = std::numeric_limits<std::int64_t>::max(), granule = 1, largest = 1;
  if (device_ == Device::cpu) {
    has = sysconf(_SC_PHYS_PAGES) * sysconf(_SC_PAGESIZE), granule = sysconf(_SC_PAGESIZE), largest = 2 << 20;
    rlimit addresses{};  // a process may be allowed fewer than its host has bytes, and wants some for all else
    if (limit_ == 0 && getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY)
      has = std::min(has, std::int64_t(addresses.rlim_cur / (2 * kAreas)));
  }
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) has = cuda::room().total_bytes, granule = cuda::granule(), largest = 64 << 20;
  const bool limited = limit_ > 0 && device_ != Device::dry;  // a dry run is to find out what is needed
  capacity_ = (limited ? std::min(limit_, has) : has) / kAlign * kAlign;
  step_ = std::clamp(capacity_ / 1024, granule, std::max(largest, granule)) / granule * granule;  // small pools grow by small ones
  if (device_ == Device::dry) return;
  span_ = rounded(std::max(capacity_, step_), step_);
  void* data = nullptr;
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) data = cuda::reserve(kAreas * span_);
  if (device_ == Device::cpu) {
    const auto map = [&] { return mmap(nullptr, std::size_t(kAreas * span_), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); };
    data = map();
    while (data == MAP_FAILED && limit_ == 0 && span_ > step_) {
      capacity_ = span_ = rounded(span_ / 2, step_);
      data = map();
    }
    if (data == MAP_FAILED) data = nullptr;
  }
  if (data == nullptr)
    throw Error("a pool of " + std::to_string(capacity_) + " bytes of " + (device_ == Device::cpu ? "host" : "GPU") + " memory needs " +
                std::to_string(kAreas) + " times as many addresses, and the system does not give them" +
                (device_ == Device::cpu ? "; ulimit -v says how many there are" : "") + ". The pool's size is memory.device_limit");
  base_ = static_cast<std::byte*>(data);
}

// Bytes that an area can still grow by. Blocks are to find as much again as they once had.
std::int64_t Pool::behind(Area area) const {
  const Places& blocks = of(Area::blocks);
  return capacity_ - stacks() - (area == Area::blocks ? blocks.reach() : blocks.most());
}

bool Pool::map(Area area, std::int64_t end) {
  std::int64_t& opened = opened_[int(area)];
  std::byte* const from = begin_of(area) + opened;
  ++system_calls_;
  bool done = false;
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) done = cuda::map(from, end - opened, step_);
  if (device_ == Device::cpu) done = mprotect(from, std::size_t(end - opened), PROT_READ | PROT_WRITE) == 0;
  if (!done) return false;
  if (device_ == Device::cpu) forbid(from, end - opened);
  opened = end;
  return true;
}

void Pool::unmap(Area area, std::int64_t end) {
  std::int64_t& opened = opened_[int(area)];
  if (end >= opened) return;
  ++system_calls_;
  std::byte* const from = begin_of(area) + end;
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) cuda::unmap(from, opened - end, step_);
  if (device_ == Device::cpu) {
    allow(from, opened - end);
    mmap(from, std::size_t(opened - end), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  }
  opened = end;
}

// Makes all that the area reaches usable. Each area's last step may be used in part, so all of them together have at most two more than
// the capacity has.
bool Pool::open(Area area) {
  const std::int64_t end = device_ == Device::dry ? 0 : rounded(of(area).reach(), step_), opened = opened_[int(area)];
  if (end <= opened) return true;
  if (Pool::opened() - opened + end <= span_ + (kAreas - 1) * step_ && map(area, end)) return true;
  for (int other = 0; other < kAreas; ++other)
    if (Area(other) != area) unmap(Area(other), rounded(areas_[other].reach(), step_));
  return map(area, end);
}

std::optional<std::int64_t> Pool::take(std::int64_t bytes, Area area) {
  if (bytes == 0) return 0;
  if (system_calls_ == 0) {
    reserve();
    system_calls_ = 1;
  }
  if (bytes > capacity_) return {};
  const std::int64_t size = rounded(bytes);
  const auto place = areas_[int(area)].take(size, behind(area));
  if (!place) return {};
  try {
    if (!open(area)) {
      areas_[int(area)].give_back(*place, size);
      return {};
    }
  } catch (...) {
    areas_[int(area)].give_back(*place, size);
    throw;
  }
  areas_[int(area)].note();
  used_ += size;
  stacks_most_ = std::max(stacks_most_, stacks());
  if (device_ == Device::cpu) allow(address(*place, area), bytes);
  return place;
}

void Pool::give_back(std::int64_t place, std::int64_t bytes, Area area) {
  if (bytes == 0) return;
  const std::int64_t size = rounded(bytes);
  if (device_ == Device::cpu) forbid(address(place, area), size);
  areas_[int(area)].give_back(place, size);
  used_ -= size;
}

void* Pool::address(std::int64_t place, Area area) const { return base_ ? begin_of(area) + place : nullptr; }

std::int64_t Pool::room(Area area) const { return std::max(behind(area), of(area).largest_hole()); }

double Pool::fragmentation() const {
  const std::int64_t free = capacity_ - used_;
  return free > 0 ? 1 - double(std::max({room(Area::blocks), room(Area::scratch), room(Area::kept)})) / double(free) : 0;
}

}  // namespace moetrain
