// balance.h -- load balance of experts: exact counts, quantile histograms, bias updates, auxiliary losses and the z-loss.
#pragma once
#include "ops/context.h"
#include <span>

namespace moetrain::ops {

struct ExpertCount {
  ConstTensor experts;  // (T, K) i32
  Tensor counts;        // (E) i64; adds
  void check_shapes() const;
};

struct QuantileHistogram {
  ConstTensor logits;   // (T, E) real
  ConstTensor cutoff;   // (T) real, of ops/router
  ConstTensor bias;     // (E) real, the bias the cutoff was computed with; bins span [min(bias) - 1, max(bias) + 1]
  Tensor histogram;     // (E, bins) i64; adds one a token and expert at cutoff_t - sigmoid(logit_te), clamped into the end bins
  void check_shapes() const;
};

struct QuantileUpdate {
  ConstTensor histogram;  // (E, bins) i64, summed over the global batch
  std::int64_t experts_per_token;
  Tensor bias;          // (E) real; replaced by the K/E quantile of each expert, then centred to mean 0
  void check_shapes() const;
};

struct SignUpdate {
  ConstTensor counts;   // (E) i64 of the global batch
  double rate;
  Tensor bias;          // (E) real; += rate sign(mean count - count)
  void check_shapes() const;
};

struct AuxiliaryLoss {
  ConstTensor logits;   // (T, E) real
  ConstTensor experts;  // (T, K) i32
  std::span<const std::int64_t> groups;  // offsets of the token groups over which frequency and mean probability are taken (one
                                         // group: Switch; sequences: sequence-wise), first 0, last T
  ConstTensor counts;   // (E) i64 that replaces the groups' own counts (global batch); absent: own
  double scale;         // coefficient times this group's share of the whole (1 / groups, or tokens here / tokens in all)
  Tensor loss;          // (1) real; adds the scaled loss
  Tensor dlogits;       // (T, E) real; adds the scaled gradient; absent: loss only
  void check_shapes() const;
};

struct ZLoss {
  ConstTensor logits;   // (T, E) real
  double scale;         // coefficient / tokens of the global batch
  Tensor loss;          // (1) real; adds scale * sum_t logsumexp(logits_t)^2
  Tensor dlogits;       // (T, E) real; adds; absent: loss only
  void check_shapes() const;
};

namespace cpu {
void expert_count(Context&, const ExpertCount&);
void quantile_histogram(Context&, const QuantileHistogram&);
void quantile_update(Context&, const QuantileUpdate&);
void sign_update(Context&, const SignUpdate&);
void auxiliary_loss(Context&, const AuxiliaryLoss&);
void z_loss(Context&, const ZLoss&);
}  // namespace cpu

inline void expert_count(Context& ctx, const ExpertCount& a) {
  dispatch(ctx, "expert_count forward", a, [&] { cpu::expert_count(ctx, a); });
}
inline void quantile_histogram(Context& ctx, const QuantileHistogram& a) {
  dispatch(ctx, "quantile_histogram forward", a, [&] { cpu::quantile_histogram(ctx, a); });
}
inline void quantile_update(Context& ctx, const QuantileUpdate& a) {
  dispatch(ctx, "quantile_update forward", a, [&] { cpu::quantile_update(ctx, a); });
}
inline void sign_update(Context& ctx, const SignUpdate& a) {
  dispatch(ctx, "sign_update forward", a, [&] { cpu::sign_update(ctx, a); });
}
inline void auxiliary_loss(Context& ctx, const AuxiliaryLoss& a) {
  dispatch(ctx, "auxiliary_loss forward", a, [&] { cpu::auxiliary_loss(ctx, a); });
}
inline void z_loss(Context& ctx, const ZLoss& a) {
  dispatch(ctx, "z_loss forward", a, [&] { cpu::z_loss(ctx, a); });
}

}  // namespace moetrain::ops
