// step_time_test.cpp -- a machine read and written, and the time of a step counted by hand on machines of round numbers.
#include "core/step_time.h"

#include <cmath>
#include <fstream>
#include <sstream>

#include "core/plan.h"
#include "core/presets.h"
#include "tests/support/catch.h"
#include "tests/support/tiny.h"

namespace moetrain::core {
namespace {

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * std::max(std::abs(a), std::abs(b)); }

constexpr double kNever = 1e-300;  // of what takes no time

// Every kind of arithmetic at one rate; all else takes no time.
Machine machine_of(double flops_per_s) {
  Machine m{.name = "round",
            .device = Device::cpu,
            .memory_bytes = 1 << 30,
            .memory_bytes_per_s = 1 / kNever,
            .rows_bytes_per_s = 1 / kNever,
            .host_bytes_per_s = 1 / kNever};
  m.network = {.near = {1 / kNever, 0}, .far = {1 / kNever, 0}, .ranks_a_host = 1};
  for (const DType dtype : {DType::bf16, DType::f32, DType::f64}) {
    KindRates& rates = m.flops_per_s[dtype];
    for (auto& passes : rates) passes = {flops_per_s, flops_per_s};
  }
  return m;
}

// One KDA layer and a dense MLP over `ranks` data ranks.
Config one_layer(int ranks = 1) {
  Config c = test::tiny_linear_config();
  c.run.dtype = DType::f32;
  c.model.num_hidden_layers = 1;
  c.model.linear_attn.full_attn_layers = {};
  c.model.num_experts = 0;
  c.model.num_shared_experts = 0;
  c.model.tie_word_embeddings = false;
  c.parallel.data_parallel = ranks;
  c.parallel.bucket_size.bytes = 0;
  return c;
}

double work_of(const StepTime& t, ops::WorkKind kind) { return t.work[std::size_t(kind)][0] + t.work[std::size_t(kind)][1]; }

std::string message(const std::string& text) {
  try {
    machine_from(io::parse_yaml(text, "m.yaml"), "m.yaml");
  } catch (const Error& e) {
    CHECK(e.code() == ExitCode::bad_job);
    return e.what();
  }
  return "read";
}

}  // namespace

TEST_CASE("the machines in the binary are those of configs/machines, and come back as they were written", "[core]") {
  REQUIRE(machine_texts().size() == 1);
  for (const auto& [name, text] : machine_texts()) {
    const Machine m = read_machine(std::string(name));
    CHECK(m.name == name);
    const io::YamlNode node = machine_to_yaml(m);
    CHECK(machine_to_yaml(machine_from(io::parse_yaml(io::to_yaml(node), "again"), "again")) == node);
    std::ifstream file(std::string(MOETRAIN_SOURCE_DIR) + "/configs/machines/" + std::string(name) + ".yaml");
    std::ostringstream contents;
    contents << file.rdbuf();
    CHECK(contents.str() == text);
  }
}

TEST_CASE("every fault of a machine is told with its line", "[core]") {
  const std::string good = io::to_yaml(machine_to_yaml(machine_of(1)));
  CHECK(message(good) == "read");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    REQUIRE(text.find(from) != std::string::npos);
    text.replace(text.find(from), from.size(), to);
    return message(text);
  };
  CHECK(with("device: cpu", "device: tpu").find("m.yaml:2: device: is 'tpu', expected cpu or cuda") != std::string::npos);
  CHECK(with("memory: 1GiB", "memory: much").find("memory: is 'much', expected a size") != std::string::npos);
  CHECK(with("launch_s: 0", "launch_s: -1").find("launch_s: is '-1', expected a number >= 0") != std::string::npos);
  CHECK(with("linear:", "liner:").find("flops_per_s.bf16.liner: unknown key") != std::string::npos);
  CHECK(with("linear:", "liner:").find("flops_per_s.bf16.linear: is missing") != std::string::npos);
  CHECK(with("ranks_a_host: 1", "ranks_a_host: 0").find("links.ranks_a_host: is '0', expected an integer >= 1") !=
        std::string::npos);
  CHECK_THROWS_AS(read_machine("h9000"), Error);
}

