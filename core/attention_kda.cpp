// attention_kda.cpp -- the order of the KDA sub-layer's operators, forward and backward.
#include "core/attention_kda.h"

#include "core/projection.h"
#include "ops/head_norm.h"
#include "ops/kda.h"
#include "ops/kda_gate.h"
#include "ops/short_conv.h"

namespace moetrain::core {
namespace {
constexpr double kL2Eps = 1e-6;
}

AttentionKda::AttentionKda(const ModelConfig& m, ParamTable& table, int layer, const std::string& prefix)
    : N_(m.linear_attn.num_heads),
      H_(m.linear_attn.head_dim),
      P_(N_ * H_),
      full_gate_(m.linear_attn.use_full_rank_gate),
      lower_bound_(m.linear_attn.gate_lower_bound),
      norm_eps_(m.rms_norm_eps) {
  const std::int64_t D = m.hidden_size, taps = m.linear_attn.short_conv_kernel_size;
  auto matrix = [&](const char* name, std::int64_t out, std::int64_t in) {
    return table.add({.name = prefix + name + ".weight", .shape = {out, in}, .layer = layer});
  };
  auto pinned = [&](const std::string& name, Shape shape, Init init) {
    return table.add({.name = prefix + name, .shape = shape, .init = init, .decay = false, .pinned = true, .layer = layer});
  };
  auto stream = [&](const std::string& letter) {
    const int proj = matrix((letter + "_proj").c_str(), P_, D);
    return Stream{proj, pinned(letter + "_conv1d.weight", {P_, 1, taps}, Init::conv)};
  };
  q_ = stream("q");
  k_ = stream("k");
  v_ = stream("v");
  a_log_ = pinned("A_log", {N_}, lower_bound_ ? Init::zero : Init::log_decay);
  dt_bias_ = pinned("dt_bias", {P_}, Init::dt_bias);
  f_a_ = matrix("f_a_proj", H_, D);
  f_b_ = matrix("f_b_proj", P_, H_);
  b_ = matrix("b_proj", N_, D);
  if (full_gate_) {
    g_ = matrix("g_proj", P_, D);
  } else {
    g_a_ = matrix("g_a_proj", H_, D);
    g_b_ = matrix("g_b_proj", P_, H_);
  }
  o_norm_ = pinned("o_norm.weight", {H_}, Init::one);
  o_proj_ = matrix("o_proj", D, P_);
}

void AttentionKda::convolve(Pass& pass, Stream s, ConstTensor x, Tensor in, Tensor y) const {
  project(pass, s.proj, x, in);
  ops::short_conv(pass.ctx,
                  ops::ShortConvForward{.u = in, .w = pass.params.weight(s.conv), .y = y, .documents = pass.batch.documents});
}

void AttentionKda::convolve_backward(Pass& pass, Stream s, ConstTensor dy, ConstTensor in, ConstTensor x, Tensor dx,
                                     bool add_dx) const {
  Scope scope(pass.ctx.scratch);
  const Tensor din = pass.scratch({pass.T(), P_});
  ops::short_conv(pass.ctx, ops::ShortConvBackward{.dy = dy,
                                                   .u = in,
                                                   .w = pass.params.weight(s.conv),
                                                   .du = din,
                                                   .dw = pass.params.gradient(s.conv),
                                                   .documents = pass.batch.documents});
  project_backward(pass, s.proj, din, x, dx, add_dx);
}

void AttentionKda::forward(Pass& pass, ConstTensor x, Kept& k, Tensor y) const {
  auto& ctx = pass.ctx;
  const std::int64_t T = pass.T();
  const Shape wide{T, P_}, heads{T, N_, H_}, head{T, N_};
  k.x = x;
  k.q_in = pass.keep(wide);
  k.k_in = pass.keep(wide);
  k.v_in = pass.keep(wide);
  k.q = pass.keep(heads);
  k.k = pass.keep(heads);
  k.v = pass.keep(heads);
  k.q_r = pass.keep_real(head);
  k.k_r = pass.keep_real(head);
  convolve(pass, q_, x, k.q_in, k.q.reshape(wide));
  convolve(pass, k_, x, k.k_in, k.k.reshape(wide));
  convolve(pass, v_, x, k.v_in, k.v.reshape(wide));
  ops::head_l2(ctx, ops::HeadL2Forward{.x = k.q, .y = k.q, .r = k.q_r, .eps = kL2Eps});
  ops::head_l2(ctx, ops::HeadL2Forward{.x = k.k, .y = k.k, .r = k.k_r, .eps = kL2Eps});

  k.f_low = pass.keep({T, H_});
  k.f = pass.keep(wide);
  k.g = pass.keep_real(heads);
  k.beta = pass.keep_real(head);
  project(pass, f_a_, x, k.f_low);
  project(pass, f_b_, k.f_low, k.f);
  {
    Scope scope(ctx.scratch);
    const Tensor b = pass.scratch(head);
    project(pass, b_, x, b);
    ops::kda_gate(ctx, ops::KdaGateForward{.f = k.f.reshape(heads),
                                           .a_log = pass.params.weight(a_log_),
                                           .dt_bias = pass.params.weight(dt_bias_).reshape({N_, H_}),
                                           .b = b,
                                           .lower_bound = lower_bound_,
                                           .g = k.g,
                                           .beta = k.beta});
  }
  k.o = pass.keep(heads);
  ops::kda(ctx, ops::KdaForward{.q = k.q,
                                .k = k.k,
                                .v = k.v,
                                .g = k.g,
                                .beta = k.beta,
                                .scale = 1 / std::sqrt(double(H_)),
                                .bounded_gate = lower_bound_.has_value(),
                                .documents = pass.batch.documents,
                                .initial_state = {},
                                .o = k.o,
                                .final_state = {}});
  k.gate = pass.keep(wide);
  if (full_gate_) {
    project(pass, g_, x, k.gate);
  } else {
    k.gate_low = pass.keep({T, H_});
    project(pass, g_a_, x, k.gate_low);
    project(pass, g_b_, k.gate_low, k.gate);
  }
  k.normed = pass.keep(wide);
  k.o_r = pass.keep_real(head);
  ops::gated_head_norm(ctx, ops::GatedHeadNormForward{.o = k.o,
                                                      .gate = k.gate.reshape(heads),
                                                      .w = pass.params.weight(o_norm_),
                                                      .y = k.normed.reshape(heads),
                                                      .r = k.o_r,
                                                      .eps = norm_eps_});
  project(pass, o_proj_, k.normed, y);
}

void AttentionKda::backward(Pass& pass, const Kept& k, ConstTensor dy, Tensor dx) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const std::int64_t T = pass.T();
  const Shape wide{T, P_}, heads{T, N_, H_}, head{T, N_};

