// export_peft.cpp -- adapters of the parameter table as modules and parameters of the model that takes them; order of the factors.
#include "core/export_peft.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <unordered_set>

#include "core/checkpoint_files.h"
#include "core/hf_names.h"
#include "core/host_values.h"
#include "core/model.h"
#include "core/together.h"
#include "core/whole_folder.h"
#include "io/hf_config.h"
#include "io/peft_config.h"
#include "io/safetensors.h"

namespace moetrain::core {
namespace fs = std::filesystem;
namespace {

using Names = std::vector<std::string>;

// A tensor of the file; its values row by row, made when it is written.
struct PeftTensor {
  std::string name;
  Shape shape;
  DType dtype;
  std::function<void(double*)> fill;
};

struct Source {
  Config job;
  ParamTable table;
  int own = 0;                // its parameters that are the model's; those after them are factors
  std::vector<DType> dtypes;  // by parameter
  WeightSource weights;
};

Source open_source(const std::string& checkpoint) {
  const auto view = std::make_shared<io::Hdf5File>(io::Hdf5File::open(view_path(checkpoint)));
  const Config job = config_of(*view);
  if (!job.lora)
    throw Error(checkpoint + ": holds no adapters, its job has no section lora; export --to hf writes the model itself", ExitCode::bad_job);
  const auto table = std::make_shared<const ParamTable>(parameters_of(job));
  Source s{job, *table, parameters_of(job.model).size(), {}, weights_of(view, table)};
  for (const Param& p : table->all()) s.dtypes.push_back(dtype_in(*view, p));
  return s;
}

// The files hold adapters alone: anything else that the run has changed would be lost.
void refuse_what_else_was_trained(const ParamTable& table, const std::string& checkpoint) {
  std::set<int> factors;
  for (const Param& p : table.all())
    if (p.adapter.present()) factors.insert({p.adapter.a, p.adapter.b});
  std::string others;
  for (int i = 0; i < table.size(); ++i)
    if (!table[i].frozen && !factors.contains(i)) others += (others.empty() ? "" : ", ") + table[i].name;
  if (!others.empty())
    throw Error(checkpoint + ": training.trainable has trained " + others +
                " beside the adapters, for which their files have no place; export --to hf writes all of it, merged");
}

// What the transformers library's KimiLinearForCausalLM does not have; null: it is the class of this model.
const char* beyond_kimi_linear(const ModelConfig& m) {
  const std::pair<bool, const char*> others[] = {{m.attn_res_block_size.has_value(), "attn_res_block_size"},
                                                 {m.routed_expert_hidden_size.has_value(), "routed_expert_hidden_size"},
                                                 {m.dsa.has_value(), "dsa_config"},
                                                 {m.mla_use_output_gate, "mla_use_output_gate"},
                                                 {m.linear_attn.gate_lower_bound.has_value(), "gate_lower_bound"},
                                                 {m.linear_attn.use_full_rank_gate, "use_full_rank_gate"},
                                                 {m.hidden_act != ops::GluKind::silu, "hidden_act"}};
  for (const auto& [differs, key] : others)
    if (differs) return key;
  return nullptr;
}

// Least endings of at least so many parts, each after a dot or whole, that stand for all of `wanted` and for no other of `all`.
Names endings(const Names& wanted, const Names& all, int parts) {
  const auto after_dot = [](std::string_view name, std::size_t end) {
    const auto dot = name.rfind('.', end);
    return dot == name.npos ? 0 : dot + 1;
  };
  const std::unordered_set<std::string_view> mine(wanted.begin(), wanted.end());
  std::unordered_set<std::string_view> taken;
  for (const std::string_view name : all)
    if (!mine.contains(name))
      for (std::size_t at = name.size(); at > 0;) taken.insert(name.substr(at = after_dot(name, at - 2)));
  std::set<std::string> found;
  for (const std::string_view name : wanted) {
    std::size_t at = name.size();
    for (int part = 0; at > 0 && (part < parts || taken.contains(name.substr(at))); ++part) at = after_dot(name, at - 2);
    found.emplace(name.substr(at));
  }
  return {found.begin(), found.end()};
}

class PeftFiles {
 public:
  PeftFiles(const Source& source, bool fused, const std::string& base) : s_(source), fused_(fused) {
    if (fs::exists(base + "/config.json") && io::read_hf_config(base + "/config.json").vision) prefix_ = kHfTextPrefix;
    for (int i = 0; i < s_.own; ++i) s_.table[i].unit == UnitKind::experts ? add_experts(i) : add_matrix(i);
    for (const auto& [module, w] : stacks_) add_fused(module, w);
    if (prefix_[0] != '\0')
      for (const HfVisionTensor& t : hf_vision_tensors(s_.job.model.hidden_size)) all_modules_.push_back(without_weight(t.name));
    const LoraConfig& lora = *s_.job.lora;
    config_ = {.base = base,
               .rank = lora.rank,
               .alpha = lora.alpha,
               .dropout = lora.dropout,
               .rslora = lora.rslora,
               .modules = endings(modules_, all_modules_, 1),
               .parameters = endings(parameters_, all_parameters_, 2),
               .ranks = {},
               .alphas = {}};
    for (const std::string& name : endings(doubled_, all_parameters_, 2)) {
      config_.ranks[name] = 2 * lora.rank;
      config_.alphas[name] = lora.alpha * (lora.rslora ? std::sqrt(2.0) : 2.0);
    }
    if (!parameters_.empty()) config_.dropout = 0;  // the library has none for a parameter
  }