TEST_CASE("an operator takes the longer of its arithmetic and its bytes, a launch, and turns that wait for each other", "[core]") {
  Machine m = machine_of(100);
  m.memory_bytes_per_s = 10;
  m.rows_bytes_per_s = 5;
  m.launch_s = 0.5;
  m.turn_s = {2, 3};
  m.flops_per_s[DType::f32][std::size_t(ops::WorkKind::loss)] = {100, 25};
  const auto seconds = [&](ops::Work w) { return m.seconds(w); };
  CHECK(seconds({.kind = ops::WorkKind::loss, .dtype = DType::f32, .flops = 1000, .bytes = 20}) == 10.5);
  CHECK(seconds({.kind = ops::WorkKind::loss, .backward = true, .dtype = DType::f32, .flops = 1000}) == 40.5);
  CHECK(seconds({.kind = ops::WorkKind::loss, .dtype = DType::f32, .flops = 1000, .bytes = 200}) == 20.5);
  CHECK(seconds({.bytes = 30}) == 6.5);
  CHECK(seconds({.kind = ops::WorkKind::optimizer, .bytes = 30}) == 3.5);
  CHECK(seconds({}) == 0.5);
  CHECK(seconds({.kind = ops::WorkKind::kda, .backward = true, .dtype = DType::f32, .turns = 4}) == 12.5);
  m.flops_per_s.erase(DType::f32);
  CHECK_THROWS_AS(seconds({.kind = ops::WorkKind::loss, .dtype = DType::f32, .flops = 1}), Error);
  CHECK(seconds({.dtype = DType::f32, .bytes = 10}) == 2.5);
}

TEST_CASE("on a machine of one flop a second a step takes the model's FLOPs, and those that are computed again once more",
          "[core]") {
  const Machine m = machine_of(1);
  Config c = one_layer();
  const Plan plan = make_plan(c, &m);
  const auto& f = plan.flops;
  REQUIRE(plan.time);
  CHECK(near(work_of(*plan.time, ops::WorkKind::linear) + work_of(*plan.time, ops::WorkKind::kda), f.kda + f.dense_mlp));
  CHECK(near(work_of(*plan.time, ops::WorkKind::loss), f.head));
  CHECK(near(plan.time->total(), f.total()));

  c.memory.activation_checkpointing = Checkpointing::full;
  const double last = 2 * 32 * 40 * 24;  // nobody asks again for what a layer adds last
  CHECK(near(make_plan(c, &m).time->total(), f.total() + (f.kda + f.dense_mlp) / 3 - last));
  c.memory.activation_checkpointing =
      Checkpointing::selective;  // KDA's own result and projections are found; the MLP's too, in part
  const double selective = make_plan(c, &m).time->total();
  CHECK(selective > f.total() * (1 - 1e-12));
  CHECK(selective < f.total() + f.dense_mlp / 3);

  c.memory.activation_checkpointing = Checkpointing::none;
  c.training.gradient_accumulation = 5;
  CHECK(near(make_plan(c, &m).time->total(), 5 * f.total()));
}

TEST_CASE("bytes of the optimizer take their time on the memory, launches theirs", "[core]") {
  Machine m = machine_of(1 / kNever);
  m.memory_bytes_per_s = 1;
  const Plan plan = make_plan(one_layer(), &m);
  // f32: sums of squares read the gradient; the update reads it, the weight and two moments, and writes three of them.
  CHECK(near(work_of(*plan.time, ops::WorkKind::optimizer), 4.0 * double(plan.parameters.trainable) * (1 + 7)));
  m = machine_of(1 / kNever);
  m.launch_s = 1;
  const double calls = make_plan(one_layer(), &m).time->total();
  CHECK(calls == std::round(calls));
  CHECK(calls > 30);
}

