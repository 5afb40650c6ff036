// sliced.h -- documents of some rows among those of all, for tests of ops whose queries are a slice of a sequence.
#pragma once
#include <algorithm>
#include <vector>

#include "ops/documents.h"

namespace moetrain::test {

// Rows [begin, end) of all, as a slice whose keys are all rows.
struct Sliced {
  std::vector<std::int64_t> starts;
  std::vector<ops::Documents::Piece> pieces;
  Sliced(const std::vector<std::int64_t>& whole, std::int64_t begin, std::int64_t end) {
    for (std::size_t d = 0; d + 1 < whole.size(); ++d) {
      const auto first = std::max(whole[d], begin), last = std::min(whole[d + 1], end);
      if (first >= last) continue;
      starts.push_back(first - begin);
      pieces.push_back({.before = first - whole[d], .first_key = whole[d], .enters = first > whole[d] ? 0 : -1});
    }
    starts.push_back(end - begin);
  }
  ops::Documents documents() const { return {.starts = starts, .on_device = {}, .pieces = pieces, .slices = 1}; }
};

}  // namespace moetrain::test
