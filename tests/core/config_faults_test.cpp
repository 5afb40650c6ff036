// config_faults_test.cpp -- every broken rule of a job and of --set is found, at its line, and none hides another.
#include <algorithm>

#include "tests/core/judged.h"
#include "tests/support/catch.h"
#include "tests/support/temp_folder.h"

using namespace moetrain;
using namespace moetrain::core;
using test::joined;
using test::judge;
using test::whole_job;

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
        "3 model.vocab_size: is 'many', expected integer in [2, 2147483647]\n"
        "4 model.hiden_size: unknown key, did you mean hidden_size?\n"
        "8 model.linear_attn_config.hed_dim: unknown key, did you mean head_dim?\n"
        "9 paralel: unknown key, did you mean parallel?\n"
        "10 data.train: '/no/such/place' does not exist\n"
        "12 training.steps: is '0', expected integer in [1, 2147483647]\n"
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
           {"run: {name: \"\"}", "run.name", "is '', expected text without control characters"},
           {"run: {dir: \"\"}", "run.dir", "is '', expected text without control characters"},
           {"run: {name: \"a\\eb\"}", "run.name", "is 'a?b', expected text without control characters"},
           {"run: {dir: \"a\\nb\"}", "run.dir", "is 'a?b', expected text without control characters"},
           {"run: {seed: -1}", "run.seed", "is '-1', expected integer in [0, 18446744073709551615]"},
           {"run: {seed: 18446744073709551616}", "run.seed",
            "is '18446744073709551616', expected integer in [0, 18446744073709551615]"},
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
           {"loss: {seq_chunk: -1}", "loss.seq_chunk", "is '-1', expected integer in [0, 2147483647]"},
           {"loss: {vocab_chunk: 1.5}", "loss.vocab_chunk", "is '1.5', expected integer in [0, 2147483647]"},
           {"schedule: {decay_fraction: 0}", "schedule.decay_fraction", "is '0', expected number in (0, 1]"},
           {"moe: {quantile_bins: 1}", "moe.quantile_bins", "is '1', expected integer in [2, 65536]"},
           {"memory: {device_limit: 8 GBit}", "memory.device_limit", "is '8 GBit', expected size, as 8GiB, 141GB or 4096"},
           {"memory: {device_limit: 0}", "memory.device_limit", "is '0', expected size, as 8GiB, 141GB or 4096"},
           {"checkpoint: {keep: {a: 1}}", "checkpoint.keep", "is a map of keys, expected integer in [0, 2147483647]"},
           {"lora: {target: head, alpha: 1e300}", "lora.alpha", "alpha 1e+300 with rank 8 makes a scale of 1.25e+299, which fp32"},
           {"lora: {target: head, rslora: true, rank: 4, alpha: 1e-38}", "lora.alpha",
            "alpha 1e-38 with rank 4 makes a scale of 5e-39,"},
           {"lora: {target: head, alpha: inf}", "lora.alpha", "is 'inf', expected number > 0"},
           {"lora: {target: head, alpha: 0}", "lora.alpha", "is '0', expected number > 0"},
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
           {{"model.attn_res_block_size=0"}, "model.attn_res_block_size", "is '0', expected integer in [1, 2147483647]"},
           {{"model.hidden_size=3000000000"}, "model.hidden_size", "is '3000000000', expected integer in [1, 2147483647]"},
           {{linear + "gate_lower_bound=0"}, "model.linear_attn_config.gate_lower_bound", "is '0', expected number in [-5, 0)"},
           {{linear + "gate_lower_bound=-5.1"},
            "model.linear_attn_config.gate_lower_bound",
            "is '-5.1', expected number in [-5, 0)"},
           {{linear + "full_attn_layers=[4, 6]"},
            "model.linear_attn_config.full_attn_layers",
            "layer 6 is not in 1 .. num_hidden_layers 5"},
           {{linear + "full_attn_layers=[0]"},
            "model.linear_attn_config.full_attn_layers",
            "is [0], expected list of integers in [1, 2147483647]"},
           {{linear + "full_attn_layers=[4, 4]"}, "model.linear_attn_config.full_attn_layers", "layer 4 stands twice"},
           {{linear + "kda_layers=[1, 2]"},
            "model.linear_attn_config.kda_layers",
            "layer 3 is neither here nor in full_attn_layers"},
           {{linear + "kda_layers=[1, 2, 3, 4]"}, "model.linear_attn_config.kda_layers", "layer 4 is in full_attn_layers too"},
           {{linear + "num_heads=~", linear + "head_dim=16"}, "model.linear_attn_config.num_heads", "has no value"},
           {{linear + "full_attn_layers=[]"}, "model.dsa_config", "an indexer serves full attention"},
           {{dsa + "layers=[4]"}, "model.dsa_config.layers", "has 1 layers that are not the 2 of full_attn_layers"},
           {{dsa + "topk=3"}, "model.dsa_config.topk", "is another name of index_topk"},
           {{dsa + "index_topk=0"}, "model.dsa_config.index_topk", "is '0', expected integer in [1, 2147483647]"},
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
           {{"parallel.sequence_parallel=3"},
            "data.sequence_length",
            "sequence_parallel 3 does not divide data.sequence_length 32"},
           {{"parallel.sequence_parallel=16"},
            "data.sequence_length",
            "a slice of 2 tokens is shorter than the 3 that short_conv_kernel_size 4 looks back"},
           {{"parallel.sequence_parallel=2", "moe.capacity_factor=1.5"},
            "parallel.sequence_parallel",
            "sequence_parallel 2 with capacity_factor 1.5"},
           {{"parallel.sharding=half"}, "parallel.sharding", "is 'half', expected one of full, gradients, optimizer, none"},
           {{"parallel.expert_placement=random"}, "parallel.expert_placement", "is 'random', expected only uniform"},
           {{"memory.cache.ops=[kda]", "memory.cache.host=1GiB"},
            "memory.cache.ops",
            "a cache is for layers that are computed again: it needs activation_checkpointing full"},
           {{"memory.cache.ops=[kda, auto]", "memory.cache.host=1GiB", "memory.activation_checkpointing=full"},
            "memory.cache.ops",
            "'auto': expected auto, or some of"},
           {{"memory.cache.ops=auto", "memory.activation_checkpointing=full"}, "memory.cache.ops", "a cache needs room"},
           {{"parallel.bucket_size=many"}, "parallel.bucket_size", "is 'many', expected size, as 8GiB, 141GB or 4096"},
           {{"parallel.expert_sharding=half"}, "parallel.expert_sharding", "is 'half', expected one of full, none"},
           {{"data.sequence_length=0"}, "data.sequence_length", "is '0', expected integer in [1, 2147483647]"},
           {{"data.train=[]"}, "data.train", "is [], expected text or list of texts"},
           {{"data.train=[/, \"\"]"}, "data.train", "is [/, ], expected text or list of texts"},
           {{"data.train=/no/such/place"}, "data.train", "'/no/such/place' does not exist"},
           {{"data.eval=[/, /no/such/place]"}, "data.eval", "'/no/such/place' does not exist"},
           {{"data.sequence_length=100", "model.max_position_embeddings=99"},
            "data.sequence_length",
            "sequence_length 100 is more than max_position_embeddings 99"},
           {{"training.micro_batch_size=0"}, "training.micro_batch_size", "is '0', expected integer in [1, 2147483647]"},
           {{"training.micro_batch_size=70000", "data.sequence_length=40000"},
            "data.sequence_length",
            "micro_batch_size 70000 x sequence_length 40000 is more than the 2147483647 tokens"},
           {{"moe.capacity_factor=-1"}, "moe.capacity_factor", "is '-1', expected number >= 0"},
           {{"parallel.tensor_parallel=4"},
            "model.linear_attn_config.num_heads",
            "tensor_parallel 4 does not divide linear_attn_config.num_heads 2"},
           {{"moe.overflow=keep"}, "moe.overflow", "is 'keep', expected one of reroute, drop"},
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
           {"moe.capacity_factor=1.25", "moe.overflow=drop"},
           {"moe.capacity_factor=1.25", "run.device=cuda"},
           {"optimizer.betas=[0, 0]", "training.grad_clip=0", "monitor.expert_load_alert=0"},
       }) {
    const auto j = judge(whole_job(), set);
    CAPTURE(set);
    CHECK(joined(j.faults).empty());
  }
}

