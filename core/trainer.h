// trainer.h -- everything of a run that lives across steps on this rank, and one optimizer step over it (core/train_step.cpp).
#pragma once
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "core/model.h"
#include "core/optimizer.h"
#include "io/batch_source.h"
#include "parallel/mesh.h"

namespace moetrain::core {

enum class Skipped : std::uint8_t { no, no_labels, nonfinite };

// What one step did, the same on every rank.
struct StepResult {
  std::int64_t step = 0;  // 1 = the first
  double loss = 0;        // mean over the label tokens of the global batch, before the update; 0 without labels
  std::optional<double> balance_loss,
      indexer_loss;      // empty where the job has none; indexer_loss: mean over rows, summed over layers
  double grad_norm = 0;  // global, before clipping
  double lr = 0;
  std::int64_t tokens = 0, label_tokens = 0;  // of the global batch
  std::vector<std::int64_t> expert_tokens;    // (moe layers x experts) of the global batch, as the router chose
  std::vector<std::int64_t> rank_rows;        // (moe layers x ranks) rows that a rank's experts worked on
  std::int64_t rerouted = 0, dropped = 0;     // slots (tokens x experts a token) of all ranks and layers that met a full expert
  Skipped skipped = Skipped::no;
};

struct Progress {  // what a checkpoint holds besides tensors
  std::int64_t step = 0, updates = 0, sequences = 0, tokens = 0;
};

// A job that leaves the device open is planned for a GPU where this build knows one: plans are made where no GPU is.
Device planned_device(const Config& config);

class Trainer {
 public:
  // `world` has as many ranks as the job's mesh. Collective: fails on every rank or on none. Weights are uninitialised.
  Trainer(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, bool poison = false);

  void initialize();              // fresh weights, a function of the seed
  void initialize(int parameter);  // those of one, not yet published
  // One step over this rank's micro-batches (as many on every rank). Collective.
  StepResult step(std::span<const io::Batch> micro_batches);
  // The micro-batches of this rank for the next step: sequence n of the run is the same under every layout.
  std::vector<io::Batch> next_batches(const io::BatchSource& source) const;
  // The micro-batches of this rank of the first `batches` global batches of `source`, or of all its sequences where it has fewer:
  // the same text under every layout. As many on every rank, empty ones past the end.
  std::vector<io::Batch> evaluation_batches(const io::BatchSource& source, std::int64_t batches) const;
  // Mean loss over the label tokens of all ranks' batches, empty where there are none; feeds nothing. logits (T, V): of the last
  // batch, when present. Collective.
  std::optional<double> evaluate(std::span<const io::Batch> batches, Tensor logits = {});

  const Config& config() const { return config_; }
  const ParamTable& table() const { return table_; }
  const Layout& layout() const { return layout_; }
  Model& model() { return model_; }
  parallel::Mesh& mesh() { return mesh_; }
  parallel::ShardedParams& params() { return *params_; }
  Optimizer& optimizer() { return *optimizer_; }
  Memory& memory() { return memory_; }
  Memory& host_memory() { return host_memory_; }  // that the device's results and state lie in
  void enter(MemoryPhase phase) { memory_.enter(phase), host_memory_.enter(phase); }
  ResultCache* results() { return results_.get(); }
  ops::Context& context() { return ctx_; }
  io::Slice slice() const { return {mesh_.here().sequence, mesh_.shape().sequence}; }  // of every sequence, that is here
  Progress progress() const;
  void set_progress(const Progress& p);

  // The parts of a step, for tests that look between forward and backward.
  struct Totals {  // of the global batch
    std::int64_t labels = 0, tokens = 0, sequences = 0;
  };
  Totals count(std::span<const io::Batch> batches);  // collective
  // Onto the stack of kept tensors. first_sequence: of the run, where the pass depends on it.
  MicroBatch upload(const io::Batch& batch, std::int64_t first_sequence = 0);
  Pass make_pass(const MicroBatch& batch, const Totals& totals, PassMode mode);
  void zero_sums();

 private:
  std::int64_t first_sequence(std::int64_t micro_batch) const;  // of the next step, of all that the run reads
  void place(const io::Batch& batch, std::int64_t first_sequence, MicroBatch& placed) const;
  std::unique_ptr<MicroBatch> share_of(const MicroBatch& slice);
  void allocate(bool poison);  // this rank's share of weights, gradients and optimizer state
  void reduce_losses(const Totals& totals, StepResult& result);
  void reduce_counts(StepResult& result);
  void update_balance(const StepResult& result);

  Config config_;
  parallel::Mesh mesh_;
  Memory memory_, host_memory_;
  Stack scratch_, kept_;
  ops::OwnedBlas blas_;
  std::vector<Buffer> planned_blas_;  // what it would take, in a dry run for a GPU
  ops::Context ctx_;
  ParamTable table_;
  Model model_;
  Layout layout_;
  std::unique_ptr<parallel::ShardedParams> params_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<parallel::ExpertExchange> exchange_;
  std::unique_ptr<parallel::SequenceSplit> sequence_;
  std::unique_ptr<parallel::TensorSplit> tensor_;
  std::unique_ptr<ResultCache> results_;
  OwnedTensor lm_, balance_, indexer_, counts_, histogram_, shared_counts_;
  RowSums rows_;
  Progress progress_;
};

}  // namespace moetrain::core
