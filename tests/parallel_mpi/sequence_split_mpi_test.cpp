// sequence_split_mpi_test.cpp -- rows of slices come together in the order of positions, gradients go back summed, and what is passed
// on reaches the neighbour.
#include "parallel/sequence_split.h"

#include <algorithm>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

using namespace moetrain;
using namespace moetrain::parallel;

namespace {

constexpr std::int64_t kShare = 3, kWidth = 2;

// Offsets of this rank's slices of sequences of these lengths.
std::vector<std::int64_t> slices_of(const std::vector<std::int64_t>& lengths, int rank) {
  std::vector<std::int64_t> offsets{0};
  for (const std::int64_t length : lengths)
    offsets.push_back(offsets.back() + std::clamp<std::int64_t>(length - rank * kShare, 0, kShare));
  return offsets;
}
double value(std::int64_t sequence, std::int64_t position, std::int64_t column) {
  return double(1 + 1000 * sequence + 10 * position + column);
}

}  // namespace

TEST_CASE("rows of slices are gathered by position, short sequences padded, and their gradients summed back", "[parallel][mpi]") {
  const auto world = mpi_world();
  const int n = world->size(), me = world->rank();
  const std::int64_t whole = n * kShare;
  SequenceSplit split(*world, kShare);
  for (const auto& lengths : {std::vector<std::int64_t>{whole, whole}, {whole, 7, 1}, {2}, {}})
    for (const DType dtype : {DType::f64, DType::bf16}) {
      test::Bench bench;
      const auto slices = slices_of(lengths, me);
      const auto B = std::int64_t(lengths.size());
      std::vector<double> mine, all, sums;
      for (std::int64_t b = 0; b < B; ++b)
        for (std::int64_t p = 0; p < whole; ++p)
          for (std::int64_t i = 0; i < kWidth; ++i) {
            const bool there = p < lengths[std::size_t(b)], here = there && p / kShare == me;
            const double v = dtype == DType::bf16 ? double(float(bf16(float(value(b, p, i))))) : value(b, p, i);
            all.push_back(there ? v : 0);
            if (!here) continue;
            mine.push_back(v);
            sums.push_back(double(n * (n + 1) / 2) + double(p));
          }
      const Tensor rows = bench.of(dtype, {slices.back(), kWidth}, mine), gathered = bench.empty(dtype, {split.gathered_rows(slices), kWidth});
      split.gather_rows(bench.context(), slices, rows, gathered);
      CHECK(test::values_of(gathered) == all);
      // Rank r's gradient of every row is r + 1, rank 0's has the position beside: the sum tells both apart.
      const Tensor gradients = bench.filled(dtype, gathered.shape, [&](std::int64_t i) {
        return double(me + 1) + (me == 0 ? double(i / kWidth % whole) : 0);
      });
      split.sum_rows(bench.context(), slices, gradients, rows);
      CHECK(test::values_of(rows) == sums);
      CHECK(bench.guards_hold());
    }
}

TEST_CASE("what is passed on arrives at the neighbour, zeros where there is none", "[parallel][mpi]") {
  const auto world = mpi_world();
  const int n = world->size(), me = world->rank();
  SequenceSplit split(*world, kShare);
  test::Bench bench;
  const Tensor mine = bench.of(DType::f32, {2}, {double(me), 0.5}), arrived = bench.empty(DType::f32, {2});
  split.shift(bench.context(), 1, mine, arrived);
  CHECK(test::values_of(arrived) == (me > 0 ? std::vector<double>{double(me - 1), 0.5} : std::vector<double>{0, 0}));
  split.shift(bench.context(), -1, mine, arrived);
  CHECK(test::values_of(arrived) == (me + 1 < n ? std::vector<double>{double(me + 1), 0.5} : std::vector<double>{0, 0}));
  const Tensor all = bench.empty(DType::f32, {n, 2});
  split.gather(mine, all);
  for (int r = 0; r < n; ++r) CHECK(test::Bench::get(all, 2 * r) == r);
  CHECK_THROWS_AS(split.shift(bench.context(), 2, mine, arrived), Error);
  CHECK(bench.guards_hold());
}
