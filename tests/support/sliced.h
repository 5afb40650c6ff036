// sliced.h -- documents of some rows among those of all, for tests of ops whose queries are a slice of a sequence.
#pragma once
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "ops/documents.h"
#include "tests/support/tensors.h"

namespace moetrain::test {

// Some rows of all, whose keys are all rows: slices one after another, each a run of rows.
struct Sliced {
  using Range = std::pair<std::int64_t, std::int64_t>;  // [first, second) of all rows
  std::vector<Range> slices;
  std::vector<std::int64_t> starts{0};
  std::vector<ops::Documents::Piece> pieces;
  Sliced(const std::vector<std::int64_t>& whole, std::int64_t begin, std::int64_t end) : Sliced(whole, {{begin, end}}) {}
  // The keys of document d begin at row first_keys[d], or where the document itself does.
  Sliced(const std::vector<std::int64_t>& whole, std::vector<Range> ranges, const std::vector<std::int64_t>& first_keys = {})
      : slices(std::move(ranges)) {
    for (std::int64_t n = 0; n < std::int64_t(slices.size()); ++n) {
      const auto [begin, end] = slices[std::size_t(n)];
      if (begin == end) {  // has a document too, be it empty
        starts.push_back(starts.back());
        pieces.push_back({.before = 0, .first_key = begin});
      }
      for (std::size_t d = 0; d + 1 < whole.size(); ++d) {
        const auto first = std::max(whole[d], begin), last = std::min(whole[d + 1], end);
        if (first >= last) continue;
        starts.push_back(starts.back() + last - first);
        pieces.push_back({.before = first - whole[d],
                          .first_key = first_keys.empty() ? whole[d] : first_keys[d],
                          .enters = first > whole[d] ? n : -1});
      }
    }
  }
  ops::Documents documents() const {
    return {.starts = starts, .on_device = {}, .pieces = pieces, .slices = std::max<std::int64_t>(1, std::int64_t(slices.size()))};
  }
  // Those rows of a tensor of all rows.
  Tensor rows(Bench& bench, ConstTensor all) const {
    const Tensor some = bench.empty(all.dtype, all.shape.with_dim0(starts.back()));
    std::int64_t at = 0;
    for (const auto& [begin, end] : slices) {
      const ConstTensor from = all.rows(begin, end);
      if (from.bytes() > 0) std::memcpy(some.rows(at, at + end - begin).data, from.data, std::size_t(from.bytes()));
      at += end - begin;
    }
    return some;
  }
};

// Which of `keys` rows a query of the documents sees.
inline std::vector<bool> seen_keys(const ops::Documents& documents, std::int64_t keys) {
  std::vector<bool> seen(std::size_t(keys), false);
  for (std::int64_t n = 0; n < documents.count(); ++n)
    if (documents.begin(n) < documents.end(n))
      for (std::int64_t i = 0; i < documents.keys(n); ++i) seen[std::size_t(documents.first_key(n) + i)] = true;
  return seen;
}
// Have all rows that are not seen zeros, and nothing but zeros?
inline bool zero_where_unseen(ConstTensor gradient, const std::vector<bool>& seen) {
  const auto row = gradient.shape.row();
  for (std::int64_t i = 0; i < gradient.count(); ++i)
    if (!seen[std::size_t(i / row)] && Bench::get(gradient, i) != 0) return false;
  return true;
}

// For tests on a device: two sequences of 600 and 500 positions, and slices of both that are their first, middle and last, of which
// some begin or end where a document does; one sequence's that all lie in one document, one whose second has no token, and no token
// at all.
inline const std::vector<std::int64_t> kCutStarts{0, 3, 200, 331, 600, 650, 900, 1100};
inline const std::vector<std::vector<Sliced::Range>> kCutSlices{{{0, 150}, {600, 725}},
                                                                {{150, 331}, {725, 900}},
                                                                {{331, 450}, {900, 1001}},
                                                                {{450, 600}, {1001, 1100}},
                                                                {{400, 529}},
                                                                {{529, 600}, {1100, 1100}},
                                                                {}};
inline constexpr std::int64_t kCutKeys = 1130;  // some of which are no one's
// Where the keys of documents may lie as well: in another order.
inline const std::vector<std::int64_t> kCutKeysMoved{1127, 900, 769, 500, 450, 200, 0};

}  // namespace moetrain::test
