// ops/cpu/kda.cpp -- the delta rule token by token and chunk by chunk, one head of one document at a time; one file, since the
// two forms are each other's proof.
#include "ops/kda.h"

#include <omp.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "ops/cpu/exp.h"
#include "ops/cpu/gemm.h"
#include "ops/cpu/types.h"

namespace moetrain::ops {
namespace {

using cpu::exp_as;
using cpu::gemm;

constexpr std::int64_t C = kKdaChunk, B = kKdaSubChunk;

struct Sizes {
  std::int64_t N, H, Hv;
  std::int64_t state() const { return H * Hv; }
  std::int64_t key(std::int64_t t, std::int64_t n) const { return (t * N + n) * H; }
  std::int64_t value(std::int64_t t, std::int64_t n) const { return (t * N + n) * Hv; }
};

template <class Args>
Sizes sizes_of(const Args& a) {
  return {a.q.shape[1], a.q.shape[2], a.v.shape[2]};
}
Sizes sizes_of(const KdaStateBackward& a) { return {a.q.shape[1], a.q.shape[2], a.do_.shape[2]}; }

template <class R>
R* take(Stack& scratch, const Shape& shape) {
  return scratch.take(DTypeOf<R>::value, shape).template as<R>();
}
template <class R>
R* take(Stack& scratch, std::int64_t count) {
  return take<R>(scratch, Shape{count});
}

template <class From, class To>
void convert(const From* from, std::int64_t count, To* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = To(from[i]);
}

// y += scale x
template <class R>
void add_scaled(R scale, const R* x, std::int64_t count, R* y) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) y[i] += scale * x[i];
}

template <class R>
void multiply(const R* x, const R* y, std::int64_t count, R* to) {
#pragma omp simd
  for (std::int64_t i = 0; i < count; ++i) to[i] = x[i] * y[i];
}

