// embedding_test.cpp -- rows come out by id and gradients go back to them, also when ids repeat.
#include "ops/embedding.h"

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/slope.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

TEST_CASE("embedding copies the row of each id", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    CAPTURE(name_of(type));
    Bench b;
    const Tensor ids = b.of(DType::i32, {4}, {2, 0, 2, 1}), table = b.of(type, {3, 2}, {1, 2, 3, 4, 5, 6});
    const Tensor y = b.empty(type, {4, 2});
    ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = table, .y = y});
    CHECK(test::values_of(y) == std::vector<double>{5, 6, 1, 2, 5, 6, 3, 4});
    CHECK(b.guards_hold());
  }
}

TEST_CASE("embedding backward adds up the gradients of equal ids", "[ops][cpu]") {
  for (const DType type : {DType::f32, DType::f64, DType::bf16}) {
    CAPTURE(name_of(type));
    Bench b;
    const Tensor ids = b.of(DType::i32, {4}, {2, 0, 2, 1}), dy = b.of(type, {4, 2}, {1, 2, 3, 4, 5, 6, 7, 8});
    const Tensor dtable = b.of(real_of(type), {3, 2}, {10, 10, 10, 10, 10, 10});
    ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = dy, .dtable = dtable});
    CHECK(test::values_of(dtable) == std::vector<double>{13, 14, 17, 18, 16, 18});
    CHECK(b.guards_hold());
  }
}

TEST_CASE("embedding backward is the slope of embedding forward", "[ops][cpu]") {
  Bench b;
  const Tensor ids = b.of(DType::i32, {5}, {3, 1, 1, 0, 3}), table = b.normal(DType::f64, {4, 3}), c = b.normal(DType::f64, {5, 3});
  const Tensor y = b.empty(DType::f64, {5, 3}), dtable = b.zeros(DType::f64, {4, 3});
  const auto f = [&] {
    ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = table, .y = y});
    return test::weighted_sum(y, c);
  };
  ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = c, .dtable = dtable});
  CHECK(test::slope_difference(f, table, dtable, 1e-9) == "");
}

TEST_CASE("embedding backward of bf16 sums in f32, on many threads as on one", "[ops][cpu]") {
  for (const std::int64_t D : {std::int64_t(1), std::int64_t(65), std::int64_t(200)}) {
    CAPTURE(D);
    Bench b;
    const std::int64_t T = 2000, V = 7;
    const Tensor ids = b.filled(DType::i32, {T}, [&](std::int64_t t) { return t * t % V; }), dy = b.normal(DType::bf16, {T, D});
    const Tensor dtable = b.zeros(DType::f32, {V, D}), wide = b.zeros(DType::f64, {V, D});
    ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = dy, .dtable = dtable});
    ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = b.as(DType::f64, dy), .dtable = wide});
    CHECK(test::difference(dtable, wide, 1e-5) == "");
    CHECK(b.guards_hold());
  }
}

TEST_CASE("embedding without tokens does nothing", "[ops][cpu]") {
  Bench b;
  const Tensor ids = b.empty(DType::i32, {0}), y = b.empty(DType::f32, {0, 2}), table = b.of(DType::f32, {2, 2}, {1, 2, 3, 4});
  ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = table, .y = y});
  ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = y, .dtable = table});
  CHECK(test::values_of(table) == std::vector<double>{1, 2, 3, 4});
  CHECK(b.guards_hold());
}

TEST_CASE("embedding refuses ids outside the table and tensors that do not fit", "[ops][cpu]") {
  Bench b;
  auto& ctx = b.context();
  const Tensor table = b.normal(DType::f32, {3, 2}), y = b.empty(DType::f32, {2, 2}), y3 = b.empty(DType::f32, {3, 2});
  const Tensor half = b.empty(DType::bf16, {2, 2}), good = b.of(DType::i32, {2}, {0, 2}), wide = b.of(DType::i64, {2}, {0, 2});
  for (const double bad : {-1.0, 3.0}) {
    const Tensor ids = b.of(DType::i32, {2}, {0, bad});
    CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingForward{.ids = ids, .table = table, .y = y}), Error);
    CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingBackward{.ids = ids, .dy = y, .dtable = table}), Error);
  }
  CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingForward{.ids = good, .table = table, .y = y3}), Error);
  CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingForward{.ids = good, .table = table, .y = half}), Error);
  CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingForward{.ids = wide, .table = table, .y = y}), Error);
  CHECK_THROWS_AS(ops::embedding(ctx, ops::EmbeddingBackward{.ids = good, .dy = half, .dtable = half}), Error);
}

TEST_CASE("embedding on CUDA copies rows and adds gradients in the order of tokens, bit for bit as on the CPU", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  struct Size {
    std::int64_t T, V, D;
  };
  // ids are few (long runs of equal ones), or as many as tokens
  for (const DType type : {DType::f32, DType::bf16})
    for (const auto& [T, V, D] : {Size{1, 1, 1}, Size{0, 5, 8}, Size{2000, 7, 65}, Size{3001, 163840, 64}, Size{700, 300, 2056},
                                  Size{129, 2, 1}, Size{64, 1, 1024}}) {
      CAPTURE(name_of(type), T, V, D);
      Bench b;
      const Tensor ids =
          b.filled(DType::i32, {T}, [v = V](std::int64_t t) { return std::int64_t(ops::uniform(4, 0, t) * double(v)); });
      const Tensor dy = b.normal(type, {T, D}), table = b.normal(type, {V, D}), y = b.empty(type, {T, D});
      const Tensor dtable = b.filled(DType::f32, {V, D}, [](std::int64_t i) { return i % 17; });
      const auto on_cuda = [&] {
        test::DeviceBench d;
        const Tensor there = d.copy(ids), out = d.empty(type, y.shape), gradient = d.copy(dtable);
        ops::embedding(d.context(), ops::EmbeddingForward{.ids = there, .table = d.copy(table), .y = out});
        ops::embedding(d.context(), ops::EmbeddingBackward{.ids = there, .dy = d.copy(dy), .dtable = gradient});
        CHECK(d.guards_hold());
        return std::pair(d.to_host(b, out), d.to_host(b, gradient));
      };
      const auto got = on_cuda(), again = on_cuda();
      ops::embedding(b.context(), ops::EmbeddingForward{.ids = ids, .table = table, .y = y});
      ops::embedding(b.context(), ops::EmbeddingBackward{.ids = ids, .dy = dy, .dtable = dtable});
      CHECK(test::values_of(got.first) == test::values_of(y));
      CHECK(test::values_of(got.second) == test::values_of(dtable));
      CHECK(test::values_of(again.second) == test::values_of(got.second));
    }
}

}  // namespace
}  // namespace moetrain
