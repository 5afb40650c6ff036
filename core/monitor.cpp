// monitor.cpp -- the columns of metrics.csv and the line of the terminal.
#include "core/monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace moetrain::core {

std::optional<Load> load_of(const std::vector<std::int64_t>& rows, std::int64_t layers, std::int64_t places) {
  std::optional<Load> worst;
  for (std::int64_t l = 0; l < layers; ++l) {
    std::vector<std::int64_t> load(rows.begin() + l * places, rows.begin() + (l + 1) * places);
    std::int64_t sum = 0;
    for (const auto n : load) sum += n;
    if (sum == 0) continue;
    const double mean = double(sum) / double(places);
    const auto fullest = std::max_element(load.begin(), load.end()) - load.begin();
    std::sort(load.begin(), load.end());
    const auto quantile = [&](double share) { return double(load[std::size_t(std::ceil(share * double(places))) - 1]) / mean; };
    const Load of{quantile(1), quantile(0.95), quantile(0.5), double(load.front()) / mean, l, fullest};
    if (!worst) worst = of;
    if (of.max > worst->max) worst->max = of.max, worst->layer = l, worst->place = fullest;
    worst->p95 = std::max(worst->p95, of.p95);
    worst->median = std::min(worst->median, of.median);
    worst->min = std::min(worst->min, of.min);
  }
  return worst;
}

namespace {

// A column's name beside its value: the one list of metrics.
struct Column {
  const char* name;
  std::optional<double> value;
};

std::int64_t moe_layers(const Config& c, const StepResult& r) {
  return c.model.num_experts > 0 ? std::int64_t(r.expert_tokens.size()) / c.model.num_experts : 0;
}

std::vector<Column> columns_of(const Config& c, const StepResult& r, const StepMeasures& m) {
  const std::int64_t layers = moe_layers(c, r);
  const auto experts = load_of(r.expert_tokens, layers, c.model.num_experts);
  // Where rows stay on their rank, its load is that of its data.
  const auto ranks = c.parallel.expert_parallel > 1 ? load_of(r.rank_rows, layers, m.ranks) : std::nullopt;
  const auto field = [](const std::optional<Load>& load, double Load::*value) {
    return load ? std::optional<double>((*load).*value) : std::nullopt;
  };
  const auto of_experts = [&](double Load::*value) { return field(experts, value); };
  const auto of_ranks = [&](double Load::*value) { return field(ranks, value); };
  const std::optional<double> none;
  const auto loss = r.skipped == Skipped::no_labels ? none : std::optional(r.loss);
  const auto of_cache = [&](double value) { return m.cache ? std::optional(value) : none; };
  const auto limited = [&](std::int64_t slots) { return c.moe.capacity_factor > 0 && layers > 0 ? std::optional<double>(slots) : none; };
  return {{"step", double(r.step)},
          {"tokens", double(m.tokens_seen)},
          {"loss", loss},
          {"balance_loss", r.balance_loss},
          {"indexer_loss", r.indexer_loss},
          {"grad_norm", r.grad_norm},
          {"lr", r.lr},
          {"label_tokens", double(r.label_tokens)},
          {"step_ms", m.seconds * 1e3},
          {"tokens_per_s", m.seconds > 0 ? std::optional<double>(double(r.tokens) / m.seconds) : none},
          {"model_tflops", m.seconds > 0 ? std::optional<double>(m.model_flops / m.seconds / m.ranks * 1e-12) : none},
          {"mfu", none},
          {"device_peak_bytes", double(m.device_peak_bytes)},
          {"pool_peak_bytes", double(m.pool_peak_bytes)},
          {"pool_fragmentation", m.pool_fragmentation},
          {"host_peak_bytes", double(m.host_peak_bytes)},
          {"expert_load_max", of_experts(&Load::max)},
          {"expert_load_p95", of_experts(&Load::p95)},
          {"expert_load_median", of_experts(&Load::median)},
          {"expert_load_min", of_experts(&Load::min)},
          {"rank_load_max", of_ranks(&Load::max)},
          {"rank_load_p95", of_ranks(&Load::p95)},
          {"rank_load_median", of_ranks(&Load::median)},
          {"dropped_tokens", limited(r.dropped)},
          {"rerouted_tokens", limited(r.rerouted)},
          {"exposed_comm_ms", m.exposed_comm_seconds * 1e3},
          {"cache_hits", of_cache(m.cache ? double(m.cache->hits) : 0)},
          {"cache_late", of_cache(m.cache ? double(m.cache->late) : 0)},
          {"cache_saved_ms", of_cache(m.cache ? m.cache->saved_seconds * 1e3 : 0)},
          {"cache_bytes_host", of_cache(double(m.cache_host_bytes))},
          {"eval_loss", m.eval_loss},
          {"skipped", r.skipped == Skipped::no ? 0.0 : 1.0}};
}

}  // namespace

std::vector<std::string> metric_columns() {
  std::vector<std::string> names;
  for (const Column& c : columns_of({}, {}, {})) names.emplace_back(c.name);
  return names;
}

std::vector<std::optional<double>> metric_row(const Config& config, const StepResult& result, const StepMeasures& measures) {
  std::vector<std::optional<double>> values;
  for (const Column& c : columns_of(config, result, measures)) values.push_back(c.value);
  return values;
}

std::string step_line(const Config& c, const StepResult& r, const StepMeasures& m, double seconds_left) {
  const auto load = load_of(r.expert_tokens, moe_layers(c, r), c.model.num_experts);
  const int width = int(std::to_string(c.training.steps).size());
  char line[256], part[64], loss[32] = "no label";
  if (r.skipped != Skipped::no_labels) std::snprintf(loss, sizeof loss, "%8.4f", r.loss);
  std::snprintf(line, sizeof line, "step %*lld/%lld  loss %s  norm %9.3g  lr %.2e  %8.0f tok/s", width,
                static_cast<long long>(r.step), static_cast<long long>(c.training.steps), loss, r.grad_norm, r.lr,
                m.seconds > 0 ? double(r.tokens) / m.seconds : 0);
  std::string text = line;
  if (load) {
    std::snprintf(part, sizeof part, "  load %5.2f", load->max);
    text += part;
  }
  if (r.dropped > 0) {
    std::snprintf(part, sizeof part, "  dropped %lld", static_cast<long long>(r.dropped));
    text += part;
  }
  const auto left = static_cast<long long>(seconds_left + 0.5);
  if (left >= 3600)
    std::snprintf(part, sizeof part, "  left %lld:%02lld:%02lld", left / 3600, left / 60 % 60, left % 60);
  else
    std::snprintf(part, sizeof part, "  left %lld:%02lld", left / 60, left % 60);
  text += part;
  if (m.eval_loss) {
    std::snprintf(part, sizeof part, "  eval %.4f", *m.eval_loss);
    text += part;
  }
  return text;
}

}  // namespace moetrain::core
