// permute_test.cpp -- holds sorting, spreading and collecting to a hand-worked case, exact round trips and slopes.
#include "ops/permute.h"

#include <algorithm>
#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"

using namespace moetrain;
using test::Bench;
using test::difference;

namespace {

// T tokens of K slots, experts chosen by expert(t, k), sorted.
struct Sorted {
  Tensor experts, slot_row, counts;
};
template <class F>
Sorted sorted(Bench& b, std::int64_t T, std::int64_t K, std::int64_t E, F expert) {
  const Sorted s{b.filled(DType::i32, {T, K}, [&](std::int64_t i) { return double(expert(i / K, i % K)); }),
                 b.empty(DType::i64, {T, K}), b.empty(DType::i64, {E})};
  ops::sort_slots(b.context(), ops::SortSlots{.experts = s.experts, .slot_row = s.slot_row, .counts = s.counts});
  return s;
}
std::int64_t scattered(std::int64_t t, std::int64_t k, std::int64_t E) {
  return std::int64_t(ops::uniform(9, std::uint64_t(t), std::uint64_t(k)) * double(E));
}

}  // namespace

TEST_CASE("permute sorts, spreads and collects a case worked by hand", "[ops][cpu]") {
  Bench b;
  const auto experts = b.of(DType::i32, {3, 2}, {2, 0, 0, 3, 2, 0});
  const auto slot_row = b.empty(DType::i64, {3, 2}), counts = b.empty(DType::i64, {5}), offsets = b.empty(DType::i64, {6});
  ops::sort_slots(b.context(), ops::SortSlots{.experts = experts, .slot_row = slot_row, .counts = counts, .offsets = offsets});
  CHECK(test::values_of(counts) == std::vector<double>{3, 0, 2, 1, 0});
  CHECK(test::values_of(offsets) == std::vector<double>{0, 3, 3, 5, 6, 6});
  CHECK(test::values_of(slot_row) == std::vector<double>{3, 0, 1, 5, 4, 2});

  const auto x = b.of(DType::f64, {3, 2}, {1, 2, 3, 4, 5, 6}), rows = b.empty(DType::f64, {6, 2});
  ops::spread_rows(b.context(), ops::SpreadRows{.x = x, .slot_row = slot_row, .rows = rows});
  CHECK(test::values_of(rows) == std::vector<double>{1, 2, 3, 4, 5, 6, 1, 2, 5, 6, 3, 4});

  const auto y = b.empty(DType::f64, {3, 2}), weights = b.of(DType::f64, {3, 2}, {1, 10, 2, 20, 3, 30});
  ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = slot_row, .weights = weights, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{11, 22, 66, 88, 165, 198});
  ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = slot_row, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{2, 4, 6, 8, 10, 12});
  ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = slot_row, .weights = weights, .y = y, .add = true});
  CHECK(test::values_of(y) == std::vector<double>{13, 26, 72, 96, 175, 210});

  const auto dy = b.of(DType::f64, {3, 2}, {1, 0, 0, 1, 1, 1}), drows = b.empty(DType::f64, {6, 2}),
             dweights = b.empty(DType::f64, {3, 2});
  ops::collect_rows(b.context(), ops::CollectRowsBackward{.dy = dy, .slot_row = slot_row, .weights = weights, .drows = drows});
  const auto dots =
      b.of(DType::f64, {6}, {30, 8, 660, 2, 33, 120});  // of the rows of slots (0,1), (1,0), (2,1), (0,0), (2,0), (1,1)
  ops::weight_gradients(b.context(),
                        ops::WeightGradients{.dots = dots, .slot_row = slot_row, .weights = weights, .dweights = dweights});
  CHECK(test::values_of(dweights) == std::vector<double>{2, 3, 4, 6, 11, 22});
  CHECK(test::values_of(drows) == std::vector<double>{10, 0, 0, 2, 30, 30, 1, 0, 3, 3, 0, 20});
  CHECK(b.guards_hold());
}

