// config_test.cpp -- a job is read strictly, judged whole and written back; every key stands in configs/README.md.
#include "core/config.h"

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::core;

namespace {

// Reads and checks; each fault as "line key: text".
struct Judged {
  Config config;
  std::vector<std::string> faults;
};
Judged judge(const std::string& text, const std::vector<std::string>& set = {}, int ranks = 0, const std::string& folder = "") {
  const auto job = io::parse_yaml(text, "job.yaml");
  std::vector<Fault> faults;
  Judged j;
  j.config = read_config(job, set, folder, faults);
  check_config(j.config, job, ranks, faults);
  for (const auto& f : faults) j.faults.push_back(std::to_string(f.line) + " " + f.key + ": " + f.text);
  return j;
}
std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

// Every rule holds here, and each test breaks one.
std::string whole_job() {
  return "run: {name: whole}\n"
         "model:\n"
         "  vocab_size: 300\n"
         "  hidden_size: 64\n"
         "  num_hidden_layers: 5\n"
         "  num_attention_heads: 4\n"
         "  intermediate_size: 128\n"
         "  q_lora_rank: 24\n"
         "  kv_lora_rank: 16\n"
         "  qk_nope_head_dim: 8\n"
         "  qk_rope_head_dim: 4\n"
         "  v_head_dim: 8\n"
         "  linear_attn_config: {num_heads: 2, head_dim: 16, full_attn_layers: [4, 5]}\n"
         "  dsa_config: {index_n_heads: 2, index_head_dim: 8, index_topk: 4}\n"
         "  num_experts: 8\n"
         "  num_experts_per_token: 2\n"
         "  moe_intermediate_size: 32\n"
         "  first_k_dense_replace: 1\n"
         "parallel: {data_parallel: 2, expert_parallel: 2}\n"
         "data: {train: [/], sequence_length: 32}\n"
         "training: {steps: 10}\n";
}

}  // namespace

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
parallel: {data_parallel: 2, expert_parallel: 3, sharding: gradients, reshard_after_use: false, expert_sharding: none}
data: {train: [/, /usr], eval: /usr, format: tokens, sequence_length: 64, packing: false, shuffle: false, exclude: MPL*}
training: {steps: 20, micro_batch_size: 2, gradient_accumulation: 4, grad_clip: 0.5, eval_every: 5,
           eval_batches: 3, trainable: ["*.w1"],
           max_nonfinite: 4}
optimizer: {lr: 0.01, betas: [0.8, 0.9], eps: 1e-6, weight_decay: 0.2}
schedule: {name: wsd, warmup_steps: 5, min_lr: 0.001, decay_fraction: 0.5}
loss: {seq_chunk: 7, vocab_chunk: 11, indexer_coefficient: 0.5, indexer_stage: dense}
moe: {overflow: drop, balance: auxiliary, quantile_bins: 500, sign_rate: 0.01, auxiliary_coefficient: 0.2,
      auxiliary_scope: micro_batch,
      z_loss: 0.3}
memory: {activation_checkpointing: full}
checkpoint: {every: 3, keep: 5}
monitor: {expert_load_alert: 4, profile_steps: 6}
)";
  const auto [c, faults] = judge(text, {}, 6);
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
  CHECK_FALSE(c.parallel.expert_sharding);
  CHECK(c.data.train == std::vector<std::string>{"/", "/usr"});
  CHECK(c.data.eval == std::vector<std::string>{"/usr"});
  CHECK(c.data.format == io::DataFormat::tokens);
  CHECK(c.data.sequence_length == 64);
  CHECK_FALSE(c.data.packing);
  CHECK_FALSE(c.data.shuffle);
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
  CHECK(c.moe.overflow == "drop");
  CHECK(c.moe.balance == Balance::auxiliary);
  CHECK(c.moe.quantile_bins == 500);
  CHECK(c.moe.sign_rate == 0.01);
  CHECK(c.moe.auxiliary_coefficient == 0.2);
  CHECK(c.moe.auxiliary_scope == AuxiliaryScope::micro_batch);
  CHECK(c.moe.z_loss == 0.3);
  CHECK(c.memory.activation_checkpointing == Checkpointing::full);
  CHECK(c.checkpoint.every == 3);
  CHECK(c.checkpoint.keep == 5);
  CHECK(c.monitor.expert_load_alert == 4);
  CHECK(c.monitor.profile_steps == 6);

  // What is written is complete, reads without faults and gives the same job.
  const auto written = config_to_yaml(c);
  const auto [again, none] = judge(io::to_yaml(written), {}, 6);
  CHECK(joined(none).empty());
  CHECK(config_to_yaml(again) == written);
}

