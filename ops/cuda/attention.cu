// attention.cu -- attention for heads of any widths in f32 (plain FFMA) and bf16 (mma.sync): tiles of 64 rows by 64 columns, a
// chunk of 64 of the width at a time, outputs gathered in shared memory. What tensor cores like best is in attention_forward.cu
// and attention_backward.cu.
#include "ops/cuda/attention.cuh"

#include <climits>

#include "ops/cuda/attention_products.cuh"
#include "ops/cuda/document_list.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kTile = 64, kThreads = 128, kTileSums = 8;  // a warp has 16 rows of a tile, all of its columns
constexpr std::int64_t kSharedBytes = 227 << 10;          // of one block on sm_90

// A matrix a head, in storage: row t of head n begins at at + n * head + t * row.
template <class X>
struct Part {
  X* at;
  std::int64_t head, row;
  int width, count;  // columns and rows
  __device__ X* rows(int n, int t) const { return at + n * head + t * row; }
};
// What a position brings to a score (nope and extra) and to the other product (the value, or the gradient of the output).
template <class X>
struct Side {
  Part<X> nope, extra, value;
};
template <class X>
struct Problem {
  Side<const X> queries, keys;
  Sight of_queries, of_keys;
  int N;
  float scale;
  bool in_packs;  // may rows be loaded in packs of 16 bytes?
};

template <class X>
struct Tiles {
  static constexpr int kRow = kTile + 16 / int(sizeof(X));  // a row begins 4 banks after the one before
  X a[kTile][kRow], b[kTile][kRow], weights[kTile][kRow];
};

// A thread's share of a tile, as mma.sync has it: [tile of 8 columns][row (0, 8) * 2 + column (0, 1)].
struct Fragment {
  float at[kTileSums][4];
};
__device__ int warp() { return int(threadIdx.x) / kWarp; }
__device__ int lane() { return int(threadIdx.x) % kWarp; }
__device__ int row_of(int i) { return 16 * warp() + lane() / 4 + 8 * (i / 2); }
__device__ int column_of(int j, int i) { return 8 * j + lane() % 4 * 2 + i % 2; }

// tile = from[0:64, 0:64], zeros past its rows and columns; there after staged()
template <class X>
__device__ void stage(X (*tile)[Tiles<X>::kRow], const X* from, std::int64_t row, int rows, int columns, bool in_packs) {
  constexpr int kPack = 16 / sizeof(X), kPacks = kTile / kPack, kStep = kThreads / kPacks;
  int thread = int(threadIdx.x);
  asm volatile("" : "+r"(thread));  // what follows from it is not worth a register in the loops around
  const int first = thread / kPacks, c = thread % kPacks * kPack, left = columns - c;
  const X* at = from + first * row + c;
  if (in_packs) {
    if (left <= 0) rows = 0;
#pragma unroll
    for (int i = 0; i < kTile / kStep; ++i, at += kStep * row)
      copy_pack(&tile[first + i * kStep][c], at, first + i * kStep < rows ? 16 : 0);
  } else {
    for (int r = first; r < kTile; r += kStep, at += kStep * row)
      for (int j = 0; j < kPack; ++j) tile[r][c + j] = r < rows && j < left ? at[j] : from_float<X>(0);
  }
}
__device__ void staged() {
  wait_for_packs();
  __syncthreads();  // waits for the packs of the other threads
}

