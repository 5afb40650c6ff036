// ops/cpu/kda_attention.cpp -- the sub-layer as a composition of its parts; backward runs the cheap parts of forward again.
#include "ops/kda_attention.h"

#include "ops/head_norm.h"
#include "ops/kda.h"
#include "ops/kda_gate.h"
#include "ops/short_conv.h"

namespace moetrain::ops {
namespace {

// What the delta rule is given, in scratch of the context.
struct Inputs {
  Tensor q, k, v, g;      // (T, N, H), g real
  Tensor q_r, k_r, beta;  // (T, N) real
  Inputs(Context& ctx, const KdaAttention& x) {
    const Shape heads{x.T(), x.N(), x.H()}, head{x.T(), x.N()};
    const auto storage = x.q_in.dtype, real = real_of(storage);
    for (Tensor* t : {&q, &k, &v}) *t = ctx.scratch.take(storage, heads);
    for (Tensor* t : {&q_r, &k_r, &beta}) *t = ctx.scratch.take(real, head);
    g = ctx.scratch.take(real, heads);
    auto convolve = [&](ConstTensor u, ConstTensor w, Tensor y) {
      cpu::short_conv(ctx, ShortConvForward{.u = u, .w = w, .y = y.reshape(u.shape), .documents = x.documents});
    };
    convolve(x.q_in, x.q_conv, q);
    convolve(x.k_in, x.k_conv, k);
    convolve(x.v_in, x.v_conv, v);
    if (ctx.dry()) return;
    cpu::head_l2(ctx, HeadL2Forward{.x = q, .y = q, .r = q_r, .eps = x.l2_eps});
    cpu::head_l2(ctx, HeadL2Forward{.x = k, .y = k, .r = k_r, .eps = x.l2_eps});
    cpu::kda_gate(ctx, KdaGateForward{.f = x.f.reshape(heads),
                                      .a_log = x.a_log,
                                      .dt_bias = x.dt_bias,
                                      .b = x.b,
                                      .lower_bound = x.lower_bound,
                                      .g = g,
                                      .beta = beta});
  }
};

}  // namespace

void cpu::kda_attention(Context& ctx, const KdaAttentionForward& a) {
  Scope scope(ctx.scratch);
  const auto& x = a.x;
  const Inputs in(ctx, x);
  const Tensor r = ctx.scratch.take(x.o_norm.dtype, {x.T(), x.N()});
  cpu::kda(ctx, KdaForward{.q = in.q,
                           .k = in.k,
                           .v = in.v,
                           .g = in.g,
                           .beta = in.beta,
                           .scale = x.scale,
                           .bounded_gate = x.bounded_gate(),
                           .documents = x.documents,
                           .initial_state = x.initial_state,
                           .o = a.o,
                           .final_state = a.final_state});
  if (ctx.dry()) return;
  cpu::gated_head_norm(
      ctx, GatedHeadNormForward{.o = a.o, .gate = x.gate.reshape(a.o.shape), .w = x.o_norm, .y = a.y, .r = r, .eps = x.norm_eps});
}

void cpu::kda_attention(Context& ctx, const KdaAttentionBackward& a) {
  Scope scope(ctx.scratch);
  const auto& x = a.x;
  const Shape heads = a.o.shape, head{x.T(), x.N()};
  const auto storage = x.q_in.dtype, real = real_of(storage);
  const Tensor do_ = ctx.scratch.take(storage, heads);
  {
    Scope norm(ctx.scratch);
    const Tensor y = ctx.scratch.take(storage, heads), r = ctx.scratch.take(real, head);
    const ConstTensor gate = x.gate.reshape(heads);
    if (!ctx.dry())
      cpu::gated_head_norm(ctx, GatedHeadNormForward{.o = a.o, .gate = gate, .w = x.o_norm, .y = y, .r = r, .eps = x.norm_eps});
    cpu::gated_head_norm(ctx, GatedHeadNormBackward{.dy = a.dy,
                                                    .o = a.o,
                                                    .gate = gate,
                                                    .w = x.o_norm,
                                                    .r = r,
                                                    .do_ = do_,
                                                    .dgate = a.dgate.reshape(heads),
                                                    .dw = a.do_norm});
  }
  const Inputs in(ctx, x);
  const Tensor dq = ctx.scratch.take(storage, heads), dk = ctx.scratch.take(storage, heads), dv = ctx.scratch.take(storage, heads);
  const Tensor dg = ctx.scratch.take(real, heads), dbeta = ctx.scratch.take(real, head);
  cpu::kda(ctx, KdaBackward{.do_ = do_,
                            .q = in.q,
                            .k = in.k,
                            .v = in.v,
                            .g = in.g,
                            .beta = in.beta,
                            .scale = x.scale,
                            .bounded_gate = x.bounded_gate(),
                            .documents = x.documents,
                            .initial_state = x.initial_state,
                            .dfinal_state = a.dfinal_state,
                            .dq = dq,
                            .dk = dk,
                            .dv = dv,
                            .dg = dg,
                            .dbeta = dbeta,
                            .dinitial_state = a.dinitial_state});
  cpu::kda_gate(ctx, KdaGateBackward{.dg = dg,
                                     .dbeta = dbeta,
                                     .f = x.f.reshape(heads),
                                     .a_log = x.a_log,
                                     .dt_bias = x.dt_bias,
                                     .beta = in.beta,
                                     .lower_bound = x.lower_bound,
                                     .df = a.df.reshape(heads),
                                     .db = a.db,
                                     .da_log = a.da_log,
                                     .ddt_bias = a.ddt_bias});
  if (!ctx.dry()) {
    cpu::head_l2(ctx, HeadL2Backward{.dy = dq, .y = in.q, .r = in.q_r, .dx = dq});
    cpu::head_l2(ctx, HeadL2Backward{.dy = dk, .y = in.k, .r = in.k_r, .dx = dk});
  }
  auto convolve = [&](Tensor dy, ConstTensor u, ConstTensor w, Tensor du, Tensor dw) {
    cpu::short_conv(ctx,
                    ShortConvBackward{.dy = dy.reshape(u.shape), .u = u, .w = w, .du = du, .dw = dw, .documents = x.documents});
  };
  convolve(dq, x.q_in, x.q_conv, a.dq_in, a.dq_conv);
  convolve(dk, x.k_in, x.k_conv, a.dk_in, a.dk_conv);
  convolve(dv, x.v_in, x.v_conv, a.dv_in, a.dv_conv);
}

}  // namespace moetrain::ops
