// embedding.h -- rows of a table by token id.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct EmbeddingForward {
  ConstTensor ids;    // (T) i32
  ConstTensor table;  // (V, D)
  Tensor y;           // (T, D)
  void check_shapes() const;
};

struct EmbeddingBackward {
  ConstTensor ids;  // (T) i32
  ConstTensor dy;   // (T, D)
  Tensor dtable;    // (V, D) real; adds
  void check_shapes() const;
};

namespace cpu {
void embedding(Context&, const EmbeddingForward&);
void embedding(Context&, const EmbeddingBackward&);
}  // namespace cpu

inline void embedding(Context& ctx, const EmbeddingForward& a) {
  dispatch(ctx, "embedding forward", a, [&] { cpu::embedding(ctx, a); });
}
inline void embedding(Context& ctx, const EmbeddingBackward& a) {
  dispatch(ctx, "embedding backward", a, [&] { cpu::embedding(ctx, a); });
}

}  // namespace moetrain::ops
