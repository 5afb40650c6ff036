// sparse_attention_test.cpp -- sparse attention against numbers worked by hand, its own slope, dense attention, separate documents,
// f64.
#include "ops/sparse_attention.h"

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "ops/attention.h"
#include "ops/head_linear.h"
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

// K slots a row: up to `taken` distinct causal positions of the document, scattered over the slots in no order, the rest -1.
Tensor scattered(Bench& bench, const Starts& starts, std::int64_t K, std::int64_t taken, std::uint64_t seed) {
  const auto indices = bench.filled(DType::i32, {starts.back(), K}, [](auto) { return -1; });
  for (std::size_t d = 0; d + 1 < starts.size(); ++d)
    for (std::int64_t t = starts[d]; t < starts[d + 1]; ++t) {
      const auto shuffled = [&](std::int64_t count, std::uint64_t stream) {
        std::vector<std::pair<double, std::int64_t>> order;
        for (std::int64_t i = 0; i < count; ++i)
          order.emplace_back(ops::uniform(seed, stream, std::uint64_t((t - starts[d]) * 1000 + i)), i);
        std::sort(order.begin(), order.end());
        return order;
      };
      const auto slots = shuffled(K, 1), keys = shuffled(t - starts[d], 2);
      Bench::set(indices, t * K + slots[0].second, double(t));  // its own position always
      for (std::int64_t i = 1; i < std::min(taken, t - starts[d] + 1); ++i)
        Bench::set(indices, t * K + slots[std::size_t(i)].second, double(starts[d] + keys[std::size_t(i - 1)].second));
    }
  return indices;
}

struct Problem {
  std::int64_t T, N, C, He, Hq, K;
  double scale = 0.6;
  Tensor q_latent, q, latent, k_extra, indices, dout;
  Tensor o, lse, probability, dq_latent, dq, dlatent, dk_extra;

  Problem(Bench& bench, DType type, std::int64_t heads, std::int64_t width, std::int64_t extra, Tensor selected)
      : T(selected.shape[0]), N(heads), C(width), He(extra), Hq(extra + 4), K(selected.shape[1]), indices(selected) {
    q_latent = bench.normal(type, {T, N, C});
    q = bench.normal(type, {T, N, Hq});
    latent = bench.normal(type, {T, C});
    k_extra = bench.normal(type, {T, He});
    dout = bench.normal(type, {T, N, C});
    outputs(bench, type);
  }
  void outputs(Bench& bench, DType type) {
    o = bench.empty(type, {T, N, C});
    lse = bench.empty(real_of(type), {T, N});
    probability = bench.empty(real_of(type), {T, K});
    dq_latent = bench.empty(type, {T, N, C});
    dq = bench.empty(type, {T, N, Hq});
    dlatent = bench.empty(type, latent.shape);
    dk_extra = bench.empty(type, k_extra.shape);
  }
  // The queries of some rows, over all keys.
  Problem of(Bench& bench, const Sliced& slice) const {
    Problem p = *this;
    for (Tensor Problem::*t : {&Problem::q_latent, &Problem::q, &Problem::indices, &Problem::dout}) p.*t = slice.rows(bench, p.*t);
    p.T = p.q.shape[0];
    p.outputs(bench, q.dtype);
    return p;
  }
  Problem as(Bench& bench, DType type) const {
    Problem p = *this;
    p.q_latent = bench.as(type, q_latent), p.q = bench.as(type, q), p.latent = bench.as(type, latent);
    p.k_extra = bench.as(type, k_extra), p.dout = bench.as(type, dout);
    p.outputs(bench, type);
    return p;
  }
  void forward(Bench& bench, bool with_probability = true) const { run_forward(bench.context(), with_probability); }
  void backward(Bench& bench) const { run_backward(bench.context()); }
  void run_forward(ops::Context& ctx, bool with_probability) const {
    ops::sparse_attention(ctx, ops::SparseAttentionForward{.q_latent = q_latent,
                                                           .q = q,
                                                           .latent = latent,
                                                           .k_extra = k_extra,
                                                           .indices = indices,
                                                           .scale = scale,
                                                           .o_latent = o,
                                                           .lse = lse,
                                                           .probability = with_probability ? probability : Tensor{}});
  }
  void run_backward(ops::Context& ctx) const {
    ops::sparse_attention(ctx, ops::SparseAttentionBackward{.do_latent = dout,
                                                            .q_latent = q_latent,
                                                            .q = q,
                                                            .latent = latent,
                                                            .k_extra = k_extra,
                                                            .indices = indices,
                                                            .o_latent = o,
                                                            .lse = lse,
                                                            .scale = scale,
                                                            .dq_latent = dq_latent,
                                                            .dq = dq,
                                                            .dlatent = dlatent,
                                                            .dk_extra = dk_extra});
  }
  // Forward and backward on the CUDA device; the results in this problem's outputs. lse and o of backward are those of forward.
  void on_cuda(Bench& bench, bool with_probability = true) {
    DeviceBench d;
    Problem p = *this;
    for (Tensor* t : {&p.q_latent, &p.q, &p.latent, &p.k_extra, &p.dout, &p.indices}) *t = d.copy(*t);
    for (Tensor* t : {&p.o, &p.lse, &p.probability, &p.dq_latent, &p.dq, &p.dlatent, &p.dk_extra}) *t = d.empty(t->dtype, t->shape);
    p.run_in(d.context(), with_probability);
    o = d.to_host(bench, p.o), lse = d.to_host(bench, p.lse), probability = d.to_host(bench, p.probability);
    dq_latent = d.to_host(bench, p.dq_latent), dq = d.to_host(bench, p.dq);
    dlatent = d.to_host(bench, p.dlatent), dk_extra = d.to_host(bench, p.dk_extra);
    CHECK(d.guards_hold());
  }
  void run_in(ops::Context& ctx, bool with_probability) const {
    run_forward(ctx, with_probability);
    run_backward(ctx);
  }
  // dq with the columns that nothing writes, and that have no slope, as zeros; false where such a column was written
  std::pair<Tensor, bool> whole_dq(Bench& bench) const {
    const auto whole = bench.copy(dq);
    bool untouched = true;
    for (std::int64_t i = 0; i < whole.count(); ++i)
      if (i % Hq < Hq - He) {
        untouched = untouched && std::isnan(Bench::get(dq, i));
        Bench::set(whole, i, 0);
      }
    return {whole, untouched};
  }
};

