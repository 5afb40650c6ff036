// kda_test.cpp -- the chunked delta rule is the recurrence, its gradients are its slopes, and documents do not see each other.
#include "ops/kda.h"

#include <omp.h>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

using ops::KdaForm;

enum class Gates { bounded, floor, published_bounded, published_unbounded };

struct Problem {
  Tensor q, k, v, g, beta, initial, do_, dfinal;
  std::vector<std::int64_t> starts;
  bool bounded = true;
  std::int64_t N() const { return q.shape[1]; }
  std::int64_t H() const { return q.shape[2]; }
  std::int64_t documents() const { return std::int64_t(starts.size()) - 1; }
};

struct Results {
  Tensor o, final_state, dq, dk, dv, dg, dbeta, dinitial;
  std::vector<std::pair<const char*, Tensor>> all() const {
    return {{"o", o},         {"final_state", final_state}, {"dq", dq}, {"dk", dk}, {"dv", dv}, {"dg", dg},
            {"dbeta", dbeta}, {"dinitial_state", dinitial}};
  }
};

Tensor unit_rows(Bench& bench, DType dtype, Shape shape) {
  const Tensor x = bench.normal(DType::f64, shape);
  const auto H = shape[2];
  double* p = x.as<double>();
  for (std::int64_t row = 0; row < x.count() / H; ++row) {
    double sum = 1e-6;
    for (std::int64_t d = 0; d < H; ++d) sum += p[row * H + d] * p[row * H + d];
    for (std::int64_t d = 0; d < H; ++d) p[row * H + d] /= std::sqrt(sum);
  }
  return bench.as(dtype, x);
}

// Log decays: anywhere in (-5, 0); -5 exactly; or as a fresh model has them, in either form of the gate.
Tensor gates(Bench& bench, DType dtype, Shape shape, Gates kind) {
  if (kind == Gates::bounded) return bench.uniform(dtype, shape, -5, 0);
  if (kind == Gates::floor) return bench.filled(dtype, shape, [](std::int64_t) { return -5.0; });
  const auto N = shape[1], H = shape[2];
  const Tensor f = bench.normal(DType::f64, shape), rate = bench.uniform(DType::f64, {N}, 1, 16),
               log_dt = bench.uniform(DType::f64, {N, H}, std::log(1e-3), std::log(1e-1));
  return bench.filled(dtype, shape, [&](std::int64_t i) {
    const double dt = std::exp(Bench::get(log_dt, i % (N * H)));
    const double z = Bench::get(f, i) + dt + std::log(-std::expm1(-dt));
    if (kind == Gates::published_bounded) return -5 / (1 + std::exp(-z));
    return -Bench::get(rate, i / H % N) * std::log1p(std::exp(z));
  });
}

Problem problem(Bench& bench, DType dtype, std::vector<std::int64_t> starts, std::int64_t N, std::int64_t H, std::int64_t Hv,
                Gates kind = Gates::bounded) {
  const auto T = starts.back(), documents = std::int64_t(starts.size()) - 1;
  const auto real = real_of(dtype);
  Problem p;
  p.q = unit_rows(bench, dtype, {T, N, H});
  p.k = unit_rows(bench, dtype, {T, N, H});
  p.v = bench.normal(dtype, {T, N, Hv});
  p.g = gates(bench, real, {T, N, H}, kind);
  p.beta = bench.uniform(real, {T, N}, 0.05, 0.95);
  p.initial = bench.normal(real, {documents, N, H, Hv}, 0.5);
  p.do_ = bench.normal(dtype, {T, N, Hv});
  p.dfinal = bench.normal(real, {documents, N, H, Hv}, 0.5);
  p.starts = std::move(starts);
  p.bounded = kind != Gates::published_unbounded;
  return p;
}

Problem widened(Bench& bench, const Problem& p) {
  Problem w = p;
  for (Tensor* t : {&w.q, &w.k, &w.v, &w.g, &w.beta, &w.initial, &w.do_, &w.dfinal}) *t = bench.as(DType::f64, *t);
  return w;
}

void forward(Bench& bench, const Problem& p, KdaForm form, const Results& r) {
  ops::kda(bench.context(), ops::KdaForward{.form = form,
                                            .q = p.q,
                                            .k = p.k,
                                            .v = p.v,
                                            .g = p.g,
                                            .beta = p.beta,
                                            .scale = 1 / std::sqrt(double(p.H())),
                                            .bounded_gate = p.bounded,
                                            .documents = {p.starts},
                                            .initial_state = p.initial,
                                            .o = r.o,
                                            .final_state = r.final_state});
}

