// linear_test.cpp -- linear by hand, as slope, in every mix of types, and where its blocks and threads begin.
#include "ops/linear.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
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

}  // namespace
}  // namespace moetrain
