// indexer_loss_tiles.cu -- the indexer's loss and its gradients for bf16 heads of 128 on the tensor cores of sm_90a. A block takes
// one query and walks twice over its keys, 64 at a time, gathered into shared memory: for the scores, and, once their softmax is
// known, for du, which it multiplies with the keys at once and leaves to key_tiles.h for the sums by key, 128 bytes a pair.
#include <algorithm>

#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/indexer.cuh"
#include "ops/cuda/key_sums.cuh"
#include "ops/cuda/key_tiles.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"

namespace moetrain::ops::cuda {
namespace {

constexpr int kWidth = 128, kPanel = 64, kLine = 128, kPanels = kWidth / kPanel, kKeys = 64, kMostHeads = 64, kStages = 2;
constexpr int kGroup = 128, kThreads = 2 * kGroup, kWarps = kGroup / kWarp;
constexpr int kKeyPanel = kKeys * kLine, kKeyTile = kPanels * kKeyPanel;

struct Layout {  // of shared memory, in bytes from its start
  static constexpr int query = 0, stages = query + kKeyTile, du = stages + kStages * kKeyTile, parts = du + kKeyPanel,  // (4, 64)
      barriers = parts + kWarps * kMostHeads * 4, full = barriers, empty = full + 8 * kStages, scores = empty + 8 * kStages;
};

struct Arguments {
  const __nv_bfloat16 *q, *k;
  const float *weights, *target;  // target (rows, W) as listed
  const std::int32_t *listed, *counts;
  float *row_loss, *scores;   // scores (rows, W) where a block does not hold them
  __nv_bfloat16 *dq, *pairs;  // pairs (rows, W, 64)
  float* dweights;
  std::int64_t begin, W;
  int J;
  float gradient_scale;
};

__device__ int place(int row, int piece) { return row * kLine + ((piece ^ (row & 7)) << 4); }

// The sum or the maximum over a warpgroup, in a fixed order; part: (4) in shared memory.
template <class Op>
__device__ float over_group(float x, float* part, Op op) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x = op(x, __shfl_xor_sync(0xffffffffU, x, lanes));
  warpgroup_sync(1);  // waits for the readers of the last parts
  if (threadIdx.x % kWarp == 0) part[threadIdx.x % kGroup / kWarp] = x;
  warpgroup_sync(1);  // waits for the parts of all warps
  return op(op(part[0], part[1]), op(part[2], part[3]));
}

// grid (rows), block (kThreads), shared Layout::scores + 4 W where scores is null: query begin + blockIdx.x; kHeads is J rounded up
template <int kHeads, bool kGradients>
__global__ void __launch_bounds__(kThreads, kHeads == 32 ? 2 : 1) index_loss_kernel(const Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::int64_t row_at = blockIdx.x, t = a.begin + row_at;
  const int thread = int(threadIdx.x) % kGroup, warp = thread / kWarp, lane = thread % kWarp;
  const int count = a.counts[row_at], tiles = (count + kKeys - 1) / kKeys;
  const std::int32_t* const listed = a.listed + row_at * a.W;
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + Layout::full + 8 * s, kGroup);
      barrier_init(shared + Layout::empty + 8 * s, kGroup);
    }
    fence_barrier_init();
  }
  const uint4 zeros = make_uint4(0, 0, 0, 0);
  for (int i = int(threadIdx.x); i < kMostHeads * kPanels * 8; i += kThreads) {
    const int head = i / (kPanels * 8), panel = i / 8 % kPanels, piece = i % 8;
    const auto* const from = reinterpret_cast<const uint4*>(a.q + (t * a.J + head) * kWidth + panel * kPanel + piece * 8);
    *reinterpret_cast<uint4*>(memory + Layout::query + panel * kKeyPanel + place(head, piece)) = head < a.J ? *from : zeros;
  }
  for (int i = int(threadIdx.x); i < kKeyPanel / 16; i += kThreads) reinterpret_cast<uint4*>(memory + Layout::du)[i] = zeros;
  fence_shared_writes();
  __syncthreads();  // waits for barriers, query and the zeros of heads that are not there

  if (threadIdx.x < kGroup) {
    for (int i = 0; i < (kGradients ? 2 * tiles : tiles); ++i) {
      const int tile = i < tiles ? i : i - tiles, piece = thread % 16;
      const std::uint32_t to = shared + Layout::stages + i % kStages * kKeyTile + piece / 8 * kKeyPanel;
      std::int32_t at[8];
#pragma unroll
      for (int x = 0; x < 8; ++x) {
        const int slot = tile * kKeys + thread / 16 + 8 * x;
        at[x] = slot < count ? listed[slot] : -1;
      }
      barrier_wait(shared + Layout::empty + 8 * (i % kStages), (i / kStages & 1) ^ 1);
#pragma unroll
      for (int x = 0; x < 8; ++x)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to + place(thread / 16 + 8 * x, piece % 8)),
                     "l"(__cvta_generic_to_global(a.k + std::int64_t(max(at[x], 0)) * kWidth + piece * 8)), "r"(at[x] >= 0 ? 16 : 0)
                     : "memory");
      asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared + Layout::full + 8 * (i % kStages))
                   : "memory");
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return;
  }

  const int row = 16 * warp + lane / 4;  // and row + 8: of a tile's keys
  auto* const parts = reinterpret_cast<float*>(memory + Layout::parts);
  float* const score = a.scores ? a.scores + row_at * a.W : reinterpret_cast<float*>(memory + Layout::scores);
  float weight[kHeads / 4];  // of a thread's columns
