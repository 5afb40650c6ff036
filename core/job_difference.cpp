// job_difference.cpp -- parts of a job as one line a key.
#include "core/job_difference.h"

#include <algorithm>
#include <map>
#include <set>

namespace moetrain::core {
namespace {

using Keys = std::map<std::string, std::string>;

void flatten(const io::YamlNode& node, const std::string& key, Keys& out) {
  if (node.kind == io::YamlNode::map) {
    for (const auto& [name, value] : node.entries) flatten(value, key + "." + name, out);
  } else if (node.kind == io::YamlNode::list) {
    std::string text;
    for (const auto& item : node.items) text += (text.empty() ? "" : ", ") + item.text;
    out[key] = "[" + text + "]";
  } else {
    out[key] = node.text;
  }
}

Keys keys_of(const io::YamlNode& job, const std::vector<std::string>& parts, const std::vector<std::string>& free) {
  Keys keys;
  for (const std::string& path : parts) {
    const auto dot = path.find('.');
    const io::YamlNode* node = job.find(path.substr(0, dot));
    if (node != nullptr && dot != path.npos) node = node->find(path.substr(dot + 1));
    if (node != nullptr) flatten(*node, path, keys);
  }
  for (const std::string& key : free) keys.erase(key);
  return keys;
}

}  // namespace

std::optional<JobDifference> first_difference(const io::YamlNode& here, const io::YamlNode& there,
                                              const std::vector<std::string>& parts, const std::vector<std::string>& free) {
  const Keys mine = keys_of(here, parts, free), theirs = keys_of(there, parts, free);
  std::set<std::string> names;
  for (const Keys* keys : {&mine, &theirs})
    for (const auto& [name, value] : *keys) names.insert(name);
  const auto value_of = [](const Keys& keys, const std::string& name) {
    const auto found = keys.find(name);
    return found == keys.end() || found->second.empty() ? std::string("absent") : "'" + found->second + "'";
  };
  for (const std::string& name : names)
    if (const std::string a = value_of(mine, name), b = value_of(theirs, name); a != b) return JobDifference{name, a, b};
  return {};
}

std::optional<JobDifference> model_difference(const ModelConfig& here, const ModelConfig& there) {
  const auto plain = [](const ModelConfig& m) {
    Config c;
    c.model = m;
    c.model.num_key_value_heads.reset();
    c.model.linear_attn.kda_layers.clear();
    if (m.dsa) c.model.dsa->layers.clear();
    return config_to_yaml(c);
  };
  return first_difference(plain(here), plain(there), {"model"},
                          {"model.init_from", "model.initializer_range", "model.max_position_embeddings"});
}

std::optional<JobDifference> adapter_difference(const Config& here, const Config& there) {
  const auto plain = [](Config c) {
    if (c.lora) std::sort(c.lora->target.begin(), c.lora->target.end());
    return config_to_yaml(c);
  };
  return first_difference(plain(here), plain(there), {"lora"}, {"lora.dropout"});
}

}  // namespace moetrain::core