TEST_CASE("a job written by one config is read as the same config, digits and absent values too", "[core][cpu]") {
  auto [c, faults] = judge(whole_job());
  REQUIRE(faults.empty());
  c.optimizer.lr = 0.1 + 0.2;
  c.optimizer.eps = 5e-324;
  c.run.name = "a: [b], #c\n\"d\" ~";
  c.data.train = {"/", "two words", "- x"};
  c.model.q_lora_rank.reset();
  c.model.dsa.reset();
  std::vector<Fault> wrong;
  const Config again = read_config(io::parse_yaml(io::to_yaml(config_to_yaml(c)), "written"), {}, "", wrong);
  CHECK(wrong.empty());
  CHECK(again.optimizer.lr == 0.1 + 0.2);
  CHECK(again.optimizer.eps == 5e-324);
  CHECK(again.run.name == c.run.name);
  CHECK(again.data.train == c.data.train);
  CHECK_FALSE(again.model.q_lora_rank.has_value());
  CHECK_FALSE(again.model.dsa.has_value());
  CHECK(config_to_yaml(again) == config_to_yaml(c));
}

TEST_CASE("what is written names every key that is documented, in their order", "[core][cpu]") {
  const auto [c, faults] = judge(whole_job());
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
                                        "memory.cache",
                                        "memory.offload",
                                        "lora"};
  for (const auto& doc : documented_keys())
    if (!silent.contains(doc.key)) documented.push_back(doc.key);
  CHECK(joined(written) == joined(documented));
}

TEST_CASE("all faults of a job are found at once, by line, with near names", "[core][cpu]") {
  const auto j = judge(
      "run: {name: x, dvice: cpu}\n"     // 1
      "model:\n"                         // 2
      "  vocab_size: many\n"             // 3
      "  hiden_size: 64\n"               // 4
      "  num_hidden_layers: 2\n"         // 5
      "  linear_attn_config:\n"          // 6
      "    num_heads: 2\n"               // 7
      "    hed_dim: 16\n"                // 8
      "paralel: {data_parallel: 2}\n"    // 9
      "data: {train: /no/such/place}\n"  // 10
      "training:\n"                      // 11
      "  steps: 0\n"                     // 12
      "  hidden_size: 3\n"               // 13
      "  frobnicate_everything: 3\n"     // 14
      "optimizer: 5\n"                   // 15
      "schedule: {name: step}\n");       // 16
  CHECK(joined(j.faults) ==
        "0 model.hidden_size: is missing\n"
        "0 model.intermediate_size: is missing: required with a dense layer\n"
        "0 model.linear_attn_config.head_dim: is missing: required with a KDA layer\n"
        "0 data.sequence_length: is missing\n"
        "1 run.dvice: unknown key, did you mean device?\n"
        "3 model.vocab_size: is 'many', expected integer >= 2\n"
        "4 model.hiden_size: unknown key, did you mean hidden_size?\n"
        "8 model.linear_attn_config.hed_dim: unknown key, did you mean head_dim?\n"
        "9 paralel: unknown key, did you mean parallel?\n"
        "10 data.train: '/no/such/place' does not exist\n"
        "12 training.steps: is '0', expected integer >= 1\n"
        "13 training.hidden_size: unknown key, did you mean model.hidden_size?\n"
        "14 training.frobnicate_everything: unknown key\n"
        "15 optimizer: is '5', expected keys with values\n"
        "16 schedule.name: is 'step', expected one of constant, linear, cosine, wsd\n");
}

TEST_CASE("a job that is no map of sections is one fault, and an empty one lacks what is required", "[core][cpu]") {
  std::vector<Fault> faults;
  read_config(io::parse_yaml("- a\n- b\n", "job.yaml"), {}, "", faults);
  REQUIRE(faults.size() == 1);
  CHECK(faults[0].text == "is [a, b], expected the sections of a job");
  const auto j = judge("");
  for (const char* key :
       {"model.vocab_size", "model.hidden_size", "model.num_hidden_layers", "data.train", "data.sequence_length", "training.steps"})
    CHECK(test::contains(joined(j.faults), std::string("0 ") + key + ": is missing\n"));
}

