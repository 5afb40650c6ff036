// permute.h -- tokens to rows sorted by expert and back, with a fixed order of every sum.
//
// Slot (t, k) is the k-th expert of token t. Sorted by expert, and within an expert by (t, k), slots become rows: expert e owns the
// counts[e] rows after those of the experts below it. counts, and not a padded block, bound an expert; it may own none. A dropped
// slot (its expert is negative, ops/router.h) has no row: slot_row is -1, spread copies and collect adds nothing for it, its
// dweights are 0, and rows past those of all experts are neither read nor written.
//
//   spread:   rows[slot_row[t,k]] = x[t]
//   collect:  y[t] = (or +=) sum_k weights[t,k] rows[slot_row[t,k]]                                   k ascending
//   place:    to[begins[n] + i] = places[n] + i      for i in [0, begins[n+1] - begins[n]): runs of rows to where they belong
//   backward: drows[slot_row[t,k]] = weights[t,k] dy[t];  dweights[t,k] = dots[slot_row[t,k]] / weights[t,k], 0 of a weight of 0
// where dots[r] = sum_d drows[r,d] rows[r,d]. Where rows = W x that is also sum_f x[r,f] (W^T drows)[r,f], so that nobody needs
// rows in backward (ops/glu.h). A weight of 0 has no gradient that matters: its score is 0, and so is the slope of the score
// (ops/router.h). The gradient of spread is collect without weights (1 each); the gradient of collect without weights is spread.
//
// spread_rows and move_rows copy bits of any dtype. collect_rows sums in real (f32 for bf16, f64 for f64) and rounds once.
// Everything is written but collect's y with `add`. Nothing aliases. slot_row names a row at most
// once, to every row once, experts numbers below E (on the CPU their ranges are checked). Bitwise repeatable for any number of
// threads.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

// The parts of a check that the structs below share.
inline void check_slots(ConstTensor slot_row, std::int64_t T, std::int64_t R, At why) {
  const auto K = slot_row.shape[1];
  check(slot_row.shape.rank() == 2 && slot_row.shape[0] == T && slot_row.dtype == DType::i64 && R == T * K, why,
        {{"T", T}, {"slot rows", slot_row.shape[0]}, {"K", K}, {"rows", R}, {"dtype", int(slot_row.dtype)}});
}
inline void check_storage(ConstTensor t, At why) {
  check(t.shape.rank() == 2 && (t.dtype == DType::f32 || t.dtype == DType::f64 || t.dtype == DType::bf16), why,
        {{"rank", t.shape.rank()}, {"dtype", int(t.dtype)}});
}

struct SortSlots {
  ConstTensor experts;  // (T, K) i32
  Tensor slot_row;      // (T, K) i64, the row of slot (t, k) when slots are sorted by expert, stable in (t, k)
  Tensor counts;        // (E) i64, written
  Tensor offsets = {};  // (E+1) i64, written: the first row of each expert, and the number of rows; absent: not wanted
  Work work(const Context&) const { return {.bytes = bytes_of(experts, experts, slot_row, counts)}; }
  void check_shapes() const {
    check(!offsets.present() || (offsets.shape == Shape{counts.count() + 1} && offsets.dtype == DType::i64),
          "sort_slots: offsets are not (E + 1) i64", {{"E", counts.count()}, {"offsets", offsets.count()}});
    check(experts.shape.rank() == 2 && experts.dtype == DType::i32, "sort_slots: experts are not (T, K) i32",
          {{"rank", experts.shape.rank()}, {"dtype", int(experts.dtype)}});
    check(slot_row.shape == experts.shape && slot_row.dtype == DType::i64, "sort_slots: slot_row is not (T, K) i64",
          {{"T", experts.shape[0]}, {"K", experts.shape[1]}, {"rows", slot_row.shape[0]}, {"dtype", int(slot_row.dtype)}});
    check(counts.shape.rank() == 1 && counts.dtype == DType::i64, "sort_slots: counts are not (E) i64",
          {{"rank", counts.shape.rank()}, {"dtype", int(counts.dtype)}});
  }
};

