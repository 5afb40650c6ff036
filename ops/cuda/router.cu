// router.cu -- a warp a token: its scores as sortable keys in shared memory, the best of them taken out one after another.
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

// Takes the experts of the groups that are not kept out of a warp's keys; two words a group are scratch.
__device__ void keep_groups(unsigned int* keys, unsigned int* scratch, int E, int groups, int top_groups) {
  const int lane = threadIdx.x % kWarp, size = E / groups;
  unsigned int *score = scratch, *kept = scratch + groups;
  __syncwarp();  // waits for the keys of every expert
  for (int g = lane; g < groups; g += kWarp) {
    unsigned int best = kTaken, second = kTaken;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      second = max(second, min(best, keys[e]));
      best = max(best, keys[e]);
    }
    score[g] = size == 1 ? best : key_of(score_of(best) + score_of(second));
  }
  __syncwarp();  // waits for the score of every group
  for (int g = lane; g < groups; g += kWarp) {
    int better = 0;
    for (int other = 0; other < groups; ++other) better += score[other] > score[g] || (score[other] == score[g] && other < g);
    kept[g] = better < top_groups;
  }
  __syncwarp();  // waits for the choice of every group
  for (int e = lane; e < E; e += kWarp)
    if (!kept[e / size]) keys[e] = kTaken;
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

struct WeightRule {
  bool renormalize;
  float scaling;
};
// The weights of one token by one warp; its experts are in memory.
__device__ void weigh(const float* logits, const std::int32_t* experts, float* weights, int K, WeightRule rule) {
  const auto score = [&](int k) { return sigmoid(logits[experts[k]]); };
  const float norm = rule.renormalize ? sum_in_order(K, score) + 1e-20F : 1.0F;
  for (int k = threadIdx.x % kWarp; k < K; k += kWarp) weights[k] = score(k) / norm * rule.scaling;
}

// What a warp needs of shared memory: its keys, and two words a group.
__host__ __device__ constexpr int words_of(int per_lane, int groups) { return per_lane * kWarp + (groups > 1 ? 2 * groups : 0); }

struct Best {
  unsigned int key;
  int at;  // of a lane's keys, the lowest that is largest
};
// The best of a lane's keys, which are every 32nd of the warp's, by way of the best of each kGroup of them: when one is taken, only
// its group is looked at again.
template <int kPerLane>
struct Bests {
  static constexpr int kGroup = kPerLane < 8 ? 4 : 8, kGroups = kPerLane / kGroup;
  unsigned int* keys;
  Best of_group[kGroups];
  __device__ Best look(int g) const {
    Best best{keys[g * kGroup * kWarp], g * kGroup};
#pragma unroll
    for (int i = 1; i < kGroup; ++i)
      if (const unsigned int key = keys[(g * kGroup + i) * kWarp]; key > best.key) best = {key, g * kGroup + i};
    return best;
  }
  __device__ Best best() const {
    Best best = of_group[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g)
      if (of_group[g].key > best.key) best = of_group[g];
    return best;
  }
  __device__ void take(int at) {
    keys[at * kWarp] = kTaken;
    const Best next = look(at / kGroup);
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
      if (g == at / kGroup) of_group[g] = next;
  }
};

// grid (ceil(T / kWarps)), block (kThreads), shared words_of words a warp
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    router_choice_kernel(const float* __restrict__ logits, const float* __restrict__ bias, std::int32_t* experts, float* weights,
                         float* cutoff, std::int64_t T, int E, int K, int groups, int top_groups, WeightRule rule) {
  extern __shared__ unsigned int shared_keys[];
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  unsigned int* keys = shared_keys + threadIdx.x / kWarp * words_of(kPerLane, groups);  // of expert e at e
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kWarp + lane;
    keys[e] = e < E ? key_of(sigmoid(logits[t * E + e]) + bias[e]) : kTaken;
  }
  if (top_groups < groups) keep_groups(keys, keys + kPerLane * kWarp, E, groups, top_groups);

  Bests<kPerLane> bests{keys + lane};  // a lane's keys are touched by no other from here
