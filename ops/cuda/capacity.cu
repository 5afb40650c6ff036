// capacity.cu -- offers of slots by the router's own keys, counted by integer atomics; ties are ranked by the sort of ops/permute.
#include "ops/capacity.h"
#include "ops/cuda/router_choice.cuh"
#include "ops/permute.h"

namespace moetrain::ops {
namespace {

using namespace cuda;          // NOLINT: the helpers of this backend
using namespace cuda::choice;  // NOLINT

using Count = unsigned long long;  // what atomicAdd knows of 64 bits
Count* count_pointer(Tensor t) { return reinterpret_cast<Count*>(t.as<std::int64_t>()); }

void check_real(ConstTensor t) { check(t.dtype == DType::f32, "capacity: CUDA has f32 only", {{"dtype", std::int64_t(t.dtype)}}); }

void zero(Context& ctx, Tensor t) { cuda_ok(cudaMemsetAsync(t.data, 0, std::size_t(t.bytes()), ctx.stream)); }

// The same as on the CPU: kScoreStep is a power of two, so that only the addition rounds.
__device__ std::int64_t offer_key(float score) {
  constexpr double kHalf = 1LL << 31;
  return std::int64_t(fmin(fmax(floor(double(score) / kScoreStep + 0.5), -kHalf), kHalf - 1) + kHalf);
}

// grid (ceil(T K / kThreads)), block (kThreads)
__global__ void offer_slots_kernel(const float* __restrict__ logits, const float* __restrict__ bias,
                                   const std::int32_t* __restrict__ chosen, std::int32_t* __restrict__ experts,
                                   float* __restrict__ scores, Count* __restrict__ counts, std::int64_t slots, int E, int K) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= slots) return;
  const int e = chosen[i];
  experts[i] = e;
  scores[i] = score_of(key_of(logits[i / K * E + e], bias[e]));
  atomicAdd(&counts[e], Count(1));
}

// grid and block of for_tokens: a warp a token
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    offer_slots_dropped_kernel(const float* __restrict__ logits, const float* __restrict__ bias,
                               const std::int64_t* __restrict__ room, std::int32_t* experts, float* scores, Count* counts,
                               std::int64_t T, int E, int K, int groups, int top_groups) {
  extern __shared__ unsigned int shared_keys[];
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  experts += t * K;
  scores += t * K;
  bool dropped = false;
  for (int k = lane; k < K; k += kWarp) {
    scores[k] = NAN;
    dropped = dropped || experts[k] < 0;
  }
  if (!__any_sync(kAll, dropped)) return;
  unsigned int* keys = shared_keys + threadIdx.x / kWarp * words_of(kPerLane, groups);
  load_keys<kPerLane>(keys, logits + t * E, bias, E, groups, top_groups);
  for (int e = lane; e < E; e += kWarp)
    if (room[e] <= 0) keys[e] = kTaken;
  __syncwarp();  // waits for the keys of every expert
  for (int k = lane; k < K; k += kWarp)
    if (experts[k] >= 0) keys[experts[k]] = kTaken;
  __syncwarp();  // waits for what the token holds
  Choice<kPerLane> choice(keys);
  for (int k = 0; k < K; ++k) {
    if (experts[k] >= 0) continue;
    const unsigned int key = choice.best();
    if (key == kTaken) return;
    const int expert = choice.take(key, E);
    if (lane == k % kWarp) {  // who wrote the NaN
      experts[k] = expert;
      scores[k] = score_of(key);
      atomicAdd(&counts[expert], Count(1));
    }
  }
}

// grid (ceil(slots / kThreads)), block (kThreads)
__global__ void offer_histogram_kernel(const std::int32_t* __restrict__ experts, const float* __restrict__ scores,
                                       const std::int64_t* __restrict__ row_of, const std::int64_t* __restrict__ leading,
                                       Count* __restrict__ histogram, std::int64_t slots, int shift) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= slots || isnan(scores[i])) return;
  const std::int64_t row = row_of[experts[i]];
  if (row < 0) return;
  const std::int64_t key = offer_key(scores[i]) >> shift;
  if (key / kKeyBins == leading[row]) atomicAdd(&histogram[row * kKeyBins + key % kKeyBins], Count(1));
}

