// layout_matrix_mpi_test.cpp -- every combination of the axes up to eight ranks, with each sharding, against one rank.
// By hand: mpirun -n 8 core_mpi_test "[slow]"; some minutes on two cores.
#include "tests/support/layouts.h"

using namespace moetrain;
using namespace moetrain::test;
using parallel::Sharding;

namespace {

constexpr std::int64_t kGlobalSequences = 8;
constexpr int kSizes[] = {1, 2, 4};  // of an axis

std::vector<Layout> layouts_of(int ranks) {
  std::vector<Layout> found;
  for (const int data : kSizes)
    for (const int expert : kSizes)
      for (const int sequence : kSizes)
        for (const int tensor : kTensorParallel)
          for (const auto sharding : {Sharding::full, Sharding::gradients, Sharding::optimizer, Sharding::none})
            if (data * expert * sequence * tensor == ranks)
              found.push_back({.data = data, .expert = expert, .sharding = sharding, .sequence = sequence, .tensor = tensor});
  return found;
}

Curve run(const core::Config& c, std::unique_ptr<parallel::Communicator> world) {
  core::Trainer t(c, std::move(world), Device::cpu, /*poison=*/true);
  return curve_of(t, [](core::Trainer& of) { return synthetic_step(of); });
}

// Layouts of fewer ranks than the world's run beside each other.
void check_all_layouts(const core::Config& base, double bound) {
  core::Config reference = config_of(base, {.micro_batch = kGlobalSequences}, kGlobalSequences);
  reference.run.dtype = DType::f64;
  auto world = parallel::mpi_world();
  REQUIRE(world->size() == 8);
  Curve one;
  if (world->rank() == 0) one = run(reference, parallel::solo());
  broadcast(one, *world);
  REQUIRE(one.losses.back() < one.losses.front());
  for (const int ranks : {1, 2, 4, 8}) {
    auto group = world_of(ranks);
    const auto layouts = layouts_of(ranks);
    for (auto i = std::size_t(world->rank() / ranks); i < layouts.size(); i += std::size_t(world->size() / ranks)) {
      const Layout& l = layouts[i];
      CAPTURE(l.data, l.expert, l.sequence, l.tensor, int(l.sharding));
      const core::Config c = config_of(base, l, kGlobalSequences);
      REQUIRE(faults_of(c) == "");
      std::vector<int> all(static_cast<std::size_t>(ranks));
      std::iota(all.begin(), all.end(), 0);
      check_curves(run(c, group->subgroup(all)), one, bound);
    }
  }
}

// KDA and a dense layer, sparse attention, KDA; every axis of four divides what it cuts.
core::Config matrix_config() {
  core::Config c = tiny_config();
  c.model.num_hidden_layers = 3;
  c.model.linear_attn.full_attn_layers = {2};
  c.data.train = {"/"};
  c.data.format = io::DataFormat::tokens;
  c.data.sequence_length = 24;
  c.model.num_attention_heads = c.model.linear_attn.num_heads = c.model.dsa->index_n_heads = 4;
  c.model.moe_intermediate_size = 12;
  return c;
}

}  // namespace

TEST_CASE("every mesh of up to eight ranks, with each sharding, gives the losses and norms of one rank in f64", "[slow]") {
  core::Config c = matrix_config();
  c.moe.balance = core::Balance::quantile;
  c.optimizer.lr = 3e-3;
  check_all_layouts(c, 1e-9);
}

TEST_CASE("every mesh of up to eight ranks, with each sharding, gives the losses and norms of one f64 rank in f32", "[slow]") {
  core::Config c = matrix_config();
  c.run.dtype = DType::f32;
  c.model.initializer_range = 0.1;
  c.model.num_experts_per_token = c.model.num_experts;  // near a tie f32 selects another, by the order of a sum
  c.model.dsa->index_topk = c.data.sequence_length;
  c.model.rms_norm_eps = 1e-2;  // with 1e-5 norms of small values carry rounding past the bound in ten steps
  c.optimizer.lr = 1e-3;
  check_all_layouts(c, 1e-4);
}
