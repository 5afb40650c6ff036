// attention_test.cpp -- dense attention against numbers worked by hand, explicit softmax, its own slope, separate documents, and
// f64.
#include "ops/attention.h"

#include <omp.h>

#include <cmath>
#include <cstring>
#include <tuple>
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

// Inputs, outputs and gradients of one call.
struct Problem {
  std::int64_t T, keys, N, Hn, He, Hv, W;
  double scale = 0.7;
  Starts starts;
  std::vector<ops::Documents::Piece> pieces;
  std::int64_t slices = 0;
  Tensor q, kv, k_extra, dout;
  Tensor o, lse, probability, dq, dkv, dk_extra;

  Problem(Bench& bench, DType type, std::int64_t heads, std::int64_t nope, std::int64_t extra, std::int64_t value, Starts documents)
      : Problem(bench, type, heads, nope, extra, value, ops::Documents{documents}, documents.back()) {}
  Problem(Bench& bench, DType type, std::int64_t heads, std::int64_t nope, std::int64_t extra, std::int64_t value,
          const ops::Documents& d, std::int64_t all_keys)
      : T(d.starts.back()),
        keys(all_keys),
        N(heads),
        Hn(nope),
        He(extra),
        Hv(value),
        W(d.most_keys() + 2),
        starts(d.starts.begin(), d.starts.end()),
        pieces(d.pieces.begin(), d.pieces.end()),
        slices(d.slices) {
    q = bench.normal(type, {T, N, Hn + He});
    kv = bench.normal(type, {keys, N, Hn + Hv});
    k_extra = bench.normal(type, {keys, He});
    dout = bench.normal(type, {T, N, Hv});
    outputs(bench, type);
  }
  void outputs(Bench& bench, DType type) {
    o = bench.empty(type, {T, N, Hv});
    lse = bench.empty(real_of(type), {T, N});
    probability = bench.empty(real_of(type), {T, W});
    dq = bench.empty(type, q.shape);
    dkv = bench.empty(type, kv.shape);
    dk_extra = bench.empty(type, k_extra.shape);
  }
  ops::Documents documents() const { return {.starts = starts, .pieces = pieces, .slices = slices}; }
  Problem as(Bench& bench, DType type) const {  // the same inputs, outputs of its own
    Problem p = *this;
    p.q = bench.as(type, q), p.kv = bench.as(type, kv), p.k_extra = bench.as(type, k_extra), p.dout = bench.as(type, dout);
    p.outputs(bench, type);
    return p;
  }
  void forward(Bench& bench, bool with_probability = true) const {
    ops::attention(bench.context(), ops::AttentionForward{.q = q,
                                                          .kv = kv,
                                                          .k_extra = k_extra,
                                                          .scale = scale,
                                                          .documents = documents(),
                                                          .o = o,
                                                          .lse = lse,
                                                          .probability = with_probability ? probability : Tensor{}});
  }
  void backward(Bench& bench) const {
    ops::attention(bench.context(), ops::AttentionBackward{.do_ = dout,
                                                           .q = q,
                                                           .kv = kv,
                                                           .k_extra = k_extra,
                                                           .o = o,
                                                           .lse = lse,
                                                           .scale = scale,
                                                           .documents = documents(),
                                                           .dq = dq,
                                                           .dkv = dkv,
                                                           .dk_extra = dk_extra});
  }
  // The outputs that CUDA gives, backward from the forward's of its own, or from those of `given`.
  Problem on_cuda(Bench& bench, bool with_probability = true, const Problem* given = nullptr) const {
    DeviceBench d;
    Problem there = *this, out = *this;
    there.q = d.copy(q), there.kv = d.copy(kv), there.k_extra = d.copy(k_extra), there.dout = d.copy(dout);
    for (Tensor Problem::*t : {&Problem::o, &Problem::lse, &Problem::probability, &Problem::dq, &Problem::dkv, &Problem::dk_extra})
      there.*t = d.empty((this->*t).dtype, (this->*t).shape);
    const auto documents = d.documents(this->documents());
    ops::attention(d.context(), ops::AttentionForward{.q = there.q,
                                                      .kv = there.kv,
                                                      .k_extra = there.k_extra,
                                                      .scale = scale,
                                                      .documents = documents,
                                                      .o = there.o,
                                                      .lse = there.lse,
                                                      .probability = with_probability ? there.probability : Tensor{}});
    ops::attention(d.context(), ops::AttentionBackward{.do_ = there.dout,
                                                       .q = there.q,
                                                       .kv = there.kv,
                                                       .k_extra = there.k_extra,
                                                       .o = given ? d.copy(given->o) : there.o,
                                                       .lse = given ? d.copy(given->lse) : there.lse,
                                                       .scale = scale,
                                                       .documents = documents,
                                                       .dq = there.dq,
                                                       .dkv = there.dkv,
                                                       .dk_extra = there.dk_extra});
    for (Tensor Problem::*t : {&Problem::o, &Problem::lse, &Problem::probability, &Problem::dq, &Problem::dkv, &Problem::dk_extra})
      out.*t = d.to_host(bench, there.*t);
    CHECK(d.guards_hold());
    return out;
  }
};

