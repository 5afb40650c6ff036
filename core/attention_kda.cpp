// attention_kda.cpp -- the order of the KDA sub-layer's operators, forward and backward.
#include "core/attention_kda.h"

#include <algorithm>

#include "core/projection.h"
#include "ops/elementwise.h"

namespace moetrain::core {
namespace {
constexpr double kL2Eps = 1e-6;
}

AttentionKda::AttentionKda(const ModelConfig& m, ParamTable& table, int layer, const std::string& prefix, int tensor_ranks)
    : N_(m.linear_attn.num_heads / tensor_ranks),
      H_(m.linear_attn.head_dim),
      P_(N_ * H_),
      taps_(m.linear_attn.short_conv_kernel_size),
      full_gate_(m.linear_attn.use_full_rank_gate),
      lower_bound_(m.linear_attn.gate_lower_bound),
      norm_eps_(m.rms_norm_eps) {
  const std::int64_t D = m.hidden_size, N = m.linear_attn.num_heads, P = N * H_;  // of all ranks
  auto matrix = [&](const std::string& name, std::int64_t out, std::int64_t in, Cut cut) {
    return table.add({.name = prefix + name + ".weight", .shape = {out, in}, .layer = layer, .cut = cut});
  };
  auto pinned = [&](const std::string& name, Shape shape, Init init, Cut cut) {
    return table.add(
        {.name = prefix + name, .shape = shape, .init = init, .decay = false, .pinned = true, .layer = layer, .cut = cut});
  };
  auto stream = [&](const std::string& letter) {
    const int proj = matrix(letter + "_proj", P, D, Cut::rows);
    return Stream{proj, pinned(letter + "_conv1d.weight", {P, 1, taps_}, Init::fan_in, Cut::rows)};
  };
  q_ = stream("q");
  k_ = stream("k");
  v_ = stream("v");
  a_log_ = pinned("A_log", {N}, lower_bound_ ? Init::zero : Init::log_decay, Cut::rows);
  dt_bias_ = pinned("dt_bias", {P}, Init::dt_bias, Cut::rows);
  f_a_ = matrix("f_a_proj", H_, D, Cut::none);
  f_b_ = matrix("f_b_proj", P, H_, Cut::rows);
  b_ = matrix("b_proj", N, D, Cut::rows);
  if (full_gate_) {
    g_ = matrix("g_proj", P, D, Cut::rows);
  } else {
    g_a_ = matrix("g_a_proj", H_, D, Cut::none);
    g_b_ = matrix("g_b_proj", P, H_, Cut::rows);
  }
  o_norm_ = pinned("o_norm.weight", {H_}, Init::one, Cut::none);
  o_proj_ = matrix("o_proj", D, P, Cut::columns);
}

ops::KdaAttention AttentionKda::inputs(Pass& pass, const Kept& k) const {
  return {.q_in = k.q_in,
          .k_in = k.k_in,
          .v_in = k.v_in,
          .f = k.f,
          .b = k.b,
          .gate = k.gate,
          .q_conv = pass.params.weight(q_.conv),
          .k_conv = pass.params.weight(k_.conv),
          .v_conv = pass.params.weight(v_.conv),
          .a_log = pass.params.weight(a_log_),
          .dt_bias = pass.params.weight(dt_bias_).reshape({N_, H_}),
          .o_norm = pass.params.weight(o_norm_),
          .lower_bound = lower_bound_,
          .scale = 1 / std::sqrt(double(H_)),
          .l2_eps = kL2Eps,
          .norm_eps = norm_eps_,
          .documents = pass.batch->documents,
          .initial_state = k.state,
          .history = k.history};
}

// Calls body(stream, first row, end row, its rows in `tails`) for what the next rank's convolutions need of this one's q_in, k_in and
// v_in: the last taps - 1 rows of each document that goes on there, or all that it has.
template <class Body>
void AttentionKda::for_each_tail(Pass& pass, Tensor tails, Body&& body) const {
  const auto& documents = pass.batch->documents;
  const std::int64_t B = pass.batch->B(), rows = taps_ - 1;
  const Tensor all = tails.reshape({3 * B * rows, P_});
  for (std::int64_t n = 0; n < documents.count(); ++n) {
    if (documents.leaves(n) < 0) continue;
    const std::int64_t end = documents.end(n), begin = std::max(documents.begin(n), end - rows);
    for (std::int64_t stream = 0; stream < 3; ++stream) {
      const std::int64_t last = (stream * B + documents.leaves(n) + 1) * rows;
      body(stream, begin, end, all.rows(last - (end - begin), last));
    }
  }
}

// All ranks find their slices' maps of the state at once; only these travel, and each rank applies those before its own.
void AttentionKda::enter_slices(Pass& pass, Kept& k) const {
  auto& ctx = pass.ctx;
  auto& sequence = *pass.sequence;
  const std::int64_t B = pass.batch->B();
  k.history = pass.keep({3, B, taps_ - 1, P_});
  const Tensor state = pass.keep_real({B, N_, H_, H_});
  Scope scope(ctx.scratch);
  const Tensor tails = ctx.scratch.zeros(pass.dtype, k.history.shape), streams[3] = {k.q_in, k.k_in, k.v_in};
  for_each_tail(pass, tails, [&](std::int64_t stream, std::int64_t begin, std::int64_t end, Tensor to) {
    ops::copy(ctx, ops::Copy{.x = streams[stream].rows(begin, end), .y = to});
  });
  sequence.shift(ctx, 1, tails, k.history);
  const Tensor map = pass.scratch_real({B, N_, H_, 2 * H_}), maps = pass.scratch_real({sequence.ranks() * B, N_, H_, 2 * H_});
  ops::kda_attention(ctx, ops::KdaAttentionMap{.x = inputs(pass, k), .map = map});
  sequence.gather(map, maps);
  ops::kda_fold(ctx, ops::KdaFold{.maps = maps, .first = 0, .end = sequence.rank(), .state = state});
  k.state = state;
}

// The gradient of the states that leave, by the slices behind; likewise.
Tensor AttentionKda::leave_slices_backward(Pass& pass, const Kept& k, ConstTensor dnormed) const {
  auto& ctx = pass.ctx;
  auto& sequence = *pass.sequence;
  const Tensor dstate = pass.scratch_real(k.state.shape);
  Scope scope(ctx.scratch);
  const std::int64_t B = pass.batch->B();
  const Tensor map = pass.scratch_real({B, N_, H_, 2 * H_}), maps = pass.scratch_real({sequence.ranks() * B, N_, H_, 2 * H_});
  ops::KdaAttention from_zero = inputs(pass, k);
  from_zero.initial_state = {};
  ops::kda_attention(ctx, ops::KdaAttentionMapBackward{.x = from_zero, .dy = dnormed, .o = k.o, .map = map});
  sequence.gather(map, maps);
  ops::kda_fold(ctx, ops::KdaFold{.maps = maps, .first = sequence.ranks() - 1, .end = sequence.rank(), .state = dstate});
  return dstate;
}

void AttentionKda::forward(Pass& pass, ConstTensor x, Kept& k, Tensor y) const {
  const std::int64_t T = pass.T();
  const Shape wide{T, P_}, low{T, H_}, heads{T, N_, H_};
  k = {};
  auto project_into = [&](int projection, ConstTensor from, Tensor& to, Shape shape) {
    project_result(pass, projection, from, to, shape);
  };
  project_into(q_.proj, x, k.q_in, wide);
  project_into(k_.proj, x, k.k_in, wide);
  project_into(v_.proj, x, k.v_in, wide);
  project_into(f_a_, x, k.f_low, low);
  project_into(f_b_, k.f_low, k.f, wide);
  project_into(b_, x, k.b, {T, N_});
  if (full_gate_) {
    project_into(g_, x, k.gate, wide);
  } else {
    project_into(g_a_, x, k.gate_low, low);
    project_into(g_b_, k.gate_low, k.gate, wide);
  }
  if (pass.sequence) enter_slices(pass, k);
  {
    auto result = pass.result(ResultOp::kda, {{&k.o, pass.dtype, heads}, {&k.normed, pass.dtype, heads}});
    result.compute([&] {
      ops::kda_attention(pass.ctx, ops::KdaAttentionForward{.x = inputs(pass, k), .o = k.o, .y = k.normed, .final_state = {}});
    });
  }
  project_result(pass, o_proj_, k.normed.reshape(wide), y, y.shape, y.dtype);
}

void AttentionKda::backward(Pass& pass, ConstTensor x, const Kept& k, ConstTensor dy, Tensor dx) const {
  auto& ctx = pass.ctx;
  Scope scope(ctx.scratch);
  const std::int64_t T = pass.T();
  const Shape wide{T, P_};
  const Tensor dq_in = pass.scratch(wide), dk_in = pass.scratch(wide), dv_in = pass.scratch(wide), df = pass.scratch(wide),
               dgate = pass.scratch(wide), db = pass.scratch({T, N_});
  {
    Scope normed(ctx.scratch);
    const Tensor dnormed = pass.scratch(wide), ddt_bias = pass.params.gradient(dt_bias_);
    project_backward(pass, o_proj_, dy, k.normed.reshape(wide), dnormed);
    const Tensor dstate = pass.sequence ? leave_slices_backward(pass, k, dnormed.reshape(k.o.shape)) : Tensor{};
    const Tensor dhistory = pass.sequence ? pass.scratch(k.history.shape) : Tensor{};
    ops::kda_attention(ctx, ops::KdaAttentionBackward{.x = inputs(pass, k),
                                                      .dy = dnormed.reshape(k.o.shape),
                                                      .o = k.o,
                                                      .dfinal_state = dstate,
                                                      .dq_in = dq_in,
                                                      .dk_in = dk_in,
                                                      .dv_in = dv_in,
                                                      .df = df,
                                                      .db = db,
                                                      .dgate = dgate,
                                                      .dq_conv = pass.params.gradient(q_.conv),
                                                      .dk_conv = pass.params.gradient(k_.conv),
                                                      .dv_conv = pass.params.gradient(v_.conv),
                                                      .da_log = pass.params.gradient(a_log_),
                                                      .ddt_bias = ddt_bias.present() ? ddt_bias.reshape({N_, H_}) : ddt_bias,
                                                      .do_norm = pass.params.gradient(o_norm_),
                                                      .dinitial_state = {},
                                                      .dhistory = dhistory});
    if (pass.sequence) {
      const Tensor tails = pass.scratch(dhistory.shape), streams[3] = {dq_in, dk_in, dv_in};
      pass.sequence->shift(ctx, -1, dhistory, tails);
      for_each_tail(pass, tails, [&](std::int64_t stream, std::int64_t begin, std::int64_t end, Tensor from) {
        ops::add(ctx, ops::Add{.x = from, .y = streams[stream].rows(begin, end)});
      });
    }
  }
  auto back = [&](int projection, ConstTensor from, ConstTensor in, Tensor to, bool add) {
    project_backward(pass, projection, from, in, to, add);
  };
  Scope low(ctx.scratch);
  const Tensor dlow = pass.scratch({T, H_});
  if (full_gate_) {
    back(g_, dgate, x, dx, false);
  } else {
    back(g_b_, dgate, k.gate_low, dlow, false);
    back(g_a_, dlow, x, dx, false);
  }
  back(b_, db, x, dx, true);
  back(f_b_, df, k.f_low, dlow, false);
  back(f_a_, dlow, x, dx, true);
  back(q_.proj, dq_in, x, dx, true);
  back(k_.proj, dk_in, x, dx, true);
  back(v_.proj, dv_in, x, dx, true);
}

}  // namespace moetrain::core
