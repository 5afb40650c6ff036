// attention_wgmma.cu -- attention in bf16 for heads [128 nope | 64 extra] and values of 128: tiles by the copy engine, products by
// groups of four warps from shared memory, softmax in registers. k_extra is read as it lies, for every head anew from the L2.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/instructions.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kNope = 128, kExtra = 64, kValue = 128, kKey = kNope + kExtra;
constexpr int kBox = 64;                              // columns and rows of what one copy brings
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kRows = 128, kGroup = 128;              // rows of a block; threads of a group of warps, which owns 64 rows
constexpr int kThreads = 3 * kGroup;                  // one group brings, two multiply
constexpr int kRowBoxBytes = 2 * kBoxBytes;           // 64 columns of the block's rows
constexpr int kRowsKeyBytes = 3 * kRowBoxBytes, kRowsValueBytes = 2 * kRowBoxBytes;
constexpr int kWarps = 2 * kGroup / kWarp;            // that multiply

// Tensors as the copy engine sees them: (T, heads, width), in boxes of 64 rows of one head by 64 columns, zeros past T.
struct Maps {
  CUtensorMap q, kv, k_extra, dout;
};

// What a row brings to a score, [nope | extra], and to the other product.
struct Rows {
  const CUtensorMap *key, *extra, *value;
  int extra_at, value_at;  // first column
  bool extra_shared;       // by all heads
  __device__ void bring_key(unsigned char* to, int box_bytes, int n, int t, std::uint64_t* barrier) const {
    copy_box(to, key, 0, n, t, barrier);
    copy_box(to + box_bytes, key, kBox, n, t, barrier);
    copy_box(to + 2 * box_bytes, extra, extra_at, extra_shared ? 0 : n, t, barrier);
  }
  __device__ void bring_value(unsigned char* to, int box_bytes, int n, int t, std::uint64_t* barrier) const {
    copy_box(to, value, value_at, n, t, barrier);
    copy_box(to + box_bytes, value, value_at + kBox, n, t, barrier);
  }
};
__device__ Rows queries_of(const Maps& maps) { return {&maps.q, &maps.q, &maps.dout, kNope, 0, false}; }
__device__ Rows keys_of(const Maps& maps) { return {&maps.kv, &maps.k_extra, &maps.kv, 0, kNope, true}; }

__device__ int warp() { return int(threadIdx.x) % kGroup / kWarp; }  // of its group
__device__ int lane() { return int(threadIdx.x) % kWarp; }
__device__ int group_of_warp() {  // 0 and 1 multiply, -1 brings; by shuffle, so that the compiler knows it for one to a warp
  return __shfl_sync(0xffffffffU, int(threadIdx.x) / kGroup, 0) - 1;
}
__device__ int row_of(int half) { return (int(threadIdx.x) / kGroup - 1) * 64 + 16 * warp() + lane() / 4 + 8 * half; }

__device__ unsigned char* aligned(unsigned char* shared) {  // the swizzle repeats every 1024 bytes of address
  return shared + (1024 - shared_address(shared) % 1024) % 1024;
}
__device__ unsigned packed(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const unsigned&>(pair);
}
template <int kCount>
__device__ void pack(unsigned (&to)[kCount], const float (&from)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = packed(from[2 * i], from[2 * i + 1]);
}
__device__ float2 unpacked(unsigned pair) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair)); }
__device__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffU, x, 2));
}
__device__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffU, x, 1);
  return x + __shfl_xor_sync(0xffffffffU, x, 2);
}

// Writes a warp's 16 rows of d, times scale by row, to rows of `to` that are there, through 4096 bytes of this warp's own.
template <int kCount>
__device__ void write_rows(const float* d, float low, float high, unsigned char* stage, __nv_bfloat16* to, std::int64_t row,
                           std::int64_t first, std::int64_t T) {
  constexpr int kTiles = kCount / 4, kRowBytes = kTiles * 16;  // tiles of 8 columns
  int l = lane();
  asm volatile("" : "+r"(l));  // what follows from it is not worth a register in the loops before
  const int r = l / 4, c = l % 4;
  __syncwarp();  // waits for the readers of what was staged before
#pragma unroll
  for (int j = 0; j < kTiles; ++j) {
    const int at = r * kRowBytes + (j ^ r) * 16 + c * 4;
    *reinterpret_cast<unsigned*>(stage + at) = packed(d[4 * j] * low, d[4 * j + 1] * low);
    *reinterpret_cast<unsigned*>(stage + at + 8 * kRowBytes) = packed(d[4 * j + 2] * high, d[4 * j + 3] * high);
  }
  __syncwarp();  // waits for the staged rows
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
    const int pack = i * kWarp + l, s = pack / kTiles, j = pack % kTiles;
    if (first + s < T)
      *reinterpret_cast<uint4*>(to + (first + s) * row + 8 * j) = *reinterpret_cast<const uint4*>(stage + s * kRowBytes + (j ^ s % 8) * 16);
  }
}

