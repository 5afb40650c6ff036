// solo.cpp -- the group of one rank: what it sends, it receives.
#include "memory/buffer.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

class Solo final : public Communicator {
 public:
  explicit Solo(Device device) : Communicator(0, 1), device_(device) {}
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane, const char*) override {
    check(members.size() == 1 && members[0] == 0, "subgroup: a group of one has only itself",
          {{"members", std::int64_t(members.size())}});
    return solo(device_);
  }

 private:
  void move(void* to, const void* from, std::int64_t bytes) const {
    if (bytes > 0 && to != from) copy_to_device(device_, to, from, bytes);
  }
  void do_begin_all_gather(std::span<const Gather> pieces) override {
    for (const auto& piece : pieces) move(piece.receive, piece.send, piece.bytes);
  }
  void do_begin_reduce_scatter(std::span<const Scatter> pieces) override {
    for (const auto& piece : pieces) move(piece.receive, piece.send, piece.count * size_of(piece.dtype));
  }
  void do_all_reduce(Tensor, Reduction) override {}
  void do_begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) override {
    move(receive[0].data, send[0].data, send[0].bytes);
  }
  void do_end(Purpose) override {}
  void do_broadcast(void*, std::int64_t, int) override {}
  void do_barrier() override {}
  Device device_;
};

}  // namespace

std::unique_ptr<Communicator> solo(Device device) { return std::make_unique<Solo>(device); }

}  // namespace moetrain::parallel
