// search.h -- layouts and memory settings of least predicted time for a job on a number of ranks: same model, same global batch.
//
// What is tried: data x expert x sequence x tensor of that product, as far as check_config lets the job run so; micro-batches and their
// number; sharding, reshard_after_use, expert_sharding; layers kept whole, selectively, with a cache of the room that is left, or computed
// again. It is no full search, and always the same one:
//   1  each layout and micro-batch with the settings of least memory. Where these alone are too large, by resting_bytes or by a dry step,
//      the layout is left, as are its larger micro-batches.
//   2  of the fastest kWidened of those, every sharding; of each the first that fits of: all activations kept, those that cost, a cache,
//      none. What does not fit with the least sharded memory is not tried with more.
//   3  the best of all are planned for every kind of rank; those that still fit are proposed.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/params.h"
#include "core/plan.h"

namespace moetrain::core {

struct SearchLimits {
  int ranks = 1;
  std::int64_t device_memory = 0;  // bytes of each device
  std::int64_t host_memory = 0;    // for a rank; 0: none for cached results
  std::size_t best = 5;            // proposals at most
};
struct Proposal {
  Config config;
  std::vector<std::string> set;  // key=value of what differs from the job
  double ms = 0;                 // predicted
  std::int64_t device_bytes = 0, host_bytes = 0;  // of the largest rank
};
struct SearchResult {
  std::vector<Proposal> best;  // the fastest first
  int tried = 0;               // dry steps of a rank
  std::optional<Proposal> smallest;  // where nothing fits: what needs the least of what was tried; of its bytes, those of rank 0 at least
};
// Does the job break no rule, run on so many ranks and on the device it names? What files say is not asked.
bool allowed(const Config& config, int ranks);

SearchResult search(const Config& job, const Machine& machine, const SearchLimits& limits);

// Weights, gradients and optimizer state that the largest rank holds between steps, without what rows that do not divide add: no plan
// has less.
std::int64_t resting_bytes(const Config& config, const ParamTable& table);

}  // namespace moetrain::core