template <class R>
R dot(const R* x, const R* y, std::int64_t count) {
  R sum = 0;
#pragma omp simd reduction(+ : sum)
  for (std::int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}

// A state of head n, from a tensor of states or zero; no state: zero, and not stored.
template <class R>
void load_state(ConstTensor states, std::int64_t state, Sizes s, std::int64_t n, R* S) {
  if (states.present() && state >= 0)
    std::copy_n(states.as<R>() + (state * s.N + n) * s.state(), s.state(), S);
  else
    std::fill_n(S, s.state(), R(0));
}
template <class R>
void store_state(const R* S, std::int64_t state, Sizes s, std::int64_t n, Tensor states) {
  if (states.present() && state >= 0) std::copy_n(S, s.state(), states.as<R>() + (state * s.N + n) * s.state());
}

// Runs body(work of this thread, document, head) for every head of every document; Work is made from scratch once a thread.
template <class Work, class Body>
void for_each_head(Context& ctx, const Documents& documents, Sizes sizes, Body&& body) {
  Scope scope(ctx.scratch);
  const std::int64_t heads = documents.count() * sizes.N;
  if (heads == 0) return;
  const int threads = int(std::min<std::int64_t>(heads, omp_get_max_threads()));
  std::vector<Work> works;
  for (int i = 0; i < threads; ++i) works.emplace_back(ctx.scratch, sizes, documents.longest());
  if (ctx.dry()) return;
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (std::int64_t i = 0; i < heads; ++i) body(works[std::size_t(omp_get_thread_num())], i / sizes.N, i % sizes.N);
}

// ---- The recurrence, and its own reverse.

template <class R>
struct Token {
  R *q, *k, *v, *decay, *r;  // r = v - S^-^T k
  R beta = 0;
  Token(Stack& scratch, Sizes s)
      : q(take<R>(scratch, s.H)),
        k(take<R>(scratch, s.H)),
        v(take<R>(scratch, s.Hv)),
        decay(take<R>(scratch, s.H)),
        r(take<R>(scratch, s.Hv)) {}

  template <class T, class Args>
  void load(const Args& a, Sizes s, std::int64_t t, std::int64_t n) {
    convert(a.q.template as<T>() + s.key(t, n), s.H, q);
    convert(a.k.template as<T>() + s.key(t, n), s.H, k);
    convert(a.v.template as<T>() + s.value(t, n), s.Hv, v);
    const R* g = a.g.template as<R>() + s.key(t, n);
    for (std::int64_t d = 0; d < s.H; ++d) decay[d] = exp_as<R>(double(g[d]));
    beta = a.beta.template as<R>()[t * s.N + n];
  }
  // S_{t-1} becomes S^-, and r is set.
  void decay_state(Sizes s, R* S) {
    std::copy_n(v, s.Hv, r);
    for (std::int64_t d = 0; d < s.H; ++d) {
      R* row = S + d * s.Hv;
#pragma omp simd
      for (std::int64_t e = 0; e < s.Hv; ++e) row[e] *= decay[d];
      add_scaled(-k[d], row, s.Hv, r);
    }
  }
  void step(Sizes s, R* S) {
    decay_state(s, S);
    for (std::int64_t d = 0; d < s.H; ++d) add_scaled(beta * k[d], r, s.Hv, S + d * s.Hv);
  }
};

template <class R>
struct RecurrentForwardWork {
  Token<R> token;
  R *S, *o;
  RecurrentForwardWork(Stack& scratch, Sizes s, std::int64_t)
      : token(scratch, s), S(take<R>(scratch, s.state())), o(take<R>(scratch, s.Hv)) {}
};

template <class T>
void recurrent_forward(Context& ctx, const KdaForward& a) {
  using R = cpu::acc_t<T>;
  const auto s = sizes_of(a);
  T* o = a.o.present() ? a.o.as<T>() : nullptr;
  for_each_head<RecurrentForwardWork<R>>(ctx, a.documents, s, [&](auto& work, std::int64_t document, std::int64_t n) {
    load_state(a.initial_state, a.documents.enters(document), s, n, work.S);
    for (auto t = a.documents.begin(document); t < a.documents.end(document); ++t) {
      work.token.template load<T>(a, s, t, n);
      work.token.step(s, work.S);
      if (!a.o.present()) continue;
      std::fill_n(work.o, s.Hv, R(0));
      for (std::int64_t d = 0; d < s.H; ++d) add_scaled(R(a.scale) * work.token.q[d], work.S + d * s.Hv, s.Hv, work.o);
      convert(work.o, s.Hv, o + s.value(t, n));
    }
    store_state(work.S, a.documents.leaves(document), s, n, a.final_state);
  });
}

template <class R>
struct RecurrentBackwardWork {
  Token<R> token;
  R* entering;  // state before every C tokens of the document
  R* states;    // S_{t-1} of the tokens of one such stretch
  R *S, *dS;    // S^- then S_t of a token; gradient of S_t then S_{t-1}
  R *do_, *dr, *dq, *dk, *dg;
  RecurrentBackwardWork(Stack& scratch, Sizes s, std::int64_t longest)
      : token(scratch, s),
        entering(take<R>(scratch, {(longest + C - 1) / C, s.state()})),
        states(take<R>(scratch, {C, s.state()})),
        S(take<R>(scratch, s.state())),
        dS(take<R>(scratch, s.state())),
        do_(take<R>(scratch, s.Hv)),
        dr(take<R>(scratch, s.Hv)),
        dq(take<R>(scratch, s.H)),
        dk(take<R>(scratch, s.H)),
        dg(take<R>(scratch, s.H)) {}

  // With S = S_{t-1} and dS the gradient of S_t by later tokens: all gradients of token t; dS becomes that of S_{t-1}. Gives dbeta.
  R reverse(Sizes s, R scale) {
    auto& x = token;
    x.decay_state(s, S);
    std::fill_n(dr, s.Hv, R(0));
    R dbeta = 0;
    for (std::int64_t d = 0; d < s.H; ++d) {
      const R* row = S + d * s.Hv;
      R* drow = dS + d * s.Hv;
      dq[d] = scale * (dot(row, do_, s.Hv) + x.beta * x.k[d] * dot(x.r, do_, s.Hv));
      add_scaled(scale * x.q[d], do_, s.Hv, drow);
      const R pull = dot(drow, x.r, s.Hv);
      dk[d] = x.beta * pull;
      dbeta += x.k[d] * pull;
      add_scaled(x.beta * x.k[d], drow, s.Hv, dr);
    }
    for (std::int64_t d = 0; d < s.H; ++d) {
      const R* row = S + d * s.Hv;
      R* drow = dS + d * s.Hv;
      dk[d] -= dot(row, dr, s.Hv);
      add_scaled(-x.k[d], dr, s.Hv, drow);
      dg[d] = dot(row, drow, s.Hv);
      for (std::int64_t e = 0; e < s.Hv; ++e) drow[e] *= x.decay[d];
    }
    return dbeta;
  }
};

template <class T>
void recurrent_backward(Context& ctx, const KdaBackward& a) {
  using R = cpu::acc_t<T>;
  const auto s = sizes_of(a);
  T *dq = a.dq.as<T>(), *dk = a.dk.as<T>(), *dv = a.dv.as<T>();
  R *dg = a.dg.as<R>(), *dbeta = a.dbeta.as<R>();
  const T* do_ = a.do_.as<T>();
  for_each_head<RecurrentBackwardWork<R>>(ctx, a.documents, s, [&](auto& work, std::int64_t document, std::int64_t n) {
    const auto begin = a.documents.begin(document), end = a.documents.end(document), stretches = (end - begin + C - 1) / C;
    load_state(a.initial_state, a.documents.enters(document), s, n, work.S);
    for (auto t = begin; t < end; ++t) {
      if ((t - begin) % C == 0) std::copy_n(work.S, s.state(), work.entering + (t - begin) / C * s.state());
      work.token.template load<T>(a, s, t, n);
      work.token.step(s, work.S);
    }
    load_state(a.dfinal_state, a.documents.leaves(document), s, n, work.dS);
    for (auto stretch = stretches - 1; stretch >= 0; --stretch) {
      const auto first = begin + stretch * C, last = std::min(end, first + C);
      std::copy_n(work.entering + stretch * s.state(), s.state(), work.S);
      for (auto t = first; t < last; ++t) {
        std::copy_n(work.S, s.state(), work.states + (t - first) * s.state());
        work.token.template load<T>(a, s, t, n);
        work.token.step(s, work.S);
      }
      for (auto t = last - 1; t >= first; --t) {
        std::copy_n(work.states + (t - first) * s.state(), s.state(), work.S);
        work.token.template load<T>(a, s, t, n);
        convert(do_ + s.value(t, n), s.Hv, work.do_);
        dbeta[t * s.N + n] = work.reverse(s, R(a.scale));
        convert(work.dq, s.H, dq + s.key(t, n));
        convert(work.dk, s.H, dk + s.key(t, n));
        convert(work.dr, s.Hv, dv + s.value(t, n));
        convert(work.dg, s.H, dg + s.key(t, n));
      }
    }
    store_state(work.dS, a.documents.enters(document), s, n, a.dinitial_state);
  });
}

// ---- Chunks.

// One chunk of one head. Matrices between rows of the chunk, (rows, rows), have rows of C elements.
template <class R>
struct Chunk {
  Sizes s;
  std::int64_t rows = 0;
  R *q, *k, *v, *beta;        // (rows, H), (rows, H), (rows, Hv), (rows)
  double* G;                  // (rows, H); f64: D takes differences of long sums
  R *into, *out, *last;       // exp(G), exp(G_last - G); exp(G_last) (H)
  R *q_in, *k_in, *k_out;     // (rows, H)
  R* M;                       // (rows, Hv)
  R *row_part, *column_part;  // (2 B or C, H) factored rows and columns
  R *since, *until;           // (rows, H) factors of D
  R* pair;                    // (2 B, C)
  Chunk(Stack& scratch, Sizes sizes)
      : s(sizes),
        q(take<R>(scratch, C * s.H)),
        k(take<R>(scratch, C * s.H)),
        v(take<R>(scratch, C * s.Hv)),
        beta(take<R>(scratch, C)),
        G(take<double>(scratch, C * s.H)),
        into(take<R>(scratch, C * s.H)),
        out(take<R>(scratch, C * s.H)),
        last(take<R>(scratch, s.H)),
        q_in(take<R>(scratch, C * s.H)),
        k_in(take<R>(scratch, C * s.H)),
        k_out(take<R>(scratch, C * s.H)),
        M(take<R>(scratch, C * s.Hv)),
        row_part(take<R>(scratch, 2 * C * s.H)),
        column_part(take<R>(scratch, C * s.H)),
        since(take<R>(scratch, C * s.H)),
        until(take<R>(scratch, C * s.H)),
        pair(take<R>(scratch, 2 * B * C)) {}

  template <class T, class Args>
  void load(const Args& a, std::int64_t first, std::int64_t count, std::int64_t n) {
    const auto H = s.H;
    rows = count;
    for (std::int64_t i = 0; i < rows; ++i) {
      const auto t = first + i;
      convert(a.q.template as<T>() + s.key(t, n), H, q + i * H);
      convert(a.k.template as<T>() + s.key(t, n), H, k + i * H);
      if constexpr (requires { a.v; }) convert(a.v.template as<T>() + s.value(t, n), s.Hv, v + i * s.Hv);
      beta[i] = a.beta.template as<R>()[t * s.N + n];
      const R* g = a.g.template as<R>() + s.key(t, n);
      for (std::int64_t d = 0; d < H; ++d) G[i * H + d] = (i > 0 ? G[(i - 1) * H + d] : 0) + double(g[d]);
    }
    const double* G_last = G + (rows - 1) * H;
    for (std::int64_t i = 0; i < rows; ++i) {
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d) {
        const auto at = i * H + d;
        into[at] = exp_as<R>(G[at]);
        out[at] = exp_as<R>(G_last[d] - G[at]);
        q_in[at] = into[at] * q[at];
        k_in[at] = into[at] * k[at];
        k_out[at] = out[at] * k[at];
      }
    }
    std::copy_n(into + (rows - 1) * H, H, last);
  }

  // since = exp(G_i - G_reference) for rows i of [r0, r1), until = exp(G_reference - G_j) for columns j of [c0, c1): D is their
  // product.
  void factor(std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1, std::int64_t reference) const {
    const double* Gr = G + reference * s.H;
    for (std::int64_t i = r0; i < r1; ++i) {
      const double* Gi = G + i * s.H;
      R* to = since + (i - r0) * s.H;
#pragma omp simd
      for (std::int64_t d = 0; d < s.H; ++d) to[d] = exp_as<R>(Gi[d] - Gr[d]);
    }
    for (std::int64_t j = c0; j < c1; ++j) {
      const double* Gj = G + j * s.H;
      R* to = until + (j - c0) * s.H;
#pragma omp simd
      for (std::int64_t d = 0; d < s.H; ++d) to[d] = exp_as<R>(Gr[d] - Gj[d]);
    }
  }

  // L and P for rows [r0, r1) and columns [c0, c1), D factored through the reference row.
  void factored_scores(std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1, std::int64_t reference, R scale, R* L,
                       R* P) const {
    const auto m = r1 - r0, n = c1 - c0;
    factor(r0, r1, c0, c1, reference);
    multiply(since, k + r0 * s.H, m * s.H, row_part);
    multiply(since, q + r0 * s.H, m * s.H, row_part + m * s.H);
    multiply(until, k + c0 * s.H, n * s.H, column_part);
    gemm<R>(false, true, 2 * m, n, s.H, 1, row_part, s.H, column_part, s.H, 0, pair, C);
    for (std::int64_t i = r0; i < r1; ++i) {
      for (std::int64_t j = c0; j < std::min(c1, i + 1); ++j) {
        if (j < i) L[i * C + j] = beta[i] * pair[(i - r0) * C + j - c0];
        P[i * C + j] = scale * pair[(m + i - r0) * C + j - c0];
      }
    }
  }
  void pairwise_scores(std::int64_t r0, std::int64_t r1, R scale, R* L, R* P) const {
    const auto H = s.H;
    for (std::int64_t i = r0; i < r1; ++i) {
      for (std::int64_t j = r0; j <= i; ++j) {
        R kk = 0, qk = 0;
#pragma omp simd reduction(+ : kk, qk)
        for (std::int64_t d = 0; d < H; ++d) {
          const R kD = exp_as<R>(G[i * H + d] - G[j * H + d]) * k[j * H + d];
          kk += k[i * H + d] * kD;
          qk += q[i * H + d] * kD;
        }
        if (j < i) L[i * C + j] = beta[i] * kk;
        P[i * C + j] = scale * qk;
      }
    }
  }
  void scores(R scale, bool bounded_gate, R* L, R* P) const {
    std::fill_n(L, rows * C, R(0));
    std::fill_n(P, rows * C, R(0));
    for (std::int64_t r0 = 0; r0 < rows; r0 += B) {
      const auto r1 = std::min(rows, r0 + B);
      if (r0 > 0) factored_scores(r0, r1, 0, r0, r0, scale, L, P);
      if (bounded_gate)
        factored_scores(r0, r1, r0, r1, middle(r0, r1), scale, L, P);
      else
        pairwise_scores(r0, r1, scale, L, P);
    }
  }

  // Z <- (I + L)^-1 Z, Z (rows, Hv)
  void substitute(const R* L, R* Z) const {
    const auto Hv = s.Hv;
    for (std::int64_t r0 = 0; r0 < rows; r0 += B) {
      const auto r1 = std::min(rows, r0 + B);
      gemm<R>(false, false, r1 - r0, Hv, r0, -1, L + r0 * C, C, Z, Hv, 1, Z + r0 * Hv, Hv);
      for (std::int64_t i = r0 + 1; i < r1; ++i)
        for (std::int64_t j = r0; j < i; ++j) add_scaled(-L[i * C + j], Z + j * Hv, Hv, Z + i * Hv);
    }
  }
  // Z <- (I + L)^-T Z
  void substitute_transposed(const R* L, R* Z) const {
    const auto Hv = s.Hv;
    for (std::int64_t r0 = (rows - 1) / B * B; r0 >= 0; r0 -= B) {
      const auto r1 = std::min(rows, r0 + B);
      gemm<R>(true, false, r1 - r0, Hv, rows - r1, -1, L + r1 * C + r0, C, Z + r1 * Hv, Hv, 1, Z + r0 * Hv, Hv);
      for (std::int64_t j = r1 - 1; j > r0; --j)
        for (std::int64_t i = r0; i < j; ++i) add_scaled(-L[j * C + i], Z + j * Hv, Hv, Z + i * Hv);
    }
  }

  // M and the pseudo values, given the state that enters.
  void pseudo_values(const R* S, const R* L, R* values) {
    difference_to_state(S);
    for (std::int64_t i = 0; i < rows; ++i) {
#pragma omp simd
      for (std::int64_t e = 0; e < s.Hv; ++e) values[i * s.Hv + e] = beta[i] * M[i * s.Hv + e];
    }
    substitute(L, values);
  }
  void difference_to_state(const R* S) {
    std::copy_n(v, rows * s.Hv, M);
    gemm<R>(false, false, rows, s.Hv, s.H, -1, k_in, s.H, S, s.Hv, 1, M, s.Hv);
  }
  // The state that leaves; next may be S.
  void advance(const R* S, const R* values, R* next) const {
    for (std::int64_t d = 0; d < s.H; ++d) {
#pragma omp simd
      for (std::int64_t e = 0; e < s.Hv; ++e) next[d * s.Hv + e] = last[d] * S[d * s.Hv + e];
    }
    gemm<R>(true, false, s.H, s.Hv, rows, 1, k_out, s.H, values, s.Hv, 1, next, s.Hv);
  }

  // dZ = (I + L)^-T (P^T dO + Kout dS'), (rows, Hv)
  void gradient_of_pseudo_values(const R* L, const R* P, const R* do_, const R* dS, R* dZ) const {
    gemm<R>(true, false, rows, s.Hv, rows, 1, P, C, do_, s.Hv, 0, dZ, s.Hv);
    gemm<R>(false, false, rows, s.Hv, s.H, 1, k_out, s.H, dS, s.Hv, 1, dZ, s.Hv);
    substitute_transposed(L, dZ);
  }
  // The gradient of the state that enters, from that of the one that leaves; before may be dS.
  void retreat(const R* do_, const R* dv, R scale, const R* dS, R* before) const {
    for (std::int64_t d = 0; d < s.H; ++d) {
#pragma omp simd
      for (std::int64_t x = 0; x < s.Hv; ++x) before[d * s.Hv + x] = last[d] * dS[d * s.Hv + x];
    }
    gemm<R>(true, false, s.H, s.Hv, rows, scale, q_in, s.H, do_, s.Hv, 1, before, s.Hv);
    gemm<R>(true, false, s.H, s.Hv, rows, -1, k_in, s.H, dv, s.Hv, 1, before, s.Hv);
  }

  static std::int64_t middle(std::int64_t r0, std::int64_t r1) { return r0 + std::min(B / 2, r1 - r0 - 1); }
};

