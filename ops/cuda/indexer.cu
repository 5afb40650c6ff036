// indexer.cu -- which kernels run; the exact selection of the best keys of a row of scores; and scores and loss for any width and
// for f32, in plain arithmetic. bf16 in the model's widths goes to indexer_tiles.cu and indexer_loss_tiles.cu.
#include <algorithm>
#include <bit>

#include "ops/cuda/indexer.cuh"
#include "ops/cuda/key_sums.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr std::int64_t kBlocks = IndexerLoss::kBlocks;  // rows in flight

// ---- scores, plainly

constexpr int kKeys = 128, kTileHeads = 32, kDepth = 16, kScoreThreads = 256;

// grid (rows, ceil(longest / kKeys)), block (kScoreThreads): scores (rows, longest) of queries begin, begin + 1, ... over the
// causal keys of their documents; a warp takes 4 heads of a tile, a lane 4 keys
template <class T>
__global__ void __launch_bounds__(kScoreThreads, 4)
    scores_kernel(const T* __restrict__ q, const T* __restrict__ k, const float* __restrict__ weights, DocumentList documents,
                  float* __restrict__ scores, std::int64_t begin, std::int64_t longest, std::int64_t J, std::int64_t H) {
  __shared__ float keys[kDepth][kKeys + 4], heads[kDepth][kTileHeads];
  __shared__ float sums[kScoreThreads / kWarp][kKeys];
  const std::int64_t t = begin + blockIdx.x;
  const KeyRange seen = documents.seen_by(t);
  const std::int64_t at = seen.begin + std::int64_t(blockIdx.y) * kKeys;
  if (at >= seen.end) return;
  const int count = int(min(seen.end - at, std::int64_t(kKeys)));  // keys of the tile
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float score[4] = {};
  for (std::int64_t j = 0; j < J; j += kTileHeads) {
    float dots[4][4] = {};
    for (std::int64_t h = 0; h < H; h += kDepth) {
      __syncthreads();  // waits for the readers of the last tile
      for (unsigned int i = threadIdx.x; i < kKeys * kDepth; i += kScoreThreads) {
        const std::int64_t c = h + i % kDepth;
        keys[i % kDepth][i / kDepth] = int(i / kDepth) < count && c < H ? to_float(k[(at + i / kDepth) * H + c]) : 0.0F;
      }
      for (unsigned int i = threadIdx.x; i < kTileHeads * kDepth; i += kScoreThreads) {
        const std::int64_t head = j + i / kDepth, c = h + i % kDepth;
        heads[i % kDepth][i / kDepth] = head < J && c < H ? to_float(q[(t * J + head) * H + c]) : 0.0F;
      }
      __syncthreads();  // waits for the tile
      for (int c = 0; c < kDepth; ++c) {
        const auto key = load<4>(&keys[c][4 * lane]), head = load<4>(&heads[c][4 * warp]);
#pragma unroll
        for (int a = 0; a < 4; ++a)
#pragma unroll
          for (int b = 0; b < 4; ++b) dots[a][b] += head.at[a] * key.at[b];
      }
    }
    for (int a = 0; a < 4; ++a) {
      const std::int64_t head = j + 4 * warp + a;
      if (head >= J) break;
      const float weight = weights[t * J + head];
      for (int b = 0; b < 4; ++b) score[b] += weight * relu(dots[a][b]);
    }
  }
  for (int b = 0; b < 4; ++b) sums[warp][4 * lane + b] = score[b];
  __syncthreads();  // waits for the sums of all warps
  if (int(threadIdx.x) >= count) return;
  float sum = 0;
  for (int w = 0; w < kScoreThreads / kWarp; ++w) sum += sums[w][threadIdx.x];
  scores[std::int64_t(blockIdx.x) * longest + std::int64_t(blockIdx.y) * kKeys + threadIdx.x] = sum;
}

// ---- selection

constexpr int kSelectThreads = 512, kDigit = 11, kBins = 1 << kDigit;
constexpr int kSegment = 4 * kWarp;  // keys that a warp sorts in registers

