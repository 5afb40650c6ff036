// dtype_test.cpp -- bf16 rounds to nearest even, keeps NaN a NaN, and survives the way there and back.
#include "memory/dtype.h"

#include "tests/support/catch.h"

namespace moetrain {
namespace {

TEST_CASE("every bf16 comes back from f32 with its own bits", "[memory][cpu]") {
  int changed = 0;
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 x;
    x.bits = std::uint16_t(bits);
    const float wide = x;
    if (std::isnan(wide)) {
      changed += !std::isnan(float(bf16(wide)));
      continue;
    }
    changed += bf16(wide).bits != bits;
  }
  CHECK(changed == 0);
}

TEST_CASE("bf16 rounds to the nearest value, halves to the even one", "[memory][cpu]") {
  CHECK(bf16(1.0F).bits == 0x3f80);
  CHECK(bf16(-2.0F).bits == 0xc000);
  CHECK(float(bf16(1 + 0x1p-8F)) == 1);
  CHECK(float(bf16(1 + 0x3p-8F)) == 1 + 0x1p-6F);
  CHECK(float(bf16(1 + 0x1p-8F + 0x1p-20F)) == 1 + 0x1p-7F);
  CHECK(float(bf16(1 + 0x1p-8F - 0x1p-20F)) == 1);
  CHECK(float(bf16(1e-40F)) > 0);
}

TEST_CASE("bf16 of what is not finite is not finite", "[memory][cpu]") {
  const float infinity = std::numeric_limits<float>::infinity();
  CHECK(float(bf16(infinity)) == infinity);
  CHECK(float(bf16(-infinity)) == -infinity);
  CHECK(float(bf16(std::numeric_limits<float>::max())) == infinity);
  CHECK(std::isnan(float(bf16(std::numeric_limits<float>::quiet_NaN()))));
  CHECK(std::isnan(float(bf16(std::bit_cast<float>(std::uint32_t(0x7f800001))))));
}

TEST_CASE("sizes, reals and floating types are those of the type", "[memory][cpu]") {
  CHECK(size_of(DType::bf16) == sizeof(bf16));
  CHECK(size_of(DType::i64) == 8);
  CHECK(size_of(DType::none) == 0);
  CHECK(real_of(DType::bf16) == DType::f32);
  CHECK(real_of(DType::f32) == DType::f32);
  CHECK(real_of(DType::f64) == DType::f64);
  CHECK((is_floating(DType::f32) && is_floating(DType::f64) && is_floating(DType::bf16)));
  CHECK(!(is_floating(DType::i32) || is_floating(DType::u8) || is_floating(DType::none)));
}

}  // namespace
}  // namespace moetrain
