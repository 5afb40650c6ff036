// verify_test.cpp -- does `moetrain verify` pass on right operators, and does it find a wrong one?
#include "app/verify/verify.h"

#include <cmath>
#include <iterator>
#include <limits>
#include <map>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/tiny.h"

using namespace moetrain;
using namespace moetrain::app;

namespace {

// The tiny model with widths that the kernels of a GPU take, several documents, and every rule of balance that has an operator.
core::Config job(DType dtype, bool sparse) {
  core::Config c = sparse ? test::tiny_config() : test::tiny_linear_config();
  c.run.dtype = dtype;
  c.data.sequence_length = 150;
  c.training.micro_batch_size = 2;
  c.model.vocab_size = 307;
  c.model.linear_attn.num_heads = 3;
  c.parallel.expert_parallel = sparse ? 2 : 1;
  c.moe.balance = sparse ? core::Balance::quantile : core::Balance::auxiliary;
  c.moe.z_loss = sparse ? 0 : 1e-3;
  c.moe.capacity_factor = sparse ? 1 : 0;
  c.model.dsa = core::IndexerConfig{.index_n_heads = 2, .index_head_dim = 5, .index_topk = 16};
  c.model.q_lora_rank = 14;
  c.loss.indexer_stage = sparse ? core::IndexerStage::sparse : core::IndexerStage::dense;
  return c;
}

std::vector<Verdict> found(Device device, const core::Config& config,
                           std::function<void(const std::string&, const std::string&, Tensor)> disturb = {}) {
  std::vector<Verdict> all;
  verify_all(
      {.device = device, .config = config, .tell = [&](const Verdict& f) { all.push_back(f); }, .disturb = std::move(disturb)});
  return all;
}

void check_all_right(Device device, const core::Config& config) {
  const auto all = found(device, config);
  CHECK(all.size() > 40);
  for (const Verdict& f : all) {
    CAPTURE(f.op, f.shape, f.output, f.gap.element, f.gap.norm);
    CHECK(f.right);
  }
}

// The n-th output of every operator, for every n: those that have one are found wrong, the others right.
void check_finds_all(Device device, const core::Config& config, const std::function<void(Tensor)>& spoil) {
  std::map<std::string, std::set<std::string>> outputs;
  found(device, config, [&](const std::string& op, const std::string& output, Tensor) { outputs[op].insert(output); });
  CHECK(outputs.size() > 40);
  for (std::size_t n = 0, left = 1; left > 0; ++n) {
    left = 0;
    std::set<std::string> spoilt;
    std::map<std::string, bool> right;
    const auto disturb = [&](const std::string& op, const std::string& output, Tensor got) {
      const auto& of_op = outputs[op];
      if (n < of_op.size() && output == *std::next(of_op.begin(), std::ptrdiff_t(n)) && spoilt.insert(op).second) spoil(got);
    };
    for (const Verdict& f : found(device, config, disturb)) right.emplace(f.op, true).first->second &= f.right;
    for (const auto& [op, ok] : right) {
      CAPTURE(op, n);
      CHECK(ok == (n >= outputs[op].size()));
      left += n + 1 < outputs[op].size();
    }
  }
}

}  // namespace

TEST_CASE("the errors of a result are those of its worst element and of all together", "[app][cpu]") {
  const Gap gap = gap_of(std::vector<double>{3, 4.5, 0}, std::vector<double>{3, 4, 0});
  CHECK(gap.element == 0.5 / 4);
  CHECK(gap.norm == 0.1);
  CHECK(gap_of(std::vector<double>{0.5, 8}, std::vector<double>{0, 8}).element ==
        0.5 / std::sqrt(32.0));  // beside what is zero: of the mean
  CHECK(gap_of(std::vector<double>{0, 0}, std::vector<double>{0, 0}).element == 0);
  CHECK(std::isinf(gap_of(std::vector<double>{1e-30, 0}, std::vector<double>{0, 0}).element));
  const double nan = std::nan(""), infinite = std::numeric_limits<double>::infinity();
  for (const double bad : {nan, infinite}) {
    CHECK(std::isnan(gap_of(std::vector<double>{1, bad, 1}, std::vector<double>{1, 1, 1}).element));
    CHECK(std::isnan(gap_of(std::vector<double>{1, bad, 1}, std::vector<double>{1, bad, 1}).norm));
  }
  CHECK_THROWS_AS(gap_of(std::vector<double>{1}, std::vector<double>{1, 2}), Error);
}

