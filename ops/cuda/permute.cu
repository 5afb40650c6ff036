// permute.cu -- a counting sort of slots in tiles, all of it integers; rows copied or summed where it says, bound by their bytes.
#include "ops/cuda/blas.h"
#include "ops/cuda/copy_rows.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/permute.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kAll = 0xffffffffU;
constexpr int kWarps = 8, kThreads = kWarps * kWarp;
constexpr int kScanThreads = kWarp * kWarp;
constexpr std::int64_t kMostRun = 512;  // consecutive slots of a warp; a block has a tile of kWarps runs
constexpr std::int64_t kMostExperts = (200 << 10) / (kWarps * sizeof(int));  // whose counters fit a block's shared memory

// The sum of x over the lanes up to this one.
__device__ std::int64_t inclusive_scan(std::int64_t x) {
  const int lane = threadIdx.x % kWarp;
  for (int up = 1; up < kWarp; up *= 2) {
    const std::int64_t other = __shfl_up_sync(kAll, x, up);
    if (lane >= up) x += other;
  }
  return x;
}

// grid (tiles), block (kThreads), shared E ints: in_tile[e, tile] = slots of expert e in the tile
__global__ void sort_slots_count_kernel(const std::int32_t* __restrict__ experts, int* __restrict__ in_tile, std::int64_t slots,
                                        std::int64_t E, std::int64_t run) {
  extern __shared__ int count[];
  for (std::int64_t e = threadIdx.x; e < E; e += kThreads) count[e] = 0;
  __syncthreads();  // waits for the zeros
  const std::int64_t begin = std::int64_t(blockIdx.x) * kWarps * run, end = min(slots, begin + kWarps * run);
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads)
    if (const int e = experts[i]; e >= 0) atomicAdd(&count[e], 1);
  __syncthreads();  // waits for every count
  for (std::int64_t e = threadIdx.x; e < E; e += kThreads) in_tile[e * gridDim.x + blockIdx.x] = count[e];
}

// grid (ceil(E / kWarps)), block (kThreads), a warp an expert: in_tile becomes the slots in the tiles before; counts[e] the sum
__global__ void sort_slots_scan_kernel(int* in_tile, std::int64_t* __restrict__ counts, std::int64_t tiles, std::int64_t E) {
  const std::int64_t e = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (e >= E) return;
  int* row = in_tile + e * tiles;
  std::int64_t before = 0;
  for (std::int64_t base = 0; base < tiles; base += kWarp) {
    const std::int64_t tile = base + lane, count = tile < tiles ? row[tile] : 0, sum = inclusive_scan(count);
    if (tile < tiles) row[tile] = int(before + sum - count);
    before += __shfl_sync(kAll, sum, kWarp - 1);
  }
  if (lane == 0) counts[e] = before;
}

// one block (kScanThreads)
__global__ void sort_slots_offsets_kernel(const std::int64_t* __restrict__ counts, std::int64_t* __restrict__ offsets,
                                          std::int64_t E) {
  __shared__ std::int64_t of_warp[kScanThreads / kWarp];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  std::int64_t before = 0;  // of the experts of earlier rounds
  for (std::int64_t base = 0; base < E; base += kScanThreads) {
    const std::int64_t e = base + threadIdx.x, count = e < E ? counts[e] : 0, sum = inclusive_scan(count);
    if (lane == kWarp - 1) of_warp[warp] = sum;
    __syncthreads();  // waits for the sum of every warp
    const std::int64_t up_to = inclusive_scan(of_warp[lane]);
    const std::int64_t of_earlier = __shfl_sync(kAll, up_to, max(warp - 1, 0));
    if (e < E) offsets[e] = before + (warp > 0 ? of_earlier : 0) + sum - count;
    before += __shfl_sync(kAll, up_to, kWarp - 1);
    __syncthreads();  // waits for the readers of the sums
  }
  if (threadIdx.x == 0) offsets[E] = before;
}

