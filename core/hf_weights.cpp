// hf_weights.cpp -- config.json to a model, headers against the parameter table, values on demand.
#include "core/hf_weights.h"

#include <spdlog/spdlog.h>

#include <algorithm>
#include <map>
#include <unordered_set>

#include "core/host_values.h"
#include "io/hf_config.h"
#include "io/mxfp4.h"

namespace moetrain::core {

namespace {

// Keys whose default would silently make another model of the same shapes.
void require_keys(const io::YamlNode& model, const ModelConfig& read, std::vector<Fault>& faults) {
  std::vector<const char*> keys{"hidden_act", "rms_norm_eps"};
  if (read.num_experts > 0) keys.insert(keys.end(), {"first_k_dense_replace", "routed_scaling_factor", "moe_renormalize"});
  for (const char* key : keys)
    if (model.find(key) == nullptr) faults.push_back({0, std::string("model.") + key, "is missing"});
}

}  // namespace

HfModel read_hf_model(const std::string& folder) {
  constexpr std::string_view kSection = "model.";
  const std::string path = folder + "/config.json";
  const io::HfConfig file = io::read_hf_config(path);
  io::YamlNode job;
  job.kind = io::YamlNode::map;
  job.entries.emplace_back("model", file.model);
  std::vector<Fault> faults;
  Config config = read_config(job, {}, folder, faults);
  std::string unknown, wrong;
  std::erase_if(faults, [&](const Fault& f) {
    if (f.unknown) unknown += (unknown.empty() ? "" : ", ") + f.key.substr(kSection.size());
    return f.unknown;
  });
  require_keys(file.model, config.model, faults);
  config.data.format = io::DataFormat::tokens;  // rules about a run are not those of the folder
  config.moe.balance = Balance::none;
  check_config(config, job, 0, faults);
  for (const Fault& f : faults)
    if (f.key.starts_with(kSection))
      wrong += (wrong.empty() ? "" : "\n") + path + ": " + f.key.substr(kSection.size()) + ": " + f.text;
  if (!wrong.empty()) throw Error(wrong);
  if (!unknown.empty()) spdlog::warn("{}: keys that are not known and not used here: {}", path, unknown);
  return {config.model, file.vision};
}

// The judgement of a folder's headers.
class HfPreflight {
 public:
  HfPreflight(HfWeights& weights, const std::string& folder, const HfModel& model, const ParamTable& table)
      : w_(weights), folder_(folder), table_(table) {
    choose_prefix();
    for (const HfTensor& t : hf_tensors(model.model, table)) find(t);
    if (model.vision)
      for (const HfVisionTensor& t : hf_vision_tensors(model.model.hidden_size))
        if (const Place* place = take(t.name)) {
          check_shape(*place, t.shape);
          votes_["vision tower"].push_back(place);
        }
    find_unused();
    judge_types();
    report();
  }

 private:
  using Place = HfWeights::Place;

  // That of the most, so that a single name with another one is found.
  void choose_prefix() {
    std::int64_t with = 0, without = 0;
    for (const auto& [name, place] : w_.folder_.tensors) {
      with += name.starts_with(kHfTextPrefix);
      without += name.starts_with("model.");
    }
    if (with > without) prefix_ = kHfTextPrefix;
  }

  bool has(const std::string& name) const { return w_.folder_.tensors.contains(name); }
  const Place* take(const std::string& name) {
    const auto found = w_.folder_.tensors.find(name);
    if (found == w_.folder_.tensors.end()) {
      faults_.push_back(folder_ + ": " + name + ": missing");
      return nullptr;
    }
    used_.insert(&found->second);
    return &found->second;
  }
  void wrong(const Place& place, const std::string& why) {
    faults_.push_back(w_.folder_.path_of(place) + ": " + place.entry.name + ": is " + place.entry.text() + ", " + why);
  }

