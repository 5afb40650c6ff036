// attention_kda.h -- the KDA sub-layer: projections, short convolutions, gates, the delta rule, gated output norm, output
// projection (spec of the public Kimi Linear / K3 model; equations in ops/kda_attention.h).
//
//   q, k, v = silu(conv(W x)); q, k L2-normalised per head       f = W_fb W_fa x      beta = sigmoid(W_b x)
//   o = KDA(q, k, v, gate(f), beta)      y = W_o( w_o RMSNorm(o) sigmoid(gate) ),   gate = W_g x, or W_gb W_ga x
#pragma once
#include <string>

#include "core/params.h"
#include "core/pass.h"
#include "ops/kda_attention.h"

namespace moetrain::core {

class AttentionKda {
 public:
  struct Kept {               // P = N H, of the heads here
    Tensor q_in, k_in, v_in;  // (T, P) before the convolution
    Tensor f_low, f, b;       // (T, H), (T, P), (T, N)
    Tensor gate_low, gate;    // (T, H) with a low-rank gate, (T, P)
    Tensor o, normed;         // (T, N, H)
    Tensor history, state;    // (3, B, taps - 1, P), (B, N, H, H) real: what enters this rank's slices; absent where sequences are whole
  };
  AttentionKda(const ModelConfig& model, ParamTable& table, int layer, const std::string& prefix, int tensor_ranks);
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor y) const;           // y (T, D) written
  void backward(Pass& pass, ConstTensor x, const Kept& kept, ConstTensor dy, Tensor dx) const;  // dx (T, D) written

 private:
  struct Stream {
    int proj, conv;
  };  // of q, k or v
  void enter_slices(Pass& pass, Kept& kept) const;
  Tensor leave_slices_backward(Pass& pass, const Kept& kept, ConstTensor dnormed) const;
  template <class Body>
  void for_each_tail(Pass& pass, Tensor tails, Body&& body) const;
  ops::KdaAttention inputs(Pass& pass, const Kept& kept) const;

  std::int64_t N_, H_, P_, taps_;
  bool full_gate_;
  std::optional<double> lower_bound_;
  double norm_eps_;
  Stream q_, k_, v_;
  int f_a_, f_b_, b_, a_log_, dt_bias_, g_ = -1, g_a_ = -1, g_b_ = -1, o_norm_, o_proj_;
};

}  // namespace moetrain::core