TEST_CASE("sparse attention of two selected positions weighs them as worked by hand", "[ops][cpu]") {
  Bench bench;
  const auto f64 = DType::f64;
  const auto indices = bench.of(DType::i32, {3, 3}, {-1, 0, -1, -1, -1, -1, 2, -1, 0});
  Problem p(bench, f64, 1, 2, 1, indices);
  p.scale = 0.5;
  // position 2 scores 0.5 * (2 * ln 3 + 4 * 0) = ln 3 against position 0 and 0.5 * (2 * 1 - 4 / 2) = 0 against itself
  p.q_latent = bench.of(f64, {3, 1, 2}, {5, 5, 5, 5, 2, 0});
  p.q = bench.filled(f64, {3, 1, 5}, [](std::int64_t i) { return i % 5 == 4 ? 4 : 1e6; });
  p.latent = bench.of(f64, {3, 2}, {std::log(3.0), 8, 1e6, 1e6, 1, 4});
  p.k_extra = bench.of(f64, {3, 1}, {0, 1e6, -0.5});
  p.forward(bench);
  const double ln3 = std::log(3.0);
  CHECK(difference(values_of(p.o), {ln3, 8, 0, 0, 0.75 * ln3 + 0.25, 7}, 1e-14) == "");
  CHECK(difference(values_of(p.probability), {0, 1, 0, 0, 0, 0, 0.25, 0, 0.75}, 1e-14) == "");
  CHECK(std::abs(Bench::get(p.lse, 2) - std::log(4.0)) <= 1e-14);
  // the row without a position
  CHECK(Bench::get(p.lse, 1) == -std::numeric_limits<double>::infinity());
  p.backward(bench);
  for (const auto& t : {p.dq_latent, p.dlatent, p.dk_extra})
    for (const double v : values_of(t)) CHECK(std::isfinite(v));
  CHECK(values_of(p.dq_latent.rows(1, 2)) == std::vector<double>{0, 0});
  CHECK(Bench::get(p.dq, 9) == 0);
  CHECK(values_of(p.dlatent.rows(1, 2)) == std::vector<double>{0, 0});  // nobody selected it
  CHECK(bench.guards_hold());
}

