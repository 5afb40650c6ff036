// attention_mla.h -- the full-attention sub-layer: gated multi-head latent attention, dense or over the indexer's top-k.
//
//   cq = RMSNorm(W_qa x), q = W_qb cq  (or q = W_q x)        [c~ | k_e] = W_kva x, c = RMSNorm(c~)
//   dense:  [k_n | v] = W_kvb c, softmax attention                      sparse: absorbed, over the selected positions only
//   y = W_o( o sigmoid(W_g x) ), or W_o o without an output gate
// With dsa_config the indexer selects keys and is trained by its own KL loss: its inputs and targets are detached, so that the LM
// loss never reaches it and its loss reaches nothing else. In the dense stage attention stays dense and the indexer learns from it.
// Where a rank has slices of sequences, latents and index keys of all slices are gathered and expanded here, and their gradients
// summed back; queries, and all else, stay. Where a rank has a part of the heads, it has all rows of them, but indexes only those
// rows that are its own: their keys are gathered, the target is the mean over the ranks' heads, and the chosen keys go to all.
#pragma once
#include <string>

#include "core/params.h"
#include "core/pass.h"

namespace moetrain::core {

class AttentionMla {
 public:
  struct Kept {
    Tensor cq_in, cq, cq_r;        // (T, Ql), (T, Ql), (T) real
    Tensor q;                      // (T, N, Hn + He)
    Tensor c_in, c, c_r, k_extra;  // (T, C), (T, C), (T) real, (T, He)
    Tensor kv;                     // (T, N, Hn + Hv) dense; absent where sequences are cut over ranks: expanded again in backward
    Tensor q_latent, o_latent;     // (T, N, C) sparse
    Tensor lse;                    // (T, N) real
    Tensor o, gate, gated;         // (T, P), P = N Hv; gate and gated with an output gate
    Tensor ki_in, ki_mean, ki_r;   // of the rows here: (T, Hi) before the indexer's key norm, (T) real
    Tensor dqi, dki, dwi;          // likewise, gradients of the indexer loss: (T, J Hi), (T, Hi), (T, J) real
  };
  AttentionMla(const ModelConfig& model, ParamTable& table, int layer, const std::string& prefix, int tensor_ranks);
  // Columns of the selection of T tokens, longest document given; 0 without selection.
  std::int64_t selected(const Config& config, std::int64_t longest) const;
  // indices (T, selected) i32: chosen by this call, or given when the pass recomputes; absent without selection.
  void forward(Pass& pass, ConstTensor x, Kept& kept, Tensor indices, Tensor y) const;
  void backward(Pass& pass, ConstTensor x, const Kept& kept, ConstTensor indices, ConstTensor dy, Tensor dx) const;

 private:
  struct Indexer {
    int wq_b = -1, wk = -1, k_norm = -1, k_norm_bias = -1, weights_proj = -1;
  };
  struct IndexInputs {
    Tensor q;        // (rows here, J, Hi)
    ConstTensor k;   // (keys, Hi)
    Tensor weights;  // (rows here, J) real
  };
  bool sparse(const Config& config) const;
  bool trained(const Pass& pass) const;  // any parameter of the indexer
  struct Keys {
    ConstTensor c, extra;  // (keys, C), (keys, He): latents of T tokens, or of the whole sequences that slices are here of
  };
  Keys all_keys(Pass& pass, const Kept& kept) const;
  Pass of_keys(const Pass& pass) const;
  std::int64_t keys(const Pass& pass) const;
  void expand(Pass& pass, const Keys& keys, Tensor kv) const;
  // dc, dk_extra = gradients of the keys here, of all ranks' queries; nothing to do where keys were not gathered.
  void sum_keys(Pass& pass, Tensor dlatent, Tensor dextra, Tensor dc, Tensor dk_extra) const;
  IndexInputs index_inputs(Pass& pass, ConstTensor x, Kept& kept) const;
  void index_loss(Pass& pass, const IndexInputs& in, ConstTensor probability, ConstTensor indices, Kept& kept) const;
  void index_backward(Pass& pass, ConstTensor x, const Kept& kept) const;
  void select(Pass& pass, const IndexInputs& in, Tensor indices) const;
  Tensor target_here(Pass& pass, Tensor probability) const;
  ConstTensor key_rows(Pass& pass, ConstTensor rows_here) const;
  void sum_key_rows(Pass& pass, Tensor all, Tensor rows_here) const;
  ResultCache::Result attended(Pass& pass, Kept& kept, Tensor& o, Tensor& probability) const;
  void attend_dense(Pass& pass, Kept& kept, Tensor probability) const;
  void attend_sparse(Pass& pass, Kept& kept, ConstTensor indices, Tensor probability) const;
  void attend_dense_backward(Pass& pass, const Kept& kept, ConstTensor do_, Tensor dq, Tensor dc, Tensor dk_extra) const;
  void attend_sparse_backward(Pass& pass, const Kept& kept, ConstTensor indices, ConstTensor do_, Tensor dq, Tensor dc,
                              Tensor dk_extra) const;

  std::int64_t N_, Ql_, C_, Hn_, He_, Hv_, P_;
  std::optional<IndexerConfig> dsa_;
  double scale_;
  int q_a_ = -1, q_a_norm_ = -1, q_ = -1, kv_a_, kv_a_norm_, kv_b_, g_ = -1, o_;
  Indexer index_;
};

}  // namespace moetrain::core
