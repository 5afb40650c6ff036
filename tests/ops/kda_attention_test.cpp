// kda_attention_test.cpp -- the sub-layer is the composition of its parts, its gradients are its slopes, and CUDA is near f64.
#include "ops/kda_attention.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string_view>

#include "ops/head_norm.h"
#include "ops/kda.h"
#include "ops/kda_gate.h"
#include "ops/short_conv.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

struct Results {
  Tensor o, y, final_state, dq_in, dk_in, dv_in, df, db, dgate, dq_conv, dk_conv, dv_conv, da_log, ddt_bias, do_norm,
      dinitial_state, dhistory, map, map_backward;
  template <class F>
  void each(F f) {
    f("o", o), f("y", y), f("final_state", final_state), f("dq_in", dq_in), f("dk_in", dk_in), f("dv_in", dv_in), f("df", df);
    f("db", db), f("dgate", dgate), f("dq_conv", dq_conv), f("dk_conv", dk_conv), f("dv_conv", dv_conv), f("da_log", da_log);
    f("ddt_bias", ddt_bias), f("do_norm", do_norm), f("dinitial_state", dinitial_state), f("dhistory", dhistory);
    f("map", map), f("map_backward", map_backward);
  }
};

enum class Gates { bounded, floor, unbounded };

// Of whole documents where there are no slices.
struct Layout {
  std::vector<std::int64_t> starts;
  std::vector<ops::Documents::Piece> pieces = {};
  std::int64_t slices = 0;
  ops::Documents documents() const { return {.starts = starts, .pieces = pieces, .slices = slices}; }
};

struct Problem {
  Tensor q_in, k_in, v_in, f, b, gate, q_conv, k_conv, v_conv, a_log, dt_bias, o_norm, initial_state, dy, dfinal_state, history;
  Layout layout;
  std::optional<double> lower_bound;
  template <class F>
  void each(F f_) {
    for (Tensor* t : {&q_in, &k_in, &v_in, &f, &b, &gate, &q_conv, &k_conv, &v_conv, &a_log, &dt_bias, &o_norm, &initial_state, &dy,
                      &dfinal_state, &history})
      if (t->present()) f_(*t);
  }
  // Gates at the floor: z so large that decays are e^-5 but for a thousandth. Else as a fresh model has them.
  Problem(Bench& bench, DType dtype, Layout layout_, std::int64_t N, std::int64_t H, Gates gates, std::int64_t k = 4)
      : layout(std::move(layout_)) {
    const auto T = layout.starts.back(), states = layout.documents().states(), P = N * H;
    const auto real = real_of(dtype);
    q_in = bench.normal(dtype, {T, P});
    k_in = bench.normal(dtype, {T, P});
    v_in = bench.normal(dtype, {T, P});
    f = bench.normal(dtype, {T, P}, 1, gates == Gates::floor ? 12 : 0);
    b = bench.normal(dtype, {T, N});
    gate = bench.normal(dtype, {T, P});
    q_conv = bench.normal(real, {P, 1, k}, 0.5);
    k_conv = bench.normal(real, {P, 1, k}, 0.5);
    v_conv = bench.normal(real, {P, 1, k}, 0.5);
    a_log = bench.uniform(real, {N}, 0, gates == Gates::unbounded ? std::log(16.0) : 0.5);
    const Tensor log_dt = bench.uniform(DType::f64, {N, H}, std::log(1e-3), std::log(1e-1));
    dt_bias = bench.filled(real, {N, H}, [&](std::int64_t i) {
      const double dt = std::exp(Bench::get(log_dt, i));
      return dt + std::log(-std::expm1(-dt));
    });
    o_norm = bench.normal(real, {H}, 0.2, 1);
    initial_state = bench.normal(real, {states, N, H, H}, 0.5);
    dy = bench.normal(dtype, {T, N, H});
    dfinal_state = bench.normal(real, {states, N, H, H}, 0.5);
    if (layout.slices > 0) history = bench.normal(dtype, {3, states, k - 1, P});
    if (gates != Gates::unbounded) lower_bound = -5;
  }
  std::int64_t H() const { return dt_bias.shape[1]; }
  ops::KdaAttention inputs(ops::Documents documents) const {
    return {.q_in = q_in,
            .k_in = k_in,
            .v_in = v_in,
            .f = f,
            .b = b,
            .gate = gate,
            .q_conv = q_conv,
            .k_conv = k_conv,
            .v_conv = v_conv,
            .a_log = a_log,
            .dt_bias = dt_bias,
            .o_norm = o_norm,
            .lower_bound = lower_bound,
            .scale = 1 / std::sqrt(double(H())),
            .l2_eps = 1e-6,
            .norm_eps = 1e-5,
            .documents = documents,
            .initial_state = initial_state,
            .history = history};
  }
};

