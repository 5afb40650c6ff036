// judged.h -- a job read and checked, with its faults as lines, and one that has none.
#pragma once
#include <string>
#include <vector>

#include "core/config.h"

namespace moetrain::test {

// Reads and checks; each fault as "line key: text", and beside it what --set gave.
struct Judged {
  core::Config config;
  std::vector<std::string> faults, set;
};
inline Judged judge(const std::string& text, const std::vector<std::string>& set = {}, int ranks = 0,
                    const std::string& folder = "") {
  const auto job = io::parse_yaml(text, "job.yaml");
  std::vector<core::Fault> faults;
  Judged j;
  j.config = read_config(job, set, folder, faults);
  check_config(j.config, job, ranks, faults);
  for (const auto& f : faults) {
    j.faults.push_back(std::to_string(f.line) + " " + f.key + ": " + f.text);
    j.set.push_back(f.set);
  }
  return j;
}
inline std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

// Every rule holds here, and each test breaks one.
inline std::string whole_job() {
  return "run: {name: whole}\n"
         "model:\n"
         "  vocab_size: 300\n"
         "  hidden_size: 64\n"
         "  num_hidden_layers: 5\n"
         "  num_attention_heads: 4\n"
         "  intermediate_size: 128\n"
         "  q_lora_rank: 24\n"
         "  kv_lora_rank: 16\n"
         "  qk_nope_head_dim: 8\n"
         "  qk_rope_head_dim: 4\n"
         "  v_head_dim: 8\n"
         "  linear_attn_config: {num_heads: 2, head_dim: 16, full_attn_layers: [4, 5]}\n"
         "  dsa_config: {index_n_heads: 2, index_head_dim: 8, index_topk: 4}\n"
         "  num_experts: 8\n"
         "  num_experts_per_token: 2\n"
         "  moe_intermediate_size: 32\n"
         "  first_k_dense_replace: 1\n"
         "parallel: {data_parallel: 2, expert_parallel: 2}\n"
         "data: {train: [/], sequence_length: 32}\n"
         "training: {steps: 10}\n";
}

}  // namespace moetrain::test