#pragma unroll
  for (int x = 0; x < kHeads / 4; ++x) {
    const int j = 8 * (x / 2) + 2 * (lane % 4) + x % 2;
    weight[x] = j < a.J ? a.weights[t * a.J + j] : 0.0F;
  }
  const auto stage = [&](int i) { return shared + Layout::stages + i % kStages * kKeyTile; };
  const auto products = [&](float(&u)[kHeads / 2], int i) {
    barrier_wait(shared + Layout::full + 8 * (i % kStages), i / kStages & 1);
    fence_shared_writes();  // the copies were ordinary writes
    settle(u);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
#pragma unroll
      for (int step = 0; step < kPanel / 16; ++step)
        wgmma<Along::k, Along::k>(u, operand_at(stage(i) + p * kKeyPanel) + step * step_of(Along::k),
                                  operand_at(shared + Layout::query + p * kKeyPanel) + step * step_of(Along::k));
    wgmma_commit();
    wgmma_wait<0>();
    settle(u);
  };

  for (int i = 0; i < tiles; ++i) {
    float u[kHeads / 2] = {};
    products(u, i);
    barrier_arrive(shared + Layout::empty + 8 * (i % kStages));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0;
#pragma unroll
      for (int x = 0; x < kHeads / 4; ++x) sum += weight[x] * relu(u[4 * (x / 2) + 2 * h + x % 2]);
      sum += __shfl_xor_sync(0xffffffffU, sum, 1);
      sum += __shfl_xor_sync(0xffffffffU, sum, 2);
      const int slot = i * kKeys + row + 8 * h;
      if (lane % 4 == 0 && slot < count) score[slot] = sum;
    }
  }
  warpgroup_sync(1);  // waits for the scores
  const auto add = [](float x, float y) { return x + y; };
  const float* const target = a.target + row_at * a.W;
  float top = -INFINITY, total = 0, sum = 0, divergence = 0;
  for (int i = thread; i < count; i += kGroup) top = fmaxf(top, score[i]), total += target[i];
  top = over_group(top, parts, [](float x, float y) { return fmaxf(x, y); });
  total = over_group(total, parts, add);
  for (int i = thread; i < count; i += kGroup) sum += expf(score[i] - top);
  sum = over_group(sum, parts, add);
  const float lse = top + logf(sum), share = 1.0F / fmaxf(total, 1e-10F);
  for (int i = thread; i < count; i += kGroup) {
    float slope = 0;
    if (count > 1) {
      const float p = target[i] * share, log_pi = score[i] - lse;
      if (p > 0) divergence += p * (logf(p) - log_pi);
      slope = a.gradient_scale * (expf(log_pi) - p);
    }
    score[i] = slope;  // from here on dI
  }
  divergence = over_group(divergence, parts, add);
  if (thread == 0) a.row_loss[t] = divergence;
  if constexpr (kGradients) {
    warpgroup_sync(1);                                        // waits for dI
    float dq[kPanels][kHeads / 2] = {}, dw[kHeads / 4] = {};  // dq of 64 columns by all heads
    __nv_bfloat16* const pairs = a.pairs + row_at * a.W * kMostHeads;
    for (int i = 0; i < tiles; ++i) {
      float u[kHeads / 2] = {};
      products(u, tiles + i);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int slot = i * kKeys + row + 8 * h;
        const float slope = slot < count ? score[slot] : 0.0F;
#pragma unroll
        for (int x = 0; x < kHeads / 4; ++x) {
          float& v = u[4 * (x / 2) + 2 * h + x % 2];
          dw[x] += slope * relu(v);
          v = v > 0 ? slope * weight[x] : 0.0F;
        }
      }
#pragma unroll
      for (int j = 0; j < kHeads / 8; j += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared + Layout::du + place(16 * warp + lane / 8 % 2 * 8 + lane % 8, j + lane / 16)),
                     "r"(packed(u[4 * j], u[4 * j + 1])), "r"(packed(u[4 * j + 2], u[4 * j + 3])),
                     "r"(packed(u[4 * j + 4], u[4 * j + 5])), "r"(packed(u[4 * j + 6], u[4 * j + 7]))
                     : "memory");
      fence_shared_writes();
      warpgroup_sync(1);  // waits for du
      settle(dq[0]), settle(dq[1]);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
        for (int p = 0; p < kPanels; ++p)
          wgmma<Along::outer, Along::outer>(dq[p], operand_at(stage(tiles + i) + p * kKeyPanel) + step * step_of(Along::outer),
                                            operand_at(shared + Layout::du) + step * step_of(Along::outer));
      wgmma_commit();