TEST_CASE("sparse attention backward is the slope of sparse attention forward", "[ops][cpu]") {
  const auto extra = GENERATE(std::int64_t(0), std::int64_t(3));
  const auto T = GENERATE(std::int64_t(1), std::int64_t(6), std::int64_t(45));
  CAPTURE(extra, T);
  Bench bench(13);
  const Problem p(bench, DType::f64, 3, 5, extra, scattered(bench, {0, T / 3, T}, 7, 5, 3));
  const auto f = [&] {
    p.forward(bench, false);
    return weighted_sum(p.o, p.dout);
  };
  f();
  p.backward(bench);
  const auto [dq, untouched] = p.whole_dq(bench);
  CHECK(untouched);
  const double alone = T == 1 ? 1e-9 : 0;
  CHECK(slope_difference(f, p.q_latent, p.dq_latent, 1e-7, alone) == "");
  CHECK(slope_difference(f, p.latent, p.dlatent, 1e-7) == "");
  if (extra > 0) {
    CHECK(slope_difference(f, p.q, dq, 1e-7, alone, 400) == "");
    CHECK(slope_difference(f, p.k_extra, p.dk_extra, 1e-7, alone) == "");
  }
  CHECK(bench.guards_hold());
}

TEST_CASE("sparse attention over all causal positions equals dense attention, outputs and gradients", "[ops][cpu]") {
  const auto He = GENERATE(std::int64_t(0), std::int64_t(3));
  const Starts starts{0, 1, 24, 95};
  const std::int64_t T = 95, N = 3, Hn = 6, Hv = 4, C = 9, K = 80;
  Bench bench(23);
  const auto f64 = DType::f64;
  const auto w = bench.normal(f64, {N, Hn + Hv, C}, 0.5);  // key rows, then value rows
  Problem p(bench, f64, N, C, He, scattered(bench, starts, K, K, 4));
  p.Hq = Hn + He;
  p.q = bench.normal(f64, {T, N, p.Hq});
  p.dq = bench.empty(f64, p.q.shape);
  const auto kv = bench.zeros(f64, {T, N, Hn + Hv});
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < N * (Hn + Hv); ++i)
      for (std::int64_t c = 0; c < C; ++c)
        Bench::set(kv, t * N * (Hn + Hv) + i,
                   Bench::get(kv, t * N * (Hn + Hv) + i) + Bench::get(p.latent, t * C + c) * Bench::get(w, i * C + c));
  const auto dy = bench.normal(f64, {T, N, Hv});

  // dense
  const auto o = bench.empty(f64, {T, N, Hv}), lse = bench.empty(f64, {T, N}), mean = bench.empty(f64, {T, T});
  const auto dq = bench.empty(f64, p.q.shape), dkv = bench.empty(f64, kv.shape), dk_extra = bench.empty(f64, {T, He});
  ops::attention(bench.context(), ops::AttentionForward{.q = p.q,
                                                        .kv = kv,
                                                        .k_extra = p.k_extra,
                                                        .scale = p.scale,
                                                        .documents = {starts},
                                                        .o = o,
                                                        .lse = lse,
                                                        .probability = mean});
  ops::attention(bench.context(), ops::AttentionBackward{.do_ = dy,
                                                         .q = p.q,
                                                         .kv = kv,
                                                         .k_extra = p.k_extra,
                                                         .o = o,
                                                         .lse = lse,
                                                         .scale = p.scale,
                                                         .documents = {starts},
                                                         .dq = dq,
                                                         .dkv = dkv,
                                                         .dk_extra = dk_extra});
  std::vector<double> dlatent(std::size_t(T * C)), dw(std::size_t(w.count()));
  for (std::int64_t t = 0; t < T; ++t)
    for (std::int64_t i = 0; i < N * (Hn + Hv); ++i)
      for (std::int64_t c = 0; c < C; ++c) {
        const double g = Bench::get(dkv, t * N * (Hn + Hv) + i);
        dlatent[std::size_t(t * C + c)] += g * Bench::get(w, i * C + c);
        dw[std::size_t(i * C + c)] += g * Bench::get(p.latent, t * C + c);
      }

  // sparse
  using ops::HeadDirection;
  const auto y = bench.empty(f64, {T, N, Hv}), dw_sparse = bench.zeros(f64, w.shape);
  auto& ctx = bench.context();
  ops::head_linear(
      ctx, ops::HeadLinearForward{
               .direction = HeadDirection::to_latent, .w = w, .row = 0, .width = Hn, .x = p.q, .column = 0, .y = p.q_latent});
  p.forward(bench);
  ops::head_linear(ctx,
                   ops::HeadLinearForward{
                       .direction = HeadDirection::from_latent, .w = w, .row = Hn, .width = Hv, .x = p.o, .column = 0, .y = y});
  ops::head_linear(ctx, ops::HeadLinearBackward{.direction = HeadDirection::from_latent,
                                                .w = w,
                                                .row = Hn,
                                                .width = Hv,
                                                .x = p.o,
                                                .column = 0,
                                                .dy = dy,
                                                .dx = p.dout,
                                                .dw = dw_sparse});
  p.backward(bench);
  ops::head_linear(ctx, ops::HeadLinearBackward{.direction = HeadDirection::to_latent,
                                                .w = w,
                                                .row = 0,
                                                .width = Hn,
                                                .x = p.q,
                                                .column = 0,
                                                .dy = p.dq_latent,
                                                .dx = p.dq,
                                                .dw = dw_sparse});

  CHECK(difference(y, o, 1e-10) == "");
  CHECK(difference(p.lse, lse, 1e-10) == "");
  CHECK(difference(p.dq, dq, 1e-10) == "");
  CHECK(difference(values_of(p.dlatent), dlatent, 1e-10) == "");
  CHECK(difference(values_of(dw_sparse), dw, 1e-10) == "");
  if (He > 0) CHECK(difference(p.dk_extra, dk_extra, 1e-10) == "");
  for (std::size_t d = 0; d + 1 < starts.size(); ++d)
    for (std::int64_t t = starts[d]; t < starts[d + 1]; ++t)
      for (std::int64_t k = 0; k < K; ++k) {
        const auto s = std::int64_t(Bench::get(p.indices, t * K + k));
        CHECK(std::abs(Bench::get(p.probability, t * K + k) - (s < 0 ? 0 : Bench::get(mean, t * T + s - starts[d]))) <= 1e-12);
      }
  CHECK(bench.guards_hold());
}

