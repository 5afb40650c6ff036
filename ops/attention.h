// attention.h -- dense causal softmax attention over heads [nope | extra], keys and values expanded from the latent (MLA, unabsorbed).
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

struct AttentionForward {
  ConstTensor q;        // (T, N, Hn + He)
  ConstTensor kv;       // (T, N, Hn + Hv), per head key then value
  ConstTensor k_extra;  // (T, He), shared by all heads; He may be 0
  double scale;
  Documents documents;
  Tensor o;             // (T, N, Hv)
  Tensor lse;           // (T, N) real, natural log of the sum of exp of the scaled scores; kept for backward
  Tensor probability;   // (T, W) real, mean over heads of what t gives to position (start of its document + column), W >= longest
                        // document, columns past t are 0; absent: not wanted
  void check_shapes() const;
};

struct AttentionBackward {
  ConstTensor do_;      // (T, N, Hv)
  ConstTensor q;        // (T, N, Hn + He)
  ConstTensor kv;       // (T, N, Hn + Hv)
  ConstTensor k_extra;  // (T, He)
  ConstTensor o;        // (T, N, Hv)
  ConstTensor lse;      // (T, N) real
  double scale;
  Documents documents;
  Tensor dq;            // (T, N, Hn + He)
  Tensor dkv;           // (T, N, Hn + Hv)
  Tensor dk_extra;      // (T, He)
  void check_shapes() const;
};

namespace cpu {
void attention(Context&, const AttentionForward&);
void attention(Context&, const AttentionBackward&);
}  // namespace cpu

inline void attention(Context& ctx, const AttentionForward& a) {
  dispatch(ctx, "attention forward", a, [&] { cpu::attention(ctx, a); });
}
inline void attention(Context& ctx, const AttentionBackward& a) {
  dispatch(ctx, "attention backward", a, [&] { cpu::attention(ctx, a); });
}

}  // namespace moetrain::ops
