// search.cpp -- the walk over layouts and settings, pruned by what is held at rest.
#include "core/search.h"

#include <algorithm>

namespace moetrain::core {
namespace {

constexpr std::size_t kWidened = 8;                    // starts whose settings are varied
constexpr std::int64_t kRoom = std::int64_t(1) << 30;  // a cache is of whole GiB

// key=value of every leaf of `now` that `before` has otherwise. run.device is the planner's own.
void differences(const io::YamlNode& before, const io::YamlNode& now, const std::string& path, std::vector<std::string>& found) {
  if (path == "run.device" || before == now) return;
  if (now.kind == io::YamlNode::map) {
    for (const auto& [key, value] : now.entries) {
      const io::YamlNode* old = before.find(key);
      differences(old ? *old : io::YamlNode{}, value, path.empty() ? key : path + "." + key, found);
    }
    return;
  }
  std::string items;
  for (const io::YamlNode& item : now.items) items += (items.empty() ? "" : ",") + item.text;
  found.push_back(path + "=" + (now.kind == io::YamlNode::list ? "[" + items + "]" : now.text));
}

std::vector<std::int64_t> divisors(std::int64_t n) {
  std::vector<std::int64_t> found;
  for (std::int64_t d = 1; d * d <= n; ++d)
    if (n % d == 0) {
      found.push_back(d);
      if (d * d != n) found.push_back(n / d);
    }
  std::sort(found.begin(), found.end());
  return found;
}

struct Tried {
  Config config;
  double seconds = 0;
  std::int64_t device_bytes = 0, host_bytes = 0;
};

class Search {
 public:
  Search(const Config& job, const Machine& machine, const SearchLimits& limits) : job_(job), machine_(machine), limits_(limits) {}

  SearchResult run() {
    std::vector<Tried> starts = all_starts(), found = starts;
    by_time(starts);
    if (starts.size() > kWidened) starts.resize(kWidened);
    for (const Tried& start : starts) widen(start, found);
    by_time(found);
    return result(found);
  }

 private:
  static void by_time(std::vector<Tried>& all) {
    std::stable_sort(all.begin(), all.end(), [](const Tried& a, const Tried& b) { return a.seconds < b.seconds; });
  }
  bool fits(const RankPlan& r) const {
    return r.device_pool <= limits_.device_memory && (limits_.host_memory == 0 || r.host_total <= limits_.host_memory);
  }

  // Planned for rank 0, the largest where shards are uneven; nothing where it is not allowed or does not fit.
  std::optional<Tried> tried(const Config& c) {
    if (!allowed(c, limits_.ranks)) return {};
    if (const RankPlan resting = resting_rank(c, 0); !fits(resting)) return too_large(c, resting);
    const RankStep step = dry_step(c, 0, &machine_);
    ++steps_;
    if (!fits(step.plan)) return too_large(c, step.plan);
    return Tried{c, step.time.total(), step.plan.device_pool, step.plan.host_total};
  }
  std::nullopt_t too_large(const Config& c, const RankPlan& r) {
    ++too_large_;
    if (!smallest_ || r.device_pool < smallest_->device_bytes) smallest_ = {c, 0, r.device_pool, r.host_total};
    return std::nullopt;
  }

  // What may lie in host memory, from nothing on.
  std::vector<OffloadConfig> offloads() const {
    std::vector<OffloadConfig> found;
    const bool host = limits_.host_memory > 0;
    for (const bool experts : {false, true})
      for (const bool optimizer : {false, true}) {
        if ((optimizer || experts) && !host) continue;
        if (experts && job_.model.num_experts == 0) continue;
        found.push_back({.optimizer = optimizer, .experts = experts, .slice = job_.memory.offload.slice});
      }
    return found;
  }

  static void least_memory(Config& c) {
    c.parallel.sharding = parallel::Sharding::full;
    c.parallel.reshard_after_use = c.parallel.expert_sharding = true;
    c.memory.activation_checkpointing = Checkpointing::full;
    c.memory.cache = {};
  }
  std::optional<Tried> least_offloaded(Config c) {
    for (const OffloadConfig& offload : offloads()) {
      c.memory.offload = offload;
      if (auto t = tried(c)) return t;
    }
    return {};
  }

  std::vector<Tried> all_starts() {
    std::vector<Tried> found;
    const std::int64_t N = limits_.ranks, sequences = job_.sequences_per_step();
    for (const std::int64_t tensor : divisors(N))
      for (const std::int64_t sequence : divisors(N / tensor))
        for (const std::int64_t expert : divisors(N / tensor / sequence)) {
          Config c = job_;
          c.parallel.tensor_parallel = int(tensor);
          c.parallel.sequence_parallel = int(sequence);
          c.parallel.expert_parallel = int(expert);
          c.parallel.data_parallel = int(N / tensor / sequence / expert);
          const std::int64_t readers = std::int64_t(c.parallel.data_parallel) * expert;
          if (sequences % readers != 0) continue;
          for (const std::int64_t size : divisors(sequences / readers)) {
            const bool usual = (size & (size - 1)) == 0 || size == job_.training.micro_batch_size;
            if (!usual) continue;
            c.training.micro_batch_size = size;
            c.training.gradient_accumulation = sequences / readers / size;
            least_memory(c);
            if (!allowed(c, limits_.ranks)) continue;
            auto t = least_offloaded(c);
            if (!t) break;  // larger ones hold more
            found.push_back(std::move(*t));
          }
        }
    return found;
  }

