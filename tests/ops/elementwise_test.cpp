// elementwise_test.cpp -- the streaming ops by hand, in every mix of types, and long enough for several threads.
#include "ops/elementwise.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;
const std::initializer_list<DType> kTypes = {DType::f32, DType::f64, DType::bf16};
const std::initializer_list<std::int64_t> kCounts = {0, 1, 7, 40001};

// Half a unit in the last place of the type.
double rounding_of(DType type) { return type == DType::bf16 ? 0x1p-8 : type == DType::f32 ? 0x1p-23 : 0x1p-52; }

std::vector<double> both(ConstTensor a, ConstTensor b, double (*f)(double, double)) {
  auto u = test::values_of(a);
  const auto v = test::values_of(b);
  for (std::size_t i = 0; i < u.size(); ++i) u[i] = f(u[i], v[i]);
  return u;
}

TEST_CASE("add and copy convert between any floating types", "[ops][cpu]") {
  for (const DType from : kTypes)
    for (const DType to : kTypes)
      for (const std::int64_t n : kCounts) {
        CAPTURE(name_of(from), name_of(to), n);
        Bench b;
        const Tensor x = b.normal(from, {n}), y = b.normal(to, {n}), z = b.empty(to, {n});
        const auto want = both(x, y, [](double p, double q) { return p + q; });
        ops::add(b.context(), ops::Add{.x = x, .y = y});
        ops::copy(b.context(), ops::Copy{.x = x, .y = z});
        CHECK(b.guards_hold());
        if (n == 0) continue;
        const double bound = std::max(rounding_of(to), from == DType::f64 || to == DType::f64 ? 0 : 0x1p-23);
        CHECK(test::difference(test::values_of(y), want, bound) == "");
        CHECK(test::difference(z, x, rounding_of(to)) == "");
      }
}

TEST_CASE("copy to bf16 rounds halves to even", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.of(DType::f32, {4}, {1 + 0x1p-8, 1 + 0x3p-8, 1 + 0x1p-8 + 0x1p-20, -1 - 0x3p-8}),
               y = b.empty(DType::bf16, {4});
  ops::copy(b.context(), ops::Copy{.x = x, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{1, 1 + 0x1p-6, 1 + 0x1p-7, -1 - 0x1p-6});
}

TEST_CASE("sum adds and scale multiplies, in place too", "[ops][cpu]") {
  for (const DType type : kTypes)
    for (const std::int64_t n : kCounts) {
      CAPTURE(name_of(type), n);
      Bench b;
      const Tensor p = b.normal(type, {n}), q = b.normal(type, {n}), y = b.empty(type, {n});
      const auto want = both(p, q, [](double u, double v) { return u + v; });
      const auto scaled = both(p, q, [](double, double v) { return -1.5 * v; });
      ops::sum(b.context(), ops::Sum{.a = p, .b = q, .y = y});
      ops::sum(b.context(), ops::Sum{.a = p, .b = q, .y = p});
      ops::scale(b.context(), ops::Scale{.factor = -1.5, .y = q});
      CHECK(b.guards_hold());
      if (n == 0) continue;
      CHECK(test::difference(test::values_of(y), want, rounding_of(type)) == "");
      CHECK(test::values_of(p) == test::values_of(y));
      CHECK(test::difference(test::values_of(q), scaled, rounding_of(type)) == "");
    }
}

TEST_CASE("copy_columns moves its columns and leaves the others", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::bf16, DType::i32}) {
    CAPTURE(name_of(type));
    Bench b;
    const Tensor x = b.of(type, {2, 3}, {1, 2, 3, 4, 5, 6}), y = b.of(type, {2, 4}, {10, 11, 12, 13, 14, 15, 16, 17});
    ops::copy_columns(b.context(), ops::CopyColumns{.x = x, .x_column = 1, .y = y, .y_column = 2, .width = 2});
    CHECK(test::values_of(y) == std::vector<double>{10, 11, 2, 3, 14, 15, 5, 6});
    ops::copy_columns(b.context(), ops::CopyColumns{.x = x, .x_column = 3, .y = y, .y_column = 4, .width = 0});
    CHECK(b.guards_hold());
    const auto moved = [&](std::int64_t from, std::int64_t to, std::int64_t width) {
      ops::copy_columns(b.context(), ops::CopyColumns{.x = x, .x_column = from, .y = y, .y_column = to, .width = width});
    };
    CHECK_THROWS_AS(moved(2, 0, 2), Error);
    CHECK_THROWS_AS(moved(0, 2, 3), Error);
    CHECK_THROWS_AS(moved(-1, 0, 1), Error);
  }
}

