// config_keys.h -- every key of a job once, with its field, its rule and its meaning: reading, writing and documentation all walk
// this.
#pragma once
#include <algorithm>
#include <charconv>
#include <concepts>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/config.h"

namespace moetrain::core {

// A visitor V has these members; `keys` is called with a visitor of the inner section and the field.
//
//   key(name, field, meaning, rule)                a value: number, text, true or false, list; optional ones may be absent
//
//   choice(name, field, choices, meaning, undone)  one of some names; `undone`: names that this version refuses
//
//   pair(name, first, second, meaning, rule)       a list of two numbers
//
//   section(name, field, keys)                     keys below a key; an optional one may be absent
//
//   preset(name, field, meaning)                   stands for other keys
//
//   accepted(name, type, valid, meaning)           looked at, but decides nothing
//
//   undone(name, what)                             a key of the job format that this version refuses
//

struct Name {
  Name(const char* n) : text(n) {}  // NOLINT: implicit on purpose
  Name(const char* n, std::initializer_list<const char*> others) : text(n), synonyms(others) {}
  const char* text;
  std::vector<const char*> synonyms;
};

template <class T>
struct Choice {
  const char* name;
  T value;
};
template <class T>
using Choices = std::initializer_list<Choice<std::type_identity_t<T>>>;
using Undone = std::initializer_list<Choice<const char*>>;  // name, and what it would ask for

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr double kLargestSize = std::numeric_limits<std::int32_t>::max();  // ids and positions are stored in 32 bits

struct Rule {
  double low = -kInfinity, high = kInfinity;   // of a number; a text or a list has at least `low` characters or items
  bool above_low = false, below_high = false;  // the bound itself is excluded
  bool printable = false;                      // a text without control characters, which a terminal would obey
  bool required = false;                       // has to be given (condition already decided)
  const char* when = "";                       // the condition in words
  const char* undone = nullptr;                // what every value but the default would ask for, which this version does not do

  Rule need(bool condition = true, const char* words = "") const {
    Rule r = *this;
    r.required = condition;
    r.when = *words == 0 ? "required" : words;
    return r;
  }
  Rule only_default(const char* what) const {
    Rule r = *this;
    r.undone = what;
    return r;
  }
};
template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};

inline std::string number_text(double value) {
  char text[40];
  return {text, std::to_chars(text, text + sizeof text, value).ptr};  // the shortest that reads back to the same bits
}

inline Rule size_from(double low) { return {.low = low, .high = kLargestSize}; }
inline Rule at_least(double low) { return {.low = low}; }
inline Rule positive() { return {.low = 0, .above_low = true}; }
inline Rule fraction() { return {.low = 0, .high = 1, .below_high = true}; }  // [0, 1)
inline Rule ranks() { return {.low = 1, .high = 32768}; }                     // of one axis: the product of four fits 64 bits

template <class V>
void visit(V& v, RunConfig& c) {
  const Rule name{.low = 1, .printable = true};
  v.key("name", c.name, "what messages call this run", name);
  v.key("dir", c.dir, "run folder for log, metrics and checkpoints; relative to the working directory", name);
  v.key("seed", c.seed, "decides fresh weights and the order of the data");
  v.choice("device", c.device, {{"auto", DeviceChoice::automatic}, {"cpu", DeviceChoice::cpu}, {"cuda", DeviceChoice::cuda}},
           "where operators run; auto is cuda where every rank has a GPU for itself, else cpu");
  v.choice("dtype", c.dtype, {{"bf16", DType::bf16}, {"fp32", DType::f32}, {"fp64", DType::f64}},
           "type of weights and activations; bf16 keeps fp32 master weights, fp64 is for the CPU only");
  v.key("deterministic", c.deterministic, "equal runs give equal bits: NCCL sums in one order; all else always does");
}

