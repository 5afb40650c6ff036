// kda_attention.h -- the KDA sub-layer between its projections: convolutions, norms, gates, the delta rule and the gated norm.
//
//   q, k, v = silu(conv(q_in, k_in, v_in)),  q and k L2-normalised per head           ops/short_conv.h, ops/head_norm.h
//   g, beta = gate(f, a_log, dt_bias), sigmoid(b)                                     ops/kda_gate.h
//   o       = KDA(q, k, v, g, beta),  y = o_norm rmsnorm(o) sigmoid(gate)             ops/kda.h, ops/head_norm.h
//
// What backward cannot cheaply have again is o, kept in storage type; all else it recomputes from the inputs. Values per head are
// as wide as keys. y, o, final_state and the gradients of activations and of the initial state are written (of slices, the states
// that a document leaves or enters: others are left alone), gradients of parameters add; nothing may alias. Arithmetic in real,
// states too; on CUDA with bf16 storage the operands of matrix products are bf16, their sums f32. A bounded gate (lower_bound >=
// -5) lets the diagonal sub-blocks be factored; else they are done pair by pair. CUDA has heads of up to 128 and up to 4 taps.
// Repeatable.
//
// A sequence cut into slices over ranks (Documents::Piece): the convolutions need the k - 1 rows before a slice (history), the
// delta rule the state that enters it. What a slice makes of that state is affine, S' = M S + N, and so is the adjoint, dS = M^T
// dS' + G:
//   KdaAttentionMap           N, the state that leaves from zero, beside M; both zero where nothing leaves, M where nothing that
//                             leaves has entered
//   KdaAttentionMapBackward   G, the gradient of the state that enters by this slice's outputs, beside M^T; likewise
//   KdaFold                   the state after several maps, the first of them on zero
#pragma once
#include <optional>

#include "ops/context.h"
#include "ops/documents.h"
#include "ops/kda.h"

namespace moetrain::ops {

struct KdaAttention {                 // what both passes are given; P = N H
  ConstTensor q_in;                   // (T, P), projected, before the convolution
  ConstTensor k_in;                   // (T, P)
  ConstTensor v_in;                   // (T, P)
  ConstTensor f;                      // (T, P), before dt_bias
  ConstTensor b;                      // (T, N), before the sigmoid
  ConstTensor gate;                   // (T, P), before the sigmoid
  ConstTensor q_conv;                 // (P, 1, k) real
  ConstTensor k_conv;                 // (P, 1, k) real
  ConstTensor v_conv;                 // (P, 1, k) real
  ConstTensor a_log;                  // (N) real
  ConstTensor dt_bias;                // (N, H) real
  ConstTensor o_norm;                 // (H) real
  std::optional<double> lower_bound;  // of the gate; unset: the unbounded form
  double scale;                       // of the score, H^-1/2
  double l2_eps, norm_eps;
  Documents documents;
  ConstTensor initial_state;  // (states, N, H, H) real, states = documents.states(); absent: zero
  ConstTensor history = {};   // (3, states, k-1, P), of q_in, k_in, v_in (ops/short_conv.h); absent: zeros

  bool bounded_gate() const { return lower_bound && *lower_bound >= -5; }
  std::int64_t T() const { return q_in.shape[0]; }
  std::int64_t P() const { return q_in.shape[1]; }
  std::int64_t N() const { return a_log.shape[0]; }
  std::int64_t H() const { return dt_bias.shape[1]; }
  std::int64_t slots() const;  // KdaTiles
  double flops() const { return double(T() * N()) * kda_row_flops(H()); }
  double turns() const { return double(documents.longest()) / double(kKdaChunk); }
  double bytes() const { return bytes_of(q_in, k_in, v_in, f, b, gate); }
  Shape states() const { return {documents.states(), N(), H(), H()}; }
  Shape maps() const { return {documents.states(), N(), H(), 2 * H()}; }
  Shape histories() const { return {3, documents.states(), q_conv.shape[2] - 1, P()}; }
  void check_shapes() const;
};

struct KdaAttentionForward {
  KdaAttention x;
  Tensor o;                                 // (T, N, H); kept for backward
  Tensor y;                                 // (T, N, H)
  Tensor final_state;                       // (states, N, H, H) real; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    return {.kind = WorkKind::kda, .dtype = y.dtype, .flops = x.flops(), .bytes = x.bytes() + bytes_of(o, y), .turns = x.turns()};
  }
  void check_shapes() const;
  void take_scratch(Context& ctx) const;
};

struct KdaAttentionBackward {
  KdaAttention x;
  ConstTensor dy;                           // (T, N, H)
  ConstTensor o;                            // (T, N, H)
  ConstTensor dfinal_state;                 // (states, N, H, H) real; absent: zero
  Tensor dq_in;                             // (T, P)
  Tensor dk_in;                             // (T, P)
  Tensor dv_in;                             // (T, P)
  Tensor df;                                // (T, P)
  Tensor db;                                // (T, N)
  Tensor dgate;                             // (T, P)
  Tensor dq_conv;                           // (P, 1, k) real; adds; absent: frozen
  Tensor dk_conv;                           // (P, 1, k) real; adds; absent: frozen
  Tensor dv_conv;                           // (P, 1, k) real; adds; absent: frozen
  Tensor da_log;                            // (N) real; adds; absent: frozen
  Tensor ddt_bias;                          // (N, H) real; adds; absent: frozen
  Tensor do_norm;                           // (H) real; adds; absent: frozen
  Tensor dinitial_state;                    // (states, N, H, H) real; absent: not wanted
  Tensor dhistory = {};                     // like history, written; absent: not wanted
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    return {.kind = WorkKind::kda,
            .backward = true,
            .dtype = dy.dtype,
            .flops = 2 * x.flops(),
            .bytes = 2 * x.bytes() + bytes_of(dy, o),
            .turns = x.turns()};
  }
  void check_shapes() const;
  void take_scratch(Context& ctx) const;
};

