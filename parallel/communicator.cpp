// communicator.cpp -- what every maker's collectives share: arguments checked, the call booked, traffic and waiting time counted.
#include "parallel/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

namespace moetrain::parallel {

// In its life the rank waits for the others; where the host is who waits, that is added to what a purpose has cost.
class Communicator::Waiting {
 public:
  Waiting(Communicator& group, Purpose purpose, const Call& call) : wait_(group.journal().get(), call), group_(group), purpose_(purpose) {}
  ~Waiting() {
    if (group_.waits_ == Waits::host)
      group_.add_exposed(purpose_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Journal::Wait wait_;
  Communicator& group_;
  Purpose purpose_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Call Communicator::note(Op op, std::int64_t count, DType dtype, std::uint64_t pieces) {
  if (journal_) noted_ = journal_->note(group_, op, count, dtype, pieces);
  return noted_;
}

Group Communicator::part_of(std::span<const int> members, const char* name) {
  const auto me = std::find(members.begin(), members.end(), rank_) - members.begin();
  return group_of(name, mixed(mixed(group_.id, ++group_.parts), std::uint64_t(members[0])), int(me), int(members.size()));
}

Group Communicator::twin() const { return group_of(group_.name.data(), mixed(group_.id, 0), rank_, size_); }

void Communicator::check_idle() const {
  check(under_way_.empty(), "communicator: others are under way", {{"under way", std::int64_t(under_way_.size())}});
}

void Communicator::begin_all_gather(std::span<const Gather> pieces) {
  std::int64_t bytes = 0;
  std::uint64_t each = 0;
  for (const auto& piece : pieces) {
    check(piece.bytes >= 0, "all_gather: negative bytes", {{"bytes", piece.bytes}});
    bytes += piece.bytes;
    each = mixed(each, std::uint64_t(piece.bytes));
  }
  traffic_.bytes_gathered += bytes * (size_ - 1);
  const Call call = note(Op::all_gather, bytes, DType::none, each);
  const Waiting waiting(*this, Purpose::gather, call);
  do_begin_all_gather(pieces);
  under_way_.push_back({Purpose::gather, call});
}

void Communicator::begin_reduce_scatter(std::span<const Scatter> pieces) {
  std::int64_t bytes = 0;
  std::uint64_t each = 0;
  for (const auto& piece : pieces) {
    check(piece.dtype == DType::f32 || piece.dtype == DType::f64 || piece.dtype == DType::i64,
          "reduce_scatter: sums are of f32, f64 or i64", {{"dtype", std::int64_t(piece.dtype)}});
    check(piece.count >= 0, "reduce_scatter: negative count", {{"count", piece.count}});
    bytes += piece.count * size_of(piece.dtype);
    each = mixed(mixed(each, std::uint64_t(piece.count)), std::uint64_t(piece.dtype));
  }
  traffic_.bytes_gathered += bytes * (size_ - 1);
  const Call call = note(Op::reduce_scatter, bytes, DType::none, each);
  const Waiting waiting(*this, Purpose::reduce, call);
  do_begin_reduce_scatter(pieces);
  under_way_.push_back({Purpose::reduce, call});
}

void Communicator::all_reduce(Tensor values, Reduction reduction) {
  check_idle();
  check(values.dtype == DType::f32 || values.dtype == DType::f64 || values.dtype == DType::i32 || values.dtype == DType::i64,
        "all_reduce: values must be f32, f64, i32 or i64", {{"dtype", std::int64_t(values.dtype)}});
  traffic_.bytes_gathered += 2 * ((values.count() + size_ - 1) / size_) * size_of(values.dtype) * (size_ - 1);
  const Waiting waiting(*this, Purpose::reduce, note(Op::all_reduce, values.count(), values.dtype, std::uint64_t(reduction)));
  do_all_reduce(values, reduction);
}

void Communicator::begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) {
  check(std::int64_t(send.size()) == size_ && std::int64_t(receive.size()) == size_, "all_to_all: not one piece a rank",
        {{"ranks", size_}, {"send", std::int64_t(send.size())}, {"receive", std::int64_t(receive.size())}});
  for (int r = 0; r < size_; ++r) {
    const auto out = send[std::size_t(r)].bytes, in = receive[std::size_t(r)].bytes;
    check(out >= 0 && in >= 0, "all_to_all: negative bytes", {{"rank", r}, {"send", out}, {"receive", in}});
    if (r != rank_) traffic_.bytes_exchanged += out;
  }
  check(send[std::size_t(rank_)].bytes == receive[std::size_t(rank_)].bytes, "all_to_all: own part differs from itself",
        {{"send", send[std::size_t(rank_)].bytes}, {"receive", receive[std::size_t(rank_)].bytes}});
  const Call call = note(Op::all_to_all);  // each pair of ranks has its own bytes
  const Waiting waiting(*this, Purpose::exchange, call);
  do_begin_all_to_all(send, receive);
  under_way_.push_back({Purpose::exchange, call});
}

void Communicator::end() {
  check(!under_way_.empty(), "communicator: nothing is under way");
  const Waiting waiting(*this, under_way_.front().purpose, under_way_.front().call);
  do_end(under_way_.front().purpose);
  under_way_.pop_front();
}

void Communicator::all_gather(std::span<const Gather> pieces) {
  check_idle();
  begin_all_gather(pieces);
  end();
}

void Communicator::reduce_scatter(std::span<const Scatter> pieces) {
  check_idle();
  begin_reduce_scatter(pieces);
  end();
}

void Communicator::all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                              std::span<const std::int64_t> receive_bytes) {
  check_idle();
  std::vector<Outgoing> out;
  std::vector<Incoming> in;
  for (const auto bytes : send_bytes) {
    out.push_back({send, bytes});
    if (send) send = static_cast<const std::byte*>(send) + bytes;
  }
  for (const auto bytes : receive_bytes) {
    in.push_back({receive, bytes});
    if (receive) receive = static_cast<std::byte*>(receive) + bytes;
  }
  begin_all_to_all(out, in);
  end();
}

void Communicator::broadcast(void* data, std::int64_t bytes, int root) {
  check_idle();
  check(0 <= root && root < size_ && bytes >= 0, "broadcast: no such root or negative bytes",
        {{"root", root}, {"ranks", size_}, {"bytes", bytes}});
  const Waiting waiting(*this, Purpose::other, note(Op::broadcast, bytes, DType::none, std::uint64_t(root)));
  do_broadcast(data, bytes, root);
}

void Communicator::barrier() {
  check_idle();
  const Waiting waiting(*this, Purpose::other, note(Op::barrier));
  do_barrier();
}

void Communicator::wait_until(const std::function<bool()>& reached) {
  if (reached()) return;
  const Journal::Wait waiting(journal().get(), noted_);
  do {
    look();
    std::this_thread::yield();
  } while (!reached());
}

}  // namespace moetrain::parallel
