// peft_config.h -- adapter_config.json: what the peft library has to know about a file of low-rank adapters.
#pragma once
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace moetrain::io {

struct PeftConfig {
  std::string base;  // base_model_name_or_path; empty: null
  std::int64_t rank = 0;
  double alpha = 0, dropout = 0;
  bool rslora = false;
  std::vector<std::string> modules, parameters;  // endings of names, each after a dot or whole
  std::map<std::string, std::int64_t> ranks;     // by ending, where it is not `rank`
  std::map<std::string, double> alphas;
};

std::string peft_config_text(const PeftConfig& config);

}  // namespace moetrain::io
