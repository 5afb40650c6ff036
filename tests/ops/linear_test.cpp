// linear_test.cpp -- linear by hand, as slope, in every mix of types on both backends, and where its blocks and threads begin.
#include "ops/linear.h"

#include <cmath>
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
  DType x, w, y;
  double bound;
};
const std::initializer_list<Types> kMixes = {{DType::f32, DType::f32, DType::f32, 2e-5},
                                             {DType::bf16, DType::bf16, DType::bf16, 8e-3},
                                             {DType::bf16, DType::bf16, DType::f32, 2e-5},
                                             {DType::bf16, DType::f32, DType::f32, 2e-5}};
struct Sizes {
  std::int64_t T, I, O;
};
const std::initializer_list<Sizes> kSizes = {{1, 1, 1}, {3, 7, 5}, {129, 33, 65}, {1100, 3, 1030}, {70, 5000, 300}};

TEST_CASE("linear multiplies rows of x with rows of w", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.of(DType::f64, {2, 2}, {1, 2, 3, 4}), w = b.of(DType::f64, {3, 2}, {1, 0, 0, 1, 2, -1});
  const Tensor y = b.empty(DType::f64, {2, 3});
  ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y});
  CHECK(test::difference(test::values_of(y), {1, 2, 0, 3, 4, 2}, 1e-15) == "");
  ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y, .add = true});
  CHECK(test::difference(test::values_of(y), {2, 4, 0, 6, 8, 4}, 1e-15) == "");

  const Tensor dy = b.of(DType::f64, {2, 3}, {1, 0, 1, 0, 1, 0});
  const Tensor dx = b.empty(DType::f64, {2, 2}), dw = b.of(DType::f64, {3, 2}, {10, 10, 10, 10, 10, 10});
  ops::linear(b.context(), ops::LinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw});
  CHECK(test::difference(test::values_of(dx), {3, -1, 0, 1}, 1e-15) == "");
  CHECK(test::difference(test::values_of(dw), {11, 12, 13, 14, 11, 12}, 1e-15) == "");
  ops::linear(b.context(), ops::LinearBackward{.dy = dy, .w = w, .dx = dx, .add_dx = true});
  CHECK(test::difference(test::values_of(dx), {6, -2, 0, 2}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("linear backward is the slope of linear forward", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.normal(DType::f64, {5, 3}), w = b.normal(DType::f64, {4, 3}), c = b.normal(DType::f64, {5, 4});
  const Tensor y = b.empty(DType::f64, {5, 4}), dx = b.empty(DType::f64, {5, 3}), dw = b.zeros(DType::f64, {4, 3});
  const auto f = [&] {
    ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y});
    return test::weighted_sum(y, c);
  };
  ops::linear(b.context(), ops::LinearBackward{.dy = c, .x = x, .w = w, .dx = dx, .dw = dw});
  CHECK(test::slope_difference(f, x, dx, 1e-9) == "");
  CHECK(test::slope_difference(f, w, dw, 1e-9) == "");
}

TEST_CASE("linear of any mix of types is within rounding of f64 on the same operands", "[ops][cpu]") {
  for (const Types& types : kMixes)
    for (const Sizes& s : kSizes) {
      CAPTURE(name_of(types.x), name_of(types.w), name_of(types.y), s.T, s.I, s.O);
      Bench b;
      const Tensor x = b.normal(types.x, {s.T, s.I}), w = b.normal(types.w, {s.O, s.I}), dy = b.normal(types.y, {s.T, s.O});
      const Tensor before_y = b.normal(types.y, {s.T, s.O}), before_dx = b.normal(types.x, {s.T, s.I});
      const Tensor before_dw = b.normal(DType::f32, {s.O, s.I});
      const auto wide = [&](ConstTensor t) { return b.as(DType::f64, t); };
      for (const bool adds : {false, true}) {
        const Tensor y = adds ? b.copy(before_y) : b.empty(types.y, {s.T, s.O}), y64 = wide(before_y);
        ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y, .add = adds});
        ops::linear(b.context(), ops::LinearForward{.x = wide(x), .w = wide(w), .y = y64, .add = adds});
        CHECK(test::difference(y, y64, types.bound) == "");
        const Tensor dx = adds ? b.copy(before_dx) : b.empty(types.x, {s.T, s.I}), dx64 = wide(before_dx);
        const Tensor dw = b.copy(before_dw), dw64 = wide(before_dw);
        ops::linear(b.context(), ops::LinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .add_dx = adds});
        ops::linear(b.context(),
                    ops::LinearBackward{.dy = wide(dy), .x = wide(x), .w = wide(w), .dx = dx64, .dw = dw64, .add_dx = adds});
        CHECK(test::difference(dx, dx64, types.x == DType::bf16 ? 8e-3 : 2e-5) == "");
        CHECK(test::difference(dw, dw64, 2e-5) == "");
      }
      CHECK(b.guards_hold());
    }
}

