// short_conv_test.cpp -- the convolution is causal, stays inside its document, and its gradients are its slopes.
#include "ops/short_conv.h"

#include <omp.h>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

using Starts = std::vector<std::int64_t>;

struct Gradients {
  Tensor du, dw;
};

Tensor forward(Bench& bench, Tensor u, Tensor w, const Starts& starts) {
  const Tensor y = bench.empty(u.dtype, u.shape);
  ops::short_conv(bench.context(), ops::ShortConvForward{.u = u, .w = w, .y = y, .documents = {starts}});
  return y;
}
Gradients backward(Bench& bench, Tensor dy, Tensor u, Tensor w, const Starts& starts) {
  const Gradients g{bench.empty(u.dtype, u.shape), bench.zeros(w.dtype, w.shape)};
  ops::short_conv(bench.context(), ops::ShortConvBackward{.dy = dy, .u = u, .w = w, .du = g.du, .dw = g.dw, .documents = {starts}});
  return g;
}
bool same_bytes(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

}  // namespace

TEST_CASE("short_conv gives silu of taps times history, worked by hand", "[ops][cpu]") {
  // k = 3, taps (1, 2, 3): the last multiplies the current token. Documents (1, 4) and (-2).
  Bench bench;
  const Tensor u = bench.of(DType::f64, {3, 1}, {1, 4, -2}), w = bench.of(DType::f64, {1, 1, 3}, {1, 2, 3});
  const auto silu = [](double c) { return c / (1 + std::exp(-c)); };
  CHECK(difference(values_of(forward(bench, u, w, {0, 2, 3})), {silu(3), silu(14), silu(-6)}, 1e-14) == "");
  CHECK(difference(values_of(forward(bench, u, w, {0, 3})), {silu(3), silu(14), silu(1 + 8 - 6)}, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("short_conv goes on from the history of a document that entered, worked by hand, and its slope goes back", "[ops][cpu]") {
  // k = 3, taps (1, 2, 3). Of three documents the first (4) entered slice 0 after (5, 1), the second (7) begins here.
  Bench bench;
  const Starts starts{0, 1, 2};
  const std::vector<ops::Documents::Piece> pieces{{.before = 6, .first_key = 0, .enters = 0, .leaves = -1}, {.before = 0, .first_key = 6}};
  const ops::Documents documents{.starts = starts, .on_device = {}, .pieces = pieces, .slices = 2};
  const Tensor u = bench.of(DType::f64, {2, 1}, {4, 7}), w = bench.of(DType::f64, {1, 1, 3}, {1, 2, 3}),
               history = bench.of(DType::f64, {2, 2, 1}, {5, 1, 100, 100}), y = bench.empty(DType::f64, u.shape);
  const auto silu = [](double c) { return c / (1 + std::exp(-c)); };
  const ops::ShortConvForward forward{.u = u, .w = w, .y = y, .documents = documents, .history = history};
  ops::short_conv(bench.context(), forward);
  CHECK(difference(values_of(y), {silu(5 + 2 + 12), silu(21)}, 1e-14) == "");

  for (const Tensor& t : {u, history}) Bench::set(t, 0, -1.5);
  Bench::set(u, 1, 0.1);
  const Tensor dy = bench.normal(DType::f64, u.shape), du = bench.empty(DType::f64, u.shape), dw = bench.zeros(DType::f64, w.shape),
               dhistory = bench.empty(DType::f64, history.shape);
  ops::short_conv(bench.context(), ops::ShortConvBackward{.dy = dy,
                                                          .u = u,
                                                          .w = w,
                                                          .du = du,
                                                          .dw = dw,
                                                          .documents = documents,
                                                          .history = history,
                                                          .dhistory = dhistory});
  const auto loss = [&] {
    ops::short_conv(bench.context(), forward);
    return weighted_sum(y, dy);
  };
  CHECK(slope_difference(loss, u, du) == "");
  CHECK(slope_difference(loss, w, dw) == "");
  CHECK(slope_difference(loss, history, dhistory) == "");
  CHECK(Bench::get(dhistory, 1) != 0);
  CHECK(Bench::get(dhistory, 2) == 0);  // nothing entered slice 1
  CHECK(bench.guards_hold());
}

TEST_CASE("short_conv backward is the slope of short_conv forward", "[ops][cpu]") {
  const std::int64_t taps = GENERATE(1, 2, 4, 7);
  Bench bench(2);
  const Starts starts{0, 2, 2, 3, 14};
  const Tensor u = bench.normal(DType::f64, {14, 35}), w = bench.normal(DType::f64, {35, 1, taps}),
               dy = bench.normal(DType::f64, u.shape), y = bench.empty(DType::f64, u.shape);
  const auto loss = [&] {
    ops::short_conv(bench.context(), ops::ShortConvForward{.u = u, .w = w, .y = y, .documents = {starts}});
    return weighted_sum(y, dy);
  };
  const auto g = backward(bench, dy, u, w, starts);
  CHECK(slope_difference(loss, u, g.du) == "");
  CHECK(slope_difference(loss, w, g.dw) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("short_conv adds to dw and does without it", "[ops][cpu]") {
  Bench bench(3);
  const Starts starts{0, 9};
  const Tensor u = bench.normal(DType::f64, {9, 5}), w = bench.normal(DType::f64, {5, 1, 4}),
               dy = bench.normal(DType::f64, u.shape);
  const auto g = backward(bench, dy, u, w, starts);
  const Tensor twice = bench.copy(g.dw), du = bench.empty(DType::f64, u.shape);
  ops::short_conv(bench.context(), ops::ShortConvBackward{.dy = dy, .u = u, .w = w, .du = du, .dw = twice, .documents = {starts}});
  for (std::int64_t i = 0; i < twice.count(); ++i) Bench::set(twice, i, Bench::get(twice, i) / 2);
  CHECK(difference(twice, g.dw, 1e-14) == "");
  const Tensor frozen = bench.empty(DType::f64, u.shape);
  ops::short_conv(bench.context(), ops::ShortConvBackward{.dy = dy, .u = u, .w = w, .du = frozen, .dw = {}, .documents = {starts}});
  CHECK(same_bytes(frozen, du));
}

TEST_CASE("short_conv in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const std::int64_t P = GENERATE(1, 33, 128);
  const Starts starts = GENERATE(Starts{0}, Starts{0, 1}, Starts{0, 3, 260, 301});
  Bench bench(4);
  const Tensor u = bench.normal(dtype, {starts.back(), P}), w = bench.normal(DType::f32, {P, 1, 4}),
               dy = bench.normal(dtype, u.shape);
  const Tensor u64 = bench.as(DType::f64, u), w64 = bench.as(DType::f64, w), dy64 = bench.as(DType::f64, dy);
  const Tensor y = forward(bench, u, w, starts), y64 = forward(bench, u64, w64, starts);
  const auto g = backward(bench, dy, u, w, starts), g64 = backward(bench, dy64, u64, w64, starts);
  CHECK(bench.guards_hold());
  if (u.count() == 0) {
    CHECK(difference(g.dw, g64.dw, 0, 1e-300) == "");
    return;
  }
  const double rounding = dtype == DType::bf16 ? 5e-3 : 5e-6;
  CHECK(difference(y, y64, rounding) == "");
  CHECK(difference(g.du, g64.du, rounding) == "");
  CHECK(difference(g.dw, g64.dw, 2e-5) == "");
}

TEST_CASE("short_conv of packed documents is short_conv of each alone, and none sees another", "[ops][cpu]") {
  Bench bench(5);
  const Starts starts{0, 5, 6, 20};
  const Tensor u = bench.normal(DType::f32, {20, 40}), w = bench.normal(DType::f32, {40, 1, 4}),
               dy = bench.normal(DType::f32, u.shape);
  const Tensor y = forward(bench, u, w, starts);
  const auto g = backward(bench, dy, u, w, starts);
  const Tensor dw = bench.zeros(DType::f32, w.shape);
  for (std::size_t n = 0; n + 1 < starts.size(); ++n) {
    const auto begin = starts[n], end = starts[n + 1];
    const Tensor rows = u.rows(begin, end);
    CHECK(same_bytes(forward(bench, rows, w, {0, end - begin}), y.rows(begin, end)));
    const Tensor du = bench.empty(DType::f32, rows.shape);
    const Starts alone{0, end - begin};
    ops::short_conv(bench.context(),
                    ops::ShortConvBackward{.dy = dy.rows(begin, end), .u = rows, .w = w, .du = du, .dw = dw, .documents = {alone}});
    CHECK(same_bytes(du, g.du.rows(begin, end)));
  }
  CHECK(difference(dw, g.dw, 1e-5) == "");

  for (std::int64_t i = 0; i < 5 * 40; ++i) Bench::set(u, i, 3 - Bench::get(u, i));
  const Tensor changed = forward(bench, u, w, starts);
  CHECK(same_bytes(changed.rows(5, 20), y.rows(5, 20)));
  CHECK(!same_bytes(changed.rows(0, 5), y.rows(0, 5)));
}

TEST_CASE("short_conv gives the same bits with any number of threads", "[ops][cpu]") {
  Bench bench(6);
  const Starts starts{0, 100, 300};
  const Tensor u = bench.normal(DType::f32, {300, 70}), w = bench.normal(DType::f32, {70, 1, 4}),
               dy = bench.normal(DType::f32, u.shape);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = backward(bench, dy, u, w, starts);
  omp_set_num_threads(3);
  const auto three = backward(bench, dy, u, w, starts);
  omp_set_num_threads(threads);
  CHECK(same_bytes(one.du, three.du));
  CHECK(same_bytes(one.dw, three.dw));
}

TEST_CASE("short_conv refuses tensors that do not fit", "[ops][cpu]") {
  Bench bench;
  const auto f32 = DType::f32;
  const Tensor u = bench.zeros(f32, {4, 6}), w = bench.zeros(f32, {6, 1, 4}), y = bench.zeros(f32, {4, 6});
  const Starts starts{0, 4};
  const auto refused = [&](ops::ShortConvForward a) { CHECK_THROWS_AS(ops::short_conv(bench.context(), a), Error); };
  refused({u, bench.zeros(f32, {5, 1, 4}), y, {starts}});
  refused({u, bench.zeros(f32, {6, 4}), y, {starts}});
  refused({u, bench.zeros(DType::bf16, w.shape), y, {starts}});
  refused({u, w, bench.zeros(f32, {6, 4}), {starts}});
  const Starts shorter{0, 3};
  refused({u, w, y, {shorter}});
  CHECK_THROWS_AS(ops::short_conv(bench.context(), ops::ShortConvBackward{y, u, w, y, bench.zeros(f32, {6, 4}), {starts}}), Error);
  CHECK_THROWS_AS(ops::short_conv(bench.context(), ops::ShortConvBackward{bench.zeros(f32, {3, 6}), u, w, y, {}, {starts}}), Error);
}

}  // namespace moetrain::test
