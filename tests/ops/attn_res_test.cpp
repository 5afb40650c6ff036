// attn_res_test.cpp -- the depth mix by hand, as slope, over one and many sources, and in every storage type.
#include "ops/attn_res.h"

#include <omp.h>

#include <cmath>
#include <cstring>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

struct Sizes {
  std::int64_t T, D, Z;
};

// The tensors of a mix of Z sources of one storage type; gamma and query of that type too.
struct Mix {
  std::vector<Tensor> own;
  std::vector<ConstTensor> sources;
  Tensor gamma, query, y, weights, dy, dgamma, dquery;
  std::vector<Tensor> dsources;
  Mix(Bench& b, DType type, Sizes s)
      : gamma(b.normal(type, {s.D}, 0.2, 1)),
        query(b.normal(type, {1, s.D}, 1 / std::sqrt(double(s.D)))),
        y(b.empty(type, {s.T, s.D})),
        weights(b.empty(real_of(type), {s.T, s.Z})),
        dy(b.normal(type, {s.T, s.D})),
        dgamma(b.zeros(real_of(type), {s.D})),
        dquery(b.zeros(real_of(type), {1, s.D})) {
    for (std::int64_t n = 0; n < s.Z; ++n) {
      own.push_back(b.normal(type, {s.T, s.D}, 1 + double(n)));
      dsources.push_back(b.normal(real_of(type), {s.T, s.D}));
    }
    sources.assign(own.begin(), own.end());
  }
  Mix(Bench& b, const Mix& other)  // the same values in f64, with outputs of its own
      : gamma(b.as(DType::f64, other.gamma)),
        query(b.as(DType::f64, other.query)),
        y(b.empty(DType::f64, other.y.shape)),
        weights(b.empty(DType::f64, other.weights.shape)),
        dy(b.as(DType::f64, other.dy)),
        dgamma(b.as(DType::f64, other.dgamma)),
        dquery(b.as(DType::f64, other.dquery)) {
    for (const Tensor& v : other.own) own.push_back(b.as(DType::f64, v));
    for (const Tensor& dv : other.dsources) dsources.push_back(b.as(DType::f64, dv));
    sources.assign(own.begin(), own.end());
  }
  void forward(Bench& b) const {
    ops::attn_res(b.context(),
                  ops::AttnResForward{.sources = sources, .gamma = gamma, .query = query, .eps = 1e-5, .y = y, .weights = weights});
  }
  void backward(Bench& b) const {
    ops::attn_res(b.context(), ops::AttnResBackward{.dy = dy,
                                                    .sources = sources,
                                                    .gamma = gamma,
                                                    .query = query,
                                                    .eps = 1e-5,
                                                    .weights = weights,
                                                    .dsources = dsources,
                                                    .dgamma = dgamma,
                                                    .dquery = dquery});
  }
};