  // Separate experts come to the library's class too: it stacks the factors itself if told the parameters, and would pass over
  // them without a word if not. Only where both forms name the same modules, and all three weights of an expert have adapters.
  bool also(const PeftFiles& fused) {
    Names modules = config_.modules;
    std::erase_if(modules, [](const std::string& name) { return name == "w1" || name == "w2" || name == "w3"; });
    const bool whole =
        std::ranges::all_of(fused.stacks_, [](const auto& stack) { return std::ranges::count(stack.second, -1) == 0; });
    if (!whole || modules != fused.config_.modules) return false;
    config_.parameters = fused.config_.parameters;
    config_.ranks = fused.config_.ranks;
    config_.alphas = fused.config_.alphas;
    return true;
  }

  const io::PeftConfig& config() const { return config_; }
  std::vector<PeftTensor>& tensors() { return tensors_; }

 private:
  static std::string without_weight(const std::string& name) {
    return name.ends_with(".weight") ? name.substr(0, name.rfind('.')) : name;
  }
  // Of the parameter `name` in the model that takes the adapters.
  std::string place_of(std::string name) const {
    const auto replace = [&](std::string_view part, const char* by) {
      if (const auto at = name.find(part); fused_ && at != name.npos) name.replace(at, part.size(), by);
    };
    replace(".block_sparse_moe.", ".mlp.");
    replace(".self_attn.f_a_proj.", ".self_attn.forget_gate.f_a_proj.");
    replace(".self_attn.f_b_proj.", ".self_attn.forget_gate.f_b_proj.");
    return prefix_ + name;
  }

  // `rows` of a factor, all of it unless told.
  std::vector<double> values(int param, parallel::Rows rows) const {
    const Shape shape = s_.table[param].shape.with_dim0(rows.count());
    std::vector<double> v(std::size_t(shape.count()));
    s_.weights.read(param, rows.begin, Tensor(v.data(), DType::f64, shape));
    return v;
  }
  std::vector<double> values(int param) const { return values(param, {0, s_.table[param].shape[0]}); }

  void add_rows(const std::string& name, int param, parallel::Rows rows, Shape shape) {
    tensors_.push_back({"base_model.model." + name, shape, s_.dtypes[std::size_t(param)],
                        [this, param, rows](double* to) { std::ranges::copy(values(param, rows), to); }});
  }

  void add_matrix(int i) {
    const Param& p = s_.table[i];
    const std::string name = place_of(p.name), module = without_weight(name);
    const bool router = p.name.ends_with(".gate.weight");  // a module of its own kind, whose weight is adapted as a parameter
    all_parameters_.push_back(name);
    if (!router && multiplied(p)) all_modules_.push_back(module);
    if (!p.adapter.present()) return;
    (router ? parameters_ : modules_).push_back(router ? name : module);
    for (const auto& [factor, param] : {std::pair(".lora_A.weight", p.adapter.a), {".lora_B.weight", p.adapter.b}})
      add_rows(module + factor, param, {0, s_.table[param].shape[0]}, s_.table[param].shape);
  }
  static bool multiplied(const Param& p) { return p.name.ends_with(".weight") && p.shape.rank() == 2; }

