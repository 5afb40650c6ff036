// tensor_test.cpp -- views: sizes, rows of the same storage, and the refusals that keep a wrong index from memory.
#include "memory/tensor.h"

#include "memory/buffer.h"
#include "tests/support/catch.h"

namespace moetrain {
namespace {

TEST_CASE("a shape counts elements, in 64 bits", "[memory][cpu]") {
  CHECK(Shape{}.count() == 1);
  CHECK(Shape{2, 3, 4}.count() == 24);
  CHECK(Shape{2, 3, 4}.row() == 12);
  CHECK(Shape{2, 0, 4}.count() == 0);
  CHECK(Shape{1 << 20, 1 << 20}.count() == std::int64_t(1) << 40);
  CHECK(Shape{2, 3}.with_dim0(5) == Shape{5, 3});
  CHECK(!(Shape{6} == Shape{6, 1}));
  CHECK(Shape{3, 4}.text() == "[3, 4]");
  CHECK_THROWS_AS((Shape{1, -1}), Error);
  CHECK_THROWS_AS((Shape{1, 1, 1, 1, 1}), Error);
}

TEST_CASE("rows of a tensor are the same storage, further on", "[memory][cpu]") {
  float data[6] = {0, 1, 2, 3, 4, 5};
  const Tensor t(data, DType::f32, {3, 2});
  const Tensor last = t.rows(2, 3);
  CHECK(last.as<float>()[1] == 5);
  CHECK(last.shape == Shape{1, 2});
  CHECK(t.rows(3, 3).count() == 0);
  CHECK(t.reshape({6}).as<float>() == data);
  CHECK_THROWS_AS(t.rows(2, 4), Error);
  CHECK_THROWS_AS(t.rows(-1, 1), Error);
  CHECK_THROWS_AS(t.rows(2, 1), Error);
  CHECK_THROWS_AS(t.reshape({5}), Error);
}

TEST_CASE("a tensor is read only as the type it holds, and a default one is absent", "[memory][cpu]") {
  double data[1] = {1};
  const ConstTensor t = Tensor(data, DType::f64, {1});
  CHECK(t.as<double>()[0] == 1);
  CHECK(t.bytes() == 8);
  CHECK_THROWS_AS(t.as<float>(), Error);
  CHECK(t.present());
  CHECK(!ConstTensor().present());
  CHECK(ConstTensor().bytes() == 0);
  CHECK(Tensor(nullptr, DType::f32, {4}).rows(1, 2).data == nullptr);
}

TEST_CASE("a failed check names its place, its cause and its numbers", "[memory][cpu]") {
  std::string what;
  try {
    check(false, "three is not four", {{"three", 3}, {"four", 4}});
  } catch (const Error& e) {
    what = e.what();
  }
  CHECK(what.find("memory/tensor_test.cpp:") == 0);
  CHECK(what.find("three is not four (three=3, four=4)") != what.npos);
}

TEST_CASE("a shape with more elements than bytes can be counted is refused with its dims", "[memory][cpu]") {
  const std::int64_t half = std::int64_t(1) << 32, rest = std::int64_t(1) << 27;
  CHECK(Shape{half, rest}.count() == half * rest);
  CHECK_THROWS_AS((Shape{half, rest, 2}), Error);
  CHECK_THROWS_AS((Shape{half, half, half}), Error);  // 2^96: a product that wraps to 0
  CHECK_THROWS_AS((Shape{1, rest}.with_dim0(2 * half)), Error);
  CHECK_THROWS_AS((Shape{half, half, half, 0}), Error);  // a row of it could not be counted either
  try {
    const Shape wrong{half, half};
  } catch (const Error& e) {
    CHECK(std::string(e.what()).find("[4294967296, 4294967296]") != std::string::npos);
  }
}

TEST_CASE("an account of more bytes than can be counted is refused and stays as it was", "[memory][cpu]") {
  Memory dry(Device::dry);
  const std::int64_t most = std::int64_t(1) << 62;
  const Buffer weights(dry, Category::weights, most);
  CHECK_THROWS_AS(Buffer(dry, Category::gradients, most), Error);
  CHECK(dry.total() == most);
  CHECK(dry.now(Category::gradients) == 0);
}

}  // namespace
}  // namespace moetrain
