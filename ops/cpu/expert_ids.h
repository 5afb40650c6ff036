// expert_ids.h -- refuses expert numbers that would index past a row; asked before any thread starts, so that the Error gets out.
#pragma once
#include "memory/tensor.h"

namespace moetrain::ops::cpu {

// A dropped slot holds ~e of the expert e that it was chosen for (ops/router.h).
enum class Dropped : std::uint8_t { refused, allowed };
inline std::int32_t expert_of(std::int32_t id) { return id < 0 ? ~id : id; }

inline void check_expert_ids(ConstTensor experts, std::int64_t E, Dropped dropped = Dropped::refused) {
  const auto* id = experts.as<std::int32_t>();
  for (std::int64_t i = 0; i < experts.count(); ++i)
    check((dropped == Dropped::allowed ? expert_of(id[i]) : id[i]) < E && (id[i] >= 0 || dropped == Dropped::allowed),
          "experts: not an expert's number", {{"slot", i}, {"expert", id[i]}, {"E", E}});
}

}  // namespace moetrain::ops::cpu