// A score as a number that sorts as the contract says: larger is better, a NaN last, -0 as 0. With its place below, no two are
// equal.
__device__ std::uint32_t key_of(float score) {
  if (isnan(score)) score = -INFINITY;
  if (score == 0) score = 0;
  const std::uint32_t bits = __float_as_uint(score);
  return bits & 0x80000000U ? ~bits : bits | 0x80000000U;
}

__device__ float score_of(std::uint32_t key) { return __uint_as_float(key & 0x80000000U ? key ^ 0x80000000U : ~key); }

// Sorts `size` (a power of two, at least kSegment) ranks from the largest down. All threads of the block; bitonic: strides below
// kSegment in the registers of a warp, four neighbours a lane.
__device__ void sort_ranks(std::uint64_t* ranks, std::int64_t size) {
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto in_registers = [&](std::int64_t from_run, std::int64_t to_run) {
    for (std::int64_t base = std::int64_t(warp) * kSegment; base < size; base += kSelectThreads / kWarp * kSegment) {
      const std::int64_t mine = base + 4 * lane;
      std::uint64_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = ranks[mine + i];
      for (std::int64_t run = from_run; run <= to_run; run *= 2) {
        for (int stride = int(min(run / 2, std::int64_t(kSegment / 2))); stride >= 4; stride /= 2) {
          const bool larger = ((mine & run) == 0) == ((mine & stride) == 0);  // do I keep the larger of the two?
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const std::uint64_t other = __shfl_xor_sync(0xffffffffU, x[i], stride / 4);
            x[i] = (x[i] > other) == larger ? x[i] : other;
          }
        }
        const auto swap = [&](int i, int j) {
          const bool larger_first = ((mine + i) & run) == 0;
          if ((x[i] > x[j]) != larger_first) {
            const std::uint64_t kept = x[i];
            x[i] = x[j];
            x[j] = kept;
          }
        };
        if (run > 2) swap(0, 2), swap(1, 3);
        swap(0, 1), swap(2, 3);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) ranks[mine + i] = x[i];
    }
    __syncthreads();  // waits for the segments of all warps
  };
  in_registers(2, kSegment);
  for (std::int64_t run = 2 * kSegment; run <= size; run *= 2) {
    for (std::int64_t stride = run / 2; stride >= kSegment; stride /= 2) {
      for (std::int64_t pair = threadIdx.x; pair < size / 2; pair += kSelectThreads) {
        const std::int64_t low = (pair & ~(stride - 1)) * 2 | (pair & (stride - 1)), high = low | stride;
        const std::uint64_t a = ranks[low], b = ranks[high];
        if ((a > b) != ((low & run) == 0)) ranks[low] = b, ranks[high] = a;
      }
      __syncthreads();  // waits for the pairs of all threads
    }
    in_registers(run, run);
  }
}

constexpr int kMostInBin = 64;              // ranks of a bin that are put in order one by one
constexpr std::int64_t kMostBinned = 8192;  // ranks of which a block's memory holds a second copy