// c += a b^T with b (columns, k); or c += a b with b (k, columns)
template <bool kTransposeB>
__device__ void multiply(Fragment& c, const __nv_bfloat16 (*a)[Tiles<__nv_bfloat16>::kRow],
                         const __nv_bfloat16 (*b)[Tiles<__nv_bfloat16>::kRow]) {
  const int matrix = lane() / 8, in_matrix = lane() % 8;
#pragma unroll
  for (int k = 0; k < kTile; k += 16) {
    unsigned as[4], bs[4];
    load_matrices(as, &a[16 * warp() + lane() % 16][k + lane() / 16 * 8]);
#pragma unroll
    for (int j = 0; j < kTileSums; j += 2) {
      if constexpr (kTransposeB)
        load_matrices(bs, &b[8 * (j + matrix / 2) + in_matrix][k + matrix % 2 * 8]);
      else
        load_matrices_transposed(bs, &b[k + matrix % 2 * 8 + in_matrix][8 * (j + matrix / 2)]);
      multiply_matrices(c.at[j], as, bs[0], bs[1]);
      multiply_matrices(c.at[j + 1], as, bs[2], bs[3]);
    }
  }
}
template <bool kTransposeB>
__device__ void multiply(Fragment& c, const float (*a)[Tiles<float>::kRow], const float (*b)[Tiles<float>::kRow]) {
#pragma unroll 2
  for (int k = 0; k < kTile; k += 4) {
    const Pack<float, 4> low = load<4>(&a[row_of(0)][k]), high = load<4>(&a[row_of(2)][k]);
#pragma unroll
    for (int j = 0; j < kTileSums; ++j)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        Pack<float, 4> bs;
        if constexpr (kTransposeB)
          bs = load<4>(&b[column_of(j, i)][k]);
        else
          for (int l = 0; l < 4; ++l) bs.at[l] = b[k + l][column_of(j, i)];
#pragma unroll
        for (int l = 0; l < 4; ++l) {
          c.at[j][i] += low.at[l] * bs.at[l];
          c.at[j][2 + i] += high.at[l] * bs.at[l];
        }
      }
  }
}

// c += rows [first_a, ..) of a times rows [first_b, ..) of b, over their width
template <class X>
__device__ void add_dots(Fragment& c, Tiles<X>& tiles, const Problem<X>& p, int n, const Part<const X>& a, int first_a,
                         const Part<const X>& b, int first_b) {
  for (int w = 0; w < a.width; w += kTile) {
    __syncthreads();  // waits for the readers of the tiles' last contents
    stage<X>(tiles.a, a.rows(n, first_a) + w, a.row, a.count - first_a, a.width - w, p.in_packs);
    stage<X>(tiles.b, b.rows(n, first_b) + w, b.row, b.count - first_b, b.width - w, p.in_packs);
    staged();
    multiply<true>(c, tiles.a, tiles.b);
  }
}

constexpr int kMine = kTileSums * 4;  // a thread's sums of a chunk; sum i of a thread lies at [i][thread]
constexpr int kChunkSums = kMine * kThreads;
__host__ __device__ int chunks(int width) { return (width + kTile - 1) / kTile; }

// sums = keep * sums + weights times rows [first, ..) of part, chunk by chunk of its width; keep by row
template <class X>
__device__ void add_weighted(float* sums, Tiles<X>& tiles, const Problem<X>& p, int n, const Part<const X>& part, int first,
                             float keep_low, float keep_high) {
  for (int w = 0; w < part.width; w += kTile, sums += kChunkSums) {
    __syncthreads();  // waits for the readers of the tile's last contents
    stage<X>(tiles.b, part.rows(n, first) + w, part.row, part.count - first, part.width - w, p.in_packs);
    staged();
    Fragment c;
    for (int j = 0; j < kTileSums; ++j)
      for (int i = 0; i < 4; ++i) c.at[j][i] = sums[(4 * j + i) * kThreads] * (i < 2 ? keep_low : keep_high);
    multiply<false>(c, tiles.weights, tiles.b);
    for (int j = 0; j < kTileSums; ++j)
      for (int i = 0; i < 4; ++i) sums[(4 * j + i) * kThreads] = c.at[j][i];
  }
}
template <class X>
__device__ void set_weights(Tiles<X>& tiles, const Fragment& c) {
  __syncwarp();  // waits for this warp's readers: a warp reads its own rows only
  for (int j = 0; j < kTileSums; ++j)
    for (int i = 0; i < 4; ++i) tiles.weights[row_of(i)][column_of(j, i)] = from_float<X>(c.at[j][i]);
}
__device__ void clear(float* sums, int count) {
  for (int i = 0; i < count * kMine; ++i) sums[i * kThreads] = 0;
}

// Rows of a tile, scaled, to `to`, whose row t of head n begins at to.rows(n, t).
template <class X>
__device__ void write(const float* sums, const Part<X>& to, int n, int first, float low, float high) {
  for (int w = 0; w < to.width; w += kTile, sums += kChunkSums)
    for (int j = 0; j < kTileSums; ++j)
      for (int i = 0; i < 4; ++i) {
        const int column = w + column_of(j, i);
        if (first + row_of(i) < to.count && column < to.width)
          to.rows(n, first + row_of(i))[column] = from_float<X>(sums[(4 * j + i) * kThreads] * (i < 2 ? low : high));
      }
}