TEST_CASE("linear without rows adds nothing to dw and without outputs makes dx zero", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    Bench b;
    const Tensor x = b.empty(type, {0, 3}), w = b.normal(type, {2, 3}), y = b.empty(type, {0, 2}), dx = b.empty(type, {0, 3});
    const Tensor dw = b.of(real_of(type), {2, 3}, {1, 2, 3, 4, 5, 6});
    ops::linear(b.context(), ops::LinearForward{.x = x, .w = w, .y = y});
    ops::linear(b.context(), ops::LinearBackward{.dy = y, .x = x, .w = w, .dx = dx, .dw = dw});
    CHECK(test::difference(test::values_of(dw), {1, 2, 3, 4, 5, 6}, 1e-15) == "");
    const Tensor dx4 = b.empty(type, {4, 3});
    ops::linear(b.context(), ops::LinearBackward{.dy = b.empty(type, {4, 0}), .w = b.empty(type, {0, 3}), .dx = dx4});
    CHECK(test::difference(test::values_of(dx4), std::vector<double>(12, 0.0), 0, 1e-300) == "");
    CHECK(b.guards_hold());
  }
}

TEST_CASE("linear refuses operands that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor x = b.normal(DType::f32, {2, 3}), w = b.normal(DType::f32, {4, 3}), y = b.normal(DType::f32, {2, 4});
  const Tensor wide = b.normal(DType::f64, {2, 4}), dw = b.zeros(DType::bf16, {4, 3});
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearForward{.x = y, .w = w, .y = y}), Error);
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearForward{.x = x, .w = w, .y = x}), Error);
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearForward{.x = x, .w = w, .y = wide}), Error);
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearBackward{.dy = y, .w = w, .dx = y}), Error);
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearBackward{.dy = y, .dx = x}), Error);
  CHECK_THROWS_AS(ops::linear(ctx, ops::LinearBackward{.dy = y, .x = x, .dw = dw}), Error);
}

// What forward and backward of one problem give; y, dx and dw start from values, so that what adds and what writes is told apart.
struct Results {
  Tensor y, dx, dw;
};
struct Problem {
  Tensor x, w, dy, y, dx, dw;
  Problem(Bench& b, Types types, Sizes s)
      : x(b.normal(types.x, {s.T, s.I})),
        w(b.normal(types.w, {s.O, s.I})),
        dy(b.normal(types.y, {s.T, s.O})),
        y(b.normal(types.y, {s.T, s.O})),
        dx(b.normal(types.x, {s.T, s.I})),
        dw(b.normal(DType::f32, {s.O, s.I})) {}
  static void run(ops::Context& ctx, const Problem& p, const Results& out, bool adds) {
    ops::linear(ctx, ops::LinearForward{.x = p.x, .w = p.w, .y = out.y, .add = adds});
    ops::linear(ctx, ops::LinearBackward{.dy = p.dy, .x = p.x, .w = p.w, .dx = out.dx, .dw = out.dw, .add_dx = adds});
  }
  Results on_cpu_in_f64(Bench& b, bool adds) const {
    Problem p = *this;
    for (Tensor* t : {&p.x, &p.w, &p.dy, &p.y, &p.dx, &p.dw}) *t = b.as(DType::f64, *t);
    const Results out{p.y, p.dx, p.dw};
    run(b.context(), p, out, adds);
    return out;
  }
  Results on_cuda(Bench& b, bool adds) const {
    test::DeviceBench d;
    Problem p = *this;
    for (Tensor* t : {&p.x, &p.w, &p.dy, &p.dw}) *t = d.copy(*t);
    const Results out{adds ? d.copy(y) : d.empty(y.dtype, y.shape), adds ? d.copy(dx) : d.empty(dx.dtype, dx.shape), p.dw};
    run(d.context(), p, out, adds);
    const Results host{d.to_host(b, out.y), d.to_host(b, out.dx), d.to_host(b, out.dw)};
    CHECK(d.guards_hold());
    return host;
  }
};

bool same_bits(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

constexpr double kRealBound = 1e-4;  // of sums of thousands of terms in f32, in the order and rounding of the matrix units
const std::initializer_list<Types> kAllMixes = {
    {DType::f32, DType::f32, DType::f32, kRealBound},   {DType::f32, DType::f32, DType::bf16, 1e-2},
    {DType::f32, DType::bf16, DType::f32, kRealBound},  {DType::f32, DType::bf16, DType::bf16, 1e-2},
    {DType::bf16, DType::f32, DType::f32, kRealBound},  {DType::bf16, DType::f32, DType::bf16, 1e-2},
    {DType::bf16, DType::bf16, DType::f32, kRealBound}, {DType::bf16, DType::bf16, DType::bf16, 1e-2}};

TEST_CASE("linear on CUDA of any mix of types is within rounding of f64 on the same operands", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const Types& types : kAllMixes)
    for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{3, 7, 5}, Sizes{129, 33, 65}, Sizes{40, 1000, 136}, Sizes{264, 136, 72}})
      for (const bool adds : {false, true}) {
        CAPTURE(name_of(types.x), name_of(types.w), name_of(types.y), s.T, s.I, s.O, adds);
        Bench b;
        const Problem p(b, types, s);
        const Results got = p.on_cuda(b, adds), want = p.on_cpu_in_f64(b, adds);
        CHECK(test::difference(got.y, want.y, types.bound) == "");
        CHECK(test::difference(got.dx, want.dx, types.x == DType::bf16 ? 1e-2 : kRealBound) == "");
        CHECK(test::difference(got.dw, want.dw, kRealBound) == "");
      }
}

