// cross_entropy_test.cpp -- holds the chunked loss to a plain softmax, to itself under other chunks, and to slopes.
#include "ops/cross_entropy.h"

#include <cmath>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"

using namespace moetrain;
using test::Bench;
using test::difference;

namespace {

struct Case {
  Tensor hidden, weight, labels;
};
struct Results {
  Tensor loss, dhidden, dweight;
};

// Every `every`-th token is ignored (0: none).
Case make(Bench& b, DType dtype, std::int64_t T, std::int64_t V, std::int64_t D, std::int64_t every, double deviation = 1) {
  return {b.normal(dtype, {T, D}, deviation), b.normal(dtype, {V, D}, deviation), b.filled(DType::i32, {T}, [&](std::int64_t t) {
            return every > 0 && t % every == every - 1 ? -100.0 : std::floor(ops::uniform(77, 5, std::uint64_t(t)) * double(V));
          })};
}

Results run(Bench& b, const Case& c, std::int64_t seq_chunk, std::int64_t vocab_chunk, double scale = 0.25) {
  const auto real = real_of(c.hidden.dtype);
  const Results r{b.zeros(real, {1}), b.empty(c.hidden.dtype, c.hidden.shape), b.zeros(real, c.weight.shape)};
  ops::cross_entropy(b.context(), ops::CrossEntropy{.hidden = c.hidden,
                                                    .weight = c.weight,
                                                    .labels = c.labels,
                                                    .seq_chunk = seq_chunk,
                                                    .vocab_chunk = vocab_chunk,
                                                    .gradient_scale = scale,
                                                    .loss = r.loss,
                                                    .dhidden = r.dhidden,
                                                    .dweight = r.dweight});
  return r;
}

double loss_only(Bench& b, const Case& c, std::int64_t seq_chunk, std::int64_t vocab_chunk) {
  const auto loss = b.zeros(real_of(c.hidden.dtype), {1});
  ops::cross_entropy(b.context(), ops::CrossEntropy{.hidden = c.hidden,
                                                    .weight = c.weight,
                                                    .labels = c.labels,
                                                    .seq_chunk = seq_chunk,
                                                    .vocab_chunk = vocab_chunk,
                                                    .gradient_scale = 1,
                                                    .loss = loss,
                                                    .dhidden = {},
                                                    .dweight = {}});
  return Bench::get(loss, 0);
}

// The definition, in f64, a token at a time.
Results plain(Bench& b, const Case& c, double scale) {
  const auto T = c.hidden.shape[0], V = c.weight.shape[0], D = c.hidden.shape[1];
  const Results r{b.zeros(DType::f64, {1}), b.zeros(DType::f64, {T, D}), b.zeros(DType::f64, {V, D})};
  std::vector<double> p(static_cast<std::size_t>(V));
  const auto hidden = test::values_of(c.hidden), weight = test::values_of(c.weight);
  double* dhidden = r.dhidden.as<double>();
  double* dweight = r.dweight.as<double>();
  for (std::int64_t t = 0; t < T; ++t) {
    const auto label = c.labels.as<std::int32_t>()[t];
    if (label == -100) continue;
    double top = -1e300, sum = 0;
    for (std::int64_t v = 0; v < V; ++v) {
      double logit = 0;
      for (std::int64_t d = 0; d < D; ++d) logit += hidden[std::size_t(t * D + d)] * weight[std::size_t(v * D + d)];
      p[std::size_t(v)] = logit;
      top = std::max(top, logit);
    }
    for (double& x : p) sum += std::exp(x - top);
    r.loss.as<double>()[0] += top + std::log(sum) - p[std::size_t(label)];
    for (std::int64_t v = 0; v < V; ++v) {
      const double g = scale * (std::exp(p[std::size_t(v)] - top) / sum - (v == label ? 1 : 0));
      for (std::int64_t d = 0; d < D; ++d) {
        dhidden[t * D + d] += g * weight[std::size_t(v * D + d)];
        dweight[v * D + d] += g * hidden[std::size_t(t * D + d)];
      }
    }
  }
  return r;
}

Results on_cuda(Bench& b, const Case& c, std::int64_t seq_chunk, std::int64_t vocab_chunk, double scale) {
  test::DeviceBench device;
  const Tensor loss = device.copy(b.zeros(DType::f32, {1})), dhidden = device.empty(c.hidden.dtype, c.hidden.shape),
               dweight = device.copy(b.zeros(DType::f32, c.weight.shape));
  ops::cross_entropy(device.context(), ops::CrossEntropy{.hidden = device.copy(c.hidden),
                                                         .weight = device.copy(c.weight),
                                                         .labels = device.copy(c.labels),
                                                         .seq_chunk = seq_chunk,
                                                         .vocab_chunk = vocab_chunk,
                                                         .gradient_scale = scale,
                                                         .loss = loss,
                                                         .dhidden = dhidden,
                                                         .dweight = dweight});
  const Results r{device.to_host(b, loss), device.to_host(b, dhidden), device.to_host(b, dweight)};
  CHECK(device.guards_hold());
  return r;
}

void check_same(const Results& got, const Results& want, double bound, double hidden_bound) {
  CHECK(difference(got.loss, want.loss, bound) == "");
  CHECK(difference(got.dhidden, want.dhidden, hidden_bound) == "");
  CHECK(difference(got.dweight, want.dweight, bound) == "");
}

}  // namespace