enum class Wanted { all, inputs_only };  // of inputs only: parameters frozen, no states given or wanted

// Forward and backward, and the maps; gradients of parameters start from 0.25, so that a backend that writes instead of adding is
// caught, and so do states of slices, which need not all be written.
template <class AnyBench>
Results run(AnyBench& bench, Bench& host, const Problem& p, ops::Documents documents, Wanted wanted) {
  const auto storage = p.q_in.dtype, real = real_of(storage);
  const Shape wide = p.q_in.shape;
  auto start = [&](const Tensor& parameter) {
    return bench.copy(host.filled(real, parameter.shape, [](std::int64_t) { return 0.25; }));
  };
  Results r;
  r.o = bench.empty(storage, p.dy.shape);
  r.y = bench.empty(storage, p.dy.shape);
  const bool cut = p.layout.slices > 0;
  r.final_state = cut ? start(p.initial_state) : bench.empty(real, p.initial_state.shape);
  for (Tensor* t : {&r.dq_in, &r.dk_in, &r.dv_in, &r.df, &r.dgate}) *t = bench.empty(storage, wide);
  r.db = bench.empty(storage, p.b.shape);
  r.dq_conv = start(p.q_conv);
  r.dk_conv = start(p.k_conv);
  r.dv_conv = start(p.v_conv);
  r.da_log = start(p.a_log);
  r.ddt_bias = start(p.dt_bias);
  r.do_norm = start(p.o_norm);
  r.dinitial_state = cut ? start(p.initial_state) : bench.empty(real, p.initial_state.shape);
  if (cut) r.dhistory = bench.empty(storage, p.history.shape);
  auto x = p.inputs(documents), from_zero = x;
  from_zero.initial_state = {};
  r.map = bench.empty(real, x.maps());
  r.map_backward = bench.empty(real, x.maps());
  Tensor dfinal_state = p.dfinal_state;
  if (wanted == Wanted::inputs_only) {
    for (Tensor* t : {&r.final_state, &r.dq_conv, &r.dk_conv, &r.dv_conv, &r.da_log, &r.ddt_bias, &r.do_norm, &r.dinitial_state,
                      &r.dhistory, &r.map, &r.map_backward, &dfinal_state})
      *t = {};
    x.initial_state = {};
  }
  ops::kda_attention(bench.context(), ops::KdaAttentionForward{.x = x, .o = r.o, .y = r.y, .final_state = r.final_state});
  ops::kda_attention(bench.context(), ops::KdaAttentionBackward{.x = x,
                                                                .dy = p.dy,
                                                                .o = r.o,
                                                                .dfinal_state = dfinal_state,
                                                                .dq_in = r.dq_in,
                                                                .dk_in = r.dk_in,
                                                                .dv_in = r.dv_in,
                                                                .df = r.df,
                                                                .db = r.db,
                                                                .dgate = r.dgate,
                                                                .dq_conv = r.dq_conv,
                                                                .dk_conv = r.dk_conv,
                                                                .dv_conv = r.dv_conv,
                                                                .da_log = r.da_log,
                                                                .ddt_bias = r.ddt_bias,
                                                                .do_norm = r.do_norm,
                                                                .dinitial_state = r.dinitial_state,
                                                                .dhistory = r.dhistory});
  if (wanted == Wanted::inputs_only) return r;
  ops::kda_attention(bench.context(), ops::KdaAttentionMap{.x = from_zero, .map = r.map});
  ops::kda_attention(bench.context(), ops::KdaAttentionMapBackward{.x = from_zero, .dy = p.dy, .o = r.o, .map = r.map_backward});
  return r;
}
Results on_cpu(Bench& bench, const Problem& p, Wanted wanted = Wanted::all) {
  return run(bench, bench, p, p.layout.documents(), wanted);
}
Results on_cpu_in_f64(Bench& bench, const Problem& p) {
  Problem wide = p;
  wide.each([&](Tensor& t) { t = bench.as(DType::f64, t); });
  return on_cpu(bench, wide);
}
Results on_cuda(Bench& bench, const Problem& p, Wanted wanted = Wanted::all) {
  DeviceBench device;
  Problem there = p;
  there.each([&](Tensor& t) { t = device.copy(t); });
  Results r = run(device, bench, there, device.documents(there.layout.documents()), wanted);
  r.each([&](const char*, Tensor& t) {
    if (t.present()) t = device.to_host(bench, t);
  });
  CHECK(device.guards_hold());
  return r;
}

