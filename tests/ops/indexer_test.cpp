// indexer_test.cpp -- selection against a plain sort, the KL loss against numbers worked by hand, its slope, and its two stages.
#include "ops/indexer.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/sliced.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

using Starts = std::vector<std::int64_t>;

bool same(ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; }

double score(ConstTensor q, ConstTensor k, ConstTensor weights, std::int64_t t, std::int64_t s) {
  const auto J = q.shape[1], H = q.shape[2];
  double sum = 0;
  for (std::int64_t j = 0; j < J; ++j) {
    double dot = 0;
    for (std::int64_t h = 0; h < H; ++h) dot += Bench::get(q, (t * J + j) * H + h) * Bench::get(k, s * H + h);
    sum += Bench::get(weights, t * J + j) * std::max(dot, 0.0);
  }
  return sum;
}

Tensor select(Bench& bench, ConstTensor q, ConstTensor k, ConstTensor weights, const ops::Documents& documents, std::int64_t K) {
  const auto indices = bench.empty(DType::i32, {q.shape[0], K});
  ops::indexer_select(bench.context(),
                      ops::IndexerSelect{.q = q, .k = k, .weights = weights, .documents = documents, .indices = indices});
  return indices;
}
Tensor select(Bench& bench, ConstTensor q, ConstTensor k, ConstTensor weights, const Starts& starts, std::int64_t K) {
  return select(bench, q, k, weights, ops::Documents{starts}, K);
}

