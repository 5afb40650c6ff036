// attn_res.h -- attention residual: softmax-weighted sum over depth of bank rows, scored by a learned query on their RMS-normalised
// values.
//
// For each token (index left out), sources v_n, n < Z, and c = gamma * query:
//   r_n = 1 / sqrt( mean_d v_n[d]^2 + eps ),  k_n = r_n v_n,  score_n = k_n . c
//   weights = softmax_n(score),  y = sum_n weights_n v_n
//
//   ds_n   = weights_n ( v_n . dy - y . dy )
//   dv_n  += weights_n dy + ds_n r_n ( c - k_n score_n / D )     adds: a bank row is read by many later mixes
//   dc     = sum over tokens and n of ds_n k_n;  dgamma += dc query,  dquery += dc gamma      add
//
// The norm that follows may be had in the same pass, of y as it is stored, with the numbers of ops/rmsnorm.
//
// Computed in f32 (f64 for f64), y rounded once. Scores are not divided by sqrt(D). dsources may not alias each other or a source.
// Repeatable, on the CPU for any number of threads.
#pragma once
#include <algorithm>
#include <optional>
#include <span>

#include "ops/rmsnorm.h"

namespace moetrain::ops {

struct AttnResForward {
  std::span<const ConstTensor> sources;  // Z of (T, D)
  ConstTensor gamma;                     // (D), any floating type
  ConstTensor query;                     // (1, D), any floating type
  double eps;
  Tensor y;                                 // (T, D)
  Tensor weights;                           // (T, Z) real, the softmax; kept for backward
  std::optional<RmsNormForward> norm = {};  // its x is y
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    Work w{.bytes = bytes_of(y, weights) + (norm ? bytes_of(norm->y, norm->r) : 0)};
    for (const ConstTensor& source : sources) w.bytes += bytes_of(source);
    return w;
  }
  void check_shapes() const {
    const auto Z = std::int64_t(sources.size());
    check(Z > 0, "attn_res: no sources");
    check(y.shape.rank() == 2 && is_floating(y.dtype), "attn_res: y is not a floating (T, D)",
          {{"rank", y.shape.rank()}, {"dtype", std::int64_t(y.dtype)}});
    const std::int64_t T = y.shape[0], D = y.shape[1];
    for (std::int64_t n = 0; n < Z; ++n)
      check(sources[std::size_t(n)].shape == y.shape && sources[std::size_t(n)].dtype == y.dtype,
            "attn_res: a source does not fit y",
            {{"source", n},
             {"T", T},
             {"D", D},
             {"count", sources[std::size_t(n)].count()},
             {"dtype", std::int64_t(sources[std::size_t(n)].dtype)}});
    check(gamma.shape == Shape{D} && query.shape == Shape{1, D}, "attn_res: gamma is not (D) or query not (1, D)",
          {{"D", D}, {"gamma", gamma.count()}, {"query", query.count()}});
    check(is_floating(gamma.dtype) && is_floating(query.dtype), "attn_res: gamma or query is not floating",
          {{"gamma", std::int64_t(gamma.dtype)}, {"query", std::int64_t(query.dtype)}});
    check(weights.shape == Shape{T, Z} && weights.dtype == real_of(y.dtype), "attn_res: weights are not (T, Z) real",
          {{"T", T}, {"Z", Z}, {"weights", weights.count()}, {"dtype", std::int64_t(weights.dtype)}});
    if (!norm) return;
    norm->check_shapes();
    check(norm->x.data == y.data && norm->x.shape == y.shape && norm->x.dtype == y.dtype, "attn_res: the norm is not of y",
          {{"T", T}, {"D", D}, {"rows", norm->x.shape[0]}, {"columns", norm->x.shape[1]}});
  }
};

