// hf_weights_test.cpp -- a folder is what its config.json says, tensor by tensor, or the Error names what is not.
#include "core/hf_weights.h"

#include <algorithm>
#include <ctime>
#include <fstream>

#include "core/presets.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/hf_folder.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

core::ModelConfig preset(const std::string& name) {
  for (const auto& [known, text] : core::preset_texts())
    if (known == name) {
      io::YamlNode job;
      job.kind = io::YamlNode::map;
      job.entries.emplace_back("model", io::parse_yaml(std::string(text), name));
      std::vector<core::Fault> faults;
      return core::read_config(job, {}, ".", faults).model;
    }
  FAIL("no preset " << name);
  return {};
}

// The K3.1 kind at a size where experts can be packed in groups of 32 columns.
core::ModelConfig packable() {
  core::ModelConfig m = tiny_config().model;
  m.routed_expert_hidden_size = 32;
  m.moe_intermediate_size = 64;
  return m;
}

// What is wrong with the folder; empty: nothing.
std::string judged(const std::string& folder) {
  const core::HfModel model = core::read_hf_model(folder);
  const core::ParamTable table = core::parameters_of(model.model);
  const std::string error = error_of([&] { core::HfWeights(folder, model, table); });
  return error == "nothing was thrown" ? "" : error;
}

std::vector<double> read_all(const std::string& folder, const std::string& name) {
  const core::HfModel model = core::read_hf_model(folder);
  const core::ParamTable table = core::parameters_of(model.model);
  const core::HfWeights weights(folder, model, table);
  const int i = table.find(name);
  std::vector<double> out(std::size_t(table[i].shape.count()));
  weights.read(i, 0, Tensor(out.data(), DType::f64, table[i].shape));
  return out;
}

// Puts bytes where the tensor of a header-only folder of one file lies.
void poke(const std::string& folder, const std::string& name, const void* bytes, std::int64_t count, std::int64_t at = 0) {
  const std::string path = folder + "/model-0.safetensors";
  const auto all = io::read_safetensors_header(path);
  for (const auto& e : all.entries)
    if (e.name == name) {
      std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
      file.seekp(e.begin + at);
      file.write(static_cast<const char*>(bytes), count);
      return;
    }
  FAIL("no tensor " << name);
}

}  // namespace

TEST_CASE("any one tensor that is removed, renamed, reshaped or retyped is named, in every form of a folder", "[core][cpu]") {
  core::ModelConfig linear = tiny_linear_config().model;
  linear.tie_word_embeddings = false;
  linear.linear_attn.full_attn_layers = {5};  // more than two layers of each kind: of two that differ, either may be the odd one
  core::ModelConfig k31 = packable();
  k31.num_hidden_layers = 8;
  k31.linear_attn.full_attn_layers = {4, 7, 8};
  const std::pair<core::ModelConfig, HfForm> forms[] = {{linear, {}}, {k31, {.packed = true, .prefix = "language_model."}}};
  for (const auto& [model, form] : forms) {
    const TempFolder folder;
    write_hf_config(folder.path(), model, form);
    const auto entries = hf_entries(model, form);
    write_headers(folder.path(), entries);
    REQUIRE(judged(folder.path()) == "");
    for (std::size_t i = 0; i < entries.size(); ++i) {
      const std::string& name = entries[i].name;
      CAPTURE(name);
      const auto changed = [&](auto change) {
        auto all = entries;
        change(all);
        write_headers(folder.path(), all);
        return judged(folder.path());
      };
      const std::string missing = ": " + name + ": missing";
      REQUIRE(contains(changed([&](auto& all) { all.erase(all.begin() + std::ptrdiff_t(i)); }), missing));
      const std::string renamed = changed([&](auto& all) { all[i].name += "s"; });
      REQUIRE(contains(renamed, missing));
      REQUIRE(contains(renamed, ": " + name + "s: is " + entries[i].text() + ", not a tensor of this model"));
      REQUIRE(contains(changed([&](auto& all) { all[i].shape.back() += 1; }), ": " + name + ": is "));
      REQUIRE(contains(changed([&](auto& all) {
                         all[i].dtype = entries[i].dtype == "U8" ? "I8" : entries[i].dtype == "F32" ? "BF16" : "F32";
                       }),
                       ": " + name + ": is "));
    }
  }
}

