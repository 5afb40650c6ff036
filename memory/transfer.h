// transfer.h -- large blocks between a device and host memory that it reaches by itself, beside other work.
#pragma once
#include <memory>

#include "memory/buffer.h"
#include "memory/stream.h"
#include "memory/timeline.h"

namespace moetrain {

// Host memory, pinned where a CUDA device copies from and to it; counted with the host's Memory.
class HostBuffer {
 public:
  HostBuffer() = default;
  HostBuffer(Memory& host, Device device, Category category, std::int64_t bytes);
  HostBuffer(HostBuffer&& o) noexcept;
  HostBuffer& operator=(HostBuffer&& o) noexcept;
  ~HostBuffer();
  void* data() const { return pinned_.get() ? pinned_.get() : plain_.data(); }
  std::int64_t bytes() const { return bytes_; }

 private:
  Memory* host_ = nullptr;  // of pinned memory
  Category category_{};
  Buffer plain_;
  cuda::Pinned pinned_;
  std::int64_t bytes_ = 0;
};

// A tensor of its own on a device, or in host memory that the device reaches: its operators may work on it there, at the speed of
// the link.
class PlacedTensor {
 public:
  PlacedTensor() = default;
  // host: where it lies; null: on the device.
  PlacedTensor(Memory& device, Memory* host, Category category, DType dtype, Shape shape);
  Tensor view() const { return view_; }
  bool present() const { return view_.present(); }

 private:
  OwnedTensor device_;
  HostBuffer host_;
  Tensor view_;
};

// Copies one after another on a stream of their own; on the CPU at once. A copy begins when the default stream has done what was
// queued before it. In a dry run they take time on the clock that the device's Memory has.
class Transfer {
 public:
  enum class Way : std::uint8_t { to_host, to_device };
  class Mark {  // the end of a copy
   private:
    friend class Transfer;
    std::unique_ptr<cuda::Event> reached_;  // null: it is over
    Timeline::Message message_{};           // of a dry run
  };
  explicit Transfer(Memory& device) : memory_(device) {}
  void copy(Way way, void* to, const void* from, std::int64_t bytes, Mark& done);
  void wait(const Mark& mark) const;  // work of the default stream from now on comes after it; the host does not wait
  void follow(const Mark& mark);      // so do copies from here from now on

 private:
  Memory& memory_;
  std::unique_ptr<cuda::Ferry> ferry_;  // of CUDA, with its first copy
  double free_at_ = 0;                  // on the clock: the last copy has arrived
};

}  // namespace moetrain
