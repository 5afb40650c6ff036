// attention_backward.cu -- the backward pass of attention on wgmma, in two passes that each write their own gradients: over blocks
// of keys, and over blocks of queries. That is 7 products instead of 5, but no sum in memory and no order between blocks.
#include "ops/cuda/attention_tiles.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;                   // NOLINT: the helpers of this backend
using namespace cuda::attention_tiles;  // NOLINT

// The columns stream by, 64 at a time.
constexpr int kColumns = 64, kPanelBytes = kColumns * kBox * 2, kStages = 3;
constexpr int kKeyBytes = 3 * kPanelBytes, kValueBytes = 2 * kPanelBytes;
constexpr int kStatisticsBytes = 2 * kColumns * 4,
              kStageBytes = kKeyBytes + kValueBytes + 1024;  // lse and delta of queries, padded
constexpr int kSharedBytes = 1024 + kRowsKeyBytes + kRowsValueBytes + kStages * kStageBytes;

// What backward writes: gradients of queries, or those of keys, with dk_extra summed over a group of heads (groups, keys, kExtra).
struct Gradients {
  __nv_bfloat16 *dq, *dkv;
  float* extra_parts;
};

// To `rows` rows of so many packs, `row` packs apart; by all threads.
__device__ void write_zeros(uint4* to, std::int64_t row, int rows, int packs) {
  for (int i = int(threadIdx.x); i < rows * packs; i += kThreads) to[i / packs * row + i % packs] = {};
}

