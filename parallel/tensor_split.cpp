// tensor_split.cpp -- one all-gather or reduce-scatter of shares padded to one size.
#include "parallel/tensor_split.h"

#include "memory/buffer.h"
#include "ops/elementwise.h"

namespace moetrain::parallel {
namespace {

// `all` as take() made it: its rows and the room behind.
Tensor with_room(Tensor all, int ranks) {
  return {all.data, all.dtype, all.shape.with_dim0(shard_rows(all.shape[0], ranks) * ranks)};
}

}  // namespace

Tensor TensorSplit::take(Stack& stack, DType dtype, Shape shape) const {
  return stack.take(dtype, shape.with_dim0(shard_rows(shape[0], ranks()) * ranks())).rows(0, shape[0]);
}

void TensorSplit::gather(ops::Context& ctx, ConstTensor mine, Tensor all) const {
  const std::int64_t T = all.shape[0], share = shard_rows(T, ranks());
  check(mine.shape == all.shape.with_dim0(rows(T).count()) && mine.dtype == all.dtype,
        "tensor split: the rows here are not this rank's of all",
        {{"rows", mine.shape[0]}, {"all", T}, {"rank", rank()}, {"ranks", ranks()}});
  const Tensor room = with_room(all, ranks()), place = room.rows(rank() * share, (rank() + 1) * share);
  copy_to_device(ctx.device(), place.data, mine.data, mine.bytes());
  const Communicator::Gather piece{place.data, room.data, place.bytes()};
  group_.all_gather({&piece, 1});
}

void TensorSplit::sum(ops::Context& ctx, ConstTensor all, Tensor mine) const {
  const std::int64_t T = all.shape[0], share = shard_rows(T, ranks());
  check(mine.shape == all.shape.with_dim0(rows(T).count()), "tensor split: the rows here are not this rank's of all",
        {{"rows", mine.shape[0]}, {"all", T}, {"rank", rank()}, {"ranks", ranks()}});
  Scope scope(ctx.scratch);
  const DType real = real_of(all.dtype);
  ConstTensor parts = all;
  if (all.dtype != real) {
    const Tensor widened = take(ctx.scratch, real, all.shape);
    ops::copy(ctx, ops::Copy{.x = all, .y = widened});
    parts = widened;
  }
  const Tensor sums = ctx.scratch.take(real, all.shape.with_dim0(share));
  const Communicator::Scatter piece{parts.data, sums.data, sums.count(), real};
  group_.reduce_scatter({&piece, 1});
  ops::copy(ctx, ops::Copy{.x = sums.rows(0, mine.shape[0]), .y = mine});
}

void TensorSplit::gather_values(ConstTensor mine, Tensor all) const {
  check(all.bytes() == ranks() * mine.bytes(), "tensor split: what is gathered does not fit",
        {{"mine", mine.bytes()}, {"all", all.bytes()}});
  const Communicator::Gather piece{mine.data, all.data, mine.bytes()};
  group_.all_gather({&piece, 1});
}

}  // namespace moetrain::parallel