bool same_bits(ConstTensor a, ConstTensor b) {
  return a.bytes() == b.bytes() && std::memcmp(a.data, b.data, std::size_t(a.bytes())) == 0;
}
void check_same(Results got, Results want) {  // all that was got
  std::vector<Tensor> all;
  want.each([&](const char*, Tensor& t) { all.push_back(t); });
  std::size_t i = 0;
  got.each([&](const char* name, Tensor& t) {
    CAPTURE(name);
    const Tensor w = all[i++];
    if (t.present()) CHECK(same_bits(t, w));
  });
}
// With zero states, which is what absent ones mean.
Problem without_states(Bench& bench, DType dtype, std::int64_t H) {
  Problem p(bench, dtype, {{0, 70, 90}}, 2, H, Gates::bounded);
  for (Tensor* t : {&p.initial_state, &p.dfinal_state}) *t = bench.zeros(t->dtype, t->shape);
  return p;
}

// Of the gap of all elements together, of the worst one, and of those of da_log together: few numbers, each a sum over all tokens
// of terms of both signs. In root mean squares of what is wanted.
struct Bounds {
  double together, worst, da_log = together;
};
void check_gap(Tensor got, Tensor want, double together, double worst) {
  double gaps = 0, squares = 0;
  for (std::int64_t e = 0; e < want.count(); ++e) {
    const double gap = Bench::get(got, e) - Bench::get(want, e);
    gaps += gap * gap;
    squares += Bench::get(want, e) * Bench::get(want, e);
  }
  if (squares == 0) {  // a map of nothing, or no element
    CHECK(gaps == 0);
    return;
  }
  const double relative = std::sqrt(gaps / squares);
  CAPTURE(relative);
  CHECK(relative <= together);
  CHECK(difference(got, want, worst) == "");
}
void check_near(Results got, Results want, Bounds bounds) {
  std::vector<Tensor> all;
  want.each([&](const char*, Tensor& t) { all.push_back(t); });
  std::size_t i = 0;
  got.each([&](const char* name, Tensor& t) {
    const Tensor w = all[i++];
    CAPTURE(name);
    if (t.present()) check_gap(t, w, std::string_view(name) == "da_log" ? bounds.da_log : bounds.together, bounds.worst);
  });
}

}  // namespace