TEST_CASE("each wrong value is one fault of its key, at its line, with the text seen", "[core][cpu]") {
  struct Row {
    const char *line, *key, *text;
  };
  for (const Row& row : std::vector<Row>{
           {"run: {name: \"\"}", "run.name", "is '', expected text"},
           {"run: {dir: \"\"}", "run.dir", "is '', expected text"},
           {"run: {seed: -1}", "run.seed", "is '-1', expected integer >= 0"},
           {"run: {seed: 18446744073709551616}", "run.seed", "is '18446744073709551616'"},
           {"run: {deterministic: yes}", "run.deterministic", "is 'yes', expected true or false"},
           {"run: {dtype: fp16}", "run.dtype", "is 'fp16', expected one of bf16, fp32, fp64"},
           {"run: {device: [cpu]}", "run.device", "is [cpu], expected one of auto, cpu"},
           {"optimizer: {lr: 0}", "optimizer.lr", "is '0', expected number > 0"},
           {"optimizer: {lr: nan}", "optimizer.lr", "is 'nan', expected number"},
           {"optimizer: {lr: inf}", "optimizer.lr", "is 'inf', expected number"},
           {"optimizer: {lr: 1e-3x}", "optimizer.lr", "is '1e-3x', expected number"},
           {"optimizer: {lr: }", "optimizer.lr", "has no value, expected number"},
           {"optimizer: {eps: 0}", "optimizer.eps", "is '0', expected number > 0"},
           {"optimizer: {betas: [0.9, 1]}", "optimizer.betas", "is [0.9, 1], expected a list of two numbers in [0, 1)"},
           {"optimizer: {betas: [0.9]}", "optimizer.betas", "is [0.9], expected a list of two numbers"},
           {"optimizer: {name: sgd}", "optimizer.name", "is 'sgd', expected only adamw"},
           {"optimizer: {weight_decay: -0.1}", "optimizer.weight_decay", "is '-0.1', expected number >= 0"},
           {"loss: {seq_chunk: -1}", "loss.seq_chunk", "is '-1', expected integer >= 0"},
           {"loss: {vocab_chunk: 1.5}", "loss.vocab_chunk", "is '1.5', expected integer >= 0"},
           {"schedule: {decay_fraction: 0}", "schedule.decay_fraction", "is '0', expected number in (0, 1]"},
           {"moe: {quantile_bins: 1}", "moe.quantile_bins", "is '1', expected integer in [2, 65536]"},
           {"checkpoint: {keep: {a: 1}}", "checkpoint.keep", "is a map of keys, expected integer >= 0"},
           {"monitor: {collective_timeout_s: 0}", "monitor.collective_timeout_s", "is '0', expected number > 0"},
       }) {
    const auto j = judge(whole_job().substr(whole_job().find('\n') + 1) + row.line + "\n");
    CAPTURE(row.line, joined(j.faults));
    REQUIRE(j.faults.size() == 1);
    CHECK(j.faults[0].starts_with("21 " + std::string(row.key) + ": " + row.text));
  }
}

