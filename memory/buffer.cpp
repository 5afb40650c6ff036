// buffer.cpp -- takes and gives back the bytes of host and device, and keeps the account.
#include "memory/buffer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "memory/cuda_memory.h"

namespace moetrain {

const char* name_of(Category c) {
  constexpr const char* kNames[kCategories] = {"weights", "gradients", "optimizer", "activations", "cache", "loss", "communication", "workspace"};
  return kNames[std::size_t(c)];
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
}

Buffer::Buffer(Memory& memory, Category category, std::int64_t bytes) : memory_(&memory), bytes_(bytes), category_(category) {
  constexpr std::size_t kAlign = 256;
  if (bytes > 0 && memory.device() == Device::cpu) {
    data_ = std::aligned_alloc(kAlign, (std::size_t(bytes) + kAlign - 1) / kAlign * kAlign);
    if (data_ == nullptr)
      throw Error("out of host memory: " + std::to_string(bytes) + " bytes asked for " + name_of(category) + ", " +
                  std::to_string(memory.total()) + " bytes held");
  } else if (bytes > 0 && memory.device() == Device::cuda) {
    if constexpr (kHasCuda) data_ = cuda::allocate(bytes);
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