TEST_CASE("sparse attention does not depend on the order of the slots, and no other position matters", "[ops][cpu]") {
  Bench bench(33);
  const std::int64_t T = 60, K = 9;  // 9 of up to 60 positions
  const Problem p(bench, DType::f64, 2, 7, 2, scattered(bench, {0, T}, K, 7, 5));
  p.forward(bench);
  p.backward(bench);
  Problem turned = p.as(bench, DType::f64);
  turned.indices =
      bench.filled(DType::i32, {T, K}, [&](std::int64_t i) { return Bench::get(p.indices, i / K * K + K - 1 - i % K); });
  turned.forward(bench);
  turned.backward(bench);
  CHECK(difference(turned.o, p.o, 1e-13) == "");
  CHECK(difference(turned.dlatent, p.dlatent, 1e-12) == "");
  CHECK(difference(turned.dq_latent, p.dq_latent, 1e-12) == "");

  const std::int64_t t = T - 1;
  Problem changed = p.as(bench, DType::f64);
  for (std::int64_t s = 0; s < T; ++s) {
    bool selected = false;
    for (std::int64_t k = 0; k < K; ++k) selected = selected || Bench::get(p.indices, t * K + k) == double(s);
    if (!selected) Bench::set(changed.latent, s * p.C, 1e3);
  }
  changed.forward(bench);
  CHECK(same(changed.o.rows(t, T), p.o.rows(t, T)));
  CHECK(!same(changed.o, p.o));
  double sum = 0;
  for (std::int64_t k = 0; k < K; ++k) sum += Bench::get(p.probability, t * K + k);
  CHECK(std::abs(sum - 1) <= 1e-13);
}

