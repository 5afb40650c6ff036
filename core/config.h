// config.h -- job.yaml as structs, one a section, every default in place; reading it, and every broken rule in one list.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "io/batch_source.h"
#include "io/byte_count.h"
#include "io/yaml.h"
#include "memory/device.h"
#include "memory/dtype.h"
#include "ops/glu.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"

namespace moetrain::core {

enum class DeviceChoice : std::uint8_t { automatic, cpu, cuda };

struct RunConfig {
  std::string name = "run";
  std::string dir = "runs/run";
  std::uint64_t seed = 1;
  DeviceChoice device = DeviceChoice::automatic;
  DType dtype = DType::bf16;
  bool deterministic = true;
};

struct LinearAttention {  // linear_attn_config
  std::int64_t num_heads = 0, head_dim = 0, short_conv_kernel_size = 4;
  std::optional<double> gate_lower_bound;         // set: bounded sigmoid gate (K3); unset: softplus gate (Kimi-Linear)
  bool use_full_rank_gate = false;                // g_proj, else g_a_proj and g_b_proj of rank head_dim
  std::vector<std::int64_t> full_attn_layers;     // 1-based; all others are KDA
  std::vector<std::int64_t> kda_layers;           // 1-based, optional: must be the rest
};

struct IndexerConfig {  // dsa_config
  std::int64_t index_n_heads = 0, index_head_dim = 0, index_topk = 0;
  double index_norm_eps = 1e-5;
  bool index_norm_bias = true;
  std::vector<std::int64_t> layers;               // 1-based, optional: must be full_attn_layers
};

// Field names and meanings of the public config.json of the family.
struct ModelConfig {
  std::string preset;
  std::string init_from;
  double initializer_range = 0.02;
  std::int64_t vocab_size = 0, hidden_size = 0, num_hidden_layers = 0, num_attention_heads = 0, intermediate_size = 0;
  std::optional<std::int64_t> num_key_value_heads;  // must equal num_attention_heads
  double rms_norm_eps = 1e-5;
  std::optional<std::int64_t> q_lora_rank;          // absent: q_proj
  std::int64_t kv_lora_rank = 0, qk_nope_head_dim = 0, qk_rope_head_dim = 0, v_head_dim = 0;
  bool mla_use_nope = true, mla_use_output_gate = false;
  LinearAttention linear_attn;
  std::optional<IndexerConfig> dsa;                 // absent: dense attention
  std::int64_t num_experts = 0, num_experts_per_token = 0, num_shared_experts = 0, moe_intermediate_size = 0;
  std::optional<std::int64_t> routed_expert_hidden_size;  // latent width; absent: experts see the hidden state
  bool latent_moe_use_norm = false;
  std::int64_t first_k_dense_replace = 0, moe_layer_freq = 1;
  std::string moe_router_activation_func = "sigmoid", topk_method = "noaux_tc";
  bool moe_renormalize = true, use_grouped_topk = true;
  double routed_scaling_factor = 1;
  std::int64_t num_expert_group = 1, topk_group = 1;
  ops::GluKind hidden_act = ops::GluKind::silu;
  double activation_situ_beta = 4, activation_situ_linear_beta = 25;
  std::optional<std::int64_t> attn_res_block_size;  // layers a block; absent: ordinary residuals
  bool tie_word_embeddings = false;
  std::int64_t max_position_embeddings = 1048576;

