// job_difference.h -- where two jobs first differ, in the parts of them that have to agree.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "core/config.h"

namespace moetrain::core {

struct JobDifference {
  std::string key;          // section.key
  std::string here, there;  // 'value' or absent
  std::string text() const { return key + " is " + there + " there and " + here + " here"; }
};
// parts: sections or section.key, compared below them; free: single keys among those that may differ.
std::optional<JobDifference> first_difference(const io::YamlNode& here, const io::YamlNode& there,
                                              const std::vector<std::string>& parts, const std::vector<std::string>& free);

// Where the same weights mean something else: not in what fresh ones are like, nor in lists that only repeat others.
std::optional<JobDifference> model_difference(const ModelConfig& here, const ModelConfig& there);
// The same of adapters, whose dropout is of a run.
std::optional<JobDifference> adapter_difference(const Config& here, const Config& there);

}  // namespace moetrain::core
