// plan.cpp -- a job's parameters, bytes, FLOPs and time as tables for people or as JSON for programs, what to change if it does not
// fit, and what would be faster.
#include "core/plan.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <iostream>
#include <numeric>

#include "app/commands.h"
#include "app/job.h"
#include "app/plan_report.h"
#include "core/search.h"
#include "core/trainer.h"

namespace moetrain::app {
namespace {

using core::Plan;
using core::RankPlan;

std::int64_t host_total(const RankPlan& r) { return std::accumulate(r.host_bytes.begin(), r.host_bytes.end(), std::int64_t(0)); }

std::int64_t worst(const Plan& plan) {
  std::int64_t most = 0;
  for (const RankPlan& r : plan.ranks) most = std::max(most, r.device_total);
  return most;
}

// Nothing when no memory was named.
std::optional<bool> fits(const Plan& plan, const PlanArguments& a) {
  if (!a.device_memory && !a.host_memory) return std::nullopt;
  return std::all_of(plan.ranks.begin(), plan.ranks.end(), [&](const RankPlan& r) {
    return (!a.device_memory || r.device_total <= *a.device_memory) && (!a.host_memory || host_total(r) <= *a.host_memory);
  });
}

struct Change {
  std::string what;  // the key and its new value
  std::function<void(core::Config&)> make;
  bool more_ranks = false;
};

// Ways to need less memory that leave the model and the global batch as they are, but for the last ones, which need more devices.
std::vector<Change> changes(const core::Config& job) {
  using core::Checkpointing, core::Config;
  std::vector<Change> found;
  const auto add = [&](std::string what, std::function<void(Config&)> make, bool more_ranks = false) {
    Config changed = job;
    make(changed);
    if (core::allowed(changed, changed.parallel.mesh().ranks())) found.push_back({std::move(what), std::move(make), more_ranks});
  };
  const auto& p = job.parallel;
  if (p.sharding != parallel::Sharding::full)
    add("parallel.sharding: full", [](Config& c) { c.parallel.sharding = parallel::Sharding::full; });
  if (!p.expert_sharding) add("parallel.expert_sharding: full", [](Config& c) { c.parallel.expert_sharding = true; });
  if (!p.reshard_after_use) add("parallel.reshard_after_use: true", [](Config& c) { c.parallel.reshard_after_use = true; });
  if (p.bucket_size.bytes > 0) add("parallel.bucket_size: 0", [](Config& c) { c.parallel.bucket_size.bytes = 0; });
  if (!job.memory.cache.ops.empty()) {
    add("memory.cache.ops: []", [](Config& c) { c.memory.cache = {}; });
    add("memory.cache.device: 0 and cache.host in its place", [](Config& c) {
      c.memory.cache.host.bytes += c.memory.cache.device.bytes;
      c.memory.cache.device.bytes = 0;
    });
  }
  if (job.memory.activation_checkpointing == Checkpointing::none)
    add("memory.activation_checkpointing: selective", [](Config& c) { c.memory.activation_checkpointing = Checkpointing::selective; });
  if (job.memory.activation_checkpointing != Checkpointing::full)
    add("memory.activation_checkpointing: full", [](Config& c) { c.memory.activation_checkpointing = Checkpointing::full; });
  if (const std::int64_t size = job.training.micro_batch_size; size > 1)
    add("training.micro_batch_size: 1 and gradient_accumulation: " + std::to_string(size * job.training.gradient_accumulation), [size](Config& c) {
      c.training.micro_batch_size = 1;
      c.training.gradient_accumulation *= size;
    });
  if (const std::int64_t E = job.model.num_experts; E > 0 && p.data_parallel % 2 == 0 && E % (2 * p.expert_parallel) == 0)
    add("parallel.expert_parallel: " + std::to_string(2 * p.expert_parallel) + " and data_parallel: " + std::to_string(p.data_parallel / 2), [](Config& c) {
      c.parallel.expert_parallel *= 2;
      c.parallel.data_parallel /= 2;
    });
  const auto twice = [&](const char* axis, int ranks, std::function<void(Config&)> make) {
    add("twice the ranks, parallel." + std::string(axis) + ": " + std::to_string(2 * ranks), std::move(make), /*more_ranks=*/true);
  };
  twice("data_parallel", p.data_parallel, [](Config& c) { c.parallel.data_parallel *= 2; });
  if (core::planned_device(job) == Device::cpu)
    twice("sequence_parallel", p.sequence_parallel, [](Config& c) { c.parallel.sequence_parallel *= 2; });
  twice("tensor_parallel", p.tensor_parallel, [](Config& c) { c.parallel.tensor_parallel *= 2; });
  return found;
}

// Where no change alone is enough: all that keep the number of ranks, and then as many more as it takes, or as make the largest rank
// smaller.
std::string all_changes(const core::Config& job, const std::vector<Change>& single, const PlanArguments& a) {
  constexpr int kMostRanks = 1 << 16;
  core::Config all = job;
  for (const Change& change : single)
    if (!change.more_ranks) change.make(all);
  Plan plan = core::make_plan(all);
  while (!fits(plan, a).value_or(true) && all.parallel.mesh().ranks() < kMostRanks) {
    core::Config more = all;
    more.parallel.data_parallel *= 2;
    Plan with_more = core::make_plan(more);
    if (worst(with_more) >= worst(plan)) break;
    all = std::move(more);
    plan = std::move(with_more);
  }
  const auto& p = all.parallel;
  const bool as_many = p.mesh().ranks() == job.parallel.mesh().ranks();
  std::string text = as_many ? "all of these that keep the ranks" : "all of these that keep the ranks, on " + std::to_string(p.mesh().ranks()) + " with parallel.data_parallel: " +
                                                                        std::to_string(p.data_parallel) + " and expert_parallel: " + std::to_string(p.expert_parallel);
  return text + ", bring it to " + bytes_text(worst(plan)) + (fits(plan, a).value_or(true) ? ", which fits" : ", which does not fit; more ranks have no less");
}

// Each change is planned, so the figures are what the job would need and no guess.
std::vector<std::string> advice(const core::Config& job, const Plan& plan, const PlanArguments& a) {
  std::vector<std::string> lines;
  if (fits(plan, a).value_or(true)) return lines;
  std::vector<std::pair<std::int64_t, std::string>> better;
  const auto single = changes(job);
  bool enough = false;
  for (const Change& change : single) {
    core::Config changed = job;
    change.make(changed);
    const Plan other = core::make_plan(changed);
    const bool fit = fits(other, a).value_or(false);
    enough = enough || fit;
    if (const std::int64_t bytes = worst(other); bytes < worst(plan))
      better.emplace_back(bytes, change.what + " brings the largest rank from " + bytes_text(worst(plan)) + " to " + bytes_text(bytes) + (fit ? ", which fits" : ""));
  }
  std::sort(better.begin(), better.end());
  for (auto& [bytes, line] : better) lines.push_back(std::move(line));
  if (lines.empty()) {
    const RankPlan& r = *std::max_element(plan.ranks.begin(), plan.ranks.end(),
                                          [](const RankPlan& x, const RankPlan& y) { return x.device_total < y.device_total; });
    const auto most = std::max_element(r.device_bytes.begin(), r.device_bytes.end());
    lines.push_back(std::string("the largest part is ") + name_of(Category(most - r.device_bytes.begin())) + ", " + bytes_text(*most) +
                    " a rank: shorten data.sequence_length or use more ranks");
  }
  if (!enough) lines.push_back(all_changes(job, single, a));
  return lines;
}

io::Json plan_json(const Plan& plan, const std::optional<core::Machine>& machine, std::optional<bool> fit, const std::vector<std::string>& lines) {
  io::Json j;
  const auto& n = plan.parameters;
  j["parameters"] = {{"total", n.total},
                     {"active_per_token", n.active_per_token},
                     {"routed_experts", n.routed_experts},
                     {"trunk", n.trunk},
                     {"trainable", n.trainable}};
  j["ranks"] = io::Json::array();
  for (const RankPlan& r : plan.ranks)
    j["ranks"].push_back({{"rank", r.rank},
                          {"count", r.count},
                          {"device_bytes", bytes_json(r.device_bytes, r.device_total)},
                          {"host_bytes", bytes_json(r.host_bytes, host_total(r))},
                          {"phases", phases_json(r)}});
  j["fits"] = fit ? io::Json(*fit) : io::Json(nullptr);
  j["step"] = {{"model_flops", plan.flops.total()},
               {"bytes_gathered", plan.bytes_gathered},
               {"bytes_exchanged", plan.bytes_exchanged},
               {"predicted_ms", plan.time ? io::Json(1e3 * plan.time->total()) : io::Json(nullptr)}};
  if (machine) {
    j["step"]["machine"] = machine->name;
    j["step"]["parts_ms"] = parts_json(*plan.time);
  }
  j["advice"] = lines;
  return j;
}

void print_row(const std::string& name, const std::string& value, const std::string& note = "") {
  std::cout << "  " << std::left << std::setw(18) << name << std::right << std::setw(22) << value
            << (note.empty() ? "" : "  " + note) << "\n";
}

std::string share(double part, double whole) { return fixed(100 * part / whole, 1) + " %"; }

// Sizes that devices are sold with.
std::string devices_that_hold(std::int64_t bytes) {
  std::string text;
  for (const std::int64_t size : {24, 40, 64, 80, 141, 192})
    text += (text.empty() ? "" : ", ") + std::to_string(size) + " GB " + (bytes <= size * 1'000'000'000 ? "yes" : "no");
  return text;
}

std::string name_of_kind(const RankPlan& r) {
  return "rank " + std::to_string(r.rank) + (r.count > 1 ? ", and alike " + std::to_string(r.count - 1) + " more" : "");
}

// The largest kind of rank in full, others by what they hold at the most.
void print_ranks(const Plan& plan) {
  const RankPlan& largest = *std::max_element(plan.ranks.begin(), plan.ranks.end(),
                                              [](const RankPlan& a, const RankPlan& b) { return a.device_total < b.device_total; });
  std::cout << name_of_kind(largest) << "\n";
  print_bytes(largest);
  for (const RankPlan& r : plan.ranks)
    if (&r != &largest) std::cout << name_of_kind(r) << ": " << bytes_text(r.device_total) << "\n";
}

void print_plan(const core::Config& job, const Plan& plan, const std::optional<core::Machine>& machine) {
  const auto& n = plan.parameters;
  std::cout << "parameters\n";
  print_row("total", std::to_string(n.total));
  print_row("active a token", std::to_string(n.active_per_token), "without the input embedding");
  print_row("routed experts", std::to_string(n.routed_experts));
  print_row("trunk", std::to_string(n.trunk), "all but the routed experts");
  print_row("trainable", std::to_string(n.trainable));
  print_ranks(plan);
  std::cout << "fits a device of " << devices_that_hold(worst(plan)) << "\n";
  const auto& f = plan.flops;
  std::cout << "one step of " << plan.tokens << " tokens, forward and backward\n";
  const std::pair<const char*, double> kinds[] = {
      {"KDA", f.kda},         {"attention", f.attention},           {"indexer", f.indexer}, {"dense MLP", f.dense_mlp},
      {"experts", f.experts}, {"shared experts", f.shared_experts}, {"latent", f.latent},   {"router", f.router},
      {"head", f.head}};
  for (const auto& [name, flops] : kinds)
    if (flops > 0) print_row(name, fixed(flops / 1e12, 6) + " TFLOP", share(flops, f.total()));
  print_row("model FLOPs", fixed(f.total() / 1e12, 6) + " TFLOP");
  print_row("gathered", bytes_text(plan.bytes_gathered), "weights and gradients, rank 0");
  print_row("exchanged", bytes_text(plan.bytes_exchanged), "rows to experts and back, rank 0");
  if (job.parallel.mesh().ranks() == 1) std::cout << "one rank: nothing is gathered or exchanged\n";
  if (!machine) return;
  std::cout << "predicted for " << machine->name << "\n";
  print_time(*plan.time, double(plan.tokens), plan.flops.total(), job.parallel.mesh().ranks());
}

// What predicts, if anything does. A job that leaves its device open is then planned for the machine's.
std::optional<core::Machine> machine_of(core::Config& job, const std::string& named) {
  auto& device = job.run.device;
  if (named.empty()) {
    if (core::planned_device(job) == Device::cpu) return {};
    device = core::DeviceChoice::cuda;
    return core::read_machine("h200");
  }
  const core::Machine machine = core::read_machine(named);
  const bool gpu = machine.device == Device::cuda;
  if (gpu && job.cpu_only())
    throw Error(std::string(job.cpu_only()) + " runs on the CPU only, and machine " + machine.name + " is a GPU", ExitCode::bad_job);
  if (device == (gpu ? core::DeviceChoice::cpu : core::DeviceChoice::cuda))
    throw Error(std::string("run.device is ") + (gpu ? "cpu" : "cuda") + ", and machine " + machine.name + " is a " + (gpu ? "GPU" : "CPU"), ExitCode::bad_job);
  device = gpu ? core::DeviceChoice::cuda : core::DeviceChoice::cpu;
  return machine;
}

io::Json search_json(const core::SearchResult& found) {
  io::Json j{{"tried", found.tried}, {"proposals", io::Json::array()}};
  for (const core::Proposal& p : found.best)
    j["proposals"].push_back({{"predicted_ms", p.ms}, {"device_bytes", p.device_bytes}, {"host_bytes", p.host_bytes}, {"set", p.set}});
  return j;
}

std::string set_lines(const core::Proposal& p) {
  std::string text;
  for (const std::string& set : p.set) text += " --set " + set;
  return text.empty() ? " as the job is" : text;
}

void print_search(const core::SearchResult& found, int ranks) {
  std::cout << found.best.size() << " best of " << found.tried << " planned for " << ranks << " ranks, with the job's model and global batch\n";
  for (const core::Proposal& p : found.best) {
    std::cout << fixed(p.ms, 1) << " ms a step, " << bytes_text(p.device_bytes) << " of the largest rank's device";
    if (p.host_bytes > 0) std::cout << ", " << bytes_text(p.host_bytes) << " of host memory";
    std::cout << "\n " << set_lines(p) << "\n";
  }
}

ExitCode search(const core::Config& job, const core::Machine& machine, const PlanArguments& a) {
  const int ranks = a.ranks > 0 ? a.ranks : job.parallel.mesh().ranks();
  const auto found = core::search(job, machine, {.ranks = ranks, .device_memory = *a.device_memory, .host_memory = a.host_memory.value_or(0)});
  if (a.json) {
    std::cout << search_json(found).dump(2) << "\n";
  } else if (found.best.empty()) {
    std::cout << "no layout of " << ranks << " ranks " << (found.smallest ? "fits " + bytes_text(*a.device_memory) + " of each device" : "has this model and global batch") << "\n";
    if (found.smallest) std::cout << "the least is " << bytes_text(found.smallest->device_bytes) << ", with\n " << set_lines(*found.smallest) << "\n";
  } else {
    print_search(found, ranks);
  }
  return ExitCode::done;
}

}  // namespace

ExitCode plan(const PlanArguments& arguments) {
  core::Config job = read_job(arguments.job, arguments.search ? 0 : arguments.ranks, Needs::sizes);
  const auto machine = machine_of(job, arguments.machine);
  PlanArguments limits = arguments;
  if (machine && !limits.device_memory && (arguments.search || !arguments.machine.empty())) limits.device_memory = machine->memory_bytes;
  if (arguments.search) {
    if (!machine) throw Error("--search compares predicted times: name a machine, as --machine h200, or a file of moetrain bench --machine", ExitCode::bad_job);
    return search(job, *machine, limits);
  }
  const Plan plan = core::make_plan(job, machine ? &*machine : nullptr);
  const auto fit = fits(plan, limits);
  const auto lines = advice(job, plan, limits);
  if (arguments.json) {
    std::cout << plan_json(plan, machine, fit, lines).dump(2) << "\n";
    return ExitCode::done;
  }
  print_plan(job, plan, machine);
  if (fit) std::cout << (*fit ? "fits" : "does not fit") << (limits.device_memory ? " " + bytes_text(*limits.device_memory) + " of device memory\n" : "\n");
  for (const std::string& line : lines) std::cout << "  " << line << "\n";
  if (!machine && job.run.device == core::DeviceChoice::automatic && !job.cpu_only())
    std::cout << "run.device auto: planned for CPU ranks, since this build has no CUDA; --machine h200 plans for that GPU\n";
  return ExitCode::done;
}

}  // namespace moetrain::app
