// hf_names.cpp -- experts one by one, A_log in its public shape, all else as the table says.
#include "core/hf_names.h"

namespace moetrain::core {
namespace {

constexpr std::int64_t kALogPadding = 128;

std::string replaced(const std::string& text, const std::string& part, const std::string& by) {
  const auto at = text.find(part);
  return at == std::string::npos ? "" : text.substr(0, at) + by + text.substr(at + part.size());
}

Shape public_shape(const ModelConfig& m, const Param& p) {
  if (!p.name.ends_with(".A_log")) return p.shape;
  const std::int64_t heads = p.shape[0];
  if (!m.linear_attn.gate_lower_bound) return {1, 1, heads, 1};
  return {(heads + kALogPadding - 1) / kALogPadding * kALogPadding};
}

}  // namespace

std::vector<HfTensor> hf_tensors(const ModelConfig& model, const ParamTable& table) {
  std::vector<HfTensor> tensors;
  for (int i = 0; i < table.size(); ++i) {
    const Param& p = table[i];
    if (p.unit != UnitKind::experts) {
      // Reading, the library calls every MLP mlp; writing, it turns that back into the name of a MoE layer everywhere.
      tensors.push_back({p.name, replaced(p.name, ".mlp.", ".block_sparse_moe."), public_shape(model, p), i, {0, p.shape[0]}});
      continue;
    }
    const auto dot = p.name.rfind('.');
    for (std::int64_t e = 0; e < p.shape[0]; ++e)
      tensors.push_back({p.name.substr(0, dot) + "." + std::to_string(e) + p.name.substr(dot) + ".weight",
                         "",
                         Shape{p.shape[1], p.shape[2]},
                         i,
                         {e, e + 1}});
  }
  return tensors;
}

std::vector<HfVisionTensor> hf_vision_tensors(std::int64_t hidden_size) {
  constexpr std::int64_t kLayers = 27, kWidth = 1024, kHeads = 1536, kMlp = 4096, kPatch = 14, kGrid = 64, kMerged = 4 * kWidth;
  std::vector<HfVisionTensor> tensors{{"vision_tower.patch_embed.proj.weight", {kWidth, 3, kPatch, kPatch}},
                                      {"vision_tower.patch_embed.pos_emb.weight", {kGrid, kGrid, kWidth}},
                                      {"vision_tower.encoder.final_layernorm.weight", {kWidth}},
                                      {"mm_projector.proj.0.weight", {kMerged, kMerged}},
                                      {"mm_projector.proj.2.weight", {hidden_size, kMerged}},
                                      {"mm_projector.post_norm.weight", {hidden_size}}};
  for (std::int64_t layer = 0; layer < kLayers; ++layer) {
    const std::string block = "vision_tower.encoder.blocks." + std::to_string(layer) + ".";
    const std::vector<HfVisionTensor> of_layer{
        {"wqkv", {3 * kHeads, kWidth}}, {"wo", {kWidth, kHeads}}, {"mlp.fc0", {kMlp, kWidth}},
        {"mlp.fc1", {kWidth, kMlp}},    {"norm0", {kWidth}},      {"norm1", {kWidth}}};
    for (const HfVisionTensor& t : of_layer) tensors.push_back({block + t.name + ".weight", t.shape});
  }
  return tensors;
}

}  // namespace moetrain::core