template <class V>
void visit_informational(V& v, ModelConfig& c) {
  const auto number = [](const io::YamlNode& n, std::int64_t low, std::int64_t high) {
    std::int64_t i = 0;
    const auto [end, error] = std::from_chars(n.text.data(), n.text.data() + n.text.size(), i);
    return n.kind == io::YamlNode::scalar && error == std::errc() && end == n.text.data() + n.text.size() && i >= low && i <= high;
  };
  const std::int64_t last_id = (c.vocab_size > 0 ? c.vocab_size : std::int64_t(kLargestSize)) - 1;
  const auto id = [=](const io::YamlNode& n) {
    if (n.kind != io::YamlNode::list) return number(n, 0, last_id);
    return std::all_of(n.items.begin(), n.items.end(), [&](const auto& item) { return number(item, 0, last_id); });
  };
  const auto kimi = [](const std::string& text) { return text.starts_with("kimi") || text.starts_with("Kimi"); };
  v.accepted(
      "model_type", "text that begins with kimi", [=](const io::YamlNode& n) { return kimi(n.text); },
      "not used: the other keys say which model it is");
  v.accepted(
      "architectures", "list of texts that begin with Kimi",
      [=](const io::YamlNode& n) {
        return n.kind == io::YamlNode::list &&
               std::all_of(n.items.begin(), n.items.end(), [&](const auto& i) { return kimi(i.text); });
      },
      "not used: the other keys say which model it is");
  v.accepted("bos_token_id", "id inside the vocabulary, or a list of them", id, "not used: data brings its own ids");
  v.accepted("eos_token_id", "id inside the vocabulary, or a list of them", id, "not used: data brings its own ids");
  v.accepted("pad_token_id", "id inside the vocabulary, or a list of them", id, "not used: there is no padding");
  v.accepted(
      "head_dim", "integer in [1, 2147483647]", [=](const io::YamlNode& n) { return number(n, 1, std::int64_t(kLargestSize)); },
      "not used: each attention kind has its own widths");
  v.accepted(
      "rope_theta", "number", [](const io::YamlNode& n) { return n.kind == io::YamlNode::scalar; }, "not used: nothing is rotated");
  v.accepted(
      "rope_scaling", "map", [](const io::YamlNode& n) { return n.kind == io::YamlNode::map; }, "not used: nothing is rotated");
  v.accepted(
      "num_nextn_predict_layers", "integer, only 0", [=](const io::YamlNode& n) { return number(n, 0, 0); },
      "layers that predict further tokens; there are none");
}

