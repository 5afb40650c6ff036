// grouped_linear_test.cpp -- every group is multiplied by its own matrix, and by no other.
#include "ops/grouped_linear.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;
using Offsets = std::vector<std::int64_t>;

TEST_CASE("grouped_linear gives each row the matrix of its group", "[ops][cpu]") {
  Bench b;
  const Offsets offsets{0, 1, 1, 3};  // the middle group is empty
  const Tensor x = b.of(DType::f64, {3, 1}, {1, 2, 3}), w = b.of(DType::f64, {3, 2, 1}, {1, 10, 2, 20, 3, 30});
  const Tensor y = b.empty(DType::f64, {3, 2});
  ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = offsets});
  CHECK(test::difference(test::values_of(y), {1, 10, 6, 60, 9, 90}, 1e-15) == "");

  const Tensor dy = b.of(DType::f64, {3, 2}, {1, 0, 0, 1, 1, 0});
  const Tensor dx = b.empty(DType::f64, {3, 1}), dw = b.of(DType::f64, {3, 2, 1}, {5, 5, 5, 5, 5, 5});
  ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .offsets = offsets});
  CHECK(test::difference(test::values_of(dx), {1, 30, 3}, 1e-15) == "");
  CHECK(test::difference(test::values_of(dw), {6, 5, 5, 5, 8, 7}, 1e-15) == "");
  ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = dy, .w = w, .dx = dx, .offsets = offsets, .add_dx = true});
  CHECK(test::difference(test::values_of(dx), {2, 60, 6}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("grouped_linear backward is the slope of grouped_linear forward", "[ops][cpu]") {
  Bench b;
  const Offsets offsets{0, 2, 2, 5, 6};
  const Tensor x = b.normal(DType::f64, {6, 3}), w = b.normal(DType::f64, {4, 2, 3}), c = b.normal(DType::f64, {6, 2});
  const Tensor y = b.empty(DType::f64, {6, 2}), dx = b.empty(DType::f64, {6, 3}), dw = b.zeros(DType::f64, {4, 2, 3});
  const auto f = [&] {
    ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = offsets});
    return test::weighted_sum(y, c);
  };
  ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = c, .x = x, .w = w, .dx = dx, .dw = dw, .offsets = offsets});
  CHECK(test::slope_difference(f, x, dx, 1e-9) == "");
  CHECK(test::slope_difference(f, w, dw, 1e-9) == "");
}

TEST_CASE("grouped_linear in f32 and bf16 is within rounding of f64 on the same operands", "[ops][cpu]") {
  struct Case {
    Offsets offsets;
    std::int64_t I, O;
  };
  // side by side; one after another on all threads; one group; a single element
  for (const Case& s : {Case{{0, 5, 5, 12, 40, 41}, 33, 17}, Case{{0, 300, 620}, 300, 250}, Case{{0, 9}, 5, 3}, Case{{0, 1}, 1, 1}})
    for (const DType type : {DType::f32, DType::bf16}) {
      CAPTURE(name_of(type), s.offsets.size(), s.I, s.O);
      Bench b;
      const std::int64_t R = s.offsets.back(), e = std::int64_t(s.offsets.size()) - 1;
      const Tensor x = b.normal(type, {R, s.I}), w = b.normal(type, {e, s.O, s.I}), dy = b.normal(type, {R, s.O});
      const auto wide = [&](ConstTensor t) { return b.as(DType::f64, t); };
      const Tensor y = b.empty(type, {R, s.O}), y64 = b.empty(DType::f64, {R, s.O});
      ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = s.offsets});
      ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = wide(x), .w = wide(w), .y = y64, .offsets = s.offsets});
      CHECK(test::difference(y, y64, type == DType::bf16 ? 8e-3 : 2e-5) == "");
      const Tensor dx = b.empty(type, {R, s.I}), dx64 = b.empty(DType::f64, {R, s.I});
      const Tensor dw = b.normal(DType::f32, {e, s.O, s.I}), dw64 = wide(dw);
      ops::grouped_linear(b.context(),
                          ops::GroupedLinearBackward{.dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .offsets = s.offsets});
      ops::grouped_linear(
          b.context(),
          ops::GroupedLinearBackward{.dy = wide(dy), .x = wide(x), .w = wide(w), .dx = dx64, .dw = dw64, .offsets = s.offsets});
      CHECK(test::difference(dx, dx64, type == DType::bf16 ? 8e-3 : 2e-5) == "");
      CHECK(test::difference(dw, dw64, 2e-5) == "");
      CHECK(b.guards_hold());
    }
}

TEST_CASE("grouped_linear without rows leaves dw as it was", "[ops][cpu]") {
  Bench b;
  const Offsets offsets{0, 0, 0};
  const Tensor x = b.empty(DType::f32, {0, 2}), w = b.normal(DType::f32, {2, 1, 2}), y = b.empty(DType::f32, {0, 1});
  const Tensor dw = b.of(DType::f32, {2, 1, 2}, {1, 2, 3, 4});
  ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = offsets});
  ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = y, .x = x, .dw = dw, .offsets = offsets});
  CHECK(test::difference(test::values_of(dw), {1, 2, 3, 4}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("grouped_linear refuses offsets that do not cut the rows", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor x = b.normal(DType::f32, {3, 2}), w = b.normal(DType::f32, {2, 4, 2}), y = b.empty(DType::f32, {3, 4});
  for (const Offsets& offsets : {Offsets{0, 3}, Offsets{0, 1, 2}, Offsets{1, 2, 3}, Offsets{0, 4, 3}, Offsets{}}) {
    CAPTURE(offsets.size());
    CHECK_THROWS_AS(ops::grouped_linear(ctx, ops::GroupedLinearForward{.x = x, .w = w, .y = y, .offsets = offsets}), Error);
  }
  const Offsets good{0, 1, 3};
  CHECK_THROWS_AS(ops::grouped_linear(ctx, ops::GroupedLinearForward{.x = x, .w = w, .y = x, .offsets = good}), Error);
  CHECK_THROWS_AS(ops::grouped_linear(ctx, ops::GroupedLinearBackward{.dy = y, .w = w, .dx = y, .offsets = good}), Error);
}

}  // namespace
}  // namespace moetrain