  bool full_attention(std::int64_t layer) const;    // 0-based
  bool moe_layer(std::int64_t layer) const { return num_experts > 0 && layer >= first_k_dense_replace && (layer - first_k_dense_replace) % moe_layer_freq == 0; }
  std::int64_t expert_width() const { return routed_expert_hidden_size.value_or(hidden_size); }
};

struct ParallelConfig {
  int data_parallel = 1, expert_parallel = 1, tensor_parallel = 1, sequence_parallel = 1;
  parallel::Sharding sharding = parallel::Sharding::full;
  bool reshard_after_use = true;
  io::ByteCount bucket_size{std::int64_t(32) << 20};
  std::string expert_placement = "uniform";
  bool expert_sharding = true;  // full: as `sharding`; none: resident on the ranks of their ep coordinate
  parallel::MeshShape mesh() const { return {data_parallel, expert_parallel, sequence_parallel, tensor_parallel}; }
};

struct DataConfig {
  std::vector<std::string> train, eval;  // files and folders
  io::DataFormat format = io::DataFormat::bytes;
  std::int64_t sequence_length = 0;
  bool packing = true, shuffle = true;
  bool skip_bad_lines = false;           // of chat data
  std::vector<std::string> exclude;      // file names left out of train (an evaluation text beside it)
};

struct TrainingConfig {
  std::int64_t steps = 0, micro_batch_size = 1, gradient_accumulation = 1;
  double grad_clip = 1;                  // global norm; 0: none
  std::int64_t eval_every = 0, eval_batches = 8;  // 0: at the end only, where data.eval is given
  std::vector<std::string> trainable;    // name patterns (* and ?); empty: all
  std::int64_t max_nonfinite = 10;       // skipped steps in a row
};

struct OptimizerConfig {
  std::string name = "adamw";
  double lr = 3e-4;
  double beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8, weight_decay = 0.1;
  DType grad_dtype = DType::f32;
};

enum class ScheduleKind : std::uint8_t { constant, linear, cosine, wsd };
struct ScheduleConfig {
  ScheduleKind name = ScheduleKind::cosine;
  std::int64_t warmup_steps = 0;
  double min_lr = 0;
  double decay_fraction = 0.2;           // wsd: share of the steps that decay, at the end
};

enum class IndexerStage : std::uint8_t { dense, sparse };
struct LossConfig {
  std::int64_t seq_chunk = 0, vocab_chunk = 0;  // 0: chosen
  double indexer_coefficient = 1;
  IndexerStage indexer_stage = IndexerStage::sparse;
};

enum class Overflow : std::uint8_t { reroute, drop };
enum class Balance : std::uint8_t { none, quantile, sign, auxiliary };
enum class AuxiliaryScope : std::uint8_t { micro_batch, sequence, global_batch };
struct MoeConfig {
  double capacity_factor = 0;
  Overflow overflow = Overflow::reroute;
  Balance balance = Balance::quantile;
  std::int64_t quantile_bins = 1000;
  double sign_rate = 1e-3;
  double auxiliary_coefficient = 1e-4;
  AuxiliaryScope auxiliary_scope = AuxiliaryScope::sequence;
  double z_loss = 0;
  std::int64_t min_expert_batch = 0, overlap_chunks = 2, max_rows = 0;
};

enum class Checkpointing : std::uint8_t { none, selective, full };
struct CacheConfig {
  std::vector<std::string> ops;  // auto, or names of core/result_cache.h; empty: nothing is cached
  io::ByteCount device, host;    // room for results
};
struct OffloadConfig {
  bool optimizer = false;  // moments and masters in host memory
  bool experts = false;    // weights of routed experts in host memory
  io::ByteCount slice{std::int64_t(96) << 20};
  bool operator==(const OffloadConfig&) const = default;
};
struct MemoryConfig {
  Checkpointing activation_checkpointing = Checkpointing::none;
  std::optional<io::ByteCount> device_limit;  // of a rank's pool; absent: memory/pool.h
  CacheConfig cache;
  OffloadConfig offload;
};

struct LoraConfig {
  std::int64_t rank = 8;
  double alpha = 8, dropout = 0;
  bool rslora = false;                   // scale alpha / sqrt(rank) instead of alpha / rank
  bool shared_a = false;                 // one A for all experts of a layer
  std::vector<std::string> target;       // core/lora.h
  double scale() const { return alpha / (rslora ? std::sqrt(double(rank)) : double(rank)); }
};

struct CheckpointConfig {
  std::int64_t every = 0;                // steps; 0: at the end only
  std::int64_t keep = 2;
  bool async = false;
};

struct MonitorConfig {
  double expert_load_alert = 10;         // warn when the fullest expert has this many times the mean; 0: never
  std::int64_t profile_steps = 0;        // print a table of time by op after this many steps; 0: never
  double collective_timeout_s = 600;
};

struct Config {
  RunConfig run;
  ModelConfig model;
  ParallelConfig parallel;
  DataConfig data;
  TrainingConfig training;
  OptimizerConfig optimizer;
  ScheduleConfig schedule;
  LossConfig loss;
  MoeConfig moe;
  MemoryConfig memory;
  std::optional<LoraConfig> lora;        // absent: no adapters
  CheckpointConfig checkpoint;
  MonitorConfig monitor;

  // What of this job has no CUDA backend; null: it runs on either.
  const char* cpu_only() const { return run.dtype == DType::f64 ? "run.dtype fp64" : nullptr; }
  std::int64_t sequences_per_step() const { return std::int64_t(parallel.data_parallel) * parallel.expert_parallel * training.micro_batch_size * training.gradient_accumulation; }
};

struct Fault {
  int line = 0;          // of the job file; 0: a key that is absent
  std::string key;       // section.key; empty: not about one key
  std::string text;      // what is wrong, with the numbers, and what would be right
  std::string set = {};  // what --set was given, where that is at fault; it names the key
  bool unknown = false;  // no such key
};

// The job as understood, presets and --set applied; faults of spelling, type and range are added to `faults`, which is then ordered
// by line. `folder` is the job's, where a preset that is a path is looked for.
Config read_config(const io::YamlNode& job, const std::vector<std::string>& set, const std::string& folder, std::vector<Fault>& faults);
// Rules between values, and against the number of ranks (0: not checked) and the file system (data paths).
void check_config(const Config& config, const io::YamlNode& job, int ranks, std::vector<Fault>& faults);
// Every key with its value, in the order of the structs: what <run.dir>/job.yaml holds. read_config(to_yaml(c)) == c, but for
// model.preset, which is written out as the keys it stands for.
io::YamlNode config_to_yaml(const Config& config);
// section.key, type, default and meaning of every key: what configs/README.md is held to.
struct KeyDoc {
  std::string key, type, default_text, meaning;
};
std::vector<KeyDoc> documented_keys();


}  // namespace moetrain::core
