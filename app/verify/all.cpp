// all.cpp -- which families of operators a model has, in the order of a step.
#include "app/verify/verify.h"

namespace moetrain::app {

void verify_all(const Verification& v) {
  const core::ModelConfig& m = v.config.model;
  const auto any_layer = [&](auto is) {
    for (std::int64_t layer = 0; layer < m.num_hidden_layers; ++layer)
      if (is(layer)) return true;
    return false;
  };
  const bool full = any_layer([&](std::int64_t layer) { return m.full_attention(layer); });
  const bool sparse = m.dsa && v.config.loss.indexer_stage == core::IndexerStage::sparse;
  verify_embedding(v);
  if (m.attn_res_block_size) verify_attn_res(v);
  verify_norms(v);
  verify_linear(v);
  if (any_layer([&](std::int64_t layer) { return !m.full_attention(layer); })) verify_kda(v);
  if (full && m.dsa) verify_indexer(v);
  if (full) sparse ? verify_sparse_attention(v) : verify_attention(v);
  verify_elementwise(v);
  verify_glu(v);
  if (any_layer([&](std::int64_t layer) { return m.moe_layer(layer); })) {
    verify_router(v);
    if (v.config.moe.capacity_factor > 0) verify_capacity(v);
    verify_permute(v);
    verify_grouped_linear(v);
    verify_balance(v);
  }
  verify_cross_entropy(v);
  verify_optimizer(v);
}

}  // namespace moetrain::app
