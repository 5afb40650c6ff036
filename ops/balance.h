// balance.h -- load balance of experts: exact counts, quantile histograms, bias updates, auxiliary losses and the z-loss.
//
// expert_count        counts[e] += number of slots (t, k) with experts[t,k] = e
// quantile_histogram  low = min(bias) - 1, high = max(bias) + 1, width = (high - low) / bins
//                     needed[t,e] = cutoff[t] - s[t,e], s = sigmoid(logits): with this bias expert e would just have been chosen;
//                     histogram[e, floor((needed - low) / width)] += 1, clamped into the end bins (NaN into the first)
// quantile_update     m = sum of a row of the histogram (tokens); rank = K m / E
//                     bias[e] = low + width (n + (rank - before) / count), n the first bin whose cumulated count reaches rank,
//                     before the tokens in bins below it, count its own; then bias -= mean(bias). No tokens: bias stays.
// sign_update         bias[e] += rate sign(mean(counts) - counts[e])
// auxiliary_loss      P[t,e] = s[t,e] / (sum_e s[t,e] + 1e-20); for a group of n tokens f[e] = its slots of e / (n K), or
//                     counts[e] / sum(counts) when given; loss += scale * sum_groups E sum_e f[e] sum_t P[t,e] / m, m = n or the
//                     group's tokens on all ranks when given; dP[t,e] = scale E f[e] / m, f held constant;
//                     dlogits[t,e] += (dP[t,e] - sum_j dP[t,j] P[t,j]) P[t,e] (1 - s[t,e]).
//                     A group of no tokens, and a count of nothing, add nothing.
// z_loss              z[t] = log sum_e exp(logits[t,e]); loss += scale sum_t z[t]^2;
//                     dlogits[t,e] += 2 scale z[t] exp(logits[t,e] - z[t])
//
// Tensors called real are f32 or f64. Bins, quantiles and the sums over tokens are f64; rows are computed in the type of logits; a
// score is computed as ops/router does. Nothing aliases. Counts are integers and so exact however tokens are cut into
// micro-batches; losses are summed in the order of tokens (on CUDA in another fixed order): bitwise repeatable for any number of
// threads. Experts that have seen different numbers of tokens are an error of quantile_update (on CUDA every bias becomes NaN).
#pragma once
#include <algorithm>
#include <span>

#include "ops/context.h"

