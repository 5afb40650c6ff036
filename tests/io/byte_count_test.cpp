// byte_count_test.cpp -- sizes as people write them, and back.
#include "io/byte_count.h"

#include "tests/support/catch.h"

using moetrain::io::ByteCount;
using moetrain::io::parse_byte_count;
using moetrain::io::text_of;

TEST_CASE("a size is a number and a unit of 1000 or 1024, and is written as short as it reads back", "[io][cpu]") {
  for (const auto& [text, bytes, written] :
       std::vector<std::tuple<const char*, std::int64_t, const char*>>{{"4096", 4096, "4KiB"},
                                                                       {"0", 0, "0"},
                                                                       {"1", 1, "1"},
                                                                       {"32MiB", 32 << 20, "32MiB"},
                                                                       {"141GB", 141'000'000'000, "141GB"},
                                                                       {"1.5 kib", 1536, "1536"},
                                                                       {"2k", 2000, "2KB"},
                                                                       {"2T", 2'000'000'000'000, "2TB"},
                                                                       {"7b", 7, "7"},
                                                                       {"1000000", 1'000'000, "1MB"}}) {
    CAPTURE(text);
    const auto size = parse_byte_count(text);
    REQUIRE(size);
    CHECK(size->bytes == bytes);
    CHECK(text_of(*size) == written);
    CHECK(parse_byte_count(text_of(*size)) == size);
  }
  for (const char* wrong : {"", "GB", "1X", "1GiBs", "1 G B", "-1", "nan", "1e300", "1ib", "8PPB"}) {
    CAPTURE(wrong);
    CHECK_FALSE(parse_byte_count(wrong));
  }
}
