// config_check.cpp -- rules between the values of a job, and between them, the ranks and the files: each broken one is a fault.
#include <algorithm>
#include <filesystem>
#include <limits>
#include <set>

#include "core/config.h"
#include "core/config_keys.h"
#include "core/result_cache.h"

namespace moetrain::core {
namespace {

using io::YamlNode;

// Faults with the lines of the job. A rule about a key that is already known to be wrong is not judged: its value is only a
// default.
class Findings {
 public:
  Findings(const YamlNode& job, std::vector<Fault>& faults) : job_(job), faults_(faults) {
    for (const Fault& f : faults) wrong_.insert(f.key == "model.preset" ? "model" : f.key);  // no preset, no values to judge
  }

  // `keys`: those the rule is about; the fault stands at the first that the job holds.
  void require(bool holds, std::initializer_list<std::string> keys, const std::string& text) {
    if (holds || std::any_of(keys.begin(), keys.end(), [&](const auto& key) { return is_wrong(key); })) return;
    const auto given = std::find_if(keys.begin(), keys.end(), [&](const auto& key) { return line_of(key) > 0; });
    const std::string& key = given == keys.end() ? *keys.begin() : *given;
    faults_.push_back({line_of(key), key, text});
  }
  void missing(const std::string& key, const std::string& when) {
    if (is_wrong(key)) return;
    faults_.push_back({0, key, "is missing" + (when == "required" ? "" : ": " + when)});
    missing_.insert(key);
  }
  // A path of a list of them, at its own line.
  void missing_path(const std::string& key, std::size_t item, const std::string& path) {
    if (is_wrong(key)) return;
    const YamlNode* list = node_of(key);
    const bool own_line = list && list->kind == YamlNode::list && item < list->items.size() && list->items[item].text == path;
    faults_.push_back({own_line ? list->items[item].line : line_of(key), key, "'" + path + "' does not exist"});
  }

 private:
  bool is_wrong(const std::string& key) const {
    const auto covers = [&](const std::string& wrong) { return key == wrong || key.starts_with(wrong + "."); };
    return std::any_of(wrong_.begin(), wrong_.end(), covers) || missing_.contains(key);
  }
  const YamlNode* node_of(const std::string& key) const {
    const YamlNode* node = &job_;
    for (std::size_t begin = 0; node && begin <= key.size();) {
      const auto end = std::min(key.find('.', begin), key.size());
      node = node->find(std::string_view(key).substr(begin, end - begin));
      begin = end + 1;
    }
    return node;
  }
  // 0 where neither the job nor the preset it names can have said so.
  int line_of(const std::string& key) const {
    if (const YamlNode* node = node_of(key)) return node->key_line;
    const auto dot = key.rfind('.');
    if (key.find('.') != dot) return line_of(key.substr(0, dot));  // a key under another name stands below its parent
    const YamlNode* preset = key.starts_with("model.") ? node_of("model.preset") : nullptr;
    return preset ? preset->key_line : 0;
  }

  const YamlNode& job_;
  std::vector<Fault>& faults_;
  std::set<std::string> wrong_, missing_;
};

class MissingKeys {  // a visitor: required keys that nobody gave
 public:
  MissingKeys(std::string path, Findings& findings) : path_(std::move(path)), findings_(findings) {}

  template <class T>
  void key(const Name& name, T& field, const char*, const Rule& rule = {}) {
    if (rule.required && field == T{}) findings_.missing(path_ + name.text, rule.when);
  }
  template <class T, class Keys>
  void section(const Name& name, T& field, Keys keys) {
    MissingKeys inner(path_ + name.text + ".", findings_);
    if constexpr (IsOptional<T>::value) {
      if (field) keys(inner, *field);
    } else {
      keys(inner, field);
    }
  }
  template <class T>
  void choice(const Name&, T&, Choices<T>, const char*, Undone = {}) {}
  void pair(const Name&, double&, double&, const char*, const Rule&) {}
  void preset(const Name&, std::string&, const char*) {}
  template <class Valid>
  void accepted(const Name&, const char*, Valid, const char*) {}
  void undone(const Name&, const char*) {}

