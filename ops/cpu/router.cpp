// router.cpp -- the choice of experts as one pass over the scores of a row, and its backward.
#include "ops/router.h"

#include "ops/cpu/exp.h"
#include "ops/cpu/expert_choice.h"
#include "ops/cpu/expert_ids.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

using cpu::expert_of;
using cpu::sigmoid;

constexpr std::int64_t kWorthThreads = 1 << 14;  // scores

template <class R>
R weight_norm(const R* logits, const std::int32_t* experts, std::int64_t K) {
  R sum = 0;
  for (std::int64_t k = 0; k < K; ++k) sum += sigmoid(logits[expert_of(experts[k])]);
  return sum + R(1e-20);
}

template <class R>
void choose_experts(const RouterForward& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  const R *logits = a.logits.as<R>(), *bias = a.bias.as<R>();
  auto* experts = a.experts.as<std::int32_t>();
  R* cutoff = a.cutoff.present() ? a.cutoff.as<R>() : nullptr;
#pragma omp parallel if (T * E > kWorthThreads)
  {
    cpu::ExpertChoice<R> choice(a.rule, E, K + 1, bias);  // and the cutoff
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < T; ++t) {
      const auto& best = choice.best(logits + t * E);
      for (std::int64_t k = 0; k < K; ++k) experts[t * K + k] = std::int32_t(best[k].id);
      if (cutoff) cutoff[t] = best.count() > K ? best[K].score : -std::numeric_limits<R>::infinity();
    }
  }
}

template <class R>
void forward(const RouterForward& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  if (a.decided)
    cpu::check_expert_ids(a.experts, E, cpu::Dropped::allowed);
  else
    choose_experts<R>(a);
  const auto* experts = a.experts.as<std::int32_t>();
  const R* logits = a.logits.as<R>();
  R* weights = a.weights.as<R>();
  const R scaling = R(a.rule.scaling);
#pragma omp parallel for schedule(static) if (T * K > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) {
    const R norm = a.rule.renormalize ? weight_norm(logits + t * E, experts + t * K, K) : R(1);
    for (std::int64_t k = 0; k < K; ++k) {
      const auto e = experts[t * K + k];
      weights[t * K + k] = e < 0 ? R(0) : sigmoid(logits[t * E + e]) / norm * scaling;
    }
  }
}

template <class R>
void backward(const RouterBackward& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  cpu::check_expert_ids(a.experts, E, cpu::Dropped::allowed);
  const R scaling = R(a.rule.scaling);
#pragma omp parallel for schedule(static) if (T * E > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) {
    const R *logits = a.logits.as<R>() + t * E, *dweights = a.dweights.as<R>() + t * K;
    const auto* experts = a.experts.as<std::int32_t>() + t * K;
    R* dlogits = a.dlogits.as<R>() + t * E;
    const auto slope = [&](std::int64_t k) { return experts[k] < 0 ? R(0) : dweights[k]; };
    R norm = 1, pull = 0;
    if (a.rule.renormalize) {
      norm = weight_norm(logits, experts, K);
      for (std::int64_t k = 0; k < K; ++k) pull += slope(k) * (sigmoid(logits[expert_of(experts[k])]) / norm);
    }
    for (std::int64_t e = 0; e < E; ++e) dlogits[e] = 0;
    for (std::int64_t k = 0; k < K; ++k) {
      const auto e = expert_of(experts[k]);
      const R x = logits[e];
      dlogits[e] = scaling / norm * (slope(k) - pull) * sigmoid(x) * sigmoid(-x);  // 1 - s without cancellation
    }
  }
}

}  // namespace

void cpu::router(Context&, const RouterForward& a) { a.logits.dtype == DType::f64 ? forward<double>(a) : forward<float>(a); }
void cpu::router(Context&, const RouterBackward& a) { a.logits.dtype == DType::f64 ? backward<double>(a) : backward<float>(a); }

}  // namespace moetrain::ops
