// context.h -- what an op may use, passed in and never global; and the one way from an op's call to its backend.
#pragma once
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "memory/stack.h"
#include "memory/stream.h"

struct CUstream_st;  // cudaStream_t without the CUDA headers

namespace moetrain::ops {

// Seconds and calls by op name; given by who wants a table of where the time goes.
struct OpTimes {
  struct Entry {
    double seconds = 0;
    std::int64_t calls = 0;
  };
  std::map<std::string, Entry> by_op;
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
  OpTimes* times = nullptr;       // set while a step is profiled: ops on a device are then waited for one by one
  CUstream_st* stream = nullptr;  // of device work; null: the device's default stream
  cuda::Blas* blas = nullptr;     // set on CUDA; one user at a time
  Device plans_for = Device::cpu; // on Device::dry: whose backends' scratch is counted
  Device device() const { return scratch.memory().device(); }
  bool dry() const { return device() == Device::dry; }
};

[[noreturn]] void no_cuda(const char* op);
void wait_for(const Context& ctx);  // until the work queued on a device is done

// Checks the shapes, then runs the backend of the context's device under the op's name. On Device::dry nothing is computed, but
// scratch is counted: what args.take_scratch(ctx) takes where all backends of an op take the same, and where Args::dry_on_cpu says
// so what the CPU backend takes, which is then called, takes all its scratch first and returns before it reads or writes anything.
template <class Args, class OnCpu, class OnCuda>
void dispatch(Context& ctx, const char* name, const Args& args, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  args.check_shapes();
  if (ctx.dry()) {
    Scope counted(ctx.scratch);
    if constexpr (requires { args.take_scratch(ctx); }) args.take_scratch(ctx);
    if constexpr (requires { Args::dry_on_cpu; })
      if (ctx.plans_for == Device::cpu) on_cpu();
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  if (ctx.device() == Device::cpu) on_cpu();
  else if constexpr (kHasCuda) on_cuda();
  else no_cuda(name);
  if (ctx.times) {
    wait_for(ctx);
    auto& entry = ctx.times->by_op[name];
    entry.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    ++entry.calls;
  }
}

template <class Args, class OnCpu>
void dispatch(Context& ctx, const char* name, const Args& args, OnCpu&& on_cpu) {
  dispatch(ctx, name, args, on_cpu, [&] { no_cuda(name); });
}

}  // namespace moetrain::ops
