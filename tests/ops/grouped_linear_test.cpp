// grouped_linear_test.cpp -- every group is multiplied by its own matrix, and by no other.
#include "ops/grouped_linear.h"

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
  CHECK(b.guards_hold());
}

TEST_CASE("grouped_linear of two matrices gives two y and two dw, and the sum of both dx", "[ops][cpu]") {
  Bench b;
  const Offsets offsets{0, 1, 2};
  const Tensor x = b.of(DType::f64, {2, 1}, {1, 2}), w = b.of(DType::f64, {2, 1, 1}, {3, 4}),
               w2 = b.of(DType::f64, {2, 1, 1}, {5, 6});
  const Tensor y = b.empty(DType::f64, {2, 1}), y2 = b.empty(DType::f64, {2, 1});
  ops::grouped_linear(b.context(), ops::GroupedLinearForward{.x = x, .w = w, .y = y, .w2 = w2, .y2 = y2, .offsets = offsets});
  CHECK(test::difference(test::values_of(y), {3, 8}, 1e-15) == "");
  CHECK(test::difference(test::values_of(y2), {5, 12}, 1e-15) == "");

  const Tensor dy = b.of(DType::f64, {2, 1}, {10, 1}), dy2 = b.of(DType::f64, {2, 1}, {1, 10}), dx = b.empty(DType::f64, {2, 1}),
               dw = b.of(DType::f64, {2, 1, 1}, {7, 7}), dw2 = b.of(DType::f64, {2, 1, 1}, {8, 8});
  ops::grouped_linear(b.context(),
                      ops::GroupedLinearBackward{
                          .dy = dy, .x = x, .w = w, .dx = dx, .dw = dw, .dy2 = dy2, .w2 = w2, .dw2 = dw2, .offsets = offsets});
  CHECK(test::difference(test::values_of(dx), {35, 64}, 1e-15) == "");
  CHECK(test::difference(test::values_of(dw), {17, 9}, 1e-15) == "");
  CHECK(test::difference(test::values_of(dw2), {9, 28}, 1e-15) == "");
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
  const Tensor dx = b.empty(DType::f32, {3, 2}), narrow = b.normal(DType::f32, {2, 3, 2});
  CHECK_THROWS_AS(
      ops::grouped_linear(ctx, ops::GroupedLinearForward{.x = x, .w = w, .y = y, .w2 = narrow, .y2 = y, .offsets = good}), Error);
  CHECK_THROWS_AS(ops::grouped_linear(ctx, ops::GroupedLinearForward{.x = x, .w = w, .y = y, .w2 = w, .offsets = good}), Error);
  CHECK_THROWS_AS(ops::grouped_linear(ctx, ops::GroupedLinearBackward{.dy = y, .w = w, .dx = dx, .dy2 = y, .offsets = good}),
                  Error);
}

enum class Matrices : std::uint8_t { one, two };

struct GroupedResults {
  Tensor y, dx, dw, y2, dw2;
};
struct Grouped {
  Offsets offsets;
  Tensor x, w, dy, dw, w2, dy2, dw2;  // dw as they were before: they add
  Grouped(Bench& b, DType type, DType y_type, Offsets bounds, std::int64_t I, std::int64_t O, Matrices matrices = Matrices::one)
      : offsets(std::move(bounds)),
        x(b.normal(type, {offsets.back(), I})),
        w(b.normal(type, {std::int64_t(offsets.size()) - 1, O, I})),
        dy(b.normal(y_type, {offsets.back(), O})),
        dw(b.normal(DType::f32, w.shape)) {
    if (matrices == Matrices::one) return;
    w2 = b.normal(type, w.shape), dy2 = b.normal(y_type, dy.shape), dw2 = b.normal(DType::f32, w.shape);
  }
  GroupedResults on_cpu_in_f64(Bench& b) const {
    const auto wide = [&](ConstTensor t) { return t.present() ? b.as(DType::f64, t) : Tensor{}; };
    const auto empty_y = [&](ConstTensor t) { return t.present() ? b.empty(DType::f64, t.shape) : Tensor{}; };
    const GroupedResults out{empty_y(dy), b.empty(DType::f64, x.shape), wide(dw), empty_y(dy2), wide(dw2)};
    const Tensor x64 = wide(x), w64 = wide(w), w264 = wide(w2);
    ops::grouped_linear(b.context(),
                        ops::GroupedLinearForward{.x = x64, .w = w64, .y = out.y, .w2 = w264, .y2 = out.y2, .offsets = offsets});
    ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = wide(dy),
                                                                .x = x64,
                                                                .w = w64,
                                                                .dx = out.dx,
                                                                .dw = out.dw,
                                                                .dy2 = wide(dy2),
                                                                .w2 = w264,
                                                                .dw2 = out.dw2,
                                                                .offsets = offsets});
    return out;
  }
  GroupedResults on_cuda(Bench& b, bool offsets_on_host) const {
    test::DeviceBench d;
    const std::span<const std::int64_t> host_offsets(offsets.data(), offsets_on_host ? offsets.size() : 0);
    const ConstTensor given = offsets_on_host ? ConstTensor{} : d.documents(offsets).on_device;
    const auto copy = [&](ConstTensor t) { return t.present() ? d.copy(t) : Tensor{}; };
    const auto empty_as = [&](ConstTensor t) { return t.present() ? d.empty(t.dtype, t.shape) : Tensor{}; };
    const auto to_host = [&](ConstTensor t) { return t.present() ? d.to_host(b, t) : Tensor{}; };
    const Tensor xs = d.copy(x), ws = d.copy(w), w2s = copy(w2);
    const GroupedResults out{empty_as(dy), empty_as(x), d.copy(dw), empty_as(dy2), copy(dw2)};
    ops::grouped_linear(
        d.context(), ops::GroupedLinearForward{
                         .x = xs, .w = ws, .y = out.y, .w2 = w2s, .y2 = out.y2, .offsets = host_offsets, .device_offsets = given});
    ops::grouped_linear(d.context(), ops::GroupedLinearBackward{.dy = d.copy(dy),
                                                                .x = xs,
                                                                .w = ws,
                                                                .dx = out.dx,
                                                                .dw = out.dw,
                                                                .dy2 = copy(dy2),
                                                                .w2 = w2s,
                                                                .dw2 = out.dw2,
                                                                .offsets = host_offsets,
                                                                .device_offsets = given});
    const GroupedResults host{to_host(out.y), to_host(out.dx), to_host(out.dw), to_host(out.y2), to_host(out.dw2)};
    CHECK(d.guards_hold());
    return host;
  }
};