template <class V>
void visit(V& v, ModelConfig& c) {
  auto& linear = c.linear_attn;
  const auto layers = std::size_t(c.num_hidden_layers);
  const bool any_full = !linear.full_attn_layers.empty(), any_kda = linear.full_attn_layers.size() < layers;
  bool any_dense = false;
  for (std::int64_t layer = 0; layer < c.num_hidden_layers; ++layer) any_dense = any_dense || !c.moe_layer(layer);
  const char *kda = "required with a KDA layer", *full = "required with a full-attention layer", *moe = "required with num_experts";

  v.preset("preset", c.preset, "a name of configs/models, or a YAML file (relative to the job) that holds keys of this section");
  v.key("init_from", c.init_from,
        "folder of Hugging Face, of a checkpoint or of a run of this model, whose weights a new run starts from");
  v.key("initializer_range", c.initializer_range, "standard deviation of fresh matrices", at_least(0));
  v.key("vocab_size", c.vocab_size, "token ids", size_from(2).need());
  v.key("hidden_size", c.hidden_size, "width of the residual stream", size_from(1).need());
  v.key("num_hidden_layers", c.num_hidden_layers, "layers, each an attention and an MLP", Rule{.low = 1, .high = 10000}.need());
  v.key("num_attention_heads", c.num_attention_heads, "heads of full attention", size_from(1).need(any_full, full));
  v.key("num_key_value_heads", c.num_key_value_heads, "equals num_attention_heads where given", size_from(1));
  v.key("intermediate_size", c.intermediate_size, "inner width of a dense MLP",
        size_from(1).need(any_dense, "required with a dense layer"));
  v.key("rms_norm_eps", c.rms_norm_eps, "added under the root of every norm but those of the latents (1e-6)", positive());
  v.key("q_lora_rank", c.q_lora_rank, "width of the query latent; absent: queries straight from the hidden state",
        size_from(1).need(c.dsa.has_value(), "required with dsa_config"));
  v.key("kv_lora_rank", c.kv_lora_rank, "width of the key-value latent", size_from(1).need(any_full, full));
  v.key("qk_nope_head_dim", c.qk_nope_head_dim, "width of a head's own query and key part", size_from(1).need(any_full, full));
  v.key("qk_rope_head_dim", c.qk_rope_head_dim, "width of the key part all heads share; never rotated", size_from(0));
  v.key("v_head_dim", c.v_head_dim, "width of a head's values", size_from(1).need(any_full, full));
  v.choice("mla_use_nope", c.mla_use_nope, {{"true", true}}, "no rotary positions");
  v.key("mla_use_output_gate", c.mla_use_output_gate, "sigmoid gate on the output of full attention");
  v.section("linear_attn_config", linear, [&](auto& s, LinearAttention& l) {
    s.key("num_heads", l.num_heads, "heads of KDA", size_from(1).need(any_kda, kda));
    s.key("head_dim", l.head_dim, "width of a KDA head's queries, keys and values", size_from(1).need(any_kda, kda));
    s.key("short_conv_kernel_size", l.short_conv_kernel_size, "taps of the causal convolution", Rule{.low = 1, .high = 64});
    s.key("gate_lower_bound", l.gate_lower_bound, "given: decay is bounded below by it (K3); absent: softplus decay (Kimi-Linear)",
          Rule{.low = -5, .high = 0, .below_high = true});
    s.key("use_full_rank_gate", l.use_full_rank_gate, "output gate from one matrix; false: from two of rank head_dim");
    s.key("full_attn_layers", l.full_attn_layers, "layers with full attention, counted from 1; all others are KDA", size_from(1));
    s.key("kda_layers", l.kda_layers, "where given: the layers that full_attn_layers leaves", size_from(1));
  });
  v.section("dsa_config", c.dsa, [&](auto& s, IndexerConfig& d) {
    s.key({"index_n_heads", {"num_heads", "n_heads"}}, d.index_n_heads, "heads of the indexer", size_from(1).need());
    s.key({"index_head_dim", {"head_dim"}}, d.index_head_dim, "width of an indexer head", size_from(1).need());
    s.key({"index_topk", {"topk", "top_k"}}, d.index_topk, "positions a query attends to", size_from(1).need());
    s.key("index_norm_eps", d.index_norm_eps, "added under the root of the indexer's key norm", positive());
    s.key("index_norm_bias", d.index_norm_bias, "the indexer's key norm has a bias");
    s.key({"layers", {"dsa_layers"}}, d.layers, "where given: equals full_attn_layers", size_from(1));
  });
  v.key("num_experts", c.num_experts, "routed experts of a MoE layer; 0: every MLP is dense", Rule{.low = 0, .high = 65536});
  v.key("num_experts_per_token", c.num_experts_per_token, "experts a token is sent to", size_from(1).need(c.num_experts > 0, moe));
  v.key("num_shared_experts", c.num_shared_experts, "experts every token passes, run as one MLP of their joint width",
        size_from(0));
  v.key("moe_intermediate_size", c.moe_intermediate_size, "inner width of an expert", size_from(1).need(c.num_experts > 0, moe));
  v.key("routed_expert_hidden_size", c.routed_expert_hidden_size, "latent width routed experts work in; absent: hidden_size",
        size_from(1));
  v.key("latent_moe_use_norm", c.latent_moe_use_norm, "norm of the experts' sum before it leaves the latent");
  v.key("first_k_dense_replace", c.first_k_dense_replace, "dense layers before the first MoE layer", size_from(0));
  v.key("moe_layer_freq", c.moe_layer_freq, "of the layers after those, every this many is MoE", size_from(1));
  v.choice("moe_router_activation_func", c.moe_router_activation_func, {{"sigmoid", "sigmoid"}}, "how a score comes from a logit");
  v.choice("topk_method", c.topk_method, {{"noaux_tc", "noaux_tc"}},
           "experts are chosen by score plus bias, weighted by score alone");
  v.key("moe_renormalize", c.moe_renormalize, "weights of a token's experts are divided by their sum");
  v.key("use_grouped_topk", c.use_grouped_topk, "experts are chosen inside the best groups");
  v.key("routed_scaling_factor", c.routed_scaling_factor, "factor of the weights of routed experts", positive());
  v.key("num_expert_group", c.num_expert_group, "groups of experts", size_from(1));
  v.key("topk_group", c.topk_group, "groups a token may choose from", size_from(1));
  v.choice("hidden_act", c.hidden_act, {{"silu", ops::GluKind::silu}, {"situ", ops::GluKind::situ}},
           "gated unit of every MLP: SwiGLU or SiTU-GLU");
  v.key("activation_situ_beta", c.activation_situ_beta, "bound of the gate of situ", positive());
  v.key("activation_situ_linear_beta", c.activation_situ_linear_beta, "bound of the linear part of situ", positive());
  v.key("attn_res_block_size", c.attn_res_block_size, "layers a block of attention residuals; absent: ordinary residuals",
        size_from(1));
  v.key("tie_word_embeddings", c.tie_word_embeddings, "the head uses the embedding's matrix");
  v.key("max_position_embeddings", c.max_position_embeddings, "longest sequence the model is meant for, tokens", size_from(1));
  visit_informational(v, c);
}

