// kda_gate.h -- log decay g of KDA from f, in both published forms, and beta = sigmoid(b).
#pragma once
#include "ops/context.h"
#include <optional>

namespace moetrain::ops {

struct KdaGateForward {
  ConstTensor f;        // (T, N, H)
  ConstTensor a_log;    // (N) real
  ConstTensor dt_bias;  // (N, H) real
  ConstTensor b;        // (T, N), before the sigmoid
  std::optional<double> lower_bound;  // set: g = lower_bound sigmoid(exp(a_log) z); unset: g = -exp(a_log) softplus(z); z = f + dt_bias
  Tensor g;             // (T, N, H) real
  Tensor beta;          // (T, N) real
  void check_shapes() const;
};

struct KdaGateBackward {
  ConstTensor dg;       // (T, N, H) real
  ConstTensor dbeta;    // (T, N) real
  ConstTensor f;        // (T, N, H)
  ConstTensor a_log;    // (N) real
  ConstTensor dt_bias;  // (N, H) real
  ConstTensor beta;     // (T, N) real
  std::optional<double> lower_bound;
  Tensor df;            // (T, N, H)
  Tensor db;            // (T, N)
  Tensor da_log;        // (N) real; adds; absent: frozen
  Tensor ddt_bias;      // (N, H) real; adds; absent: frozen
  void check_shapes() const;
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