// grid (ceil(T / 64), N), block kThreads: a tile of queries of a head against the keys that it sees, the longest rows first
template <class X>
__global__ void __launch_bounds__(kThreads) attention_forward_kernel(Problem<X> p, Part<X> o, float* __restrict__ lse) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& tiles = *reinterpret_cast<Tiles<X>*>(shared);
  float* const sums = reinterpret_cast<float*>(shared + sizeof(Tiles<X>)) + threadIdx.x;
  const int n = int(blockIdx.y);
  const int tile = int(gridDim.x - 1 - blockIdx.x), first = tile * kTile;
  const Seen any = p.of_queries.tiles[tile].any;
  const Seen seen[2] = {p.of_queries.rows[first + row_of(0)], p.of_queries.rows[first + row_of(2)]};
  const float to_log2 = p.scale * kLog2E;
  float top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
  clear(sums, chunks(o.width));
  for (int column = any.low / kTile * kTile; column < any.high; column += kTile) {
    Fragment z = {};
    add_dots(z, tiles, p, n, p.queries.nope, first, p.keys.nope, column);
    add_dots(z, tiles, p, n, p.queries.extra, first, p.keys.extra, column);
    float keep[2];
    for (int row = 0; row < 2; ++row) {
      float most = -INFINITY, part = 0;
      for (int j = 0; j < kTileSums; ++j)
        for (int i = 2 * row; i < 2 * row + 2; ++i) {
          const int s = column + column_of(j, i);
          z.at[j][i] = seen[row].low <= s && s < seen[row].high ? z.at[j][i] * to_log2 : -INFINITY;
          most = fmaxf(most, z.at[j][i]);
        }
      most = fmaxf(top[row], quad_max(most));
      const float from = most == -INFINITY ? 0 : most;  // a row may have seen nothing yet
      keep[row] = power_of_2(top[row] - from);
      for (int j = 0; j < kTileSums; ++j)
        for (int i = 2 * row; i < 2 * row + 2; ++i) part += z.at[j][i] = power_of_2(z.at[j][i] - from);
      sum[row] = sum[row] * keep[row] + part;
      top[row] = most;
    }
    set_weights(tiles, z);
    add_weighted(sums, tiles, p, n, p.keys.value, column, keep[0], keep[1]);
  }
  for (int row = 0; row < 2; ++row) {
    sum[row] = quad_sum(sum[row]);
    const std::int64_t t = first + row_of(2 * row);
    if (lane() % 4 == 0 && t < o.count) lse[t * p.N + n] = (top[row] + log2f(sum[row])) / kLog2E;
  }
  write(sums, o, n, first, 1 / sum[0], 1 / sum[1]);
}

// Where backward writes: the gradients of the rows' side. Keys' extra is shared, so that its sums over a group of heads go to
// parts (groups, keys, He).
template <class X>
struct Gradients {
  Part<X> nope, extra, value;
  Part<float> extra_parts;
};

