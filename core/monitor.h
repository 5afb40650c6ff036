// monitor.h -- figures of a step that a person watches: expert load, speed, memory, time; as metrics row and as one aligned line.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/trainer.h"

namespace moetrain::core {

// Rows of an expert or a rank over the mean of its layer: the worst figures of any layer, which are the largest max and p95, and
// the smallest median and min. Empty without places or rows.
struct Load {
  double max = 0, p95 = 0, median = 0, min = 0;
  std::int64_t layer = 0, place = 0;  // of max: MoE layer from 0; expert or rank
};
std::optional<Load> load_of(const std::vector<std::int64_t>& rows, std::int64_t layers, std::int64_t places);

// What the loop measured around a step, of all ranks.
struct StepMeasures {
  double seconds = 0;
  std::int64_t device_peak_bytes = 0, host_peak_bytes = 0;  // the largest of any rank
  std::int64_t pool_peak_bytes = 0;                         // likewise: what its pool had to have (memory/pool.h)
  double pool_fragmentation = 0;                            // at the step's end
  double exposed_comm_seconds = 0;                          // likewise
  double model_flops = 0;                                   // of the global batch
  int ranks = 1;
  std::optional<ResultCache::Figures> cache;  // of all ranks together; saved_seconds of the rank that saved least
  std::int64_t cache_host_bytes = 0;          // the largest of any rank
  std::optional<double> eval_loss;
  std::int64_t tokens_seen = 0;
};

std::vector<std::string> metric_columns();
// In the order of metric_columns; what does not apply is empty.
std::vector<std::optional<double>> metric_row(const Config& config, const StepResult& result, const StepMeasures& measures);
// "step  12/300  loss   2.3456  norm     1.23  lr 3.00e-03     12345 tok/s  load  1.34  left 0:45"
std::string step_line(const Config& config, const StepResult& result, const StepMeasures& measures, double seconds_left);

}  // namespace moetrain::core