// grid (ceil(slots / kThreads)), block (kThreads): drops the offers below the last key; tied = the row of those that are equal
__global__ void take_offers_kernel(const std::int32_t* __restrict__ chosen, const float* __restrict__ scores,
                                   const std::int64_t* __restrict__ row_of, const std::int64_t* __restrict__ last,
                                   std::int32_t* __restrict__ experts, std::int32_t* __restrict__ tied, std::int64_t slots) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= slots) return;
  const std::int64_t row = isnan(scores[i]) ? -1 : row_of[experts[i]];
  const std::int64_t above = row < 0 ? 1 : offer_key(scores[i]) - last[row];
  tied[i] = above == 0 ? std::int32_t(row) : -1;
  if (above < 0) experts[i] = ~chosen[i];
}

// grid (ceil(slots / kThreads)), block (kThreads): place[i] - offsets[tied[i]] equal offers come before this one
__global__ void take_offers_ties_kernel(const std::int32_t* __restrict__ chosen, const std::int32_t* __restrict__ tied,
                                        const std::int64_t* __restrict__ place, const std::int64_t* __restrict__ offsets,
                                        const std::int64_t* __restrict__ ties, std::int32_t* __restrict__ experts,
                                        std::int64_t slots) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= slots || tied[i] < 0) return;
  if (place[i] - offsets[tied[i]] >= ties[tied[i]]) experts[i] = ~chosen[i];
}

}  // namespace

void cuda::offer_slots(Context& ctx, const OfferSlots& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1], slots = T * K;
  zero(ctx, a.counts);
  const float *logits = a.logits.as<float>(), *bias = a.bias.as<float>();
  auto* experts = a.experts.as<std::int32_t>();
  if (!a.room.present())
    return launch(ctx, offer_slots_kernel, {blocks(slots, kThreads), kThreads}, logits, bias, a.chosen.as<std::int32_t>(), experts,
                  a.scores.as<float>(), count_pointer(a.counts), slots, int(E), int(K));
  for_tokens(T, E, a.rule.groups, [&](auto per_lane, const Grid& grid) {
    launch(ctx, offer_slots_dropped_kernel<per_lane>, grid, logits, bias, a.room.as<std::int64_t>(), experts, a.scores.as<float>(),
           count_pointer(a.counts), T, int(E), int(K), int(a.rule.groups), int(a.rule.top_groups));
  });
}

void cuda::offer_histogram(Context& ctx, const OfferHistogram& a) {
  check_real(a.scores);
  const std::int64_t slots = a.scores.count();
  zero(ctx, a.histogram);
  launch(ctx, offer_histogram_kernel, {blocks(slots, kThreads), kThreads}, a.experts.as<std::int32_t>(), a.scores.as<float>(),
         a.row_of.as<std::int64_t>(), a.leading.as<std::int64_t>(), count_pointer(a.histogram), slots,
         int(8 * (kKeyBytes - 1 - a.known)));
}

void cuda::take_offers(Context& ctx, const TakeOffers& a) {
  check_real(a.scores);
  const std::int64_t slots = a.scores.count();
  const auto* chosen = a.chosen.as<std::int32_t>();
  auto* experts = a.experts.as<std::int32_t>();
  Scope scope(ctx.scratch);
  const auto [tied, place, counts, offsets] = a.take_scratch(ctx);
  launch(ctx, take_offers_kernel, {blocks(slots, kThreads), kThreads}, chosen, a.scores.as<float>(), a.row_of.as<std::int64_t>(),
         a.last.as<std::int64_t>(), experts, tied.as<std::int32_t>(), slots);
  cuda::sort_slots(ctx, {.experts = tied, .slot_row = place, .counts = counts, .offsets = offsets});
  launch(ctx, take_offers_ties_kernel, {blocks(slots, kThreads), kThreads}, chosen, tied.as<std::int32_t>(),
         place.as<std::int64_t>(), offsets.as<std::int64_t>(), a.ties.as<std::int64_t>(), experts, slots);
}

}  // namespace moetrain::ops