// The rule as a sort: causal positions from the latest back, ordered by score and otherwise left in place.
std::vector<double> sorted(ConstTensor q, ConstTensor k, ConstTensor weights, const Starts& starts, std::int64_t K) {
  std::vector<double> all;
  for (std::size_t d = 0; d + 1 < starts.size(); ++d)
    for (std::int64_t t = starts[d]; t < starts[d + 1]; ++t) {
      std::vector<std::pair<double, std::int64_t>> row;
      for (std::int64_t s = t; s >= starts[d]; --s) row.emplace_back(score(q, k, weights, t, s), s);
      std::stable_sort(row.begin(), row.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
      for (std::int64_t i = 0; i < K; ++i) all.push_back(std::size_t(i) < row.size() ? double(row[std::size_t(i)].second) : -1.0);
    }
  return all;
}

TEST_CASE("indexer selects by score, of equal scores the later, and fills with -1", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  // one head of width one, q = 1, weight 1 but -1 at the last row: scores are max(k, 0), at the last row their negatives
  const auto q = bench.of(f64, {5, 1, 1}, {1, 1, 1, 1, 1}), k = bench.of(f64, {5, 1}, {2, -3, 2, 7, -1});
  const auto weights = bench.of(f64, {5, 1}, {1, 1, 1, 1, -1});
  const auto indices = select(bench, q, k, weights, {0, 5}, 3);
  CHECK(values_of(indices) == std::vector<double>{0, -1, -1, /**/ 0, 1, -1, /**/ 2, 0, 1, /**/ 3, 2, 0, /**/ 4, 1, 2});
  CHECK(values_of(select(bench, q, k, weights, {0, 3, 5}, 3)) ==
        std::vector<double>{0, -1, -1, /**/ 0, 1, -1, /**/ 2, 0, 1, /**/ 3, -1, -1, /**/ 4, 3, -1});
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer selection equals a plain stable sort for many seeds", "[ops][cpu]") {
  const auto tied = GENERATE(false, true);
  const auto type = GENERATE(DType::f64, DType::f32, DType::bf16);
  const Starts starts{0, 1, 3, 70, 175};
  const std::int64_t T = starts.back(), J = 3, H = 4;
  for (std::uint64_t seed = 0; seed < 12; ++seed) {
    CAPTURE(tied, name_of(type), seed);
    Bench bench(seed);
    // small whole numbers are exact in every type, and tie often; else only f64 tells neighbours apart as the sort does
    if (!tied && type != DType::f64) continue;
    const auto whole = [&](DType t, Shape shape) {
      const auto x = bench.uniform(t, shape, -2, 3);
      for (std::int64_t i = 0; i < x.count(); ++i) Bench::set(x, i, std::floor(Bench::get(x, i)));
      return x;
    };
    const auto q = tied ? whole(type, {T, J, H}) : bench.normal(type, {T, J, H}),
               k = tied ? whole(type, {T, H}) : bench.normal(type, {T, H});
    const auto weights = tied ? whole(real_of(type), {T, J}) : bench.normal(real_of(type), {T, J});
    for (const std::int64_t K : {1, 8, 25, 200}) {  // of up to 105 causal positions
      const bool equal = values_of(select(bench, q, k, weights, starts, K)) == sorted(q, k, weights, starts, K);
      CHECK(equal);
    }
    CHECK(bench.guards_hold());
  }
}

TEST_CASE("indexer selection of a document keeps its bits when another one changes, and is that of the document alone",
          "[ops][cpu]") {
  Bench bench(5);
  const Starts starts{0, 60, 130};
  const auto q = bench.normal(DType::f32, {130, 4, 8}), k = bench.normal(DType::f32, {130, 8}),
             weights = bench.normal(DType::f32, {130, 4});
  const auto before = select(bench, q, k, weights, starts, 9);
  auto alone = values_of(select(bench, q.rows(60, 130), k.rows(60, 130), weights.rows(60, 130), {0, 70}, 9));
  for (auto& i : alone) i += i < 0 ? 0 : 60;
  CHECK(values_of(before.rows(60, 130)) == alone);
  for (std::int64_t i = 0; i < 60 * 8; ++i) Bench::set(k, i, -2 * Bench::get(k, i));
  const auto after = select(bench, q, k, weights, starts, 9);
  CHECK(!same(after.rows(0, 60), before.rows(0, 60)));
  CHECK(same(after.rows(60, 130), before.rows(60, 130)));
}

TEST_CASE("indexer selection ranks a score that is not a number last", "[ops][cpu]") {
  Bench bench;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto q = bench.of(DType::f64, {3, 1, 1}, {1, 1, 1}), k = bench.of(DType::f64, {3, 1}, {1, nan, 5}),
             weights = bench.of(DType::f64, {3, 1}, {1, 1, 1});
  CHECK(values_of(select(bench, q, k, weights, {0, 3}, 3).rows(1, 3)) == std::vector<double>{0, 1, -1, 2, 0, 1});
}

Tensor select_on_cuda(Bench& bench, ConstTensor q, ConstTensor k, ConstTensor weights, const ops::Documents& documents,
                      std::int64_t K) {
  DeviceBench d;
  const auto indices = d.empty(DType::i32, {q.shape[0], K});
  ops::indexer_select(
      d.context(),
      ops::IndexerSelect{
          .q = d.copy(q), .k = d.copy(k), .weights = d.copy(weights), .documents = d.documents(documents), .indices = indices});
  CHECK(d.guards_hold());
  return d.to_host(bench, indices);
}
Tensor select_on_cuda(Bench& bench, ConstTensor q, ConstTensor k, ConstTensor weights, const Starts& starts, std::int64_t K) {
  return select_on_cuda(bench, q, k, weights, ops::Documents{starts}, K);
}

// Small whole numbers are exact in every type and every order of sums, and tie often.
Tensor whole(Bench& bench, DType type, Shape shape) {
  const auto x = bench.uniform(type, shape, -2, 3);
  for (std::int64_t i = 0; i < x.count(); ++i) Bench::set(x, i, std::floor(Bench::get(x, i)));
  return x;
}

TEST_CASE("indexer selection on CUDA equals a plain stable sort where scores are whole numbers", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  for (const auto& [J, H] : {std::pair<std::int64_t, std::int64_t>{3, 5}, {32, 128}, {37, 40}})
    for (const Starts& starts : {Starts{0, 1}, Starts{0, 1, 3, 70, 275}}) {
      Bench bench(std::uint64_t(J + starts.back()));
      const std::int64_t T = starts.back();
      const auto q = whole(bench, type, {T, J, H}), k = whole(bench, type, {T, H}), weights = whole(bench, DType::f32, {T, J});
      constexpr std::int64_t kAll = 300;
      const auto all = sorted(q, k, weights, starts, kAll);
      for (const std::int64_t K : {std::int64_t(1), std::int64_t(8), std::int64_t(130), kAll}) {
        CAPTURE(name_of(type), J, H, T, K);
        std::vector<double> want;
        for (std::int64_t i = 0; i < T * kAll; ++i)
          if (i % kAll < K) want.push_back(all[std::size_t(i)]);
        const bool equal = values_of(select_on_cuda(bench, q, k, weights, starts, K)) == want;
        CHECK(equal);
      }
    }
}

// A long row in which every score is known: one head of width one, q = weight = 1.
TEST_CASE("indexer selection on CUDA of a long row of known scores is that of a sort", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto T = GENERATE(std::int64_t(12000), std::int64_t(40000));  // a block holds the first
  const auto kind = GENERATE(0, 1, 2, 3);
  Bench bench(17);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto uniform = bench.uniform(DType::f32, {T, 1}, 0.5, 0.5001);  // all of one sign and power of two
  const auto k = kind == 0   ? bench.uniform(DType::f32, {T, 1}, 0, 1)
                 : kind == 1 ? uniform
                 : kind == 2
                     ? bench.filled(DType::f32, {T, 1}, [](std::int64_t s) { return double(s % 7 == 0); })
                     : bench.filled(DType::f32, {T, 1}, [&](std::int64_t s) { return s % 3 == 0 ? nan : double(s % 1000); });
  const auto ones = bench.filled(DType::f32, {T, 1, 1}, [](auto) { return 1; });
  const auto value = [&](std::int64_t s) {
    const double x = Bench::get(k, s);
    return std::isnan(x) ? -std::numeric_limits<double>::infinity() : x;
  };
  for (const std::int64_t K : {std::int64_t(2048), T / 2}) {  // 20000 are more than a block sorts in its own memory
    CAPTURE(kind, T, K);
    DeviceBench d;
    const Starts starts{0, T};
    // the last rows only: their query sees all keys
    const auto indices = d.empty(DType::i32, {T, K});
    ops::indexer_select(d.context(), ops::IndexerSelect{.q = d.copy(ones),
                                                        .k = d.copy(k),
                                                        .weights = d.copy(ones.reshape({T, 1})),
                                                        .documents = d.documents(starts),
                                                        .indices = indices});
    for (const std::int64_t t : {T - 1, T / 2, K - 2}) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(t + 1));
      std::iota(order.begin(), order.end(), 0);
      std::sort(order.begin(), order.end(),
                [&](std::int32_t a, std::int32_t b) { return value(a) > value(b) || (value(a) == value(b) && a > b); });
      order.resize(std::size_t(K), -1);
      const auto row = d.to_host(bench, indices.rows(t, t + 1));
      CHECK(std::memcmp(row.data, order.data(), std::size_t(4 * K)) == 0);
    }
    CHECK(d.guards_hold());
  }
}