template <class R>
struct ChunkedForwardWork {
  Chunk<R> chunk;
  R *S, *L, *P, *values, *o;
  ChunkedForwardWork(Stack& scratch, Sizes s, std::int64_t)
      : chunk(scratch, s),
        S(take<R>(scratch, s.state())),
        L(take<R>(scratch, C * C)),
        P(take<R>(scratch, C * C)),
        values(take<R>(scratch, C * s.Hv)),
        o(take<R>(scratch, C * s.Hv)) {}
};

template <class T>
void chunked_forward(Context& ctx, const KdaForward& a) {
  using R = cpu::acc_t<T>;
  const auto s = sizes_of(a);
  T* o = a.o.present() ? a.o.as<T>() : nullptr;
  for_each_head<ChunkedForwardWork<R>>(ctx, a.documents, s, [&](auto& work, std::int64_t document, std::int64_t n) {
    auto& chunk = work.chunk;
    load_state(a.initial_state, a.documents.enters(document), s, n, work.S);
    for (auto first = a.documents.begin(document); first < a.documents.end(document); first += C) {
      const auto rows = std::min(C, a.documents.end(document) - first);
      chunk.template load<T>(a, first, rows, n);
      chunk.scores(R(a.scale), a.bounded_gate, work.L, work.P);
      chunk.pseudo_values(work.S, work.L, work.values);
      if (o) {
        gemm<R>(false, false, rows, s.Hv, s.H, R(a.scale), chunk.q_in, s.H, work.S, s.Hv, 0, work.o, s.Hv);
        gemm<R>(false, false, rows, s.Hv, rows, 1, work.P, C, work.values, s.Hv, 1, work.o, s.Hv);
        for (std::int64_t i = 0; i < rows; ++i) convert(work.o + i * s.Hv, s.Hv, o + s.value(first + i, n));
      }
      chunk.advance(work.S, work.values, work.S);
    }
    store_state(work.S, a.documents.leaves(document), s, n, a.final_state);
  });
}

