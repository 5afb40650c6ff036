// balance.cpp -- counts, quantiles and losses of the router as plain loops; bins are cut by one function for both of their ops.
#include "ops/balance.h"

#include <algorithm>
#include <cmath>

#include "ops/cpu/exp.h"
#include "ops/cpu/expert_ids.h"

namespace moetrain::ops {
namespace {

using cpu::sigmoid;

constexpr std::int64_t kWorthThreads = 1 << 14;  // scores

template <class Body>
void with_real(DType dtype, Body&& body) {
  dtype == DType::f64 ? body(double{}) : body(float{});
}

struct Bins {
  double low, width;
  std::int64_t count;
  std::int64_t of(double x) const {
    const double place = (x - low) / width;
    if (!(place > 0)) return 0;  // also NaN and -infinity
    return place >= double(count) ? count - 1 : std::int64_t(place);
  }
};

template <class R>
Bins bins_of(const R* bias, std::int64_t E, std::int64_t count) {
  const auto [least, most] = std::minmax_element(bias, bias + E);
  const double low = double(*least) - 1, high = double(*most) + 1;
  return {low, (high - low) / double(count), count};
}

template <class R>
void add_to_histogram(const QuantileHistogram& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1];
  const R *logits = a.logits.as<R>(), *cutoff = a.cutoff.as<R>();
  auto* histogram = a.histogram.as<std::int64_t>();
  const Bins bins = bins_of(a.bias.as<R>(), E, a.histogram.shape[1]);
#pragma omp parallel for schedule(static) if (T * E > kWorthThreads)
  for (std::int64_t e = 0; e < E; ++e)
    for (std::int64_t t = 0; t < T; ++t)
      ++histogram[e * bins.count + bins.of(double(cutoff[t]) - double(sigmoid(logits[t * E + e])))];
}

std::int64_t sum_of(const std::int64_t* counts, std::int64_t n) {
  std::int64_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) sum += counts[i];
  return sum;
}

double quantile(const std::int64_t* row, const Bins& bins, double rank) {
  std::int64_t before = 0, n = 0;
  while (n < bins.count - 1 && double(before + row[n]) < rank) before += row[n++];
  return bins.low + bins.width * (double(n) + (rank - double(before)) / double(row[n]));
}

template <class R>
void update_by_quantile(const QuantileUpdate& a) {
  const auto E = a.histogram.shape[0], count = a.histogram.shape[1];
  const auto* histogram = a.histogram.as<std::int64_t>();
  const auto tokens = sum_of(histogram, count);
  for (std::int64_t e = 1; e < E; ++e)
    check(sum_of(histogram + e * count, count) == tokens, "quantile_update: experts have seen different numbers of tokens",
          {{"expert", e}, {"tokens", sum_of(histogram + e * count, count)}, {"expert 0", tokens}});
  if (tokens == 0) return;
  R* bias = a.bias.as<R>();
  const Bins bins = bins_of(bias, E, count);
  const double rank = double(a.experts_per_token) * double(tokens) / double(E);
  double mean = 0;
  for (std::int64_t e = 0; e < E; ++e) mean += quantile(histogram + e * count, bins, rank) / double(E);
  for (std::int64_t e = 0; e < E; ++e) bias[e] = R(quantile(histogram + e * count, bins, rank) - mean);
}

template <class R>
void update_by_sign(const SignUpdate& a) {
  const auto E = a.counts.shape[0];
  const auto* counts = a.counts.as<std::int64_t>();
  const auto total = sum_of(counts, E);
  for (std::int64_t e = 0; e < E; ++e) {
    const auto scaled = counts[e] * E;  // against the sum, not the rounded mean
    a.bias.as<R>()[e] += R(a.rate) * R((scaled < total) - (scaled > total));
  }
}

// Shares of the slots an expert got; zeros when there are none.
void set_frequency(double* f, std::int64_t E, const std::int64_t* counts) {
  const auto total = sum_of(counts, E);
  for (std::int64_t e = 0; e < E; ++e) f[e] = total > 0 ? double(counts[e]) / double(total) : 0;
}
void set_frequency(double* f, std::int64_t E, const std::int32_t* experts, std::int64_t slots) {
  std::fill_n(f, E, 0);
  for (std::int64_t i = 0; i < slots; ++i) f[experts[i]] += 1;
  for (std::int64_t e = 0; e < E; ++e) f[e] /= double(std::max<std::int64_t>(slots, 1));
}

