// sparse_attention.cpp -- gathers the rows a query selected, then it is a small dense attention of all heads over them.
#include "ops/sparse_attention.h"

#include <omp.h>

#include <algorithm>

#include "ops/cpu/exp.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/real_output.h"
#include "ops/cpu/softmax.h"

namespace moetrain::ops::cpu {
namespace {

// Gradients of keys are summed in a fixed number of lanes, so that the order of sums does not follow the number of threads.
constexpr std::int64_t kLanes = 8, kRowsATurn = 16;  // lane l takes the rows t with (t / kRowsATurn) % kLanes == l

struct Sizes {
  std::int64_t T, keys, N, C, He, Hq, K;
  std::int64_t width() const { return C + He; }  // of a key: latent, then extra
  template <class Args>
  explicit Sizes(const Args& a)
      : T(a.q.shape[0]), keys(a.latent.shape[0]), N(a.q.shape[1]), C(a.q_latent.shape[2]), He(a.k_extra.shape[1]), Hq(a.q.shape[2]), K(a.indices.shape[1]) {}
  bool worth_threads() const { return double(T) * double(K) * double(N) * double(width()) > 1e5; }
};

void check_indices(const std::int32_t* indices, std::int64_t count, std::int64_t keys) {
  for (std::int64_t i = 0; i < count; ++i)
    check(-1 <= indices[i] && indices[i] < keys, "sparse_attention: an index is no position",
          {{"at", i}, {"index", indices[i]}, {"keys", keys}});
}

// What is read of one query, gathered: its own rows of all heads and the keys of its filled slots.
template <class T>
struct Query {
  using R = acc_t<T>;
  std::int64_t filled = 0;
  std::int32_t* slot;  // (K) slot of a filled key
  R* q;                // (N, C + He); backward (2 N, C + He): dout and zeros follow, so that products with both are one
  R* keys;             // (filled, C + He)
  R* z;                // (N, filled); backward (2 N, filled): gradients of the probabilities follow
  R* dkeys;            // (filled, C + He), backward
  static std::int64_t reals_needed(const Sizes& s, bool backward) {
    return (backward ? 2 : 1) * (s.N + s.K) * s.width() + (backward ? 2 : 1) * s.N * s.K;
  }
  Query(const Sizes& s, R* scratch, std::int32_t* slots, bool backward)
      : slot(slots),
        q(scratch),
        keys(q + (backward ? 2 : 1) * s.N * s.width()),
        z(keys + s.K * s.width()),
        dkeys(backward ? z + 2 * s.N * s.K : nullptr) {}

