// config_test.cpp -- every value of a job lands in its field and is written back; every key stands in configs/README.md.
#include "core/config.h"

#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "tests/core/judged.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::core;
using test::joined;
using test::judge;
using test::whole_job;

TEST_CASE("a whole job has no faults", "[core][cpu]") { CHECK(joined(judge(whole_job(), {}, 4).faults).empty()); }

TEST_CASE("every value of a job lands in its field", "[core][cpu]") {
  const std::string text = R"(
run: {name: n, dir: d/e, seed: 18446744073709551615, device: cpu, dtype: fp64, deterministic: false}
model:
  initializer_range: 0.01
  vocab_size: 300
  hidden_size: 65
  num_hidden_layers: 6
  num_attention_heads: 3
  num_key_value_heads: 3
  intermediate_size: 130
  rms_norm_eps: 1e-4
  q_lora_rank: 24
  kv_lora_rank: 16
  qk_nope_head_dim: 8
  qk_rope_head_dim: 4
  v_head_dim: 9
  mla_use_output_gate: true
  linear_attn_config:
    num_heads: 2
    head_dim: 17
    short_conv_kernel_size: 3
    gate_lower_bound: -4.5
    use_full_rank_gate: true
    full_attn_layers: [4, 6]
    kda_layers: [1, 2, 3, 5]
  dsa_config: {num_heads: 7, head_dim: 11, topk: 5, index_norm_eps: 1e-6, index_norm_bias: false, dsa_layers: [4, 6]}
  num_experts: 12
  num_experts_per_token: 3
  num_shared_experts: 2
  moe_intermediate_size: 33
  routed_expert_hidden_size: 31
  latent_moe_use_norm: true
  first_k_dense_replace: 1
  moe_layer_freq: 2
  moe_renormalize: false
  use_grouped_topk: true
  routed_scaling_factor: 2.5
  num_expert_group: 3
  topk_group: 2
  hidden_act: situ
  activation_situ_beta: 3
  activation_situ_linear_beta: 20
  attn_res_block_size: 2
  tie_word_embeddings: true
  max_position_embeddings: 4096
parallel: {data_parallel: 2, expert_parallel: 3, sharding: gradients, reshard_after_use: false, bucket_size: 2 mib, expert_sharding: none}
data: {train: [/, /usr], eval: /usr, format: tokens, sequence_length: 64, packing: false, shuffle: false, exclude: MPL*,
       bad_lines: skip}
training: {steps: 20, micro_batch_size: 2, gradient_accumulation: 4, grad_clip: 0.5, eval_every: 5,
           eval_batches: 3, trainable: ["*.w1"],
           max_nonfinite: 4}
optimizer: {lr: 0.01, betas: [0.8, 0.9], eps: 1e-6, weight_decay: 0.2}
schedule: {name: wsd, warmup_steps: 5, min_lr: 0.001, decay_fraction: 0.5}
loss: {seq_chunk: 7, vocab_chunk: 11, indexer_coefficient: 0.5, indexer_stage: dense}
moe: {capacity_factor: 1.25, overflow: drop, balance: auxiliary, quantile_bins: 500, sign_rate: 0.01, auxiliary_coefficient: 0.2,
      auxiliary_scope: micro_batch,
      z_loss: 0.3}
memory: {activation_checkpointing: full, device_limit: 1.5 GiB, cache: {ops: [kda, linear], device: 2GiB, host: 3GB},
         offload: {optimizer: host, experts: host, slice: 1MiB}}
lora: {rank: 4, alpha: 9, dropout: 0.25, rslora: true, shared_a: true, target: [attention, "*.w1"]}
checkpoint: {every: 3, keep: 5}
monitor: {expert_load_alert: 4, profile_steps: 6}
)";
  const auto [c, faults, given] = judge(text, {}, 6);
  REQUIRE(joined(faults).empty());
  CHECK(c.run.name == "n");
  CHECK(c.run.dir == "d/e");
  CHECK(c.run.seed == 18446744073709551615ULL);
  CHECK(c.run.device == DeviceChoice::cpu);
  CHECK(c.run.dtype == DType::f64);
  CHECK_FALSE(c.run.deterministic);
  const auto& m = c.model;
  CHECK(m.initializer_range == 0.01);
  CHECK(m.vocab_size == 300);
  CHECK(m.hidden_size == 65);
  CHECK(m.num_hidden_layers == 6);
  CHECK(m.num_attention_heads == 3);
  CHECK(m.num_key_value_heads == 3);
  CHECK(m.intermediate_size == 130);
  CHECK(m.rms_norm_eps == 1e-4);
  CHECK(m.q_lora_rank == 24);
  CHECK(m.kv_lora_rank == 16);
  CHECK(m.qk_nope_head_dim == 8);
  CHECK(m.qk_rope_head_dim == 4);
  CHECK(m.v_head_dim == 9);
  CHECK(m.mla_use_output_gate);
  CHECK(m.linear_attn.num_heads == 2);
  CHECK(m.linear_attn.head_dim == 17);
  CHECK(m.linear_attn.short_conv_kernel_size == 3);
  CHECK(m.linear_attn.gate_lower_bound == -4.5);
  CHECK(m.linear_attn.use_full_rank_gate);
  CHECK(m.linear_attn.full_attn_layers == std::vector<std::int64_t>{4, 6});
  CHECK(m.linear_attn.kda_layers == std::vector<std::int64_t>{1, 2, 3, 5});
  REQUIRE(m.dsa.has_value());
  CHECK(m.dsa->index_n_heads == 7);
  CHECK(m.dsa->index_head_dim == 11);
  CHECK(m.dsa->index_topk == 5);
  CHECK(m.dsa->index_norm_eps == 1e-6);
  CHECK_FALSE(m.dsa->index_norm_bias);
  CHECK(m.dsa->layers == std::vector<std::int64_t>{4, 6});
  CHECK(m.num_experts == 12);
  CHECK(m.num_experts_per_token == 3);
  CHECK(m.num_shared_experts == 2);
  CHECK(m.moe_intermediate_size == 33);
  CHECK(m.routed_expert_hidden_size == 31);
  CHECK(m.latent_moe_use_norm);
  CHECK(m.first_k_dense_replace == 1);
  CHECK(m.moe_layer_freq == 2);
  CHECK_FALSE(m.moe_renormalize);
  CHECK(m.use_grouped_topk);
  CHECK(m.routed_scaling_factor == 2.5);
  CHECK(m.num_expert_group == 3);
  CHECK(m.topk_group == 2);
  CHECK(m.hidden_act == ops::GluKind::situ);
  CHECK(m.activation_situ_beta == 3);
  CHECK(m.activation_situ_linear_beta == 20);
  CHECK(m.attn_res_block_size == 2);
  CHECK(m.tie_word_embeddings);
  CHECK(m.max_position_embeddings == 4096);
  CHECK(c.parallel.data_parallel == 2);
  CHECK(c.parallel.expert_parallel == 3);
  CHECK(c.parallel.sharding == parallel::Sharding::gradients);
  CHECK_FALSE(c.parallel.reshard_after_use);
  CHECK(c.parallel.bucket_size.bytes == 2 << 20);
  CHECK_FALSE(c.parallel.expert_sharding);
  CHECK(c.data.train == std::vector<std::string>{"/", "/usr"});
  CHECK(c.data.eval == std::vector<std::string>{"/usr"});
  CHECK(c.data.format == io::DataFormat::tokens);
  CHECK(c.data.sequence_length == 64);
  CHECK_FALSE(c.data.packing);
  CHECK_FALSE(c.data.shuffle);
  CHECK(c.data.skip_bad_lines);
  CHECK(c.data.exclude == std::vector<std::string>{"MPL*"});
  CHECK(c.training.steps == 20);
  CHECK(c.training.micro_batch_size == 2);
  CHECK(c.training.gradient_accumulation == 4);
  CHECK(c.training.grad_clip == 0.5);
  CHECK(c.training.eval_every == 5);
  CHECK(c.training.eval_batches == 3);
  CHECK(c.training.trainable == std::vector<std::string>{"*.w1"});
  CHECK(c.training.max_nonfinite == 4);
  CHECK(c.optimizer.lr == 0.01);
  CHECK(c.optimizer.beta1 == 0.8);
  CHECK(c.optimizer.beta2 == 0.9);
  CHECK(c.optimizer.eps == 1e-6);
  CHECK(c.optimizer.weight_decay == 0.2);
  CHECK(c.schedule.name == ScheduleKind::wsd);
  CHECK(c.schedule.warmup_steps == 5);
  CHECK(c.schedule.min_lr == 0.001);
  CHECK(c.schedule.decay_fraction == 0.5);
  CHECK(c.loss.seq_chunk == 7);
  CHECK(c.loss.vocab_chunk == 11);
  CHECK(c.loss.indexer_coefficient == 0.5);
  CHECK(c.loss.indexer_stage == IndexerStage::dense);
  CHECK(c.moe.capacity_factor == 1.25);
  CHECK(c.moe.overflow == core::Overflow::drop);
  CHECK(c.moe.balance == Balance::auxiliary);
  CHECK(c.moe.quantile_bins == 500);
  CHECK(c.moe.sign_rate == 0.01);
  CHECK(c.moe.auxiliary_coefficient == 0.2);
  CHECK(c.moe.auxiliary_scope == AuxiliaryScope::micro_batch);
  CHECK(c.moe.z_loss == 0.3);
  CHECK(c.memory.activation_checkpointing == Checkpointing::full);
  CHECK(c.memory.device_limit == io::ByteCount{3 << 29});
  CHECK(c.memory.cache.ops == std::vector<std::string>{"kda", "linear"});
  CHECK((c.memory.cache.device.bytes == std::int64_t(2) << 30 && c.memory.cache.host.bytes == 3'000'000'000));
  CHECK((c.memory.offload.optimizer && c.memory.offload.experts && c.memory.offload.slice.bytes == 1 << 20));
  REQUIRE(c.lora);
  CHECK(c.lora->rank == 4);
  CHECK(c.lora->alpha == 9);
  CHECK(c.lora->dropout == 0.25);
  CHECK(c.lora->rslora);
  CHECK(c.lora->shared_a);
  CHECK(c.lora->target == std::vector<std::string>{"attention", "*.w1"});
  CHECK(c.checkpoint.every == 3);
  CHECK(c.checkpoint.keep == 5);
  CHECK(c.monitor.expert_load_alert == 4);
  CHECK(c.monitor.profile_steps == 6);

  // What is written is complete, reads without faults and gives the same job.
  const auto written = config_to_yaml(c);
  const auto [again, none, given_again] = judge(io::to_yaml(written), {}, 6);
  CHECK(joined(none).empty());
  CHECK(config_to_yaml(again) == written);
}

TEST_CASE("a job written by one config is read as the same config, digits and absent values too", "[core][cpu]") {
  auto [c, faults, given] = judge(whole_job());
  REQUIRE(faults.empty());
  c.optimizer.lr = 0.1 + 0.2;
  c.optimizer.eps = 5e-324;
  c.run.name = "a: [b], #c \"d\" ~";
  c.data.train = {"/", "two words", "- x", "two\nlines\x01"};
  c.model.q_lora_rank.reset();
  c.model.dsa.reset();
  c.memory.device_limit = io::ByteCount{12345678901};
  std::vector<Fault> wrong;
  const Config again = read_config(io::parse_yaml(io::to_yaml(config_to_yaml(c)), "written"), {}, "", wrong);
  CHECK(wrong.empty());
  CHECK(again.optimizer.lr == 0.1 + 0.2);
  CHECK(again.optimizer.eps == 5e-324);
  CHECK(again.run.name == c.run.name);
  CHECK(again.data.train == c.data.train);
  CHECK_FALSE(again.model.q_lora_rank.has_value());
  CHECK_FALSE(again.model.dsa.has_value());
  CHECK(again.memory.device_limit == c.memory.device_limit);
  CHECK(config_to_yaml(again) == config_to_yaml(c));
}

TEST_CASE("what is written names every key that is documented, in their order", "[core][cpu]") {
  auto [c, faults, given] = judge(whole_job());
  c.lora.emplace();
  std::vector<std::string> written, documented;
  const auto root = config_to_yaml(c);
  const std::function<void(const io::YamlNode&, const std::string&)> walk = [&](const io::YamlNode& node, const std::string& path) {
    for (const auto& [name, value] : node.entries) {
      if (value.kind == io::YamlNode::map)
        walk(value, path + name + ".");
      else
        written.push_back(path + name);
    }
  };
  walk(root, "");
  const std::set<std::string> silent = {"model.preset",
                                        "model.model_type",
                                        "model.architectures",
                                        "model.bos_token_id",
                                        "model.eos_token_id",
                                        "model.pad_token_id",
                                        "model.head_dim",
                                        "model.rope_theta",
                                        "model.rope_scaling",
                                        "model.num_nextn_predict_layers",
                                        "memory.offload.path"};
  for (const auto& doc : documented_keys())
    if (!silent.contains(doc.key)) documented.push_back(doc.key);
  CHECK(joined(written) == joined(documented));
}

TEST_CASE("a preset is taken by name or path and overridden key by key", "[core][cpu]") {
  const std::string rest = "data: {train: /, sequence_length: 64}\ntraining: {steps: 5}\n";
  const auto j = judge(
      "model: {preset: tiny-k3.1, hidden_size: 96, dsa_config: {index_topk: 8}, linear_attn_config: {full_attn_layers: [5]}}\n" +
      rest);
  CHECK(joined(j.faults).empty());
  CHECK(j.config.model.hidden_size == 96);
  CHECK(j.config.model.kv_lora_rank == 32);
  REQUIRE(j.config.model.dsa.has_value());
  CHECK(j.config.model.dsa->index_topk == 8);
  CHECK(j.config.model.dsa->index_n_heads == 4);
  CHECK(j.config.model.linear_attn.num_heads == 4);
  CHECK(j.config.model.preset == "tiny-k3.1");
  CHECK(config_to_yaml(j.config).find("model")->find("preset") == nullptr);

  CHECK(joined(judge("model: {preset: kimi-k3.1, linear_attn_config: {full_attn_layers: [4, 93]}}\n" + rest).faults).empty());
  CHECK(joined(judge(rest, {"model.preset=tiny-linear"}).faults).empty());
  CHECK(joined(judge("model:\n  preset: kimi-k4\n" + rest).faults) ==
        "2 model.preset: is 'kimi-k4', neither a preset (kimi-k3, kimi-k3.1, kimi-linear-48b, tiny-k3, tiny-k3.1, tiny-linear) nor "
        "a file; "
        "did you mean kimi-k3?\n");

  const test::TempFolder folder;
  folder.file("mine.yaml",
              "vocab_size: 300\nhidden_size: 8\nnum_hidden_layers: 1\nintermediate_size: 16\nlinear_attn_config: {num_heads: 1, "
              "head_dim: 8}\n");
  const auto own = judge("model: {preset: mine.yaml}\n" + rest, {}, 0, folder.path());
  CHECK(joined(own.faults).empty());
  CHECK(own.config.model.hidden_size == 8);

  folder.file("bad.yaml", "vocab_size: 300\nhiden_size: 8\npreset: kimi-k3\n");
  const auto bad = joined(judge("run: {}\nmodel:\n  preset: bad.yaml\n" + rest, {}, 0, folder.path()).faults);
  CHECK(test::contains(bad, "3 model.hiden_size: in " + folder / "bad.yaml" + ":2: unknown key, did you mean hidden_size?\n"));
  CHECK(test::contains(bad, "3 model.preset: in " + folder / "bad.yaml" + ":3: a preset names no other preset\n"));
  folder.file("twice.yaml", "vocab_size: 300\nvocab_size: 301\nhiden_size: 8\n");
  const auto twice = joined(judge("model: {preset: twice.yaml}\n" + rest, {}, 0, folder.path()).faults);
  CHECK(test::contains(twice, "1 model.preset: in " + folder / "twice.yaml" + ":2: key vocab_size is given twice"));
  CHECK(test::contains(twice, "1 model.hiden_size: in " + folder / "twice.yaml" + ":3: unknown key"));
  folder.file("broken.yaml", "a: [\n");
  CHECK(test::contains(joined(judge("model: {preset: broken.yaml}\n" + rest, {}, 0, folder.path()).faults), "broken.yaml:"));
}

TEST_CASE("a layer is full attention exactly where the list that counts from 1 says so", "[core][cpu]") {
  ModelConfig m;
  m.linear_attn.full_attn_layers = {4, 5};
  std::vector<bool> full;
  for (std::int64_t layer = 0; layer < 6; ++layer) full.push_back(m.full_attention(layer));
  CHECK(full == std::vector<bool>{false, false, false, true, true, false});
}

TEST_CASE("configs/README.md lists every key with its type, default and meaning, and no other", "[core][cpu]") {
  const auto trimmed = [](std::string text) {
    text.erase(0, text.find_first_not_of(' '));
    text.erase(text.find_last_not_of(' ') + 1);
    return text;
  };
  std::map<std::string, std::string> page, code;
  std::ifstream file(std::string(MOETRAIN_SOURCE_DIR) + "/configs/README.md");
  REQUIRE(file.good());
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("| `")) continue;
    std::vector<std::string> cells;
    for (std::size_t begin = 1; begin < line.size();) {
      const auto end = std::min(line.find('|', begin), line.size());
      cells.push_back(trimmed(line.substr(begin, end - begin)));
      begin = end + 1;
    }
    CAPTURE(line);
    REQUIRE(cells.size() == 4);
    const std::string key = cells[0].substr(1, cells[0].size() - 2);
    CHECK_FALSE(page.contains(key));
    page[key] = cells[1] + " | " + cells[2] + " | " + cells[3];
  }
  for (const auto& doc : documented_keys()) code[doc.key] = doc.type + " | " + doc.default_text + " | " + doc.meaning;
  CHECK(code.size() > 100);
  for (const auto& [key, text] : code) {
    CAPTURE(key);
    CHECK(page[key] == text);
  }
  for (const auto& [key, text] : page) {
    CAPTURE(key, text);
    CHECK(code.contains(key));
  }
}