TEST_CASE("samples hold both ends, and are a function of the seed", "[app][cpu]") {
  core::Config config = job(DType::f32, true);
  const Verification v{Device::cpu, config, [](const Verdict&) {}};
  const Places some = OpCase(v).sample(1000, 16);
  CHECK(some.size() == 16);
  CHECK((some.front() == 0 && some.back() == 999));
  CHECK((std::is_sorted(some.begin(), some.end()) && std::set<std::int64_t>(some.begin(), some.end()).size() == 16));
  CHECK(OpCase(v).sample(1000, 16) == some);
  CHECK(OpCase(v).sample(5, 16) == Places{0, 1, 2, 3, 4});
  config.run.seed = 2;
  CHECK(OpCase(v).sample(1000, 16) != some);
}

TEST_CASE("values come back from a device by rows and columns, and all but the kept ones become zero", "[app][cpu]") {
  const core::Config config = job(DType::bf16, true);
  const Verification v{Device::cpu, config, [](const Verdict&) {}};
  OpCase c(v);
  const Tensor t = c.put(std::vector<std::int32_t>{0, 1, 2, 3, 10, 11, 12, 13, 20, 21, 22, 23}, {3, 4});
  CHECK(test::values_of(c.wide(t, {2, 0}, {1, 3})) == std::vector<double>{21, 23, 1, 3});
  CHECK(test::values_of(c.wide(t, {1})) == std::vector<double>{10, 11, 12, 13});
  c.keep_columns(t, {1, 2});
  CHECK(test::values_of(t) == std::vector<double>{0, 1, 2, 0, 0, 11, 12, 0, 0, 21, 22, 0});
  c.keep_rows(t, {1});
  CHECK(test::values_of(t) == std::vector<double>{0, 0, 0, 0, 0, 11, 12, 0, 0, 0, 0, 0});
  const Tensor x = c.normal(DType::bf16, {1100, 1000});  // more than a block of random values
  CHECK(test::values_of(c.wide(x.rows(1099, 1100))) == test::values_of(x.rows(1099, 1100)));
  CHECK(c.starts().back() == c.T());
  CHECK(c.starts().size() > 4);
}

TEST_CASE("the CPU's own operators are found right, in both precisions and both kinds of attention", "[app][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const bool sparse = GENERATE(true, false);
  CAPTURE(name_of(dtype), sparse);
  check_all_right(Device::cpu, job(dtype, sparse));
}

TEST_CASE("queries of a sequence longer than the reference holds are found right", "[app][cpu]") {
  core::Config config = job(DType::f32, true);
  config.data.sequence_length = 9000;
  config.training.micro_batch_size = 1;
  int found_right = 0;
  const Verification v{Device::cpu, config, [&](const Verdict& f) { found_right += f.right && f.compared > 0; }};
  verify_sparse_attention(v);
  verify_indexer(v);
  CHECK(found_right == 5);
}

TEST_CASE("one wrong value of any output is found", "[app][cpu]") {
  core::Config config = job(DType::f32, GENERATE(true, false));
  config.data.sequence_length = 40;
  check_finds_all(Device::cpu, config, [](Tensor got) {
    double sum = 0;
    for (std::int64_t i = 0; i < got.count(); ++i) sum += std::abs(got.as<double>()[i]);
    got.as<double>()[got.count() - 1] += 0.3 * std::max(1.0, 3 * sum / double(got.count()));
  });
}

TEST_CASE("a GPU's operators are found right, and a wrong value of them is found", "[app][cuda]") {
  if (!test::cuda_device_here()) return;
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const bool sparse = GENERATE(true, false);
  CAPTURE(name_of(dtype), sparse);
  core::Config config = job(dtype, sparse);
  check_all_right(Device::cuda, config);
  int wrong = 0;
  for (const Verdict& f :
       found(Device::cuda, config, [](const std::string&, const std::string&, Tensor got) { got.as<double>()[0] = std::nan(""); }))
    wrong += !f.right;
  CHECK(wrong == int(found(Device::cuda, config).size()));
}
