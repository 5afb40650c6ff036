// adamw_test.cpp -- the update by hand, against its equations step after step, and for shards as for the whole.
#include "ops/adamw.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
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

ops::AdamWShard shard_of(const Parameter& p, ConstTensor gradient) {
  return {.gradient = gradient,
          .master = p.master,
          .exp_avg = p.exp_avg,
          .exp_avg_sq = p.exp_avg_sq,
          .weight = p.weight,
          .weight_decay = 0.1};
}
ops::AdamW update_of(std::span<const ops::AdamWShard> shards, std::int64_t step, double eps = 1e-8) {
  return {.shards = shards, .lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = eps, .gradient_scale = 0.5, .step = step};
}
void update(ops::Context& ctx, const Parameter& p, ConstTensor gradient, std::int64_t step, double eps = 1e-8) {
  const ops::AdamWShard shard = shard_of(p, gradient);
  ops::adamw(ctx, update_of({&shard, 1}, step, eps));
}

TEST_CASE("adamw moves by the sign of the first gradient, and decays apart from it", "[ops][cpu]") {
  // at step 1 both corrections undo the averages: the quotient is g / |g| = 1 and -1 whatever the size of g
  Bench b;
  Parameter p(b, DType::f64, DType::none, 2);
  p.master = b.of(DType::f64, {2}, {2, 4});
  update(b.context(), p, b.of(DType::f64, {2}, {8, -0.5}), 1, 0);
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
        update(b.context(), p, gradient, step);
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
  update(b.context(), whole, gradient, 1);
  for (const auto& [begin, end] : {std::pair{0, 38}, std::pair{38, 101}}) {
    Parameter part = shards;
    part.master = shards.master.rows(begin, end);
    part.exp_avg = shards.exp_avg.rows(begin, end);
    part.exp_avg_sq = shards.exp_avg_sq.rows(begin, end);
    part.weight = shards.weight.rows(begin, end);
    update(b.context(), part, gradient.rows(begin, end), 1);
  }
  CHECK(test::values_of(shards.master) == test::values_of(whole.master));
  CHECK(test::values_of(shards.weight) == test::values_of(whole.weight));
}

TEST_CASE("adamw takes an empty shard and refuses tensors that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Parameter none(b, DType::f32, DType::bf16, 0), p(b, DType::f32, DType::bf16, 4);
  update(ctx, none, b.empty(DType::f32, {0}), 1);
  ops::adamw(ctx, update_of({}, 1));
  CHECK(b.guards_hold());
  const Tensor gradient = b.normal(DType::f32, {4});
  CHECK_THROWS_AS(update(ctx, p, b.normal(DType::f32, {3}), 1), Error);
  CHECK_THROWS_AS(update(ctx, p, gradient, 0), Error);
  Parameter wrong = p;
  wrong.exp_avg = b.zeros(DType::f64, {4});
  CHECK_THROWS_AS(update(ctx, wrong, gradient, 1), Error);
  wrong = p;
  wrong.master = b.normal(DType::bf16, {4});
  CHECK_THROWS_AS(update(ctx, wrong, gradient, 1), Error);
}

TEST_CASE("adamw of many shards in one call, with a scale on the device, is each of them alone", "[ops][cpu]") {
  Bench b;
  std::vector<Parameter> together, alone;
  std::vector<ops::AdamWShard> shards;
  for (const std::int64_t n : {std::int64_t(7), std::int64_t(0), std::int64_t(130)}) {
    together.emplace_back(b, DType::f32, DType::bf16, n);
    alone.push_back(together.back());
    alone.back().master = b.copy(together.back().master);
    alone.back().exp_avg = b.zeros(DType::f32, {n});
    alone.back().exp_avg_sq = b.zeros(DType::f32, {n});
    shards.push_back(shard_of(together.back(), b.normal(DType::f32, {n})));
    update(b.context(), alone.back(), shards.back().gradient, 1);
  }
  ops::AdamW all = update_of(shards, 1);
  all.gradient_scale = 2;
  all.scale = b.of(DType::f64, {1}, {0.25});
  ops::adamw(b.context(), all);
  for (std::size_t i = 0; i < shards.size(); ++i) CHECK(test::values_of(together[i].master) == test::values_of(alone[i].master));
  all.scale = b.zeros(DType::f32, {1});
  CHECK_THROWS_AS(ops::adamw(b.context(), all), Error);
}

