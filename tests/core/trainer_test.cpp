// trainer_test.cpp -- what a step does at its edges: no labels, non-finite gradients, clipping, evaluation, balance, bf16,
// schedules.
#include "core/trainer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "core/monitor.h"
#include "core/plan.h"
#include "core/schedule.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

std::unique_ptr<core::Trainer> make(const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t->initialize();
  return t;
}

std::vector<double> all_weights(core::Trainer& t) {
  std::vector<double> all;
  for (int i = 0; i < t.table().size(); ++i) {
    const auto v = values_of(t.params().stored(i, t.params().update_rows(i)));
    all.insert(all.end(), v.begin(), v.end());
  }
  return all;
}

std::vector<double> moments(core::Trainer& t) {
  std::vector<double> all;
  for (int i = 0; i < t.table().size(); ++i)
    if (t.optimizer().has_state(i)) {
      const auto v = values_of(t.optimizer().exp_avg(i, t.params().update_rows(i)));
      all.insert(all.end(), v.begin(), v.end());
    }
  return all;
}

Tensor stored(core::Trainer& t, const std::string& name) {
  const int i = t.table().find(name);
  REQUIRE(i >= 0);
  return t.params().stored(i, t.params().update_rows(i));
}

}  // namespace

TEST_CASE("a batch without labels has loss 0, changes no weight, moment or bias, and advances step and data") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::quantile;
  auto t = make(c);
  t->step(synthetic_step(*t));
  const auto weights = all_weights(*t), before = moments(*t);
  auto batches = synthetic_step(*t);
  for (auto& b : batches) std::fill(b.labels.begin(), b.labels.end(), -100);
  const auto r = t->step(batches);
  CHECK(r.skipped == core::Skipped::no_labels);
  CHECK(r.loss == 0);
  CHECK(r.grad_norm == 0);
  CHECK(all_weights(*t) == weights);
  CHECK(moments(*t) == before);
  CHECK(t->progress().step == 2);
  CHECK(t->progress().updates == 1);
  CHECK(t->progress().sequences == 2 * c.sequences_per_step());
}

TEST_CASE("a non-finite gradient skips the update and leaves weights, moments, bias and AdamW's count as they were") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::sign;
  auto t = make(c);
  t->step(synthetic_step(*t));
  const Tensor norm = stored(*t, "model.norm.weight");
  const double kept = norm.as<double>()[0];
  norm.as<double>()[0] = std::numeric_limits<double>::infinity();
  const auto weights = all_weights(*t), before = moments(*t);
  const auto r = t->step(synthetic_step(*t));
  CHECK(r.skipped == core::Skipped::nonfinite);
  for (const double x : {r.loss, r.grad_norm}) CHECK((std::isnan(x) && !std::signbit(x)));  // "nan", never "-nan"
  CHECK(all_weights(*t) == weights);
  CHECK(moments(*t) == before);
  CHECK(t->progress().updates == 1);
  CHECK(t->progress().step == 2);
  norm.as<double>()[0] = kept;
  CHECK(t->step(synthetic_step(*t)).skipped == core::Skipped::no);
  CHECK(t->progress().updates == 2);
}

TEST_CASE("the norm counts every element once and clipping divides by it") {
  core::Config c = tiny_config();
  auto t = make(c);
  const auto r = t->step(synthetic_step(*t));
  double sum = 0;
  for (int i = 0; i < t->table().size(); ++i)
    if (t->table()[i].trainable)
      for (const double g : values_of(t->params().stored_gradient(i, t->params().update_rows(i)))) sum += g * g;
  CHECK(std::abs(r.grad_norm - std::sqrt(sum)) <= 1e-12 * r.grad_norm);
  // After one update the first moment is (1 - beta1) times the clipped gradient.
  const double factor = std::min(1.0, c.training.grad_clip / (r.grad_norm + 1e-6));
  const int i = t->table().find("lm_head.weight");
  const auto rows = t->params().update_rows(i);
  auto want = values_of(t->params().stored_gradient(i, rows));
  for (double& g : want) g *= (1 - c.optimizer.beta1) * factor;
  CHECK(difference(values_of(t->optimizer().exp_avg(i, rows)), want, 1e-12) == "");
}

TEST_CASE("evaluation changes nothing: not weights, not balance, not the next step") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::quantile;
  auto a = make(c), b = make(c);
  for (int s = 0; s < 3; ++s) {
    const io::Batch other[1] = {synthetic_batch(c, 100, 2)};
    CHECK(std::isfinite(*a->evaluate(other)));
    const auto x = a->step(synthetic_step(*a)), y = b->step(synthetic_step(*b));
    CHECK(x.loss == y.loss);
    CHECK(x.expert_tokens == y.expert_tokens);
  }
  CHECK(all_weights(*a) == all_weights(*b));
}

