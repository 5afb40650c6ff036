// tensor_split.h -- tokens shared out over ranks that cut matrices between them: all rows gathered for a matrix whose outputs are
// cut, and what a matrix whose inputs are cut adds on each rank summed back into the rows that are here.
//
// Of T rows rank r has [r c, min(T, (r+1) c)), c = ceil(T / ranks), as parallel/shard.h says.
#pragma once
#include "ops/context.h"
#include "parallel/communicator.h"
#include "parallel/shard.h"

namespace moetrain::parallel {

class TensorSplit {
 public:
  explicit TensorSplit(Communicator& group) : group_(group) {}
  int ranks() const { return group_.size(); }
  int rank() const { return group_.rank(); }
  Rows rows(std::int64_t T) const { return shard_of(T, rank(), ranks()); }
  // (T, ...) with room behind for all shares: what the calls below take as `all`. Not yet written.
  Tensor take(Stack& stack, DType dtype, Shape shape) const;

  // Collective, both. all (T, ...) = everyone's rows, in their order.
  void gather(ops::Context& ctx, ConstTensor mine, Tensor all) const;
  // mine = the sum over ranks of these rows of all, summed in real.
  void sum(ops::Context& ctx, ConstTensor all, Tensor mine) const;
  // Of every rank, (ranks, ...), in their order.
  void gather_values(ConstTensor mine, Tensor all) const;

 private:
  Communicator& group_;
};

}  // namespace moetrain::parallel
