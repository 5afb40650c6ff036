// monitor.cpp -- the columns of metrics.csv and the line of the terminal.
#include "core/monitor.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace moetrain::core {

std::optional<ExpertLoad> expert_load(const std::vector<std::int64_t>& tokens, std::int64_t layers, std::int64_t experts) {
  std::optional<ExpertLoad> worst;
  for (std::int64_t l = 0; l < layers; ++l) {
    std::vector<std::int64_t> load(tokens.begin() + l * experts, tokens.begin() + (l + 1) * experts);
    std::int64_t sum = 0;
    for (const auto n : load) sum += n;
    if (sum == 0) continue;
    const double mean = double(sum) / double(experts);
    const auto fullest = std::max_element(load.begin(), load.end()) - load.begin();
    std::sort(load.begin(), load.end());
    const double p95 = double(load[std::size_t(std::ceil(0.95 * double(experts))) - 1]) / mean;
    const double max = double(load.back()) / mean, min = double(load.front()) / mean;
    if (!worst) worst = ExpertLoad{max, p95, min, l, fullest};
    if (max > worst->max) worst->max = max, worst->layer = l, worst->expert = fullest;
    worst->p95 = std::max(worst->p95, p95);
    worst->min = std::min(worst->min, min);
  }
  return worst;
}

namespace {

// A column's name beside its value: the one list of metrics.
struct Column {
  const char* name;
  std::optional<double> value;
};

std::vector<Column> columns_of(const Config& c, const StepResult& r, const StepMeasures& m) {
  const auto moe_layers = c.model.num_experts > 0 ? std::int64_t(r.expert_tokens.size()) / c.model.num_experts : 0;
  const auto load = moe_layers > 0 ? expert_load(r.expert_tokens, moe_layers, c.model.num_experts) : std::nullopt;
  auto of_load = [&](double ExpertLoad::*field) { return load ? std::optional<double>((*load).*field) : std::nullopt; };
  const std::optional<double> none;
  const auto loss = r.skipped == Skipped::no_labels ? none : std::optional(r.loss);
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
          {"host_peak_bytes", double(m.host_peak_bytes)},
          {"expert_load_max", of_load(&ExpertLoad::max)},
          {"expert_load_p95", of_load(&ExpertLoad::p95)},
          {"expert_load_min", of_load(&ExpertLoad::min)},
          {"dropped_tokens", none},
          {"exposed_comm_ms", m.exposed_comm_seconds * 1e3},
          {"cache_hits", none},
          {"cache_bytes_host", none},
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
  const auto moe_layers = c.model.num_experts > 0 ? std::int64_t(r.expert_tokens.size()) / c.model.num_experts : 0;
  const auto load = expert_load(r.expert_tokens, moe_layers, c.model.num_experts);
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
