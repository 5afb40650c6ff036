// indexer.cuh -- what the kernels of the indexer share.
#pragma once
#include <cstdint>

#include "ops/indexer.h"

namespace moetrain::ops::cuda {

struct DocumentList {
  const std::int64_t* starts;  // (count + 1)
  std::int64_t count;
  explicit DocumentList(const Documents& d)
      : starts(d.on_device.present() ? d.on_device.as<std::int64_t>() : nullptr), count(d.count()) {
    check(starts || count == 0, "indexer: the documents are not on the device");
  }
  __device__ std::int64_t first_of(std::int64_t t) const {  // where the document of position t begins
    std::int64_t low = 0, high = count;                     // starts[low] <= t < starts[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (starts[middle] <= t ? low : high) = middle;
    }
    return starts[low];
  }
};

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
