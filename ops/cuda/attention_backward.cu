// attention_backward.cu -- the backward pass of attention on wgmma, in two passes that each write their own gradients: over blocks
// of keys, and over blocks of queries. That is 7 products instead of 5, but no sum in memory and no order between blocks.
#include "ops/cuda/attention.cuh"
#include "ops/cuda/instructions.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kNope = 128, kExtra = 64, kValue = 128, kKey = kNope + kExtra;
constexpr int kBox = 64;  // columns and rows of what one copy brings
constexpr int kBoxBytes = kBox * kBox * 2;
constexpr int kRows = 128, kGroup = 128;     // rows of a block; threads of a group of warps, which owns 64 rows
constexpr int kThreads = 3 * kGroup;         // one group brings, two multiply
constexpr int kRowBoxBytes = 2 * kBoxBytes;  // 64 columns of the block's rows
constexpr int kRowsKeyBytes = 3 * kRowBoxBytes, kRowsValueBytes = 2 * kRowBoxBytes;
constexpr int kWarps = 2 * kGroup / kWarp;  // that multiply

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
      *reinterpret_cast<uint4*>(to + (first + s) * row + 8 * j) =
          *reinterpret_cast<const uint4*>(stage + s * kRowBytes + (j ^ s % 8) * 16);
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

constexpr int kStreamed = 64, kStreams = 3;  // columns of a stage, stages
constexpr int kStreamKeyBytes = 3 * kBoxBytes, kStreamValueBytes = 2 * kBoxBytes;
constexpr int kStreamStatisticsBytes = 1024;  // of queries: lse and delta, 256 bytes each
constexpr int kStreamBytes = kStreamKeyBytes + kStreamValueBytes + kStreamStatisticsBytes;
constexpr int kBackwardBytes = 1024 + kRowsKeyBytes + kRowsValueBytes + kStreams * kStreamBytes;

// Where in the ring of stages a thread is, and the parity of the stage's barrier that it waits for.
struct Turn {
  int stage = 0;
  unsigned parity = 0;
  __device__ void next() {
    if (++stage == kStreams) stage = 0, parity ^= 1;
  }
  __device__ int before() const { return stage == 0 ? kStreams - 1 : stage - 1; }
};

// What backward writes: gradients of queries, or those of keys, with dk_extra summed over a group of heads (groups, T, kExtra).
struct Gradients {
  __nv_bfloat16 *dq, *dkv;
  float* extra_parts;
};