TEST_CASE("sigmoid_gate lets three quarters through at gate ln 3", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.of(DType::f64, {2}, {4, -8}), gate = b.of(DType::f64, {2}, {std::log(3.0), 0}), y = b.empty(DType::f64, {2});
  ops::sigmoid_gate(b.context(), ops::SigmoidGateForward{.x = x, .gate = gate, .y = y});
  CHECK(test::difference(test::values_of(y), {3, -4}, 1e-15) == "");
}

TEST_CASE("sigmoid_gate backward is the slope of sigmoid_gate forward", "[ops][cpu]") {
  Bench b;
  const Tensor x = b.normal(DType::f64, {3, 4}), gate = b.normal(DType::f64, {3, 4}), c = b.normal(DType::f64, {3, 4});
  const Tensor y = b.empty(DType::f64, {3, 4}), dx = b.copy(c), dgate = b.empty(DType::f64, {3, 4});  // dx aliases dy
  const auto f = [&] {
    ops::sigmoid_gate(b.context(), ops::SigmoidGateForward{.x = x, .gate = gate, .y = y});
    return test::weighted_sum(y, c);
  };
  ops::sigmoid_gate(b.context(), ops::SigmoidGateBackward{.dy = dx, .x = x, .gate = gate, .dx = dx, .dgate = dgate});
  CHECK(test::slope_difference(f, x, dx, 1e-8) == "");
  CHECK(test::slope_difference(f, gate, dgate, 1e-8) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("sigmoid_gate in f32 and bf16 is within rounding of f64 on the same operands", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t n : {std::int64_t(1), std::int64_t(20011)}) {
      CAPTURE(name_of(type), n);
      Bench b;
      const Tensor x = b.normal(type, {n}), gate = b.normal(type, {n}, 3), dy = b.normal(type, {n});
      const Tensor y = b.empty(type, {n}), dx = b.empty(type, {n}), dgate = b.empty(type, {n});
      const Tensor x64 = b.as(DType::f64, x), gate64 = b.as(DType::f64, gate), dy64 = b.as(DType::f64, dy);
      const Tensor y64 = b.empty(DType::f64, {n}), dx64 = b.empty(DType::f64, {n}), dgate64 = b.empty(DType::f64, {n});
      ops::sigmoid_gate(b.context(), ops::SigmoidGateForward{.x = x, .gate = gate, .y = y});
      ops::sigmoid_gate(b.context(), ops::SigmoidGateForward{.x = x64, .gate = gate64, .y = y64});
      ops::sigmoid_gate(b.context(), ops::SigmoidGateBackward{.dy = dy, .x = x, .gate = gate, .dx = dx, .dgate = dgate});
      ops::sigmoid_gate(b.context(), ops::SigmoidGateBackward{.dy = dy64, .x = x64, .gate = gate64, .dx = dx64, .dgate = dgate64});
      const double bound = type == DType::bf16 ? 4e-3 : 2e-6;
      CHECK(test::difference(y, y64, bound) == "");
      CHECK(test::difference(dx, dx64, bound) == "");
      CHECK(test::difference(dgate, dgate64, bound) == "");
      CHECK(b.guards_hold());
    }
}

TEST_CASE("elementwise ops refuse tensors of other sizes or types", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor x = b.normal(DType::f32, {3}), longer = b.normal(DType::f32, {4}), half = b.normal(DType::bf16, {3});
  const Tensor ids = b.zeros(DType::i32, {3});
  CHECK_THROWS_AS(ops::add(ctx, ops::Add{.x = x, .y = longer}), Error);
  CHECK_THROWS_AS(ops::add(ctx, ops::Add{.x = ids, .y = x}), Error);
  CHECK_THROWS_AS(ops::copy(ctx, ops::Copy{.x = x, .y = longer}), Error);
  CHECK_THROWS_AS(ops::sum(ctx, ops::Sum{.a = x, .b = half, .y = x}), Error);
  CHECK_THROWS_AS(ops::sum(ctx, ops::Sum{.a = x, .b = longer, .y = x}), Error);
  CHECK_THROWS_AS(ops::scale(ctx, ops::Scale{.factor = 2, .y = ids}), Error);
  CHECK_THROWS_AS(ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = x, .gate = longer, .y = x}), Error);
  CHECK_THROWS_AS(ops::sigmoid_gate(ctx, ops::SigmoidGateBackward{.dy = x, .x = x, .gate = x, .dx = x, .dgate = half}), Error);
}

// Runs op(context, tensors) on copies of `in` on the device, `off` elements past an aligned address, and gives all of them back.
template <class Op>
std::vector<Tensor> on_cuda(Bench& b, const std::vector<Tensor>& in, std::int64_t off, Op op) {
  test::DeviceBench d;
  std::vector<Tensor> there, out;
  for (const Tensor& host : in) {
    const Tensor all = d.empty(host.dtype, {host.count() + off});
    there.push_back(all.rows(off, all.count()).reshape(host.shape));
    copy_to_device(Device::cuda, there.back().data, host.data, host.bytes());
  }
  op(d.context(), there);
  CHECK(d.guards_hold());
  for (const Tensor& t : there) out.push_back(d.to_host(b, t));
  return out;
}

