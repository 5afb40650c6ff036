// ops/cpu/kda_attention.cpp -- the sub-layer as a composition of its parts; backward runs the cheap parts of forward again.
#include "ops/kda_attention.h"

#include <algorithm>

#include "ops/cpu/gemm.h"
#include "ops/cpu/types.h"
#include "ops/head_norm.h"
#include "ops/kda.h"
#include "ops/kda_gate.h"
#include "ops/short_conv.h"

namespace moetrain::ops {
namespace {

ConstTensor history_of(const KdaAttention& x, std::int64_t stream) {
  return x.history.present() ? x.history.rows(stream, stream + 1).reshape({x.histories()[1], x.histories()[2], x.P()}) : ConstTensor{};
}

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
    auto convolve = [&](std::int64_t stream, ConstTensor u, ConstTensor w, Tensor y) {
      cpu::short_conv(ctx, ShortConvForward{.u = u,
                                            .w = w,
                                            .y = y.reshape(u.shape),
                                            .documents = x.documents,
                                            .history = history_of(x, stream)});
    };
    convolve(0, x.q_in, x.q_conv, q);
    convolve(1, x.k_in, x.k_conv, k);
    convolve(2, x.v_in, x.v_conv, v);
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

// The gradient of o, and of gate and the norm's weight where they are wanted.
void output_backward(Context& ctx, const KdaAttention& x, ConstTensor dy, ConstTensor o, Tensor do_, Tensor dgate, Tensor do_norm) {
  Scope scope(ctx.scratch);
  const Tensor y = ctx.scratch.take(o.dtype, o.shape), r = ctx.scratch.take(real_of(o.dtype), {x.T(), x.N()});
  const ConstTensor gate = x.gate.reshape(o.shape);
  if (!ctx.dry())
    cpu::gated_head_norm(ctx, GatedHeadNormForward{.o = o, .gate = gate, .w = x.o_norm, .y = y, .r = r, .eps = x.norm_eps});
  cpu::gated_head_norm(
      ctx, GatedHeadNormBackward{
               .dy = dy, .o = o, .gate = gate, .w = x.o_norm, .r = r, .do_ = do_, .dgate = dgate.reshape(o.shape), .dw = do_norm});
}

// An affine map is the delta rule on columns side by side: what the tokens put in, from zero, and what becomes of the identity when
// they put in nothing.
Tensor beside_zeros(Context& ctx, ConstTensor x) {
  const auto rows = x.shape[0] * x.shape[1], H = x.shape[2];
  const Tensor wide = ctx.scratch.take(x.dtype, {x.shape[0], x.shape[1], 2 * H});
  if (ctx.dry()) return wide;
  const auto bytes = std::size_t(H * size_of(x.dtype));
  for (std::int64_t i = 0; i < rows; ++i) {
    auto* to = static_cast<std::byte*>(wide.data) + std::size_t(2 * i) * bytes;
    std::copy_n(static_cast<const std::byte*>(x.data) + std::size_t(i) * bytes, bytes, to);
    std::fill_n(to + bytes, bytes, std::byte{0});
  }
  return wide;
}
template <class R>
void zero_beside_identity(Tensor state, std::int64_t N, std::int64_t H) {
  std::fill_n(state.as<R>(), state.count(), R(0));
  for (std::int64_t n = 0; n < N; ++n)
    for (std::int64_t d = 0; d < H; ++d) state.as<R>()[((n * H) + d) * 2 * H + H + d] = R(1);
}

// For each document that goes through the slice's start or end, as `through` says: body(its tokens, slice, the state [0 | I] where it
// goes through both, else absent).
template <class Through, class Body>
void for_each_map(Context& ctx, const KdaAttention& x, Tensor map, Through&& through, Body&& body) {
  if (!ctx.dry()) fill(ctx.device(), map.data, 0, map.bytes());
  for (std::int64_t n = 0; n < x.documents.count(); ++n) {
    const std::int64_t slice = through(n);
    if (slice < 0) continue;
    Scope scope(ctx.scratch);
    const Tensor state = ctx.scratch.take(map.dtype, {1, x.N(), x.H(), 2 * x.H()});
    if (!ctx.dry()) map.dtype == DType::f64 ? zero_beside_identity<double>(state, x.N(), x.H()) : zero_beside_identity<float>(state, x.N(), x.H());
    const bool both = x.documents.enters(n) >= 0 && x.documents.leaves(n) >= 0;
    const std::int64_t starts[2] = {0, x.documents.end(n) - x.documents.begin(n)};
    body([&](auto t) { return t.rows(x.documents.begin(n), x.documents.end(n)); }, Documents{starts},
         map.rows(slice, slice + 1), both ? ConstTensor(state) : ConstTensor{});
  }
}

template <class R>
void fold(Context& ctx, const KdaFold& a) {
  const auto H = a.state.shape[2], heads = a.state.shape[0] * a.state.shape[1];
  Scope scope(ctx.scratch);
  const Tensor before = ctx.scratch.take(a.state.dtype, {H, H});
  if (ctx.dry()) return;
  fill(ctx.device(), a.state.data, 0, a.state.bytes());
  const std::int64_t step = a.end < a.first ? -1 : 1;
  for (std::int64_t i = a.first; i != a.end; i += step)
    for (std::int64_t n = 0; n < heads; ++n) {
      const R* map = a.maps.as<R>() + (i * heads + n) * H * 2 * H;
      R *S = a.state.as<R>() + n * H * H, *old = before.as<R>();
      std::copy_n(S, H * H, old);
      for (std::int64_t d = 0; d < H; ++d) std::copy_n(map + d * 2 * H, H, S + d * H);
      cpu::gemm<R>(false, false, H, H, H, R(1), map + H, 2 * H, old, H, R(1), S, H);
    }
}

}  // namespace

void cpu::kda_fold(Context& ctx, const KdaFold& a) { a.state.dtype == DType::f64 ? fold<double>(ctx, a) : fold<float>(ctx, a); }

void cpu::kda_attention(Context& ctx, const KdaAttentionMap& a) {
  Scope scope(ctx.scratch);
  const auto& x = a.x;
  const Inputs in(ctx, x);
  const auto leaves = [&](std::int64_t n) { return x.documents.leaves(n); };
  for_each_map(ctx, x, a.map, leaves, [&](auto&& of, const Documents& document, Tensor map, ConstTensor identity) {
    cpu::kda(ctx, KdaForward{.q = of(in.q),
                             .k = of(in.k),
                             .v = beside_zeros(ctx, of(in.v)),
                             .g = of(in.g),
                             .beta = of(in.beta),
                             .scale = x.scale,
                             .bounded_gate = x.bounded_gate(),
                             .documents = document,
                             .initial_state = identity,
                             .o = {},
                             .final_state = map});
  });
}

void cpu::kda_attention(Context& ctx, const KdaAttentionMapBackward& a) {
  Scope scope(ctx.scratch);
  const auto& x = a.x;
  const Tensor do_ = ctx.scratch.take(a.o.dtype, a.o.shape);
  {
    Scope unwanted(ctx.scratch);
    output_backward(ctx, x, a.dy, a.o, do_, ctx.scratch.take(a.o.dtype, a.o.shape), {});
  }
  const Inputs in(ctx, x);
  const auto enters = [&](std::int64_t n) { return x.documents.enters(n); };
  for_each_map(ctx, x, a.map, enters, [&](auto&& of, const Documents& document, Tensor map, ConstTensor identity) {
    cpu::kda(ctx, KdaStateBackward{.do_ = beside_zeros(ctx, of(do_)),
                                   .q = of(in.q),
                                   .k = of(in.k),
                                   .g = of(in.g),
                                   .beta = of(in.beta),
                                   .scale = x.scale,
                                   .bounded_gate = x.bounded_gate(),
                                   .documents = document,
                                   .dfinal_state = identity,
                                   .dinitial_state = map});
  });
}

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
  output_backward(ctx, x, a.dy, a.o, do_, a.dgate, a.do_norm);
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
  auto convolve = [&](std::int64_t stream, Tensor dy, ConstTensor u, ConstTensor w, Tensor du, Tensor dw) {
    const Shape rows{x.histories()[1], x.histories()[2], x.P()};
    cpu::short_conv(ctx, ShortConvBackward{.dy = dy.reshape(u.shape),
                                           .u = u,
                                           .w = w,
                                           .du = du,
                                           .dw = dw,
                                           .documents = x.documents,
                                           .history = history_of(x, stream),
                                           .dhistory = a.dhistory.present() ? a.dhistory.rows(stream, stream + 1).reshape(rows)
                                                                            : Tensor{}});
  };
  convolve(0, dq, x.q_in, x.q_conv, a.dq_in, a.dq_conv);
  convolve(1, dk, x.k_in, x.k_conv, a.dk_in, a.dk_conv);
  convolve(2, dv, x.v_in, x.v_conv, a.dv_in, a.dv_conv);
}

}  // namespace moetrain::ops
