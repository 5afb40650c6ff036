// sparse_attention.h -- softmax attention over a selected set of positions a query, in the latent space (MLA, absorbed).
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct SparseAttentionForward {
  ConstTensor q_latent;  // (T, N, C), absorbed query
  ConstTensor q;         // (T, N, Hn + He), used: the last He columns
  ConstTensor latent;    // (T, C), key and value
  ConstTensor k_extra;   // (T, He), shared by all heads; He may be 0
  ConstTensor indices;   // (T, K) i32, positions in 0..T-1 of the same document; -1: empty slot
  double scale;
  Tensor o_latent;       // (T, N, C)
  Tensor lse;            // (T, N) real; kept for backward
  Tensor probability;    // (T, K) real, mean over heads, 0 at empty slots; absent: not wanted
  void check_shapes() const;
};

struct SparseAttentionBackward {
  ConstTensor do_latent;  // (T, N, C)
  ConstTensor q_latent;   // (T, N, C)
  ConstTensor q;          // (T, N, Hn + He)
  ConstTensor latent;     // (T, C)
  ConstTensor k_extra;    // (T, He)
  ConstTensor indices;    // (T, K) i32
  ConstTensor o_latent;   // (T, N, C)
  ConstTensor lse;        // (T, N) real
  double scale;
  Tensor dq_latent;       // (T, N, C)
  Tensor dq;              // (T, N, Hn + He), written: the last He columns
  Tensor dlatent;         // (T, C)
  Tensor dk_extra;        // (T, He)
  void check_shapes() const;
};

namespace cpu {
void sparse_attention(Context&, const SparseAttentionForward&);
void sparse_attention(Context&, const SparseAttentionBackward&);
}  // namespace cpu

inline void sparse_attention(Context& ctx, const SparseAttentionForward& a) {
  dispatch(ctx, "sparse_attention forward", a, [&] { cpu::sparse_attention(ctx, a); });
}
inline void sparse_attention(Context& ctx, const SparseAttentionBackward& a) {
  dispatch(ctx, "sparse_attention backward", a, [&] { cpu::sparse_attention(ctx, a); });
}

}  // namespace moetrain::ops