template <class R>
struct StateBackwardWork {
  Chunk<R> chunk;
  R *dS, *L, *P, *do_, *dv;
  StateBackwardWork(Stack& scratch, Sizes s, std::int64_t)
      : chunk(scratch, s),
        dS(take<R>(scratch, s.state())),
        L(take<R>(scratch, C * C)),
        P(take<R>(scratch, C * C)),
        do_(take<R>(scratch, C * s.Hv)),
        dv(take<R>(scratch, C * s.Hv)) {}
};

template <class T>
void state_backward(Context& ctx, const KdaStateBackward& a) {
  using R = cpu::acc_t<T>;
  const auto s = sizes_of(a);
  const T* do_ = a.do_.as<T>();
  for_each_head<StateBackwardWork<R>>(ctx, a.documents, s, [&](auto& work, std::int64_t document, std::int64_t n) {
    auto& chunk = work.chunk;
    const auto begin = a.documents.begin(document), end = a.documents.end(document);
    load_state(a.dfinal_state, a.documents.leaves(document), s, n, work.dS);
    for (auto i = (end - begin + C - 1) / C - 1; i >= 0; --i) {
      const auto first = begin + i * C, rows = std::min(C, end - first);
      chunk.template load<T>(a, first, rows, n);
      chunk.scores(R(a.scale), a.bounded_gate, work.L, work.P);
      for (std::int64_t r = 0; r < rows; ++r) convert(do_ + s.value(first + r, n), s.Hv, work.do_ + r * s.Hv);
      chunk.gradient_of_pseudo_values(work.L, work.P, work.do_, work.dS, work.dv);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t x = 0; x < s.Hv; ++x) work.dv[r * s.Hv + x] *= chunk.beta[r];
      chunk.retreat(work.do_, work.dv, R(a.scale), work.dS, work.dS);
    }
    store_state(work.dS, a.documents.enters(document), s, n, a.dinitial_state);
  });
}

