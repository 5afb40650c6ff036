// export_peft_test.cpp -- adapters in the peft library's files: its own equations give the merged weights, and nothing is left out.
#include "core/export_peft.h"

#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "core/checkpoint_saver.h"
#include "core/export.h"
#include "core/hf_names.h"
#include "core/lora.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
using Json = nlohmann::json;

namespace {

core::Config with_adapters(core::Config c, std::vector<std::string> target, bool shared_a = false) {
  c.model.tie_word_embeddings = false;
  c.lora =
      core::LoraConfig{.rank = 3, .alpha = 5, .dropout = 0, .rslora = shared_a, .shared_a = shared_a, .target = std::move(target)};
  return c;
}
const std::vector<std::string> kEverything = {"attention", "shared", "expert_proj", "head", "*.mlp.*", "*.gate.weight"};

struct Saved {
  std::unique_ptr<core::Trainer> run;
  std::string checkpoint;
};
Saved saved(const core::Config& c, const TempFolder& folder) {
  Saved s{std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true), ""};
  s.run->initialize();
  disturb(*s.run);
  core::CheckpointSaver(*s.run, folder / "run", 1).save();
  s.checkpoint = core::latest_checkpoint(folder / "run");
  return s;
}

struct Exported {
  Json config;
  io::SafetensorsFolder files;
  std::set<std::string> unread;

  Exported(const Saved& s, const std::string& out, const core::PeftOptions& options) {
    core::export_adapters(*parallel::solo(), s.checkpoint, out, options);
    config = Json::parse(io::read_text(out + "/adapter_config.json"));
    files = io::read_safetensors_folder(out);
    for (const auto& [name, place] : files.tensors) unread.insert(name);
  }
  std::vector<double> values(const std::string& name, Shape shape) {
    CAPTURE(name);
    REQUIRE(files.tensors.contains("base_model.model." + name));
    const auto& place = files.tensors.at("base_model.model." + name);
    CHECK(place.entry.shape == std::vector<std::int64_t>{shape[0], shape[1]});
    std::vector<double> v(std::size_t(shape.count()));
    io::read_safetensors_values(files.path_of(place), place.entry, 0, Tensor(v.data(), DType::f64, shape));
    unread.erase("base_model.model." + name);
    return v;
  }
  // What the library makes of the keys.
  static bool matches(const Json& endings, const std::string& name) {
    for (const std::string ending : endings)
      if (name == ending || name.ends_with("." + ending)) return true;
    return false;
  }
  std::int64_t rank_of(const std::string& parameter) const {
    for (const auto& [ending, rank] : config["rank_pattern"].items())
      if (matches(Json::array({ending}), parameter)) return rank;
    return config["r"];
  }
  double scale_of(const std::string& parameter) const {
    double alpha = config["lora_alpha"];
    for (const auto& [ending, other] : config["alpha_pattern"].items())
      if (matches(Json::array({ending}), parameter)) alpha = other;
    const auto r = double(rank_of(parameter));
    return alpha / (config["use_rslora"] ? std::sqrt(r) : r);
  }
};

// Rows of dim 0: what merging adds to a weight.
std::vector<double> delta(core::Trainer& t, int i, std::int64_t first, std::int64_t count) {
  const core::WeightSource source{"run", [&](int param, std::int64_t row, Tensor to) {
                                    const Tensor w =
                                        t.params().stored(param, t.params().update_rows(param)).rows(row, row + to.shape[0]);
                                    std::copy_n(w.as<double>(), w.count(), to.as<double>());
                                  }};
  const Shape shape = t.table()[i].shape.with_dim0(count);
  std::vector<double> with(std::size_t(shape.count())), without = with;
  core::merged(source, t.table()).read(i, first, Tensor(with.data(), DType::f64, shape));
  source.read(i, first, Tensor(without.data(), DType::f64, shape));
  for (std::size_t k = 0; k < with.size(); ++k) with[k] -= without[k];
  return with;
}

}  // namespace

TEST_CASE("a file of adapters one by one holds each, and its config names their modules and no other", "[core][cpu]") {
  for (const bool shared_a : {false, true}) {
    const TempFolder folder;
    auto target = kEverything;
    target.push_back("latent");
    if (shared_a) target = {"*.layers.2.*.w1", "*.indexer.wk.weight", "*.layers.1.self_attn.?_proj.weight"};
    const Saved s = saved(with_adapters(tiny_config(), target, shared_a), folder);
    Exported e(s, folder / "out", {});
    const auto& table = s.run->table();
    const int own = core::parameters_of(s.run->config().model).size();
    for (const core::HfTensor& t : core::hf_tensors(s.run->config().model, table)) {
      if (t.param >= own) continue;
      const core::Param& p = table[t.param];
      const std::string module = t.name.substr(0, t.name.rfind('.'));
      CAPTURE(t.name);
      const bool router = t.name.ends_with(".gate.weight");
      CHECK(Exported::matches(e.config["target_modules"], module) == (p.adapter.present() && !router));
      CHECK((e.config["target_parameters"].is_array() && Exported::matches(e.config["target_parameters"], t.name)) ==
            (p.adapter.present() && router));
      if (!p.adapter.present()) continue;
      const std::int64_t O = t.shape[0], I = t.shape[1], r = e.config["r"];
      const auto a = e.values(module + ".lora_A.weight", {r, I}), b = e.values(module + ".lora_B.weight", {O, r});
      auto want = delta(*s.run, t.param, t.rows.begin, t.rows.count());
      std::vector<double> got(want.size());
      for (std::int64_t o = 0; o < O; ++o)
        for (std::int64_t i = 0; i < I; ++i)
          for (std::int64_t k = 0; k < r; ++k)
            got[std::size_t(o * I + i)] += e.scale_of(module) * b[std::size_t(o * r + k)] * a[std::size_t(k * I + i)];
      CHECK(difference(got, want, 1e-9, 1e-12) == "");
    }
    CHECK(e.unread.empty());
  }
}

