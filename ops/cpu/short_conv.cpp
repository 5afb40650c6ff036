// ops/cpu/short_conv.cpp -- the convolution as loops over tokens, for a few neighbouring channels at a time.
#include "ops/short_conv.h"

#include <omp.h>

#include <algorithm>

#include "ops/cpu/exp.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kLanes = 32;  // channels of one pass: what a thread owns, so that sums over tokens stay with it
constexpr std::int64_t kWorthThreads = 1 << 14;

// (P, 1, k) -> (k, P), so that the inner loops run over channels.
template <class R>
R* taps_first(Context& ctx, ConstTensor w) {
  const auto P = w.shape[0], k = w.shape[2];
  R* taps = ctx.scratch.take(w.dtype, {k, P}).template as<R>();
  if (ctx.dry()) return taps;
  const R* from = w.as<R>();
  for (std::int64_t p = 0; p < P; ++p)
    for (std::int64_t i = 0; i < k; ++i) taps[i * P + p] = from[p * k + i];
  return taps;
}

// The inputs of one document at the first of some channels: its tokens here, and those before where it entered a slice.
template <class T>
struct Inputs {
  const T *first, *history;  // of the token `begin`; of the oldest row, or null
  std::int64_t k, P;
  Inputs(ConstTensor u, ConstTensor history_rows, const Documents& documents, std::int64_t n, std::int64_t k_)
      : first(u.as<T>() + documents.begin(n) * u.shape[1]), history(nullptr), k(k_), P(u.shape[1]) {
    if (history_rows.present() && documents.enters(n) >= 0) history = history_rows.as<T>() + documents.enters(n) * (k - 1) * P;
  }
  // Of the token t after the first here, t >= -(k - 1); null: zeros.
  const T* row(std::int64_t t) const { return t >= 0 ? first + t * P : history ? history + (k - 1 + t) * P : nullptr; }
};

// c[lane] of token t of the document, for channels from p0 on.
template <class T, class R>
void convolve(const Inputs<T>& u, const R* taps, std::int64_t p0, std::int64_t lanes, std::int64_t t, R* c) {
  std::fill_n(c, lanes, R(0));
  for (std::int64_t i = 0; i < u.k; ++i) {
    const T* row = u.row(t - (u.k - 1) + i);
    if (!row) continue;
    row += p0;
    const R* tap = taps + i * u.P + p0;
#pragma omp simd
    for (std::int64_t p = 0; p < lanes; ++p) c[p] += tap[p] * R(row[p]);
  }
}

template <class T>
void forward(Context& ctx, const ShortConvForward& a) {
  using R = cpu::acc_t<T>;
  const auto P = a.u.shape[1], k = a.w.shape[2];
  T* y = a.y.as<T>();
  const R* taps = taps_first<R>(ctx, a.w);
  if (ctx.dry()) return;
  for (std::int64_t n = 0; n < a.documents.count(); ++n) {
    const auto begin = a.documents.begin(n), end = a.documents.end(n);
    const Inputs<T> u(a.u, a.history, a.documents, n, k);
#pragma omp parallel for if ((end - begin) * P > kWorthThreads)
    for (std::int64_t t = begin; t < end; ++t) {
      R c[kLanes];
      for (std::int64_t p0 = 0; p0 < P; p0 += kLanes) {
        const auto lanes = std::min(kLanes, P - p0);
        convolve(u, taps, p0, lanes, t - begin, c);
        T* out = y + t * P + p0;
#pragma omp simd
        for (std::int64_t p = 0; p < lanes; ++p) out[p] = T(c[p] * cpu::sigmoid(c[p]));
      }
    }
  }
}

template <class T>
void backward(Context& ctx, const ShortConvBackward& a) {
  using R = cpu::acc_t<T>;
  const auto P = a.u.shape[1], k = a.w.shape[2];
  const T* dy = a.dy.as<T>();
  T* du = a.du.as<T>();
  R* dw = a.dw.present() ? a.dw.as<R>() : nullptr;
  const R* taps = taps_first<R>(ctx, a.w);
  const std::int64_t threads = omp_get_max_threads(), padded = a.documents.longest() + k - 1;
  R* all_dc = ctx.scratch.take(real_of(a.u.dtype), {threads, padded, kLanes}).template as<R>();
  R* all_sums = ctx.scratch.take(real_of(a.u.dtype), {threads, k, kLanes}).template as<R>();
  if (ctx.dry()) return;
  fill(ctx.device(), a.dhistory.data, 0, a.dhistory.bytes());
#pragma omp parallel for if (a.u.count() > kWorthThreads)
  for (std::int64_t p0 = 0; p0 < P; p0 += kLanes) {
    const auto lanes = std::min(kLanes, P - p0);
    R* dc = all_dc + omp_get_thread_num() * padded * kLanes;
    R* sums = all_sums + omp_get_thread_num() * k * kLanes;
    std::fill_n(sums, k * kLanes, R(0));
    for (std::int64_t n = 0; n < a.documents.count(); ++n) {
      const auto begin = a.documents.begin(n), length = a.documents.end(n) - begin, enters = a.documents.enters(n);
      const Inputs<T> u(a.u, a.history, a.documents, n, k);
      std::fill_n(dc + length * kLanes, (k - 1) * kLanes, R(0));  // gradients of the tokens that the document does not have
      for (std::int64_t t = 0; t < length; ++t) {
        R* row = dc + t * kLanes;
        convolve(u, taps, p0, lanes, t, row);
        const T* dy_row = dy + (begin + t) * P + p0;
#pragma omp simd
        for (std::int64_t p = 0; p < lanes; ++p) {
          const R c = row[p], s = cpu::sigmoid(c);
          row[p] = R(dy_row[p]) * s * (1 + c * (1 - s));
        }
        for (std::int64_t i = 0; i < k; ++i) {
          const T* u_row = u.row(t - (k - 1) + i);
          if (!u_row) continue;
          u_row += p0;
#pragma omp simd
          for (std::int64_t p = 0; p < lanes; ++p) sums[i * kLanes + p] += row[p] * R(u_row[p]);
        }
      }
      const bool back = a.dhistory.present() && enters >= 0;
      for (std::int64_t t = back ? -(k - 1) : 0; t < length; ++t) {
        R sum[kLanes] = {};
        for (std::int64_t i = 0; i < std::min(k, t + k); ++i) {
          const R *row = dc + (t + k - 1 - i) * kLanes, *tap = taps + i * P + p0;
#pragma omp simd
          for (std::int64_t p = 0; p < lanes; ++p) sum[p] += tap[p] * row[p];
        }
        T* out = t >= 0 ? du + (begin + t) * P + p0 : a.dhistory.as<T>() + (enters * (k - 1) + k - 1 + t) * P + p0;
        for (std::int64_t p = 0; p < lanes; ++p) out[p] = T(sum[p]);
      }
    }
    if (dw)
      for (std::int64_t p = 0; p < lanes; ++p)
        for (std::int64_t i = 0; i < k; ++i) dw[(p0 + p) * k + i] += sums[i * kLanes + p];
  }
}

}  // namespace

void cpu::short_conv(Context& ctx, const ShortConvForward& a) {
  Scope scope(ctx.scratch);
  with_storage(a.u.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
}
void cpu::short_conv(Context& ctx, const ShortConvBackward& a) {
  Scope scope(ctx.scratch);
  with_storage(a.u.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops
