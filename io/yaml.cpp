// yaml.cpp -- builds the tree from yaml-cpp's events, since its own nodes forget repeated keys; and writes it back.
#include "io/yaml.h"

#include <yaml-cpp/depthguard.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <map>
#include <sstream>

#include "io/files.h"
#include "memory/check.h"

namespace moetrain::io {

namespace {

class TreeBuilder : public YAML::EventHandler {
 public:
  explicit TreeBuilder(std::vector<YamlFault>& faults) : faults_(faults) {}

  YamlNode take() { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& mark) override {
    if (++documents_ == 2) faults_.push_back({mark.line + 1, "a second document; one is expected"});
  }
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    begin(YamlNode::null, mark, anchor);
    end();
  }
  void OnScalar(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, const std::string& value) override {
    begin(YamlNode::scalar, mark, anchor);
    open_.back().node.text = value;
    end();
  }
  void OnAlias(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    const auto known = anchored_.find(anchor);
    if (known == anchored_.end()) faults_.push_back({mark.line + 1, "an alias stands inside the value it repeats"});
    open_.push_back({known == anchored_.end() ? YamlNode{} : known->second, YAML::NullAnchor, {}, false});
    open_.back().node.line = mark.line + 1;
    end();
  }
  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    begin(YamlNode::list, mark, anchor);
  }
  void OnSequenceEnd() override { end(); }
  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t anchor, YAML::EmitterStyle::value) override {
    begin(YamlNode::map, mark, anchor);
  }
  void OnMapEnd() override { end(); }

 private:
  struct Open {
    YamlNode node;
    YAML::anchor_t anchor;
    YamlNode key;  // of a map: the key whose value comes next
    bool has_key;
  };

  void begin(YamlNode::Kind kind, const YAML::Mark& mark, YAML::anchor_t anchor) {
    Open opened{{}, anchor, {}, false};
    opened.node.kind = kind;
    opened.node.line = mark.line + 1;
    // An empty value has no place of its own.
    if (mark.line < 0 && !open_.empty()) opened.node.line = open_.back().has_key ? open_.back().key.line : open_.back().node.line;
    open_.push_back(std::move(opened));
  }

  void end() {
    Open done = std::move(open_.back());
    open_.pop_back();
    if (done.anchor != YAML::NullAnchor) anchored_[done.anchor] = done.node;
    if (open_.empty()) {
      if (documents_ == 1) root_ = std::move(done.node);
      return;
    }
    Open& parent = open_.back();
    if (parent.node.kind == YamlNode::list) {
      parent.node.items.push_back(std::move(done.node));
    } else if (!parent.has_key) {
      if (done.node.kind != YamlNode::scalar) faults_.push_back({done.node.line, "a key must be a plain text"});
      parent.key = std::move(done.node);
      parent.has_key = true;
    } else {
      done.node.key_line = parent.key.line;
      parent.has_key = false;
      if (parent.key.kind == YamlNode::scalar) add(parent.node, std::move(parent.key.text), std::move(done.node));
    }
  }

  void add(YamlNode& map, std::string key, YamlNode value) {
    const auto first = std::find_if(map.entries.begin(), map.entries.end(), [&](const auto& e) { return e.first == key; });
    if (first == map.entries.end()) {
      map.entries.emplace_back(std::move(key), std::move(value));
      return;
    }
    faults_.push_back(
        {value.key_line, "key " + key + " is given twice (first in line " + std::to_string(first->second.key_line) + ")"});
    if (first->second.kind == YamlNode::map)  // the faults below both are wanted
      for (auto& [name, inner] : value.entries) add(first->second, std::move(name), std::move(inner));
  }

  std::vector<YamlFault>& faults_;
  YamlNode root_;
  std::vector<Open> open_;
  std::map<YAML::anchor_t, YamlNode> anchored_;
  int documents_ = 0;
};

bool tab_indents(const std::string& line) {
  const auto begin = line.find_first_not_of(" \t\r");
  return begin != std::string::npos && line.find('\t') < begin;
}

