// search.h -- layouts and memory settings of least predicted time for a job on a number of ranks: same model, same global batch.
//
// What is tried: data x expert x sequence x tensor of that product, as far as check_config lets the job run so; micro-batches and
// their number; sharding, reshard_after_use, expert_sharding; layers kept whole, selectively, with a cache of the room that is
// left, or computed again; with host memory optimizer state, experts or both there. All else is the job's. It is no full search,
// and always the same one:
//   1  each layout and micro-batch with the settings of least memory, as little in host memory as it takes. Where that is too
//      large, at rest or in a dry step, the layout is left, as are its larger micro-batches.
//   2  of the fastest kWidened of those, every sharding; of each the first that fits of: all activations kept, those that cost, a
//      cache, none. What does not fit with the least sharded memory is not tried with more. Where something did not fit, all that
//      once more with more in host memory.
//   3  the best of all are planned for every kind of rank; those that still fit are proposed.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/plan.h"

namespace moetrain::core {

struct SearchLimits {
  int ranks = 1;
  std::int64_t device_memory = 0;  // bytes of each device
  std::int64_t host_memory = 0;    // for a rank; 0: nothing is laid there
  std::size_t best = 5;            // proposals at most
};
struct Proposal {
  Config config;
  std::vector<std::string> set;                   // key=value of what differs from the job
  double ms = 0;                                  // predicted
  std::int64_t device_bytes = 0, host_bytes = 0;  // of the largest rank
};
struct SearchResult {
  std::vector<Proposal> best;        // the fastest first
  int tried = 0;                     // dry steps of a rank
  std::optional<Proposal> smallest;  // where nothing fits: what needs the least of all tried, as far as rank 0 was planned
};
// Does the job break no rule, run on so many ranks and on the device it names? What files say is not asked.
bool allowed(const Config& config, int ranks);

SearchResult search(const Config& job, const Machine& machine, const SearchLimits& limits);

}  // namespace moetrain::core
