// model_test.cpp -- the whole model: its gradient is the slope of its loss, recomputation and chunking change nothing, documents
// do not leak.
#include <algorithm>
#include <map>

#include "core/trainer.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

std::unique_ptr<core::Trainer> make(const core::Config& c) {
  auto t = std::make_unique<core::Trainer>(c, parallel::solo(), Device::cpu, /*poison=*/true);
  t->initialize();
  disturb(*t);
  return t;
}

struct Losses {
  double lm, balance, indexer;
};

// One forward with the given decisions; the sums scaled as the gradients are.
Losses losses_held(core::Trainer& t, Stack& kept, const io::Batch& host, std::span<const core::Block::Decisions> held) {
  Scope scope(kept);
  const core::MicroBatch batch = t.upload(host);
  const auto totals = t.count({&host, 1});
  t.zero_sums();
  core::Pass pass = t.make_pass(batch, totals, core::PassMode::held);
  const auto mark = pass.kept.mark();
  t.model().forward(pass, t.layout(), {}, held);
  std::vector<int> units = t.layout().head;
  if (t.config().model.tie_word_embeddings) units.insert(units.end(), t.layout().embedding.begin(), t.layout().embedding.end());
  for (const int unit : units) {
    t.params().reduce(unit);
    t.params().release(unit);
  }
  for (const int unit : t.layout().router_bias) t.params().release(unit);
  pass.kept.release(mark);
  return {*pass.losses.lm.as<double>() * pass.scales.per_label, *pass.losses.balance.as<double>(),
          *pass.losses.indexer.as<double>() * pass.scales.per_token * t.config().loss.indexer_coefficient};
}

// Copies of the decisions a forward makes.
struct Held {
  std::vector<OwnedTensor> owned;
  std::vector<core::Block::Decisions> decisions;
};

// Gradients of one batch into the stored gradients, and the decisions it made.
Held run_backward(core::Trainer& t, Memory& memory, const io::Batch& host) {
  Held held;
  const core::MicroBatch batch = t.upload(host);
  const auto totals = t.count({&host, 1});
  t.zero_sums();
  t.params().begin_step();
  core::Pass pass = t.make_pass(batch, totals, core::PassMode::train);
  t.model().forward(pass, t.layout());
  for (const auto& d : t.model().decisions()) {
    auto copy = [&](Tensor x) {
      if (!x.present()) return Tensor{};
      held.owned.emplace_back(memory, Category::workspace, x.dtype, x.shape);
      std::memcpy(held.owned.back().view().data, x.data, std::size_t(x.bytes()));
      return held.owned.back().view();
    };
    held.decisions.push_back({copy(d.attention), copy(d.experts)});
  }
  t.model().backward(pass, t.layout());
  t.params().finish_gradients();
  return held;
}

// Strips the layer and expert numbers: one entry a parameter kind.
std::string kind_of(const std::string& name) {
  std::string kind;
  for (const char c : name)
    if (!std::isdigit(static_cast<unsigned char>(c)) || kind.ends_with("w") || kind.ends_with("conv")) kind += c;
  return kind;
}

void check_slopes(const core::Config& c) {
  auto t = make(c);
  Memory memory(Device::cpu);
  Stack kept(memory, Category::activations);
  const io::Batch host = synthetic_batch(c, 3, 2);
  const Held held = run_backward(*t, memory, host);
  std::vector<std::vector<double>> gradients;  // the forwards below add the head's again
  for (int i = 0; i < t->table().size(); ++i)
    gradients.push_back(t->table()[i].trainable ? values_of(t->params().stored_gradient(i, t->params().update_rows(i)))
                                                : std::vector<double>{});
  std::map<std::string, int> seen;
  for (int i = 0; i < t->table().size(); ++i) {
    const auto& p = t->table()[i];
    // Two of each kind (an early and a late layer meet other residual banks); of a bias that only selects there is no gradient.
    if (!p.trainable || ++seen[kind_of(p.name)] > 2) continue;
    const auto rows = t->params().update_rows(i);
    const Tensor w = t->params().stored(i, rows);
    const ConstTensor g(gradients[std::size_t(i)].data(), DType::f64, w.shape);
    const bool unread = c.model.attn_res_block_size && p.name.find("layers.0.self_attention_res") != std::string::npos;
    const bool indexer = p.name.find("indexer") != std::string::npos;
    auto f = [&] {
      const Losses l = losses_held(*t, kept, host, held.decisions);
      return indexer ? l.indexer : l.lm + l.balance;  // detached: each reaches its own parameters only
    };
    CAPTURE(p.name);
    if (unread) {
      for (const double v : values_of(g)) CHECK(v == 0);
    } else {
      CHECK(slope_difference(f, w, g, 1e-6, 1e-11, 5, 2e-4) == "");
    }
  }
  CHECK(seen.size() > 20);
}

}  // namespace