TEST_CASE("norms, gates, convolutions, queries and biases do not decay; matrices do") {
  auto t = make(tiny_config());
  for (const auto& p : t->table().all()) {
    CAPTURE(p.name);
    const bool gate = p.name.ends_with("A_log") || p.name.ends_with("dt_bias") || p.name.ends_with("conv1d.weight") ||
                      p.name.ends_with("_res_proj.weight");
    CHECK(p.decay == (p.shape.rank() >= 2 && !gate));
  }
}

TEST_CASE("balance quantile and sign bring a skewed router towards even load; none leaves the bias alone") {
  core::Config c = tiny_config();
  c.optimizer.lr = 0;
  c.data.sequence_length = 128;
  c.training.micro_batch_size = 4;
  auto worst_after = [&](core::Balance balance, int steps) {
    c.moe.balance = balance;
    c.moe.sign_rate = 0.02;
    auto t = make(c);
    for (const int id : t->model().router_biases()) {
      const Tensor bias = t->params().stored(id, {0, 8});
      bias.as<double>()[1] = 0.5;
    }
    core::StepResult r;
    for (int s = 0; s < steps; ++s) {
      t->set_progress({});  // the same batch again
      r = t->step(synthetic_step(*t));
    }
    return core::load_of(r.expert_tokens, t->model().moe_layers(), 8)->max;
  };
  const double skewed = worst_after(core::Balance::none, 1);
  CHECK(skewed > 3);
  CHECK(worst_after(core::Balance::none, 6) == skewed);
  CHECK(worst_after(core::Balance::quantile, 6) < 1.3);
  CHECK(worst_after(core::Balance::sign, 25) < 0.75 * skewed);
}

TEST_CASE("an indexer warm-up trains the indexer alone") {
  core::Config c = tiny_config();
  c.loss.indexer_stage = core::IndexerStage::dense;
  c.training.trainable = {"*indexer*"};
  auto t = make(c);
  std::vector<std::vector<double>> before;
  for (int i = 0; i < t->table().size(); ++i) before.push_back(values_of(t->params().stored(i, t->params().update_rows(i))));
  double first = 0, last = 0;
  for (int s = 0; s < 30; ++s) {
    t->set_progress({.step = s, .updates = s, .sequences = 0, .tokens = 0});
    const auto r = t->step(synthetic_step(*t));
    (s == 0 ? first : last) = r.indexer_loss.value();
  }
  CHECK(last < 0.8 * first);
  for (int i = 0; i < t->table().size(); ++i) {
    CAPTURE(t->table()[i].name);
    const bool indexer = t->table()[i].name.find("indexer") != std::string::npos;
    CHECK((values_of(t->params().stored(i, t->params().update_rows(i))) != before[std::size_t(i)]) == indexer);
    CHECK(t->optimizer().has_state(i) == indexer);
  }
}

TEST_CASE("a router bias that training.trainable leaves out is frozen, one that it names is balanced") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::quantile;
  for (const bool named : {false, true}) {
    c.training.trainable = {"*indexer*"};
    if (named) c.training.trainable.push_back("*e_score_correction_bias");
    auto t = make(c);
    t->step(synthetic_step(*t));
    double moved = 0;
    for (const int id : t->model().router_biases())
      for (const double b : values_of(t->params().stored(id, {0, 8}))) moved += std::abs(b);
    CHECK((moved > 0) == named);
  }
}

TEST_CASE("bf16 weights keep fp32 masters: updates far below a bf16 step accumulate") {
  core::Config c = tiny_config();
  c.run.dtype = DType::bf16;
  c.optimizer.lr = 1e-5;
  c.optimizer.weight_decay = 0;
  auto t = make(c);
  const int i = t->table().find("model.norm.weight");
  const auto rows = t->params().update_rows(i);
  REQUIRE(t->optimizer().has_master(i));
  for (int s = 0; s < 20; ++s) {
    t->set_progress({.step = s, .updates = s, .sequences = 0, .tokens = 0});
    CHECK(t->step(synthetic_step(*t)).skipped == core::Skipped::no);
  }
  const auto weights = values_of(t->params().stored(i, rows)), masters = values_of(t->optimizer().master(i, rows));
  double moved = 0;
  for (std::size_t k = 0; k < masters.size(); ++k) {
    CHECK(weights[k] == double(float(bf16(float(masters[k])))));
    moved = std::max(moved, std::abs(masters[k] - 1));
  }
  CHECK(moved > 1e-4);    // twenty updates of 1e-5 each
  CHECK(moved < 3.9e-3);  // and all of them inside one bf16 step above 1
  for (const char* pinned :
       {"model.layers.0.self_attn.A_log", "model.layers.0.self_attn.dt_bias", "model.layers.0.self_attn.q_conv1d.weight",
        "model.layers.0.self_attn.o_norm.weight", "model.layers.1.block_sparse_moe.gate.e_score_correction_bias"}) {
    CAPTURE(pinned);
    CHECK(stored(*t, pinned).dtype == DType::f32);
  }
}

