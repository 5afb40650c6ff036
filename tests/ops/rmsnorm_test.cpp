// rmsnorm_test.cpp -- rmsnorm by hand, as slope, and both backends in every storage type against f64 on the same operands.
#include "ops/rmsnorm.h"

#include <omp.h>

#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

struct Types {
  DType x, w;
  double bound;
};
const std::initializer_list<Types> kTypes = {
    {DType::f32, DType::f32, 1e-5}, {DType::bf16, DType::bf16, 1e-2}, {DType::bf16, DType::f32, 1e-2}};
struct Sizes {
  std::int64_t T, D;
};
const std::initializer_list<Sizes> kSizes = {{1, 1}, {1, 8}, {3, 7}, {37, 130}, {257, 1023}, {64, 4096}, {600, 72}};

// What forward and backward of one problem give.
struct Results {
  Tensor y, r, dx, dw;
};

// dw starts from `before`, so that a backend that writes instead of adding is caught.
struct Problem {
  Tensor x, w, dy, before;
  Problem(Bench& b, Types types, Sizes s)
      : x(b.normal(types.x, {s.T, s.D}, 2, 0.3)),
        w(b.normal(types.w, {s.D}, 0.3, 1)),
        dy(b.normal(types.x, {s.T, s.D})),
        before(b.normal(DType::f32, {s.D})) {}
  Results on_cpu_in_f64(Bench& b) const {
    const auto wide = [&](ConstTensor t) { return b.as(DType::f64, t); };
    const Results out{b.empty(DType::f64, x.shape), b.empty(DType::f64, {x.shape[0]}), b.empty(DType::f64, x.shape), wide(before)};
    const Tensor x64 = wide(x), w64 = wide(w), dy64 = wide(dy);
    ops::rmsnorm(b.context(), ops::RmsNormForward{.x = x64, .w = w64, .y = out.y, .r = out.r, .eps = 1e-5});
    ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = dy64, .x = x64, .w = w64, .r = out.r, .dx = out.dx, .dw = out.dw});
    return out;
  }
  Results on_cpu(Bench& b) const {
    const Results out{b.empty(x.dtype, x.shape), b.empty(DType::f32, {x.shape[0]}), b.empty(x.dtype, x.shape), b.copy(before)};
    ops::rmsnorm(b.context(), ops::RmsNormForward{.x = x, .w = w, .y = out.y, .r = out.r, .eps = 1e-5});
    ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = dy, .x = x, .w = w, .r = out.r, .dx = out.dx, .dw = out.dw});
    return out;
  }
  Results on_cuda(Bench& b) const {
    test::DeviceBench d;
    const Tensor dx = d.copy(x), dw = d.copy(w), ddy = d.copy(dy);
    const Results out{d.empty(x.dtype, x.shape), d.empty(DType::f32, {x.shape[0]}), d.empty(x.dtype, x.shape), d.copy(before)};
    ops::rmsnorm(d.context(), ops::RmsNormForward{.x = dx, .w = dw, .y = out.y, .r = out.r, .eps = 1e-5});
    ops::rmsnorm(d.context(), ops::RmsNormBackward{.dy = ddy, .x = dx, .w = dw, .r = out.r, .dx = out.dx, .dw = out.dw});
    const Results host{d.to_host(b, out.y), d.to_host(b, out.r), d.to_host(b, out.dx), d.to_host(b, out.dw)};
    CHECK(d.guards_hold());
    return host;
  }
};

void check_close(const Results& got, const Results& want, double bound) {
  CHECK(test::difference(got.y, want.y, bound) == "");
  CHECK(test::difference(got.r, want.r, 1e-5) == "");
  // A row of one element has a dx that nearly cancels: what is left is measured against the gradient that went in.
  CHECK(test::difference(got.dx, want.dx, bound, got.dx.shape[1] == 1 ? bound : 0) == "");
  CHECK(test::difference(got.dw, want.dw, 1e-4) == "");
}

