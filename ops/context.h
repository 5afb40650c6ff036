// context.h -- what an op may use, passed in and never global; and the one way from an op's call to its backend.
#pragma once
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory/range.h"
#include "memory/stack.h"
#include "memory/stream.h"
#include "ops/work.h"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace moetrain::ops {

// Seconds and calls by op name; given by who wants a table of where the time goes. A device's own clock times what it is given, and
// its queue goes on; collect() waits for the last of it.
struct OpTimes {
  struct Entry {
    double seconds = 0;
    std::int64_t calls = 0;
  };
  std::map<std::string, Entry> by_op;
  void collect();

  struct Queued {
    const char* op;
    std::shared_ptr<moetrain::cuda::Event> before, after;
  };
  std::vector<Queued> queued;
};

namespace cuda {
class Blas;  // ops/cuda/blas.h
}
struct BlasDeleter {
  void operator()(cuda::Blas* blas) const;
};
using OwnedBlas = std::unique_ptr<cuda::Blas, BlasDeleter>;
OwnedBlas make_blas(Memory& memory);  // the matrix library of a CUDA device with its workspace; null on others

struct Context {
  Stack& scratch;                 // an op gives back what it takes before it returns
  OpTimes* times = nullptr;       // set while a step is profiled
  CUstream_st* stream = nullptr;  // of device work; null: the device's default stream
  cuda::Blas* blas = nullptr;     // set on CUDA; one user at a time
  Device plans_for = Device::cpu; // on Device::dry: whose backends' scratch is counted
  std::function<void(const char* op, const Work&)> on_work = {};  // on Device::dry: told what each op would do
  Device device() const { return scratch.memory().device(); }
  bool dry() const { return device() == Device::dry; }
};

[[noreturn]] void no_cuda(const char* op);

// Books the time of one op from its making to end(), where times are wanted.
class Timing {
 public:
  Timing(const Context& ctx, const char* op);
  void end() const;

 private:
  const Context& ctx_;
  const char* op_;
  std::size_t queued_ = 0;  // its place among those of a device
  std::chrono::steady_clock::time_point start_;
};

// Checks the shapes, then runs the backend of the context's device under the op's name. On Device::dry nothing is computed, but
// scratch is counted: what args.take_scratch(ctx) takes where all backends of an op take the same, and where Args::dry_on_cpu says
// so what the CPU backend takes, which is then called, takes all its scratch first and returns before it reads or writes anything.
// And who wants to know is told args.work(ctx), what the backend would do.
template <class Args, class OnCpu, class OnCuda>
void dispatch(Context& ctx, const char* name, const Args& args, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  args.check_shapes();
  if (ctx.dry()) {
    if (ctx.on_work) {
      if constexpr (requires { args.work(ctx); })
        ctx.on_work(name, args.work(ctx));
      else
        ctx.on_work(name, {});
    }
    Scope counted(ctx.scratch);
    if constexpr (requires { args.take_scratch(ctx); }) args.take_scratch(ctx);
    if constexpr (requires { Args::dry_on_cpu; })
      if (ctx.plans_for == Device::cpu) on_cpu();
    return;
  }
  const Range range(name);
  const Timing timing(ctx, name);
  if (ctx.device() == Device::cpu) on_cpu();
  else if constexpr (kHasCuda) on_cuda();
  else no_cuda(name);
  timing.end();
}

template <class Args, class OnCpu>
void dispatch(Context& ctx, const char* name, const Args& args, OnCpu&& on_cpu) {
  dispatch(ctx, name, args, on_cpu, [&] { no_cuda(name); });
}

}  // namespace moetrain::ops