  template <class Args>
  void gather(const Sizes& s, const Args& a, std::int64_t t) {
    const T *q_latent = a.q_latent.template as<T>() + t * s.N * s.C, *q_all = a.q.template as<T>() + t * s.N * s.Hq;
    const T *latent = a.latent.template as<T>(), *k_extra = a.k_extra.template as<T>();
    const std::int32_t* indices = a.indices.template as<std::int32_t>() + t * s.K;
    for (std::int64_t n = 0; n < s.N; ++n) {
      R* to = q + n * s.width();
      for (std::int64_t c = 0; c < s.C; ++c) to[c] = R(q_latent[n * s.C + c]);
      for (std::int64_t h = 0; h < s.He; ++h) to[s.C + h] = R(q_all[n * s.Hq + s.Hq - s.He + h]);
    }
    filled = 0;
    for (std::int64_t k = 0; k < s.K; ++k) {
      if (indices[k] < 0) continue;
      const T *from = latent + indices[k] * s.C, *extra = k_extra + indices[k] * s.He;
      R* to = keys + filled * s.width();
      for (std::int64_t c = 0; c < s.C; ++c) to[c] = R(from[c]);
      for (std::int64_t h = 0; h < s.He; ++h) to[s.C + h] = R(extra[h]);
      slot[filled++] = std::int32_t(k);
    }
  }
};

template <class T>
void forward(Context& ctx, const SparseAttentionForward& a) {
  using R = acc_t<T>;
  const Sizes s(a);
  const Scope scope(ctx.scratch);
  const RealOutput<R> o_latent(ctx, a.o_latent);
  R *lse = a.lse.as<R>(), *probability = a.probability.present() ? a.probability.as<R>() : nullptr;
  const std::int64_t threads = omp_get_max_threads(), needed = Query<T>::reals_needed(s, false);
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {threads, needed}).template as<R>();
  std::int32_t* const slots = ctx.scratch.take(DType::i32, {threads, s.K}).as<std::int32_t>();
  if (ctx.dry()) return;
  check_indices(a.indices.as<std::int32_t>(), s.T * s.K, s.keys);
#pragma omp parallel for schedule(static) if (s.worth_threads())
  for (std::int64_t t = 0; t < s.T; ++t) {
    Query<T> query(s, scratch + omp_get_thread_num() * needed, slots + omp_get_thread_num() * s.K, false);
    query.gather(s, a, t);
    gemm<R>(false, true, s.N, query.filled, s.width(), R(a.scale), query.q, s.width(), query.keys, s.width(), R(0), query.z,
            query.filled);
    const std::int64_t filled = query.filled;
    for (std::int64_t n = 0; n < s.N; ++n) lse[t * s.N + n] = softmax(query.z + n * filled, filled);
    gemm<R>(false, false, s.N, s.C, filled, R(1), query.z, filled, query.keys, s.width(), R(0), o_latent.data + t * s.N * s.C, s.C);
    if (!probability) continue;
    R* mean = probability + t * s.K;
    std::fill(mean, mean + s.K, R(0));
    for (std::int64_t n = 0; n < s.N; ++n)
      for (std::int64_t k = 0; k < filled; ++k) mean[query.slot[k]] += query.z[n * filled + k] / R(s.N);
  }
  o_latent.round();
}

// Gradients of one query: its own are written, those of the keys it read are added to lane (keys, C + He).
template <class T, class R = acc_t<T>>
void backward_row(const Sizes& s, const SparseAttentionBackward& a, std::int64_t t, Query<T>& query, R* lane) {
  const T *dout = a.do_latent.as<T>() + t * s.N * s.C, *o = a.o_latent.as<T>() + t * s.N * s.C;
  const R *lse = a.lse.as<R>() + t * s.N, scale = R(a.scale);
  const std::int32_t* indices = a.indices.as<std::int32_t>() + t * s.K;
  query.gather(s, a, t);
  const std::int64_t filled = query.filled, width = s.width();
  R *const dout_wide = query.q + s.N * width, *const dp_all = query.z + s.N * filled;
  for (std::int64_t n = 0; n < s.N; ++n) {
    R* to = dout_wide + n * width;
    for (std::int64_t c = 0; c < s.C; ++c) to[c] = R(dout[n * s.C + c]);
    std::fill(to + s.C, to + width, R(0));
  }
  gemm<R>(false, true, 2 * s.N, filled, width, R(1), query.q, width, query.keys, width, R(0), query.z, filled);
  for (std::int64_t n = 0; n < s.N; ++n) {
    R *score = query.z + n * filled, *dp = dp_all + n * filled, delta = 0;
    for (std::int64_t c = 0; c < s.C; ++c) delta += R(o[n * s.C + c]) * dout_wide[n * width + c];
#pragma omp simd
    for (std::int64_t k = 0; k < filled; ++k) {
      const R p = exp(scale * score[k] - lse[n]);
      score[k] = scale * p * (dp[k] - delta);  // what meets q in the next product, as p meets dout
      dp[k] = p;
    }
  }
  gemm<R>(true, false, filled, width, 2 * s.N, R(1), query.z, filled, query.q, width, R(0), query.dkeys, width);
  for (std::int64_t k = 0; k < filled; ++k) {
    const R* from = query.dkeys + k * width;
    R* to = lane + indices[query.slot[k]] * width;
#pragma omp simd
    for (std::int64_t i = 0; i < width; ++i) to[i] += from[i];
  }
  R* const dquery = query.q;  // the query itself was read above for the last time
  gemm<R>(false, false, s.N, width, filled, R(1), query.z, filled, query.keys, width, R(0), dquery, width);
  T *dq_latent = a.dq_latent.as<T>() + t * s.N * s.C, *dq = a.dq.as<T>() + t * s.N * s.Hq;
  for (std::int64_t n = 0; n < s.N; ++n) {
    for (std::int64_t c = 0; c < s.C; ++c) dq_latent[n * s.C + c] = T(dquery[n * width + c]);
    for (std::int64_t h = 0; h < s.He; ++h) dq[n * s.Hq + s.Hq - s.He + h] = T(dquery[n * width + s.C + h]);
  }
}

template <class T>
void backward(Context& ctx, const SparseAttentionBackward& a) {
  using R = acc_t<T>;
  const Sizes s(a);
  const Scope scope(ctx.scratch);
  const std::int64_t lanes = std::clamp<std::int64_t>((s.T + kRowsATurn - 1) / kRowsATurn, 1, kLanes), lane_size = s.keys * s.width();
  const std::int64_t threads = omp_get_max_threads(), needed = Query<T>::reals_needed(s, true);
  R* const sums = ctx.scratch.zeros(DTypeOf<R>::value, {lanes, lane_size}).template as<R>();
  R* const scratch = ctx.scratch.take(DTypeOf<R>::value, {threads, needed}).template as<R>();
  std::int32_t* const slots = ctx.scratch.take(DType::i32, {threads, s.K}).as<std::int32_t>();
  if (ctx.dry()) return;
  check_indices(a.indices.as<std::int32_t>(), s.T * s.K, s.keys);
#pragma omp parallel for schedule(dynamic) if (s.worth_threads())
  for (std::int64_t lane = 0; lane < lanes; ++lane) {
    Query<T> query(s, scratch + omp_get_thread_num() * needed, slots + omp_get_thread_num() * s.K, true);
    for (std::int64_t turn = lane * kRowsATurn; turn < s.T; turn += lanes * kRowsATurn)
      for (std::int64_t t = turn; t < std::min(turn + kRowsATurn, s.T); ++t) backward_row(s, a, t, query, sums + lane * lane_size);
  }
  T *dlatent = a.dlatent.as<T>(), *dk_extra = a.dk_extra.as<T>();
#pragma omp parallel for schedule(static) if (lane_size > kWorthThreads)
  for (std::int64_t t = 0; t < s.keys; ++t) {
    R* total = sums + t * s.width();
    for (std::int64_t lane = 1; lane < lanes; ++lane)
      for (std::int64_t i = 0; i < s.width(); ++i) total[i] += total[lane * lane_size + i];
    for (std::int64_t c = 0; c < s.C; ++c) dlatent[t * s.C + c] = T(total[c]);
    for (std::int64_t h = 0; h < s.He; ++h) dk_extra[t * s.He + h] = T(total[s.C + h]);
  }
}

}  // namespace

void sparse_attention(Context& ctx, const SparseAttentionForward& a) {
  with_storage(a.q.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
}
void sparse_attention(Context& ctx, const SparseAttentionBackward& a) {
  with_storage(a.q.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
}

}  // namespace moetrain::ops::cpu
