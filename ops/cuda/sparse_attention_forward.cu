// sparse_attention_forward.cu -- bf16, latent 512 and extra 64 on the tensor cores of sm_90a. A block takes 64 heads of one query;
// its four warpgroups form a line: one gathers tiles of 32 keys (four in flight), one makes scores and probabilities of two of them
// at a time, two add the probabilities' products with half of the latent's columns each. Shared memory has room for two pairs of
// tiles: a pair's keys (72 KB, from L2) come once the products with the values of the last but one have gone, and by estimate that
// chain is what bounds it.
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sparse_attention_tiles.cuh"

namespace moetrain::ops::cuda {
namespace {

using namespace tiles;  // NOLINT

constexpr int kStages = 4, kThreads = 4 * kGroup, kHeld = 4;
// Two tiles share their panels: the lines of the second follow those of the first.
constexpr int kPairPanel = 2 * kKeyPanel, kPairTile = 2 * kKeyTile, kPairKeys = 2 * kKeys;
constexpr float kSlack = 8;  // powers of two by which a row's greatest score may outgrow what it is measured from

// Shared memory, in bytes from its start.
struct Layout {
  static constexpr int query = 0, stages = query + kPanels * kHeadPanel, p = stages + kStages * kKeyTile,
                       factor = p + 2 * kKeyPanel,  // (64): what the sums so far are to be multiplied with
      inverse = factor + kHeads * 4,                // (64): 1 / sum of a row's probabilities
      mean = inverse + kHeads * 4,                  // (2, 4, 64): sums over the heads of a warp
      last = mean + 2 * 4 * kPairKeys * 4,          // last filled slot + 1
      barriers = last + 8, full = barriers, empty = full + kStages * 8, p_full = empty + kStages * 8, p_empty = p_full + 16,
                       done = p_empty + 16, bytes = done + 8;
};
static_assert(Layout::bytes <= 227 << 10);

struct Outputs {
  __nv_bfloat16* o;
  float *lse, *probability;
};

// grid (T), block (kThreads), shared Layout::bytes: heads [head, head + 64). probability is written by the first heads and added to
// by the others.
template <bool kProbability>
__global__ void __launch_bounds__(kThreads, 1)
    sparse_attention_forward_tiles_kernel(const Inputs in, const Outputs out, const std::int64_t head) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::int64_t t = blockIdx.x;
  const std::int32_t* const indices = in.indices + t * in.K;
  const int thread = int(threadIdx.x) % kGroup, warp = thread / 32, lane = thread % 32, group = uniform(int(threadIdx.x) / kGroup);
  auto* const last = reinterpret_cast<int*>(memory + Layout::last);