TEST_CASE("the gradient of the whole sparse model is the slope of its losses, LM and indexer apart") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::auxiliary;
  c.moe.auxiliary_coefficient = 0.1;
  c.moe.z_loss = 0.01;
  c.loss.seq_chunk = 7;
  c.loss.vocab_chunk = 17;
  check_slopes(c);
}

TEST_CASE("the gradient of the auxiliary loss is its slope over a micro-batch and over the global batch") {
  for (const auto scope : {core::AuxiliaryScope::micro_batch, core::AuxiliaryScope::global_batch}) {
    core::Config c = tiny_config();
    c.moe.balance = core::Balance::auxiliary;
    c.moe.auxiliary_coefficient = 1;
    c.moe.auxiliary_scope = scope;
    check_slopes(c);
  }
}

TEST_CASE("the gradient of the whole model in the dense indexer stage is the slope of its losses") {
  core::Config c = tiny_config();
  c.loss.indexer_stage = core::IndexerStage::dense;
  check_slopes(c);
}

TEST_CASE("the gradient of the whole Kimi-Linear kind with a tied head is the slope of its loss") {
  check_slopes(tiny_linear_config());
}

TEST_CASE(
    "gradients of the factors of adapters are the slopes of the loss: dense, of experts, with a shared A, absorbed and dropped") {
  const std::vector<std::string> all = {"attention", "shared", "expert_proj", "latent", "head", "*.mlp.*", "*.gate.weight"};
  core::Config c = tiny_config();
  c.lora = core::LoraConfig{.rank = 3, .alpha = 2, .target = all};
  check_slopes(c);
  c.lora->shared_a = c.lora->rslora = true;
  c.loss.indexer_stage = core::IndexerStage::dense;
  check_slopes(c);
  c.lora->dropout = 0.3;
  c.lora->target = {"attention", "shared", "latent", "head", "*.mlp.*"};
  check_slopes(c);
  core::Config linear = tiny_linear_config();
  linear.lora = core::LoraConfig{.rank = 2, .alpha = 2, .target = {"attention", "shared", "expert_proj"}};
  check_slopes(linear);
}

TEST_CASE("gradients with limited experts are the slopes of the loss, slots rerouted or dropped") {
  for (const auto overflow : {core::Overflow::reroute, core::Overflow::drop})
    for (const double factor : {1.0, 0.6}) {  // below 1 reroute drops too
      core::Config c = tiny_config();
      c.moe.capacity_factor = factor;
      c.moe.overflow = overflow;
      c.moe.balance = core::Balance::auxiliary;
      c.moe.auxiliary_coefficient = 0.1;
      check_slopes(c);
    }
  core::Config linear = tiny_linear_config();  // no norm after the experts: what a dropped slot leaves of the others shows
  linear.moe.capacity_factor = 0.8;
  linear.moe.overflow = core::Overflow::drop;
  check_slopes(linear);
}

