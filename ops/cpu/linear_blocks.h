// linear_blocks.h -- how products with operands that BLAS cannot read are cut, and the scratch their parts are converted in.
#pragma once
#include <algorithm>
#include <initializer_list>

#include "ops/cpu/reals.h"
#include "ops/linear.h"

namespace moetrain::ops::cpu {

// How many rows of x, dy or y (tokens) and of w (outputs) are worked on at once: all of them when nothing needs converting.
struct Blocks {
  std::int64_t tokens, outputs;
};
template <class R>
Blocks blocks_of(std::initializer_list<ConstTensor> operands, std::int64_t T, std::int64_t O, std::int64_t I) {
  const bool converts = std::any_of(operands.begin(), operands.end(), [](ConstTensor t) { return t.dtype != DTypeOf<R>::value; });
  if (!converts) return {std::max<std::int64_t>(T, 1), std::max<std::int64_t>(O, 1)};
  // Below 256 rows converting would show beside the product; above 1024 nothing is gained.
  const std::int64_t rows = std::clamp<std::int64_t>((1 << 20) / std::max<std::int64_t>(I, 1), 256, 1024);
  return {std::clamp<std::int64_t>(T, 1, rows), std::clamp<std::int64_t>(O, 1, rows)};
}

template <class R>
R* scratch_for(Context& ctx, ConstTensor t, std::int64_t rows, std::int64_t columns) {
  if (t.dtype == DTypeOf<R>::value) return nullptr;
  return ctx.scratch.take(DTypeOf<R>::value, {rows, columns}).template as<R>();
}

// linear backward of some of up to most_tokens rows: scratch is taken as if it were all of them, so that it does not depend on how
// many there are.
void linear_part(Context&, const LinearBackward&, std::int64_t most_tokens);

}  // namespace moetrain::ops::cpu