// grid (rows), block (kSelectThreads), shared 8 * size bytes where spill is null, up to kMostBinned 16 * size: indices (K) of row
// begin + blockIdx.x from its scores (longest). size: a power of two from kSegment on that holds min(K, longest); spill (rows,
// size).
__global__ void __launch_bounds__(kSelectThreads, 4)
    select_kernel(const float* __restrict__ scores, DocumentList documents, std::int32_t* __restrict__ indices,
                  std::uint64_t* __restrict__ spill, std::int64_t begin, std::int64_t longest, std::int64_t K, std::int64_t size) {
  extern __shared__ std::uint64_t in_shared[];
  __shared__ std::int32_t bins[kBins], of_warp[kSelectThreads / kWarp];
  __shared__ std::uint32_t lowest, highest, found, above, filled;
  constexpr int kEach = kBins / kSelectThreads;
  const std::int64_t t = begin + blockIdx.x;
  const KeyRange seen = documents.seen_by(t);
  const int first = int(seen.begin), n = int(seen.end) - first, taken = int(min(K, std::int64_t(n)));
  const int thread = int(threadIdx.x), place_bits = 32 - __clz(n);
  const int lane = thread % kWarp, warp = thread / kWarp, highest_bin = kBins - 1 - thread * kEach;  // a thread's, going down
  const std::uint64_t places = (std::uint64_t(1) << place_bits) - 1;
  std::uint64_t* const ranks = spill ? spill + blockIdx.x * size : in_shared;
  const bool has_copy = !spill && size <= kMostBinned;
  const float* const row = scores + blockIdx.x * longest;
  const auto rank_at = [&](int s) { return std::uint64_t(key_of(row[s])) << place_bits | std::uint64_t(s); };
  // The least and the greatest key over the block, to `lowest` and `highest`.
  const auto extremes = [&](std::uint32_t low, std::uint32_t high) {
    low = __reduce_min_sync(0xffffffffU, low), high = __reduce_max_sync(0xffffffffU, high);
    if (lane == 0) atomicMin(&lowest, low), atomicMax(&highest, high);
  };
  // How many are in the bins of the threads before.
  const auto in_bins_before = [&](std::int32_t mine) {
    std::int32_t before = mine;
    for (int step = 1; step < kWarp; step *= 2) {
      const std::int32_t other = __shfl_up_sync(0xffffffffU, before, step);
      if (lane >= step) before += other;
    }
    if (lane == kWarp - 1) of_warp[warp] = before;
    before -= mine;
    __syncthreads();  // waits for the sums of all warps
    for (int w = 0; w < warp; ++w) before += of_warp[w];
    return before;
  };
  const auto clear_bins = [&] {
    for (int b = thread; b < kBins; b += kSelectThreads) bins[b] = 0;
    __syncthreads();  // waits for empty bins
  };
  // From full bins: where each begins, the highest first. `found` becomes the bin of the last rank taken; is none too full from
  // there up?
  const auto begin_bins = [&] {
    __syncthreads();  // waits for full bins
    std::int32_t mine = 0;
    for (int b = 0; b < kEach; ++b) mine += bins[highest_bin - b];
    std::int32_t before = in_bins_before(mine);
    bool crowded = false;
    for (int b = 0; b < kEach; ++b) {
      const std::int32_t count = bins[highest_bin - b];
      bins[highest_bin - b] = before;
      crowded |= before < taken && count > kMostInBin;
      if (before < taken && taken <= before + count) found = std::uint32_t(highest_bin - b);
      before += count;
    }
    return !__syncthreads_or(crowded);  // and waits for the beginnings
  };
  // Ranks in their bins, which hold where they end: each finds its place among those of its bin.
  const auto order_bins = [&](const std::uint64_t* binned, auto bin_of) {
    __syncthreads();  // waits for the ranks in their bins
    for (int i = thread; i < bins[found]; i += kSelectThreads) {
      const std::uint64_t rank = binned[i];
      const int b = bin_of(rank), end = bins[b];
      int at = b == kBins - 1 ? 0 : bins[b + 1];
      for (int other = at; other < end; ++other) at += binned[other] > rank;
      if (at < taken) indices[t * K + at] = first + std::int32_t(rank & places);
    }
  };
  // How many bits from the lowest on tell ranks of keys in [lowest, highest] apart.
  const auto bits_apart = [&] {
    return 64 - __clzll(std::int64_t(std::uint64_t(lowest) << place_bits ^ (std::uint64_t(highest) << place_bits | places)));
  };
  if (thread == 0) lowest = 0xffffffffU, highest = 0, filled = 0;
  for (std::int64_t i = taken + thread; i < K; i += kSelectThreads) indices[t * K + i] = -1;
  __syncthreads();  // waits for the starting values
  std::uint32_t low = 0xffffffffU, high = 0;
#pragma unroll 4
  for (int s = thread; s < n; s += kSelectThreads) {
    const std::uint32_t key = key_of(row[s]);
    low = min(low, key), high = max(high, key);
  }
  extremes(low, high);
  clear_bins();  // and waits for the extremes

  // Bins of equal width in score: one count of them selects, and each rank taken is soon among its like.
  const float bottom = score_of(lowest), steps = float(kBins - 1) / (score_of(highest) - bottom);
  if (has_copy && isfinite(steps)) {
    const auto bin_of = [&](float score) { return int((score - bottom) * steps); };  // rounding keeps the order
#pragma unroll 4
    for (int s = thread; s < n; s += kSelectThreads) atomicAdd(&bins[bin_of(row[s])], 1);
    if (begin_bins()) {
      const int last = int(found);
#pragma unroll 4
      for (int s = thread; s < n; s += kSelectThreads) {
        const int b = bin_of(row[s]);
        if (b >= last) in_shared[atomicAdd(&bins[b], 1)] = rank_at(s);
      }
      order_bins(in_shared, [&](std::uint64_t rank) { return bin_of(score_of(std::uint32_t(rank >> place_bits))); });
      return;
    }
  }

  int shift = 0;
  std::uint64_t least = 0;  // ranks >> shift that are at least this are taken
  if (n > K) {
    // all ranks agree in the bits from `top` up; the next digit down is looked at, until a bin is taken whole
    int top = bits_apart();
    least = (std::uint64_t(highest) << place_bits) >> top;
    std::int32_t need = std::int32_t(K);
    for (;;) {
      shift = max(top - kDigit, 0);
      const auto mask = std::uint32_t((1U << (top - shift)) - 1);
      clear_bins();
      for (int s = thread; s < n; s += kSelectThreads) {
        const std::uint64_t rank = rank_at(s);
        if (rank >> top == least) atomicAdd(&bins[std::uint32_t(rank >> shift) & mask], 1);
      }
      __syncthreads();  // waits for full bins
      std::int32_t mine = 0;
      for (int b = 0; b < kEach; ++b) mine += bins[highest_bin - b];
      std::int32_t before = in_bins_before(mine);
      if (before < need && need <= before + mine) {  // who holds the need-th rank says so
        int b = highest_bin;
        while (before + bins[b] < need) before += bins[b--];
        found = std::uint32_t(b), above = std::uint32_t(before);
      }
      __syncthreads();  // waits for the bin
      least = least << (top - shift) | found;
      need -= std::int32_t(above);
      const bool whole = bins[found] == need;
      __syncthreads();   // waits for the readers of the bins
      if (whole) break;  // at shift 0 at the latest: ranks differ from one another
      top = shift;
    }
    if (thread == 0) lowest = 0xffffffffU, highest = 0;
    __syncthreads();  // waits for the starting values
  }

  low = 0xffffffffU, high = 0;  // of those taken
  for (int s = thread; s - thread < n; s += kSelectThreads) {
    const std::uint64_t rank = s < n ? rank_at(s) : 0;
    const bool in = s < n && rank >> shift >= least;
    const unsigned int votes = __ballot_sync(0xffffffffU, in);
    std::uint32_t at = 0;
    if (lane == 0 && votes) at = atomicAdd(&filled, __popc(votes));  // any order: what follows sorts
    at = __shfl_sync(0xffffffffU, at, 0) + __popc(votes & ((1U << lane) - 1));
    if (!in) continue;
    ranks[at] = rank;
    low = min(low, std::uint32_t(rank >> place_bits)), high = max(high, std::uint32_t(rank >> place_bits));
  }
  extremes(low, high);
  clear_bins();  // and waits for the ranks and their extremes

  // In order: by their highest bits into bins; where too many share a bin, or there is no room for a second copy, by comparing.
  const int sort_shift = max(bits_apart() - kDigit, 0);
  const auto bin_of = [&](std::uint64_t rank) { return int(std::uint32_t(rank >> sort_shift) & std::uint32_t(kBins - 1)); };
  if (has_copy) {
    std::uint64_t* const binned = ranks + size;
    for (int i = thread; i < taken; i += kSelectThreads) atomicAdd(&bins[bin_of(ranks[i])], 1);
    if (begin_bins()) {
      for (int i = thread; i < taken; i += kSelectThreads) binned[atomicAdd(&bins[bin_of(ranks[i])], 1)] = ranks[i];
      order_bins(binned, bin_of);
      return;
    }
  }
  int sorted = kSegment;  // ranks: the power of two that holds those taken
  while (sorted < taken) sorted *= 2;
  for (int i = taken + thread; i < sorted; i += kSelectThreads) ranks[i] = 0;  // below every rank
  __syncthreads();                                                             // waits for these
  sort_ranks(ranks, sorted);
  for (int i = thread; i < taken; i += kSelectThreads) indices[t * K + i] = first + std::int32_t(ranks[i] & places);
}

