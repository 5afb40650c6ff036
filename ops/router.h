// router.h -- top-k choice of experts by biased sigmoid scores; weights from the scores without bias.
//
//   s[t,e] = 1 / (1 + exp(-logits[t,e]))          c[t,e] = s[t,e] + bias[e], for the choice only; NaN ranks below everything
//   group score = sum of the two largest c of a group (of its only one in groups of one); top_groups groups are kept, ties to the
//   lower group, and the experts of the others cannot be chosen
//   experts[t,:] = the K largest c of the kept groups, descending, ties to the lower expert
//   cutoff[t]    = the (K+1)-th largest c of the kept groups; -infinity when they hold only K experts
//   n[t]         = sum_k s[t,experts[t,k]] + 1e-20        (renormalize; k ascending)
//   weights[t,k] = scaling * s[t,experts[t,k]] / n[t]     (else scaling * s[t,experts[t,k]])
// A decided choice may have dropped slots: experts[t,k] = ~e of an expert e whose places were taken (ops/capacity.h).
// Such a slot has weight 0, and e still counts in n: the others weigh what they would have, and a token loses the dropped share.
// Below, dweights of a dropped slot are 0.
//
//   q[t,k]  = s[t,experts[t,k]] / n[t]
//   ds[t,k] = scaling / n[t] * ( dweights[t,k] - sum_j dweights[t,j] q[t,j] )        (else scaling * dweights[t,k])
//   dlogits[t,experts[t,k]] = ds[t,k] s (1 - s), of a dropped slot at e;  0 for every other expert; the bias has no gradient
//
// All tensors are real (f32 or f64) and computed in their own type. Outputs are written and alias nothing. Rows are independent:
// bitwise repeatable for any number of threads.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct RouterRule {
  std::int64_t groups = 1, top_groups = 1;  // experts are chosen inside the top_groups groups of best group score
  bool renormalize = true;
  double scaling = 1;
  void check_fits(std::int64_t E, std::int64_t K) const {
    check(groups >= 1 && E % groups == 0, "router: groups do not divide the experts", {{"groups", groups}, {"E", E}});
    check(top_groups >= 1 && top_groups <= groups, "router: top_groups is not in 1 .. groups",
          {{"top_groups", top_groups}, {"groups", groups}});
    check(K >= 1 && K <= top_groups * (E / groups), "router: the kept groups hold fewer than K experts",
          {{"K", K}, {"E", E}, {"groups", groups}, {"top_groups", top_groups}});
  }
};

struct RouterForward {
  ConstTensor logits;  // (T, E) real
  ConstTensor bias;    // (E) real, for selection only; may be absent when decided
  RouterRule rule;
  bool decided = false;  // experts are given (recomputation): only weights are computed, cutoff must be absent
  Tensor experts;        // (T, K) i32; read, not written, when decided
  Tensor weights;        // (T, K) real
  Tensor cutoff;         // (T) real; absent: not wanted
  Work work(const Context&) const { return {.bytes = bytes_of(logits, experts, weights, cutoff)}; }
  void check_shapes() const {
    const auto T = logits.shape[0], E = logits.shape[1], K = experts.shape[1];
    check(logits.shape.rank() == 2 && E >= 1, "router: logits are not (T, E)", {{"rank", logits.shape.rank()}, {"E", E}});
    check(logits.dtype == DType::f32 || logits.dtype == DType::f64, "router: logits are not real", {{"dtype", int(logits.dtype)}});
    check(experts.shape == Shape{T, K} && experts.dtype == DType::i32, "router: experts are not (T, K) i32",
          {{"T", T}, {"K", K}, {"rows", experts.shape[0]}, {"dtype", int(experts.dtype)}});
    rule.check_fits(E, K);
    check(weights.shape == experts.shape && weights.dtype == logits.dtype, "router: weights do not fit experts and logits",
          {{"T", T}, {"K", K}, {"rows", weights.shape[0]}, {"columns", weights.shape[1]}, {"dtype", int(weights.dtype)}});
    check((decided && !bias.present()) || (bias.shape == Shape{E} && bias.dtype == logits.dtype), "router: bias is not (E) real",
          {{"E", E}, {"bias", bias.count()}, {"dtype", int(bias.dtype)}});
    check(!cutoff.present() || (cutoff.shape == Shape{T} && cutoff.dtype == logits.dtype), "router: cutoff is not (T) real",
          {{"T", T}, {"cutoff", cutoff.count()}, {"dtype", int(cutoff.dtype)}});
    check(!decided || !cutoff.present(), "router: a decided choice has no cutoff", {{"T", T}});
  }
};

struct RouterBackward {
  ConstTensor dweights;  // (T, K) real
  ConstTensor logits;    // (T, E) real
  ConstTensor experts;   // (T, K) i32
  RouterRule rule;
  Tensor dlogits;  // (T, E) real; written, 0 where unselected
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dweights, logits, experts, dlogits)}; }
  void check_shapes() const {
    const auto T = logits.shape[0], E = logits.shape[1], K = experts.shape[1];
    check(logits.shape.rank() == 2 && E >= 1, "router: logits are not (T, E)", {{"rank", logits.shape.rank()}, {"E", E}});
    check(logits.dtype == DType::f32 || logits.dtype == DType::f64, "router: logits are not real", {{"dtype", int(logits.dtype)}});
    check(experts.shape == Shape{T, K} && experts.dtype == DType::i32, "router: experts are not (T, K) i32",
          {{"T", T}, {"K", K}, {"rows", experts.shape[0]}, {"dtype", int(experts.dtype)}});
    rule.check_fits(E, K);
    check(dweights.shape == experts.shape && dweights.dtype == logits.dtype, "router: dweights do not fit experts and logits",
          {{"T", T}, {"K", K}, {"rows", dweights.shape[0]}, {"columns", dweights.shape[1]}, {"dtype", int(dweights.dtype)}});
    check(dlogits.shape == logits.shape && dlogits.dtype == logits.dtype, "router: dlogits do not fit logits",
          {{"T", T}, {"E", E}, {"rows", dlogits.shape[0]}, {"columns", dlogits.shape[1]}, {"dtype", int(dlogits.dtype)}});
  }
};

namespace cpu {
void router(Context&, const RouterForward&);
void router(Context&, const RouterBackward&);
}  // namespace cpu
namespace cuda {
void router(Context&, const RouterForward&);
void router(Context&, const RouterBackward&);
}  // namespace cuda

inline void router(Context& ctx, const RouterForward& a) {
  dispatch(
      ctx, "router forward", a, [&] { cpu::router(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::router(ctx, a);
      });
}
inline void router(Context& ctx, const RouterBackward& a) {
  dispatch(
      ctx, "router backward", a, [&] { cpu::router(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::router(ctx, a);
      });
}

}  // namespace moetrain::ops
