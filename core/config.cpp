// config.cpp -- a job's texts to typed values and back: strict reading with every fault at once, presets, --set, the list of keys.
// One file though long: the three visitors of config_keys.h share how a value is parsed, bounded, named and written.
#include "core/config.h"

#include <cmath>
#include <filesystem>
#include <limits>
#include <set>

#include "core/config_keys.h"
#include "core/presets.h"
#include "io/files.h"

namespace moetrain::core {
namespace {

using io::YamlNode;

constexpr const char* kNotDone = "known, but this version does not ";

// --- single values

template <class T>
bool parse_number(const std::string& text, T& out) {
  const char* end = text.data() + text.size();
  T value{};
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc() || stop != end) return false;
  if constexpr (std::floating_point<T>)
    if (!std::isfinite(value)) return false;
  out = value;
  return true;
}

template <class T>
requires(std::integral<T> || std::floating_point<T>) bool parse(const YamlNode& n, T& out) {
  return n.kind == YamlNode::scalar && parse_number(n.text, out);
}
bool parse(const YamlNode& n, bool& out) {
  if (n.kind != YamlNode::scalar || (n.text != "true" && n.text != "false")) return false;
  out = n.text == "true";
  return true;
}
bool parse(const YamlNode& n, std::string& out) {
  if (n.kind != YamlNode::scalar) return false;
  out = n.text;
  return true;
}
bool parse(const YamlNode& n, ByteSize& out) {
  const auto size = n.kind == YamlNode::scalar ? parse_size(n.text) : std::nullopt;
  if (size) out = *size;
  return size.has_value();
}
template <class T>
bool parse(const YamlNode& n, std::vector<T>& out) {
  constexpr bool kTexts = std::is_same_v<T, std::string>;
  std::vector<T> values;
  if (kTexts && n.kind == YamlNode::scalar) {
    values.emplace_back();
    if (!parse(n, values.back())) return false;
  } else {
    if (n.kind != YamlNode::list) return false;
    for (const YamlNode& item : n.items)
      if (T value{}; parse(item, value))
        values.push_back(std::move(value));
      else
        return false;
  }
  out = std::move(values);
  return true;
}
template <class T>
bool parse(const YamlNode& n, std::optional<T>& out) {
  T value{};
  if (n.kind == YamlNode::null) {
    out.reset();
    return true;
  }
  if (!parse(n, value)) return false;
  out = value;
  return true;
}

YamlNode scalar(std::string text) {
  YamlNode n;
  n.kind = YamlNode::scalar;
  n.text = std::move(text);
  return n;
}
YamlNode write(bool value) { return scalar(value ? "true" : "false"); }
YamlNode write(const std::string& value) { return scalar(value); }
YamlNode write(double value) { return scalar(number_text(value)); }
YamlNode write(ByteSize value) { return scalar(std::to_string(value.bytes)); }
template <std::integral T>
YamlNode write(T value) {
  return scalar(std::to_string(value));
}
template <class T>
YamlNode write(const std::vector<T>& values) {
  YamlNode n;
  n.kind = YamlNode::list;
  for (const T& value : values) n.items.push_back(write(value));
  return n;
}
template <class T>
YamlNode write(const std::optional<T>& value) {
  return value ? write(*value) : YamlNode{};
}

// --- what a rule allows

template <class T>
struct IsList : std::false_type {};
template <class T>
struct IsList<std::vector<T>> : std::true_type {};

bool is_control(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

bool inside(const Rule& r, double value) {
  return (r.above_low ? value > r.low : value >= r.low) && (r.below_high ? value < r.high : value <= r.high);
}
template <class T>
bool allows(const Rule& r, const T& value) {
  if constexpr (IsOptional<T>::value) {
    return !value || allows(r, *value);
  } else if constexpr (std::is_same_v<T, bool> || std::is_same_v<T, ByteSize>) {
    return true;
  } else if constexpr (std::is_same_v<T, std::string>) {
    return double(value.size()) >= r.low && (!r.printable || std::none_of(value.begin(), value.end(), is_control));
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return double(value.size()) >= r.low && std::none_of(value.begin(), value.end(), [](const auto& text) { return text.empty(); });
  } else if constexpr (IsList<T>::value) {
    return std::all_of(value.begin(), value.end(), [&](const auto& item) { return allows(r, item); });
  } else {
    return inside(r, double(value));
  }
}

std::string bounds_text(const Rule& r) {
  const bool low = r.low > -kInfinity, high = r.high < kInfinity;
  if (low && high)
    return std::string(" in ") + (r.above_low ? "(" : "[") + number_text(r.low) + ", " + number_text(r.high) +
           (r.below_high ? ")" : "]");
  if (low) return (r.above_low ? " > " : " >= ") + number_text(r.low);
  return "";
}
template <class T>
std::string type_text(const Rule& r) {
  if constexpr (IsOptional<T>::value) {
    return type_text<typename T::value_type>(r);
  } else if constexpr (std::is_same_v<T, bool>) {
    return "true or false";
  } else if constexpr (std::is_same_v<T, ByteSize>) {
    return "size as 8GiB, 141GB or 4096";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return r.printable ? "text without control characters" : "text";
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return "text or list of texts";
  } else if constexpr (IsList<T>::value) {
    return "list of integers" + bounds_text(r);
  } else if constexpr (std::floating_point<T>) {
    return "number" + bounds_text(r);
  } else {
    return "integer" + (std::is_unsigned_v<T> ? " in [0, " + std::to_string(std::numeric_limits<T>::max()) + "]" : bounds_text(r));
  }
}
template <class T>
std::string choices_text(Choices<T> choices) {
  std::string text;
  for (const auto& c : choices) text += (text.empty() ? "" : ", ") + std::string(c.name);
  return choices.size() > 1 ? "one of " + text : "only " + text;
}

std::string printable(std::string text) {  // a terminal would obey control characters
  std::replace_if(text.begin(), text.end(), is_control, '?');
  return text;
}

std::string shown(const YamlNode& n) {
  switch (n.kind) {
    case YamlNode::null:
      return "has no value";
    case YamlNode::scalar:
      return "is '" + printable(n.text) + "'";
    case YamlNode::list: {
      std::string text;
      for (const YamlNode& item : n.items) text += (text.empty() ? "" : ", ") + (item.kind == YamlNode::scalar ? item.text : "...");
      return "is [" + printable(text.size() > 60 ? text.substr(0, 57) + "..." : text) + "]";
    }
    case YamlNode::map:
      return "is a map of keys";
  }
  return "";
}

// --- near names

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}
// Empty when nothing is near enough to be meant.
std::string nearest(const std::string& name, const std::vector<std::string>& known) {
  std::string best;
  std::size_t least = std::max<std::size_t>(2, name.size() / 3) + 1;
  for (const std::string& k : known)
    if (const auto distance = edit_distance(name, k); distance < least) {
      least = distance;
      best = k;
    }
  return best;
}
std::string leaf(const std::string& key) { return key.substr(key.rfind('.') + 1); }

// --- the visitors

// Where faults go: those of a preset's file stand at the line of the job that names it.
struct Report {
  std::vector<Fault>& faults;
  std::string file = {};  // empty: the job
  int preset_line = 0;
  void add(int line, const std::string& key, const std::string& text) {
    if (file.empty())
      faults.push_back({line, key, text});
    else
      faults.push_back({preset_line, key, "in " + file + ":" + std::to_string(line) + ": " + text});
  }
};

class Reader {
 public:
  Reader(const YamlNode& map, std::string path, Report& report) : map_(map), path_(std::move(path)), report_(report) {}

