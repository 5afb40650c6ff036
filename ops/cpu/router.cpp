// router.cpp -- the choice of experts as one pass over the scores of a row, and its backward.
#include "ops/router.h"

#include <limits>
#include <vector>

#include "ops/cpu/exp.h"
#include "ops/cpu/expert_ids.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

using cpu::sigmoid;

constexpr std::int64_t kWorthThreads = 1 << 14;  // scores

// The best few of what is offered in ascending order of id, best first; of equals the lower id.
template <class R>
class Best {
 public:
  struct Entry {
    R score;
    std::int64_t id;
  };
  explicit Best(std::int64_t most) : entries_(std::size_t(most)) {}
  void clear() { count_ = 0; }
  void offer(R score, std::int64_t id) {
    if (count_ < entries_.size())
      ++count_;
    else if (!(score > entries_[count_ - 1].score))
      return;
    std::size_t place = count_ - 1;
    for (; place > 0 && score > entries_[place - 1].score; --place) entries_[place] = entries_[place - 1];
    entries_[place] = {score, id};
  }
  std::int64_t count() const { return std::int64_t(count_); }
  const Entry& operator[](std::int64_t i) const { return entries_[std::size_t(i)]; }

 private:
  std::vector<Entry> entries_;
  std::size_t count_ = 0;
};

template <class R>
class Chooser {
 public:
  Chooser(const RouterRule& rule, std::int64_t E, std::int64_t K, const R* bias)
      : rule_(rule),
        size_(E / rule.groups),
        bias_(bias),
        scores_(std::size_t(E)),
        experts_(K + 1),
        groups_(rule.top_groups),
        kept_(std::size_t(rule.groups)) {}

  // The K + 1 best of a row, or all there are.
  const Best<R>& choose(const R* logits) {
    for (std::size_t e = 0; e < scores_.size(); ++e) {
      const R score = sigmoid(logits[e]) + bias_[e];
      scores_[e] = score == score ? score : -std::numeric_limits<R>::infinity();
    }
    keep_groups();
    experts_.clear();
    for (std::int64_t g = 0; g < rule_.groups; ++g)
      if (kept_[std::size_t(g)])
        for (std::int64_t e = g * size_; e < (g + 1) * size_; ++e) experts_.offer(scores_[std::size_t(e)], e);
    return experts_;
  }

 private:
  void keep_groups() {
    if (rule_.top_groups == rule_.groups) {
      kept_.assign(kept_.size(), 1);
      return;
    }
    groups_.clear();
    for (std::int64_t g = 0; g < rule_.groups; ++g) {
      two_.clear();
      for (std::int64_t e = g * size_; e < (g + 1) * size_; ++e) two_.offer(scores_[std::size_t(e)], e);
      groups_.offer(two_.count() == 2 ? two_[0].score + two_[1].score : two_[0].score, g);
    }
    kept_.assign(kept_.size(), 0);
    for (std::int64_t i = 0; i < groups_.count(); ++i) kept_[std::size_t(groups_[i].id)] = 1;
  }

  RouterRule rule_;
  std::int64_t size_;
  const R* bias_;
  std::vector<R> scores_;
  Best<R> experts_, groups_, two_{2};
  std::vector<char> kept_;
};

template <class R>
R weight_norm(const R* logits, const std::int32_t* experts, std::int64_t K) {
  R sum = 0;
  for (std::int64_t k = 0; k < K; ++k) sum += sigmoid(logits[experts[k]]);
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
    Chooser<R> chooser(a.rule, E, K, bias);
#pragma omp for schedule(static)
    for (std::int64_t t = 0; t < T; ++t) {
      const auto& best = chooser.choose(logits + t * E);
      for (std::int64_t k = 0; k < K; ++k) experts[t * K + k] = std::int32_t(best[k].id);
      if (cutoff) cutoff[t] = best.count() > K ? best[K].score : -std::numeric_limits<R>::infinity();
    }
  }
}

template <class R>
void forward(const RouterForward& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  if (a.decided)
    cpu::check_expert_ids(a.experts, E);
  else
    choose_experts<R>(a);
  const auto* experts = a.experts.as<std::int32_t>();
  const R* logits = a.logits.as<R>();
  R* weights = a.weights.as<R>();
  const R scaling = R(a.rule.scaling);
#pragma omp parallel for schedule(static) if (T * K > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) {
    const R norm = a.rule.renormalize ? weight_norm(logits + t * E, experts + t * K, K) : R(1);
    for (std::int64_t k = 0; k < K; ++k) weights[t * K + k] = sigmoid(logits[t * E + experts[t * K + k]]) / norm * scaling;
  }
}

template <class R>
void backward(const RouterBackward& a) {
  const auto T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  cpu::check_expert_ids(a.experts, E);
  const R scaling = R(a.rule.scaling);
#pragma omp parallel for schedule(static) if (T * E > kWorthThreads)
  for (std::int64_t t = 0; t < T; ++t) {
    const R *logits = a.logits.as<R>() + t * E, *dweights = a.dweights.as<R>() + t * K;
    const auto* experts = a.experts.as<std::int32_t>() + t * K;
    R* dlogits = a.dlogits.as<R>() + t * E;
    R norm = 1, pull = 0;
    if (a.rule.renormalize) {
      norm = weight_norm(logits, experts, K);
      for (std::int64_t k = 0; k < K; ++k) pull += dweights[k] * (sigmoid(logits[experts[k]]) / norm);
    }
    for (std::int64_t e = 0; e < E; ++e) dlogits[e] = 0;
    for (std::int64_t k = 0; k < K; ++k) {
      const R x = logits[experts[k]];
      dlogits[experts[k]] = scaling / norm * (dweights[k] - pull) * sigmoid(x) * sigmoid(-x);  // 1 - s without cancellation
    }
  }
}

}  // namespace

void cpu::router(Context&, const RouterForward& a) { a.logits.dtype == DType::f64 ? forward<double>(a) : forward<float>(a); }
void cpu::router(Context&, const RouterBackward& a) { a.logits.dtype == DType::f64 ? backward<double>(a) : backward<float>(a); }

}  // namespace moetrain::ops