  static bool is(const Place& place, const Shape& shape) {
    const auto& dims = place.entry.shape;
    if (int(dims.size()) != shape.rank()) return false;
    for (int d = 0; d < shape.rank(); ++d)
      if (dims[std::size_t(d)] != shape[d]) return false;
    return true;
  }
  void check_shape(const Place& place, const Shape& shape) {
    if (!is(place, shape)) wrong(place, "config.json makes it " + shape.text());
  }
  // Any shape with one long dim that has room for all heads; alike in all layers.
  void check_a_log(const Place& place, const HfTensor& t) {
    const auto& dims = place.entry.shape;
    const auto longest = dims.empty() ? 1 : *std::max_element(dims.begin(), dims.end());
    if (place.entry.elements() != longest || longest < t.rows.count())
      return wrong(place, "config.json makes it " + t.shape.text() + ", of which " + std::to_string(t.rows.count()) + " are heads");
    a_logs_.push_back(&place);
  }

  void find(const HfTensor& t) {
    const Param& p = table_[t.param];
    const std::string name = prefix_ + t.name, other = t.other.empty() ? name : prefix_ + t.other;
    auto& sources = w_.sources_[std::size_t(t.param)];
    if (p.unit == UnitKind::experts && !has(name) && (has(name + "_packed") || has(name + "_scale")))
      return find_packed(name, t, sources);
    const Place* place = take(!has(name) && has(other) ? other : name);
    sources.push_back({t.rows, place, nullptr});
    if (place == nullptr) return;
    if (p.name.ends_with(".A_log"))
      check_a_log(*place, t);
    else
      check_shape(*place, t.shape);
    votes_[p.pinned ? kind_of(p.name) : kMatrices].push_back(place);
  }

  void find_packed(const std::string& name, const HfTensor& t, std::vector<HfWeights::Source>& sources) {
    const Place *packed = take(name + "_packed"), *scale = take(name + "_scale");
    sources.push_back({t.rows, packed, scale});
    if (packed == nullptr || scale == nullptr) return;
    if (t.shape[1] % io::kMxfp4Group != 0)
      return wrong(*packed, "but its rows of " + std::to_string(t.shape[1]) + " columns are not whole groups of 32");
    check_shape(*packed, {t.shape[0], t.shape[1] / 2});
    check_shape(*scale, {t.shape[0], t.shape[1] / io::kMxfp4Group});
    for (const Place* place : {packed, scale})
      if (place->entry.dtype != "U8") wrong(*place, "MXFP4 is packed in U8");
  }

  void find_unused() {
    std::vector<const Place*> unused;
    for (const auto& [name, place] : w_.folder_.tensors)
      if (!used_.contains(&place)) unused.push_back(&place);
    std::sort(unused.begin(), unused.end(), [](const Place* a, const Place* b) { return a->entry.name < b->entry.name; });
    for (const Place* place : unused) wrong(*place, "not a tensor of this model");
  }