TEST_CASE("bf16 training lowers the loss of the tiny model") {
  core::Config c = tiny_config();
  c.run.dtype = DType::bf16;
  c.training.micro_batch_size = 4;
  auto t = make(c);
  double first = 0, last = 0;
  for (int s = 0; s < 60; ++s) {
    const auto r = t->step(synthetic_step(*t));
    REQUIRE(r.skipped == core::Skipped::no);
    if (s < 3) first += r.loss / 3;
    if (s >= 57) last += r.loss / 3;
  }
  CHECK(last < first - 0.5);
}

TEST_CASE("fresh weights are a function of seed, name and index with the deviation asked for") {
  core::Config c = tiny_config();
  auto a = make(c), b = make(c);
  CHECK(all_weights(*a) == all_weights(*b));
  c.run.seed = 2;
  CHECK(all_weights(*make(c)) != all_weights(*b));
  const auto w = values_of(stored(*a, "model.layers.0.mlp.gate_proj.weight"));
  double sum = 0, squares = 0;
  for (const double x : w) sum += x, squares += x * x;
  CHECK(std::abs(sum / double(w.size())) < 0.03);
  CHECK(std::abs(std::sqrt(squares / double(w.size())) - c.model.initializer_range) < 0.02);
}

TEST_CASE("schedules: warm-up ends at the full rate, decay ends at the least, by hand") {
  using core::learning_rate;
  using core::ScheduleKind;
  core::ScheduleConfig s{.name = ScheduleKind::cosine, .warmup_steps = 4, .min_lr = 0.1, .decay_fraction = 0.25};
  CHECK(learning_rate(s, 1, 1, 12) == 0.25);
  CHECK(learning_rate(s, 1, 4, 12) == 1);
  CHECK(std::abs(learning_rate(s, 1, 8, 12) - 0.55) < 1e-12);
  CHECK(std::abs(learning_rate(s, 1, 12, 12) - 0.1) < 1e-12);
  s.name = ScheduleKind::linear;
  CHECK(std::abs(learning_rate(s, 1, 6, 12) - 0.775) < 1e-12);
  s.name = ScheduleKind::wsd;
  CHECK(learning_rate(s, 1, 9, 12) == 1);
  CHECK(std::abs(learning_rate(s, 1, 10, 12) - 0.7) < 1e-12);
  CHECK(std::abs(learning_rate(s, 1, 12, 12) - 0.1) < 1e-12);
  s.name = ScheduleKind::constant;
  CHECK(learning_rate(s, 1, 12, 12) == 1);
}

TEST_CASE("limited experts work on no more than their places, count what they turn away, and leave evaluation alone") {
  core::Config c = tiny_config();
  c.training.gradient_accumulation = 2;
  const auto first_step = [](const core::Config& config) {
    auto t = make(config);
    const auto held_out = t->evaluate(synthetic_step(*t));
    return std::pair{t->step(synthetic_step(*t)), held_out};
  };
  const auto [free, held_out] = first_step(c);
  const std::int64_t layers = 4, E = 8, slots = free.tokens * c.model.num_experts_per_token;
  CHECK(free.rank_rows == std::vector<std::int64_t>(4, slots));
  c.moe.capacity_factor = 8;  // room for all at each
  const auto wide = first_step(c).first;
  CHECK(wide.loss == free.loss);
  CHECK(wide.grad_norm == free.grad_norm);
  CHECK(wide.dropped + wide.rerouted == 0);

  c.moe.capacity_factor = 1;
  const auto [rerouted, held_out_limited] = first_step(c);
  CHECK(held_out_limited == held_out);
  CHECK(rerouted.loss != free.loss);
  CHECK(rerouted.rerouted > 0);
  std::int64_t worked = 0;
  for (const auto rows : rerouted.rank_rows) worked += rows;
  CHECK(worked == layers * slots - rerouted.dropped);
  CHECK(rerouted.dropped < rerouted.rerouted / 4);  // places are just enough, but an expert takes a token once

  c.moe.overflow = core::Overflow::drop;
  const auto dropped = first_step(c).first;
  CHECK(dropped.rerouted == 0);
  worked = 0;
  for (const auto rows : dropped.rank_rows) worked += rows;
  CHECK(worked == layers * slots - dropped.dropped);
  // A layer's first choices are those of the free step, as long as nothing before it was limited; each micro-batch drops on its own.
  std::int64_t least = 0;
  for (std::int64_t e = 0; e < E; ++e) least += std::max<std::int64_t>(0, free.expert_tokens[std::size_t(e)] - slots / E);
  CHECK(dropped.rank_rows[0] <= slots - least);
  CHECK(std::equal(dropped.expert_tokens.begin(), dropped.expert_tokens.begin() + E, free.expert_tokens.begin()));
}