// grid (ceil(rows / 64), ceil(N / heads)), block kThreads: a tile of rows, of keys or of queries, against the columns that it sees,
// head by head. lse in log2 and delta are (N, stride).
template <class X, bool kRowsAreKeys>
__global__ void __launch_bounds__(kThreads)
    attention_backward_kernel(Problem<X> p, Gradients<X> to, const float* __restrict__ lse, const float* __restrict__ delta,
                              std::int64_t stride, int heads) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& tiles = *reinterpret_cast<Tiles<X>*>(shared);
  const Side<const X>&rows = kRowsAreKeys ? p.keys : p.queries, &columns = kRowsAreKeys ? p.queries : p.keys;
  const Sight& sight = kRowsAreKeys ? p.of_keys : p.of_queries;
  float* const extra_sums = reinterpret_cast<float*>(shared + sizeof(Tiles<X>)) + threadIdx.x;
  float* const nope_sums = extra_sums + chunks(rows.extra.width) * kChunkSums;
  float* const value_sums = nope_sums + chunks(rows.nope.width) * kChunkSums;  // of keys only
  const int tile = int(kRowsAreKeys ? blockIdx.x : gridDim.x - 1 - blockIdx.x), first = tile * kTile;
  const Seen any = sight.tiles[tile].any;
  const Seen seen[2] = {sight.rows[first + row_of(0)], sight.rows[first + row_of(2)]};
  const float to_log2 = p.scale * kLog2E;
  clear(extra_sums, chunks(rows.extra.width));
  for (int n = int(blockIdx.y) * heads; n < min(int(blockIdx.y + 1) * heads, p.N); ++n) {
    clear(nope_sums, chunks(rows.nope.width) + (kRowsAreKeys ? chunks(rows.value.width) : 0));
    if (!kRowsAreKeys) clear(extra_sums, chunks(rows.extra.width));
    for (int column = any.low / kTile * kTile; column < any.high; column += kTile) {
      Fragment z = {}, dz = {};
      add_dots(z, tiles, p, n, rows.nope, first, columns.nope, column);
      add_dots(z, tiles, p, n, rows.extra, first, columns.extra, column);
      add_dots(dz, tiles, p, n, rows.value, first, columns.value, column);
      for (int j = 0; j < kTileSums; ++j)
        for (int i = 0; i < 4; ++i) {
          const int s = column + column_of(j, i);
          const bool counts = seen[i / 2].low <= s && s < seen[i / 2].high;
          const std::int64_t at = n * stride + (kRowsAreKeys ? s : first + row_of(i));
          z.at[j][i] = counts ? power_of_2(z.at[j][i] * to_log2 - lse[at]) : 0;
          dz.at[j][i] = counts ? z.at[j][i] * (dz.at[j][i] - delta[at]) : 0;
        }
      if constexpr (kRowsAreKeys) {
        set_weights(tiles, z);
        add_weighted(value_sums, tiles, p, n, columns.value, column, 1, 1);
      }
      set_weights(tiles, dz);
      add_weighted(nope_sums, tiles, p, n, columns.nope, column, 1, 1);
      add_weighted(extra_sums, tiles, p, n, columns.extra, column, 1, 1);
    }
    write(nope_sums, to.nope, n, first, p.scale, p.scale);
    if constexpr (kRowsAreKeys)
      write(value_sums, to.value, n, first, 1, 1);
    else
      write(extra_sums, to.extra, n, first, p.scale, p.scale);
  }
  if constexpr (kRowsAreKeys) write(extra_sums, to.extra_parts, int(blockIdx.y), first, p.scale, p.scale);
}

// grid (ceil(T / 64), tiles of keys), block kThreads: a tile of queries against the tile of keys that is blockIdx.y tiles before
// the last that it sees, head by head; probability (T, W) is 0 before
template <class X>
__global__ void __launch_bounds__(kThreads)
    attention_probability_kernel(Problem<X> p, const float* __restrict__ lse, float* __restrict__ probability, std::int64_t W) {
  extern __shared__ __align__(16) unsigned char shared[];
  auto& tiles = *reinterpret_cast<Tiles<X>*>(shared);
  const Seen any = p.of_queries.tiles[blockIdx.x].any;
  const int first = int(blockIdx.x) * kTile, column = (any.high - 1) / kTile * kTile - int(blockIdx.y) * kTile;
  if (column < 0 || column + kTile <= any.low) return;
  const Seen seen[2] = {p.of_queries.rows[first + row_of(0)], p.of_queries.rows[first + row_of(2)]};
  bool some = false;
  for (const Seen& s : seen) some |= s.low < column + kTile && column < s.high;
  if (!__syncthreads_or(some)) return;  // between the keys of two documents
  Fragment mean = {};
  for (int n = 0; n < p.N; ++n) {
    Fragment z = {};
    add_dots(z, tiles, p, n, p.queries.nope, first, p.keys.nope, column);
    add_dots(z, tiles, p, n, p.queries.extra, first, p.keys.extra, column);
    for (int row = 0; row < 2; ++row) {
      const std::int64_t t = first + row_of(2 * row);
      if (t >= p.of_queries.count) continue;
      const float sum = lse[t * p.N + n];
      for (int j = 0; j < kTileSums; ++j)
        for (int i = 2 * row; i < 2 * row + 2; ++i) mean.at[j][i] += expf(z.at[j][i] * p.scale - sum);
    }
  }
  for (int j = 0; j < kTileSums; ++j)
    for (int i = 0; i < 4; ++i) {
      const int s = column + column_of(j, i);
      const auto [low, high] = seen[i / 2];
      if (low <= s && s < high) probability[std::int64_t(first + row_of(i)) * W + s - low] = mean.at[j][i] / float(p.N);
    }
}

