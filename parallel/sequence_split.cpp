// sequence_split.cpp -- slices padded to their share where sequences are short, so that every rank's part of a message is as long.
#include "parallel/sequence_split.h"

#include <vector>

#include "ops/elementwise.h"

namespace moetrain::parallel {

void SequenceSplit::gather_rows(ops::Context& ctx, std::span<const std::int64_t> slices, ConstTensor rows, Tensor gathered) {
  const auto B = std::int64_t(slices.size()) - 1, whole = ranks() * share_;
  check(rows.shape[0] == slices.back() && gathered.shape == rows.shape.with_dim0(B * whole) && gathered.dtype == rows.dtype,
        "sequence split: gathered rows do not fit", {{"rows", rows.shape[0]}, {"slices", slices.back()}, {"gathered", gathered.shape[0]}});
  Scope scope(ctx.scratch);
  ConstTensor padded = rows;
  if (!full(slices)) {
    const Tensor room = ctx.scratch.zeros(rows.dtype, rows.shape.with_dim0(B * share_));
    for (std::int64_t b = 0; b < B; ++b) {
      const std::int64_t begin = slices[std::size_t(b)], count = slices[std::size_t(b) + 1] - begin;
      ops::copy(ctx, ops::Copy{.x = rows.rows(begin, begin + count), .y = room.rows(b * share_, b * share_ + count)});
    }
    padded = room;
  }
  std::vector<Communicator::Gather> pieces;
  for (std::int64_t b = 0; b < B; ++b) {
    const ConstTensor mine = padded.rows(b * share_, (b + 1) * share_);
    pieces.push_back({mine.data, gathered.rows(b * whole, (b + 1) * whole).data, mine.bytes()});
  }
  group_.all_gather(pieces);
}

void SequenceSplit::sum_rows(ops::Context& ctx, std::span<const std::int64_t> slices, ConstTensor gathered, Tensor rows) {
  const auto B = std::int64_t(slices.size()) - 1, whole = ranks() * share_;
  check(rows.shape[0] == slices.back() && gathered.shape == rows.shape.with_dim0(B * whole), "sequence split: gathered rows do not fit",
        {{"rows", rows.shape[0]}, {"slices", slices.back()}, {"gathered", gathered.shape[0]}});
  Scope scope(ctx.scratch);
  const DType real = real_of(rows.dtype);
  ConstTensor parts = gathered;
  if (gathered.dtype != real) {
    const Tensor widened = ctx.scratch.take(real, gathered.shape);
    ops::copy(ctx, ops::Copy{.x = gathered, .y = widened});
    parts = widened;
  }
  const Tensor sums = ctx.scratch.take(real, rows.shape.with_dim0(B * share_));
  std::vector<Communicator::Scatter> pieces;
  for (std::int64_t b = 0; b < B; ++b) {
    const Tensor mine = sums.rows(b * share_, (b + 1) * share_);
    pieces.push_back({parts.rows(b * whole, (b + 1) * whole).data, mine.data, mine.count(), real});
  }
  group_.reduce_scatter(pieces);
  for (std::int64_t b = 0; b < B; ++b) {
    const std::int64_t begin = slices[std::size_t(b)], count = slices[std::size_t(b) + 1] - begin;
    ops::copy(ctx, ops::Copy{.x = sums.rows(b * share_, b * share_ + count), .y = rows.rows(begin, begin + count)});
  }
}

void SequenceSplit::gather(ConstTensor mine, Tensor all) {
  check(all.bytes() == ranks() * mine.bytes(), "sequence split: what is gathered does not fit", {{"mine", mine.bytes()}, {"all", all.bytes()}});
  const Communicator::Gather piece{mine.data, all.data, mine.bytes()};
  group_.all_gather({&piece, 1});
}

void SequenceSplit::shift(ops::Context& ctx, int step, ConstTensor mine, Tensor arrived) {
  check(mine.bytes() == arrived.bytes() && (step == 1 || step == -1), "sequence split: what arrives does not fit what leaves",
        {{"leaves", mine.bytes()}, {"arrives", arrived.bytes()}, {"step", step}});
  std::vector<Communicator::Outgoing> send(std::size_t(ranks()), {nullptr, 0});
  std::vector<Communicator::Incoming> receive(std::size_t(ranks()), {nullptr, 0});
  const int to = rank() + step, from = rank() - step;
  if (0 <= to && to < ranks()) send[std::size_t(to)] = {mine.data, mine.bytes()};
  if (0 <= from && from < ranks())
    receive[std::size_t(from)] = {arrived.data, arrived.bytes()};
  else
    fill(ctx.device(), arrived.data, 0, arrived.bytes());
  group_.begin_all_to_all(send, receive);
  group_.end();
}

}  // namespace moetrain::parallel