  void add_experts(int i) {
    const Param& p = s_.table[i];
    const auto dot = p.name.rfind('.');
    const std::string stem = place_of(p.name.substr(0, dot)), which = p.name.substr(dot);
    if (fused_) {
      all_parameters_.push_back(stem + (which == ".w2" ? ".down_proj" : ".gate_up_proj"));
      if (p.adapter.present()) stacks_[stem][which == ".w1" ? 0 : which == ".w3" ? 1 : 2] = i;
      return;
    }
    const Shape &a = s_.table[p.adapter.present() ? p.adapter.a : i].shape,
                &b = s_.table[p.adapter.present() ? p.adapter.b : i].shape;
    for (std::int64_t e = 0; e < p.shape[0]; ++e) {
      const std::string module = stem + "." + std::to_string(e) + which;
      all_modules_.push_back(module);
      if (!p.adapter.present()) continue;
      modules_.push_back(module);
      const bool shared = a.rank() == 2;
      add_rows(module + ".lora_A.weight", p.adapter.a, shared ? parallel::Rows{0, a[0]} : parallel::Rows{e, e + 1},
               shared ? a : Shape{a[1], a[2]});
      add_rows(module + ".lora_B.weight", p.adapter.b, {e, e + 1}, Shape{b[1], b[2]});
    }
  }

  // Weights w1, w3 and w2 of a layer by index; -1: without an adapter. The library wraps gate_up_proj first, then down_proj around
  // it.
  struct Stack : std::array<int, 3> {
    Stack() { fill(-1); }
  };
  void add_fused(const std::string& module, const Stack& w) {
    const bool down = w[2] >= 0;
    std::vector<int> parts;
    for (const int i : {w[0], w[1]})
      if (i >= 0) parts.push_back(i);
    if (down) {
      parameters_.push_back(module + ".down_proj");
      add_stacked(module, {w[2]}, s_.table[w[2]].shape[1], {0});
    }
    if (parts.empty()) return;
    parameters_.push_back(module + ".gate_up_proj");
    if (parts.size() == 2) doubled_.push_back(parameters_.back());
    const std::int64_t F = s_.table[parts[0]].shape[1];
    std::vector<std::int64_t> outputs;  // where those of each begin
    for (const int i : parts) outputs.push_back(i == w[0] ? 0 : F);
    add_stacked(module + (down ? ".base_layer" : ""), parts, 2 * F, outputs);
  }

  // Adapters of stacked weights with the same inputs as one of more outputs, `O` in all.
  void add_stacked(const std::string& module, const std::vector<int>& parts, std::int64_t O,
                   const std::vector<std::int64_t>& outputs) {
    const Param &w = s_.table[parts[0]], &b0 = s_.table[w.adapter.b];
    const std::int64_t E = w.shape[0], I = w.shape[2], r = b0.shape[2], R = r * std::int64_t(parts.size());
    const auto fill_a = [this, parts, E, I, r, R](double* to) {
      for (std::size_t j = 0; j < parts.size(); ++j) {
        const int a = s_.table[parts[j]].adapter.a;
        const auto from = values(a);
        const bool shared = s_.table[a].shape.rank() == 2;
        for (std::int64_t e = 0; e < E; ++e)
          std::copy_n(from.data() + (shared ? 0 : e * r * I), r * I, to + (e * R + std::int64_t(j) * r) * I);
      }
    };
    const auto fill_b = [this, parts, outputs, E, r, R, O](double* to) {
      std::fill_n(to, O * R * E, 0.0);
      for (std::size_t j = 0; j < parts.size(); ++j) {
        const int b = s_.table[parts[j]].adapter.b;
        const auto from = values(b);
        const std::int64_t rows = s_.table[b].shape[1];
        for (std::int64_t e = 0; e < E; ++e)
          for (std::int64_t o = 0; o < rows; ++o)
            for (std::int64_t k = 0; k < r; ++k)
              to[(outputs[j] + o) * R * E + (std::int64_t(j) * r + k) * E + e] = from[std::size_t((e * rows + o) * r + k)];
      }
    };
    const std::string name = "base_model.model." + module;
    tensors_.push_back({name + ".lora_A.weight", {E * R, I}, s_.dtypes[std::size_t(w.adapter.a)], fill_a});
    tensors_.push_back({name + ".lora_B.weight", {O, R * E}, s_.dtypes[std::size_t(w.adapter.b)], fill_b});
  }