bool same_bits(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

TEST_CASE("rmsnorm of (3, 4) divides by the root of the mean square", "[ops][cpu]") {
  // the mean square is 12.5, and with eps = 12.5 the root is 5
  Bench b;
  const Tensor x = b.of(DType::f64, {1, 2}, {3, 4}), w = b.of(DType::f64, {2}, {1, 10});
  const Tensor y = b.empty(DType::f64, {1, 2}), r = b.empty(DType::f64, {1});
  ops::rmsnorm(b.context(), ops::RmsNormForward{.x = x, .w = w, .y = y, .r = r, .eps = 12.5});
  CHECK(test::difference(test::values_of(r), {0.2}, 1e-15) == "");
  CHECK(test::difference(test::values_of(y), {0.6, 8}, 1e-15) == "");

  // g = (1, 0): mean(g x) = 1.5, dx = 0.2 (g - x 0.04 1.5)
  const Tensor dy = b.of(DType::f64, {1, 2}, {1, 0}), dx = b.empty(DType::f64, {1, 2}), dw = b.of(DType::f64, {2}, {1, 1});
  ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = dy, .x = x, .w = w, .r = r, .dx = dx, .dw = dw});
  CHECK(test::difference(test::values_of(dx), {0.164, -0.048}, 1e-14) == "");
  CHECK(test::difference(test::values_of(dw), {1.6, 1}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("rmsnorm rounds the normalised row to bf16 before the weight multiplies", "[ops][cpu]") {
  // r = 1 / sqrt(2/3), so 1 r = 1.2247 is stored as 1.2265625 = 157/128, and 3 times that is 3.6796875, stored as 3.6875
  Bench b;
  const Tensor x = b.of(DType::bf16, {1, 3}, {1, 1, 0}), w = b.of(DType::bf16, {3}, {3, 1, 1});
  const Tensor y = b.empty(DType::bf16, {1, 3}), r = b.empty(DType::f32, {1});
  ops::rmsnorm(b.context(), ops::RmsNormForward{.x = x, .w = w, .y = y, .r = r, .eps = 0});
  CHECK(test::values_of(y) == std::vector<double>{3.6875, 1.2265625, 0});
}

TEST_CASE("rmsnorm backward is the slope of rmsnorm forward", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.normal(DType::f64, {5, 7}), w = b.normal(DType::f64, {7}), c = b.normal(DType::f64, {5, 7});
  const Tensor y = b.empty(DType::f64, {5, 7}), r = b.empty(DType::f64, {5});
  const auto f = [&] {
    ops::rmsnorm(b.context(), ops::RmsNormForward{.x = x, .w = w, .y = y, .r = r, .eps = 1e-3});
    return test::weighted_sum(y, c);
  };
  f();
  const Tensor dw = b.zeros(DType::f64, {7}), dx = b.copy(c);  // dx aliases dy
  ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = dx, .x = x, .w = w, .r = r, .dx = dx, .dw = dw});
  CHECK(test::slope_difference(f, x, dx, 1e-8) == "");
  CHECK(test::slope_difference(f, w, dw, 1e-8) == "");
}

TEST_CASE("rmsnorm in f32 and bf16 is within rounding of f64 on the same operands", "[ops][cpu]") {
  for (const Types& types : kTypes)
    for (const Sizes& s : kSizes) {
      CAPTURE(name_of(types.x), name_of(types.w), s.T, s.D);
      Bench b;
      const Problem problem(b, types, s);
      check_close(problem.on_cpu(b), problem.on_cpu_in_f64(b), types.bound);
      CHECK(b.guards_hold());
    }
}

TEST_CASE("rmsnorm backward computes only what is asked for", "[ops][cpu]") {
  Bench b;
  const Problem p(b, {DType::f32, DType::f32, 0}, {4, 5});
  const Results all = p.on_cpu(b);
  const Tensor dx = b.empty(DType::f32, {4, 5}), dw = b.copy(p.before);
  ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = p.dy, .x = p.x, .w = p.w, .r = all.r, .dx = dx});
  ops::rmsnorm(b.context(), ops::RmsNormBackward{.dy = p.dy, .x = p.x, .w = p.w, .r = all.r, .dw = dw});
  CHECK(same_bits(dx, all.dx));
  CHECK(same_bits(dw, all.dw));
}

