// long_sequence_test.cpp -- one sequence of 262,144 tokens through KDA and through sparse attention on CUDA, where offsets pass
// 2^31: what is looked at (the end, and both sides of 2^31) is beside f64 on the CPU, what is not adds nothing to the sums.
//
// Gradients come in only where outputs are looked at, so that sums over all tokens (of parameters, of keys, of squares) have f64
// counterparts that need no other token. Hidden, for its size: tests/README.md.
#include <algorithm>
#include <cmath>
#include <limits>
#include <span>
#include <utility>
#include <vector>

#include "ops/cpu/gemm.h"
#include "ops/indexer.h"
#include "ops/kda_attention.h"
#include "ops/random_normal.h"
#include "ops/reduce.h"
#include "ops/sparse_attention.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/tensors.h"

namespace moetrain::test {
namespace {

constexpr auto kF64 = DType::f64, kF32 = DType::f32, kBf16 = DType::bf16, kI32 = DType::i32;

// Device tensors that are too large to be made on the host, and the seconds of each op.
struct LargeBench : DeviceBench {
  std::uint64_t stream = 0;
  ops::OpTimes times;
  LargeBench() : DeviceBench(/*all that is free*/ 0) { context().times = &times; }
  Tensor normal(DType dtype, Shape shape, double deviation = 1) {
    const Tensor t = empty(dtype, shape);
    ops::random_normal(context(), {.seed = 5, .stream = stream++, .first = 0, .deviation = deviation, .y = t});
    return t;
  }
  Tensor zeros(DType dtype, Shape shape) {
    const Tensor t = empty(dtype, shape);
    fill(Device::cuda, t.data, 0, t.bytes());
    return t;
  }
  double squares(ConstTensor t) {  // NaN or infinite where an element is
    const Tensor sum = zeros(kF64, {1});
    ops::sum_of_squares(context(), {.x = std::span(&t, 1), .sum = sum});
    double value = 0;
    copy_to_host(Device::cuda, &value, sum.data, sum.bytes());
    return value;
  }
  void tell_times(std::int64_t T) const {
    for (const auto& [op, entry] : times.by_op) WARN(T << " tokens, " << op << ": " << entry.seconds << " s");
  }
};

double sum_of_squares(ConstTensor t) {
  double sum = 0;
  for (const double v : values_of(t)) sum += v * v;
  return sum;
}

// The gap of all elements together, and of the worst one, in root mean squares of what is wanted.
void check_near(const char* name, ConstTensor got, ConstTensor want, double together, double worst = 0.5) {
  REQUIRE(got.count() == want.count());
  double gaps = 0;
  for (std::int64_t i = 0; i < want.count(); ++i) {
    const double gap = Bench::get(got, i) - Bench::get(want, i);
    gaps += gap * gap;
  }
  const double relative = std::sqrt(gaps / sum_of_squares(want));
  CAPTURE(name, relative);
  CHECK(relative <= together);
  CHECK(difference(got, want, worst) == "");
}

// ---- KDA. With 72 heads of 128, 2^18 tokens have byte 2^31 of an activation, and element 2^31 of the states of all chunks, at 4/9
// of the sequence; element 2^31 of an activation, and byte 2^33 of the states, at 8/9: head 64 of row 233016.

constexpr std::int64_t kHeads = 72, kWidth = 128;
const std::vector<std::int64_t> kSampled = {0, 63, 64, 71};  // heads
constexpr std::int64_t kRows = 256;                          // of outputs looked at in one place
// Rows before them that have a say. The slowest channels decay by e^-0.086 a token in the mean (5 sigmoid(f - 4.5), f normal), so
// that 73 tokens leave less than the rounding of bf16 (2^-9), and these e^-44.
constexpr std::int64_t kMemory = 512;

using Kda = ops::KdaAttention;
using KdaGradients = ops::KdaAttentionBackward;
struct KdaPair {  // an input and its gradient
  const char* name;
  ConstTensor Kda::*input;
  Tensor KdaGradients::*gradient;
};
constexpr KdaPair kByRow[] = {{"dq_in", &Kda::q_in, &KdaGradients::dq_in}, {"dk_in", &Kda::k_in, &KdaGradients::dk_in},
                              {"dv_in", &Kda::v_in, &KdaGradients::dv_in}, {"df", &Kda::f, &KdaGradients::df},
                              {"db", &Kda::b, &KdaGradients::db},          {"dgate", &Kda::gate, &KdaGradients::dgate}};
constexpr KdaPair kByHead[] = {{"dq_conv", &Kda::q_conv, &KdaGradients::dq_conv},
                               {"dk_conv", &Kda::k_conv, &KdaGradients::dk_conv},
                               {"dv_conv", &Kda::v_conv, &KdaGradients::dv_conv},
                               {"da_log", &Kda::a_log, &KdaGradients::da_log},
                               {"ddt_bias", &Kda::dt_bias, &KdaGradients::ddt_bias}};

// The sampled heads of rows of all heads, in f64.
Tensor sampled(Bench& bench, ConstTensor all, std::int64_t rows = 1) {
  const auto heads = std::int64_t(kSampled.size()), width = all.count() / rows / kHeads;
  return bench.filled(kF64, {rows, heads * width}, [&](std::int64_t i) {
    const std::int64_t row = i / (heads * width), head = kSampled[std::size_t(i / width % heads)];
    return Bench::get(all, (row * kHeads + head) * width + i % width);
  });
}

struct KdaRun {
  LargeBench device;
  Bench host{3};
  std::vector<std::int64_t> starts, ends;  // ends: of the places looked at
  Kda x;
  Tensor y, o;
  KdaGradients back;

