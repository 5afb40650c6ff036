// attention.cpp -- blocks of query rows against all their causal keys, so that the products are BLAS's and T x T is never stored.
#include "ops/attention.h"

#include <omp.h>

#include <algorithm>
#include <vector>

#include "ops/cpu/exp.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/real_output.h"
#include "ops/cpu/softmax.h"

namespace moetrain::ops::cpu {
namespace {

constexpr std::int64_t kRows = 64;  // query rows a block: enough for BLAS, and the waste above the diagonal stays small

struct Sizes {
  std::int64_t T, keys, N, Hn, He, Hv, longest;  // keys: rows of kv; longest: the most of them that a query sees
  std::int64_t q() const { return Hn + He; }
  std::int64_t kv() const { return Hn + Hv; }
  template <class Args>
  explicit Sizes(const Args& a)
      : T(a.q.shape[0]),
        keys(a.kv.shape[0]),
        N(a.q.shape[1]),
        Hn(a.q.shape[2] - a.k_extra.shape[1]),
        He(a.k_extra.shape[1]),
        Hv(a.kv.shape[2] - Hn),
        longest(a.documents.most_keys()) {}
  bool worth_threads() const { return double(T) * double(longest) * double(N) * double(Hn + He + Hv) > 1e5; }
};

struct Block {
  std::int64_t begin, end;     // query rows
  std::int64_t first, before;  // key row of the document's first token; its tokens before `begin`
  std::int64_t keys() const { return before + end - begin; }
  std::int64_t causal(std::int64_t t) const { return before + t - begin + 1; }
};

Block block_of(const Documents& documents, std::int64_t n, std::int64_t begin) {
  return {begin, std::min(begin + kRows, documents.end(n)), documents.first_key(n), documents.before(n) + begin - documents.begin(n)};
}

std::vector<Block> blocks_of(const Documents& documents) {
  std::vector<Block> blocks;
  for (std::int64_t n = 0; n < documents.count(); ++n)
    for (std::int64_t t = documents.begin(n); t < documents.end(n); t += kRows) blocks.push_back(block_of(documents, n, t));
  return blocks;
}

// z = scaled scores of the block's rows (dense, one column a key from the document's first to the block's last) for head n.
template <class R>
void scores(const Sizes& s, const Block& b, std::int64_t n, R scale, const R* q, const R* kv, const R* k_extra, R* z) {
  const std::int64_t rows = b.end - b.begin, keys = b.keys(), q_stride = s.N * s.q(), kv_stride = s.N * s.kv();
  const R* q_block = q + b.begin * q_stride + n * s.q();
  gemm<R>(false, true, rows, keys, s.Hn, scale, q_block, q_stride, kv + b.first * kv_stride + n * s.kv(), kv_stride, R(0), z, keys);
  if (s.He > 0)
    gemm<R>(false, true, rows, keys, s.He, scale, q_block + s.Hn, q_stride, k_extra + b.first * s.He, s.He, R(1), z, keys);
}

template <class T>
void forward(Context& ctx, const AttentionForward& a) {
  using R = acc_t<T>;
  const Sizes s(a);
  const Scope scope(ctx.scratch);
  const R *q = reals<R>(ctx, a.q), *kv = reals<R>(ctx, a.kv), *k_extra = reals<R>(ctx, a.k_extra);
  const RealOutput<R> o(ctx, a.o);
  R *lse = a.lse.as<R>(), *probability = a.probability.present() ? a.probability.as<R>() : nullptr;
  const std::int64_t W = probability ? a.probability.shape[1] : 0;

  // a mean over heads is summed by whoever holds all heads of a row; else every head is work of its own
  const std::int64_t heads_an_item = probability ? s.N : 1, items_a_block = s.N / heads_an_item;
  const std::int64_t scratch_size = std::min(kRows, s.longest) * s.longest;
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {omp_get_max_threads(), scratch_size}).template as<R>();
  if (ctx.dry()) return;
  const auto blocks = blocks_of(a.documents);
  const std::int64_t items = std::int64_t(blocks.size()) * items_a_block;
#pragma omp parallel for schedule(dynamic) if (s.worth_threads())
  for (std::int64_t item = 0; item < items; ++item) {
    const Block b = blocks[std::size_t(item / items_a_block)];
    const std::int64_t rows = b.end - b.begin, keys = b.keys(), head = item % items_a_block;
    R* const z = scratch + omp_get_thread_num() * scratch_size;
    if (probability) std::fill(probability + b.begin * W, probability + b.end * W, R(0));
    for (std::int64_t n = head; n < head + heads_an_item; ++n) {
      scores(s, b, n, R(a.scale), q, kv, k_extra, z);
      for (std::int64_t r = 0; r < rows; ++r) {
        const std::int64_t t = b.begin + r, causal = b.causal(t);
        R* p = z + r * keys;
        lse[t * s.N + n] = softmax(p, causal);
        std::fill(p + causal, p + keys, R(0));
        if (!probability) continue;
        R* mean = probability + t * W;
        for (std::int64_t k = 0; k < causal; ++k) mean[k] += p[k] / R(s.N);
      }
      gemm<R>(false, false, rows, s.Hv, keys, R(1), z, keys, kv + (b.first * s.N + n) * s.kv() + s.Hn, s.N * s.kv(), R(0),
              o.data + (b.begin * s.N + n) * s.Hv, s.N * s.Hv);
    }
  }
  o.round();
}

// z: scores, become probabilities; dz: gradients of the probabilities, become those of the unscaled scores.
template <class T, class R>
void softmax_backward(const Sizes& s, const Block& b, std::int64_t n, R scale, const T* o, const R* dout, const R* lse, R* z,
                      R* dz) {
  const std::int64_t keys = b.keys();
  for (std::int64_t t = b.begin; t < b.end; ++t) {
    const std::int64_t causal = b.causal(t), at = t * s.N + n;
    R *p = z + (t - b.begin) * keys, *dp = dz + (t - b.begin) * keys, delta = 0;
#pragma omp simd reduction(+ : delta)
    for (std::int64_t h = 0; h < s.Hv; ++h) delta += R(o[at * s.Hv + h]) * dout[at * s.Hv + h];
#pragma omp simd
    for (std::int64_t k = 0; k < causal; ++k) {
      p[k] = exp(p[k] - lse[at]);
      dp[k] = scale * p[k] * (dp[k] - delta);
    }
    for (std::int64_t k = causal; k < keys; ++k) p[k] = dp[k] = 0;
  }
}

template <class T>
void backward(Context& ctx, const AttentionBackward& a) {
  using R = acc_t<T>;
  const Sizes s(a);
  const Scope scope(ctx.scratch);
  const R *q = reals<R>(ctx, a.q), *kv = reals<R>(ctx, a.kv), *k_extra = reals<R>(ctx, a.k_extra), *dout = reals<R>(ctx, a.do_);
  const RealOutput<R> dq(ctx, a.dq), dkv(ctx, a.dkv);
  const T* o = a.o.as<T>();
  const R *lse = a.lse.as<R>(), scale = R(a.scale);
  R* const dk_extra_head = ctx.scratch.take(DTypeOf<R>::value, {s.N, s.keys, s.He}).template as<R>();  // summed over heads at the end
  const std::int64_t scratch_size = std::min(kRows, s.longest) * s.longest, q_stride = s.N * s.q(), kv_stride = s.N * s.kv();
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {omp_get_max_threads(), 2 * scratch_size}).template as<R>();
  if (ctx.dry()) return;
  if (!a.documents.whole()) {  // keys that nothing here sees
    std::fill_n(dkv.data, s.keys * kv_stride, R(0));
    std::fill_n(dk_extra_head, s.N * s.keys * s.He, R(0));
  }

#pragma omp parallel for schedule(dynamic) if (s.worth_threads())
  for (std::int64_t item = 0; item < a.documents.count() * s.N; ++item) {
    const std::int64_t n = item % s.N, document = item / s.N, first = a.documents.first_key(document);
    R *const z = scratch + omp_get_thread_num() * 2 * scratch_size, *const dz = z + scratch_size;
    const R *kn = kv + first * kv_stride + n * s.kv(), *v = kn + s.Hn, *ke = k_extra + first * s.He;
    R *dkn = dkv.data + first * kv_stride + n * s.kv(), *dv = dkn + s.Hn, *dke = dk_extra_head + (n * s.keys + first) * s.He;
    for (std::int64_t t = 0; t < a.documents.keys(document); ++t) std::fill(dkn + t * kv_stride, dkn + t * kv_stride + s.kv(), R(0));
    std::fill(dke, dke + a.documents.keys(document) * s.He, R(0));
    for (std::int64_t begin = a.documents.begin(document); begin < a.documents.end(document); begin += kRows) {
      const Block b = block_of(a.documents, document, begin);
      const std::int64_t rows = b.end - b.begin, keys = b.keys();
      const R *qn = q + begin * q_stride + n * s.q(), *dout_block = dout + (begin * s.N + n) * s.Hv;
      R* dqn = dq.data + begin * q_stride + n * s.q();
      scores(s, b, n, scale, q, kv, k_extra, z);
      gemm<R>(false, true, rows, keys, s.Hv, R(1), dout_block, s.N * s.Hv, v, kv_stride, R(0), dz, keys);
      softmax_backward(s, b, n, scale, o, dout, lse, z, dz);
      gemm<R>(false, false, rows, s.Hn, keys, R(1), dz, keys, kn, kv_stride, R(0), dqn, q_stride);
      gemm<R>(true, false, keys, s.Hn, rows, R(1), dz, keys, qn, q_stride, R(1), dkn, kv_stride);
      gemm<R>(true, false, keys, s.Hv, rows, R(1), z, keys, dout_block, s.N * s.Hv, R(1), dv, kv_stride);
      if (s.He == 0) continue;
      gemm<R>(false, false, rows, s.He, keys, R(1), dz, keys, ke, s.He, R(0), dqn + s.Hn, q_stride);
      gemm<R>(true, false, keys, s.He, rows, R(1), dz, keys, qn + s.Hn, q_stride, R(1), dke, s.He);
    }
  }
  T* dk_extra = a.dk_extra.as<T>();
  for (std::int64_t i = 0; i < s.keys * s.He; ++i) {
    R sum = 0;
    for (std::int64_t n = 0; n < s.N; ++n) sum += dk_extra_head[n * s.keys * s.He + i];
    dk_extra[i] = T(sum);
  }
  dq.round();
  dkv.round();
}

}  // namespace

void attention(Context& ctx, const AttentionForward& a) {
  with_storage(a.q.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
}
void attention(Context& ctx, const AttentionBackward& a) {
  with_storage(a.q.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops::cpu