Results run(Bench& bench, const Problem& p, KdaForm form) {
  const auto real = p.g.dtype;
  Results r;
  r.o = bench.empty(p.v.dtype, p.v.shape);
  r.final_state = bench.empty(real, p.initial.shape);
  r.dq = bench.empty(p.q.dtype, p.q.shape);
  r.dk = bench.empty(p.q.dtype, p.q.shape);
  r.dv = bench.empty(p.q.dtype, p.v.shape);
  r.dg = bench.empty(real, p.g.shape);
  r.dbeta = bench.empty(real, p.beta.shape);
  r.dinitial = bench.empty(real, p.initial.shape);
  forward(bench, p, form, r);
  ops::kda(bench.context(), ops::KdaBackward{.form = form,
                                             .do_ = p.do_,
                                             .q = p.q,
                                             .k = p.k,
                                             .v = p.v,
                                             .g = p.g,
                                             .beta = p.beta,
                                             .scale = 1 / std::sqrt(double(p.H())),
                                             .bounded_gate = p.bounded,
                                             .documents = {p.starts},
                                             .initial_state = p.initial,
                                             .dfinal_state = p.dfinal,
                                             .dq = r.dq,
                                             .dk = r.dk,
                                             .dv = r.dv,
                                             .dg = r.dg,
                                             .dbeta = r.dbeta,
                                             .dinitial_state = r.dinitial});
  return r;
}

std::string first_difference(const Results& got, const Results& want, double relative) {
  const auto g = got.all(), w = want.all();
  for (std::size_t i = 0; i < g.size(); ++i) {
    if (w[i].second.count() == 0) continue;
    const auto text = difference(g[i].second, w[i].second, relative);
    if (!text.empty()) return std::string(g[i].first) + text;
  }
  return {};
}

bool same_bytes(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}

struct Envelope {
  double largest = 0, rms = 0;  // of the gap, in units of the reference's root mean square
};
Envelope envelope(ConstTensor got, ConstTensor want) {
  double gaps = 0, wants = 0, largest = 0;
  for (std::int64_t i = 0; i < want.count(); ++i) {
    const double gap = std::abs(Bench::get(got, i) - Bench::get(want, i));
    if (!(gap <= largest)) largest = gap;
    gaps += gap * gap;
    wants += Bench::get(want, i) * Bench::get(want, i);
  }
  const double unit = std::sqrt(wants / double(want.count()));
  return {largest / unit, std::sqrt(gaps / double(want.count())) / unit};
}

}  // namespace