// Walks the run of a warp, 32 slots a step in their order, and moves the warp's counter of each slot's expert past it; with kPlace
// the counters are rows, and slot_row is written: -1 for a dropped slot.
template <bool kPlace>
__device__ void for_run(const std::int32_t* __restrict__ experts, std::int64_t slots, std::int64_t run, int* counters,
                        std::int64_t* __restrict__ slot_row) {
  const int lane = threadIdx.x % kWarp;
  const std::int64_t begin = (std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp) * run;
  for (std::int64_t base = begin; base < begin + run && base < slots; base += kWarp) {
    const std::int64_t i = base + lane;
    const int expert = i < slots ? experts[i] : -1;
    const unsigned int peers = __match_any_sync(kAll, expert);
    const int below = __popc(peers & ((1U << lane) - 1)), count = expert >= 0 ? counters[expert] : 0;
    __syncwarp();  // waits for the readers of the counters
    if (expert >= 0 && below == 0) counters[expert] = count + __popc(peers);
    if (kPlace && i < slots) slot_row[i] = expert >= 0 ? count + below : -1;
    __syncwarp();  // waits for the counters of this step
  }
}

// grid (tiles), block (kThreads), shared kWarps * E ints: next[w, e] is the row of warp w's next slot of expert e
__global__ void sort_slots_place_kernel(const std::int32_t* __restrict__ experts, const int* __restrict__ before_tile,
                                        const std::int64_t* __restrict__ offsets, std::int64_t* __restrict__ slot_row,
                                        std::int64_t slots, std::int64_t E, std::int64_t run) {
  extern __shared__ int next[];
  int* mine = next + threadIdx.x / kWarp * E;
  for (std::int64_t i = threadIdx.x; i < kWarps * E; i += kThreads) next[i] = 0;
  __syncthreads();  // waits for the zeros
  for_run<false>(experts, slots, run, mine, slot_row);
  __syncthreads();  // waits for the counts of every warp
  for (std::int64_t e = threadIdx.x; e < E; e += kThreads) {
    int row = int(offsets[e]) + before_tile[e * gridDim.x + blockIdx.x];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next[w * E + e];
      next[w * E + e] = row;
      row += count;
    }
  }
  __syncthreads();  // waits for the first row of every warp and expert
  for_run<true>(experts, slots, run, mine, slot_row);
}

// grid (ceil(T / blockDim.y)), block (threads_for_rows): a unit of x is read once and written to its K rows
template <class Unit>
__global__ void spread_rows_kernel(const Unit* __restrict__ x, const std::int64_t* __restrict__ slot_row, Unit* __restrict__ rows,
                                   std::int64_t T, std::int64_t K, std::int64_t units) {
  const std::int64_t t = std::int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (t >= T) return;
#pragma unroll 2
  for (std::int64_t i = threadIdx.x; i < units; i += blockDim.x) {
    const Unit value = x[t * units + i];
    for (std::int64_t k = 0; k < K; ++k)
      if (const std::int64_t row = slot_row[t * K + k]; row >= 0) rows[row * units + i] = value;
  }
}

// What a dropped slot adds: read like a row, for a branch would let fewer loads be under way at once.
__device__ alignas(16) const std::uint32_t kNoRow[4] = {};

// grid (ceil(T / blockDim.y)), block (threads_for_rows)
template <class X, int kCount>
__global__ void collect_rows_kernel(const X* __restrict__ rows, const std::int64_t* __restrict__ slot_row,
                                    const float* __restrict__ weights, X* __restrict__ y, bool add, std::int64_t T,
                                    std::int64_t K, std::int64_t D) {
  const std::int64_t t = std::int64_t(blockIdx.x) * blockDim.y + threadIdx.y;
  if (t >= T) return;
  for (std::int64_t d = std::int64_t(threadIdx.x) * kCount; d < D; d += std::int64_t(blockDim.x) * kCount) {
    Floats<kCount> sum{};
#pragma unroll 8
    for (std::int64_t k = 0; k < K; ++k) {
      const std::int64_t at = slot_row[t * K + k];
      const auto row = load_floats<kCount>(at < 0 ? reinterpret_cast<const X*>(kNoRow) : rows + at * D + d);
      const float w = weights ? weights[t * K + k] : 1.0F;
      for (int i = 0; i < kCount; ++i) sum.at[i] += w * row.at[i];
    }
    if (add) {
      const auto old = load_floats<kCount>(y + t * D + d);
      for (int i = 0; i < kCount; ++i) sum.at[i] += old.at[i];
    }
    store_floats<kCount>(y + t * D + d, sum);
  }
}