TEST_CASE("each value and each rule of a model, its ranks, data and schedule is held", "[core][cpu]") {
  struct Row {
    std::vector<std::string> set;
    const char *key, *text;
  };
  const std::string linear = "model.linear_attn_config.", dsa = "model.dsa_config.";
  for (const Row& row : std::vector<Row>{
           {{"model.vocab_size=256"}, "model.vocab_size", "vocab_size 256 is too small for data.format bytes"},
           {{"model.num_key_value_heads=2"}, "model.num_attention_heads", "num_key_value_heads 2 is not num_attention_heads 4"},
           {{"model.mla_use_nope=false"}, "model.mla_use_nope", "is 'false', expected only true"},
           {{"model.hidden_act=gelu"}, "model.hidden_act", "is 'gelu', expected one of silu, situ"},
           {{"model.moe_router_activation_func=softmax"},
            "model.moe_router_activation_func",
            "is 'softmax', expected only sigmoid"},
           {{"model.topk_method=greedy"}, "model.topk_method", "is 'greedy', expected only noaux_tc"},
           {{"model.attn_res_block_size=0"}, "model.attn_res_block_size", "is '0', expected integer >= 1"},
           {{"model.hidden_size=3000000000"}, "model.hidden_size", "is '3000000000', expected integer >= 1"},
           {{linear + "gate_lower_bound=0"}, "model.linear_attn_config.gate_lower_bound", "is '0', expected number in [-5, 0)"},
           {{linear + "gate_lower_bound=-5.1"},
            "model.linear_attn_config.gate_lower_bound",
            "is '-5.1', expected number in [-5, 0)"},
           {{linear + "full_attn_layers=[4, 6]"},
            "model.linear_attn_config.full_attn_layers",
            "layer 6 is not in 1 .. num_hidden_layers 5"},
           {{linear + "full_attn_layers=[0]"},
            "model.linear_attn_config.full_attn_layers",
            "is [0], expected list of integers >= 1"},
           {{linear + "full_attn_layers=[4, 4]"}, "model.linear_attn_config.full_attn_layers", "layer 4 stands twice"},
           {{linear + "kda_layers=[1, 2]"},
            "model.linear_attn_config.kda_layers",
            "layer 3 is neither here nor in full_attn_layers"},
           {{linear + "kda_layers=[1, 2, 3, 4]"}, "model.linear_attn_config.kda_layers", "layer 4 is in full_attn_layers too"},
           {{linear + "num_heads=~", linear + "head_dim=16"}, "model.linear_attn_config.num_heads", "has no value"},
           {{linear + "full_attn_layers=[]"}, "model.dsa_config", "an indexer serves full attention"},
           {{dsa + "layers=[4]"}, "model.dsa_config.layers", "has 1 layers that are not the 2 of full_attn_layers"},
           {{dsa + "topk=3"}, "model.dsa_config.topk", "is another name of index_topk"},
           {{dsa + "index_topk=0"}, "model.dsa_config.index_topk", "is '0', expected integer >= 1"},
           {{"model.q_lora_rank=~"}, "model.q_lora_rank", "is missing: required with dsa_config"},
           {{"model.first_k_dense_replace=6"}, "model.first_k_dense_replace", "is 6, more than num_hidden_layers 5"},
           {{"model.latent_moe_use_norm=true"}, "model.latent_moe_use_norm", "needs routed_expert_hidden_size"},
           {{"model.num_experts_per_token=9"}, "model.num_experts_per_token", "num_experts_per_token 9 is more than num_experts 8"},
           {{"model.num_experts_per_token=8"}, "model.num_experts_per_token", "quantile needs fewer experts a token than the 8"},
           {{"model.num_expert_group=3"}, "model.num_experts", "num_expert_group 3 does not divide num_experts 8"},
           {{"model.topk_group=2"}, "model.topk_group", "topk_group 2 is more than num_expert_group 1"},
           {{"model.num_expert_group=4", "model.num_experts_per_token=3", "moe.balance=none"},
            "model.num_experts_per_token",
            "num_experts_per_token 3 is more than the 2 experts of topk_group 1 groups"},
           {{"model.num_expert_group=2", "model.use_grouped_topk=false"},
            "model.use_grouped_topk",
            "num_expert_group 2 needs use_grouped_topk"},
           {{"parallel.expert_parallel=3", "parallel.data_parallel=1"},
            "parallel.expert_parallel",
            "expert_parallel 3 does not divide num_experts 8"},
           {{"parallel.data_parallel=0"}, "parallel.data_parallel", "is '0', expected integer in [1, 32768]"},
           {{"parallel.data_parallel=32768", "parallel.expert_parallel=64", "model.num_experts=64"},
            "parallel.data_parallel",
            "sequence_parallel 1 x tensor_parallel 1 is 2097152 ranks, more than 1048576"},
           {{"parallel.sharding=half"}, "parallel.sharding", "is 'half', expected one of full, gradients, optimizer, none"},
           {{"parallel.expert_placement=random"}, "parallel.expert_placement", "is 'random', expected only uniform"},
           {{"parallel.expert_sharding=half"}, "parallel.expert_sharding", "is 'half', expected one of full, none"},
           {{"data.sequence_length=0"}, "data.sequence_length", "is '0', expected integer >= 1"},
           {{"data.train=[]"}, "data.train", "is [], expected text or list of texts"},
           {{"data.train=[/, \"\"]"}, "data.train", "is [/, ], expected text or list of texts"},
           {{"data.train=/no/such/place"}, "data.train", "'/no/such/place' does not exist"},
           {{"data.eval=[/, /no/such/place]"}, "data.eval", "'/no/such/place' does not exist"},
           {{"data.sequence_length=100", "model.max_position_embeddings=99"},
            "data.sequence_length",
            "sequence_length 100 is more than max_position_embeddings 99"},
           {{"training.micro_batch_size=0"}, "training.micro_batch_size", "is '0', expected integer >= 1"},
           {{"training.micro_batch_size=70000", "data.sequence_length=40000"},
            "data.sequence_length",
            "micro_batch_size 70000 x sequence_length 40000 is more than the 2147483647 tokens"},
           {{"training.eval_every=5"}, "training.eval_every", "eval_every 5 needs data.eval"},
           {{"schedule.warmup_steps=11"}, "training.steps", "warmup_steps 11 is more than training.steps 10"},
           {{"schedule.min_lr=0.5"}, "schedule.min_lr", "min_lr 0.5 is more than optimizer.lr 3e-04"},
           {{"model.model_type=llama"}, "model.model_type", "is 'llama', expected text that begins with kimi"},
           {{"model.architectures=[LlamaForCausalLM]"},
            "model.architectures",
            "is [LlamaForCausalLM], expected list of texts that begin with Kimi"},
           {{"model.eos_token_id=300"}, "model.eos_token_id", "is '300', expected id inside the vocabulary"},
           {{"model.bos_token_id=[1, -1]"}, "model.bos_token_id", "is [1, -1], expected id inside the vocabulary"},
           {{"model.pad_token_id=x"}, "model.pad_token_id", "is 'x', expected id inside the vocabulary"},
           {{"model.num_nextn_predict_layers=1"}, "model.num_nextn_predict_layers", "is '1', expected integer, only 0"},
       }) {
    const auto j = judge(whole_job(), row.set);
    CAPTURE(row.set, joined(j.faults));
    REQUIRE(j.faults.size() == 1);
    const std::string fault = j.faults[0].substr(j.faults[0].find(' ') + 1);
    CHECK(fault.starts_with(std::string(row.key) + ": "));
    CHECK(test::contains(fault, row.text));
  }
}

