// buffer.cpp -- takes and gives back the bytes of host and device, and keeps the account.
#include "memory/buffer.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  std::int64_t sum = 0;
  if (__builtin_add_overflow(total_, bytes, &sum)) [[unlikely]]
    throw Error("more memory than can be counted: " + std::to_string(bytes) + " bytes asked for " + name_of(c) + ", " +
                std::to_string(total_) + " bytes held");
  total_ = sum;
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

std::string gib(std::int64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(std::int64_t(1) << 30));
  return text;
}

// What was asked, who holds what, what to change.
[[noreturn]] void out_of_memory(const Memory& memory, Category category, std::int64_t bytes) {
  const bool host = memory.device() == Device::cpu;
  std::string what = std::string("out of ") + (host ? "host" : "GPU") + " memory: " + gib(bytes) + " asked for " + name_of(category) +
                     "; held:";
  for (int c = 0; c < kCategories; ++c)
    if (memory.now(Category(c)) > 0) what += std::string(" ") + name_of(Category(c)) + " " + gib(memory.now(Category(c))) + ",";
  what += " " + gib(memory.total()) + " in all";
  if constexpr (kHasCuda)
    if (!host) {
      const cuda::Room room = cuda::room();
      what += "; the device has " + gib(room.free_bytes) + " of " + gib(room.total_bytes) + " free";
    }
  throw Error(what + ". Less is held with memory.activation_checkpointing: full, a smaller training.micro_batch_size or "
                     "data.sequence_length, parallel.sharding: full, or more ranks; moetrain plan shows each");
}

}  // namespace

Buffer::Buffer(Memory& memory, Category category, std::int64_t bytes) : memory_(&memory), bytes_(bytes), category_(category) {
  constexpr std::size_t kAlign = 256;
  if (bytes > 0 && memory.device() == Device::cpu) {
    data_ = std::aligned_alloc(kAlign, (std::size_t(bytes) + kAlign - 1) / kAlign * kAlign);
    if (data_ == nullptr) out_of_memory(memory, category, bytes);
  } else if (bytes > 0 && memory.device() == Device::cuda) {
    if constexpr (kHasCuda) data_ = cuda::allocate(bytes);
    if (data_ == nullptr) out_of_memory(memory, category, bytes);
  }
  memory.add(category, bytes);
}

Buffer& Buffer::operator=(Buffer&& o) noexcept {
  Buffer dying(std::move(*this));
  memory_ = std::exchange(o.memory_, nullptr);
  data_ = std::exchange(o.data_, nullptr);
  bytes_ = o.bytes_;
  category_ = o.category_;
  return *this;
}

Buffer::~Buffer() {
  if (memory_ == nullptr) return;
  if (memory_->device() == Device::cpu) std::free(data_);
  if constexpr (kHasCuda)
    if (memory_->device() == Device::cuda) cuda::release(data_);
  memory_->add(category_, -bytes_);
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
