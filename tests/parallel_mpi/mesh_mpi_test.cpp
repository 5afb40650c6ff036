// mesh_mpi_test.cpp -- the groups of a mesh of live ranks hold exactly the ranks that share the right coordinates.
#include "parallel/mesh.h"
#include "tests/support/catch.h"

using namespace moetrain;
using namespace moetrain::parallel;

namespace {

std::vector<int> ranks_of(Communicator& group, int me) {
  std::vector<int> all(std::size_t(group.size()), -1);
  const Communicator::Gather piece{&me, all.data(), sizeof(int)};
  group.all_gather({&piece, 1});
  return all;
}

}  // namespace

TEST_CASE("every group of every mesh of four ranks gathers the ranks that share its coordinates", "[parallel][mpi]") {
  for (const MeshShape shape : {MeshShape{.data = 4}, MeshShape{.expert = 4}, MeshShape{.data = 2, .expert = 2},
                                MeshShape{.expert = 2, .tensor = 2}, MeshShape{.data = 2, .sequence = 2}, MeshShape{.sequence = 2, .tensor = 2},
                                MeshShape{.tensor = 4}}) {
    Mesh mesh(shape, mpi_world());
    const Coordinates me = mesh.here();
    std::vector<int> world, dense, expert, expert_data, sequence, readers, tensor;
    for (int r = 0; r < shape.ranks(); ++r) {
      const Coordinates c = coordinates_of(shape, r);
      world.push_back(r);
      if (c.tensor == me.tensor) dense.push_back(r);
      if (c.data == me.data && c.sequence == me.sequence && c.tensor == me.tensor) expert.push_back(r);
      if (c.expert == me.expert) expert_data.push_back(r);
      if (c.data == me.data && c.expert == me.expert && c.tensor == me.tensor) sequence.push_back(r);
      if (c.data == me.data && c.expert == me.expert) readers.push_back(r);
      if (c.data == me.data && c.expert == me.expert && c.sequence == me.sequence) tensor.push_back(r);
    }
    for (const bool control : {false, true}) {
      const auto side = [&](Axis& axis) -> Communicator& { return control ? *axis.control : *axis.data; };
      CHECK(ranks_of(side(mesh.world()), mesh.rank()) == world);
      CHECK(ranks_of(side(mesh.dense()), mesh.rank()) == dense);
      CHECK(ranks_of(side(mesh.expert()), mesh.rank()) == expert);
      CHECK(ranks_of(side(mesh.expert_data()), mesh.rank()) == expert_data);
      CHECK(ranks_of(side(mesh.sequence()), mesh.rank()) == sequence);
      CHECK(ranks_of(side(mesh.readers()), mesh.rank()) == readers);
      CHECK(ranks_of(side(mesh.uncut()), mesh.rank()) == world);
      if (shape.tensor > 1) CHECK(ranks_of(side(mesh.tensor()), mesh.rank()) == tensor);
    }
    const auto others =
        2 * world.size() + dense.size() + expert.size() + expert_data.size() + sequence.size() + readers.size() + tensor.size() - 8;
    CHECK(mesh.traffic().bytes_gathered == std::int64_t(2 * sizeof(int) * others));
  }
}
