// pool.h -- one reservation of a device's memory, made once, and all that is cut from it; on Device::dry the places alone.
//
//   | blocks, holes     | low stack >    free    < high stack |
//                       floor
//
// Blocks live as long as they like: what lasts over steps, and what comes and goes with a step's weights and gradients. A block is as
// many times 512 bytes as it needs, cut from the first hole that has room, else from what is free behind the last; given back it
// merges with the holes beside it. These are a buddy allocator's cuts and merges without its powers of two, which waste far more at the
// sizes of weights than holes do. The first hole and not the smallest: that leaves fewer that are of no use.
// What a step's data decides the size of, rows of experts above all, lies on two stacks that grow towards each other: whatever the
// sizes, between them is no hole. A step that gives back all it took leaves the pool as it was; so nothing wears out over steps.
// Places follow from what was taken and given back, never from the capacity. So the mark of a dry run, the most of the blocks and the
// most of both stacks, rounding and holes among them, is the least capacity that the run needs.
// In host memory both parts have addresses enough, and the floor is a sum. On CUDA the floor rises to the most that blocks took, but
// not while the low stack is in use: blocks that grow meanwhile have to be known before (set_floor).
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/device.h"

namespace moetrain {

enum class Area : std::uint8_t { blocks, low, high };

class Pool {
 public:
  static constexpr std::int64_t kAlign = 512;  // of a block's address and size
  // limit: bytes. 0: on CUDA what is free, but for a 32nd of the device, which NCCL, kernels and libraries come to want; in host
  // memory as many as the host has. The reservation is made by the first take.
  Pool(Device device, std::int64_t limit) : device_(device), limit_(limit) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  void set_floor(std::int64_t bytes) { floor_ = bytes; }  // on CUDA, where the low stack holds nothing

  // The place of a block, uninitialised; nothing where it does not fit. An Error where the reservation cannot be made.
  // On CUDA it may be cut from what queued work still uses: the default stream's order holds, other streams wait for it.
  std::optional<std::int64_t> take(std::int64_t bytes, Area area);
  void give_back(std::int64_t place, std::int64_t bytes, Area area);
  void* address(std::int64_t place, std::int64_t bytes, Area area) const;  // null on Device::dry

  std::int64_t capacity() const { return capacity_; }  // 0 before the first take
  std::int64_t used() const { return used_; }          // by blocks and stacks, as they are rounded
  std::int64_t reach() const { return of(Area::blocks).reach() + stacks(); }  // with holes
  std::int64_t blocks_most() const { return of(Area::blocks).most(); }
  std::int64_t high_water() const { return blocks_most() + stacks_most_; }
  std::int64_t room(Area area) const;                  // the largest block that fits
  double fragmentation() const;                        // 1 - largest free block / free bytes
  // How often the system was asked for memory: once on CUDA; in host memory once for the addresses, and whenever more of them are used.
  std::int64_t system_allocations() const { return system_allocations_; }

 private:
  // The places of one area: bytes from its beginning.
  class Places {
   public:
    std::optional<std::int64_t> take(std::int64_t bytes, std::int64_t behind);  // behind: free after the last; nothing where no room is
    void give_back(std::int64_t begin, std::int64_t bytes);
    std::int64_t reach() const { return reach_; }  // behind the last
    std::int64_t most() const { return most_; }    // that reach() was
    std::int64_t largest_hole() const;

   private:
    struct Hole {
      std::int64_t begin, bytes;
    };
    std::vector<Hole> holes_;  // by place, none beside another or at reach_
    std::int64_t reach_ = 0, most_ = 0;
  };

  const Places& of(Area area) const { return areas_[int(area)]; }
  std::int64_t stacks() const { return of(Area::low).reach() + of(Area::high).reach(); }
  std::int64_t behind(Area area) const;
  void reserve();
  bool open(Area area);
  Device device_;
  std::int64_t limit_, capacity_ = 0, floor_ = 0, used_ = 0, stacks_most_ = 0, system_allocations_ = 0;
  Places areas_[3];
  std::byte* base_ = nullptr;
  std::int64_t addresses_ = 0;   // bytes of them at base_
  std::int64_t opened_[3] = {};  // host memory: bytes of each area that may be touched
};

}  // namespace moetrain