template <class R>
struct ChunkedBackwardWork {
  Chunk<R> chunk;
  R *S, *L, *P, *values;  // of every chunk of the document: entering states, scores, pseudo values
  R* dS;                  // gradient of the state leaving the chunk, then of that entering it
  R *do_, *dZ, *dv;
  R* dP;       // (rows, 2 C) strictly lower triangles, a row of dP and then of dL: products with both are one
  R* dP_self;  // the diagonal of dP
  R *dq_in, *dk_in, *dk_out;
  R *a, *c, *e, *sum;  // (rows, H): parts within the chunk; sums of one sub-block
  R* leaving;          // (H) gradient of G_last by the state that is only carried through
  ChunkedBackwardWork(Stack& scratch, Sizes s, std::int64_t longest)
      : ChunkedBackwardWork(scratch, s, (longest + C - 1) / C, C * s.H, C * s.Hv) {}
  ChunkedBackwardWork(Stack& scratch, Sizes s, std::int64_t chunks, std::int64_t keys, std::int64_t rows_of_values)
      : chunk(scratch, s),
        S(take<R>(scratch, {chunks, s.state()})),
        L(take<R>(scratch, {chunks, C, C})),
        P(take<R>(scratch, {chunks, C, C})),
        values(take<R>(scratch, {chunks, rows_of_values})),
        dS(take<R>(scratch, s.state())),
        do_(take<R>(scratch, rows_of_values)),
        dZ(take<R>(scratch, rows_of_values)),
        dv(take<R>(scratch, rows_of_values)),
        dP(take<R>(scratch, 2 * C * C)),
        dP_self(take<R>(scratch, C)),
        dq_in(take<R>(scratch, keys)),
        dk_in(take<R>(scratch, keys)),
        dk_out(take<R>(scratch, keys)),
        a(take<R>(scratch, keys)),
        c(take<R>(scratch, keys)),
        e(take<R>(scratch, keys)),
        sum(take<R>(scratch, keys)),
        leaving(take<R>(scratch, s.H)) {}

