// plan_advice.cpp -- changes that keep the model, and where they can the global batch and the ranks, each planned.
#include "app/plan_advice.h"

#include <algorithm>
#include <functional>

#include "app/plan_report.h"
#include "core/search.h"

namespace moetrain::app {
namespace {

using core::Config, core::Plan;

struct Change {
  std::string what;  // the key and its new value
  std::function<void(Config&)> make;
  bool more_ranks = false;
};

// What a plan has too much of.
struct Short {
  bool device = false, host = false;
};
Short short_of(const Plan& plan, const MemoryLimits& limits) {
  return {limits.device && plan.most_device() > *limits.device, limits.host && plan.most_host() > *limits.host};
}

// Gathers the changes that check_config lets the job run with.
class Changes {
 public:
  Changes(const Config& job, Short lack) : job_(job), lack_(lack) {}
  std::vector<Change> all() {
    if (lack_.device) of_device();
    if (lack_.host) of_host();
    of_ranks();
    return std::move(found_);
  }

 private:
  void add(std::string what, std::function<void(Config&)> make, bool more_ranks = false) {
    Config changed = job_;
    make(changed);
    if (core::allowed(changed, changed.parallel.mesh().ranks())) found_.push_back({std::move(what), std::move(make), more_ranks});
  }

  void of_device() {
    using core::Checkpointing;
    const auto& p = job_.parallel;
    const auto& m = job_.memory;
    if (p.sharding != parallel::Sharding::full)
      add("parallel.sharding: full", [](Config& c) { c.parallel.sharding = parallel::Sharding::full; });
    if (!p.expert_sharding) add("parallel.expert_sharding: full", [](Config& c) { c.parallel.expert_sharding = true; });
    if (!p.reshard_after_use) add("parallel.reshard_after_use: true", [](Config& c) { c.parallel.reshard_after_use = true; });
    if (p.bucket_size.bytes > 0) add("parallel.bucket_size: 0", [](Config& c) { c.parallel.bucket_size.bytes = 0; });
    if (!m.cache.ops.empty()) add("memory.cache.ops: []", [](Config& c) { c.memory.cache = {}; });
    if (m.activation_checkpointing == Checkpointing::none)
      add("memory.activation_checkpointing: selective",
          [](Config& c) { c.memory.activation_checkpointing = Checkpointing::selective; });
    if (m.activation_checkpointing != Checkpointing::full)
      add("memory.activation_checkpointing: full", [](Config& c) { c.memory.activation_checkpointing = Checkpointing::full; });
    if (const std::int64_t size = job_.training.micro_batch_size; size > 1)
      add("training.micro_batch_size: 1 and gradient_accumulation: " + std::to_string(size * job_.training.gradient_accumulation),
          [size](Config& c) {
            c.training.micro_batch_size = 1;
            c.training.gradient_accumulation *= size;
          });
    if (const std::int64_t E = job_.model.num_experts; E > 0 && p.data_parallel % 2 == 0 && E % (2 * p.expert_parallel) == 0)
      add("parallel.expert_parallel: " + std::to_string(2 * p.expert_parallel) +
              " and data_parallel: " + std::to_string(p.data_parallel / 2),
          [](Config& c) {
            c.parallel.expert_parallel *= 2;
            c.parallel.data_parallel /= 2;
          });
    if (!lack_.host) to_host();
  }

  void to_host() {
    const auto& m = job_.memory;
    if (m.cache.device.bytes > 0)
      add("memory.cache.device: 0 and cache.host in its place", [](Config& c) {
        c.memory.cache.host.bytes += c.memory.cache.device.bytes;
        c.memory.cache.device.bytes = 0;
      });
    if (!m.offload.optimizer) add("memory.offload.optimizer: host", [](Config& c) { c.memory.offload.optimizer = true; });
    if (!m.offload.experts && job_.model.num_experts > 0)
      add("memory.offload.experts: host", [](Config& c) { c.memory.offload.experts = true; });
  }

  void of_host() {
    const auto& m = job_.memory;
    if (m.cache.host.bytes > 0) {
      if (m.cache.device.bytes > 0)
        add("memory.cache.host: 0", [](Config& c) { c.memory.cache.host.bytes = 0; });
      else if (!lack_.device)
        add("memory.cache.ops: []", [](Config& c) { c.memory.cache = {}; });
    }
    if (job_.checkpoint.async) add("checkpoint.async: false", [](Config& c) { c.checkpoint.async = false; });
    if (lack_.device) return;
    if (m.offload.optimizer) add("memory.offload.optimizer: none", [](Config& c) { c.memory.offload.optimizer = false; });
    if (m.offload.experts) add("memory.offload.experts: none", [](Config& c) { c.memory.offload.experts = false; });
  }

