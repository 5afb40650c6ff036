// yaml.h -- YAML as a tree of texts that knows its lines, so that core/config can type the values and say where a fault stands.
#pragma once
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace moetrain::io {

struct YamlNode {
  enum Kind { null, scalar, list, map };
  Kind kind = null;
  std::string text;                                       // of a scalar, unquoted
  std::vector<YamlNode> items;                            // of a list
  std::vector<std::pair<std::string, YamlNode>> entries;  // of a map, in the order of the file
  int line = 0;                                           // where the value stands; 1 is the first, 0: not from a file
  int key_line = 0;                                       // where its key stands, if it is an entry of a map

  const YamlNode* find(std::string_view key) const;  // null when there is no such entry
  bool operator==(const YamlNode& other) const;      // the content; lines do not count
};

// What is wrong with a text, and in which of its lines.
struct YamlFault {
  int line = 0;
  std::string text;
};

// One document, strictly. A key given twice, a key that is no scalar, an alias inside the value it repeats and a second document
// are faults, and what can be read without them is read: of two values the first, of two maps both. Nothing comes back where the
// text breaks off with an error of syntax, the last fault then. Anchors and aliases are resolved. An empty document is null.
std::optional<YamlNode> parse_yaml(const std::string& text, std::vector<YamlFault>& faults);
// The same with all faults as one Error of a bad job, a line each: "name:line: what is wrong".
YamlNode parse_yaml(const std::string& text, const std::string& name);
YamlNode read_yaml(const std::string& path);  // a file that cannot be read is a fault of the job too

std::string to_yaml(const YamlNode& node);  // block style; parse_yaml gives the node back

}  // namespace moetrain::io
