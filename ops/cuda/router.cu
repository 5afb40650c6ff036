// router.cu -- a warp a token: its scores as sortable keys in registers, the best of them taken out one after another.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/router.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kAll = 0xffffffffU;
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostPerLane = 32;  // experts of a lane: E is at most 1024
constexpr unsigned int kTaken = 0;

// Keys are ordered as the scores are, with NaN as -infinity; kTaken, which no score has, is below them all.
__device__ unsigned int key_of(float score) {
  if (!(score == score)) score = -INFINITY;
  const unsigned int bits = __float_as_uint(score);
  return bits & 0x80000000U ? ~bits : bits | 0x80000000U;
}
__device__ float score_of(unsigned int key) { return __uint_as_float(key & 0x80000000U ? key & 0x7fffffffU : ~key); }

// Takes out of a warp's keys those of the groups that are not kept. Expert e is key e / 32 of lane e % 32.
template <int kPerLane>
__device__ void keep_groups(unsigned int (&key)[kPerLane], unsigned int* keys, int E, int groups, int top_groups) {
  const int lane = threadIdx.x % kWarp, size = E / groups;
  unsigned int* of_group = keys + E;  // key of the group's score, then whether it is kept
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (const int e = i * kWarp + lane; e < E) keys[e] = key[i];
  __syncwarp();  // waits for the keys of every expert
  for (int g = lane; g < groups; g += kWarp) {
    unsigned int best = kTaken, second = kTaken;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = max(second, min(best, keys[e]));
      best = max(best, keys[e]);
    }
    of_group[g] = size == 1 ? best : key_of(score_of(best) + score_of(second));
  }
  __syncwarp();  // waits for the score of every group
  for (int g = lane; g < groups; g += kWarp) {
    int better = 0;
    for (int other = 0; other < groups; ++other)
      better += of_group[other] > of_group[g] || (of_group[other] == of_group[g] && other < g);
    keys[g] = better < top_groups;  // the experts' keys have been read
  }
  __syncwarp();  // waits for the choice of every group
#pragma unroll
  for (int i = 0; i < kPerLane; ++i)
    if (const int e = i * kWarp + lane; e < E && !keys[e / size]) key[i] = kTaken;
}

struct Best {
  unsigned int key;
  int at;  // of a lane's keys, the lowest that is largest
};
template <int kPerLane>
__device__ Best best_of(const unsigned int (&key)[kPerLane]) {
  Best best{key[0], 0};
#pragma unroll
  for (int i = 1; i < kPerLane; ++i)
    if (key[i] > best.key) best = {key[i], i};
  return best;
}

// grid (ceil(T / kWarps)), block (kThreads), shared kWarps * (E + groups) keys when groups are left out
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    router_choice_kernel(const float* __restrict__ logits, const float* __restrict__ bias, std::int32_t* __restrict__ experts,
                         float* __restrict__ cutoff, std::int64_t T, int E, int K, int groups, int top_groups) {
  extern __shared__ unsigned int shared_keys[];
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  unsigned int key[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kWarp + lane;
    key[i] = e < E ? key_of(sigmoid(logits[t * E + e]) + bias[e]) : kTaken;
  }
  if (top_groups < groups) keep_groups(key, shared_keys + threadIdx.x / kWarp * (E + groups), E, groups, top_groups);

  Best best = best_of(key);
  for (int k = 0; k < K + (cutoff != nullptr); ++k) {
    const unsigned int top = __reduce_max_sync(kAll, best.key);
    if (k == K) {
      if (lane == 0) cutoff[t] = top == kTaken ? -INFINITY : score_of(top);
      return;
    }
    const int expert = __reduce_min_sync(kAll, best.key == top ? best.at * kWarp + lane : E);
    if (lane == k % kWarp) experts[t * K + k] = expert;
    if (expert % kWarp == lane) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i)
        if (i == best.at) key[i] = kTaken;
      best = best_of(key);
    }
  }
}