  explicit KdaRun(std::int64_t T) : starts{0, T}, ends{kRows, T * 4 / 9 + kRows / 2, T * 8 / 9 + kRows / 2, T} {
    const std::int64_t P = kHeads * kWidth;
    const auto wide = [&] { return device.normal(kBf16, {T, P}); };
    const auto taps = [&] { return device.normal(kF32, {P, 1, 4}, 0.5); };
    x = {.q_in = wide(),
         .k_in = wide(),
         .v_in = wide(),
         .f = wide(),
         .b = device.normal(kBf16, {T, kHeads}),
         .gate = wide(),
         .q_conv = taps(),
         .k_conv = taps(),
         .v_conv = taps(),
         .a_log = device.copy(host.uniform(kF32, {kHeads}, -0.5, 0)),
         .dt_bias = device.copy(host.uniform(kF32, {kHeads, kWidth}, -4.5, 0)),
         .o_norm = device.copy(host.normal(kF32, {kWidth}, 0.2, 1)),
         .lower_bound = -5,
         .scale = 1 / std::sqrt(double(kWidth)),
         .l2_eps = 1e-6,
         .norm_eps = 1e-5,
         .documents = device.documents(starts),
         .initial_state = {}};
    o = device.empty(kBf16, {T, kHeads, kWidth});
    y = device.empty(kBf16, o.shape);
    ops::kda_attention(device.context(), ops::KdaAttentionForward{.x = x, .o = o, .y = y, .final_state = {}});
    const Tensor dy = device.zeros(kBf16, o.shape);
    for (const std::int64_t end : ends) {
      const Tensor rows = host.normal(kBf16, {kRows, kHeads, kWidth});
      for (std::int64_t i = 0; i < rows.count(); ++i)
        if (std::count(kSampled.begin(), kSampled.end(), i / kWidth % kHeads) == 0) Bench::set(rows, i, 0);
      copy_to_device(Device::cuda, dy.rows(end - kRows, end).data, rows.data, rows.bytes());
    }
    back.x = x, back.dy = dy, back.o = o;
    for (const KdaPair& p : kByRow) back.*p.gradient = device.empty(kBf16, (x.*p.input).shape);
    for (const KdaPair& p : kByHead) back.*p.gradient = device.zeros(kF32, (x.*p.input).shape);
    back.do_norm = device.zeros(kF32, x.o_norm.shape);
    ops::kda_attention(device.context(), back);
  }
  Tensor rows(Bench& bench, ConstTensor of, std::int64_t begin, std::int64_t end) const {  // the sampled heads
    return sampled(bench, device.to_host(bench, of.rows(begin, end)), end - begin);
  }
};

// Looks at the sampled heads of kRows rows before `end`, beside f64 on the CPU of these rows and those in memory alone, whose
// gradients of parameters add to those of `sums`, and squares of the others to `squares`.
void check_kda_at(std::int64_t end, const KdaRun& run, const KdaGradients& sums, std::vector<double>& squares) {
  Bench bench;
  const std::int64_t begin = std::max<std::int64_t>(0, end - kRows - kMemory), T = end - begin,
                     heads = std::int64_t(kSampled.size());
  const std::vector<std::int64_t> starts = {0, T};
  KdaGradients back = sums;
  back.x.documents = {starts};
  for (const KdaPair& p : kByRow) {
    back.x.*p.input = run.rows(bench, run.x.*p.input, begin, end);
    back.*p.gradient = bench.empty(kF64, (back.x.*p.input).shape);
  }
  const Shape shape{T, heads, kWidth};
  const Tensor o = bench.empty(kF64, shape), y = bench.empty(kF64, shape);
  ops::kda_attention(bench.context(), ops::KdaAttentionForward{.x = back.x, .o = o, .y = y, .final_state = {}});
  back.o = o, back.dy = run.rows(bench, run.back.dy, begin, end).reshape(shape);
  ops::kda_attention(bench.context(), back);
  const auto near = [&](const char* name, ConstTensor got, ConstTensor want) {
    check_near(name, run.rows(bench, got, end - kRows, end), want.rows(T - kRows, T), 2.5e-2);
  };
  near("o", run.o, o);
  near("y", run.y, y);
  for (std::size_t i = 0; i < squares.size(); ++i) {
    near(kByRow[i].name, run.back.*kByRow[i].gradient, back.*kByRow[i].gradient);
    squares[i] += sum_of_squares(back.*kByRow[i].gradient);
  }
}

TEST_CASE("kda_attention of a long sequence on CUDA is that of the tokens before alone at its end and past 2^31 elements",
          "[ops][.long]") {
  if (!cuda_device_here()) return;
  const auto T = GENERATE(std::int64_t(8192), std::int64_t(262144));
  CAPTURE(T);
  KdaRun run(T);
  Bench bench;
  KdaGradients sums;
  sums.x = run.x;
  for (const KdaPair& p : kByHead) {
    const Tensor parameter = sampled(bench, run.device.to_host(bench, run.x.*p.input));
    const Shape shape = (run.x.*p.input).shape;
    sums.x.*p.input = parameter.reshape(shape.with_dim0(parameter.count() / shape.row()));
    sums.*p.gradient = bench.zeros(kF64, (sums.x.*p.input).shape);
  }
  sums.x.o_norm = bench.as(kF64, run.device.to_host(bench, run.x.o_norm));
  sums.do_norm = bench.zeros(kF64, sums.x.o_norm.shape);
  std::vector<double> squares(std::size(kByRow));
  for (const std::int64_t end : run.ends) {
    CAPTURE(end);
    check_kda_at(end, run, sums, squares);
  }
  for (std::size_t i = 0; i < squares.size(); ++i) {
    const double all = run.device.squares(run.back.*kByRow[i].gradient);
    CAPTURE(kByRow[i].name, all, squares[i]);
    CHECK(std::abs(all / squares[i] - 1) <= 5e-3);
  }
  for (const KdaPair& p : kByHead)  // sums of terms that nearly cancel
    check_near(p.name, sampled(bench, run.device.to_host(bench, run.back.*p.gradient)), sums.*p.gradient, 5e-2);
  check_near("do_norm", run.device.to_host(bench, run.back.do_norm), sums.do_norm, 5e-2);
  for (const Tensor& t : {run.o, run.y}) CHECK(std::isfinite(run.device.squares(t)));
  CHECK(run.device.guards_hold());
  run.device.tell_times(T);
}

// ---- Sparse attention with its indexer. With 64 heads, 2^18 tokens have element 2^31 of q_latent at 1/4 of the sequence, 2^32 at
// 1/2 and element 2^31 of q at 2/3; 2^33 elements of q_latent, and bytes 2^31 of the indices and of the indexer's q, end with it.

constexpr std::int64_t J = 32, Hi = 128, N = 64, C = 512, He = 64, Hq = 192, K = 2048;

struct SparseRun {
  std::int64_t T;
  LargeBench device;
  Bench host{7};
  std::vector<std::int64_t> starts, queries;  // queries: those looked at
  Tensor indices, target;
  ops::IndexerLoss loss;
  ops::SparseAttentionForward forward;
  ops::SparseAttentionBackward back;

