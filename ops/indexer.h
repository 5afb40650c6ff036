// indexer.h -- lightning indexer: index scores, selection of the top-k keys a query, and the KL loss that trains it.
//
//   u[t,j,s]     = q[t,j].k[s]                             s in t's document, s <= t; keys are T rows, or those of all slices
//                                                          where documents have pieces elsewhere (ops/documents.h)
//   I[t,s]       = sum_j weights[t,j] * max(u[t,j,s], 0)
//   indices[t,:] = the K positions s of largest I[t,s], by I descending, of equal ones (+0 equals -0) the later first; where t has
//                  fewer than K causal positions all of them, then -1. A score that is not a number ranks last. No gradient.
//
//   Loss, over the key set of row t (the positions of indices[t,:], -1 left out; or without indices all causal positions):
//   p[t,s]       = target[t,s] / max( sum_s target[t,s], 1e-10 )                pi[t,s] = softmax_s I[t,s]
//   loss        += sum_t sum_s p[t,s] * ( log p[t,s] - log pi[t,s] )            0 log 0 = 0
//   dI[t,s]      = gradient_scale * ( pi[t,s] - p[t,s] )                        0 in a row of one key or none
//   du[t,j,s]    = dI[t,s] * weights[t,j] where u[t,j,s] > 0, else 0
//   dq[t,j]      = sum_s du[t,j,s] k[s]     dk[s] = sum_{t,j} du[t,j,s] q[t,j]     dweights[t,j] = sum_s dI[t,s] max(u[t,j,s], 0)
//
// loss adds, the plain sum over rows without gradient_scale; dq, dk, dweights are written, for a loss scaled by gradient_scale.
// The target is a constant and nothing flows past q, k, weights. A row of one key adds 0 to the loss (its caller counts it).
// Nothing may alias. Scores, softmax and sums are real; dq and dk are rounded once. The scores of all pairs are never stored at
// once. Repeatable, and on the CPU for any number of threads
// the same bits.
#pragma once
#include <algorithm>
#include <bit>
#include <limits>

#include "ops/context.h"
#include "ops/cuda/key_tiles.h"
#include "ops/documents.h"