// One token: returns sum_e f P, and adds scale times its gradient.
template <class R>
double balance_of(const R* logits, const double* f, std::int64_t E, double scale, R* dlogits) {
  R sum = R(1e-20);
  for (std::int64_t e = 0; e < E; ++e) sum += sigmoid(logits[e]);
  R dot = 0;
  for (std::int64_t e = 0; e < E; ++e) dot += R(f[e]) * (sigmoid(logits[e]) / sum);
  if (dlogits)
    for (std::int64_t e = 0; e < E; ++e)
      dlogits[e] += R(scale) * (R(f[e]) - dot) * (sigmoid(logits[e]) / sum) * sigmoid(-logits[e]);  // sigmoid(-x): 1 - s
  return double(dot);
}

template <class R>
void add_auxiliary(const AuxiliaryLoss& a, const AuxiliaryLoss::Scratch& scratch) {
  const auto E = a.logits.shape[1], K = a.experts.shape[1];
  double *f = scratch.frequency.as<double>(), *rows = scratch.rows.as<double>();
  const R* logits = a.logits.as<R>();
  R* dlogits = a.dlogits.present() ? a.dlogits.as<R>() : nullptr;
  const bool by_group = a.counts.present() && a.counts.shape.rank() == 2;
  if (a.counts.present() && !by_group) set_frequency(f, E, a.counts.as<std::int64_t>());
  double loss = 0;
  for (std::size_t g = 1; g < a.groups.size(); ++g) {
    const auto begin = a.groups[g - 1], end = a.groups[g];
    if (begin == end) continue;
    if (by_group) set_frequency(f, E, a.counts.as<std::int64_t>() + std::int64_t(g - 1) * E);
    if (!a.counts.present()) set_frequency(f, E, a.experts.as<std::int32_t>() + begin * K, (end - begin) * K);
    const double scale = a.scale * double(E) / double(a.tokens.empty() ? end - begin : a.tokens[g - 1]);
#pragma omp parallel for schedule(static) if ((end - begin) * E > kWorthThreads)
    for (std::int64_t t = begin; t < end; ++t)
      rows[t] = scale * balance_of(logits + t * E, f, E, scale, dlogits ? dlogits + t * E : nullptr);
    for (std::int64_t t = begin; t < end; ++t) loss += rows[t];
  }
  *a.loss.as<R>() += R(loss);
}

template <class R>
void add_z(const ZLoss& a, double* rows) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1];
#pragma omp parallel for schedule(static) if (T * E > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) {
    const R* logits = a.logits.as<R>() + t * E;
    const R most = *std::max_element(logits, logits + E);
    R sum = 0;
    for (std::int64_t e = 0; e < E; ++e) sum += std::exp(logits[e] - most);
    const R z = most + std::log(sum);
    rows[t] = double(z) * double(z);
    if (!a.dlogits.present()) continue;
    R* dlogits = a.dlogits.as<R>() + t * E;
    for (std::int64_t e = 0; e < E; ++e) dlogits[e] += R(2 * a.scale) * z * (std::exp(logits[e] - most) / sum);
  }
  double loss = 0;
  for (std::int64_t t = 0; t < T; ++t) loss += rows[t];
  *a.loss.as<R>() += R(a.scale * loss);
}

}  // namespace

void cpu::expert_count(Context&, const ExpertCount& a) {
  check_expert_ids(a.experts, a.counts.shape[0]);
  const auto* experts = a.experts.as<std::int32_t>();
  auto* counts = a.counts.as<std::int64_t>();
  for (std::int64_t i = 0; i < a.experts.count(); ++i) ++counts[experts[i]];
}

void cpu::quantile_histogram(Context&, const QuantileHistogram& a) {
  with_real(a.logits.dtype, [&](auto type) { add_to_histogram<decltype(type)>(a); });
}

void cpu::quantile_update(Context&, const QuantileUpdate& a) {
  with_real(a.bias.dtype, [&](auto type) { update_by_quantile<decltype(type)>(a); });
}

void cpu::sign_update(Context&, const SignUpdate& a) {
  with_real(a.bias.dtype, [&](auto type) { update_by_sign<decltype(type)>(a); });
}

void cpu::auxiliary_loss(Context& ctx, const AuxiliaryLoss& a) {
  check_expert_ids(a.experts, a.logits.shape[1]);
  Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  with_real(a.logits.dtype, [&](auto type) { add_auxiliary<decltype(type)>(a, scratch); });
}

void cpu::z_loss(Context& ctx, const ZLoss& a) {
  Scope scope(ctx.scratch);
  const auto rows = a.take_scratch(ctx);
  with_real(a.logits.dtype, [&](auto type) { add_z<decltype(type)>(a, rows.as<double>()); });
}

}  // namespace moetrain::ops