  explicit SparseRun(std::int64_t tokens) : T(tokens), starts{0, T} {
    for (const std::int64_t at : {T / 4, T / 2, T * 2 / 3}) queries.insert(queries.end(), {at - 1, at});
    for (std::int64_t t = T - 10; t < T; ++t) queries.push_back(t);
    indices = device.empty(kI32, {T, K});
    target = device.empty(kF32, {T, K});
    const Tensor index_q = device.normal(kBf16, {T, J, Hi}), index_k = device.normal(kBf16, {T, Hi}),
                 weights = device.normal(kF32, {T, J}, 1 / std::sqrt(double(J * Hi)));
    ops::indexer_select(
        device.context(),
        {.q = index_q, .k = index_k, .weights = weights, .documents = device.documents(starts), .indices = indices});
    run_attention();
    loss = {.q = index_q,
            .k = index_k,
            .weights = where_looked_at(weights),  // of other rows q and k get no gradient
            .target = target,
            .indices = indices,
            .documents = device.documents(starts),
            .gradient_scale = 1,
            .loss = device.zeros(kF32, {1}),
            .dq = device.empty(kBf16, index_q.shape),
            .dk = device.empty(kBf16, index_k.shape),
            .dweights = device.empty(kF32, weights.shape)};
    ops::indexer_loss(device.context(), loss);
  }
  void run_attention() {
    const Shape latents{T, N, C};
    forward = {.q_latent = device.normal(kBf16, latents),
               .q = device.normal(kBf16, {T, N, Hq}),
               .latent = device.normal(kBf16, {T, C}),
               .k_extra = device.normal(kBf16, {T, He}),
               .indices = indices,
               .scale = 1 / std::sqrt(double(C + He)),  // scores of size 1
               .o_latent = device.empty(kBf16, latents),
               .lse = device.empty(kF32, {T, N}),
               .probability = target};
    ops::sparse_attention(device.context(), forward);
    back = {.do_latent = where_looked_at(device.normal(kBf16, latents)),
            .q_latent = forward.q_latent,
            .q = forward.q,
            .latent = forward.latent,
            .k_extra = forward.k_extra,
            .indices = indices,
            .o_latent = forward.o_latent,
            .lse = forward.lse,
            .scale = forward.scale,
            .dq_latent = device.empty(kBf16, latents),
            .dq = device.zeros(kBf16, forward.q.shape),  // not all of it is written
            .dlatent = device.empty(kBf16, forward.latent.shape),
            .dk_extra = device.empty(kBf16, forward.k_extra.shape)};
    ops::sparse_attention(device.context(), back);
  }
  Tensor where_looked_at(Tensor x) {  // x, zeros in the rows of other queries
    std::vector<Tensor> kept;
    for (const std::int64_t t : queries) kept.push_back(row(host, x, t));
    fill(Device::cuda, x.data, 0, x.bytes());
    for (std::size_t i = 0; i < kept.size(); ++i)
      copy_to_device(Device::cuda, x.rows(queries[i], queries[i] + 1).data, kept[i].data, kept[i].bytes());
    return x;
  }
  Tensor row(Bench& bench, ConstTensor x, std::int64_t t) const { return device.to_host(bench, x.rows(t, t + 1)); }
};

// On the host: what queries read of all keys, and what they add to all keys' gradients in f64.
struct SparseSums {
  Bench bench;
  Tensor indices, target, latent, k_extra, k;
  Tensor dlatent, dk_extra, dk, loss;
  double dq_latent = 0, dq = 0, index_dq = 0;  // squares
  explicit SparseSums(const SparseRun& run) {
    const auto here = [&](ConstTensor x) { return run.device.to_host(bench, x); };
    indices = here(run.indices), target = here(run.target);
    latent = here(run.forward.latent), k_extra = here(run.forward.k_extra), k = bench.as(kF64, here(run.loss.k));
    dlatent = bench.zeros(kF64, latent.shape), dk_extra = bench.zeros(kF64, k_extra.shape), dk = bench.zeros(kF64, k.shape);
    loss = bench.zeros(kF64, {1});
  }
  const std::int32_t* list(std::int64_t t) const { return indices.as<std::int32_t>() + t * K; }
};

// Every row lists as many causal positions as it can, then -1; and the loss of rows of weights 0, which is the divergence of the
// target from equal shares, adds to the sum.
void check_all_rows(const SparseRun& run, SparseSums& sums) {
  std::int64_t wrong = 0;
  double loss = 0;
  const float* const target = sums.target.as<float>();
#pragma omp parallel for reduction(+ : wrong, loss)
  for (std::int64_t t = 0; t < run.T; ++t) {
    const std::int64_t taken = std::min(K, t + 1);
    double total = 0, terms = 0;
    for (std::int64_t i = 0; i < K; ++i) {
      const std::int32_t s = sums.list(t)[i];
      wrong += i < taken ? s < 0 || s > t : s != -1;
      if (i < taken) total += double(target[t * K + i]);
    }
    for (std::int64_t i = 0; i < taken; ++i)
      if (const double p = double(target[t * K + i]) / total; p > 0) terms += p * std::log(p);
    if (std::count(run.queries.begin(), run.queries.end(), t) == 0) loss += terms + std::log(double(taken));
  }
  REQUIRE(wrong == 0);
  Bench::set(sums.loss, 0, loss);
}

// The chosen keys are the best by f64 scores, in their order, but for what rounding of f32 may swap.
void check_chosen(const SparseRun& run, const SparseSums& sums, std::int64_t t) {
  constexpr double kTie = 1e-5;  // scores are of size 1
  Bench bench;
  const std::int64_t keys = t + 1, taken = std::min(K, keys);
  const Tensor q = bench.as(kF64, run.row(bench, run.loss.q, t)), weights = run.row(bench, run.loss.weights, t);
  std::vector<double> u(std::size_t(J * keys)), score(std::size_t(keys), 0.0);
  ops::cpu::gemm<double>(false, true, J, keys, Hi, 1, q.as<double>(), Hi, sums.k.as<double>(), Hi, 0, u.data(), keys);
  for (std::int64_t j = 0; j < J; ++j)
    for (std::int64_t s = 0; s < keys; ++s)
      score[std::size_t(s)] += Bench::get(weights, j) * std::max(0.0, u[std::size_t(j * keys + s)]);
  std::vector<bool> chosen(std::size_t(keys), false);
  double worst = std::numeric_limits<double>::infinity(), best_left = -worst;
  bool in_order = true;
  for (std::int64_t i = 0; i < taken; ++i) {
    const auto s = std::size_t(sums.list(t)[i]);
    chosen[s] = true;
    in_order = in_order && score[s] <= worst + kTie;
    worst = std::min(worst, score[s]);
  }
  for (std::size_t s = 0; s < score.size(); ++s)
    if (!chosen[s]) best_left = std::max(best_left, score[s]);
  CHECK(in_order);
  CHECK(std::count(chosen.begin(), chosen.end(), true) == taken);
  CAPTURE(worst, best_left);
  CHECK(worst >= best_left - kTie);
}

// One query's keys as all keys of a problem of K rows. Its heads are the first N rows of one head each for attention, its J heads
// the first row for the loss; the other rows are zeros.
struct OneQuery {
  static constexpr double kTurned = 8;  // of so many products one may be so near 0 that rounding turns its gradient on
  const SparseRun& run;
  SparseSums& sums;
  std::int64_t t;
  Bench bench{11};
  const std::int32_t* list = sums.list(t);
  std::int64_t taken = std::min(K, t + 1);
  Tensor indices = bench.filled(kI32, {K, K}, [&](std::int64_t i) { return i / K < N && i % K < taken ? i % K : -1; });

