// layout.h -- where each parameter of the table lives under a mesh: its unit, its rank group, and which rows of the whole are here.
#pragma once
#include <vector>

#include "core/params.h"
#include "parallel/mesh.h"
#include "parallel/sharded_params.h"

namespace moetrain::core {

// Units are gathered together. Dense parameters are cut over the dense group; the experts of an ep coordinate over the ranks that
// share them (resident with expert_sharding none); router biases are small, frozen and everywhere.
struct Layout {
  std::vector<parallel::ShardedTensor> tensors;  // one a parameter of the table, same index
  std::vector<std::int64_t> first_row;           // of the whole tensor's dim 0, for the local tensor's row 0
  std::vector<parallel::Unit> units;
  int embedding = -1, head = -1, router_bias = -1;
  std::vector<int> trunk, experts;  // by layer; -1: none
};
Layout make_layout(const Config& config, const ParamTable& table, parallel::Mesh& mesh);

}  // namespace moetrain::core