// grid (ceil(R / kThreads)), block (kThreads)
__global__ void place_runs_kernel(const std::int64_t* __restrict__ begins, const std::int64_t* __restrict__ places,
                                  std::int64_t* __restrict__ to, std::int64_t runs, std::int64_t R) {
  const std::int64_t r = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (r >= R) return;
  std::int64_t low = 0, high = runs;  // the run of r is in [low, high)
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (begins[middle] <= r ? low : high) = middle;
  }
  to[r] = places[low] + r - begins[low];
}

// grid (ceil(T K / kWarps)), block (kThreads), a warp a slot
template <class X, int kCount>
__global__ void collect_rows_backward_kernel(const X* __restrict__ dy, const std::int64_t* __restrict__ slot_row,
                                             const float* __restrict__ weights, X* __restrict__ drows, std::int64_t slots,
                                             std::int64_t K, std::int64_t D) {
  const std::int64_t slot = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (slot >= slots) return;
  const std::int64_t row = slot_row[slot];
  if (row < 0) return;
  const float w = weights[slot];
  const X* from = dy + slot / K * D;
  X* to = drows + row * D;
#pragma unroll 4
  for (std::int64_t d = threadIdx.x % kWarp * kCount; d < D; d += kWarp * kCount) {
    auto x = load_floats<kCount>(from + d);
    for (int i = 0; i < kCount; ++i) x.at[i] *= w;
    store_floats<kCount>(to + d, x);
  }
}

// grid (ceil(slots / kThreads)), block (kThreads)
__global__ void weight_gradients_kernel(const float* __restrict__ dots, const std::int64_t* __restrict__ slot_row,
                                        const float* __restrict__ weights, float* __restrict__ dweights, std::int64_t slots) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= slots) return;
  const std::int64_t row = slot_row[i];
  dweights[i] = row < 0 || weights[i] == 0 ? 0.0F : dots[row] / weights[i];
}

template <class X, int kCount>
void collect(Context& ctx, const CollectRows& a) {
  const std::int64_t T = a.y.shape[0], D = a.y.shape[1], K = a.slot_row.shape[1];
  const dim3 threads = threads_for_rows((D + kCount - 1) / kCount);
  launch(ctx, collect_rows_kernel<device_t<X>, kCount>, {blocks(T, threads.y), threads}, device_pointer<X>(a.rows),
         a.slot_row.as<std::int64_t>(), device_pointer<float>(a.weights), device_pointer<X>(a.y), a.add, T, K, D);
}

template <class X, int kCount>
void collect_backward(Context& ctx, const CollectRowsBackward& a) {
  const std::int64_t D = a.dy.shape[1], K = a.slot_row.shape[1], slots = a.slot_row.count();
  launch(ctx, collect_rows_backward_kernel<device_t<X>, kCount>, {blocks(slots, kWarps), kThreads}, device_pointer<X>(a.dy),
         a.slot_row.as<std::int64_t>(), a.weights.as<float>(), device_pointer<X>(a.drows), slots, K, D);
}

}  // namespace