struct SpreadRows {
  ConstTensor x;         // (T, D)
  ConstTensor slot_row;  // (T, K) i64
  Tensor rows;           // (T*K, D)
  Work work(const Context&) const { return {.bytes = bytes_of(x, slot_row, rows)}; }
  void check_shapes() const {
    check(x.present() && x.shape.rank() == 2, "spread_rows: x is not (T, D)", {{"rank", x.shape.rank()}});
    check_slots(slot_row, x.shape[0], rows.shape[0], "spread_rows: slot_row is not (T, K) i64 for T tokens and T*K rows");
    check(rows.shape == x.shape.with_dim0(rows.shape[0]) && rows.dtype == x.dtype, "spread_rows: rows are not (T*K, D) as x",
          {{"D", x.shape[1]}, {"width", rows.shape[1]}, {"dtype", int(rows.dtype)}});
  }
};

struct CollectRows {
  ConstTensor rows;      // (T*K, D)
  ConstTensor slot_row;  // (T, K) i64
  ConstTensor weights;   // (T, K) real; absent: 1
  Tensor y;              // (T, D)
  bool add = false;      // y += instead of y =, rounded once
  Work work(const Context&) const { return {.bytes = bytes_of(rows, slot_row, weights, y)}; }
  void check_shapes() const {
    check_storage(rows, "collect_rows: rows are not (T*K, D) of a storage type");
    check_slots(slot_row, y.shape[0], rows.shape[0], "collect_rows: slot_row is not (T, K) i64 for T tokens and T*K rows");
    check(y.shape == rows.shape.with_dim0(y.shape[0]) && y.dtype == rows.dtype, "collect_rows: y is not (T, D) as rows",
          {{"D", rows.shape[1]}, {"width", y.shape[1]}, {"dtype", int(y.dtype)}});
    check(!weights.present() || (weights.shape == slot_row.shape && weights.dtype == real_of(rows.dtype)),
          "collect_rows: weights are not (T, K) real",
          {{"T", slot_row.shape[0]}, {"K", slot_row.shape[1]}, {"rows", weights.shape[0]}, {"dtype", int(weights.dtype)}});
  }
};

struct CollectRowsBackward {
  ConstTensor dy;        // (T, D)
  ConstTensor slot_row;  // (T, K) i64
  ConstTensor weights;   // (T, K) real
  Tensor drows;          // (T*K, D), written
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dy, drows, slot_row, weights)}; }
  void check_shapes() const {
    check_storage(drows, "collect_rows backward: drows are not (T*K, D) of a storage type");
    check_slots(slot_row, dy.shape[0], drows.shape[0],
                "collect_rows backward: slot_row is not (T, K) i64 for T tokens and T*K rows");
    check(dy.shape == drows.shape.with_dim0(dy.shape[0]) && dy.dtype == drows.dtype,
          "collect_rows backward: dy is not (T, D) as drows",
          {{"D", drows.shape[1]}, {"width", dy.shape[1]}, {"dtype", int(dy.dtype)}});
    check(weights.shape == slot_row.shape && weights.dtype == real_of(drows.dtype),
          "collect_rows backward: weights are not (T, K) real",
          {{"T", slot_row.shape[0]}, {"K", slot_row.shape[1]}, {"rows", weights.shape[0]}, {"dtype", int(weights.dtype)}});
  }
};

struct WeightGradients {
  ConstTensor dots;      // (T*K) real
  ConstTensor slot_row;  // (T, K) i64
  ConstTensor weights;   // (T, K) real
  Tensor dweights;       // (T, K) real, written
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dots, slot_row, weights, dweights)}; }
  void check_shapes() const {
    check(dots.shape.rank() == 1 && weights.shape == slot_row.shape && weights.dtype == dots.dtype,
          "weight_gradients: dots and weights are not (T*K) and (T, K) of one type",
          {{"dots", dots.count()}, {"weights", weights.count()}, {"dtype", int(weights.dtype)}});
    check_slots(slot_row, weights.shape[0], dots.shape[0], "weight_gradients: slot_row is not (T, K) i64 for T*K dots");
    check(dweights.shape == slot_row.shape && dweights.dtype == weights.dtype &&
              (weights.dtype == DType::f32 || weights.dtype == DType::f64),
          "weight_gradients: dweights do not fit weights, or these are not real",
          {{"T", slot_row.shape[0]}, {"K", slot_row.shape[1]}, {"rows", dweights.shape[0]}, {"dtype", int(dweights.dtype)}});
  }
};

