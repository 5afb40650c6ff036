// attention_forward.cu -- the forward pass of attention on wgmma: tiles by the copy engine, softmax in registers. k_extra is read
// as it lies, for every head anew from the L2.
#include "ops/cuda/attention_tiles.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;                   // NOLINT: the helpers of this backend
using namespace cuda::attention_tiles;  // NOLINT

constexpr int kColumns = 128, kStages = 2, kPanelBytes = kColumns * kBox * 2;
constexpr int kKeyBytes = 3 * kPanelBytes, kValueBytes = 2 * kPanelBytes;
constexpr int kSharedBytes = 1024 + kRowsKeyBytes + kStages * (kKeyBytes + kValueBytes);

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
    keep[half] = power_of_2(top[half] * to_log2 - from);
#pragma unroll
    for (int j = 0; j < 16; ++j)
#pragma unroll
      for (int i = 4 * j + 2 * half; i < 4 * j + 2 * half + 2; ++i) part += z[i] = power_of_2(z[i] * to_log2 - from);
    top[half] = most;
    sum[half] = sum[half] * keep[half] + part;
  }
}

// grid (blocks of 128 queries * N), block kThreads: the longest blocks of a section first. Group -1 brings keys and values from the
// diagonal down, the others have 64 queries each and take turns: one multiplies while the other is at its softmax. 687 GFLOP at
// T = 8192, N = 32.
__global__ void __launch_bounds__(kThreads, 1)
    attention_forward_wgmma_kernel(const __grid_constant__ Maps maps, const Sight sight, __nv_bfloat16* __restrict__ o,
                                   float* __restrict__ lse, int N, float scale, int heads_a_section) {
  extern __shared__ unsigned char shared[];
  __shared__ std::uint64_t queries_full, key_barriers[2 * kStages], value_barriers[2 * kStages];
  unsigned char* const staged = aligned(shared);  // queries, and o at the end
  const std::uint32_t queries = shared_address(staged), full = shared_address(&queries_full);
  Ring<kStages, kKeyBytes> keys(queries + kRowsKeyBytes, key_barriers);
  Ring<kStages, kValueBytes> values(keys.stages + kStages * kKeyBytes, value_barriers);

  const int T = sight.count, row_blocks = (T + kRows - 1) / kRows;
  const auto [n, row_block] = place(row_blocks, N, heads_a_section);
  const int first = (row_blocks - 1 - row_block) * kRows;
  const Seen any = sight.any_of_pair(first);
  const int begin = any.low / kColumns, turns = (any.high - 1) / kColumns + 1 - begin;  // blocks of keys

  if (threadIdx.x == 0) {
    barrier_init(full, 1);
    keys.init();
    values.init();
    fence_barrier_init();
  }
  __syncthreads();  // waits for the barriers

  const int group = group_of_warp();
  if (group < 0) {
    leave_registers<24>();
    if (threadIdx.x != 0) return;
    const Rows rows = queries_of(maps), columns = keys_of(maps);
    const auto bring_keys = [&](int turn) {
      keys.expect(kKeyBytes);
      for (int at = 0; at < kColumns; at += kBox)
        columns.bring_key(keys.here() + at * kBox * 2, kPanelBytes, n, (begin + turns - 1 - turn) * kColumns + at, keys.full());
      keys.next();
    };
    barrier_arrive_and_expect(full, kRowsKeyBytes);
    for (int at = 0; at < kRows; at += kBox) rows.bring_key(queries + at * kBox * 2, kRowBoxBytes, n, first + at, full);
    bring_keys(0);
    for (int turn = 0; turn < turns; ++turn) {
      if (turn + 1 < turns) bring_keys(turn + 1);
      values.expect(kValueBytes);
      for (int at = 0; at < kColumns; at += kBox)
        columns.bring_value(values.here() + at * kBox * 2, kPanelBytes, n, (begin + turns - 1 - turn) * kColumns + at,
                            values.full());
      values.next();
    }
    return;
  }

  take_registers<240>();
  const std::uint32_t my_queries = queries + group * kBoxBytes;
  const int mine = first + 64 * group;
  const Seen seen[2] = {sight.rows[first + row_of(0)], sight.rows[first + row_of(1)]};
  const Seen all = sight.tiles[mine / kSeenTile].all;  // what all rows of the group see
  const auto weigh = [&](float(&z)[64], float(&top)[2], float(&sum)[2], float(&keep)[2], int turn) {
    const int column = (begin + turns - 1 - turn) * kColumns;
    softmax(z, top, sum, keep, scale * kLog2E, column, seen, all.low <= column && column + kColumns <= all.high);
  };
  float z[64], sums[64], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, keep[2];
  unsigned weights[32];
#pragma unroll
  for (int i = 0; i < 64; ++i) sums[i] = 0;

  barrier_wait(full, 0);
  keys.await();
  start_dots<kKey / 16>(z, my_queries, keys.here(), kPanelBytes);
  if (group == 1 && turns > 1) named_barrier_arrive(1, 2 * kGroup);  // group 0 has the first turn
  wgmma_wait<0>();
  settle(z);
  keys.release();
  keys.next();
  weigh(z, top, sum, keep, 0);
  pack(weights, z);
  for (int turn = 1; turn < turns; ++turn) {
    keys.await();
    named_barrier_sync(1 + group, 2 * kGroup);  // waits for this group's turn
    start_dots<kKey / 16>(z, my_queries, keys.here(), kPanelBytes);
    values.await();
    start_sums<kColumns / 16>(sums, weights, values.here(), kPanelBytes);
    if (group == 0 || turn + 1 < turns) named_barrier_arrive(2 - group, 2 * kGroup);  // the other's turn
    wgmma_wait<1>();
    settle(z);
    keys.release();
    keys.next();
    weigh(z, top, sum, keep, turn);
    wgmma_wait<0>();
    settle(sums);
    values.release();
    values.next();
#pragma unroll
    for (int i = 0; i < 64; ++i) sums[i] *= keep[i / 2 % 2];
    pack(weights, z);
  }
  values.await();
  start_sums<kColumns / 16>(sums, weights, values.here(), kPanelBytes);
  for (int half = 0; half < 2; ++half) {
    sum[half] = quad_sum(sum[half]);
    const std::int64_t t = first + row_of(half);
    if (lane() % 4 == 0 && t < T) lse[t * N + n] = (top[half] * scale * kLog2E + log2f(sum[half])) / kLog2E;
  }
  wgmma_wait<0>();
  settle(sums);
  warpgroup_sync(3 + group);  // waits until the group's queries, where rows are staged now, are read
  write_rows<64>(sums, 1 / sum[0], 1 / sum[1], staged + warp() / 2 * kRowBoxBytes + group * kBoxBytes + warp() % 2 * 4096,
                 o + std::int64_t(n) * kValue, std::int64_t(N) * kValue, mine + 16 * warp(), T);
}

}  // namespace

bool cuda::wgmma_takes(const AttentionForward& a) { return takes(a, {a.q, a.kv, a.k_extra, a.o}); }

void cuda::attention_wgmma(Context& ctx, const AttentionForward& a, const AttentionSight& of_queries) {
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1];
  launch(ctx, attention_forward_wgmma_kernel, {blocks((T + kRows - 1) / kRows * N, 1), kThreads, kSharedBytes}, maps_of(a),
         Sight(of_queries), device_pointer<bf16>(a.o), a.lse.as<float>(), int(N), float(a.scale),
         heads_a_section(a.kv.shape[0], N));
}

}  // namespace moetrain::ops
