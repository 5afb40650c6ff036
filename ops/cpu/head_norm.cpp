// ops/cpu/head_norm.cpp -- the head norms, one row of H elements at a time.
#include "ops/head_norm.h"

#include <algorithm>

#include "ops/cpu/exp.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kWorthThreads = 1 << 14;
constexpr std::int64_t kGroup = 256;  // rows whose part of dw is summed by one thread; fixed, so that threads do not matter

template <class T>
void forward(const HeadL2Forward& a) {
  using R = cpu::acc_t<T>;
  const auto rows = a.r.count(), H = a.x.shape[2];
  const T* all_x = a.x.as<T>();
  T* all_y = a.y.as<T>();
  R* r = a.r.as<R>();
#pragma omp parallel for if (rows * H > kWorthThreads)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T* x = all_x + row * H;
    T* y = all_y + row * H;
    R sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < H; ++d) sum += R(x[d]) * R(x[d]);
    r[row] = 1 / std::sqrt(sum + R(a.eps));
    for (std::int64_t d = 0; d < H; ++d) y[d] = T(R(x[d]) * r[row]);
  }
}

template <class T>
void backward(const HeadL2Backward& a) {
  using R = cpu::acc_t<T>;
  const auto rows = a.r.count(), H = a.y.shape[2];
  const T *all_dy = a.dy.as<T>(), *all_y = a.y.as<T>();
  const R* r = a.r.as<R>();
  T* all_dx = a.dx.as<T>();
#pragma omp parallel for if (rows * H > kWorthThreads)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T *dy = all_dy + row * H, *y = all_y + row * H;
    T* dx = all_dx + row * H;
    R dot = 0;
#pragma omp simd reduction(+ : dot)
    for (std::int64_t d = 0; d < H; ++d) dot += R(dy[d]) * R(y[d]);
    for (std::int64_t d = 0; d < H; ++d) dx[d] = T(r[row] * (R(dy[d]) - R(y[d]) * dot));
  }
}

template <class T>
void forward(const GatedHeadNormForward& a) {
  using R = cpu::acc_t<T>;
  const auto rows = a.r.count(), H = a.o.shape[2];
  const T *all_o = a.o.as<T>(), *all_gate = a.gate.as<T>();
  const R* w = a.w.as<R>();
  T* all_y = a.y.as<T>();
  R* r = a.r.as<R>();
#pragma omp parallel for if (rows * H > kWorthThreads)
  for (std::int64_t row = 0; row < rows; ++row) {
    const T *o = all_o + row * H, *gate = all_gate + row * H;
    T* y = all_y + row * H;
    R sum = 0;
#pragma omp simd reduction(+ : sum)
    for (std::int64_t d = 0; d < H; ++d) sum += R(o[d]) * R(o[d]);
    const R root = 1 / std::sqrt(sum / R(H) + R(a.eps));
#pragma omp simd
    for (std::int64_t d = 0; d < H; ++d) y[d] = T(w[d] * (R(o[d]) * root) * cpu::sigmoid(R(gate[d])));
    r[row] = root;
  }
}

template <class T>
void backward(Context& ctx, const GatedHeadNormBackward& a) {
  using R = cpu::acc_t<T>;
  const auto rows = a.r.count(), H = a.o.shape[2], groups = (rows + kGroup - 1) / kGroup;
  const T *all_dy = a.dy.as<T>(), *all_o = a.o.as<T>(), *all_gate = a.gate.as<T>();
  const R *w = a.w.as<R>(), *r = a.r.as<R>();
  T *all_do = a.do_.as<T>(), *all_dgate = a.dgate.as<T>();
  R* sums = ctx.scratch.zeros(a.w.dtype, {groups, H}).template as<R>();
  if (ctx.dry()) return;
#pragma omp parallel for if (rows * H > kWorthThreads)
  for (std::int64_t group = 0; group < groups; ++group) {
    R* sum = sums + group * H;
    for (std::int64_t row = group * kGroup; row < std::min(rows, (group + 1) * kGroup); ++row) {
      const T *dy = all_dy + row * H, *o = all_o + row * H, *gate = all_gate + row * H;
      T *do_ = all_do + row * H, *dgate = all_dgate + row * H;
      const R root = r[row];
      R dot = 0;
#pragma omp simd reduction(+ : dot)
      for (std::int64_t d = 0; d < H; ++d) {
        const R oh = R(o[d]) * root, s = cpu::sigmoid(R(gate[d]));
        sum[d] += R(dy[d]) * oh * s;
        dot += R(dy[d]) * w[d] * s * oh;
      }
      const R mean = dot / R(H);
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d) {
        const R oh = R(o[d]) * root, s = cpu::sigmoid(R(gate[d])), pull = R(dy[d]) * w[d];
        dgate[d] = T(pull * oh * s * (1 - s));
        do_[d] = T(root * (pull * s - oh * mean));
      }
    }
  }
  if (!a.dw.present()) return;
  R* dw = a.dw.as<R>();
  for (std::int64_t group = 0; group < groups; ++group)
    for (std::int64_t d = 0; d < H; ++d) dw[d] += sums[group * H + d];
}

}  // namespace

void cpu::head_l2(Context&, const HeadL2Forward& a) {
  with_storage(a.x.dtype, [&](auto storage) { forward<decltype(storage)>(a); });
}
void cpu::head_l2(Context&, const HeadL2Backward& a) {
  with_storage(a.y.dtype, [&](auto storage) { backward<decltype(storage)>(a); });
}
void cpu::gated_head_norm(Context&, const GatedHeadNormForward& a) {
  with_storage(a.o.dtype, [&](auto storage) { forward<decltype(storage)>(a); });
}
void cpu::gated_head_norm(Context& ctx, const GatedHeadNormBackward& a) {
  Scope scope(ctx.scratch);
  with_storage(a.o.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops
