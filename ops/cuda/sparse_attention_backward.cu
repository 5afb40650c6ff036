// sparse_attention_backward.cu -- bf16, latent 512 and extra 64 on the tensor cores of sm_90a. For some rows of queries at a time:
// the positions of each in order; then a block takes 64 heads of one query as in forward. One warpgroup gathers keys, one makes
// probabilities p and gradients of scores dz, two add dz's products with five and four panels of columns, and of these one leaves p
// and dz, 256 bytes a pair of query and key, to key_tiles.h, which adds them up by key. 64 heads by 2048 keys are 524 KB a query:
// what is held is bounded by the rows, not by T; no sum is ever exchanged between blocks in an order that timing could change.
#include "ops/cuda/key_sums.cuh"
#include "ops/cuda/key_tiles.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sparse_attention_tiles.cuh"

namespace moetrain::ops::cuda {
namespace {

using namespace tiles;  // NOLINT

constexpr int kStages = 3, kValueGroups = 2, kThreads = (2 + kValueGroups) * kGroup, kLatentPanels = kPanels - 1, kHeld = 4;
constexpr int kPairTile = 2 * kKeyPanel;  // dz, then p

struct Layout {  // of shared memory, in bytes from its start; the query's last panels lie in the stages before their first use
  static constexpr int query = 0, stages = query + (kPanels - kHeld) * kHeadPanel, dout = stages + kStages * kKeyTile,
                       pairs = dout + kLatentPanels * kHeadPanel, lse = pairs + kPairTile, delta = lse + kHeads * 4,
                       barriers = delta + kHeads * 4, full = barriers, empty = full + 8 * kStages, pair_full = empty + 8 * kStages,
                       pair_empty = pair_full + 8, bytes = pair_empty + 8;
};
static_assert(Layout::bytes <= 227 << 10 && kHeld * kHeadPanel <= kStages * kKeyTile);

struct Arguments {
  const __nv_bfloat16 *dout, *o;
  const float* lse;
  __nv_bfloat16 *dq_latent, *dq;
  const std::int32_t *listed, *counts;  // of the rows from `begin` on
  __nv_bfloat16* pairs;                 // (rows, K, 128)
  std::int64_t begin, head;
  float scale;
};

// grid (rows), block (kThreads), shared Layout::bytes: heads [head, head + 64) of query begin + blockIdx.x
__global__ void __launch_bounds__(kThreads, 1) sparse_attention_backward_tiles_kernel(const Inputs in, const Arguments a) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const std::int64_t t = a.begin + blockIdx.x;
  const std::int32_t* const listed = a.listed + std::int64_t(blockIdx.x) * in.K;
  const int count = a.counts[blockIdx.x], tiles = (count + kKeys - 1) / kKeys;
  const int thread = int(threadIdx.x) % kGroup, warp = thread / 32, lane = thread % 32, group = uniform(int(threadIdx.x) / kGroup);

  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      barrier_init(shared + Layout::full + 8 * s, kGroup);
      barrier_init(shared + Layout::empty + 8 * s, (1 + kValueGroups) * kGroup);
    }
    barrier_init(shared + Layout::pair_full, kGroup);
    barrier_init(shared + Layout::pair_empty, kValueGroups * kGroup);
    fence_barrier_init();
  }
  load_query(in, t, a.head, memory + Layout::query, kThreads);
  for (int row = int(threadIdx.x) / 32; row < kHeads; row += kThreads / 32) {  // a warp a head
    const std::int64_t n = t * in.N + a.head + row;
    const bool there = a.head + row < in.N;
    float delta = 0;
    for (int i = lane; i < kLatent / 8; i += 32) {
      uint4 x = make_uint4(0, 0, 0, 0);
      if (there) {
        x = *reinterpret_cast<const uint4*>(a.dout + n * kLatent + 8 * i);
        const auto dout = load<8>(a.dout + n * kLatent + 8 * i), o = load<8>(a.o + n * kLatent + 8 * i);
#pragma unroll
        for (int c = 0; c < 8; ++c) delta += to_float(dout.at[c]) * to_float(o.at[c]);
      }
      *reinterpret_cast<uint4*>(memory + Layout::dout + i / 8 * kHeadPanel + place(row, i % 8)) = x;
    }
    delta = warp_sum(delta);
    if (lane == 0) {
      reinterpret_cast<float*>(memory + Layout::delta)[row] = delta;
      reinterpret_cast<float*>(memory + Layout::lse)[row] = there ? a.lse[n] * kLog2E : INFINITY;  // no head: probabilities of 0
    }
  }
  fence_shared_writes();
  __syncthreads();  // waits for barriers, query, dout, lse and delta
  const auto stage = [&](int i) { return shared + Layout::stages + i % kStages * kKeyTile; };
  const auto wait_full = [&](int i) { barrier_wait(shared + Layout::full + 8 * (i % kStages), i / kStages & 1); };
  const auto arrive_empty = [&](int i) { barrier_arrive(shared + Layout::empty + 8 * (i % kStages)); };
  const auto wait_pairs = [&](int i) { barrier_wait(shared + Layout::pair_full, i & 1); };

  if (group == 0) {
    leave_registers<32>();
    warpgroups_sync(1);  // waits for the query's panels to leave the stages
    for (int i = 0; i < tiles; ++i) {
      std::int32_t at[2];
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const int slot = i * kKeys + thread / 8 + 16 * x;
        at[x] = slot < count ? listed[slot] : -1;
      }
      barrier_wait(shared + Layout::empty + 8 * (i % kStages), (i / kStages & 1) ^ 1);
      gather<kKeyPanel>(in, at, stage(i), thread);
      arrive_when_copied(shared + Layout::full + 8 * (i % kStages));
    }
    wait_for_own_copies();
  } else if (group == 1) {
    const int row = 16 * warp + lane / 4;
    const auto* const lses = reinterpret_cast<const float*>(memory + Layout::lse) + row;
    const auto* const deltas = reinterpret_cast<const float*>(memory + Layout::delta) + row;
    const float lse[2] = {lses[0], lses[8]}, delta[2] = {deltas[0], deltas[8]};
    Held<kHeld> held;
    held.load(memory + Layout::query + (kPanels - kHeld) * kHeadPanel, warp, lane);
    warpgroups_arrive(1);
    for (int i = 0; i < tiles; ++i) {
      float z[kKeys / 2], dp[kKeys / 2];
      wait_full(i);
      fence_shared_writes();  // the copies were ordinary writes
      wgmma_fence();
      products<kPanels - kHeld, kKeyPanel>(z, shared + Layout::query, stage(i));
      held.add_products<kKeyPanel>(z, stage(i) + (kPanels - kHeld) * kKeyPanel);
      wgmma_commit();
      products<kLatentPanels, kKeyPanel>(dp, shared + Layout::dout, stage(i));
      wgmma_commit();
      wgmma_wait<1>();  // probabilities are made while the other products are under way
      settle(z);
      const int left = count - i * kKeys - 2 * (lane % 4);
#pragma unroll
      for (int x = 0; x < kKeys / 2; ++x)
        z[x] = 8 * (x / 4) + x % 2 < left ? power_of_2(z[x] * in.scale_log2 - lse[x / 2 % 2]) : 0.0F;
      wgmma_wait<0>();
      settle(dp);
      arrive_empty(i);
#pragma unroll
      for (int x = 0; x < kKeys / 2; ++x) dp[x] = a.scale * z[x] * (dp[x] - delta[x / 2 % 2]);
      barrier_wait(shared + Layout::pair_empty, (i & 1) ^ 1);
      store_transposed(z, shared + Layout::pairs + kKeyPanel, warp, lane);
      store_transposed(dp, shared + Layout::pairs, warp, lane);
      fence_shared_writes();
      barrier_arrive(shared + Layout::pair_full);
    }
  } else {
    const int row = 16 * warp + lane / 4;
    __nv_bfloat16* const pairs = a.pairs + std::int64_t(blockIdx.x) * in.K * (2 * kHeads);
    const auto keep_pairs = [&](int i) {  // 256 bytes a key
#pragma unroll 1
      for (int x = thread; x < kKeys * 16; x += 2 * kGroup) {
        const int key = x / 16, term = x / 8 % 2, piece = x % 8, slot = i * kKeys + key;
        constexpr int kBelow = kGroup / 16;  // lines from one to the thread's next
        const auto* const from = reinterpret_cast<const uint4*>(memory + Layout::pairs + term * kKeyPanel + place(key, piece));
        auto* const to = reinterpret_cast<uint4*>(pairs + std::int64_t(slot) * (2 * kHeads) + term * kHeads + 8 * piece);
        const uint4 value = from[0], below = from[kBelow * kLine / 16];
        if (slot < count) *to = value;
        if (slot + kBelow < count) to[kBelow * 2 * kHeads / 8] = below;
      }
    };
    // panels first .. first + 3 in pairs, and where `five` says so one more
    const auto add_up = [&](const int first, auto five) {
      float twos[2][kPanel] = {}, one[kPanel / 2] = {};
      for (int i = 0; i < tiles; ++i) {
        wait_full(i);
        wait_pairs(i);
        fence_shared_writes();
        const std::uint64_t dz = operand_at(shared + Layout::pairs), keys = operand_at(stage(i) + first * kKeyPanel, kKeyPanel);
        settle(twos[0]), settle(twos[1]), settle(one);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < kKeys / 16; ++step) {
          const std::uint64_t along = step * step_of(Along::outer);
          wgmma<Along::outer, Along::outer>(twos[0], dz + along, keys + along);
          wgmma<Along::outer, Along::outer>(twos[1], dz + along, keys + further(2 * kKeyPanel) + along);
          if constexpr (five) wgmma<Along::outer, Along::outer>(one, dz + along, keys + further(4 * kKeyPanel) + along);
        }
        wgmma_commit();
        if constexpr (!five) keep_pairs(i);
        wgmma_wait<0>();
        settle(twos[0]), settle(twos[1]), settle(one);
        arrive_empty(i);
        barrier_arrive(shared + Layout::pair_empty);
      }
      constexpr float kOnes[2] = {1, 1};
      const std::int64_t first_row = a.head + row;
      __nv_bfloat16* const to = a.dq_latent + t * in.N * kLatent + first * kPanel;
#pragma unroll
      for (int panel = 0; panel < 4; ++panel)
        store_panel(twos[panel / 2], panel % 2, kOnes, to + panel * kPanel, kLatent, first_row, in.N, lane);
      if constexpr (five)  // the last: extra
        store_panel(one, 0, kOnes, a.dq + t * in.N * in.Hq + in.Hq - kExtra, in.Hq, first_row, in.N, lane);
    };
    if (group == 2) {
      take_registers<160>();
      add_up(0, std::false_type{});
    } else {
      take_registers<192>();
      add_up(4, std::true_type{});
    }
  }
}

}  // namespace