// grid (blocks of 128 rows * ceil(N / heads)), block kThreads: rows, keys or queries, of one head after another against the columns
// that they see. z = rows.columns^T, then dP = values.values^T; with P and dz rounded to bf16 in registers the gradient of
// a key gathers dz times queries and P times do, that of a query dz times keys. lse in log2 and delta are (N, stride). At T = 8192,
// N = 32: 1375 GFLOP for keys, 1100 for queries.
template <bool kRowsAreKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_wgmma_kernel(const __grid_constant__ Maps maps, const Sight sight, const float* __restrict__ lse,
                                    const float* __restrict__ delta, std::int64_t stride, Gradients to, int N, float scale,
                                    int heads_a_group, int groups_a_section) {
  constexpr int kSums = kColumns / 2, kSteps = kColumns / 16;
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t row_barriers[2], column_barriers[2 * kStages];
  unsigned char* const base = aligned(shared);
  Ring<1, kRowsKeyBytes + kRowsValueBytes> rows(shared_address(base), row_barriers);
  Ring<kStages, kStageBytes> columns(rows.stages + kRowsKeyBytes + kRowsValueBytes, column_barriers);

  const int count = sight.count, row_blocks = (count + kRows - 1) / kRows, groups = (N + heads_a_group - 1) / heads_a_group;
  const auto [of_heads, row_block] = place(row_blocks, groups, groups_a_section);
  const int first = (kRowsAreKeys ? row_block : row_blocks - 1 - row_block) * kRows;
  const Seen any = sight.any_of_pair(first);
  const int first_head = of_heads * heads_a_group, last_head = min(first_head + heads_a_group, N) - 1;
  const int begin = any.low / kColumns * kColumns, end = any.high;
  if (kRowsAreKeys && begin >= end) {  // no query here sees these keys
    constexpr int kHeadPacks = (kNope + kValue) / 8, kExtraPacks = kExtra / 4;
    const int there = min(kRows, count - first);
    write_zeros(reinterpret_cast<uint4*>(to.dkv) + (std::int64_t(first) * N + first_head) * kHeadPacks,
                std::int64_t(N) * kHeadPacks, there, (last_head + 1 - first_head) * kHeadPacks);
    write_zeros(reinterpret_cast<uint4*>(to.extra_parts) + (std::int64_t(of_heads) * count + first) * kExtraPacks, kExtraPacks,
                there, kExtraPacks);
    return;
  }

  if (threadIdx.x == 0) {
    rows.init();
    columns.init();
    fence_barrier_init();
  }
  __syncthreads();  // waits for the barriers

  const int group = group_of_warp();
  if (group < 0) {
    leave_registers<24>();
    if (threadIdx.x != 0) return;
    const Rows of_rows = kRowsAreKeys ? keys_of(maps) : queries_of(maps),
               of_columns = kRowsAreKeys ? queries_of(maps) : keys_of(maps);
    for (int n = first_head; n <= last_head; ++n, rows.next()) {
      rows.expect(kRowsKeyBytes + kRowsValueBytes);
      for (int at = 0; at < kRows; at += kBox) {
        of_rows.bring_key(rows.here() + at * kBox * 2, kRowBoxBytes, n, first + at, rows.full());
        of_rows.bring_value(rows.here() + kRowsKeyBytes + at * kBox * 2, kRowBoxBytes, n, first + at, rows.full());
      }
      for (int column = begin; column < end; column += kColumns, columns.next()) {
        columns.expect(kKeyBytes + kValueBytes + (kRowsAreKeys ? kStatisticsBytes : 0));
        of_columns.bring_key(columns.here(), kPanelBytes, n, column, columns.full());
        of_columns.bring_value(columns.here() + kKeyBytes, kPanelBytes, n, column, columns.full());
        if (kRowsAreKeys) {
          const std::uint32_t statistics = columns.here() + kKeyBytes + kValueBytes;
          copy_bytes(statistics, lse + n * stride + column, kStatisticsBytes / 2, columns.full());
          copy_bytes(statistics + kStatisticsBytes / 2, delta + n * stride + column, kStatisticsBytes / 2, columns.full());
        }
      }
    }
    return;
  }

  take_registers<240>();
  const std::uint32_t my_keys = rows.stages + group * kBoxBytes, my_values = my_keys + kRowsKeyBytes;
  const float to_log2 = scale * kLog2E;
  const int mine = first + 64 * group;
  const Seen all = sight.tiles[mine / kSeenTile].all;  // what all rows of the group see
  unsigned char* const staged = base + warp() / 2 * kRowBoxBytes + group * kBoxBytes + warp() % 2 * 4096;
  float d_key[96], d_value[kRowsAreKeys ? 64 : 1];  // d_key is [nope | extra]
#pragma unroll
  for (int i = 64; i < 96; ++i) d_key[i] = 0;
  for (int n = first_head; n <= last_head; ++n, rows.next()) {
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
    rows.await();
    for (int column = begin; column < end; column += kColumns, columns.next()) {
      const std::uint32_t keys = columns.here(), values = keys + kKeyBytes;
      const float* const statistics = reinterpret_cast<const float*>(base + (values - rows.stages) + kValueBytes) + lane() % 4 * 2;
      columns.await();
      start_dots<kKey / 16>(z, my_keys, keys, kPanelBytes);
      if constexpr (!kRowsAreKeys) {  // keys have no registers left for dz so early
        start_dots<kValue / 16>(dz, my_values, values, kPanelBytes);
      }
      wgmma_wait<kRowsAreKeys ? 0 : 1>();  // for z, and for the sums over the columns before
      settle(z);
      settle(d_key);
      if (column != begin) columns.release_last();
#pragma unroll
      for (int i = 0; i < kSums; ++i)
        z[i] = power_of_2(z[i] * to_log2 - (kRowsAreKeys ? statistics[i / 4 * 8 + i % 2] : lse_of[i / 2 % 2]));
      if (column < all.low || column + kColumns > all.high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          int row = first + row_of(half);
          asm volatile("" : "+r"(row));  // what follows from it is not worth a register in the loops around
          const Seen seen = sight.rows[row];
#pragma unroll
          for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int s = column + 8 * j + lane() % 4 * 2 + i;
              if (s < seen.low || s >= seen.high) z[4 * j + 2 * half + i] = 0;
            }
        }
      }
      if constexpr (kRowsAreKeys) {
        pack(weights, z);
        start_dots<kValue / 16>(dz, my_values, values, kPanelBytes);
        start_sums<kSteps>(d_value, weights, values, kPanelBytes);
      }
      wgmma_wait<0>();
      settle(dz);
      if constexpr (kRowsAreKeys) settle(d_value);
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * j + 2 * half, c = kColumns + 8 * j;
          const float2 p = kRowsAreKeys ? unpacked(weights[2 * j + half]) : float2{z[i], z[i + 1]};
          const float low = kRowsAreKeys ? statistics[c] : delta_of[half], high = kRowsAreKeys ? statistics[c + 1] : delta_of[half];
          d_weights[2 * j + half] = packed(p.x * (dz[i] - low), p.y * (dz[i + 1] - high));
        }
      start_sums<kSteps>(d_key, d_weights, keys, kPanelBytes);
    }
    wgmma_wait<0>();
    settle(d_key);
    columns.release_last();
    warpgroup_sync(1 + group);  // waits until the group's rows, where gradients are staged now, are read
    const std::int64_t at = mine + 16 * warp();
    if constexpr (kRowsAreKeys) {
      const std::int64_t row = std::int64_t(N) * (kNope + kValue);
      __nv_bfloat16* const dkv = to.dkv + std::int64_t(n) * (kNope + kValue);
      write_rows<64>(d_key, scale, scale, staged, dkv, row, at, count);
      write_rows<64>(d_value, 1, 1, staged, dkv + kNope, row, at, count);
    } else {
      const std::int64_t row = std::int64_t(N) * kKey;
      write_rows<64>(d_key, scale, scale, staged, to.dq + std::int64_t(n) * kKey, row, at, count);
      write_rows<32>(d_key + 64, scale, scale, staged, to.dq + std::int64_t(n) * kKey + kNope, row, at, count);
    }
    fence_shared_writes();
    rows.release();
  }
  if constexpr (kRowsAreKeys) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t t = first + row_of(half);
      if (t >= count) continue;
      float* const part = to.extra_parts + (std::int64_t(of_heads) * count + t) * kExtra + lane() % 4 * 2;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        *reinterpret_cast<float2*>(part + 8 * j) = {d_key[64 + 4 * j + 2 * half] * scale, d_key[64 + 4 * j + 2 * half + 1] * scale};
    }
  }
}

}  // namespace

bool cuda::wgmma_takes(const AttentionBackward& a) { return takes(a, {a.do_, a.q, a.kv, a.k_extra, a.dq, a.dkv}); }

void cuda::attention_wgmma(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch) {
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1], keys = a.kv.shape[0], groups = scratch.extra_parts.shape[0];
  const Maps maps = maps_of(a);
  const float *lse = scratch.lse.as<float>(), *delta = scratch.delta.as<float>();
  const std::int64_t stride = scratch.lse.shape[1];
  const Gradients to = {device_pointer<bf16>(a.dq), device_pointer<bf16>(a.dkv), scratch.extra_parts.as<float>()};
  launch(ctx, attention_backward_wgmma_kernel<true>, {blocks((keys + kRows - 1) / kRows * groups, 1), kThreads, kSharedBytes}, maps,
         Sight(scratch.of_keys), lse, delta, stride, to, int(N), float(a.scale), int(a.heads_a_group()),
         heads_a_section(T, groups));
  launch(ctx, attention_backward_wgmma_kernel<false>, {blocks((T + kRows - 1) / kRows * N, 1), kThreads, kSharedBytes}, maps,
         Sight(scratch.of_queries), lse, delta, stride, to, int(N), float(a.scale), 1, heads_a_section(keys, N));
}

}  // namespace moetrain::ops
