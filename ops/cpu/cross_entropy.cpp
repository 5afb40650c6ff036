// cross_entropy.cpp -- two passes over the vocabulary for each block of labelled tokens; every product is one gemm.
#include "ops/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/exp.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

using cpu::acc_t;
using cpu::gemm;

constexpr std::int64_t kWorthThreads = 1 << 13;  // exponentials

template <class T>
class Loss {
  using R = acc_t<T>;

 public:
  Loss(const CrossEntropy& a, const CrossEntropy::Scratch& s)
      : a_(a),
        D_(a.hidden.shape[1]),
        V_(a.weight.shape[0]),
        most_rows_(s.token.shape[0]),
        chunk_(std::min(a.vocab_chunk, V_)),
        token_(s.token.as<std::int64_t>()),
        running_(s.running),
        top_(s.running.as<R>()),
        sum_(top_ + most_rows_),
        label_logit_(sum_ + most_rows_),
        hidden_(s.hidden.as<R>()),
        logits_(s.logits.as<R>()),
        wide_weight_(s.weight.present() ? s.weight.as<R>() : nullptr),
        dhidden_(a.dhidden.present() ? s.dhidden.as<R>() : nullptr),
        dweight_(a.dweight.present() ? a.dweight.as<R>() : nullptr) {}

  void run() {
    if (dhidden_) std::fill_n(a_.dhidden.as<T>(), a_.dhidden.count(), T(0.0F));
    double loss = 0;
    for (std::int64_t t = 0; t < a_.labels.count();) {
      t = take_block(t);
      if (rows_ > 0) loss += block_loss();
      if (rows_ > 0 && dhidden_) block_gradients();
    }
    *a_.loss.as<R>() += R(loss);
  }

 private:
  std::int32_t label(std::int64_t row) const { return a_.labels.as<std::int32_t>()[token_[row]]; }

  // Fills the block with the labelled tokens from t on; returns where the next one begins.
  std::int64_t take_block(std::int64_t t) {
    const auto* labels = a_.labels.as<std::int32_t>();
    for (rows_ = 0; t < a_.labels.count() && rows_ < most_rows_; ++t) {
      if (labels[t] == kIgnored) continue;
      const T* from = a_.hidden.as<T>() + t * D_;
      std::copy_n(from, D_, hidden_ + rows_ * D_);
      token_[rows_++] = t;
    }
    return t;
  }

  // Rows [v0, v0 + n) of the weight, in real.
  const R* weight_rows(std::int64_t v0, std::int64_t n) {
    const T* rows = a_.weight.as<T>() + v0 * D_;
    if constexpr (std::is_same_v<T, R>)
      return rows;
    else {
#pragma omp parallel for simd schedule(static) if (parallel : n * D_ > kWorthThreads)
      for (std::int64_t i = 0; i < n * D_; ++i) wide_weight_[i] = R(rows[i]);
      return wide_weight_;
    }
  }

  void fill_logits(const R* weight, std::int64_t n) {
    gemm<R>(false, true, rows_, n, D_, 1, hidden_, D_, weight, D_, 0, logits_, n);
  }

  double block_loss() {
    std::fill_n(top_, rows_, -std::numeric_limits<R>::infinity());
    std::fill_n(sum_, rows_, R(0));
    std::fill_n(label_logit_, most_rows_, R(0));
    for (std::int64_t v0 = 0; v0 < V_; v0 += chunk_) {
      const auto n = std::min(chunk_, V_ - v0);
      fill_logits(weight_rows(v0, n), n);
#pragma omp parallel for schedule(static) if (rows_ * n > kWorthThreads)
      for (std::int64_t r = 0; r < rows_; ++r) add_to_running(r, logits_ + r * n, v0, n);
    }
    if (a_.merge) a_.merge(running_);
    double loss = 0;
    for (std::int64_t r = 0; r < rows_; ++r) loss += double(std::log(sum_[r])) + (double(top_[r]) - double(label_logit_[r]));
    return loss;
  }

  void add_to_running(std::int64_t r, const R* logits, std::int64_t v0, std::int64_t n) {
    R top = top_[r];
#pragma omp simd reduction(max : top)
    for (std::int64_t v = 0; v < n; ++v) top = logits[v] > top ? logits[v] : top;
    double sum = 0;  // in f32 the last of many thousand terms would lose their low bits
#pragma omp simd reduction(+ : sum)
    for (std::int64_t v = 0; v < n; ++v) sum += double(cpu::exp(logits[v] - top));
    sum_[r] = R(double(sum_[r] * std::exp(top_[r] - top)) + sum);
    top_[r] = top;
    if (const auto v = label(r) - v0; v >= 0 && v < n) label_logit_[r] = logits[v];
  }

  void block_gradients() {
    const bool whole = chunk_ == V_;  // the first pass left all the logits there are
    for (std::int64_t v0 = 0; v0 < V_; v0 += chunk_) {
      const auto n = std::min(chunk_, V_ - v0);
      const R* weight = whole && wide_weight_ ? wide_weight_ : weight_rows(v0, n);
      if (!whole) fill_logits(weight, n);
#pragma omp parallel for schedule(static) if (rows_ * n > kWorthThreads)
      for (std::int64_t r = 0; r < rows_; ++r) logits_to_slopes(r, logits_ + r * n, v0, n);
      gemm<R>(false, false, rows_, D_, n, 1, logits_, n, weight, D_, R(v0 > 0), dhidden_, D_);
      if (dweight_) gemm<R>(true, false, n, D_, rows_, 1, logits_, n, hidden_, D_, 1, dweight_ + v0 * D_, D_);
    }
    for (std::int64_t r = 0; r < rows_; ++r)
      for (std::int64_t d = 0; d < D_; ++d) a_.dhidden.as<T>()[token_[r] * D_ + d] = T(dhidden_[r * D_ + d]);
  }

  void logits_to_slopes(std::int64_t r, R* logits, std::int64_t v0, std::int64_t n) const {
    const R top = top_[r], scale = R(a_.gradient_scale) / sum_[r];
#pragma omp simd
    for (std::int64_t v = 0; v < n; ++v) logits[v] = cpu::exp(logits[v] - top) * scale;
    if (const auto v = label(r) - v0; v >= 0 && v < n) logits[v] -= R(a_.gradient_scale);
  }

  const CrossEntropy& a_;
  std::int64_t D_, V_, most_rows_, chunk_, rows_ = 0;
  std::int64_t* token_;
  Tensor running_;
  R *top_, *sum_, *label_logit_, *hidden_, *logits_, *wide_weight_, *dhidden_, *dweight_;
};

void check_labels(const CrossEntropy& a) {
  const auto V = a.weight.shape[0];
  const auto* labels = a.labels.as<std::int32_t>();
  for (std::int64_t t = 0; t < a.labels.count(); ++t)
    check((labels[t] >= 0 && labels[t] < V) || labels[t] == kIgnored || (labels[t] == kElsewhere && a.merge),
          "cross_entropy: label is not in the vocabulary", {{"position", t}, {"label", labels[t]}, {"V", V}});
}

}  // namespace

void cpu::cross_entropy(Context& ctx, const CrossEntropy& a) {
  check_labels(a);
  Scope scope(ctx.scratch);
  const auto scratch = a.take_host_scratch(ctx);
  with_storage(a.hidden.dtype, [&](auto type) { Loss<decltype(type)>(a, scratch).run(); });
}

}  // namespace moetrain::ops
