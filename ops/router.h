// router.h -- top-k choice of experts by biased sigmoid scores; weights from the scores without bias.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct RouterRule {
  std::int64_t groups = 1, top_groups = 1;  // experts are chosen inside the top_groups groups of best (sum of two best biased scores)
  bool renormalize = true;                  // p = s / (sum of selected s + 1e-20) * scaling, else p = s * scaling
  double scaling = 1;
};

struct RouterForward {
  ConstTensor logits;  // (T, E) real
  ConstTensor bias;    // (E) real, for selection only
  RouterRule rule;
  bool decided = false;  // experts are given (recomputation): only weights are computed
  Tensor experts;      // (T, K) i32, by biased score descending, ties to the lower expert
  Tensor weights;      // (T, K) real
  Tensor cutoff;       // (T) real, the (K+1)-th largest biased score; absent: not wanted
  void check_shapes() const;
};

struct RouterBackward {
  ConstTensor dweights;  // (T, K) real
  ConstTensor logits;    // (T, E) real
  ConstTensor experts;   // (T, K) i32
  RouterRule rule;
  Tensor dlogits;        // (T, E) real; written, 0 where unselected
  void check_shapes() const;
};

namespace cpu {
void router(Context&, const RouterForward&);
void router(Context&, const RouterBackward&);
}  // namespace cpu

inline void router(Context& ctx, const RouterForward& a) {
  dispatch(ctx, "router forward", a, [&] { cpu::router(ctx, a); });
}
inline void router(Context& ctx, const RouterBackward& a) {
  dispatch(ctx, "router backward", a, [&] { cpu::router(ctx, a); });
}

}  // namespace moetrain::ops
