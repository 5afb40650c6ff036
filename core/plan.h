// plan.h -- what follows from a job and a number of ranks before anything runs: parameters, bytes by rank and category, FLOPs.
#pragma once
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"
#include "core/step_time.h"
#include "memory/buffer.h"

namespace moetrain::core {

struct ParameterCounts {
  std::int64_t total = 0;
  std::int64_t active_per_token = 0;  // a token's share: its experts_per_token experts, everything else but the input embedding
  std::int64_t routed_experts = 0;
  std::int64_t trunk = 0;             // all that is not a routed expert
  std::int64_t trainable = 0;
};
ParameterCounts count_parameters(const Config& config);

// Multiplications and additions (2 a product) of one step's forward and backward (backward: twice forward, once where a matrix is
// frozen, not at all below the lowest layer that learns; recomputation not counted), by kind of layer, over all ranks' tokens.
// Attention counts causal pairs of full sequences, sparse attention the selected ones.
struct StepFlops {
  double kda = 0, attention = 0, indexer = 0, dense_mlp = 0, experts = 0, shared_experts = 0, latent = 0, router = 0, head = 0;
  double total() const { return kda + attention + indexer + dense_mlp + experts + shared_experts + latent + router + head; }
};
StepFlops step_flops(const Config& config, std::int64_t tokens);  // tokens of the global batch

struct RankPlan {
  int rank = 0, count = 1;            // ranks that are alike, this one the first of them
  std::array<std::int64_t, kCategories> device_bytes{};  // each category's own peak in the step
  std::array<std::int64_t, kCategories> host_bytes{};    // of cached results, offloaded state, and the copy of checkpoint.async
  std::int64_t device_total = 0, host_total = 0;         // peaks of their sums
  std::int64_t device_pool = 0;       // what the device's pool must have (memory/pool.h): that with rounding and holes
  std::array<PhaseBytes, kMemoryPhases> device_phases{}, host_phases{};
};
// What one rank holds and how long its step takes; without a machine no time.
struct RankStep {
  RankPlan plan;
  StepTime time;
  parallel::Traffic traffic;
};
RankStep dry_step(const Config& config, int rank, const Machine* machine = nullptr);
// What a rank holds before its first step: no step holds less.
RankPlan resting_rank(const Config& config, int rank);

struct Plan {
  ParameterCounts parameters;
  std::vector<RankPlan> ranks;
  StepFlops flops;
  std::int64_t tokens = 0;            // of the global batch
  std::int64_t bytes_gathered = 0, bytes_exchanged = 0;  // a step, of rank 0
  std::optional<StepTime> time;                          // of the slowest kind of rank; only with a machine
  std::int64_t most_device() const;                      // of the largest rank's pool
  std::int64_t most_host() const;
};
// One step run on Device::dry for each kind of rank: balanced routing, full sequences. There is no second book of sizes. Scratch
// that CPU kernels take for every thread is counted for as many threads as this process has (OMP_NUM_THREADS). An Error where
// tokens, parameters or bytes are too many to count. With a machine the step has a clock (core/step_time.h), and cached results are
// those that are worth it by that clock; without one, as many as there is room for.
Plan make_plan(const Config& config, const Machine* machine = nullptr);

}  // namespace moetrain::core