  const Tensor do_ = pass.scratch(heads), dgate = pass.scratch(wide);
  project_backward(pass, o_proj_, dy, k.normed, do_.reshape(wide));
  ops::gated_head_norm(ctx, ops::GatedHeadNormBackward{.dy = do_,
                                                       .o = k.o,
                                                       .gate = k.gate.reshape(heads),
                                                       .w = pass.params.weight(o_norm_),
                                                       .r = k.o_r,
                                                       .do_ = do_,
                                                       .dgate = dgate.reshape(heads),
                                                       .dw = pass.params.gradient(o_norm_)});
  if (full_gate_) {
    project_backward(pass, g_, dgate, k.x, dx);
  } else {
    Scope low(ctx.scratch);
    const Tensor dgate_low = pass.scratch({T, H_});
    project_backward(pass, g_b_, dgate, k.gate_low, dgate_low);
    project_backward(pass, g_a_, dgate_low, k.x, dx);
  }

  const Tensor dq = pass.scratch(heads), dk = pass.scratch(heads), dv = pass.scratch(heads);
  const Tensor dg = pass.scratch_real(heads), dbeta = pass.scratch_real(head);
  ops::kda(ctx, ops::KdaBackward{.do_ = do_,
                                 .q = k.q,
                                 .k = k.k,
                                 .v = k.v,
                                 .g = k.g,
                                 .beta = k.beta,
                                 .scale = 1 / std::sqrt(double(H_)),
                                 .bounded_gate = lower_bound_.has_value(),
                                 .documents = pass.batch.documents,
                                 .initial_state = {},
                                 .dfinal_state = {},
                                 .dq = dq,
                                 .dk = dk,
                                 .dv = dv,
                                 .dg = dg,
                                 .dbeta = dbeta,
                                 .dinitial_state = {}});
  {
    Scope gates(ctx.scratch);
    const Tensor df = pass.scratch(wide), db = pass.scratch(head), df_low = pass.scratch({T, H_});
    const Tensor ddt_bias = pass.params.gradient(dt_bias_);
    ops::kda_gate(ctx, ops::KdaGateBackward{.dg = dg,
                                            .dbeta = dbeta,
                                            .f = k.f.reshape(heads),
                                            .a_log = pass.params.weight(a_log_),
                                            .dt_bias = pass.params.weight(dt_bias_).reshape({N_, H_}),
                                            .beta = k.beta,
                                            .lower_bound = lower_bound_,
                                            .df = df.reshape(heads),
                                            .db = db,
                                            .da_log = pass.params.gradient(a_log_),
                                            .ddt_bias = ddt_bias.present() ? ddt_bias.reshape({N_, H_}) : ddt_bias});
    project_backward(pass, b_, db, k.x, dx, true);
    project_backward(pass, f_b_, df, k.f_low, df_low);
    project_backward(pass, f_a_, df_low, k.x, dx, true);
  }
  ops::head_l2(ctx, ops::HeadL2Backward{.dy = dq, .y = k.q, .r = k.q_r, .dx = dq});
  ops::head_l2(ctx, ops::HeadL2Backward{.dy = dk, .y = k.k, .r = k.k_r, .dx = dk});
  convolve_backward(pass, q_, dq.reshape(wide), k.q_in, k.x, dx, true);
  convolve_backward(pass, k_, dk.reshape(wide), k.k_in, k.x, dx, true);
  convolve_backward(pass, v_, dv.reshape(wide), k.v_in, k.x, dx, true);
}

}  // namespace moetrain::core
