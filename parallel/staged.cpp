// staged.cpp -- collectives of device memory through host memory: for ranks that share a GPU, which NCCL refuses; and the choice.
#include <unistd.h>

#include <cstring>
#include <utility>
#include <vector>

#include "memory/buffer.h"
#include "memory/cuda_memory.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

// Every collective is done when it returns. A copy waits for what the default stream holds.
class Staged final : public Communicator {
 public:
  Staged(std::unique_ptr<Communicator> host, Group group)
      : Communicator(host->rank(), host->size(), Waits::host, host->journal(), group), host_(std::move(host)) {}
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane lane, const char* name) override {
    return make(host_->subgroup(members, lane, name));
  }
  static std::unique_ptr<Communicator> make(std::unique_ptr<Communicator> host) {
    if (host->size() == 1) return solo(Device::cuda);
    const Group group = host->twin();
    return std::make_unique<Staged>(std::move(host), group);
  }

 private:
  struct Stage {
    std::vector<std::byte> bytes;
    explicit Stage(std::int64_t count) : bytes(std::size_t(count)) {}
    Stage(const void* device, std::int64_t count) : Stage(count) {
      if (count > 0) copy_to_host(Device::cuda, bytes.data(), device, count);
    }
    void land(void* device) const {
      if (!bytes.empty()) copy_to_device(Device::cuda, device, bytes.data(), std::int64_t(bytes.size()));
    }
  };

  void do_begin_all_gather(std::span<const Gather> pieces) override {
    for (const auto& p : pieces) {
      const Stage mine(p.send, p.bytes);
      Stage all(size() * p.bytes);
      const Gather piece{mine.bytes.data(), all.bytes.data(), p.bytes};
      host_->all_gather({&piece, 1});
      all.land(p.receive);
    }
  }
  void do_begin_reduce_scatter(std::span<const Scatter> pieces) override {
    for (const auto& p : pieces) {
      const std::int64_t bytes = p.count * size_of(p.dtype);
      const Stage all(p.send, size() * bytes);
      Stage mine(bytes);
      const Scatter piece{all.bytes.data(), mine.bytes.data(), p.count, p.dtype};
      host_->reduce_scatter({&piece, 1});
      mine.land(p.receive);
    }
  }
  void do_all_reduce(Tensor values, Reduction reduction) override {
    Stage all(values.data, values.bytes());
    host_->all_reduce({all.bytes.data(), values.dtype, values.shape}, reduction);
    all.land(values.data);
  }
  void do_begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) override {
    std::vector<Stage> out, in;
    std::vector<Outgoing> sent;
    std::vector<Incoming> received;
    for (const auto& piece : send) sent.push_back({out.emplace_back(piece.data, piece.bytes).bytes.data(), piece.bytes});
    for (const auto& piece : receive) received.push_back({in.emplace_back(piece.bytes).bytes.data(), piece.bytes});
    host_->begin_all_to_all(sent, received);
    host_->end();
    for (std::size_t r = 0; r < in.size(); ++r) in[r].land(receive[r].data);
  }
  void do_end(Purpose) override {}
  void do_broadcast(void* data, std::int64_t bytes, int root) override {
    Stage all(data, bytes);
    host_->broadcast(all.bytes.data(), bytes, root);
    all.land(data);
  }
  void do_barrier() override { host_->barrier(); }
  std::unique_ptr<Communicator> host_;
};

}  // namespace

std::optional<SharedDevice> shared_device(Communicator& host, int index) {
  struct Address {
    char host[256] = {}, device[64] = {};
    bool operator==(const Address& o) const { return std::strcmp(host, o.host) == 0 && std::strcmp(device, o.device) == 0; }
  } mine;
  gethostname(mine.host, sizeof mine.host - 1);
  if constexpr (kHasCuda) cuda::bus_of(index).copy(mine.device, sizeof mine.device - 1);
  std::vector<Address> all(std::size_t(host.size()));
  const Communicator::Gather piece{&mine, all.data(), sizeof mine};
  host.all_gather({&piece, 1});
  for (std::size_t r = 0; r < all.size(); ++r)
    for (std::size_t q = 0; q < r; ++q)
      if (all[q] == all[r]) return SharedDevice{int(q), int(r), all[r].device, all[r].host};
  return {};
}

std::unique_ptr<Communicator> on_devices(std::unique_ptr<Communicator> host) {
  if constexpr (kHasCuda)
    if (host->size() > 1 && shared_device(*host, cuda::device_in_use())) return Staged::make(std::move(host));
  return nccl_on_devices(std::move(host));
}

}  // namespace moetrain::parallel
