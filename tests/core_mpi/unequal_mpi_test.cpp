// unequal_mpi_test.cpp -- ranks with unequal work: label counts, sequence lengths, experts that get everything or nothing.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/plan.h"
#include "core/trainer.h"
#include "parallel/expert_capacity.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/temp_folder.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

// Four sequences of unequal length, the second without any label.
std::vector<io::Batch> unequal(const core::Config& base) {
  std::vector<io::Batch> all;
  for (const auto& [n, length] : {std::pair<int, std::int64_t>{0, 5}, {1, 31}, {2, 17}, {3, 1}}) {
    core::Config c = base;
    c.data.sequence_length = length;
    all.push_back(synthetic_batch(c, n, 1));
  }
  for (auto& label : all[1].labels) label = -100;
  return all;
}

// The same sequences as one batch.
io::Batch joined(const std::vector<io::Batch>& batches) {
  io::Batch all;
  all.sequences = all.documents = {0};
  for (const auto& b : batches) {
    const auto base = std::int64_t(all.tokens.size());
    all.tokens.insert(all.tokens.end(), b.tokens.begin(), b.tokens.end());
    all.labels.insert(all.labels.end(), b.labels.begin(), b.labels.end());
    for (std::size_t i = 1; i < b.sequences.size(); ++i) all.sequences.push_back(base + b.sequences[i]);
    for (std::size_t i = 1; i < b.documents.size(); ++i) all.documents.push_back(base + b.documents[i]);
  }
  return all;
}

std::unique_ptr<core::Trainer> make(core::Config c, int data, int expert, std::unique_ptr<parallel::Communicator> world) {
  c.parallel.data_parallel = data;
  c.parallel.expert_parallel = expert;
  auto t = std::make_unique<core::Trainer>(c, std::move(world), Device::cpu, /*poison=*/true);
  t->initialize();
  disturb(*t);
  return t;
}

void check_equal_to_one_rank(const core::Config& c, int data, int expert) {
  const auto batches = unequal(c);
  auto one = make(c, 1, 1, parallel::solo());
  auto many = make(c, data, expert, parallel::mpi_world());
  const io::Batch mine[1] = {batches[std::size_t(many->mesh().data_coordinate())]};
  for (int s = 0; s < 3; ++s) {
    const auto x = one->step(batches), y = many->step(mine);
    CHECK(x.label_tokens == y.label_tokens);
    CHECK(std::abs(x.loss - y.loss) <= 1e-10 * std::abs(x.loss));
    CHECK(std::abs(x.grad_norm - y.grad_norm) <= 1e-10 * x.grad_norm);
    CHECK(x.expert_tokens == y.expert_tokens);
  }
}

}  // namespace

TEST_CASE("sequences of unequal length, some without a token in the last slices, are cut over ranks to the step of one rank") {
  for (const auto balance : {core::Balance::quantile, core::Balance::auxiliary}) {
    core::Config c = tiny_config();
    c.moe.balance = balance;
    c.moe.auxiliary_scope = core::AuxiliaryScope::sequence;
    c.moe.auxiliary_coefficient = 0.05;
    c.training.micro_batch_size = 2;
    const auto whole = unequal(c);
    std::vector<io::Batch> pairs;  // lengths 5 and 31, 17 and 1
    for (std::size_t i = 0; i < whole.size(); i += 2) {
      io::Batch joined = whole[i];
      const io::Batch& more = whole[i + 1];
      const auto base = std::int64_t(joined.tokens.size());
      joined.tokens.insert(joined.tokens.end(), more.tokens.begin(), more.tokens.end());
      joined.labels.insert(joined.labels.end(), more.labels.begin(), more.labels.end());
      joined.sequences.push_back(base + more.sequences[1]);
      for (std::size_t d = 1; d < more.documents.size(); ++d) joined.documents.push_back(base + more.documents[d]);
      pairs.push_back(joined);
    }
    for (const auto& [data, sequence] : {std::pair{1, 4}, {2, 2}}) {
      core::Config cut = c;
      cut.parallel.sequence_parallel = sequence;
      auto reference = make(c, 1, 1, parallel::solo());
      auto many = make(cut, data, 1, parallel::mpi_world());
      std::vector<io::Batch> mine;
      for (int b = many->mesh().data_coordinate(); b < 2; b += data)
        mine.push_back(slice_of(pairs[std::size_t(b)], many->slice(), c.data.sequence_length));
      for (int s = 0; s < 3; ++s) {
        CAPTURE(int(balance), sequence, s);
        const auto x = reference->step(pairs), y = many->step(mine);
        CHECK(x.label_tokens == y.label_tokens);
        CHECK(x.tokens == y.tokens);
        CHECK(std::abs(x.loss - y.loss) <= 1e-9 * std::abs(x.loss));
        CHECK(std::abs(x.grad_norm - y.grad_norm) <= 1e-9 * x.grad_norm);
        CHECK(x.expert_tokens == y.expert_tokens);
        if (x.balance_loss) CHECK(std::abs(*x.balance_loss - *y.balance_loss) <= 1e-9 * *x.balance_loss);
      }
    }
  }
}