TEST_CASE("names of the job format that this version does not do are refused, never ignored", "[core][cpu]") {
  for (const auto& [set, what] : std::vector<std::pair<std::string, std::string>>{
           {"optimizer.grad_dtype=bf16", "is 'bf16': known, but this version does not sum gradients in bf16"},
           {"moe.min_expert_batch=64",
            "is '64': known, but this version does not merge small experts: grouped products cut tiles to the rows an expert has"},
           {"moe.max_rows=100", "is '100': known, but this version does not limit the rows of a rank"},
           {"memory.offload.path=x", "known, but this version does not keep anything on disk"},
       }) {
    const auto j = judge(whole_job(), {set});
    CAPTURE(set, joined(j.faults));
    REQUIRE(j.faults.size() == 1);
    CHECK(test::contains(j.faults[0], what));
  }
  CHECK(joined(judge(whole_job(),
                     {"parallel.tensor_parallel=1", "moe.capacity_factor=0", "moe.overlap_chunks=2", "checkpoint.async=true"})
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

  const std::vector<std::pair<std::string, std::string>> wrong = {
      {"model.hiden_size=3", "unknown key, did you mean hidden_size?"},
      {"modl.hidden_size=3", "unknown key, did you mean model?"},
      {"training.steps=many", "is 'many', expected integer in [1, 2147483647]"},
      {"steps=3", "expected section.key=value"},
      {"training.steps", "expected section.key=value"},
      {"run.name={a: b}", "a map of keys; set each key by itself"},
      {"run.name=[", "end of sequence flow not found"},
      {"run.name.x=3", "a part of this key is a value and holds no keys"},
      {"data.exclude=*", "alias not found after *; a text that begins with * stands in quotes"},
      {"data.exclude=*x", "the referenced anchor is not defined"}};
  std::vector<std::string> set;
  for (const auto& [given, text] : wrong) set.push_back(given);
  const auto found = judge(whole_job(), set);
  CHECK(found.faults.size() == wrong.size());
  for (const auto& [given, text] : wrong) {
    const auto at = std::find(found.set.begin(), found.set.end(), given);
    CAPTURE(given, joined(found.faults));
    REQUIRE(at != found.set.end());
    CHECK(test::contains(found.faults[std::size_t(at - found.set.begin())], ": " + text));
  }
}

TEST_CASE("a --set that is refused hides no rule", "[core][cpu]") {
  const std::string job = whole_job() + "schedule: {warmup_steps: 11}\n";
  for (const char* given : {"model", "model.preset", "schedule", "training.steps=[", "schedule.warmup_steps.x=1"}) {
    const auto j = judge(job, {given, "model.num_experts_per_token=9"});
    CAPTURE(given, joined(j.faults));
    CHECK(j.faults.size() == 3);
    CHECK(test::contains(joined(j.faults), "num_experts_per_token 9 is more than num_experts 8"));
    CHECK(test::contains(joined(j.faults), "warmup_steps 11 is more than training.steps 10"));
  }
}

TEST_CASE("a rule between a preset's values and the job's stands at the line that names the preset", "[core][cpu]") {
  const auto j = judge(
      "model:\n  preset: tiny-k3\nparallel: {expert_parallel: 16}\ndata: {train: /, sequence_length: 64}\ntraining: {steps: 5}\n",
      {"model.num_experts_per_token=17"});
  CHECK(joined(j.faults) == "2 model.num_experts_per_token: num_experts_per_token 17 is more than num_experts 16\n");
}