void cuda::sort_slots(Context& ctx, const SortSlots& a) {
  const std::int64_t E = a.counts.shape[0], slots = a.experts.count();
  const std::int64_t run = std::clamp<std::int64_t>(slots / (ctx.blas->multiprocessors() * kWarps) / kWarp * kWarp, kWarp,
                                                    kMostRun);  // fills the device
  const std::int64_t tiles = std::max<std::int64_t>(blocks(slots, kWarps * run), 1);
  check(E <= kMostExperts, "sort_slots: more experts than a block counts", {{"E", E}, {"most", kMostExperts}});
  check(slots <= 0x7fffffff, "sort_slots: more slots than fit 32 bits", {{"slots", slots}});
  Scope scope(ctx.scratch);
  int* in_tile = ctx.scratch.take(DType::i32, {E, tiles}).as<std::int32_t>();
  const Tensor offsets = a.offsets.present() ? a.offsets : ctx.scratch.take(DType::i64, {E + 1});
  const auto* experts = a.experts.as<std::int32_t>();
  launch(ctx, sort_slots_count_kernel, {blocks(tiles, 1), kThreads, std::size_t(E) * sizeof(int)}, experts, in_tile, slots, E, run);
  launch(ctx, sort_slots_scan_kernel, {blocks(E, kWarps), kThreads}, in_tile, a.counts.as<std::int64_t>(), tiles, E);
  launch(ctx, sort_slots_offsets_kernel, {1, kScanThreads}, a.counts.as<std::int64_t>(), offsets.as<std::int64_t>(), E);
  if (slots > 0)
    launch(ctx, sort_slots_place_kernel, {blocks(tiles, 1), kThreads, std::size_t(kWarps * E) * sizeof(int)}, experts, in_tile,
           offsets.as<std::int64_t>(), a.slot_row.as<std::int64_t>(), slots, E, run);
}

void cuda::spread_rows(Context& ctx, const SpreadRows& a) {
  const std::int64_t T = a.x.shape[0], K = a.slot_row.shape[1], bytes = a.x.shape[1] * size_of(a.x.dtype);
  if (bytes == 0) return;
  with_unit(address(a.x.data) | address(a.rows.data) | std::uint64_t(bytes), [&](auto unit) {
    using Unit = decltype(unit);
    const std::int64_t units = bytes / std::int64_t(sizeof(Unit));
    const dim3 threads = threads_for_rows(units);
    launch(ctx, spread_rows_kernel<Unit>, {blocks(T, threads.y), threads}, static_cast<const Unit*>(a.x.data),
           a.slot_row.as<std::int64_t>(), static_cast<Unit*>(a.rows.data), T, K, units);
  });
}

void cuda::collect_rows(Context& ctx, const CollectRows& a) {
  with_storage(a.rows.dtype, [&](auto storage) {
    using S = decltype(storage);
    constexpr int kPack = kPackOf<S>;
    in_packs<kPack>(a.y.shape[1], {a.rows, a.y}) ? collect<S, kPack>(ctx, a) : collect<S, 1>(ctx, a);
  });
}

void cuda::collect_rows(Context& ctx, const CollectRowsBackward& a) {
  with_storage(a.drows.dtype, [&](auto storage) {
    using S = decltype(storage);
    constexpr int kPack = kPackOf<S>;
    in_packs<kPack>(a.dy.shape[1], {a.dy, a.drows}) ? collect_backward<S, kPack>(ctx, a) : collect_backward<S, 1>(ctx, a);
  });
}

void cuda::weight_gradients(Context& ctx, const WeightGradients& a) {
  check(a.dots.dtype == DType::f32, "weight_gradients: CUDA has f32 only", {{"dtype", std::int64_t(a.dots.dtype)}});
  const std::int64_t slots = a.slot_row.count();
  launch(ctx, weight_gradients_kernel, {blocks(slots, kThreads), kThreads}, a.dots.as<float>(), a.slot_row.as<std::int64_t>(),
         a.weights.as<float>(), a.dweights.as<float>(), slots);
}

void cuda::place_runs(Context& ctx, const PlaceRuns& a) {
  const std::int64_t R = a.to.count();
  launch(ctx, place_runs_kernel, {blocks(R, kThreads), kThreads}, a.begins.as<std::int64_t>(), a.places.as<std::int64_t>(),
         a.to.as<std::int64_t>(), a.places.count(), R);
}

void cuda::move_rows(Context& ctx, const MoveRows& a) {
  const std::int64_t row = a.x.shape[1] * size_of(a.x.dtype);
  const auto* to = a.to.as<std::int64_t>();
  copy_rows<std::int64_t>(
      ctx, {.from = a.x.data, .to = a.y.data, .rows = a.x.shape[0], .bytes = row, .from_stride = row, .to_stride = row},
      a.gather ? to : nullptr, a.gather ? nullptr : to);
}

}  // namespace moetrain::ops