TEST_CASE("sparse attention of packed documents is that of each alone, and one leaves the other's bits", "[ops][cpu]") {
  Bench bench(43);
  const Starts starts{0, 37, 90};
  const Problem packed(bench, DType::f64, 2, 6, 2, scattered(bench, starts, 8, 6, 6));
  packed.forward(bench);
  packed.backward(bench);
  for (std::size_t d = 0; d + 1 < starts.size(); ++d) {
    const auto begin = starts[d], end = starts[d + 1];
    Problem alone(bench, DType::f64, 2, 6, 2, scattered(bench, {0, end - begin}, 8, 6, 6));
    alone.q_latent = bench.copy(packed.q_latent.rows(begin, end)), alone.q = bench.copy(packed.q.rows(begin, end));
    alone.latent = bench.copy(packed.latent.rows(begin, end)), alone.k_extra = bench.copy(packed.k_extra.rows(begin, end));
    alone.dout = bench.copy(packed.dout.rows(begin, end));
    alone.forward(bench);
    alone.backward(bench);
    CHECK(difference(packed.o.rows(begin, end), alone.o, 1e-13) == "");
    CHECK(difference(packed.probability.rows(begin, end), alone.probability, 1e-13) == "");
    CHECK(difference(packed.dq_latent.rows(begin, end), alone.dq_latent, 1e-12) == "");
    CHECK(difference(packed.dlatent.rows(begin, end), alone.dlatent, 1e-12) == "");
    CHECK(difference(packed.dk_extra.rows(begin, end), alone.dk_extra, 1e-12) == "");
  }
  Problem changed = packed.as(bench, DType::f64);
  for (std::int64_t i = 0; i < 37 * 6; ++i) Bench::set(changed.latent, i, -Bench::get(packed.latent, i));
  changed.forward(bench);
  changed.backward(bench);
  CHECK(!same(changed.o.rows(0, 37), packed.o.rows(0, 37)));
  CHECK(same(changed.o.rows(37, 90), packed.o.rows(37, 90)));
  CHECK(same(changed.dlatent.rows(37, 90), packed.dlatent.rows(37, 90)));
  CHECK(same(changed.dq_latent.rows(37, 90), packed.dq_latent.rows(37, 90)));
}

TEST_CASE(
    "sparse attention in f32 and bf16 is within rounding of f64 on the same inputs, with the same bits for any number of threads",
    "[ops][cpu]") {
  const auto type = GENERATE(DType::f32, DType::bf16);
  const auto T = GENERATE(std::int64_t(1), std::int64_t(301));
  CAPTURE(name_of(type), T);
  Bench bench(53);
  const Problem got(bench, type, 3, 19, 5, scattered(bench, {0, T / 3, T}, 33, 29, 7));
  Problem want = got.as(bench, DType::f64);
  const Problem again = got.as(bench, type);
  const double stored = type == DType::bf16 ? 4e-3 : 2e-5, meant = T == 1 ? stored : 0;
  got.forward(bench);
  got.backward(bench);
  const int threads = omp_get_max_threads();
  omp_set_num_threads(threads == 1 ? 3 : 1);
  again.forward(bench);
  again.backward(bench);
  omp_set_num_threads(threads);
  want.forward(bench);
  CHECK(difference(got.o, want.o, type == DType::bf16 ? 4e-3 : 5e-6) == "");
  CHECK(difference(got.lse, want.lse, 5e-6) == "");
  CHECK(difference(got.probability, want.probability, 2e-5) == "");
  want.o = bench.as(DType::f64, got.o), want.lse = bench.as(DType::f64, got.lse);  // inputs of backward: the same, as rounded
  want.backward(bench);
  CHECK(difference(got.dq_latent, want.dq_latent, stored, meant) == "");
  CHECK(difference(got.whole_dq(bench).first, want.whole_dq(bench).first, stored, meant) == "");
  CHECK(difference(got.dlatent, want.dlatent, stored) == "");
  CHECK(difference(got.dk_extra, want.dk_extra, stored, meant) == "");
  CHECK((same(again.o, got.o) && same(again.dlatent, got.dlatent) && same(again.dq_latent, got.dq_latent) &&
         same(again.dk_extra, got.dk_extra)));
  CHECK(bench.guards_hold());
}