TEST_CASE("kda_attention is the composition of its parts", "[ops][cpu]") {
  Bench bench;
  const Problem p(bench, DType::f32, {{0, 70, 71}}, 2, 6, Gates::bounded);
  const Results got = on_cpu(bench, p);
  auto& ctx = bench.context();
  const Shape heads = p.dy.shape, head = p.b.shape;
  const auto f32 = DType::f32;
  const ops::Documents documents = p.layout.documents();
  Tensor streams[3], r = bench.empty(f32, head);
  const Tensor* u[] = {&p.q_in, &p.k_in, &p.v_in};
  const Tensor* w[] = {&p.q_conv, &p.k_conv, &p.v_conv};
  for (int i = 0; i < 3; ++i) {
    streams[i] = bench.empty(f32, heads);
    ops::short_conv(ctx,
                    ops::ShortConvForward{.u = *u[i], .w = *w[i], .y = streams[i].reshape(u[i]->shape), .documents = documents});
    if (i < 2) ops::head_l2(ctx, ops::HeadL2Forward{.x = streams[i], .y = streams[i], .r = r, .eps = 1e-6});
  }
  const Tensor g = bench.empty(f32, heads), beta = bench.empty(f32, head), o = bench.empty(f32, heads), y = bench.empty(f32, heads),
               final_state = bench.empty(f32, p.initial_state.shape);
  ops::kda_gate(ctx, ops::KdaGateForward{.f = p.f.reshape(heads),
                                         .a_log = p.a_log,
                                         .dt_bias = p.dt_bias,
                                         .b = p.b,
                                         .lower_bound = p.lower_bound,
                                         .g = g,
                                         .beta = beta});
  ops::kda(ctx, ops::KdaForward{.form = ops::KdaForm::recurrent,
                                .q = streams[0],
                                .k = streams[1],
                                .v = streams[2],
                                .g = g,
                                .beta = beta,
                                .scale = 1 / std::sqrt(6.0),
                                .bounded_gate = true,
                                .documents = documents,
                                .initial_state = p.initial_state,
                                .o = o,
                                .final_state = final_state});
  ops::gated_head_norm(
      ctx, ops::GatedHeadNormForward{.o = o, .gate = p.gate.reshape(heads), .w = p.o_norm, .y = y, .r = r, .eps = 1e-5});
  CHECK(difference(got.o, o, 1e-4) == "");
  CHECK(difference(got.y, y, 1e-4) == "");
  CHECK(difference(got.final_state, final_state, 1e-4) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("kda_attention backward is the slope of kda_attention forward", "[ops][cpu]") {
  const auto gates = GENERATE(Gates::bounded, Gates::unbounded);
  Bench bench(3);
  Problem p(bench, DType::f64, {{0, 19, 19, 86}}, 2, 3, gates);
  Results r = on_cpu(bench, p);
  const Tensor o = bench.empty(DType::f64, p.dy.shape), y = bench.empty(DType::f64, p.dy.shape),
               final_state = bench.empty(DType::f64, p.initial_state.shape);
  const auto loss = [&] {
    ops::kda_attention(bench.context(),
                       ops::KdaAttentionForward{.x = p.inputs(p.layout.documents()), .o = o, .y = y, .final_state = final_state});
    return weighted_sum(y, p.dy) + weighted_sum(final_state, p.dfinal_state);
  };
  for (const Tensor& t : {r.dq_conv, r.dk_conv, r.dv_conv, r.da_log, r.ddt_bias, r.do_norm})
    for (std::int64_t i = 0; i < t.count(); ++i) Bench::set(t, i, Bench::get(t, i) - 0.25);
  const std::pair<Tensor, Tensor> all[] = {{p.q_in, r.dq_in},
                                           {p.k_in, r.dk_in},
                                           {p.v_in, r.dv_in},
                                           {p.f, r.df},
                                           {p.b, r.db},
                                           {p.gate, r.dgate},
                                           {p.q_conv, r.dq_conv},
                                           {p.k_conv, r.dk_conv},
                                           {p.v_conv, r.dv_conv},
                                           {p.a_log, r.da_log},
                                           {p.dt_bias, r.ddt_bias},
                                           {p.o_norm, r.do_norm},
                                           {p.initial_state, r.dinitial_state}};
  for (const auto& [x, dx] : all) CHECK(slope_difference(loss, x, dx, 1e-5, 1e-9, 24) == "");
  CHECK(bench.guards_hold());
}

TEST_CASE("kda_attention computes only what is asked for", "[ops][cpu]") {
  Bench bench(4);
  const Problem p = without_states(bench, DType::f32, 5);
  check_same(on_cpu(bench, p, Wanted::inputs_only), on_cpu(bench, p));
}

TEST_CASE("kda_attention refuses tensors that do not fit each other", "[ops][cpu]") {
  Bench bench;
  const Problem good(bench, DType::f32, {{0, 4, 9}}, 2, 3, Gates::bounded);
  const auto refused = [&](auto&& spoil) {
    Problem p = good;
    spoil(p);
    CHECK_THROWS_AS(on_cpu(bench, p), Error);
  };
  refused([&](Problem& p) { p.k_in = bench.zeros(DType::f32, {9, 7}); });
  refused([&](Problem& p) { p.b = bench.zeros(DType::f32, {9, 3}); });
  refused([&](Problem& p) { p.v_conv = bench.zeros(DType::f32, {6, 1, 3}); });
  refused([&](Problem& p) { p.a_log = bench.zeros(DType::f64, {2}); });
  refused([&](Problem& p) { p.o_norm = bench.zeros(DType::f32, {6}); });
  refused([&](Problem& p) { p.initial_state = bench.zeros(DType::f32, {1, 2, 3, 3}); });
  refused([&](Problem& p) { p.layout.starts = {0, 4, 8}; });
  refused([&](Problem& p) { p.lower_bound = 1; });
}

TEST_CASE("kda_attention on CUDA in bf16 is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  struct Case {
    std::vector<std::int64_t> starts;
    std::int64_t N, H;
  };
  for (const auto gates : {Gates::bounded, Gates::floor, Gates::unbounded})
    for (const Case& c : {Case{{0, 64}, 1, 128}, {{0, 40, 41, 41, 300}, 3, 128}, {{0, 17, 150}, 2, 32}, {{0, 131}, 2, 50}}) {
      CAPTURE(int(gates), c.starts.back(), c.N, c.H);
      Bench bench(5);
      const Problem p(bench, DType::bf16, {c.starts}, c.N, c.H, gates);
      check_near(on_cuda(bench, p), on_cpu_in_f64(bench, p), {2.5e-2, 0.5});
    }
}

TEST_CASE("kda_attention on CUDA in f32 is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  struct Case {
    std::vector<std::int64_t> starts;
    std::int64_t N, H, taps;
  };
  for (const auto gates : {Gates::bounded, Gates::floor, Gates::unbounded})
    for (const Case& c :
         {Case{{0, 1}, 1, 8, 4}, {{0, 0, 64, 200}, 2, 32, 3}, {{0, 5, 135}, 2, 7, 4}, {{0, 130}, 1, 128, 4}, {{0, 70}, 1, 90, 1}}) {
      CAPTURE(int(gates), c.starts.back(), c.N, c.H);
      Bench bench(7);
      const Problem p(bench, DType::f32, {c.starts}, c.N, c.H, gates, c.taps);
      check_near(on_cuda(bench, p), on_cpu_in_f64(bench, p), {1e-4, 1e-3});
    }
}