struct PlaceRuns {
  ConstTensor begins;  // (n+1) i64, ascending from 0 to R; empty runs are normal
  ConstTensor places;  // (n) i64
  Tensor to;           // (R) i64, written
  Work work(const Context&) const { return {.bytes = bytes_of(begins, places, to)}; }
  void check_shapes() const {
    check(begins.shape == Shape{places.count() + 1} && places.shape.rank() == 1 && to.shape.rank() == 1,
          "place_runs: begins are not one more than places, or to is not (R)",
          {{"begins", begins.count()}, {"places", places.count()}, {"rank", to.shape.rank()}});
    check(begins.dtype == DType::i64 && places.dtype == DType::i64 && to.dtype == DType::i64, "place_runs: not i64",
          {{"begins", int(begins.dtype)}, {"places", int(places.dtype)}, {"to", int(to.dtype)}});
  }
};

struct MoveRows {
  ConstTensor x;        // (R, D)
  ConstTensor to;       // (R) i64, a permutation
  bool gather = false;  // false: y[to[r]] = x[r]; true: y[r] = x[to[r]]
  Tensor y;             // (R, D)
  Work work(const Context&) const { return {.bytes = bytes_of(x, to, y)}; }
  void check_shapes() const {
    check(x.present() && x.shape.rank() == 2, "move_rows: x is not (R, D)", {{"rank", x.shape.rank()}});
    check(to.shape == Shape{x.shape[0]} && to.dtype == DType::i64, "move_rows: to is not (R) i64",
          {{"R", x.shape[0]}, {"to", to.count()}, {"dtype", int(to.dtype)}});
    check(y.shape == x.shape && y.dtype == x.dtype, "move_rows: y does not fit x",
          {{"R", x.shape[0]}, {"D", x.shape[1]}, {"rows", y.shape[0]}, {"width", y.shape[1]}, {"dtype", int(y.dtype)}});
  }
};

namespace cpu {
void sort_slots(Context&, const SortSlots&);
void spread_rows(Context&, const SpreadRows&);
void collect_rows(Context&, const CollectRows&);
void collect_rows(Context&, const CollectRowsBackward&);
void weight_gradients(Context&, const WeightGradients&);
void place_runs(Context&, const PlaceRuns&);
void move_rows(Context&, const MoveRows&);
}  // namespace cpu
namespace cuda {
void sort_slots(Context&, const SortSlots&);
void spread_rows(Context&, const SpreadRows&);
void collect_rows(Context&, const CollectRows&);
void collect_rows(Context&, const CollectRowsBackward&);
void weight_gradients(Context&, const WeightGradients&);
void place_runs(Context&, const PlaceRuns&);
void move_rows(Context&, const MoveRows&);
}  // namespace cuda

inline void sort_slots(Context& ctx, const SortSlots& a) {
  dispatch(
      ctx, "sort_slots forward", a, [&] { cpu::sort_slots(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sort_slots(ctx, a);
      });
}
inline void spread_rows(Context& ctx, const SpreadRows& a) {
  dispatch(
      ctx, "spread_rows forward", a, [&] { cpu::spread_rows(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::spread_rows(ctx, a);
      });
}
inline void collect_rows(Context& ctx, const CollectRows& a) {
  dispatch(
      ctx, "collect_rows forward", a, [&] { cpu::collect_rows(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::collect_rows(ctx, a);
      });
}
inline void collect_rows(Context& ctx, const CollectRowsBackward& a) {
  dispatch(
      ctx, "collect_rows backward", a, [&] { cpu::collect_rows(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::collect_rows(ctx, a);
      });
}
inline void weight_gradients(Context& ctx, const WeightGradients& a) {
  dispatch(
      ctx, "weight_gradients forward", a, [&] { cpu::weight_gradients(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::weight_gradients(ctx, a);
      });
}
inline void place_runs(Context& ctx, const PlaceRuns& a) {
  dispatch(
      ctx, "place_runs forward", a, [&] { cpu::place_runs(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::place_runs(ctx, a);
      });
}
inline void move_rows(Context& ctx, const MoveRows& a) {
  dispatch(
      ctx, "move_rows forward", a, [&] { cpu::move_rows(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::move_rows(ctx, a);
      });
}

}  // namespace moetrain::ops