// The root mean square of what got differs from want, relative to want's.
double mean_gap(ConstTensor got, ConstTensor want) {
  double gaps = 0, sum = 0;
  for (std::int64_t i = 0; i < want.count(); ++i) {
    gaps += std::pow(Bench::get(got, i) - Bench::get(want, i), 2);
    sum += std::pow(Bench::get(want, i), 2);
  }
  return std::sqrt(gaps / sum);
}
// Outputs against those of f64 on the same inputs. Weights rounded to bf16 show most in the few rows that have large values, those
// of few keys: every element is held to `one`, the root of their mean square to `mean`.
void check_close(const Problem& got, const Problem& want, double one, double mean, bool with_probability = true) {
  const bool alone = got.documents().most_keys() == 1;  // positions alone in their documents: no gradient by scores
  for (const auto& [a, b, zero] : {std::tuple{got.o, want.o, false},
                                   {got.dq, want.dq, alone},
                                   {got.dkv, want.dkv, false},
                                   {got.dk_extra, want.dk_extra, alone}}) {
    if (a.count() == 0) continue;
    CHECK(difference(a, b, one, zero ? mean : 0) == "");
    if (!zero) CHECK(mean_gap(a, b) <= mean);
  }
  CHECK(difference(got.lse, want.lse, 1e-5) == "");
  if (with_probability) CHECK(difference(got.probability, want.probability, 1e-4) == "");
}
// What f64 gives on the CPU for the same inputs; backward's o and lse are those of `given`, so that its rounding is not compared.
Problem in_f64(Bench& bench, const Problem& p, const Problem& given) {
  Problem want = p.as(bench, DType::f64);
  want.forward(bench);
  Problem backward = want;
  backward.o = bench.as(DType::f64, given.o), backward.lse = bench.as(DType::f64, given.lse);
  backward.backward(bench);
  return want;
}

