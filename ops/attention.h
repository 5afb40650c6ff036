// attention.h -- dense causal softmax attention over heads [nope | extra], keys and values expanded from the latent (MLA,
// unabsorbed).
//
//   q = [qn | qe] and kv = [kn | v] a head; s runs over the positions of t's document with s <= t. Keys are T rows, or more where
//   the documents have pieces elsewhere: then those of all slices (Documents::first_key)
//   z[t,n,s]  = scale * ( qn[t,n].kn[s,n] + qe[t,n].k_extra[s] )
//   lse[t,n]  = log sum_s exp z[t,n,s]                     A[t,n,s] = exp( z[t,n,s] - lse[t,n] )
//   o[t,n]    = sum_s A[t,n,s] v[s,n]                      probability[t, s - start] = mean_n A[t,n,s]
//
//   dz[t,n,s] = scale * A[t,n,s] * ( do[t,n].v[s,n] - o[t,n].do[t,n] )
//   dqn[t,n]  = sum_s dz[t,n,s] kn[s,n]                    dqe[t,n] = sum_s dz[t,n,s] k_extra[s]
//   dkn[s,n]  = sum_t dz[t,n,s] qn[t,n]                    dk_extra[s] = sum_{t,n} dz[t,n,s] qe[t,n]
//   dv[s,n]   = sum_t A[t,n,s] do[t,n]
//
// Every output is written, nothing adds, nothing may alias. Scores, softmax and sums are real; what is stored in the storage type
// is rounded once. Nothing is rotated; no gradient goes through probability. Repeatable, and for any number of threads the same
// bits. On CUDA rows of kv and k_extra that no query sees are finite too.
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

inline void check_attention(ConstTensor q, ConstTensor kv, ConstTensor k_extra, ConstTensor o, ConstTensor lse,
                            const Documents& documents) {
  check(q.shape.rank() == 3 && kv.shape.rank() == 3 && k_extra.shape.rank() == 2,
        "attention: q, kv, k_extra are not of rank 3, 3, 2",
        {{"q", q.shape.rank()}, {"kv", kv.shape.rank()}, {"k_extra", k_extra.shape.rank()}});
  const auto T = q.shape[0], keys = kv.shape[0], N = q.shape[1], He = k_extra.shape[1], Hn = q.shape[2] - He, Hv = kv.shape[2] - Hn;
  check(N >= 1 && Hn >= 1 && Hv >= 1, "attention: no head, or q or kv too narrow", {{"N", N}, {"Hn", Hn}, {"He", He}, {"Hv", Hv}});
  check(kv.shape == Shape{keys, N, Hn + Hv}, "attention: kv is not (keys, N, Hn + Hv)", {{"T", T}, {"N", N}, {"kv", kv.count()}});
  check(k_extra.shape == Shape{keys, He}, "attention: k_extra is not (keys, He)", {{"keys", keys}, {"rows", k_extra.shape[0]}});
  check(o.shape == Shape{T, N, Hv}, "attention: o is not (T, N, Hv)", {{"T", T}, {"N", N}, {"Hv", Hv}, {"o", o.count()}});
  check(lse.shape == Shape{T, N}, "attention: lse is not (T, N)", {{"T", T}, {"N", N}, {"lse", lse.count()}});
  documents.check_cover(T);
  documents.check_keys(T, keys);
  const auto type = q.dtype;
  check(kv.dtype == type && k_extra.dtype == type && o.dtype == type, "attention: q, kv, k_extra, o are not of one type",
        {{"q", int(type)}, {"kv", int(kv.dtype)}, {"k_extra", int(k_extra.dtype)}, {"o", int(o.dtype)}});
  check(lse.dtype == real_of(type), "attention: lse is not real", {{"q", int(type)}, {"lse", int(lse.dtype)}});
}

// What rows of queries or of keys see of the other, on CUDA: columns [low, high) by row, and by 64 rows those that some see and
// those that all see; rows rounded up to 128.
struct AttentionSight {
  std::int64_t count = 0;  // rows
  Tensor rows, tiles;      // (rounded, 2) and (rounded / 64, 4) i32
};
inline AttentionSight take_attention_sight(Context& ctx, std::int64_t count) {
  const std::int64_t pairs = (count + 127) / 128;  // of tiles
  return {count, ctx.scratch.take(DType::i32, {128 * pairs, 2}), ctx.scratch.take(DType::i32, {2 * pairs, 4})};
}

