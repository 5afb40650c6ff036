// kda_gate.h -- log decay g of KDA from f, in both published forms, and beta = sigmoid(b).
//
//   z = f + dt_bias,  a = exp(a_log[n])
//   bounded (lower_bound lb set):  g = lb sg,  sg = sigmoid(a z)          in (lb, 0)
//                                  dz = dg lb a sg (1 - sg);   da_log[n] += sum dz z
//   unbounded:                     g = -a softplus(z)                     in (-inf, 0)
//                                  dz = -a sigmoid(z) dg;      da_log[n] += sum dg g
//   df = dz;  ddt_bias[n,d] += sum_t dz                                   (da_log, ddt_bias add; sums over t, and d for da_log)
//   beta = sigmoid(b);  db = dbeta beta (1 - beta)
//
// The bounded form is another function, not a clamp of the unbounded one. All but da_log and ddt_bias is written; nothing may
// alias. Arithmetic and sums in real. Repeatable; on the CPU also for any number of threads.
#pragma once
#include <optional>

#include "ops/context.h"

namespace moetrain::ops {

struct KdaGateForward {
  ConstTensor f;        // (T, N, H)
  ConstTensor a_log;    // (N) real
  ConstTensor dt_bias;  // (N, H) real
  ConstTensor b;        // (T, N), before the sigmoid
  std::optional<double>
      lower_bound;  // set: g = lower_bound sigmoid(exp(a_log) z); unset: g = -exp(a_log) softplus(z); z = f + dt_bias
  Tensor g;         // (T, N, H) real
  Tensor beta;      // (T, N) real
  void check_shapes() const {
    check(f.shape.rank() == 3, "kda_gate: f is not (T, N, H)", {{"rank", f.shape.rank()}});
    const auto T = f.shape[0], N = f.shape[1], H = f.shape[2];
    const auto real = real_of(f.dtype);
    check(a_log.shape == Shape{N} && a_log.dtype == real, "kda_gate: a_log is not (N) real", {{"N", N}, {"a_log", a_log.count()}});
    check(dt_bias.shape == Shape{N, H} && dt_bias.dtype == real, "kda_gate: dt_bias is not (N, H) real",
          {{"N", N}, {"H", H}, {"dt_bias", dt_bias.count()}});
    check(b.shape == Shape{T, N} && b.dtype == f.dtype, "kda_gate: b is not (T, N)", {{"T", T}, {"N", N}, {"b", b.count()}});
    check(g.shape == f.shape && g.dtype == real, "kda_gate: g is not (T, N, H) real", {{"f", f.count()}, {"g", g.count()}});
    check(beta.shape == b.shape && beta.dtype == real, "kda_gate: beta is not (T, N) real",
          {{"b", b.count()}, {"beta", beta.count()}});
    check(!lower_bound || *lower_bound < 0, "kda_gate: lower_bound is not negative");
  }
};

struct KdaGateBackward {
  ConstTensor dg;       // (T, N, H) real
  ConstTensor dbeta;    // (T, N) real
  ConstTensor f;        // (T, N, H)
  ConstTensor a_log;    // (N) real
  ConstTensor dt_bias;  // (N, H) real
  ConstTensor beta;     // (T, N) real
  std::optional<double> lower_bound;
  Tensor df;        // (T, N, H)
  Tensor db;        // (T, N)
  Tensor da_log;    // (N) real; adds; absent: frozen
  Tensor ddt_bias;  // (N, H) real; adds; absent: frozen
  static constexpr bool dry_on_cpu = true;  // ops/context.h
  void check_shapes() const {
    check(f.shape.rank() == 3, "kda_gate: f is not (T, N, H)", {{"rank", f.shape.rank()}});
    const auto T = f.shape[0], N = f.shape[1], H = f.shape[2];
    const auto real = real_of(f.dtype);
    check(a_log.shape == Shape{N} && a_log.dtype == real, "kda_gate: a_log is not (N) real", {{"N", N}, {"a_log", a_log.count()}});
    check(dt_bias.shape == Shape{N, H} && dt_bias.dtype == real, "kda_gate: dt_bias is not (N, H) real",
          {{"N", N}, {"H", H}, {"dt_bias", dt_bias.count()}});
    check(dg.shape == f.shape && dg.dtype == real, "kda_gate: dg is not (T, N, H) real", {{"f", f.count()}, {"dg", dg.count()}});
    check(df.shape == f.shape && df.dtype == f.dtype, "kda_gate: df does not fit f", {{"f", f.count()}, {"df", df.count()}});
    check(beta.shape == Shape{T, N} && beta.dtype == real, "kda_gate: beta is not (T, N) real",
          {{"T", T}, {"N", N}, {"beta", beta.count()}});
    check(dbeta.shape == beta.shape && dbeta.dtype == real, "kda_gate: dbeta does not fit beta",
          {{"beta", beta.count()}, {"dbeta", dbeta.count()}});
    check(db.shape == beta.shape && db.dtype == f.dtype, "kda_gate: db is not (T, N)",
          {{"beta", beta.count()}, {"db", db.count()}});
    check(!da_log.present() || (da_log.shape == a_log.shape && da_log.dtype == real), "kda_gate: da_log does not fit a_log",
          {{"N", N}, {"da_log", da_log.count()}});
    check(!ddt_bias.present() || (ddt_bias.shape == dt_bias.shape && ddt_bias.dtype == real),
          "kda_gate: ddt_bias does not fit dt_bias", {{"dt_bias", dt_bias.count()}, {"ddt_bias", ddt_bias.count()}});
    check(!lower_bound || *lower_bound < 0, "kda_gate: lower_bound is not negative");
  }
};

namespace cpu {
void kda_gate(Context&, const KdaGateForward&);
void kda_gate(Context&, const KdaGateBackward&);
}  // namespace cpu

inline void kda_gate(Context& ctx, const KdaGateForward& a) {
  dispatch(ctx, "kda_gate forward", a, [&] { cpu::kda_gate(ctx, a); });
}
inline void kda_gate(Context& ctx, const KdaGateBackward& a) {
  dispatch(ctx, "kda_gate backward", a, [&] { cpu::kda_gate(ctx, a); });
}

}  // namespace moetrain::ops