TEST_CASE("kda_attention on CUDA gives packed documents the results of separate ones, to the bit", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(9);
  const Problem p(bench, DType::bf16, {{0, 100, 101, 300}}, 2, 128, Gates::bounded);
  const Results packed = on_cuda(bench, p);
  for (std::size_t n = 0; n + 1 < p.layout.starts.size(); ++n) {
    const auto begin = p.layout.starts[n], end = p.layout.starts[n + 1];
    Problem one = p;
    for (Tensor* t : {&one.q_in, &one.k_in, &one.v_in, &one.f, &one.b, &one.gate, &one.dy}) *t = t->rows(begin, end);
    one.initial_state = p.initial_state.rows(std::int64_t(n), std::int64_t(n) + 1);
    one.dfinal_state = p.dfinal_state.rows(std::int64_t(n), std::int64_t(n) + 1);
    one.layout.starts = {0, end - begin};
    const Results alone = on_cuda(bench, one);
    CHECK(same_bits(packed.y.rows(begin, end), alone.y));
    CHECK(same_bits(packed.dq_in.rows(begin, end), alone.dq_in));
    CHECK(same_bits(packed.dk_in.rows(begin, end), alone.dk_in));
    CHECK(same_bits(packed.dv_in.rows(begin, end), alone.dv_in));
    CHECK(same_bits(packed.df.rows(begin, end), alone.df));
    CHECK(same_bits(packed.final_state.rows(std::int64_t(n), std::int64_t(n) + 1), alone.final_state));
  }
}

TEST_CASE("kda_attention on CUDA computes only what is asked for", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(10);
  const Problem p = without_states(bench, DType::bf16, 128);
  check_same(on_cuda(bench, p, Wanted::inputs_only), on_cuda(bench, p));
}

TEST_CASE("kda_attention on CUDA of no tokens hands its states through", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(11);
  const Problem p(bench, DType::bf16, {{0, 0, 0}}, 2, 128, Gates::bounded);
  const Results r = on_cuda(bench, p);
  CHECK(same_bits(r.final_state, p.initial_state));
  CHECK(same_bits(r.dinitial_state, p.dfinal_state));
}

TEST_CASE("kda_attention on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const auto dtype : {DType::bf16, DType::f32}) {
    Bench bench(13);
    const Problem p(bench, dtype, {{0, 500, 777}}, 4, 128, Gates::bounded);
    const Results first = on_cuda(bench, p);
    for (int i = 0; i < 20; ++i) check_same(on_cuda(bench, p), first);
  }
}

// Pieces of documents: a slice of one that goes through; of one that ends at once (in fewer tokens than the convolution reads
// back), one within and one that goes on; of two slices, the first left by nothing; three, the last with a document but no token of
// it; one whole document in its slice; no document.
std::vector<Layout> cut_layouts() {
  using Piece = ops::Documents::Piece;
  return {{{0, 20}, {Piece{70, 0, 0, 0}}, 1},
          {{0, 2, 70, 150}, {Piece{5, 0, 0, -1}, Piece{}, Piece{0, 0, -1, 0}}, 1},
          {{0, 40, 41, 171}, {Piece{1, 0, 0, -1}, Piece{}, Piece{99, 0, 1, 1}}, 2},
          {{0, 65, 67, 67}, {Piece{0, 0, -1, 0}, Piece{3, 0, 1, 1}, Piece{9, 0, 2, 2}}, 3},
          {{0, 30}, {Piece{}}, 1},
          {{0}, {}, 2}};
}

// Results(Problem) of all these, against the f64 reference.
template <class Run>
void check_pieces(Bench& bench, DType dtype, std::int64_t N, std::int64_t H, std::int64_t taps, Bounds bounds, Run&& run) {
  for (const auto gates : {Gates::bounded, Gates::unbounded}) {
    int at = 0;
    for (const Layout& layout : cut_layouts()) {
      CAPTURE(int(gates), at++, N, H, taps);
      const Problem p(bench, dtype, layout, N, H, gates, taps);
      check_near(run(p), on_cpu_in_f64(bench, p), bounds);
    }
  }
}

TEST_CASE("kda_attention of pieces in f32 is within rounding of the f64 reference", "[ops][cpu]") {
  Bench bench(15);
  check_pieces(bench, DType::f32, 2, 9, 4, {2e-5, 2e-4}, [&](const Problem& p) { return on_cpu(bench, p); });
}

