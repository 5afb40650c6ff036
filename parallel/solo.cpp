// solo.cpp -- the group of one rank in host memory: what it sends, it receives.
#include <cstring>

#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

class Solo final : public Communicator {
 public:
  Solo() : Communicator(0, 1) {}
  std::unique_ptr<Communicator> subgroup(std::span<const int> members) override {
    check(members.size() == 1 && members[0] == 0, "subgroup: a group of one has only itself",
          {{"members", std::int64_t(members.size())}});
    return solo();
  }

 private:
  static void move(void* to, const void* from, std::int64_t bytes) {
    if (bytes > 0 && to != from) std::memcpy(to, from, std::size_t(bytes));
  }
  void do_all_gather(std::span<const Gather> pieces) override {
    for (const auto& piece : pieces) move(piece.receive, piece.send, piece.bytes);
  }
  void do_reduce_scatter(std::span<const Scatter> pieces) override {
    for (const auto& piece : pieces) move(piece.receive, piece.send, piece.count * size_of(piece.dtype));
  }
  void do_all_reduce(Tensor, Reduction) override {}
  void do_all_to_all(const void* send, std::span<const std::int64_t> send_bytes, void* receive,
                     std::span<const std::int64_t>) override {
    move(receive, send, send_bytes[0]);
  }
  void do_broadcast(void*, std::int64_t, int) override {}
  void do_barrier() override {}
};

}  // namespace

std::unique_ptr<Communicator> solo() { return std::make_unique<Solo>(); }

}  // namespace moetrain::parallel
