// train_loop.h -- a whole run: steps, evaluation, checkpoints, log lines, stop signals, and how it ended.
#pragma once
#include <functional>
#include <memory>
#include <string>

#include "core/config.h"
#include "parallel/communicator.h"

namespace moetrain::core {

struct TrainOptions {
  std::string resume = "auto";  // auto: from <run.dir>/checkpoints/latest if it is there; never; or what checkpoint_at takes
  std::int64_t stop_after = 0;  // steps of this run, then a checkpoint and the end; 0: all
  std::function<bool()> stop_requested;  // asked once a step: a signal reached this rank
  // Told the step the run stands at, at its start and after each one: who catches a failure can say how far it came.
  std::function<void(std::int64_t)> reached;
};

// Collective; returns the same code on every rank, after everything is on disk. Failures throw: AgreedError on all ranks alike, any
// other Error on the rank it happened on.
ExitCode train(const Config& config, std::unique_ptr<parallel::Communicator> world, Device device, const TrainOptions& options);

}  // namespace moetrain::core