TEST_CASE("unequal lengths and label counts a rank give the step of one rank") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::quantile;
  check_equal_to_one_rank(c, 4, 1);
  check_equal_to_one_rank(c, 2, 2);
  check_equal_to_one_rank(c, 1, 4);
}

TEST_CASE("tokens that all go to one expert or one rank's, or past some ranks, change no result, also where experts are limited") {
  struct Skew {
    std::int64_t per_token;
    std::vector<double> bias;  // of the eight experts, two a rank
  };
  for (const Skew& skew : {Skew{1, {0, 0, 0, 10, 0, 0, 0, 0}}, Skew{2, {10, 10, 0, 0, 0, 0, 0, 0}}, Skew{2, {9, 0, 0, 0, 9, 9, 0, 0}}})
    for (const double factor : {0.0, 1.0, 2.5})
      for (const auto overflow : {core::Overflow::reroute, core::Overflow::drop}) {
        if (factor == 0 && overflow == core::Overflow::drop) continue;
        CAPTURE(skew.per_token, factor, int(overflow));
        core::Config c = tiny_config();
        c.model.num_experts_per_token = skew.per_token;
        c.moe.capacity_factor = factor;
        c.moe.overflow = overflow;
        const auto bias_of = [&](core::Trainer& t) {
          for (const int id : t.model().router_biases())
            std::copy(skew.bias.begin(), skew.bias.end(), t.params().stored(id, {0, 8}).as<double>());
        };
        const auto batches = unequal(c);
        const auto whole = joined(batches);  // limits are those of the micro-batch of all ranks
        auto one = make(c, 1, 1, parallel::solo());
        auto many = make(c, 1, 4, parallel::mpi_world());
        bias_of(*one);
        bias_of(*many);
        const io::Batch mine[1] = {batches[std::size_t(many->mesh().data_coordinate())]};
        for (int s = 0; s < 2; ++s) {
          const auto x = one->step({&whole, 1}), y = many->step(mine);
          CHECK(std::abs(x.loss - y.loss) <= 1e-10 * std::abs(x.loss));
          CHECK(std::abs(x.grad_norm - y.grad_norm) <= 1e-10 * x.grad_norm);
          CHECK(x.expert_tokens == y.expert_tokens);
          CHECK((x.dropped == y.dropped && x.rerouted == y.rerouted));
          for (std::int64_t e = 0; e < 8; ++e)
            if (skew.bias[std::size_t(e)] == 0) CHECK(y.expert_tokens[std::size_t(e)] == 0);
          const std::int64_t places = parallel::expert_places(factor, y.tokens * skew.per_token, 8);
          for (std::int64_t l = 0; l < 4; ++l) {
            std::int64_t rows = 0;
            for (int r = 0; r < 4; ++r) {
              const auto of_rank = y.rank_rows[std::size_t(l * 4 + r)];
              if (factor > 0) CHECK(of_rank <= 2 * places);
              rows += of_rank;
            }
            CHECK(rows == x.rank_rows[std::size_t(l)]);
          }
          if (factor == 0) CHECK(y.rank_rows[3] == 0);
          if (factor == 1) CHECK((overflow == core::Overflow::drop ? y.dropped : y.rerouted) > y.tokens);
        }
      }
}

