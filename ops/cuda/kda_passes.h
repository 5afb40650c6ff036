// kda_passes.h -- the passes of kda_attention on CUDA, over tiles in device memory; each can be timed alone.
#pragma once
#include "ops/kda_attention.h"

namespace moetrain::ops::cuda {

// Fills the tiles from the inputs; with tiles.t, for a backward.
void kda_prepare(Context& ctx, const KdaAttention& x, const KdaTiles& tiles);
// Walks the chunks of every document: gives o and the final state; or, with tiles.s, keeps the entering states and R instead; or,
// with neither, gives the map of the state (KdaAttentionMap) in place of the final one, but for its zeros.
void kda_scan(Context& ctx, const KdaAttention& x, const KdaTiles& tiles, Tensor o, Tensor final_state);
// Backward, given the entering states, R, dO, the leaving states' gradients and dR in the tiles: the gradients of the inputs, but
// for what the next chunk's first rows give through the convolutions (tiles.edge), and the parts of the parameters' gradients.
void kda_gradients(Context& ctx, const KdaAttentionBackward& a, const KdaTiles& tiles);

}  // namespace moetrain::ops::cuda
