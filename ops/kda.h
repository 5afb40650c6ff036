// kda.h -- Kimi Delta Attention: the gated delta rule, as recurrence (reference) and in chunked WY form (the one that trains).
//
// Per document and head, state S (H, Hv) starting at initial_state, s = scale:
//   S^-  = diag(exp g_t) S_{t-1}
//   S_t  = S^- + beta_t k_t (v_t - S^-^T k_t)^T
//   o_t  = s S_t^T q_t                                  after the update: a token sees itself
//
// Chunked, rows i, j of one chunk of kKdaChunk, S the state entering it, G_i = sum_{r<=i} g_r, D_ij = exp(G_i - G_j):
//   L_ij = beta_i sum_d k_id k_jd D_ijd  (j < i),   P_ij = s sum_d q_id k_jd D_ijd  (j <= i)
//   Kin  = exp(G) K,  Qin = exp(G) Q,  Kout = exp(G_last - G) K        elementwise
//   M    = V - Kin S,   R = (I + L)^-1 diag(beta) M
//   O    = s Qin S + P R,   S' = diag(exp G_last) S + Kout^T R
// This is W, U and the inverse of I + L multiplied out: R = U - W S is found by substitution, the inverse is never formed.
//
// Backward of a chunk, dS' the gradient of the state leaving it (dfinal_state, or zero, for the last):
//   dP   = s tril(dO R^T),   dR = P^T dO + Kout dS',   dZ = (I + L)^-T dR,   dL = -stricttril(dZ R^T)
//   dV   = diag(beta) dZ,    dKin = -dV S^T,   dQin = s dO S^T,   dKout = R dS'^T
//   dS   = diag(exp G_last) dS' + s Qin^T dO - Kin^T dV
//   a_i  = sum_{j<i} dP_ij k_j D_ij,   c_i = sum_{j<i} dL_ij k_j D_ij,   e_j = sum_{i>j} (dP_ij q_i + dL_ij beta_i k_i) D_ij
//   dq_i = dQin exp(G) + a + dP_ii k_i,   dk_i = dKout exp(G_last - G) + dKin exp(G) + beta c + e + dP_ii q_i
//   dbeta = rowsum(dZ M) + rowsum(c K)
//   dG   = dQin Qin + dKin Kin + q a + k (beta c - e)
//   dg_t = sum_{r>=t} dG_r + exp(G_last) rowsum(S dS') + sum_{r<t} Kout_r dKout_r
// (P_ii and Kout of the last row do not depend on g: kept out of these sums, they cannot drown a small dg by cancelling there.)
//
// No exp(-G) over a chunk: D is factored through a reference row between i and j in sub-blocks of kKdaSubChunk rows (both
// exponents <= 0); diagonal sub-blocks through their middle row (bounded_gate: exponents within 40) or pair by pair.
// Everything is written, nothing adds; nothing may alias. Arithmetic in real, state included. Chunks start afresh at every
// document; an empty document hands its state (and its gradient) through. Of a document cut into slices, the state that enters is
// read and its gradient written, and the state that leaves written and its gradient read, where documents.enters and leaves say so;
// other states are neither. KdaStateBackward is the dS alone. Repeatable; on the CPU for any number of threads.
#pragma once
#include "ops/context.h"
#include "ops/documents.h"

namespace moetrain::ops {

enum class KdaForm : std::uint8_t { chunked, recurrent };
inline constexpr std::int64_t kKdaChunk = 64, kKdaSubChunk = 16;  // rows
// Products and sums of a head's row in the chunked form, forward.
constexpr double kda_row_flops(std::int64_t H) { return double(6 * H * H + 3 * kKdaChunk * H + kKdaChunk * kKdaChunk); }

struct KdaForward {
  KdaForm form = KdaForm::chunked;
  ConstTensor q;      // (T, N, H), L2-normalised
  ConstTensor k;      // (T, N, H), L2-normalised
  ConstTensor v;      // (T, N, Hv)
  ConstTensor g;      // (T, N, H) real, log decay <= 0
  ConstTensor beta;   // (T, N) real
  double scale;       // of the score, H^-1/2
  bool bounded_gate;  // g >= -5: diagonal sub-blocks may be factored through their middle row
  Documents documents;
  ConstTensor initial_state;  // (states, N, H, Hv) real, states = documents.states(); absent: zero
  Tensor o;                   // (T, N, Hv); absent: states alone are wanted
  Tensor final_state;         // (states, N, H, Hv) real; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    check(q.shape.rank() == 3 && v.shape.rank() == 3, "kda: q is not (T, N, H) or v not (T, N, Hv)",
          {{"q", q.shape.rank()}, {"v", v.shape.rank()}});
    const auto T = q.shape[0], N = q.shape[1], H = q.shape[2], Hv = v.shape[2];
    const auto real = real_of(q.dtype);
    check(k.shape == q.shape && k.dtype == q.dtype, "kda: k does not fit q", {{"q", q.count()}, {"k", k.count()}});
    check(v.shape == Shape{T, N, Hv} && v.dtype == q.dtype, "kda: v does not fit q", {{"T", T}, {"N", N}, {"v", v.count()}});
    check(g.shape == q.shape && g.dtype == real, "kda: g is not (T, N, H) real", {{"q", q.count()}, {"g", g.count()}});
    check(beta.shape == Shape{T, N} && beta.dtype == real, "kda: beta is not (T, N) real",
          {{"T", T}, {"N", N}, {"beta", beta.count()}});
    check(!o.present() || (o.shape == v.shape && o.dtype == q.dtype), "kda: o does not fit v", {{"v", v.count()}, {"o", o.count()}});
    documents.check_cover(T);
    const Shape states{documents.states(), N, H, Hv};
    check(!initial_state.present() || (initial_state.shape == states && initial_state.dtype == real),
          "kda: initial_state is not (states, N, H, Hv) real", {{"states", states.count()}, {"it", initial_state.count()}});
    check(!final_state.present() || (final_state.shape == states && final_state.dtype == real),
          "kda: final_state is not (states, N, H, Hv) real", {{"states", states.count()}, {"it", final_state.count()}});
  }
};