// The parser's words for some faults name neither what stands there nor what to do.
YamlFault syntax_fault(const YAML::Exception& wrong, const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  const int at = std::clamp(wrong.mark.line, 0, std::max(0, int(lines.size()) - 1));
  if (const auto* deep = dynamic_cast<const YAML::DeepRecursion*>(&wrong))
    return {at + 1, "values inside values, more than " + std::to_string(deep->depth()) + " deep"};
  for (const int line : {at, at - 1})
    if (line >= 0 && line < int(lines.size()) && tab_indents(lines[std::size_t(line)]))
      return {line + 1, "a tab in the indentation; YAML takes only spaces"};
  const bool alias =
      wrong.msg.starts_with(YAML::ErrorMsg::ALIAS_NOT_FOUND) || wrong.msg.starts_with(YAML::ErrorMsg::UNKNOWN_ANCHOR);
  return {at + 1, wrong.msg + (alias ? "; a text that begins with * stands in quotes" : "")};
}

bool is_plain(const std::string& text) {
  for (const char* null_text : {"", "~", "null", "Null", "NULL"})
    if (text == null_text) return false;
  const bool simple = std::all_of(text.begin(), text.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '.' || c == '/' ||
           c == '+' || c == '-';
  });
  return simple && text.find_first_not_of("-.") != std::string::npos;  // "-", "---" and "..." mean something
}

std::string scalar_text(const std::string& text) {
  if (is_plain(text)) return text;
  constexpr const char* kHex = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (c == '\n') {
      quoted += "\\n";
    } else if (byte < 0x20 || byte == 0x7f) {
      quoted += std::string("\\x") + kHex[byte >> 4] + kHex[byte & 15];
    } else {
      quoted += c;
    }
  }
  return quoted + "\"";
}

bool is_block(const YamlNode& node) { return !node.items.empty() || !node.entries.empty(); }

std::string inline_text(const YamlNode& node) {
  switch (node.kind) {
    case YamlNode::scalar:
      return scalar_text(node.text);
    case YamlNode::list:
      return "[]";
    case YamlNode::map:
      return "{}";
    case YamlNode::null:
      return "~";
  }
  return "~";
}

void write_block(const YamlNode& node, int indent, std::string& out) {
  const std::string margin(std::size_t(indent), ' ');
  for (const auto& [key, value] : node.entries) {
    out += margin + scalar_text(key) + ":";
    if (is_block(value)) {
      out += "\n";
      write_block(value, indent + 2, out);
    } else {
      out += " " + inline_text(value) + "\n";
    }
  }
  for (const auto& item : node.items) {
    out += margin + "- ";
    if (is_block(item)) {
      std::string inner;
      write_block(item, indent + 2, inner);
      out += inner.substr(std::size_t(indent) + 2);  // the dash stands where the first line's margin was
    } else {
      out += inline_text(item) + "\n";
    }
  }
}

}  // namespace

const YamlNode* YamlNode::find(std::string_view key) const {
  for (const auto& [name, value] : entries)
    if (name == key) return &value;
  return nullptr;
}

bool YamlNode::operator==(const YamlNode& other) const {
  return kind == other.kind && text == other.text && items == other.items && entries == other.entries;
}

std::optional<YamlNode> parse_yaml(const std::string& text, std::vector<YamlFault>& faults) {
  std::istringstream stream(text);
  TreeBuilder builder(faults);
  try {
    YAML::Parser parser(stream);
    while (parser.HandleNextDocument(builder)) {
    }
  } catch (const YAML::Exception& wrong) {
    faults.push_back(syntax_fault(wrong, text));
    return std::nullopt;
  }
  return builder.take();
}

YamlNode parse_yaml(const std::string& text, const std::string& name) {
  std::vector<YamlFault> faults;
  auto tree = parse_yaml(text, faults);
  std::string lines;
  for (const YamlFault& f : faults) lines += (lines.empty() ? "" : "\n") + name + ":" + std::to_string(f.line) + ": " + f.text;
  if (!faults.empty()) throw Error(lines, ExitCode::bad_job);
  return std::move(*tree);
}

YamlNode read_yaml(const std::string& path) {
  try {
    return parse_yaml(read_text(path), path);
  } catch (const Error& wrong) {
    throw Error(wrong.what(), ExitCode::bad_job);
  }
}

std::string to_yaml(const YamlNode& node) {
  if (!is_block(node)) return inline_text(node) + "\n";
  std::string out;
  write_block(node, 0, out);
  return out;
}

}  // namespace moetrain::io
