// mesh.cpp -- makes the groups of a mesh by listing the ranks that share coordinates.
#include "parallel/mesh.h"

#include <string>

namespace moetrain::parallel {
namespace {

// The ranks whose coordinates `same` accepts, ascending.
template <class Same>
std::vector<int> members(const MeshShape& shape, Same&& same) {
  std::vector<int> found;
  for (int r = 0; r < shape.ranks(); ++r)
    if (same(coordinates_of(shape, r))) found.push_back(r);
  return found;
}

Axis axis_of(const char* name, Communicator& data, Communicator& control, const std::vector<int>& ranks,
             Communicator::Lane lane = Communicator::Lane::sharding) {
  return {data.subgroup(ranks, lane, name),
          control.subgroup(ranks, Communicator::Lane::control, (std::string(name) + " control").c_str())};
}

}  // namespace

Coordinates coordinates_of(const MeshShape& shape, int rank) {
  check(0 <= rank && rank < shape.ranks(), "mesh: no such rank", {{"rank", rank}, {"ranks", shape.ranks()}});
  Coordinates c;
  c.tensor = rank % shape.tensor;
  rank /= shape.tensor;
  c.sequence = rank % shape.sequence;
  rank /= shape.sequence;
  c.expert = rank % shape.expert;
  c.data = rank / shape.expert;
  return c;
}

Mesh::Mesh(MeshShape shape, std::unique_ptr<Communicator> world, Device device) : shape_(shape), device_(device) {
  check(shape.data >= 1 && shape.expert >= 1 && shape.sequence >= 1 && shape.tensor >= 1 && world->size() == shape.ranks(),
        "mesh: the axes do not make up the ranks of the job",
        {{"data", shape.data},
         {"expert", shape.expert},
         {"sequence", shape.sequence},
         {"tensor", shape.tensor},
         {"ranks", world->size()}});
  here_ = coordinates_of(shape, world->rank());
  const auto me = here_;
  world_.control =
      world->subgroup(members(shape, [](const Coordinates&) { return true; }), Communicator::Lane::control, "world control");
  world_.data = device == Device::cuda ? on_devices(std::move(world)) : std::move(world);
  Communicator &data = *world_.data, &control = *world_.control;
  dense_ = axis_of("dense", data, control, members(shape, [&](const Coordinates& c) { return c.tensor == me.tensor; }));
  const auto share_the_experts = [&](const Coordinates& c) {
    return c.data == me.data && c.sequence == me.sequence && c.tensor == me.tensor;
  };
  expert_ = axis_of("expert", data, control, members(shape, share_the_experts), Communicator::Lane::exchange);
  expert_data_ = axis_of("expert data", data, control, members(shape, [&](const Coordinates& c) { return c.expert == me.expert; }));
  const auto share_sequences = [&](const Coordinates& c) { return c.data == me.data && c.expert == me.expert && c.tensor == me.tensor; };
  sequence_ = axis_of("sequence", data, control, members(shape, share_sequences), Communicator::Lane::exchange);
  if (shape.tensor == 1) return;
  const auto share_slices = [&](const Coordinates& c) {
    return c.data == me.data && c.expert == me.expert && c.sequence == me.sequence;
  };
  tensor_ = axis_of("tensor", data, control, members(shape, share_slices), Communicator::Lane::tensor);
  uncut_ = axis_of("uncut", data, control, members(shape, [](const Coordinates&) { return true; }));
  if (shape.sequence == 1) return;
  const auto read_the_same = [&](const Coordinates& c) { return c.data == me.data && c.expert == me.expert; };
  readers_ = axis_of("readers", data, control, members(shape, read_the_same), Communicator::Lane::exchange);
}

std::vector<const Axis*> Mesh::axes() const {
  std::vector<const Axis*> all{&world_, &dense_, &expert_, &expert_data_, &sequence_};
  for (const Axis* axis : {&tensor_, &readers_, &uncut_})
    if (axis->data) all.push_back(axis);
  return all;
}

void Mesh::settle() {
  for (const Axis* axis : axes()) axis->data->settle();
}

Traffic Mesh::traffic() const {
  Traffic sum;
  for (const Axis* axis : axes())
    for (const Communicator* group : {axis->data.get(), axis->control.get()}) {
      const Traffic& t = group->traffic();
      sum.bytes_gathered += t.bytes_gathered;
      sum.bytes_exchanged += t.bytes_exchanged;
      if (device_ == Device::cuda && group == axis->control.get()) continue;  // the host waited, not the device
      for (std::size_t p = 0; p < kPurposes; ++p) sum.exposed_seconds[p] += t.exposed_seconds[p];
    }
  return sum;
}

}  // namespace moetrain::parallel