// Sums in f32 round, so that neighbours may change places: what is taken may not score less than what is left by more than that.
TEST_CASE("indexer selection on CUDA takes the best scores in their order, up to rounding", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const Starts starts{0, 30, 430};
  const std::int64_t T = starts.back(), J = 32, H = 128, K = 100;
  Bench bench(19);
  const auto q = bench.normal(type, {T, J, H}), k = bench.normal(type, {T, H}),
             weights = bench.normal(DType::f32, {T, J}, 1 / 64.0);
  const auto got = select_on_cuda(bench, q, k, weights, starts, K);
  CHECK(same(select_on_cuda(bench, q, k, weights, starts, K), got));
  const double rounding = 2e-4;  // scores are of size 1
  std::int64_t wrong = 0;
  for (std::int64_t t = 0; t < T; t += 3) {
    const std::int64_t first = t < 30 ? 0 : 30, n = t - first + 1;
    std::vector<double> scores, chosen;
    for (std::int64_t s = first; s <= t; ++s) scores.push_back(score(q, k, weights, t, s));
    std::vector<bool> seen(std::size_t(n), false);
    for (std::int64_t i = 0; i < K; ++i) {
      const auto s = std::int64_t(Bench::get(got, t * K + i)) - first;
      if (i >= n) {
        wrong += Bench::get(got, t * K + i) != -1;
        continue;
      }
      if (s < 0 || s >= n || seen[std::size_t(s)]) {
        ++wrong;
        continue;
      }
      seen[std::size_t(s)] = true;
      chosen.push_back(scores[std::size_t(s)]);
    }
    std::sort(scores.rbegin(), scores.rend());
    for (std::size_t i = 0; i < chosen.size(); ++i) wrong += !(std::abs(chosen[i] - scores[i]) <= rounding);
  }
  CHECK(wrong == 0);
}

TEST_CASE("indexer selection on CUDA of a document is that of the document alone", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(21);
  const auto q = bench.normal(DType::bf16, {300, 32, 128}), k = bench.normal(DType::bf16, {300, 128}),
             weights = bench.normal(DType::f32, {300, 32});
  const auto packed = select_on_cuda(bench, q, k, weights, {0, 77, 300}, 64);
  auto alone = values_of(select_on_cuda(bench, q.rows(77, 300), k.rows(77, 300), weights.rows(77, 300), {0, 223}, 64));
  for (auto& i : alone) i += i < 0 ? 0 : 77;
  CHECK(values_of(packed.rows(77, 300)) == alone);
}

