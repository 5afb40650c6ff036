// capacity.cpp -- offers of slots, counted by the bytes of their keys, and the best of them taken.
#include "ops/capacity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "ops/cpu/expert_choice.h"
#include "ops/cpu/expert_ids.h"

namespace moetrain::ops {
namespace {

constexpr std::int64_t kWorthThreads = 1 << 14;  // scores

std::int64_t key_of(double score) {
  constexpr double kHalf = 1LL << 31;
  return std::int64_t(std::clamp(std::floor(score / kScoreStep + 0.5), -kHalf, kHalf - 1) + kHalf);
}

template <class R>
void offer(const OfferSlots& a) {
  const auto T = a.experts.shape[0], K = a.experts.shape[1], E = a.logits.shape[1];
  const R *logits = a.logits.as<R>(), *bias = a.bias.as<R>();
  const auto* chosen = a.chosen.as<std::int32_t>();
  const auto* room = a.room.present() ? a.room.as<std::int64_t>() : nullptr;
  auto* experts = a.experts.as<std::int32_t>();
  R* scores = a.scores.as<R>();
#pragma omp parallel if (T * E > kWorthThreads)
  {
    cpu::ExpertChoice<R> choice(a.rule, E, K, bias);
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < T; ++t) {
      auto* mine = experts + t * K;
      const auto is_dropped = [](std::int32_t e) { return e < 0; };
      if (!room) {
        std::copy_n(chosen + t * K, K, mine);
        for (std::int64_t k = 0; k < K; ++k) scores[t * K + k] = cpu::biased_score(logits[t * E + mine[k]], bias[mine[k]]);
        continue;
      }
      std::fill_n(scores + t * K, K, std::numeric_limits<R>::quiet_NaN());
      if (std::none_of(mine, mine + K, is_dropped)) continue;
      const auto& next = choice.best(
          logits + t * E, [&](std::int64_t e) { return room[e] > 0 && std::find(mine, mine + K, std::int32_t(e)) == mine + K; });
      for (std::int64_t k = 0, n = 0; k < K && n < next.count(); ++k) {
        if (!is_dropped(mine[k])) continue;
        mine[k] = std::int32_t(next[n].id);
        scores[t * K + k] = next[n++].score;
      }
    }
  }
  auto* counts = a.counts.as<std::int64_t>();
  std::fill_n(counts, E, 0);
  for (std::int64_t i = 0; i < T * K; ++i)
    if (!std::isnan(scores[i])) ++counts[experts[i]];
}

template <class R>
void count_keys(const OfferHistogram& a) {
  const auto* experts = a.experts.as<std::int32_t>();
  const auto *row_of = a.row_of.as<std::int64_t>(), *leading = a.leading.as<std::int64_t>();
  auto* histogram = a.histogram.as<std::int64_t>();
  std::fill_n(histogram, a.histogram.count(), 0);
  const auto shift = 8 * (kKeyBytes - 1 - a.known);
  for (std::int64_t i = 0; i < a.scores.count(); ++i) {
    const R score = a.scores.as<R>()[i];
    if (std::isnan(score) || row_of[experts[i]] < 0) continue;
    const std::int64_t key = key_of(score) >> shift, row = row_of[experts[i]];
    if (key / kKeyBins == leading[row]) ++histogram[row * kKeyBins + key % kKeyBins];
  }
}

template <class R>
void take(const TakeOffers& a) {
  const auto* chosen = a.chosen.as<std::int32_t>();
  const auto *row_of = a.row_of.as<std::int64_t>(), *last = a.last.as<std::int64_t>();
  auto* experts = a.experts.as<std::int32_t>();
  std::vector<std::int64_t> ties(a.ties.as<std::int64_t>(), a.ties.as<std::int64_t>() + a.ties.count());
  for (std::int64_t i = 0; i < a.scores.count(); ++i) {
    const R score = a.scores.as<R>()[i];
    if (std::isnan(score)) continue;
    const std::int64_t row = row_of[experts[i]];
    if (row < 0) continue;
    const std::int64_t key = key_of(score), least = last[row];
    if (key < least || (key == least && ties[std::size_t(row)]-- <= 0)) experts[i] = ~chosen[i];
  }
}

}  // namespace

void cpu::offer_slots(Context&, const OfferSlots& a) {
  check_expert_ids(a.chosen, a.logits.shape[1]);
  if (a.room.present()) check_expert_ids(a.experts, a.logits.shape[1], Dropped::allowed);
  a.logits.dtype == DType::f64 ? offer<double>(a) : offer<float>(a);
}
void cpu::offer_histogram(Context&, const OfferHistogram& a) {
  check_expert_ids(a.experts, a.row_of.count(), Dropped::allowed);
  a.scores.dtype == DType::f64 ? count_keys<double>(a) : count_keys<float>(a);
}
void cpu::take_offers(Context&, const TakeOffers& a) {
  check_expert_ids(a.experts, a.row_of.count(), Dropped::allowed);
  a.scores.dtype == DType::f64 ? take<double>(a) : take<float>(a);
}

}  // namespace moetrain::ops
