// router.cu -- a warp a token: the best experts taken out of its keys one after another, and what the chosen weigh.
#include "ops/cuda/router_choice.cuh"
#include "ops/router.h"

namespace moetrain::ops {
namespace {

using namespace cuda;          // NOLINT: the helpers of this backend
using namespace cuda::choice;  // NOLINT

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
// A dropped slot holds ~e of the expert e that it was chosen for.
__device__ int expert_of(std::int32_t id) { return id < 0 ? ~id : id; }

// The weights of one token by one warp; its experts are in memory.
__device__ void weigh(const float* logits, const std::int32_t* experts, float* weights, int K, WeightRule rule) {
  const auto score = [&](int k) { return sigmoid(logits[expert_of(experts[k])]); };
  const float norm = rule.renormalize ? sum_in_order(K, score) + 1e-20F : 1.0F;
  for (int k = threadIdx.x % kWarp; k < K; k += kWarp) weights[k] = experts[k] < 0 ? 0.0F : score(k) / norm * rule.scaling;
}

// grid (ceil(T / kWarps)), block (kThreads), shared words_of words a warp
template <int kPerLane>
__global__ void __launch_bounds__(kThreads)
    router_choice_kernel(const float* __restrict__ logits, const float* __restrict__ bias, std::int32_t* experts, float* weights,
                         float* cutoff, std::int64_t T, int E, int K, int groups, int top_groups, WeightRule rule) {
  extern __shared__ unsigned int shared_keys[];
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  unsigned int* keys = shared_keys + threadIdx.x / kWarp * words_of(kPerLane, groups);
  load_keys<kPerLane>(keys, logits + t * E, bias, E, groups, top_groups);
  Choice<kPerLane> choice(keys);
  experts += t * K;
  for (int k = 0; k < K; ++k) {
    const int expert = choice.take(choice.best(), E);
    if (lane == k % kWarp) experts[k] = expert;
  }
  const unsigned int next = choice.best();
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
  const auto expert = [&](int k) { return expert_of(experts[t * K + k]); };
  const auto logit = [&](int k) { return logits[t * E + expert(k)]; };
  const auto slope = [&](int k) { return experts[t * K + k] < 0 ? 0.0F : dweights[t * K + k]; };
  float norm = 1, pull = 0;
  if (rule.renormalize) {
    norm = sum_in_order(K, [&](int k) { return sigmoid(logit(k)); }) + 1e-20F;
    pull = sum_in_order(K, [&](int k) { return slope(k) * (sigmoid(logit(k)) / norm); });
  }
  __syncwarp();  // waits for the zeros
  for (int k = lane; k < K; k += kWarp) {
    const float x = logit(k);
    dlogits[t * E + expert(k)] = rule.scaling / norm * (slope(k) - pull) * sigmoid(x) * sigmoid(-x);
  }
}

WeightRule weight_rule(const RouterRule& rule) { return {rule.renormalize, float(rule.scaling)}; }

void check_real(ConstTensor logits) {
  check(logits.dtype == DType::f32, "router: CUDA has f32 only", {{"dtype", std::int64_t(logits.dtype)}});
}

}  // namespace

void cuda::router(Context& ctx, const RouterForward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  const WeightRule rule = weight_rule(a.rule);
  if (a.decided)
    return launch(ctx, router_weights_kernel, {blocks(T, kWarps), kThreads}, a.logits.as<float>(), a.experts.as<std::int32_t>(),
                  a.weights.as<float>(), T, int(E), int(K), rule);
  for_tokens(T, E, a.rule.groups, [&](auto per_lane, const Grid& grid) {
    launch(ctx, router_choice_kernel<per_lane>, grid, a.logits.as<float>(), a.bias.as<float>(), a.experts.as<std::int32_t>(),
           a.weights.as<float>(), device_pointer<float>(a.cutoff), T, int(E), int(K), int(a.rule.groups), int(a.rule.top_groups),
           rule);
  });
}

void cuda::router(Context& ctx, const RouterBackward& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  launch(ctx, router_backward_kernel, {blocks(T, kWarps), kThreads}, a.dweights.as<float>(), a.logits.as<float>(),
         a.experts.as<std::int32_t>(), a.dlogits.as<float>(), T, int(E), int(K), weight_rule(a.rule));
}

}  // namespace moetrain::ops
