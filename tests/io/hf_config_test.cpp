// hf_config_test.cpp -- config.json of the family in its several forms, and what is refused.
#include "io/hf_config.h"

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

io::HfConfig read(const TempFolder& folder, const std::string& text) {
  return io::read_hf_config(folder.file("config.json", text));
}

}  // namespace

TEST_CASE("the text model of a config.json has the names of a job's model section", "[io][cpu]") {
  const TempFolder folder;
  const auto c = read(
      folder, R"({"model_type": "kimi_k3", "vision_config": {"layers": 27}, "text_config": {"vocab_size": 10, "rms_norm_eps": 1e-05,
      "n_group": 2, "norm_topk_prob": true, "q_lora_rank": null, "transformers_version": "5", "dsa_config": {"topk": 4}}})");
  CHECK(c.vision);
  CHECK(c.model ==
        io::parse_yaml("vocab_size: 10\nrms_norm_eps: 1e-05\ndsa_config: {topk: 4}\nnum_expert_group: 2\nmoe_renormalize: true\n",
                       "want"));
  CHECK_FALSE(read(folder, R"({"vocab_size": 10})").vision);
}

TEST_CASE("lists by layer become the public ones, and are held to those beside them", "[io][cpu]") {
  const TempFolder folder;
  const auto c = read(
      folder,
      R"({"layer_types": ["linear_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"], "linear_num_heads": 3})");
  CHECK(c.model == io::parse_yaml("linear_attn_config: {num_heads: 3, full_attn_layers: [2]}\nfirst_k_dense_replace: 1\n", "want"));
  auto why = [&](const std::string& text) { return error_of([&] { read(folder, text); }); };
  CHECK(contains(why(R"({"layer_types": ["full_attention"], "linear_attn_config": {"full_attn_layers": [2]}})"),
                 "full_attn_layers [2]"));
  CHECK(contains(why(R"({"layer_types": ["sliding_attention"]})"), "'sliding_attention' of layer 0"));
  CHECK(contains(why(R"({"mlp_layer_types": ["sparse", "dense"]})"), "a dense layer after"));
  CHECK(contains(why(R"({"mlp_layer_types": ["sparse"], "first_k_dense_replace": 1})"), "first_k_dense_replace is 1"));
}

TEST_CASE("a config.json that contradicts itself or asks for what is not read is refused by name", "[io][cpu]") {
  const TempFolder folder;
  auto why = [&](const std::string& text) { return error_of([&] { read(folder, text); }); };
  CHECK(contains(why("{"), folder / "config.json" + ": not the config.json of a model"));
  CHECK(contains(why("[]"), folder / "config.json" + ": not the config.json of a model: it holds no object"));
  CHECK(contains(why(R"({"n_group": 2, "n_group": 2})"), folder / "config.json" + ": the key 'n_group' stands there twice"));
  CHECK(contains(why(R"({"n_group": 2, "num_expert_group": 1})"),
                 folder / "config.json" + ": n_group is 2, but num_expert_group is 1"));
  CHECK(contains(why(R"({"attention_bias": true})"), "attention_bias is true"));
  CHECK(contains(why(R"({"attention_bias": "true"})"), "attention_bias is \"true\""));
  CHECK(contains(why(R"({"hidden_size": "48"})"), "hidden_size is \"48\": a text"));
  CHECK(contains(why(R"({"dsa_config": {"layers": [4, "8"]}})"), "layers is \"8\": a text"));
  CHECK(contains(why(R"({"quantization_config": {"quant_method": "fp8"}})"), "format fp8"));
  CHECK(why(R"({"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}})") ==
        "nothing was thrown");
}

TEST_CASE("a written config.json reads back as the model section it was made from", "[io][cpu]") {
  const TempFolder folder;
  const auto model = io::parse_yaml(
      "vocab_size: 10\nrms_norm_eps: 1e-05\nq_lora_rank:\nmla_use_nope: true\nhidden_act: situ\nlinear_attn_config: {kda_layers: "
      "[1, 2], gate_lower_bound: -5}\n",
      "model");
  auto back = read(folder, io::hf_config_text(model, "bfloat16")).model;
  std::erase_if(back.entries, [](const auto& e) { return e.first == "architectures" || e.first == "model_type"; });
  CHECK(back == io::parse_yaml("vocab_size: 10\nrms_norm_eps: 1e-05\nmla_use_nope: true\nhidden_act: situ\nlinear_attn_config: "
                               "{kda_layers: [1, 2], gate_lower_bound: -5}\n",
                               "want"));
}
