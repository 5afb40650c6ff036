// permute.h -- tokens to rows sorted by expert and back, with a fixed order of every sum.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct SortSlots {
  ConstTensor experts;  // (T, K) i32
  Tensor slot_row;      // (T, K) i64, the row of slot (t, k) when slots are sorted by expert, stable in (t, k)
  Tensor counts;        // (E) i64, written
  void check_shapes() const;
};

struct SpreadRows {
  ConstTensor x;         // (T, D)
  ConstTensor slot_row;  // (T, K) i64
  Tensor rows;           // (T*K, D), rows[slot_row[t,k]] = x[t]
  void check_shapes() const;
};

struct CollectRows {
  ConstTensor rows;      // (T*K, D)
  ConstTensor slot_row;  // (T, K) i64
  ConstTensor weights;   // (T, K) real; absent: 1
  Tensor y;              // (T, D) = sum_k weights[t,k] rows[slot_row[t,k]], k ascending, summed in real
  void check_shapes() const;
};

struct CollectRowsBackward {
  ConstTensor dy;        // (T, D)
  ConstTensor rows;      // (T*K, D)
  ConstTensor slot_row;  // (T, K) i64
  ConstTensor weights;   // (T, K) real
  Tensor drows;          // (T*K, D), written
  Tensor dweights;       // (T, K) real = rows . dy, written
  void check_shapes() const;
};

struct MoveRows {
  ConstTensor x;   // (R, D)
  ConstTensor to;  // (R) i64, a permutation
  bool gather = false;  // false: y[to[r]] = x[r]; true: y[r] = x[to[r]]
  Tensor y;        // (R, D)
  void check_shapes() const;
};

namespace cpu {
void sort_slots(Context&, const SortSlots&);
void spread_rows(Context&, const SpreadRows&);
void collect_rows(Context&, const CollectRows&);
void collect_rows(Context&, const CollectRowsBackward&);
void move_rows(Context&, const MoveRows&);
}  // namespace cpu

inline void sort_slots(Context& ctx, const SortSlots& a) {
  dispatch(ctx, "sort_slots forward", a, [&] { cpu::sort_slots(ctx, a); });
}
inline void spread_rows(Context& ctx, const SpreadRows& a) {
  dispatch(ctx, "spread_rows forward", a, [&] { cpu::spread_rows(ctx, a); });
}
inline void collect_rows(Context& ctx, const CollectRows& a) {
  dispatch(ctx, "collect_rows forward", a, [&] { cpu::collect_rows(ctx, a); });
}
inline void collect_rows(Context& ctx, const CollectRowsBackward& a) {
  dispatch(ctx, "collect_rows backward", a, [&] { cpu::collect_rows(ctx, a); });
}
inline void move_rows(Context& ctx, const MoveRows& a) {
  dispatch(ctx, "move_rows forward", a, [&] { cpu::move_rows(ctx, a); });
}

}  // namespace moetrain::ops