#pragma unroll
  for (int g = 0; g < bests.kGroups; ++g) bests.of_group[g] = bests.look(g);
  Best best = bests.best();
  experts += t * K;
  for (int k = 0; k < K; ++k) {
    const unsigned int top = __reduce_max_sync(kAll, best.key);
    const int expert = __reduce_min_sync(kAll, best.key == top ? best.at * kWarp + lane : E);
    if (lane == k % kWarp) experts[k] = expert;
    if (expert % kWarp == lane) {
      bests.take(best.at);
      best = bests.best();
    }
  }
  const unsigned int next = __reduce_max_sync(kAll, best.key);
  if (cutoff && lane == 0) cutoff[t] = next == kTaken ? -INFINITY : score_of(next);
  __syncwarp();  // waits for the experts
  weigh(logits + t * E, experts, weights + t * K, K, rule);
}

// grid (ceil(T / kWarps)), block (kThreads), a warp a token
__global__ void router_weights_kernel(const float* __restrict__ logits, const std::int32_t* __restrict__ experts,
                                      float* __restrict__ weights, std::int64_t T, int E, int K, WeightRule rule) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t < T) weigh(logits + t * E, experts + t * K, weights + t * K, K, rule);
}

// grid (ceil(T / kWarps)), block (kThreads), a warp a token
__global__ void router_backward_kernel(const float* __restrict__ dweights, const float* __restrict__ logits,
                                       const std::int32_t* __restrict__ experts, float* __restrict__ dlogits, std::int64_t T, int E,
                                       int K, WeightRule rule) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  for (int e = lane; e < E; e += kWarp) dlogits[t * E + e] = 0;
  const auto logit = [&](int k) { return logits[t * E + experts[t * K + k]]; };
  float norm = 1, pull = 0;
  if (rule.renormalize) {
    norm = sum_in_order(K, [&](int k) { return sigmoid(logit(k)); }) + 1e-20F;
    pull = sum_in_order(K, [&](int k) { return dweights[t * K + k] * (sigmoid(logit(k)) / norm); });
  }
  __syncwarp();  // waits for the zeros
  for (int k = lane; k < K; k += kWarp) {
    const float x = logit(k);
    dlogits[t * E + experts[t * K + k]] = rule.scaling / norm * (dweights[t * K + k] - pull) * sigmoid(x) * sigmoid(-x);
  }
}

WeightRule weight_rule(const RouterRule& rule) { return {rule.renormalize, float(rule.scaling)}; }

template <int kPerLane>
void choose(Context& ctx, const RouterForward& a) {
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  const std::int64_t groups = a.rule.groups, top_groups = a.rule.top_groups;
  const std::size_t shared = std::size_t(kWarps * words_of(kPerLane, int(groups))) * sizeof(unsigned int);
  launch(ctx, router_choice_kernel<kPerLane>, {blocks(T, kWarps), kThreads, shared}, a.logits.as<float>(), a.bias.as<float>(),
         a.experts.as<std::int32_t>(), a.weights.as<float>(), device_pointer<float>(a.cutoff), T, int(E), int(K), int(groups),
         int(top_groups), weight_rule(a.rule));
}

void check_real(ConstTensor logits) {
  check(logits.dtype == DType::f32, "router: CUDA has f32 only", {{"dtype", std::int64_t(logits.dtype)}});
}

}  // namespace

void cuda::router(Context& ctx, const RouterForward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  check(E <= kMostPerLane * kWarp, "router: more experts than a warp holds", {{"E", E}, {"most", kMostPerLane * kWarp}});
  if (a.decided)
    return launch(ctx, router_weights_kernel, {blocks(T, kWarps), kThreads}, a.logits.as<float>(), a.experts.as<std::int32_t>(),
                  a.weights.as<float>(), T, int(E), int(K), weight_rule(a.rule));
  if (E <= 4 * kWarp)
    choose<4>(ctx, a);
  else if (E <= 8 * kWarp)
    choose<8>(ctx, a);
  else if (E <= 16 * kWarp)
    choose<16>(ctx, a);
  else
    choose<kMostPerLane>(ctx, a);
}

void cuda::router(Context& ctx, const RouterBackward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  launch(ctx, router_backward_kernel, {blocks(T, kWarps), kThreads}, a.dweights.as<float>(), a.logits.as<float>(),
         a.experts.as<std::int32_t>(), a.dlogits.as<float>(), T, int(E), int(K), weight_rule(a.rule));
}

}  // namespace moetrain::ops
