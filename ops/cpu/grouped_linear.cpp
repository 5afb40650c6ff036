// grouped_linear.cpp -- one linear a group; many small groups run side by side, large ones one after another on all threads.
#include "ops/grouped_linear.h"

#include <omp.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "ops/cpu/gemm.h"
#include "ops/cpu/linear_blocks.h"

namespace moetrain::ops {
namespace {

bool real_operands(std::initializer_list<ConstTensor> operands) {
  return std::all_of(operands.begin(), operands.end(),
                     [](const ConstTensor& t) { return !t.present() || t.dtype == real_of(t.dtype); });
}

// Within a group side by side, only products that take no scratch may run: a stack has one user at a time.
bool side_by_side(std::initializer_list<ConstTensor> operands, std::int64_t groups, double multiply_adds) {
  constexpr double kLarge = 1 << 24;  // multiply-adds of a group that are worth all threads for themselves
  return real_operands(operands) && groups > 1 && multiply_adds < kLarge * double(groups);
}

template <class Body>
void each_group(std::span<const std::int64_t> offsets, bool parallel, Body body) {
  const auto groups = std::int64_t(offsets.size()) - 1;
#pragma omp parallel for schedule(dynamic, 1) if (parallel)
  for (std::int64_t g = 0; g < groups; ++g)
    if (offsets[std::size_t(g)] < offsets[std::size_t(g) + 1]) body(g, offsets[std::size_t(g)], offsets[std::size_t(g) + 1]);
}

template <bool kConst>
BasicTensor<kConst> matrix(BasicTensor<kConst> w, std::int64_t g) {
  return w.present() ? w.rows(g, g + 1).reshape({w.shape[1], w.shape[2]}) : w;
}
template <bool kConst>
BasicTensor<kConst> run(BasicTensor<kConst> x, std::int64_t begin, std::int64_t end) {
  return x.present() ? x.rows(begin, end) : x;
}

// Every product of forward has kRows rows, the last of a group padded: BLAS picks its kernels by size, so only then is a row's
// result the same bits however many rows its expert got, and one document's outputs do not depend on another's.
constexpr std::int64_t kRows = 32;

struct Block {
  std::int64_t group, begin, end;
};

std::vector<Block> blocks_of_rows(std::span<const std::int64_t> offsets) {
  std::vector<Block> blocks;
  for (std::int64_t g = 0; g + 1 < std::int64_t(offsets.size()); ++g)
    for (std::int64_t r = offsets[std::size_t(g)], end = offsets[std::size_t(g) + 1]; r < end; r += kRows)
      blocks.push_back({g, r, std::min(end, r + kRows)});
  return blocks;
}

// Rows past a group's end hold an older block's values; their results are not read.
void forward_in_place(Context& ctx, const GroupedLinearForward& a) {
  // R rows may be as many blocks: scratch does not depend on how they are spread over groups.
  const auto threads = int(std::clamp<std::int64_t>(a.x.shape[0], 1, omp_get_max_threads()));
  Scope scope(ctx.scratch);
  const Tensor padded_x = ctx.scratch.zeros(a.x.dtype, {threads, kRows, a.x.shape[1]});
  const Tensor padded_y = ctx.scratch.take(a.y.dtype, {threads, kRows, a.y.shape[1]});
  if (ctx.dry()) return;
  const auto blocks = blocks_of_rows(a.offsets);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (blocks.size() > 1)
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    const Block& b = blocks[i];
    ConstTensor x = a.x.rows(b.begin, b.end);
    Tensor y = a.y.rows(b.begin, b.end);
    const std::int64_t thread = omp_get_thread_num();
    const bool whole = b.end - b.begin == kRows;
    if (!whole) {
      const Tensor block = matrix(padded_x, thread);
      std::memcpy(block.data, x.data, std::size_t(x.bytes()));
      x = block;
      y = matrix(padded_y, thread);
    }
    cpu::linear(ctx, LinearForward{.x = x, .w = matrix(a.w, b.group), .y = y});
    if (!whole) std::memcpy(a.y.rows(b.begin, b.end).data, y.data, std::size_t((b.end - b.begin) * y.shape[1] * size_of(y.dtype)));
  }
}

// Each block of outputs of an expert is converted once and meets all the expert's rows.
template <class R>
void forward_converted(Context& ctx, const GroupedLinearForward& a) {
  const std::int64_t I = a.x.shape[1], O = a.y.shape[1];
  const std::int64_t most = cpu::blocks_of<R>({a.x, a.w, a.y}, kRows, O, I).outputs;
  Scope scope(ctx.scratch);
  R* x = ctx.scratch.zeros(DTypeOf<R>::value, {kRows, I}).template as<R>();
  R* w_scratch = cpu::scratch_for<R>(ctx, a.w, most, I);
  R* y = ctx.scratch.take(DTypeOf<R>::value, {kRows, most}).template as<R>();
  if (ctx.dry()) return;
  each_group(a.offsets, /*parallel=*/false, [&](std::int64_t g, std::int64_t first, std::int64_t last) {
    for (std::int64_t o = 0; o < O; o += most) {
      const std::int64_t outputs = std::min(most, O - o);
      const auto w = cpu::reals<R>(matrix(a.w, g), {o, outputs, 0, I}, w_scratch);
      for (std::int64_t r = first; r < last; r += kRows) {
        const std::int64_t rows = std::min(kRows, last - r);
        if (const auto from = cpu::reals<R>(a.x, {r, rows, 0, I}, x); from.data != x) std::copy_n(from.data, rows * I, x);
        cpu::gemm<R>(false, true, kRows, outputs, I, 1, x, I, w.data, w.stride, 0, y, outputs);
        cpu::write_reals<R>(y, a.y, {r, rows, o, outputs}, /*add=*/false);
      }
    }
  });
}

}  // namespace

void cpu::grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  if (a.w2.present()) {
    auto one = a;
    one.w2 = {}, one.y2 = {};
    cpu::grouped_linear(ctx, one);
    one.w = a.w2, one.y = a.y2;
    return cpu::grouped_linear(ctx, one);
  }
  if (real_operands({a.x, a.w, a.y})) return forward_in_place(ctx, a);
  forward_converted<float>(ctx, a);  // f64 does not mix
}

void cpu::grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  const ConstTensor in = a.dx.present() ? ConstTensor(a.dx) : a.x;
  if (!in.present()) return;
  const double work = double(a.dy.count()) * double(in.shape[1]);
  const auto backward = [&](std::int64_t g, std::int64_t begin, std::int64_t end) {
    const auto part = [&](ConstTensor dy, ConstTensor w, Tensor dw, bool add_dx) {
      cpu::linear_part(ctx,
                       LinearBackward{.dy = dy.rows(begin, end),
                                      .x = run(a.x, begin, end),
                                      .w = matrix(w, g),
                                      .dx = run(a.dx, begin, end),
                                      .dw = matrix(dw, g),
                                      .add_dx = add_dx},
                       a.dy.shape[0]);
    };
    part(a.dy, a.w, a.dw, false);
    if (a.dy2.present()) part(a.dy2, a.w2, a.dw2, true);
  };
  if (ctx.dry()) {  // each group takes the same
    if (a.dy.shape[0] > 0 && a.offsets.size() > 1) backward(0, 0, 0);
    return;
  }
  each_group(a.offsets, side_by_side({a.dy, a.x, a.w, a.dx}, std::int64_t(a.offsets.size()) - 1, work), backward);
}

}  // namespace moetrain::ops
