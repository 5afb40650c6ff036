// device_mpi_test.cpp -- two ranks on GPUs give the losses and norms of one, whatever is cut between them; over NCCL where each has
// a GPU, through host memory where they share one.
#include <numeric>

#include "core/trainer.h"
#include "memory/cuda_memory.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;
using parallel::Sharding;

namespace {

constexpr std::int64_t kGlobalSequences = 8;

// This rank's GPU, the same for the whole program; false where there are no two ranks, or no GPU.
bool two_ranks_on_devices() {
  if constexpr (kHasCuda) {
    const auto world = parallel::mpi_world();
    const int devices = cuda::devices();
    if (world->size() != 2 || devices == 0) return false;
    cuda::use_device(world->rank() % devices);
    return true;
  }
  return false;
}

struct Layout {
  const char* name;
  int data = 1, expert = 1, sequence = 1, tensor = 1;
  Sharding sharding = Sharding::full;
  bool reshard = true, recompute = false;
  std::int64_t accumulation = 1, parts = 1;
};

struct Curve {
  std::vector<double> losses, norms;
  std::vector<std::int64_t> expert_tokens;
};

Curve run(core::Config c, const Layout& l, std::unique_ptr<parallel::Communicator> world, int steps) {
  c.parallel.data_parallel = l.data;
  c.parallel.expert_parallel = l.expert;
  c.parallel.sequence_parallel = l.sequence;
  c.parallel.tensor_parallel = l.tensor;
  c.parallel.sharding = l.sharding;
  c.parallel.reshard_after_use = l.reshard;
  c.training.gradient_accumulation = l.accumulation;
  c.moe.overlap_chunks = l.parts;
  c.training.micro_batch_size = kGlobalSequences / (l.data * l.expert * l.accumulation);
  c.memory.activation_checkpointing = l.recompute ? core::Checkpointing::full : core::Checkpointing::none;
  core::Trainer t(c, std::move(world), Device::cuda, /*poison=*/true);
  t.initialize();
  Curve curve;
  for (int s = 0; s < steps; ++s) {
    const auto r = t.step(synthetic_step(t));
    curve.losses.push_back(r.loss);
    curve.norms.push_back(r.grad_norm);
    curve.expert_tokens.insert(curve.expert_tokens.end(), r.expert_tokens.begin(), r.expert_tokens.end());
  }
  return curve;
}

constexpr Layout kLayouts[] = {
    {.name = "data 2, full", .data = 2},
    {.name = "data 2, gathered once", .data = 2, .reshard = false},
    {.name = "data 2, gradients", .data = 2, .sharding = Sharding::gradients},
    {.name = "data 2, optimizer", .data = 2, .sharding = Sharding::optimizer},
    {.name = "data 2, none, two micro-batches", .data = 2, .sharding = Sharding::none, .accumulation = 2},
    {.name = "expert 2", .expert = 2},
    {.name = "expert 2, recomputed, two micro-batches", .expert = 2, .recompute = true, .accumulation = 2},
    {.name = "expert 2, none", .expert = 2, .sharding = Sharding::none},
    {.name = "expert 2 in two parts", .expert = 2, .parts = 2},
    {.name = "expert 2 in four parts, recomputed", .expert = 2, .recompute = true, .parts = 4},
};

}  // namespace

TEST_CASE("two ranks on GPUs have the f32 losses and norms of one, for every sharding, by data and by experts", "[cuda]") {
  if (!two_ranks_on_devices()) return;
  core::Config c = tiny_config();
  c.run.dtype = DType::f32;
  c.optimizer.lr = 1e-3;
  c.moe.balance = core::Balance::quantile;
  c.model.num_experts_per_token = c.model.num_experts;  // nothing is selected that a rounding could change
  c.model.dsa->index_topk = c.data.sequence_length;
  constexpr int kSteps = 5;
  const Curve one = run(c, {.name = "one"}, parallel::solo(), kSteps);
  for (const Layout& l : kLayouts) {
    CAPTURE(l.name);
    const Curve two = run(c, l, parallel::mpi_world(), kSteps);
    CHECK(difference(two.losses, one.losses, 1e-5) == "");
    CHECK(difference(two.norms, one.norms, 1e-4) == "");
    CHECK(two.expert_tokens == one.expert_tokens);
  }
}

TEST_CASE("two ranks on GPUs that cut sequences or matrices have the f32 losses and norms of one", "[cuda]") {
  if (!two_ranks_on_devices()) return;
  core::Config c = tiny_config();
  c.run.dtype = DType::f32;
  c.model.num_attention_heads = 4;
  c.optimizer.lr = 3e-4;  // at 1e-3 the fifth norm has rounding of 1.1e-4
  c.moe.balance = GENERATE(core::Balance::quantile, core::Balance::auxiliary);
  c.model.num_experts_per_token = c.model.num_experts;
  const bool dense = GENERATE(false, true);
  CAPTURE(dense, int(c.moe.balance));
  if (dense)
    c.model.dsa.reset();
  else
    c.model.dsa->index_topk = c.data.sequence_length;
  constexpr int kSteps = 5;
  const Curve one = run(c, {.name = "one"}, parallel::solo(), kSteps);
  for (const Layout& l :
       {Layout{.name = "sequence 2", .sequence = 2},
        Layout{.name = "sequence 2, none, recomputed", .sequence = 2, .sharding = Sharding::none, .recompute = true},
        Layout{.name = "tensor 2", .tensor = 2},
        Layout{.name = "tensor 2, none, recomputed", .tensor = 2, .sharding = Sharding::none, .recompute = true}}) {
    CAPTURE(l.name);
    const Curve two = run(c, l, parallel::mpi_world(), kSteps);
    CHECK(difference(two.losses, one.losses, 1e-5) == "");
    CHECK(difference(two.norms, one.norms, 1e-4) == "");
    CHECK(two.expert_tokens == one.expert_tokens);
  }
}

TEST_CASE("two ranks on GPUs in bf16 follow one in the mean", "[cuda]") {
  if (!two_ranks_on_devices()) return;
  core::Config c = tiny_config();
  c.run.dtype = DType::bf16;
  c.optimizer.lr = 1e-3;
  const auto mean = [](const Curve& curve) { return std::accumulate(curve.losses.begin(), curve.losses.end(), 0.0) / double(curve.losses.size()); };
  const double want = mean(run(c, {.name = "one"}, parallel::solo(), 10));
  for (const Layout& l : {kLayouts[0], kLayouts[5]}) {
    CAPTURE(l.name);
    CHECK(std::abs(mean(run(c, l, parallel::mpi_world(), 10)) - want) <= 2e-2 * want);
  }
}

TEST_CASE("the exchange in parts gives the same bits as in one on two ranks with GPUs", "[cuda]") {
  if (!two_ranks_on_devices()) return;
  core::Config c = tiny_config();
  c.run.dtype = GENERATE(DType::f32, DType::bf16);
  CAPTURE(name_of(c.run.dtype));
  Layout l{.name = "expert 2", .expert = 2};
  const Curve whole = run(c, l, parallel::mpi_world(), 5);
  for (l.parts = 2; l.parts <= 4; ++l.parts) {
    CAPTURE(l.parts);
    const Curve parts = run(c, l, parallel::mpi_world(), 5);
    CHECK(parts.losses == whole.losses);
    CHECK(parts.norms == whole.norms);
  }
}