TEST_CASE("sparse attention takes zero rows and refuses what does not fit", "[ops][cpu]") {
  Bench bench(63);
  const auto f64 = DType::f64;
  const Problem none(bench, f64, 2, 3, 1, bench.empty(DType::i32, {0, 4}));
  none.forward(bench);
  none.backward(bench);
  const Problem p(bench, f64, 2, 3, 1, scattered(bench, {0, 5}, 4, 4, 8));
  const auto refused = [&](auto change) {
    Problem broken = p;
    change(broken);
    CHECK_THROWS_AS(broken.forward(bench), Error);
    CHECK_THROWS_AS(broken.backward(bench), Error);
  };
  refused([&](Problem& b) { b.latent = bench.zeros(f64, {5, 4}); });
  refused([&](Problem& b) { b.k_extra = bench.zeros(f64, {5, 9}); });
  refused([&](Problem& b) { b.q = bench.zeros(f64, {5, 1, 5}); });
  refused([&](Problem& b) { b.o = bench.zeros(f64, {5, 2, 2}); });
  refused([&](Problem& b) { b.lse = bench.zeros(DType::f32, {5, 2}); });
  refused([&](Problem& b) { b.latent = bench.zeros(DType::f32, {5, 3}); });
  refused([&](Problem& b) { b.indices = bench.zeros(DType::i64, {5, 4}); });
  refused([&](Problem& b) { b.indices = bench.filled(DType::i32, {5, 4}, [](std::int64_t i) { return i == 19 ? 5 : 0; }); });
  refused([&](Problem& b) { b.indices = bench.filled(DType::i32, {5, 4}, [](std::int64_t i) { return i == 0 ? -2 : 0; }); });
}

struct DeviceCase {
  DType type;
  std::int64_t N, C, He, K, taken;
  Starts starts;
};

// Widths for the kernels of any width, then those of the model: heads under, at and over a tile, slots that end inside one, rows
// that fill theirs, and more rows than one block takes; their sums over keys by tiles and, where a row lists an eighth of the keys,
// as products.
const std::initializer_list<DeviceCase> kDeviceCases = {
    {DType::f32, 1, 1, 0, 1, 1, {0, 1}},
    {DType::f32, 3, 19, 5, 33, 29, {0, 100, 301}},
    {DType::bf16, 3, 19, 5, 33, 29, {0, 100, 301}},
    {DType::f32, 17, 512, 64, 65, 60, {0, 1, 90}},
    {DType::bf16, 9, 130, 0, 300, 260, {0, 40, 311}},
    {DType::bf16, 64, 512, 64, 200, 190, {0, 7, 210}},
    {DType::bf16, 5, 512, 64, 67, 67, {0, 80}},
    {DType::bf16, 96, 512, 64, 64, 64, {0, 70}},
    {DType::bf16, 16, 512, 64, 512, 180, {0, 190}},
    {DType::bf16, 64, 512, 64, 64, 1, {0, 1}},
    {DType::bf16, 2, 512, 64, 40, 30, {0, 500, 1300}},
    {DType::bf16, 2, 512, 64, 300, 280, {0, 500, 1300}},
};

