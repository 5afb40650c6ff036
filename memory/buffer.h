// buffer.h -- bytes of one device: an account of who holds how many, and buffers that give theirs back when they die.
#pragma once
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "memory/phase_peaks.h"
#include "memory/pool.h"
#include "memory/tensor.h"

namespace moetrain {

class Timeline;
struct LinkClock {  // of a dry run: what copies between a device and the host go by; without one they take no time
  Timeline* timeline = nullptr;
  double bytes_per_s = 0;  // one way
};

// The bytes of one device: a pool that gives them out, and an account of what for, now and at the most. One per rank; outlives what
// holds them. The account knows what was asked for, the pool what that takes with rounding and holes.
class Memory {
 public:
  explicit Memory(Device device, std::int64_t limit = 0) : pool_(device, limit), device_(device) {}  // limit: memory/pool.h
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Device device() const { return device_; }
  const Pool& pool() const { return pool_; }

  struct Block {
    void* data;          // uninitialised, aligned to Pool::kAlign; null on Device::dry
    std::int64_t place;  // which give_back wants again
  };
  Block take(Category c, std::int64_t bytes, Area area = Area::blocks);  // an Error that says who holds what where there is no room
  void give_back(Category c, std::int64_t bytes, std::int64_t place, Area area = Area::blocks);
  void add(Category c, std::int64_t bytes);  // that lie elsewhere and count here; negative: given back

  std::int64_t now(Category c) const { return now_[std::size_t(c)]; }
  std::int64_t total() const { return total_; }
  std::int64_t peak() const { return peak_; }
  std::array<std::int64_t, kCategories> at_peak() const { return at_peak_; }          // the split at the peak of the sum
  std::array<std::int64_t, kCategories> peaks() const { return peaks_; }              // each category's own peak
  void enter(MemoryPhase phase) { phases_.enter(phase, now_, total_); }
  const std::array<PhaseBytes, kMemoryPhases>& phases() const { return phases_.all(); }
  void take_time(const LinkClock& link) { link_clock_ = link; }
  const LinkClock& link_clock() const { return link_clock_; }
  // Who holds what, now and at the most: a line for each category that holds or held something, for their sum, and for the pool.
  std::vector<std::string> table() const;

 private:
  Pool pool_;
  Device device_;
  std::array<std::int64_t, kCategories> now_{}, at_peak_{}, peaks_{};
  std::int64_t total_ = 0, peak_ = 0;
  PhasePeaks phases_;
  LinkClock link_clock_;
};

// Sole owner of bytes on a Memory's device. Uninitialised; on Device::dry only counted.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Memory& memory, Category category, std::int64_t bytes)
      : memory_(&memory), block_(memory.take(category, bytes)), bytes_(bytes), category_(category) {}
  Buffer(Buffer&& o) noexcept : memory_(std::exchange(o.memory_, nullptr)), block_(o.block_), bytes_(o.bytes_), category_(o.category_) {}
  Buffer& operator=(Buffer&& o) noexcept;
  ~Buffer();
  void* data() const { return memory_ ? block_.data : nullptr; }
  std::int64_t bytes() const { return memory_ ? bytes_ : 0; }

 private:
  Memory* memory_ = nullptr;
  Memory::Block block_{};
  std::int64_t bytes_ = 0;
  Category category_ = Category::workspace;
};

// A buffer that holds one tensor.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(Memory& memory, Category category, DType dtype, Shape shape)
      : buffer_(memory, category, shape.count() * size_of(dtype)), view_(buffer_.data(), dtype, shape) {}
  OwnedTensor(OwnedTensor&& o) noexcept : buffer_(std::move(o.buffer_)), view_(std::exchange(o.view_, {})) {}
  OwnedTensor& operator=(OwnedTensor&& o) noexcept {
    buffer_ = std::move(o.buffer_);
    view_ = std::exchange(o.view_, {});
    return *this;
  }
  Tensor view() const { return view_; }
  bool present() const { return view_.present(); }

 private:
  Buffer buffer_;
  Tensor view_;
};

// Between host and a device, or within one; finished when they return. Nothing happens on Device::dry.
void copy_to_device(Device device, void* to, const void* from_host, std::int64_t bytes);
void copy_to_host(Device device, void* to_host, const void* from, std::int64_t bytes);
void fill(Device device, void* data, int byte, std::int64_t bytes);  // every byte the same

}  // namespace moetrain
