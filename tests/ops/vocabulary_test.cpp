// vocabulary_test.cpp -- a loss and an embedding over parts of the vocabulary are those over all of it.
#include "ops/vocabulary.h"

#include <cmath>

#include "ops/cross_entropy.h"
#include "ops/embedding.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"

using namespace moetrain;
using namespace moetrain::test;

namespace {

constexpr std::int64_t T = 37, V = 61, D = 24;
const std::vector<std::pair<std::int64_t, std::int64_t>> kParts{{0, 20}, {20, 41}, {41, 61}};

Tensor some_labels(Bench& b) {
  return b.filled(DType::i32, {T}, [](std::int64_t t) {
    return t % 5 == 4 ? -100.0 : std::floor(ops::uniform(77, 5, std::uint64_t(t)) * double(V));
  });
}

struct Results {
  double loss;
  std::vector<double> dhidden, dweight;
};

// One rank after another: each first hands out its sums of every block, then takes all of them.
template <class AnyBench>
Results by_parts(Bench& host, AnyBench& b, ConstTensor hidden, ConstTensor weight, ConstTensor labels, std::int64_t seq,
                 std::int64_t vocab) {
  const DType real = real_of(hidden.dtype);
  Results all{0, std::vector<double>(std::size_t(T * D)), {}};
  std::vector<std::vector<Tensor>> sums(kParts.size());  // of a part, by block
  for (const bool merges : {false, true})
    for (std::size_t p = 0; p < kParts.size(); ++p) {
      const auto [first, end] = kParts[p];
      const Tensor here = b.empty(DType::i32, {T}), loss = b.zeros(real, {1}), dhidden = b.empty(hidden.dtype, {T, D}),
                   dweight = b.zeros(real, {end - first, D});
      ops::local_ids(b.context(), ops::LocalIds{.ids = labels, .first = first, .count = end - first, .words = V, .y = here});
      std::size_t block = 0;
      ops::cross_entropy(b.context(),
                         ops::CrossEntropy{.hidden = hidden,
                                           .weight = weight.rows(first, end),
                                           .labels = here,
                                           .seq_chunk = seq,
                                           .vocab_chunk = vocab,
                                           .gradient_scale = 0.25,
                                           .loss = loss,
                                           .dhidden = dhidden,
                                           .dweight = dweight,
                                           .merge = [&](Tensor running) {
                                             if (!merges) return sums[p].push_back(b.copy(running));
                                             const std::int64_t s = running.shape[1];
                                             const Tensor parts = b.empty(real, {std::int64_t(kParts.size()), 3, s});
                                             for (std::size_t q = 0; q < kParts.size(); ++q) {
                                               const Tensor to = parts.rows(std::int64_t(q), std::int64_t(q) + 1);
                                               copy_to_device(b.context().device(), to.data, sums[q][block].data, to.bytes());
                                             }
                                             ++block;
                                             ops::merge_sums(b.context(), ops::MergeSums{.parts = parts, .all = running});
                                           }});
      if (!merges) continue;
      all.loss = Bench::get(b.to_host(host, loss), 0);
      const auto dx = values_of(b.to_host(host, dhidden)), dw = values_of(b.to_host(host, dweight));
      for (std::size_t i = 0; i < dx.size(); ++i) all.dhidden[i] += dx[i];
      all.dweight.insert(all.dweight.end(), dw.begin(), dw.end());
    }
  return all;
}

Results whole(Bench& b, ConstTensor hidden, ConstTensor weight, ConstTensor labels) {
  const DType real = real_of(hidden.dtype);
  const Tensor loss = b.zeros(real, {1}), dhidden = b.empty(hidden.dtype, {T, D}), dweight = b.zeros(real, {V, D});
  ops::cross_entropy(b.context(), ops::CrossEntropy{.hidden = hidden,
                                                    .weight = weight,
                                                    .labels = labels,
                                                    .seq_chunk = T,
                                                    .vocab_chunk = V,
                                                    .gradient_scale = 0.25,
                                                    .loss = loss,
                                                    .dhidden = dhidden,
                                                    .dweight = dweight});
  return {Bench::get(loss, 0), values_of(dhidden), values_of(dweight)};
}

struct HostBench : Bench {
  Tensor to_host(Bench&, Tensor t) { return t; }
};

}  // namespace

TEST_CASE("the loss and its gradients over parts of a vocabulary are those over all of it, however they are cut", "[ops][cpu]") {
  HostBench b;
  const Tensor hidden = b.normal(DType::f64, {T, D}), weight = b.normal(DType::f64, {V, D}), labels = some_labels(b);
  const Results want = whole(b, hidden, weight, labels);
  for (const auto& [seq, vocab] :
       {std::pair{T, V}, {std::int64_t(5), std::int64_t(7)}, {std::int64_t(1), V}, {T, std::int64_t(1)}}) {
    CAPTURE(seq, vocab);
    const Results got = by_parts(b, b, hidden, weight, labels, seq, vocab);
    CHECK(std::abs(got.loss - want.loss) <= 1e-12 * want.loss);
    CHECK(difference(got.dhidden, want.dhidden, 1e-12) == "");
    CHECK(difference(got.dweight, want.dweight, 1e-12) == "");
  }
}