  template <class T>
  void key(const Name& name, T& field, const char*, const Rule& rule = {}) {
    const YamlNode* n = find(name);
    if (!n) return;
    T value{};
    const std::string expected = ", expected " + type_text<T>(rule);
    if (!parse(*n, value) || !allows(rule, value)) return fault(*n, name, shown(*n) + expected);
    if (rule.undone && value != field) return fault(*n, name, shown(*n) + ": " + kNotDone + rule.undone);
    field = std::move(value);
  }

  template <class T>
  void choice(const Name& name, T& field, Choices<T> choices, const char*, Undone undone = {}) {
    const YamlNode* n = find(name);
    if (!n) return;
    for (const auto& c : choices)
      if (n->kind == YamlNode::scalar && n->text == c.name) {
        field = c.value;
        return;
      }
    for (const auto& u : undone)
      if (n->kind == YamlNode::scalar && n->text == u.name) return fault(*n, name, shown(*n) + ": " + kNotDone + u.value);
    fault(*n, name, shown(*n) + ", expected " + choices_text<T>(choices));
  }

  void pair(const Name& name, double& first, double& second, const char*, const Rule& rule) {
    const YamlNode* n = find(name);
    if (!n) return;
    std::vector<double> values;
    if (!parse(*n, values) || values.size() != 2 || !allows(rule, values))
      return fault(*n, name, shown(*n) + ", expected a list of two numbers" + bounds_text(rule));
    first = values[0];
    second = values[1];
  }

