// plan.cpp -- a job's parameters, bytes and FLOPs as tables for people or as JSON for programs, and what to change if it does not
// fit.
#include "core/plan.h"

#include <algorithm>
#include <functional>
#include <iomanip>
#include <iostream>
#include <numeric>
#include <sstream>

#include "app/commands.h"
#include "app/job.h"
#include "io/json.h"

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

std::string fixed(double value, int digits) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}
std::string gib(std::int64_t bytes) { return fixed(double(bytes) / double(std::int64_t(1) << 30), 2) + " GiB"; }

struct Change {
  std::string what;  // the key and its new value
  core::Config config;
};

// Ways to need less memory that leave the model and the global batch as they are, but for the last one, which needs more devices.
std::vector<Change> changes(const core::Config& job) {
  std::vector<Change> found;
  auto add = [&](std::string what, const std::function<void(core::Config&)>& change) {
    found.push_back({std::move(what), job});
    change(found.back().config);
  };
  const auto& p = job.parallel;
  if (p.sharding != parallel::Sharding::full)
    add("parallel.sharding: full", [](core::Config& c) { c.parallel.sharding = parallel::Sharding::full; });
  if (!p.expert_sharding) add("parallel.expert_sharding: full", [](core::Config& c) { c.parallel.expert_sharding = true; });
  if (!p.reshard_after_use) add("parallel.reshard_after_use: true", [](core::Config& c) { c.parallel.reshard_after_use = true; });
  if (job.memory.activation_checkpointing != core::Checkpointing::full)
    add("memory.activation_checkpointing: full",
        [](core::Config& c) { c.memory.activation_checkpointing = core::Checkpointing::full; });
  if (const std::int64_t size = job.training.micro_batch_size; size > 1)
    add("training.micro_batch_size: 1 and gradient_accumulation: " + std::to_string(size * job.training.gradient_accumulation),
        [size](core::Config& c) {
          c.training.micro_batch_size = 1;
          c.training.gradient_accumulation *= size;
        });
  if (const std::int64_t E = job.model.num_experts; E > 0 && p.data_parallel % 2 == 0 && E % (2 * p.expert_parallel) == 0)
    add("parallel.expert_parallel: " + std::to_string(2 * p.expert_parallel) +
            " and data_parallel: " + std::to_string(p.data_parallel / 2),
        [](core::Config& c) {
          c.parallel.expert_parallel *= 2;
          c.parallel.data_parallel /= 2;
        });
  add("twice the ranks, parallel.data_parallel: " + std::to_string(2 * p.data_parallel),
      [](core::Config& c) { c.parallel.data_parallel *= 2; });
  const std::int64_t slices = 2 * p.sequence_parallel, S = job.data.sequence_length;
  if (job.run.device == core::DeviceChoice::cpu && S % slices == 0 && S / slices >= job.model.linear_attn.short_conv_kernel_size - 1)
    add("twice the ranks, parallel.sequence_parallel: " + std::to_string(slices),
        [](core::Config& c) { c.parallel.sequence_parallel *= 2; });
  return found;
}

// Each change is planned, so the figures are what the job would need and no guess.
std::vector<std::string> advice(const core::Config& job, const Plan& plan, const PlanArguments& a) {
  std::vector<std::string> lines;
  if (fits(plan, a).value_or(true)) return lines;
  std::vector<std::pair<std::int64_t, std::string>> better;
  for (const Change& change : changes(job)) {
    const Plan other = core::make_plan(change.config);
    if (const std::int64_t bytes = worst(other); bytes < worst(plan))
      better.emplace_back(bytes, change.what + " brings the largest rank from " + gib(worst(plan)) + " to " + gib(bytes) +
                                     (fits(other, a).value_or(false) ? ", which fits" : ""));
  }
  std::sort(better.begin(), better.end());
  for (auto& [bytes, line] : better) lines.push_back(std::move(line));
  if (lines.empty()) {
    const RankPlan& r = *std::max_element(plan.ranks.begin(), plan.ranks.end(),
                                          [](const RankPlan& x, const RankPlan& y) { return x.device_total < y.device_total; });
    const auto most = std::max_element(r.device_bytes.begin(), r.device_bytes.end());
    lines.push_back(std::string("the largest part is ") + name_of(Category(most - r.device_bytes.begin())) + ", " + gib(*most) +
                    " a rank: shorten data.sequence_length or use more ranks");
  }
  return lines;
}