template <class V>
void visit(V& v, ParallelConfig& c) {
  v.key("data_parallel", c.data_parallel, "ranks along this axis: copies of the model, each with its own data", ranks());
  v.key("expert_parallel", c.expert_parallel, "ranks along this axis: each holds a part of the experts and has its own data",
        ranks());
  v.key(
      "tensor_parallel", c.tensor_parallel,
      "ranks along this axis: heads, hidden widths and vocabulary cut between them, tokens elsewhere; divides the numbers of heads",
      ranks());
  v.key("sequence_parallel", c.sequence_parallel,
        "ranks along this axis: each has a slice of the same sequences; divides data.sequence_length", ranks());
  v.choice("sharding", c.sharding,
           {{"full", parallel::Sharding::full},
            {"gradients", parallel::Sharding::gradients},
            {"optimizer", parallel::Sharding::optimizer},
            {"none", parallel::Sharding::none}},
           "what is cut over the ranks that share parameters: ZeRO stage 3, 2, 1 or 0");
  v.key("reshard_after_use", c.reshard_after_use, "with full sharding, gathered weights are dropped between forward and backward");
  v.key("bucket_size", c.bucket_size,
        "gradients of layers wait for each other until they are as many, and leave as one message; as many weights are gathered "
        "ahead; "
        "0: a layer at a time");
  v.choice("expert_placement", c.expert_placement, {{"uniform", "uniform"}},
           "each rank of the expert axis holds equally many experts");
  v.choice("expert_sharding", c.expert_sharding, {{"full", true}, {"none", false}},
           "full: experts are cut as sharding says; none: whole on every rank of their expert coordinate");
}

template <class V>
void visit(V& v, DataConfig& c) {
  v.key("train", c.train, "files and folders; relative to the working directory", size_from(1).need());
  v.key("eval", c.eval, "files and folders the loss is also measured on");
  v.choice("format", c.format, {{"bytes", io::DataFormat::bytes}, {"tokens", io::DataFormat::tokens}, {"chat", io::DataFormat::chat}},
           "any files as UTF-8 bytes, one document each; HDF5 token files; or those of conversations, with a loss mask");
  v.choice("bad_lines", c.skip_bad_lines, {{"refuse", false}, {"skip", true}},
           "chat data made from a text with bad lines: the run is refused, or trains without them");
  v.key("sequence_length", c.sequence_length, "tokens a sequence", size_from(1).need());
  v.key("packing", c.packing, "a sequence may hold several documents; false: one, or a piece of one");
  v.key("shuffle", c.shuffle, "a new order of the sequences every epoch; false: as they stand in the files");
  v.key("exclude", c.exclude,
        "names of files left out of train (an evaluation text beside it); * and ? match any text and any letter");
}

template <class V>
void visit(V& v, TrainingConfig& c) {
  v.key("steps", c.steps, "updates of the run", size_from(1).need());
  v.key("micro_batch_size", c.micro_batch_size, "sequences a data coordinate computes at once", size_from(1));
  v.key("gradient_accumulation", c.gradient_accumulation, "micro-batches a step", size_from(1));
  v.key("grad_clip", c.grad_clip, "largest global norm of the gradient; 0: not clipped", at_least(0));
  v.key("eval_every", c.eval_every, "steps between evaluations; 0: at the end only, where data.eval is given", size_from(0));
  v.key("eval_batches", c.eval_batches, "micro-batches a data coordinate evaluates", size_from(1));
  v.key("trainable", c.trainable,
        "names of the parameters that are trained, with * and ?; none: all, with lora the adapters alone");
  v.key("max_nonfinite", c.max_nonfinite, "steps in a row whose gradient is not finite before the run gives up", size_from(1));
}

