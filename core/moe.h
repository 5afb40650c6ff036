// moe.h -- the latent mixture of experts: router, dispatch, experts, combine, balance, and the shared experts beside them.
//
//   p, e = router(W_r x)      z = W_down x (or x without a latent)      y_s = W2_e glu(W1_e z, W3_e z) for each chosen slot s
//   r = sum_s p_s y_s (fixed order)      out = W_up RMSNorm(r) (or r) + shared(x)
// With moe.capacity_factor a slot may get another expert than the router's choice, or none, before any row travels
// (parallel/expert_capacity.h). Balance is fed with the choice: it sees the load that the limit hides.
// Rows travel to their experts' ranks in the latent width, and back, with true counts, in parts: while one travels, experts work on
// another, and the shared experts on what is theirs (parallel/expert_exchange.h).
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/mlp.h"
#include "ops/router.h"

namespace moetrain::core {

class Moe {
 public:
  struct Kept {
    ConstTensor x;           // (T, D)
    Tensor logits, weights;  // (T, E), (T, K) real
    Tensor slot_row;         // (T, K) i64
    parallel::ExchangePlan plan;
    Tensor received;                      // (R, Z) rows of the local experts, expert by expert; Z: width the experts see
    Tensor gate, up;                      // (R, F)
    Tensor combined, combined_r, normed;  // (T, Z), (T) real, (T, Z)
    Mlp::Kept shared;
  };
  // moe_index: which MoE layer this is, from 0; the row of the balance sums.
  Moe(const ModelConfig& model, ParamTable& table, int layer, int moe_index);
  // (T, K) i32, the experts the router chose; where experts have a limited number of places another (T, K), what the slots got.
  Tensor take_decisions(Pass& pass) const { return pass.kept.take(DType::i32, {(pass.limits_experts() ? 2 : 1) * pass.T(), K_}); }
  // y (T, D) written; absent: only what backward needs.
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor decisions, Tensor y) const;
  void backward(Pass& pass, const Kept& kept, ConstTensor decisions, ConstTensor dy, Tensor dx) const;
  int bias() const { return bias_; }

 private:
  void route(Pass& pass, ConstTensor x, Kept& kept, Tensor decisions) const;
  void limit(Pass& pass, const Kept& kept, ConstTensor chosen, Tensor experts) const;
  void count(Pass& pass, const Kept& kept, ConstTensor chosen, ConstTensor cutoff) const;
  std::vector<std::int64_t> balanced_groups(const Pass& pass) const;
  Tensor shared_counts(const Pass& pass) const;
  void balance_losses(Pass& pass, const Kept& kept, ConstTensor chosen, Tensor loss, Tensor dlogits) const;
  void sort(Pass& pass, Kept& kept, ConstTensor experts, Tensor counts) const;
  void plan_exchange(Pass& pass, Kept& kept) const;
  template <class Spread, class Meanwhile>
  void run_experts(Pass& pass, const Spread& spread, Kept& kept, Tensor y, const Meanwhile& meanwhile) const;
  template <class Meanwhile>
  void run_experts_backward(Pass& pass, const Kept& kept, ConstTensor dcombined, Tensor dz, Tensor dweights,
                            const Meanwhile& meanwhile) const;

  int moe_index_;
  std::int64_t D_, E_, K_, F_, Z_;
  bool latent_, norm_;
  double norm_eps_;
  ops::RouterRule rule_;
  ops::GluKind act_;
  double beta_, linear_beta_;
  int router_, bias_, down_ = -1, up_ = -1, norm_id_ = -1, w1_, w2_, w3_;
  std::optional<Mlp> shared_;
};

}  // namespace moetrain::core