 private:
  std::string path_;
  Findings& findings_;
};

std::string text(std::int64_t n) { return std::to_string(n); }
bool divides(std::int64_t a, std::int64_t b) { return a >= 1 && b % a == 0; }

void check_layer_list(Findings& f, const ModelConfig& m, const std::vector<std::int64_t>& layers, const std::string& key) {
  std::set<std::int64_t> seen;
  for (const std::int64_t layer : layers) {
    f.require(layer >= 1 && layer <= m.num_hidden_layers, {key, "model.num_hidden_layers"},
              "layer " + text(layer) + " is not in 1 .. num_hidden_layers " + text(m.num_hidden_layers));
    f.require(seen.insert(layer).second, {key}, "layer " + text(layer) + " stands twice");
  }
}

void check_layers(Findings& f, const ModelConfig& m) {
  const std::string full_key = "model.linear_attn_config.full_attn_layers", kda_key = "model.linear_attn_config.kda_layers";
  const auto& full = m.linear_attn.full_attn_layers;
  const auto& kda = m.linear_attn.kda_layers;
  check_layer_list(f, m, full, full_key);
  check_layer_list(f, m, kda, kda_key);
  for (std::int64_t layer = 1; !kda.empty() && layer <= m.num_hidden_layers; ++layer) {
    const bool is_kda = std::find(kda.begin(), kda.end(), layer) != kda.end(), is_full = m.full_attention(layer - 1);
    f.require(is_kda != is_full, {kda_key, full_key, "model.num_hidden_layers"},
              "layer " + text(layer) + (is_full ? " is in full_attn_layers too" : " is neither here nor in full_attn_layers"));
  }
  if (!m.dsa) return;
  const std::set<std::int64_t> sparse(m.dsa->layers.begin(), m.dsa->layers.end()), all(full.begin(), full.end());
  f.require(m.dsa->layers.empty() || sparse == all, {"model.dsa_config.layers", full_key},
            "has " + text(std::int64_t(sparse.size())) + " layers that are not the " + text(std::int64_t(all.size())) +
                " of full_attn_layers");
  f.require(!full.empty(), {"model.dsa_config", full_key}, "an indexer serves full attention, and full_attn_layers is empty");
}

void check_experts(Findings& f, const Config& c) {
  const auto& m = c.model;
  const std::int64_t E = m.num_experts, K = m.num_experts_per_token;
  f.require(m.first_k_dense_replace <= m.num_hidden_layers, {"model.first_k_dense_replace", "model.num_hidden_layers"},
            "is " + text(m.first_k_dense_replace) + ", more than num_hidden_layers " + text(m.num_hidden_layers));
  f.require(!m.latent_moe_use_norm || m.routed_expert_hidden_size, {"model.latent_moe_use_norm"},
            "needs routed_expert_hidden_size");
  if (E == 0) return;
  f.require(K <= E, {"model.num_experts_per_token", "model.num_experts"},
            "num_experts_per_token " + text(K) + " is more than num_experts " + text(E));
  f.require(divides(c.parallel.expert_parallel, E), {"parallel.expert_parallel", "model.num_experts"},
            "expert_parallel " + text(std::int64_t(c.parallel.expert_parallel)) + " does not divide num_experts " + text(E));
  f.require(divides(m.num_expert_group, E), {"model.num_expert_group", "model.num_experts"},
            "num_expert_group " + text(m.num_expert_group) + " does not divide num_experts " + text(E));
  f.require(m.topk_group <= m.num_expert_group, {"model.topk_group", "model.num_expert_group"},
            "topk_group " + text(m.topk_group) + " is more than num_expert_group " + text(m.num_expert_group));
  f.require(m.use_grouped_topk || m.num_expert_group == 1, {"model.use_grouped_topk", "model.num_expert_group"},
            "num_expert_group " + text(m.num_expert_group) + " needs use_grouped_topk");
  if (!divides(m.num_expert_group, E) || m.topk_group > m.num_expert_group || K > E) return;
  const std::int64_t kept = m.topk_group * (E / m.num_expert_group);
  f.require(K <= kept, {"model.num_experts_per_token", "model.topk_group"},
            "num_experts_per_token " + text(K) + " is more than the " + text(kept) + " experts of topk_group " +
                text(m.topk_group) + " groups");
  f.require(
      c.moe.balance != Balance::quantile || K != kept, {"moe.balance", "model.num_experts_per_token"},
      "quantile needs fewer experts a token than the " + text(kept) + " it may choose from; num_experts_per_token is " + text(K));
  f.require(c.moe.balance != Balance::auxiliary || c.moe.auxiliary_scope != AuxiliaryScope::global_batch ||
                c.training.gradient_accumulation == 1,
            {"moe.auxiliary_scope", "training.gradient_accumulation"},
            "global_batch takes the load of the whole batch, which is known only with gradient_accumulation 1, not " +
                text(c.training.gradient_accumulation));
}

void check_model(Findings& f, const Config& c) {
  const auto& m = c.model;
  f.require(!m.num_key_value_heads || *m.num_key_value_heads == m.num_attention_heads,
            {"model.num_key_value_heads", "model.num_attention_heads"},
            "num_key_value_heads " + text(m.num_key_value_heads.value_or(0)) + " is not num_attention_heads " +
                text(m.num_attention_heads));
  f.require(
      c.data.format != io::DataFormat::bytes || m.vocab_size > 256, {"model.vocab_size", "data.format"},
      "vocab_size " + text(m.vocab_size) + " is too small for data.format bytes: 256 bytes and an end-of-document id need 257");
  check_layers(f, m);
  check_experts(f, c);
}

void check_ranks(Findings& f, const ParallelConfig& p, int ranks) {
  const auto product = std::int64_t(p.data_parallel) * p.expert_parallel * p.sequence_parallel * p.tensor_parallel;
  const std::initializer_list<std::string> axes = {"parallel.data_parallel", "parallel.expert_parallel",
                                                   "parallel.sequence_parallel", "parallel.tensor_parallel"};
  const std::string sizes = "data_parallel " + text(std::int64_t(p.data_parallel)) + " x expert_parallel " +
                            text(std::int64_t(p.expert_parallel)) + " x sequence_parallel " +
                            text(std::int64_t(p.sequence_parallel)) + " x tensor_parallel " +
                            text(std::int64_t(p.tensor_parallel)) + " is " + text(product) + " ranks";
  constexpr std::int64_t kMostRanks = 1 << 20;
  f.require(product <= kMostRanks, axes, sizes + ", more than " + text(kMostRanks));
  f.require(ranks == 0 || product == ranks, axes, sizes + ", but there are " + text(std::int64_t(ranks)));
}

void check_cache(Findings& f, const MemoryConfig& m) {
  const CacheConfig& cache = m.cache;
  if (cache.ops.empty()) return;
  for (const std::string& name : cache.ops) {
    const bool known = cache_op(name).has_value() || (name == "auto" && cache.ops.size() == 1);
    f.require(known, {"memory.cache.ops"},
              "'" + name + "': expected auto, or some of linear, grouped_linear, kda, attention, exchange");
  }
  f.require(m.activation_checkpointing == Checkpointing::full, {"memory.cache.ops", "memory.activation_checkpointing"},
            "a cache is for layers that are computed again: it needs activation_checkpointing full");
  f.require(cache.device.bytes + cache.host.bytes > 0, {"memory.cache.ops", "memory.cache.device", "memory.cache.host"},
            "a cache needs room: cache.device, cache.host or both");
}

void check_offload(Findings& f, const Config& c) {
  const auto sharding = c.parallel.sharding;
  f.require(!c.memory.offload.experts || !c.parallel.expert_sharding || sharding == parallel::Sharding::full ||
                sharding == parallel::Sharding::none,
            {"memory.offload.experts", "parallel.sharding"},
            "experts in host memory need parallel.sharding full or none, or parallel.expert_sharding none");
}

// What a tensor cut divides. Hidden widths and the vocabulary need not be multiples.
void check_tensor_cut(Findings& f, const Config& c) {
  const std::int64_t ranks = c.parallel.tensor_parallel;
  const ModelConfig& m = c.model;
  if (ranks == 1) return;
  const auto divided = [&](const std::string& key, std::int64_t heads) {
    f.require(divides(ranks, heads), {"parallel.tensor_parallel", "model." + key},
              "tensor_parallel " + text(ranks) + " does not divide " + key + " " + text(heads));
  };
  const auto reached = [&](const std::string& key, std::int64_t width) {
    f.require(width >= ranks, {"parallel.tensor_parallel", "model." + key},
              "tensor_parallel " + text(ranks) + " is more than " + key + " " + text(width));
  };
  bool any_full = false, any_kda = false, any_dense = false;
  for (std::int64_t l = 0; l < m.num_hidden_layers; ++l) {
    (m.full_attention(l) ? any_full : any_kda) = true;
    any_dense = any_dense || !m.moe_layer(l);
  }
  if (any_full) divided("num_attention_heads", m.num_attention_heads);
  if (any_kda) divided("linear_attn_config.num_heads", m.linear_attn.num_heads);
  reached("vocab_size", m.vocab_size);
  if (any_dense) reached("intermediate_size", m.intermediate_size);
  if (m.num_experts > 0 && m.num_shared_experts > 0)
    reached("moe_intermediate_size", m.num_shared_experts * m.moe_intermediate_size);
}

void check_paths(Findings& f, const std::vector<std::string>& paths, const std::string& key) {
  for (std::size_t i = 0; i < paths.size(); ++i) {
    std::error_code unreadable;  // a path behind a closed folder cannot be told from an absent one
    if (!std::filesystem::exists(paths[i], unreadable)) f.missing_path(key, i, paths[i]);
  }
}

void check_run(Findings& f, const Config& c) {
  f.require(c.run.dtype != DType::f64 || c.run.device != DeviceChoice::cuda, {"run.dtype", "run.device"},
            "fp64 runs on the CPU only");
  if (c.lora)
    f.require(c.lora->scale() >= std::numeric_limits<float>::min() && c.lora->scale() <= std::numeric_limits<float>::max(),
              {"lora.alpha", "lora.rank"},
              "alpha " + number_text(c.lora->alpha) + " with rank " + text(c.lora->rank) + " makes a scale of " +
                  number_text(c.lora->scale()) + ", which fp32 does not hold");
  if (const std::string& from = c.model.init_from; !from.empty()) {
    check_paths(f, {from}, "model.init_from");
    std::error_code unreadable;
    f.require(!std::filesystem::is_regular_file(from, unreadable), {"model.init_from"},
              "'" + from + "' is a file; expected a folder: of Hugging Face, of a checkpoint, or of a run");
  }
  check_paths(f, c.data.train, "data.train");
  check_paths(f, c.data.eval, "data.eval");
  f.require(c.training.eval_every == 0 || !c.data.eval.empty(), {"training.eval_every", "data.eval"},
            "eval_every " + text(c.training.eval_every) + " needs data.eval");
  const double tokens = double(c.data.sequence_length) * double(c.training.micro_batch_size);
  f.require(tokens <= kLargestSize, {"training.micro_batch_size", "data.sequence_length"},
            "micro_batch_size " + text(c.training.micro_batch_size) + " x sequence_length " + text(c.data.sequence_length) +
                " is more than the " + text(std::int64_t(kLargestSize)) + " tokens a micro-batch may have");
  const std::int64_t slices = c.parallel.sequence_parallel, taps = c.model.linear_attn.short_conv_kernel_size;
  f.require(divides(slices, c.data.sequence_length), {"parallel.sequence_parallel", "data.sequence_length"},
            "sequence_parallel " + text(slices) + " does not divide data.sequence_length " + text(c.data.sequence_length));
  f.require(slices == 1 || c.data.sequence_length / slices >= taps - 1,
            {"parallel.sequence_parallel", "data.sequence_length", "model.linear_attn_config.short_conv_kernel_size"},
            "a slice of " + text(c.data.sequence_length / slices) + " tokens is shorter than the " + text(taps - 1) +
                " that short_conv_kernel_size " + text(taps) + " looks back");
  f.require(slices == 1 || c.moe.capacity_factor == 0, {"parallel.sequence_parallel", "moe.capacity_factor"},
            "sequence_parallel " + text(slices) + " with capacity_factor " + number_text(c.moe.capacity_factor) +
                ": places of experts are given in the order of whole sequences");
  f.require(c.data.sequence_length <= c.model.max_position_embeddings, {"data.sequence_length", "model.max_position_embeddings"},
            "sequence_length " + text(c.data.sequence_length) + " is more than max_position_embeddings " +
                text(c.model.max_position_embeddings));
  f.require(c.schedule.warmup_steps <= c.training.steps, {"schedule.warmup_steps", "training.steps"},
            "warmup_steps " + text(c.schedule.warmup_steps) + " is more than training.steps " + text(c.training.steps));
  f.require(c.schedule.min_lr <= c.optimizer.lr, {"schedule.min_lr", "optimizer.lr"},
            "min_lr " + number_text(c.schedule.min_lr) + " is more than optimizer.lr " + number_text(c.optimizer.lr));
}

}  // namespace

void check_config(const Config& config, const YamlNode& job, int ranks, std::vector<Fault>& faults) {
  Findings findings(job, faults);
  Config copy = config;
  MissingKeys missing("", findings);
  visit(missing, copy);
  check_model(findings, config);
  check_ranks(findings, config.parallel, ranks);
  check_tensor_cut(findings, config);
  check_cache(findings, config.memory);
  check_offload(findings, config);
  check_run(findings, config);
  std::stable_sort(faults.begin(), faults.end(), [](const Fault& a, const Fault& b) { return a.line < b.line; });
}

}  // namespace moetrain::core
