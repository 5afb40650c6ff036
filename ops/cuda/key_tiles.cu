// key_tiles.cu -- sums over keys on the tensor cores of sm_90a. What bounds it: each pair's 256 bytes are read once a panel, each
// row's values once a range of keys (together 43 GB of L2 reads for 8192 queries of 2048 keys), and each sum is read and written in
// shared memory once a pair.
#include "ops/cuda/key_tiles.cuh"
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
  const int words = int((to.keys + 31) / 32), each = (words + kListThreads - 1) / kListThreads,
            ranges = int((to.keys + kKeyRange - 1) / kKeyRange);
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
  constexpr int kRangeWords = kKeyRange / 32;
  for (int w = begin; w < end; ++w) {
    if (w % kRangeWords == 0) to.bounds[row * (ranges + 1) + w / kRangeWords] = place;
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
  if (threadIdx.x == 0) to.counts[row] = to.bounds[row * (ranges + 1) + ranges] = total;
}

// ---- sums

constexpr int kLine = 128, kPanel = 64, kHeads = 64, kPairs = 64, kHalf = kPairs / 2;
constexpr int kGroup = 128, kThreads = 2 * kGroup + kWarp;  // two warpgroups of 32 columns each, and a warp that copies
constexpr int kTileStages = 3, kValueStages = 2;
constexpr int kPanelBytes = kPairs * kLine, kTileBytes = 2 * kPanelBytes, kHalfBytes = kHalf * kLine;

struct Layout {  // of shared memory, in bytes from its start
  static constexpr int tiles = 0, values = tiles + kTileStages * kTileBytes, sums = values + kValueStages * kTileBytes,
                       positions = sums + int(kKeyRange) * kPanel * 4,  // (kTileStages, kPairs)
      counts = positions + kTileStages * kPairs * 4,                    // (kTileStages)
      segments = counts + 16,                                           // (rows of a part) begin and end of the range in the row
      barriers = segments + int(kMostKeyRows) * 8, tile_full = barriers, tile_empty = tile_full + 8 * kTileStages,
                       value_full = tile_empty + 8 * kTileStages, value_empty = value_full + 8 * kValueStages,
                       bytes = value_empty + 8 * kValueStages;
};
static_assert(Layout::bytes <= 227 << 10);

struct Sums {
  const std::int32_t *listed, *bounds;
  float* sums;
  std::int64_t rows, K, keys, width;
  int ranges, head, both, first;
};

// Where column c of key's sums lies: groups of 8 columns change places, so that the rows of a product meet different banks.
__device__ inline int sum_at(int key, int c) { return key * kPanel + (c ^ (key & 3) << 3); }

