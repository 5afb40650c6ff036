// grouped_passes.h -- the pass of grouped_linear that has a file of its own.
#pragma once
#include "ops/context.h"

namespace moetrain::ops::cuda {

// dw[m] (+)= dy[m]^T x of each group, in f32 from bf16 whose rows are whole 16 bytes. Without a second dy there is one dw.
struct GroupedWgrad {
  ConstTensor dy[2];            // (R, O)
  ConstTensor x;                // (R, I)
  Tensor dw[2];                 // (e, O, I)
  const std::int64_t* offsets;  // (e+1) on the device
  bool write;                   // else adds
};
void grouped_wgrad(Context& ctx, const GroupedWgrad& a);

}  // namespace moetrain::ops::cuda
