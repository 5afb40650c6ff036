// key_tiles.cu -- sums over keys on the tensor cores of sm_90a, where rows list few of the keys. By count shared memory bounds it:
// a tile of 64 pairs by 64 columns is written there (16 KB), read by the product (16 KB, and its values 16 KB), and its sums are
// read and written (16 KB each); from L2 come each pair's 256 bytes once a cluster of panels and each row's values once a range of
// keys.
#include "ops/cuda/key_tiles.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"

namespace moetrain::ops::cuda {
namespace {

// ---- lists

constexpr int kListThreads = 256;

// grid (rows), block (kListThreads), shared a bit a key, with values another: the set of positions, read out in order
__global__ void list_keys_kernel(const std::int32_t* __restrict__ indices, const KeyLists to, const float* __restrict__ values,
                                 float* __restrict__ turned) {
  extern __shared__ std::uint32_t set[];
  __shared__ int of_warp[kListThreads / kWarp];
  const std::int64_t row = blockIdx.x;
  const int words = int((to.keys + kKeyRange - 1) / kKeyRange * kRangeWords), each = (words + kListThreads - 1) / kListThreads;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int w = threadIdx.x; w < words; w += kListThreads) set[w] = 0;
  __syncthreads();  // waits for the empty set
  for (std::int64_t k = threadIdx.x; k < to.K; k += kListThreads) {
    const std::int32_t at = indices[row * to.K + k];
    if (at >= to.keys) __trap();  // no position: as the CPU, refuse rather than read what is not there
    if (at >= 0) atomicOr(&set[at / 32], 1U << at % 32);
  }
  __syncthreads();  // waits for the set
  const int begin = min(int(threadIdx.x) * each, words), end = min(begin + each, words);
  int mine = 0;
  for (int w = begin; w < end; ++w) mine += __popc(set[w]);
  int place = mine;
  for (int step = 1; step < kWarp; step *= 2) {
    const int other = __shfl_up_sync(0xffffffffU, place, step);
    if (lane >= step) place += other;
  }
  if (lane == kWarp - 1) of_warp[warp] = place;
  place -= mine;
  __syncthreads();  // waits for the sums of all warps
  int total = 0;
  for (int w = 0; w < kListThreads / kWarp; ++w) {
    place += w < warp ? of_warp[w] : 0;
    total += of_warp[w];
  }
  for (int w = begin; w < end; ++w) {
    to.sets[row * words + w] = std::int32_t(set[w]);
    to.starts[row * (words + 1) + w] = place;
    if (values) set[words + w] = std::uint32_t(place);
    for (std::uint32_t bits = set[w]; bits != 0; bits &= bits - 1) to.listed[row * to.K + place++] = 32 * w + __ffs(int(bits)) - 1;
  }
  for (std::int64_t k = total + int(threadIdx.x); k < to.K; k += kListThreads) to.listed[row * to.K + k] = -1;
  if (values) {
    __syncthreads();  // waits for the places of all words
    for (std::int64_t k = threadIdx.x; k < to.K; k += kListThreads) {
      const std::int32_t at = indices[row * to.K + k];
      if (at < 0) continue;
      turned[row * to.K + set[words + at / 32] + __popc(set[at / 32] & ((1U << at % 32) - 1))] = values[row * to.K + k];
    }
  }
  if (threadIdx.x == 0) to.counts[row] = to.starts[row * (words + 1) + words] = total;
}

// ---- sums

constexpr int kLine = 128, kPanel = 64, kHeads = 64, kPairs = 64, kHalf = kPairs / 2;
constexpr int kGroup = 128, kThreads = 2 * kGroup + kWarp;  // two warpgroups that take turns, and a warp that copies
constexpr int kTileStages = 4, kValueStages = 2;
constexpr int kPanelBytes = kPairs * kLine, kTileBytes = 2 * kPanelBytes, kHalfBytes = kHalf * kLine;

struct Layout {  // of shared memory, in bytes from its start
  static constexpr int tiles = 0, values = tiles + kTileStages * kTileBytes, sums = values + kValueStages * kTileBytes,
                       positions = sums + int(kKeyRange) * kPanel * 4,  // (kTileStages, kPairs)
      descriptors = positions + kTileStages * kPairs * 4,               // (kTileStages)
      barriers = descriptors + kTileStages * 16, tile_full = barriers, tile_empty = tile_full + 8 * kTileStages,
                       value_full = tile_empty + 8 * kTileStages, value_empty = value_full + 8 * kValueStages,
                       turn = value_empty + 8 * kValueStages, room = turn + 8,  // of the first block: a stage is empty in all
      bytes = room + 8 * kTileStages;
};
static_assert(Layout::bytes <= 227 << 10);

struct Sums {
  const std::int32_t *listed, *starts;
  float* sums;
  std::int64_t rows, K, keys, width, words;
  int head, both, first;
};

// Where column c (even) of a key's sums lies. A thread's share of a product, two columns of every eight, comes to lie in fours; and
// the halves of a line change places from key to key, so that neighbours meet different banks.
__device__ inline int sum_at(int key, int c) {
  const int j = c / 8, pair = c / 2 % 4;
  return key * kPanel + ((16 * (j / 2) + 4 * pair + 2 * (j % 2)) ^ (key & 1) << 4);
}

// grid (panels, ranges, parts), block (kThreads), shared Layout::bytes. Tile i, up to 64 pairs of one row, is multiplied by
// warpgroup i % 2; the sums are added to in the order of the tiles.
template <int kCluster>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    key_tiles_kernel(const Sums a, const __grid_constant__ CUtensorMap pairs, const __grid_constant__ CUtensorMap value0,
                     const __grid_constant__ CUtensorMap value1, const __grid_constant__ CUtensorMap value2) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const int panel = int(blockIdx.x), range = int(blockIdx.y), lane = int(threadIdx.x) % kWarp;
  const int per_part = int((a.rows + gridDim.z - 1) / gridDim.z), first_row = int(blockIdx.z) * per_part,
            end_row = min(first_row + per_part, int(a.rows)), terms = panel < a.both ? 2 : 1;
  const std::int64_t first_key = std::int64_t(range) * kKeyRange;
  const auto segment_of = [&](int row) {
    if (row >= end_row) return make_int2(0, 0);
    const std::int32_t* const starts = a.starts + row * (a.words + 1) + range * kRangeWords;
    return make_int2(starts[0], starts[kRangeWords]);
  };
  int any = 0;
  for (int row = first_row + int(threadIdx.x); row < end_row; row += kThreads) {
    const int2 segment = segment_of(row);
    any |= segment.x < segment.y;
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < kTileStages; ++s) {
      barrier_init(shared + Layout::tile_full + 8 * s, 1 + kWarp);
      barrier_init(shared + Layout::tile_empty + 8 * s, kGroup);
    }
    for (int s = 0; s < kValueStages; ++s) {
      barrier_init(shared + Layout::value_full + 8 * s, 1);
      barrier_init(shared + Layout::value_empty + 8 * s, kGroup);
    }
    for (int s = 0; s < kTileStages; ++s) barrier_init(shared + Layout::room + 8 * s, kCluster * kGroup / kWarp);
    barrier_init(shared + Layout::turn, kGroup);
    fence_barrier_init();
  }
  if (!__syncthreads_or(any)) return;  // as all blocks of the cluster
  cluster_sync();                      // waits for the barriers of all

  const bool copies = threadIdx.x >= 2 * kGroup;
  auto* const sums = reinterpret_cast<float*>(memory + Layout::sums);
  float* const global = a.sums + std::int64_t(blockIdx.z) * a.keys * a.width + first_key * a.width + panel * kPanel;
  const int keys = int(min(kKeyRange, a.keys - first_key));
  if (!copies)
    for (int i = int(threadIdx.x); i < keys * (kPanel / 4); i += 2 * kGroup) {
      const int key = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
      const float4 x = *reinterpret_cast<const float4*>(global + key * a.width + c);
      *reinterpret_cast<float2*>(sums + sum_at(key, c)) = make_float2(x.x, x.y);
      *reinterpret_cast<float2*>(sums + sum_at(key, c + 2)) = make_float2(x.z, x.w);
    }
  __syncthreads();  // waits for the sums so far

  auto* const descriptors = reinterpret_cast<int4*>(memory + Layout::descriptors);  // pairs, row's number, is it the row's last
  if (copies) {
    int tile = 0, value = 0;
    const auto begin_tile = [&](int4 descriptor) {  // its barrier, once there is room
      barrier_wait(shared + Layout::tile_empty + 8 * (tile % kTileStages), (tile / kTileStages & 1) ^ 1);
      if (lane == 0) descriptors[tile % kTileStages] = descriptor;
      return shared + Layout::tile_full + 8 * (tile % kTileStages);
    };
    for (int base = first_row; base < end_row; base += kWarp) {
      const int2 mine = segment_of(base + lane);
      for (unsigned int filled = __ballot_sync(0xffffffffU, mine.x < mine.y); filled != 0; filled &= filled - 1) {
        const int from = __ffs(int(filled)) - 1, row = base + from, begin = __shfl_sync(0xffffffffU, mine.x, from),
                  end = __shfl_sync(0xffffffffU, mine.y, from), stage = value % kValueStages;
        const std::uint32_t values = shared + Layout::values + stage * kTileBytes, ready = shared + Layout::value_full + 8 * stage;
        barrier_wait(shared + Layout::value_empty + 8 * stage, (value / kValueStages & 1) ^ 1);
        if (lane == 0) {
          barrier_arrive_and_expect(ready, terms * kPanelBytes);
          if (terms == 2) {
            copy_box(values, &value0, ready, panel * kPanel, a.head, row);
            copy_box(values + kPanelBytes, &value1, ready, panel * kPanel, a.head, row);
          } else {
            copy_box(values, &value2, ready, a.first + (panel - a.both) * kPanel, a.head, row);
          }
        }
        for (int slot = begin; slot < end; slot += kPairs, ++tile) {
          const int count = min(kPairs, end - slot), halves = count > kHalf ? 2 : 1, at = tile % kTileStages;
          const std::uint32_t full = begin_tile(make_int4(count, value, slot + kPairs >= end, 0)),
                              to = shared + Layout::tiles + at * kTileBytes;
          const std::int32_t* const listed = a.listed + row * a.K + slot;
          for (int i = lane; i < count; i += kWarp)
            asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared + Layout::positions + (at * kPairs + i) * 4),
                         "l"(__cvta_generic_to_global(listed + i))
                         : "memory");
          asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
          if (lane == 0) {
            barrier_arrive_and_expect(full, terms * halves * kHalfBytes);
            if (panel % kCluster == 0) {
              barrier_wait(shared + Layout::room + 8 * at, (tile / kTileStages & 1) ^ 1);
              for (int term = 0; term < 2; ++term) {
                // who wants the term: of the first all blocks, of the second those with panels of both
                const int wanting = term == 0 ? kCluster : min(max(a.both - panel, 0), kCluster);
                for (int half = 0; half < halves && wanting > 0; ++half)
                  copy_box_to(std::uint16_t((1 << wanting) - 1), to + term * kPanelBytes + half * kHalfBytes, &pairs, full,
                              term * kPanel, int(row * a.K) + slot + half * kHalf);
              }
            }
          }
          __syncwarp();
        }
        ++value;
      }
    }
    for (int group = 0; group < 2; ++group, ++tile) {  // one that ends it, for each
      const std::uint32_t full = begin_tile(make_int4(0, 0, 0, 0));
      __syncwarp();
      barrier_arrive(full);
      if (lane == 0) barrier_arrive(full);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int group = int(threadIdx.x) / kGroup, row = int(threadIdx.x) % kGroup / kWarp * 16 + lane / 4;
    for (int tile = group;; tile += 2) {
      const int stage = tile % kTileStages;
      const std::uint32_t from = shared + Layout::tiles + stage * kTileBytes;
      barrier_wait(shared + Layout::tile_full + 8 * stage, tile / kTileStages & 1);
      const int4 descriptor = descriptors[stage];
      const int count = descriptor.x, value_stage = descriptor.y % kValueStages;
      if (count == 0) break;
      const std::int32_t* const positions =
          reinterpret_cast<const std::int32_t*>(memory + Layout::positions) + stage * kPairs + row;
      const int key[2] = {row < count ? int(positions[0] - first_key) : -1, row + 8 < count ? int(positions[8] - first_key) : -1};
      const std::uint32_t values = shared + Layout::values + value_stage * kTileBytes;
      barrier_wait(shared + Layout::value_full + 8 * value_stage, descriptor.y / kValueStages & 1);
      float x[kPanel / 2] = {};
      if (terms == 2)
        multiply_panels<Along::k, Along::outer, 2, kHeads / 16>(x, from, kPanelBytes, values, kPanelBytes);
      else
        multiply_panels<Along::k, Along::outer, 1, kHeads / 16>(x, from, kPanelBytes, values, kPanelBytes);
      barrier_arrive(shared + Layout::tile_empty + 8 * stage);
      __syncwarp();
      if (lane == 0) barrier_arrive_at(shared + Layout::room + 8 * stage, 0, 1);
      barrier_wait(shared + Layout::turn, (tile & 1) ^ 1);  // of the tile before: its sums are made, and so its products
      if (descriptor.z) barrier_arrive(shared + Layout::value_empty + 8 * value_stage);
      float4 at[2][4];  // the positions of a tile differ: no two threads meet
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (key[h] >= 0)
#pragma unroll
          for (int m = 0; m < 4; ++m) at[h][m] = *reinterpret_cast<float4*>(sums + sum_at(key[h], 16 * m + 2 * (lane % 4)));
#pragma unroll
      for (int h = 0; h < 2; ++h)
        if (key[h] >= 0)
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            float4& sum = at[h][m];
            sum.x += x[8 * m + 2 * h], sum.y += x[8 * m + 2 * h + 1], sum.z += x[8 * m + 4 + 2 * h], sum.w += x[8 * m + 5 + 2 * h];
            *reinterpret_cast<float4*>(sums + sum_at(key[h], 16 * m + 2 * (lane % 4))) = sum;
          }
      barrier_arrive(shared + Layout::turn);
    }
  }
  __syncthreads();  // waits for all sums
  cluster_sync();   // and for the other blocks, whose last arrivals the first hears of
  if (copies) return;
  for (int i = int(threadIdx.x); i < keys * (kPanel / 4); i += 2 * kGroup) {
    const int key = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
    const float2 low = *reinterpret_cast<const float2*>(sums + sum_at(key, c)),
                 high = *reinterpret_cast<const float2*>(sums + sum_at(key, c + 2));
    *reinterpret_cast<float4*>(global + key * a.width + c) = make_float4(low.x, low.y, high.x, high.y);
  }
}

}  // namespace