TEST_CASE("a file of fused experts gives every expert its own merged weight by the library's order of indices", "[core][cpu]") {
  for (const bool shared_a : {false, true})
    for (const auto& target : {kEverything, {"*.layers.1.*.w1", "*.layers.1.*.w2", "*.layers.2.*.w3", "*.layers.3.*.w?"}}) {
      const TempFolder folder;
      const Saved s = saved(with_adapters(tiny_linear_config(), target, shared_a), folder);
      Exported e(s, folder / "out", {.experts = core::ExpertLayout::fused, .base = "a/name"});
      CHECK(e.config["base_model_name_or_path"] == "a/name");
      const auto& table = s.run->table();
      for (int layer = 1; layer < 5; ++layer) {
        const std::string ours = "model.layers." + std::to_string(layer) + ".block_sparse_moe.experts.";
        const std::string module = "model.layers." + std::to_string(layer) + ".mlp.experts";
        const int w1 = table.find(ours + "w1"), w2 = table.find(ours + "w2"), w3 = table.find(ours + "w3");
        const bool down = table[w2].adapter.present(), up = table[w1].adapter.present() || table[w3].adapter.present();
        const std::int64_t E = table[w1].shape[0], F = table[w1].shape[1], D = table[w1].shape[2];
        const auto holds = [&](const std::string& parameter, const std::string& prefix, std::int64_t O, std::int64_t I,
                               auto&& want) {
          CHECK(Exported::matches(e.config["target_parameters"], parameter));
          const std::int64_t r = e.rank_of(parameter);
          const auto a = e.values(prefix + ".lora_A.weight", {E * r, I}), b = e.values(prefix + ".lora_B.weight", {O, r * E});
          for (std::int64_t x = 0; x < E; ++x) {
            std::vector<double> got(std::size_t(O * I));
            for (std::int64_t o = 0; o < O; ++o)
              for (std::int64_t i = 0; i < I; ++i)
                for (std::int64_t k = 0; k < r; ++k)
                  got[std::size_t(o * I + i)] +=
                      e.scale_of(parameter) * b[std::size_t(o * r * E + k * E + x)] * a[std::size_t((x * r + k) * I + i)];
            CHECK(difference(got, want(x), 1e-9, 1e-12) == "");
          }
        };
        if (down) holds(module + ".down_proj", module, D, F, [&](std::int64_t x) { return delta(*s.run, w2, x, 1); });
        if (up)
          holds(module + ".gate_up_proj", module + (down ? ".base_layer" : ""), 2 * F, D, [&](std::int64_t x) {
            auto both = delta(*s.run, w1, x, 1);
            const auto second = delta(*s.run, w3, x, 1);
            both.insert(both.end(), second.begin(), second.end());
            return both;
          });
      }
      std::erase_if(e.unread, [](const std::string& name) { return name.find(".experts.") == std::string::npos; });
      CHECK(e.unread.empty());
    }
}

TEST_CASE("factors keep the type they are stored in, and a base with pictures puts its prefix before every name", "[core][cpu]") {
  for (const DType dtype : {DType::bf16, DType::f32}) {
    const TempFolder folder;
    core::Config c = with_adapters(tiny_config(), {"attention", "expert_proj"});
    c.run.dtype = dtype;
    const Saved s = saved(c, folder);
    core::export_folder(*parallel::solo(), s.checkpoint, folder / "base", {.merge = true});
    const std::string config = io::read_text(folder / "base" + "/config.json");
    io::write_text_atomically(folder / "base" + "/config.json", "{\"vision_config\": {}," + config.substr(1));
    const Exported e(s, folder / "out", {.experts = core::ExpertLayout::separate, .base = folder / "base"});
    for (const auto& [name, place] : e.files.tensors) {
      CHECK(name.starts_with("base_model.model.language_model.model.layers."));
      CHECK(place.entry.dtype == (dtype == DType::bf16 ? "BF16" : "F32"));
    }
    CHECK(e.config["target_parameters"].is_null());
  }
}

TEST_CASE("what files of adapters cannot hold is refused by name and leaves nothing", "[core][cpu]") {
  const auto refused = [](const core::Config& c, core::ExpertLayout experts = core::ExpertLayout::separate) {
    const TempFolder folder;
    const Saved s = saved(c, folder);
    const std::string error = error_of([&] {
      core::export_adapters(*parallel::solo(), s.checkpoint, folder / "out", {experts, ""});
    });
    CHECK(!std::filesystem::exists(folder / "out"));
    return error;
  };
  CHECK(contains(refused(tiny_config()), "holds no adapters"));
  core::Config more = with_adapters(tiny_config(), {"attention"});
  CHECK(contains(refused(more, core::ExpertLayout::fused), "no class for a model with attn_res_block_size"));
  more.training.trainable = {"model.norm.weight", "*.layers.1.*.e_score_correction_bias"};
  const std::string error = refused(more);
  CHECK(contains(error, "model.norm.weight"));
  CHECK(contains(error, "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"));
}
