// gemm_test.cpp -- every transposition, stride and scale of the product, on one thread and on several, against three loops.
#include "ops/cpu/gemm.h"

#include <limits>
#include <type_traits>

#include "tests/support/catch.h"
#include "tests/support/compare.h"
#include "tests/support/tensors.h"

namespace moetrain {
namespace {

using test::Bench;

struct Sizes {
  std::int64_t m, n, k;
};

// a, b and c have three columns more than they need, so that a stride taken for a width is caught.
template <class R>
void compare_with_loops(Sizes s, bool transpose_a, bool transpose_b, R alpha, R beta, bool inside_parallel_region) {
  CAPTURE(s.m, s.n, s.k, transpose_a, transpose_b, alpha, beta, inside_parallel_region);
  Bench b;
  constexpr DType kType = DTypeOf<R>::value;
  const Tensor a = b.normal(kType, transpose_a ? Shape{s.k, s.m + 3} : Shape{s.m, s.k + 3});
  const Tensor w = b.normal(kType, transpose_b ? Shape{s.n, s.k + 3} : Shape{s.k, s.n + 3});
  const Tensor c = b.normal(kType, {s.m, s.n + 3});
  auto want = test::values_of(c);
  if (beta == 0)  // c must not be read
    for (std::int64_t i = 0; i < s.m; ++i)
      for (std::int64_t j = 0; j < s.n; ++j) Bench::set(c, i * (s.n + 3) + j, std::numeric_limits<double>::quiet_NaN());
  for (std::int64_t i = 0; i < s.m; ++i)
    for (std::int64_t j = 0; j < s.n; ++j) {
      double sum = 0;
      for (std::int64_t p = 0; p < s.k; ++p)
        sum += Bench::get(a, transpose_a ? p * (s.m + 3) + i : i * (s.k + 3) + p) *
               Bench::get(w, transpose_b ? j * (s.k + 3) + p : p * (s.n + 3) + j);
      double& out = want[std::size_t(i * (s.n + 3) + j)];
      out = double(alpha) * sum + double(beta) * out;
    }
  const auto multiply = [&] {
    ops::cpu::gemm<R>(transpose_a, transpose_b, s.m, s.n, s.k, alpha, a.as<R>(), a.shape[1], w.as<R>(), w.shape[1], beta, c.as<R>(),
                      c.shape[1]);
  };
  if (inside_parallel_region) {
#pragma omp parallel
#pragma omp single
    multiply();
  } else {
    multiply();
  }
  CHECK(test::difference(test::values_of(c), want, std::is_same_v<R, double> ? 1e-12 : 1e-4) == "");
  CHECK(b.guards_hold());
}

TEST_CASE("gemm is the product of three loops", "[ops][cpu]") {
  // the last three are shared among threads: by rows, by columns, and with an uneven last share
  for (const Sizes& s : {Sizes{1, 1, 1}, Sizes{3, 5, 7}, Sizes{2, 9, 0}, Sizes{203, 40, 90}, Sizes{24, 500, 60}, Sizes{97, 97, 97}})
    for (const bool transpose_a : {false, true})
      for (const bool transpose_b : {false, true}) {
        compare_with_loops<float>(s, transpose_a, transpose_b, 1.5F, 0, false);
        compare_with_loops<double>(s, transpose_a, transpose_b, 1, 1, false);
        compare_with_loops<double>(s, transpose_a, transpose_b, -1, 0.5, true);
      }
}

TEST_CASE("gemm without rows or columns writes nothing", "[ops][cpu]") {
  float c = 7;
  const float one = 1;
  ops::cpu::gemm<float>(false, false, 0, 1, 1, 1, &one, 1, &one, 1, 0, &c, 1);
  ops::cpu::gemm<float>(false, false, 1, 0, 1, 1, &one, 1, &one, 1, 0, &c, 1);
  CHECK(c == 7);
}

}  // namespace
}  // namespace moetrain