TEST_CASE("sparse attention on CUDA is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const DeviceCase& c : kDeviceCases) {
    CAPTURE(name_of(c.type), c.N, c.C, c.He, c.K, c.starts.back());
    Bench bench(73);
    Problem got(bench, c.type, c.N, c.C, c.He, scattered(bench, c.starts, c.K, c.taken, 9));
    got.scale = 1 / std::sqrt(double(c.C + c.He));
    Problem want = got.as(bench, DType::f64);
    got.on_cuda(bench);
    want.forward(bench);
    const bool narrow = c.type == DType::bf16;
    const double stored = narrow ? 1e-2 : 5e-5, meant = c.taken == 1 ? stored : 0;  // one key: gradients of scores nearly cancel
    CHECK(difference(got.o, want.o, stored) == "");
    CHECK(difference(got.lse, want.lse, 2e-5) == "");
    CHECK(difference(got.probability, want.probability, narrow ? 2e-4 : 5e-5) == "");
    want.o = bench.as(DType::f64, got.o), want.lse = bench.as(DType::f64, got.lse);  // inputs of backward: the same, as rounded
    want.backward(bench);
    const auto [dq, untouched] = got.whole_dq(bench);
    CHECK(untouched);
    CHECK(difference(got.dq_latent, want.dq_latent, stored, meant) == "");
    CHECK(difference(got.dlatent, want.dlatent, stored) == "");
    if (c.He > 0) {
      CHECK(difference(dq, want.whole_dq(bench).first, stored, meant) == "");
      CHECK(difference(got.dk_extra, want.dk_extra, stored, meant) == "");
    }
    Problem without = got;
    without.outputs(bench, c.type);
    without.on_cuda(bench, false);
    CHECK(same(without.o, got.o));
    CHECK(same(without.lse, got.lse));
  }
}

// Few slots and many, so that the sums over keys are made in each way; the slices' last but one has a slice without a token.
TEST_CASE("sparse attention on CUDA of slices of sequences over the keys of all is within rounding of the f64 reference",
          "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const DeviceCase& c :
       {DeviceCase{DType::f32, 3, 19, 5, 33, 29, kCutStarts}, DeviceCase{DType::bf16, 3, 19, 5, 33, 29, kCutStarts},
        DeviceCase{DType::bf16, 20, 512, 64, 40, 30, kCutStarts}, DeviceCase{DType::bf16, 2, 512, 64, 300, 280, kCutStarts}}) {
    Bench all(103);
    Problem whole(all, c.type, c.N, c.C, c.He, scattered(all, c.starts, c.K, c.taken, 9));
    whole.scale = 1 / std::sqrt(double(c.C + c.He));
    for (std::size_t i = 0; i < kCutSlices.size(); ++i) {
      CAPTURE(name_of(c.type), c.C, c.K, i);
      Bench bench(113);
      const Sliced slice(c.starts, kCutSlices[i]);
      Problem got = whole.of(bench, slice), want = got.as(bench, DType::f64);
      got.on_cuda(bench);
      std::vector<bool> seen(std::size_t(whole.T), false);
      for (const double s : values_of(got.indices))
        if (s >= 0) seen[std::size_t(s)] = true;
      CHECK((zero_where_unseen(got.dlatent, seen) && zero_where_unseen(got.dk_extra, seen)));
      if (got.T == 0) continue;
      want.forward(bench);
      const bool narrow = c.type == DType::bf16;
      const double stored = narrow ? 1e-2 : 5e-5;
      CHECK(difference(got.o, want.o, stored) == "");
      CHECK(difference(got.lse, want.lse, 2e-5) == "");
      CHECK(difference(got.probability, want.probability, narrow ? 2e-4 : 5e-5) == "");
      want.o = bench.as(DType::f64, got.o), want.lse = bench.as(DType::f64, got.lse);
      want.backward(bench);
      CHECK(difference(got.dq_latent, want.dq_latent, stored) == "");
      CHECK(difference(got.whole_dq(bench).first, want.whole_dq(bench).first, stored) == "");
      CHECK(difference(got.dlatent, want.dlatent, stored) == "");
      CHECK(difference(got.dk_extra, want.dk_extra, stored) == "");
    }
  }
}

