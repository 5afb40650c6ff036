// documents.h -- where documents begin in a micro-batch: the only source of boundaries for every op that mixes positions.
#pragma once
#include <algorithm>
#include <cstdint>
#include <limits>
#include <span>

#include "memory/tensor.h"

namespace moetrain::ops {

// Document n is positions [starts[n], starts[n+1]) of the T tokens of a micro-batch. The start of a sequence is the start of a
// document, so that one list separates both.
struct Documents {
  // What lies elsewhere of a document whose sequence is cut into slices over ranks (parallel/sequence_split.h).
  struct Piece {
    std::int64_t before = 0;     // its tokens before those here
    std::int64_t first_key = 0;  // row of its first token among the keys of all slices
    // Slice of this rank by whose start it comes from the rank before, and by whose end it goes on; -1: not. A slice has one state
    // that enters it and one that leaves it.
    std::int64_t enters = -1, leaves = -1;
  };
  static_assert(sizeof(Piece) == 4 * sizeof(std::int64_t));  // a row of pieces_on_device
  std::span<const std::int64_t> starts;  // (N+1) ascending, first 0, last T; on the host
  ConstTensor on_device = {};            // (N+1) i64, the same list on the device; needed by ops on CUDA
  std::span<const Piece> pieces = {};    // (N); empty: every document is whole here, its keys stand where its tokens do
  std::int64_t slices = 0;               // of this rank, where there are pieces
  ConstTensor pieces_on_device = {};     // (N, 4) i64: before, first_key, enters, leaves; likewise, where there are pieces
  std::int64_t count() const { return std::int64_t(starts.size()) - 1; }
  std::int64_t begin(std::int64_t n) const { return starts[std::size_t(n)]; }
  std::int64_t end(std::int64_t n) const { return starts[std::size_t(n) + 1]; }
  bool whole() const { return pieces.empty() && slices == 0; }  // a share without a token has slices and no piece
  std::int64_t before(std::int64_t n) const { return whole() ? 0 : pieces[std::size_t(n)].before; }
  std::int64_t first_key(std::int64_t n) const { return whole() ? begin(n) : pieces[std::size_t(n)].first_key; }
  std::int64_t keys(std::int64_t n) const { return before(n) + end(n) - begin(n); }  // that its last token here sees
  // Pairs of a token here and a key that it sees, or of the `most` that are selected for it.
  double pairs(std::int64_t most = std::numeric_limits<std::int32_t>::max()) const {
    double sum = 0;
    for (std::int64_t n = 0; n < count(); ++n) {
      const auto all = double(keys(n)), here = double(end(n) - begin(n));
      const double growing = std::clamp(double(most) - (all - here), 0.0, here);  // tokens that see fewer than `most`
      sum += growing * (all - here) + growing * (growing + 1) / 2 + (here - growing) * double(most);
    }
    return sum;
  }
  // Recurrent states: one a document, or one a slice that a document may enter or leave.
  std::int64_t states() const { return whole() ? count() : slices; }
  std::int64_t enters(std::int64_t n) const { return whole() ? n : pieces[std::size_t(n)].enters; }
  std::int64_t leaves(std::int64_t n) const { return whole() ? n : pieces[std::size_t(n)].leaves; }
  std::int64_t longest() const {  // of the tokens here
    std::int64_t most = 0;
    for (std::int64_t n = 0; n < count(); ++n) most = std::max(most, end(n) - begin(n));
    return most;
  }
  std::int64_t most_keys() const {  // that a token here sees
    std::int64_t most = 0;
    for (std::int64_t n = 0; n < count(); ++n) most = std::max(most, keys(n));
    return most;
  }
  void check_cover(std::int64_t T) const {
    check(!starts.empty() && starts.front() == 0 && starts.back() == T, "documents: starts do not cover the tokens", {{"T", T}, {"starts", std::int64_t(starts.size())}});
    for (std::int64_t n = 0; n < count(); ++n) check(begin(n) <= end(n), "documents: starts do not ascend", {{"n", n}});
    check(!on_device.present() || (on_device.count() == std::int64_t(starts.size()) && on_device.dtype == DType::i64),
          "documents: the list on the device does not fit the one on the host", {{"starts", std::int64_t(starts.size())}, {"on device", on_device.count()}});
    check(whole() || std::int64_t(pieces.size()) == count(), "documents: not one piece a document",
          {{"documents", count()}, {"pieces", std::int64_t(pieces.size())}});
    check(!pieces_on_device.present() ||
              (!whole() && pieces_on_device.shape == Shape{count(), 4} && pieces_on_device.dtype == DType::i64),
          "documents: the pieces on the device do not fit those on the host",
          {{"pieces", count()}, {"on device", pieces_on_device.count()}});
    for (const Piece& p : pieces)
      check(p.before >= 0 && p.enters < slices && p.leaves < slices && (p.enters >= 0) == (p.before > 0),
            "documents: a piece fits no slice", {{"slices", slices}, {"before", p.before}, {"enters", p.enters}, {"leaves", p.leaves}});
  }
  // What a row of T may see lies among `keys` rows.
  void check_keys(std::int64_t T, std::int64_t keys_here) const {
    check(!whole() || keys_here == T, "documents: keys are not as many as tokens", {{"T", T}, {"keys", keys_here}});
    for (std::int64_t n = 0; n < count(); ++n)
      check(first_key(n) >= 0 && first_key(n) + keys(n) <= keys_here, "documents: a document's keys are not all here",
            {{"document", n}, {"first", first_key(n)}, {"its keys", keys(n)}, {"keys", keys_here}});
  }
};

}  // namespace moetrain::ops