TEST_CASE("attn_res weighs two sources by their normalised dot with the query", "[ops][cpu]") {
  // rows (1, 1) and (3, -3) have root mean squares 1 and 3; with c = (ln 2, 0) their scores are ln 2 and ln 2; with
  // c = (0, ln 2) they are ln 2 and -ln 2, so the weights are 4/5 and 1/5
  Bench b;
  const std::vector<ConstTensor> sources{b.of(DType::f64, {1, 2}, {1, 1}), b.of(DType::f64, {1, 2}, {3, -3})};
  const Tensor gamma = b.of(DType::f64, {2}, {2, 2}), y = b.empty(DType::f64, {1, 2}), weights = b.empty(DType::f64, {1, 2});
  const auto mix = [&](double q0, double q1) {
    const Tensor query = b.of(DType::f64, {1, 2}, {q0, q1});
    ops::attn_res(b.context(),
                  ops::AttnResForward{.sources = sources, .gamma = gamma, .query = query, .eps = 0, .y = y, .weights = weights});
  };
  mix(std::log(2.0) / 2, 0);
  CHECK(test::difference(test::values_of(weights), {0.5, 0.5}, 1e-15) == "");
  CHECK(test::difference(test::values_of(y), {2, -1}, 1e-15) == "");
  mix(0, std::log(2.0) / 2);
  CHECK(test::difference(test::values_of(weights), {0.8, 0.2}, 1e-15) == "");
  CHECK(test::difference(test::values_of(y), {1.4, 0.2}, 1e-15) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("attn_res backward is the slope of attn_res forward", "[ops][cpu]") {
  for (const std::int64_t Z : {std::int64_t(2), std::int64_t(5)}) {
    CAPTURE(Z);
    Bench b;
    const Mix m(b, DType::f64, {3, 6, Z});
    for (const Tensor& dv : m.dsources) std::memset(dv.data, 0, std::size_t(dv.bytes()));
    const auto f = [&] {
      m.forward(b);
      return test::weighted_sum(m.y, m.dy);
    };
    f();
    m.backward(b);
    for (std::size_t n = 0; n < m.own.size(); ++n) CHECK(test::slope_difference(f, m.own[n], m.dsources[n], 1e-7) == "");
    CHECK(test::slope_difference(f, m.gamma, m.dgamma, 1e-7) == "");
    CHECK(test::slope_difference(f, m.query, m.dquery, 1e-7) == "");
    CHECK(b.guards_hold());
  }
}

TEST_CASE("attn_res backward gives gamma and query the same gradients when the other is frozen", "[ops][cpu]") {
  Bench b;
  const Mix both(b, DType::f64, {3, 4, 3});
  both.forward(b);
  both.backward(b);
  for (const bool gamma : {true, false}) {
    Mix one = both;
    (gamma ? one.dgamma : one.dquery) = b.zeros(DType::f64, (gamma ? both.dgamma : both.dquery).shape);
    (gamma ? one.dquery : one.dgamma) = {};
    one.backward(b);
    CHECK(test::values_of(gamma ? one.dgamma : one.dquery) == test::values_of(gamma ? both.dgamma : both.dquery));
  }
  CHECK(b.guards_hold());
}

TEST_CASE("attn_res backward adds to every gradient", "[ops][cpu]") {
  Bench b;
  const Mix m(b, DType::f64, {3, 4, 3});
  m.forward(b);
  m.backward(b);
  const auto once = test::values_of(m.dquery), once_gamma = test::values_of(m.dgamma), once_source = test::values_of(m.dsources[1]);
  m.backward(b);
  m.backward(b);
  auto grew = [](std::vector<double> first, const std::vector<double>& step, double times) {
    for (std::size_t i = 0; i < first.size(); ++i) first[i] += times * step[i];
    return first;
  };
  CHECK(test::difference(test::values_of(m.dquery), grew(once, once, 2), 1e-12) == "");
  CHECK(test::difference(test::values_of(m.dgamma), grew(once_gamma, once_gamma, 2), 1e-12) == "");
  Mix fresh(b, m);
  std::memset(fresh.dsources[1].data, 0, std::size_t(fresh.dsources[1].bytes()));
  fresh.forward(b);
  fresh.backward(b);
  CHECK(test::difference(test::values_of(m.dsources[1]), grew(once_source, test::values_of(fresh.dsources[1]), 2), 1e-12) == "");
}

TEST_CASE("attn_res in f32 and bf16 is within rounding of f64 on the same operands", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::bf16})
    for (const Sizes& s : {Sizes{1, 8, 1}, Sizes{3, 7, 4}, Sizes{130, 600, 9}, Sizes{65, 257, 2}}) {
      CAPTURE(name_of(type), s.T, s.D, s.Z);
      Bench b;
      const Mix m(b, type, s), wide(b, m);
      for (const Mix* mix : {&m, &wide}) {
        mix->forward(b);
        mix->backward(b);
      }
      CHECK(test::difference(m.weights, wide.weights, 1e-5) == "");
      CHECK(test::difference(m.y, wide.y, type == DType::bf16 ? 4e-3 : 1e-5) == "");
      for (std::size_t n = 0; n < m.own.size(); ++n) CHECK(test::difference(m.dsources[n], wide.dsources[n], 2e-5) == "");
      // With one source the softmax is constant, and these gradients are zero but for rounding.
      CHECK(test::difference(m.dgamma, wide.dgamma, 1e-4, s.Z == 1 ? 1e-4 : 0) == "");
      CHECK(test::difference(m.dquery, wide.dquery, 1e-4, s.Z == 1 ? 1e-4 : 0) == "");
      CHECK(b.guards_hold());
    }
}

