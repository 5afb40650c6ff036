// sparse_attention.h -- softmax attention over a selected set of positions a query, in the latent space (MLA, absorbed).
//
//   qe = the last He columns of q; s runs over the positions in row t of indices, -1 left out: rows of latent, which are as many as
//   queries, or more where queries are a slice of a sequence
//   z[t,n,s]      = scale * ( q_latent[t,n].latent[s] + qe[t,n].k_extra[s] )
//   lse[t,n]      = log sum_s exp z[t,n,s]                 A[t,n,s] = exp( z[t,n,s] - lse[t,n] )
//   o_latent[t,n] = sum_s A[t,n,s] latent[s]               probability[t,j] = mean_n A[t,n,indices[t,j]]
//
//   dz[t,n,s]      = scale * A[t,n,s] * ( do_latent[t,n].latent[s] - o_latent[t,n].do_latent[t,n] )
//   dq_latent[t,n] = sum_s dz[t,n,s] latent[s]             dqe[t,n] = sum_s dz[t,n,s] k_extra[s]
//   dlatent[s]     = sum_{t,n} ( dz[t,n,s] q_latent[t,n] + A[t,n,s] do_latent[t,n] )
//   dk_extra[s]    = sum_{t,n} dz[t,n,s] qe[t,n]
//
// The indices of a row may come in any order, -1 may stand anywhere, a position stands there once at most. The row itself says what
// is causal and inside the document: nothing else masks. A row without any position gives o_latent = 0, lse = -inf, probability = 0
// and no gradient. Outputs are written (of dq the last He columns, the rest is left alone), nothing adds, nothing may alias.
// Scores, softmax and sums are real, dlatent and dk_extra are summed over queries before they are rounded. No gradient goes through
// probability. Repeatable, and on the CPU for any number of threads the same bits.
#pragma once
#include <algorithm>
#include <limits>

#include "ops/context.h"
#include "ops/cuda/key_tiles.h"

