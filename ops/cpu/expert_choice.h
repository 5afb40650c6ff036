// expert_choice.h -- the experts of a token by biased score, inside its best groups: the rule of ops/router.h.
#pragma once
#include <limits>
#include <vector>

#include "ops/cpu/exp.h"
#include "ops/router.h"

namespace moetrain::ops::cpu {

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
R biased_score(R logit, R bias) {
  const R score = sigmoid(logit) + bias;
  return score == score ? score : -std::numeric_limits<R>::infinity();
}

// Finds the `most` best experts of one row of logits after another, or all there are.
template <class R>
class ExpertChoice {
 public:
  ExpertChoice(const RouterRule& rule, std::int64_t E, std::int64_t most, const R* bias)
      : rule_(rule),
        size_(E / rule.groups),
        bias_(bias),
        scores_(std::size_t(E)),
        experts_(most),
        groups_(rule.top_groups),
        kept_(std::size_t(rule.groups)) {}

  // Of those that open(e) lets in, the best there are, best first.
  template <class Open>
  const Best<R>& best(const R* logits, Open&& open) {
    for (std::size_t e = 0; e < scores_.size(); ++e) scores_[e] = biased_score(logits[e], bias_[e]);
    keep_groups();
    experts_.clear();
    for (std::int64_t g = 0; g < rule_.groups; ++g)
      if (kept_[std::size_t(g)])
        for (std::int64_t e = g * size_; e < (g + 1) * size_; ++e)
          if (open(e)) experts_.offer(scores_[std::size_t(e)], e);
    return experts_;
  }
  const Best<R>& best(const R* logits) {
    return best(logits, [](std::int64_t) { return true; });
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

}  // namespace moetrain::ops::cpu
