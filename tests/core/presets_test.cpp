// presets_test.cpp -- the presets in the binary are jobs without faults, of the published shapes and parameter counts.
#include "core/presets.h"

#include <fstream>
#include <sstream>

#include "core/config.h"
#include "core/plan.h"
#include "tests/support/catch.h"

using namespace moetrain;
using namespace moetrain::core;

namespace {

struct Judged {
  Config config;
  std::string faults;
};
Judged preset(const std::string& name) {
  const auto job =
      io::parse_yaml("model: {preset: " + name + "}\ndata: {train: /, sequence_length: 64}\ntraining: {steps: 1}\n", "job.yaml");
  std::vector<Fault> faults;
  Judged j;
  j.config = read_config(job, {}, "", faults);
  check_config(j.config, job, 1, faults);
  for (const auto& f : faults) j.faults += std::to_string(f.line) + " " + f.key + ": " + f.text + "\n";
  return j;
}

}  // namespace

TEST_CASE("the binary holds exactly the presets of configs/models, in order, and none has a fault", "[core][cpu]") {
  std::string names;
  for (const auto& [name, text] : preset_texts()) {
    names += std::string(name) + " ";
    std::ifstream file(std::string(MOETRAIN_SOURCE_DIR) + "/configs/models/" + std::string(name) + ".yaml");
    std::ostringstream contents;
    contents << file.rdbuf();
    CAPTURE(std::string(name));
    CHECK(contents.str() == text);
    CHECK(preset(std::string(name)).faults.empty());
  }
  CHECK(names == "kimi-k3 kimi-k3.1 kimi-linear-48b tiny-k3 tiny-k3.1 tiny-linear ");
}

TEST_CASE("layers of kimi-k3 are full attention where i mod 4 is 3 and at the end, and MoE from the second on", "[core][cpu]") {
  for (const char* name : {"kimi-k3", "kimi-k3.1"}) {
    const auto m = preset(name).config.model;
    REQUIRE(m.num_hidden_layers == 93);
    for (std::int64_t layer = 0; layer < 93; ++layer) {
      CAPTURE(name, layer);
      CHECK(m.full_attention(layer) == (layer % 4 == 3 || layer == 92));
      CHECK(m.moe_layer(layer) == (layer >= 1));
    }
    CHECK(m.dsa.has_value() == (std::string(name) == "kimi-k3.1"));
  }
}

TEST_CASE("parameters of kimi-k3 are the published ones to the unit", "[core][cpu]") {
  const auto n = count_parameters(preset("kimi-k3").config);
  CHECK(n.total == 2779484476000);
  CHECK(n.active_per_token == 104189612640);
  CHECK(n.routed_experts == 2722740830208);
  CHECK(n.trunk == 2779484476000 - 2722740830208);
}

TEST_CASE("parameters of kimi-k3.1 are those of kimi-k3 and 24 indexers", "[core][cpu]") {
  const auto n = count_parameters(preset("kimi-k3.1").config);
  CHECK(n.total == 2779663002208);
  CHECK(n.total - count_parameters(preset("kimi-k3").config).total == 24 * 7438592);
}

TEST_CASE("parameters of kimi-linear-48b are about 49.1 billion, 3106972544 of them active", "[core][cpu]") {
  const auto n = count_parameters(preset("kimi-linear-48b").config);
  CHECK(n.active_per_token == 3106972544);
  CHECK(n.total > 49000000000);
  CHECK(n.total < 49200000000);
}

TEST_CASE("the tiny presets hold every kind of layer of their large ones", "[core][cpu]") {
  for (const char* size : {"k3", "k3.1", "linear"}) {
    const auto tiny = preset(std::string("tiny-") + size).config.model;
    const auto large = preset(size == std::string("linear") ? "kimi-linear-48b" : std::string("kimi-") + size).config.model;
    CAPTURE(size);
    CHECK(tiny.hidden_act == large.hidden_act);
    CHECK(tiny.q_lora_rank.has_value() == large.q_lora_rank.has_value());
    CHECK(tiny.dsa.has_value() == large.dsa.has_value());
    CHECK(tiny.mla_use_output_gate == large.mla_use_output_gate);
    CHECK(tiny.linear_attn.gate_lower_bound == large.linear_attn.gate_lower_bound);
    CHECK(tiny.linear_attn.use_full_rank_gate == large.linear_attn.use_full_rank_gate);
    CHECK(tiny.routed_expert_hidden_size.has_value() == large.routed_expert_hidden_size.has_value());
    CHECK(tiny.latent_moe_use_norm == large.latent_moe_use_norm);
    CHECK(tiny.attn_res_block_size.has_value() == large.attn_res_block_size.has_value());
    CHECK(tiny.routed_scaling_factor == large.routed_scaling_factor);
    CHECK(tiny.rms_norm_eps == large.rms_norm_eps);
    CHECK(tiny.tie_word_embeddings == large.tie_word_embeddings);
    CHECK(tiny.first_k_dense_replace == large.first_k_dense_replace);
    CHECK(tiny.vocab_size == 257);
    CHECK(count_parameters(preset(std::string("tiny-") + size).config).total < 2000000);
  }
}