namespace moetrain::ops {

struct IndexerSelect {
  ConstTensor q;        // (T, J, H)
  ConstTensor k;        // (keys, H)
  ConstTensor weights;  // (T, J) real, already scaled by J^-1/2 H^-1/2; any sign
  Documents documents;
  Tensor indices;                           // (T, K) i32, rows of k by score descending, ties to the later position, then -1
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  struct Scratch {
    Tensor scores;  // (rows, longest document): query rows whose scores are held at once
    Tensor spill;   // (rows, n): what is sorted of them, where it does not fit a block
  };
  bool on_tensor_cores() const { return q.dtype == DType::bf16 && q.shape[1] <= 64 && q.shape[2] == 128; }  // of a CUDA device
  Scratch take_scratch(Context& ctx) const {                                                                // of the CUDA backend
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    constexpr std::int64_t kBytes = std::int64_t(64) << 20, kFitsABlock = 16384;
    const std::int64_t longest = documents.most_keys(), most = std::min(indices.shape[1], longest);
    const std::int64_t spilled = most > kFitsABlock ? std::int64_t(std::bit_ceil(std::uint64_t(most))) : 0;
    const std::int64_t rows = std::clamp<std::int64_t>(kBytes / (4 * std::max<std::int64_t>(longest, 1) + 8 * spilled), 1,
                                                       std::max<std::int64_t>(q.shape[0], 1));
    return {ctx.scratch.take(DType::f32, {rows, longest}), spilled > 0 ? ctx.scratch.take(DType::i64, {rows, spilled}) : Tensor{}};
  }
  Work work(const Context&) const {
    return {.kind = WorkKind::indexer,
            .dtype = q.dtype,
            .flops = 2 * double(q.shape[1] * q.shape[2]) * documents.pairs(),
            .bytes = bytes_of(q, k, weights, indices)};
  }
  void check_shapes() const {
    check(q.shape.rank() == 3 && indices.shape.rank() == 2, "indexer_select: q, indices are not of rank 3, 2",
          {{"q", q.shape.rank()}, {"indices", indices.shape.rank()}});
    const auto T = q.shape[0], J = q.shape[1], H = q.shape[2];
    check(J >= 1 && H >= 1 && T <= std::numeric_limits<std::int32_t>::max(), "indexer_select: sizes",
          {{"T", T}, {"J", J}, {"H", H}});
    check(k.shape == Shape{k.shape[0], H} && k.shape[0] <= std::numeric_limits<std::int32_t>::max(),
          "indexer_select: k is not (keys, H)", {{"keys", k.shape[0]}, {"H", H}, {"k", k.count()}});
    check(weights.shape == Shape{T, J}, "indexer_select: weights is not (T, J)",
          {{"T", T}, {"J", J}, {"weights", weights.count()}});
    check(indices.shape[0] == T && indices.shape[1] >= 1, "indexer_select: indices is not (T, K)",
          {{"T", T}, {"indices", indices.count()}});
    documents.check_cover(T);
    documents.check_keys(T, k.shape[0]);
    check(k.dtype == q.dtype && weights.dtype == real_of(q.dtype) && indices.dtype == DType::i32,
          "indexer_select: k is not of q's type, weights not real or indices not i32",
          {{"q", int(q.dtype)}, {"k", int(k.dtype)}, {"weights", int(weights.dtype)}, {"indices", int(indices.dtype)}});
  }
};

struct IndexerLoss {
  ConstTensor q;        // (T, J, H)
  ConstTensor k;        // (keys, H)
  ConstTensor weights;  // (T, J) real, already scaled
  ConstTensor target;   // (T, W) real, head-mean attention; normalised here over the row's key set
  ConstTensor indices;  // (T, W) i32, the key set of a row (sparse stage); absent: all causal keys, column = position - document
                        // start (dense)
  Documents documents;
  double gradient_scale;                    // coefficient / rows of the global batch
  Tensor loss;                              // (1) real; adds sum_t KL(target_t || softmax(score_t))
  Tensor dq;                                // (T, J, H); absent (with dk, dweights): loss only
  Tensor dk;                                // (keys, H)
  Tensor dweights;                          // (T, J) real, gradient of the scaled weights
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  bool on_tensor_cores() const {            // of a CUDA device
    return q.dtype == DType::bf16 && q.shape[1] <= 64 && q.shape[2] == 128 && k.shape[0] <= cuda::kMostListedKeys;
  }
  // Of the CUDA backend, which holds some query rows at a time: the products of their pairs, or the gradients of these. Blocks at
  // once, four a multiprocessor of an H200; scores of a row that a block on tensor cores holds itself.
  static constexpr std::int64_t kBlocks = 528, kHeldScores = 8192;
  struct Scratch {
    Tensor row_loss;                              // (T)
    Tensor scores;                                // (rows or blocks, W)
    Tensor u, slots;                              // (rows, J, W) and (keys, rows)
    Tensor pairs;                                 // on tensor cores: (rows, W, 64) bf16, and
    Tensor listed, counts, sets, starts, target;  // the positions of each row, and their target
    Tensor dk;                                    // (keys, H), on tensor cores (parts, keys, H)
  };
  Scratch take_scratch(Context& ctx) const {
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    constexpr std::int64_t kBytes = std::int64_t(256) << 20, f32 = 4, i32 = 4, kSMs = 132;
    const std::int64_t T = q.shape[0], J = q.shape[1], H = q.shape[2], W = target.shape[1], all = k.shape[0];
    const std::int64_t keys = dq.present() ? all : 0;  // that get a gradient
    const bool tiles = on_tensor_cores();
    constexpr std::int64_t kHeads = 64;  // of a pair
    const std::int64_t a_row = tiles ? W * (2 * kHeads + 3 * f32) : J * W * f32 + all * i32;
    const std::int64_t fit = std::clamp<std::int64_t>(kBytes / std::max<std::int64_t>(a_row, 1), 1, std::max<std::int64_t>(T, 1));
    if (!tiles)
      return {.row_loss = ctx.scratch.take(DType::f32, {T}),
              .scores = ctx.scratch.take(DType::f32, {std::min(fit, kBlocks), W}),
              .u = ctx.scratch.take(DType::f32, {fit, J, W}),
              .slots = ctx.scratch.take(DType::i32, {keys, fit}),
              .dk = ctx.scratch.take(DType::f32, {keys, H})};
    const std::int64_t rows = fit < kSMs ? fit : std::min(fit / kSMs, std::int64_t(8)) * kSMs;
    return {.row_loss = ctx.scratch.take(DType::f32, {T}),
            .scores = ctx.scratch.take(DType::f32, {W > kHeldScores ? rows : 0, W}),
            .pairs = ctx.scratch.take(DType::bf16, {dq.present() ? rows : 0, W, kHeads}),
            .listed = ctx.scratch.take(DType::i32, {rows, W}),
            .counts = ctx.scratch.take(DType::i32, {rows}),
            .sets = ctx.scratch.take(DType::i32, {rows, cuda::key_words(all)}),
            .starts = ctx.scratch.take(DType::i32, {rows, cuda::key_words(all) + 1}),
            .target = ctx.scratch.take(DType::f32, {indices.present() ? rows : 0, W}),
            .dk = ctx.scratch.take(DType::f32, {cuda::key_parts(all, H / 64), keys, H})};
  }
  Work work(const Context&) const {
    const double pairs = indices.present() ? documents.pairs(indices.shape[1]) : documents.pairs();
    return {.kind = WorkKind::indexer,
            .backward = true,
            .dtype = q.dtype,
            .flops = (dq.present() ? 3 : 1) * 2 * double(q.shape[1] * q.shape[2]) * pairs,
            .bytes = bytes_of(q, k, weights, target, indices, dq, dk, dweights)};
  }
  void check_shapes() const {
    check(q.shape.rank() == 3 && target.shape.rank() == 2, "indexer_loss: q, target are not of rank 3, 2",
          {{"q", q.shape.rank()}, {"target", target.shape.rank()}});
    const auto T = q.shape[0], J = q.shape[1], H = q.shape[2];
    check(J >= 1 && H >= 1 && T <= std::numeric_limits<std::int32_t>::max(), "indexer_loss: sizes", {{"T", T}, {"J", J}, {"H", H}});
    check(k.shape == Shape{k.shape[0], H}, "indexer_loss: k is not (keys, H)", {{"keys", k.shape[0]}, {"H", H}, {"k", k.count()}});
    check(weights.shape == Shape{T, J}, "indexer_loss: weights is not (T, J)", {{"T", T}, {"J", J}, {"weights", weights.count()}});
    documents.check_cover(T);
    documents.check_keys(T, k.shape[0]);
    check(target.shape[0] == T && (indices.present() || target.shape[1] >= documents.most_keys()),
          "indexer_loss: target is not (T, W), W the longest document or more where no indices are given",
          {{"T", T}, {"longest", documents.most_keys()}, {"target", target.count()}});
    check(loss.shape == Shape{1}, "indexer_loss: loss is not (1)", {{"loss", loss.count()}});
    const auto type = q.dtype, real = real_of(type);
    check(k.dtype == type && weights.dtype == real && target.dtype == real && loss.dtype == real,
          "indexer_loss: k is not of q's type, or weights, target or loss not real",
          {{"q", int(type)},
           {"k", int(k.dtype)},
           {"weights", int(weights.dtype)},
           {"target", int(target.dtype)},
           {"loss", int(loss.dtype)}});
    if (indices.present())
      check(indices.shape == target.shape && indices.dtype == DType::i32, "indexer_loss: indices does not fit target or is not i32",
            {{"target", target.count()}, {"indices", indices.count()}, {"dtype", int(indices.dtype)}});
    check(dq.present() == dk.present() && dq.present() == dweights.present(),
          "indexer_loss: some gradients are absent, but not all",
          {{"dq", dq.present()}, {"dk", dk.present()}, {"dweights", dweights.present()}});
    if (!dq.present()) return;
    check(dq.shape == q.shape && dk.shape == k.shape && dweights.shape == weights.shape, "indexer_loss: a gradient does not fit",
          {{"dq", dq.count()}, {"dk", dk.count()}, {"dweights", dweights.count()}});
    check(dq.dtype == type && dk.dtype == type && dweights.dtype == real,
          "indexer_loss: a gradient is not of the type of its input",
          {{"dq", int(dq.dtype)}, {"dk", int(dk.dtype)}, {"dweights", int(dweights.dtype)}});
  }
};

namespace cpu {
void indexer_select(Context&, const IndexerSelect&);
void indexer_loss(Context&, const IndexerLoss&);
}  // namespace cpu
namespace cuda {
void indexer_select(Context&, const IndexerSelect&);
void indexer_loss(Context&, const IndexerLoss&);
}  // namespace cuda

inline void indexer_select(Context& ctx, const IndexerSelect& a) {
  dispatch(
      ctx, "indexer_select forward", a, [&] { cpu::indexer_select(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::indexer_select(ctx, a);
      });
}
inline void indexer_loss(Context& ctx, const IndexerLoss& a) {
  dispatch(
      ctx, "indexer_loss forward", a, [&] { cpu::indexer_loss(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::indexer_loss(ctx, a);
      });
}

}  // namespace moetrain::ops
