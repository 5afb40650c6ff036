// lora_test.cpp -- adapters: nothing at first, what the merged weight gives later, alone trained, planned, saved and merged away.
#include "core/lora.h"

#include <algorithm>

#include "core/checkpoint_saver.h"
#include "core/export.h"
#include "core/import.h"
#include "core/plan.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

const std::vector<std::string> kEverything = {"attention", "shared", "expert_proj", "latent", "head", "*.mlp.*", "*.gate.weight"};

core::Config with_adapters(core::Config c, std::vector<std::string> target, bool shared_a = false, double dropout = 0) {
  if (c.model.tie_word_embeddings) std::erase(target, "head");
  if (!c.model.routed_expert_hidden_size) std::erase(target, "latent");
  c.lora = core::LoraConfig{.rank = 3, .alpha = 5, .dropout = dropout, .shared_a = shared_a, .target = std::move(target)};
  return c;
}

bool is_adapter(const core::Param& p) { return p.name.find(".lora_") != std::string::npos; }

std::unique_ptr<core::Trainer> fresh(const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t->initialize();
  return t;
}
std::unique_ptr<core::Trainer> disturbed(const core::Config& c) {
  auto t = fresh(c);
  disturb(*t);
  return t;
}

Tensor weight(core::Trainer& t, int i) { return t.params().stored(i, t.params().update_rows(i)); }

struct Outcome {
  double loss;
  std::vector<double> logits;
};
Outcome evaluate(core::Trainer& t) {
  const io::Batch batch = synthetic_batch(t.config(), 3, 2);
  const std::int64_t T = batch.sequences.back(), V = t.config().model.vocab_size;
  Outcome o{0, std::vector<double>(std::size_t(T * V))};
  o.loss = *t.evaluate({&batch, 1}, Tensor(o.logits.data(), DType::f64, {T, V}));
  return o;
}

// A run of the job without adapters, its weights those of `t` with adapters merged.
std::unique_ptr<core::Trainer> merged_run(core::Trainer& t) {
  core::Config c = t.config();
  c.lora.reset();
  auto plain = fresh(c);
  const core::WeightSource source{"run", [&](int i, std::int64_t first, Tensor to) {
                                    const Tensor rows = weight(t, i).rows(first, first + to.shape[0]);
                                    std::copy_n(rows.as<double>(), rows.count(), to.as<double>());
                                  }};
  const core::WeightSource merged = core::merged(source, t.table());
  for (int i = 0; i < plain->table().size(); ++i) {
    REQUIRE(plain->table()[i].name == t.table()[i].name);
    const Tensor to = weight(*plain, i);
    const std::int64_t middle = to.shape[0] / 2;  // in two pieces
    merged.read(i, 0, to.rows(0, middle));
    merged.read(i, middle, to.rows(middle, to.shape[0]));
    // Every weight that is aimed at is another one, no other is.
    CHECK((values_of(to) != values_of(weight(t, i))) == t.table()[i].adapter.present());
  }
  plain->params().publish();
  return plain;
}

std::string bytes_of(core::Trainer& t) {
  std::string all;
  const auto add = [&](Tensor x) {
    if (x.present()) all.append(static_cast<const char*>(x.data), std::size_t(x.bytes()));
  };
  for (int i = 0; i < t.table().size(); ++i) {
    const auto rows = t.params().update_rows(i);
    add(t.params().stored(i, rows));
    if (t.optimizer().has_master(i)) add(t.optimizer().master(i, rows));
    if (t.optimizer().has_state(i)) add(t.optimizer().exp_avg(i, rows)), add(t.optimizer().exp_avg_sq(i, rows));
  }
  return all;
}

std::int64_t bytes(const core::RankPlan& r, Category c) { return r.device_bytes[std::size_t(c)]; }

}  // namespace