  // Gradients of what the state and the pseudo values meet; dS becomes the gradient of the entering state.
  void through_state(const R* entering, const R* Li, const R* Pi, const R* pseudo, R scale) {
    const auto rows = chunk.rows, H = chunk.s.H, Hv = chunk.s.Hv;
    gemm<R>(false, true, rows, rows, Hv, scale, do_, Hv, pseudo, Hv, 0, dP, 2 * C);
    chunk.gradient_of_pseudo_values(Li, Pi, do_, dS, dZ);
    gemm<R>(false, true, rows, rows, Hv, -1, dZ, Hv, pseudo, Hv, 0, dP + C, 2 * C);
    for (std::int64_t i = 0; i < rows; ++i) {
      R *dP_row = dP + 2 * i * C, *dL_row = dP_row + C;
      dP_self[i] = dP_row[i];
      std::fill(dP_row + i, dP_row + rows, R(0));
      std::fill(dL_row + i, dL_row + rows, R(0));
#pragma omp simd
      for (std::int64_t x = 0; x < Hv; ++x) dv[i * Hv + x] = chunk.beta[i] * dZ[i * Hv + x];
    }
    chunk.difference_to_state(entering);
    gemm<R>(false, true, rows, H, Hv, scale, do_, Hv, entering, Hv, 0, dq_in, H);
    gemm<R>(false, true, rows, H, Hv, -1, dv, Hv, entering, Hv, 0, dk_in, H);
    gemm<R>(false, true, rows, H, Hv, 1, pseudo, Hv, dS, Hv, 0, dk_out, H);
    for (std::int64_t d = 0; d < H; ++d) leaving[d] = chunk.last[d] * dot(entering + d * Hv, dS + d * Hv, Hv);
    chunk.retreat(do_, dv, scale, dS, dS);
  }