  template <class T, class Keys>
  void section(const Name& name, T& field, Keys keys) {
    const YamlNode* n = find(name);
    if (!n) return;
    if constexpr (IsOptional<T>::value) {
      if (n->kind == YamlNode::null) return field.reset();
      if (!field) field.emplace();
      read_section(*n, name, *field, keys);
    } else if (n->kind != YamlNode::null) {
      read_section(*n, name, field, keys);
    }
  }

  void preset(const Name& name, std::string& field, const char* meaning) { key(name, field, meaning); }

  template <class Valid>
  void accepted(const Name& name, const char* type, Valid valid, const char*) {
    const YamlNode* n = find(name);
    if (n && n->kind != YamlNode::null && !valid(*n)) fault(*n, name, shown(*n) + ", expected " + type);
  }

  void undone(const Name& name, const char* what) {
    const YamlNode* n = find(name);
    if (n && n->kind != YamlNode::null) fault(*n, name, std::string(kNotDone) + what);
  }

  void refuse_unknown() {
    for (const auto& [name, value] : map_.entries) {
      if (std::find(known_.begin(), known_.end(), name) != known_.end()) continue;
      std::string near = nearest(name, known_);
      if (near.empty()) {
        for (const KeyDoc& doc : documented_keys())
          if (near.empty() && leaf(doc.key) == name) near = doc.key;
      }
      report_.add(value.key_line, path_ + name, "unknown key" + (near.empty() ? "" : ", did you mean " + near + "?"));
      report_.faults.back().unknown = true;
    }
  }

 private:
  const YamlNode* find(const Name& name) {
    const YamlNode* found = map_.find(name.text);
    known_.emplace_back(name.text);
    for (const char* other : name.synonyms) {
      known_.emplace_back(other);
      const YamlNode* again = map_.find(other);
      if (found && again)
        report_.add(again->key_line, path_ + other, std::string("is another name of ") + name.text + ": one value is given twice");
      else if (again)
        found = again;
    }
    return found;
  }
  template <class T, class Keys>
  void read_section(const YamlNode& n, const Name& name, T& field, Keys keys) {
    if (n.kind != YamlNode::map) return fault(n, name, shown(n) + ", expected keys with values");
    Reader inner(n, path_ + name.text + ".", report_);
    keys(inner, field);
    inner.refuse_unknown();
  }
  void fault(const YamlNode& n, const Name& name, const std::string& text) { report_.add(n.key_line, path_ + name.text, text); }

  const YamlNode& map_;
  std::string path_;
  Report& report_;
  std::vector<std::string> known_;
};

class Writer {
 public:
  explicit Writer(YamlNode& map) : map_(map) { map_.kind = YamlNode::map; }

  template <class T>
  void key(const Name& name, T& field, const char*, const Rule& = {}) {
    map_.entries.emplace_back(name.text, write(std::as_const(field)));
  }
  template <class T>
  void choice(const Name& name, T& field, Choices<T> choices, const char*, Undone = {}) {
    for (const auto& c : choices)
      if (field == c.value) {
        map_.entries.emplace_back(name.text, scalar(c.name));
        return;
      }
    throw Error(std::string("config: ") + name.text + " holds a value that the job format cannot name", ExitCode::bad_job);
  }
  void pair(const Name& name, double& first, double& second, const char*, const Rule&) {
    map_.entries.emplace_back(name.text, write(std::vector<double>{first, second}));
  }
  template <class T, class Keys>
  void section(const Name& name, T& field, Keys keys) {
    YamlNode inner;
    if constexpr (IsOptional<T>::value) {
      if (field) {
        Writer writer(inner);
        keys(writer, *field);
      }
    } else {
      Writer writer(inner);
      keys(writer, field);
    }
    map_.entries.emplace_back(name.text, std::move(inner));
  }
  void preset(const Name&, std::string&, const char*) {}
  template <class Valid>
  void accepted(const Name&, const char*, Valid, const char*) {}
  void undone(const Name&, const char*) {}

 private:
  YamlNode& map_;
};

class Documenter {
 public:
  Documenter(std::string path, std::vector<KeyDoc>& docs) : path_(std::move(path)), docs_(docs) {}