TEST_CASE("fresh adapters change no logit by a bit") {
  for (const auto& base : {tiny_config(), tiny_linear_config()})
    for (const bool shared_a : {false, true}) {
      auto plain = fresh(base), adapted = fresh(with_adapters(base, kEverything, shared_a));
      const Outcome a = evaluate(*plain), b = evaluate(*adapted);
      CHECK(a.logits == b.logits);
      CHECK(std::abs(a.loss - b.loss) <= 1e-13 * a.loss);
    }
}

TEST_CASE("a model with adapters is the model with their product merged into its weights") {
  for (auto base : {tiny_config(), tiny_linear_config()})
    for (const auto stage : {core::IndexerStage::sparse, core::IndexerStage::dense})
      for (const bool shared_a : {false, true}) {
        base.loss.indexer_stage = stage;
        core::Config c = with_adapters(base, kEverything, shared_a);
        c.lora->rslora = shared_a;
        auto adapted = disturbed(c);
        auto plain = merged_run(*adapted);
        const Outcome a = evaluate(*adapted), b = evaluate(*plain);
        CHECK(difference(a.logits, b.logits, 1e-9, 1e-11) == "");
        CHECK(std::abs(a.loss - b.loss) <= 1e-12 * b.loss);
      }
}

TEST_CASE("the scale of an adapter is alpha over the rank, or over its root") {
  core::Config c = with_adapters(tiny_config(), {"head"});
  for (const bool rslora : {false, true}) {
    c.lora->rslora = rslora;
    const core::ParamTable table = core::parameters_of(c);
    CHECK(table[table.find("lm_head.weight")].adapter.scale == (rslora ? 5 / std::sqrt(3.0) : 5.0 / 3));
  }
}

TEST_CASE("targets name the matrices they should: factors have their shapes, and all else is frozen") {
  core::Config c = tiny_config();
  const auto adapted = [&](const std::vector<std::string>& target, bool shared_a = false) {
    const core::ParamTable table = core::parameters_of(with_adapters(c, target, shared_a));
    std::vector<std::string> names;
    for (const core::Param& p : table.all()) {
      CHECK(p.trainable == is_adapter(p));
      CHECK(p.frozen == !is_adapter(p));
      if (p.adapter.present() && (p.layer < 0 || p.layer == 3)) names.push_back(p.name);
    }
    return names;
  };
  const std::string attention = "model.layers.3.self_attn.", moe = "model.layers.3.block_sparse_moe.";
  using Names = std::vector<std::string>;
  CHECK(adapted({"attention"}) == Names{attention + "q_a_proj.weight", attention + "q_b_proj.weight",
                                        attention + "kv_a_proj_with_mqa.weight", attention + "kv_b_proj.weight",
                                        attention + "g_proj.weight", attention + "o_proj.weight"});
  CHECK(adapted({"shared"}) == Names{moe + "shared_experts.gate_proj.weight", moe + "shared_experts.up_proj.weight",
                                     moe + "shared_experts.down_proj.weight"});
  CHECK(adapted({"expert_proj"}) == Names{moe + "experts.w1", moe + "experts.w2", moe + "experts.w3"});
  CHECK(adapted({"latent"}) == Names{moe + "routed_expert_down_proj.weight", moe + "routed_expert_up_proj.weight"});
  CHECK(adapted({"head"}) == Names{"lm_head.weight"});
  CHECK(adapted({"*.indexer.wk.weight", "head"}) == Names{attention + "indexer.wk.weight", "lm_head.weight"});

  for (const bool shared_a : {false, true}) {
    const core::ParamTable table = core::parameters_of(with_adapters(c, {"expert_proj", "latent"}, shared_a));
    const auto shape = [&](const std::string& name) { return table[table.find(moe + name)].shape; };
    CHECK(shape("experts.w1.lora_A.weight") == (shared_a ? Shape{3, 13} : Shape{8, 3, 13}));
    CHECK(shape("experts.w1.lora_B.weight") == Shape{8, 11, 3});
    CHECK(shape("routed_expert_down_proj.lora_A.weight") == Shape{3, 24});
    CHECK(shape("routed_expert_down_proj.lora_B.weight") == Shape{13, 3});
  }
}

