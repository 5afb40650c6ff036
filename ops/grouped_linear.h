// grouped_linear.h -- one matrix a group of rows: y[r] = x[r] W[group of r]^T (the experts).
//
// Group g is rows [offsets[g], offsets[g+1]); for each of its rows r
//   y[r,o]     = sum_i x[r,i] w[g,o,i]
//   dx[r,i]    = sum_o dy[r,o] w[g,o,i]
//   dw[g,o,i] += sum_r dy[r,o] x[r,i]               adds; a group without rows adds nothing; or dw = , with write_dw
//
// A second matrix a group on the same x (gate and up) goes in the same call: y2, w2, dy2, dw2 as y, w, dy, dw, and
//   dx[r,i]    = sum_o dy[r,o] w[g,o,i] + dy2[r,o] w2[g,o,i]
//
// Types, precision and repeatability as in ops/linear.h, but that a bf16 dx of two matrices is rounded after each where no kernel of
// tensor cores takes it (widths that are no multiples of 8, the CPU). Nothing may alias.
#pragma once
#include <span>

#include "ops/context.h"

namespace moetrain::ops {

// Do the offsets cut R rows into `groups` runs? Those on a device are not looked into.
inline void check_group_offsets(std::span<const std::int64_t> offsets, ConstTensor device_offsets, std::int64_t groups,
                                std::int64_t R) {
  if (device_offsets.present()) {
    check(device_offsets.shape == Shape{groups + 1} && device_offsets.dtype == DType::i64,
          "grouped_linear: offsets on the device are not (groups + 1) i64",
          {{"offsets", device_offsets.count()}, {"groups", groups}});
    return;
  }
  check(std::int64_t(offsets.size()) == groups + 1, "grouped_linear: offsets are not one more than the groups",
        {{"offsets", std::int64_t(offsets.size())}, {"groups", groups}});
  check(offsets.front() == 0 && offsets.back() == R, "grouped_linear: offsets do not cover the rows",
        {{"first", offsets.front()}, {"last", offsets.back()}, {"R", R}});
  for (std::size_t g = 0; g + 1 < offsets.size(); ++g)
    check(offsets[g] <= offsets[g + 1], "grouped_linear: offsets do not ascend", {{"group", std::int64_t(g)}});
}

// Are both absent, or of one shape and type?
inline bool alike(const ConstTensor& a, const ConstTensor& b) {
  return a.present() == b.present() && (!a.present() || (a.shape == b.shape && a.dtype == b.dtype));
}

// Rows of all groups, each group's rounded up to whole tiles on CUDA; offsets that only a device knows leave it at the rows.
inline double rows_in_tiles(const Context& ctx, std::span<const std::int64_t> offsets, std::int64_t R, std::int64_t tile) {
  if (ctx.plans_for != Device::cuda || offsets.empty()) return double(R);
  std::int64_t rows = 0;
  for (std::size_t g = 0; g + 1 < offsets.size(); ++g) rows += in_tiles(offsets[g + 1] - offsets[g], tile);
  return double(rows);
}
// Of tiles on CUDA: a width of weights, and a group's rows as columns or as summands (ops/cuda/grouped_linear.cu holds them to it).
inline constexpr std::int64_t kWidthOfTile = 256, kColumnsOfTile = 32, kSummandsOfTile = 64;
// A width of weights in the tiles of a pair of blocks (ops/cuda/pair_tiles.cuh), or of what takes no tensor cores.
inline double width_in_tiles(const Context& ctx, DType dtype, std::int64_t width) {
  return double(ctx.plans_for != Device::cuda ? width : in_tiles(width, dtype == DType::bf16 ? kWidthOfTile : 64));
}

struct GroupedLinearForward {
  ConstTensor x;                            // (R, I), rows of group g are [offsets[g], offsets[g+1])
  ConstTensor w;                            // (e, O, I)
  Tensor y;                                 // (R, O)
  ConstTensor w2 = {};                      // as w, or absent
  Tensor y2 = {};                           // as y where w2 is given
  std::span<const std::int64_t> offsets;    // (e+1) on the host; empty groups are normal
  ConstTensor device_offsets = {};          // (e+1) i64 on the device, for CUDA, which then needs none on the host
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context& ctx) const {
    const double matrices = w2.present() ? 2 : 1;
    return {.kind = WorkKind::grouped_linear,
            .dtype = x.dtype,
            .flops = 2 * matrices * rows_in_tiles(ctx, offsets, x.shape[0], kColumnsOfTile) *
                     width_in_tiles(ctx, x.dtype, w.shape[1]) * double(w.shape[2]),
            .bytes = bytes_of(x, w, y, w2, y2)};
  }
  void check_shapes() const {
    check(x.shape.rank() == 2 && w.shape.rank() == 3 && x.shape[1] == w.shape[2], "grouped_linear: x is not (R, I) of w (e, O, I)",
          {{"I of x", x.shape[1]}, {"I of w", w.shape[2]}});
    check(y.shape == Shape{x.shape[0], w.shape[1]}, "grouped_linear: y is not (R, O)",
          {{"R", x.shape[0]}, {"O", w.shape[1]}, {"rows", y.shape[0]}, {"columns", y.shape[1]}});
    const DType real = real_of(x.dtype);
    check(is_floating(x.dtype) && is_floating(w.dtype) && is_floating(y.dtype) && real_of(w.dtype) == real &&
              real_of(y.dtype) == real,
          "grouped_linear: types are not floating, or mix f64 with others",
          {{"x", std::int64_t(x.dtype)}, {"w", std::int64_t(w.dtype)}, {"y", std::int64_t(y.dtype)}});
    check(w2.present() == y2.present() && (!w2.present() || (alike(w2, w) && alike(y2, y))),
          "grouped_linear: the second w and y are not like the first");
    check_group_offsets(offsets, device_offsets, w.shape[0], x.shape[0]);
  }
};

