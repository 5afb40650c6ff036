// indexer.cpp -- scores of a few query rows at a time, then the best of each row, or its divergence from the target and the slopes.
#include "ops/indexer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <vector>

#include "ops/cpu/exp.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/real_output.h"

namespace moetrain::ops::cpu {
namespace {

constexpr std::int64_t kRows = 16;  // query rows whose dot products (kRows * J, keys) are held at once
// Gradients of keys are summed in a fixed number of lanes, so that the order of sums does not follow the number of threads.
constexpr std::int64_t kLanes = 8;

struct Sizes {
  std::int64_t T, keys, J, H, longest;  // longest: the most keys of a query
  template <class Args>
  explicit Sizes(const Args& a)
      : T(a.q.shape[0]), keys(a.k.shape[0]), J(a.q.shape[1]), H(a.q.shape[2]), longest(a.documents.most_keys()) {}
  bool worth_threads(std::int64_t width) const { return double(T) * double(width) * double(J) * double(H) > 1e5; }
};

// Query rows [begin, end) of a document whose first token is row `first` of the keys, `before` tokens of it before `begin`.
struct Block {
  std::int64_t begin, end, first, before;
  Block(const Documents& documents, std::int64_t n, std::int64_t begin_)
      : begin(begin_),
        end(std::min(begin + kRows, documents.end(n))),
        first(documents.first_key(n)),
        before(documents.before(n) + begin - documents.begin(n)) {}
  std::int64_t keys() const { return before + end - begin; }
  std::int64_t causal(std::int64_t t) const { return before + t - begin + 1; }
};

template <class R>
R relu(R u) {
  return u < R(0) ? R(0) : u;  // in this order: a NaN stays one
}

// score[s] = sum_j weights[j] * relu(u[j, s]) over n keys; the rows of u are `stride` apart.
template <class R>
void score_row(const R* u, std::int64_t stride, const R* weights, std::int64_t J, std::int64_t n, R* score) {
  std::fill(score, score + n, R(0));
  for (std::int64_t j = 0; j < J; ++j) {
    const R w = weights[j], *uj = u + j * stride;
#pragma omp simd
    for (std::int64_t s = 0; s < n; ++s) score[s] += w * relu(uj[s]);
  }
}

// The positions of the K best of n scores into `indices`, best first, then -1; `order` (n) is scratch.
template <class R>
void select_row(R* score, std::int64_t n, std::int64_t first, std::int64_t K, std::int32_t* order, std::int32_t* indices) {
  for (std::int64_t s = 0; s < n; ++s)
    if (std::isnan(score[s])) score[s] = -std::numeric_limits<R>::infinity();
  const auto before = [score](std::int32_t a, std::int32_t b) { return score[a] > score[b] || (score[a] == score[b] && a > b); };
  const std::int64_t taken = std::min(K, n);
  std::iota(order, order + n, 0);
  if (taken < n) std::nth_element(order, order + taken, order + n, before);
  std::sort(order, order + taken, before);
  for (std::int64_t i = 0; i < taken; ++i) indices[i] = std::int32_t(first + order[i]);
  std::fill(indices + taken, indices + K, std::int32_t(-1));
}

template <class T>
void select(Context& ctx, const IndexerSelect& a) {
  using R = acc_t<T>;
  const Sizes size(a);
  const std::int64_t J = size.J, H = size.H, K = a.indices.shape[1];
  const Scope scope(ctx.scratch);
  const R *q = reals<R>(ctx, a.q), *k = reals<R>(ctx, a.k), *weights = a.weights.as<R>();
  const std::int64_t threads = omp_get_max_threads();
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {threads, kRows * J + 1, size.longest}).template as<R>();
  std::int32_t* const orders = ctx.scratch.take(DType::i32, {threads, size.longest}).as<std::int32_t>();
  if (ctx.dry()) return;
  const std::int64_t needed = (kRows * J + 1) * size.longest;
  std::int32_t* const indices = a.indices.as<std::int32_t>();
  std::vector<Block> blocks;
  for (std::int64_t n = 0; n < a.documents.count(); ++n)
    for (std::int64_t t = a.documents.begin(n); t < a.documents.end(n); t += kRows) blocks.emplace_back(a.documents, n, t);
#pragma omp parallel for schedule(dynamic) if (size.worth_threads(size.longest))
  for (std::size_t item = 0; item < blocks.size(); ++item) {
    const Block& b = blocks[item];
    const std::int64_t keys = b.keys();
    R *const u = scratch + omp_get_thread_num() * needed, *const score = u + kRows * J * size.longest;
    gemm<R>(false, true, (b.end - b.begin) * J, keys, H, R(1), q + b.begin * J * H, H, k + b.first * H, H, R(0), u, keys);
    for (std::int64_t t = b.begin; t < b.end; ++t) {
      score_row(u + (t - b.begin) * J * keys, keys, weights + t * J, J, b.causal(t), score);
      select_row(score, b.causal(t), b.first, K, orders + omp_get_thread_num() * size.longest, indices + t * K);
    }
  }
}

// One row over its n keys: returns the divergence; with dweights, u becomes du and dweights (J) is written. score and p are
// scratch, p comes holding the target.
template <class R>
R divergence_row(R* u, std::int64_t stride, const R* weights, std::int64_t J, std::int64_t n, R gradient_scale, R* score, R* p,
                 R* dweights) {
  score_row(u, stride, weights, J, n, score);
  R top = -std::numeric_limits<R>::infinity(), sum = 0, total = 0, divergence = 0;
#pragma omp simd reduction(max : top)
  for (std::int64_t s = 0; s < n; ++s) top = std::max(top, score[s]);
#pragma omp simd reduction(+ : sum, total)
  for (std::int64_t s = 0; s < n; ++s) {
    sum += exp(score[s] - top);
    total += p[s];
  }
  const R lse = top + std::log(sum), share = R(1) / std::max(total, R(1e-10));
  if (n > 1)
    for (std::int64_t s = 0; s < n; ++s) {
      p[s] *= share;
      score[s] -= lse;
      if (p[s] > R(0)) divergence += p[s] * (std::log(p[s]) - score[s]);
    }
  if (!dweights) return divergence;
#pragma omp simd
  for (std::int64_t s = 0; s < n; ++s) score[s] = n > 1 ? gradient_scale * (exp(score[s]) - p[s]) : R(0);
  for (std::int64_t j = 0; j < J; ++j) {
    R *uj = u + j * stride, w = weights[j], dw = 0;
#pragma omp simd reduction(+ : dw)
    for (std::int64_t s = 0; s < n; ++s) {
      dw += score[s] * relu(uj[s]);
      uj[s] = uj[s] > R(0) ? score[s] * w : R(0);
    }
    dweights[j] = dw;
  }
  return divergence;
}

// What both stages read and write, as reals; row_loss (T) holds one divergence a row.
template <class R>
struct Work {
  const Sizes& size;
  const IndexerLoss& a;
  const R *q, *k, *weights, *target;
  R *dq, *dweights, *row_loss;  // dq and dweights null: loss only
};

// The block's rows over all their causal keys. dk: the lane's rows of this document.
template <class R>
void dense_rows(const Work<R>& work, const Block& b, R* scratch, R* dk) {
  const std::int64_t J = work.size.J, H = work.size.H, W = work.a.target.shape[1], keys = b.keys(), rows = (b.end - b.begin) * J;
  R *const u = scratch, *const score = u + kRows * J * work.size.longest, *const p = score + work.size.longest;
  const R *q = work.q + b.begin * J * H, *k = work.k + b.first * H;
  gemm<R>(false, true, rows, keys, H, R(1), q, H, k, H, R(0), u, keys);
  for (std::int64_t t = b.begin; t < b.end; ++t) {
    const std::int64_t causal = b.causal(t);
    R* const u_row = u + (t - b.begin) * J * keys;
    std::copy(work.target + t * W, work.target + t * W + causal, p);
    work.row_loss[t] = divergence_row(u_row, keys, work.weights + t * J, J, causal, R(work.a.gradient_scale), score, p,
                                      work.dq ? work.dweights + t * J : nullptr);
    for (std::int64_t j = 0; j < J; ++j) std::fill(u_row + j * keys + causal, u_row + (j + 1) * keys, R(0));
  }
  if (!work.dq) return;
  gemm<R>(false, false, rows, H, keys, R(1), u, keys, k, H, R(0), work.dq + b.begin * J * H, H);
  gemm<R>(true, false, keys, H, rows, R(1), u, keys, q, H, R(1), dk, H);
}

// Row t over its selected keys, gathered. dk: the lane's rows of all tokens.
template <class R>
void sparse_row(const Work<R>& work, std::int64_t t, R* scratch, R* dk) {
  const std::int64_t J = work.size.J, H = work.size.H, W = work.a.target.shape[1];
  const std::int32_t* indices = work.a.indices.template as<std::int32_t>() + t * W;
  R *const u = scratch, *const score = u + J * W, *const p = score + W, *const keys = p + W, *const dkeys = keys + W * H;
  std::int64_t n = 0;
  for (std::int64_t i = 0; i < W; ++i) {
    if (indices[i] < 0) continue;
    std::copy(work.k + indices[i] * H, work.k + (indices[i] + 1) * H, keys + n * H);
    p[n++] = work.target[t * W + i];
  }
  const R* q = work.q + t * J * H;
  gemm<R>(false, true, J, n, H, R(1), q, H, keys, H, R(0), u, n);
  work.row_loss[t] = divergence_row(u, n, work.weights + t * J, J, n, R(work.a.gradient_scale), score, p,
                                    work.dq ? work.dweights + t * J : nullptr);
  if (!work.dq) return;
  gemm<R>(false, false, J, H, n, R(1), u, n, keys, H, R(0), work.dq + t * J * H, H);
  gemm<R>(true, false, n, H, J, R(1), u, n, q, H, R(0), dkeys, H);
  for (std::int64_t i = 0, row = 0; i < W; ++i) {
    if (indices[i] < 0) continue;
    for (std::int64_t h = 0; h < H; ++h) dk[indices[i] * H + h] += dkeys[row * H + h];
    ++row;
  }
}

template <class T>
void loss(Context& ctx, const IndexerLoss& a) {
  using R = acc_t<T>;
  const Sizes size(a);
  const bool sparse = a.indices.present(), gradients = a.dq.present();
  const std::int64_t W = a.target.shape[1], J = size.J, H = size.H;
  const Scope scope(ctx.scratch);
  std::optional<RealOutput<R>> dq;
  if (gradients) dq.emplace(ctx, a.dq);
  R* const row_loss = ctx.scratch.take(DTypeOf<R>::value, {size.T}).template as<R>();
  const Work<R> work{size,
                     a,
                     reals<R>(ctx, a.q),
                     reals<R>(ctx, a.k),
                     a.weights.as<R>(),
                     a.target.as<R>(),
                     dq ? dq->data : nullptr,
                     gradients ? a.dweights.as<R>() : nullptr,
                     row_loss};
  const std::int64_t dk_size = gradients ? size.keys * H : 0;
  R* const dk_lanes = ctx.scratch.zeros(DTypeOf<R>::value, {kLanes, dk_size}).template as<R>();
  const Shape needed = sparse ? Shape{W, J + 2 + 2 * H} : Shape{kRows * J + 2, size.longest};
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {omp_get_max_threads(), needed[0], needed[1]}).template as<R>();
  if (ctx.dry()) return;
  if (sparse)
    for (std::int64_t i = 0; i < size.T * W; ++i) {
      const auto index = a.indices.as<std::int32_t>()[i];
      check(-1 <= index && index < size.keys, "indexer_loss: an index is no position",
            {{"at", i}, {"index", index}, {"keys", size.keys}});
    }
#pragma omp parallel for schedule(dynamic) if (size.worth_threads(sparse ? W : size.longest))
  for (std::int64_t item = 0; item < a.documents.count() * kLanes; ++item) {
    const std::int64_t lane = item % kLanes, n = item / kLanes;
    R *const mine = scratch + omp_get_thread_num() * needed.count(), *const dk = dk_lanes + lane * dk_size;
    for (std::int64_t t = a.documents.begin(n) + lane * kRows; t < a.documents.end(n); t += kLanes * kRows) {
      const Block b(a.documents, n, t);
      if (sparse)
        for (std::int64_t row = b.begin; row < b.end; ++row) sparse_row(work, row, mine, dk);
      else
        dense_rows(work, b, mine, gradients ? dk + b.first * H : nullptr);
    }
  }
  a.loss.as<R>()[0] += R(std::accumulate(row_loss, row_loss + size.T, 0.0));
  if (!gradients) return;
  dq->round();
  T* const dk = a.dk.as<T>();
#pragma omp parallel for schedule(static) if (dk_size > kWorthThreads)
  for (std::int64_t i = 0; i < dk_size; ++i) {
    R sum = 0;
    for (std::int64_t lane = 0; lane < kLanes; ++lane) sum += dk_lanes[lane * dk_size + i];
    dk[i] = T(sum);
  }
}

}  // namespace

void indexer_select(Context& ctx, const IndexerSelect& a) {
  with_storage(a.q.dtype, [&](auto storage) { select<decltype(storage)>(ctx, a); });
}
void indexer_loss(Context& ctx, const IndexerLoss& a) {
  with_storage(a.q.dtype, [&](auto storage) { loss<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops::cpu