// d = rows of this group times columns of a box pair, over kSteps steps of 16 of their common width; committed.
template <int kSteps, int kCount>
__device__ void start_dots(float (&d)[kCount], const unsigned char* rows, const unsigned char* columns, int column_box_bytes) {
  const std::uint64_t a = along_rows(rows), b = along_rows(columns);
  forget(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma(d, advanced(a, k / 4 * kRowBoxBytes + k % 4 * 32), advanced(b, k / 4 * column_box_bytes + k % 4 * 32), k > 0);
  wgmma_commit();
  hold(d);
}
// d += weights times rows of a box, over kSteps steps of 16 rows; committed.
template <int kSteps, int kCount>
__device__ void start_sums(float (&d)[kCount], const unsigned (&weights)[4 * kSteps], const unsigned char* boxes, int box_bytes) {
  const std::uint64_t b = down_rows(boxes, box_bytes);
  hold(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma(d, weights + 4 * k, advanced(b, k * 2048));
  wgmma_commit();
  hold(d);
}

// Blocks of the grid by sections of heads (or groups of heads) whose other side stays in the L2; in a section by blocks of rows.
struct Place {
  int head, row_block;
};
__device__ Place place(int row_blocks, int heads, int heads_a_section) {
  const int section = int(blockIdx.x) / (heads_a_section * row_blocks), first = section * heads_a_section;
  const int here = min(heads_a_section, heads - first), in_section = int(blockIdx.x) - first * row_blocks;
  return {first + in_section % here, in_section / here};
}

// ---- forward

constexpr int kColumns = 128, kStages = 2;
constexpr int kKeyStageBytes = 3 * kRowBoxBytes, kValueStageBytes = 2 * kRowBoxBytes;
constexpr int kForwardBytes = 1024 + kRowsKeyBytes + kStages * (kKeyStageBytes + kValueStageBytes);

// Scores to weights that are not yet divided by their sum; top and sum by row so far. keep is what older sums are worth.
__device__ void softmax(float (&z)[64], float (&top)[2], float (&sum)[2], float (&keep)[2], float to_log2, int column,
                        const Seen (&seen)[2], bool all_seen) {
  if (!all_seen) {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int s = column + i / 4 * 8 + lane() % 4 * 2 + i % 2, half = i / 2 % 2;
      if (s < seen[half].low || s >= seen[half].high) z[i] = -INFINITY;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = top[half], part = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) most = fmaxf(most, fmaxf(z[4 * j + 2 * half], z[4 * j + 2 * half + 1]));
    most = quad_max(most);
    const float from = most == -INFINITY ? 0 : most * to_log2;  // a row may have seen nothing yet
    keep[half] = exp2_fast(top[half] * to_log2 - from);
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 4 * j + 2 * half; i < 4 * j + 2 * half + 2; ++i) part += z[i] = exp2_fast(z[i] * to_log2 - from);
    top[half] = most;
    sum[half] = sum[half] * keep[half] + part;
  }
}