TEST_CASE("elementwise ops on CUDA give what the CPU gives, at any size and alignment", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType from : {DType::f32, DType::bf16})
    for (const DType to : {DType::f32, DType::bf16})
      for (const std::int64_t n : {0, 1, 7, 2048, 100003})
        for (const std::int64_t off : {0, 1}) {
          CAPTURE(name_of(from), name_of(to), n, off);
          Bench b;
          const std::vector<Tensor> in{b.normal(from, {n}), b.normal(to, {n}), b.empty(to, {n}), b.empty(to, {n}),
                                       b.normal(to, {n})};
          const auto op = [](ops::Context& ctx, const std::vector<Tensor>& t) {
            ops::copy(ctx, ops::Copy{.x = t[0], .y = t[2]});
            ops::sum(ctx, ops::Sum{.a = t[1], .b = t[4], .y = t[3]});
            ops::sum(ctx, ops::Sum{.a = t[1], .b = t[4], .y = t[4]});
            ops::add(ctx, ops::Add{.x = t[0], .y = t[1]});
            ops::scale(ctx, ops::Scale{.factor = -1.5, .y = t[2]});
          };
          const auto got = on_cuda(b, in, off, op);
          op(b.context(), in);
          for (std::size_t i = 0; i < in.size(); ++i) CHECK(test::values_of(got[i]) == test::values_of(in[i]));
        }
}

TEST_CASE("copy_columns on CUDA moves its columns and leaves the others", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Case {
    std::int64_t T, X, from, Y, to, width;
  };
  for (const DType type : {DType::f32, DType::bf16, DType::i32, DType::i64})
    for (const Case& c : {Case{2, 3, 1, 4, 2, 2}, Case{100, 256, 64, 512, 128, 128}, Case{33, 700, 1, 701, 0, 600},
                          Case{5, 8, 8, 8, 8, 0}, Case{0, 4, 0, 4, 0, 4}, Case{3, 20000, 3, 16001, 1, 16000}}) {
      CAPTURE(name_of(type), c.T, c.X, c.Y, c.width);
      Bench b;
      const std::vector<Tensor> in{b.filled(type, {c.T, c.X}, [](std::int64_t i) { return i % 251; }),
                                   b.filled(type, {c.T, c.Y}, [](std::int64_t i) { return -(i % 113); })};
      const auto op = [&](ops::Context& ctx, const std::vector<Tensor>& t) {
        ops::copy_columns(ctx, ops::CopyColumns{.x = t[0], .x_column = c.from, .y = t[1], .y_column = c.to, .width = c.width});
      };
      const auto got = on_cuda(b, in, 0, op);
      op(b.context(), in);
      CHECK(test::values_of(got[1]) == test::values_of(in[1]));
    }
}

TEST_CASE("sigmoid_gate on CUDA is within rounding of the f64 reference, in place too", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16})
    for (const std::int64_t n : {1, 4096, 20011}) {
      CAPTURE(name_of(type), n);
      Bench b;
      const std::vector<Tensor> in{b.normal(type, {n}), b.normal(type, {n}, 3), b.normal(type, {n}),
                                   b.empty(type, {n}),  b.empty(type, {n}),     b.empty(type, {n})};
      std::vector<Tensor> wide;
      for (const Tensor& t : in) wide.push_back(b.as(DType::f64, t));
      const auto apart = [](ops::Context& ctx, const std::vector<Tensor>& t) {
        ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = t[0], .gate = t[1], .y = t[3]});
        ops::sigmoid_gate(ctx, ops::SigmoidGateBackward{.dy = t[2], .x = t[0], .gate = t[1], .dx = t[4], .dgate = t[5]});
      };
      const auto in_place = [](ops::Context& ctx, const std::vector<Tensor>& t) {
        ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = t[0], .gate = t[1], .y = t[3]});
        ops::sigmoid_gate(ctx, ops::SigmoidGateBackward{.dy = t[2], .x = t[0], .gate = t[1], .dx = t[2], .dgate = t[1]});
        ops::sigmoid_gate(ctx, ops::SigmoidGateForward{.x = t[0], .gate = t[3], .y = t[0]});
      };
      const auto got = on_cuda(b, in, 0, apart), aliased = on_cuda(b, in, 0, in_place);
      apart(b.context(), wide);
      const double bound = type == DType::bf16 ? 4e-3 : 2e-6;
      for (const std::size_t i : {3, 4, 5}) CHECK(test::difference(got[i], wide[i], bound) == "");
      CHECK(test::values_of(aliased[2]) == test::values_of(got[4]));
      CHECK(test::values_of(aliased[1]) == test::values_of(got[5]));
    }
}

}  // namespace
}  // namespace moetrain