  // a and c of rows [r0, r1) += what columns [c0, c1) give; the chunk holds the factors of their D.
  void factored_rows(std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1) {
    const auto H = chunk.s.H, m = r1 - r0, n = c1 - c0;
    multiply(chunk.until, chunk.k + c0 * H, n * H, chunk.column_part);
    gemm<R>(false, false, 2 * m, H, n, 1, dP + 2 * r0 * C + c0, C, chunk.column_part, H, 0, sum, H);
    for (std::int64_t i = 0; i < m; ++i) {
      const R *since = chunk.since + i * H, *by_q = sum + 2 * i * H, *by_k = by_q + H;
      R *ai = a + (r0 + i) * H, *ci = c + (r0 + i) * H;
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d) {
        ai[d] += since[d] * by_q[d];
        ci[d] += since[d] * by_k[d];
      }
    }
  }
  // e of columns [c0, c1) += what rows [r0, r1) give, likewise.
  void factored_columns(std::int64_t r0, std::int64_t r1, std::int64_t c0, std::int64_t c1) {
    const auto H = chunk.s.H, m = r1 - r0, n = c1 - c0;
    for (std::int64_t i = 0; i < m; ++i) {
      const R *since = chunk.since + i * H, *q = chunk.q + (r0 + i) * H, *k = chunk.k + (r0 + i) * H;
      const R beta = chunk.beta[r0 + i];
      R *row_q = chunk.row_part + 2 * i * H, *row_k = row_q + H;
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d) {
        row_q[d] = since[d] * q[d];
        row_k[d] = since[d] * k[d] * beta;
      }
    }
    gemm<R>(true, false, n, H, 2 * m, 1, dP + 2 * r0 * C + c0, C, chunk.row_part, H, 0, sum, H);
    R* to = e + c0 * H;
#pragma omp simd
    for (std::int64_t i = 0; i < n * H; ++i) to[i] += chunk.until[i] * sum[i];
  }
  void pairwise(std::int64_t r0, std::int64_t r1) {
    const auto H = chunk.s.H;
    for (std::int64_t i = r0; i < r1; ++i) {
      for (std::int64_t j = r0; j < i; ++j) {
        const R p = dP[2 * i * C + j], l = dP[(2 * i + 1) * C + j], l_beta = l * chunk.beta[i];
        const double *Gi = chunk.G + i * H, *Gj = chunk.G + j * H;
        const R *qi = chunk.q + i * H, *ki = chunk.k + i * H, *kj = chunk.k + j * H;
        R *ai = a + i * H, *ci = c + i * H, *ej = e + j * H;
#pragma omp simd
        for (std::int64_t d = 0; d < H; ++d) {
          const R D = exp_as<R>(Gi[d] - Gj[d]);
          ai[d] += p * kj[d] * D;
          ci[d] += l * kj[d] * D;
          ej[d] += (p * qi[d] + l_beta * ki[d]) * D;
        }
      }
    }
  }
  void within_chunk(bool bounded_gate) {
    const auto rows = chunk.rows, H = chunk.s.H;
    for (R* part : {a, c, e}) std::fill_n(part, rows * H, R(0));
    for (std::int64_t r0 = 0; r0 < rows; r0 += B) {
      const auto r1 = std::min(rows, r0 + B);
      if (r0 > 0) {
        chunk.factor(r0, r1, 0, r0, r0);
        factored_rows(r0, r1, 0, r0);
      }
      if (r1 < rows) {
        chunk.factor(r1, rows, r0, r1, r1 - 1);
        factored_columns(r1, rows, r0, r1);
      }
      if (bounded_gate) {
        chunk.factor(r0, r1, r0, r1, Chunk<R>::middle(r0, r1));
        factored_rows(r0, r1, r0, r1);
        factored_columns(r0, r1, r0, r1);
      } else {
        pairwise(r0, r1);
      }
    }
  }

  // The gradients of the chunk's inputs, last row first (dg is a sum over later rows).
  template <class T>
  void write(const KdaBackward& args, std::int64_t first, std::int64_t n) {
    const auto H = chunk.s.H, Hv = chunk.s.Hv;
    T *dq_all = args.dq.as<T>(), *dk_all = args.dk.as<T>(), *dv_all = args.dv.as<T>();
    R *dg_all = args.dg.as<R>(), *dbeta_all = args.dbeta.as<R>();
    R *before = sum, *running = chunk.column_part;  // of dg: by state and rows that came before, summed forwards; by later rows
    std::copy_n(leaving, H, before);
    for (std::int64_t i = 1; i < chunk.rows; ++i) {
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d)
        before[i * H + d] = before[(i - 1) * H + d] + chunk.k_out[(i - 1) * H + d] * dk_out[(i - 1) * H + d];
    }
    std::fill_n(running, H, R(0));
    for (std::int64_t i = chunk.rows - 1; i >= 0; --i) {
      const auto t = first + i, at = i * H;
      const R *q = chunk.q + at, *k = chunk.k + at, *into = chunk.into + at, *out = chunk.out + at;
      T *dq = dq_all + chunk.s.key(t, n), *dk = dk_all + chunk.s.key(t, n);
      R* dg = dg_all + chunk.s.key(t, n);
      const R beta = chunk.beta[i], self = dP_self[i];
#pragma omp simd
      for (std::int64_t d = 0; d < H; ++d) {
        const R from_q = dq_in[at + d] * into[d], from_k_in = dk_in[at + d] * into[d], from_k_out = dk_out[at + d] * out[d];
        dq[d] = T(from_q + a[at + d] + self * k[d]);
        dk[d] = T(from_k_out + from_k_in + beta * c[at + d] + e[at + d] + self * q[d]);
        running[d] += q[d] * (from_q + a[at + d]) + k[d] * (from_k_in + beta * c[at + d] - e[at + d]);
        dg[d] = before[at + d] + running[d];
      }
      dbeta_all[t * chunk.s.N + n] = dot(dZ + i * Hv, chunk.M + i * Hv, Hv) + dot(c + at, k, H);
      convert(dv + i * Hv, Hv, dv_all + chunk.s.value(t, n));
    }
  }
};