TEST_CASE("attn_res with a frozen query still gives the sources their gradients", "[ops][cpu]") {
  Bench b;
  const Mix m(b, DType::f32, {40, 5, 3});
  m.forward(b);
  std::vector<Tensor> frozen;
  for (const Tensor& dv : m.dsources) frozen.push_back(b.copy(dv));
  m.backward(b);
  ops::attn_res(b.context(), ops::AttnResBackward{.dy = m.dy,
                                                  .sources = m.sources,
                                                  .gamma = m.gamma,
                                                  .query = m.query,
                                                  .eps = 1e-5,
                                                  .weights = m.weights,
                                                  .dsources = frozen});
  for (std::size_t n = 0; n < frozen.size(); ++n) CHECK(test::values_of(frozen[n]) == test::values_of(m.dsources[n]));
}

TEST_CASE("attn_res gives the same bits on one thread and on three", "[ops][cpu]") {
  Bench b(3), c(3);
  const Mix one(b, DType::f32, {301, 70, 4}), three(c, DType::f32, {301, 70, 4});
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  one.forward(b);
  one.backward(b);
  omp_set_num_threads(3);
  three.forward(c);
  three.backward(c);
  omp_set_num_threads(threads);
  CHECK(test::values_of(one.y) == test::values_of(three.y));
  CHECK(test::values_of(one.dsources[2]) == test::values_of(three.dsources[2]));
  CHECK(test::values_of(one.dgamma) == test::values_of(three.dgamma));
  CHECK(test::values_of(one.dquery) == test::values_of(three.dquery));
}

TEST_CASE("attn_res without tokens leaves the gradients of its weights as they were", "[ops][cpu]") {
  Bench b;
  const Mix m(b, DType::bf16, {0, 4, 2});
  m.forward(b);
  m.backward(b);
  CHECK(test::values_of(m.dgamma) == std::vector<double>(4, 0));
  CHECK(b.guards_hold());
}

TEST_CASE("attn_res refuses sources and gradients that do not fit", "[ops][cpu]") {
  Bench b;
  const Mix good(b, DType::f32, {3, 4, 2});
  good.forward(b);
  {
    Mix m = good;
    m.sources.clear();
    CHECK_THROWS_AS(m.forward(b), Error);
  }
  {
    Mix m = good;
    m.sources[1] = b.normal(DType::f32, {4, 4});
    CHECK_THROWS_AS(m.forward(b), Error);
  }
  {
    Mix m = good;
    m.query = b.normal(DType::f32, {4});
    CHECK_THROWS_AS(m.forward(b), Error);
  }
  {
    Mix m = good;
    m.weights = b.normal(DType::f32, {3, 3});
    CHECK_THROWS_AS(m.backward(b), Error);
  }
  {
    Mix m = good;
    m.dsources.pop_back();
    CHECK_THROWS_AS(m.backward(b), Error);
  }
  {
    Mix m = good;
    m.dquery = b.zeros(DType::f32, {4});
    CHECK_THROWS_AS(m.backward(b), Error);
  }
}

// The norm that follows a mix: its weight is of the real type.
struct MixNorm {
  Tensor w, y, r;
  MixNorm(Bench& b, const Mix& m)
      : w(b.normal(real_of(m.y.dtype), {m.y.shape[1]}, 0.2, 1)),
        y(b.empty(m.y.dtype, m.y.shape)),
        r(b.empty(real_of(m.y.dtype), {m.y.shape[0]})) {}
  ops::RmsNormForward of(ConstTensor x) const { return {.x = x, .w = w, .y = y, .r = r, .eps = 1e-5}; }
};

TEST_CASE("attn_res with the norm that follows gives the bits of one after the other", "[ops][cpu]") {
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    CAPTURE(name_of(type));
    Bench b;
    const Mix m(b, type, {13, 70, 3});
    const MixNorm fused(b, m);
    MixNorm apart = fused;
    apart.y = b.empty(type, m.y.shape), apart.r = b.empty(fused.r.dtype, fused.r.shape);
    ops::AttnResForward a{.sources = m.sources,
                          .gamma = m.gamma,
                          .query = m.query,
                          .eps = 1e-5,
                          .y = m.y,
                          .weights = m.weights,
                          .norm = fused.of(m.y)};
    ops::attn_res(b.context(), a);
    ops::rmsnorm(b.context(), apart.of(m.y));
    CHECK(test::values_of(fused.y) == test::values_of(apart.y));
    CHECK(test::values_of(fused.r) == test::values_of(apart.r));
    CHECK(b.guards_hold());
    a.norm = fused.of(m.dy);
    CHECK_THROWS_AS(ops::attn_res(b.context(), a), Error);
  }
}

