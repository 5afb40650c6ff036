// nccl.cpp -- collectives of device memory over NCCL, on a stream a lane beside the default one; host messages stay with MPI.
#include <nccl.h>

#include <deque>
#include <exception>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "memory/stream.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {
namespace {

ncclDataType_t type_of(DType t) {
  switch (t) {
    case DType::f32:
      return ncclFloat32;
    case DType::f64:
      return ncclFloat64;
    case DType::i32:
      return ncclInt32;
    case DType::i64:
      return ncclInt64;
    default:
      fail("nccl: no such element", {{"dtype", std::int64_t(t)}});
  }
}

[[noreturn]] void lost(const std::string& what) { throw Error("NCCL: " + what, ExitCode::rank_lost); }

class Nccl;

// What the groups of a job share: a stream a lane, and one order of all their collectives.
struct Queue {
  cuda::Stream lanes[3]{cuda::Stream(/*urgent=*/true), cuda::Stream(/*urgent=*/true), cuda::Stream(/*urgent=*/true)};
  std::vector<Nccl*> groups;
  Nccl* issuing = nullptr;  // whose last collective may not be on the stream yet
};

// A non-blocking communicator puts a collective on the stream from a thread of its own, while the host goes on. Before the next one,
// or before anything waits for it, it must be there.
class Nccl final : public Communicator {
 public:
  Nccl(std::unique_ptr<Communicator> host, std::shared_ptr<Queue> queue, Lane lane, Group group)
      : Communicator(host->rank(), host->size(), Waits::device, host->journal(), group),
        host_(std::move(host)),
        queue_(std::move(queue)),
        stream_(queue_->lanes[std::size_t(lane)].get()) {
    ncclUniqueId id;
    if (rank() == 0) ok(ncclGetUniqueId(&id), "ncclGetUniqueId");
    host_->broadcast(&id, sizeof id, 0);
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    const Journal::Wait waiting(journal().get(), note(Op::split));
    finish(ncclCommInitRankConfig(&comm_, size(), id, rank(), &config), "ncclCommInitRank");
    queue_->groups.push_back(this);
  }
  ~Nccl() override {
    std::erase(queue_->groups, this);
    if (queue_->issuing == this) queue_->issuing = nullptr;
    if (!comm_) return;
    const Journal::Wait waiting(journal().get(), last_call());
    // A rank that leaves by an exception does not wait for others that may be gone.
    if (std::uncaught_exceptions() > 0)
      ncclCommAbort(comm_);
    else
      ncclCommDestroy(comm_);
  }
  std::unique_ptr<Communicator> subgroup(std::span<const int> members, Lane lane, const char* name) override {
    check(lane != Lane::control, "nccl: control messages are of host memory");
    return make(host_->subgroup(members, lane, name), queue_, lane);
  }
  static std::unique_ptr<Communicator> make(std::unique_ptr<Communicator> host, std::shared_ptr<Queue> queue, Lane lane) {
    if (host->size() == 1) return solo(Device::cuda);
    const Group group = host->twin();
    return std::make_unique<Nccl>(std::move(host), std::move(queue), lane, group);
  }

  void settle() override {
    if (pending_.empty()) return;
    wait_until([&] { return pending_.back().after.reached(); });
    for (const Span& span : pending_) add_exposed(span.purpose, double(span.after.ms_since(span.before)) * 1e-3);
    pending_.clear();
  }

 private:
  // The time in which the default stream stood still for one collective.
  struct Span {
    Purpose purpose;
    cuda::Event before{true}, after{true};
  };
  struct UnderWay {
    const char* call;
    cuda::Event done{false};
  };

  void ok(ncclResult_t status, const char* call) const {
    if (status == ncclSuccess || status == ncclInProgress) return;
    const char* more = ncclGetLastError(comm_);
    lost(std::string(call) + ": " + ncclGetErrorString(status) + (more && *more ? std::string(" (") + more + ")" : ""));
  }
  ncclResult_t state(const char* call) const {
    ncclResult_t state = ncclSuccess;
    ok(ncclCommGetAsyncError(comm_, &state), "ncclCommGetAsyncError");
    ok(state, call);
    return state;
  }
  void look() const override {
    for (const Nccl* group : queue_->groups) group->state("a collective");
  }
  // Calls of a non-blocking communicator go on after they return; the next may only come when they are done.
  void finish(ncclResult_t status, const char* call) const {
    ok(status, call);
    while (state(call) == ncclInProgress) std::this_thread::yield();
  }

