// dry.cpp -- a group that only counts: one process plans for any rank of any number, and no pointer is followed.
#include <bit>
#include <numeric>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/network.h"

namespace moetrain::parallel {
namespace {

// What a group has of its ranks on this rank's host: they stand together in it.
struct Near {
  int first = 0, end = 1;
  int count() const { return end - first; }
  bool holds(int member) const { return first <= member && member < end; }
};

class Dry final : public Communicator {
 public:
  Dry(int rank, int size) : Communicator(rank, size, Waits::device) {}
  // `ranks`: of the members in the job.
  Dry(int rank, std::vector<int> ranks, Lane lane, const Network& network)
      : Communicator(rank, int(ranks.size()), Waits::device), network_(&network), ranks_(std::move(ranks)), lane_(lane) {
    const auto host = [&](int member) { return ranks_[std::size_t(member)] / network.ranks_a_host; };
    near_ = {rank, rank + 1};
    while (near_.first > 0 && host(near_.first - 1) == host(rank)) --near_.first;
    while (near_.end < size() && host(near_.end) == host(rank)) ++near_.end;
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane lane, const char*) override {
    for (std::size_t i = 0; i < members.size(); ++i)
      if (members[i] == rank()) {
        if (network_ == nullptr) return std::make_unique<Dry>(int(i), int(members.size()));
        std::vector<int> ranks;
        for (const int m : members) ranks.push_back(ranks_[std::size_t(m)]);
        return std::make_unique<Dry>(int(i), std::move(ranks), lane, *network_);
      }
    fail("subgroup: this rank is not a member", {{"rank", rank()}, {"members", std::int64_t(members.size())}});
  }

 private:
  // Small messages of host memory take no time here, but for them the host has to know what the device has made.
  bool timed() const {
    if (network_ != nullptr && lane_ == Lane::control) network_->timeline->host_waits();
    return network_ != nullptr && lane_ != Lane::control && size() > 1;
  }
  double latency(int stages) const { return stages * (near_.count() == size() ? network_->near : network_->far).latency_s; }
  double gather_seconds(double bytes) const {
    const double near = (size() - 1) * bytes / network_->near.bytes_per_s;
    const double far = (size() - near_.count()) * bytes / (near_.count() * network_->far.bytes_per_s);
    return std::max(near, far) + latency(int(std::bit_width(unsigned(size() - 1))));
  }
  void send(double seconds) {
    const auto lane = lane_ == Lane::exchange ? Timeline::Lane::exchange
                      : lane_ == Lane::tensor ? Timeline::Lane::tensor
                                              : Timeline::Lane::sharding;
    under_way_.push_back(network_->timeline->send(lane, seconds));
  }
  void do_begin_all_gather(std::span<const Gather> pieces) override {
    if (!timed()) return;
    double bytes = 0;
    for (const Gather& piece : pieces) bytes += double(piece.bytes);
    send(gather_seconds(bytes));
  }
  void do_begin_reduce_scatter(std::span<const Scatter> pieces) override {
    if (!timed()) return;
    double bytes = 0;
    for (const Scatter& piece : pieces) bytes += double(piece.count * size_of(piece.dtype));
    send(gather_seconds(bytes));
  }
  void do_all_reduce(Tensor values, Reduction) override {
    if (!timed()) return;
    send(2 * gather_seconds(double(values.bytes()) / size()));
    do_end(Purpose::reduce);
  }
  void do_begin_all_to_all(std::span<const Outgoing> out, std::span<const Incoming> in) override {
    if (!timed()) return;
    double near_out = 0, near_in = 0, far_out = 0, far_in = 0;
    for (int r = 0; r < size(); ++r) {
      if (r == rank()) continue;
      (near_.holds(r) ? near_out : far_out) += double(out[std::size_t(r)].bytes);
      (near_.holds(r) ? near_in : far_in) += double(in[std::size_t(r)].bytes);
    }
    send(std::max(std::max(near_out, near_in) / network_->near.bytes_per_s, std::max(far_out, far_in) / network_->far.bytes_per_s) +
         latency(1));
  }
  void do_end(Purpose purpose) override {
    if (!timed()) return;
    add_exposed(purpose, network_->timeline->wait(under_way_.front()));
    under_way_.pop_front();
  }
  void do_broadcast(void*, std::int64_t, int) override {}
  void do_barrier() override {}

  const Network* network_ = nullptr;
  std::vector<int> ranks_;
  Lane lane_ = Lane::sharding;
  Near near_;
  std::deque<Timeline::Message> under_way_;
};

}  // namespace

std::unique_ptr<Communicator> dry(int rank, int size, const Network* network) {
  check(0 <= rank && rank < size, "dry: no such rank", {{"rank", rank}, {"ranks", size}});
  if (network == nullptr) return std::make_unique<Dry>(rank, size);
  std::vector<int> ranks(static_cast<std::size_t>(size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<Dry>(rank, std::move(ranks), Communicator::Lane::sharding, *network);
}

}  // namespace moetrain::parallel