  void of_ranks() {
    const auto twice = [&](const char* axis, int core::ParallelConfig::*ranks) {
      add(
          "twice the ranks, parallel." + std::string(axis) + ": " + std::to_string(2 * (job_.parallel.*ranks)),
          [ranks](Config& c) { c.parallel.*ranks *= 2; }, /*more_ranks=*/true);
    };
    twice("data_parallel", &core::ParallelConfig::data_parallel);
    twice("sequence_parallel", &core::ParallelConfig::sequence_parallel);
    twice("tensor_parallel", &core::ParallelConfig::tensor_parallel);
  }

  const Config& job_;
  const Short lack_;
  std::vector<Change> found_;
};

std::string verdict(const Plan& plan, const MemoryLimits& limits, const std::string& too_much) {
  if (!*fits(plan, limits)) return too_much;
  return ", which fits" + (plan.time ? ": " + fixed(1e3 * plan.time->total(), 1) + " ms a step" : "");
}

// Where no change alone is enough: all those `changes`, which keep the number of ranks, and then as many more as it takes, or as
// make the largest rank smaller.
std::string all_changes(const Config& job, const std::vector<Change>& changes, const MemoryLimits& limits,
                        const core::Machine* machine, std::int64_t (*most)(const Plan&)) {
  constexpr int kMostRanks = 1 << 15;  // of an axis
  Config all = job;
  for (const Change& change : changes) change.make(all);
  Plan plan = core::make_plan(all, machine);
  while (!*fits(plan, limits) && all.parallel.data_parallel < kMostRanks) {
    Config more = all;
    more.parallel.data_parallel *= 2;
    Plan with_more = core::make_plan(more, machine);
    if (most(with_more) >= most(plan)) break;
    all = std::move(more);
    plan = std::move(with_more);
  }
  const auto& p = all.parallel;
  std::string text = "all of these that keep the ranks";
  if (p.mesh().ranks() != job.parallel.mesh().ranks())
    text += ", on " + std::to_string(p.mesh().ranks()) + " with parallel.data_parallel: " + std::to_string(p.data_parallel) +
            " and expert_parallel: " + std::to_string(p.expert_parallel);
  text += ", bring the largest rank to " + bytes_text(plan.most_device());
  if (plan.most_host() > 0) text += " and " + bytes_text(plan.most_host()) + " of host memory";
  return text + verdict(plan, limits, ", which does not fit; more ranks have no less");
}

}  // namespace

std::optional<bool> fits(const Plan& plan, const MemoryLimits& limits) {
  if (!limits.device && !limits.host) return std::nullopt;
  const Short lack = short_of(plan, limits);
  return !lack.device && !lack.host;
}

std::vector<std::string> advice(const Config& job, const Plan& plan, const MemoryLimits& limits, const core::Machine* machine) {
  std::vector<std::string> lines;
  const Short lack = short_of(plan, limits);
  if (!lack.device && !lack.host) return lines;
  std::int64_t (*const most)(const Plan&) =
      lack.device ? +[](const Plan& p) { return p.most_device(); } : +[](const Plan& p) { return p.most_host(); };
  std::vector<std::pair<std::int64_t, std::string>> better;
  const auto single = Changes(job, lack).all();
  std::vector<Change> kept;
  bool enough = false;
  for (const Change& change : single) {
    Config changed = job;
    change.make(changed);
    const Plan other = core::make_plan(changed, machine);
    enough = enough || *fits(other, limits);
    if (most(other) >= most(plan)) continue;
    if (!change.more_ranks) kept.push_back(change);
    std::string line = change.what + " brings the largest rank from " + bytes_text(most(plan)) + " to " + bytes_text(most(other));
    if (!lack.device)
      line += " of host memory";
    else if (other.most_host() != plan.most_host())
      line += ", and its host memory to " + bytes_text(other.most_host());
    better.emplace_back(most(other), line + verdict(other, limits, ""));
  }
  std::stable_sort(better.begin(), better.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  for (auto& [bytes, line] : better) lines.push_back(std::move(line));
  if (lines.empty()) {
    const core::RankPlan& r = *std::max_element(plan.ranks.begin(), plan.ranks.end(), [](const core::RankPlan& x, const core::RankPlan& y) {
      return x.device_pool < y.device_pool;
    });
    const auto part = std::max_element(r.device_bytes.begin(), r.device_bytes.end());
    lines.push_back(std::string("the largest part is ") + name_of(Category(part - r.device_bytes.begin())) + ", " +
                    bytes_text(*part) + " a rank: shorten data.sequence_length or use more ranks");
  }
  if (!enough) lines.push_back(all_changes(job, kept, limits, machine, most));
  return lines;
}

}  // namespace moetrain::app