// grid (blocks of 128 queries * N), block kThreads: the longest blocks of a section first. Group -1 brings keys and values from the diagonal down, the others have 64 queries each and take turns: one
// multiplies while the other is at its softmax. 687 GFLOP at T = 8192, N = 32.
__global__ void __launch_bounds__(kThreads, 1)
    attention_forward_wgmma_kernel(const __grid_constant__ Maps maps, const int2* __restrict__ documents, __nv_bfloat16* __restrict__ o,
                                   float* __restrict__ lse, int T, int N, float scale, int heads_a_section) {
  extern __shared__ unsigned char shared[];
  unsigned char* const queries = aligned(shared);
  unsigned char* const keys = queries + kRowsKeyBytes;
  unsigned char* const values = keys + kStages * kKeyStageBytes;
  __shared__ std::uint64_t queries_full, keys_full[kStages], keys_empty[kStages], values_full[kStages], values_empty[kStages];

  const int row_blocks = (T + kRows - 1) / kRows;
  const auto [n, row_block] = place(row_blocks, N, heads_a_section);
  const int first = (row_blocks - 1 - row_block) * kRows;
  const int last = min(first + kRows, T) - 1;
  const int begin = documents[first].x / kColumns, turns = last / kColumns + 1 - begin;  // blocks of keys

  if (threadIdx.x == 0) {
    barrier_init(&queries_full, 1);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(&keys_full[i], 1);
      barrier_init(&values_full[i], 1);
      barrier_init(&keys_empty[i], kWarps);
      barrier_init(&values_empty[i], kWarps);
    }
    barriers_are_initialised();
  }
  __syncthreads();  // waits for the barriers

  const int group = group_of_warp();
  if (group < 0) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    const Rows rows = queries_of(maps), columns = keys_of(maps);
    const auto bring_keys = [&](int turn) {
      const int stage = turn % kStages, column = (begin + turns - 1 - turn) * kColumns;
      unsigned char* const to = keys + stage * kKeyStageBytes;
      wait(&keys_empty[stage], unsigned(turn / kStages + 1) % 2);
      arrive_and_expect(&keys_full[stage], kKeyStageBytes);
      columns.bring_key(to, kRowBoxBytes, n, column, &keys_full[stage]);
      columns.bring_key(to + kBoxBytes, kRowBoxBytes, n, column + kBox, &keys_full[stage]);
    };
    arrive_and_expect(&queries_full, kRowsKeyBytes);
    rows.bring_key(queries, kRowBoxBytes, n, first, &queries_full);
    rows.bring_key(queries + kBoxBytes, kRowBoxBytes, n, first + kBox, &queries_full);
    bring_keys(0);
    for (int turn = 0; turn < turns; ++turn) {
      if (turn + 1 < turns) bring_keys(turn + 1);
      const int stage = turn % kStages, column = (begin + turns - 1 - turn) * kColumns;
      unsigned char* const to = values + stage * kValueStageBytes;
      wait(&values_empty[stage], unsigned(turn / kStages + 1) % 2);
      arrive_and_expect(&values_full[stage], kValueStageBytes);
      columns.bring_value(to, kRowBoxBytes, n, column, &values_full[stage]);
      columns.bring_value(to + kBoxBytes, kRowBoxBytes, n, column + kBox, &values_full[stage]);
    }
    return;
  }

  take_registers<240>();
  const unsigned char* const my_queries = queries + group * kBoxBytes;
  const int mine = first + 64 * group;
  const Seen seen[2] = {columns_of<false>(documents, first + row_of(0), T), columns_of<false>(documents, first + row_of(1), T)};
  const int all_low = documents[min(mine + 63, T - 1)].x, all_high = mine + 1;  // what all rows of the group see
  const auto weigh = [&](float(&z)[64], float(&top)[2], float(&sum)[2], float(&keep)[2], int turn) {
    const int column = (begin + turns - 1 - turn) * kColumns;
    softmax(z, top, sum, keep, scale * kLog2E, column, seen, all_low <= column && column + kColumns <= all_high);
  };
  const auto release = [&](std::uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  };
  float z[64], sums[64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, keep[2];
  unsigned weights[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = 0;

  wait(&queries_full, 0);
  wait(&keys_full[0], 0);
  start_dots<kKey / 16>(z, my_queries, keys, kRowBoxBytes);
  if (group == 1 && turns > 1) barrier_arrive(1, 2 * kGroup);  // group 0 has the first turn
  wgmma_wait<0>();
  hold(z);
  release(&keys_empty[0]);
  weigh(z, top, sum, keep, 0);
  pack(weights, z);
  for (int turn = 1; turn < turns; ++turn) {
    const int stage = turn % kStages, before = (turn - 1) % kStages;
    wait(&keys_full[stage], unsigned(turn / kStages) % 2);
    barrier_sync(1 + group, 2 * kGroup);  // waits for this group's turn
    start_dots<kKey / 16>(z, my_queries, keys + stage * kKeyStageBytes, kRowBoxBytes);
    wait(&values_full[before], unsigned((turn - 1) / kStages) % 2);
    start_sums<kColumns / 16>(sums, weights, values + before * kValueStageBytes, kRowBoxBytes);
    if (group == 0 || turn + 1 < turns) barrier_arrive(2 - group, 2 * kGroup);  // the other's turn
    wgmma_wait<1>();
    hold(z);
    release(&keys_empty[stage]);
    weigh(z, top, sum, keep, turn);
    wgmma_wait<0>();
    hold(sums);
    release(&values_empty[before]);
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] *= keep[i / 2 % 2];
    pack(weights, z);
  }
  const int stage = (turns - 1) % kStages;
  wait(&values_full[stage], unsigned((turns - 1) / kStages) % 2);
  start_sums<kColumns / 16>(sums, weights, values + stage * kValueStageBytes, kRowBoxBytes);
  for (int half = 0; half < 2; ++half) {
    sum[half] = quad_sum(sum[half]);
    const std::int64_t t = first + row_of(half);
    if (lane() % 4 == 0 && t < T) lse[t * N + n] = (top[half] * scale * kLog2E + log2f(sum[half])) / kLog2E;
  }
  wgmma_wait<0>();
  hold(sums);
  barrier_sync(3 + group, kGroup);  // waits until the group's queries, where rows are staged now, are read
  write_rows<64>(sums, 1 / sum[0], 1 / sum[1], queries + warp() / 2 * kRowBoxBytes + group * kBoxBytes + warp() % 2 * 4096,
                 o + std::int64_t(n) * kValue, std::int64_t(N) * kValue, mine + 16 * warp(), T);
}

