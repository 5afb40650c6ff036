// layernorm_test.cpp -- layernorm against numbers worked by hand, its own slope, and f64.
#include "ops/layernorm.h"

#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

TEST_CASE("layernorm of (1, 5) with eps 5 has mean 3 and r a third", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  // deviations (-2, 2), mean square 4, plus eps 5 is 9
  const auto x = bench.of(f64, {1, 2}, {1, 5}), w = bench.of(f64, {2}, {3, 30}), b = bench.of(f64, {2}, {100, 200});
  const auto y = bench.empty(f64, {1, 2}), mean = bench.empty(f64, {1}), r = bench.empty(f64, {1});
  ops::layernorm(bench.context(), ops::LayerNormForward{.x = x, .w = w, .b = b, .y = y, .mean = mean, .r = r, .eps = 5});
  CHECK(difference(values_of(y), {98, 220}, 1e-15) == "");
  CHECK(difference(values_of(mean), {3}, 1e-15) == "");
  CHECK(difference(values_of(r), {1.0 / 3}, 1e-15) == "");
  ops::layernorm(bench.context(), ops::LayerNormForward{.x = x, .w = w, .b = {}, .y = y, .mean = mean, .r = r, .eps = 5});
  CHECK(difference(values_of(y), {-2, 20}, 1e-15) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("layernorm backward is the slope of layernorm forward, writes dx and adds dw and db", "[ops][cpu]") {
  const auto D = GENERATE(std::int64_t(2), std::int64_t(7), std::int64_t(130));
  const std::int64_t T = 5;
  Bench bench(std::uint64_t(D) + 1);
  const auto f64 = DType::f64;
  const auto x = bench.normal(f64, {T, D}, 2, 1), w = bench.normal(f64, {D}), b = bench.normal(f64, {D}),
             dy = bench.normal(f64, {T, D});
  const auto y = bench.empty(f64, {T, D}), mean = bench.empty(f64, {T}), r = bench.empty(f64, {T});
  const auto f = [&] {
    ops::layernorm(bench.context(), ops::LayerNormForward{.x = x, .w = w, .b = b, .y = y, .mean = mean, .r = r, .eps = 0.1});
    return weighted_sum(y, dy);
  };
  f();
  const auto dx = bench.empty(f64, {T, D}), dw = bench.zeros(f64, {D}), db = bench.zeros(f64, {D});
  const ops::LayerNormBackward backward{.dy = dy, .x = x, .w = w, .mean = mean, .r = r, .dx = dx, .dw = dw, .db = db};
  ops::layernorm(bench.context(), backward);
  CHECK(slope_difference(f, x, dx, 1e-7) == "");
  CHECK(slope_difference(f, w, dw, 1e-7) == "");
  CHECK(slope_difference(f, b, db, 1e-7) == "");
  f();

  const auto dw2 = bench.copy(dw), db2 = bench.copy(db), aliased = bench.copy(dy);
  ops::layernorm(bench.context(),
                 ops::LayerNormBackward{.dy = aliased, .x = x, .w = w, .mean = mean, .r = r, .dx = aliased, .dw = dw2, .db = db2});
  CHECK(difference(aliased, dx, 1e-14) == "");
  auto doubled = values_of(dw);
  for (auto& v : doubled) v *= 2;
  CHECK(difference(values_of(dw2), doubled, 1e-14) == "");
  doubled = values_of(db);
  for (auto& v : doubled) v *= 2;
  CHECK(difference(values_of(db2), doubled, 1e-14) == "");

  const auto dx_alone = bench.empty(f64, {T, D}), dw_alone = bench.zeros(f64, {D});
  ops::layernorm(bench.context(),
                 ops::LayerNormBackward{.dy = dy, .x = x, .w = w, .mean = mean, .r = r, .dx = dx_alone, .dw = {}, .db = {}});
  ops::layernorm(bench.context(),
                 ops::LayerNormBackward{.dy = dy, .x = x, .w = w, .mean = mean, .r = r, .dx = {}, .dw = dw_alone, .db = {}});
  CHECK(difference(dx_alone, dx, 1e-14) == "");
  CHECK(difference(dw_alone, dw, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("layernorm in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto T = GENERATE(std::int64_t(1), std::int64_t(13), std::int64_t(400));
  const std::int64_t D = 129;
  CAPTURE(name_of(type), T);
  Bench bench(3);
  const auto real = real_of(type), f64 = DType::f64;
  const auto x = bench.normal(type, {T, D}, 2, 3), w = bench.normal(type, {D}), b = bench.normal(type, {D}),
             dy = bench.normal(type, {T, D});
  const auto run = [&](DType storage, DType statistics) {
    std::vector<Tensor> out{bench.empty(storage, {T, D}), bench.empty(statistics, {T}), bench.empty(statistics, {T}),
                            bench.empty(storage, {T, D}), bench.zeros(statistics, {D}), bench.zeros(statistics, {D})};
    const auto xs = bench.as(storage, x), ws = bench.as(storage, w), bs = bench.as(storage, b), dys = bench.as(storage, dy);
    ops::layernorm(bench.context(),
                   ops::LayerNormForward{.x = xs, .w = ws, .b = bs, .y = out[0], .mean = out[1], .r = out[2], .eps = 1e-5});
    ops::layernorm(
        bench.context(),
        ops::LayerNormBackward{.dy = dys, .x = xs, .w = ws, .mean = out[1], .r = out[2], .dx = out[3], .dw = out[4], .db = out[5]});
    return out;
  };
  const auto got = run(type, real), want = run(f64, f64);
  for (std::size_t i = 0; i < got.size(); ++i) {
    CAPTURE(i);
    CHECK(difference(got[i], want[i], got[i].dtype == DType::bf16 ? 4e-3 : 2e-5) == "");
  }
  CHECK(bench.guards_hold());
}

TEST_CASE("layernorm takes zero rows and refuses what does not fit", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  const auto w = bench.normal(f64, {3}), dw = bench.of(f64, {3}, {1, 2, 3});
  const auto none = bench.empty(f64, {0, 3}), statistic = bench.empty(f64, {0});
  ops::LayerNormForward forward{.x = none, .w = w, .b = w, .y = none, .mean = statistic, .r = statistic, .eps = 1e-5};
  ops::layernorm(bench.context(), forward);
  ops::LayerNormBackward backward{.dy = none, .x = none, .w = w, .mean = statistic, .r = statistic, .dx = none, .dw = dw, .db = dw};
  ops::layernorm(bench.context(), backward);
  CHECK(difference(values_of(dw), {1, 2, 3}, 1e-15) == "");
  forward.w = bench.normal(f64, {4});
  CHECK_THROWS_AS(ops::layernorm(bench.context(), forward), Error);
  forward.w = bench.normal(DType::f32, {3});
  CHECK_THROWS_AS(ops::layernorm(bench.context(), forward), Error);
  forward.w = w;
  forward.r = bench.empty(DType::f32, {0});
  CHECK_THROWS_AS(ops::layernorm(bench.context(), forward), Error);
  backward.db = bench.zeros(f64, {2});
  CHECK_THROWS_AS(ops::layernorm(bench.context(), backward), Error);
}

TEST_CASE("layernorm on CUDA is within rounding of the f64 reference and repeats its bits", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  struct Size {
    std::int64_t T, D;
  };
  for (const auto type : {DType::f32, DType::bf16})
    for (const auto& [T, D] : {Size{1, 1}, Size{3, 7}, Size{400, 129}, Size{2049, 128}, Size{37, 5000}, Size{0, 8}}) {
      CAPTURE(name_of(type), T, D);
      Bench bench(5);
      const auto f32 = DType::f32, f64 = DType::f64;
      const auto x = bench.normal(type, {T, D}, 2, 3), w = bench.normal(type, {D}), b = bench.normal(type, {D}),
                 dy = bench.normal(type, {T, D}), before = bench.normal(f32, {D});
      const auto args = [&](const std::vector<Tensor>& in, const std::vector<Tensor>& out) {
        return std::pair(
            ops::LayerNormForward{.x = in[0], .w = in[1], .b = in[2], .y = out[0], .mean = out[1], .r = out[2], .eps = 1e-5},
            ops::LayerNormBackward{
                .dy = in[3], .x = in[0], .w = in[1], .mean = out[1], .r = out[2], .dx = out[3], .dw = out[4], .db = out[5]});
      };
      const auto on_cuda = [&](bool in_place) {
        DeviceBench d;
        const std::vector<Tensor> in{d.copy(x), d.copy(w), d.copy(b), d.copy(dy)};
        const std::vector<Tensor> out{d.empty(type, {T, D}), d.empty(f32, {T}),
                                      d.empty(f32, {T}),     in_place ? in[3] : d.empty(type, {T, D}),
                                      d.copy(before),        d.copy(before)};
        const auto [forward, backward] = args(in, out);
        ops::layernorm(d.context(), forward);
        ops::layernorm(d.context(), backward);
        std::vector<Tensor> host;
        for (const Tensor& t : out) host.push_back(d.to_host(bench, t));
        CHECK(d.guards_hold());
        return host;
      };
      const std::vector<Tensor> in{bench.as(f64, x), bench.as(f64, w), bench.as(f64, b), bench.as(f64, dy)};
      const std::vector<Tensor> want{bench.empty(f64, {T, D}), bench.empty(f64, {T}), bench.empty(f64, {T}),
                                     bench.empty(f64, {T, D}), bench.as(f64, before), bench.as(f64, before)};
      const auto [forward, backward] = args(in, want);
      ops::layernorm(bench.context(), forward);
      ops::layernorm(bench.context(), backward);
      const auto got = on_cuda(false);
      for (std::size_t i = 0; i < got.size(); ++i) {
        CAPTURE(i);
        if (got[i].count() == 0) continue;
        // Rows of one element have a dx of nothing but rounding.
        CHECK(difference(got[i], want[i], got[i].dtype == DType::bf16 ? 4e-3 : 1e-4, D == 1 ? 1e-4 : 0) == "");
      }
      for (int run = 0; run < 20; ++run) {
        const auto again = on_cuda(run % 2 == 1);
        for (std::size_t i = 0; i < got.size(); ++i)
          CHECK((got[i].count() == 0 || std::memcmp(again[i].data, got[i].data, std::size_t(got[i].bytes())) == 0));
      }
    }
}

}  // namespace
}  // namespace moetrain::test
