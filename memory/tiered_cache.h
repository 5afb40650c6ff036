// tiered_cache.h -- tensors set aside between their making and a later use: on the device, or in host memory with the way there and back
// travelling beside other work.
//
//   tier     put()               demoted                                prefetch()                 recall()      drop()
//   device   room on the device  -                                      -                          the same      room given back
//   host     room on the device  leaves once written; the room goes     room on the device, and    waits for it  room given back
//                                at the second step() after             the way back begins
//
// What put() gives is written by work that is queued before the next step(). A tensor that is not prefetched is when it is recalled, and
// counts as late, as does one that has not arrived by then where that can be seen. Host rooms are pinned on CUDA and kept for the next
// tensor of their key. On Device::dry everything is counted and nothing moves.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/buffer.h"
#include "memory/stream.h"
#include "memory/timeline.h"

namespace moetrain {

enum class Tier : std::uint8_t { none, device, host };
inline constexpr int kTiers = 3;
const char* name_of(Tier tier);

// One way, of a block of 64 MiB between the device and the host memory that a cache takes.
double link_bytes_per_second(Device device);

class TieredCache {
 public:
  TieredCache(Memory& device, Memory& host);
  ~TieredCache();
  TieredCache(const TieredCache&) = delete;
  TieredCache& operator=(const TieredCache&) = delete;

  Tensor put(int key, Tier tier, DType dtype, Shape shape);  // keys from 0 on; one that is dropped may be put again
  void step();                                               // what was put is written: its way to the host begins
  void prefetch(int key);
  Tensor recall(int key);
  void drop(int key);
  bool holds(int key) const { return key >= 0 && std::size_t(key) < entries_.size() && entries_[std::size_t(key)].stage != Stage::empty; }

  struct Counts {
    std::int64_t recalled = 0, late = 0;
    std::int64_t bytes_down = 0, bytes_up = 0;  // to the host and back
  };
  Counts take_counts();  // since it was last asked
  std::int64_t host_bytes() const { return host_.now(Category::cache); }
  void take_time(Timeline& clock, double bytes_per_s) { clock_ = &clock, bytes_per_s_ = bytes_per_s; }  // of a dry run; of the link, one way

 private:
  enum class Stage : std::uint8_t { empty, written, leaving, away, coming, back };
  struct Entry {
    Stage stage = Stage::empty;
    Tier tier = Tier::none;
    OwnedTensor device;
    DType dtype = DType::none;
    Shape shape;
    int age = 0;  // step()s since it began to leave
    Timeline::Message message{};  // on the clock of a dry run
  };
  struct HostRoom;
  bool on_cuda() const { return device_.device() == Device::cuda; }
  void leave(int key);
  void copy(int key, void* to, const void* from, std::int64_t bytes);
  void wait_for(int key);
  Entry& entry(int key);

  Memory &device_, &host_;
  std::vector<Entry> entries_;
  std::vector<std::unique_ptr<HostRoom>> rooms_;  // by key
  std::vector<int> leaving_;
  std::unique_ptr<cuda::Ferry> ferry_;
  Counts counts_;
  Timeline* clock_ = nullptr;
  double bytes_per_s_ = 0;
};

}  // namespace moetrain