// ---- backward

// Rows of keys stream queries 64 at a time, as many sums as they keep in registers; rows of queries stream keys 128 at a time.
template <bool kRowsAreKeys>
struct Stream {
  static constexpr int kColumns = kRowsAreKeys ? 64 : 128, kBoxColumnBytes = kColumns * kBox * 2;
  static constexpr int kKeyStages = kRowsAreKeys ? 3 : 2, kValueStages = kRowsAreKeys ? 3 : 1;
  static constexpr int kStatisticsBytes = kRowsAreKeys ? 1024 : 0;  // lse and delta, 256 bytes each
  static constexpr int kKeyBytes = 3 * kBoxColumnBytes, kKeyStageBytes = kKeyBytes + kStatisticsBytes, kValueBytes = 2 * kBoxColumnBytes;
  static constexpr int kBytes = 1024 + kRowsKeyBytes + kRowsValueBytes + kKeyStages * kKeyStageBytes + kValueStages * kValueBytes;
};

// Where in a ring of stages a thread is, and the parity of the stage's barrier that it waits for.
template <int kStages>
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  __device__ int before() const { return stage == 0 ? kStages - 1 : stage - 1; }
};

// What backward writes: gradients of queries, or those of keys, with dk_extra summed over a group of heads (groups, T, kExtra).
struct Gradients {
  __nv_bfloat16 *dq, *dkv;
  float* extra_parts;
};

