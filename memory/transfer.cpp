// transfer.cpp -- memcpy, or a stream beside the default one.
#include "memory/transfer.h"

#include <algorithm>

namespace moetrain {

HostBuffer::HostBuffer(Memory& host, Device device, Category category, std::int64_t bytes) : category_(category), bytes_(bytes) {
  if (device != Device::cuda || bytes == 0) {
    plain_ = Buffer(host, category, bytes);
    return;
  }
  if constexpr (kHasCuda) pinned_ = cuda::pinned(bytes);
  host_ = &host;
  host.add(category, bytes);
}
HostBuffer::HostBuffer(HostBuffer&& o) noexcept
    : host_(std::exchange(o.host_, nullptr)),
      category_(o.category_),
      plain_(std::move(o.plain_)),
      pinned_(std::move(o.pinned_)),
      bytes_(std::exchange(o.bytes_, 0)) {}
HostBuffer& HostBuffer::operator=(HostBuffer&& o) noexcept {
  HostBuffer dying(std::move(o));
  std::swap(host_, dying.host_);
  std::swap(category_, dying.category_);
  std::swap(plain_, dying.plain_);
  std::swap(pinned_, dying.pinned_);
  std::swap(bytes_, dying.bytes_);
  return *this;
}
HostBuffer::~HostBuffer() {
  if (host_) host_->add(category_, -bytes_);
}

PlacedTensor::PlacedTensor(Memory& device, Memory* host, Category category, DType dtype, Shape shape) {
  if (!host) {
    device_ = OwnedTensor(device, category, dtype, shape);
    view_ = device_.view();
  } else {
    host_ = HostBuffer(*host, device.device(), category, shape.count() * size_of(dtype));
    view_ = Tensor(host_.data(), dtype, shape);
  }
}

void Transfer::copy(Way way, void* to, const void* from, std::int64_t bytes, Mark& done) {
  if (const LinkClock& link = memory_.link_clock(); link.timeline) {
    const auto lane = way == Way::to_host ? Timeline::Lane::to_host : Timeline::Lane::to_device;
    done.message_ = link.timeline->send(lane, double(bytes) / link.bytes_per_s, free_at_);
    free_at_ = done.message_.arrives;
    if (!link.timeline->beside()) link.timeline->wait(std::exchange(done.message_, {}));  // at once
  }
  if (memory_.device() != Device::cuda) return copy_to_device(memory_.device(), to, from, bytes);
  if (!ferry_) ferry_ = std::make_unique<cuda::Ferry>();
  if (!done.reached_) done.reached_ = std::make_unique<cuda::Event>();
  if constexpr (kHasCuda) ferry_->copy(to, from, bytes, *done.reached_);
}

void Transfer::wait(const Mark& mark) const {
  if (Timeline* clock = memory_.link_clock().timeline) clock->wait(mark.message_);
  if constexpr (kHasCuda)
    if (mark.reached_) cuda::wait(nullptr, *mark.reached_);
}

void Transfer::follow(const Mark& mark) {
  free_at_ = std::max(free_at_, mark.message_.arrives);
  if (!mark.reached_) return;
  if (!ferry_) ferry_ = std::make_unique<cuda::Ferry>();
  if constexpr (kHasCuda) ferry_->follow(*mark.reached_);
}

}  // namespace moetrain