struct Trained {
  bool gamma = true, query = true;
};
constexpr Trained kFrozen{false, false};

// Forward with its norm, and backward, on the device; everything they write, on the host: weights, y, the norm's y and r, dgamma,
// dquery, then the gradients of the sources.
std::vector<Tensor> on_cuda(Bench& b, const Mix& m, const MixNorm& norm, Trained trained = {}) {
  test::DeviceBench d;
  const Tensor y = d.empty(m.y.dtype, m.y.shape), weights = d.empty(DType::f32, m.weights.shape), dgamma = d.copy(m.dgamma),
               dquery = d.copy(m.dquery), gamma = d.copy(m.gamma), query = d.copy(m.query), w = d.copy(norm.w),
               normed = d.empty(m.y.dtype, m.y.shape), r = d.empty(DType::f32, norm.r.shape);
  std::vector<ConstTensor> sources;
  std::vector<Tensor> dsources;
  for (const Tensor& v : m.own) sources.push_back(d.copy(v));
  for (const Tensor& dv : m.dsources) dsources.push_back(d.copy(dv));
  ops::attn_res(d.context(), ops::AttnResForward{.sources = sources,
                                                 .gamma = gamma,
                                                 .query = query,
                                                 .eps = 1e-5,
                                                 .y = y,
                                                 .weights = weights,
                                                 .norm = ops::RmsNormForward{.x = y, .w = w, .y = normed, .r = r, .eps = 1e-5}});
  ops::attn_res(d.context(), ops::AttnResBackward{.dy = d.copy(m.dy),
                                                  .sources = sources,
                                                  .gamma = gamma,
                                                  .query = query,
                                                  .eps = 1e-5,
                                                  .weights = weights,
                                                  .dsources = dsources,
                                                  .dgamma = trained.gamma ? dgamma : Tensor{},
                                                  .dquery = trained.query ? dquery : Tensor{}});
  std::vector<Tensor> out{weights, y, normed, r, dgamma, dquery};
  out.insert(out.end(), dsources.begin(), dsources.end());
  const Tensor again = d.empty(m.y.dtype, m.y.shape);  // without a norm
  ops::attn_res(d.context(), ops::AttnResForward{
                                 .sources = sources, .gamma = gamma, .query = query, .eps = 1e-5, .y = again, .weights = weights});
  for (Tensor& t : out) t = d.to_host(b, t);
  CHECK(test::values_of(d.to_host(b, again)) == test::values_of(out[1]));
  CHECK(d.guards_hold());
  return out;
}

