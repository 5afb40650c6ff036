// work.h -- what an operator costs, as far as its arguments tell: arithmetic by kind, and bytes read and written.
#pragma once
#include <cstdint>

#include "memory/tensor.h"

namespace moetrain::ops {

// Operators that reach alike shares of what a machine can do. rows: those that bytes alone bound.
enum class WorkKind : std::uint8_t { linear, grouped_linear, kda, attention, sparse_attention, indexer, loss, optimizer, rows };
inline constexpr int kWorkKinds = 9;
const char* name_of(WorkKind kind);

struct Work {
  WorkKind kind = WorkKind::rows;
  bool backward = false;
  DType dtype = DType::none;         // of the operands
  double flops = 0;                  // a product and its sum are two; with what tiles multiply beside the rows that there are
  double bytes = 0;                  // each operand once, a sum that is added to twice
  double turns = 0;                  // stretches of rows that wait for the one before, however wide the machine
  Work& operator+=(const Work& o) {  // the same kind's
    flops += o.flops, bytes += o.bytes, turns += o.turns;
    return *this;
  }
};

template <class... Tensors>
double bytes_of(const Tensors&... tensors) {
  return double((std::int64_t(0) + ... + tensors.bytes()));
}

// n rounded up to whole tiles.
constexpr std::int64_t in_tiles(std::int64_t n, std::int64_t tile) { return (n + tile - 1) / tile * tile; }

}  // namespace moetrain::ops