TEST_CASE("kda of two tokens is what the recurrence gives by hand", "[ops][cpu]") {
  // One head, H = 2, Hv = 1, scale 2. S0 = (8, 4). Token 0: decay (1/2, 1/4), so S^- = (4, 1); k = (1, 0), v = 6, beta = 1/2:
  // r = 2, S = (5, 1); q = (1, 1): o = 12. Token 1: no decay; k = (0, 1), v = -3, beta = 1: r = -4, S = (5, -3); q = (0, 1): o =
  // -6.
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  const bool bounded = GENERATE(true, false);
  Bench bench;
  const auto f64 = DType::f64;
  const Tensor q = bench.of(f64, {2, 1, 2}, {1, 1, 0, 1}), k = bench.of(f64, {2, 1, 2}, {1, 0, 0, 1}),
               v = bench.of(f64, {2, 1, 1}, {6, -3}), g = bench.of(f64, {2, 1, 2}, {-std::log(2.0), -std::log(4.0), 0, 0}),
               beta = bench.of(f64, {2, 1}, {0.5, 1}), S0 = bench.of(f64, {1, 1, 2, 1}, {8, 4});
  const Tensor o = bench.empty(f64, {2, 1, 1}), S = bench.empty(f64, {1, 1, 2, 1});
  const std::vector<std::int64_t> starts{0, 2};
  ops::kda(bench.context(), ops::KdaForward{form, q, k, v, g, beta, 2, bounded, {starts}, S0, o, S});
  CHECK(difference(values_of(o), {12, -6}, 1e-14) == "");
  CHECK(difference(values_of(S), {5, -3}, 1e-14) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("kda backward is the slope of kda forward", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  const auto kind = GENERATE(Gates::bounded, Gates::published_unbounded);
  Bench bench(3);
  const Problem p = problem(bench, DType::f64, {0, 19, 20, 20, 86}, 2, 5, 3, kind);
  const Results r = run(bench, p, form);
  const Results probe{.o = bench.empty(DType::f64, p.v.shape),
                      .final_state = bench.empty(DType::f64, p.initial.shape),
                      .dq = {},
                      .dk = {},
                      .dv = {},
                      .dg = {},
                      .dbeta = {},
                      .dinitial = {}};
  const auto loss = [&] {
    forward(bench, p, form, probe);
    return weighted_sum(probe.o, p.do_) + weighted_sum(probe.final_state, p.dfinal);
  };
  CHECK(slope_difference(loss, p.q, r.dq) == "");
  CHECK(slope_difference(loss, p.k, r.dk) == "");
  CHECK(slope_difference(loss, p.v, r.dv) == "");
  CHECK(slope_difference(loss, p.g, r.dg) == "");
  CHECK(slope_difference(loss, p.beta, r.dbeta) == "");
  CHECK(slope_difference(loss, p.initial, r.dinitial) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("chunked kda equals recurrent kda in f64 at every length", "[ops][cpu]") {
  const std::int64_t length = GENERATE(1, 2, 15, 16, 17, 63, 64, 65, 200);
  const auto kind = GENERATE(Gates::bounded, Gates::floor, Gates::published_bounded, Gates::published_unbounded);
  Bench bench{std::uint64_t(length)};
  const Problem p = problem(bench, DType::f64, {0, length, length + 3, length + 3, 2 * length + 40}, 2, 8, 12, kind);
  CAPTURE(length, int(kind));
  CHECK(first_difference(run(bench, p, KdaForm::chunked), run(bench, p, KdaForm::recurrent), 1e-9) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("bounded gates give the same with and without factored diagonal blocks", "[ops][cpu]") {
  Bench bench(5);
  Problem p = problem(bench, DType::f64, {0, 150}, 1, 16, 7, Gates::floor);
  const Results factored = run(bench, p, KdaForm::chunked);
  p.bounded = false;
  CHECK(first_difference(factored, run(bench, p, KdaForm::chunked), 1e-10) == "");
}

TEST_CASE("f32 kda is finite and near the f64 recurrence at gate -5 and at published gates", "[ops][cpu]") {
  const auto kind = GENERATE(Gates::floor, Gates::bounded, Gates::published_bounded, Gates::published_unbounded);
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(7);
  const Problem p = problem(bench, DType::f32, {0, 64, 230}, 2, 128, 128, kind);
  const Results want = run(bench, widened(bench, p), KdaForm::recurrent);
  CAPTURE(int(kind), int(form));
  CHECK(first_difference(run(bench, p, form), want, 1e-4) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("bf16 kda is within rounding of the f64 recurrence on the same inputs", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(9);
  const Problem p = problem(bench, DType::bf16, {0, 5, 105}, 3, 16, 24, Gates::published_bounded);
  const Results want = run(bench, widened(bench, p), KdaForm::recurrent), got = run(bench, p, form);
  CHECK(first_difference(got, want, 5e-3) == "");
  CHECK(difference(got.dg, want.dg, 1e-4) == "");  // inside it is f32: what is not stored in bf16 is not rounded to it
  CHECK(bench.guards_hold());
}

TEST_CASE("f32 chunked kda keeps its error envelope over many seeds", "[ops][cpu]") {
  for (std::uint64_t seed = 100; seed < 132; ++seed) {
    Bench bench(seed);
    const auto kind = seed % 2 == 0 ? Gates::bounded : Gates::published_unbounded;
    Problem p = problem(bench, DType::f32, {0, 130}, 1, 32, 32, kind);
    // Neighbouring keys nearly alike: their gradients are differences of large terms.
    for (std::int64_t i = 32; i < p.k.count(); ++i)
      if (i / 32 % 4 != 0) Bench::set(p.k, i, 0.98 * Bench::get(p.k, i - 32) + 0.02 * Bench::get(p.k, i));
    const auto got = run(bench, p, KdaForm::chunked).all(), want = run(bench, widened(bench, p), KdaForm::recurrent).all();
    for (std::size_t i = 0; i < got.size(); ++i) {
      const auto gap = envelope(got[i].second, want[i].second);
      CAPTURE(seed, got[i].first, gap.largest, gap.rms);
      CHECK(gap.largest <= 3e-5);
      CHECK(gap.rms <= 2e-6);
    }
  }
}

TEST_CASE("packed documents give kda's results of separate documents, to the bit", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(11);
  const Problem p = problem(bench, DType::f32, {0, 70, 71, 171}, 2, 6, 5);
  const Results packed = run(bench, p, form);
  for (std::int64_t n = 0; n < p.documents(); ++n) {
    const auto begin = p.starts[std::size_t(n)], end = p.starts[std::size_t(n) + 1];
    Problem one = p;
    for (Tensor* t : {&one.q, &one.k, &one.v, &one.g, &one.beta, &one.do_}) *t = t->rows(begin, end);
    one.initial = p.initial.rows(n, n + 1);
    one.dfinal = p.dfinal.rows(n, n + 1);
    one.starts = {0, end - begin};
    const auto alone = run(bench, one, form).all(), all = packed.all();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const bool by_document = all[i].second.shape.rank() == 4;
      CAPTURE(n, all[i].first);
      CHECK(same_bytes(by_document ? all[i].second.rows(n, n + 1) : all[i].second.rows(begin, end), alone[i].second));
    }
  }
}

TEST_CASE("changing document a leaves kda's outputs of document b as they were, to the bit", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(13);
  const Problem p = problem(bench, DType::f32, {0, 37, 110}, 2, 6, 5);
  const Results before = run(bench, p, form);
  for (const Tensor& t : {p.q, p.k, p.v, p.g, p.beta, p.do_})
    for (std::int64_t i = 0; i < 37 * t.shape.row(); ++i) Bench::set(t, i, 0.7 * Bench::get(t, i) - 0.01);
  const Results after = run(bench, p, form);
  CHECK(same_bytes(before.o.rows(37, 110), after.o.rows(37, 110)));
  CHECK(same_bytes(before.dk.rows(37, 110), after.dk.rows(37, 110)));
  CHECK(same_bytes(before.final_state.rows(1, 2), after.final_state.rows(1, 2)));
  CHECK(!same_bytes(before.o.rows(0, 37), after.o.rows(0, 37)));
}

TEST_CASE("kda without states is kda with zero states", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(15);
  Problem p = problem(bench, DType::f64, {0, 80}, 1, 4, 3);
  p.initial = bench.zeros(DType::f64, p.initial.shape);
  p.dfinal = bench.zeros(DType::f64, p.dfinal.shape);
  const Results want = run(bench, p, form);
  const auto f64 = DType::f64;
  const Tensor o = bench.empty(f64, p.v.shape), dq = bench.empty(f64, p.q.shape), dk = bench.empty(f64, p.q.shape),
               dv = bench.empty(f64, p.v.shape), dg = bench.empty(f64, p.g.shape), dbeta = bench.empty(f64, p.beta.shape);
  const double scale = 1 / std::sqrt(double(p.H()));
  ops::kda(bench.context(), ops::KdaForward{form, p.q, p.k, p.v, p.g, p.beta, scale, true, {p.starts}, {}, o, {}});
  ops::kda(bench.context(),
           ops::KdaBackward{form, p.do_, p.q, p.k, p.v, p.g, p.beta, scale, true, {p.starts}, {}, {}, dq, dk, dv, dg, dbeta, {}});
  CHECK(same_bytes(o, want.o));
  CHECK(same_bytes(dk, want.dk));
  CHECK(same_bytes(dg, want.dg));
}

TEST_CASE("kda of no tokens hands its states through", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(17);
  const Problem empty = problem(bench, DType::f32, {0, 0, 0}, 2, 3, 4);
  const Results r = run(bench, empty, form);
  CHECK(same_bytes(r.final_state, empty.initial));
  CHECK(same_bytes(r.dinitial, empty.dfinal));
  const Problem none = problem(bench, DType::f32, {0}, 2, 3, 4);
  run(bench, none, form);
  CHECK(bench.guards_hold());
}

TEST_CASE("kda gives the same bits with any number of threads", "[ops][cpu]") {
  const auto form = GENERATE(KdaForm::chunked, KdaForm::recurrent);
  Bench bench(19);
  const Problem p = problem(bench, DType::f32, {0, 90, 100}, 3, 32, 32);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const auto one = run(bench, p, form).all();
  omp_set_num_threads(3);
  const auto three = run(bench, p, form).all();
  omp_set_num_threads(threads);
  for (std::size_t i = 0; i < one.size(); ++i) CHECK(same_bytes(one[i].second, three[i].second));
}

TEST_CASE("kda refuses tensors that do not fit each other", "[ops][cpu]") {
  Bench bench;
  const Problem good = problem(bench, DType::f32, {0, 4, 9}, 2, 3, 5);
  const auto refused = [&](auto&& spoil) {
    Problem p = good;
    spoil(p);
    CHECK_THROWS_AS(run(bench, p, KdaForm::chunked), Error);
  };
  refused([&](Problem& p) { p.k = bench.zeros(DType::f32, {9, 2, 4}); });
  refused([&](Problem& p) { p.v = bench.zeros(DType::f32, {8, 2, 5}); });
  refused([&](Problem& p) { p.g = bench.zeros(DType::f64, p.g.shape); });
  refused([&](Problem& p) { p.beta = bench.zeros(DType::f32, {9, 1}); });
  refused([&](Problem& p) { p.initial = bench.zeros(DType::f32, {1, 2, 3, 5}); });
  refused([&](Problem& p) { p.dfinal = bench.zeros(DType::f32, {2, 2, 5, 3}); });
  refused([&](Problem& p) { p.do_ = bench.zeros(DType::bf16, p.do_.shape); });
  refused([&](Problem& p) { p.starts = {0, 4, 8}; });
  refused([&](Problem& p) { p.starts = {0, 10, 9}; });
}

}  // namespace moetrain::test
