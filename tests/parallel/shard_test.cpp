// shard_test.cpp -- shards are a partition: every row once, in rank order, for any rows and ranks.
#include "parallel/shard.h"

#include "tests/support/catch.h"

using namespace moetrain::parallel;

TEST_CASE("shards of ten rows over four ranks are three, three, three and one", "[parallel][cpu]") {
  CHECK(shard_of(10, 0, 4) == Rows{0, 3});
  CHECK(shard_of(10, 1, 4) == Rows{3, 6});
  CHECK(shard_of(10, 2, 4) == Rows{6, 9});
  CHECK(shard_of(10, 3, 4) == Rows{9, 10});
}

TEST_CASE("with more ranks than rows the first ranks hold one row each and the others none", "[parallel][cpu]") {
  CHECK(shard_of(2, 0, 5) == Rows{0, 1});
  CHECK(shard_of(2, 1, 5) == Rows{1, 2});
  for (const int rank : {2, 3, 4}) CHECK(shard_of(2, rank, 5) == Rows{2, 2});
}

TEST_CASE("shards cover every row once and in order, and none is larger than its padding", "[parallel][cpu]") {
  for (std::int64_t rows = 0; rows <= 40; ++rows)
    for (int ranks = 1; ranks <= 12; ++ranks) {
      CAPTURE(rows, ranks);
      std::int64_t next = 0;
      for (int r = 0; r < ranks; ++r) {
        const Rows mine = shard_of(rows, r, ranks);
        REQUIRE(mine.begin == next);
        REQUIRE(mine.count() >= 0);
        REQUIRE(mine.count() <= shard_rows(rows, ranks));
        if (mine.count() > 0) REQUIRE(mine.begin == r * shard_rows(rows, ranks));
        next = mine.end;
      }
      REQUIRE(next == rows);
    }
}

TEST_CASE("shards of more rows than an int counts do not wrap", "[parallel][cpu]") {
  constexpr std::int64_t kRows = std::int64_t(5) << 40;
  CHECK(shard_of(kRows, 1023, 1024) == Rows{kRows / 1024 * 1023, kRows});
}