TEST_CASE("the headers of Kimi K3.1 at its full size are judged in seconds, and a fault among 497,340 keys is found",
          "[core][cpu]") {
  const core::ModelConfig model = preset("kimi-k3.1");
  const HfForm form{.packed = true, .vision = true, .prefix = "language_model."};
  const TempFolder folder;
  write_hf_config(folder.path(), model, form);
  auto entries = hf_entries(model, form);
  CHECK(entries.size() == 497340);
  write_headers(folder.path(), entries, 96);
  const std::clock_t start = std::clock();  // of the processor: other programs may share it
  CHECK(judged(folder.path()) == "");
  const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
  INFO(seconds << " s");
  CHECK(seconds < 60);

  const auto find = [&](const std::string& name) {
    return std::find_if(entries.begin(), entries.end(),
                        [&](const auto& e) { return e.name == "language_model.model.layers." + name; });
  };
  find("92.block_sparse_moe.experts.895.w2.weight_scale")->name += "s";
  find("91.self_attn.indexer.k_norm.bias")->shape = {127};
  find("3.self_attn.q_b_proj.weight")->dtype = "F32";
  find("90.self_attn.A_log")->shape = {96};
  entries.erase(find("45.block_sparse_moe.gate.e_score_correction_bias"));
  entries.back().shape[0] += 1;
  write_headers(folder.path(), entries, 96);
  const std::string why = judged(folder.path());
  for (const char* part :
       {"layers.92.block_sparse_moe.experts.895.w2.weight_scale: missing", "w2.weight_scales: is U8 [3584, 96], not a tensor",
        "layers.91.self_attn.indexer.k_norm.bias: is BF16 [127], config.json makes it [128]",
        "layers.3.self_attn.q_b_proj.weight: is F32 [18432, 1536], the others of the matrices are BF16",
        "layers.90.self_attn.A_log: is F32 [96], the A_log of the other layers are F32 [128]",
        "layers.45.block_sparse_moe.gate.e_score_correction_bias: missing",
        "vision_tower.encoder.blocks.26.norm1.weight: is BF16 [1025], config.json makes it [1024]"}) {
    CAPTURE(part);
    CHECK(contains(why, part));
  }
  CHECK(std::count(why.begin(), why.end(), '\n') == 6);
}

TEST_CASE("Kimi K3 has the number of tensors that was published, and Kimi-Linear its shape of A_log", "[core][cpu]") {
  CHECK(hf_entries(preset("kimi-k3"), {.packed = true, .vision = true}).size() == 497220);
  const auto linear = hf_entries(preset("kimi-linear-48b"), {});
  const auto a_log = std::find_if(linear.begin(), linear.end(), [](const auto& e) { return e.name.ends_with("A_log"); });
  CHECK(a_log->text() == "F32 [1, 1, 32, 1]");
}

TEST_CASE("what is kept in fp32 may be stored as the matrices are, if all layers do; pictures and a prefix change nothing",
          "[core][cpu]") {
  core::ModelConfig m = tiny_linear_config().model;
  m.linear_attn.full_attn_layers = {5};
  const TempFolder folder;
  write_hf_config(folder.path(), m, {});
  auto entries = hf_entries(m, {});
  const auto retype = [&](const std::string& kind) {
    for (auto& e : entries)
      if (e.name.ends_with(kind)) e.dtype = "BF16";
    write_headers(folder.path(), entries);
    return judged(folder.path());
  };
  CHECK(retype("_conv1d.weight") == "");
  CHECK(retype("o_norm.weight") == "");
  CHECK(contains(retype("layers.2.self_attn.dt_bias"),
                 "layers.2.self_attn.dt_bias: is BF16 [18], the others of the self_attn.dt_bias are F32"));

  const HfForm form{.vision = true, .prefix = "language_model."};
  const TempFolder whole;
  write_hf_config(whole.path(), m, form);
  entries = hf_entries(m, form);
  write_headers(whole.path(), entries, 3);
  CHECK(judged(whole.path()) == "");
  write_hf_config(whole.path(), m, {});  // without a word of pictures their tensors are strangers
  CHECK(contains(judged(whole.path()), "mm_projector.post_norm.weight: is BF16 [24], not a tensor of this model"));
}