#pragma unroll
      for (int x = thread; x < kKeys * 8; x += kGroup) {
        const int key = x / 8, slot = i * kKeys + key;
        if (slot < count)
          *reinterpret_cast<uint4*>(pairs + std::int64_t(slot) * kMostHeads + x % 8 * 8) =
              *reinterpret_cast<const uint4*>(memory + Layout::du + place(key, x % 8));
      }
      wgmma_wait<0>();
      settle(dq[0]), settle(dq[1]);
      barrier_arrive(shared + Layout::empty + 8 * ((tiles + i) % kStages));
      warpgroup_sync(1);  // waits for the readers of du
    }
    // dw over the rows of a warp, then over the warps; dq turned over in the place of the query
#pragma unroll
    for (int x = 0; x < kHeads / 4; ++x) {
      for (int lanes = 4; lanes < kWarp; lanes *= 2) dw[x] += __shfl_xor_sync(0xffffffffU, dw[x], lanes);
      if (lane < 4) parts[warp * kMostHeads + 8 * (x / 2) + 2 * lane + x % 2] = dw[x];
    }
#pragma unroll
    for (int p = 0; p < kPanels; ++p)
#pragma unroll
      for (int j = 0; j < kHeads / 8; j += 2)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(
                         shared + Layout::query + p * kKeyPanel + place(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2)),
                     "r"(packed(dq[p][4 * j], dq[p][4 * j + 1])), "r"(packed(dq[p][4 * j + 2], dq[p][4 * j + 3])),
                     "r"(packed(dq[p][4 * j + 4], dq[p][4 * j + 5])), "r"(packed(dq[p][4 * j + 6], dq[p][4 * j + 7]))
                     : "memory");
    warpgroup_sync(1);  // waits for both
    for (int j = thread; j < a.J; j += kGroup)
      a.dweights[t * a.J + j] = (parts[j] + parts[kMostHeads + j]) + (parts[2 * kMostHeads + j] + parts[3 * kMostHeads + j]);
    for (int x = thread; x < a.J * kPanels * 8; x += kGroup) {
      const int head = x / (kPanels * 8), panel = x / 8 % kPanels, piece = x % 8;
      *reinterpret_cast<uint4*>(a.dq + (t * a.J + head) * kWidth + panel * kPanel + piece * 8) =
          *reinterpret_cast<const uint4*>(memory + Layout::query + panel * kKeyPanel + place(head, piece));
    }
  }
}