// grid (blocks of 128 rows * ceil(N / heads)), block kThreads: rows, keys or queries, of one head after another against the columns
// that they see. z = rows.columns^T, then dP = values.values^T; with weights P and dz rounded to bf16 in registers the gradient of
// a key gathers dz times queries and P times do, that of a query dz times keys. lse in log2 and delta are (N, stride). At T = 8192,
// N = 32: 1375 GFLOP for keys, 1100 for queries.
template <bool kRowsAreKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_wgmma_kernel(const __grid_constant__ Maps maps, const int2* __restrict__ documents,
                                    const float* __restrict__ lse, const float* __restrict__ delta, std::int64_t stride,
                                    Gradients to, int T, int N, float scale, int heads_a_group, int groups_a_section) {
  using S = Stream<kRowsAreKeys>;
  constexpr int kColumns = S::kColumns, kSums = kColumns / 2, kSteps = kColumns / 16;
  extern __shared__ unsigned char shared[];
  unsigned char* const row_keys = aligned(shared);
  unsigned char* const row_values = row_keys + kRowsKeyBytes;
  unsigned char* const keys = row_values + kRowsValueBytes;
  unsigned char* const values = keys + S::kKeyStages * S::kKeyStageBytes;
  __shared__ std::uint64_t rows_full, rows_empty, keys_full[S::kKeyStages], keys_empty[S::kKeyStages], values_full[S::kValueStages],
      values_empty[S::kValueStages];

  const int row_blocks = (T + kRows - 1) / kRows, groups = (N + heads_a_group - 1) / heads_a_group;
  const auto [of_heads, row_block] = place(row_blocks, groups, groups_a_section);
  const int first = (kRowsAreKeys ? row_block : row_blocks - 1 - row_block) * kRows, last = min(first + kRows, T) - 1;
  const int begin = kRowsAreKeys ? first : documents[first].x / kColumns * kColumns;
  const int end = kRowsAreKeys ? documents[last].y : last + 1;
  const int first_head = of_heads * heads_a_group, last_head = min(first_head + heads_a_group, N) - 1;

  if (threadIdx.x == 0) {
    barrier_init(&rows_full, 1);
    barrier_init(&rows_empty, kWarps);
    for (int i = 0; i < S::kKeyStages; ++i) {
      barrier_init(&keys_full[i], 1);
      barrier_init(&keys_empty[i], kWarps);
    }
    for (int i = 0; i < S::kValueStages; ++i) {
      barrier_init(&values_full[i], 1);
      barrier_init(&values_empty[i], kWarps);
    }
    barriers_are_initialised();
  }
  __syncthreads();  // waits for the barriers
  Turn<S::kKeyStages> key;
  Turn<S::kValueStages> value;

  const int group = group_of_warp();
  if (group < 0) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    const Rows rows = kRowsAreKeys ? keys_of(maps) : queries_of(maps), columns = kRowsAreKeys ? queries_of(maps) : keys_of(maps);
    for (int n = first_head; n <= last_head; ++n) {
      wait(&rows_empty, unsigned(n - first_head + 1) % 2);
      arrive_and_expect(&rows_full, kRowsKeyBytes + kRowsValueBytes);
      for (int at = 0; at < kRows; at += kBox) {
        rows.bring_key(row_keys + at * kBox * 2, kRowBoxBytes, n, first + at, &rows_full);
        rows.bring_value(row_values + at * kBox * 2, kRowBoxBytes, n, first + at, &rows_full);
      }
      for (int column = begin; column < end; column += kColumns, key.next(), value.next()) {
        unsigned char* const key_stage = keys + key.stage * S::kKeyStageBytes;
        std::uint64_t* const key_full = &keys_full[key.stage];
        wait(&keys_empty[key.stage], key.parity ^ 1);
        arrive_and_expect(key_full, S::kKeyBytes + (kRowsAreKeys ? 2 * kColumns * 4 : 0));
        for (int at = 0; at < kColumns; at += kBox)
          columns.bring_key(key_stage + at * kBox * 2, S::kBoxColumnBytes, n, column + at, key_full);
        if (kRowsAreKeys) {
          copy_bytes(key_stage + S::kKeyBytes, lse + n * stride + column, kColumns * 4, key_full);
          copy_bytes(key_stage + S::kKeyBytes + kColumns * 4, delta + n * stride + column, kColumns * 4, key_full);
        }
        wait(&values_empty[value.stage], value.parity ^ 1);
        arrive_and_expect(&values_full[value.stage], S::kValueBytes);
        for (int at = 0; at < kColumns; at += kBox)
          columns.bring_value(values + value.stage * S::kValueBytes + at * kBox * 2, S::kBoxColumnBytes, n, column + at,
                              &values_full[value.stage]);
      }
    }
    return;
  }

  take_registers<240>();
  const unsigned char *const my_keys = row_keys + group * kBoxBytes, *const my_values = row_values + group * kBoxBytes;
  const float to_log2 = scale * kLog2E;
  const int mine = first + 64 * group;
  const int all_low = columns_of<kRowsAreKeys>(documents, min(mine + 63, T - 1), T).low,  // what all rows of the group see
            all_high = columns_of<kRowsAreKeys>(documents, min(mine, T - 1), T).high;
  unsigned char* const staged = row_keys + warp() / 2 * kRowBoxBytes + group * kBoxBytes + warp() % 2 * 4096;
  const auto release = [&](std::uint64_t* barrier) {
    if (lane() == 0) arrive(barrier);
  };
  float d_key[96], d_value[kRowsAreKeys ? 64 : 1];  // d_key is [nope | extra]