TEST_CASE("MXFP4 experts are decoded, each into its own rows", "[core][cpu]") {
  const core::ModelConfig m = packable();
  const TempFolder folder;
  write_hf_config(folder.path(), m, {});
  write_headers(folder.path(), hf_entries(m, {.packed = true}));
  const std::string expert = "model.layers.2.block_sparse_moe.experts.5.w1.weight";
  const std::uint8_t codes[2] = {0x2f, 0x91}, scale = 129;        // -6, 1; 0.5, -0.5; times 4
  poke(folder.path(), expert + "_packed", codes, 2, 16 * 3 + 8);  // row 3, columns 16 ..
  poke(folder.path(), expert + "_scale", &scale, 1, 3);
  const auto got = read_all(folder.path(), "model.layers.2.block_sparse_moe.experts.w1");
  std::vector<double> want(std::size_t(8 * 64 * 32));
  const std::size_t at = (5 * 64 + 3) * 32 + 16;
  want[at] = -24, want[at + 1] = 4, want[at + 2] = 2, want[at + 3] = -2;
  CHECK(got == want);
  const std::uint8_t nan = 255;
  poke(folder.path(), expert + "_scale", &nan, 1, 2);
  CHECK(contains(error_of([&] { read_all(folder.path(), "model.layers.2.block_sparse_moe.experts.w1"); }),
                 "model-0.safetensors: " + expert + "_packed: element 64 is not a finite number"));
}

TEST_CASE("the padding of A_log is left out, and refused where it is not zero", "[core][cpu]") {
  const core::ModelConfig m = tiny_config().model;  // two heads
  const TempFolder folder;
  write_hf_config(folder.path(), m, {});
  write_headers(folder.path(), hf_entries(m, {}));
  const std::string name = "model.layers.1.self_attn.A_log";
  const float values[2] = {0.25F, -1.5F}, stray = 0.5F, nan = std::nanf("");
  poke(folder.path(), name, values, sizeof values);
  CHECK(read_all(folder.path(), name) == std::vector<double>{0.25, -1.5});
  poke(folder.path(), name, &stray, sizeof stray, 4 * 127);
  CHECK(contains(error_of([&] { read_all(folder.path(), name); }), "A_log: element 127 is 0.5"));
  poke(folder.path(), name, &nan, sizeof nan, 4 * 2);
  CHECK(contains(error_of([&] { read_all(folder.path(), name); }), "A_log: element 2 is nan"));
}

TEST_CASE("a value that is no number is refused by file, tensor and place", "[core][cpu]") {
  const core::ModelConfig m = tiny_config().model;
  const TempFolder folder;
  write_hf_config(folder.path(), m, {});
  write_headers(folder.path(), hf_entries(m, {}));
  const std::uint16_t infinite = 0x7f80;
  poke(folder.path(), "lm_head.weight", &infinite, 2, 2 * 30);
  CHECK(contains(error_of([&] { read_all(folder.path(), "lm_head.weight"); }),
                 "model-0.safetensors: lm_head.weight: element 30 is not a finite"));
}

TEST_CASE("config.json is judged like a job, but for keys that nobody here knows", "[core][cpu]") {
  const TempFolder folder;
  const core::ModelConfig m = tiny_config().model;
  auto with = [&](const std::string& from, const std::string& to) {
    write_hf_config(folder.path(), m, {});
    std::string text = io::read_text(folder / "config.json");
    const auto at = text.find(from);
    REQUIRE(at != text.npos);
    folder.file("config.json", text.replace(at, from.size(), to));
    return error_of([&] { core::read_hf_model(folder.path()); });
  };
  CHECK(with("\"vocab_size\"", "\"an_unknown_key\": 1, \"vocab_size\"") == "nothing was thrown");
  CHECK(
      contains(with("\"hidden_size\": 24", "\"hidden_size\": \"wide\""), "config.json: hidden_size: is 'wide', expected integer"));
  CHECK(contains(with("\"hidden_act\": \"situ\",", ""), "config.json: hidden_act: is missing"));
  CHECK(contains(with("\"num_experts_per_token\": 2", "\"num_experts_per_token\": 20"),
                 "num_experts_per_token 20 is more than num_experts 8"));
  CHECK(contains(with("\"model_type\": \"kimi_linear\"", "\"model_type\": \"llama\""), "config.json: model_type: is 'llama'"));
  CHECK(contains(with("\"kda_layers\": []", "\"kda_layers\": [1, 2]"), "layer 3 is neither here nor in full_attn_layers"));
}