  // Shardings of `start`, the one of least memory first.
  std::vector<Config> shardings(const Config& start) const {
    using parallel::Sharding;
    const auto& p = start.parallel;
    const bool dense = limits_.ranks > 1, experts = job_.model.num_experts > 0 && limits_.ranks > p.expert_parallel;
    std::vector<Config> found;
    for (const bool cut_experts : {true, false}) {
      if (!cut_experts && !experts) continue;
      for (const auto& [sharding, reshard] : {std::pair{Sharding::full, true},
                                              {Sharding::full, false},
                                              {Sharding::gradients, true},
                                              {Sharding::optimizer, true},
                                              {Sharding::none, true}}) {
        if (!dense && !(sharding == Sharding::full && reshard)) continue;
        found.push_back(start);
        auto& to = found.back().parallel;
        to.sharding = sharding;
        to.reshard_after_use = reshard;
        to.expert_sharding = cut_experts;
      }
    }
    return found;
  }

  void widen(const Tried& start, std::vector<Tried>& found) {
    bool reached = false;  // what the start has there
    for (const OffloadConfig& offload : offloads()) {
      reached = reached || offload == start.config.memory.offload;
      if (!reached) continue;
      Config offloaded = start.config;
      offloaded.memory.offload = offload;
      const int too_large = too_large_;
      std::array<bool, 2> hopeless{};  // with the least sharded memory already
      bool first = true;
      for (const Config& c : shardings(offloaded)) {
        widen_memory(c, first, hopeless, found);
        first = false;
      }
      if (too_large_ == too_large) return;
    }
  }

  void widen_memory(const Config& sharded, bool first, std::array<bool, 2>& hopeless, std::vector<Tried>& found) {
    Config c = sharded;
    for (const Checkpointing kept : {Checkpointing::none, Checkpointing::selective}) {
      bool& gone = hopeless[std::size_t(kept == Checkpointing::selective)];
      if (gone) continue;
      c.memory.activation_checkpointing = kept;
      if (auto t = tried(c)) return void(found.push_back(std::move(*t)));
      gone = first;
    }
    c.memory.activation_checkpointing = Checkpointing::full;
    const auto without = tried(c);
    if (!without) return;
    found.push_back(*without);
    const std::int64_t host = limits_.host_memory > 0 ? (limits_.host_memory - without->host_bytes) / kRoom * kRoom : 0;
    c.memory.cache = {.ops = {"auto"}, .device = {(limits_.device_memory - without->device_bytes) / kRoom * kRoom}, .host = {host}};
    if (c.memory.cache.device.bytes + host == 0) return;
    auto with = tried(c);
    if (!with) return;
    if (with->host_bytes == without->host_bytes) {  // nothing was worth the way there
      if (c.memory.cache.device.bytes == 0) return;
      with->config.memory.cache.host = {};
    }
    found.push_back(std::move(*with));
  }

  SearchResult result(const std::vector<Tried>& found) {
    SearchResult r;
    const io::YamlNode before = config_to_yaml(job_);
    for (const Tried& t : found) {
      if (r.best.size() == limits_.best) break;
      Proposal p{.config = t.config};
      differences(before, config_to_yaml(t.config), "", p.set);
      if (std::any_of(r.best.begin(), r.best.end(), [&](const Proposal& o) { return o.set == p.set; })) continue;
      const Plan plan = make_plan(t.config, &machine_);
      p.device_bytes = plan.most_device();
      p.host_bytes = plan.most_host();
      p.ms = 1e3 * plan.time->total();
      if (std::all_of(plan.ranks.begin(), plan.ranks.end(), [&](const RankPlan& rank) { return fits(rank); }))
        r.best.push_back(std::move(p));
    }
    std::stable_sort(r.best.begin(), r.best.end(), [](const Proposal& a, const Proposal& b) { return a.ms < b.ms; });
    r.tried = steps_;
    if (r.best.empty() && smallest_) {
      r.smallest = {.config = smallest_->config, .device_bytes = smallest_->device_bytes, .host_bytes = smallest_->host_bytes};
      differences(before, config_to_yaml(smallest_->config), "", r.smallest->set);
    }
    return r;
  }

  const Config& job_;
  const Machine& machine_;
  const SearchLimits& limits_;
  int steps_ = 0, too_large_ = 0;
  std::optional<Tried> smallest_;  // of what does not fit
};

}  // namespace

bool allowed(const Config& c, int ranks) {
  std::vector<Fault> faults;
  check_config(c, io::YamlNode{}, ranks, faults);
  const auto of_files = [](const Fault& f) {
    return f.key.starts_with("data.train") || f.key.starts_with("data.eval") || f.key.starts_with("model.init_from");
  };
  return std::all_of(faults.begin(), faults.end(), of_files) && !(c.run.device == DeviceChoice::cuda && c.cpu_only());
}

SearchResult search(const Config& job, const Machine& machine, const SearchLimits& limits) {
  return Search(job, machine, limits).run();
}

}  // namespace moetrain::core