TEST_CASE("cross_entropy, worked by hand, adds to loss and dweight and writes dhidden", "[ops][cpu]") {
  Bench b;
  // logits of both tokens: (0, log 3), probabilities (1/4, 3/4); the second token is ignored
  const auto hidden = b.of(DType::f64, {2, 1}, {1, 1}), weight = b.of(DType::f64, {2, 1}, {0, std::log(3.0)});
  const auto labels = b.of(DType::i32, {2}, {0, -100});
  const auto loss = b.of(DType::f64, {1}, {10}), dhidden = b.empty(DType::f64, {2, 1}),
             dweight = b.of(DType::f64, {2, 1}, {100, 200});
  const auto chunk = GENERATE(1, 2, 3);
  ops::cross_entropy(b.context(), ops::CrossEntropy{.hidden = hidden,
                                                    .weight = weight,
                                                    .labels = labels,
                                                    .seq_chunk = chunk,
                                                    .vocab_chunk = chunk,
                                                    .gradient_scale = 2,
                                                    .loss = loss,
                                                    .dhidden = dhidden,
                                                    .dweight = dweight});
  CHECK(difference(test::values_of(loss), {10 + std::log(4.0)}, 1e-14) == "");
  CHECK(difference(test::values_of(dhidden), {1.5 * std::log(3.0), 0}, 1e-14) == "");
  CHECK(difference(test::values_of(dweight), {100 - 1.5, 200 + 1.5}, 1e-14) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("cross_entropy is a plain softmax however it is cut", "[ops][cpu]") {
  struct Size {
    std::int64_t T, V, D, every;
  };
  for (const auto [T, V, D, every] :
       {Size{13, 17, 5, 3}, Size{1, 1, 1, 0}, Size{1, 7, 3, 0}, Size{7, 64, 9, 0}, Size{31, 10, 4, 2}}) {
    Bench b(41);
    const auto c = make(b, DType::f64, T, V, D, every);
    const auto want = plain(b, c, 0.25), whole = run(b, c, T, V);
    for (const std::int64_t seq : {1, 2, 3, 8, 13, 1000})
      for (const std::int64_t vocab : {1, 2, 5, 16, 17, 64, 100000}) {
        CAPTURE(T, V, D, seq, vocab);
        const auto got = run(b, c, seq, vocab);
        const double floor = V == 1 ? 1e-15 : 0;  // one word: no loss, no gradient
        CHECK(difference(got.loss, want.loss, 1e-12, floor) == "");
        CHECK(difference(got.dhidden, want.dhidden, 1e-12, floor) == "");
        CHECK(difference(got.dweight, want.dweight, 1e-12, floor) == "");
        CHECK(difference(got.loss, whole.loss, 1e-12, floor) == "");
        CHECK(difference(got.dhidden, whole.dhidden, 1e-12, floor) == "");
        CHECK(difference(got.dweight, whole.dweight, 1e-12, floor) == "");
        CHECK(std::abs(loss_only(b, c, seq, vocab) - Bench::get(want.loss, 0)) <=
              1e-12 * std::abs(Bench::get(want.loss, 0)) + floor);
      }
    CHECK(b.guards_hold());
  }
}

TEST_CASE("cross_entropy gradients are the slopes of its loss", "[ops][cpu]") {
  const std::int64_t seq = GENERATE(3, 100), vocab = GENERATE(4, 100);
  CAPTURE(seq, vocab);
  Bench b(42);
  const auto c = make(b, DType::f64, 7, 11, 5, 4);
  const auto r = run(b, c, seq, vocab, 1);
  auto loss = [&] { return loss_only(b, c, seq, vocab); };
  CHECK(test::slope_difference(loss, c.hidden, r.dhidden, 1e-7) == "");
  CHECK(test::slope_difference(loss, c.weight, r.dweight, 1e-7) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("cross_entropy in f32 and bf16 is within rounding of f64 on the same inputs", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const std::int64_t seq = GENERATE(16, 1000), vocab = GENERATE(100, 1000);
  CAPTURE(int(dtype), seq, vocab);
  Bench b(43);
  const auto c = make(b, dtype, 61, 257, 33, 5, 0.5);
  const Case wide{b.as(DType::f64, c.hidden), b.as(DType::f64, c.weight), c.labels};
  check_same(run(b, c, seq, vocab), run(b, wide, 61, 257), 5e-6, dtype == DType::bf16 ? 4e-3 : 5e-6);
  CHECK(b.guards_hold());
}

TEST_CASE("cross_entropy gives no probability to lanes past the vocabulary, real vocabularies and chunks that do not divide them",
          "[ops][cpu]") {
  const std::int64_t V = GENERATE(257, 32000, 65537, 163840);
  CAPTURE(V);
  Bench b(44);
  const auto c = make(b, DType::f32, 3, V, 4, 0);
  // every logit far below zero, so that a lane of zeros would take all the probability
  const auto shift = b.filled(DType::f32, {3, 4}, [](std::int64_t i) { return i % 4 == 0 ? 100.0 : 0.1; });
  const auto low = b.filled(DType::f32, {V, 4}, [&](std::int64_t i) { return i % 4 == 0 ? -5.0 : Bench::get(c.weight, i); });
  for (const bool far : {false, true}) {
    const Case input = far ? Case{shift, low, c.labels} : c;
    const auto want = plain(b, input, 0.25);
    const double bound = far ? 2e-4 : 1e-5;  // the rounding of a logit of -500 in f32 is 3e-5
    CAPTURE(far);
    for (const std::int64_t vocab : {V, std::int64_t(4096), std::int64_t(50000)}) {
      CAPTURE(vocab);
      // dhidden is a sum over V in f32, whose rounding grows as a random walk
      check_same(run(b, input, 2, vocab), want, bound, bound + std::sqrt(double(V)) * 0x1p-24);
      CHECK(std::abs(loss_only(b, input, 2, vocab) / Bench::get(want.loss, 0) - 1) < 1e-5);
    }
  }
  CHECK(b.guards_hold());
}

TEST_CASE("cross_entropy without any label is a loss of zero and gradients of zero", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::f64, DType::bf16);
  const std::int64_t T = GENERATE(0, 1, 5);
  CAPTURE(int(dtype), T);
  Bench b;
  auto c = make(b, dtype, T, 7, 3, 1);
  c.hidden = b.empty(dtype, {T, 3});  // NaN: what an ignored token holds is of no account
  const auto r = run(b, c, 2, 3, std::numeric_limits<double>::infinity());
  for (const auto& t : {r.loss, r.dhidden, r.dweight})
    for (const double v : test::values_of(t)) CHECK(v == 0);
  CHECK(loss_only(b, c, 2, 3) == 0);
  CHECK(b.guards_hold());
}

TEST_CASE("cross_entropy leaves out blocks without labels and hidden states that are ignored", "[ops][cpu]") {
  Bench b(45);
  const auto c = make(b, DType::f64, 11, 9, 4, 0);
  for (const std::int64_t t : {0, 1, 2, 3, 7}) {
    Bench::set(c.labels, t, -100);
    Bench::set(c.hidden, t * 4, std::numeric_limits<double>::quiet_NaN());
  }
  const auto want = plain(b, c, 0.25);
  for (const std::int64_t seq : {1, 2, 4, 20}) check_same(run(b, c, seq, 4), want, 1e-12, 1e-12);
}

TEST_CASE("cross_entropy does not hide a logit that is not a number", "[ops][cpu]") {
  Bench b(46);
  const auto c = make(b, DType::f32, 5, 9, 4, 0);
  Bench::set(c.hidden, 2 * 4, std::numeric_limits<double>::quiet_NaN());
  CHECK(std::isnan(loss_only(b, c, 2, 4)));
}

TEST_CASE("cross_entropy counts as much scratch on a dry device as it takes", "[ops][cpu]") {
  const auto dtype = GENERATE(DType::f32, DType::bf16);
  const bool gradients = GENERATE(true, false);
  Bench b;
  const auto c = make(b, dtype, 29, 50, 8, 3);
  std::vector<std::int64_t> peaks;
  for (const auto device : {Device::cpu, Device::dry}) {
    Memory memory(device);
    Stack scratch(memory, Category::workspace);
    ops::Context ctx{scratch};
    ops::cross_entropy(ctx, ops::CrossEntropy{.hidden = c.hidden,
                                              .weight = c.weight,
                                              .labels = c.labels,
                                              .seq_chunk = 7,
                                              .vocab_chunk = 20,
                                              .gradient_scale = 1,
                                              .loss = b.zeros(DType::f32, {1}),
                                              .dhidden = gradients ? b.empty(dtype, {29, 8}) : Tensor{},
                                              .dweight = gradients ? b.zeros(DType::f32, {50, 8}) : Tensor{}});
    CHECK(memory.total() == 0);
    peaks.push_back(memory.peak());
  }
  CHECK(peaks[0] == peaks[1]);
  CHECK(peaks[0] >= 7 * 20 * 4);
  CHECK(peaks[0] < 29 * 50 * 4);
}

TEST_CASE("cross_entropy names the position of a label outside the vocabulary", "[ops][cpu]") {
  Bench b;
  auto c = make(b, DType::f32, 5, 9, 4, 0);
  for (const int bad : {9, -1, -99, 1 << 30}) {
    CAPTURE(bad);
    const auto labels = b.copy(c.labels);
    Bench::set(labels, 3, bad);
    std::string text;
    try {
      run(b, Case{c.hidden, c.weight, labels}, 2, 4);
    } catch (const Error& e) {
      text = e.what();
    }
    CHECK(text.find("position=3") != std::string::npos);
  }
}

TEST_CASE("cross_entropy refuses what does not fit", "[ops][cpu]") {
  Bench b;
  const auto c = make(b, DType::f32, 5, 9, 4, 0);
  const ops::CrossEntropy good{.hidden = c.hidden,
                               .weight = c.weight,
                               .labels = c.labels,
                               .seq_chunk = 2,
                               .vocab_chunk = 4,
                               .gradient_scale = 1,
                               .loss = b.zeros(DType::f32, {1}),
                               .dhidden = b.empty(DType::f32, {5, 4}),
                               .dweight = b.zeros(DType::f32, {9, 4})};
  ops::cross_entropy(b.context(), good);
  auto refused = [&](auto change) {
    auto bad = good;
    change(bad);
    CHECK_THROWS_AS(ops::cross_entropy(b.context(), bad), Error);
  };
  refused([&](auto& a) { a.weight = b.normal(DType::f32, {9, 5}); });
  refused([&](auto& a) { a.weight = b.normal(DType::f64, {9, 4}); });
  refused([&](auto& a) { a.weight = b.normal(DType::f32, {0, 4}), a.dweight = b.normal(DType::f32, {0, 4}); });
  refused([&](auto& a) { a.hidden = b.normal(DType::f32, {5}); });
  refused([&](auto& a) { a.labels = b.zeros(DType::i64, {5}); });
  refused([&](auto& a) { a.labels = b.zeros(DType::i32, {6}); });
  refused([&](auto& a) { a.seq_chunk = 0; });
  refused([&](auto& a) { a.vocab_chunk = -1; });
  refused([&](auto& a) { a.loss = b.zeros(DType::f64, {1}); });
  refused([&](auto& a) { a.loss = b.zeros(DType::f32, {2}); });
  refused([&](auto& a) { a.dhidden = b.empty(DType::f32, {5, 3}); });
  refused([&](auto& a) { a.dhidden = {}; });
  refused([&](auto& a) { a.dweight = b.zeros(DType::bf16, {9, 4}); });
  refused([&](auto& a) { a.dweight = b.zeros(DType::f32, {4, 9}); });
}

TEST_CASE("cross_entropy on CUDA is within rounding of the f64 reference, however it is cut", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Size {
    std::int64_t T, V, D, every;
  };
  struct Cut {
    std::int64_t seq, vocab;
  };
  for (const auto [T, V, D, every] : {Size{13, 17, 5, 3}, Size{1, 7, 3, 0}, Size{130, 1009, 64, 4}, Size{64, 2048, 40, 0}})
    for (const DType type : {DType::f32, DType::bf16})
      for (const auto [seq, vocab] : {Cut{1000, 100000}, Cut{7, 100000}, Cut{50, 256}, Cut{3, 5}}) {
        CAPTURE(T, V, D, every, name_of(type), seq, vocab);
        Bench b(45);
        const Case c = make(b, type, T, V, D, every, 0.4);
        const Case wide{b.as(DType::f64, c.hidden), b.as(DType::f64, c.weight), c.labels};
        const bool narrow = type == DType::bf16;
        check_same(on_cuda(b, c, seq, vocab, 0.25), run(b, wide, T, V, 0.25), narrow ? 2e-2 : 2e-5, narrow ? 2e-2 : 2e-5);
      }
}

TEST_CASE("cross_entropy on CUDA is within rounding of the f64 reference over many tiles", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Cut {
    std::int64_t seq, vocab;
  };
  Bench b(49);
  const Case c = make(b, DType::bf16, 700, 3001, 328, 7, 0.3);
  const Case wide{b.as(DType::f64, c.hidden), b.as(DType::f64, c.weight), c.labels};
  const Results want = run(b, wide, 700, 3001, 0.25);
  for (const auto [seq, vocab] : {Cut{700, 3001}, Cut{290, 3001}, Cut{700, 1100}, Cut{290, 520}}) {
    CAPTURE(seq, vocab);
    check_same(on_cuda(b, c, seq, vocab, 0.25), want, 2e-2, 2e-2);
  }
}

TEST_CASE("cross_entropy on CUDA gives no probability to lanes past the vocabulary", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b(50);
  // every logit -512, which bf16 holds: a lane of zeros would take all the probability
  const auto noise = b.normal(DType::bf16, {1009, 8});
  const Case c{b.filled(DType::bf16, {3, 8}, [](std::int64_t i) { return i % 8 == 0 ? 64.0 : 0.0; }),
               b.filled(DType::bf16, {1009, 8}, [&](std::int64_t i) { return i % 8 == 0 ? -8.0 : Bench::get(noise, i); }),
               b.of(DType::i32, {3}, {0, 700, 1008})};
  for (const std::int64_t vocab : {1009, 1000, 300}) {
    CAPTURE(vocab);
    check_same(on_cuda(b, c, 2, vocab, 0.25), plain(b, c, 0.25), 1e-2, 1e-2);
  }
}

namespace {
void write_dweight(ops::Context& ctx, const Case& c, const Results& to) {
  ops::cross_entropy(ctx, ops::CrossEntropy{.hidden = c.hidden,
                                            .weight = c.weight,
                                            .labels = c.labels,
                                            .seq_chunk = 4,
                                            .vocab_chunk = 16,
                                            .gradient_scale = 0.25,
                                            .loss = to.loss,
                                            .dhidden = to.dhidden,
                                            .dweight = to.dweight,
                                            .write_dweight = true});
}
}  // namespace

TEST_CASE("cross_entropy that writes dweight does not read what it held", "[ops][cpu]") {
  Bench b(48);
  const Case c = make(b, DType::f32, 10, 37, 6, 3);
  const Results to{b.zeros(DType::f32, {1}), b.empty(DType::f32, c.hidden.shape), b.empty(DType::f32, c.weight.shape)};
  write_dweight(b.context(), c, to);
  CHECK(test::values_of(to.dweight) == test::values_of(run(b, c, 4, 16).dweight));
}

TEST_CASE("cross_entropy on CUDA that writes dweight does not read what it held", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b(48);
  test::DeviceBench device;
  const Case c = make(b, DType::f32, 10, 37, 6, 3);
  const Results to{device.copy(b.zeros(DType::f32, {1})), device.empty(DType::f32, c.hidden.shape),
                   device.empty(DType::f32, c.weight.shape)};
  write_dweight(device.context(), {device.copy(c.hidden), device.copy(c.weight), device.copy(c.labels)}, to);
  CHECK(difference(device.to_host(b, to.dweight), run(b, c, 4, 16).dweight, 2e-5) == "");
}

TEST_CASE("cross_entropy on CUDA does not let an ignored token's NaN through, and without labels does nothing", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b(46);
  Case c = make(b, DType::bf16, 9, 33, 8, 3);
  const Results before = on_cuda(b, c, 4, 33, 1);
  for (std::int64_t t = 2; t < 9; t += 3)
    for (std::int64_t d = 0; d < 8; ++d) Bench::set(c.hidden, t * 8 + d, std::numeric_limits<double>::quiet_NaN());
  const Results after = on_cuda(b, c, 4, 33, 1);
  CHECK(test::values_of(after.loss) == test::values_of(before.loss));
  CHECK(test::values_of(after.dhidden) == test::values_of(before.dhidden));
  CHECK(test::values_of(after.dweight) == test::values_of(before.dweight));
  c.labels = b.filled(DType::i32, {9}, [](std::int64_t) { return -100.0; });
  const Results none = on_cuda(b, c, 4, 7, 1);
  for (const Tensor& t : {none.loss, none.dhidden, none.dweight})
    for (const double v : test::values_of(t)) CHECK(v == 0);
}

TEST_CASE("cross_entropy on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b(47);
  const Case c = make(b, DType::bf16, 100, 999, 48, 5, 0.3);
  for (const std::int64_t vocab : {999, 128}) {
    const Results first = on_cuda(b, c, 33, vocab, 0.01);
    for (int i = 0; i < 19; ++i) {
      const Results again = on_cuda(b, c, 33, vocab, 0.01);
      CHECK(test::values_of(again.loss) == test::values_of(first.loss));
      CHECK(test::values_of(again.dhidden) == test::values_of(first.dhidden));
      CHECK(test::values_of(again.dweight) == test::values_of(first.dweight));
    }
  }
}