TEST_CASE("sparse attention on CUDA of rows without a position is zero, and nobody's key gets no gradient", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const auto& [type, N, C, He] : {std::tuple{DType::f32, std::int64_t(3), std::int64_t(7), std::int64_t(2)},
                                       std::tuple{DType::bf16, std::int64_t(20), std::int64_t(512), std::int64_t(64)}}) {
    CAPTURE(name_of(type));
    Bench bench(83);
    const std::int64_t T = 40, K = 70;
    const auto indices = scattered(bench, {0, T}, K, 9, 5);
    for (std::int64_t i = 0; i < T * K; ++i)
      if (i / K % 3 == 1 || Bench::get(indices, i) == 4) Bench::set(indices, i, -1);
    Problem p(bench, type, N, C, He, indices);
    p.scale = 0.1;
    p.on_cuda(bench);
    for (std::int64_t t = 1; t < T; t += 3) {
      for (const double v : values_of(p.o.rows(t, t + 1))) CHECK(v == 0);
      for (const double v : values_of(p.lse.rows(t, t + 1))) CHECK(v == -std::numeric_limits<double>::infinity());
      for (const double v : values_of(p.probability.rows(t, t + 1))) CHECK(v == 0);
      for (const double v : values_of(p.dq_latent.rows(t, t + 1))) CHECK(v == 0);
    }
    for (const Tensor& g : {p.dlatent, p.dk_extra}) {
      for (const double v : values_of(g)) CHECK(std::isfinite(v));
      for (const double v : values_of(g.rows(4, 5))) CHECK(v == 0);
      for (const double v : values_of(g.rows(0, 1))) CHECK(v != 0);
    }
  }
}

TEST_CASE("sparse attention on CUDA takes zero rows, and gives the same bits in 20 runs", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(93);
  for (const auto type : {DType::f32, DType::bf16})
    Problem(bench, type, 64, 512, 64, bench.empty(DType::i32, {0, 40})).on_cuda(bench);
  for (const DeviceCase& c :
       {DeviceCase{DType::f32, 3, 19, 5, 33, 29, {0, 100, 301}}, DeviceCase{DType::bf16, 8, 512, 64, 100, 90, {0, 600, 1100}},
        DeviceCase{DType::bf16, 8, 512, 64, 300, 290, {0, 600, 1100}}}) {
    CAPTURE(name_of(c.type));
    Problem first(bench, c.type, c.N, c.C, c.He, scattered(bench, c.starts, c.K, c.taken, 9));
    first.scale = 1 / std::sqrt(double(c.C + c.He));
    first.on_cuda(bench);
    for (int run = 0; run < 20; ++run) {
      Bench again_bench;
      Problem again = first;
      again.on_cuda(again_bench);
      CAPTURE(run);
      CHECK((same(again.o, first.o) && same(again.lse, first.lse) && same(again.probability, first.probability)));
      CHECK((same(again.dq_latent, first.dq_latent) && same(again.dlatent, first.dlatent)));
      CHECK((same(again.dq, first.dq) && same(again.dk_extra, first.dk_extra)));
    }
  }
}

}  // namespace

TEST_CASE("sparse attention of a slice of the queries over all keys is that of all queries, and its gradients of keys sum up", "[ops][cpu]") {
  Bench bench(47);
  const Starts starts{0, 3, 40, 41, 90};
  Problem p(bench, DType::f64, 3, 7, 4, scattered(bench, starts, 6, 5, 48));
  p.forward(bench);
  p.backward(bench);
  const Tensor dlatent = bench.zeros(DType::f64, p.latent.shape), dk_extra = bench.zeros(DType::f64, p.k_extra.shape);
  for (const auto& [begin, end] : {std::pair<std::int64_t, std::int64_t>{0, 33}, {33, 33}, {33, 41}, {41, 90}}) {
    CAPTURE(begin, end);
    const Problem slice = p.of(bench, Sliced(starts, begin, end));
    slice.forward(bench);
    slice.backward(bench);
    for (Tensor Problem::*t : {&Problem::o, &Problem::lse, &Problem::probability, &Problem::dq_latent})
      CHECK(difference(slice.*t, (p.*t).rows(begin, end), 1e-13, 1e-13) == "");
    for (std::int64_t i = 0; i < dlatent.count(); ++i) Bench::set(dlatent, i, Bench::get(dlatent, i) + Bench::get(slice.dlatent, i));
    for (std::int64_t i = 0; i < dk_extra.count(); ++i) Bench::set(dk_extra, i, Bench::get(dk_extra, i) + Bench::get(slice.dk_extra, i));
  }
  CHECK(difference(dlatent, p.dlatent, 1e-12, 1e-13) == "");
  CHECK(difference(dk_extra, p.dk_extra, 1e-12, 1e-13) == "");
  CHECK(bench.guards_hold());
}

}  // namespace moetrain::test
