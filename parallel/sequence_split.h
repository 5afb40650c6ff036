// sequence_split.h -- one sequence over ranks in slices: what goes to the next one, and rows of all slices gathered and summed back.
//
// A sequence has room for `ranks() * share` positions, rank r holds [r share, (r+1) share) of those it has. Rows here are those of B
// slices one after another; gathered rows have room for B whole sequences, each position in its place, zeros where a sequence has
// none.
#pragma once
#include <span>

#include "ops/context.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {

class SequenceSplit {
 public:
  SequenceSplit(Communicator& group, std::int64_t share) : group_(group), share_(share) {}
  int ranks() const { return group_.size(); }
  int rank() const { return group_.rank(); }
  std::int64_t share() const { return share_; }
  std::int64_t gathered_rows(std::span<const std::int64_t> slices) const {
    return (std::int64_t(slices.size()) - 1) * ranks() * share_;
  }

  // Collective, all of them; slices (B+1): offsets of the slices in rows.
  void gather_rows(ops::Context& ctx, std::span<const std::int64_t> slices, ConstTensor rows, Tensor gathered);
  // rows = the sum over ranks of the gathered rows that lie here, summed in real.
  void sum_rows(ops::Context& ctx, std::span<const std::int64_t> slices, ConstTensor gathered, Tensor rows);
  // all = everyone's `mine`, in the order of the slices.
  void gather(ConstTensor mine, Tensor all);
  // `mine` goes to the rank after (step 1) or before (step -1), and what came the same way arrives; zeros where nobody sends.
  void shift(ops::Context& ctx, int step, ConstTensor mine, Tensor arrived);

 private:
  bool full(std::span<const std::int64_t> slices) const { return slices.back() == (std::int64_t(slices.size()) - 1) * share_; }
  Communicator& group_;
  std::int64_t share_;
};

}  // namespace moetrain::parallel
