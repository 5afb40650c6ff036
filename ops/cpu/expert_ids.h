// expert_ids.h -- refuses expert numbers that would index past a row; asked before any thread starts, so that the Error gets out.
#pragma once
#include "memory/tensor.h"

namespace moetrain::ops::cpu {

inline void check_expert_ids(ConstTensor experts, std::int64_t E) {
  const auto* id = experts.as<std::int32_t>();
  for (std::int64_t i = 0; i < experts.count(); ++i)
    check(id[i] >= 0 && id[i] < E, "experts: not an expert's number", {{"slot", i}, {"expert", id[i]}, {"E", E}});
}

}  // namespace moetrain::ops::cpu
