// plan_mpi_test.cpp -- what ranks of cut sequences and matrices take is what the plan of one of their kind says.
#include <algorithm>

#include "core/plan.h"
#include "tests/support/catch.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

TEST_CASE("a plan holds what each rank of cut sequences and matrices takes, to the byte and in every category", "[core][mpi]") {
  core::Config base = tiny_config();
  base.model.num_attention_heads = base.model.linear_attn.num_heads = 4;
  base.run.dtype = GENERATE(DType::f32, DType::bf16);
  base.memory.activation_checkpointing =
      GENERATE(core::Checkpointing::none, core::Checkpointing::selective, core::Checkpointing::full);
  base.data.sequence_length = 26;
  base.training.micro_batch_size = 2;
  base.training.gradient_accumulation = 2;
  struct Axes {
    int data, sequence, tensor;
  };
  for (const Axes& axes : {Axes{2, 2, 1}, {1, 1, 4}, {1, 2, 2}, {2, 1, 2}}) {
    CAPTURE(axes.data, axes.sequence, axes.tensor);
    core::Config c = base;
    c.parallel.data_parallel = axes.data;
    c.parallel.sequence_parallel = axes.sequence;
    c.parallel.tensor_parallel = axes.tensor;
    core::Trainer t(c, parallel::mpi_world(), Device::cpu, /*poison=*/true);
    t.initialize();
    auto batches = synthetic_step(t, 7, /*document_length=*/26);
    for (io::Batch& b : batches)  // a plan counts every token
      for (auto& label : b.labels) label = std::max(label, 0);
    t.step(batches);
    core::Trainer dry(c, parallel::dry(t.mesh().rank(), 4), Device::dry);
    for (io::Batch& b : batches) b.tokens.clear(), b.labels.clear();
    dry.step(batches);
    for (int k = 0; k < kCategories; ++k) {
      INFO(name_of(Category(k)));
      CHECK(dry.memory().peaks()[std::size_t(k)] == t.memory().peaks()[std::size_t(k)]);
    }
    const auto plan = core::make_plan(c);
    const auto mine = std::find_if(plan.ranks.begin(), plan.ranks.end(),
                                   [&](const core::RankPlan& r) { return r.device_bytes == t.memory().peaks(); });
    REQUIRE(mine != plan.ranks.end());
    CHECK(mine->device_total == t.memory().peak());
    CHECK(mine->device_pool == t.memory().pool().high_water());
  }
}