// grid (panels, ranges, parts), block (kThreads), shared Layout::bytes
__global__ void __launch_bounds__(kThreads, 1)
    key_tiles_kernel(const Sums a, const __grid_constant__ CUtensorMap pairs, const __grid_constant__ CUtensorMap value0,
                     const __grid_constant__ CUtensorMap value1, const __grid_constant__ CUtensorMap value2) {
  extern __shared__ __align__(1024) unsigned char memory[];
  const std::uint32_t shared = shared_address(memory);
  const int panel = int(blockIdx.x), range = int(blockIdx.y), lane = int(threadIdx.x) % kWarp;
  const int per_part = int((a.rows + gridDim.z - 1) / gridDim.z), first_row = int(blockIdx.z) * per_part,
            rows = max(0, min(per_part, int(a.rows) - first_row)), terms = panel < a.both ? 2 : 1;
  const std::int64_t first_key = std::int64_t(range) * kKeyRange;
  auto* const segments = reinterpret_cast<int2*>(memory + Layout::segments);
  auto* const sums = reinterpret_cast<float*>(memory + Layout::sums);

  int any = 0;
  for (int r = int(threadIdx.x); r < rows; r += kThreads) {
    const std::int32_t* const bounds = a.bounds + std::int64_t(first_row + r) * (a.ranges + 1) + range;
    segments[r] = make_int2(bounds[0], bounds[1]);
    any |= bounds[0] < bounds[1];
  }
  if (threadIdx.x == 0) {
    for (int s = 0; s < kTileStages; ++s) {
      barrier_init(shared + Layout::tile_full + 8 * s, 1 + kWarp);
      barrier_init(shared + Layout::tile_empty + 8 * s, 2 * kGroup);
    }
    for (int s = 0; s < kValueStages; ++s) {
      barrier_init(shared + Layout::value_full + 8 * s, 1);
      barrier_init(shared + Layout::value_empty + 8 * s, 2 * kGroup);
    }
    fence_barrier_init();
  }
  if (!__syncthreads_or(any)) return;  // waits for segments and barriers

  const bool copies = threadIdx.x >= 2 * kGroup;
  float* const global = a.sums + std::int64_t(blockIdx.z) * a.keys * a.width + first_key * a.width + panel * kPanel;
  const int keys = int(min(kKeyRange, a.keys - first_key));
  if (!copies) {
    for (int i = int(threadIdx.x); i < keys * (kPanel / 4); i += 2 * kGroup) {
      const int key = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
      *reinterpret_cast<float4*>(sums + sum_at(key, c)) = *reinterpret_cast<const float4*>(global + key * a.width + c);
    }
  }
  __syncthreads();  // waits for the sums so far

  if (copies) {
    int tile = 0, value = 0;
    for (int r = 0; r < rows; ++r) {
      const int2 segment = segments[r];
      if (segment.x == segment.y) continue;
      const int row = first_row + r;
      {
        const int stage = value % kValueStages;
        const std::uint32_t to = shared + Layout::values + stage * kTileBytes, full = shared + Layout::value_full + 8 * stage;
        barrier_wait(shared + Layout::value_empty + 8 * stage, (value / kValueStages & 1) ^ 1);
        if (lane == 0) {
          barrier_arrive_and_expect(full, terms * kPanelBytes);
          if (terms == 2) {
            copy_box(to, &value0, full, panel * kPanel, a.head, row);
            copy_box(to + kPanelBytes, &value1, full, panel * kPanel, a.head, row);
          } else {
            copy_box(to, &value2, full, a.first + (panel - a.both) * kPanel, a.head, row);
          }
        }
        ++value;
      }
      for (int slot = segment.x; slot < segment.y; slot += kPairs, ++tile) {
        const int stage = tile % kTileStages, count = min(kPairs, segment.y - slot), halves = count > kHalf ? 2 : 1;
        const std::uint32_t to = shared + Layout::tiles + stage * kTileBytes, full = shared + Layout::tile_full + 8 * stage;
        barrier_wait(shared + Layout::tile_empty + 8 * stage, (tile / kTileStages & 1) ^ 1);
        const std::int32_t* const listed = a.listed + row * a.K + slot;
        for (int i = lane; i < count; i += kWarp)
          asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared + Layout::positions + (stage * kPairs + i) * 4),
                       "l"(__cvta_generic_to_global(listed + i))
                       : "memory");
        asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(full) : "memory");
        if (lane == 0) {
          reinterpret_cast<int*>(memory + Layout::counts)[stage] = count;
          barrier_arrive_and_expect(full, terms * halves * kHalfBytes);
          for (int term = 0; term < terms; ++term)
            for (int half = 0; half < halves; ++half)
              copy_box(to + term * kPanelBytes + half * kHalfBytes, &pairs, full, term * kPanel,
                       int(row * a.K) + slot + half * kHalf);
        }
        __syncwarp();
      }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
  } else {
    const int half = int(threadIdx.x) / kGroup, warp = int(threadIdx.x) % kGroup / kWarp, column = 32 * half + 2 * (lane % 4);
    int tile = 0, value = 0;
    for (int r = 0; r < rows; ++r) {
      const int2 segment = segments[r];
      if (segment.x == segment.y) continue;
      const int value_stage = value % kValueStages;
      const std::uint32_t values = shared + Layout::values + value_stage * kTileBytes + half * (kLine / 2);
      barrier_wait(shared + Layout::value_full + 8 * value_stage, value / kValueStages & 1);
      for (int slot = segment.x; slot < segment.y; slot += kPairs, ++tile) {
        const int stage = tile % kTileStages;
        const std::uint32_t from = shared + Layout::tiles + stage * kTileBytes;
        barrier_wait(shared + Layout::tile_full + 8 * stage, tile / kTileStages & 1);
        float x[16] = {};
        const auto add_terms = [&](auto count) {
          settle(x);
          wgmma_fence();
#pragma unroll
          for (int term = 0; term < count; ++term)
#pragma unroll
            for (int step = 0; step < kHeads / 16; ++step)
              wgmma<Along::k, Along::outer>(x, operand_at(from + term * kPanelBytes) + step * step_of(Along::k),
                                            operand_at(values + term * kPanelBytes) + step * step_of(Along::outer));
          wgmma_commit();
        };
        if (terms == 2)
          add_terms(std::integral_constant<int, 2>{});
        else
          add_terms(std::integral_constant<int, 1>{});
        const int count = reinterpret_cast<const int*>(memory + Layout::counts)[stage], row = 16 * warp + lane / 4;
        const std::int32_t* const positions =
            reinterpret_cast<const std::int32_t*>(memory + Layout::positions) + stage * kPairs + row;
        const int key[2] = {row < count ? int(positions[0] - first_key) : -1, row + 8 < count ? int(positions[8] - first_key) : -1};
        wgmma_wait<0>();
        settle(x);
        barrier_arrive(shared + Layout::tile_empty + 8 * stage);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (key[h] < 0) continue;
#pragma unroll
          for (int j = 0; j < 4; ++j) {  // the positions of a row differ: no two lanes meet
            auto& at = *reinterpret_cast<float2*>(sums + sum_at(key[h], column + 8 * j));
            float2 sum = at;
            sum.x += x[4 * j + 2 * h], sum.y += x[4 * j + 2 * h + 1];
            at = sum;
          }
        }
        warpgroup_sync(1 + half);  // waits for the sums of this tile: the next row may list the same keys in other lanes
      }
      barrier_arrive(shared + Layout::value_empty + 8 * value_stage);
      ++value;
    }
  }
  __syncthreads();  // waits for all sums
  if (copies) return;
  for (int i = int(threadIdx.x); i < keys * (kPanel / 4); i += 2 * kGroup) {
    const int key = i / (kPanel / 4), c = i % (kPanel / 4) * 4;
    *reinterpret_cast<float4*>(global + key * a.width + c) = *reinterpret_cast<const float4*>(sums + sum_at(key, c));
  }
}

}  // namespace

