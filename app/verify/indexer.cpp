// indexer.cpp -- the selection of keys by their scores, and the loss that teaches it in the job's stage.
#include "ops/indexer.h"

#include <cmath>

#include "app/verify/selection.h"
#include "app/verify/verify.h"
#include "ops/linear.h"

namespace moetrain::app {
namespace {

struct Inputs {
  std::int64_t J, H;
  Tensor q, k, weights;
  Inputs(OpCase& c, std::int64_t T)
      : J(c.model().dsa->index_n_heads),
        H(c.model().dsa->index_head_dim),
        q(c.normal(c.storage(), {T, J, H})),
        k(c.normal(c.storage(), {T, H})),
        weights(c.normal(c.real(), {T, J}, 1 / std::sqrt(double(J * H)))) {}
};

// The scores that a query gives to the keys of rows first..t, in f64.
std::vector<double> scores_of(OpCase& c, const Inputs& in, std::int64_t t, ConstTensor keys64) {
  Scope scope(c.host_tensors());
  const Tensor q64 = c.wide(in.q, {t}).reshape({in.J, in.H}), w64 = c.wide(in.weights, {t}),
               u = c.host_zeros({in.J, keys64.shape[0]});
  ops::linear(c.host(), ops::LinearForward{.x = q64, .w = keys64, .y = u});
  std::vector<double> scores(std::size_t(keys64.shape[0]));
  for (std::int64_t j = 0; j < in.J; ++j)
    for (std::size_t s = 0; s < scores.size(); ++s)
      scores[s] += w64.as<double>()[j] * std::max(u.as<double>()[std::size_t(j) * scores.size() + s], 0.0);
  return scores;
}

// Scores that rounding cannot tell apart may change places, so what is compared are the scores of the chosen, one after another.
void verify_select(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = c.T();
  const Inputs in(c, T);
  const ops::Documents documents = c.documents();
  const std::int64_t K = std::clamp<std::int64_t>(c.model().dsa->index_topk, 1, documents.longest());
  const Tensor indices = c.empty(DType::i32, {T, K});
  c.run("indexer_select", sizes({{"T", T}, {"J", in.J}, {"H", in.H}, {"K", K}}), [&](ops::Context& ctx) {
    ops::indexer_select(
        ctx, ops::IndexerSelect{.q = in.q, .k = in.k, .weights = in.weights, .documents = documents, .indices = indices});
  });
  std::vector<double> got, want;
  const Tensor k64 = c.wide(in.k);
  for (const std::int64_t t : c.sample(T, 64)) {
    Scope scope(c.host_tensors());
    const std::int64_t first = *(std::upper_bound(c.starts().begin(), c.starts().end(), t) - 1), n = t - first + 1,
                       most = std::min(K, n);
    const std::vector<double> scores = scores_of(c, in, t, k64.rows(first, t + 1));
    std::vector<double> best(scores);
    std::sort(best.begin(), best.end(), std::greater<>());
    std::vector<bool> taken(std::size_t(n), false);
    const Tensor row = c.fetch(indices, {t});
    for (std::int64_t i = 0; i < K; ++i) {
      const std::int64_t s = row.as<std::int32_t>()[i] - first;
      const bool position = s >= 0 && s < n && !taken[std::size_t(s)];
      if (position) taken[std::size_t(s)] = true;
      const bool none = row.as<std::int32_t>()[i] == -1;
      want.push_back(i < most ? best[std::size_t(i)] : 0);
      got.push_back(i < most ? (position ? scores[std::size_t(s)] : std::nan("")) : (none ? 0 : std::nan("")));
    }
  }
  const auto count = std::int64_t(got.size());
  c.judge("chosen scores", c.host_of(got, {count}), c.host_of(want, {count}), {1e-4, 1e-5});
  c.tell();
}

struct Gradients {
  Tensor loss, dq, dk, dweights;
};

// Products that are nearly zero change side by rounding, which turns a gradient on or off.
Bound bound_of(const OpCase& c) { return c.storage() == DType::bf16 ? Bound{3e-2, 5e-3} : Bound{5e-3, 1e-3}; }

// All queries for what is a row's own; then the compared ones alone, for what is summed over queries.
void verify_sparse_loss(const Verification& v) {
  OpCase c(v);
  const Selection selected(c, 64);
  const std::int64_t T = selected.T, K = selected.K, W = T - selected.window;
  const Inputs in(c, T);
  const Places &rows = selected.rows, window = range(selected.window, T);
  const Tensor target = c.normal(c.real(), {T, K}, 0.1, 1), all = c.put(selected.indices, {T, K}),
               few = c.put(selected.of_rows(), {T, K});
  const Gradients got{c.zeros(c.real(), {1}), c.empty(c.storage(), in.q.shape), c.empty(c.storage(), in.k.shape),
                      c.empty(c.real(), in.weights.shape)};
  const auto call = [&](ops::Context& ctx, ConstTensor q, ConstTensor k, ConstTensor weights, ConstTensor to, ConstTensor indices,
                        const ops::Documents& documents, const Gradients& to_write) {
    ops::indexer_loss(ctx, ops::IndexerLoss{.q = q,
                                            .k = k,
                                            .weights = weights,
                                            .target = to,
                                            .indices = indices,
                                            .documents = documents,
                                            .gradient_scale = 1,
                                            .loss = to_write.loss,
                                            .dq = to_write.dq,
                                            .dk = to_write.dk,
                                            .dweights = to_write.dweights});
  };
  const ops::Documents documents = c.documents();
  std::vector<std::int64_t> starts_of_window{0};
  for (const std::int64_t s : c.starts())
    if (s > selected.window) starts_of_window.push_back(s - selected.window);
  const Gradients want{c.host_zeros({1}), c.host_zeros({W, in.J, in.H}), c.host_zeros({W, in.H}), c.host_zeros({W, in.J})};
  call(c.host(), c.wide(in.q, window), c.wide(in.k, window), c.wide(in.weights, window), c.wide(target, window),
       c.host_of(selected.of_window(), {W, K}), {starts_of_window}, want);
  const std::string shape = sizes({{"T", T}, {"J", in.J}, {"H", in.H}, {"K", K}});
  const auto run = [&](const char* name, ConstTensor indices) {
    c.run(
        name, shape, [&] { c.clear({got.loss}); },
        [&](ops::Context& ctx) { call(ctx, in.q, in.k, in.weights, target, indices, documents, got); });
  };
  run("indexer_loss, rows", all);
  c.compare("dq", got.dq, rows, c.pick(want.dq, selected.rows_of_window()), bound_of(c));
  c.compare("dweights", got.dweights, rows, c.pick(want.dweights, selected.rows_of_window()), bound_of(c));
  c.tell();
  run("indexer_loss, sums", few);
  c.compare("loss", got.loss, want.loss, {1e-3, 1e-3});
  c.compare("dk", got.dk, window, want.dk, bound_of(c));
  c.tell();
}

// Every causal key is in every sum, so all of fewer tokens.
void verify_dense_loss(const Verification& v) {
  OpCase c(v);
  const std::int64_t T = std::min<std::int64_t>(c.T(), 1024);
  const Inputs in(c, T);
  const std::vector<std::int64_t> starts{0, T};
  const ops::Documents documents{starts, c.put(starts, {2})};
  const Tensor target = c.normal(c.real(), {T, T}, 0.1, 1), loss = c.zeros(c.real(), {1}), dq = c.empty(c.storage(), in.q.shape),
               dk = c.empty(c.storage(), in.k.shape), dweights = c.empty(c.real(), in.weights.shape);
  const auto call = [&](ops::Context& ctx, ConstTensor q, ConstTensor k, ConstTensor weights, ConstTensor to, const Gradients& g) {
    ops::indexer_loss(ctx, ops::IndexerLoss{.q = q,
                                            .k = k,
                                            .weights = weights,
                                            .target = to,
                                            .indices = {},
                                            .documents = documents,
                                            .gradient_scale = 1,
                                            .loss = g.loss,
                                            .dq = g.dq,
                                            .dk = g.dk,
                                            .dweights = g.dweights});
  };
  c.run(
      "indexer_loss, dense", sizes({{"T", T}, {"J", in.J}, {"H", in.H}}), [&] { c.clear({loss}); },
      [&](ops::Context& ctx) {
        call(ctx, in.q, in.k, in.weights, target, {loss, dq, dk, dweights});
      });
  const Gradients want{c.host_zeros({1}), c.host_zeros(dq.shape), c.host_zeros(dk.shape), c.host_zeros(dweights.shape)};
  call(c.host(), c.wide(in.q), c.wide(in.k), c.wide(in.weights), c.wide(target), want);
  c.compare("loss", loss, want.loss, {1e-3, 1e-3});
  c.compare("dq", dq, want.dq, bound_of(c));
  c.compare("dk", dk, want.dk, bound_of(c));
  c.compare("dweights", dweights, want.dweights, bound_of(c));
  c.tell();
}

}  // namespace

void verify_indexer(const Verification& v) {
  const bool sparse = v.config.loss.indexer_stage == core::IndexerStage::sparse;
  if (sparse) verify_select(v);
  if (v.config.loss.indexer_coefficient != 0) sparse ? verify_sparse_loss(v) : verify_dense_loss(v);
}

}  // namespace moetrain::app
