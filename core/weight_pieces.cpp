// weight_pieces.cpp -- one buffer, filled again and again.
#include "core/weight_pieces.h"

#include <algorithm>
#include <cstring>

#include "core/host_values.h"

namespace moetrain::core {
namespace {
constexpr std::int64_t kPieceBytes = std::int64_t(64) << 20;
}

void for_each_piece(const WeightSource& source, const Param& p, int param, parallel::Rows rows, DType dtype, const UseRows& use) {
  const std::int64_t row_bytes = std::max<std::int64_t>(1, p.shape.row() * size_of(dtype));
  const std::int64_t most = std::min(rows.count(), std::max<std::int64_t>(1, kPieceBytes / row_bytes));
  std::vector<std::byte> host(std::size_t(most * row_bytes));
  for (std::int64_t first = rows.begin; first < rows.end; first += most) {
    const Tensor piece(host.data(), dtype, p.shape.with_dim0(std::min(most, rows.end - first)));
    std::memset(host.data(), 0xff, host.size());  // NaN in every floating type
    source.read(param, first, piece);
    if (const std::int64_t at = first_not_finite(piece); at >= 0)
      throw Error(source.path + ": " + p.name + ": element " + std::to_string(first * p.shape.row() + at) +
                  " is not a finite number");
    use(first, piece);
  }
}

}  // namespace moetrain::core
