// layout.cpp -- units and groups from the table.
#include "core/layout.h"

#include <map>
#include <string>

namespace moetrain::core {
namespace {

std::string unit_name(UnitKind kind, int layer) {
  switch (kind) {
    case UnitKind::embedding:
      return "embedding";
    case UnitKind::head:
      return "head";
    case UnitKind::router_bias:
      return "router_bias";
    case UnitKind::trunk:
      return "trunk." + std::to_string(layer);
    case UnitKind::experts:
      return "experts." + std::to_string(layer);
  }
  return {};
}

}  // namespace

Layout make_layout(const Config& config, const ParamTable& table, parallel::Mesh& mesh) {
  Layout l;
  const auto layers = std::size_t(config.model.num_hidden_layers);
  l.trunk.assign(layers, -1);
  l.experts.assign(layers, -1);
  std::map<std::pair<UnitKind, int>, int> unit_of;
  for (int i = 0; i < table.size(); ++i) {
    const Param& p = table[i];
    const bool expert = p.unit == UnitKind::experts;
    Shape shape = p.shape;
    std::int64_t first = 0;
    if (expert) {
      const std::int64_t local = shape[0] / mesh.shape().expert;
      first = local * mesh.here().expert;
      shape = shape.with_dim0(local);
    }
    l.tensors.push_back({p.name, shape, p.pinned ? real_of(config.run.dtype) : config.run.dtype, p.trainable});
    l.first_row.push_back(first);

    // Biases of all layers are one unit, whatever layer they belong to.
    const std::pair key{p.unit, p.unit == UnitKind::router_bias ? -1 : p.layer};
    const auto [it, fresh] = unit_of.emplace(key, int(l.units.size()));
    if (fresh) {
      auto sharding = config.parallel.sharding;
      if (p.unit == UnitKind::router_bias || (expert && !config.parallel.expert_sharding)) sharding = parallel::Sharding::none;
      auto* group = expert ? mesh.expert_data().data.get() : mesh.dense().data.get();
      l.units.push_back({unit_name(key.first, key.second), {}, group, sharding});
    }
    l.units[std::size_t(it->second)].tensors.push_back(i);
    switch (p.unit) {
      case UnitKind::embedding:
        l.embedding = it->second;
        break;
      case UnitKind::head:
        l.head = it->second;
        break;
      case UnitKind::router_bias:
        l.router_bias = it->second;
        break;
      case UnitKind::trunk:
        l.trunk[std::size_t(p.layer)] = it->second;
        break;
      case UnitKind::experts:
        l.experts[std::size_t(p.layer)] = it->second;
        break;
    }
  }
  return l;
}

}  // namespace moetrain::core