  const Source& s_;
  const bool fused_;
  std::string prefix_;
  Names modules_, parameters_, doubled_, all_modules_, all_parameters_;
  std::map<std::string, Stack> stacks_;
  std::vector<PeftTensor> tensors_;
  io::PeftConfig config_;
};

void write_tensors(const std::vector<PeftTensor>& tensors, const std::string& path) {
  std::vector<io::SafetensorsEntry> entries;
  for (const PeftTensor& t : tensors)
    entries.push_back({.name = t.name, .dtype = io::safetensors_dtype(t.dtype), .shape = {t.shape[0], t.shape[1]}});
  io::SafetensorsWriter writer(path, std::move(entries));
  for (const PeftTensor& t : tensors) {
    std::vector<double> values(std::size_t(t.shape.count()));
    std::memset(values.data(), 0xff, values.size() * sizeof(double));  // NaN
    t.fill(values.data());
    const ConstTensor made(values.data(), DType::f64, t.shape);
    if (const auto at = first_not_finite(made); at >= 0)
      throw Error(t.name + ": element " + std::to_string(at) + " is not a finite number");
    std::vector<std::byte> raw(std::size_t(t.shape.count() * size_of(t.dtype)));
    convert(made, Tensor(raw.data(), t.dtype, t.shape));
    writer.append(raw.data(), std::int64_t(raw.size()));
  }
  writer.close();
}

}  // namespace

void export_adapters(parallel::Communicator& control, const std::string& checkpoint, const std::string& out,
                     const PeftOptions& options) {
  WholeFolder folder(control, out, IfThere::refused);
  std::optional<Source> source;
  std::optional<PeftFiles> files;
  bool passed_over = false;
  open_verified(control, checkpoint, [&] {
    source.emplace(open_source(checkpoint));
    refuse_what_else_was_trained(source->table, checkpoint);
    const bool fused = options.experts == ExpertLayout::fused;
    const std::string& base = options.base.empty() ? source->job.model.init_from : options.base;
    const char* beyond = beyond_kimi_linear(source->job.model);
    if (fused && beyond != nullptr)
      throw Error(std::string("--experts fused: the transformers library has no class for a model with ") + beyond +
                      "; code published for it holds experts one by one: --experts separate",
                  ExitCode::bad_job);
    files.emplace(*source, fused, base);
    passed_over = !fused && beyond == nullptr && !files->also(PeftFiles(*source, true, base));
  });
  folder.finish([&] {
    // The widest type first, so that each begins where its type may.
    std::ranges::stable_sort(files->tensors(), std::greater(), [](const PeftTensor& t) { return size_of(t.dtype); });
    write_tensors(files->tensors(), folder.partial() + "/adapter_model.safetensors");
    const io::PeftConfig& c = files->config();
    io::write_text_atomically(folder.partial() + "/adapter_config.json", io::peft_config_text(c));
    if (c.dropout != source->job.lora->dropout)
      spdlog::warn("{}: lora_dropout is written as 0, the peft library has none for {}", out, c.parameters[0]);
    if (passed_over)
      spdlog::warn(
          "{}: for modules of published code; transformers' KimiLinearForCausalLM would pass over some of these adapters, for it "
          "there is --experts fused",
          out);
    spdlog::info("{}: {} tensors of adapters of rank {}, for {}", out, files->tensors().size(), c.rank,
                 c.base.empty() ? "a model without a name: the run has no model.init_from, --base names it" : c.base);
  });
}

}  // namespace moetrain::core
