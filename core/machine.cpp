// machine.cpp -- a description read strictly and written back, and the time of an operator from it.
#include "core/machine.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <set>

#include "core/config_keys.h"
#include "core/presets.h"
#include "io/byte_count.h"

namespace moetrain::core {
namespace {

using io::YamlNode;

constexpr DType kTypes[] = {DType::bf16, DType::f32, DType::f64};
bool has_rate(ops::WorkKind kind) { return kind != ops::WorkKind::optimizer && kind != ops::WorkKind::rows; }

// Every key once, for who reads and who writes. All are required, but for types.
template <class V>
void walk(V& v, Machine& m) {
  v.text("name", m.name);
  v.choice("device", m.device, {{"cpu", Device::cpu}, {"cuda", Device::cuda}});
  v.size("memory", m.memory_bytes);
  v.number("memory_bytes_per_s", m.memory_bytes_per_s, /*zero=*/false);
  v.number("rows_bytes_per_s", m.rows_bytes_per_s, false);
  v.number("launch_s", m.launch_s, true);
  v.number("queue_s", m.queue_s, true);
  v.pair("kda_turn_s", m.turn_s, true);
  v.section("flops_per_s", [&](V& types) {
    for (const DType type : kTypes) {
      if (!types.wants(name_of(type), m.flops_per_s.contains(type))) continue;
      KindRates& rates = m.flops_per_s[type];
      types.section(name_of(type), [&](V& kinds) {
        for (int k = 0; k < ops::kWorkKinds; ++k)
          if (has_rate(ops::WorkKind(k))) kinds.pair(name_of(ops::WorkKind(k)), rates[std::size_t(k)], false);
      });
    }
  });
  const auto link = [](V& in, const char* name, parallel::Link& to) {
    in.section(name, [&](V& l) {
      l.number("bytes_per_s", to.bytes_per_s, false);
      l.number("latency_s", to.latency_s, true);
    });
  };
  v.section("links", [&](V& links) {
    links.count("ranks_a_host", m.network.ranks_a_host);
    link(links, "within_host", m.network.near);
    link(links, "between_hosts", m.network.far);
    links.number("host_memory_bytes_per_s", m.host_bytes_per_s, false);
  });
  v.section("messages", [&](V& messages) {
    messages.flag("beside_work", m.beside);
    messages.number("drag", m.drag, true);
  });
}

class Reader {
 public:
  Reader(const YamlNode& node, std::string path, std::vector<Fault>& faults)
      : node_(node), path_(std::move(path)), faults_(faults) {}
  ~Reader() {
    for (const auto& [key, value] : node_.entries)
      if (!known_.contains(key)) faults_.push_back({value.key_line, path_ + key, "unknown key"});
  }
  Reader(const Reader&) = delete;
  Reader& operator=(const Reader&) = delete;

  void text(const char* name, std::string& to) {
    if (const YamlNode* n = find(name); n && expect(name, *n, n->kind == YamlNode::scalar && !n->text.empty(), "a text"))
      to = n->text;
  }
  void choice(const char* name, Device& to, std::initializer_list<std::pair<const char*, Device>> choices) {
    const YamlNode* n = find(name);
    if (!n) return;
    std::string names;
    for (const auto& [known, value] : choices) {
      if (n->text == known) return void(to = value);
      names += (names.empty() ? "" : " or ") + std::string(known);
    }
    expect(name, *n, false, names);
  }
  void size(const char* name, std::int64_t& to) {
    const YamlNode* n = find(name);
    if (!n) return;
    const auto size = io::parse_byte_count(n->text);
    if (expect(name, *n, size && size->bytes > 0, "a size, as 141GB")) to = size->bytes;
  }
  void count(const char* name, int& to) {
    const YamlNode* n = find(name);
    if (!n) return;
    const auto [end, error] = std::from_chars(n->text.data(), n->text.data() + n->text.size(), to);
    expect(name, *n, error == std::errc() && end == n->text.data() + n->text.size() && to >= 1, "an integer >= 1");
  }
  void flag(const char* name, bool& to) {
    if (const YamlNode* n = find(name); n && expect(name, *n, n->text == "true" || n->text == "false", "true or false"))
      to = n->text == "true";
  }
  void number(const char* name, double& to, bool zero) {
    if (const YamlNode* n = find(name)) expect(name, *n, parse(*n, to, zero), zero ? "a number >= 0" : "a number > 0");
  }
  void pair(const char* name, PassRates& to, bool zero) {
    const YamlNode* n = find(name);
    if (!n) return;
    const bool two =
        n->kind == YamlNode::list && n->items.size() == 2 && parse(n->items[0], to[0], zero) && parse(n->items[1], to[1], zero);
    expect(name, *n, two, std::string("two numbers ") + (zero ? ">= 0" : "> 0") + ", forward and backward");
  }
  template <class Inside>
  void section(const char* name, Inside&& inside) {
    const YamlNode* n = find(name);
    if (!n || !expect(name, *n, n->kind == YamlNode::map, "keys below it")) return;
    Reader inner(*n, path_ + name + ".", faults_);
    inside(inner);
  }
  bool wants(const char* name, bool) const { return node_.find(name) != nullptr; }