TEST_CASE("values at the very edge of a rule are no faults", "[core][cpu]") {
  for (const std::vector<std::string>& set : std::vector<std::vector<std::string>>{
           {"model.vocab_size=257"},
           {"model.vocab_size=256", "data.format=tokens"},
           {"model.num_key_value_heads=4"},
           {"model.linear_attn_config.gate_lower_bound=-5"},
           {"model.linear_attn_config.kda_layers=[3, 2, 1]", "model.dsa_config.layers=[5, 4]"},
           {"model.linear_attn_config.full_attn_layers=[]", "model.dsa_config=~"},
           {"model.dsa_config=~", "model.q_lora_rank=~"},
           {"model.num_experts_per_token=7"},
           {"model.num_experts_per_token=8", "moe.balance=sign"},
           {"model.num_expert_group=4", "model.topk_group=2", "model.num_experts_per_token=3"},
           {"model.first_k_dense_replace=5"},
           {"model.num_experts=0"},
           {"model.qk_rope_head_dim=0"},
           {"model.model_type=kimi_linear", "model.architectures=[KimiLinearForCausalLM]", "model.bos_token_id=0",
            "model.eos_token_id=[1, 299]", "model.pad_token_id=~", "model.rope_scaling=~", "model.rope_theta=1e4",
            "model.head_dim=72", "model.num_nextn_predict_layers=0"},
           {"parallel.expert_parallel=8"},
           {"training.eval_every=5", "data.eval=/"},
           {"schedule.warmup_steps=10", "schedule.min_lr=3e-4"},
           {"run.dtype=fp64", "run.device=cpu"},
           {"optimizer.betas=[0, 0]", "training.grad_clip=0", "monitor.expert_load_alert=0"},
       }) {
    const auto j = judge(whole_job(), set);
    CAPTURE(set);
    CHECK(joined(j.faults).empty());
  }
}