struct GroupedLinearBackward {
  ConstTensor dy;                            // (R, O)
  ConstTensor x;                             // (R, I); absent when dw is
  ConstTensor w;                             // (e, O, I); absent when dx is
  Tensor dx;                                 // (R, I); absent: not wanted
  Tensor dw;                                 // (e, O, I) real; adds; absent: frozen
  ConstTensor dy2 = {};                      // as dy, or absent
  ConstTensor w2 = {};                       // as w where dy2 is given
  Tensor dw2 = {};                           // as dw where dy2 is given
  std::span<const std::int64_t> offsets;     // (e+1)
  ConstTensor device_offsets = {};           // (e+1) i64, as above
  bool write_dw = false;                     // as in ops/linear.h
  static constexpr bool dry_on_cpu = true;   // ops/context.h
  void clear_dw(const Context& ctx) const {  // for backends that only add
    if (ctx.dry() || !write_dw) return;
    for (const Tensor& t : {dw, dw2})
      if (t.present()) fill(ctx.device(), t.data, 0, t.bytes());
  }
  Work work(const Context& ctx) const {
    const double O = double(dy.shape[1]), matrices = dy2.present() ? 2 : 1;
    Work both{.kind = WorkKind::grouped_linear, .backward = true, .dtype = dy.dtype};
    if (dx.present()) {
      both.flops +=
          2 * matrices * rows_in_tiles(ctx, offsets, dy.shape[0], kColumnsOfTile) * width_in_tiles(ctx, dy.dtype, w.shape[2]) * O;
      both.bytes += bytes_of(dy, dy2, w, w2, dx);
    }
    if (dw.present()) {
      both.flops += 2 * matrices * rows_in_tiles(ctx, offsets, dy.shape[0], kSummandsOfTile) *
                    width_in_tiles(ctx, dy.dtype, dw.shape[1]) * width_in_tiles(ctx, dy.dtype, dw.shape[2]);
      both.bytes += bytes_of(dy, dy2, x) + (write_dw ? 1 : 2) * bytes_of(dw, dw2);
    }
    return both;
  }
  void check_shapes() const {
    check(dy.shape.rank() == 2 && is_floating(dy.dtype), "grouped_linear: dy is not a floating (R, O)",
          {{"rank", dy.shape.rank()}, {"dtype", std::int64_t(dy.dtype)}});
    const std::int64_t R = dy.shape[0], O = dy.shape[1];
    const DType real = real_of(dy.dtype);
    check(dy2.present() ? alike(dy2, dy) && (!dx.present() || alike(w2, w)) && alike(dw2, dw) : !w2.present() && !dw2.present(),
          "grouped_linear: the second dy, w and dw are not like the first");
    if (dx.present()) {
      check(w.shape.rank() == 3 && w.shape[1] == O, "grouped_linear: w is not (e, O, I) of dy (R, O)",
            {{"O", O}, {"O of w", w.shape[1]}});
      check(dx.shape == Shape{R, w.shape[2]}, "grouped_linear: dx is not (R, I)",
            {{"R", R}, {"I", w.shape[2]}, {"rows", dx.shape[0]}, {"columns", dx.shape[1]}});
      check(is_floating(w.dtype) && is_floating(dx.dtype) && real_of(w.dtype) == real && real_of(dx.dtype) == real,
            "grouped_linear: types of w or dx are not floating, or mix f64 with others",
            {{"dy", std::int64_t(dy.dtype)}, {"w", std::int64_t(w.dtype)}, {"dx", std::int64_t(dx.dtype)}});
      check_group_offsets(offsets, device_offsets, w.shape[0], R);
    }
    if (dw.present()) {
      check(x.shape.rank() == 2 && x.shape[0] == R, "grouped_linear: x is not (R, I) of dy (R, O)",
            {{"R", R}, {"rows of x", x.shape[0]}});
      check(dw.shape.rank() == 3 && dw.shape[1] == O && dw.shape[2] == x.shape[1], "grouped_linear: dw is not (e, O, I)",
            {{"O", O}, {"I", x.shape[1]}, {"O of dw", dw.shape[1]}, {"I of dw", dw.shape[2]}});
      check(is_floating(x.dtype) && real_of(x.dtype) == real && dw.dtype == real,
            "grouped_linear: x mixes f64 with others, or dw is not real",
            {{"dy", std::int64_t(dy.dtype)}, {"x", std::int64_t(x.dtype)}, {"dw", std::int64_t(dw.dtype)}});
      check_group_offsets(offsets, device_offsets, dw.shape[0], R);
    }
  }
};

namespace cpu {
void grouped_linear(Context&, const GroupedLinearForward&);
void grouped_linear(Context&, const GroupedLinearBackward&);
}  // namespace cpu
namespace cuda {
void grouped_linear(Context&, const GroupedLinearForward&);
void grouped_linear(Context&, const GroupedLinearBackward&);
}  // namespace cuda

inline void grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  dispatch(
      ctx, "grouped_linear forward", a, [&] { cpu::grouped_linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::grouped_linear(ctx, a);
      });
}
inline void grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  dispatch(
      ctx, "grouped_linear backward", a, [&] { a.clear_dw(ctx), cpu::grouped_linear(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::grouped_linear(ctx, a);
      });
}

}  // namespace moetrain::ops
