// unequal_mpi_test.cpp -- ranks with unequal work: label counts, sequence lengths, experts that get everything or nothing.
#include <cmath>
#include <cstring>

#include "core/trainer.h"
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

TEST_CASE("unequal lengths and label counts a rank give the step of one rank") {
  core::Config c = tiny_config();
  c.moe.balance = core::Balance::quantile;
  check_equal_to_one_rank(c, 4, 1);
  check_equal_to_one_rank(c, 2, 2);
  check_equal_to_one_rank(c, 1, 4);
}

TEST_CASE("a bias that sends every token to the experts of one rank leaves the others empty and changes no result") {
  core::Config c = tiny_config();
  auto skew = [](core::Trainer& t) {
    for (const int id : t.model().router_biases()) {
      const Tensor bias = t.params().stored(id, {0, 8});
      for (int e = 0; e < 8; ++e)
        bias.as<double>()[e] = e < 2 ? 10 : 0;  // both of a token's experts are on the first of four ranks
    }
  };
  const auto batches = unequal(c);
  auto one = make(c, 1, 1, parallel::solo());
  auto many = make(c, 1, 4, parallel::mpi_world());
  skew(*one);
  skew(*many);
  const io::Batch mine[1] = {batches[std::size_t(many->mesh().data_coordinate())]};
  for (int s = 0; s < 2; ++s) {
    const auto x = one->step(batches), y = many->step(mine);
    CHECK(y.expert_tokens[0] == y.tokens);
    CHECK(y.expert_tokens[2] == 0);
    CHECK(std::abs(x.loss - y.loss) <= 1e-10 * std::abs(x.loss));
    CHECK(std::abs(x.grad_norm - y.grad_norm) <= 1e-10 * x.grad_norm);
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
