// checkpoint.h -- what a checkpoint holds, and loading under any layout; core/checkpoint_saver.h writes it.
//
//   <folder>/step_00000100/checkpoint.h5      the one view: every parameter whole under its public name, /master,
//                                             /optimizer/exp_avg and /optimizer/exp_avg_sq likewise (virtual data sets over the shards), step, tokens,
//                                             job, layout, checksums
//   <folder>/step_00000100/checkpoint.crc32   bytes and checksum of checkpoint.h5 itself
//   <folder>/step_00000100/shard_00000.h5     the rows of one rank
//   <folder>/step_00000100/frozen_00000.h5    those that the job leaves as they are, where it has such: one file under several names in
//                                             the checkpoints of a run, where the disk can do that
//   <folder>/latest                           the name of the newest complete one
// A checkpoint is complete or absent: written into step_N.partial, synced, renamed; `latest` moves after that, and only then older
// ones go. Nothing of it is used before presence, size and checksum of every file have been verified.
#pragma once
#include <optional>
#include <string>

#include "core/trainer.h"

namespace moetrain::core {

inline constexpr std::int64_t kCheckpointFormat = 1;

// The tensors of a parameter that a checkpoint holds, as data sets and the rows of them that lie here.
struct SavedTensor {
  std::string dataset;
  Tensor rows;
  Category category;  // weights, optimizer
};
std::vector<SavedTensor> saved_tensors(Trainer& trainer, int parameter, parallel::Rows rows);

std::string step_name(std::int64_t step);

// Collective. path: a step folder. Fails on every rank or on none, before any value is used. The model and adapters of the job in
// the checkpoint must be those of this run, with same_run its data and optimizer too; the layout may differ.
void load_checkpoint(Trainer& trainer, const std::string& path, bool same_run);

// An Error that names the first difference when the checkpoint at `path` belongs to a run of another model, adapters, data or
// optimizer.
void check_same_run(const Config& config, const std::string& path);

// The step folder that <folder>/latest names, without that file the newest; empty when there is no checkpoint. An Error when `latest` names what is not there.
std::string latest_checkpoint(const std::string& folder);

// The checkpoint that a path means: a step folder, or the newest of a run folder or of a folder of checkpoints. Empty: none of these.
std::string checkpoint_at(const std::string& path);

// What stands in a checkpoint, files verified; for `moetrain inspect`.
struct CheckpointSummary {
  std::int64_t format = 0, step = 0, tokens = 0, sequences = 0, updates = 0, seed = 0;
  std::string job, layout;
  std::vector<std::string> shards;  // file names
  std::int64_t bytes = 0;
};
CheckpointSummary read_checkpoint_summary(const std::string& path);

}  // namespace moetrain::core