constexpr int kSightThreads = 256, kSightBlocks = 16;

// grid (documents, up to kSightBlocks), block (kSightThreads): what the queries of a document here see, and what its keys see; keys
// may be absent
__global__ void attention_sight_kernel(const DocumentList documents, Seen* __restrict__ of_queries, Seen* __restrict__ of_keys) {
  const std::int64_t n = blockIdx.x, begin = documents.starts[n], end = documents.starts[n + 1];
  if (begin == end) return;
  const std::int64_t before = documents.before(n), first = documents.first_key(n);
  for (std::int64_t i = std::int64_t(blockIdx.y) * kSightThreads + threadIdx.x; i < before + end - begin;
       i += std::int64_t(gridDim.y) * kSightThreads) {
    const std::int64_t t = begin + i - before;  // the document's position i, if it is here
    if (t >= begin) of_queries[t] = {int(first), int(first + i + 1)};
    if (of_keys) of_keys[first + i] = {int(max(t, begin)), int(end)};
  }
}

constexpr int kSightTiles = 8;

// grid (ceil(tiles / kSightTiles), sides), block (32, kSightTiles): a warp takes a tile of queries, or of keys
__global__ void attention_sight_tiles_kernel(const Sight of_queries, const Sight of_keys) {
  const Sight sight = blockIdx.y == 0 ? of_queries : of_keys;
  const int tile = int(blockIdx.x) * kSightTiles + int(threadIdx.y), first = tile * kSeenTile;
  if (first >= (sight.count + 2 * kSeenTile - 1) / (2 * kSeenTile) * (2 * kSeenTile)) return;
  Seen any = {INT_MAX, 0}, all = {INT_MIN, INT_MAX};
  for (int row = first + int(threadIdx.x); row < first + kSeenTile; row += kWarp) {
    if (row >= sight.count) {
      sight.rows[row] = {0, 0};
      continue;
    }
    const Seen seen = sight.rows[row];
    if (seen.low < seen.high) any = {min(any.low, seen.low), max(any.high, seen.high)};
    all = {max(all.low, seen.low), min(all.high, seen.high)};
  }
  any = {__reduce_min_sync(0xffffffffU, any.low), __reduce_max_sync(0xffffffffU, any.high)};
  all = {__reduce_max_sync(0xffffffffU, all.low), __reduce_min_sync(0xffffffffU, all.high)};
  if (threadIdx.x == 0) sight.tiles[tile] = {any, all};
}

constexpr int kStatisticsRows = 8;

// grid (columns / kStatisticsRows), block (32, kStatisticsRows): a warp takes a row of all heads
template <class X, int kCount>
__global__ void attention_statistics_kernel(const X* __restrict__ o, const X* __restrict__ dout, const float* __restrict__ lse,
                                            float* __restrict__ lse_log2, float* __restrict__ delta, std::int64_t T, int N, int Hv,
                                            std::int64_t columns) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kStatisticsRows + threadIdx.y;
  for (int n = 0; n < N; ++n) {
    float sum = 0;
    if (t < T)
      for (int h = int(threadIdx.x) * kCount; h < Hv; h += kWarp * kCount) {
        const auto os = load<kCount>(o + (t * N + n) * Hv + h), dos = load<kCount>(dout + (t * N + n) * Hv + h);
        for (int i = 0; i < kCount; ++i) sum += to_float(os.at[i]) * to_float(dos.at[i]);
      }
    sum = warp_sum(sum);
    if (threadIdx.x != 0) continue;
    lse_log2[n * columns + t] = t < T ? lse[t * N + n] * kLog2E : INFINITY;
    delta[n * columns + t] = sum;
  }
}

// grid (ceil(count / 256)), block (256)
template <class X>
__global__ void attention_extra_kernel(const float* __restrict__ parts, X* __restrict__ dk_extra, std::int64_t groups,
                                       std::int64_t count) {
  const std::int64_t i = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= count) return;
  float sum = 0;
  for (std::int64_t group = 0; group < groups; ++group) sum += parts[group * count + i];
  dk_extra[i] = from_float<X>(sum);
}

