// indexer.cuh -- what the kernels of the indexer share.
#pragma once
#include <cstdint>

#include "ops/cuda/document_list.cuh"
#include "ops/indexer.h"

namespace moetrain::ops::cuda {

__device__ inline float relu(float u) {  // a NaN stays one
  asm("max.NaN.f32 %0, %0, 0f00000000;" : "+f"(u));
  return u;
}

// indexer_tiles.cu: scores (rows, longest) of rows [begin, begin + rows) over the causal keys of their documents, for bf16, H = 128
// and at most 64 heads.
void index_score_tiles(Context& ctx, const IndexerSelect& a, float* scores, std::int64_t begin, std::int64_t rows);

// indexer_loss_tiles.cu: all but the sum over rows of IndexerLoss, for bf16, H = 128 and at most 64 heads.
void index_loss_tiles(Context& ctx, const IndexerLoss& a, const IndexerLoss::Scratch& scratch);

}  // namespace moetrain::ops::cuda