TEST_CASE("a target without a matrix, a rank above all sides, and dropout where it cannot be are faults of the job") {
  using test::contains;
  const auto fault = [](const core::Config& c) {
    try {
      core::parameters_of(c);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  core::Config tied = tiny_linear_config();
  tied.lora = core::LoraConfig{.target = {"attention", "head"}};
  CHECK(contains(fault(tied), "lora.target: 'head' matches no matrix"));
  tied.lora->target = {"model.norm.weight"};
  CHECK(contains(fault(tied), "lora.target: 'model.norm.weight' matches no matrix"));
  core::Config wide = with_adapters(tiny_config(), {"expert_proj"});
  wide.lora->rank = 13;
  CHECK(fault(wide).empty());
  wide.lora->rank = 14;
  CHECK(contains(fault(wide),
                 "lora.rank: 14 is more than both sides of model.layers.1.block_sparse_moe.experts.w1 [8, 11, 13], "
                 "where a rank above 11 adds nothing"));
  CHECK(contains(fault(with_adapters(tiny_config(), {"expert_proj"}, false, 0.1)), "lora.dropout: not possible"));
  CHECK(contains(fault(with_adapters(tiny_config(), {"attention"}, false, 0.1)), "kv_b_proj.weight"));
  CHECK(fault(with_adapters(tiny_linear_config(), {"attention", "shared"}, false, 0.1)).empty());
}

TEST_CASE("steps move adapters and what training.trainable names beside them, nothing else: no gradient, state or bias") {
  core::Config c = with_adapters(tiny_config(), kEverything, /*shared_a=*/true);
  c.moe.balance = core::Balance::quantile;
  for (const bool more : {false, true}) {
    if (more) c.training.trainable = {"*.A_log", "*.e_score_correction_bias"};
    auto t = disturbed(c);
    std::vector<std::vector<double>> before;
    for (int i = 0; i < t->table().size(); ++i) before.push_back(values_of(weight(*t, i)));
    t->step(synthetic_step(*t));
    for (int i = 0; i < t->table().size(); ++i) {
      const core::Param& p = t->table()[i];
      CAPTURE(p.name);
      const bool bias = more && p.name.ends_with(".e_score_correction_bias");
      const bool trained = is_adapter(p) || (more && p.name.ends_with(".A_log"));
      CHECK((values_of(weight(*t, i)) != before[std::size_t(i)]) == (trained || bias));
      CHECK(t->optimizer().has_state(i) == trained);
      CHECK(t->params().stored_gradient(i, t->params().update_rows(i)).present() == trained);
    }
  }
}

TEST_CASE("backward ends at the lowest layer with an adapter") {
  const auto calls = [](const std::vector<std::string>& target, const char* op) {
    auto t = disturbed(with_adapters(tiny_config(), target));
    ops::OpTimes times;
    t->context().times = &times;
    t->step(synthetic_step(*t));
    return times.by_op[op].calls;
  };
  CHECK(calls({"attention"}, "kda_attention backward") == 3);
  CHECK(calls({"model.layers.1.self_attn.q_proj.weight"}, "kda_attention backward") == 2);
  CHECK(calls({"model.layers.3.self_attn.q_b_proj.weight"}, "kda_attention backward") == 0);
  CHECK(calls({"model.layers.3.self_attn.q_b_proj.weight"}, "sparse_attention backward") == 2);
  CHECK(calls({"head"}, "sparse_attention backward") == 0);
  CHECK(calls({"head"}, "sparse_attention forward") == 2);
}

TEST_CASE("a loss falls by adapters alone") {
  core::Config c = with_adapters(tiny_config(), kEverything);
  auto t = fresh(c);
  double first = 0, last = 0;
  for (int s = 0; s < 25; ++s) {
    t->set_progress({.step = s, .updates = s, .sequences = 0, .tokens = 0});
    (s == 0 ? first : last) = t->step(synthetic_step(*t)).loss;
  }
  CHECK(last < 0.8 * first);
}

TEST_CASE("recomputation gives the bits of keeping with dropout too, and evaluation drops nothing") {
  for (const auto stage : {core::IndexerStage::sparse, core::IndexerStage::dense}) {
    core::Config c = tiny_config();
    c.loss.indexer_stage = stage;
    const std::vector<std::string> sparse = {"*.q_*", "*.o_proj.weight", "shared", "latent", "head"};
    c = with_adapters(c, stage == core::IndexerStage::sparse ? sparse : std::vector<std::string>{"attention", "head"}, false, 0.4);
    c.training.gradient_accumulation = 2;
    core::Config full = c, none = c;
    full.memory.activation_checkpointing = core::Checkpointing::full;
    none.lora->dropout = 0;
    auto a = disturbed(c), b = disturbed(full), whole = disturbed(none);
    CHECK(evaluate(*a).logits == evaluate(*whole).logits);
    for (int step = 0; step < 3; ++step) {
      const auto x = a->step(synthetic_step(*a)), y = b->step(synthetic_step(*b)), z = whole->step(synthetic_step(*whole));
      CHECK(x.loss == y.loss);
      CHECK(x.grad_norm == y.grad_norm);
      CHECK(x.loss != z.loss);
    }
    CHECK(bytes_of(*a) == bytes_of(*b));
  }
}

TEST_CASE("a run of adapters resumes to the last bit, and other adapters are another run, which starts from merged weights") {
  for (const DType dtype : {DType::f64, DType::bf16}) {
    const TempFolder folder;
    core::Config c = with_adapters(tiny_config(), {"*.q_*", "shared", "head"}, false, 0.3);
    c.run.dtype = dtype;
    auto a = fresh(c), b = fresh(c);
    for (int s = 0; s < 3; ++s) a->step(synthetic_step(*a));
    core::CheckpointSaver(*a, folder.path(), 2).save();
    const std::string saved = core::latest_checkpoint(folder.path());
    core::load_checkpoint(*b, saved, true);
    for (int s = 0; s < 2; ++s) CHECK(a->step(synthetic_step(*a)).loss == b->step(synthetic_step(*b)).loss);
    CHECK(bytes_of(*a) == bytes_of(*b));
    const auto refused = [&](const core::Config& other, const std::string& what) {
      const std::string words = "2: " + saved + ": belongs to another job: " + what +
                                "; other adapters start anew, in a run.dir of their own, by model.init_from: " + saved +
                                ", which merges these into the weights";
      CHECK(error_of([&] { core::check_same_run(other, saved); }) == words);
      CHECK(error_of([&] { core::load_checkpoint(*fresh(other), saved, false); }) == words);
    };
    const auto with = [&](auto change) {
      core::Config other = c;
      change(*other.lora);
      return other;
    };
    refused(with([](auto& l) { l.alpha = 6; }), "lora.alpha is '5' there and '6' here");
    refused(with([](auto& l) { l.rslora = true; }), "lora.rslora is 'false' there and 'true' here");
    refused(with([](auto& l) { l.rank = 4; }), "lora.rank is '3' there and '4' here");
    refused(with([](auto& l) { l.target = {"head"}; }), "lora.target is '[*.q_*, head, shared]' there and '[head]' here");
    core::load_checkpoint(*fresh(with([](auto& l) { l.target = {"head", "*.q_*", "shared"}; })), saved, false);  // the same ones
    core::load_checkpoint(*fresh(with([](auto& l) { l.dropout = 0.1; })), saved, false);
    core::Config plain = c;
    plain.lora.reset();
    refused(plain, "lora.alpha is '5' there and absent here");
  }
}

TEST_CASE("adapters start from a plain checkpoint, go on from their own, and are merged into any other run and into an export") {
  const TempFolder folder;
  const core::Config base = tiny_config(), c = with_adapters(base, kEverything, true);
  auto pretrained = disturbed(base);
  core::CheckpointSaver(*pretrained, folder / "plain", 1).save();
  auto adapted = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, true);
  core::initialize_from(*adapted, folder / "plain");
  CHECK(evaluate(*adapted).logits == evaluate(*pretrained).logits);

  for (int i = 0; i < adapted->table().size(); ++i)
    if (is_adapter(adapted->table()[i])) {
      core::Param noise = adapted->table()[i];
      noise.init = core::Init::normal;
      core::initialize_rows(noise, 0.2, 11, adapted->params().update_rows(i), weight(*adapted, i));
    }
  core::CheckpointSaver(*adapted, folder / "lora", 1).save();
  const Outcome want = evaluate(*adapted);
  core::Config wider = c;
  wider.lora->rank = 4;
  for (const core::Config& next : {base, c, wider}) {
    core::Trainer t(next, parallel::solo(), Device::cpu, true);
    core::initialize_from(t, folder / "lora");
    CHECK(difference(evaluate(t).logits, want.logits, 1e-9, 1e-11) == "");
    const int factor = t.table().find("lm_head.lora_B.weight");
    const bool goes_on = next.lora && next.lora->rank == 3;
    if (factor >= 0) CHECK((values_of(weight(t, factor)) == values_of(weight(*adapted, factor))) == goes_on);
  }
  auto alone = parallel::solo();
  CHECK(contains(error_of([&] { core::export_folder(*alone, core::latest_checkpoint(folder / "lora"), folder / "hf"); }), "--merge"));
  core::export_folder(*alone, core::latest_checkpoint(folder / "lora"), folder / "hf", {.merge = true, .file_bytes = 1 << 20});
  core::Trainer exported(base, parallel::solo(), Device::cpu, true);
  core::initialize_from(exported, folder / "hf");
  CHECK(difference(evaluate(exported).logits, want.logits, 1e-9, 1e-11) == "");
}

TEST_CASE("adapters take less than a tenth of the gradients and optimizer state of full training, planned and real") {
  core::Config c = tiny_config();
  c.model.hidden_size = 256;
  c.model.intermediate_size = 512;
  c.model.moe_intermediate_size = 128;
  c.model.routed_expert_hidden_size = 128;
  c.model.q_lora_rank = 128;
  c.model.kv_lora_rank = 128;
  c.model.qk_nope_head_dim = c.model.v_head_dim = c.model.linear_attn.head_dim = 64;
  c.run.dtype = DType::bf16;
  core::Config lora = c;
  lora.lora = core::LoraConfig{.rank = 4, .target = {"attention", "shared", "expert_proj", "latent", "*.mlp.*"}};
  const core::Plan all = core::make_plan(c), few = core::make_plan(lora);
  for (const auto category : {Category::gradients, Category::optimizer})
    CHECK(bytes(few.ranks[0], category) * 10 < bytes(all.ranks[0], category));
  CHECK(few.parameters.trainable * 10 < all.parameters.trainable);
  CHECK(few.flops.total() < 0.75 * all.flops.total());
}

TEST_CASE("a plan holds what a real step of adapters takes, to the byte and in every category") {
  core::Config c = with_adapters(tiny_config(), kEverything, /*shared_a=*/true);
  if (GENERATE(false, true)) c = with_adapters(tiny_config(), {"*.q_*", "*.o_proj.weight", "shared", "latent", "head"}, false, 0.2);
  c.run.dtype = GENERATE(DType::f64, DType::bf16);
  c.memory.activation_checkpointing = GENERATE(core::Checkpointing::none, core::Checkpointing::full);
  c.moe.balance = core::Balance::none;
  const core::Plan plan = core::make_plan(c);
  auto t = fresh(c);
  const io::Batch full = [&] {
    io::Batch b = synthetic_batch(c, 0, 1);
    b.documents = b.sequences;
    for (std::size_t i = 0; i < b.labels.size(); ++i) b.labels[i] = b.tokens[i];
    return b;
  }();
  t->step({&full, 1});
  for (std::size_t k = 0; k < kCategories; ++k) {
    CAPTURE(k);
    CHECK(t->memory().peaks()[k] == plan.ranks[0].device_bytes[k]);
  }
}
