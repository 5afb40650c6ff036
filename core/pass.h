// pass.h -- what one forward or backward pass over one micro-batch has at hand; handed down from the step to every layer.
#pragma once
#include <memory>
#include <span>
#include <vector>

#include "core/params.h"
#include "core/result_cache.h"
#include "ops/context.h"
#include "ops/documents.h"
#include "parallel/expert_exchange.h"
#include "parallel/sequence_split.h"
#include "parallel/sharded_params.h"
#include "parallel/tensor_split.h"

namespace moetrain::core {

// Rows [begin, end) are the run's text from token `place` on, of which sequence n has [n S, (n+1) S).
struct Text {
  std::int64_t begin, end, place;
};

// One micro-batch of this rank, or its share of the rows of one, on the device.
struct MicroBatch {
  ConstTensor tokens;                       // (T) i32
  ConstTensor labels;                       // (T) i32, -100: ignored
  ops::Documents documents;                 // of the T tokens
  std::span<const std::int64_t> sequences;  // (B+1) offsets, of slices where sequences are cut over ranks
  std::vector<std::int64_t> lengths;        // (B) of whole sequences; empty where they are whole here
  std::vector<ops::Documents::Piece> pieces;  // what `documents` points to; so is a MicroBatch moved, and never copied
  std::vector<Text> text, gathered_text;      // of its rows, and of those that SequenceSplit gathers
  std::vector<std::int64_t> own_starts, own_sequences;  // what a share's `documents` and `sequences` point to
  std::unique_ptr<MicroBatch> share;                    // this rank's of the rows, where matrices are cut over ranks
  MicroBatch() = default;
  MicroBatch(MicroBatch&&) = default;
  MicroBatch& operator=(MicroBatch&&) = default;
  std::int64_t T() const { return tokens.shape[0]; }
  std::int64_t B() const { return std::int64_t(sequences.size()) - 1; }
};

// One over the sizes of the global batch (all ranks, all micro-batches), so that sums over ranks and micro-batches are means.
struct Scales {
  double per_label = 0, per_token = 0, per_sequence = 0;
};

// Running sums of this rank over the micro-batches of a step.
struct LossSums {
  Tensor lm;       // (1) real, sum over labels
  Tensor balance;  // (1) real, already scaled
  Tensor indexer;  // (1) real, sum over rows and layers
};

// What balancing needs of a step: exact integers of this rank.
struct BalanceSums {
  Tensor counts;     // (moe layers, E) i64, slots the router chose an expert for, whatever room it had
  Tensor histogram;  // (moe layers, E, bins) i64; absent unless balance is quantile
  Tensor shared;     // (moe layers, groups, E) i64, counts of this micro-batch by group of tokens, with those of other ranks; absent
                     // unless the auxiliary loss takes the load over tokens of several ranks
};

// Where rows of a step went; on the host.
struct RowSums {
  std::vector<std::int64_t> received;      // (moe layers) rows the experts of this rank worked on
  std::int64_t rerouted = 0, dropped = 0;  // slots of all ranks
};

enum class PassMode : std::uint8_t {
  train,      // forward for a backward: sums losses and balance
  recompute,  // forward again for a backward: nothing is summed twice, decisions are given
  held,       // train with given decisions: a loss whose slope exists (its selections do not jump)
  evaluate    // loss only; balance is not fed
};

struct Pass {
  ops::Context& ctx;
  Stack& kept;  // what forward keeps for backward
  parallel::ShardedParams& params;
  const ParamTable& table;
  parallel::ExpertExchange* exchange;        // null without experts
  parallel::SequenceSplit* sequence;         // null where sequences are whole
  parallel::TensorSplit* tensor;             // null where matrices are whole; else all layers work on this rank's rows, and ask for
                                             // all of them where they multiply by a part of a matrix
  parallel::Communicator& balanced;          // the ranks that share the groups of balance.shared
  parallel::Communicator& everyone;          // the ranks that share a global batch, in the order of their sequences
  parallel::Communicator& everyone_on_host;  // the same, in host memory
  const Config& config;
  const MicroBatch *batch, *slice, *rows_here;  // what is worked on: all rows of the slice, or those of this rank
  Scales scales;
  LossSums losses;
  BalanceSums balance;
  RowSums& rows;
  PassMode mode = PassMode::train;
  DType dtype = DType::f32;  // of activations
  ResultCache* results = nullptr;   // where layers are computed again, and some operators need not be
  std::span<const Text> text = {};  // of the rows that are projected: what dropout is a function of

  DType real() const { return real_of(dtype); }
  std::int64_t T() const { return batch->T(); }
  Pass on(const MicroBatch& other) const {
    Pass pass = *this;
    pass.batch = &other;
    pass.text = other.text;
    return pass;
  }
  Pass on_slice() const { return on(*slice); }
  Pass on_rows() const { return on(*rows_here); }
  parallel::Rows rows_of_slice() const { return tensor ? tensor->rows(slice->T()) : parallel::Rows{0, slice->T()}; }
  // All rows of the slice from those here; in scratch where they come from several ranks: the caller holds a Scope.
  ConstTensor all_rows(ConstTensor here) const {
    if (!tensor) return here;
    const Tensor all = tensor->take(ctx.scratch, here.dtype, here.shape.with_dim0(slice->T()));
    tensor->gather(ctx, here, all);
    return all;
  }
  bool sums() const { return mode == PassMode::train || mode == PassMode::held; }
  bool decided() const { return mode == PassMode::recompute || mode == PassMode::held; }
  // Evaluation sees the model as it will be used: its loss does not depend on what else is in a batch.
  bool limits_experts() const { return config.moe.capacity_factor > 0 && mode != PassMode::evaluate; }
  // The outputs of an operator that backward needs, and that cost: kept, or found again (core/result_cache.h).
  ResultCache::Result result(ResultOp op, std::initializer_list<ResultCache::Output> outputs) const {
    return {results, kept, op, {outputs.begin(), outputs.size()}};
  }
  Tensor keep(Shape shape) { return kept.take(dtype, shape); }
  Tensor keep_real(Shape shape) { return kept.take(real(), shape); }
  Tensor scratch(Shape shape) { return ctx.scratch.take(dtype, shape); }
  Tensor scratch_real(Shape shape) { return ctx.scratch.take(real(), shape); }
};

// The sum over ranks of what work(pass, all rows of x, y) writes, each with its part of a matrix. Without y it writes none.
template <class Work>
void on_all_rows(Pass& pass, ConstTensor x, Tensor y, Work&& work) {
  if (!pass.tensor) return work(pass, x, y);
  Scope scope(pass.ctx.scratch);
  Pass slice = pass.on_slice();
  const ConstTensor all = pass.all_rows(x);
  if (!y.present()) return work(slice, all, y);
  const Tensor part = pass.tensor->take(pass.ctx.scratch, y.dtype, y.shape.with_dim0(slice.T()));
  work(slice, all, part);
  pass.tensor->sum(pass.ctx, part, y);
}

}  // namespace moetrain::core