  // Until the last collective of any group is on the stream.
  void finish_issuing() {
    if (Nccl* group = std::exchange(queue_->issuing, nullptr)) {
      auto& last = group->under_way_.back();
      group->finish(ncclInProgress, last.call);
      last.done.record(group->stream_);
    }
  }
  // Queues what issue() asks for after the work of the default stream, which goes on beside it.
  template <class Issue>
  void begin(const char* call, Issue&& issue) {
    finish_issuing();
    cuda::Event ready;
    ready.record(nullptr);
    cuda::wait(stream_, ready);
    ok(ncclGroupStart(), "ncclGroupStart");
    issue();
    ok(ncclGroupEnd(), call);
    under_way_.emplace_back(call);
    queue_->issuing = this;
  }
  // Later work of the default stream waits for what began first.
  void do_end(Purpose purpose) override {
    finish_issuing();
    Span& span = pending_.emplace_back(purpose);
    span.before.record(nullptr);
    cuda::wait(nullptr, under_way_.front().done);
    under_way_.pop_front();
    span.after.record(nullptr);
  }
  template <class Issue>
  void queued(Purpose purpose, const char* call, Issue&& issue) {
    begin(call, issue);
    do_end(purpose);
  }

  void do_begin_all_gather(std::span<const Gather> pieces) override {
    begin("all-gather", [&] {
      for (const auto& p : pieces)
        ok(ncclAllGather(p.send, p.receive, std::size_t(p.bytes), ncclInt8, comm_, stream_), "all-gather");
    });
  }
  void do_begin_reduce_scatter(std::span<const Scatter> pieces) override {
    begin("reduce-scatter", [&] {
      for (const auto& p : pieces)
        ok(ncclReduceScatter(p.send, p.receive, std::size_t(p.count), type_of(p.dtype), ncclSum, comm_, stream_),
           "reduce-scatter");
    });
  }
  void do_all_reduce(Tensor v, Reduction reduction) override {
    const ncclRedOp_t op = reduction == Reduction::sum ? ncclSum : reduction == Reduction::max ? ncclMax : ncclMin;
    queued(Purpose::reduce, "all-reduce", [&] {
      ok(ncclAllReduce(v.data, v.data, std::size_t(v.count()), type_of(v.dtype), op, comm_, stream_), "all-reduce");
    });
  }
  void do_begin_all_to_all(std::span<const Outgoing> send, std::span<const Incoming> receive) override {
    begin("all-to-all", [&] {
      for (int r = 0; r < size(); ++r) {
        const auto& out = send[std::size_t(r)];
        const auto& in = receive[std::size_t(r)];
        if (out.bytes > 0) ok(ncclSend(out.data, std::size_t(out.bytes), ncclInt8, r, comm_, stream_), "send");
        if (in.bytes > 0) ok(ncclRecv(in.data, std::size_t(in.bytes), ncclInt8, r, comm_, stream_), "receive");
      }
    });
  }
  void do_broadcast(void* data, std::int64_t bytes, int root) override {
    queued(Purpose::other, "broadcast",
           [&] { ok(ncclBroadcast(data, data, std::size_t(bytes), ncclInt8, root, comm_, stream_), "broadcast"); });
  }
  void do_barrier() override {
    settle();
    host_->barrier();
  }

  std::unique_ptr<Communicator> host_;
  std::shared_ptr<Queue> queue_;
  CUstream_st* stream_;
  ncclComm_t comm_ = nullptr;
  std::deque<UnderWay> under_way_;
  std::deque<Span> pending_;
};

}  // namespace

std::unique_ptr<Communicator> nccl_on_devices(std::unique_ptr<Communicator> host) {
  return Nccl::make(std::move(host), std::make_shared<Queue>(), Communicator::Lane::sharding);
}

}  // namespace moetrain::parallel