void check_aligned(std::initializer_list<ConstTensor> tensors) {  // what views by rows keep
  check(in_packs<8>(8, tensors), "indexer: a tensor does not begin at a multiple of 16 bytes");
}

template <class Storage>
void select(Context& ctx, const IndexerSelect& a) {
  const std::int64_t T = a.q.shape[0], J = a.q.shape[1], H = a.q.shape[2], K = a.indices.shape[1];
  const std::int64_t longest = a.documents.most_keys();
  const std::int64_t size = std::int64_t(std::bit_ceil(std::uint64_t(std::max<std::int64_t>(std::min(K, longest), kSegment))));
  const DocumentList documents(a.documents);
  if (a.on_tensor_cores()) check_aligned({a.q, a.k});
  const Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  const std::int64_t chunk = scratch.scores.shape[0];
  float* const scores = scratch.scores.template as<float>();
  const auto shared = std::size_t(scratch.spill.present() ? 0 : size <= kMostBinned ? 16 * size : 8 * size);
  for (std::int64_t begin = 0; begin < T; begin += chunk) {
    const std::int64_t rows = std::min(chunk, T - begin);
    if (a.on_tensor_cores())
      index_score_tiles(ctx, a, scores, begin, rows);
    else
      launch(ctx, scores_kernel<device_t<Storage>>, {dim3(blocks(rows, 1), blocks(longest, kKeys)), dim3(kScoreThreads)},
             device_pointer<Storage>(a.q), device_pointer<Storage>(a.k), a.weights.as<float>(), documents, scores, begin, longest,
             J, H);
    launch(ctx, select_kernel, {blocks(rows, 1), dim3(kSelectThreads), shared}, scores, documents, a.indices.as<std::int32_t>(),
           static_cast<std::uint64_t*>(scratch.spill.data), begin, longest, K, size);
  }
}