namespace moetrain::ops {

// The checks that the structs below share.
inline void check_router_logits(ConstTensor logits, At why) {
  check(logits.shape.rank() == 2 && logits.shape[1] >= 1 && (logits.dtype == DType::f32 || logits.dtype == DType::f64), why,
        {{"rank", logits.shape.rank()}, {"E", logits.shape[1]}, {"dtype", int(logits.dtype)}});
}
inline void check_loss_and_slope(ConstTensor logits, ConstTensor loss, ConstTensor dlogits, At why) {
  check(loss.shape == Shape{1} && loss.dtype == logits.dtype &&
            (!dlogits.present() || (dlogits.shape == logits.shape && dlogits.dtype == logits.dtype)),
        why, {{"T", logits.shape[0]}, {"E", logits.shape[1]}, {"loss", loss.count()}, {"dlogits", dlogits.count()}});
}

struct ExpertCount {
  ConstTensor experts;  // (T, K) i32
  Tensor counts;        // (E) i64; adds
  Work work(const Context&) const { return {.bytes = bytes_of(experts, counts)}; }
  void check_shapes() const {
    check(experts.shape.rank() == 2 && experts.dtype == DType::i32, "expert_count: experts are not (T, K) i32",
          {{"rank", experts.shape.rank()}, {"dtype", int(experts.dtype)}});
    check(counts.shape.rank() == 1 && counts.dtype == DType::i64, "expert_count: counts are not (E) i64",
          {{"rank", counts.shape.rank()}, {"dtype", int(counts.dtype)}});
  }
};

struct QuantileHistogram {
  ConstTensor logits;  // (T, E) real
  ConstTensor cutoff;  // (T) real, of ops/router
  ConstTensor bias;    // (E) real, the bias the cutoff was computed with
  Tensor histogram;    // (E, bins) i64; adds one a token and expert
  Work work(const Context&) const { return {.bytes = bytes_of(logits, cutoff, histogram)}; }
  void check_shapes() const {
    check_router_logits(logits, "quantile_histogram: logits are not (T, E) real");
    const auto T = logits.shape[0], E = logits.shape[1];
    check(cutoff.shape == Shape{T} && cutoff.dtype == logits.dtype, "quantile_histogram: cutoff is not (T) real",
          {{"T", T}, {"cutoff", cutoff.count()}, {"dtype", int(cutoff.dtype)}});
    check(bias.shape == Shape{E} && bias.dtype == logits.dtype, "quantile_histogram: bias is not (E) real",
          {{"E", E}, {"bias", bias.count()}, {"dtype", int(bias.dtype)}});
    check(histogram.shape.rank() == 2 && histogram.shape[0] == E && histogram.shape[1] >= 1 && histogram.dtype == DType::i64,
          "quantile_histogram: histogram is not (E, bins) i64",
          {{"E", E}, {"rows", histogram.shape[0]}, {"bins", histogram.shape[1]}, {"dtype", int(histogram.dtype)}});
  }
};

struct QuantileUpdate {
  ConstTensor histogram;           // (E, bins) i64, summed over the global batch
  std::int64_t experts_per_token;  // K
  Tensor bias;                     // (E) real; in: the bias of the histogram, out: the next one
  Work work(const Context&) const { return {.bytes = bytes_of(histogram, bias)}; }
  void check_shapes() const {
    const auto E = histogram.shape[0];
    check(histogram.shape.rank() == 2 && E >= 1 && histogram.shape[1] >= 1 && histogram.dtype == DType::i64,
          "quantile_update: histogram is not (E, bins) i64",
          {{"E", E}, {"bins", histogram.shape[1]}, {"dtype", int(histogram.dtype)}});
    check(experts_per_token >= 1 && experts_per_token <= E, "quantile_update: experts_per_token is not in 1 .. E",
          {{"K", experts_per_token}, {"E", E}});
    check(bias.shape == Shape{E} && (bias.dtype == DType::f32 || bias.dtype == DType::f64), "quantile_update: bias is not (E) real",
          {{"E", E}, {"bias", bias.count()}, {"dtype", int(bias.dtype)}});
  }
};

struct SignUpdate {
  ConstTensor counts;  // (E) i64 of the global batch
  double rate;
  Tensor bias;  // (E) real; adds
  Work work(const Context&) const { return {.bytes = bytes_of(counts, bias)}; }
  void check_shapes() const {
    check(counts.shape.rank() == 1 && counts.dtype == DType::i64, "sign_update: counts are not (E) i64",
          {{"rank", counts.shape.rank()}, {"dtype", int(counts.dtype)}});
    check(bias.shape == counts.shape && (bias.dtype == DType::f32 || bias.dtype == DType::f64), "sign_update: bias is not (E) real",
          {{"E", counts.shape[0]}, {"bias", bias.count()}, {"dtype", int(bias.dtype)}});
  }
};

struct AuxiliaryLoss {
  ConstTensor logits;                    // (T, E) real
  ConstTensor experts;                   // (T, K) i32
  std::span<const std::int64_t> groups;  // offsets of the token groups over which frequency and mean probability are taken (one
                                         // group: Switch; sequences: sequence-wise), first 0, last T; on the host
  ConstTensor counts;                    // i64 that replace the groups' own counts: (E) for all (global batch), or (groups, E);
                                         // absent: own
  double scale;    // coefficient times this group's share of the whole (1 / groups, or tokens here / tokens in all)
  Tensor loss;     // (1) real; adds the scaled loss
  Tensor dlogits;  // (T, E) real; adds the scaled gradient; absent: loss only
  std::span<const std::int64_t> tokens = {};  // (groups), of each on all ranks; empty: those here
  Work work(const Context&) const { return {.bytes = bytes_of(logits, experts, dlogits, dlogits)}; }
  void check_shapes() const {
    check_router_logits(logits, "auxiliary_loss: logits are not (T, E) real");
    const auto T = logits.shape[0], E = logits.shape[1];
    check(experts.shape.rank() == 2 && experts.shape[0] == T && experts.dtype == DType::i32,
          "auxiliary_loss: experts are not (T, K) i32", {{"T", T}, {"rows", experts.shape[0]}, {"dtype", int(experts.dtype)}});
    check(!groups.empty() && groups.front() == 0 && groups.back() == T, "auxiliary_loss: groups do not cover the tokens",
          {{"T", T}, {"offsets", std::int64_t(groups.size())}});
    for (std::size_t g = 1; g < groups.size(); ++g)
      check(groups[g - 1] <= groups[g], "auxiliary_loss: groups do not ascend",
            {{"group", std::int64_t(g)}, {"offset", groups[g]}});
    const auto given = std::int64_t(groups.size()) - 1;
    check(!counts.present() || ((counts.shape == Shape{E} || counts.shape == Shape{given, E}) && counts.dtype == DType::i64),
          "auxiliary_loss: counts are not (E) or (groups, E) i64", {{"E", E}, {"counts", counts.count()}, {"dtype", int(counts.dtype)}});
    check(tokens.empty() || std::int64_t(tokens.size()) == given, "auxiliary_loss: not a number of tokens a group",
          {{"groups", given}, {"tokens", std::int64_t(tokens.size())}});
    check_loss_and_slope(logits, loss, dlogits, "auxiliary_loss: loss is not (1) or dlogits not (T, E), real as logits");
  }
  static constexpr std::int64_t kGroupsTogether = 64;  // whose frequencies are held at once, on CUDA
  struct Scratch {
    Tensor frequency;  // (up to kGroupsTogether, E) f64; the CPU needs one row
    Tensor rows;       // (T) f64, each token's part of the loss
  };
  Scratch take_scratch(Context& ctx) const {
    const std::int64_t together = std::clamp<std::int64_t>(std::int64_t(groups.size()) - 1, 1, kGroupsTogether);
    return {ctx.scratch.take(DType::f64, {together, logits.shape[1]}), ctx.scratch.take(DType::f64, {logits.shape[0]})};
  }
};

struct ZLoss {
  ConstTensor logits;  // (T, E) real
  double scale;        // coefficient / tokens of the global batch
  Tensor loss;         // (1) real; adds scale * sum_t logsumexp(logits_t)^2
  Tensor dlogits;      // (T, E) real; adds; absent: loss only
  Work work(const Context&) const { return {.bytes = bytes_of(logits, dlogits, dlogits)}; }
  void check_shapes() const {
    check_router_logits(logits, "z_loss: logits are not (T, E) real");
    check_loss_and_slope(logits, loss, dlogits, "z_loss: loss is not (1) or dlogits not (T, E), real as logits");
  }
  Tensor take_scratch(Context& ctx) const { return ctx.scratch.take(DType::f64, {logits.shape[0]}); }  // each token's part
};

namespace cpu {
void expert_count(Context&, const ExpertCount&);
void quantile_histogram(Context&, const QuantileHistogram&);
void quantile_update(Context&, const QuantileUpdate&);
void sign_update(Context&, const SignUpdate&);
void auxiliary_loss(Context&, const AuxiliaryLoss&);
void z_loss(Context&, const ZLoss&);
}  // namespace cpu
namespace cuda {
void expert_count(Context&, const ExpertCount&);
void quantile_histogram(Context&, const QuantileHistogram&);
void quantile_update(Context&, const QuantileUpdate&);
void sign_update(Context&, const SignUpdate&);
void auxiliary_loss(Context&, const AuxiliaryLoss&);
void z_loss(Context&, const ZLoss&);
}  // namespace cuda

inline void expert_count(Context& ctx, const ExpertCount& a) {
  dispatch(
      ctx, "expert_count forward", a, [&] { cpu::expert_count(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::expert_count(ctx, a);
      });
}
inline void quantile_histogram(Context& ctx, const QuantileHistogram& a) {
  dispatch(
      ctx, "quantile_histogram forward", a, [&] { cpu::quantile_histogram(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::quantile_histogram(ctx, a);
      });
}
inline void quantile_update(Context& ctx, const QuantileUpdate& a) {
  dispatch(
      ctx, "quantile_update forward", a, [&] { cpu::quantile_update(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::quantile_update(ctx, a);
      });
}
inline void sign_update(Context& ctx, const SignUpdate& a) {
  dispatch(
      ctx, "sign_update forward", a, [&] { cpu::sign_update(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sign_update(ctx, a);
      });
}
inline void auxiliary_loss(Context& ctx, const AuxiliaryLoss& a) {
  dispatch(
      ctx, "auxiliary_loss forward", a, [&] { cpu::auxiliary_loss(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::auxiliary_loss(ctx, a);
      });
}
inline void z_loss(Context& ctx, const ZLoss& a) {
  dispatch(
      ctx, "z_loss forward", a, [&] { cpu::z_loss(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::z_loss(ctx, a);
      });
}

}  // namespace moetrain::ops