TEST_CASE("attention of two positions weighs them as worked by hand", "[ops][cpu]") {
  Bench bench;
  Problem p(bench, DType::f64, 1, 1, 1, 1, {0, 2});
  p.scale = 0.5;
  p.q = bench.of(DType::f64, {2, 1, 2}, {1, 1, 2, 4});
  // position 1 scores 0.5 * (2 * 0 + 4 * 0) = 0 against the first and 0.5 * (2 * ln 9 - 4 * ln 3 / 2) = ln 3 against itself
  const double ln3 = std::log(3.0);
  p.kv = bench.of(DType::f64, {2, 1, 2}, {0, 10, 2 * ln3, 30});
  p.k_extra = bench.of(DType::f64, {2, 1}, {0, -ln3 / 2});
  p.forward(bench);
  CHECK(difference(values_of(p.o), {10, 25}, 1e-14) == "");
  CHECK(difference(values_of(p.lse), {0, std::log(4.0)}, 1e-14) == "");
  CHECK(difference(values_of(p.probability), {1, 0, 0, 0, 0.25, 0.75, 0, 0}, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("attention equals an explicit softmax over the earlier positions of the document", "[ops][cpu]") {
  const auto extra = GENERATE(std::int64_t(0), std::int64_t(3));
  Bench bench(std::uint64_t(extra) + 11);
  const Problem p(bench, DType::f64, 3, 5, extra, 4, {0, 1, 1, 80, 227});
  p.forward(bench);
  std::vector<double> o(std::size_t(p.o.count())), lse(std::size_t(p.lse.count())), mean(std::size_t(p.probability.count()));
  for (std::size_t d = 0; d + 1 < p.starts.size(); ++d)
    for (std::int64_t t = p.starts[d]; t < p.starts[d + 1]; ++t)
      for (std::int64_t n = 0; n < p.N; ++n) {
        std::vector<double> z;
        double sum = 0;
        for (std::int64_t s = p.starts[d]; s <= t; ++s) {
          double dot = 0;
          for (std::int64_t h = 0; h < p.Hn; ++h)
            dot += Bench::get(p.q, (t * p.N + n) * (p.Hn + p.He) + h) * Bench::get(p.kv, (s * p.N + n) * (p.Hn + p.Hv) + h);
          for (std::int64_t h = 0; h < p.He; ++h)
            dot += Bench::get(p.q, (t * p.N + n) * (p.Hn + p.He) + p.Hn + h) * Bench::get(p.k_extra, s * p.He + h);
          z.push_back(std::exp(p.scale * dot));
          sum += z.back();
        }
        lse[std::size_t(t * p.N + n)] = std::log(sum);
        for (std::size_t i = 0; i < z.size(); ++i) {
          mean[std::size_t(t * p.W) + i] += z[i] / sum / double(p.N);
          for (std::int64_t h = 0; h < p.Hv; ++h)
            o[std::size_t((t * p.N + n) * p.Hv + h)] +=
                z[i] / sum * Bench::get(p.kv, ((p.starts[d] + std::int64_t(i)) * p.N + n) * (p.Hn + p.Hv) + p.Hn + h);
        }
      }
  CHECK(difference(values_of(p.o), o, 1e-12) == "");
  CHECK(difference(values_of(p.lse), lse, 1e-12) == "");
  CHECK(difference(values_of(p.probability), mean, 1e-12) == "");
  for (std::int64_t t = 0; t < p.T; ++t) {
    double sum = 0;
    for (std::int64_t i = 0; i < p.W; ++i) sum += Bench::get(p.probability, t * p.W + i);
    CHECK(std::abs(sum - 1) <= 1e-12);
  }
  const auto o_with = bench.copy(p.o);
  p.forward(bench, false);
  CHECK(difference(p.o, o_with, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("attention backward is the slope of attention forward", "[ops][cpu]") {
  const auto extra = GENERATE(std::int64_t(0), std::int64_t(3));
  const auto starts = GENERATE(Starts{0, 1}, Starts{0, 5, 6, 13}, Starts{0, 70});
  CAPTURE(extra, starts.back());
  Bench bench(21);
  const Problem p(bench, DType::f64, 2, 5, extra, 4, starts);
  const auto f = [&] {
    p.forward(bench, false);
    return weighted_sum(p.o, p.dout);
  };
  f();
  p.backward(bench);
  const double alone = p.T == 1 ? 1e-9 : 0;  // one position attends to itself whatever the scores: no slope
  CHECK(slope_difference(f, p.q, p.dq, 1e-7, alone) == "");
  CHECK(slope_difference(f, p.kv, p.dkv, 1e-7) == "");
  if (extra > 0) CHECK(slope_difference(f, p.k_extra, p.dk_extra, 1e-7, alone) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("attention of packed documents is that of each alone", "[ops][cpu]") {
  Bench bench(31);
  const Problem packed(bench, DType::f64, 2, 6, 2, 3, {0, 67, 77, 177});
  packed.forward(bench);
  packed.backward(bench);
  for (std::size_t d = 0; d + 1 < packed.starts.size(); ++d) {
    const auto begin = packed.starts[d], end = packed.starts[d + 1];
    Problem alone(bench, DType::f64, 2, 6, 2, 3, {0, end - begin});
    alone.q = bench.copy(packed.q.rows(begin, end)), alone.kv = bench.copy(packed.kv.rows(begin, end));
    alone.k_extra = bench.copy(packed.k_extra.rows(begin, end)), alone.dout = bench.copy(packed.dout.rows(begin, end));
    alone.forward(bench);
    alone.backward(bench);
    CHECK(difference(packed.o.rows(begin, end), alone.o, 1e-13) == "");
    CHECK(difference(packed.lse.rows(begin, end), alone.lse, 1e-13) == "");
    CHECK(difference(packed.dq.rows(begin, end), alone.dq, 1e-12) == "");
    CHECK(difference(packed.dkv.rows(begin, end), alone.dkv, 1e-12) == "");
    CHECK(difference(packed.dk_extra.rows(begin, end), alone.dk_extra, 1e-12) == "");
    for (std::int64_t t = begin; t < end; ++t)
      CHECK(difference(packed.probability.rows(t, t + 1).reshape({packed.W}).rows(0, alone.W),
                       alone.probability.rows(t - begin, t - begin + 1).reshape({alone.W}), 1e-13) == "");
  }
}

TEST_CASE("attention of a document keeps its bits when another one and later positions change, or the number of threads",
          "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  Bench bench(41);
  const Problem p(bench, type, 2, 8, 4, 8, {0, 90, 170, 200});
  p.forward(bench);
  p.backward(bench);
  const auto same = [](ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; };
  Problem again = p.as(bench, type);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(threads == 1 ? 3 : 1);
  again.forward(bench);
  again.backward(bench);
  omp_set_num_threads(threads);
  CHECK((same(again.o, p.o) && same(again.probability, p.probability) && same(again.dq, p.dq) && same(again.dkv, p.dkv) &&
         same(again.dk_extra, p.dk_extra)));

  for (const auto t : {std::int64_t(3), std::int64_t(180)}) {
    Bench::set(again.q, t * p.q.shape.row(), 9);
    Bench::set(again.kv, t * p.kv.shape.row() + 1, -9);
    Bench::set(again.kv, t * p.kv.shape.row() + p.Hn, -9);
    Bench::set(again.k_extra, t * p.He, 9);
  }
  again.forward(bench);
  again.backward(bench);
  CHECK(!same(again.o.rows(0, 90), p.o.rows(0, 90)));
  for (const auto& [changed, kept] : {std::pair{again.o, p.o},
                                      {again.lse, p.lse},
                                      {again.probability, p.probability},
                                      {again.dq, p.dq},
                                      {again.dkv, p.dkv},
                                      {again.dk_extra, p.dk_extra}})
    CHECK(same(changed.rows(90, 170), kept.rows(90, 170)));
  CHECK(same(again.o.rows(0, 3), p.o.rows(0, 3)));
  CHECK(same(again.o.rows(170, 180), p.o.rows(170, 180)));
}

TEST_CASE("attention in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto starts = GENERATE(Starts{0, 1}, Starts{0, 3, 4, 200, 331});
  CAPTURE(name_of(type), starts.back());
  Bench bench(51);
  const Problem got(bench, type, 3, 17, 5, 11, starts);
  Problem want = got.as(bench, DType::f64);
  const double stored = type == DType::bf16 ? 4e-3 : 1e-5, real = 3e-6, meant = got.T == 1 ? stored : 0;
  got.forward(bench);
  want.forward(bench);
  CHECK(difference(got.o, want.o, type == DType::bf16 ? 4e-3 : 3e-6) == "");
  CHECK(difference(got.lse, want.lse, real) == "");
  CHECK(difference(got.probability, want.probability, 1e-5) == "");
  want.o = bench.as(DType::f64, got.o), want.lse = bench.as(DType::f64, got.lse);  // inputs of backward: the same, as rounded
  got.backward(bench);
  want.backward(bench);
  CHECK(difference(got.dq, want.dq, stored, meant) == "");
  CHECK(difference(got.dkv, want.dkv, stored) == "");
  CHECK(difference(got.dk_extra, want.dk_extra, stored, meant) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("attention stays finite where scores are far beyond the range of exp", "[ops][cpu]") {
  Bench bench(61);
  Problem p(bench, DType::f32, 2, 4, 2, 3, {0, 40});
  p.scale = 300;
  p.forward(bench);
  p.backward(bench);
  const Problem want = p.as(bench, DType::f64);
  want.forward(bench);
  CHECK(difference(p.o, want.o, 1e-2) == "");
  for (const auto& t : {p.dq, p.dkv, p.dk_extra})
    for (const double v : values_of(t)) CHECK(std::isfinite(v));
}

TEST_CASE("attention takes zero rows and refuses what does not fit", "[ops][cpu]") {
  Bench bench(71);
  const auto f64 = DType::f64;
  const Problem none(bench, f64, 2, 3, 1, 2, {0});
  none.forward(bench);
  none.backward(bench);
  Problem p(bench, f64, 2, 3, 1, 2, {0, 2, 5});
  const auto refused = [&](auto change) {
    Problem broken = p;
    change(broken);
    CHECK_THROWS_AS(broken.forward(bench), Error);
    CHECK_THROWS_AS(broken.backward(bench), Error);
  };
  refused([&](Problem& b) { b.kv = bench.zeros(f64, {5, 1, 5}); });
  refused([&](Problem& b) { b.k_extra = bench.zeros(f64, {4, 1}); });
  refused([&](Problem& b) { b.k_extra = bench.zeros(f64, {5, 4}); });
  refused([&](Problem& b) { b.o = bench.zeros(f64, {5, 2, 3}); });
  refused([&](Problem& b) { b.lse = bench.zeros(DType::f32, {5, 2}); });
  refused([&](Problem& b) { b.kv = bench.zeros(DType::f32, {5, 2, 5}); });
  refused([&](Problem& b) { b.starts = {0, 2, 4}; });
  refused([&](Problem& b) { b.starts = {0, 6, 5}; });
  p.probability = bench.zeros(f64, {5, 2});  // the longest document has three
  CHECK_THROWS_AS(p.forward(bench), Error);
  p.dkv = bench.zeros(f64, {5, 2, 4});
  CHECK_THROWS_AS(p.backward(bench), Error);
}

struct Shape3 {
  std::int64_t N, Hn, He, Hv;
};

TEST_CASE("attention on CUDA is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto heads =
      GENERATE(Shape3{1, 1, 0, 1}, Shape3{3, 17, 5, 11}, Shape3{2, 64, 64, 64}, Shape3{2, 128, 64, 128}, Shape3{1, 256, 64, 256});
  const auto starts = GENERATE(Starts{0, 1}, Starts{0, 1, 2, 3}, Starts{0, 129}, Starts{0, 3, 3, 4, 200, 331, 332});
  CAPTURE(name_of(type), heads.N, heads.Hn, heads.He, heads.Hv, starts.back());
  Bench bench(81);
  Problem p(bench, type, heads.N, heads.Hn, heads.He, heads.Hv, starts);
  p.scale = 0.7 / std::sqrt(double(heads.Hn + heads.He));
  const Problem got = p.on_cuda(bench);
  check_close(got, in_f64(bench, p, got), type == DType::bf16 ? 0.1 : 1e-4, type == DType::bf16 ? 5e-3 : 1e-5);
}

TEST_CASE("attention on CUDA is right over many blocks of long and short documents", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto starts = GENERATE(Starts{0, 1500}, Starts{0, 128, 256, 257, 700, 763, 1024, 1407});
  CAPTURE(name_of(type), starts.size());
  Bench bench(91);
  Problem p(bench, type, 3, 128, 64, 128, starts);
  p.scale = 1 / std::sqrt(192.0);
  const Problem got = p.on_cuda(bench);
  check_close(got, in_f64(bench, p, got), type == DType::bf16 ? 0.1 : 1e-4, type == DType::bf16 ? 5e-3 : 1e-5);
}

TEST_CASE("attention on CUDA in bf16 follows f32 on CUDA over thousands of positions", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto starts = GENERATE(Starts{0, 5000}, Starts{0, 700, 701, 4100, 4228, 5000});
  CAPTURE(starts.size());
  Bench bench(141);
  Problem p(bench, DType::bf16, 3, 128, 64, 128, starts);
  p.scale = 1 / std::sqrt(192.0);
  const Problem got = p.on_cuda(bench, false), wide = p.as(bench, DType::f32);
  Problem given = wide;  // backward's o and lse, so that their rounding is not compared
  given.o = bench.as(DType::f32, got.o), given.lse = got.lse;
  check_close(got, wide.on_cuda(bench, false, &given), 0.3, 5e-3, false);
}

TEST_CASE("attention on CUDA stays finite where scores are far beyond the range of exp", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  Bench bench(61);
  Problem p(bench, type, 2, 128, 64, 128, {0, 40, 300});
  p.scale = 30;
  const Problem got = p.on_cuda(bench);
  CHECK(difference(got.o, in_f64(bench, p, got).o, 2e-2) == "");
  for (const auto& t : {got.dq, got.dkv, got.dk_extra})
    for (const double v : values_of(t)) CHECK(std::isfinite(v));
}

TEST_CASE("attention on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto heads = GENERATE(Shape3{5, 40, 24, 56}, Shape3{5, 128, 64, 128});
  Bench bench(101);
  const Problem p(bench, type, heads.N, heads.Hn, heads.He, heads.Hv, {0, 90, 1201});
  const Problem first = p.on_cuda(bench);
  const auto same = [](ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; };
  for (int run = 0; run < 20; ++run) {
    CAPTURE(name_of(type), heads.Hn, run);
    const Problem again = p.on_cuda(bench);
    CHECK((same(again.o, first.o) && same(again.lse, first.lse) && same(again.probability, first.probability)));
    CHECK((same(again.dq, first.dq) && same(again.dkv, first.dkv) && same(again.dk_extra, first.dk_extra)));
  }
}

TEST_CASE("attention on CUDA keeps a document's bits when another one and later positions change", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto heads = GENERATE(Shape3{2, 16, 8, 8}, Shape3{2, 128, 64, 128});
  Bench bench(111);
  const Problem p(bench, DType::bf16, heads.N, heads.Hn, heads.He, heads.Hv, {0, 90, 170, 400});
  Problem changed = p.as(bench, DType::bf16);
  for (const auto t : {std::int64_t(3), std::int64_t(350)}) {
    Bench::set(changed.q, t * p.q.shape.row(), 9);
    Bench::set(changed.kv, t * p.kv.shape.row() + 1, -9);
    Bench::set(changed.kv, t * p.kv.shape.row() + p.Hn, -9);
    Bench::set(changed.k_extra, t * p.He, 9);
  }
  const Problem before = p.on_cuda(bench), after = changed.on_cuda(bench);
  const auto same = [](ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; };
  CHECK(!same(after.o.rows(0, 90), before.o.rows(0, 90)));
  CHECK(!same(after.o.rows(170, 400), before.o.rows(170, 400)));
  for (const auto& [a, b] : {std::pair{after.o, before.o},
                             {after.lse, before.lse},
                             {after.probability, before.probability},
                             {after.dq, before.dq},
                             {after.dkv, before.dkv},
                             {after.dk_extra, before.dk_extra}})
    CHECK(same(a.rows(90, 170), b.rows(90, 170)));
  CHECK(same(after.o.rows(170, 350), before.o.rows(170, 350)));
}

TEST_CASE("attention backward on CUDA sums dk_extra over groups of heads, and gives each head what it gives it alone",
          "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto heads = GENERATE(Shape3{4, 16, 8, 8}, Shape3{4, 128, 64, 128});
  constexpr std::int64_t kTimes = 600;
  Bench bench(131);
  const Problem few(bench, DType::bf16, heads.N, heads.Hn, heads.He, heads.Hv, {0, 130});
  Problem many = few;
  many.N = kTimes * few.N;
  const auto repeated = [&](ConstTensor t) {  // a row's heads again and again
    const std::int64_t row = t.shape.row() * size_of(t.dtype);
    const Tensor out = bench.empty(t.dtype, {t.shape[0], kTimes * t.shape[1], t.shape[2]});
    for (std::int64_t i = 0; i < t.shape[0] * kTimes; ++i)
      std::memcpy(static_cast<std::byte*>(out.data) + i * row, static_cast<const std::byte*>(t.data) + i / kTimes * row,
                  std::size_t(row));
    return out;
  };
  many.q = repeated(few.q), many.kv = repeated(few.kv), many.dout = repeated(few.dout);
  many.outputs(bench, DType::bf16);
  CHECK(ops::AttentionBackward{.q = many.q, .kv = many.kv}.heads_a_group() > 1);
  const Problem want = few.on_cuda(bench, false), got = many.on_cuda(bench, false);
  const auto same = [](ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; };
  CHECK((same(got.o, repeated(want.o)) && same(got.dq, repeated(want.dq)) && same(got.dkv, repeated(want.dkv))));
  const Tensor sum =
      bench.filled(DType::f64, want.dk_extra.shape, [&](std::int64_t i) { return kTimes * Bench::get(want.dk_extra, i); });
  CHECK(difference(got.dk_extra, sum, 1e-2) == "");
}

TEST_CASE("attention on CUDA takes zero rows, and gives the same without probability", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(121);
  Problem(bench, DType::bf16, 2, 128, 64, 128, {0}).on_cuda(bench);
  const Problem p(bench, DType::bf16, 2, 128, 64, 128, {0, 150});
  CHECK(difference(p.on_cuda(bench, false).o, p.on_cuda(bench).o, 1e-14) == "");
}

TEST_CASE("attention on CUDA of slices of sequences over the keys of all is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto heads = GENERATE(Shape3{3, 17, 5, 11}, Shape3{2, 128, 64, 128});
  const auto moved = GENERATE(false, true);
  for (std::size_t i = 0; i < kCutSlices.size(); ++i) {
    CAPTURE(name_of(type), heads.Hn, moved, i);
    const Sliced slice(kCutStarts, kCutSlices[i], moved ? kCutKeysMoved : Starts{});
    Bench bench(151);
    Problem p(bench, type, heads.N, heads.Hn, heads.He, heads.Hv, slice.documents(), kCutKeys);
    p.scale = 0.7 / std::sqrt(double(heads.Hn + heads.He));
    const Problem got = p.on_cuda(bench);
    if (p.T > 0) check_close(got, in_f64(bench, p, got), type == DType::bf16 ? 0.1 : 1e-4, type == DType::bf16 ? 5e-3 : 1e-5);
    const auto seen = seen_keys(p.documents(), p.keys);
    CHECK(zero_where_unseen(got.dkv, seen));
    CHECK(zero_where_unseen(got.dk_extra, seen));
    const Problem without = p.on_cuda(bench, false);
    CHECK(std::memcmp(without.o.data, got.o.data, std::size_t(got.o.bytes())) == 0);
  }
}

TEST_CASE("attention on CUDA gives documents that are pieces, but wholly here, the bits of whole documents", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  const auto heads = GENERATE(Shape3{3, 17, 5, 11}, Shape3{2, 128, 64, 128});
  Bench bench(161);
  const Problem whole(bench, DType::bf16, heads.N, heads.Hn, heads.He, heads.Hv, {0, 3, 3, 128, 400, 1001});
  Problem pieces = whole;
  const Sliced slice(whole.starts, {{0, 400}, {400, 1001}});
  pieces.starts = slice.starts, pieces.pieces = slice.pieces, pieces.slices = 2;
  const Problem want = whole.on_cuda(bench), got = pieces.on_cuda(bench);
  const auto same = [](ConstTensor a, ConstTensor b) { return std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0; };
  CHECK((same(got.o, want.o) && same(got.lse, want.lse) && same(got.probability, want.probability)));
  CHECK((same(got.dq, want.dq) && same(got.dkv, want.dkv) && same(got.dk_extra, want.dk_extra)));
}

}  // namespace

TEST_CASE("attention of slices of the queries over all keys is that of all queries, and its gradients of keys sum to theirs", "[ops][cpu]") {
  Bench bench(41);
  const Starts starts{0, 3, 100, 101, 190};
  const auto He = GENERATE(0, 5);
  Problem p(bench, DType::f64, 3, 7, He, 6, starts);
  p.forward(bench);
  p.backward(bench);
  const Tensor dkv = bench.zeros(DType::f64, p.kv.shape), dk_extra = bench.zeros(DType::f64, p.k_extra.shape);
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 60}, {60, 100}, {100, 170}, {170, 190}}) {
    CAPTURE(begin, end);
    const Sliced slice(starts, begin, end);
    const std::int64_t T = end - begin;
    const auto rows = [&, b = begin, e = end](Tensor t) { return t.rows(b, e); };
    const Tensor o = bench.empty(DType::f64, {T, p.N, p.Hv}), lse = bench.empty(DType::f64, {T, p.N}),
                 probability = bench.empty(DType::f64, {T, p.W}), dq = bench.empty(DType::f64, {T, p.N, p.Hn + p.He}),
                 some_dkv = bench.empty(DType::f64, p.kv.shape), some_dk_extra = bench.empty(DType::f64, p.k_extra.shape);
    ops::attention(bench.context(), ops::AttentionForward{.q = rows(p.q),
                                                          .kv = p.kv,
                                                          .k_extra = p.k_extra,
                                                          .scale = p.scale,
                                                          .documents = slice.documents(),
                                                          .o = o,
                                                          .lse = lse,
                                                          .probability = probability});
    CHECK(difference(o, rows(p.o), 1e-12, 1e-12) == "");
    CHECK(difference(lse, rows(p.lse), 1e-12, 1e-12) == "");
    CHECK(difference(probability, rows(p.probability), 1e-12, 1e-12) == "");
    ops::attention(bench.context(), ops::AttentionBackward{.do_ = rows(p.dout),
                                                           .q = rows(p.q),
                                                           .kv = p.kv,
                                                           .k_extra = p.k_extra,
                                                           .o = o,
                                                           .lse = lse,
                                                           .scale = p.scale,
                                                           .documents = slice.documents(),
                                                           .dq = dq,
                                                           .dkv = some_dkv,
                                                           .dk_extra = some_dk_extra});
    CHECK(difference(dq, rows(p.dq), 1e-12, 1e-12) == "");
    for (std::int64_t i = 0; i < dkv.count(); ++i) Bench::set(dkv, i, Bench::get(dkv, i) + Bench::get(some_dkv, i));
    for (std::int64_t i = 0; i < dk_extra.count(); ++i) Bench::set(dk_extra, i, Bench::get(dk_extra, i) + Bench::get(some_dk_extra, i));
  }
  CHECK(difference(dkv, p.dkv, 1e-12, 1e-12) == "");
  CHECK(difference(dk_extra, p.dk_extra, 1e-12, 1e-12) == "");
  CHECK(bench.guards_hold());
}

}  // namespace moetrain::test