TEST_CASE("dropped slots have no row: nothing is spread, collected or read for them", "[ops][cpu]") {
  Bench b;
  const auto experts = b.of(DType::i32, {3, 2}, {2, double(~0), 0, double(~3), double(~2), double(~0)});
  const auto slot_row = b.empty(DType::i64, {3, 2}), counts = b.empty(DType::i64, {4}), offsets = b.empty(DType::i64, {5});
  ops::sort_slots(b.context(), ops::SortSlots{.experts = experts, .slot_row = slot_row, .counts = counts, .offsets = offsets});
  CHECK(test::values_of(counts) == std::vector<double>{1, 0, 1, 0});
  CHECK(test::values_of(offsets) == std::vector<double>{0, 1, 1, 2, 2});
  CHECK(test::values_of(slot_row) == std::vector<double>{1, -1, 0, -1, -1, -1});

  const auto x = b.of(DType::f64, {3, 1}, {5, 6, 7}), rows = b.empty(DType::f64, {6, 1});
  ops::spread_rows(b.context(), ops::SpreadRows{.x = x, .slot_row = slot_row, .rows = rows});
  CHECK((Bench::get(rows, 0) == 6 && Bench::get(rows, 1) == 5));
  for (std::int64_t r = 2; r < 6; ++r) CHECK(std::isnan(Bench::get(rows, r)));

  const auto y = b.empty(DType::f64, {3, 1}), weights = b.of(DType::f64, {3, 2}, {2, 0, 3, 0, 0, 0});
  ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = slot_row, .weights = weights, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{10, 18, 0});
  const auto drows = b.empty(DType::f64, {6, 1}), dweights = b.empty(DType::f64, {3, 2});
  ops::collect_rows(b.context(), ops::CollectRowsBackward{.dy = x, .slot_row = slot_row, .weights = weights, .drows = drows});
  const auto dots = b.of(DType::f64, {6}, {18, 50, std::nan(""), std::nan(""), std::nan(""), std::nan("")});
  ops::weight_gradients(b.context(),
                        ops::WeightGradients{.dots = dots, .slot_row = slot_row, .weights = weights, .dweights = dweights});
  CHECK(test::values_of(dweights) == std::vector<double>{25, 0, 6, 0, 0, 0});
  CHECK((Bench::get(drows, 0) == 18 && Bench::get(drows, 1) == 10));
  for (std::int64_t r = 2; r < 6; ++r) CHECK(std::isnan(Bench::get(drows, r)));
  ops::collect_rows(b.context(), ops::CollectRows{.rows = drows, .slot_row = slot_row, .weights = {}, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{10, 18, 0});
  CHECK(b.guards_hold());
}

TEST_CASE("permute keeps rows of an expert in token order, whatever the sizes", "[ops][cpu]") {
  const bool all_to_one = GENERATE(false, true);
  struct Size {
    std::int64_t T, K, E;
  };
  for (const auto [T, K, E] :
       {Size{1, 1, 1}, Size{0, 3, 4}, Size{13, 3, 7}, Size{101, 4, 200}, Size{257, 16, 31}, Size{50, 2, 3}}) {
    CAPTURE(T, K, E);
    Bench b;
    const auto s = sorted(b, T, K, E, [&, n = E](auto t, auto k) { return all_to_one ? n - 1 : scattered(t, k, n); });
    std::vector<std::pair<std::int64_t, std::int64_t>> slots;  // (expert, slot)
    for (std::int64_t i = 0; i < T * K; ++i) slots.emplace_back(std::int64_t(Bench::get(s.experts, i)), i);
    std::sort(slots.begin(), slots.end());
    bool in_order = true;
    std::vector<double> counted(static_cast<std::size_t>(E));
    for (std::size_t r = 0; r < slots.size(); ++r) {
      in_order = in_order && Bench::get(s.slot_row, slots[r].second) == double(r);
      ++counted[std::size_t(slots[r].first)];
    }
    CHECK(in_order);
    CHECK(test::values_of(s.counts) == counted);
    CHECK(b.guards_hold());
  }
}