TEST_CASE("attn_res on CUDA, with the norm that follows, is within rounding of the f64 reference", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  for (const DType type : {DType::f32, DType::bf16})
    for (const Sizes& s : {Sizes{1, 8, 1}, Sizes{5, 100, 3}, Sizes{3, 7, 4}, Sizes{130, 600, 9}, Sizes{65, 257, 2},
                           Sizes{20, 7168, 9}, Sizes{300, 512, 3}, Sizes{7, 64, 64}, Sizes{3, 20001, 6}, Sizes{0, 64, 2}}) {
      CAPTURE(name_of(type), s.T, s.D, s.Z);
      Bench b;
      const Mix m(b, type, s), wide(b, m);
      const MixNorm norm(b, m);
      MixNorm wide_norm = norm;
      wide_norm.w = b.as(DType::f64, norm.w), wide_norm.y = b.empty(DType::f64, m.y.shape),
      wide_norm.r = b.empty(DType::f64, {s.T});
      const auto got = on_cuda(b, m, norm), frozen = on_cuda(b, m, norm, kFrozen);
      const auto gamma = on_cuda(b, m, norm, {.query = false}), query = on_cuda(b, m, norm, {.gamma = false});
      wide.forward(b);
      wide.backward(b);
      ops::rmsnorm(b.context(), wide_norm.of(wide.y));
      CHECK(test::values_of(frozen[4]) == std::vector<double>(std::size_t(s.D), 0));
      CHECK((test::values_of(gamma[4]) == test::values_of(got[4]) && test::values_of(query[5]) == test::values_of(got[5])));
      CHECK((test::values_of(gamma[5]) == test::values_of(frozen[5]) && test::values_of(query[4]) == test::values_of(frozen[4])));
      if (s.T == 0) continue;
      const double bound = type == DType::bf16 ? 4e-3 : 1e-5;
      CHECK(test::difference(got[0], wide.weights, 1e-5) == "");
      CHECK(test::difference(got[1], wide.y, bound) == "");
      CHECK(test::difference(got[2], wide_norm.y, 3 * bound) == "");
      CHECK(test::difference(got[3], wide_norm.r, 3 * bound) == "");
      // With one source the softmax is constant, and these gradients are zero but for rounding.
      CHECK(test::difference(got[4], wide.dgamma, 1e-4, s.Z == 1 ? 1e-4 : 0) == "");
      CHECK(test::difference(got[5], wide.dquery, 1e-4, s.Z == 1 ? 1e-4 : 0) == "");
      for (std::size_t n = 0; n < m.own.size(); ++n) {
        CHECK(test::difference(got[6 + n], wide.dsources[n], 2e-5) == "");
        CHECK(test::values_of(frozen[6 + n]) == test::values_of(got[6 + n]));
      }
    }
}

TEST_CASE("attn_res on CUDA gives a token the same bits wherever it stands among many", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Case {
    Sizes few;
    std::int64_t times;  // so many that every block takes several tokens
  };
  for (const DType type : {DType::f32, DType::bf16})
    for (const Case& c : {Case{{37, 64, 3}, 130}, Case{{37, 128, 64}, 90}, Case{{11, 7168, 5}, 90}, Case{{37, 63, 2}, 130}}) {
      CAPTURE(name_of(type), c.few.T, c.few.D, c.few.Z);
      Bench b;
      const Mix few(b, type, c.few);
      const MixNorm few_norm(b, few);
      const auto repeated = [&](ConstTensor t) {
        const Tensor many = b.empty(t.dtype, t.shape.with_dim0(t.shape[0] * c.times));
        for (std::int64_t i = 0; i < c.times; ++i)
          std::memcpy(static_cast<std::byte*>(many.data) + i * t.bytes(), t.data, std::size_t(t.bytes()));
        return many;
      };
      Mix many = few;
      MixNorm many_norm = few_norm;
      many.y = repeated(few.y), many.weights = repeated(few.weights), many.dy = repeated(few.dy),
      many_norm.r = repeated(few_norm.r);
      for (Tensor& v : many.own) v = repeated(v);
      for (Tensor& dv : many.dsources) dv = repeated(dv);
      const auto alone = on_cuda(b, few, few_norm, kFrozen), among = on_cuda(b, many, many_norm, kFrozen);
      for (std::size_t n = 0; n < alone.size(); ++n) {
        if (n == 4 || n == 5) continue;  // gradients of gamma and query, here left alone
        bool same = among[n].bytes() == alone[n].bytes() * c.times;
        for (std::int64_t i = 0; same && i < c.times; ++i)
          same = std::memcmp(static_cast<const std::byte*>(among[n].data) + i * alone[n].bytes(), alone[n].data,
                             std::size_t(alone[n].bytes())) == 0;
        CAPTURE(n);
        CHECK(same);
      }
    }
}

TEST_CASE("attn_res on CUDA gives the same bits in 20 runs", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  Bench b;
  const Mix m(b, DType::bf16, {1500, 264, 5});
  const MixNorm norm(b, m);
  const auto first = on_cuda(b, m, norm);
  for (int run = 0; run < 20; ++run) {
    const auto again = on_cuda(b, m, norm);
    for (std::size_t i = 0; i < first.size(); ++i)
      CHECK(std::memcmp(again[i].data, first[i].data, std::size_t(first[i].bytes())) == 0);
  }
}

}  // namespace
}  // namespace moetrain