// grid (blocks of 128 rows * ceil(N / heads)), block kThreads: rows, keys or queries, of one head after another against the columns
// that they see, 64 at a time. z = rows.columns^T, then dP = values.values^T; with weights P and dz rounded to bf16 in registers
// the gradient of a key gathers dz times queries and P times do, that of a query dz times keys. lse in log2 and delta are
// (N, stride). At
// T = 8192, N = 32: 1375 GFLOP for keys, 1100 for queries.
template <bool kRowsAreKeys>
__global__ void __launch_bounds__(kThreads, 1)
    attention_backward_wgmma_kernel(const __grid_constant__ Maps maps, const int2* __restrict__ documents,
                                    const float* __restrict__ lse, const float* __restrict__ delta, std::int64_t stride,
                                    Gradients to, int T, int N, float scale, int heads_a_group, int groups_a_section) {
  extern __shared__ unsigned char shared[];
  unsigned char* const row_keys = aligned(shared);
  unsigned char* const row_values = row_keys + kRowsKeyBytes;
  unsigned char* const streams = row_values + kRowsValueBytes;
  __shared__ std::uint64_t rows_full, rows_empty, full[kStreams], empty[kStreams];

  const int row_blocks = (T + kRows - 1) / kRows, groups = (N + heads_a_group - 1) / heads_a_group;
  const auto [of_heads, row_block] = place(row_blocks, groups, groups_a_section);
  const int first = (kRowsAreKeys ? row_block : row_blocks - 1 - row_block) * kRows, last = min(first + kRows, T) - 1;
  const int begin = kRowsAreKeys ? first : documents[first].x / kStreamed * kStreamed;
  const int end = kRowsAreKeys ? documents[last].y : last + 1;
  const int first_head = of_heads * heads_a_group, last_head = min(first_head + heads_a_group, N) - 1;

  if (threadIdx.x == 0) {
    barrier_init(&rows_full, 1);
    barrier_init(&rows_empty, kWarps);
    for (int i = 0; i < kStreams; ++i) {
      barrier_init(&full[i], 1);
      barrier_init(&empty[i], kWarps);
    }
    barriers_are_initialised();
  }
  __syncthreads();  // waits for the barriers

  const int group = group_of_warp();
  if (group < 0) {
    give_registers<24>();
    if (threadIdx.x != 0) return;
    const Rows rows = kRowsAreKeys ? keys_of(maps) : queries_of(maps), columns = kRowsAreKeys ? queries_of(maps) : keys_of(maps);
    Turn turn;
    for (int n = first_head; n <= last_head; ++n) {
      wait(&rows_empty, unsigned(n - first_head + 1) % 2);
      arrive_and_expect(&rows_full, kRowsKeyBytes + kRowsValueBytes);
      for (int half = 0; half < 2; ++half) {
        rows.bring_key(row_keys + half * kBoxBytes, kRowBoxBytes, n, first + half * kBox, &rows_full);
        rows.bring_value(row_values + half * kBoxBytes, kRowBoxBytes, n, first + half * kBox, &rows_full);
      }
      for (int column = begin; column < end; column += kStreamed, turn.next()) {
        unsigned char* const at = streams + turn.stage * kStreamBytes;
        std::uint64_t* const here = &full[turn.stage];
        wait(&empty[turn.stage], turn.parity ^ 1);
        arrive_and_expect(here, kStreamKeyBytes + kStreamValueBytes + (kRowsAreKeys ? 2 * kStreamed * 4 : 0));
        columns.bring_key(at, kBoxBytes, n, column, here);
        columns.bring_value(at + kStreamKeyBytes, kBoxBytes, n, column, here);
        if (kRowsAreKeys) {
          unsigned char* const statistics = at + kStreamKeyBytes + kStreamValueBytes;
          copy_bytes(statistics, lse + n * stride + column, kStreamed * 4, here);
          copy_bytes(statistics + kStreamed * 4, delta + n * stride + column, kStreamed * 4, here);
        }
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
  float d_key[96], d_value[kRowsAreKeys ? 64 : 1];  // d_key is [nope | extra]
#pragma unroll
  for (int i = 64; i < 96; ++i) d_key[i] = 0;
  Turn turn;
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
    float z[32], dz[32];
    unsigned weights[16], d_weights[16];
    wait(&rows_full, unsigned(n - first_head) % 2);
    for (int column = begin; column < end; column += kStreamed, turn.next()) {
      const unsigned char* const at = streams + turn.stage * kStreamBytes;
      const float* const statistics = reinterpret_cast<const float*>(at + kStreamKeyBytes + kStreamValueBytes);
      wait(&full[turn.stage], turn.parity);
      start_dots<kKey / 16>(z, my_keys, at, kBoxBytes);
      if constexpr (kRowsAreKeys) {
        wgmma_wait<0>();  // for z, and for the sums over the columns before
      } else {
        start_dots<kValue / 16>(dz, my_values, at + kStreamKeyBytes, kBoxBytes);  // keys have no registers left for it so early
        wgmma_wait<1>();
      }
      hold(z);
      hold(d_key);
      if (column != begin && lane() == 0) arrive(&empty[turn.before()]);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float sum = kRowsAreKeys ? statistics[i / 4 * 8 + lane() % 4 * 2 + i % 2] : lse_of[i / 2 % 2];
        z[i] = exp2_fast(z[i] * to_log2 - sum);
      }
      if (column < all_low || column + kStreamed > all_high) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Seen seen = columns_of<kRowsAreKeys>(documents, first + row_of(half), T);
#pragma unroll
          for (int j = 0; j < 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const int s = column + 8 * j + lane() % 4 * 2 + i;
              if (s < seen.low || s >= seen.high) z[4 * j + 2 * half + i] = 0;
            }
        }
      }
      if constexpr (kRowsAreKeys) {
        pack(weights, z);
        start_dots<kValue / 16>(dz, my_values, at + kStreamKeyBytes, kBoxBytes);
        start_sums<kStreamed / 16>(d_value, weights, at + kStreamKeyBytes, kBoxBytes);
      }
      wgmma_wait<0>();
      hold(dz);
      if constexpr (kRowsAreKeys) hold(d_value);
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = 4 * j + 2 * half, c = kStreamed + 8 * j + lane() % 4 * 2;
          const float low = kRowsAreKeys ? statistics[c] : delta_of[half], high = kRowsAreKeys ? statistics[c + 1] : delta_of[half];
          const float2 p = kRowsAreKeys ? unpacked(weights[2 * j + half]) : float2{z[i], z[i + 1]};
          d_weights[2 * j + half] = packed(p.x * (dz[i] - low), p.y * (dz[i + 1] - high));
        }
      start_sums<kStreamed / 16>(d_key, d_weights, at, kBoxBytes);
    }
    wgmma_wait<0>();
    hold(d_key);
    if (lane() == 0) arrive(&empty[turn.before()]);
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
    if (lane() == 0) arrive(&rows_empty);
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
  const CUresult status = encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(t.data), dims, strides, box, steps,
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
  return a.q.dtype == DType::bf16 && a.q.shape[2] == kKey && a.k_extra.shape[1] == kExtra && a.o.shape[2] == kValue &&
         a.scale > 0 && in_packs<8>(kKey, tensors);
}

}  // namespace

bool cuda::wgmma_takes(const AttentionBackward& a) { return takes(a, {a.do_, a.q, a.kv, a.k_extra, a.dq, a.dkv}); }

void cuda::attention_wgmma(Context& ctx, const AttentionBackward& a, const AttentionBackward::Scratch& scratch) {
  const std::int64_t T = a.q.shape[0], N = a.q.shape[1], groups = scratch.extra_parts.shape[0],
                     row_blocks = (T + kRows - 1) / kRows;
  const Maps maps = maps_of(a);
  const auto* documents = static_cast<const int2*>(scratch.documents.data);
  const float *lse = scratch.lse.as<float>(), *delta = scratch.delta.as<float>();
  const std::int64_t stride = scratch.lse.shape[1];
  const Gradients to = {device_pointer<bf16>(a.dq), device_pointer<bf16>(a.dkv), scratch.extra_parts.as<float>()};
  launch(ctx, attention_backward_wgmma_kernel<true>, {blocks(row_blocks * groups, 1), kThreads, kBackwardBytes}, maps, documents,
         lse, delta, stride, to, int(T), int(N), float(a.scale), int(a.heads_a_group()), heads_a_section(T, groups));
  launch(ctx, attention_backward_wgmma_kernel<false>, {blocks(row_blocks * N, 1), kThreads, kBackwardBytes}, maps, documents, lse,
         delta, stride, to, int(T), int(N), float(a.scale), 1, heads_a_section(T, N));
}

}  // namespace moetrain::ops