TEST_CASE("permute brings every row back exactly", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::f64, DType::bf16);
  const std::int64_t T = 67, K = 4, E = 9, D = GENERATE(1, 5, 300, 512);
  CAPTURE(int(dtype), D);
  Bench b;
  const auto s = sorted(b, T, K, E, [](auto t, auto k) { return scattered(t, k, 9); });
  const auto x = b.normal(dtype, {T, D}), rows = b.empty(dtype, {T * K, D}), y = b.empty(dtype, {T, D});
  const auto real = real_of(dtype);
  ops::spread_rows(b.context(), ops::SpreadRows{.x = x, .slot_row = s.slot_row, .rows = rows});
  const auto quarter = b.filled(real, {T, K}, [](std::int64_t) { return 0.25; });
  ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = s.slot_row, .weights = quarter, .y = y});
  CHECK(test::values_of(y) == test::values_of(x));  // four quarters of one number are that number

  const auto to = s.slot_row.reshape({T * K});
  const auto moved = b.empty(dtype, {T * K, D}), back = b.empty(dtype, {T * K, D});
  ops::move_rows(b.context(), ops::MoveRows{.x = rows, .to = to, .y = moved});
  CHECK(test::values_of(moved) != test::values_of(rows));
  ops::move_rows(b.context(), ops::MoveRows{.x = moved, .to = to, .gather = true, .y = back});
  CHECK(test::values_of(back) == test::values_of(rows));
  CHECK(b.guards_hold());
}

TEST_CASE("move_rows scatters and gathers as told", "[ops][cpu]") {
  Bench b;
  const auto x = b.of(DType::f32, {3, 1}, {10, 20, 30}), y = b.empty(DType::f32, {3, 1}), to = b.of(DType::i64, {3}, {1, 2, 0});
  ops::move_rows(b.context(), ops::MoveRows{.x = x, .to = to, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{30, 10, 20});
  ops::move_rows(b.context(), ops::MoveRows{.x = x, .to = to, .gather = true, .y = y});
  CHECK(test::values_of(y) == std::vector<double>{20, 30, 10});
  const auto none = b.empty(DType::f32, {0, 4}), nowhere = b.empty(DType::i64, {0});
  ops::move_rows(b.context(), ops::MoveRows{.x = none, .to = nowhere, .y = none});
  CHECK(b.guards_hold());
}

TEST_CASE("place_runs counts on from the place of each run", "[ops][cpu]") {
  Bench b;
  const auto to = b.empty(DType::i64, {6});
  const auto begins = b.of(DType::i64, {5}, {0, 2, 2, 5, 6}), places = b.of(DType::i64, {4}, {4, 9, 1, 0});
  ops::place_runs(b.context(), ops::PlaceRuns{.begins = begins, .places = places, .to = to});
  CHECK(test::values_of(to) == std::vector<double>{4, 5, 1, 2, 3, 0});
  CHECK(b.guards_hold());
  const auto few = b.of(DType::i64, {2}, {0, 5}), back = b.of(DType::i64, {3}, {0, 7, 6});
  CHECK_THROWS_AS(ops::place_runs(b.context(), ops::PlaceRuns{.begins = few, .places = places, .to = to}), Error);
  CHECK_THROWS_AS(ops::place_runs(b.context(), ops::PlaceRuns{.begins = few, .places = places.rows(0, 1), .to = to}), Error);
  CHECK_THROWS_AS(ops::place_runs(b.context(), ops::PlaceRuns{.begins = back, .places = places.rows(0, 2), .to = to}), Error);
}

TEST_CASE("place_runs on CUDA places what the CPU does", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const std::int64_t runs : {0, 1, 7, 896}) {
    CAPTURE(runs);
    Bench b;
    std::int64_t R = 0;
    const auto begins = b.filled(DType::i64, {runs + 1}, [&](std::int64_t n) {  // every third run is empty
      if (n > 0 && n % 3 != 0) R += scattered(n, 0, 300);
      return double(R);
    });
    const auto places = b.filled(DType::i64, {runs}, [&](std::int64_t n) { return double(scattered(n, 1, 100000)); });
    const auto want = b.empty(DType::i64, {R});
    ops::place_runs(b.context(), ops::PlaceRuns{.begins = begins, .places = places, .to = want});
    test::DeviceBench d;
    const auto to = d.empty(DType::i64, {R});
    ops::place_runs(d.context(), ops::PlaceRuns{.begins = d.copy(begins), .places = d.copy(places), .to = to});
    CHECK(test::values_of(d.to_host(b, to)) == test::values_of(want));
    CHECK(d.guards_hold());
  }
}

