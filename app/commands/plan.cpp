// plan.cpp -- a job's parameters, bytes, FLOPs and time as tables for people or as JSON for programs, and what would be faster.
#include "core/plan.h"

#include <algorithm>
#include <iomanip>
#include <iostream>

#include "app/commands.h"
#include "app/job.h"
#include "app/plan_advice.h"
#include "app/plan_report.h"
#include "core/search.h"
#include "core/trainer.h"

namespace moetrain::app {
namespace {

using core::Plan;
using core::RankPlan;

io::Json plan_json(const Plan& plan, const std::optional<core::Machine>& machine, std::optional<bool> fit,
                   const std::vector<std::string>& lines) {
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
                          {"pool_bytes", r.device_pool},
                          {"host_bytes", bytes_json(r.host_bytes, r.host_total)},
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
                                              [](const RankPlan& a, const RankPlan& b) { return a.device_pool < b.device_pool; });
  std::cout << name_of_kind(largest) << "\n";
  print_bytes(largest);
  for (const RankPlan& r : plan.ranks)
    if (&r != &largest) std::cout << name_of_kind(r) << ": " << bytes_text(r.device_pool) << "\n";
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
  std::cout << "fits a device of " << devices_that_hold(plan.most_device()) << "\n";
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
    throw Error(std::string(job.cpu_only()) + " runs on the CPU only, and machine " + machine.name + " is a GPU",
                ExitCode::bad_job);
  if (device == (gpu ? core::DeviceChoice::cpu : core::DeviceChoice::cuda))
    throw Error(
        std::string("run.device is ") + (gpu ? "cpu" : "cuda") + ", and machine " + machine.name + " is a " + (gpu ? "GPU" : "CPU"),
        ExitCode::bad_job);
  device = gpu ? core::DeviceChoice::cuda : core::DeviceChoice::cpu;
  return machine;
}

io::Json search_json(const core::SearchResult& found) {
  io::Json j{{"tried", found.tried}, {"proposals", io::Json::array()}, {"smallest", nullptr}};
  const auto sizes = [](const core::Proposal& p) {
    return io::Json{{"device_bytes", p.device_bytes}, {"host_bytes", p.host_bytes}, {"set", p.set}};
  };
  for (const core::Proposal& p : found.best) {
    j["proposals"].push_back(sizes(p));
    j["proposals"].back()["predicted_ms"] = p.ms;
  }
  if (found.smallest) j["smallest"] = sizes(*found.smallest);
  return j;
}

std::string memory_text(const MemoryLimits& m) {
  std::string text = m.device ? bytes_text(*m.device) + " of device memory" : "";
  if (m.host) text += (text.empty() ? "" : " and ") + bytes_text(*m.host) + " of host memory";
  return text;
}
std::string memory_text(const core::Proposal& p) {  // of the largest rank
  return memory_text(MemoryLimits{p.device_bytes, p.host_bytes > 0 ? std::optional(p.host_bytes) : std::nullopt});
}

std::string set_lines(const core::Proposal& p) {
  std::string text;
  for (const std::string& set : p.set) text += " --set " + set;
  return text.empty() ? " as the job is" : text;
}

void print_search(const core::SearchResult& found, int ranks) {
  std::cout << found.best.size() << " best of " << found.tried << " planned for " << ranks
            << " ranks, with the job's model and global batch\n";
  for (const core::Proposal& p : found.best)
    std::cout << fixed(p.ms, 1) << " ms a step, " << memory_text(p) << "\n " << set_lines(p) << "\n";
}

ExitCode search(const core::Config& job, const core::Machine& machine, const PlanArguments& a, const MemoryLimits& limits) {
  const int ranks = a.ranks > 0 ? a.ranks : job.parallel.mesh().ranks();
  const auto found =
      core::search(job, machine, {.ranks = ranks, .device_memory = *limits.device, .host_memory = limits.host.value_or(0)});
  if (a.json) {
    std::cout << search_json(found).dump(2) << "\n";
  } else if (found.best.empty()) {
    std::cout << "no layout of " << ranks << " ranks "
              << (found.smallest ? "fits " + memory_text(limits) : "has this model and global batch") << "\n";
    if (found.smallest)
      std::cout << "the least is " << memory_text(*found.smallest) << ", with\n " << set_lines(*found.smallest) << "\n";
  } else {
    print_search(found, ranks);
  }
  return ExitCode::done;
}

}  // namespace

ExitCode plan(const PlanArguments& arguments) {
  core::Config job = read_job(arguments.job, arguments.search ? 0 : arguments.ranks, Needs::sizes);
  const auto machine = machine_of(job, arguments.machine);
  MemoryLimits limits{arguments.device_memory, arguments.host_memory};
  if (machine && !limits.device && (arguments.search || !arguments.machine.empty())) limits.device = machine->memory_bytes;
  if (const auto& most = job.memory.device_limit) limits.device = std::min(most->bytes, limits.device.value_or(most->bytes));
  if (arguments.search) {
    if (!machine)
      throw Error("--search compares predicted times: name a machine, as --machine h200, or a file of moetrain bench --machine",
                  ExitCode::bad_job);
    return search(job, *machine, arguments, limits);
  }
  const Plan plan = core::make_plan(job, machine ? &*machine : nullptr);
  const auto fit = fits(plan, limits);
  const auto lines = advice(job, plan, limits, machine ? &*machine : nullptr);
  if (arguments.json) {
    std::cout << plan_json(plan, machine, fit, lines).dump(2) << "\n";
    return ExitCode::done;
  }
  print_plan(job, plan, machine);
  if (fit) std::cout << (*fit ? "fits " : "does not fit ") << memory_text(limits) << "\n";
  for (const std::string& line : lines) std::cout << "  " << line << "\n";
  if (!machine && job.run.device == core::DeviceChoice::automatic && !job.cpu_only())
    std::cout << "run.device auto: planned for CPU ranks, since this build has no CUDA; --machine h200 plans for that GPU\n";
  return ExitCode::done;
}

}  // namespace moetrain::app