template <class S, class Args>
auto problem(const Args& a, const AttentionSight& of_queries, const AttentionSight& of_keys = {}) {
  using X = device_t<S>;
  const std::int64_t N = a.q.shape[1], He = a.k_extra.shape[1], Hq = a.q.shape[2], Hn = Hq - He;
  const std::int64_t Hkv = a.kv.shape[2], Hv = Hkv - Hn;
  const int T = int(a.q.shape[0]), keys = int(a.kv.shape[0]);
  const X *q = device_pointer<S>(a.q), *kv = device_pointer<S>(a.kv);
  Problem<X> p = {
      .queries = {{q, Hq, N * Hq, int(Hn), T}, {q + Hn, Hq, N * Hq, int(He), T}, {}},
      .keys = {{kv, Hkv, N * Hkv, int(Hn), keys},
               {device_pointer<S>(a.k_extra), 0, He, int(He), keys},
               {kv + Hn, Hkv, N * Hkv, int(Hv), keys}},
      .of_queries = Sight(of_queries),
      .of_keys = Sight(of_keys),
      .N = int(N),
      .scale = float(a.scale)};
  constexpr int kPack = 16 / sizeof(X);
  p.in_packs = Hn % kPack == 0 && Hv % kPack == 0 && in_packs<kPack>(He, {a.q, a.kv, a.k_extra});
  return p;
}

template <class X>
std::size_t shared_bytes(std::int64_t sums) {
  const std::int64_t bytes = std::int64_t(sizeof(Tiles<X>)) + sums * kChunkSums * std::int64_t(sizeof(float));
  check(bytes <= kSharedBytes, "attention: heads this wide do not fit a block's shared memory",
        {{"bytes", bytes}, {"most", kSharedBytes}});
  return std::size_t(bytes);
}

template <class S>
void forward(Context& ctx, const AttentionForward& a, const AttentionSight& of_queries) {
  using X = device_t<S>;
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1], Hv = a.o.shape[2];
  const auto p = problem<S>(a, of_queries);
  float* const lse = a.lse.as<float>();
  if (wgmma_takes(a))
    attention_wgmma(ctx, a, of_queries);
  else
    launch(ctx, attention_forward_kernel<X>, {dim3(blocks(T, kTile), unsigned(N)), kThreads, shared_bytes<X>(chunks(int(Hv)))}, p,
           Part<X>{device_pointer<S>(a.o), Hv, N * Hv, int(Hv), int(T)}, lse);
  if (!a.probability.present()) return;
  cuda_ok(cudaMemsetAsync(a.probability.data, 0, std::size_t(a.probability.bytes()), ctx.stream));
  // whole documents follow one another, between pieces keys may lie that nothing here sees
  const unsigned int tiles = a.documents.whole() ? blocks(a.documents.longest(), kTile) + 1 : blocks(a.kv.shape[0], kTile);
  launch(ctx, attention_probability_kernel<X>, {dim3(blocks(T, kTile), tiles), kThreads, shared_bytes<X>(0)}, p, lse,
         a.probability.as<float>(), a.probability.shape[1]);
}

template <class S>
void backward(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch) {
  using X = device_t<S>;
  const std::int64_t N = a.q.shape[1], He = a.k_extra.shape[1], Hq = a.q.shape[2], Hn = Hq - He;
  const std::int64_t Hkv = a.kv.shape[2], Hv = Hkv - Hn, groups = scratch.extra_parts.shape[0], heads = a.heads_a_group();
  const int T = int(a.q.shape[0]), keys = int(a.kv.shape[0]);
  auto p = problem<S>(a, scratch.of_queries, scratch.of_keys);
  p.queries.value = {device_pointer<S>(a.do_), Hv, N * Hv, int(Hv), T};
  p.in_packs = p.in_packs && in_packs<16 / int(sizeof(X))>(Hv, {a.do_});
  X *dq = device_pointer<S>(a.dq), *dkv = device_pointer<S>(a.dkv);
  const Gradients<X> of_queries = {.nope = {dq, Hq, N * Hq, int(Hn), T}, .extra = {dq + Hn, Hq, N * Hq, int(He), T}};
  const Gradients<X> of_keys = {.nope = {dkv, Hkv, N * Hkv, int(Hn), keys},
                                .value = {dkv + Hn, Hkv, N * Hkv, int(Hv), keys},
                                .extra_parts = {scratch.extra_parts.as<float>(), keys * He, He, int(He), keys}};
  const float *lse = scratch.lse.as<float>(), *delta = scratch.delta.as<float>();
  const std::int64_t stride = scratch.lse.shape[1], sums = chunks(int(Hn)) + chunks(int(He));
  launch(ctx, attention_backward_kernel<X, false>, {dim3(blocks(T, kTile), unsigned(N)), kThreads, shared_bytes<X>(sums)}, p,
         of_queries, lse, delta, stride, 1);
  launch(ctx, attention_backward_kernel<X, true>,
         {dim3(blocks(keys, kTile), unsigned(groups)), kThreads, shared_bytes<X>(sums + chunks(int(Hv)))}, p, of_keys, lse, delta,
         stride, int(heads));
}

}  // namespace

