// block.h -- one decoder layer: mix, norm, attention, mix, norm, feed-forward, and the residual wiring between them.
//
//   plain:     p += Attn(RMSNorm(p));  p += FFN(RMSNorm(p))
//   attention residuals, blocks of `size` layers, bank of finished block sums v_0 (embedding), v_1, ...:
//     a = mix(bank + [p]; attention query)  (a = p while the bank is empty)
//     if layer % size == 0: bank.append(p), p = 0
//     p += Attn(RMSNorm(a));  b = mix(bank + [p]; mlp query);  p += FFN(RMSNorm(b))
#pragma once
#include <variant>
#include <vector>

#include "core/attention.h"
#include "core/moe.h"
#include "ops/rmsnorm.h"

namespace moetrain::core {

// Rows of attention residuals before a layer: ceil(layer / size).
struct Bank {
  std::vector<ConstTensor> rows;  // (T, D) each, in the order they were finished
  std::vector<Tensor> gradients;  // (T, D) real each; every later mix adds to them
};

// The learned query of one mix (ops/attn_res.h).
class Mix {
 public:
  Mix(const ModelConfig& model, ParamTable& table, int layer, UnitKind unit, const std::string& prefix);
  // norm: the norm of y that follows, if it is to be had in the same pass (ops/attn_res.h).
  void forward(Pass& pass, std::span<const ConstTensor> sources, Tensor y, Tensor weights,
               const std::optional<ops::RmsNormForward>& norm = {}) const;
  void backward(Pass& pass, ConstTensor dy, std::span<const ConstTensor> sources, ConstTensor weights,
                std::span<const Tensor> dsources) const;

 private:
  double eps_;
  int gamma_, query_;
};

class Block {
 public:
  struct Decisions {  // kept also when the rest of the block is recomputed
    Tensor attention, experts;
  };
  struct SubKept {              // before attention, and before the feed-forward
    Tensor mixed, mix_weights;  // (T, D), (T, sources) real; absent without a mix
    ConstTensor in;             // (T, D) what the norm reads
    Tensor in_r, normed;        // (T) real, (T, D)
  };
  struct Kept {
    ConstTensor p_in;  // (T, D)
    Tensor p_mid;      // (T, D) after attention
    SubKept attn, ffn;
    Attention::Kept attention;
    std::variant<std::monostate, Mlp::Kept, Moe::Kept> feed_forward;
  };
  Block(const ModelConfig& model, ParamTable& table, int layer, int moe_index, int tensor_ranks);
  Decisions take_decisions(Pass& pass) const;
  // p_in -> p_out (T, D). The bank must hold the rows before this layer; a layer that starts a block appends p_in.
  void forward(Pass& pass, Bank& bank, ConstTensor p_in, Kept& kept, const Decisions& decisions, Tensor p_out) const;
  // dp (T, D) real: gradient of p_out in, of p_in out. Adds to the bank's gradients.
  void backward(Pass& pass, Bank& bank, const Kept& kept, const Decisions& decisions, Tensor dp) const;
  std::int64_t bank_before() const { return bank_before_; }
  const Moe* moe() const { return std::get_if<Moe>(&feed_forward_); }

 private:
  struct Sub {
    std::optional<Mix> mix;
    int norm;
  };
  void enter(Pass& pass, const Sub& sub, std::span<const ConstTensor> bank, ConstTensor p, SubKept& kept) const;
  void leave(Pass& pass, const Sub& sub, std::span<const ConstTensor> bank, std::span<const Tensor> dbank, ConstTensor p,
             const SubKept& kept, Tensor dnormed, Tensor dp) const;

  double eps_;
  bool residual_bank_, starts_block_;
  std::int64_t bank_before_;
  Sub attn_sub_, ffn_sub_;
  Attention attention_;
  std::variant<Mlp, Moe> feed_forward_;
};

}  // namespace moetrain::core