struct AttnResBackward {
  ConstTensor dy;                        // (T, D)
  std::span<const ConstTensor> sources;  // Z of (T, D)
  ConstTensor gamma;                     // (D)
  ConstTensor query;                     // (1, D)
  double eps;
  ConstTensor weights;               // (T, Z) real
  std::span<const Tensor> dsources;  // Z of (T, D) real; add
  Tensor dgamma;                     // (D) real; adds; absent: frozen
  Tensor dquery;                     // (1, D) real; adds; absent: frozen
  bool trained() const { return dgamma.present() || dquery.present(); }
  // On CUDA dc is summed over parts of the tokens, then over the parts: as many as there are blocks at once on an H200.
  std::int64_t blocks_together() const { return dy.shape[1] > 4096 ? 2 : dy.shape[1] > 2048 ? 4 : 7; }  // on a multiprocessor
  std::int64_t parts() const { return std::min(dy.shape[0], 132 * blocks_together()); }
  void take_scratch(Context& ctx) const {  // on CUDA; the CPU backend counts its own
    if (ctx.plans_for == Device::cuda && trained()) ctx.scratch.take(DType::f32, {parts() + 1, dy.shape[1]});
  }
  Work work(const Context&) const {
    Work w{.backward = true, .bytes = bytes_of(dy, weights)};
    for (std::size_t n = 0; n < sources.size(); ++n) w.bytes += bytes_of(sources[n], dsources[n], dsources[n]);
    return w;
  }
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    const auto Z = std::int64_t(sources.size());
    check(Z > 0 && std::int64_t(dsources.size()) == Z, "attn_res: sources and dsources differ in number",
          {{"sources", Z}, {"dsources", std::int64_t(dsources.size())}});
    check(dy.shape.rank() == 2 && is_floating(dy.dtype), "attn_res: dy is not a floating (T, D)",
          {{"rank", dy.shape.rank()}, {"dtype", std::int64_t(dy.dtype)}});
    const std::int64_t T = dy.shape[0], D = dy.shape[1];
    const DType real = real_of(dy.dtype);
    for (std::size_t n = 0; n < sources.size(); ++n) {
      check(sources[n].shape == dy.shape && sources[n].dtype == dy.dtype, "attn_res: a source does not fit dy",
            {{"source", std::int64_t(n)},
             {"T", T},
             {"D", D},
             {"count", sources[n].count()},
             {"dtype", std::int64_t(sources[n].dtype)}});
      check(dsources[n].shape == dy.shape && dsources[n].dtype == real, "attn_res: the gradient of a source is not (T, D) real",
            {{"source", std::int64_t(n)},
             {"T", T},
             {"D", D},
             {"count", dsources[n].count()},
             {"dtype", std::int64_t(dsources[n].dtype)}});
    }
    check(gamma.shape == Shape{D} && query.shape == Shape{1, D}, "attn_res: gamma is not (D) or query not (1, D)",
          {{"D", D}, {"gamma", gamma.count()}, {"query", query.count()}});
    check(is_floating(gamma.dtype) && is_floating(query.dtype), "attn_res: gamma or query is not floating",
          {{"gamma", std::int64_t(gamma.dtype)}, {"query", std::int64_t(query.dtype)}});
    check(weights.shape == Shape{T, Z} && weights.dtype == real, "attn_res: weights are not (T, Z) real",
          {{"T", T}, {"Z", Z}, {"weights", weights.count()}, {"dtype", std::int64_t(weights.dtype)}});
    check((!dgamma.present() || (dgamma.shape == Shape{D} && dgamma.dtype == real)) &&
              (!dquery.present() || (dquery.shape == Shape{1, D} && dquery.dtype == real)),
          "attn_res: dgamma is not (D) real or dquery not (1, D) real",
          {{"D", D}, {"dgamma", dgamma.count()}, {"dquery", dquery.count()}});
  }
};

namespace cpu {
void attn_res(Context&, const AttnResForward&);
void attn_res(Context&, const AttnResBackward&);
}  // namespace cpu
namespace cuda {
void attn_res(Context&, const AttnResForward&);
void attn_res(Context&, const AttnResBackward&);
}  // namespace cuda

inline void attn_res(Context& ctx, const AttnResForward& a) {
  dispatch(
      ctx, "attn_res forward", a, [&] { cpu::attn_res(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::attn_res(ctx, a);
      });
}
inline void attn_res(Context& ctx, const AttnResBackward& a) {
  dispatch(
      ctx, "attn_res backward", a, [&] { cpu::attn_res(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::attn_res(ctx, a);
      });
}

}  // namespace moetrain::ops