void list_keys(Context& ctx, const std::int32_t* indices, const KeyLists& to, const float* values, float* turned) {
  check(to.keys <= kMostListedKeys, "key_tiles: more keys than a block's memory has bits for", {{"keys", to.keys}});
  launch(ctx, list_keys_kernel, {blocks(to.rows, 1), dim3(kListThreads), std::size_t(key_words(to.keys) * (values ? 8 : 4))},
         indices, to, values, turned);
}

namespace {
template <int kCluster>
void run(Context& ctx, const KeyTiles& a) {
  const KeyLists& l = a.lists;
  const auto map = [](ConstTensor t) {  // (rows, N, width)
    return t.present() ? tensor_map(t, {t.shape[2], t.shape[1], t.shape[0]}, {kPanel, kHeads, 1}) : CUtensorMap{};
  };
  launch(
      ctx, key_tiles_kernel<kCluster>,
      {dim3(unsigned(a.panels), blocks(l.keys, kKeyRange), unsigned(key_parts(l.keys, a.panels))), dim3(kThreads), Layout::bytes},
      Sums{.listed = l.listed,
           .starts = l.starts,
           .sums = a.sums,
           .rows = l.rows,
           .K = l.K,
           .keys = l.keys,
           .width = a.panels * kPanel,
           .words = key_words(l.keys),
           .head = int(a.head),
           .both = int(a.both),
           .first = int(a.first)},
      tensor_map(a.pairs, {a.pairs.shape[2], l.rows * l.K}, {kPanel, kHalf}), map(a.value0), map(a.value1), map(a.value2));
}
}  // namespace

void sum_key_tiles(Context& ctx, const KeyTiles& a) {
  if (a.lists.rows == 0 || a.lists.keys == 0 || a.lists.K == 0) return;
  // a key that a row does not list costs a product as much as one listed, and a pair of a tile eight times that (on an H200)
  constexpr std::int64_t kPairCost = 8;
  if (a.reach <= kPairCost * a.lists.K) return sum_key_products(ctx, a);
  a.panels % 3 == 0 ? run<3>(ctx, a) : a.panels % 2 == 0 ? run<2>(ctx, a) : run<1>(ctx, a);
}

}  // namespace moetrain::ops::cuda
