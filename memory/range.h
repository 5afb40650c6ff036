// range.h -- a named stretch of the host's work (NVTX): profilers of a GPU show what is queued in it under its name.
#pragma once
#include "memory/device.h"

namespace moetrain {
namespace cuda {
void push_range(const char* name);  // defined only in a build with CUDA; next to nothing where no profiler listens
void pop_range() noexcept;
}  // namespace cuda

class Range {
 public:
  explicit Range(const char* name) {
    if constexpr (kHasCuda) cuda::push_range(name);
  }
  ~Range() {
    if constexpr (kHasCuda) cuda::pop_range();
  }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace moetrain
