// mpi.cpp -- collectives of host memory over MPI: batches packed into one message, sums in rank order, no count beyond an int.
#include <mpi.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <exception>
#include <thread>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/mpi_check.h"

namespace moetrain::parallel {
namespace {

constexpr std::int64_t kAlign = 8;  // of every piece in a packed message: the widest element
constexpr std::int64_t kSmallReduce =
    32 << 10;  // gathered bytes up to which one all-gather beats two exchanges: latency rules there

constexpr std::int64_t aligned(std::int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }
std::byte* at(void* p, std::int64_t offset) { return static_cast<std::byte*>(p) + offset; }
const std::byte* at(const void* p, std::int64_t offset) { return static_cast<const std::byte*>(p) + offset; }

// Pieces lie end to end on one line, each on a multiple of kAlign. Calls body(piece, first byte inside it, place inside the window,
// bytes) for what of each lies in the window [begin, end) of the line.
template <class Piece, class BytesOf, class Body>
void for_window(std::span<const Piece> pieces, BytesOf bytes_of, std::int64_t begin, std::int64_t end, Body&& body) {
  std::int64_t place = 0;
  for (const auto& piece : pieces) {
    const std::int64_t bytes = bytes_of(piece), from = std::max(begin, place), to = std::min(end, place + bytes);
    if (from < to) body(piece, from - place, from - begin, to - from);
    place += aligned(bytes);
  }
}
template <class Piece, class BytesOf>
std::int64_t line_bytes(std::span<const Piece> pieces, BytesOf bytes_of) {
  std::int64_t total = 0;
  for (const auto& piece : pieces) total += aligned(bytes_of(piece));
  return total;
}
std::int64_t bytes_of(const Communicator::Gather& piece) { return piece.bytes; }
std::int64_t bytes_of(const Communicator::Scatter& piece) { return piece.count * size_of(piece.dtype); }

template <class T>
void reduce_as(Reduction reduction, void* out, const std::byte* parts, std::int64_t stride, int ranks, std::int64_t bytes) {
  const std::int64_t count = bytes / std::int64_t(sizeof(T));
  T* y = static_cast<T*>(out);
  std::memcpy(y, parts, std::size_t(bytes));
  for (int r = 1; r < ranks; ++r) {
    const T* x = reinterpret_cast<const T*>(parts + r * stride);
    switch (reduction) {
      case Reduction::sum:
        for (std::int64_t i = 0; i < count; ++i) y[i] += x[i];
        break;
      case Reduction::max:  // x != x: a NaN of any rank is never lost
        for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] > y[i] || x[i] != x[i] ? x[i] : y[i];
        break;
      case Reduction::min:
        for (std::int64_t i = 0; i < count; ++i) y[i] = x[i] < y[i] || x[i] != x[i] ? x[i] : y[i];
        break;
    }
  }
}

// out = the reduction of `ranks` parts, `stride` bytes apart, always in rank order.
void reduce_parts(DType dtype, Reduction reduction, void* out, const std::byte* parts, std::int64_t stride, int ranks,
                  std::int64_t bytes) {
  switch (dtype) {
    case DType::f32:
      return reduce_as<float>(reduction, out, parts, stride, ranks, bytes);
    case DType::f64:
      return reduce_as<double>(reduction, out, parts, stride, ranks, bytes);
    case DType::i32:
      return reduce_as<std::int32_t>(reduction, out, parts, stride, ranks, bytes);
    case DType::i64:
      return reduce_as<std::int64_t>(reduction, out, parts, stride, ranks, bytes);
    default:
      fail("mpi: no reduction of this type", {{"dtype", std::int64_t(dtype)}});
  }
}

// Whether ranks of this host share cores; collective over comm.
bool ranks_share_cores(MPI_Comm comm) {
  MPI_Comm host = MPI_COMM_NULL;
  int ranks = 0;
  mpi_ok(MPI_Comm_split_type(comm, MPI_COMM_TYPE_SHARED, 0, MPI_INFO_NULL, &host));
  mpi_ok(MPI_Comm_size(host, &ranks));
  mpi_ok(MPI_Comm_free(&host));
  const unsigned cores = std::thread::hardware_concurrency();
  return cores > 0 && unsigned(ranks) > cores;
}

// Returns when all requests are complete. Where ranks share cores, one that waits as MPI does keeps its core from the very rank it
// waits for (on newer kernels a yield gives it up for a moment only): after a first while it sleeps between polls. Where each has
// its own core, sleep would only hold up the pieces of a long message.
void wait_all(std::span<MPI_Request> requests, bool shared_cores) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::microseconds kAwake{50},
      kNap{20};  // with the kernel's timer slack a nap is about as long as the first while
  std::vector<MPI_Status> statuses(requests.size());
  const auto start = Clock::now();
  for (int done = 0;;) {
    const int status = MPI_Testall(int(requests.size()), requests.data(), &done, statuses.data());
    if (status == MPI_ERR_IN_STATUS)
      for (const auto& one : statuses)
        if (one.MPI_ERROR != MPI_ERR_PENDING) mpi_ok(one.MPI_ERROR);
    mpi_ok(status);
    if (done) return;
    if (shared_cores && Clock::now() - start > kAwake) std::this_thread::sleep_for(kNap);
  }
}

