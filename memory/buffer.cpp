// buffer.cpp -- takes and gives back the bytes of host and device, and keeps the account.
#include "memory/buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "memory/cuda_memory.h"

namespace moetrain {

const char* name_of(Category c) {
  constexpr const char* kNames[kCategories] = {"weights", "gradients", "optimizer", "activations", "cache", "loss", "communication", "workspace"};
  return kNames[std::size_t(c)];
}

const char* name_of(MemoryPhase p) {
  constexpr const char* kNames[kMemoryPhases] = {"load", "forward", "backward", "step", "save"};
  return kNames[std::size_t(p)];
}

void Memory::add(Category c, std::int64_t bytes) {
  total_ += bytes;  // no more than a pool can place or a host has
  auto& now = now_[std::size_t(c)];
  now += bytes;
  peaks_[std::size_t(c)] = std::max(peaks_[std::size_t(c)], now);
  if (total_ > peak_) {
    peak_ = total_;
    at_peak_ = now_;
  }
  phases_.note(c, now, total_);
}

namespace {

std::string in_units(std::int64_t bytes) {
  char text[32];
  int unit = 0;
  auto value = double(bytes);
  for (; value >= 1000 && unit < 3; ++unit) value /= 1024;
  constexpr const char* kUnits[] = {"bytes", "KiB", "MiB", "GiB"};
  std::snprintf(text, sizeof text, "%.*f %s", unit == 0 ? 0 : 2, value, kUnits[unit]);
  return text;
}

// What was asked, who holds what, what to change.
[[noreturn]] void out_of_memory(const Memory& memory, Category category, std::int64_t bytes, Area area) {
  const Pool& pool = memory.pool();
  if (memory.device() == Device::dry)
    throw Error("more memory than can be counted: " + std::to_string(bytes) + " bytes asked for " + name_of(category) + ", " +
                std::to_string(memory.total()) + " bytes held");
  std::string what = std::string("out of ") + (memory.device() == Device::cpu ? "host" : "GPU") + " memory: " + in_units(bytes) +
                     " asked for " + name_of(category) + " of a pool of " + in_units(pool.capacity()) + "; held:";
  for (int c = 0; c < kCategories; ++c)
    if (memory.now(Category(c)) > 0) what += std::string(" ") + name_of(Category(c)) + " " + in_units(memory.now(Category(c))) + ",";
  what += " " + in_units(memory.total()) + " in all, and " + in_units(pool.used() - memory.total()) + " by rounding; free: " +
          in_units(pool.capacity() - pool.used()) + ", at most " + in_units(pool.room(area)) + " in one piece";
  if (pool.room(area) >= bytes) {  // within the limit
    what += ", but the system gives no more";
    if constexpr (kHasCuda)
      if (memory.device() == Device::cuda) {
        const cuda::Room room = cuda::room();
        what += ": the device has " + in_units(room.free_bytes) + " of " + in_units(room.total_bytes) + " free, this pool holds " +
                in_units(pool.opened()) + ", and other processes, NCCL and kernels the rest";
      }
  }
  throw Error(what + ". Less is held with memory.activation_checkpointing: full, a smaller training.micro_batch_size or "
                     "data.sequence_length, parallel.sharding: full, or more ranks; moetrain plan shows each. The pool's size is "
                     "memory.device_limit");
}

}  // namespace

Memory::Block Memory::take(Category c, std::int64_t bytes, Area area) {
  const auto place = pool_.take(bytes, area);
  if (!place) [[unlikely]]
    out_of_memory(*this, c, bytes, area);
  add(c, bytes);
  return {pool_.address(*place, area), *place};
}

void Memory::give_back(Category c, std::int64_t bytes, std::int64_t place, Area area) {
  pool_.give_back(place, bytes, area);
  add(c, -bytes);
}

std::vector<std::string> Memory::table() const {
  std::vector<std::string> lines;
  const auto line = [&](const char* what, std::int64_t now, std::int64_t most) {
    char text[96];
    std::snprintf(text, sizeof text, "%-13s %12s   at most %12s", what, in_units(now).c_str(), in_units(most).c_str());
    lines.emplace_back(text);
  };
  for (int c = 0; c < kCategories; ++c)
    if (peaks_[std::size_t(c)] > 0) line(name_of(Category(c)), now_[std::size_t(c)], peaks_[std::size_t(c)]);
  line("in all", total_, peak_);
  if (pool_.capacity() == 0) return lines;  // pinned memory is not of a pool
  line("of the pool", pool_.reach(), pool_.high_water());
  if (device_ != Device::dry) lines.back() += "   of " + in_units(pool_.capacity());
  return lines;
}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  Buffer dying(std::move(*this));
  memory_ = std::exchange(o.memory_, nullptr);
  block_ = o.block_;
  bytes_ = o.bytes_;
  category_ = o.category_;
  return *this;
}

Buffer::~Buffer() {
  if (memory_ != nullptr) memory_->give_back(category_, bytes_, block_.place);
}

void copy_to_device(Device device, void* to, const void* from_host, std::int64_t bytes) {
  if (bytes == 0) return;
  if (device == Device::cpu) std::memcpy(to, from_host, std::size_t(bytes));
  if constexpr (kHasCuda)
    if (device == Device::cuda) cuda::copy_in(to, from_host, bytes);
}

void copy_to_host(Device device, void* to_host, const void* from, std::int64_t bytes) {
  if (bytes == 0) return;
  if (device == Device::cpu) std::memcpy(to_host, from, std::size_t(bytes));
  if constexpr (kHasCuda)
    if (device == Device::cuda) cuda::copy_out(to_host, from, bytes);
}

void fill(Device device, void* data, int byte, std::int64_t bytes) {
  if (bytes == 0) return;
  if (device == Device::cpu) std::memset(data, byte, std::size_t(bytes));
  if constexpr (kHasCuda)
    if (device == Device::cuda) cuda::fill(data, byte, bytes);
}

}  // namespace moetrain
