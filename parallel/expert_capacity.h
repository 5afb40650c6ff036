// expert_capacity.h -- experts with a limited number of places: which slots of all ranks get them, before any row leaves.
//
// The tokens are those of one micro-batch of every rank of the group, T in all, in the order of ranks, then of tokens. With
//   capacity = ceil(factor * T K / E)
// places at each of the E experts (a product within 1e-12 of a whole number counts as that number):
// 1. Every slot offers itself to the expert the router chose. An expert takes its best offers: the higher biased score first, of
//    equals (scores are compared in steps of 2^-16, ops/capacity.h) the earlier token. Places that are taken stay taken.
// 2. With `reroute` those left over offer themselves to the next-best expert of their token that has room and that the token does
//    not have yet; experts take by the same rule, and so on, until all are placed or no expert of theirs has room.
// 3. What has no place then is dropped: it holds ~e of the expert e that the router chose.
// Scores decide and not ranks: every cut of the same tokens over ranks, in the same order, gives the same slots the same experts.
//
// What travels are counts: one an expert for a round of offers, and for an expert with more offers than places 256 for each byte of
// a score, and the offers of equal score. No rank sees another's scores. Every further round follows one that filled an expert.
#pragma once
#include "ops/capacity.h"
#include "parallel/communicator.h"

namespace moetrain::parallel {

// Places at an expert for `slots` slots of all ranks.
std::int64_t expert_places(double factor, std::int64_t slots, std::int64_t experts);

struct LimitExperts {
  ConstTensor logits;  // (T, E) real, of the tokens here
  ConstTensor bias;    // (E) real
  ops::RouterRule rule;
  double factor;
  bool reroute;
  ConstTensor chosen;  // (T, K) i32, by ops/router
  Tensor experts;      // (T, K) i32, written
  Communicator* data = nullptr;  // the group where tensors lie: what fails there ends a wait for the device; absent: control
};
struct Limited {
  std::int64_t rerouted = 0, dropped = 0;  // slots of all ranks
};
// Collective. control: the group in host memory.
Limited limit_experts(ops::Context& ctx, Communicator& control, const LimitExperts& a);

}  // namespace moetrain::parallel