TEST_CASE("linear on CUDA of an f32 operand beside a bf16 one keeps all bits of the f32 one", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const double fine = 1 + std::ldexp(1.0, -12) + std::ldexp(1.0, -23);
  const Tensor x = b.of(DType::bf16, {1, 2}, {1, -1}), w = b.of(DType::f32, {1, 2}, {fine, 1});
  test::DeviceBench d;
  const Tensor y = d.empty(DType::f32, {1, 1});
  ops::linear(d.context(), ops::LinearForward{.x = d.copy(x), .w = d.copy(w), .y = y});
  CHECK(test::values_of(d.to_host(b, y)) == std::vector<double>{fine - 1});
}

TEST_CASE("linear on CUDA takes rows that begin at any element", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16}) {
    Bench b;
    const Tensor x = b.normal(type, {6, 5}), w = b.normal(type, {4, 5}), y64 = b.empty(DType::f64, {5, 3});
    ops::linear(b.context(),
                ops::LinearForward{.x = b.as(DType::f64, x.rows(1, 6)), .w = b.as(DType::f64, w.rows(1, 4)), .y = y64});
    test::DeviceBench d;
    const Tensor y = d.empty(type, {6, 3});
    ops::linear(d.context(), ops::LinearForward{.x = d.copy(x).rows(1, 6), .w = d.copy(w).rows(1, 4), .y = y.rows(1, 6)});
    CHECK(test::difference(d.to_host(b, y.rows(1, 6)), y64, 1e-2) == "");
    CHECK(d.guards_hold());
  }
}

TEST_CASE("linear that writes dw gives what it adds to zeros, whatever dw held", "[ops][cpu]") {
  for (const std::int64_t T : {0, 70}) {
    Bench b;
    const Tensor x = b.normal(DType::bf16, {T, 33}), dy = b.normal(DType::f32, {T, 17});
    const Tensor dw = b.empty(DType::f32, {17, 33}), added = b.zeros(DType::f32, {17, 33});
    ops::linear(b.context(), ops::LinearBackward{.dy = dy, .x = x, .dw = dw, .write_dw = true});
    ops::linear(b.context(), ops::LinearBackward{.dy = dy, .x = x, .dw = added});
    CHECK(same_bits(dw, added));
  }
}

TEST_CASE("linear on CUDA that writes dw gives what it adds to zeros, whatever dw held", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const auto& [T, type] : {std::pair<std::int64_t, DType>{0, DType::bf16}, {70, DType::bf16}, {70, DType::f32}}) {
    Bench b;
    test::DeviceBench d;
    const Tensor x = d.copy(b.normal(DType::bf16, {T, 40})), dy = d.copy(b.normal(type, {T, 24}));
    const Tensor dw = d.empty(DType::f32, {24, 40}), added = d.copy(b.zeros(DType::f32, {24, 40}));
    ops::linear(d.context(), ops::LinearBackward{.dy = dy, .x = x, .dw = dw, .write_dw = true});
    ops::linear(d.context(), ops::LinearBackward{.dy = dy, .x = x, .dw = added});
    CHECK(test::difference(d.to_host(b, dw), d.to_host(b, added), 1e-6, T == 0 ? 1e-300 : 0) == "");
    CHECK(d.guards_hold());
  }
}

TEST_CASE("linear on CUDA without rows adds nothing to dw and without outputs makes dx zero", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16}) {
    Bench b;
    const Problem p(b, {type, type, type, 0}, {0, 3, 2});
    CHECK(same_bits(p.on_cuda(b, false).dw, p.dw));
    test::DeviceBench d;
    const Tensor dx = d.empty(type, {4, 3});
    ops::linear(d.context(), ops::LinearBackward{.dy = d.empty(type, {4, 0}), .w = d.empty(type, {0, 3}), .dx = dx});
    CHECK(test::values_of(d.to_host(b, dx)) == std::vector<double>(12, 0.0));
  }
}

TEST_CASE("linear on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const Types& types : kMixes) {
    Bench b;
    const Problem p(b, types, {2040, 520, 264});
    const Results first = p.on_cuda(b, true);
    for (int run = 0; run < 20; ++run) {
      CAPTURE(name_of(types.x), name_of(types.w), name_of(types.y), run);
      const Results again = p.on_cuda(b, true);
      CHECK(same_bits(again.y, first.y));
      CHECK(same_bits(again.dx, first.dx));
      CHECK(same_bits(again.dw, first.dw));
    }
  }
}

}  // namespace
}  // namespace moetrain
