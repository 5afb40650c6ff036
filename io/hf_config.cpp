// hf_config.cpp -- names of keys between config.json and a job; both hold the same values.
#include "io/hf_config.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "io/files.h"
#include "io/json.h"
#include "memory/check.h"

namespace moetrain::io {
namespace {

constexpr std::array<std::pair<const char*, const char*>, 6> kOtherNames{{{"model_max_length", "max_position_embeddings"},
                                                                          {"num_experts_per_tok", "num_experts_per_token"},
                                                                          {"num_local_experts", "num_experts"},
                                                                          {"n_shared_experts", "num_shared_experts"},
                                                                          {"n_group", "num_expert_group"},
                                                                          {"norm_topk_prob", "moe_renormalize"}}};

// How a program loads, serves or trains, or what another key says too.
constexpr const char* kWithoutBearing[] = {"transformers_version",
                                           "_name_or_path",
                                           "auto_map",
                                           "torch_dtype",
                                           "dtype",
                                           "use_cache",
                                           "output_router_logits",
                                           "pretraining_tp",
                                           "attention_dropout",
                                           "qk_head_dim",
                                           "layer_types",
                                           "mlp_layer_types",
                                           "linear_head_dim",
                                           "linear_num_heads",
                                           "linear_conv_kernel_dim",
                                           "bos_token_id",
                                           "eos_token_id",
                                           "pad_token_id",
                                           "attention_bias",
                                           "quantization_config",
                                           "vision_config"};

YamlNode to_node(const Json& value, const std::string& name = {}) {
  YamlNode n;
  if (value.is_object()) {
    n.kind = YamlNode::map;
    for (const auto& [key, inner] : value.items())
      if (!inner.is_null()) n.entries.emplace_back(key, to_node(inner, key));
  } else if (value.is_array()) {
    n.kind = YamlNode::list;
    for (const Json& item : value) n.items.push_back(to_node(item, name));
  } else if (!value.is_null()) {
    n.kind = YamlNode::scalar;
    if (value.is_string() && Json::accept(value.get<std::string>()))
      throw Error(name + " is " + value.dump() + ": a text, where a value without quotes is meant");
    n.text = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return n;
}

void use_public_names(Json& text) {
  for (const auto& [other, name] : kOtherNames) {
    if (!text.contains(other)) continue;
    if (text.contains(name) && text[name] != text[other])
      throw Error(std::string(other) + " is " + text[other].dump() + ", but " + name + " is " + text[name].dump());
    Json value = text[other];  // a new key may move the others
    text[name] = std::move(value);
    text.erase(other);
  }
}

// Layers (from 1) that the library's list calls full attention; the public list says it too, or is made from this.
void use_layer_types(Json& text) {
  if (!text.contains("layer_types") || text["layer_types"].is_null()) return;
  Json full = Json::array();
  for (std::size_t layer = 0; layer < text["layer_types"].size(); ++layer) {
    const auto type = text["layer_types"][layer].get<std::string>();
    if (type == "full_attention")
      full.push_back(layer + 1);
    else if (type != "linear_attention")
      throw Error("layer_types: '" + type + "' of layer " + std::to_string(layer) + " is not known");
  }
  Json& linear = text["linear_attn_config"];
  const std::array<std::pair<const char*, const char*>, 3> widths{
      {{"linear_num_heads", "num_heads"}, {"linear_head_dim", "head_dim"}, {"linear_conv_kernel_dim", "short_conv_kernel_size"}}};
  for (const auto& [other, name] : widths)
    if (text.contains(other) && !linear.contains(name)) linear[name] = text[other];
  if (!linear.contains("full_attn_layers")) linear["full_attn_layers"] = full;
  if (linear["full_attn_layers"] != full)
    throw Error("layer_types make layers " + full.dump() + " full attention, linear_attn_config.full_attn_layers " +
                linear["full_attn_layers"].dump());
}

void use_mlp_layer_types(Json& text) {
  if (!text.contains("mlp_layer_types") || text["mlp_layer_types"].is_null()) return;
  const Json& types = text["mlp_layer_types"];
  const auto sparse = std::find(types.begin(), types.end(), "sparse");
  const auto dense = std::int64_t(sparse - types.begin());
  if (std::any_of(sparse, types.end(), [](const Json& type) { return type != "sparse"; }))
    throw Error("mlp_layer_types: a dense layer after the first sparse one, layer " + std::to_string(dense));
  if (!text.contains("first_k_dense_replace")) text["first_k_dense_replace"] = dense;
  if (text["first_k_dense_replace"] != dense)
    throw Error("mlp_layer_types begin with " + std::to_string(dense) + " dense layers, first_k_dense_replace is " +
                text["first_k_dense_replace"].dump());
}

void refuse_what_is_not_read(const Json& config) {
  if (config.contains("attention_bias") && !config["attention_bias"].is_null() && config["attention_bias"] != false)
    throw Error("attention_bias is " + config["attention_bias"].dump() + ": biases of projections are not known here");
  if (!config.contains("quantization_config") || config["quantization_config"].is_null()) return;
  const Json& quantization = config["quantization_config"];
  const std::string format = quantization.value("format", quantization.value("quant_method", "unknown"));
  if (format != "mxfp4-pack-quantized")
    throw Error("quantization_config: the weights are in the format " + format + "; mxfp4-pack-quantized and plain ones are read");
}

Json to_json(const YamlNode& node) {
  if (node.kind == YamlNode::null) return nullptr;
  if (node.kind == YamlNode::list) {
    Json list = Json::array();
    for (const YamlNode& item : node.items) list.push_back(to_json(item));
    return list;
  }
  if (node.kind == YamlNode::map) {
    Json map = Json::object();
    for (const auto& [key, value] : node.entries)
      if (value.kind != YamlNode::null) map[key] = to_json(value);
    return map;
  }
  if (node.text == "true" || node.text == "false") return node.text == "true";
  const char *first = node.text.data(), *last = first + node.text.size();
  std::int64_t whole = 0;
  if (const auto [end, error] = std::from_chars(first, last, whole); error == std::errc() && end == last) return whole;
  double number = 0;
  if (const auto [end, error] = std::from_chars(first, last, number); error == std::errc() && end == last) return number;
  return node.text;
}

}  // namespace

HfConfig read_hf_config(const std::string& path) {
  const std::string contents = read_text(path);
  HfConfig result;
  try {
    const Json config = parse_json<Json>(contents);
    if (!config.is_object()) throw Error("not the config.json of a model: it holds no object");
    const bool nested = config.contains("text_config") && config["text_config"].is_object();
    Json text = nested ? config["text_config"] : config;
    refuse_what_is_not_read(config);
    refuse_what_is_not_read(text);
    use_public_names(text);
    use_layer_types(text);
    use_mlp_layer_types(text);
    result.vision = config.contains("vision_config") && config["vision_config"].is_object();
    for (const char* key : kWithoutBearing) text.erase(key);
    result.model = to_node(text);
  } catch (const Json::exception& wrong) {
    throw Error(path + ": not the config.json of a model: " + wrong.what());
  } catch (const Error& wrong) {
    throw Error(path + ": " + wrong.what());
  }
  return result;
}

std::string hf_config_text(const YamlNode& model, const std::string& torch_dtype) {
  Json config = {{"architectures", {"KimiLinearForCausalLM"}}, {"model_type", "kimi_linear"}, {"torch_dtype", torch_dtype}};
  const Json keys = to_json(model);
  for (const auto& [key, value] : keys.items()) config[key] = value;
  // Unless told, the transformers library has a padding id of its own, which may lie outside the vocabulary.
  for (const char* id : {"bos_token_id", "eos_token_id", "pad_token_id"}) config[id] = nullptr;
  return config.dump(2) + "\n";
}

}  // namespace moetrain::io