// The sum over k, ascending, of what lane k % 32 of step k / 32 holds, in every lane.
template <class Value>
__device__ float sum_in_order(int K, Value value) {
  const int lane = threadIdx.x % kWarp;
  float sum = 0;
  for (int base = 0; base < K; base += kWarp) {
    const float x = base + lane < K ? value(base + lane) : 0.0F;
    for (int k = base; k < min(K, base + kWarp); ++k) sum += __shfl_sync(kAll, x, k - base);
  }
  return sum;
}

// grid (ceil(T / kWarps)), block (kThreads), a warp a token
__global__ void router_weights_kernel(const float* __restrict__ logits, const std::int32_t* __restrict__ experts,
                                      float* __restrict__ weights, std::int64_t T, int E, int K, bool renormalize, float scaling) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const auto score = [&](int k) { return sigmoid(logits[t * E + experts[t * K + k]]); };
  const float norm = renormalize ? sum_in_order(K, score) + 1e-20F : 1.0F;
  for (int k = threadIdx.x % kWarp; k < K; k += kWarp) weights[t * K + k] = score(k) / norm * scaling;
}

// grid (ceil(T / kWarps)), block (kThreads), a warp a token
__global__ void router_backward_kernel(const float* __restrict__ dweights, const float* __restrict__ logits,
                                       const std::int32_t* __restrict__ experts, float* __restrict__ dlogits, std::int64_t T, int E,
                                       int K, bool renormalize, float scaling) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  for (int e = lane; e < E; e += kWarp) dlogits[t * E + e] = 0;
  const auto logit = [&](int k) { return logits[t * E + experts[t * K + k]]; };
  float norm = 1, pull = 0;
  if (renormalize) {
    norm = sum_in_order(K, [&](int k) { return sigmoid(logit(k)); }) + 1e-20F;
    pull = sum_in_order(K, [&](int k) { return dweights[t * K + k] * (sigmoid(logit(k)) / norm); });
  }
  __syncwarp();  // waits for the zeros
  for (int k = lane; k < K; k += kWarp) {
    const float x = logit(k);
    dlogits[t * E + experts[t * K + k]] = scaling / norm * (dweights[t * K + k] - pull) * sigmoid(x) * sigmoid(-x);
  }
}

template <int kPerLane>
void choose(Context& ctx, const RouterForward& a) {
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  const auto [groups, top_groups, renormalize, scaling] = a.rule;
  const std::size_t shared = top_groups < groups ? std::size_t(kWarps * (E + groups)) * sizeof(unsigned int) : 0;
  launch(ctx, router_choice_kernel<kPerLane>, {blocks(T, kWarps), kThreads, shared}, a.logits.as<float>(), a.bias.as<float>(),
         a.experts.as<std::int32_t>(), device_pointer<float>(a.cutoff), T, int(E), int(K), int(groups), int(top_groups));
}

void check_real(ConstTensor logits) {
  check(logits.dtype == DType::f32, "router: CUDA has f32 only", {{"dtype", std::int64_t(logits.dtype)}});
}

}  // namespace

void cuda::router(Context& ctx, const RouterForward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  check(E <= kMostPerLane * kWarp, "router: more experts than a warp holds", {{"E", E}, {"most", kMostPerLane * kWarp}});
  if (!a.decided) {
    if (E <= 4 * kWarp)
      choose<4>(ctx, a);
    else if (E <= 8 * kWarp)
      choose<8>(ctx, a);
    else if (E <= 16 * kWarp)
      choose<16>(ctx, a);
    else
      choose<kMostPerLane>(ctx, a);
  }
  launch(ctx, router_weights_kernel, {blocks(T, kWarps), kThreads}, a.logits.as<float>(), a.experts.as<std::int32_t>(),
         a.weights.as<float>(), T, int(E), int(K), a.rule.renormalize, float(a.rule.scaling));
}

void cuda::router(Context& ctx, const RouterBackward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  launch(ctx, router_backward_kernel, {blocks(T, kWarps), kThreads}, a.dweights.as<float>(), a.logits.as<float>(),
         a.experts.as<std::int32_t>(), a.dlogits.as<float>(), T, int(E), int(K), a.rule.renormalize, float(a.rule.scaling));
}

}  // namespace moetrain::ops