void cuda::find_sight(Context& ctx, const Documents& documents, const AttentionSight& of_queries, const AttentionSight& of_keys) {
  for (const auto* side : {&of_queries, &of_keys})
    check(side->count < std::int64_t(1) << 30, "attention: more positions than CUDA counts", {{"rows", side->count}});
  const bool both = of_keys.count > 0;
  if (!documents.whole()) set_zero(ctx, {of_keys.rows});  // keys that no query here sees
  const Sight queries(of_queries), keys(of_keys);
  const unsigned int parts = std::min(blocks(documents.most_keys(), kSightThreads), unsigned(kSightBlocks));
  launch(ctx, attention_sight_kernel, {dim3(blocks(documents.count(), 1), parts), kSightThreads}, DocumentList(documents),
         queries.rows, keys.rows);
  launch(ctx, attention_sight_tiles_kernel,
         {dim3(blocks(std::max(of_queries.tiles.shape[0], of_keys.tiles.shape[0]), kSightTiles), both ? 2 : 1),
          dim3(kWarp, kSightTiles)},
         queries, keys);
}

void cuda::row_statistics(Context& ctx, const AttentionBackward& a, Tensor lse, Tensor delta) {
  with_storage(a.q.dtype, [&](auto storage) {
    using S = decltype(storage);
    using X = device_t<S>;
    const bool packed = in_packs<4>(a.o.shape[2], {a.o, a.do_});
    launch(ctx, packed ? attention_statistics_kernel<X, 4> : attention_statistics_kernel<X, 1>,
           {blocks(lse.shape[1], kStatisticsRows), dim3(kWarp, kStatisticsRows)}, device_pointer<S>(a.o), device_pointer<S>(a.do_),
           a.lse.as<float>(), lse.as<float>(), delta.as<float>(), a.o.shape[0], int(a.o.shape[1]), int(a.o.shape[2]), lse.shape[1]);
  });
}

void cuda::sum_extra_parts(Context& ctx, ConstTensor parts, Tensor dk_extra) {
  with_storage(dk_extra.dtype, [&](auto storage) {
    using S = decltype(storage);
    launch(ctx, attention_extra_kernel<device_t<S>>, {blocks(dk_extra.count(), 256), 256}, parts.as<float>(),
           device_pointer<S>(dk_extra), parts.shape[0], dk_extra.count());
  });
}

void cuda::attention(Context& ctx, const AttentionForward& a) {
  with_storage(a.q.dtype, [&](auto storage) {
    Scope scope(ctx.scratch);
    const auto of_queries = a.take_scratch(ctx);
    if (a.q.shape[0] == 0) return;
    find_sight(ctx, a.documents, of_queries);
    forward<decltype(storage)>(ctx, a, of_queries);
  });
}

void cuda::attention(Context& ctx, const AttentionBackward& a) {
  with_storage(a.q.dtype, [&](auto storage) {
    Scope scope(ctx.scratch);
    const auto scratch = a.take_scratch(ctx);
    if (a.q.shape[0] == 0) return set_zero(ctx, {a.dkv, a.dk_extra});  // keys of other ranks' queries only
    find_sight(ctx, a.documents, scratch.of_queries, scratch.of_keys);
    row_statistics(ctx, a, scratch.lse, scratch.delta);
    if (wgmma_takes(a))
      attention_wgmma(ctx, a, scratch);
    else
      backward<decltype(storage)>(ctx, a, scratch);
    sum_extra_parts(ctx, scratch.extra_parts, a.dk_extra);
  });
}

}  // namespace moetrain::ops
