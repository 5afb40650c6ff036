// job_difference.h -- where two jobs first differ, in the parts of them that have to agree.
#pragma once
#include <optional>
#include <string>
#include <vector>

#include "io/yaml.h"

namespace moetrain::core {

struct JobDifference {
  std::string key;          // section.key
  std::string here, there;  // 'value' or absent
};
// parts: sections or section.key, compared below them; free: single keys among those that may differ.
std::optional<JobDifference> first_difference(const io::YamlNode& here, const io::YamlNode& there,
                                              const std::vector<std::string>& parts, const std::vector<std::string>& free);

}  // namespace moetrain::core