TEST_CASE("what travels is in the way only as far as nothing hides it", "[core]") {
  Machine m = machine_of(1 / kNever);
  m.network.near = m.network.far = {1, 0};
  m.network.ranks_a_host = 2;
  Config c = one_layer(2);
  c.model.num_hidden_layers = 6;
  const Plan plan = make_plan(c, &m);
  const auto& waits = plan.time->waits;
  const double gathered = waits[std::size_t(parallel::Purpose::gather)] + waits[std::size_t(parallel::Purpose::reduce)];
  CHECK(near(plan.time->total(), gathered));            // nothing to hide behind
  CHECK(gathered > 0.9 * double(plan.bytes_gathered));  // but for small sums of host memory
  CHECK(gathered <= double(plan.bytes_gathered));

  Machine slow = m;
  for (auto& [dtype, rates] : slow.flops_per_s)
    for (auto& passes : rates) passes = {1e-3, 1e-3};
  const Plan hidden = make_plan(c, &slow);
  const auto& left = hidden.time->waits;
  const double exposed = left[std::size_t(parallel::Purpose::gather)] + left[std::size_t(parallel::Purpose::reduce)];
  CHECK(exposed < 0.5 * gathered);  // the first gathers and the last sums have nothing beside them
  CHECK(exposed > 0);
  slow.beside = false;
  const Plan blocking = make_plan(c, &slow);
  CHECK(near(blocking.time->total(), hidden.time->total() - exposed + gathered));
}

TEST_CASE("optimizer state in host memory passes its link both ways, in slices that leave while others come", "[core]") {
  Machine m = machine_of(1 / kNever);
  m.host_bytes_per_s = 1;
  Config c = one_layer();
  c.memory.offload.optimizer = true;
  const Plan whole = make_plan(c, &m);
  const double state = 8.0 * double(whole.parameters.trainable);  // two moments of f32, whose weights are their own masters
  CHECK(near(whole.time->host, 2 * state));                       // one slice: nothing leaves before all has come
  CHECK(near(whole.time->total(), 2 * state));
  c.memory.offload.slice = {4096};
  const double slices = make_plan(c, &m).time->host;
  CHECK(slices >= state);
  CHECK(slices < 1.2 * state);
  m.beside = false;
  CHECK(near(make_plan(c, &m).time->host, 2 * state));
}

TEST_CASE("experts in host memory come for each pass and pass through the update, and cost nothing where other layers take as long",
          "[core]") {
  Machine m = machine_of(1 / kNever);
  m.host_bytes_per_s = 1;
  Config c = test::tiny_linear_config();
  c.run.dtype = DType::f32;
  c.memory.offload.experts = true;
  const Plan plan = make_plan(c, &m);
  const double experts = 4.0 * double(plan.parameters.routed_experts);
  CHECK(near(plan.time->host, 4 * experts));  // twice for the passes, and for the update, whose one slice comes and then leaves
  m = machine_of(1);
  m.host_bytes_per_s = 1e9;
  CHECK(make_plan(c, &m).time->host < 1e-6 * make_plan(c, &m).time->total());
}

TEST_CASE("results in host memory travel beside other layers, and are waited for on a slow link", "[core]") {
  Machine m = machine_of(1);
  m.host_bytes_per_s = 1e6;
  Config c = test::tiny_linear_config();
  c.run.dtype = DType::f32;
  c.memory = {.activation_checkpointing = Checkpointing::full,
              .cache = {.ops = {"linear", "kda"}, .device = {}, .host = {1 << 30}}};
  const Plan fast = make_plan(c, &m);
  CHECK(fast.time->host == 0);
  CHECK(fast.ranks[0].host_bytes[std::size_t(Category::cache)] > 0);
  m.host_bytes_per_s = 1e-3;
  const Plan slow = make_plan(c, &m);
  CHECK(slow.time->host > 0);
  CHECK(slow.time->total() > fast.time->total());
  c.memory.cache.ops = {"auto"};  // not worth it then
  CHECK(make_plan(c, &m).time->host == 0);
}

}  // namespace moetrain::core
