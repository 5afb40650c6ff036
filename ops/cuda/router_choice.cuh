// router_choice.cuh -- a warp's choice among the experts of a token: scores as sortable keys in shared memory, the best of them taken
// out one after another.
#pragma once
#include <type_traits>

#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops::cuda::choice {

constexpr unsigned int kAll = 0xffffffffU;
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kMostPerLane = 32;  // experts of a lane: E is at most 1024
constexpr unsigned int kTaken = 0;

// Keys are ordered as the scores are, with NaN as -infinity; kTaken, which no score has, is below them all.
__device__ inline unsigned int key_of(float score) {
  if (!(score == score)) score = -INFINITY;
  const unsigned int bits = __float_as_uint(score);
  return bits & 0x80000000U ? ~bits : bits | 0x80000000U;
}
__device__ inline float score_of(unsigned int key) { return __uint_as_float(key & 0x80000000U ? key & 0x7fffffffU : ~key); }
__device__ inline unsigned int key_of(float logit, float bias) { return key_of(sigmoid(logit) + bias); }

// Takes the experts of the groups that are not kept out of a warp's keys; two words a group are scratch.
__device__ inline void keep_groups(unsigned int* keys, unsigned int* scratch, int E, int groups, int top_groups) {
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

// What a warp needs of shared memory: its keys, and two words a group.
__host__ __device__ constexpr int words_of(int per_lane, int groups) { return per_lane * kWarp + (groups > 1 ? 2 * groups : 0); }

// A warp's keys of one token: of expert e at e, kTaken where it cannot be chosen. Each lane has written those of its own experts.
template <int kPerLane>
__device__ void load_keys(unsigned int* keys, const float* __restrict__ logits, const float* __restrict__ bias, int E, int groups,
                          int top_groups) {
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = i * kWarp + int(threadIdx.x % kWarp);
    keys[e] = e < E ? key_of(logits[e], bias[e]) : kTaken;
  }
  if (top_groups < groups) keep_groups(keys, keys + kPerLane * kWarp, E, groups, top_groups);
}

struct Best {
  unsigned int key;
  int at;  // of a lane's keys, the lowest that is largest
};
// The best of a warp's keys, which are each lane's every 32nd, and of a lane's by way of the best of each kGroup of them: when one is
// taken, only its group is looked at again.
template <int kPerLane>
class Choice {
 public:
  __device__ explicit Choice(unsigned int* keys) : keys_(keys + threadIdx.x % kWarp) {  // touched by no other lane from here
#pragma unroll
    for (int g = 0; g < kGroups; ++g) of_group_[g] = look(g);
    best_ = best_of_groups();
  }
  __device__ unsigned int best() const { return __reduce_max_sync(kAll, best_.key); }
  // The lowest of the E experts with this key, which is the best.
  __device__ int take(unsigned int key, int E) {
    const int lane = threadIdx.x % kWarp, expert = __reduce_min_sync(kAll, best_.key == key ? best_.at * kWarp + lane : E);
    if (expert % kWarp == lane) {
      keys_[best_.at * kWarp] = kTaken;
      const int group = best_.at / kGroup;
      const Best next = look(group);
#pragma unroll
      for (int g = 0; g < kGroups; ++g)
        if (g == group) of_group_[g] = next;
      best_ = best_of_groups();
    }
    return expert;
  }

 private:
  static constexpr int kGroup = kPerLane < 8 ? 4 : 8, kGroups = kPerLane / kGroup;
  __device__ Best look(int g) const {
    Best best{keys_[g * kGroup * kWarp], g * kGroup};
#pragma unroll
    for (int i = 1; i < kGroup; ++i)
      if (const unsigned int key = keys_[(g * kGroup + i) * kWarp]; key > best.key) best = {key, g * kGroup + i};
    return best;
  }
  __device__ Best best_of_groups() const {
    Best best = of_group_[0];
#pragma unroll
    for (int g = 1; g < kGroups; ++g)
      if (of_group_[g].key > best.key) best = of_group_[g];
    return best;
  }
  unsigned int* keys_;
  Best of_group_[kGroups], best_;
};

// body(an integral_constant of the keys that a lane has, the grid for T tokens).
template <class Body>
void for_tokens(std::int64_t T, std::int64_t E, std::int64_t groups, Body&& body) {
  check(E <= kMostPerLane * kWarp, "router: more experts than a warp holds", {{"E", E}, {"most", kMostPerLane * kWarp}});
  const auto with = [&](auto per_lane) {
    body(per_lane, Grid{blocks(T, kWarps), kThreads, std::size_t(kWarps * words_of(per_lane, int(groups))) * sizeof(unsigned int)});
  };
  if (E <= 4 * kWarp) return with(std::integral_constant<int, 4>{});
  if (E <= 8 * kWarp) return with(std::integral_constant<int, 8>{});
  if (E <= 16 * kWarp) return with(std::integral_constant<int, 16>{});
  with(std::integral_constant<int, kMostPerLane>{});
}

}  // namespace moetrain::ops::cuda::choice