  template <class T>
  void key(const Name& name, T& field, const char* meaning, const Rule& rule = {}) {
    const std::string value = default_text(field);
    Rule shown = rule.undone ? Rule{} : rule;
    if (shown.high == kLargestSize) shown.high = kInfinity;  // the page says it once
    const std::string type = type_text<T>(shown) + (rule.undone ? ", only " + value : "");
    const std::string when = rule.when;
    add(name, type, when.empty() ? value : IsOptional<T>::value ? value + "; " + when : when, meaning);
  }
  template <class T>
  void choice(const Name& name, T& field, Choices<T> choices, const char* meaning, Undone = {}) {
    for (const auto& c : choices)
      if (field == c.value) add(name, choices_text<T>(choices), c.name, meaning);
  }
  void pair(const Name& name, double& first, double& second, const char* meaning, const Rule& rule) {
    add(name, "list of two numbers" + bounds_text(rule), "[" + number_text(first) + ", " + number_text(second) + "]", meaning);
  }
  template <class T, class Keys>
  void section(const Name& name, T& field, Keys keys) {
    Documenter inner(path_ + name.text + ".", docs_);
    if constexpr (IsOptional<T>::value) {
      typename T::value_type fresh;
      keys(inner, fresh);
    } else {
      keys(inner, field);
    }
  }
  void preset(const Name& name, std::string&, const char* meaning) { add(name, "text", "none", meaning); }
  template <class Valid>
  void accepted(const Name& name, const char* type, Valid, const char* meaning) {
    add(name, type, "absent", meaning);
  }
  void undone(const Name& name, const char* what) { add(name, "section", "absent", std::string(kNotDone) + what); }

 private:
  template <class T>
  static std::string default_text(const T& field) {
    if constexpr (IsOptional<T>::value) {
      return "absent";
    } else if constexpr (IsList<T>::value) {
      return "none";
    } else {
      const std::string text = write(field).text;
      return text.empty() ? "none" : text;
    }
  }
  void add(const Name& name, const std::string& type, const std::string& default_value, const std::string& meaning) {
    std::string others;
    for (const char* other : name.synonyms) others += (others.empty() ? "; also called " : ", ") + std::string(other);
    docs_.push_back({path_ + name.text, type, default_value, meaning + others});
  }

  std::string path_;
  std::vector<KeyDoc>& docs_;
};

// --- --set and presets

void forget_lines(YamlNode& n) {
  n.line = n.key_line = 0;
  for (YamlNode& item : n.items) forget_lines(item);
}

// Puts `value` at `key` (section.key, section.key.key); not where a value stands in the way that holds no keys.
bool set_value(YamlNode& map, std::string_view key, const YamlNode& value) {
  if (map.kind == YamlNode::null) map.kind = YamlNode::map;
  if (map.kind != YamlNode::map) return false;
  const auto dot = key.find('.');
  const std::string name(key.substr(0, dot));
  auto entry = std::find_if(map.entries.begin(), map.entries.end(), [&](const auto& e) { return e.first == name; });
  if (entry == map.entries.end()) entry = map.entries.insert(map.entries.end(), {name, YamlNode{}});
  if (dot != std::string_view::npos) return set_value(entry->second, key.substr(dot + 1), value);
  entry->second = value;
  return true;
}

// What is wrong with one --set, which then leaves the job as it is; empty: nothing.
std::string set_fault(YamlNode& job, const std::string& argument) {
  const auto equals = argument.find('=');
  const std::string key = argument.substr(0, equals);
  const bool formed = equals != std::string::npos && key.find('.') != std::string::npos && !key.starts_with('.') &&
                      !key.ends_with('.') && key.find("..") == std::string::npos;
  if (!formed) return "expected section.key=value";
  std::vector<io::YamlFault> faults;
  auto value = io::parse_yaml(argument.substr(equals + 1), faults);
  if (!faults.empty()) return faults.front().text;
  if (value->kind == YamlNode::map) return "a map of keys; set each key by itself";
  forget_lines(*value);
  return set_value(job, key, *value) ? "" : "a part of this key is a value and holds no keys";
}

// What --set asks for, put into the job; its values have line 0. Returns the arguments by key.
std::vector<std::pair<std::string, std::string>> apply_set(YamlNode& job, const std::vector<std::string>& set,
                                                           std::vector<Fault>& faults) {
  std::vector<std::pair<std::string, std::string>> applied;
  for (const std::string& argument : set)
    // No key: what the job says of it is still judged.
    if (std::string wrong = set_fault(job, argument); wrong.empty())
      applied.emplace_back(argument.substr(0, argument.find('=')), printable(argument));
    else
      faults.push_back({0, "", std::move(wrong), printable(argument)});
  return applied;
}

struct PresetText {
  std::string file, text;
  bool found = false;
};
PresetText find_preset(const std::string& name, const std::string& folder) {
  for (const auto& [known, text] : preset_texts())
    if (known == name) return {"preset " + name, std::string(text), true};
  const std::filesystem::path path = std::filesystem::path(folder) / name;
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(path, ignored)) return {};
  return {path.string(), {}, true};
}