TEST_CASE("kda_attention of pieces on CUDA in bf16 is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const auto [N, H] : {std::array<std::int64_t, 2>{2, 128}, {3, 32}, {2, 50}}) {
    Bench bench(17);
    check_pieces(bench, DType::bf16, N, H, 4, {2.5e-2, 0.5, 0.15}, [&](const Problem& p) { return on_cuda(bench, p); });
  }
}

TEST_CASE("kda_attention of pieces on CUDA in f32 is within rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const auto [N, H, taps] : {std::array<std::int64_t, 3>{2, 32, 4}, {1, 128, 3}, {2, 7, 2}, {1, 90, 1}}) {
    Bench bench(19);
    check_pieces(bench, DType::f32, N, H, taps, {1e-4, 1e-3}, [&](const Problem& p) { return on_cuda(bench, p); });
  }
}

TEST_CASE("kda_attention of pieces on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  Bench bench(21);
  const Problem p(bench, DType::bf16, cut_layouts()[2], 4, 128, Gates::bounded);
  const Results first = on_cuda(bench, p);
  for (int i = 0; i < 20; ++i) check_same(on_cuda(bench, p), first);
}

TEST_CASE("kda_fold on CUDA is within f32 rounding of the f64 reference", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  constexpr std::int64_t kMaps = 4, kStates = 2, N = 3;
  for (const std::int64_t H : {7, 32, 50, 128}) {
    Bench bench(23);
    DeviceBench device;
    const Tensor maps = bench.normal(DType::f32, {kMaps * kStates, N, H, 2 * H}, 1 / std::sqrt(double(H)));
    const Tensor wide = bench.as(DType::f64, maps), there = device.copy(maps);
    for (const auto [first, end] : {std::array<std::int64_t, 2>{0, 0}, {0, 1}, {0, 4}, {1, 3}, {3, 0}, {3, -1}, {4, 4}}) {
      CAPTURE(H, first, end);
      const Tensor want = bench.empty(DType::f64, {kStates, N, H, H}), got = device.empty(DType::f32, want.shape);
      ops::kda_fold(bench.context(), ops::KdaFold{.maps = wide, .first = first, .end = end, .state = want});
      ops::kda_fold(device.context(), ops::KdaFold{.maps = there, .first = first, .end = end, .state = got});
      CHECK(difference(device.to_host(bench, got), want, 1e-5, 1e-9) == "");
    }
    CHECK(device.guards_hold());
  }
}

Tensor to_host(Bench&, Bench&, Tensor t) { return t; }
Tensor to_host(Bench& host, DeviceBench& device, Tensor t) { return device.to_host(host, t); }
ops::Documents documents_of(Bench&, const Layout& layout) { return layout.documents(); }
ops::Documents documents_of(DeviceBench& device, const Layout& layout) { return device.documents(layout.documents()); }

