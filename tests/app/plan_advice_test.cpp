// plan_advice_test.cpp -- what a job that does not fit is told, with more of the device or of the host asked than there is.
#include "app/plan_advice.h"

#include <algorithm>

#include "tests/support/catch.h"
#include "tests/support/tiny.h"

using namespace moetrain;

namespace {

core::Config job() {
  core::Config c = test::tiny_config();
  c.run.dtype = DType::f32;
  c.parallel.data_parallel = 2;
  c.parallel.sharding = parallel::Sharding::none;
  c.parallel.bucket_size = {0};
  c.training.micro_batch_size = 2;
  c.memory.offload.slice = {4096};
  c.data.train = {"/"};
  c.data.format = io::DataFormat::tokens;
  return c;
}

// Nothing where no line begins so.
std::string line_of(const std::vector<std::string>& lines, const std::string& begin) {
  const auto found = std::find_if(lines.begin(), lines.end(), [&](const std::string& line) { return line.starts_with(begin); });
  return found == lines.end() ? "" : *found;
}

}  // namespace

TEST_CASE("a job that fits is told nothing, and without a limit none is judged", "[app][cpu]") {
  const core::Plan plan = core::make_plan(job());
  CHECK(!app::fits(plan, {}));
  CHECK(*app::fits(plan, {.device = plan.most_device(), .host = 0}));
  CHECK(app::advice(job(), plan, {.device = plan.most_device(), .host = {}}, nullptr).empty());
}

TEST_CASE("a job with too much on its devices is told every change that lowers it, the best first", "[app][cpu]") {
  const core::Plan plan = core::make_plan(job());
  const app::MemoryLimits limits{.device = plan.most_device() - 1, .host = {}};
  CHECK(!*app::fits(plan, limits));
  const auto lines = app::advice(job(), plan, limits, nullptr);
  for (const char* change :
       {"parallel.sharding: full", "memory.activation_checkpointing: full", "memory.offload.optimizer: host",
        "memory.offload.experts: host", "parallel.expert_parallel: 2 and data_parallel: 1",
        "training.micro_batch_size: 1 and gradient_accumulation: 2", "twice the ranks, parallel.sequence_parallel: 2"}) {
    INFO(change);
    CHECK(line_of(lines, change).ends_with(", which fits"));
  }
  core::Config offloaded = job();
  offloaded.memory.offload.optimizer = true;
  const core::Plan there = core::make_plan(offloaded);
  CHECK(there.most_host() > 0);
  CHECK(line_of(lines, "memory.offload.optimizer: host").find("and its host memory to ") != std::string::npos);
  CHECK(line_of(lines, "all of these").empty());  // one is enough
}

TEST_CASE("where no change is enough alone, all are planned together", "[app][cpu]") {
  const auto lines = app::advice(job(), core::make_plan(job()), {.device = 1000, .host = {}}, nullptr);
  REQUIRE(!lines.empty());
  CHECK(lines.back().starts_with("all of these that keep the ranks"));
  CHECK(lines.back().ends_with("more ranks have no less"));
}

TEST_CASE("a job with too much in host memory is told to lay less there, and one with too much of both not to move it",
          "[app][cpu]") {
  core::Config c = job();
  c.memory.offload.optimizer = true;
  const core::Plan plan = core::make_plan(c);
  const auto host = app::advice(c, plan, {.device = {}, .host = plan.most_host() - 1}, nullptr);
  CHECK(line_of(host, "memory.offload.optimizer: none").ends_with(" of host memory, which fits"));
  CHECK(line_of(host, "parallel.sharding: full").empty());
  const auto both = app::advice(c, plan, {.device = plan.most_device() - 1, .host = plan.most_host() - 1}, nullptr);
  CHECK(line_of(both, "memory.offload").empty());
  CHECK(!both.empty());
}
