// context.h -- what an op may use, passed in and never global; and the one way from an op's call to its backend.
#pragma once
#include <chrono>
#include <map>
#include <string>

#include "memory/stack.h"

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

struct Context {
  Stack& scratch;                 // an op gives back what it takes before it returns
  OpTimes* times = nullptr;       // set while a step is profiled
  CUstream_st* stream = nullptr;
  Device device() const { return scratch.memory().device(); }
};

[[noreturn]] void no_cuda(const char* op);

// Checks the shapes, then runs the backend of the context's device under the op's name. On Device::dry nothing runs, but what
// args.take_scratch(ctx) takes (an op has it where its temporaries matter to a plan, and its backend calls it too) is counted.
template <class Args, class OnCpu, class OnCuda>
void dispatch(Context& ctx, const char* name, const Args& args, OnCpu&& on_cpu, OnCuda&& on_cuda) {
  args.check_shapes();
  if (ctx.device() == Device::dry) {
    if constexpr (requires { args.take_scratch(ctx); }) {
      Scope counted(ctx.scratch);
      args.take_scratch(ctx);
    }
    return;
  }
  const auto start = std::chrono::steady_clock::now();
  if (ctx.device() == Device::cpu) on_cpu();
  else on_cuda();
  if (ctx.times) {
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
