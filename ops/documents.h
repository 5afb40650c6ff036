// documents.h -- where documents begin in a micro-batch: the only source of boundaries for every op that mixes positions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <span>

#include "memory/tensor.h"

namespace moetrain::ops {

// Document n is positions [starts[n], starts[n+1]) of the T tokens of a micro-batch. The start of a sequence is the start of a
// document, so that one list separates both.
struct Documents {
  std::span<const std::int64_t> starts;  // (N+1) ascending, first 0, last T; on the host
  ConstTensor on_device = {};            // (N+1) i64, the same list on the device; needed by ops on CUDA
  std::int64_t count() const { return std::int64_t(starts.size()) - 1; }
  std::int64_t begin(std::int64_t n) const { return starts[std::size_t(n)]; }
  std::int64_t end(std::int64_t n) const { return starts[std::size_t(n) + 1]; }
  std::int64_t longest() const {
    std::int64_t most = 0;
    for (std::int64_t n = 0; n < count(); ++n) most = std::max(most, end(n) - begin(n));
    return most;
  }
  void check_cover(std::int64_t T) const {
    check(!starts.empty() && starts.front() == 0 && starts.back() == T, "documents: starts do not cover the tokens", {{"T", T}, {"starts", std::int64_t(starts.size())}});
    for (std::int64_t n = 0; n < count(); ++n) check(begin(n) <= end(n), "documents: starts do not ascend", {{"n", n}});
    check(!on_device.present() || (on_device.count() == std::int64_t(starts.size()) && on_device.dtype == DType::i64),
          "documents: the list on the device does not fit the one on the host", {{"starts", std::int64_t(starts.size())}, {"on device", on_device.count()}});
  }
};

}  // namespace moetrain::ops
