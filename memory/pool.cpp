// pool.cpp -- cuts and merges blocks, and asks the system for what they lie in.
#include "memory/pool.h"

#include <sys/mman.h>
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

constexpr std::int64_t kStep = 2 << 20;  // of host memory that is made usable

std::int64_t rounded(std::int64_t bytes) { return (bytes + Pool::kAlign - 1) / Pool::kAlign * Pool::kAlign; }
std::int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

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
    most_ = std::max(most_, reach_);
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
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) cuda::release(base_);
  if (device_ != Device::cpu) return;
  allow(base_, opened_[0]);
  allow(base_ + capacity_, opened_[1]);
  allow(base_ + addresses_ - opened_[2], opened_[2]);
  munmap(base_, std::size_t(addresses_));
}

void Pool::reserve() {
  std::int64_t bytes = limit_ / kAlign * kAlign;
  if (device_ == Device::dry) bytes = std::numeric_limits<std::int64_t>::max();
  if (device_ == Device::cpu) {
    if (bytes == 0) bytes = sysconf(_SC_PHYS_PAGES) * page_bytes();
    const auto map = [&] { return mmap(nullptr, 2 * std::size_t(bytes), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0); };
    void* data = map();
    // A process may be allowed fewer addresses than its host has bytes.
    while (data == MAP_FAILED && limit_ == 0 && bytes > kStep) bytes /= 2, data = map();
    if (data == MAP_FAILED)
      throw Error("a pool of " + std::to_string(bytes) + " bytes of host memory needs twice as many addresses; ulimit -v says how many there are");
    base_ = static_cast<std::byte*>(data);
  }
  if constexpr (kHasCuda)
    if (device_ == Device::cuda) {
      const cuda::Room room = cuda::room();
      if (bytes == 0) bytes = std::max<std::int64_t>(0, room.free_bytes - room.total_bytes / 32);
      base_ = static_cast<std::byte*>(cuda::allocate(bytes));
      if (base_ == nullptr)
        throw Error("the GPU does not give a pool of " + std::to_string(bytes) + " bytes: " + std::to_string(room.free_bytes) + " of its " +
                    std::to_string(room.total_bytes) + " are free; memory.device_limit is the pool's size");
    }
  capacity_ = bytes / kAlign * kAlign;
  addresses_ = device_ == Device::cpu ? 2 * capacity_ : capacity_;
  ++system_allocations_;
}

// Bytes that an area can still grow by.
std::int64_t Pool::behind(Area area) const {
  const Places& blocks = of(Area::blocks);
  const bool fixed = device_ == Device::cuda && of(Area::low).reach() > 0;
  if (area == Area::blocks) return (fixed ? floor_ : capacity_ - stacks()) - blocks.reach();
  return capacity_ - std::max(floor_, blocks.most()) - stacks();
}

// Host memory: makes all that the area reaches usable, in steps.
bool Pool::open(Area area) {
  std::int64_t& opened = opened_[int(area)];
  const std::int64_t reach = of(area).reach();
  if (device_ != Device::cpu || reach <= opened) return true;
  // The two stacks may meet in what the other has opened.
  const std::int64_t others = area == Area::blocks ? 0 : opened_[area == Area::low ? 2 : 1];
  const std::int64_t all = std::max(reach, std::min((reach + kStep - 1) / kStep * kStep, capacity_ - others));
  const std::int64_t from = area == Area::high ? addresses_ - all : (area == Area::low ? capacity_ : 0) + opened;
  const std::int64_t page = from / page_bytes() * page_bytes();
  if (mprotect(base_ + page, std::size_t(from - page + all - opened), PROT_READ | PROT_WRITE) != 0) return false;
  forbid(base_ + from, all - opened);
  opened = all;
  ++system_allocations_;
  return true;
}

std::optional<std::int64_t> Pool::take(std::int64_t bytes, Area area) {
  if (bytes == 0) return 0;
  if (capacity_ == 0) reserve();
  if (area == Area::low && of(area).reach() == 0) floor_ = std::max(floor_, blocks_most());
  const std::int64_t size = rounded(bytes);
  const auto place = areas_[int(area)].take(size, behind(area));
  if (!place) return {};
  if (!open(area)) {
    areas_[int(area)].give_back(*place, size);
    return {};
  }
  used_ += size;
  stacks_most_ = std::max(stacks_most_, stacks());
  if (device_ == Device::cpu) allow(address(*place, bytes, area), bytes);
  return place;
}

void Pool::give_back(std::int64_t place, std::int64_t bytes, Area area) {
  if (bytes == 0) return;
  const std::int64_t size = rounded(bytes);
  if (device_ == Device::cpu) forbid(address(place, bytes, area), size);
  areas_[int(area)].give_back(place, size);
  used_ -= size;
}

void* Pool::address(std::int64_t place, std::int64_t bytes, Area area) const {
  if (base_ == nullptr) return nullptr;
  if (area == Area::high) return base_ + addresses_ - place - rounded(bytes);
  return base_ + place + (area == Area::blocks ? 0 : device_ == Device::cpu ? capacity_ : floor_);
}

std::int64_t Pool::room(Area area) const { return std::max(behind(area), of(area).largest_hole()); }

double Pool::fragmentation() const {
  const std::int64_t free = capacity_ - used_;
  return free > 0 ? 1 - double(std::max({room(Area::blocks), room(Area::low), room(Area::high)})) / double(free) : 0;
}

}  // namespace moetrain