void list_keys(Context& ctx, const std::int32_t* indices, const KeyLists& to, const float* values, float* turned) {
  check(to.keys <= kMostListedKeys, "key_tiles: more keys than a block's memory has bits for", {{"keys", to.keys}});
  launch(ctx, list_keys_kernel, {blocks(to.rows, 1), dim3(kListThreads), std::size_t((to.keys + 31) / 32 * (values ? 8 : 4))},
         indices, to, values, turned);
}

void sum_key_tiles(Context& ctx, const KeyTiles& a) {
  const KeyLists& l = a.lists;
  if (l.rows == 0 || l.keys == 0 || l.K == 0) return;
  check(l.rows <= kMostKeyRows, "key_tiles: too many rows in a call", {{"rows", l.rows}});
  const auto map = [](const __nv_bfloat16* data, std::int64_t width, std::int64_t N, std::int64_t rows) {
    return data ? tensor_map(data, {width, N, rows}, {kPanel, kHeads, 1}) : CUtensorMap{};
  };
  const CUtensorMap pairs = tensor_map(a.pairs, {a.both > 0 ? 2 * kHeads : kHeads, l.rows * l.K}, {kPanel, kHalf});
  launch(
      ctx, key_tiles_kernel,
      {dim3(unsigned(a.panels), blocks(l.keys, kKeyRange), unsigned(key_parts(l.keys, a.panels))), dim3(kThreads), Layout::bytes},
      Sums{.listed = l.listed,
           .bounds = l.bounds,
           .sums = a.sums,
           .rows = l.rows,
           .K = l.K,
           .keys = l.keys,
           .width = a.panels * kPanel,
           .ranges = int(key_ranges(l.keys)),
           .head = int(a.head),
           .both = int(a.both),
           .first = int(a.first)},
      pairs, map(a.value0, a.both * kPanel, a.N, l.rows), map(a.value1, a.both * kPanel, a.N, l.rows),
      map(a.value2, a.width2, a.N, l.rows));
}

}  // namespace moetrain::ops::cuda
