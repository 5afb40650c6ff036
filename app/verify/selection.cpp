// selection.cpp -- random causal positions of queries.
#include "app/verify/selection.h"

#include <numeric>

namespace moetrain::app {

Selection::Selection(OpCase& c, std::int64_t compared) : T(c.T()) {
  constexpr std::int64_t kWindow = 8192;
  const ops::Documents documents{c.starts()};
  K = std::clamp<std::int64_t>(c.model().dsa->index_topk, 1, documents.longest());
  window = std::max<std::int64_t>(0, T - kWindow);
  rows = c.sample(T - window, compared);
  for (std::int64_t& row : rows) row += window;
  indices.assign(std::size_t(T * K), -1);
  std::size_t next = 0;  // of rows
  for (std::int64_t d = 0; d < documents.count(); ++d)
    for (std::int64_t t = documents.begin(d); t < documents.end(d); ++t) {
      const bool is_compared = next < rows.size() && rows[next] == t;
      next += is_compared;
      const std::int64_t first = is_compared ? std::max(documents.begin(d), window) : documents.begin(d), n = t - first + 1;
      // first + (s, s + g, s + 2 g, ... modulo n), for a random start and a random step g without a divisor in common with n
      auto step = std::int64_t(c.random(std::uint64_t(n))), at = std::int64_t(c.random(std::uint64_t(n)));
      while (step < 1 || std::gcd(step, n) != 1) ++step;
      for (std::int64_t k = 0; k < std::min(K, n); ++k, at = (at + step) % n)
        indices[std::size_t(t * K + k)] = std::int32_t(first + at);
    }
}

std::vector<std::int32_t> Selection::of_rows() const {
  std::vector<std::int32_t> some(indices.size(), -1);
  for (const std::int64_t t : rows) std::copy_n(indices.begin() + t * K, K, some.begin() + t * K);
  return some;
}

std::vector<std::int32_t> Selection::of_window() const {
  std::vector<std::int32_t> some(std::size_t((T - window) * K), -1);
  for (const std::int64_t t : rows)
    for (std::int64_t k = 0; k < K; ++k)
      if (const std::int32_t s = indices[std::size_t(t * K + k)]; s >= 0)
        some[std::size_t((t - window) * K + k)] = std::int32_t(s - window);
  return some;
}

Places Selection::rows_of_window() const {
  Places counted(rows);
  for (std::int64_t& row : counted) row -= window;
  return counted;
}

}  // namespace moetrain::app