TEST_CASE("indexer selection on CUDA for slices of sequences among the keys of all is that of the CPU", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto moved = GENERATE(false, true);
  for (const auto& [J, H] : {std::pair<std::int64_t, std::int64_t>{3, 5}, {32, 128}, {40, 128}})
    for (std::size_t i = 0; i < kCutSlices.size(); ++i) {
      const Sliced slice(kCutStarts, kCutSlices[i], moved ? kCutKeysMoved : Starts{});
      const std::int64_t T = slice.starts.back();
      Bench bench(std::uint64_t(J) + i);
      const auto q = whole(bench, type, {T, J, H}), k = whole(bench, type, {kCutKeys, H}),
                 weights = whole(bench, DType::f32, {T, J});
      for (const std::int64_t K : {std::int64_t(1), std::int64_t(60), std::int64_t(300)}) {  // of up to 269 keys
        CAPTURE(name_of(type), moved, J, i, K);
        const bool equal =
            same(select_on_cuda(bench, q, k, weights, slice.documents(), K), select(bench, q, k, weights, slice.documents(), K));
        CHECK(equal);
      }
    }
}

// Inputs, the loss and the gradients of one call.
struct Problem {
  std::int64_t T, J, H;
  Starts starts;
  std::vector<ops::Documents::Piece> pieces;
  std::int64_t slices = 0;
  Tensor q, k, weights, target, indices;
  Tensor loss, dq, dk, dweights;
  double gradient_scale = 1;

  Problem(Bench& bench, DType type, std::int64_t heads, std::int64_t width, Starts documents)
      : Problem(bench, type, heads, width, ops::Documents{documents}, documents.back()) {}
  Problem(Bench& bench, DType type, std::int64_t heads, std::int64_t width, const ops::Documents& d, std::int64_t keys)
      : T(d.starts.back()),
        J(heads),
        H(width),
        starts(d.starts.begin(), d.starts.end()),
        pieces(d.pieces.begin(), d.pieces.end()),
        slices(d.slices) {
    q = bench.normal(type, {T, J, H});
    k = bench.normal(type, {keys, H});
    weights = bench.normal(real_of(type), {T, J}, 0.5);
    outputs(bench, type);
  }
  void outputs(Bench& bench, DType type) {
    loss = bench.zeros(real_of(type), {1});
    dq = bench.empty(type, q.shape);
    dk = bench.empty(type, k.shape);
    dweights = bench.empty(real_of(type), weights.shape);
  }
  ops::Documents documents() const { return {.starts = starts, .pieces = pieces, .slices = slices}; }
  void dense_target(Bench& bench, std::int64_t W) {
    target = bench.uniform(weights.dtype, {T, W}, 0.05, 1);
    indices = {};
  }
  // The same target over all causal keys, listed in another order with gaps: what the dense stage reads.
  void list_all(Bench& bench, std::int64_t W) {
    const auto dense = target;
    indices = bench.filled(DType::i32, {T, W}, [](auto) { return -1; });
    target = bench.filled(weights.dtype, {T, W}, [](auto) { return 1e3; });  // at empty slots: not to be read
    const auto all = documents();
    for (std::int64_t n = 0; n < all.count(); ++n)
      for (std::int64_t t = all.begin(n); t < all.end(n); ++t)
        for (std::int64_t i = 0; i <= all.before(n) + t - all.begin(n); ++i) {
          const auto slot = t * W + i * 7 % W;
          Bench::set(indices, slot, double(all.first_key(n) + i));
          Bench::set(target, slot, Bench::get(dense, t * dense.shape[1] + i));
        }
  }
  Problem as(Bench& bench, DType type) const {
    Problem p = *this;
    p.q = bench.as(type, q), p.k = bench.as(type, k), p.weights = bench.as(real_of(type), weights),
    p.target = bench.as(real_of(type), target);
    p.outputs(bench, type);
    return p;
  }
  double run(Bench& bench, bool gradients = true) const {
    Bench::set(loss, 0, 0);
    ops::indexer_loss(bench.context(), arguments(gradients));
    return Bench::get(loss, 0);
  }
  double on_cuda(Bench& bench, bool gradients = true) {  // the results in this problem's outputs
    DeviceBench d;
    Problem p = *this;
    for (Tensor* t : {&p.q, &p.k, &p.weights, &p.target, &p.indices})
      if (t->present()) *t = d.copy(*t);
    p.loss = d.copy(bench.of(DType::f32, {1}, {3}));  // adds
    for (Tensor* t : {&p.dq, &p.dk, &p.dweights}) *t = d.empty(t->dtype, t->shape);
    auto args = p.arguments(gradients);
    args.documents = d.documents(documents());
    ops::indexer_loss(d.context(), args);
    if (gradients) dq = d.to_host(bench, p.dq), dk = d.to_host(bench, p.dk), dweights = d.to_host(bench, p.dweights);
    CHECK(d.guards_hold());
    return Bench::get(d.to_host(bench, p.loss), 0) - 3;
  }
  ops::IndexerLoss arguments(bool gradients) const {
    return {.q = q,
            .k = k,
            .weights = weights,
            .target = target,
            .indices = indices,
            .documents = documents(),
            .gradient_scale = gradient_scale,
            .loss = loss,
            .dq = gradients ? dq : Tensor{},
            .dk = gradients ? dk : Tensor{},
            .dweights = gradients ? dweights : Tensor{}};
  }
};

