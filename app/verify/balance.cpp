// balance.cpp -- counts of experts, and the rule by which the job keeps them even.
#include "ops/balance.h"

#include "app/verify/routing.h"
#include "app/verify/verify.h"

namespace moetrain::app {
namespace {

void verify_counts(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), E = c.model().num_experts, K = c.model().num_experts_per_token;
  const std::vector<std::int32_t> chosen = random_experts(c, T, E, K);
  const Tensor experts = c.put(chosen, {T, K}), counts = c.zeros(DType::i64, {E});
  c.run(
      "expert_count", sizes({{"T", T}, {"E", E}, {"K", K}}), [&] { c.clear({counts}); },
      [&](ops::Context& ctx) { ops::expert_count(ctx, ops::ExpertCount{.experts = experts, .counts = counts}); });
  std::vector<double> want(std::size_t(E), 0.0);
  for (const std::int32_t e : chosen) ++want[std::size_t(e)];
  c.compare("counts", counts, c.host_of(want, {E}), OpCase::exact());
  if (c.config().moe.balance != core::Balance::sign) return c.tell();
  c.tell();

  const Tensor start = c.normal(c.real(), {E}, 0.01), bias = c.empty(c.real(), {E});
  const double rate = c.config().moe.sign_rate;
  c.run(
      "sign_update", sizes({{"E", E}}), [&] { copy_to_device(v.device, bias.data, c.fetch(start).data, bias.bytes()); },
      [&](ops::Context& ctx) { ops::sign_update(ctx, ops::SignUpdate{.counts = counts, .rate = rate, .bias = bias}); });
  const Tensor bias64 = c.wide(start);
  ops::sign_update(c.host(), ops::SignUpdate{.counts = c.fetch(counts), .rate = rate, .bias = bias64});
  c.compare("bias", bias, bias64, {1e-5, 1e-6});
  c.tell();
}

// A score on the edge of a bin may fall to either side, so the counts are summed up along the bins.
void verify_quantile(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), E = c.model().num_experts, K = c.model().num_experts_per_token, bins = c.config().moe.quantile_bins;
  const Tensor logits = c.normal(c.real(), {T, E}), cutoff = c.normal(c.real(), {T}, 0.05, 0.8),
               start = c.normal(c.real(), {E}, 0.05), bias = c.empty(c.real(), {E}), histogram = c.zeros(DType::i64, {E, bins});
  const std::string shape = sizes({{"T", T}, {"E", E}, {"bins ", bins}});
  c.run(
      "quantile_histogram", shape, [&] { c.clear({histogram}); },
      [&](ops::Context& ctx) {
        ops::quantile_histogram(ctx,
                                ops::QuantileHistogram{.logits = logits, .cutoff = cutoff, .bias = start, .histogram = histogram});
      });
  const Tensor counts = c.host_tensors().zeros(DType::i64, {E, bins});
  ops::quantile_histogram(
      c.host(),
      ops::QuantileHistogram{.logits = c.wide(logits), .cutoff = c.wide(cutoff), .bias = c.wide(start), .histogram = counts});
  const auto summed_up = [&](ConstTensor t) {
    const Tensor sums = c.host_zeros(t.shape);
    for (std::int64_t e = 0; e < E; ++e) {
      double sum = 0;
      for (std::int64_t b = 0; b < bins; ++b) sums.as<double>()[e * bins + b] = sum += double(t.as<std::int64_t>()[e * bins + b]);
    }
    return sums;
  };
  const Tensor there = c.fetch(histogram);
  const double one = 4 / double(T);
  c.judge("summed counts", summed_up(there), summed_up(counts), {1e-3 + one, 1e-3 + one});
  c.tell();

  c.run(
      "quantile_update", shape, [&] { copy_to_device(v.device, bias.data, c.fetch(start).data, bias.bytes()); },
      [&](ops::Context& ctx) {
        ops::quantile_update(ctx, ops::QuantileUpdate{.histogram = histogram, .experts_per_token = K, .bias = bias});
      });
  const Tensor bias64 = c.wide(start);
  ops::quantile_update(c.host(), ops::QuantileUpdate{.histogram = there, .experts_per_token = K, .bias = bias64});
  c.compare("bias", bias, bias64, {1e-4, 1e-5});
  c.tell();
}

void verify_losses(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T(), E = c.model().num_experts, K = c.model().num_experts_per_token, S = c.config().data.sequence_length;
  const std::vector<std::int32_t> chosen = random_experts(c, T, E, K);
  const Tensor logits = c.normal(c.real(), {T, E}), experts = c.put(chosen, {T, K}), loss = c.zeros(c.real(), {1}),
               dlogits = c.zeros(c.real(), {T, E});
  const Tensor logits64 = c.wide(logits);
  const std::string shape = sizes({{"T", T}, {"E", E}, {"K", K}});
  const auto compare = [&](Tensor loss64, Tensor dlogits64) {
    c.compare("loss", loss, loss64, OpCase::summed());
    c.compare("dlogits", dlogits, dlogits64, OpCase::summed());
    c.tell();
  };
  if (c.config().moe.balance == core::Balance::auxiliary) {
    std::vector<std::int64_t> groups{0};
    const std::int64_t step = c.config().moe.auxiliary_scope == core::AuxiliaryScope::sequence ? S : T;
    while (groups.back() < T) groups.push_back(groups.back() + step);
    const auto call = [&](ops::Context& ctx, ConstTensor of, ConstTensor to, Tensor l, Tensor d) {
      ops::auxiliary_loss(
          ctx,
          ops::AuxiliaryLoss{.logits = of, .experts = to, .groups = groups, .counts = {}, .scale = 0.5, .loss = l, .dlogits = d});
    };
    c.run(
        "auxiliary_loss", shape,
        [&] {
          c.clear({loss, dlogits});
        },
        [&](ops::Context& ctx) { call(ctx, logits, experts, loss, dlogits); });
    const Tensor loss64 = c.host_zeros({1}), dlogits64 = c.host_zeros({T, E});
    call(c.host(), logits64, c.host_of(chosen, {T, K}), loss64, dlogits64);
    compare(loss64, dlogits64);
  }
  if (c.config().moe.z_loss != 0) {
    const double scale = 1 / double(T);
    const auto call = [&](ops::Context& ctx, ConstTensor of, Tensor l, Tensor d) {
      ops::z_loss(ctx, ops::ZLoss{.logits = of, .scale = scale, .loss = l, .dlogits = d});
    };
    c.run(
        "z_loss", shape,
        [&] {
          c.clear({loss, dlogits});
        },
        [&](ops::Context& ctx) { call(ctx, logits, loss, dlogits); });
    const Tensor loss64 = c.host_zeros({1}), dlogits64 = c.host_zeros({T, E});
    call(c.host(), logits64, loss64, dlogits64);
    compare(loss64, dlogits64);
  }
}

}  // namespace

void verify_balance(const Verification& v) {
  verify_counts(v);
  if (v.config.moe.balance == core::Balance::quantile) verify_quantile(v);
  if (v.config.moe.balance == core::Balance::auxiliary || v.config.moe.z_loss != 0) verify_losses(v);
}

}  // namespace moetrain::app