TEST_CASE("with limited experts a step of the worst skew takes the memory of the plan, and without a limit more") {
  for (const double factor : {0.0, 1.5}) {
    core::Config c = tiny_config();
    c.moe.capacity_factor = factor;
    c.moe.overflow = core::Overflow::drop;
    c.parallel.expert_parallel = 4;
    const core::Plan plan = core::make_plan(c);
    auto t = make(c, 1, 4, parallel::mpi_world());
    for (const int id : t->model().router_biases()) {
      const Tensor bias = t->params().stored(id, {0, 8});
      for (int e = 0; e < 8; ++e) bias.as<double>()[e] = e < 2 ? 10 : 0;
    }
    for (int s = 0; s < 2; ++s) t->step(synthetic_step(*t));
    const int rank = t->mesh().world().control->rank();
    CAPTURE(factor, rank);
    if (rank > 0)
      CHECK(t->memory().pool().high_water() < plan.ranks[0].device_pool);  // their experts got nothing
    else if (factor > 0)
      CHECK(t->memory().pool().high_water() == plan.ranks[0].device_pool);  // both of its experts are full
    else
      CHECK(t->memory().pool().high_water() > plan.ranks[0].device_pool);
  }
}

TEST_CASE("held-out loss is that of one rank under every layout, also where ranks run out of sequences") {
  const test::TempFolder folder;
  std::string text;
  for (int i = 0; i < 210; ++i) text += char('a' + i * i % 7);
  core::Config c = tiny_config();
  c.model.vocab_size = 257;
  c.training.micro_batch_size = 2;
  auto all = parallel::mpi_world();
  const io::BatchSource source(
      {.paths = {folder.file("text", text)}, .sequence_length = 32, .exclude = {}, .vocab_size = 257});  // 7 windows
  auto one = make(c, 1, 1, parallel::solo());
  auto many = make(c, 2, 2, std::move(all));
  c.training.micro_batch_size = 8;
  auto whole = make(c, 1, 1, parallel::solo());
  const double want = *whole->evaluate(whole->evaluation_batches(source, 1));
  CHECK(std::isfinite(want));
  CHECK(std::abs(*one->evaluate(one->evaluation_batches(source, 4)) - want) <= 1e-12 * want);
  CHECK(std::abs(*many->evaluate(many->evaluation_batches(source, 1)) - want) <= 1e-12 * want);
  c.parallel.sequence_parallel = 2;
  for (const std::int64_t size : {4, 8}) {  // the last of seven sequences is short; the second coordinate has three of them, or none
    c.training.micro_batch_size = size;
    auto cut = make(c, 2, 1, parallel::mpi_world());
    CHECK(std::abs(*cut->evaluate(cut->evaluation_batches(source, 1)) - want) <= 1e-12 * want);
  }
}

TEST_CASE("replicated weights have the same bits on every rank after steps with unequal experts") {
  core::Config c = tiny_config();
  c.parallel.sharding = parallel::Sharding::none;
  const auto batches = unequal(c);
  auto t = make(c, 2, 2, parallel::mpi_world());
  const io::Batch mine[1] = {batches[std::size_t(t->mesh().data_coordinate())]};
  for (int s = 0; s < 3; ++s) t->step(mine);
  auto& control = *t->mesh().world().control;
  for (int i = 0; i < t->table().size(); ++i) {
    if (t->table()[i].unit == core::UnitKind::experts) continue;
    const Tensor w = t->params().stored(i, t->params().update_rows(i));
    std::vector<std::byte> all(std::size_t(w.bytes() * control.size()));
    const parallel::Communicator::Gather piece{w.data, all.data(), w.bytes()};
    control.all_gather({&piece, 1});
    CAPTURE(t->table()[i].name);
    for (int r = 0; r < control.size(); ++r) CHECK(std::memcmp(all.data() + r * w.bytes(), w.data, std::size_t(w.bytes())) == 0);
  }
}