struct AttentionForward {
  ConstTensor q;        // (T, N, Hn + He)
  ConstTensor kv;       // (keys, N, Hn + Hv), per head key then value
  ConstTensor k_extra;  // (keys, He), shared by all heads; He may be 0
  double scale;
  Documents documents;
  Tensor o;            // (T, N, Hv)
  Tensor lse;          // (T, N) real, natural log of the sum of exp of the scaled scores; kept for backward
  Tensor probability;  // (T, W) real, mean over heads of what t gives to position (start of its document + column), W >= longest
                       // document, columns past t are 0; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  AttentionSight take_scratch(Context& ctx) const {  // of queries
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    return take_attention_sight(ctx, q.shape[0]);
  }
  Work work(const Context&) const {
    const double Hv = double(o.shape[2]), Hq = double(q.shape[2]), products = (probability.present() ? 2 : 1) * Hq + Hv;
    return {.kind = WorkKind::attention,
            .dtype = q.dtype,
            .flops = 2 * double(q.shape[1]) * products * documents.pairs(),
            .bytes = bytes_of(q, kv, k_extra, o, lse, probability)};
  }
  void check_shapes() const {
    check_attention(q, kv, k_extra, o, lse, documents);
    if (!probability.present()) return;
    check(probability.shape.rank() == 2 && probability.shape[0] == q.shape[0] && probability.shape[1] >= documents.most_keys(),
          "attention: probability is not (T, W), W the longest document or more",
          {{"T", q.shape[0]}, {"longest", documents.most_keys()}, {"probability", probability.count()}});
    check(probability.dtype == lse.dtype, "attention: probability is not real",
          {{"lse", int(lse.dtype)}, {"probability", int(probability.dtype)}});
  }
};

struct AttentionBackward {
  ConstTensor do_;      // (T, N, Hv)
  ConstTensor q;        // (T, N, Hn + He)
  ConstTensor kv;       // (keys, N, Hn + Hv)
  ConstTensor k_extra;  // (keys, He)
  ConstTensor o;        // (T, N, Hv)
  ConstTensor lse;      // (T, N) real
  double scale;
  Documents documents;
  Tensor dq;        // (T, N, Hn + He)
  Tensor dkv;       // (keys, N, Hn + Hv)
  Tensor dk_extra;  // (keys, He)

  static constexpr bool dry_on_cpu = true;  // ops/context.h
  // On CUDA a block of keys takes a group of heads one after another and sums their dk_extra: few parts, yet blocks enough.
  std::int64_t heads_a_group() const {
    constexpr std::int64_t kKeys = 128, kBlocks = 2048;
    return std::clamp((kv.shape[0] + kKeys - 1) / kKeys * q.shape[1] / kBlocks, std::int64_t(1), q.shape[1]);
  }
  struct Scratch {
    AttentionSight of_queries, of_keys;
    Tensor lse, delta;   // (N, T rounded up to a block) f32
    Tensor extra_parts;  // (groups of heads, keys, He) f32
  };
  Scratch take_scratch(Context& ctx) const {
    if (ctx.dry() && ctx.plans_for == Device::cpu) return {};
    constexpr std::int64_t kRows = 128;
    const std::int64_t T = q.shape[0], N = q.shape[1], keys = kv.shape[0], columns = (T + kRows - 1) / kRows * kRows;
    const std::int64_t heads = heads_a_group();
    const auto take = [&](Shape shape) { return ctx.scratch.take(DType::f32, shape); };
    return {take_attention_sight(ctx, T), take_attention_sight(ctx, keys), take({N, columns}), take({N, columns}),
            take({(N + heads - 1) / heads, keys, k_extra.shape[1]})};
  }
  Work work(const Context&) const {
    return {.kind = WorkKind::attention,
            .backward = true,
            .dtype = q.dtype,
            .flops = 2 * double(q.shape[1]) * double(3 * q.shape[2] + 2 * o.shape[2]) * documents.pairs(),
            .bytes = bytes_of(do_, q, kv, k_extra, o, lse, dq, dkv, dk_extra)};
  }
  void check_shapes() const {
    check_attention(q, kv, k_extra, o, lse, documents);
    check(do_.shape == o.shape, "attention: do is not (T, N, Hv)", {{"o", o.count()}, {"do", do_.count()}});
    check(dq.shape == q.shape && dkv.shape == kv.shape && dk_extra.shape == k_extra.shape, "attention: a gradient does not fit",
          {{"dq", dq.count()}, {"dkv", dkv.count()}, {"dk_extra", dk_extra.count()}});
    const auto type = q.dtype;
    check(do_.dtype == type && dq.dtype == type && dkv.dtype == type && dk_extra.dtype == type,
          "attention: a gradient is not of q's type",
          {{"q", int(type)},
           {"do", int(do_.dtype)},
           {"dq", int(dq.dtype)},
           {"dkv", int(dkv.dtype)},
           {"dk_extra", int(dk_extra.dtype)}});
  }
};

namespace cpu {
void attention(Context&, const AttentionForward&);
void attention(Context&, const AttentionBackward&);
}  // namespace cpu
namespace cuda {
void attention(Context&, const AttentionForward&);
void attention(Context&, const AttentionBackward&);
}  // namespace cuda

inline void attention(Context& ctx, const AttentionForward& a) {
  dispatch(
      ctx, "attention forward", a, [&] { cpu::attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::attention(ctx, a);
      });
}
inline void attention(Context& ctx, const AttentionBackward& a) {
  dispatch(
      ctx, "attention backward", a, [&] { cpu::attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::attention(ctx, a);
      });
}

}  // namespace moetrain::ops
