// context.cpp -- what a context borrows from the device, and the refusal of an op without a CUDA backend.
#include "ops/context.h"

#ifdef MOETRAIN_HAS_CUDA
#include "ops/cuda/blas.h"
#endif

namespace moetrain::ops {

const char* name_of(WorkKind kind) {
  constexpr const char* kNames[kWorkKinds] = {"linear",  "grouped_linear", "kda",       "attention", "sparse_attention",
                                              "indexer", "loss",           "optimizer", "rows"};
  return kNames[std::size_t(kind)];
}

void no_cuda(const char* op) { throw Error(std::string("op ") + op + " has no CUDA backend in this build"); }

Timing::Timing(const Context& ctx, const char* op) : ctx_(ctx), op_(op) {
  if (!ctx.times) return;
  start_ = std::chrono::steady_clock::now();
  if constexpr (kHasCuda)
    if (ctx.device() == Device::cuda) {
      using moetrain::cuda::Event;
      auto& queued = ctx.times->queued;
      queued_ = queued.size();
      queued.push_back({op, std::make_shared<Event>(/*timed=*/true), std::make_shared<Event>(/*timed=*/true)});
      queued.back().before->record(ctx.stream);
    }
}

void Timing::end() const {
  if (!ctx_.times) return;
  if constexpr (kHasCuda)
    if (ctx_.device() == Device::cuda) return ctx_.times->queued[queued_].after->record(ctx_.stream);
  auto& entry = ctx_.times->by_op[op_];
  entry.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  ++entry.calls;
}

void OpTimes::collect() {
  if constexpr (kHasCuda)
    for (const Queued& op : queued) {
      op.after->synchronize();
      auto& entry = by_op[op.op];
      entry.seconds += 1e-3 * double(op.after->ms_since(*op.before));
      ++entry.calls;
    }
  queued.clear();
}

#ifdef MOETRAIN_HAS_CUDA
void BlasDeleter::operator()(cuda::Blas* blas) const { delete blas; }
OwnedBlas make_blas(Memory& memory) { return OwnedBlas(memory.device() == Device::cuda ? new cuda::Blas(memory) : nullptr); }
#else
void BlasDeleter::operator()(cuda::Blas*) const {}
OwnedBlas make_blas(Memory&) { return nullptr; }
#endif

}  // namespace moetrain::ops