template <class V>
void visit(V& v, OptimizerConfig& c) {
  v.choice("name", c.name, {{"adamw", "adamw"}}, "the optimizer");
  v.key("lr", c.lr, "learning rate after warm-up", positive());
  v.pair("betas", c.beta1, c.beta2, "decay of the first and the second moment", fraction());
  v.key("eps", c.eps, "added to the root of the second moment", positive());
  v.key("weight_decay", c.weight_decay, "decoupled decay of matrices; times the learning rate a step", at_least(0));
  v.choice("grad_dtype", c.grad_dtype, {{"fp32", DType::f32}}, "type gradients are summed and reduced in (fp64 runs: fp64)",
           {{"bf16", "sum gradients in bf16"}});
}

template <class V>
void visit(V& v, ScheduleConfig& c) {
  v.choice("name", c.name,
           {{"constant", ScheduleKind::constant},
            {"linear", ScheduleKind::linear},
            {"cosine", ScheduleKind::cosine},
            {"wsd", ScheduleKind::wsd}},
           "course of the learning rate after warm-up; wsd is constant, then linear");
  v.key("warmup_steps", c.warmup_steps, "steps over which the rate rises from 0", size_from(0));
  v.key("min_lr", c.min_lr, "rate at the last step (not with constant)", at_least(0));
  v.key("decay_fraction", c.decay_fraction, "wsd: share of the steps that decay, at the end",
        Rule{.low = 0, .high = 1, .above_low = true});
}

template <class V>
void visit(V& v, LossConfig& c) {
  v.key("seq_chunk", c.seq_chunk, "tokens a block of the loss; 0: chosen", size_from(0));
  v.key("vocab_chunk", c.vocab_chunk, "vocabulary rows a block of the loss; 0: chosen", size_from(0));
  v.key("indexer_coefficient", c.indexer_coefficient, "weight of the indexer's loss; 0: the indexer does not learn", at_least(0));
  v.choice("indexer_stage", c.indexer_stage, {{"dense", IndexerStage::dense}, {"sparse", IndexerStage::sparse}},
           "dense: full attention teaches the indexer (warm-up); sparse: attention over what it selects");
}

template <class V>
void visit(V& v, MoeConfig& c) {
  v.key("capacity_factor", c.capacity_factor,
        "rows that an expert takes at most in training, in multiples of the mean over a micro-batch of all ranks; 0: no limit",
        at_least(0));
  v.choice("overflow", c.overflow, {{"reroute", Overflow::reroute}, {"drop", Overflow::drop}},
           "what happens to rows past the capacity: the token's next-best expert with room, or nothing");
  v.choice("balance", c.balance,
           {{"quantile", Balance::quantile}, {"sign", Balance::sign}, {"auxiliary", Balance::auxiliary}, {"none", Balance::none}},
           "how the load of experts is evened out: a new bias from quantiles or in steps, a loss, or not at all");
  v.key("quantile_bins", c.quantile_bins, "quantile: bins of an expert's histogram", Rule{.low = 2, .high = 65536});
  v.key("sign_rate", c.sign_rate, "sign: step of the bias", at_least(0));
  v.key("auxiliary_coefficient", c.auxiliary_coefficient, "auxiliary: weight of the loss", at_least(0));
  v.choice("auxiliary_scope", c.auxiliary_scope,
           {{"micro_batch", AuxiliaryScope::micro_batch},
            {"sequence", AuxiliaryScope::sequence},
            {"global_batch", AuxiliaryScope::global_batch}},
           "auxiliary: over which tokens the load is taken");
  v.key("z_loss", c.z_loss, "weight of the squared log-sum-exp of router logits", at_least(0));
  v.key("min_expert_batch", c.min_expert_batch, "only 0: grouped products take experts of any size at the speed of their tiles",
        size_from(0).only_default("merge small experts: grouped products cut tiles to the rows an expert has, and padding would only "
                                  "add to them"));
  v.key("overlap_chunks", c.overlap_chunks, "parts of a rank's experts: rows of one travel while others work; at most one an expert",
        size_from(1));
  v.key("max_rows", c.max_rows, "rows a rank may receive in a layer; 0: no limit",
        size_from(0).only_default("limit the rows of a rank"));
}

