// key_products.cu -- sums over keys on the tensor cores of sm_90a, where rows list a good part of the keys before them: keys are
// the rows of a product that goes on over all queries and heads, a key that a query did not list has zeros there, and the sums stay
// in registers. The tensor cores bound it: 128 keys by 288 columns by a query's 128 (64 heads of two terms) take 2176 cycles, in
// which shared memory takes up the query's values (544) and gives them to two warpgroups (1088).
#include "ops/cuda/attention_products.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/key_tiles.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"

namespace moetrain::ops::cuda {
namespace {

constexpr int kLine = 128, kPanel = 64, kHeads = 64, kPanelBytes = kHeads * kLine;
constexpr int kGroup = 128, kGroups = 2, kThreads = (kGroups + 1) * kGroup;  // two warpgroups of 64 keys each, and one that copies
constexpr int kGroupKeys = 64, kBlockKeys = kGroups * kGroupKeys, kCluster = 2, kClusterWords = kCluster * kBlockKeys / 32;
constexpr int kPart = 128, kPartBytes = kPart / kPanel * kPanelBytes;  // columns of a product

// kBoth: panels 4 x to 4 x + 3 of both terms and half x of the last one; else two panels of the one term.
template <bool kBoth>
struct Layout {  // of shared memory, in bytes from its start
  static constexpr int parts = kBoth ? 2 : 1, terms = kBoth ? 2 : 1, term = parts * kPartBytes, stages_of = kBoth ? 3 : 6,
                       extra = terms * term, stage = extra + (kBoth ? kPanelBytes : 0), stages = 0,
                       full = stages + stages_of * stage, empty = full + 8 * stages_of, count = empty + 8 * stages_of,
                       votes = count + 16;
  static constexpr int bytes(int rows) { return votes + (rows + kWarp - 1) / kWarp * 4 + rows * 4; }
};

struct Sums {
  const std::int32_t *sets, *starts;
  const uint4* pairs;
  float* sums;
  std::int64_t K, keys, width, words;
  int rows, head, first;
};

// sums += a b for a (64, 16) in registers and b (16, 32) Along::outer
__device__ inline void wgmma(float (&d)[16], const unsigned* a, std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 1;"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), "+f"(d[9]),
        "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
using cuda::wgmma;

// grid (halves of the columns, ranges of kBlockKeys, parts of the rows), block (kThreads), shared Layout::bytes(rows of a part).
// The two blocks of a cluster have neighbouring ranges and share the values.
template <bool kBoth>
__global__ void __cluster_dims__(1, kCluster, 1) __launch_bounds__(kThreads, 1)
    key_products_kernel(const Sums a, const __grid_constant__ CUtensorMap value0, const __grid_constant__ CUtensorMap value1,
                        const __grid_constant__ CUtensorMap value2) {
  using L = Layout<kBoth>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const int half = int(blockIdx.x), lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int per_part = (a.rows + int(gridDim.z) - 1) / int(gridDim.z), first_row = int(blockIdx.z) * per_part,
            rows = min(per_part, a.rows - first_row);
  auto* const votes = reinterpret_cast<std::uint32_t*>(memory + L::votes);
  auto* const listing = reinterpret_cast<std::int32_t*>(votes + (per_part + kWarp - 1) / kWarp);
  auto* const listing_count = reinterpret_cast<std::int32_t*>(memory + L::count);
  if (threadIdx.x == 0) {
    for (int s = 0; s < L::stages_of; ++s) {
      barrier_init(shared + L::full + 8 * s, 1);
      barrier_init(shared + L::empty + 8 * s, kCluster * kGroups * kGroup / kWarp);
    }
    fence_barrier_init();
    *listing_count = 0;
  }
  // which rows list keys of the cluster
  for (int row = int(threadIdx.x); row - lane < rows; row += kThreads) {
    const std::int32_t* const starts = a.starts + (first_row + row) * (a.words + 1) + blockIdx.y / kCluster * kClusterWords;
    const unsigned int vote = __ballot_sync(0xffffffffU, row < rows && starts[0] < starts[kClusterWords]);
    if (lane == 0) votes[row / kWarp] = vote;
  }
  __syncthreads();  // waits for the votes
  for (int row = int(threadIdx.x); row < rows; row += kThreads) {
    if (!(votes[row / kWarp] >> row % kWarp & 1)) continue;
    int place = __popc(votes[row / kWarp] & ((1U << row % kWarp) - 1));
    for (int w = 0; w < row / kWarp; ++w) place += __popc(votes[w]);
    listing[place] = first_row + row;
    atomicMax(listing_count, place + 1);
  }
  __syncthreads();  // waits for the list of rows
  const int count = *listing_count;
  if (count == 0) return;  // as the other block of the cluster
  cluster_sync();          // waits for the barriers of both

  if (warp >= kGroups * kGroup / kWarp) {
    leave_registers<24>();
    if (threadIdx.x == kGroups * kGroup) {
      const int rank = int(cluster_rank());
      constexpr std::uint16_t kAll = (1 << kCluster) - 1;
      for (int i = 0; i < count; ++i) {
        const int stage = i % L::stages_of, row = listing[i];
        const std::uint32_t full = shared + L::full + 8 * stage, to = shared + L::stages + stage * L::stage;
        barrier_wait(shared + L::empty + 8 * stage, (i / L::stages_of & 1) ^ 1);
        barrier_arrive_and_expect(full, L::stage);
        if constexpr (kBoth) {  // each block brings a term
          for (int p = 0; p < 4; ++p)
            copy_box_to(kAll, to + rank * L::term + p * kPanelBytes, rank == 0 ? &value0 : &value1, full, (4 * half + p) * kPanel,
                        a.head, row);
          if (rank == 1) copy_box_to(kAll, to + L::extra, &value2, full, a.first, a.head, row);
        } else {
          copy_box_to(kAll, to + rank * kPanelBytes, &value2, full, a.first + rank * kPanel, a.head, row);
        }
      }
    }
  } else {
    take_registers<240>();
    const int group = warp / (kGroup / kWarp), key_group = int(blockIdx.y) * kGroups + group, in_group = warp % 4;
    const int bit = 16 * (in_group % 2) + lane / 4;  // and bit + 8: the thread's keys in a set
    struct Sets {
      uint2 both;
      std::int32_t start;
    };
    const auto sets_of = [&](int i) {
      const std::int64_t row = listing[i];
      return Sets{*reinterpret_cast<const uint2*>(a.sets + row * a.words + 2 * key_group),
                  a.starts[row * (a.words + 1) + 2 * key_group + in_group / 2]};
    };
    constexpr int kPieces = 2 * L::terms;  // of 32 heads, a quarter each for four lanes
    uint4 next[2][kPieces];
    const auto fetch = [&](int i, const Sets& sets) {
      const std::uint32_t set = in_group < 2 ? sets.both.x : sets.both.y;
      const uint4* const pairs = a.pairs + listing[i] * a.K * (4 * kPieces) + lane % 4;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool there = set >> (bit + 8 * h) & 1;
        const int slot = sets.start + __popc(set & ((1U << (bit + 8 * h)) - 1));
#pragma unroll
        for (int x = 0; x < kPieces; ++x)
          next[h][x] = there ? __ldg(pairs + std::int64_t(slot) * (4 * kPieces) + 4 * x) : make_uint4(0, 0, 0, 0);
      }
    };
    float sums[L::parts][kPart / 2] = {}, extra[16] = {};
    Sets now = sets_of(0);
    fetch(0, now);
    Sets following = sets_of(min(1, count - 1));
    for (int i = 0; i < count; ++i) {
      unsigned int weights[2 * kPieces][4];  // of 16 heads each
#pragma unroll
      for (int x = 0; x < kPieces; ++x) {
        const uint4 low = whole_piece(next[0][x].x, next[0][x].y, next[0][x].z, next[0][x].w, lane),
                    high = whole_piece(next[1][x].x, next[1][x].y, next[1][x].z, next[1][x].w, lane);
        weights[2 * x][0] = low.x, weights[2 * x][1] = high.x, weights[2 * x][2] = low.y, weights[2 * x][3] = high.y;
        weights[2 * x + 1][0] = low.z, weights[2 * x + 1][1] = high.z, weights[2 * x + 1][2] = low.w,
                        weights[2 * x + 1][3] = high.w;
      }
      const bool any = __shfl_sync(0xffffffffU, now.both.x | now.both.y, 0) != 0;
      now = following;
      const int stage = i % L::stages_of;
      const std::uint32_t values = shared + L::stages + stage * L::stage;
      barrier_wait(shared + L::full + 8 * stage, i / L::stages_of & 1);
      if (any) {
        for (auto& part : sums) settle(part);
        settle(extra);
        wgmma_fence();
#pragma unroll
        for (int term = 0; term < L::terms; ++term)
#pragma unroll
          for (int step = 0; step < kHeads / 16; ++step) {
            const unsigned int* const w = weights[term * (kHeads / 16) + step];
            const std::uint64_t along = step * step_of(Along::outer);
#pragma unroll
            for (int part = 0; part < L::parts; ++part)
              wgmma(sums[part], w, operand_at(values + term * L::term + part * kPartBytes, kPanelBytes) + along);
            if constexpr (kBoth)
              if (term == 0) wgmma(extra, w, operand_at(values + L::extra + half * kLine / 2) + along);
          }
        wgmma_commit();
      }
      if (i + 1 < count) {
        fetch(i + 1, now);
        following = sets_of(min(i + 2, count - 1));
      }
      wgmma_wait<0>();
      for (auto& part : sums) settle(part);
      settle(extra);
      if (lane < kCluster) barrier_arrive_at(shared + L::empty + 8 * stage, std::uint32_t(lane), 1);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const std::int64_t key = std::int64_t(key_group) * kGroupKeys + 16 * in_group + lane / 4 + 8 * h;
      if (key >= a.keys) continue;
      float* const to = a.sums + (std::int64_t(blockIdx.z) * a.keys + key) * a.width + 2 * (lane % 4);
      const auto add = [&](const float* x, float* at) {
        float2 sum = *reinterpret_cast<float2*>(at);
        sum.x += x[2 * h], sum.y += x[2 * h + 1];
        *reinterpret_cast<float2*>(at) = sum;
      };
#pragma unroll
      for (int part = 0; part < L::parts; ++part)
#pragma unroll
        for (int j = 0; j < kPart / 8; ++j) add(&sums[part][4 * j], to + (half * L::parts + part) * kPart + 8 * j);
      if constexpr (kBoth)
#pragma unroll
        for (int j = 0; j < 4; ++j) add(&extra[4 * j], to + 8 * kPanel + half * kPanel / 2 + 8 * j);
    }
  }
  cluster_sync();  // the other block's copies and arrivals end here too
}

template <bool kBoth>
void run(Context& ctx, const KeyTiles& a) {
  constexpr int kHalves = kBoth ? 2 : 1;
  const std::int64_t at_once = ctx.blas->multiprocessors();
  const KeyLists& l = a.lists;
  // as many parts of the rows as fill the device best, of those that the sums have room for
  const std::int64_t filled = kHalves * kCluster * std::int64_t(blocks(std::min(a.reach, l.keys), kCluster * kBlockKeys));
  std::int64_t parts = 1;
  const auto waves = [&](std::int64_t count) { return (filled * count + at_once - 1) / at_once; };
  for (std::int64_t count = 2; count <= key_parts(l.keys, a.panels); ++count)
    if (waves(count) * parts < waves(parts) * count) parts = count;
  const auto map = [](ConstTensor t) {  // (rows, N, width)
    return t.present() ? tensor_map(t, {t.shape[2], t.shape[1], t.shape[0]}, {kPanel, kHeads, 1}) : CUtensorMap{};
  };
  const unsigned int ranges = kCluster * blocks(l.keys, kCluster * kBlockKeys);
  launch(ctx, key_products_kernel<kBoth>,
         {dim3(kHalves, ranges, unsigned(parts)), dim3(kThreads), std::size_t(Layout<kBoth>::bytes(int(blocks(l.rows, parts))))},
         Sums{.sets = l.sets,
              .starts = l.starts,
              .pairs = reinterpret_cast<const uint4*>(device_pointer<bf16>(a.pairs)),
              .sums = a.sums,
              .K = l.K,
              .keys = l.keys,
              .width = a.panels * kPanel,
              .words = key_words(l.keys),
              .rows = int(l.rows),
              .head = int(a.head),
              .first = int(a.first)},
         map(a.value0), map(a.value1), map(a.value2));
}

}  // namespace

void sum_key_products(Context& ctx, const KeyTiles& a) {
  check((a.both == 8 && a.panels == 9) || (a.both == 0 && a.panels == 2), "key_products: panels",
        {{"both", a.both}, {"panels", a.panels}});
  a.both > 0 ? run<true>(ctx, a) : run<false>(ctx, a);
}

}  // namespace moetrain::ops::cuda
