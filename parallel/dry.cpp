// dry.cpp -- a group that only counts: one process plans for any rank of any number, and no pointer is followed.
#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

class Dry final : public Communicator {
 public:
  Dry(int rank, int size) : Communicator(rank, size) {}
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane, const char*) override {
    for (std::size_t i = 0; i < members.size(); ++i)
      if (members[i] == rank()) return dry(int(i), int(members.size()));
    fail("subgroup: this rank is not a member", {{"rank", rank()}, {"members", std::int64_t(members.size())}});
  }

 private:
  void do_begin_all_gather(std::span<const Gather>) override {}
  void do_begin_reduce_scatter(std::span<const Scatter>) override {}
  void do_all_reduce(Tensor, Reduction) override {}
  void do_begin_all_to_all(std::span<const Outgoing>, std::span<const Incoming>) override {}
  void do_end(Purpose) override {}
  void do_broadcast(void*, std::int64_t, int) override {}
  void do_barrier() override {}
};

}  // namespace

std::unique_ptr<Communicator> dry(int rank, int size) {
  check(0 <= rank && rank < size, "dry: no such rank", {{"rank", rank}, {"ranks", size}});
  return std::make_unique<Dry>(rank, size);
}

}  // namespace moetrain::parallel