bool same_bits(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && (a.bytes() == 0 || std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0);
}

void check_same_bits(const GroupedResults& a, const GroupedResults& b) {
  CHECK(same_bits(a.y, b.y));
  CHECK(same_bits(a.dx, b.dx));
  CHECK(same_bits(a.dw, b.dw));
  CHECK(same_bits(a.y2, b.y2));
  CHECK(same_bits(a.dw2, b.dw2));
}

// Groups of the given numbers of rows.
Offsets groups_of(std::initializer_list<std::int64_t> rows) {
  Offsets offsets{0};
  for (const std::int64_t r : rows) offsets.push_back(offsets.back() + r);
  return offsets;
}

struct CudaCase {
  Offsets offsets;
  std::int64_t I, O;
};
// odd widths; widths that the tensor cores take with parts of tiles in every direction; groups of none, one, and several tiles
const std::initializer_list<CudaCase> kCudaCases = {
    {groups_of({1}), 1, 1},       {groups_of({5, 0, 7, 28, 1}), 33, 17},      {groups_of({0, 3, 0, 0, 17, 64, 65, 0}), 64, 128},
    {groups_of({1}), 8, 8},       {groups_of({31, 0, 129, 32, 33}), 72, 200}, {groups_of({300, 1, 0, 255, 256, 257}), 136, 328},
    {groups_of({520}), 264, 600}, {groups_of({770, 40, 768}), 72, 136},  // groups of many whole tiles: the part after them comes
                                                                         // late
};

void check_close(const GroupedResults& got, const GroupedResults& want) {
  CHECK(test::difference(got.y, want.y, got.y.dtype == DType::bf16 ? 1e-2 : 1e-4) == "");
  CHECK(test::difference(got.dx, want.dx, got.dx.dtype == DType::bf16 ? 1e-2 : 1e-4) == "");
  CHECK(test::difference(got.dw, want.dw, 1e-4) == "");
  if (!want.y2.present()) return;
  CHECK(test::difference(got.y2, want.y2, got.y2.dtype == DType::bf16 ? 1e-2 : 1e-4) == "");
  CHECK(test::difference(got.dw2, want.dw2, 1e-4) == "");
}

TEST_CASE("grouped_linear on CUDA is within rounding of f64 on the same operands", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const auto& [type, y_type] :
       {std::pair(DType::f32, DType::f32), std::pair(DType::bf16, DType::bf16), std::pair(DType::bf16, DType::f32)})
    for (const CudaCase& c : kCudaCases)
      for (const Matrices matrices : {Matrices::one, Matrices::two}) {
        CAPTURE(name_of(type), name_of(y_type), c.offsets.size(), c.offsets.back(), c.I, c.O, int(matrices));
        Bench b;
        const Grouped p(b, type, y_type, c.offsets, c.I, c.O, matrices);
        const GroupedResults got = p.on_cuda(b, false);
        check_close(got, p.on_cpu_in_f64(b));
        check_same_bits(got, p.on_cuda(b, true));
      }
}

