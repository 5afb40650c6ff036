// grouped_linear.cpp -- one linear a group; many small groups run side by side, large ones one after another on all threads.
#include "ops/grouped_linear.h"

#include <initializer_list>

#include "ops/cpu/types.h"
#include "ops/linear.h"

namespace moetrain::ops {
namespace {

// Within a group side by side, only products that take no scratch may run: a stack has one user at a time.
bool side_by_side(std::initializer_list<ConstTensor> operands, std::int64_t groups, double multiply_adds) {
  constexpr double kLarge = 1 << 24;  // multiply-adds of a group that are worth all threads for themselves
  for (const ConstTensor& t : operands)
    if (t.present() && t.dtype != real_of(t.dtype)) return false;
  return groups > 1 && multiply_adds < kLarge * double(groups);
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

}  // namespace

void cpu::grouped_linear(Context& ctx, const GroupedLinearForward& a) {
  const double work = double(a.x.count()) * double(a.w.shape[1]);
  each_group(a.offsets, side_by_side({a.x, a.w, a.y}, a.w.shape[0], work),
             [&](std::int64_t g, std::int64_t begin, std::int64_t end) {
               cpu::linear(ctx, LinearForward{.x = a.x.rows(begin, end), .w = matrix(a.w, g), .y = a.y.rows(begin, end)});
             });
}

void cpu::grouped_linear(Context& ctx, const GroupedLinearBackward& a) {
  const ConstTensor in = a.dx.present() ? ConstTensor(a.dx) : a.x;
  if (!in.present()) return;
  const double work = double(a.dy.count()) * double(in.shape[1]);
  each_group(a.offsets, side_by_side({a.dy, a.x, a.w, a.dx}, std::int64_t(a.offsets.size()) - 1, work),
             [&](std::int64_t g, std::int64_t begin, std::int64_t end) {
               cpu::linear(ctx, LinearBackward{.dy = a.dy.rows(begin, end),
                                               .x = run(a.x, begin, end),
                                               .w = matrix(a.w, g),
                                               .dx = run(a.dx, begin, end),
                                               .dw = matrix(a.dw, g),
                                               .add_dx = a.add_dx});
             });
}

}  // namespace moetrain::ops