#pragma unroll
  for (int i = 64; i < 96; ++i) d_key[i] = 0;
  for (int n = first_head; n <= last_head; ++n) {
#pragma unroll
    for (int i = 0; i < (kRowsAreKeys ? 64 : 96); ++i) d_key[i] = 0;
    if constexpr (kRowsAreKeys) {
#pragma unroll
      for (int i = 0; i < 64; ++i) d_value[i] = 0;
    }
    float lse_of[2] = {}, delta_of[2] = {};
    if constexpr (!kRowsAreKeys)
      for (int half = 0; half < 2; ++half) {
        lse_of[half] = lse[n * stride + first + row_of(half)];
        delta_of[half] = delta[n * stride + first + row_of(half)];
      }
    float z[kSums], dz[kSums];
    unsigned weights[kSums / 2], d_weights[kSums / 2];
    wait(&rows_full, unsigned(n - first_head) % 2);
    for (int column = begin; column < end; column += kColumns, key.next(), value.next()) {
      const unsigned char *const key_stage = keys + key.stage * S::kKeyStageBytes, *const value_stage = values + value.stage * S::kValueBytes;
      const float* const statistics = reinterpret_cast<const float*>(key_stage + S::kKeyBytes) + lane() % 4 * 2;
      wait(&keys_full[key.stage], key.parity);
      start_dots<kKey / 16>(z, my_keys, key_stage, S::kBoxColumnBytes);
      wgmma_wait<0>();  // for z, and for the sums over the columns before
      hold(z);
      hold(d_key);
      if (column != begin) release(&keys_empty[key.before()]);
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        z[i] = exp2_fast(z[i] * to_log2 - (kRowsAreKeys ? statistics[i / 4 * 8 + i % 2] : lse_of[i / 2 % 2]));
      if (column < all_low || column + kColumns > all_high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Seen seen = columns_of<kRowsAreKeys>(documents, first + row_of(half), T);
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int s = column + 8 * j + lane() % 4 * 2 + i;
              if (s < seen.low || s >= seen.high) z[4 * j + 2 * half + i] = 0;
            }
        }
      }
      pack(weights, z);
      wait(&values_full[value.stage], value.parity);
      start_dots<kValue / 16>(dz, my_values, value_stage, S::kBoxColumnBytes);
      if constexpr (kRowsAreKeys) start_sums<kSteps>(d_value, weights, value_stage, S::kBoxColumnBytes);
      wgmma_wait<0>();
      hold(dz);
      if constexpr (kRowsAreKeys) hold(d_value);
      release(&values_empty[value.stage]);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 p = unpacked(weights[2 * j + half]);
          const int i = 4 * j + 2 * half, c = kColumns + 8 * j;
          const float low = kRowsAreKeys ? statistics[c] : delta_of[half], high = kRowsAreKeys ? statistics[c + 1] : delta_of[half];
          d_weights[2 * j + half] = packed(p.x * (dz[i] - low), p.y * (dz[i + 1] - high));
        }
      start_sums<kSteps>(d_key, d_weights, key_stage, S::kBoxColumnBytes);
    }
    wgmma_wait<0>();
    hold(d_key);
    release(&keys_empty[key.before()]);
    barrier_sync(1 + group, kGroup);  // waits until the group's rows, where gradients are staged now, are read
    const std::int64_t at = mine + 16 * warp();
    if constexpr (kRowsAreKeys) {
      const std::int64_t row = std::int64_t(N) * (kNope + kValue);
      __nv_bfloat16* const dkv = to.dkv + std::int64_t(n) * (kNope + kValue);
      write_rows<64>(d_key, scale, scale, staged, dkv, row, at, T);
      write_rows<64>(d_value, 1, 1, staged, dkv + kNope, row, at, T);
    } else {
      const std::int64_t row = std::int64_t(N) * kKey;
      write_rows<64>(d_key, scale, scale, staged, to.dq + std::int64_t(n) * kKey, row, at, T);
      write_rows<32>(d_key + 64, scale, scale, staged, to.dq + std::int64_t(n) * kKey + kNope, row, at, T);
    }
    fence_for_copies();
    __syncwarp();  // waits for the lanes' fences
    release(&rows_empty);
  }
  if constexpr (kRowsAreKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t t = first + row_of(half);
      if (t >= T) continue;
      float* const part = to.extra_parts + (std::int64_t(of_heads) * T + t) * kExtra + lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(part + 8 * j) = {d_key[64 + 4 * j + 2 * half] * scale, d_key[64 + 4 * j + 2 * half + 1] * scale};
    }
  }
}

