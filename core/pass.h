// pass.h -- what one forward or backward pass over one micro-batch has at hand; handed down from the step to every layer.
#pragma once
#include <span>
#include <vector>

#include "core/params.h"
#include "ops/context.h"
#include "ops/documents.h"
#include "parallel/expert_exchange.h"
#include "parallel/sequence_split.h"
#include "parallel/sharded_params.h"

namespace moetrain::core {

// Rows [begin, end) are the run's text from token `place` on, of which sequence n has [n S, (n+1) S).
struct Text {
  std::int64_t begin, end, place;
};

// One micro-batch of this rank, on the device.
struct MicroBatch {
  ConstTensor tokens;                       // (T) i32
  ConstTensor labels;                       // (T) i32, -100: ignored
  ops::Documents documents;                 // of the T tokens
  std::span<const std::int64_t> sequences;  // (B+1) offsets, of slices where sequences are cut over ranks
  std::vector<std::int64_t> lengths;        // (B) of whole sequences; empty where they are whole here
  std::vector<ops::Documents::Piece> pieces;  // what `documents` points to; so is a MicroBatch moved, and never copied
  std::vector<Text> text, gathered_text;      // of its rows, and of those that SequenceSplit gathers
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
  parallel::Communicator& balanced;          // the ranks that share the groups of balance.shared
  parallel::Communicator& everyone;          // the ranks that share a global batch, in the order of their sequences
  parallel::Communicator& everyone_on_host;  // the same, in host memory
  const Config& config;
  const MicroBatch& batch;
  Scales scales;
  LossSums losses;
  BalanceSums balance;
  RowSums& rows;
  PassMode mode = PassMode::train;
  DType dtype = DType::f32;  // of activations
  std::span<const Text> text = {};  // of the rows that are projected: what dropout is a function of

  DType real() const { return real_of(dtype); }
  std::int64_t T() const { return batch.T(); }
  bool sums() const { return mode == PassMode::train || mode == PassMode::held; }
  bool decided() const { return mode == PassMode::recompute || mode == PassMode::held; }
  // Evaluation sees the model as it will be used: its loss does not depend on what else is in a batch.
  bool limits_experts() const { return config.moe.capacity_factor > 0 && mode != PassMode::evaluate; }
  Tensor keep(Shape shape) { return kept.take(dtype, shape); }
  Tensor keep_real(Shape shape) { return kept.take(real(), shape); }
  Tensor scratch(Shape shape) { return ctx.scratch.take(dtype, shape); }
  Tensor scratch_real(Shape shape) { return ctx.scratch.take(real(), shape); }
};

}  // namespace moetrain::core