TEST_CASE("indexer loss of two keys is the divergence worked by hand", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  Problem p(bench, f64, 1, 1, {0, 2});
  // row 0 has one key and adds nothing; row 1 scores (ln 3, 0): softmax (3/4, 1/4), target (2, 2) becomes halves
  p.q = bench.of(f64, {2, 1, 1}, {1, 1});
  p.k = bench.of(f64, {2, 1}, {std::log(3.0), -1});
  p.weights = bench.of(f64, {2, 1}, {1, 1});
  p.target = bench.of(f64, {2, 2}, {5, 0, 2, 2});
  p.gradient_scale = 8;
  Bench::set(p.loss, 0, 100);
  ops::indexer_loss(bench.context(), p.arguments(true));
  CHECK(difference(values_of(p.loss), {100 + 0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0)}, 1e-15) == "");
  // dI = 8 * (3/4 - 1/2, 1/4 - 1/2) = (2, -2), and the second key's product is negative
  CHECK(difference(values_of(p.dq), {0, 2 * std::log(3.0)}, 1e-14) == "");
  CHECK(difference(values_of(p.dk), {2, 0}, 1e-14) == "");
  CHECK(difference(values_of(p.dweights), {0, 2 * std::log(3.0)}, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer gradients are the slopes of the scaled loss, in both stages", "[ops][cpu]") {
  const auto sparse = GENERATE(false, true);
  const auto starts = GENERATE(Starts{0, 2}, Starts{0, 1, 8, 41});
  CAPTURE(sparse, starts.back());
  Bench bench(7);
  Problem p(bench, DType::f64, 3, 5, starts);
  p.dense_target(bench, 35);
  p.gradient_scale = 0.3;
  if (sparse) {
    // a third of the keys a row, among them its own
    p.list_all(bench, 37);
    for (std::int64_t t = 0; t < p.T; ++t)
      for (std::int64_t i = 0; i < 37; ++i) {
        const auto s = std::int64_t(Bench::get(p.indices, t * 37 + i));
        if (s >= 0 && t > 1 && (t - s) % 3 != 0) Bench::set(p.indices, t * 37 + i, -1);
      }
  }
  p.run(bench);
  const auto f = [&] { return p.gradient_scale * p.run(bench, false); };
  // a small step, so that none of the products crosses the kink at zero
  CHECK(slope_difference(f, p.q, p.dq, 1e-6, 0, 200, 1e-5) == "");
  CHECK(slope_difference(f, p.k, p.dk, 1e-6, 0, 200, 1e-5) == "");
  CHECK(slope_difference(f, p.weights, p.dweights, 1e-6, 0, 200, 1e-5) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer loss over listed keys equals the dense one when all are listed", "[ops][cpu]") {
  Bench bench(9);
  Problem dense(bench, DType::f64, 4, 6, {0, 1, 30, 171});
  dense.dense_target(bench, 150);
  Problem sparse = dense.as(bench, DType::f64);
  sparse.list_all(bench, 151);
  const double loss = dense.run(bench);
  CHECK(loss > 1);
  CHECK(std::abs(sparse.run(bench) - loss) <= 1e-11 * loss);
  CHECK(difference(sparse.dq, dense.dq, 1e-11) == "");
  CHECK(difference(sparse.dk, dense.dk, 1e-11) == "");
  CHECK(difference(sparse.dweights, dense.dweights, 1e-11) == "");
  CHECK(std::abs(sparse.run(bench, false) - loss) <= 1e-11 * loss);
  CHECK(std::abs(dense.run(bench, false) - loss) <= 1e-14 * loss);
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer loss is zero where the target is the softmax of the scores, and does not depend on the target's scale",
          "[ops][cpu]") {
  Bench bench(10);
  Problem p(bench, DType::f64, 2, 4, {0, 25});
  p.dense_target(bench, 25);
  const double loss = p.run(bench);
  for (std::int64_t i = 0; i < p.target.count(); ++i) Bench::set(p.target, i, 3 * Bench::get(p.target, i));
  CHECK(std::abs(p.run(bench) - loss) <= 1e-12 * loss);
  for (std::int64_t t = 0; t < 25; ++t)
    for (std::int64_t s = 0; s <= t; ++s) Bench::set(p.target, t * 25 + s, std::exp(score(p.q, p.k, p.weights, t, s)));
  CHECK(std::abs(p.run(bench)) <= 1e-12);
  for (const double g : values_of(p.dk)) CHECK(std::abs(g) <= 1e-12);
}

TEST_CASE("indexer loss of rows of one key or none adds nothing, and zeros in the target add nothing", "[ops][cpu]") {
  const auto type = GENERATE(DType::f64, DType::f32, DType::bf16);
  Bench bench(11);
  Problem p(bench, type, 2, 3, {0, 1, 4});
  p.indices = bench.of(DType::i32, {4, 2}, {-1, 0, -1, -1, 2, -1, 3, 1});
  p.target = bench.of(real_of(type), {4, 2}, {0, 0, 0, 0, 0.5, 0, 1, 0});
  const double loss = p.run(bench);
  const double z3 = score(p.q, p.k, p.weights, 3, 3), z1 = score(p.q, p.k, p.weights, 3, 1);
  CHECK(difference({loss}, {std::log1p(std::exp(z1 - z3))}, type == DType::f64 ? 1e-14 : 1e-5) == "");
  for (const double g : values_of(p.dq.rows(0, 3))) CHECK(g == 0);
  for (const double g : values_of(p.dweights.rows(0, 3))) CHECK(g == 0);
  for (const double g : values_of(p.dk.rows(2, 3))) CHECK(g == 0);
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer loss of packed documents is the sum of each alone, and one leaves the other's bits", "[ops][cpu]") {
  const auto sparse = GENERATE(false, true);
  Bench bench(12);
  Problem packed(bench, DType::f64, 3, 5, {0, 50, 120});
  packed.dense_target(bench, 70);
  if (sparse) packed.list_all(bench, 71);
  const double loss = packed.run(bench);
  double sum = 0;
  for (std::size_t d = 0; d < 2; ++d) {
    const auto begin = packed.starts[d], end = packed.starts[d + 1];
    Problem alone(bench, DType::f64, 3, 5, {0, end - begin});
    alone.q = bench.copy(packed.q.rows(begin, end)), alone.k = bench.copy(packed.k.rows(begin, end));
    alone.weights = bench.copy(packed.weights.rows(begin, end)), alone.target = bench.copy(packed.target.rows(begin, end));
    if (sparse)
      alone.indices = bench.filled(DType::i32, {end - begin, 71}, [&](std::int64_t i) {
        const double s = Bench::get(packed.indices, begin * 71 + i);
        return s < 0 ? s : s - double(begin);
      });
    sum += alone.run(bench);
    CHECK(difference(packed.dq.rows(begin, end), alone.dq, 1e-11) == "");
    CHECK(difference(packed.dk.rows(begin, end), alone.dk, 1e-11) == "");
    CHECK(difference(packed.dweights.rows(begin, end), alone.dweights, 1e-11) == "");
  }
  CHECK(std::abs(loss - sum) <= 1e-12 * loss);
  Problem changed = packed.as(bench, DType::f64);
  for (std::int64_t i = 0; i < 50 * 5; ++i) Bench::set(changed.k, i, -2 * Bench::get(packed.k, i));
  changed.run(bench);
  CHECK(!same(changed.dq.rows(0, 50), packed.dq.rows(0, 50)));
  CHECK(same(changed.dq.rows(50, 120), packed.dq.rows(50, 120)));
  CHECK(same(changed.dk.rows(50, 120), packed.dk.rows(50, 120)));
  CHECK(same(changed.dweights.rows(50, 120), packed.dweights.rows(50, 120)));
}

TEST_CASE("indexer loss in f32 and bf16 is within rounding of f64 on the same inputs, with the same bits for any number of threads",
          "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto sparse = GENERATE(false, true);
  CAPTURE(name_of(type), sparse);
  Bench bench(13);
  Problem got(bench, type, 5, 11, {0, 3, 104, 305});
  got.dense_target(bench, 201);
  if (sparse) got.list_all(bench, 205);
  const Problem want = got.as(bench, DType::f64), again = got.as(bench, type);
  const double loss = got.run(bench);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(threads == 1 ? 3 : 1);
  CHECK(again.run(bench) == loss);
  omp_set_num_threads(threads);
  CHECK((same(again.dq, got.dq) && same(again.dk, got.dk) && same(again.dweights, got.dweights)));
  CHECK(difference({loss}, {want.run(bench)}, 1e-5) == "");
  CHECK(difference(got.dq, want.dq, type == DType::bf16 ? 4e-3 : 5e-5) == "");
  CHECK(difference(got.dk, want.dk, type == DType::bf16 ? 4e-3 : 5e-5) == "");
  CHECK(difference(got.dweights, want.dweights, 5e-5) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("indexer takes zero rows and refuses what does not fit", "[ops][cpu]") {
  Bench bench(14);
  const auto f64 = DType::f64;
  Problem none(bench, f64, 2, 3, {0});
  none.dense_target(bench, 0);
  CHECK(none.run(bench) == 0);
  select(bench, none.q, none.k, none.weights, {0}, 2);
  Problem p(bench, f64, 2, 3, {0, 2, 5});
  p.dense_target(bench, 3);
  const auto refused = [&](auto change) {
    Problem broken = p;
    change(broken);
    CHECK_THROWS_AS(broken.run(bench), Error);
  };
  refused([&](Problem& b) { b.k = bench.zeros(f64, {4, 3}); });
  refused([&](Problem& b) { b.weights = bench.zeros(f64, {5, 3}); });
  refused([&](Problem& b) { b.weights = bench.zeros(DType::f32, {5, 2}); });
  refused([&](Problem& b) { b.target = bench.zeros(f64, {5, 2}); });
  refused([&](Problem& b) { b.indices = bench.zeros(DType::i32, {5, 2}); });
  refused([&](Problem& b) { b.indices = bench.filled(DType::i32, {5, 3}, [](auto) { return 5; }); });
  refused([&](Problem& b) { b.dk = {}; });
  refused([&](Problem& b) { b.dq = bench.zeros(f64, {5, 2, 2}); });
  refused([&](Problem& b) { b.loss = bench.zeros(f64, {2}); });
  refused([&](Problem& b) { b.starts = {0, 2}; });
  CHECK_THROWS_AS(select(bench, p.q, bench.zeros(f64, {5, 2}), p.weights, p.starts, 2), Error);
  CHECK_THROWS_AS(select(bench, p.q, p.k, bench.zeros(DType::f32, {5, 2}), p.starts, 2), Error);
  CHECK_THROWS_AS(select(bench, p.q, p.k, p.weights, p.starts, 0), Error);
}

std::string gradient_error(ConstTensor t, ConstTensor f64) {  // a sum's terms are rounded too, and rows of few keys have large ones
  double largest = 0;
  for (const double v : values_of(f64)) largest = std::max(largest, std::abs(v));
  return t.dtype == DType::bf16 ? difference(t, f64, 1e-2, 4e-3 * largest) : difference(t, f64, 1e-4);
}

TEST_CASE("indexer loss on CUDA is within rounding of the f64 reference, in both stages", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto sparse = GENERATE(false, true);
  for (const auto& [J, H] : {std::pair<std::int64_t, std::int64_t>{5, 11}, {32, 128}, {64, 128}, {40, 128}}) {
    if (type == DType::f32 && J > 32) continue;  // of so many products one is so near 0 that rounding turns its gradient on
    CAPTURE(name_of(type), sparse, J, H);
    Bench bench(23);
    Problem got(bench, type, J, H, {0, 3, 104, 305});
    for (std::int64_t i = 0; i < got.weights.count(); ++i)  // scores of size 1
      Bench::set(got.weights, i, Bench::get(got.weights, i) / std::sqrt(double(J * H)));
    got.gradient_scale = 0.7;
    got.dense_target(bench, 203);
    if (sparse) got.list_all(bench, 205);
    const Problem want = got.as(bench, DType::f64);
    Problem alone = got;
    const double loss = got.on_cuda(bench);
    CHECK(difference({loss}, {want.run(bench)}, 1e-4) == "");
    CHECK(alone.on_cuda(bench, false) == loss);
    CHECK(gradient_error(got.dq, want.dq) == "");
    CHECK(gradient_error(got.dk, want.dk) == "");
    CHECK(difference(got.dweights, want.dweights, 2e-4) == "");
  }
}

TEST_CASE(
    "indexer loss on CUDA of slices of sequences over the keys of all is within rounding of the f64 reference, in both stages",
    "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto sparse = GENERATE(false, true);
  const auto moved = GENERATE(false, true);
  for (const auto& [J, H] : {std::pair<std::int64_t, std::int64_t>{5, 11}, {32, 128}})
    for (std::size_t i = 0; i < kCutSlices.size(); ++i) {
      CAPTURE(name_of(type), sparse, moved, J, i);
      const Sliced slice(kCutStarts, kCutSlices[i], moved ? kCutKeysMoved : Starts{});
      Bench bench(31);
      Problem got(bench, type, J, H, slice.documents(), kCutKeys);
      got.q = whole(bench, type, got.q.shape), got.k = whole(bench, type, got.k.shape);  // of so many products none is nearly 0
      for (std::int64_t x = 0; x < got.weights.count(); ++x)                             // scores of size 1
        Bench::set(got.weights, x, Bench::get(got.weights, x) / std::sqrt(double(J * H)));
      got.gradient_scale = 0.7;
      got.dense_target(bench, 271);
      if (sparse) got.list_all(bench, 275);
      const Problem want = got.as(bench, DType::f64);
      const double loss = got.on_cuda(bench);
      const auto seen = seen_keys(got.documents(), kCutKeys);
      CHECK(zero_where_unseen(got.dk, seen));
      if (got.T == 0) {
        CHECK(loss == 0);
        continue;
      }
      CHECK(difference({loss}, {want.run(bench)}, 1e-4) == "");
      Problem alone = got;
      CHECK(alone.on_cuda(bench, false) == loss);
      CHECK(gradient_error(got.dq, want.dq) == "");
      CHECK(gradient_error(got.dk, want.dk) == "");
      CHECK(difference(got.dweights, want.dweights, 2e-4) == "");
    }
}

TEST_CASE("indexer loss on CUDA gives the same bits in 20 runs, and takes zero rows", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto sparse = GENERATE(false, true);
  Bench bench(29);
  Problem none(bench, DType::bf16, 32, 128, {0});
  none.dense_target(bench, 0);
  CHECK(none.on_cuda(bench) == 0);
  for (const auto type : {DType::f32, DType::bf16}) {
    Problem first(bench, type, 32, 128, {0, 9, 700});
    first.dense_target(bench, 700);
    if (sparse) first.list_all(bench, 701);
    const double loss = first.on_cuda(bench);
    for (int run = 0; run < 20; ++run) {
      Bench again_bench;
      Problem again = first;
      CHECK(again.on_cuda(again_bench) == loss);
      CHECK((same(again.dq, first.dq) && same(again.dk, first.dk) && same(again.dweights, first.dweights)));
    }
  }
}

}  // namespace

TEST_CASE("indexer selects for a slice of the queries among all keys, and its losses and gradients sum to those of all", "[ops][cpu]") {
  Bench bench(43);
  const auto f64 = DType::f64;
  const Starts starts{0, 3, 60, 61, 120};
  const std::int64_t T = 120, J = 3, H = 5, K = 7;
  const bool sparse = GENERATE(false, true);
  const auto q = bench.normal(f64, {T, J, H}), k = bench.normal(f64, {T, H}), weights = bench.normal(f64, {T, J});
  const auto indices = select(bench, q, k, weights, starts, K), target = bench.uniform(f64, {T, sparse ? K : 60}, 0, 1);
  const auto run = [&](ConstTensor some_q, ConstTensor some_weights, ConstTensor some_target, ConstTensor some_indices,
                       const ops::Documents& documents, Tensor loss, Tensor dq, Tensor dk, Tensor dweights) {
    ops::indexer_loss(bench.context(), ops::IndexerLoss{.q = some_q,
                                                        .k = k,
                                                        .weights = some_weights,
                                                        .target = some_target,
                                                        .indices = sparse ? some_indices : ConstTensor{},
                                                        .documents = documents,
                                                        .gradient_scale = 0.3,
                                                        .loss = loss,
                                                        .dq = dq,
                                                        .dk = dk,
                                                        .dweights = dweights});
  };
  const auto loss = bench.zeros(f64, {1}), dq = bench.empty(f64, q.shape), dk = bench.empty(f64, k.shape), dw = bench.empty(f64, weights.shape);
  run(q, weights, target, indices, {starts}, loss, dq, dk, dw);
  const auto losses = bench.zeros(f64, {1}), dk_sum = bench.zeros(f64, k.shape);
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 40}, {40, 60}, {60, 110}, {110, 120}}) {
    CAPTURE(begin, end);
    const Sliced slice(starts, begin, end);
    const auto rows = [&, b = begin, e = end](Tensor t) { return t.rows(b, e); };
    const auto selected = bench.empty(DType::i32, {end - begin, K});
    ops::indexer_select(
        bench.context(),
        ops::IndexerSelect{.q = rows(q), .k = k, .weights = rows(weights), .documents = slice.documents(), .indices = selected});
    CHECK(same(selected, rows(indices)));
    const auto some_dq = bench.empty(f64, rows(q).shape), some_dk = bench.empty(f64, k.shape), some_dw = bench.empty(f64, rows(weights).shape);
    run(rows(q), rows(weights), rows(target), rows(indices), slice.documents(), losses, some_dq, some_dk, some_dw);
    CHECK(difference(some_dq, rows(dq), 1e-12, 1e-13) == "");
    CHECK(difference(some_dw, rows(dw), 1e-12, 1e-13) == "");
    for (std::int64_t i = 0; i < dk.count(); ++i) Bench::set(dk_sum, i, Bench::get(dk_sum, i) + Bench::get(some_dk, i));
  }
  CHECK(difference(losses, loss, 1e-12) == "");
  CHECK(difference(dk_sum, dk, 1e-12, 1e-13) == "");
  CHECK(bench.guards_hold());
}

}  // namespace moetrain::test