  static std::string kind_of(const std::string& name) { return name.substr(name.find('.', name.find("layers.") + 7) + 1); }
  // What most of them are; text_of: type, or type and shape.
  template <class Text>
  static std::string most(const std::vector<const Place*>& places, Text text_of) {
    std::map<std::string, int> count;
    for (const Place* place : places) ++count[text_of(*place)];
    const auto top = std::max_element(count.begin(), count.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
    return top == count.end() ? "" : top->first;
  }
  static std::string type_of(const Place& place) { return place.entry.dtype; }

  void judge_types() {
    const std::string matrices = most(votes_[kMatrices], type_of);
    for (const auto& [kind, places] : votes_) {
      const std::string type = most(places, type_of);
      const bool allowed =
          io::is_safetensors_float(type) && (kind == kMatrices || type == matrices || type == "F32" || kind == "vision tower");
      for (const Place* place : places)
        if (!allowed)
          wrong(*place, "a type that is not read here");
        else if (place->entry.dtype != type)
          wrong(*place, "the others of the " + kind + " are " + type);
    }
    const std::string a_log = most(a_logs_, [](const Place& place) { return place.entry.text(); });
    for (const Place* place : a_logs_)
      if (place->entry.text() != a_log && place->entry.dtype == a_log.substr(0, place->entry.dtype.size()))
        wrong(*place, "the A_log of the other layers are " + a_log);
    w_.dtype_ = matrices == "BF16" ? DType::bf16 : matrices == "F64" ? DType::f64 : DType::f32;
  }

  void report() const {
    constexpr std::size_t kTold = 20;
    if (faults_.empty()) return;
    std::string text = faults_[0];
    for (std::size_t i = 1; i < std::min(kTold, faults_.size()); ++i) text += "\n" + faults_[i];
    if (faults_.size() > kTold) text += "\nand " + std::to_string(faults_.size() - kTold) + " more";
    throw Error(text);
  }

  static constexpr const char* kMatrices = "matrices";
  HfWeights& w_;
  const std::string& folder_;
  const ParamTable& table_;
  std::string prefix_;
  std::unordered_set<const Place*> used_;
  std::map<std::string, std::vector<const Place*>> votes_;  // those that have to agree on a type
  std::vector<const Place*> a_logs_;
  std::vector<std::string> faults_;
};

HfWeights::HfWeights(const std::string& folder, const HfModel& model, const ParamTable& table)
    : folder_(io::read_safetensors_folder(folder)), sources_(std::size_t(table.size())) {
  HfPreflight(*this, folder, model, table);
}

void HfWeights::read(int param, std::int64_t first, Tensor to) const {
  const std::int64_t last = first + to.shape[0];
  for (const Source& source : sources_[std::size_t(param)]) {
    const std::int64_t begin = std::max(first, source.rows.begin), end = std::min(last, source.rows.end);
    if (begin < end) read_source(source, begin - source.rows.begin, to.rows(begin - first, end - first));
  }
}

// `row` of the source, and as many as `to` has.
void HfWeights::read_source(const Source& source, std::int64_t row, Tensor to) const {
  const Place& values = *source.values;
  const std::string& path = folder_.path_of(values);
  const std::int64_t row_elements = to.shape.row(), all = source.rows.count() * row_elements;
  if (source.scale != nullptr) {
    const io::SafetensorsEntry &codes = values.entry, &scale = source.scale->entry;
    std::vector<std::uint8_t> raw(std::size_t(codes.end - codes.begin)), scales(std::size_t(scale.end - scale.begin));
    io::read_bytes(path, codes.begin, std::int64_t(raw.size()), raw.data());
    io::read_bytes(folder_.path_of(*source.scale), scale.begin, std::int64_t(scales.size()), scales.data());
    io::decode_mxfp4(raw.data(), scales.data(), to.reshape({to.shape[1], to.shape[2]}));
  } else {
    io::read_safetensors_values(path, values.entry, row * row_elements, to);
  }
  if (const std::int64_t padding = source.scale != nullptr ? 0 : values.entry.elements() - all; padding > 0) {
    std::vector<double> tail(static_cast<std::size_t>(padding));
    io::read_safetensors_values(path, values.entry, all, Tensor(tail.data(), DType::f64, {padding}));
    for (std::int64_t i = 0; i < padding; ++i)
      if (tail[std::size_t(i)] != 0)  // NaN too
        throw Error(path + ": " + values.entry.name + ": element " + std::to_string(all + i) + " is " +
                    std::to_string(tail[std::size_t(i)]) + ", but past the " + std::to_string(all) +
                    " heads there is only padding, which has to be 0");
  }
  if (const std::int64_t i = first_not_finite(to); i >= 0)
    throw Error(path + ": " + values.entry.name + ": element " + std::to_string(row * row_elements + i) +
                " is not a finite number");
}

}  // namespace moetrain::core