// Two sequences of 150 and 90 tokens in three slices, computed in `there`: what ranks do with theirs. `whole` is the result of all
// at once.
template <class AnyBench>
void check_slices(Bench& bench, AnyBench& there, const Problem& p, const Results& whole, Bounds bounds) {
  constexpr std::int64_t kSlices = 3, B = 2;
  const std::int64_t sequences[] = {0, 150, 240}, N = p.b.shape[1], H = p.H(), P = N * H, taps = p.q_conv.shape[2];
  const auto dtype = p.q_in.dtype, real = real_of(dtype);
  const auto& starts = p.layout.starts;
  const auto begin_of = [&](std::int64_t b, std::int64_t slice) {
    return sequences[b] + (sequences[b + 1] - sequences[b]) * slice / kSlices;
  };
  const auto rows_of = [&](Tensor t, std::int64_t slice) {  // both sequences' rows of a slice
    std::vector<double> values;
    for (std::int64_t b = 0; b < B; ++b) {
      const auto mine = values_of(t.rows(begin_of(b, slice), begin_of(b, slice + 1)));
      values.insert(values.end(), mine.begin(), mine.end());
    }
    return bench.of(t.dtype, t.shape.with_dim0(std::int64_t(values.size()) / t.shape.row()), values);
  };
  const auto history_at = [&](std::int64_t stream, std::int64_t b, std::int64_t back, std::int64_t c) {
    return ((stream * B + b) * (taps - 1) + taps - 1 - back) * P + c;
  };

  std::vector<Problem> slices(kSlices, p);  // then as `there` has them
  for (std::int64_t i = 0; i < kSlices; ++i) {
    Problem& s = slices[std::size_t(i)];
    for (Tensor* t : {&s.q_in, &s.k_in, &s.v_in, &s.f, &s.b, &s.gate, &s.dy}) *t = rows_of(*t, i);
    s.initial_state = s.dfinal_state = {};
    s.history = bench.zeros(dtype, {3, B, taps - 1, P});
    s.layout = {{}, {}, B};
    for (std::int64_t b = 0, here = 0; b < B; ++b) {
      const auto begin = begin_of(b, i), end = begin_of(b, i + 1);
      for (std::size_t d = 0; d + 1 < starts.size(); ++d) {
        const auto first = std::max(starts[d], begin), last = std::min(starts[d + 1], end);
        if (first >= last) continue;
        s.layout.starts.push_back(here + first - begin);
        s.layout.pieces.push_back({first - starts[d], starts[d], first > starts[d] ? b : -1, last < starts[d + 1] ? b : -1});
        for (std::int64_t back = 1; first > starts[d] && back < taps && first - back >= starts[d]; ++back)
          for (std::int64_t stream = 0; stream < 3; ++stream)
            for (std::int64_t c = 0; c < P; ++c)
              Bench::set(s.history, history_at(stream, b, back, c),
                         Bench::get(std::array{p.q_in, p.k_in, p.v_in}[std::size_t(stream)], (first - back) * P + c));
      }
      here += end - begin;
      if (b + 1 == B) s.layout.starts.push_back(here);
    }
    s.each([&](Tensor& t) { t = there.copy(t); });
  }

  const Tensor maps = there.empty(real, {kSlices * B, N, H, 2 * H});
  std::vector<ops::KdaAttention> inputs;
  for (std::int64_t i = 0; i < kSlices; ++i) {
    const Problem& s = slices[std::size_t(i)];
    inputs.push_back(s.inputs(documents_of(there, s.layout)));
    ops::kda_attention(there.context(), ops::KdaAttentionMap{.x = inputs.back(), .map = maps.rows(B * i, B * i + B)});
  }
  std::vector<Tensor> o;
  for (std::int64_t i = 0; i < kSlices; ++i) {
    auto& x = inputs[std::size_t(i)];
    const Tensor state = there.empty(real, {B, N, H, H}), y = there.empty(dtype, {x.T(), N, H});
    ops::kda_fold(there.context(), ops::KdaFold{.maps = maps, .first = 0, .end = i, .state = state});
    x.initial_state = state;
    o.push_back(there.empty(dtype, y.shape));
    ops::kda_attention(there.context(), ops::KdaAttentionForward{.x = x, .o = o.back(), .y = y, .final_state = {}});
    CAPTURE(i);
    check_gap(to_host(bench, there, y), rows_of(whole.y, i), bounds.together, bounds.worst);
  }
  for (std::int64_t i = 0; i < kSlices; ++i) {
    auto from_zero = inputs[std::size_t(i)];
    from_zero.initial_state = {};
    ops::kda_attention(
        there.context(),
        ops::KdaAttentionMapBackward{
            .x = from_zero, .dy = slices[std::size_t(i)].dy, .o = o[std::size_t(i)], .map = maps.rows(B * i, B * i + B)});
  }
  Results sums = whole;  // of the gradients of parameters, from 0.25 as those of the whole begin
  for (Tensor* t : {&sums.dq_conv, &sums.dk_conv, &sums.dv_conv, &sums.da_log, &sums.ddt_bias, &sums.do_norm})
    *t = there.copy(bench.filled(real, t->shape, [](std::int64_t) { return 0.25; }));
  Tensor behind;  // gradients of this slice's last rows by the convolutions of the next
  for (std::int64_t i = kSlices; i-- > 0;) {
    const auto& x = inputs[std::size_t(i)];
    const Problem& s = slices[std::size_t(i)];
    const Tensor dstate = there.empty(real, {B, N, H, H}), dhistory = there.empty(dtype, s.history.shape);
    ops::kda_fold(there.context(), ops::KdaFold{.maps = maps, .first = kSlices - 1, .end = i, .state = dstate});
    Results r;
    for (Tensor* t : {&r.dq_in, &r.dk_in, &r.dv_in, &r.df, &r.dgate}) *t = there.empty(dtype, s.q_in.shape);
    r.db = there.empty(dtype, s.b.shape);
    ops::kda_attention(there.context(), ops::KdaAttentionBackward{.x = x,
                                                                  .dy = s.dy,
                                                                  .o = o[std::size_t(i)],
                                                                  .dfinal_state = dstate,
                                                                  .dq_in = r.dq_in,
                                                                  .dk_in = r.dk_in,
                                                                  .dv_in = r.dv_in,
                                                                  .df = r.df,
                                                                  .db = r.db,
                                                                  .dgate = r.dgate,
                                                                  .dq_conv = sums.dq_conv,
                                                                  .dk_conv = sums.dk_conv,
                                                                  .dv_conv = sums.dv_conv,
                                                                  .da_log = sums.da_log,
                                                                  .ddt_bias = sums.ddt_bias,
                                                                  .do_norm = sums.do_norm,
                                                                  .dinitial_state = {},
                                                                  .dhistory = dhistory});
    for (Tensor* t : {&r.dq_in, &r.dk_in, &r.dv_in, &r.df, &r.db, &r.dgate}) *t = to_host(bench, there, *t);
    for (std::size_t n = 0; behind.present() && n < s.layout.pieces.size(); ++n) {
      const auto b = s.layout.pieces[n].leaves, end = s.layout.starts[n + 1];
      for (std::int64_t back = 1; b >= 0 && back < taps && end - back >= s.layout.starts[n]; ++back)
        for (std::int64_t stream = 0; stream < 3; ++stream)
          for (std::int64_t c = 0; c < P; ++c) {
            const Tensor to = std::array{r.dq_in, r.dk_in, r.dv_in}[std::size_t(stream)];
            const auto at = (end - back) * P + c;
            Bench::set(to, at, Bench::get(to, at) + Bench::get(behind, history_at(stream, b, back, c)));
          }
    }
    behind = to_host(bench, there, dhistory);
    CAPTURE(i);
    check_gap(r.dq_in, rows_of(whole.dq_in, i), bounds.together, bounds.worst);
    check_gap(r.dk_in, rows_of(whole.dk_in, i), bounds.together, bounds.worst);
    check_gap(r.dv_in, rows_of(whole.dv_in, i), bounds.together, bounds.worst);
    check_gap(r.df, rows_of(whole.df, i), bounds.together, bounds.worst);
    check_gap(r.db, rows_of(whole.db, i), bounds.together, bounds.worst);
    check_gap(r.dgate, rows_of(whole.dgate, i), bounds.together, bounds.worst);
  }
  const auto check_sum = [&](Tensor got, Tensor want, double together) {
    check_gap(to_host(bench, there, got), want, together, bounds.worst);
  };
  check_sum(sums.dq_conv, whole.dq_conv, bounds.together);
  check_sum(sums.dk_conv, whole.dk_conv, bounds.together);
  check_sum(sums.dv_conv, whole.dv_conv, bounds.together);
  check_sum(sums.da_log, whole.da_log, bounds.da_log);
  check_sum(sums.ddt_bias, whole.ddt_bias, bounds.together);
  check_sum(sums.do_norm, whole.do_norm, bounds.together);
  CHECK(there.guards_hold());
}

