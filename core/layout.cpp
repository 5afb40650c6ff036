// layout.cpp -- units and groups from the table.
#include "core/layout.h"

#include <map>
#include <string>
#include <tuple>

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
  l.layers.resize(std::size_t(config.model.num_hidden_layers));
  const auto users = [&](const Param& p) -> std::vector<int>& {
    switch (p.unit) {
      case UnitKind::embedding:
        return l.embedding;
      case UnitKind::head:
        return l.head;
      case UnitKind::router_bias:
        return l.router_bias;
      default:
        return l.layers[std::size_t(p.layer)];
    }
  };
  std::map<std::tuple<UnitKind, int, bool>, int> unit_of;
  for (int i = 0; i < table.size(); ++i) {
    const Param& p = table[i];
    const bool expert = p.unit == UnitKind::experts, cut = p.cut != Cut::none && mesh.shape().tensor > 1;
    const auto mine = [&](std::int64_t dim) { return parallel::part_of(dim, mesh.here().tensor, mesh.shape().tensor); };
    Shape shape = p.shape;
    std::int64_t row = 0, column = 0;
    if (expert) {
      const std::int64_t local = shape[0] / mesh.shape().expert;
      row = local * mesh.here().expert;
      shape = shape.with_dim0(local);
    } else if (cut && p.cut == Cut::rows) {
      row = mine(shape[0]).begin;
      shape = shape.with_dim0(mine(shape[0]).count());
    } else if (cut) {
      column = mine(shape[1]).begin;
      shape = {shape[0], mine(shape[1]).count()};
    }
    l.tensors.push_back({p.name, shape, p.pinned ? real_of(config.run.dtype) : config.run.dtype, p.trainable});
    l.first_row.push_back(row);
    l.first_column.push_back(column);

    // Biases of all layers are one unit, whatever layer they belong to.
    const std::tuple key{p.unit, p.unit == UnitKind::router_bias ? -1 : p.layer, cut};
    const auto [it, fresh] = unit_of.emplace(key, int(l.units.size()));
    if (fresh) {
      auto sharding = config.parallel.sharding;
      if (p.unit == UnitKind::router_bias || (expert && !config.parallel.expert_sharding)) sharding = parallel::Sharding::none;
      parallel::Axis& axis = expert ? mesh.expert_data() : cut ? mesh.dense() : mesh.uncut();
      l.units.push_back({unit_name(p.unit, std::get<1>(key)) + (cut ? " cut" : ""), {}, axis.data.get(), sharding});
      users(p).push_back(it->second);
    }
    parallel::Unit& unit = l.units[std::size_t(it->second)];
    unit.in_host = expert && config.memory.offload.experts;
    unit.tensors.push_back(i);
    const std::int64_t ranks = expert ? mesh.shape().expert : cut ? mesh.shape().tensor : 1;
    const std::int64_t count = (p.shape.count() + ranks - 1) / ranks;
    unit.weight_bytes += count * size_of(l.tensors.back().dtype);
    if (p.trainable) unit.gradient_bytes += count * size_of(real_of(config.run.dtype));
  }
  return l;
}

}  // namespace moetrain::core
