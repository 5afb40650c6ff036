// attention.cpp -- which kind a layer has, and the call to it.
#include "core/attention.h"

namespace moetrain::core {
namespace {

std::variant<AttentionKda, AttentionMla> make(const ModelConfig& m, ParamTable& table, int layer) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
  if (m.full_attention(layer)) return AttentionMla(m, table, layer, prefix);
  return AttentionKda(m, table, layer, prefix);
}

}  // namespace

Attention::Attention(const ModelConfig& m, ParamTable& table, int layer) : kind_(make(m, table, layer)) {}

Tensor Attention::take_decisions(Pass& pass) const {
  const auto* mla = std::get_if<AttentionMla>(&kind_);
  const std::int64_t columns = mla ? mla->selected(pass.config, pass.batch.documents.most_keys()) : 0;
  return columns > 0 ? pass.kept.take(DType::i32, {pass.T(), columns}) : Tensor{};
}

void Attention::forward(Pass& pass, ConstTensor x, Kept& kept, Tensor decisions, Tensor y) const {
  if (const auto* kda = std::get_if<AttentionKda>(&kind_)) return kda->forward(pass, x, kept.emplace<AttentionKda::Kept>(), y);
  std::get<AttentionMla>(kind_).forward(pass, x, kept.emplace<AttentionMla::Kept>(), decisions, y);
}

void Attention::backward(Pass& pass, const Kept& kept, ConstTensor decisions, ConstTensor dy, Tensor dx) const {
  if (const auto* kda = std::get_if<AttentionKda>(&kind_)) return kda->backward(pass, std::get<AttentionKda::Kept>(kept), dy, dx);
  std::get<AttentionMla>(kind_).backward(pass, std::get<AttentionMla::Kept>(kept), decisions, dy, dx);
}

}  // namespace moetrain::core
