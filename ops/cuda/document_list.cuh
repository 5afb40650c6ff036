// document_list.cuh -- the documents of a micro-batch as kernels find them: which keys a query sees, its document whole or a piece.
#pragma once
#include <cstdint>

#include "ops/documents.h"

namespace moetrain::ops::cuda {

struct KeyRange {
  std::int64_t begin, end;  // rows of keys; the last is the query's own
};

struct DocumentList {
  const std::int64_t* starts;      // (count + 1)
  const Documents::Piece* pieces;  // (count); null: all are whole
  std::int64_t count;
  explicit DocumentList(const Documents& d)
      : starts(d.on_device.present() ? d.on_device.as<std::int64_t>() : nullptr),
        pieces(d.pieces_on_device.present() ? static_cast<const Documents::Piece*>(d.pieces_on_device.data) : nullptr),
        count(d.count()) {
    check(count == 0 || (starts && (pieces || d.whole())), "documents: CUDA needs their lists on the device",
          {{"documents", count}, {"whole", d.whole()}});
  }
  __device__ std::int64_t before(std::int64_t n) const { return pieces ? pieces[n].before : 0; }
  __device__ std::int64_t first_key(std::int64_t n) const { return pieces ? pieces[n].first_key : starts[n]; }
  __device__ KeyRange seen_by(std::int64_t t) const {
    std::int64_t low = 0, high = count;  // starts[low] <= t < starts[high]
    while (high - low > 1) {
      const std::int64_t middle = (low + high) / 2;
      (starts[middle] <= t ? low : high) = middle;
    }
    const std::int64_t first = first_key(low);
    return {first, first + before(low) + t - starts[low] + 1};
  }
};

}  // namespace moetrain::ops::cuda