template <class V>
void visit(V& v, MemoryConfig& c) {
  v.choice("activation_checkpointing", c.activation_checkpointing,
           {{"none", Checkpointing::none}, {"selective", Checkpointing::selective}, {"full", Checkpointing::full}},
           "none: what backward needs is kept; full: layers are computed again; selective: likewise, but matrix products, KDA, "
           "attention "
           "and what experts exchange are kept");
  v.key("device_limit", c.device_limit, "the most that a rank's pool takes for tensors; absent: what the GPU or the host has in all",
        Rule{.low = 4096});
  v.section("cache", c.cache, [](auto& s, CacheConfig& cache) {
    s.key("ops", cache.ops,
          "under full: results that need not be computed again. auto: of all operators those that save most time a byte, in host "
          "memory only "
          "where there is time for the way; or names: linear, grouped_linear, kda, attention, exchange");
    s.key("device", cache.device, "room for them on a rank's device");
    s.key("host", cache.host, "room for them in a rank's host memory");
  });
  v.section("offload", c.offload, [](auto& s, OffloadConfig& offload) {
    s.choice("optimizer", offload.optimizer, {{"none", false}, {"host", true}},
             "host: moments and masters lie in host memory and pass through the device in slices while weights are updated");
    s.key("slice", offload.slice, "bytes of state that pass at once; the device has room for three times that", Rule{.low = 4096});
    s.choice("experts", offload.experts, {{"none", false}, {"host", true}},
             "host: the weights of routed experts lie in host memory, and are on the device while their layer works and the one "
             "before it",
             {{"disk", "keep experts on disk"}});
    s.undone("path", "keep anything on disk");
  });
}

template <class V>
void visit(V& v, LoraConfig& c) {
  v.key("rank", c.rank, "rank of every adapter, an expert's too; at most the longer side of every target", size_from(1));
  v.key("alpha", c.alpha, "an adapter counts alpha / rank", positive());
  v.key("dropout", c.dropout, "share of an adapter's inputs that a training step drops; not with experts",
        fraction());
  v.key("rslora", c.rslora, "an adapter counts alpha / sqrt(rank)");
  v.key("shared_a", c.shared_a, "the experts of a layer share the factor A and have their own B");
  v.key("target", c.target, "what gets adapters: attention, shared, expert_proj, latent, head, or names of matrices with * and ?",
        size_from(1).need());
}

template <class V>
void visit(V& v, CheckpointConfig& c) {
  v.key("every", c.every, "steps between checkpoints; 0: at the end only", size_from(0));
  v.key("keep", c.keep, "newest checkpoints kept; 0: all", size_from(0));
  v.key("async", c.async,
        "training goes on while a checkpoint is written, from a copy in host memory that `moetrain plan` shows; its failure ends the run at the next step");
}

template <class V>
void visit(V& v, MonitorConfig& c) {
  v.key("expert_load_alert", c.expert_load_alert, "warn when the fullest expert has this many times the mean; 0: never",
        at_least(0));
  v.key("profile_steps", c.profile_steps,
        "print a table of time by operator after this many steps, or at the end of a shorter run; 0: never", size_from(0));
  v.key("collective_timeout_s", c.collective_timeout_s, "seconds a rank waits for the others before it calls them lost",
        positive());
}

template <class V>
void visit(V& v, Config& c) {
  const auto keys = [](auto& inner, auto& section) { visit(inner, section); };
  v.section("run", c.run, keys);
  v.section("model", c.model, keys);
  v.section("parallel", c.parallel, keys);
  v.section("data", c.data, keys);
  v.section("training", c.training, keys);
  v.section("optimizer", c.optimizer, keys);
  v.section("schedule", c.schedule, keys);
  v.section("loss", c.loss, keys);
  v.section("moe", c.moe, keys);
  v.section("memory", c.memory, keys);
  v.section("lora", c.lora, keys);
  v.section("checkpoint", c.checkpoint, keys);
  v.section("monitor", c.monitor, keys);
}

}  // namespace moetrain::core