struct KdaAttentionMap {
  KdaAttention x;                           // without an initial state
  Tensor map;                               // (states, N, H, 2 H) real, [N | M] a row
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    return {.kind = WorkKind::kda, .dtype = x.q_in.dtype, .flops = 2 * x.flops(), .bytes = x.bytes(), .turns = x.turns()};
  }
  void check_shapes() const;
  void take_scratch(Context& ctx) const;
};

struct KdaAttentionMapBackward {
  KdaAttention x;                           // without an initial state
  ConstTensor dy;                           // (T, N, H)
  ConstTensor o;                            // (T, N, H)
  Tensor map;                               // (states, N, H, 2 H) real, [G | M^T] a row
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const {
    return {.kind = WorkKind::kda,
            .backward = true,
            .dtype = dy.dtype,
            .flops = 2 * x.flops(),
            .bytes = x.bytes() + bytes_of(dy, o),
            .turns = x.turns()};
  }
  void check_shapes() const;
  void take_scratch(Context& ctx) const;
};

struct KdaFold {
  ConstTensor maps;         // (maps states, N, H, 2 H) real, [N | M]
  std::int64_t first, end;  // the maps first, first + 1, ..., or where end < first downwards; that of `end` is not among them
  Tensor state;             // (states, N, H, H) real: S = M S + N over them, from zero
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  Work work(const Context&) const { return {.kind = WorkKind::kda, .dtype = state.dtype, .bytes = bytes_of(maps, state)}; }
  void check_shapes() const;
};

// What the CUDA backend takes, in slots: document n has its chunks of 64 rows in slots begin / 64 + n and on, so that a slot is
// found without a list. A tile is the rows of one chunk of one head, padded to 64 rows and to a width of 32 or 128.
struct KdaTiles {
  enum class For { forward, map_backward, backward };
  std::int64_t slots, width;
  Tensor w, q, k;  // (slots, N, 64, width)   W, s Qin, Kout; at the end of a backward dk, dq, Kout
  Tensor u;        // (slots, N, width, 64)   U; backward: then R
  Tensor p, t;     // (slots, N, 64, 64)      P; backward: (I + L)^-1
  Tensor decay;    // (slots, N, width) f32   exp(G_last); at the end of a backward exp(G_last) rowsum(S dS')
  Tensor s, ds;    // (slots, N, width, width) backward: state entering, gradient of the state leaving; (value, key)
  Tensor do_;      // (slots, N, width, 64)   backward, also of a map: gradients of o
  Tensor dr;       // (slots, N, width, 64)   backward: gradients of R (then dZ)
  Tensor dg,
      dx;       // (slots, N, 64, width) f32 backward: gradients of the decays; where they fit, over s and ds when these are used up
  Tensor rows;  // (slots, N, 4, 64) f32   backward: norms, beta and its gradient
  Tensor edge;  // (slots, 3, 3, P) f32    backward: gradients of the first rows before SiLU, for the chunk before
  Tensor conv_parts;   // (slots, 3, P, 4) f32    backward: parts of the taps' gradients
  Tensor bias_parts;   // (slots, P) f32          backward: parts of ddt_bias
  Tensor a_log_parts;  // (slots, N) f32          backward: parts of da_log
  Tensor norm_parts;   // (slots, N, H) f32       backward: parts of do_norm
  KdaTiles(Stack& scratch, const KdaAttention& x, For pass);
};

namespace cpu {
void kda_attention(Context&, const KdaAttentionForward&);
void kda_attention(Context&, const KdaAttentionBackward&);
void kda_attention(Context&, const KdaAttentionMap&);
void kda_attention(Context&, const KdaAttentionMapBackward&);
void kda_fold(Context&, const KdaFold&);
}  // namespace cpu
namespace cuda {
void kda_attention(Context&, const KdaAttentionForward&);
void kda_attention(Context&, const KdaAttentionBackward&);
void kda_attention(Context&, const KdaAttentionMap&);
void kda_attention(Context&, const KdaAttentionMapBackward&);
void kda_fold(Context&, const KdaFold&);
}  // namespace cuda

inline void kda_attention(Context& ctx, const KdaAttentionForward& a) {
  dispatch(
      ctx, "kda_attention forward", a, [&] { cpu::kda_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::kda_attention(ctx, a);
      });
}
inline void kda_attention(Context& ctx, const KdaAttentionBackward& a) {
  dispatch(
      ctx, "kda_attention backward", a, [&] { cpu::kda_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::kda_attention(ctx, a);
      });
}
inline void kda_attention(Context& ctx, const KdaAttentionMap& a) {
  dispatch(
      ctx, "kda_attention map forward", a, [&] { cpu::kda_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::kda_attention(ctx, a);
      });
}
inline void kda_attention(Context& ctx, const KdaAttentionMapBackward& a) {
  dispatch(
      ctx, "kda_attention map backward", a, [&] { cpu::kda_attention(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::kda_attention(ctx, a);
      });
}
inline void kda_fold(Context& ctx, const KdaFold& a) {
  dispatch(
      ctx, "kda_fold", a, [&] { cpu::kda_fold(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::kda_fold(ctx, a);
      });
}

}  // namespace moetrain::ops