TEST_CASE("names of the job format that this version does not do are refused, never ignored", "[core][cpu]") {
  for (const auto& [set, what] : std::vector<std::pair<std::string, std::string>>{
           {"run.device=cuda", "is 'cuda': known, but this version does not train on CUDA devices"},
           {"model.init_from=somewhere", "is 'somewhere': known, but this version does not start from other weights"},
           {"parallel.tensor_parallel=2", "is '2': known, but this version does not cut matrices over ranks"},
           {"parallel.sequence_parallel=2", "is '2': known, but this version does not cut sequences over ranks"},
           {"data.format=chat", "is 'chat': known, but this version does not read chat transcripts"},
           {"optimizer.grad_dtype=bf16", "is 'bf16': known, but this version does not sum gradients in bf16"},
           {"moe.capacity_factor=1.25", "is '1.25': known, but this version does not limit the rows of an expert"},
           {"moe.min_expert_batch=64", "is '64': known, but this version does not hold rows back"},
           {"monitor.collective_timeout_s=30", "is '30': known, but this version does not watch over collectives"},
           {"moe.overlap_chunks=2", "is '2': known, but this version does not cut the exchange of rows"},
           {"moe.max_rows=100", "is '100': known, but this version does not limit the rows of a rank"},
           {"memory.activation_checkpointing=selective", "is 'selective': known, but this version does not choose what"},
           {"memory.cache.ops=[kda]", "known, but this version does not cache results"},
           {"memory.offload.path=x", "known, but this version does not keep optimizer state"},
           {"lora.rank=8", "known, but this version does not train adapters"},
           {"checkpoint.async=true", "is 'true': known, but this version does not write checkpoints beside training"},
       }) {
    const auto j = judge(whole_job(), {set});
    CAPTURE(set, joined(j.faults));
    REQUIRE(j.faults.size() == 1);
    CHECK(test::contains(j.faults[0], what));
  }
  CHECK(joined(judge(whole_job(),
                     {"parallel.tensor_parallel=1", "moe.capacity_factor=0", "moe.overlap_chunks=1", "checkpoint.async=false"})
                   .faults)
            .empty());
}

TEST_CASE("a number of ranks that is not the product of the axes is a fault with all numbers", "[core][cpu]") {
  CHECK(joined(judge(whole_job(), {}, 3).faults) ==
        "19 parallel.data_parallel: data_parallel 2 x expert_parallel 2 x sequence_parallel 1 x tensor_parallel 1 is 4 ranks, but "
        "there are 3\n");
}

TEST_CASE("--set replaces, adds and resets values, and says so in its faults", "[core][cpu]") {
  const auto j =
      judge(whole_job(), {"run.name=other", "model.linear_attn_config.full_attn_layers=[5]", "optimizer.betas=[0.5, 0.6]",
                          "run.dir=a=b", "model.dsa_config=~", "training.steps=3", "training.steps=4", "data.train=[/, /usr]"});
  CHECK(joined(j.faults).empty());
  CHECK(j.config.run.name == "other");
  CHECK(j.config.run.dir == "a=b");
  CHECK(j.config.model.linear_attn.full_attn_layers == std::vector<std::int64_t>{5});
  CHECK(j.config.model.linear_attn.num_heads == 2);
  CHECK(j.config.optimizer.beta2 == 0.6);
  CHECK_FALSE(j.config.model.dsa.has_value());
  CHECK(j.config.training.steps == 4);
  CHECK(j.config.data.train.size() == 2);

  const auto wrong = judge(whole_job(), {"model.hiden_size=3", "modl.hidden_size=3", "training.steps=many", "steps=3",
                                         "training.steps", "run.name={a: b}", "run.name=[", "run.name.x=3"});
  const auto text = joined(wrong.faults);
  CHECK(wrong.faults.size() == 7);
  CHECK(test::contains(text, "0 model.hiden_size: --set model.hiden_size=3: unknown key, did you mean hidden_size?\n"));
  CHECK(test::contains(text, "0 modl: --set modl.hidden_size=3: unknown key, did you mean model?\n"));
  CHECK(test::contains(text, "0 training.steps: --set training.steps=many: is 'many', expected integer >= 1\n"));
  CHECK(test::contains(text, "0 steps: --set steps=3: expected section.key=value\n"));
  CHECK(test::contains(text, "0 training.steps: --set training.steps: expected section.key=value\n"));
  CHECK(test::contains(text, "0 run.name: --set run.name={a: b}: a map of keys"));
  CHECK(test::contains(text, "0 run.name: --set run.name=[: "));
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
  folder.file("broken.yaml", "a: [\n");
  CHECK(test::contains(joined(judge("model: {preset: broken.yaml}\n" + rest, {}, 0, folder.path()).faults), "broken.yaml:"));
}

TEST_CASE("a rule between a preset's values and the job's stands at the line that names the preset", "[core][cpu]") {
  const auto j = judge(
      "model:\n  preset: tiny-k3\nparallel: {expert_parallel: 16}\ndata: {train: /, sequence_length: 64}\ntraining: {steps: 5}\n",
      {"model.num_experts_per_token=17"});
  CHECK(joined(j.faults) == "2 model.num_experts_per_token: num_experts_per_token 17 is more than num_experts 16\n");
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