TEST_CASE("recomputation gives the losses, gradients and counts of keeping, to the last bit") {
  core::Config limited = tiny_config(), dropping = tiny_linear_config();
  limited.moe.capacity_factor = dropping.moe.capacity_factor = 1;
  dropping.moe.overflow = core::Overflow::drop;
  for (const auto& base : {tiny_config(), tiny_linear_config(), limited, dropping}) {
    core::Config c = base;
    c.training.gradient_accumulation = 2;
    if (c.model.dsa) c.moe.balance = core::Balance::quantile;
    core::Config full = c;
    full.memory.activation_checkpointing = core::Checkpointing::full;
    auto a = make(c), b = make(full);
    for (int step = 0; step < 3; ++step) {
      const auto x = a->step(synthetic_step(*a)), y = b->step(synthetic_step(*b));
      CHECK(x.loss == y.loss);
      CHECK(x.grad_norm == y.grad_norm);
      CHECK(x.indexer_loss == y.indexer_loss);
      CHECK(x.expert_tokens == y.expert_tokens);
      CHECK((x.rank_rows == y.rank_rows && x.dropped == y.dropped && x.rerouted == y.rerouted));
      CHECK((x.dropped + x.rerouted > 0) == (c.moe.capacity_factor > 0));
      for (std::int64_t l = 0; l < a->model().moe_layers(); ++l) {
        std::int64_t sum = 0;
        for (std::int64_t e = 0; e < c.model.num_experts; ++e) sum += x.expert_tokens[std::size_t(l * c.model.num_experts + e)];
        CHECK(sum == x.tokens * c.model.num_experts_per_token);
      }
    }
    CHECK(b->memory().peak() < a->memory().peak());
  }
}

TEST_CASE("a document's outputs do not change by a bit when another document of its sequence does") {
  for (const auto& c : {tiny_config(), tiny_linear_config()}) {
    auto t = make(c);
    io::Batch host = synthetic_batch(c, 11, 1);
    const auto T = std::int64_t(host.tokens.size());
    std::vector<double> before(std::size_t(T * c.model.vocab_size)), after(before.size());
    const Shape shape{T, c.model.vocab_size};
    t->evaluate({&host, 1}, Tensor(before.data(), DType::f64, shape));
    REQUIRE(host.documents.size() > 3);
    const std::int64_t begin = host.documents[1], end = host.documents[2];  // the document that changes
    for (std::int64_t i = begin; i < end; ++i) host.tokens[std::size_t(i)] = (host.tokens[std::size_t(i)] + 1) % 61;
    t->evaluate({&host, 1}, Tensor(after.data(), DType::f64, shape));
    bool others_same = true, itself_changed = false;
    for (std::int64_t i = 0; i < T; ++i)
      for (std::int64_t v = 0; v < c.model.vocab_size; ++v) {
        const auto k = std::size_t(i * c.model.vocab_size + v);
        if (i >= begin && i < end)
          itself_changed |= before[k] != after[k];
        else
          others_same &= before[k] == after[k] && std::isfinite(before[k]);
      }
    CHECK(others_same);
    CHECK(itself_changed);
  }
}

TEST_CASE("packed documents give the losses and gradients of the same documents apart") {
  core::Config c = tiny_config();
  auto packed = make(c), apart = make(c);
  const io::Batch host = synthetic_batch(c, 5, 2);
  io::Batch split = host;
  split.sequences = host.documents;  // every document a sequence of its own
  const io::Batch one[1] = {host}, other[1] = {split};
  packed->step(one);
  apart->step(other);
  for (int i = 0; i < packed->table().size(); ++i) {
    if (!packed->table()[i].trainable) continue;
    CAPTURE(packed->table()[i].name);
    const auto rows = packed->params().update_rows(i);
    CHECK(difference(packed->params().stored_gradient(i, rows), apart->params().stored_gradient(i, rows), 1e-12, 1e-15) == "");
  }
}

TEST_CASE("separate micro-batches of single documents sum to the packed gradient") {
  core::Config c = tiny_config();
  auto packed = make(c), apart = make(c);
  const io::Batch host = synthetic_batch(c, 5, 1);
  std::vector<io::Batch> pieces;
  for (std::size_t d = 0; d + 1 < host.documents.size(); ++d) {
    io::Batch b;
    b.tokens.assign(host.tokens.begin() + host.documents[d], host.tokens.begin() + host.documents[d + 1]);
    b.labels.assign(host.labels.begin() + host.documents[d], host.labels.begin() + host.documents[d + 1]);
    b.sequences = b.documents = {0, std::int64_t(b.tokens.size())};
    pieces.push_back(b);
  }
  const io::Batch one[1] = {host};
  const auto x = packed->step(one), y = apart->step(pieces);
  CHECK(std::abs(x.loss - y.loss) <= 1e-12 * std::abs(y.loss));
  CHECK(std::abs(x.grad_norm - y.grad_norm) <= 1e-11 * y.grad_norm);
  CHECK(x.expert_tokens == y.expert_tokens);
}