// ---- loss, plainly

constexpr int kHeads = 8, kLossThreads = kHeads * kWarp;

template <class T>
struct LossInputs {
  const T *q, *k;
  const float *weights, *target;
  const std::int32_t* indices;  // null: all causal keys
  std::int64_t keys, J, H, W;
  float gradient_scale;
  // the key in slot i of row t, -1: none
  __device__ std::int64_t position(std::int64_t t, const KeyRange& seen, std::int64_t i) const {
    if (!indices) return seen.begin + i < seen.end ? seen.begin + i : -1;
    const std::int32_t at = indices[t * W + i];
    if (at >= keys) __trap();  // no position: as the CPU, refuse rather than read what is not there
    return at;
  }
};

// grid (up to kBlocks), block (kLossThreads), shared kHeads * H floats: rows [begin, end). u (end - begin, J, W) becomes du where
// gradients are wanted (dq not null); scores (gridDim.x, W).
template <class T>
__global__ void loss_kernel(const LossInputs<T> in, DocumentList documents, float* __restrict__ u_all, float* __restrict__ scores,
                            float* __restrict__ row_loss, T* __restrict__ dq, float* __restrict__ dweights, std::int64_t begin,
                            std::int64_t end) {
  extern __shared__ float query[];  // (kHeads, H)
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  float* const score = scores + std::int64_t(blockIdx.x) * in.W;
  for (std::int64_t t = begin + blockIdx.x; t < end; t += gridDim.x) {
    const KeyRange seen = documents.seen_by(t);
    const std::int64_t slots = in.indices ? in.W : seen.end - seen.begin;
    float* const u = u_all + (t - begin) * in.J * in.W;
    for (std::int64_t j = 0; j < in.J; j += kHeads) {
      __syncthreads();  // waits for the readers of the last heads' query, and of the last row
      for (std::int64_t i = threadIdx.x; i < kHeads * in.H; i += kLossThreads)
        query[i] = j + i / in.H < in.J ? to_float(in.q[(t * in.J + j) * in.H + i]) : 0.0F;
      __syncthreads();  // waits for the query
      for (std::int64_t i = warp; i < slots; i += kHeads) {
        const std::int64_t at = in.position(t, seen, i);
        float dots[kHeads] = {};
        if (at >= 0)
          for (std::int64_t h = lane; h < in.H; h += kWarp) {
            const float x = to_float(in.k[at * in.H + h]);
#pragma unroll
            for (int d = 0; d < kHeads; ++d) dots[d] += query[d * in.H + h] * x;
          }
        float sum = j == 0 ? 0.0F : score[i];
#pragma unroll
        for (int d = 0; d < kHeads; ++d) {
          const float dot = warp_sum(dots[d]);
          if (j + d >= in.J) continue;
          sum += in.weights[t * in.J + j + d] * relu(dot);
          if (lane == 0) u[(j + d) * in.W + i] = dot;
        }
        __syncwarp();  // every lane has read the score that lane 0 writes
        if (lane == 0) score[i] = at < 0 ? -INFINITY : sum;
        __syncwarp();  // and reads it again for the next heads
      }
    }
    __syncthreads();  // waits for the scores
    float top = -INFINITY, count = 0, total = 0, sum = 0, divergence = 0;
    for (std::int64_t i = lane; i < slots; i += kWarp) top = fmaxf(top, score[i]);  // every warp for itself
    for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, lanes));
    const float* const target = in.target + t * in.W;
    for (std::int64_t i = threadIdx.x; i < slots; i += kLossThreads) {
      if (in.position(t, seen, i) < 0) continue;
      count += 1, total += target[i], sum += expf(score[i] - top);
    }
    count = block_sum(count), total = block_sum(total), sum = block_sum(sum);
    const float lse = top + logf(sum), share = 1.0F / fmaxf(total, 1e-10F);
    for (std::int64_t i = threadIdx.x; i < slots; i += kLossThreads) {
      float slope = 0;
      if (count > 1 && in.position(t, seen, i) >= 0) {
        const float p = target[i] * share, log_pi = score[i] - lse;
        if (p > 0) divergence += p * (logf(p) - log_pi);
        slope = in.gradient_scale * (expf(log_pi) - p);
      }
      score[i] = slope;  // from here on dI
    }
    divergence = block_sum(divergence);
    if (threadIdx.x == 0) row_loss[t] = divergence;
    if (!dq) continue;
    __syncthreads();  // waits for dI
    for (std::int64_t j = warp; j < in.J; j += kHeads) {
      const float weight = in.weights[t * in.J + j];
      float* const uj = u + j * in.W;
      float dw = 0;
      for (std::int64_t i = lane; i < slots; i += kWarp) {
        const bool there = in.position(t, seen, i) >= 0;
        dw += there ? score[i] * relu(uj[i]) : 0.0F;
        uj[i] = there && uj[i] > 0 ? score[i] * weight : 0.0F;
      }
      dw = warp_sum(dw);
      if (lane == 0) dweights[t * in.J + j] = dw;
    }
    __syncthreads();  // waits for du
    for (std::int64_t j = 0; j < in.J; j += kHeads)
      for (std::int64_t h = threadIdx.x; h < in.H; h += kLossThreads) {
        float sums[kHeads] = {};
        for (std::int64_t i = 0; i < slots; ++i) {
          const std::int64_t at = in.position(t, seen, i);
          if (at < 0) continue;
          const float x = to_float(in.k[at * in.H + h]);
#pragma unroll
          for (int d = 0; d < kHeads; ++d)
            if (j + d < in.J) sums[d] += u[(j + d) * in.W + i] * x;
        }
#pragma unroll
        for (int d = 0; d < kHeads; ++d)
          if (j + d < in.J) dq[(t * in.J + j + d) * in.H + h] = from_float<T>(sums[d]);
      }
  }
}