// The second sequence with documents that begin at a border, inside, and not at all.
const Layout kSequences[] = {{{0, 150, 240}}, {{0, 50, 110, 150, 155, 175, 240}}};

// From zero states, as a sequence begins.
Problem of_sequences(Bench& bench, DType dtype, const Layout& layout, std::int64_t H, Gates gates) {
  Problem p(bench, dtype, layout, 2, H, gates);
  for (Tensor* t : {&p.initial_state, &p.dfinal_state}) *t = bench.zeros(t->dtype, t->shape);
  return p;
}

TEST_CASE("kda_attention of slices, each entered by the folded maps of the others, is that of whole sequences", "[ops][cpu]") {
  const Gates gates = GENERATE(Gates::bounded, Gates::unbounded);
  const auto dtype = GENERATE(DType::f64, DType::f32);
  const int layout = GENERATE(0, 1);
  Bench bench(31);
  const Problem p = of_sequences(bench, dtype, kSequences[layout], 9, gates);
  const double bound = dtype == DType::f64 ? 1e-11 : 1e-4;
  check_slices(bench, bench, p, on_cpu(bench, p), {bound, 10 * bound});
}

TEST_CASE("kda_attention of slices on CUDA, likewise entered, is that of whole sequences", "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const auto gates : {Gates::bounded, Gates::unbounded})
    for (const Layout& layout : kSequences)
      for (const std::int64_t H : {9, 128}) {
        CAPTURE(int(gates), H, layout.starts.size());
        Bench bench(31);
        DeviceBench device;
        const Problem p = of_sequences(bench, DType::f32, layout, H, gates);
        check_slices(bench, device, p, on_cuda(bench, p), {2e-4, 2e-3});
        const Problem narrow = of_sequences(bench, DType::bf16, layout, H, gates);
        check_slices(bench, device, narrow, on_cuda(bench, narrow), {5e-2, 1, 0.3});
      }
}

}  // namespace moetrain::test