class OwnedComm {
 public:
  explicit OwnedComm(MPI_Comm comm) : comm_(comm) { mpi_ok(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN)); }
  OwnedComm(const OwnedComm&) = delete;
  OwnedComm& operator=(const OwnedComm&) = delete;
  ~OwnedComm() {
    // Freeing may wait for the whole group, and after an exception the others may wait elsewhere for us; what ends the run ends it too.
    if (std::uncaught_exceptions() > 0) return;
    int finalized = 0;
    if (MPI_Finalized(&finalized) == MPI_SUCCESS && !finalized && MPI_Comm_free(&comm_) == MPI_SUCCESS) return;
    try {
      spdlog::warn("mpi: a communicator outlived its session or could not be freed");
    } catch (...) {  // nothing is left to tell it to
    }
  }
  MPI_Comm get() const { return comm_; }
  int rank() const {
    int rank = 0;
    mpi_ok(MPI_Comm_rank(comm_, &rank));
    return rank;
  }
  int size() const {
    int size = 0;
    mpi_ok(MPI_Comm_size(comm_, &size));
    return size;
  }

 private:
  MPI_Comm comm_;
};

class Mpi final : public Communicator {
 public:
  Mpi(std::unique_ptr<OwnedComm> comm, std::int64_t round_bytes, bool shared_cores, std::shared_ptr<Journal> journal, Group group)
      : Communicator(comm->rank(), comm->size(), Waits::host, std::move(journal), group),
        comm_(std::move(comm)),
        round_bytes_(round_bytes / kAlign * kAlign),
        shared_cores_(shared_cores) {
    check(kAlign <= round_bytes && round_bytes <= std::int64_t(1) << 30, "mpi: rounds must be of 8 B to 1 GiB",
          {{"round_bytes", round_bytes}});
  }

