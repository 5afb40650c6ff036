// adamw_test.cpp -- the update by hand, against its equations step after step, and for shards as for the whole.
#include "ops/adamw.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

struct Parameter {
  Tensor master, exp_avg, exp_avg_sq, weight;
  Parameter(Bench& b, DType real, DType storage, std::int64_t n)
      : master(b.normal(real, {n})), exp_avg(b.zeros(real, {n})), exp_avg_sq(b.zeros(real, {n})) {
    if (storage != DType::none) weight = b.empty(storage, {n});
  }
};

ops::AdamW update_of(const Parameter& p, ConstTensor gradient, std::int64_t step) {
  return {.gradient = gradient,
          .master = p.master,
          .exp_avg = p.exp_avg,
          .exp_avg_sq = p.exp_avg_sq,
          .weight = p.weight,
          .lr = 0.01,
          .beta1 = 0.9,
          .beta2 = 0.95,
          .eps = 1e-8,
          .weight_decay = 0.1,
          .gradient_scale = 0.5,
          .step = step};
}

TEST_CASE("adamw moves by the sign of the first gradient, and decays apart from it", "[ops][cpu]") {
  // at step 1 both corrections undo the averages: the quotient is g / |g| = 1 and -1 whatever the size of g
  Bench b;
  Parameter p(b, DType::f64, DType::none, 2);
  p.master = b.of(DType::f64, {2}, {2, 4});
  ops::AdamW a = update_of(p, b.of(DType::f64, {2}, {8, -0.5}), 1);
  a.eps = 0;
  ops::adamw(b.context(), a);
  CHECK(test::difference(test::values_of(p.master), {2 - 0.01 * (1 + 0.2), 4 - 0.01 * (-1 + 0.4)}, 1e-14) == "");
  CHECK(test::difference(test::values_of(p.exp_avg), {0.4, -0.025}, 1e-14) == "");
  CHECK(test::difference(test::values_of(p.exp_avg_sq), {0.8, 0.05 * 0.0625}, 1e-14) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("adamw follows its equations over several steps and rounds the weight from the master", "[ops][cpu]") {
  struct Types {
    DType real, gradient, weight;
    double bound;
  };
  for (const Types& types : {Types{DType::f64, DType::f64, DType::f64, 1e-13}, Types{DType::f32, DType::f32, DType::bf16, 1e-6},
                             Types{DType::f32, DType::bf16, DType::bf16, 1e-6}, Types{DType::f32, DType::f32, DType::none, 1e-6}})
    for (const std::int64_t n : {std::int64_t(1), std::int64_t(13), std::int64_t(40001)}) {
      CAPTURE(name_of(types.real), name_of(types.gradient), name_of(types.weight), n);
      Bench b;
      const Parameter p(b, types.real, types.weight, n);
      auto master = test::values_of(p.master), m = test::values_of(p.exp_avg), v = test::values_of(p.exp_avg_sq);
      for (std::int64_t step = 1; step <= 3; ++step) {
        const Tensor gradient = b.normal(types.gradient, {n});
        ops::adamw(b.context(), update_of(p, gradient, step));
        const auto g = test::values_of(gradient);
        for (std::size_t i = 0; i < g.size(); ++i) {
          m[i] = 0.9 * m[i] + 0.1 * 0.5 * g[i];
          v[i] = 0.95 * v[i] + 0.05 * 0.25 * g[i] * g[i];
          const double mhat = m[i] / (1 - std::pow(0.9, double(step))), vhat = v[i] / (1 - std::pow(0.95, double(step)));
          master[i] -= 0.01 * (mhat / (std::sqrt(vhat) + 1e-8) + 0.1 * master[i]);
        }
      }
      CHECK(test::difference(test::values_of(p.master), master, types.bound) == "");
      CHECK(test::difference(test::values_of(p.exp_avg), m, types.bound) == "");
      CHECK(test::difference(test::values_of(p.exp_avg_sq), v, types.bound) == "");
      if (p.weight.present()) CHECK(test::values_of(p.weight) == test::values_of(b.as(types.weight, p.master)));
      CHECK(b.guards_hold());
    }
}

TEST_CASE("adamw of two shards gives the bits of the whole", "[ops][cpu]") {
  Bench b;
  const Parameter whole(b, DType::f32, DType::bf16, 101);
  const Tensor gradient = b.normal(DType::f32, {101});
  Parameter shards = whole;
  shards.master = b.copy(whole.master);
  shards.exp_avg = b.copy(whole.exp_avg);
  shards.exp_avg_sq = b.copy(whole.exp_avg_sq);
  shards.weight = b.empty(DType::bf16, {101});
  ops::adamw(b.context(), update_of(whole, gradient, 1));
  for (const auto& [begin, end] : {std::pair{0, 38}, std::pair{38, 101}}) {
    Parameter part = shards;
    part.master = shards.master.rows(begin, end);
    part.exp_avg = shards.exp_avg.rows(begin, end);
    part.exp_avg_sq = shards.exp_avg_sq.rows(begin, end);
    part.weight = shards.weight.rows(begin, end);
    ops::adamw(b.context(), update_of(part, gradient.rows(begin, end), 1));
  }
  CHECK(test::values_of(shards.master) == test::values_of(whole.master));
  CHECK(test::values_of(shards.weight) == test::values_of(whole.weight));
}

TEST_CASE("adamw takes an empty shard and refuses tensors that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Parameter none(b, DType::f32, DType::bf16, 0), p(b, DType::f32, DType::bf16, 4);
  ops::adamw(ctx, update_of(none, b.empty(DType::f32, {0}), 1));
  CHECK(b.guards_hold());
  const Tensor gradient = b.normal(DType::f32, {4});
  CHECK_THROWS_AS(ops::adamw(ctx, update_of(p, b.normal(DType::f32, {3}), 1)), Error);
  CHECK_THROWS_AS(ops::adamw(ctx, update_of(p, gradient, 0)), Error);
  Parameter wrong = p;
  wrong.exp_avg = b.zeros(DType::f64, {4});
  CHECK_THROWS_AS(ops::adamw(ctx, update_of(wrong, gradient, 1)), Error);
  wrong = p;
  wrong.master = b.normal(DType::bf16, {4});
  CHECK_THROWS_AS(ops::adamw(ctx, update_of(wrong, gradient, 1)), Error);
}

}  // namespace
}  // namespace moetrain