  Tensor row(ConstTensor x) { return run.row(bench, x, t); }
  Tensor padded(ConstTensor x, Shape shape) {
    return bench.filled(kF64, shape, [&](std::int64_t i) { return i < x.count() ? Bench::get(x, i) : 0; });
  }
  Tensor gathered(ConstTensor all) {  // the rows of its keys
    const std::int64_t width = all.shape.row();
    return bench.filled(kF64, {K, width}, [&](std::int64_t i) {
      return i / width < taken ? Bench::get(all, list[i / width] * width + i % width) : 0;
    });
  }
  void scatter(ConstTensor part, Tensor all) {  // adds them
    const std::int64_t width = all.shape.row();
    for (std::int64_t i = 0; i < taken * width; ++i) all.as<double>()[list[i / width] * width + i % width] += Bench::get(part, i);
  }
  void check_attention() {
    const Tensor q_latent = padded(row(run.forward.q_latent), {K, 1, C}), q = padded(row(run.forward.q), {K, 1, Hq}),
                 latent = gathered(sums.latent), k_extra = gathered(sums.k_extra), o = bench.empty(kF64, q_latent.shape),
                 lse = bench.empty(kF64, {K, 1}), probability = bench.empty(kF64, {K, K});
    ops::sparse_attention(bench.context(), ops::SparseAttentionForward{.q_latent = q_latent,
                                                                       .q = q,
                                                                       .latent = latent,
                                                                       .k_extra = k_extra,
                                                                       .indices = indices,
                                                                       .scale = run.forward.scale,
                                                                       .o_latent = o,
                                                                       .lse = lse,
                                                                       .probability = probability});
    const Tensor got_o = row(run.forward.o_latent), got_lse = row(run.forward.lse);
    check_near("o_latent", got_o, o.rows(0, N), 1e-2);
    check_near("lse", got_lse, lse.rows(0, N), 2e-5);
    const Tensor mean = bench.zeros(kF64, {1, K});
    for (std::int64_t i = 0; i < N * K; ++i) mean.as<double>()[i % K] += Bench::get(probability, i) / double(N);
    check_near("probability", sums.target.rows(t, t + 1), mean, 2e-4);
    const Tensor dq_latent = bench.empty(kF64, q_latent.shape), dq = bench.zeros(kF64, q.shape),
                 dlatent = bench.empty(kF64, latent.shape), dk_extra = bench.empty(kF64, k_extra.shape);
    ops::sparse_attention(bench.context(), ops::SparseAttentionBackward{.do_latent = padded(row(run.back.do_latent), o.shape),
                                                                        .q_latent = q_latent,
                                                                        .q = q,
                                                                        .latent = latent,
                                                                        .k_extra = k_extra,
                                                                        .indices = indices,
                                                                        .o_latent = padded(got_o, o.shape),  // as rounded
                                                                        .lse = padded(got_lse, lse.shape),
                                                                        .scale = run.back.scale,
                                                                        .dq_latent = dq_latent,
                                                                        .dq = dq,
                                                                        .dlatent = dlatent,
                                                                        .dk_extra = dk_extra});
    check_near("dq_latent", row(run.back.dq_latent), dq_latent.rows(0, N), 1e-2);
    check_near("dq", row(run.back.dq), dq.rows(0, N), 1e-2);
    scatter(dlatent, sums.dlatent);
    scatter(dk_extra, sums.dk_extra);
    sums.dq_latent += sum_of_squares(dq_latent), sums.dq += sum_of_squares(dq);
  }
  void check_loss() {
    const std::vector<std::int64_t> starts = {0, K};
    const Tensor dq = bench.empty(kF64, {K, J, Hi}), dk = bench.empty(kF64, {K, Hi}), dweights = bench.empty(kF64, {K, J});
    ops::indexer_loss(bench.context(), {.q = padded(row(run.loss.q), dq.shape),
                                        .k = gathered(sums.k),
                                        .weights = padded(row(run.loss.weights), dweights.shape),
                                        .target = padded(sums.target.rows(t, t + 1), {K, K}),
                                        .indices = indices,
                                        .documents = {starts},
                                        .gradient_scale = run.loss.gradient_scale,
                                        .loss = sums.loss,
                                        .dq = dq,
                                        .dk = dk,
                                        .dweights = dweights});
    check_near("index dq", row(run.loss.dq), dq.rows(0, 1), 1e-2, kTurned);
    check_near("index dweights", row(run.loss.dweights), dweights.rows(0, 1), 1e-3);
    scatter(dk, sums.dk);
    sums.index_dq += sum_of_squares(dq);
  }
};

TEST_CASE("sparse attention and its indexer of a long sequence on CUDA are near f64 at its end and past 2^31 elements",
          "[ops][.long]") {
  if (!cuda_device_here()) return;
  const auto T = GENERATE(std::int64_t(4096), std::int64_t(262144));
  CAPTURE(T);
  SparseRun run(T);
  SparseSums sums(run);
  check_all_rows(run, sums);
  for (const std::int64_t t : run.queries) {
    CAPTURE(t);
    check_chosen(run, sums, t);
    OneQuery query{run, sums, t};
    query.check_attention();
    query.check_loss();
  }
  Bench bench;
  const auto all = [&](ConstTensor x) { return run.device.to_host(bench, x); };
  check_near("dlatent", all(run.back.dlatent), sums.dlatent, 1e-2);
  check_near("dk_extra", all(run.back.dk_extra), sums.dk_extra, 1e-2);
  check_near("index dk", all(run.loss.dk), sums.dk, 1e-2, OneQuery::kTurned);
  check_near("loss", all(run.loss.loss), sums.loss, 1e-3);
  const std::pair<ConstTensor, double> squares[] = {
      {run.back.dq_latent, sums.dq_latent}, {run.back.dq, sums.dq}, {run.loss.dq, sums.index_dq}};
  for (const auto& [gradient, want] : squares) CHECK(std::abs(run.device.squares(gradient) / want - 1) <= 1e-2);
  for (const Tensor& t : {run.forward.o_latent, run.forward.lse, run.loss.dweights}) CHECK(std::isfinite(run.device.squares(t)));
  CHECK(run.device.guards_hold());
  run.device.tell_times(T);
}

}  // namespace
}  // namespace moetrain::test
