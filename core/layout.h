// layout.h -- where each parameter of the table lives under a mesh: its unit, its rank group, and which rows of the whole are here.
#pragma once
#include <vector>

#include "core/params.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"

namespace moetrain::core {

// Units are gathered together. Dense parameters are shared out over the dense group, or over all ranks where no tensor cut divides
// them; the experts of an ep coordinate over the ranks that share them (resident with expert_sharding none); router biases are
// small, frozen and everywhere.
struct Layout {
  std::vector<parallel::ShardedTensor> tensors;  // one a parameter of the table, same index
  std::vector<std::int64_t> first_row;           // of the whole tensor's dim 0, for the local tensor's row 0
  std::vector<std::int64_t> first_column;        // of its dim 1, where columns are cut
  std::vector<parallel::Unit> units;
  std::vector<int> embedding, head, router_bias;  // units that are used together
  std::vector<std::vector<int>> layers;           // trunk and experts
};
Layout make_layout(const Config& config, const ParamTable& table, parallel::Mesh& mesh);

}  // namespace moetrain::core
