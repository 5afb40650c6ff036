// journal.h -- what this rank asks of the others: its collectives in order, hashed, and the place of the run that it stands at.
#pragma once
#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "memory/dtype.h"

namespace moetrain::parallel {

class Communicator;

enum class Phase : std::uint8_t { start, load, forward, backward, step, evaluate, save, exit };
struct Place {
  Phase phase = Phase::start;
  std::int32_t layer = -1;  // -1: in none
};
std::string text_of(Place place);  // "forward, layer 3"

// `start` and `end` are MPI's own.
enum class Op : std::uint8_t { all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, barrier, split, start, end };

// The ranks of one communicator, and how many collectives and groups of some of them it has made.
struct Group {
  std::array<char, 20> name{};
  std::int32_t rank = 0, ranks = 1;
  std::uint64_t id = 0;  // the same on its ranks, another for every other group
  std::uint64_t calls = 0, parts = 0;
};
Group group_of(const char* name, std::uint64_t id, int rank, int ranks);
std::uint64_t mixed(std::uint64_t hash, std::uint64_t value);  // a hash that goes on with a value

// One collective of this rank; plain bytes, since ranks read each other's.
struct Call {
  std::uint64_t seq = 0;             // of all collectives of the rank, from 1; 0: none yet
  std::uint64_t group = 0, nth = 0;  // the nth of its group, from 1
  std::int64_t count = 0;            // elements, or bytes where dtype is none; 0: each rank has its own
  std::uint64_t pieces = 0;          // hash of the tensors it is made of
  std::array<char, 20> name{};       // of the group
  std::int32_t ranks = 0;
  Place place;
  Op op = Op::start;
  DType dtype = DType::none;
};
std::string text_of(const Call& call);  // "collective 104, all-reduce of 3 fp64 over world (4 ranks) in step"

// Who made another collective than the others, and what it was.
struct Difference {
  int rank = 0;
  std::string text;
};

// The communicators of a rank share one; a watchdog reads it from its own thread.
class Journal {
 public:
  static constexpr std::size_t kRecent = 128;  // calls that are remembered
  struct State {
    Place place;
    Call last;                // that was made; while it waits, that it waits for
    bool waiting = false;
    std::uint64_t waits = 0, calls = 0;  // so far
    std::array<Call, kRecent> recent;  // call n at n % kRecent
  };

  void at(Place place);
  Call note(Group& group, Op op, std::int64_t count = 0, DType dtype = DType::none, std::uint64_t pieces = 0);
  State state() const;
  // Of this rank's collectives so far. The sum over all ranks is 0 when those of each group agree.
  std::uint64_t balance() const;

  // In its life this rank stands still for others.
  class Wait {
   public:
    Wait(Journal* journal, const Call& what);  // without a journal it is nothing
    ~Wait();
    Wait(const Wait&) = delete;
    Wait& operator=(const Wait&) = delete;

   private:
    Journal* journal_;
  };

 private:
  mutable std::mutex mutex_;
  State state_;
  Call noted_;
  std::uint64_t balance_ = 0;
};

// The first collective in which one rank's differs from that of most others. recent[r]: of rank r; empty: not known.
std::optional<Difference> first_difference(std::span<const std::array<Call, Journal::kRecent>* const> recent);

// Asks all ranks for theirs; the same answer on every rank. Collective.
Difference find_difference(Communicator& everyone);

}  // namespace moetrain::parallel