void sparse_attention_tiles(Context& ctx, const SparseAttentionBackward& a) {
  const Inputs in(a);
  const Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  const std::int64_t chunk = scratch.listed.shape[0], parts = scratch.sums.shape[0];
  float* const sums = scratch.sums.as<float>();
  auto* const pairs = device_pointer<bf16>(scratch.pairs);
  cuda_ok(cudaMemsetAsync(sums, 0, std::size_t(scratch.sums.bytes()), ctx.stream));
  for (std::int64_t begin = 0; begin < in.T; begin += chunk) {
    const KeyLists lists{.listed = scratch.listed.as<std::int32_t>(),
                         .counts = scratch.counts.as<std::int32_t>(),
                         .sets = scratch.sets.as<std::int32_t>(),
                         .starts = scratch.starts.as<std::int32_t>(),
                         .rows = std::min(chunk, in.T - begin),
                         .K = in.K,
                         .keys = in.keys};
    list_keys(ctx, in.indices + begin * in.K, lists);
    for (std::int64_t head = 0; head < in.N; head += kHeads) {
      launch(ctx, sparse_attention_backward_tiles_kernel, {blocks(lists.rows, 1), dim3(kThreads), Layout::bytes}, in,
             Arguments{.dout = device_pointer<bf16>(a.do_latent),
                       .o = device_pointer<bf16>(a.o_latent),
                       .lse = a.lse.as<float>(),
                       .dq_latent = device_pointer<bf16>(a.dq_latent),
                       .dq = device_pointer<bf16>(a.dq),
                       .listed = lists.listed,
                       .counts = lists.counts,
                       .pairs = pairs,
                       .begin = begin,
                       .head = head,
                       .scale = float(a.scale)});
      sum_key_tiles(ctx, KeyTiles{.lists = lists,
                                  .pairs = scratch.pairs,
                                  .value0 = a.q_latent.rows(begin, begin + lists.rows),
                                  .value1 = a.do_latent.rows(begin, begin + lists.rows),
                                  .value2 = a.q.rows(begin, begin + lists.rows),
                                  .head = head,
                                  .both = kLatentPanels,
                                  .first = in.Hq - kExtra,
                                  .panels = kPanels,
                                  .reach = in.keys == in.T ? begin + lists.rows : in.keys,
                                  .sums = sums});
    }
  }
  store_sums(ctx, sums, device_pointer<bf16>(a.dlatent), parts, in.keys, kLatent + kExtra, 0, kLatent);
  store_sums(ctx, sums, device_pointer<bf16>(a.dk_extra), parts, in.keys, kLatent + kExtra, kLatent, kExtra);
}

}  // namespace moetrain::ops::cuda