io::Json bytes_json(const std::array<std::int64_t, kCategories>& bytes, std::int64_t total) {
  io::Json j;
  for (int c = 0; c < kCategories; ++c) j[name_of(Category(c))] = bytes[std::size_t(c)];
  j["total"] = total;
  return j;
}

io::Json plan_json(const Plan& plan, std::optional<bool> fit, const std::vector<std::string>& lines) {
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
                          {"host_bytes", bytes_json(r.host_bytes, host_total(r))}});
  j["fits"] = fit ? io::Json(*fit) : io::Json(nullptr);
  j["step"] = {{"model_flops", plan.flops.total()},
               {"bytes_gathered", plan.bytes_gathered},
               {"bytes_exchanged", plan.bytes_exchanged},
               {"predicted_ms", nullptr}};
  j["advice"] = lines;
  return j;
}

void print_row(const std::string& name, const std::string& value, const std::string& note = "") {
  std::cout << "  " << std::left << std::setw(18) << name << std::right << std::setw(22) << value
            << (note.empty() ? "" : "  " + note) << "\n";
}

std::string share(double part, double whole) { return fixed(100 * part / whole, 1) + " %"; }

void print_plan(const core::Config& job, const Plan& plan) {
  const auto& n = plan.parameters;
  std::cout << "parameters\n";
  print_row("total", std::to_string(n.total));
  print_row("active a token", std::to_string(n.active_per_token), "without the input embedding");
  print_row("routed experts", std::to_string(n.routed_experts));
  print_row("trunk", std::to_string(n.trunk), "all but the routed experts");
  print_row("trainable", std::to_string(n.trainable));
  for (const RankPlan& r : plan.ranks) {
    std::cout << "rank " << r.rank;
    if (r.count > 1) std::cout << ", and alike " << r.count - 1 << " more";
    std::cout << "\n";
    for (int c = 0; c < kCategories; ++c) print_row(name_of(Category(c)), gib(r.device_bytes[std::size_t(c)]));
    print_row("peak of the sum", gib(r.device_held));
    print_row("pool", gib(r.device_total), "for the most of blocks and of stacks, with rounding and holes");
    if (const std::int64_t host = host_total(r); host > 0) print_row("host memory", gib(host), "the copy that a checkpoint is written from");
  }
  const auto& f = plan.flops;
  std::cout << "one step of " << plan.tokens << " tokens, forward and backward\n";
  const std::pair<const char*, double> kinds[] = {
      {"KDA", f.kda},         {"attention", f.attention},           {"indexer", f.indexer}, {"dense MLP", f.dense_mlp},
      {"experts", f.experts}, {"shared experts", f.shared_experts}, {"latent", f.latent},   {"router", f.router},
      {"head", f.head}};
  for (const auto& [name, flops] : kinds)
    if (flops > 0) print_row(name, fixed(flops / 1e12, 6) + " TFLOP", share(flops, f.total()));
  print_row("model FLOPs", fixed(f.total() / 1e12, 6) + " TFLOP");
  print_row("gathered", gib(plan.bytes_gathered), "weights and gradients, rank 0");
  print_row("exchanged", gib(plan.bytes_exchanged), "rows to experts and back, rank 0");
  if (job.parallel.mesh().ranks() == 1) std::cout << "one rank: nothing is gathered or exchanged\n";
}

}  // namespace

ExitCode plan(const PlanArguments& arguments) {
  const core::Config job = read_job(arguments.job, arguments.ranks, Needs::sizes);
  const Plan plan = core::make_plan(job);
  PlanArguments limits = arguments;
  if (const auto& limit = job.memory.device_limit)
    limits.device_memory = std::min(limit->bytes, arguments.device_memory.value_or(limit->bytes));
  const auto fit = fits(plan, limits);
  const auto lines = advice(job, plan, limits);
  if (arguments.json) {
    std::cout << plan_json(plan, fit, lines).dump(2) << "\n";
    return ExitCode::done;
  }
  print_plan(job, plan);
  if (fit) std::cout << (*fit ? "fits\n" : "does not fit\n");
  for (const std::string& line : lines) std::cout << "  " << line << "\n";
  return ExitCode::done;
}

}  // namespace moetrain::app