// ---- the host's side

// A bf16 tensor (T, heads, width) in boxes of 64 rows of one head by 64 columns.
CUtensorMap map_of(ConstTensor t, std::int64_t heads) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cuda_ok(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    check(result == cudaDriverEntryPointSuccess, "attention: the driver has no cuTensorMapEncodeTiled", {{"result", int(result)}});
    return reinterpret_cast<Encode>(found);
  }();
  const std::int64_t T = t.shape[0], width = t.count() / T / heads;
  const cuuint64_t dims[3] = {cuuint64_t(width), cuuint64_t(heads), cuuint64_t(T)},
                   strides[2] = {cuuint64_t(2 * width), cuuint64_t(2 * width * heads)};
  const cuuint32_t box[3] = {kBox, 1, kBox}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult status =
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(t.data), dims, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  check(status == CUDA_SUCCESS, "attention: the copy engine takes no such tensor",
        {{"status", int(status)}, {"T", T}, {"heads", heads}, {"width", width}});
  return map;
}
template <class Args>
Maps maps_of(const Args& a) {
  Maps maps = {.q = map_of(a.q, a.q.shape[1]), .kv = map_of(a.kv, a.q.shape[1]), .k_extra = map_of(a.k_extra, 1)};
  if constexpr (requires { a.do_; }) maps.dout = map_of(a.do_, a.q.shape[1]);
  return maps;
}

int heads_a_section(std::int64_t T, std::int64_t heads) {
  constexpr std::int64_t kStayInL2 = 24 << 20;
  return int(std::clamp(kStayInL2 / (T * (kKey + kValue) * 2), std::int64_t(1), heads));
}

template <class Args>
bool takes(const Args& a, std::initializer_list<ConstTensor> tensors) {
  return a.q.dtype == DType::bf16 && a.q.shape[2] == kKey && a.k_extra.shape[1] == kExtra && a.o.shape[2] == kValue && a.scale > 0 &&
         in_packs<8>(kKey, tensors);
}

}  // namespace

bool cuda::wgmma_takes(const AttentionForward& a) { return takes(a, {a.q, a.kv, a.k_extra, a.o}); }

bool cuda::wgmma_takes(const AttentionBackward& a) {
  return takes(a, {a.do_, a.q, a.kv, a.k_extra, a.dq, a.dkv});
}

void cuda::attention_wgmma(Context& ctx, const AttentionForward& a, ConstTensor documents) {
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1];
  launch(ctx, attention_forward_wgmma_kernel, {blocks((T + kRows - 1) / kRows * N, 1), kThreads, kForwardBytes}, maps_of(a),
         static_cast<const int2*>(documents.data), device_pointer<bf16>(a.o), a.lse.as<float>(), int(T), int(N), float(a.scale),
         heads_a_section(T, N));
}

void cuda::attention_wgmma(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch) {
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1], groups = scratch.extra_parts.shape[0], row_blocks = (T + kRows - 1) / kRows;
  const Maps maps = maps_of(a);
  const auto* documents = static_cast<const int2*>(scratch.documents.data);
  const float *lse = scratch.lse.as<float>(), *delta = scratch.delta.as<float>();
  const std::int64_t stride = scratch.lse.shape[1];
  const Gradients to = {device_pointer<bf16>(a.dq), device_pointer<bf16>(a.dkv), scratch.extra_parts.as<float>()};
  launch(ctx, attention_backward_wgmma_kernel<true>, {blocks(row_blocks * groups, 1), kThreads, Stream<true>::kBytes}, maps, documents, lse,
         delta, stride, to, int(T), int(N), float(a.scale), int(a.heads_a_group()),
         heads_a_section(T, groups));
  launch(ctx, attention_backward_wgmma_kernel<false>, {blocks(row_blocks * N, 1), kThreads, Stream<false>::kBytes}, maps, documents, lse,
         delta, stride, to, int(T), int(N), float(a.scale), 1, heads_a_section(T, N));
}

}  // namespace moetrain::ops