TEST_CASE("rmsnorm gives the same bits on one thread and on three", "[ops][cpu]") {
  Bench b;
  const Problem p(b, {DType::bf16, DType::f32, 0}, {601, 72});
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const Results one = p.on_cpu(b);
  omp_set_num_threads(3);
  const Results three = p.on_cpu(b);
  omp_set_num_threads(threads);
  CHECK(same_bits(one.y, three.y));
  CHECK(same_bits(one.dx, three.dx));
  CHECK(same_bits(one.dw, three.dw));
}

TEST_CASE("rmsnorm without rows leaves dw as it was", "[ops][cpu]") {
  for (const Types& types : kTypes) {
    Bench b;
    const Problem p(b, types, {0, 5});
    CHECK(same_bits(p.on_cpu(b).dw, p.before));
    CHECK(b.guards_hold());
  }
}

TEST_CASE("rmsnorm refuses operands that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor x = b.normal(DType::f32, {2, 3}), w = b.normal(DType::f32, {3}), r = b.normal(DType::f32, {2});
  const Tensor y = b.empty(DType::f32, {2, 3}), half = b.empty(DType::bf16, {2, 3}), w64 = b.normal(DType::f64, {3});
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormForward{.x = x, .w = r, .y = y, .r = r, .eps = 0}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormForward{.x = x, .w = w, .y = y, .r = w, .eps = 0}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormForward{.x = x, .w = w, .y = half, .r = r, .eps = 0}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormForward{.x = x, .w = w64, .y = y, .r = r, .eps = 0}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = w, .x = x, .w = w, .r = r, .dx = y}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = x, .x = x, .w = w, .r = r, .dx = half}), Error);
  CHECK_THROWS_AS(ops::rmsnorm(ctx, ops::RmsNormBackward{.dy = x, .x = x, .w = w, .r = r, .dw = r}), Error);
}

TEST_CASE("rmsnorm on CUDA is within rounding of the f64 reference", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const Types& types : kTypes)
    for (const Sizes& s : {Sizes{1, 1}, Sizes{1, 8}, Sizes{3, 7}, Sizes{37, 130}, Sizes{257, 1023}, Sizes{64, 4096},
                           Sizes{2000, 72}, Sizes{130, 7168}, Sizes{9, 20001}}) {
      CAPTURE(name_of(types.x), name_of(types.w), s.T, s.D);
      Bench b;
      const Problem problem(b, types, s);
      check_close(problem.on_cuda(b), problem.on_cpu_in_f64(b), types.bound);
    }
}

TEST_CASE("rmsnorm on CUDA without rows leaves dw as it was", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const Problem p(b, {DType::bf16, DType::bf16, 0}, {0, 64});
  CHECK(same_bits(p.on_cuda(b).dw, p.before));
}

TEST_CASE("rmsnorm backward on CUDA may write dx over dy", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const Problem p(b, {DType::bf16, DType::bf16, 0}, {300, 520});
  const Results apart = p.on_cuda(b);
  test::DeviceBench d;
  const Tensor dx = d.copy(p.dy), dw = d.copy(p.before);
  ops::rmsnorm(d.context(),
               ops::RmsNormBackward{.dy = dx, .x = d.copy(p.x), .w = d.copy(p.w), .r = d.copy(apart.r), .dx = dx, .dw = dw});
  CHECK(same_bits(d.to_host(b, dx), apart.dx));
  CHECK(same_bits(d.to_host(b, dw), apart.dw));
}

TEST_CASE("rmsnorm on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const Types& types : kTypes) {
    Bench b;
    const Problem p(b, types, {3001, 264});
    const Results first = p.on_cuda(b);
    for (int run = 0; run < 20; ++run) {
      CAPTURE(name_of(types.x), run);
      const Results again = p.on_cuda(b);
      CHECK(same_bits(again.y, first.y));
      CHECK(same_bits(again.r, first.r));
      CHECK(same_bits(again.dx, first.dx));
      CHECK(same_bits(again.dw, first.dw));
    }
  }
}

}  // namespace
}  // namespace moetrain