void read_preset(const YamlNode& named, const std::string& folder, ModelConfig& model, std::vector<Fault>& faults) {
  const std::string key = "model.preset";
  const PresetText preset = find_preset(named.text, folder);
  if (!preset.found) {
    std::vector<std::string> names;
    std::string list;
    for (const auto& [name, text] : preset_texts()) {
      names.emplace_back(name);
      list += (list.empty() ? "" : ", ") + names.back();
    }
    const std::string near = nearest(named.text, names);
    faults.push_back(
        {named.key_line, key,
         shown(named) + ", neither a preset (" + list + ") nor a file" + (near.empty() ? "" : "; did you mean " + near + "?")});
    return;
  }
  Report report{faults, preset.file, named.key_line};
  try {
    std::vector<io::YamlFault> wrong;
    const auto keys = io::parse_yaml(preset.text.empty() ? io::read_text(preset.file) : preset.text, wrong);
    for (const io::YamlFault& f : wrong) report.add(f.line, key, f.text);
    if (!keys) return;
    if (keys->kind != YamlNode::map) return report.add(keys->line, key, shown(*keys) + ", expected keys of the model section");
    Reader reader(*keys, "model.", report);
    visit(reader, model);
    reader.refuse_unknown();
    if (!model.preset.empty()) report.add(keys->find("preset")->key_line, key, "a preset names no other preset");
  } catch (const Error& wrong) {
    faults.push_back({named.key_line, key, wrong.what()});
  }
}

}  // namespace

Config read_config(const YamlNode& job, const std::vector<std::string>& set, const std::string& folder,
                   std::vector<Fault>& faults) {
  Config config;
  YamlNode tree = job;
  std::vector<Fault> found;
  const auto overrides = apply_set(tree, set, found);
  if (tree.kind == YamlNode::null) tree.kind = YamlNode::map;
  if (tree.kind != YamlNode::map) {
    faults.push_back({tree.line, "", shown(tree) + ", expected the sections of a job"});
    return config;
  }
  const YamlNode* model = tree.find("model");
  const YamlNode* preset = model ? model->find("preset") : nullptr;
  if (preset && preset->kind == YamlNode::scalar && !preset->text.empty()) read_preset(*preset, folder, config.model, found);
  const YamlNode* linear = model ? model->find("linear_attn_config") : nullptr;
  if (linear && linear->find("full_attn_layers")) {  // the preset's other two lists only repeat what is replaced here
    config.model.linear_attn.kda_layers.clear();
    if (config.model.dsa) config.model.dsa->layers.clear();
  }
  Report report{found};
  Reader reader(tree, "", report);
  visit(reader, config);
  reader.refuse_unknown();

  for (Fault& f : found) {
    if (f.line != 0 || !f.set.empty()) continue;
    const auto cause = std::find_if(overrides.rbegin(), overrides.rend(),
                                    [&](const auto& o) { return f.key == o.first || o.first.starts_with(f.key + "."); });
    if (cause != overrides.rend()) f.set = cause->second;
  }
  faults.insert(faults.end(), found.begin(), found.end());
  std::stable_sort(faults.begin(), faults.end(), [](const Fault& a, const Fault& b) { return a.line < b.line; });
  return config;
}

YamlNode config_to_yaml(const Config& config) {
  YamlNode root;
  Writer writer(root);
  Config copy = config;
  visit(writer, copy);
  return root;
}

std::vector<KeyDoc> documented_keys() {
  std::vector<KeyDoc> docs;
  Documenter documenter("", docs);
  Config defaults;
  visit(documenter, defaults);
  return docs;
}

std::optional<ByteSize> parse_size(const std::string& text) {
  double n = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, n);
  std::string unit(stop, end);
  unit.erase(0, unit.find_first_not_of(' '));
  std::transform(unit.begin(), unit.end(), unit.begin(), [](unsigned char c) { return char(std::toupper(c)); });
  const auto power = unit.empty() ? std::string::npos : std::string("BKMGTP").find(unit[0]);
  const std::string rest = unit.empty() ? "B" : unit[0] == 'B' ? unit : unit.substr(1);
  const bool known = (unit.empty() || power != std::string::npos) && (rest.empty() || rest == "B" || (rest == "IB" && power > 0));
  const double bytes = n * std::pow(rest == "IB" ? 1024 : 1000, unit.empty() ? 0 : double(power));
  if (error != std::errc() || !known || !(bytes >= 1 && bytes < 0x1p63)) return {};
  return ByteSize{std::int64_t(bytes)};
}

bool ModelConfig::full_attention(std::int64_t layer) const {
  const auto& full = linear_attn.full_attn_layers;
  return std::find(full.begin(), full.end(), layer + 1) != full.end();
}

}  // namespace moetrain::core
