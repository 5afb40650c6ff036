// kda_attention.cpp -- what kda_attention refuses, and the temporaries of its CUDA backend, which a dry run counts too.
#include "ops/kda_attention.h"

#include <algorithm>

#include "ops/kda.h"

namespace moetrain::ops {

void KdaAttention::check_shapes() const {
  check(q_in.shape.rank() == 2 && a_log.shape.rank() == 1 && dt_bias.shape.rank() == 2,
        "kda_attention: q_in is not (T, P), a_log not (N) or dt_bias not (N, H)",
        {{"q_in", q_in.shape.rank()}, {"a_log", a_log.shape.rank()}, {"dt_bias", dt_bias.shape.rank()}});
  const auto real = real_of(q_in.dtype);
  check(is_floating(q_in.dtype) && P() == N() * H() && dt_bias.shape == Shape{N(), H()}, "kda_attention: P is not N H",
        {{"P", P()}, {"N", N()}, {"H", H()}});
  for (const ConstTensor& t : {k_in, v_in, f, gate})
    check(t.shape == q_in.shape && t.dtype == q_in.dtype, "kda_attention: k_in, v_in, f or gate does not fit q_in",
          {{"q_in", q_in.count()}, {"it", t.count()}});
  check(b.shape == Shape{T(), N()} && b.dtype == q_in.dtype, "kda_attention: b is not (T, N)", {{"T", T()}, {"N", N()}});
  check(q_conv.shape.rank() == 3 && q_conv.shape == Shape{P(), 1, q_conv.shape[2]} && q_conv.shape[2] >= 1,
        "kda_attention: q_conv is not (P, 1, k)", {{"P", P()}, {"q_conv", q_conv.count()}});
  for (const ConstTensor& t : {q_conv, k_conv, v_conv})
    check(t.shape == q_conv.shape && t.dtype == real, "kda_attention: k_conv or v_conv does not fit q_conv, or they are not real",
          {{"q_conv", q_conv.count()}, {"it", t.count()}});
  check(a_log.dtype == real && dt_bias.dtype == real && o_norm.dtype == real && o_norm.shape == Shape{H()},
        "kda_attention: o_norm is not (H), or a_log, dt_bias or o_norm is not real", {{"H", H()}, {"o_norm", o_norm.count()}});
  check(!lower_bound || *lower_bound < 0, "kda_attention: lower_bound is not negative");
  documents.check_cover(T());
  check(!initial_state.present() || (initial_state.shape == states() && initial_state.dtype == real),
        "kda_attention: initial_state is not (states, N, H, H) real",
        {{"states", states().count()}, {"it", initial_state.count()}});
  check(!history.present() || (history.shape == histories() && history.dtype == q_in.dtype),
        "kda_attention: history is not (3, states, k-1, P) of q_in's type",
        {{"histories", histories().count()}, {"it", history.count()}});
}

void KdaAttentionForward::check_shapes() const {
  x.check_shapes();
  for (const Tensor& t : {o, y})
    check(t.shape == Shape{x.T(), x.N(), x.H()} && t.dtype == x.q_in.dtype, "kda_attention: o or y is not (T, N, H)",
          {{"T", x.T()}, {"N", x.N()}, {"H", x.H()}, {"it", t.count()}});
  check(!final_state.present() || (final_state.shape == x.states() && final_state.dtype == real_of(x.q_in.dtype)),
        "kda_attention: final_state is not (states, N, H, H) real",
        {{"states", x.states().count()}, {"it", final_state.count()}});
}

namespace {

void check_map(const KdaAttention& x, ConstTensor map) {
  x.check_shapes();
  check(!x.initial_state.present() && map.shape == x.maps() && map.dtype == real_of(x.q_in.dtype),
        "kda_attention: map is not (states, N, H, 2 H) real, or a state is given", {{"maps", x.maps().count()}, {"it", map.count()}});
}

}  // namespace

void KdaAttentionMap::check_shapes() const { check_map(x, map); }
void KdaAttentionMapBackward::check_shapes() const {
  check_map(x, map);
  for (const ConstTensor& t : {dy, o})
    check(t.shape == Shape{x.T(), x.N(), x.H()} && t.dtype == x.q_in.dtype, "kda_attention: dy or o is not (T, N, H)",
          {{"T", x.T()}, {"N", x.N()}, {"H", x.H()}, {"it", t.count()}});
}

void KdaFold::check_shapes() const {
  check(maps.shape.rank() == 4 && state.shape.rank() == 4, "kda_fold: maps and state are not of rank 4",
        {{"maps", maps.shape.rank()}, {"state", state.shape.rank()}});
  const Shape s = state.shape;
  const std::int64_t most = s[0] > 0 ? maps.shape[0] / s[0] : std::max(first, end) + 1;
  check(s[2] == s[3] && maps.shape == Shape{most * s[0], s[1], s[2], 2 * s[2]} && maps.dtype == state.dtype,
        "kda_fold: maps are not (maps states, N, H, 2 H) of the type of state", {{"maps", maps.count()}, {"state", state.count()}});
  check(first >= 0 && first <= most && end >= -1 && end <= most && (first < most || end >= first), "kda_fold: no such maps",
        {{"first", first}, {"end", end}, {"maps", most}});
}

void KdaAttentionBackward::check_shapes() const {
  x.check_shapes();
  const auto real = real_of(x.q_in.dtype);
  for (const ConstTensor& t : {dy, o})
    check(t.shape == Shape{x.T(), x.N(), x.H()} && t.dtype == x.q_in.dtype, "kda_attention: dy or o is not (T, N, H)",
          {{"T", x.T()}, {"N", x.N()}, {"H", x.H()}, {"it", t.count()}});
  for (const Tensor& t : {dq_in, dk_in, dv_in, df, dgate})
    check(t.shape == x.q_in.shape && t.dtype == x.q_in.dtype, "kda_attention: a gradient does not fit its input",
          {{"input", x.q_in.count()}, {"gradient", t.count()}});
  check(db.shape == x.b.shape && db.dtype == x.b.dtype, "kda_attention: db does not fit b",
        {{"b", x.b.count()}, {"db", db.count()}});
  auto fits = [&](const Tensor& gradient, const ConstTensor& parameter) {
    check(!gradient.present() || (gradient.shape == parameter.shape && gradient.dtype == real),
          "kda_attention: a gradient does not fit its parameter",
          {{"parameter", parameter.count()}, {"gradient", gradient.count()}});
  };
  fits(dq_conv, x.q_conv);
  fits(dk_conv, x.k_conv);
  fits(dv_conv, x.v_conv);
  fits(da_log, x.a_log);
  fits(ddt_bias, x.dt_bias);
  fits(do_norm, x.o_norm);
  for (const ConstTensor& t : {dfinal_state, ConstTensor(dinitial_state)})
    check(!t.present() || (t.shape == x.states() && t.dtype == real),
          "kda_attention: dfinal_state or dinitial_state is not (states, N, H, H) real",
          {{"states", x.states().count()}, {"it", t.count()}});
  check(!dhistory.present() || (dhistory.shape == x.histories() && dhistory.dtype == x.q_in.dtype),
        "kda_attention: dhistory does not fit history", {{"histories", x.histories().count()}, {"it", dhistory.count()}});
}

std::int64_t KdaAttention::slots() const { return T() / kKdaChunk + documents.count(); }

KdaTiles::KdaTiles(Stack& scratch, const KdaAttention& x, For pass) : slots(x.slots()), width(x.H() <= 32 ? 32 : 128) {
  const auto N = x.N(), P = x.P();
  const auto storage = x.q_in.dtype;
  const Shape by_row{slots, N, kKdaChunk, width}, columns{slots, N, width, kKdaChunk}, pairs{slots, N, kKdaChunk, kKdaChunk},
      square{slots, N, width, width};
  for (Tensor* tile : {&w, &q, &k}) *tile = scratch.take(storage, by_row);
  u = scratch.take(storage, columns);
  p = scratch.take(storage, pairs);
  decay = scratch.take(DType::f32, {slots, N, width});
  if (pass == For::forward) return;
  do_ = scratch.take(storage, columns);
  if (pass == For::map_backward) return;
  t = scratch.take(storage, pairs);
  s = scratch.take(storage, square);
  ds = scratch.take(storage, square);
  dr = scratch.take(storage, columns);
  rows = scratch.take(DType::f32, {slots, N, 4, kKdaChunk});
  const Shape reals{slots, N, kKdaChunk, width};
  const bool fits =
      s.bytes() == reals.count() * size_of(DType::f32);  // then tile by tile: a block overwrites what only it has read
  dg = fits ? Tensor(s.data, DType::f32, reals) : scratch.take(DType::f32, reals);
  dx = fits ? Tensor(ds.data, DType::f32, reals) : scratch.take(DType::f32, reals);
  edge = scratch.take(DType::f32, {slots, 3, 3, P});
  conv_parts = scratch.take(DType::f32, {slots, 3, P, 4});
  bias_parts = scratch.take(DType::f32, {slots, P});
  a_log_parts = scratch.take(DType::f32, {slots, N});
  norm_parts = scratch.take(DType::f32, {slots, N, x.H()});
}

void KdaAttentionForward::take_scratch(Context& ctx) const {
  if (ctx.plans_for == Device::cuda) KdaTiles(ctx.scratch, x, KdaTiles::For::forward);
}
void KdaAttentionBackward::take_scratch(Context& ctx) const {
  if (ctx.plans_for == Device::cuda) KdaTiles(ctx.scratch, x, KdaTiles::For::backward);
}
void KdaAttentionMap::take_scratch(Context& ctx) const {
  if (ctx.plans_for == Device::cuda) KdaTiles(ctx.scratch, x, KdaTiles::For::forward);
}
void KdaAttentionMapBackward::take_scratch(Context& ctx) const {
  if (ctx.plans_for == Device::cuda) KdaTiles(ctx.scratch, x, KdaTiles::For::map_backward);
}

}  // namespace moetrain::ops