template <class T>
void chunked_backward(Context& ctx, const KdaBackward& a) {
  using R = cpu::acc_t<T>;
  const auto s = sizes_of(a);
  const T* do_ = a.do_.as<T>();
  for_each_head<ChunkedBackwardWork<R>>(ctx, a.documents, s, [&](auto& work, std::int64_t document, std::int64_t n) {
    auto& chunk = work.chunk;
    const auto begin = a.documents.begin(document), end = a.documents.end(document), chunks = (end - begin + C - 1) / C;
    auto rows_of = [&](std::int64_t i) { return std::min(C, end - begin - i * C); };
    if (chunks > 0) load_state(a.initial_state, a.documents.enters(document), s, n, work.S);
    for (std::int64_t i = 0; i < chunks; ++i) {
      R *S = work.S + i * s.state(), *L = work.L + i * C * C, *values = work.values + i * C * s.Hv;
      chunk.template load<T>(a, begin + i * C, rows_of(i), n);
      chunk.scores(R(a.scale), a.bounded_gate, L, work.P + i * C * C);
      chunk.pseudo_values(S, L, values);
      if (i + 1 < chunks) chunk.advance(S, values, S + s.state());
    }
    load_state(a.dfinal_state, a.documents.leaves(document), s, n, work.dS);
    for (auto i = chunks - 1; i >= 0; --i) {
      const auto first = begin + i * C, rows = rows_of(i);
      chunk.template load<T>(a, first, rows, n);
      for (std::int64_t r = 0; r < rows; ++r) convert(do_ + s.value(first + r, n), s.Hv, work.do_ + r * s.Hv);
      work.through_state(work.S + i * s.state(), work.L + i * C * C, work.P + i * C * C, work.values + i * C * s.Hv, R(a.scale));
      work.within_chunk(a.bounded_gate);
      work.template write<T>(a, first, n);
    }
    store_state(work.dS, a.documents.enters(document), s, n, a.dinitial_state);
  });
}

}  // namespace

void cpu::kda(Context& ctx, const KdaForward& a) {
  with_storage(a.q.dtype, [&](auto storage) {
    using T = decltype(storage);
    a.form == KdaForm::recurrent ? recurrent_forward<T>(ctx, a) : chunked_forward<T>(ctx, a);
  });
}
void cpu::kda(Context& ctx, const KdaStateBackward& a) {
  with_storage(a.q.dtype, [&](auto storage) { state_backward<decltype(storage)>(ctx, a); });
}
void cpu::kda(Context& ctx, const KdaBackward& a) {
  with_storage(a.q.dtype, [&](auto storage) {
    using T = decltype(storage);
    a.form == KdaForm::recurrent ? recurrent_backward<T>(ctx, a) : chunked_backward<T>(ctx, a);
  });
}

}  // namespace moetrain::ops