  ~Mpi() override {  // freeing waits for the group
    const Journal::Wait waiting(journal().get(), last_call());
    comm_.reset();
  }

  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane, const char* name) override {
    const auto me = std::find(members.begin(), members.end(), rank());
    check(me != members.end(), "subgroup: this rank is not a member",
          {{"rank", rank()}, {"members", std::int64_t(members.size())}});
    const Journal::Wait waiting(journal().get(), note(Op::split));
    MPI_Comm part = MPI_COMM_NULL;
    // The groups of one call are disjoint, so the first member names a group.
    mpi_ok(MPI_Comm_split(comm_->get(), members[0], int(me - members.begin()), &part));
    auto group = std::make_unique<Mpi>(std::make_unique<OwnedComm>(part), round_bytes_, shared_cores_, journal(),
                                       part_of(members, name));
    check(group->size() == int(members.size()), "subgroup: the ranks do not agree on the members",
          {{"listed", std::int64_t(members.size())}, {"came", group->size()}});
    return group;
  }

 private:
  // Bytes a rank contributes to one round of a collective in which `size()` such parts are staged.
  std::int64_t part_bytes() const { return std::max(kAlign, round_bytes_ / size() / kAlign * kAlign); }
  void stage(std::int64_t send_bytes, std::int64_t receive_bytes) {
    if (std::int64_t(send_.size()) < send_bytes) send_.resize(std::size_t(send_bytes));
    if (std::int64_t(receive_.size()) < receive_bytes) receive_.resize(std::size_t(receive_bytes));
  }
  // Starts a collective of MPI and waits for it.
  template <class Start>
  void run(Start&& start) {
    MPI_Request request = MPI_REQUEST_NULL;
    mpi_ok(start(&request));
    wait_all({&request, 1}, shared_cores_);
  }
  void gather_staged(std::int64_t bytes) {
    run([&](MPI_Request* request) {
      return MPI_Iallgather(send_.data(), int(bytes), MPI_BYTE, receive_.data(), int(bytes), MPI_BYTE, comm_->get(), request);
    });
  }
  void exchange_staged(std::int64_t bytes) {
    run([&](MPI_Request* request) {
      return MPI_Ialltoall(send_.data(), int(bytes), MPI_BYTE, receive_.data(), int(bytes), MPI_BYTE, comm_->get(), request);
    });
  }

  void do_begin_all_gather(std::span<const Gather> pieces) override {
    exchanges_.emplace_back();  // done at once
    const auto bytes = [](const Gather& piece) { return bytes_of(piece); };
    const std::int64_t total = line_bytes(pieces, bytes);
    for (std::int64_t begin = 0; begin < total; begin += part_bytes()) {
      const std::int64_t end = std::min(total, begin + part_bytes()), length = end - begin;
      stage(length, length * size());
      for_window(pieces, bytes, begin, end, [&](const Gather& piece, std::int64_t from, std::int64_t place, std::int64_t n) {
        std::memcpy(at(send_.data(), place), at(piece.send, from), std::size_t(n));
      });
      gather_staged(length);
      for_window(pieces, bytes, begin, end, [&](const Gather& piece, std::int64_t from, std::int64_t place, std::int64_t n) {
        for (int r = 0; r < size(); ++r)
          std::memcpy(at(piece.receive, r * piece.bytes + from), at(receive_.data(), r * length + place), std::size_t(n));
      });
    }
  }

  // An exchange of parts and a sum in rank order: MPI's own reductions may choose another order for another count.
  void do_begin_reduce_scatter(std::span<const Scatter> pieces) override {
    exchanges_.emplace_back();  // done at once
    const auto bytes = [](const Scatter& piece) { return bytes_of(piece); };
    const std::int64_t total = line_bytes(pieces, bytes);
    for (std::int64_t begin = 0; begin < total; begin += part_bytes()) {
      const std::int64_t end = std::min(total, begin + part_bytes()), length = end - begin;
      stage(length * size(), length * size());
      for_window(pieces, bytes, begin, end, [&](const Scatter& piece, std::int64_t from, std::int64_t place, std::int64_t n) {
        for (int r = 0; r < size(); ++r)
          std::memcpy(at(send_.data(), r * length + place), at(piece.send, r * bytes_of(piece) + from), std::size_t(n));
      });
      exchange_staged(length);
      for_window(pieces, bytes, begin, end, [&](const Scatter& piece, std::int64_t from, std::int64_t place, std::int64_t n) {
        reduce_parts(piece.dtype, Reduction::sum, at(piece.receive, from), at(receive_.data(), place), length, size(), n);
      });
    }
  }

  void do_all_reduce(Tensor values, Reduction reduction) override {
    const std::int64_t total = values.bytes();
    if (size() == 1) return;
    for (std::int64_t begin = 0; begin < total; begin += round_bytes_) {
      const std::int64_t length = std::min(total - begin, round_bytes_);
      std::byte* data = at(values.data, begin);
      if (length * size() <= std::min(kSmallReduce, round_bytes_)) {
        const std::int64_t stride = aligned(length);
        stage(stride, stride * size());
        std::memcpy(send_.data(), data, std::size_t(length));
        gather_staged(stride);
        reduce_parts(values.dtype, reduction, data, receive_.data(), stride, size(), length);
      } else {  // each rank reduces one share for all, so all read the same bits
        const std::int64_t share = aligned((length + size() - 1) / size());
        stage(share * size(), share * size());
        std::memcpy(send_.data(), data, std::size_t(length));
        std::memset(at(send_.data(), length), 0, std::size_t(share * size() - length));  // summed too: old bytes might overflow
        exchange_staged(share);
        reduce_parts(values.dtype, reduction, send_.data(), receive_.data(), share, size(), share);
        gather_staged(share);
        std::memcpy(data, receive_.data(), std::size_t(length));
      }
    }
  }

  // Pair by pair: both ends know the bytes between them, so a pair needs as many messages as its own bytes ask for, and neither the
  // int counts nor the int displacements of MPI_Alltoallv bound the sum. Messages of a pair arrive in the order of their sending, so
  // several exchanges may be under way.
  void do_begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) override {
    const auto n = std::size_t(size()), me = std::size_t(rank());
    auto& requests = exchanges_.emplace_back();
    const auto in_rounds = [&](std::int64_t bytes, auto&& start) {
      for (std::int64_t begin = 0; begin < bytes; begin += round_bytes_)
        start(begin, int(std::min(bytes - begin, round_bytes_)), &requests.emplace_back());
    };
    for (std::size_t step = 1; step < n; ++step) {
      const std::size_t source = (me + n - step) % n;
      in_rounds(receive[source].bytes, [&](std::int64_t place, int bytes, MPI_Request* request) {
        mpi_ok(MPI_Irecv(at(receive[source].data, place), bytes, MPI_BYTE, int(source), 0, comm_->get(), request));
      });
    }
    for (std::size_t step = 1; step < n; ++step) {
      const std::size_t target = (me + step) % n;
      in_rounds(send[target].bytes, [&](std::int64_t place, int bytes, MPI_Request* request) {
        mpi_ok(MPI_Isend(at(send[target].data, place), bytes, MPI_BYTE, int(target), 0, comm_->get(), request));
      });
    }
    if (send[me].bytes > 0) std::memcpy(receive[me].data, send[me].data, std::size_t(send[me].bytes));
  }
  void do_end(Purpose) override {
    if (!exchanges_.front().empty()) wait_all(exchanges_.front(), shared_cores_);
    exchanges_.pop_front();
  }

  void do_broadcast(void* data, std::int64_t bytes, int root) override {
    for (std::int64_t begin = 0; begin < bytes; begin += round_bytes_)
      run([&](MPI_Request* request) {
        return MPI_Ibcast(at(data, begin), int(std::min(bytes - begin, round_bytes_)), MPI_BYTE, root, comm_->get(), request);
      });
  }
  void do_barrier() override {
    run([&](MPI_Request* request) { return MPI_Ibarrier(comm_->get(), request); });
  }

  std::unique_ptr<OwnedComm> comm_;
  std::int64_t round_bytes_;
  bool shared_cores_;
  std::vector<std::byte> send_, receive_;  // staging, kept between calls
  std::deque<std::vector<MPI_Request>> exchanges_;  // under way, the oldest first
};

}  // namespace

std::unique_ptr<Communicator> mpi_world(std::int64_t round_bytes, std::shared_ptr<Journal> journal) {
  int rank = 0, ranks = 0;
  mpi_ok(MPI_Comm_rank(MPI_COMM_WORLD, &rank));
  mpi_ok(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
  Group group = group_of("world", journal ? journal->state().calls : 0, rank, ranks);
  const Journal::Wait waiting(journal.get(), journal && ranks > 1 ? journal->note(group, Op::split) : Call{});
  MPI_Comm all = MPI_COMM_NULL;
  mpi_ok(MPI_Comm_dup(MPI_COMM_WORLD, &all));
  auto comm = std::make_unique<OwnedComm>(all);
  const bool shared_cores = ranks_share_cores(comm->get());
  return std::make_unique<Mpi>(std::move(comm), round_bytes, shared_cores, std::move(journal), group);
}

}  // namespace moetrain::parallel