TEST_CASE("collect_rows backward is the slope of collect_rows forward", "[ops][cpu]") {
  const std::int64_t T = 7, K = 3, E = 4, D = 5;
  Bench b(2);
  const auto s = sorted(b, T, K, E, [](auto t, auto k) { return scattered(t, k, 4); });
  const auto rows = b.normal(DType::f64, {T * K, D}), weights = b.normal(DType::f64, {T, K}), dy = b.normal(DType::f64, {T, D});
  const auto y = b.empty(DType::f64, {T, D}), drows = b.empty(DType::f64, {T * K, D}), dweights = b.empty(DType::f64, {T, K});
  ops::collect_rows(b.context(), ops::CollectRowsBackward{.dy = dy, .slot_row = s.slot_row, .weights = weights, .drows = drows});
  const auto dots = b.empty(DType::f64, {T * K});
  for (std::int64_t r = 0; r < T * K; ++r) dots.as<double>()[r] = test::weighted_sum(rows.rows(r, r + 1), drows.rows(r, r + 1));
  ops::weight_gradients(b.context(),
                        ops::WeightGradients{.dots = dots, .slot_row = s.slot_row, .weights = weights, .dweights = dweights});
  auto loss = [&] {
    ops::collect_rows(b.context(), ops::CollectRows{.rows = rows, .slot_row = s.slot_row, .weights = weights, .y = y});
    return test::weighted_sum(y, dy);
  };
  CHECK(test::slope_difference(loss, rows, drows, 1e-9, 0, T * K * D) == "");
  CHECK(test::slope_difference(loss, weights, dweights, 1e-9) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("collect_rows in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const std::int64_t T = 33, K = 5, E = 6, D = 277;
  CAPTURE(int(dtype));
  Bench b(6);
  const auto s = sorted(b, T, K, E, [](auto t, auto k) { return scattered(t, k, 6); });
  const auto rows = b.normal(dtype, {T * K, D}), weights = b.uniform(DType::f32, {T, K}, 0, 1), dy = b.normal(dtype, {T, D});
  std::vector<Tensor> y, drows;
  for (const auto type : {dtype, DType::f64}) {
    const auto real = real_of(type);
    const auto r = b.as(type, rows), w = b.as(real, weights);
    y.push_back(b.empty(type, {T, D})), drows.push_back(b.empty(type, {T * K, D}));
    ops::collect_rows(b.context(), ops::CollectRows{.rows = r, .slot_row = s.slot_row, .weights = w, .y = y.back()});
    ops::collect_rows(b.context(),
                      ops::CollectRowsBackward{.dy = b.as(type, dy), .slot_row = s.slot_row, .weights = w, .drows = drows.back()});
  }
  const double bound = dtype == DType::bf16 ? 4e-3 : 1e-6;
  CHECK(difference(y[0], y[1], bound) == "");
  CHECK(difference(drows[0], drows[1], bound) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("permute refuses what does not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const auto s = sorted(b, 3, 2, 4, [](auto t, auto) { return t; });
  const auto x = b.normal(DType::f32, {3, 2}), rows = b.normal(DType::f32, {6, 2}), w = b.normal(DType::f32, {3, 2});
  const auto past = b.of(DType::i64, {3, 2}, {0, 1, 2, 3, 4, 6});
  CHECK_THROWS_AS(ops::sort_slots(ctx, ops::SortSlots{s.experts, b.empty(DType::i64, {3, 3}), s.counts}), Error);
  CHECK_THROWS_AS(ops::sort_slots(ctx, ops::SortSlots{s.experts, s.slot_row, b.empty(DType::i32, {4})}), Error);
  CHECK_THROWS_AS(ops::sort_slots(ctx, ops::SortSlots{s.experts, s.slot_row, b.empty(DType::i64, {2})}), Error);  // expert 2 of 2
  CHECK_THROWS_AS(ops::spread_rows(ctx, ops::SpreadRows{x, s.slot_row, b.empty(DType::f32, {5, 2})}), Error);
  CHECK_THROWS_AS(ops::spread_rows(ctx, ops::SpreadRows{x, s.slot_row, b.empty(DType::f64, {6, 2})}), Error);
  CHECK_THROWS_AS(ops::spread_rows(ctx, ops::SpreadRows{x, past, rows}), Error);
  CHECK_THROWS_AS(ops::collect_rows(ctx, ops::CollectRows{rows, s.slot_row, {}, b.empty(DType::f32, {3, 3})}), Error);
  CHECK_THROWS_AS(ops::collect_rows(ctx, ops::CollectRows{rows, s.slot_row, b.normal(DType::f64, {3, 2}), x}), Error);
  CHECK_THROWS_AS(ops::collect_rows(ctx, ops::CollectRows{rows, past, {}, x}), Error);
  CHECK_THROWS_AS(ops::collect_rows(ctx, ops::CollectRowsBackward{x, s.slot_row, {}, rows}), Error);
  CHECK_THROWS_AS(ops::collect_rows(ctx, ops::CollectRowsBackward{x, s.slot_row, w, x}), Error);
  CHECK_THROWS_AS(ops::weight_gradients(ctx, ops::WeightGradients{b.normal(DType::f32, {5}), s.slot_row, w, w}), Error);
  CHECK_THROWS_AS(ops::weight_gradients(ctx, ops::WeightGradients{b.normal(DType::f64, {6}), s.slot_row, w, w}), Error);
  CHECK_THROWS_AS(ops::move_rows(ctx, ops::MoveRows{.x = x, .to = b.of(DType::i64, {3}, {0, 1, 3}), .y = x}), Error);
  CHECK_THROWS_AS(ops::move_rows(ctx, ops::MoveRows{.x = x, .to = b.of(DType::i64, {2}, {0, 1}), .y = x}), Error);
}

TEST_CASE("sort_slots on CUDA places every slot as the CPU does", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Size {
    std::int64_t T, K, E;
  };
  const bool all_to_one = GENERATE(false, true), dropped = GENERATE(false, true);
  for (const auto [T, K, E] : {Size{1, 1, 1}, Size{0, 3, 4}, Size{13, 3, 7}, Size{101, 4, 200}, Size{4096, 1, 3}, Size{4097, 1, 64},
                               Size{2500, 16, 896}, Size{40001, 8, 1024}}) {
    CAPTURE(T, K, E, all_to_one, dropped);
    Bench b;
    const auto s = sorted(b, T, K, E, [&, n = E](auto t, auto k) {
      const std::int64_t e = all_to_one ? n / 2 : scattered(t, k, n);
      return dropped && ((t + k) % 3 == 0 || (t > 1000 && t < 2200)) ? ~e : e;  // here and there, and long runs of them
    });
    test::DeviceBench d;
    const auto experts = d.copy(s.experts), slot_row = d.empty(DType::i64, {T, K}), counts = d.empty(DType::i64, {E}),
               offsets = d.empty(DType::i64, {E + 1});
    ops::sort_slots(d.context(), ops::SortSlots{.experts = experts, .slot_row = slot_row, .counts = counts, .offsets = offsets});
    CHECK(test::values_of(d.to_host(b, slot_row)) == test::values_of(s.slot_row));
    CHECK(test::values_of(d.to_host(b, counts)) == test::values_of(s.counts));
    auto first = test::values_of(s.counts);
    first.insert(first.begin(), 0);
    for (std::size_t e = 1; e < first.size(); ++e) first[e] += first[e - 1];
    CHECK(test::values_of(d.to_host(b, offsets)) == first);
    ops::sort_slots(d.context(), ops::SortSlots{.experts = experts, .slot_row = slot_row, .counts = counts});
    CHECK(test::values_of(d.to_host(b, slot_row)) == test::values_of(s.slot_row));
    CHECK(d.guards_hold());
  }
}

TEST_CASE("rows on CUDA are spread, moved, collected and given their gradients as in f64", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Size {
    std::int64_t T, K, D;
  };
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  for (const auto [T, K, D] :
       {Size{1, 1, 1}, Size{0, 2, 8}, Size{33, 5, 277}, Size{257, 8, 128}, Size{100, 16, 1032}, Size{19, 3, 7168}}) {
    CAPTURE(int(dtype), T, K, D);
    Bench b(6);
    const auto s = sorted(b, T, K, 6, [](auto t, auto k) { return scattered(t, k, 6); });
    const auto x = b.normal(dtype, {T, D}), rows = b.normal(dtype, {T * K, D}), dy = b.normal(dtype, {T, D}),
               weights = b.uniform(DType::f32, {T, K}, 0, 1), dots = b.normal(DType::f32, {T * K});
    const auto run = [&](ops::Context& ctx, auto take, auto empty, DType type) {
      const auto real = real_of(type);
      const auto slot_row = take(s.slot_row, DType::i64), to = slot_row.reshape({T * K});
      const auto in = take(rows, type), w = take(weights, real), g = take(dy, type);
      const std::vector<Tensor> out{empty(type, {T * K, D}), empty(type, {T * K, D}), empty(type, {T * K, D}), empty(type, {T, D}),
                                    empty(type, {T, D}),     empty(type, {T * K, D}), empty(real, {T, K})};
      ops::spread_rows(ctx, ops::SpreadRows{.x = take(x, type), .slot_row = slot_row, .rows = out[0]});
      ops::move_rows(ctx, ops::MoveRows{.x = in, .to = to, .y = out[1]});
      ops::move_rows(ctx, ops::MoveRows{.x = in, .to = to, .gather = true, .y = out[2]});
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .weights = w, .y = out[3]});
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .y = out[4]});
      ops::collect_rows(ctx, ops::CollectRowsBackward{.dy = g, .slot_row = slot_row, .weights = w, .drows = out[5]});
      ops::weight_gradients(ctx,
                            ops::WeightGradients{.dots = take(dots, real), .slot_row = slot_row, .weights = w, .dweights = out[6]});
      const auto sum = take(dy, type);
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .weights = w, .y = sum, .add = true});
      auto all = out;
      all.push_back(sum);
      return all;
    };
    test::DeviceBench d;
    const auto there = run(
        d.context(), [&](ConstTensor t, DType) { return d.copy(t); }, [&](DType type, Shape shape) { return d.empty(type, shape); },
        dtype);
    const auto want = run(
        b.context(), [&](ConstTensor t, DType type) { return b.as(type, t); },
        [&](DType type, Shape shape) { return b.empty(type, shape); }, DType::f64);
    CHECK(d.guards_hold());
    if (T == 0) continue;
    std::vector<Tensor> got;
    for (const auto& t : there) got.push_back(d.to_host(b, t));
    for (std::size_t i = 0; i < 3; ++i) CHECK(test::values_of(got[i]) == test::values_of(want[i]));
    const double bound = dtype == DType::bf16 ? 4e-3 : 1e-6;
    for (std::size_t i = 3; i < 6; ++i) CHECK(difference(got[i], want[i], bound) == "");
    CHECK(difference(got[7], want[7], bound) == "");
    CHECK(difference(got[6], want[6], 1e-6) == "");
  }
}

