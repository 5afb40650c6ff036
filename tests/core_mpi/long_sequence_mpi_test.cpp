// long_sequence_mpi_test.cpp -- one sequence of 65,536 tokens over eight ranks: the steps of one rank, with an eighth of what it keeps.
// By hand: mpirun -n 8 core_mpi_test "[slow]"; some minutes on two cores.
#include <cmath>

#include "core/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

struct Run {
  double losses[2], norms[2], activations;
};

Run run(const core::Config& c, std::unique_ptr<parallel::Communicator> world) {
  core::Trainer t(c, std::move(world), Device::cpu);
  t.initialize();
  Run r{};
  for (int s = 0; s < 2; ++s) {
    const auto step = t.step(synthetic_step(t, /*seed=*/7, /*document_length=*/40000));  // the border of documents lies in the fifth slice
    r.losses[s] = step.loss;
    r.norms[s] = step.grad_norm;
  }
  r.activations = double(t.memory().peaks()[std::size_t(Category::activations)]);
  return r;
}

}  // namespace

TEST_CASE("a sequence of 65,536 tokens over eight ranks has the losses of one rank, and a fifth of its activations at most", "[slow]") {
  core::Config c = tiny_config();
  c.run.dtype = DType::f32;
  c.model.num_hidden_layers = 3;
  c.model.linear_attn.full_attn_layers = {3};
  c.model.max_position_embeddings = c.data.sequence_length = 65536;
  c.model.dsa->index_topk = 32;
  c.model.initializer_range = 0.1;
  c.optimizer.lr = 1e-3;
  c.moe.balance = core::Balance::quantile;
  auto world = parallel::mpi_world();
  REQUIRE(world->size() == 8);
  double one[5] = {};
  if (world->rank() == 0) {  // the others wait for it: all would only slow each other down
    const Run r = run(c, parallel::solo());
    const double values[5] = {r.losses[0], r.losses[1], r.norms[0], r.norms[1], r.activations};
    std::copy_n(values, 5, one);
  }
  world->broadcast(one, sizeof one, 0);
  c.parallel.sequence_parallel = 8;
  const Run eight = run(c, std::move(world));
  CAPTURE(one[0], one[1], one[2], one[3], one[4], eight.losses[0], eight.losses[1], eight.norms[0], eight.norms[1], eight.activations);
  for (int s = 0; s < 2; ++s) CHECK(std::abs(eight.losses[s] - one[s]) <= 1e-4 * one[s]);
  CHECK(std::abs(eight.norms[0] - one[2]) <= 1e-4 * one[2]);
  CHECK(std::abs(eight.norms[1] - one[3]) <= 1e-3 * one[3]);  // after an update some experts and keys near a tie are others
  CHECK(one[1] < one[0]);
  CHECK(eight.activations <= 0.2 * one[4]);
}