TEST_CASE("grouped_linear on CUDA takes as many groups as there are experts, most of them small", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Offsets offsets{0};
  for (std::int64_t g = 0; g < 896; ++g) offsets.push_back(offsets.back() + g * g % 7);
  for (const bool offsets_on_host : {false, true}) {
    Bench b;
    const Grouped p(b, DType::bf16, DType::bf16, offsets, 64, 40);
    check_close(p.on_cuda(b, offsets_on_host), p.on_cpu_in_f64(b));
  }
}

TEST_CASE("grouped_linear on CUDA keeps what is not finite inside its group", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const std::int64_t I = 64, O = 136;
  const Grouped p(b, DType::bf16, DType::bf16, groups_of({100, 3, 70}), I, O);
  for (std::int64_t r = 100; r < 103; ++r) {  // the middle group
    for (std::int64_t i = 0; i < I; ++i) Bench::set(p.x, r * I + i, std::nan(""));
    for (std::int64_t o = 0; o < O; ++o) Bench::set(p.dy, r * O + o, std::nan(""));
  }
  const GroupedResults got = p.on_cuda(b, false);
  const auto nans = [](ConstTensor t, std::int64_t from, std::int64_t to) {
    std::int64_t count = 0;
    for (std::int64_t i = from; i < to; ++i) count += std::isnan(Bench::get(t, i));
    return count;
  };
  CHECK(nans(got.y, 0, 173 * O) == 3 * O);
  CHECK(nans(got.y, 100 * O, 103 * O) == 3 * O);
  CHECK(nans(got.dx, 0, 173 * I) == 3 * I);
  CHECK(nans(got.dx, 100 * I, 103 * I) == 3 * I);
  CHECK(nans(got.dw, 0, 3 * O * I) == O * I);
  CHECK(nans(got.dw, O * I, 2 * O * I) == O * I);
}

TEST_CASE("grouped_linear that writes dw gives what it adds to zeros, and zeros to empty groups", "[ops][cpu]") {
  Bench b;
  const Grouped p(b, DType::bf16, DType::bf16, groups_of({0, 40, 0, 7}), 24, 16);
  const Tensor dw = b.empty(DType::f32, p.dw.shape), added = b.zeros(DType::f32, p.dw.shape);
  ops::grouped_linear(b.context(),
                      ops::GroupedLinearBackward{.dy = p.dy, .x = p.x, .dw = dw, .offsets = p.offsets, .write_dw = true});
  ops::grouped_linear(b.context(), ops::GroupedLinearBackward{.dy = p.dy, .x = p.x, .dw = added, .offsets = p.offsets});
  CHECK(same_bits(dw, added));
}

TEST_CASE("grouped_linear on CUDA that writes dw gives what it adds to zeros, and zeros to empty groups", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::bf16, DType::f32})
    for (const Offsets& offsets : {groups_of({0, 70, 0, 0, 300, 64, 1, 0}), groups_of({0, 0})}) {
      CAPTURE(name_of(type), offsets.back());
      Bench b;
      test::DeviceBench d;
      const Grouped p(b, type, type, offsets, 328, 264);
      const Tensor x = d.copy(p.x), dy = d.copy(p.dy), dw = d.empty(DType::f32, p.dw.shape);
      const Tensor added = d.copy(b.zeros(DType::f32, p.dw.shape));
      const ConstTensor there = d.documents(offsets).on_device;
      ops::grouped_linear(d.context(), ops::GroupedLinearBackward{
                                           .dy = dy, .x = x, .dw = dw, .offsets = {}, .device_offsets = there, .write_dw = true});
      ops::grouped_linear(d.context(),
                          ops::GroupedLinearBackward{.dy = dy, .x = x, .dw = added, .offsets = {}, .device_offsets = there});
      CHECK(test::values_of(d.to_host(b, dw)) == test::values_of(d.to_host(b, added)));
      CHECK(d.guards_hold());
    }
}

TEST_CASE("grouped_linear on CUDA without rows leaves dw as it was", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const Grouped p(b, DType::bf16, DType::bf16, groups_of({0, 0}), 64, 128);
  CHECK(same_bits(p.on_cuda(b, false).dw, p.dw));
}

TEST_CASE("grouped_linear on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16}) {
    Bench b;
    const Grouped p(b, type, type, groups_of({700, 0, 1300, 90, 5, 411}), 264, 520, Matrices::two);
    const GroupedResults first = p.on_cuda(b, false);
    for (int run = 0; run < 20; ++run) {
      CAPTURE(name_of(type), run);
      check_same_bits(p.on_cuda(b, false), first);
    }
  }
}

}  // namespace
}  // namespace moetrain