struct KdaBackward {
  KdaForm form = KdaForm::chunked;
  ConstTensor do_;   // (T, N, Hv)
  ConstTensor q;     // (T, N, H)
  ConstTensor k;     // (T, N, H)
  ConstTensor v;     // (T, N, Hv)
  ConstTensor g;     // (T, N, H) real
  ConstTensor beta;  // (T, N) real
  double scale;
  bool bounded_gate;
  Documents documents;
  ConstTensor initial_state;  // (states, N, H, Hv) real; absent: zero
  ConstTensor dfinal_state;   // (states, N, H, Hv) real; absent: zero
  Tensor dq;                  // (T, N, H)
  Tensor dk;                  // (T, N, H)
  Tensor dv;                  // (T, N, Hv)
  Tensor dg;                  // (T, N, H) real
  Tensor dbeta;               // (T, N) real
  Tensor dinitial_state;      // (states, N, H, Hv) real; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    KdaForward{form, q, k, v, g, beta, scale, bounded_gate, documents, initial_state, dv, dinitial_state}.check_shapes();
    const auto real = real_of(q.dtype);
    check(do_.shape == v.shape && do_.dtype == v.dtype, "kda: do does not fit v", {{"v", v.count()}, {"do", do_.count()}});
    check(dq.shape == q.shape && dq.dtype == q.dtype, "kda: dq does not fit q", {{"q", q.count()}, {"dq", dq.count()}});
    check(dk.shape == q.shape && dk.dtype == q.dtype, "kda: dk does not fit k", {{"k", k.count()}, {"dk", dk.count()}});
    check(dg.shape == g.shape && dg.dtype == real, "kda: dg does not fit g", {{"g", g.count()}, {"dg", dg.count()}});
    check(dbeta.shape == beta.shape && dbeta.dtype == real, "kda: dbeta does not fit beta",
          {{"beta", beta.count()}, {"dbeta", dbeta.count()}});
    const Shape states{documents.states(), q.shape[1], q.shape[2], v.shape[2]};
    check(!dfinal_state.present() || (dfinal_state.shape == states && dfinal_state.dtype == real),
          "kda: dfinal_state is not (states, N, H, Hv) real", {{"states", states.count()}, {"it", dfinal_state.count()}});
  }
};

struct KdaStateBackward {
  ConstTensor do_;   // (T, N, Hv)
  ConstTensor q;     // (T, N, H)
  ConstTensor k;     // (T, N, H)
  ConstTensor g;     // (T, N, H) real
  ConstTensor beta;  // (T, N) real
  double scale;
  bool bounded_gate;
  Documents documents;
  ConstTensor dfinal_state;  // (states, N, H, Hv) real; absent: zero
  Tensor dinitial_state;     // (states, N, H, Hv) real
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    KdaForward{KdaForm::chunked, q, k, do_, g, beta, scale, bounded_gate, documents, dfinal_state, {}, dinitial_state}.check_shapes();
  }
};

namespace cpu {
void kda(Context&, const KdaForward&);
void kda(Context&, const KdaBackward&);
void kda(Context&, const KdaStateBackward&);
}  // namespace cpu

inline void kda(Context& ctx, const KdaForward& a) {
  dispatch(ctx, "kda forward", a, [&] { cpu::kda(ctx, a); });
}
inline void kda(Context& ctx, const KdaBackward& a) {
  dispatch(ctx, "kda backward", a, [&] { cpu::kda(ctx, a); });
}
inline void kda(Context& ctx, const KdaStateBackward& a) {
  dispatch(ctx, "kda state backward", a, [&] { cpu::kda(ctx, a); });
}

}  // namespace moetrain::ops