  if (threadIdx.x == 0) {
    *last = 0;
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + Layout::full + 8 * s, kGroup);
      barrier_init(shared + Layout::empty + 8 * s, 3 * kGroup);
    }
    for (int b = 0; b < 2; ++b) {
      barrier_init(shared + Layout::p_full + 8 * b, kGroup);
      barrier_init(shared + Layout::p_empty + 8 * b, 2 * kGroup);
    }
    barrier_init(shared + Layout::done, kGroup);
    fence_barrier_init();
  }
  __syncthreads();  // waits for the barriers and for *last
  int end = 0;
  for (std::int64_t k = threadIdx.x; k < in.K; k += kThreads) {
    if (indices[k] >= in.keys) __trap();  // no position: as the CPU, refuse rather than read what is not there
    if (indices[k] >= 0) end = int(k) + 1;
  }
  end = __reduce_max_sync(0xffffffffU, end);
  if (lane == 0 && end > 0) atomicMax(last, end);
  load_query(in, t, head, memory + Layout::query, kThreads);
  fence_shared_writes();
  __syncthreads();  // waits for the query and for *last
  const int tiles = uniform((*last + kPairKeys - 1) / kPairKeys * 2), sweeps = kProbability ? 2 * tiles : tiles;
  const auto stage = [&](int i) { return shared + Layout::stages + i / 2 % (kStages / 2) * kPairTile + i % 2 * kKeyPanel; };
  const auto wait_full = [&](int i) { barrier_wait(shared + Layout::full + 8 * (i % kStages), i / kStages & 1); };
  const auto arrive_empty = [&](int i) { barrier_arrive(shared + Layout::empty + 8 * (i % kStages)); };
  const auto position = [&](int tile, int row) {
    const std::int64_t slot = std::int64_t(tile) * kKeys + row;
    return slot < in.K ? indices[slot] : -1;
  };

  if (group == 0) {
    leave_registers<40>();
    std::int32_t next[2] = {position(0, thread / 8), position(0, thread / 8 + 16)};
    for (int i = 0; i < sweeps; ++i) {
      const std::int32_t at[2] = {next[0], next[1]};
      const int following = i + 1 < tiles ? i + 1 : i + 1 - tiles;
      next[0] = position(following, thread / 8), next[1] = position(following, thread / 8 + 16);
      barrier_wait(shared + Layout::empty + 8 * (i % kStages), (i / kStages & 1) ^ 1);
      gather<kPairPanel>(in, at, stage(i), thread);
      arrive_when_copied(shared + Layout::full + 8 * (i % kStages));
    }
    wait_for_own_copies();
  } else if (group == 1) {
    take_registers<136>();
    const int row = 16 * warp + lane / 4;
    float top[2] = {-INFINITY, -INFINITY}, sum[2] = {};
    Held<kHeld> held;
    held.load(memory + Layout::query + (kPanels - kHeld) * kHeadPanel, warp, lane);
    // Calls use(i, z) for pairs of tiles from, from + 2, ... with their scores in powers of two, -inf at empty slots. The products
    // of the next pair wait for it: were they to wait for their keys first, the keys in flight would wait for them.
    const auto sweep = [&](int from, auto use) {
      for (int i = 0; i < tiles; i += 2) {
        float z[kPairKeys / 2];
        const std::int32_t at[2] = {position(i, lane), position(i + 1, lane)};  // of keys `lane` of both tiles
        wait_full(from + i);
        wait_full(from + i + 1);
        fence_shared_writes();  // the copies were ordinary writes
        std::uint32_t query = shared + Layout::query, keys = stage(from + i);
        asm volatile("" : "+r"(query), "+r"(keys));  // what follows from them is not worth registers in the loop around
        wgmma_fence();
        products<kPanels - kHeld, kPairPanel>(z, query, keys);
        held.add_products<kPairPanel>(z, keys + (kPanels - kHeld) * kPairPanel);
        wgmma_commit();
        wgmma_wait<0>();
        settle(z);
        arrive_empty(from + i);
        arrive_empty(from + i + 1);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const unsigned int there = __ballot_sync(0xffffffffU, at[h] >= 0) >> 2 * (lane % 4);
#pragma unroll
          for (int x = 0; x < kKeys / 2; ++x) {
            float& score = z[h * kKeys / 2 + x];
            score = there >> (8 * (x / 4) + x % 2) & 1 ? score * in.scale_log2 : -INFINITY;
          }
        }
        use(from + i, z);
      }
    };
    sweep(0, [&](int i, float(&z)[kPairKeys / 2]) {
      float factor[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float most = -INFINITY;
#pragma unroll
        for (int j = 0; j < kPairKeys / 8; ++j) most = fmaxf(most, fmaxf(z[4 * j + 2 * h], z[4 * j + 2 * h + 1]));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, 1));
        most = fmaxf(most, __shfl_xor_sync(0xffffffffU, most, 2));
        const float old = top[h];
        if (most > old + kSlack || old == -INFINITY) top[h] = most;
        factor[h] = top[h] == old ? 1.0F : power_of_2(old - top[h]);
        const float from = top[h] == -INFINITY ? 0.0F : top[h];
        float added = 0;
#pragma unroll
        for (int j = 0; j < kPairKeys / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float& x = z[4 * j + 2 * h + c];
            x = power_of_2(x - from);
            added += x;
          }
        sum[h] = sum[h] * factor[h] + added;
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        barrier_wait(shared + Layout::p_empty + 8 * tile, (i / 2 & 1) ^ 1);
        store_transposed(z + tile * kKeys / 2, shared + Layout::p + tile * kKeyPanel, warp, lane);
        if (tile == 0 && lane % 4 == 0)
          for (int h = 0; h < 2; ++h) reinterpret_cast<float*>(memory + Layout::factor)[row + 8 * h] = factor[h];
        fence_shared_writes();
        barrier_arrive(shared + Layout::p_full + 8 * tile);
      }
    });
    float lse[2];  // in powers of two
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      sum[h] += __shfl_xor_sync(0xffffffffU, sum[h], 1);
      sum[h] += __shfl_xor_sync(0xffffffffU, sum[h], 2);
      const std::int64_t n = head + row + 8 * h;
      lse[h] = n < in.N ? top[h] + log2f(sum[h]) : INFINITY;  // no position: -inf; no head: probabilities of 0
      if (lane % 4 == 0) {
        reinterpret_cast<float*>(memory + Layout::inverse)[row + 8 * h] = sum[h] > 0 ? 1.0F / sum[h] : 0.0F;
        if (n < in.N) out.lse[t * in.N + n] = tiles > 0 ? top[h] * kLn2 + logf(sum[h]) : -INFINITY;
      }
    }
    barrier_arrive(shared + Layout::done);
    if constexpr (kProbability) {
      float* const probability = out.probability + t * in.K;
      sweep(tiles, [&](int i, float(&z)[kPairKeys / 2]) {
        auto* const means = reinterpret_cast<float*>(memory + Layout::mean) + (i / 2 & 1) * 4 * kPairKeys;
#pragma unroll
        for (int j = 0; j < kPairKeys / 8; ++j)
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float x = power_of_2(z[4 * j + c] - lse[0]) + power_of_2(z[4 * j + 2 + c] - lse[1]);
            for (int lanes = 4; lanes < 32; lanes *= 2) x += __shfl_xor_sync(0xffffffffU, x, lanes);
            if (lane < 4) means[warp * kPairKeys + 8 * j + 2 * lane + c] = x;
          }
        warpgroup_sync(1);
        const std::int64_t slot = std::int64_t(i - tiles) * kKeys + thread;
        if (thread < kPairKeys && slot < in.K) {
          const float x =
              (means[thread] + means[kPairKeys + thread] + means[2 * kPairKeys + thread] + means[3 * kPairKeys + thread]) /
              float(in.N);
          probability[slot] = head == 0 ? x : probability[slot] + x;
        }
      });
      if (head == 0)
        for (std::int64_t k = std::int64_t(tiles) * kKeys + thread; k < in.K; k += kGroup) probability[k] = 0;
    }
  } else {
    take_registers<168>();
    const int half = group - 2, row = 16 * warp + lane / 4;
    // two products of 128 columns: one of 256 needs more registers than a block of four warpgroups starts with
    constexpr int kParts = 2, kPartPanels = kLatent / kPanel / 2 / kParts;
    float o[kParts][kPartPanels * kPanel / 2];
#pragma unroll
    for (auto& part : o)
#pragma unroll
      for (float& x : part) x = 0;
    for (int i = 0; i < tiles; ++i) {
      wait_full(i);
      barrier_wait(shared + Layout::p_full + 8 * (i & 1), i / 2 & 1);
      const float* const factors = reinterpret_cast<const float*>(memory + Layout::factor) + row;
      const float factor[2] = {factors[0], factors[8]};  // of both tiles of a pair
      if (i % 2 == 0 && __any_sync(0xffffffffU, factor[0] != 1.0F || factor[1] != 1.0F))
#pragma unroll
        for (auto& part : o)
#pragma unroll
          for (int x = 0; x < kPartPanels * kPanel / 2; ++x) part[x] *= factor[x / 2 % 2];
      fence_shared_writes();
      const std::uint64_t p = operand_at(shared + Layout::p + (i & 1) * kKeyPanel);
      const std::uint64_t values = operand_at(stage(i) + half * kParts * kPartPanels * kPairPanel, kPairPanel);
      for (auto& part : o) settle(part);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          wgmma<Along::outer, Along::outer>(o[part], p + step * step_of(Along::outer),
                                            values + further(part * kPartPanels * kPairPanel) + step * step_of(Along::outer));
      wgmma_commit();
      wgmma_wait<0>();
      for (auto& part : o) settle(part);
      arrive_empty(i);
      barrier_arrive(shared + Layout::p_empty + 8 * (i & 1));
    }
    barrier_wait(shared + Layout::done, 0);
    const float* const inverses = reinterpret_cast<const float*>(memory + Layout::inverse) + row;
    const float inverse[2] = {inverses[0], inverses[8]};
    __nv_bfloat16* const to = out.o + t * in.N * kLatent + half * (kLatent / 2);
#pragma unroll
    for (int part = 0; part < kParts; ++part)
#pragma unroll
      for (int panel = 0; panel < kPartPanels; ++panel)
        store_panel(o[part], panel, inverse, to + (part * kPartPanels + panel) * kPanel, kLatent, head + row, in.N, lane);
    for (int i = tiles; i < sweeps; ++i) {  // the second sweep needs no values
      wait_full(i);
      arrive_empty(i);
    }
  }
}

}  // namespace

void sparse_attention_tiles(Context& ctx, const SparseAttentionForward& a) {
  const Inputs in(a);
  const Outputs out{device_pointer<bf16>(a.o_latent), a.lse.as<float>(),
                    a.probability.present() ? a.probability.as<float>() : nullptr};
  for (std::int64_t head = 0; head < in.N; head += kHeads)
    launch(ctx, out.probability ? sparse_attention_forward_tiles_kernel<true> : sparse_attention_forward_tiles_kernel<false>,
           {blocks(in.T, 1), dim3(kThreads), Layout::bytes}, in, out, head);
}

}  // namespace moetrain::ops::cuda