 private:
  static bool parse(const YamlNode& n, double& to, bool zero) {
    const auto [end, error] = std::from_chars(n.text.data(), n.text.data() + n.text.size(), to);
    return n.kind == YamlNode::scalar && error == std::errc() && end == n.text.data() + n.text.size() && std::isfinite(to) &&
           (zero ? to >= 0 : to > 0);
  }
  const YamlNode* find(const char* name) {
    known_.insert(name);
    const YamlNode* n = node_.find(name);
    if (!n) faults_.push_back({0, path_ + name, "is missing"});
    return n;
  }
  bool expect(const char* name, const YamlNode& n, bool holds, const std::string& what) {
    if (!holds)
      faults_.push_back(
          {n.key_line, path_ + name, (n.kind == YamlNode::scalar ? "is '" + n.text + "', " : "") + "expected " + what});
    return holds;
  }

  const YamlNode& node_;
  std::string path_;
  std::vector<Fault>& faults_;
  std::set<std::string> known_;
};

class Writer {
 public:
  explicit Writer(YamlNode& node) : node_(node) { node_.kind = YamlNode::map; }
  void text(const char* name, const std::string& from) { put(name, from); }
  void choice(const char* name, Device from, std::initializer_list<std::pair<const char*, Device>> choices) {
    for (const auto& [known, value] : choices)
      if (value == from) put(name, known);
  }
  void size(const char* name, std::int64_t from) { put(name, io::text_of({from})); }
  void count(const char* name, int from) { put(name, std::to_string(from)); }
  void flag(const char* name, bool from) { put(name, from ? "true" : "false"); }
  void number(const char* name, double from, bool) { put(name, number_text(from)); }
  void pair(const char* name, const PassRates& from, bool) {
    YamlNode& n = add(name);
    n.kind = YamlNode::list;
    for (const double value : from) n.items.push_back(scalar(number_text(value)));
  }
  template <class Inside>
  void section(const char* name, Inside&& inside) {
    Writer inner(add(name));
    inside(inner);
  }
  bool wants(const char*, bool has) const { return has; }

 private:
  static YamlNode scalar(std::string text) {
    YamlNode n;
    n.kind = YamlNode::scalar;
    n.text = std::move(text);
    return n;
  }
  YamlNode& add(const char* name) { return node_.entries.emplace_back(name, YamlNode{}).second; }
  void put(const char* name, std::string text) { add(name) = scalar(std::move(text)); }
  YamlNode& node_;
};

}  // namespace

double Machine::seconds(const ops::Work& w) const {
  double seconds = w.bytes / (w.kind == ops::WorkKind::rows ? rows_bytes_per_s : memory_bytes_per_s);
  if (w.flops > 0) {
    const auto rates = flops_per_s.find(w.dtype);
    if (rates == flops_per_s.end())
      throw Error("machine " + name + " has no flops_per_s." + name_of(w.dtype) + ", which this job's operators ask for",
                  ExitCode::bad_job);
    seconds = std::max(seconds, w.flops / rates->second[std::size_t(w.kind)][w.backward]);
  }
  return launch_s + seconds + w.turns * turn_s[w.backward];
}

Machine machine_from(const YamlNode& node, const std::string& path) {
  std::vector<Fault> faults;
  Machine m;
  {
    Reader reader(node, "", faults);
    walk(reader, m);
    if (faults.empty() && m.flops_per_s.empty()) faults.push_back({0, "flops_per_s", "has rates for none of bf16, fp32, fp64"});
  }
  std::string lines;
  for (const Fault& f : faults)
    lines += path + (f.line > 0 ? ":" + std::to_string(f.line) : "") + ": " + f.key + ": " + f.text + "\n";
  if (!faults.empty())
    throw Error(lines + std::to_string(faults.size()) + (faults.size() == 1 ? " fault" : " faults"), ExitCode::bad_job);
  return m;
}

Machine read_machine(const std::string& name_or_path) {
  std::string names;
  for (const auto& [name, text] : machine_texts()) {
    if (name == name_or_path)
      return machine_from(io::parse_yaml(std::string(text), "configs/machines/" + std::string(name) + ".yaml"), std::string(name));
    names += (names.empty() ? "" : ", ") + std::string(name);
  }
  std::error_code unreadable;
  if (!std::filesystem::exists(name_or_path, unreadable))
    throw Error(
        "--machine is '" + name_or_path + "', neither a machine (" + names + ") nor a file; moetrain bench --machine writes one",
        ExitCode::bad_job);
  return machine_from(io::read_yaml(name_or_path), name_or_path);
}

YamlNode machine_to_yaml(const Machine& machine) {
  YamlNode node;
  Machine copy = machine;
  Writer writer(node);
  walk(writer, copy);
  return node;
}

}  // namespace moetrain::core