// grid (rows), any block: rows that list all causal keys of their documents
__global__ void list_causal_kernel(const DocumentList documents, const KeyLists to, std::int64_t begin) {
  const std::int64_t row = blockIdx.x;
  const auto [first, end] = documents.seen_by(begin + row);
  const std::int64_t count = end - first, last = end - 1;
  const std::int64_t words = (to.keys + kKeyRange - 1) / kKeyRange * kRangeWords;
  for (std::int64_t k = threadIdx.x; k < count; k += blockDim.x) to.listed[row * to.K + k] = std::int32_t(first + k);
  const auto before = [&](std::int64_t word) { return std::int32_t(min(max(32 * word - first, std::int64_t(0)), count)); };
  for (std::int64_t w = threadIdx.x; w <= words; w += blockDim.x) {
    to.starts[row * (words + 1) + w] = before(w);
    if (w == words) continue;
    const int filled = before(w + 1) - before(w), above = last / 32 == w ? 31 - int(last % 32) : 0;  // a run that ends there or at 31
    to.sets[row * words + w] = filled == 0 ? 0 : std::int32_t(0xffffffffU >> (32 - filled) << (32 - filled - above));
  }
  if (threadIdx.x == 0) to.counts[row] = std::int32_t(count);
}

template <int kHeads>
void run(Context& ctx, const IndexerLoss& a, const Arguments& arguments, std::int64_t rows) {
  const std::size_t shared = Layout::scores + (arguments.scores ? 0 : std::size_t(4 * arguments.W));
  launch(ctx, a.dq.present() ? index_loss_kernel<kHeads, true> : index_loss_kernel<kHeads, false>,
         {blocks(rows, 1), dim3(kThreads), shared}, arguments);
}

}  // namespace

void index_loss_tiles(Context& ctx, const IndexerLoss& a, const IndexerLoss::Scratch& scratch) {
  const std::int64_t T = a.q.shape[0], J = a.q.shape[1], W = a.target.shape[1], chunk = scratch.listed.shape[0];
  const std::int64_t keys = a.k.shape[0];
  const bool gradients = a.dq.present();
  const auto* q = device_pointer<bf16>(a.q);
  auto* const pairs = device_pointer<bf16>(scratch.pairs);
  float *const sums = gradients ? scratch.dk.as<float>() : nullptr, *const turned =
                                                                        a.indices.present() ? scratch.target.as<float>() : nullptr;
  if (gradients) cuda_ok(cudaMemsetAsync(sums, 0, std::size_t(scratch.dk.bytes()), ctx.stream));
  for (std::int64_t begin = 0; begin < T; begin += chunk) {
    const KeyLists lists{.listed = scratch.listed.as<std::int32_t>(),
                         .counts = scratch.counts.as<std::int32_t>(),
                         .sets = scratch.sets.as<std::int32_t>(),
                         .starts = scratch.starts.as<std::int32_t>(),
                         .rows = std::min(chunk, T - begin),
                         .K = W,
                         .keys = keys};
    const float* const target = a.target.as<float>() + begin * W;
    if (turned)
      list_keys(ctx, a.indices.as<std::int32_t>() + begin * W, lists, target, turned);
    else
      launch(ctx, list_causal_kernel, {blocks(lists.rows, 1), dim3(256)}, DocumentList(a.documents), lists, begin);
    const Arguments arguments{.q = q,
                              .k = device_pointer<bf16>(a.k),
                              .weights = a.weights.as<float>(),
                              .target = turned ? turned : target,
                              .listed = lists.listed,
                              .counts = lists.counts,
                              .row_loss = scratch.row_loss.as<float>(),
                              .scores = W > IndexerLoss::kHeldScores ? scratch.scores.as<float>() : nullptr,
                              .dq = device_pointer<bf16>(a.dq),
                              .pairs = pairs,
                              .dweights = gradients ? a.dweights.as<float>() : nullptr,
                              .begin = begin,
                              .W = W,
                              .J = int(J),
                              .gradient_scale = float(a.gradient_scale)};
    J <= 32 ? run<32>(ctx, a, arguments, lists.rows) : run<64>(ctx, a, arguments, lists.rows);
    if (gradients)
      sum_key_tiles(ctx, KeyTiles{.lists = lists,
                                  .pairs = scratch.pairs,
                                  .value2 = a.q.rows(begin, begin + lists.rows),
                                  .panels = kPanels,
                                  .reach = keys == T ? begin + lists.rows : keys,
                                  .sums = sums});
  }
  if (gradients) store_sums(ctx, sums, device_pointer<bf16>(a.dk), scratch.dk.shape[0], keys, kWidth, 0, kWidth);
}

}  // namespace moetrain::ops::cuda
