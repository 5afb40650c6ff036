// mesh_test.cpp -- rank arithmetic of the axes, and the groups that each rank of a mesh is in.
#include "parallel/mesh.h"

#include "tests/support/catch.h"

using namespace moetrain;
using namespace moetrain::parallel;

TEST_CASE("ranks of a 2x3x2x2 mesh count tensor fastest, then sequence, expert and data", "[parallel][cpu]") {
  const MeshShape shape{.data = 2, .expert = 3, .sequence = 2, .tensor = 2};
  REQUIRE(shape.ranks() == 24);
  CHECK(coordinates_of(shape, 0) == Coordinates{0, 0, 0, 0});
  CHECK(coordinates_of(shape, 1) == Coordinates{0, 0, 0, 1});
  CHECK(coordinates_of(shape, 2) == Coordinates{0, 0, 1, 0});
  CHECK(coordinates_of(shape, 4) == Coordinates{0, 1, 0, 0});
  CHECK(coordinates_of(shape, 12) == Coordinates{1, 0, 0, 0});
  CHECK(coordinates_of(shape, 23) == Coordinates{1, 2, 1, 1});
  for (int r = 0; r < shape.ranks(); ++r) {
    const Coordinates c = coordinates_of(shape, r);
    CHECK(((c.data * 3 + c.expert) * 2 + c.sequence) * 2 + c.tensor == r);
  }
}

TEST_CASE("ranks outside a mesh are refused", "[parallel][cpu]") {
  const MeshShape shape{.data = 2, .expert = 2};
  CHECK_THROWS_AS(coordinates_of(shape, 4), Error);
  CHECK_THROWS_AS(coordinates_of(shape, -1), Error);
  CHECK_THROWS_AS(Mesh(shape, solo()), Error);
}

TEST_CASE("groups of a 2x3x2x2 mesh have the sizes and places that the axes say", "[parallel][cpu]") {
  const MeshShape shape{.data = 2, .expert = 3, .sequence = 2, .tensor = 2};
  for (int r = 0; r < shape.ranks(); ++r) {
    CAPTURE(r);
    Mesh mesh(shape, dry(r, shape.ranks()));
    const Coordinates c = coordinates_of(shape, r);
    CHECK(mesh.here() == c);
    CHECK(mesh.rank() == r);
    CHECK(mesh.data_coordinates() == 6);
    CHECK(mesh.data_coordinate() == c.data * 3 + c.expert);
    CHECK(mesh.world().data->size() == 24);
    CHECK(mesh.dense().data->size() == 12);
    CHECK(mesh.dense().data->rank() == (c.data * 3 + c.expert) * 2 + c.sequence);
    CHECK(mesh.expert().data->size() == 3);
    CHECK(mesh.expert().data->rank() == c.expert);
    CHECK(mesh.expert_data().data->size() == 8);
    CHECK(mesh.expert_data().data->rank() == (c.data * 2 + c.sequence) * 2 + c.tensor);
    CHECK(mesh.sequence().data->size() == 2);
    CHECK(mesh.sequence().data->rank() == c.sequence);
    for (Axis* axis : {&mesh.world(), &mesh.dense(), &mesh.expert(), &mesh.expert_data(), &mesh.sequence()}) {
      CHECK(axis->control->size() == axis->data->size());
      CHECK(axis->control->rank() == axis->data->rank());
    }
  }
}

TEST_CASE("traffic of a mesh is the sum over all its groups", "[parallel][cpu]") {
  Mesh mesh({.data = 2, .expert = 2}, dry(1, 4));
  const Communicator::Gather piece{nullptr, nullptr, 10};
  mesh.dense().data->all_gather({&piece, 1});           // 3 others
  mesh.expert_data().control->all_gather({&piece, 1});  // 1 other
  const std::int64_t bytes[] = {5, 7};
  mesh.expert().data->all_to_all(nullptr, bytes, nullptr, bytes);
  CHECK(mesh.traffic().bytes_gathered == 40);
  CHECK(mesh.traffic().bytes_exchanged == 5);
}