// grid (rows, ceil(keys / 256)), block (256): the slot of every key in rows that list all causal keys in order
__global__ void causal_slots_kernel(DocumentList documents, std::int32_t* __restrict__ slots, std::int64_t begin, std::int64_t rows,
                                    std::int64_t keys) {
  const std::int64_t s = std::int64_t(blockIdx.y) * blockDim.x + threadIdx.x, row = blockIdx.x, t = begin + row;
  if (s >= keys) return;
  const auto [first, end] = documents.seen_by(t);
  slots[s * rows + row] = first <= s && s < end ? std::int32_t(s - first) : -1;
}

// one block of 256 threads: loss += the sum of row_loss (rows), in a fixed order
__global__ void loss_sum_kernel(const float* __restrict__ row_loss, float* __restrict__ loss, std::int64_t rows) {
  __shared__ double sums[256];
  double sum = 0;
  for (std::int64_t t = threadIdx.x; t < rows; t += 256) sum += row_loss[t];
  sums[threadIdx.x] = sum;
  for (unsigned int half = 128; half > 0; half /= 2) {
    __syncthreads();  // waits for the last sums
    if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss += float(sums[0]);
}

template <class Storage>
void loss(Context& ctx, const IndexerLoss& a, const IndexerLoss::Scratch& scratch) {
  using T = device_t<Storage>;
  const std::int64_t tokens = a.q.shape[0], J = a.q.shape[1], H = a.q.shape[2], W = a.target.shape[1];
  const std::int64_t keys = a.k.shape[0];
  const bool gradients = a.dq.present();
  const DocumentList documents(a.documents);
  const LossInputs<T> in{.q = device_pointer<Storage>(a.q),
                         .k = device_pointer<Storage>(a.k),
                         .weights = a.weights.as<float>(),
                         .target = a.target.as<float>(),
                         .indices = a.indices.present() ? a.indices.as<std::int32_t>() : nullptr,
                         .keys = keys,
                         .J = J,
                         .H = H,
                         .W = W,
                         .gradient_scale = float(a.gradient_scale)};
  const std::int64_t chunk = scratch.u.shape[0];
  for (std::int64_t begin = 0; begin < tokens; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, tokens), rows = end - begin;
    launch(ctx, loss_kernel<T>, {blocks(std::min(rows, kBlocks), 1), dim3(kLossThreads), std::size_t(kHeads * H) * sizeof(float)},
           in, documents, scratch.u.template as<float>(), scratch.scores.template as<float>(),
           scratch.row_loss.template as<float>(), device_pointer<Storage>(a.dq), gradients ? a.dweights.as<float>() : nullptr,
           begin, end);
    if (!gradients) continue;
    std::int32_t* const slots = scratch.slots.template as<std::int32_t>();
    if (in.indices)
      invert(ctx, in.indices + begin * W, slots, rows, W, keys);
    else
      launch(ctx, causal_slots_kernel, {dim3(blocks(rows, 1), blocks(keys, 256)), dim3(256)}, documents, slots, begin, rows, keys);
    sum_keys(ctx, KeySums<T>{.terms = {{scratch.u.template as<float>(), in.q + begin * J * H, H, 0, H}},
                             .slots = slots,
                             .sums = scratch.dk.template as<float>(),
                             .keys = keys,
                             .rows = rows,
                             .N = J,
                             .K = W,
                             .width = H,
                             .first = begin == 0});
  }
  if (tokens == 0) set_zero(ctx, {scratch.dk});  // no row wrote the sums
  if (gradients) store_sums(ctx, scratch.dk.template as<float>(), device_pointer<Storage>(a.dk), 1, keys, H, 0, H);
}

}  // namespace

void cuda::indexer_select(Context& ctx, const IndexerSelect& a) {
  with_storage(a.q.dtype, [&](auto storage) { select<decltype(storage)>(ctx, a); });
}
void cuda::indexer_loss(Context& ctx, const IndexerLoss& a) {
  const Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  if (a.on_tensor_cores()) {
    check_aligned({a.q, a.k, a.dq});
    index_loss_tiles(ctx, a, scratch);
  } else
    with_storage(a.q.dtype, [&](auto storage) { loss<decltype(storage)>(ctx, a, scratch); });
  launch(ctx, loss_sum_kernel, {dim3(1), dim3(256)}, scratch.row_loss.as<float>(), a.loss.as<float>(), a.q.shape[0]);
}

}  // namespace moetrain::ops