TEST_CASE("rows of a table in parts add up to rows of the table, and gradients to its rows", "[ops][cpu]") {
  Bench b;
  const Tensor table = b.normal(DType::f32, {V, D}), dy = b.normal(DType::f32, {T, D}), y = b.empty(DType::f32, {T, D}),
               dtable = b.zeros(DType::f32, {V, D});
  const Tensor ids =
      b.filled(DType::i32, {T}, [](std::int64_t t) { return std::floor(ops::uniform(7, 5, std::uint64_t(t)) * double(V)); });
  ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = table, .y = y});
  ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = dy, .dtable = dtable});
  std::vector<double> sum(std::size_t(T * D), 0), rows;
  for (const auto& [first, end] : kParts) {
    const Tensor here = b.empty(DType::i32, {T}), part = b.empty(DType::f32, {T, D}),
                 gradient = b.zeros(DType::f32, {end - first, D});
    ops::local_ids(b.context(), ops::LocalIds{.ids = ids, .first = first, .count = end - first, .words = V, .y = here});
    ops::embedding(b.context(), ops::EmbeddingForward{.ids = here, .table = table.rows(first, end), .y = part});
    ops::embedding(b.context(), ops::EmbeddingBackward{.ids = here, .dy = dy, .dtable = gradient});
    const auto values = values_of(part), more = values_of(gradient);
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
    rows.insert(rows.end(), more.begin(), more.end());
  }
  CHECK(sum == values_of(y));
  CHECK(rows == values_of(dtable));
}

TEST_CASE("an id outside the vocabulary is named with its place", "[ops][cpu]") {
  Bench b;
  const Tensor ids = b.filled(DType::i32, {3}, [](std::int64_t t) { return t == 1 ? double(V) : -100.0; });
  std::string text;
  try {
    ops::local_ids(b.context(), ops::LocalIds{.ids = ids, .first = 0, .count = 5, .words = V, .y = ids});
  } catch (const Error& e) {
    text = e.what();
  }
  CHECK(text.find("t=1, id=61") != std::string::npos);
}

TEST_CASE("on CUDA the loss over parts of a vocabulary is within rounding of the whole in f64, and the embedding bit by bit",
          "[ops][cuda]") {
  if (!cuda_device_here()) return;
  for (const DType dtype : {DType::f32, DType::bf16})
    for (const auto& [seq, vocab] : {std::pair{T, V}, {std::int64_t(16), std::int64_t(8)}}) {
      CAPTURE(dtype, seq, vocab);
      Bench b;
      DeviceBench there;
      const Tensor hidden = b.normal(dtype, {T, D}), weight = b.normal(dtype, {V, D}), labels = some_labels(b);
      const Results want = whole(b, b.as(DType::f64, hidden), b.as(DType::f64, weight), labels);
      const Results got = by_parts(b, there, there.copy(hidden), there.copy(weight), there.copy(labels), seq, vocab);
      const double bound = dtype == DType::f32 ? 1e-5 : 2e-2;
      CHECK(std::abs(got.loss - want.loss) <= bound * want.loss);
      CHECK(difference(got.dhidden, want.dhidden, bound) == "");
      // A logit of 16 and more is known to within 1/16 in bf16, and so the probability of a likely word to 6 %.
      CHECK(difference(got.dweight, want.dweight, dtype == DType::f32 ? bound : 6e-2) == "");

      const Tensor ids = b.empty(DType::i32, {T}), y = b.empty(dtype, {T, D}), dtable = b.zeros(DType::f32, {20, D});
      ops::local_ids(b.context(), ops::LocalIds{.ids = labels, .first = 41, .count = 20, .words = V, .y = ids});
      for (std::int64_t t = 0; t < T; ++t)
        if (ids.as<std::int32_t>()[t] == ops::kIgnored) ids.as<std::int32_t>()[t] = 19;
      ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = weight.rows(41, 61), .y = y});
      ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = hidden, .dtable = dtable});
      const Tensor gids = there.copy(ids), gy = there.empty(dtype, {T, D}), gtable = there.zeros(DType::f32, {20, D});
      ops::embedding(there.context(), ops::EmbeddingForward{.ids = gids, .table = there.copy(weight.rows(41, 61)), .y = gy});
      ops::embedding(there.context(), ops::EmbeddingBackward{.ids = gids, .dy = there.copy(hidden), .dtable = gtable});
      CHECK(values_of(there.to_host(b, gy)) == values_of(y));
      CHECK(difference(values_of(there.to_host(b, gtable)), values_of(dtable), 1e-6) == "");
      CHECK(there.guards_hold());
    }
}