// Some shards of mixed types and sizes, more than one launch holds; on the host, to be copied to where they are updated.
struct Shards {
  std::vector<Parameter> parameters;
  std::vector<Tensor> gradients;
  Shards(Bench& b, const std::vector<std::int64_t>& sizes) {
    const DType gradient_types[] = {DType::f32, DType::bf16}, weight_types[] = {DType::bf16, DType::none, DType::f32};
    for (std::size_t i = 0; i < sizes.size(); ++i) {
      parameters.emplace_back(b, DType::f32, weight_types[i % 3], sizes[i]);
      parameters.back().exp_avg = b.normal(DType::f32, {sizes[i]}, 0.1);
      parameters.back().exp_avg_sq = b.uniform(DType::f32, {sizes[i]}, 0, 0.1);
      gradients.push_back(b.normal(gradient_types[i % 2], {sizes[i]}));
    }
  }
  // What one update leaves, shard by shard, on the host: on CUDA, `off` elements past an aligned address.
  std::vector<Parameter> on_cuda(Bench& b, std::int64_t off) const {
    test::DeviceBench d;
    const auto put = [&](ConstTensor host) {
      const Tensor all = d.empty(host.dtype, {host.count() + off}), t = all.rows(off, all.count());
      copy_to_device(Device::cuda, t.data, host.data, host.bytes());
      return t;
    };
    std::vector<Parameter> there = parameters;
    std::vector<ops::AdamWShard> shards;
    for (std::size_t i = 0; i < there.size(); ++i) {
      Parameter& p = there[i];
      p.master = put(p.master), p.exp_avg = put(p.exp_avg), p.exp_avg_sq = put(p.exp_avg_sq);
      if (p.weight.present()) p.weight = put(p.weight);
      shards.push_back(shard_of(p, put(gradients[i])));
    }
    ops::AdamW a = update_of(shards, 3);
    a.gradient_scale = 2;
    a.scale = d.copy(b.of(DType::f64, {1}, {0.25}));
    ops::adamw(d.context(), a);
    CHECK(d.guards_hold());
    for (Parameter& p : there) {
      p.master = d.to_host(b, p.master), p.exp_avg = d.to_host(b, p.exp_avg), p.exp_avg_sq = d.to_host(b, p.exp_avg_sq);
      if (p.weight.present()) p.weight = d.to_host(b, p.weight);
    }
    return there;
  }
  std::vector<Parameter> in_f64(Bench& b) const {
    std::vector<Parameter> there = parameters;
    for (std::size_t i = 0; i < there.size(); ++i) {
      Parameter& p = there[i];
      p.master = b.as(DType::f64, p.master), p.exp_avg = b.as(DType::f64, p.exp_avg), p.exp_avg_sq = b.as(DType::f64, p.exp_avg_sq);
      p.weight = {};
      update(b.context(), p, b.as(DType::f64, gradients[i]), 3);
    }
    return there;
  }
};

TEST_CASE("adamw on CUDA follows the f64 reference over shards of every type, size and alignment", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  std::vector<std::int64_t> sizes{1, 4, 8192, 8193, 24577, 0, 100003, 7};
  for (std::int64_t n = 0; n < 150; ++n) sizes.push_back(1 + n * n % 37);
  Bench b;
  const Shards shards(b, sizes);
  const auto want = shards.in_f64(b), got = shards.on_cuda(b, 0), off = shards.on_cuda(b, 3);
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    CAPTURE(i, sizes[i]);
    if (sizes[i] == 0) continue;
    CHECK(test::difference(got[i].master, want[i].master, 1e-6) == "");
    CHECK(test::difference(got[i].exp_avg, want[i].exp_avg, 1e-6) == "");
    CHECK(test::difference(got[i].exp_avg_sq, want[i].exp_avg_sq, 1e-6) == "");
    if (got[i].weight.present()) CHECK(test::values_of(got[i].weight) == test::values_of(b.as(got[i].weight.dtype, got[i].master)));
    CHECK(test::values_of(off[i].master) == test::values_of(got[i].master));  // the same bits wherever an element lies
    CHECK(test::values_of(off[i].exp_avg_sq) == test::values_of(got[i].exp_avg_sq));
  }
}

}  // namespace
}  // namespace moetrain
