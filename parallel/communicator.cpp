// communicator.cpp -- what every maker's collectives share: arguments checked, traffic and waiting time counted.
#include "parallel/communicator.h"

#include <chrono>
#include <cstddef>
#include <thread>
#include <vector>

namespace moetrain::parallel {

// Adds its life to what a purpose has cost, where the host is who waits.
class Communicator::Stopwatch {
 public:
  Stopwatch(Communicator& group, Purpose purpose) : group_(group), purpose_(purpose) {}
  ~Stopwatch() {
    if (group_.waits_ == Waits::host)
      group_.add_exposed(purpose_, std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count());
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  Communicator& group_;
  Purpose purpose_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

void Communicator::check_idle() const {
  check(under_way_.empty(), "communicator: others are under way", {{"under way", std::int64_t(under_way_.size())}});
}

void Communicator::begin_all_gather(std::span<const Gather> pieces) {
  for (const auto& piece : pieces) {
    check(piece.bytes >= 0, "all_gather: negative bytes", {{"bytes", piece.bytes}});
    traffic_.bytes_gathered += piece.bytes * (size_ - 1);
  }
  const Stopwatch waiting(*this, Purpose::gather);
  do_begin_all_gather(pieces);
  under_way_.push_back(Purpose::gather);
}

void Communicator::begin_reduce_scatter(std::span<const Scatter> pieces) {
  for (const auto& piece : pieces) {
    check(piece.dtype == DType::f32 || piece.dtype == DType::f64 || piece.dtype == DType::i64,
          "reduce_scatter: sums are of f32, f64 or i64", {{"dtype", std::int64_t(piece.dtype)}});
    check(piece.count >= 0, "reduce_scatter: negative count", {{"count", piece.count}});
    traffic_.bytes_gathered += piece.count * size_of(piece.dtype) * (size_ - 1);
  }
  const Stopwatch waiting(*this, Purpose::reduce);
  do_begin_reduce_scatter(pieces);
  under_way_.push_back(Purpose::reduce);
}

void Communicator::all_reduce(Tensor values, Reduction reduction) {
  check_idle();
  check(values.dtype == DType::f32 || values.dtype == DType::f64 || values.dtype == DType::i32 || values.dtype == DType::i64,
        "all_reduce: values must be f32, f64, i32 or i64", {{"dtype", std::int64_t(values.dtype)}});
  traffic_.bytes_gathered += 2 * ((values.count() + size_ - 1) / size_) * size_of(values.dtype) * (size_ - 1);
  const Stopwatch waiting(*this, Purpose::reduce);
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
  const Stopwatch waiting(*this, Purpose::exchange);
  do_begin_all_to_all(send, receive);
  under_way_.push_back(Purpose::exchange);
}

void Communicator::end() {
  check(!under_way_.empty(), "communicator: nothing is under way");
  const Stopwatch waiting(*this, under_way_.front());
  do_end(under_way_.front());
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
  const Stopwatch waiting(*this, Purpose::other);
  do_broadcast(data, bytes, root);
}

void Communicator::barrier() {
  check_idle();
  const Stopwatch waiting(*this, Purpose::other);
  do_barrier();
}

void Communicator::wait_until(const std::function<bool()>& reached) {
  while (!reached()) std::this_thread::yield();
}

}  // namespace moetrain::parallel