TEST_CASE("dropped slots on CUDA have no row: what lies past the last one is neither read nor written", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Size {
    std::int64_t T, K, D;
  };
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  for (const auto [T, K, D] : {Size{1, 1, 1}, Size{33, 5, 277}, Size{257, 8, 128}, Size{100, 16, 1032}, Size{19, 3, 7168}}) {
    CAPTURE(int(dtype), T, K, D);
    Bench b(8);
    const auto s = sorted(b, T, K, 6, [n = K](auto t, auto k) {  // here and there, all of every seventh token, all there are of one
      const std::int64_t e = scattered(t, k, 6);
      return (t * n + k) % 3 == 0 || t % 7 == 6 ? ~e : e;
    });
    std::int64_t R = 0;
    for (const double n : test::values_of(s.counts)) R += std::int64_t(n);
    REQUIRE(R < T * K);
    const auto x = b.normal(dtype, {T, D}), dy = b.normal(dtype, {T, D}), weights = b.uniform(DType::f32, {T, K}, 0, 1),
               rows = b.empty(dtype, {T * K, D}), dots = b.empty(DType::f32, {T * K});  // NaN past R
    for (std::int64_t i = 0; i < R * D; ++i) Bench::set(rows, i, ops::normal(5, 2, std::uint64_t(i)));
    for (std::int64_t i = 0; i < R; ++i) Bench::set(dots, i, ops::normal(5, 3, std::uint64_t(i)));
    const auto run = [&](ops::Context& ctx, auto take, auto empty, DType type) {
      const auto real = real_of(type);
      const auto slot_row = take(s.slot_row, DType::i64), in = take(rows, type), w = take(weights, real), g = take(dy, type);
      const std::vector<Tensor> out{empty(type, {T * K, D}), empty(type, {T, D}),     empty(type, {T, D}),
                                    take(dy, type),          empty(type, {T * K, D}), empty(real, {T, K})};
      ops::spread_rows(ctx, ops::SpreadRows{.x = take(x, type), .slot_row = slot_row, .rows = out[0]});
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .weights = w, .y = out[1]});
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .y = out[2]});
      ops::collect_rows(ctx, ops::CollectRows{.rows = in, .slot_row = slot_row, .weights = w, .y = out[3], .add = true});
      ops::collect_rows(ctx, ops::CollectRowsBackward{.dy = g, .slot_row = slot_row, .weights = w, .drows = out[4]});
      ops::weight_gradients(ctx,
                            ops::WeightGradients{.dots = take(dots, real), .slot_row = slot_row, .weights = w, .dweights = out[5]});
      return out;
    };
    test::DeviceBench d;
    const auto there = run(
        d.context(), [&](ConstTensor t, DType) { return d.copy(t); }, [&](DType type, Shape shape) { return d.empty(type, shape); },
        dtype);
    const auto want = run(
        b.context(), [&](ConstTensor t, DType type) { return b.as(type, t); },
        [&](DType type, Shape shape) { return b.empty(type, shape); }, DType::f64);
    CHECK(d.guards_hold());
    std::vector<Tensor> got;
    for (const auto& t : there) got.push_back(d.to_host(b, t));
    const double bound = dtype == DType::bf16 ? 4e-3 : 1e-6;
    for (const std::size_t i : {0, 4}) {
      bool past_is_nan = true;
      for (std::int64_t n = R * D; n < T * K * D; ++n) past_is_nan &= std::isnan(Bench::get(got[i], n));
      CHECK(past_is_nan);
      if (R > 0) CHECK(difference(got[i].rows(0, R), want[i].rows(0, R), i == 0 ? 0 : bound) == "");
    }
    for (const std::size_t i : {1, 2, 3}) CHECK(difference(got[i], want[i], bound, R > 0 ? 0 : 1e-9) == "");
    CHECK(difference(got[5], want[5], 1e-6, R > 0 ? 0 : 1e-9) == "");
  }
}