TEST_CASE("expert load is the worst layer's, by hand, and a collapse shows") {
  const auto load = core::load_of({2, 2, 2, 2, 8, 0, 0, 0}, 2, 4);
  REQUIRE(load);
  CHECK(load->max == 4);
  CHECK(load->min == 0);
  CHECK(load->median == 0);
  CHECK(core::load_of({5, 1, 3, 3}, 1, 4)->median == 1);  // of an even number the lower of the middle two
  CHECK(load->layer == 1);
  CHECK(load->place == 0);
  CHECK_FALSE(core::load_of({0, 0}, 1, 2));
}

TEST_CASE("a pattern that names no parameter is a fault of the job") {
  core::Config c = tiny_config();
  c.training.trainable = {"*indexer*", "*typo*"};
  CHECK_THROWS_AS(core::Trainer(c, parallel::solo(), Device::cpu), Error);
  c.training.trainable = {"*e_score_correction_bias"};  // has no gradient: nothing would be trained
  CHECK_THROWS_AS(core::Trainer(c, parallel::solo(), Device::cpu), Error);
}

TEST_CASE("state in host memory gives the bits of state on the device, in slices of any size, and loads from either's checkpoints",
          "[core]") {
  core::Config base = tiny_config();
  base.run.dtype = GENERATE(DType::bf16, DType::f32, DType::f64);
  base.moe.balance = core::Balance::quantile;
  const auto run = [](core::Trainer& t) {
    std::vector<double> losses;
    for (int s = 0; s < 3; ++s) losses.push_back(t.step(synthetic_step(t)).loss);
    return losses;
  };
  core::Trainer there(base, parallel::solo(), Device::cpu);
  there.initialize();
  const auto want = run(there);
  const std::int64_t state = there.memory().now(Category::optimizer);
  for (const std::int64_t slice : {std::int64_t(4096), std::int64_t(50000), std::int64_t(1) << 30}) {
    CAPTURE(slice);
    core::Config c = base;
    c.memory.offload = {.optimizer = true, .experts = slice == 50000, .slice = {slice}};
    core::Trainer t(c, parallel::solo(), Device::cpu, /*poison=*/true);
    t.initialize();
    CHECK(run(t) == want);
    CHECK(t.host_memory().now(Category::optimizer) == state);
    CHECK(t.memory().now(Category::optimizer) <= 3 * slice);
    for (int i = 0; i < t.table().size(); ++i) {
      const auto rows = t.params().update_rows(i);
      for (const auto& [a, b] : {std::pair{t.params().stored(i, rows), there.params().stored(i, rows)},
                                 {t.optimizer().exp_avg(i, rows), there.optimizer().exp_avg(i, rows)},
                                 {t.optimizer().master(i, rows), there.optimizer().master(i, rows)}})
        CHECK((!a.present() || std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0));
    }
    const core::Plan plan = core::make_plan(c);
    CHECK(plan.ranks[0].device_bytes[std::size_t(Category::optimizer)] == t.memory().peaks()[std::size_t(Category::optimizer)]);
    CHECK(plan.ranks[0].host_bytes[std::size_t(Category::optimizer)] == state);
    for (const Category k : {Category::weights, Category::gradients}) {
      CHECK(plan.ranks[0].device_bytes[std::size_t(k)] == t.memory().peaks()[std::size_t(k)]);
      CHECK(plan.ranks[0].host_bytes[std::size_t(k)] == t.host_memory().peaks()[std::size_t(k)]);
    }
    if (!c.memory.offload.experts) continue;
    std::int64_t experts = 0;
    for (const core::Param& p : t.table().all())
      if (p.unit == core::UnitKind::experts) experts += p.shape.count() * size_of(c.run.dtype);
    CHECK(t.host_memory().now(Category::weights) == experts);
    CHECK(t.memory().now(Category::weights) == there.memory().now(Category::weights) - experts);
  }
}
