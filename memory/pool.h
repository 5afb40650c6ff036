// pool.h -- one reservation of addresses on a device, made once, and all that is cut from it; on Device::dry the places alone.
//
//   | blocks, holes >          | scratch >                | kept >                   |    each area has addresses for all of the capacity
//
// Bytes lie behind an area's first addresses only: as the area grows, in steps, the system is asked for them, and they stay. So a pool
// takes no more than is needed, several pools and processes share a device, and after the first steps of a run nothing is asked for.
//
// Blocks live as long as they like: what lasts over steps, and what comes and goes with a step's weights and gradients. A block is as
// many times 512 bytes as it needs, cut from the first hole that has room, else from what is free behind the last; given back it
// merges with the holes beside it. These are a buddy allocator's cuts and merges without its powers of two, which waste far more at the
// sizes of weights than holes do. The first hole and not the smallest: that leaves fewer that are of no use.
// What a step's data decides the size of, rows of experts above all, lies on two stacks, of temporaries and of what backward needs:
// whatever the sizes, in a stack is no hole. A step that gives back all it took leaves the pool as it was; so nothing wears out.
// Places follow from what was taken and given back, never from the capacity. So the mark of a dry run, the most of the blocks and the
// most of both stacks, rounding and holes among them, is the least capacity that the run needs. Where the bytes of all areas would be
// more than the capacity, or more than the system has, an area gives up those it does not reach now: the one case in which they move.
#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "memory/device.h"

namespace moetrain {

enum class Area : std::uint8_t { blocks, scratch, kept };
inline constexpr int kAreas = 3;

class Pool {
 public:
  static constexpr std::int64_t kAlign = 512;  // of a block's address and size
  // limit: bytes, of which there are no more than the device or the host has. 0: all of those; on Device::dry without end. The
  // reservation is made by the first take.
  Pool(Device device, std::int64_t limit) : device_(device), limit_(limit) {}
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // The place of a block, uninitialised; nothing where it does not fit. An Error where the reservation cannot be made.
  // On CUDA it may be cut from what queued work still uses: the default stream's order holds, other streams wait for it.
  std::optional<std::int64_t> take(std::int64_t bytes, Area area);
  void give_back(std::int64_t place, std::int64_t bytes, Area area);
  void* address(std::int64_t place, Area area) const;  // null on Device::dry

  std::int64_t capacity() const { return capacity_; }  // 0 before the first take
  std::int64_t used() const { return used_; }          // by blocks and stacks, as they are rounded
  std::int64_t reach() const { return of(Area::blocks).reach() + stacks(); }  // with holes
  std::int64_t blocks_most() const { return of(Area::blocks).most(); }
  std::int64_t high_water() const { return blocks_most() + stacks_most_; }
  std::int64_t room(Area area) const;                  // the largest block that fits
  double fragmentation() const;                        // 1 - largest free block / free bytes
  std::int64_t opened() const { return opened_[0] + opened_[1] + opened_[2]; }  // bytes that the system has given
  std::int64_t step() const { return step_; }                                   // that it is asked for at once, at the least
  // How often the system was asked: for the addresses, and whenever an area grew.
  std::int64_t system_calls() const { return system_calls_; }

 private:
  // The places of one area: bytes from its beginning.
  class Places {
   public:
    std::optional<std::int64_t> take(std::int64_t bytes, std::int64_t behind);  // behind: free after the last; nothing where no room is
    void give_back(std::int64_t begin, std::int64_t bytes);
    std::int64_t reach() const { return reach_; }  // behind the last
    void note() { most_ = reach_ > most_ ? reach_ : most_; }
    std::int64_t most() const { return most_; }  // that reach() was when it was noted
    std::int64_t largest_hole() const;

   private:
    struct Hole {
      std::int64_t begin, bytes;
    };
    std::vector<Hole> holes_;  // by place, none beside another or at reach_
    std::int64_t reach_ = 0, most_ = 0;
  };

  const Places& of(Area area) const { return areas_[int(area)]; }
  std::int64_t stacks() const { return of(Area::scratch).reach() + of(Area::kept).reach(); }
  std::int64_t behind(Area area) const;
  void reserve();
  bool open(Area area);
  bool map(Area area, std::int64_t end);    // the area's bytes up to there
  void unmap(Area area, std::int64_t end);  // those from there on
  std::byte* begin_of(Area area) const { return base_ + int(area) * span_; }
  Device device_;
  std::int64_t limit_, capacity_ = 0, used_ = 0, stacks_most_ = 0, system_calls_ = 0;
  Places areas_[kAreas];
  std::byte* base_ = nullptr;
  std::int64_t step_ = 0, span_ = 0;  // addresses of an area: the capacity, rounded up to whole steps
  std::int64_t opened_[kAreas] = {};  // bytes of each area that may be touched, whole steps
};

}  // namespace moetrain
