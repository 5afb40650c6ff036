// attention.cpp -- which kind a layer has, and the call to it.
#include "core/attention.h"

namespace moetrain::core {
namespace {

std::variant<AttentionKda, AttentionMla> make(const ModelConfig& m, ParamTable& table, int layer, int tensor_ranks) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
  if (m.full_attention(layer)) return AttentionMla(m, table, layer, prefix, tensor_ranks);
  return AttentionKda(m, table, layer, prefix, tensor_ranks);
}

}  // namespace

Attention::Attention(const ModelConfig& m, ParamTable& table, int layer, int tensor_ranks)
    : kind_(make(m, table, layer, tensor_ranks)) {}

Tensor Attention::take_decisions(Pass& pass) const {
  const auto* mla = std::get_if<AttentionMla>(&kind_);
  const std::int64_t columns = mla ? mla->selected(pass.config, pass.slice->documents.most_keys()) : 0;
  return columns > 0 ? pass.kept.take(DType::i32, {pass.slice->T(), columns}) : Tensor{};
}

void Attention::forward(Pass& pass, ConstTensor x_here, Kept& kept, Tensor decisions, Tensor y_here) const {
  on_all_rows(pass, x_here, y_here, [&](Pass& all, ConstTensor x, Tensor y) {
    if (const auto* kda = std::get_if<AttentionKda>(&kind_)) return kda->forward(all, x, kept.emplace<AttentionKda::Kept>(), y);
    std::get<AttentionMla>(kind_).forward(all, x, kept.emplace<AttentionMla::Kept>(), decisions, y);
  });
}

void Attention::backward(Pass& pass, ConstTensor x_here, const Kept& kept, ConstTensor decisions, ConstTensor dy_here,
                         Tensor dx_here) const {
  on_all_rows(pass, dy_here, dx_here, [&](Pass& all, ConstTensor dy, Tensor dx) {
    Scope scope(all.ctx.scratch);
    const ConstTensor x = all.all_rows(x_here);
    if (const auto* kda = std::get_if<AttentionKda>(&kind_))
      return kda->backward(all, x, std::get<AttentionKda::Kept>(kept), dy, dx);
    std::get<AttentionMla>(kind_).backward(all, x, std::get<AttentionMla::Kept>(kept), decisions, dy, dx);
  });
}

}  // namespace moetrain::core
