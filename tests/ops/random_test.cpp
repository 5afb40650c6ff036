// random_test.cpp -- the generator gives the published bits, and its uniforms and normals have the moments they should.
#include "ops/random.h"

#include <set>

#include "ops/random_normal.h"
#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/on_device.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

TEST_CASE("philox gives the published known answers", "[ops][cpu]") {
  // Random123's known-answer vectors for philox4x32-10
  CHECK(ops::philox(0, 0, 0) == std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8});
  const std::uint64_t ones = ~std::uint64_t(0);
  CHECK(ops::philox(ones, ones, ones) == std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd});
  CHECK(ops::philox(0x299f31d0a4093822U, 0x0370734413198a2eU, 0x85a308d3243f6a88U) ==
        std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1});
}

TEST_CASE("stream_of gives the published hash of a name", "[ops][cpu]") {
  CHECK(ops::stream_of("") == 0xcbf29ce484222325U);
  CHECK(ops::stream_of("a") == 0xaf63dc4c8601ec8cU);
  CHECK(ops::stream_of("foobar") == 0x85944171f73967e8U);
}

TEST_CASE("random values depend on seed, stream and index", "[ops][cpu]") {
  std::set<double> seen;
  for (const std::uint64_t seed : {1, 2})
    for (const std::uint64_t stream : {0, 7})
      for (std::uint64_t i = 0; i < 100; ++i) seen.insert(ops::uniform(seed, stream, i + (std::uint64_t(1) << 33) * (i % 2)));
  CHECK(seen.size() == 400);
  CHECK(ops::normal(3, 4, 5) == ops::normal(3, 4, 5));
}

TEST_CASE("uniform lies inside (0, 1) and fills it evenly", "[ops][cpu]") {
  constexpr int kBins = 20, kDraws = 200000;
  std::array<int, kBins> counts{};
  bool inside = true;
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double u = ops::uniform(11, 0, i);
    inside = inside && 0 < u && u < 1;
    ++counts[std::size_t(u * kBins)];
  }
  CHECK(inside);
  for (const int count : counts) CHECK(std::abs(count - kDraws / kBins) < 500);  // five standard deviations are 487
}

TEST_CASE("normal has mean 0, variance 1, no skew and the kurtosis of a Gaussian", "[ops][cpu]") {
  constexpr int kDraws = 200000;
  std::array<double, 5> moment{};
  for (std::uint64_t i = 0; i < kDraws; ++i) {
    const double z = ops::normal(5, 1, i);
    for (double power = 1; double& m : moment) {
      m += power / kDraws;
      power *= z;
    }
  }
  CHECK(std::abs(moment[1]) < 0.012);
  CHECK(std::abs(moment[2] - 1) < 0.016);
  CHECK(std::abs(moment[3]) < 0.045);
  CHECK(std::abs(moment[4] - 3) < 0.12);
}

TEST_CASE("random_normal of a part is that part of the whole, on every device", "[ops][cpu]") {
  test::Bench b;
  for (const DType type : {DType::f64, DType::f32, DType::bf16}) {
    const Tensor y = b.empty(type, {20011});
    ops::random_normal(b.context(), ops::RandomNormal{.seed = 3, .stream = 4, .first = 100, .deviation = 0.02, .y = y});
    for (const std::int64_t i : {0, 1, 7777, 20010}) {
      const double want = 0.02 * ops::normal(3, 4, std::uint64_t(100 + i));
      CHECK(test::Bench::get(y, i) == (type == DType::f64 ? want : type == DType::f32 ? double(float(want)) : double(float(bf16(want)))));
    }
  }
  CHECK(b.guards_hold());
}

TEST_CASE("random_normal of some columns is those of the whole", "[ops][cpu]") {
  test::Bench b;
  const Tensor whole = b.empty(DType::f32, {40, 17}), part = b.empty(DType::f32, {40, 6});
  ops::random_normal(b.context(), ops::RandomNormal{.seed = 3, .stream = 4, .first = 100, .deviation = 0.02, .y = whole});
  ops::random_normal(b.context(),
                     ops::RandomNormal{.seed = 3, .stream = 4, .first = 105, .deviation = 0.02, .y = part, .stride = 17});
  for (std::int64_t r = 0; r < 40; ++r)
    for (std::int64_t c = 0; c < 6; ++c) CHECK(test::Bench::get(part, r * 6 + c) == test::Bench::get(whole, r * 17 + 5 + c));
  CHECK(b.guards_hold());
  CHECK_THROWS_AS(ops::random_normal(b.context(),
                                     ops::RandomNormal{.seed = 3, .stream = 4, .first = 0, .deviation = 1, .y = part, .stride = 5}),
                  Error);
}

TEST_CASE("random_normal on CUDA has the CPU's numbers, to the neighbouring f32", "[ops][cuda]") {
  if (!test::cuda_device_here()) return;
  test::Bench b;
  for (const auto& [type, shape, stride] :
       {std::tuple{DType::f32, Shape{300007}, 0}, {DType::bf16, Shape{300007}, 0}, {DType::f32, Shape{211, 300}, 1000}}) {
    test::DeviceBench device;
    const Tensor y = b.empty(type, shape), on_device = device.empty(type, shape);
    ops::RandomNormal fill{.seed = 3, .stream = 4, .first = std::int64_t(1) << 33, .deviation = 0.02, .y = y, .stride = stride};
    ops::random_normal(b.context(), fill);
    fill.y = on_device;
    ops::random_normal(device.context(), fill);
    const auto want = test::values_of(y), got = test::values_of(device.to_host(b, on_device));
    std::int64_t others = 0;
    for (std::size_t i = 0; i < want.size(); ++i) {
      others += got[i] != want[i];
      CHECK(std::abs(got[i] - want[i]) <= std::abs(want[i]) * (type == DType::f32 ? 1.2e-7 : 8e-3));
    }
    CHECK(others <= 3);
    CHECK(device.guards_hold());
  }
}

}  // namespace
}  // namespace moetrain
