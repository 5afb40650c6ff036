// communicator.h -- the collectives of one group of ranks; the only virtual class of the house.
#pragma once
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "memory/device.h"
#include "memory/tensor.h"
#include "parallel/journal.h"

namespace moetrain::parallel {

enum class Reduction : std::uint8_t { sum, max, min };

// What collectives are for, as far as who waits for them cares.
enum class Purpose : std::uint8_t { gather, reduce, exchange, other };
inline constexpr int kPurposes = 4;

// What a group has moved, and how long the work that needs it stood still for it: the host, or on a device the default stream.
struct Traffic {
  std::int64_t bytes_gathered = 0;   // all-gather: bytes that reached this rank from others; reduce-scatter: bytes that left it for
                                     // others; all-reduce: as one of each over equal shares
  std::int64_t bytes_exchanged = 0;  // all-to-all: bytes that left this rank for others
  std::array<double, kPurposes> exposed_seconds{};
  double exposed() const { return exposed_seconds[0] + exposed_seconds[1] + exposed_seconds[2] + exposed_seconds[3]; }
};

// Every rank of the group makes the same calls in the same order. Sizes of 0 bytes are normal. The public calls count the
// traffic and time, then run the maker's own.
class Communicator {
 public:
  virtual ~Communicator() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  const Traffic& traffic() const { return traffic_; }
  const std::shared_ptr<Journal>& journal() const { return journal_; }  // where its collectives are booked; null: nobody watches
  Group twin() const;  // the same ranks, for another maker
  void enter(Phase phase, int layer = -1) const {  // the place of the run that its next collectives belong to
    if (journal_) journal_->at({phase, layer});
  }

  struct Gather {      // one tensor of a batch of all-gathers
    const void* send;  // bytes
    void* receive;     // size() * bytes, in rank order; send may lie at its own place inside
    std::int64_t bytes;
  };
  struct Scatter {     // one tensor of a batch of reduce-scatters (sum)
    const void* send;  // size() * count elements
    void* receive;     // count elements: the sum of everyone's part `rank`; may not overlap send
    std::int64_t count;
    DType dtype;  // f32, f64, i64
  };
  // What begins may travel while other work runs, and no piece may be touched before its end: end() ends what began first. The calls
  // without a beginning are both at once, and wait for nothing else to be under way.
  void begin_all_gather(std::span<const Gather> pieces);
  void begin_reduce_scatter(std::span<const Scatter> pieces);
  void end();
  void all_gather(std::span<const Gather> pieces);
  void reduce_scatter(std::span<const Scatter> pieces);
  // The same bits on every rank. f32, f64, i32, i64.
  void all_reduce(Tensor values, Reduction reduction);
  struct Outgoing {
    const void* data;
    std::int64_t bytes;
  };
  struct Incoming {
    void* data;
    std::int64_t bytes;
  };
  // send[r] goes to rank r, what rank s sent lands in receive[s].
  void begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive);
  // Bytes [sum of send_bytes before r, ...) go to rank r; what rank s sent lands at [sum of receive_bytes before s, ...).
  void all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                  std::span<const std::int64_t> receive_bytes);
  void broadcast(void* data, std::int64_t bytes, int root);
  void barrier();
  // The group of some of this group's ranks, in this order; every rank of this group calls it, each with the group it is in. On a
  // device collectives of one lane run one after another, those of several beside each other. A message names it.
  enum class Lane : std::uint8_t { sharding, exchange, tensor, control };  // control: small messages of host memory
  virtual std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane lane = Lane::sharding,
                                                 const char* name = "group") = 0;
  // On a device collectives are queued: the host waits here until they are done, the traffic then has their time. Nothing to do in
  // host memory.
  virtual void settle() {}
  // The host waits until reached() says so. Throws where a collective on a device failed meanwhile.
  void wait_until(const std::function<bool()>& reached);

 protected:
  enum class Waits : std::uint8_t { host, device };  // for the end of a call: its caller, or work queued later
  Communicator(int rank, int size, Waits waits = Waits::host, std::shared_ptr<Journal> journal = {}, Group group = {})
      : rank_(rank), size_(size), waits_(waits), journal_(size > 1 ? std::move(journal) : nullptr), group_(group) {}
  Group part_of(std::span<const int> members, const char* name);  // what a subgroup is booked as
  Call note(Op op, std::int64_t count = 0, DType dtype = DType::none, std::uint64_t pieces = 0);
  const Call& last_call() const { return noted_; }
  void add_exposed(Purpose purpose, double seconds) { traffic_.exposed_seconds[std::size_t(purpose)] += seconds; }

 private:
  class Waiting;
  struct UnderWay {
    Purpose purpose;
    Call call;
  };
  void check_idle() const;
  virtual void look() const {}  // throws what is known to have failed
  virtual void do_begin_all_gather(std::span<const Gather> pieces) = 0;
  virtual void do_begin_reduce_scatter(std::span<const Scatter> pieces) = 0;
  virtual void do_all_reduce(Tensor values, Reduction reduction) = 0;
  virtual void do_begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) = 0;
  virtual void do_end(Purpose purpose) = 0;
  virtual void do_broadcast(void* data, std::int64_t bytes, int root) = 0;
  virtual void do_barrier() = 0;
  int rank_, size_;
  Waits waits_;
  std::shared_ptr<Journal> journal_;
  Group group_;
  Call noted_;  // last
  std::deque<UnderWay> under_way_;  // the oldest first
  Traffic traffic_;
};

std::unique_ptr<Communicator> solo(Device device = Device::cpu);  // one rank: copies
// Counts traffic, moves nothing (moetrain plan); over a network, which outlives it, messages take time too.
struct Network;
std::unique_ptr<Communicator> dry(int rank, int size, const Network* network = nullptr);
// All ranks of the job, host memory; collective, needs a live MpiSession, which must outlive it. A collective stages and sends at
// most round_bytes at a time, so that no count outgrows MPI's int and staging stays small.
inline constexpr std::int64_t kRoundBytes = std::int64_t(64) << 20;
std::unique_ptr<Communicator> mpi_world(std::int64_t round_bytes = kRoundBytes, std::shared_ptr<Journal> journal = {});
// The ranks of a host group, each with the GPU it has in use, tensors on the device; collective. One GPU each: NCCL. Where two
// share one, which NCCL refuses: through host memory, slowly, each collective done when it returns; for trying a job out.
std::unique_ptr<Communicator> on_devices(std::unique_ptr<Communicator> host);
// NCCL on a stream a lane, in order with the default stream on both sides; a group and its subgroups put their collectives on the
// streams in the one order in which the host called them. A build without NCCL has groups of one rank only and refuses others.
std::unique_ptr<Communicator> nccl_on_devices(std::unique_ptr<Communicator> host);
// The first two ranks that would share a GPU if each took the one of this index on its host. Collective.
struct SharedDevice {
  int first, second;
  std::string device, host;
};
std::optional<SharedDevice> shared_device(Communicator& host, int index);

}  // namespace moetrain::parallel
