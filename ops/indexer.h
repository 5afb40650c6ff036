// indexer.h -- lightning indexer: index scores, selection of the top-k keys a query, and the KL loss that trains it.
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

struct IndexerSelect {
  ConstTensor q;        // (T, J, H)
  ConstTensor k;        // (T, H)
  ConstTensor weights;  // (T, J) real, already scaled by J^-1/2 H^-1/2; any sign
  Documents documents;
  Tensor indices;       // (T, K) i32, by score descending, ties to the later position, then -1
  void check_shapes() const;
};

struct IndexerLoss {
  ConstTensor q;        // (T, J, H)
  ConstTensor k;        // (T, H)
  ConstTensor weights;  // (T, J) real, already scaled
  ConstTensor target;   // (T, W) real, head-mean attention; normalised here over the row's key set
  ConstTensor indices;  // (T, W) i32, the key set of a row (sparse stage); absent: all causal keys, column = position - document start (dense)
  Documents documents;
  double gradient_scale;  // coefficient / rows of the global batch
  Tensor loss;          // (1) real; adds sum_t KL(target_t || softmax(score_t))
  Tensor dq;            // (T, J, H); absent (with dk, dweights): loss only
  Tensor dk;            // (T, H)
  Tensor dweights;      // (T, J) real, gradient of the scaled weights
  void check_shapes() const;
};

namespace cpu {
void indexer_select(Context&, const IndexerSelect&);
void indexer_loss(Context&, const IndexerLoss&);
}  // namespace cpu

inline void indexer_select(Context& ctx, const IndexerSelect& a) {
  dispatch(ctx, "indexer_select forward", a, [&] { cpu::indexer_select(ctx, a); });
}
inline void indexer_loss(Context& ctx, const IndexerLoss& a) {
  dispatch(ctx, "indexer_loss forward", a, [&] { cpu::indexer_loss(ctx, a); });
}

}  // namespace moetrain::ops