namespace moetrain::ops {

// What forward and backward read alike.
template <class Args>
void check_sparse_attention_inputs(const Args& a) {
  check(a.q_latent.shape.rank() == 3 && a.q.shape.rank() == 3 && a.k_extra.shape.rank() == 2 && a.indices.shape.rank() == 2,
        "sparse_attention: q_latent, q, k_extra, indices are not of rank 3, 3, 2, 2",
        {{"q_latent", a.q_latent.shape.rank()},
         {"q", a.q.shape.rank()},
         {"k_extra", a.k_extra.shape.rank()},
         {"indices", a.indices.shape.rank()}});
  const auto T = a.q_latent.shape[0], N = a.q_latent.shape[1], C = a.q_latent.shape[2], He = a.k_extra.shape[1];
  check(N >= 1 && C >= 1 && T <= std::numeric_limits<std::int32_t>::max(), "sparse_attention: sizes",
        {{"T", T}, {"N", N}, {"C", C}});
  check(a.q.shape[0] == T && a.q.shape[1] == N && a.q.shape[2] >= He, "sparse_attention: q is not (T, N, Hn + He)",
        {{"T", T}, {"N", N}, {"He", He}, {"q", a.q.count()}});
  const auto keys = a.k_extra.shape[0];
  check(a.latent.shape == Shape{keys, C} && keys <= std::numeric_limits<std::int32_t>::max(), "sparse_attention: latent is not (keys, C)",
        {{"keys", keys}, {"C", C}, {"latent", a.latent.count()}});
  check(a.indices.shape[0] == T, "sparse_attention: indices is not (T, K)", {{"T", T}, {"rows", a.indices.shape[0]}});
  check(a.o_latent.shape == a.q_latent.shape, "sparse_attention: o_latent is not (T, N, C)",
        {{"T", T}, {"N", N}, {"C", C}, {"o_latent", a.o_latent.count()}});
  check(a.lse.shape == Shape{T, N}, "sparse_attention: lse is not (T, N)", {{"T", T}, {"N", N}, {"lse", a.lse.count()}});
  const auto type = a.q.dtype;
  check(a.q_latent.dtype == type && a.latent.dtype == type && a.k_extra.dtype == type && a.o_latent.dtype == type,
        "sparse_attention: q_latent, q, latent, k_extra, o_latent are not of one type",
        {{"q", int(type)},
         {"q_latent", int(a.q_latent.dtype)},
         {"latent", int(a.latent.dtype)},
         {"k_extra", int(a.k_extra.dtype)},
         {"o_latent", int(a.o_latent.dtype)}});
  check(a.indices.dtype == DType::i32 && a.lse.dtype == real_of(type), "sparse_attention: indices is not i32 or lse not real",
        {{"indices", int(a.indices.dtype)}, {"lse", int(a.lse.dtype)}});
}
// Are the widths those that the tensor cores of a CUDA device take?
template <class Args>
bool sparse_attention_in_tiles(const Args& a) {
  return a.q.dtype == DType::bf16 && a.latent.shape[1] == 512 && a.k_extra.shape[1] == 64 && a.q.shape[2] % 8 == 0 &&
         a.latent.shape[0] <= cuda::kMostListedKeys;
}

// What one product of the latent's width and one of a score's take, of all pairs of a query and a position.
template <class Args>
double sparse_attention_flops(const Args& a, int scores, int values) {
  const std::int64_t C = a.latent.shape[1], all = a.indices.count();
  return 2 * double(a.q.shape[1] * (scores * (C + a.k_extra.shape[1]) + values * C)) * (a.pairs > 0 ? a.pairs : double(all));
}

struct SparseAttentionForward {
  ConstTensor q_latent;  // (T, N, C), absorbed query
  ConstTensor q;         // (T, N, Hn + He), used: the last He columns
  ConstTensor latent;    // (keys, C), key and value
  ConstTensor k_extra;   // (keys, He), shared by all heads; He may be 0
  ConstTensor indices;   // (T, K) i32, positions in 0..keys-1 of the same document; -1: empty slot
  double scale;
  Tensor o_latent;                          // (T, N, C)
  Tensor lse;                               // (T, N) real; kept for backward
  Tensor probability;                       // (T, K) real, mean over heads, 0 at empty slots; absent: not wanted
  double pairs = 0;                         // of queries and positions, where that is known to be less than T K
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  // Of the CUDA backend: blocks at once, four a multiprocessor of an H200, and heads whose scores a block's query has at once.
  static constexpr std::int64_t kBlocks = 528, kHeads = 8;
  Tensor take_scratch(Context& ctx) const {
    if (sparse_attention_in_tiles(*this) || (ctx.dry() && ctx.plans_for == Device::cpu)) return {};
    return ctx.scratch.take(DType::f32, {std::min(q.shape[0], kBlocks), kHeads, indices.shape[1]});
  }
  Work work(const Context&) const {
    return {.kind = WorkKind::sparse_attention,
            .dtype = q.dtype,
            .flops = sparse_attention_flops(*this, 1, 1),
            .bytes = bytes_of(q_latent, latent, k_extra, indices, o_latent, lse, probability)};
  }
  void check_shapes() const {
    check_sparse_attention_inputs(*this);
    if (probability.present())
      check(probability.shape == indices.shape && probability.dtype == lse.dtype,
            "sparse_attention: probability is not (T, K) real",
            {{"T", q.shape[0]}, {"K", indices.shape[1]}, {"probability", probability.count()}, {"dtype", int(probability.dtype)}});
  }
};

struct SparseAttentionBackward {
  ConstTensor do_latent;  // (T, N, C)
  ConstTensor q_latent;   // (T, N, C)
  ConstTensor q;          // (T, N, Hn + He)
  ConstTensor latent;     // (keys, C)
  ConstTensor k_extra;    // (keys, He)
  ConstTensor indices;    // (T, K) i32
  ConstTensor o_latent;   // (T, N, C)
  ConstTensor lse;        // (T, N) real
  double scale;
  Tensor dq_latent;                         // (T, N, C)
  Tensor dq;                                // (T, N, Hn + He), written: the last He columns
  Tensor dlatent;                           // (keys, C)
  Tensor dk_extra;                          // (keys, He)
  double pairs = 0;                         // as above
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  // Of the CUDA backend, which holds some rows of queries at a time: the probabilities and the gradients of scores of their pairs.
  struct Scratch {
    Tensor p, dz;                         // (rows, N, K)
    Tensor slots;                         // (keys, rows)
    Tensor pairs;                         // on tensor cores: (rows, K, 128) bf16, of 64 heads, and
    Tensor listed, counts, sets, starts;  // the positions of each row in order
    Tensor sums;                          // (keys, C + He), on tensor cores (parts, keys, C + He)
  };
  Scratch take_scratch(Context& ctx) const {
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    constexpr std::int64_t kBytes = std::int64_t(288) << 20, f32 = 4, i32 = 4, kPair = 128, kSMs = 132, kMostRows = 8 * kSMs;
    const std::int64_t T = q.shape[0], N = q.shape[1], K = indices.shape[1], keys = latent.shape[0];
    const std::int64_t width = latent.shape[1] + k_extra.shape[1];
    const bool tiles = sparse_attention_in_tiles(*this);
    const std::int64_t a_row = tiles ? K * (2 * kPair + i32) : 2 * N * K * f32 + keys * i32;
    const std::int64_t fit = std::clamp<std::int64_t>(kBytes / std::max<std::int64_t>(a_row, 1), 1, std::max<std::int64_t>(T, 1));
    if (!tiles)
      return {.p = ctx.scratch.take(DType::f32, {fit, N, K}),
              .dz = ctx.scratch.take(DType::f32, {fit, N, K}),
              .slots = ctx.scratch.take(DType::i32, {keys, fit}),
              .sums = ctx.scratch.take(DType::f32, {keys, width})};
    const std::int64_t rows = fit < kSMs ? fit : std::min(fit / kSMs * kSMs, kMostRows);  // a multiprocessor a row, all of them
    return {.pairs = ctx.scratch.take(DType::bf16, {rows, K, kPair}),
            .listed = ctx.scratch.take(DType::i32, {rows, K}),
            .counts = ctx.scratch.take(DType::i32, {rows}),
            .sets = ctx.scratch.take(DType::i32, {rows, cuda::key_words(keys)}),
            .starts = ctx.scratch.take(DType::i32, {rows, cuda::key_words(keys) + 1}),
            .sums = ctx.scratch.take(DType::f32, {cuda::key_parts(keys, width / 64), keys, width})};
  }
  Work work(const Context&) const {
    return {.kind = WorkKind::sparse_attention,
            .backward = true,
            .dtype = q.dtype,
            .flops = sparse_attention_flops(*this, 3, 2),
            .bytes = bytes_of(do_latent, q_latent, latent, k_extra, indices, o_latent, lse, dq_latent, dlatent, dk_extra)};
  }
  void check_shapes() const {
    check_sparse_attention_inputs(*this);
    check(do_latent.shape == q_latent.shape && do_latent.dtype == q.dtype, "sparse_attention: do_latent does not fit o_latent",
          {{"o_latent", o_latent.count()}, {"do_latent", do_latent.count()}, {"dtype", int(do_latent.dtype)}});
    check(dq_latent.shape == q_latent.shape && dq.shape == q.shape && dlatent.shape == latent.shape &&
              dk_extra.shape == k_extra.shape,
          "sparse_attention: a gradient does not fit",
          {{"dq_latent", dq_latent.count()}, {"dq", dq.count()}, {"dlatent", dlatent.count()}, {"dk_extra", dk_extra.count()}});
    const auto type = q.dtype;
    check(dq_latent.dtype == type && dq.dtype == type && dlatent.dtype == type && dk_extra.dtype == type,
          "sparse_attention: a gradient is not of q's type",
          {{"q", int(type)},
           {"dq_latent", int(dq_latent.dtype)},
           {"dq", int(dq.dtype)},
           {"dlatent", int(dlatent.dtype)},
           {"dk_extra", int(dk_extra.dtype)}});
  }
};

namespace cpu {
void sparse_attention(Context&, const SparseAttentionForward&);
void sparse_attention(Context&, const SparseAttentionBackward&);
}  // namespace cpu
namespace cuda {
void sparse_attention(Context&, const SparseAttentionForward&);
void sparse_attention(Context&, const SparseAttentionBackward&);
}  // namespace cuda

inline void sparse_attention(Context& ctx, const SparseAttentionForward& a) {
  dispatch(
      ctx, "sparse_attention forward", a, [&] { cpu::sparse_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sparse_attention(ctx, a);
      });
}
inline void sparse_attention(Context& ctx, const SparseAttentionBackward& a) {
  dispatch(
      ctx, "sparse_attention backward", a, [&] { cpu::sparse_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sparse_attention(ctx, a);
      });
}

}  // namespace moetrain::ops
