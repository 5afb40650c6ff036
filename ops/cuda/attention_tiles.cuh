// attention_tiles.cuh -- how the wgmma kernels of attention lay a block's tiles out, bring them and write rows back: bf16, heads
// [128 nope | 64 extra], values of 128.
#pragma once
#include "ops/cuda/attention.cuh"
#include "ops/cuda/attention_products.cuh"

namespace moetrain::ops::cuda::attention_tiles {

constexpr int kNope = 128, kExtra = 64, kValue = 128, kKey = kNope + kExtra;
constexpr int kBox = 64, kBoxBytes = kBox * kBox * 2;        // columns and rows of what one copy brings
constexpr int kRows = 128, kRowBoxBytes = kRows * kBox * 2;  // rows of a block; 64 columns of them
constexpr int kRowsKeyBytes = 3 * kRowBoxBytes, kRowsValueBytes = 2 * kRowBoxBytes;
constexpr int kGroup = 128, kThreads = 3 * kGroup;  // a warpgroup; one brings, two multiply, 64 of the block's rows each
constexpr int kWarps = 2 * kGroup / kWarp;          // that multiply

// Tensors (T or keys, heads, width) as the copy engine sees them: boxes of 64 rows of a head by 64 columns, zeros past the last row.
struct Maps {
  CUtensorMap q, kv, k_extra, dout;
};

// What a row brings to a score, [nope | extra], and to the other product.
struct Rows {
  const CUtensorMap *key, *extra, *value;
  int extra_at, value_at;  // first column
  bool extra_shared;       // by all heads
  // 64 rows from t on, to `to` and, for further columns, a panel of 64 columns on.
  __device__ void bring_key(std::uint32_t to, int panel_bytes, int n, int t, std::uint32_t barrier) const {
    copy_box(to, key, barrier, 0, n, t);
    copy_box(to + panel_bytes, key, barrier, kBox, n, t);
    copy_box(to + 2 * panel_bytes, extra, barrier, extra_at, extra_shared ? 0 : n, t);
  }
  __device__ void bring_value(std::uint32_t to, int panel_bytes, int n, int t, std::uint32_t barrier) const {
    copy_box(to, value, barrier, value_at, n, t);
    copy_box(to + panel_bytes, value, barrier, value_at + kBox, n, t);
  }
};
__device__ inline Rows queries_of(const Maps& maps) { return {&maps.q, &maps.q, &maps.dout, kNope, 0, false}; }
__device__ inline Rows keys_of(const Maps& maps) { return {&maps.kv, &maps.k_extra, &maps.kv, 0, kNope, true}; }

__device__ inline int warp() { return int(threadIdx.x) % kGroup / kWarp; }  // of its group
__device__ inline int lane() { return int(threadIdx.x) % kWarp; }
__device__ inline int group_of_warp() {  // 0 and 1 multiply, -1 brings; by shuffle, so that the compiler knows it for one to a warp
  return __shfl_sync(0xffffffffU, int(threadIdx.x) / kGroup, 0) - 1;
}
__device__ inline int row_of(int half) { return (int(threadIdx.x) / kGroup - 1) * 64 + 16 * warp() + lane() / 4 + 8 * half; }

__device__ inline unsigned char* aligned(unsigned char* shared) {  // the swizzle repeats every 1024 bytes of address
  return shared + (1024 - shared_address(shared) % 1024) % 1024;
}

// Stages of shared memory that one thread fills and kWarps warps read, each with two barriers, and where in them a thread is.
template <int kStages, int kBytes>
struct Ring {
  std::uint32_t stages, barriers;
  int stage = 0;
  std::uint32_t parity = 0;
  __device__ Ring(std::uint32_t first, const std::uint64_t (&full_and_empty)[2 * kStages])
      : stages(first), barriers(shared_address(full_and_empty)) {}
  __device__ void init() const {  // by one thread of the block
    for (int i = 0; i < kStages; ++i) {
      barrier_init(barriers + 8 * i, 1);
      barrier_init(barriers + 8 * (kStages + i), kWarps);
    }
  }
  __device__ std::uint32_t here() const { return stages + stage * kBytes; }
  __device__ std::uint32_t full() const { return barriers + 8 * stage; }
  __device__ void expect(int bytes) const {  // once the stage's last contents are read
    barrier_wait(barriers + 8 * (kStages + stage), parity ^ 1);
    barrier_arrive_and_expect(full(), bytes);
  }
  __device__ void await() const { barrier_wait(full(), parity); }
  __device__ void release(int read) const {  // by all lanes of a warp
    __syncwarp();                            // waits for its readers
    if (lane() == 0) barrier_arrive(barriers + 8 * (kStages + read));
  }
  __device__ void release() const { release(stage); }
  __device__ void release_last() const { release(stage == 0 ? kStages - 1 : stage - 1); }
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// Blocks of the grid by sections of heads (or groups of heads) whose other side stays in the L2; in a section by blocks of rows.
struct Place {
  int head, row_block;
};
__device__ inline Place place(int row_blocks, int heads, int heads_a_section) {
  const int section = int(blockIdx.x) / (heads_a_section * row_blocks), first = section * heads_a_section;
  const int here = min(heads_a_section, heads - first), in_section = int(blockIdx.x) - first * row_blocks;
  return {first + in_section % here, in_section / here};
}
inline int heads_a_section(std::int64_t T, std::int64_t heads) {
  constexpr std::int64_t kStayInL2 = 24 << 20;
  return int(std::clamp(kStayInL2 / (T * (kKey + kValue) * 2), std::int64_t(1), heads));
}

template <int kCount>
__device__ void pack(unsigned (&to)[kCount], const float (&from)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = packed(from[2 * i], from[2 * i + 1]);
}
__device__ inline float2 unpacked(unsigned pair) { return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair)); }

// d = 64 rows from `rows` on times columns, over kSteps steps of 16 of their common width; committed. Panels of 64 of the width
// are kRowBoxBytes and column_panel_bytes apart.
template <int kSteps, int kCount>
__device__ void start_dots(float (&d)[kCount], std::uint32_t rows, std::uint32_t columns, int column_panel_bytes) {
  const std::uint64_t a = operand_at(rows), b = operand_at(columns);
  forget(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k)
    wgmma(d, a + (k / 4 * kRowBoxBytes >> 4) + k % 4 * step_of(Along::k),
          b + (k / 4 * column_panel_bytes >> 4) + k % 4 * step_of(Along::k), k > 0);
  wgmma_commit();
  settle(d);
}
// d += weights times rows of a stage, over kSteps steps of 16 rows; committed.
template <int kSteps, int kCount>
__device__ void start_sums(float (&d)[kCount], const unsigned (&weights)[4 * kSteps], std::uint32_t rows, int panel_bytes) {
  const std::uint64_t b = operand_at(rows, std::uint32_t(panel_bytes));
  settle(d);
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < kSteps; ++k) wgmma(d, weights + 4 * k, b + k * step_of(Along::outer));
  wgmma_commit();
  settle(d);
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
      *reinterpret_cast<uint4*>(to + (first + s) * row + 8 * j) =
          *reinterpret_cast<const uint4*>(stage + s * kRowBytes + (j ^ s % 8) * 16);
  }
}

inline CUtensorMap map_of(ConstTensor t, std::int64_t heads) {
  return tensor_map(t, {t.count() / t.shape[0] / heads, heads, t.shape[0]}, {kBox, 1, kBox});
}
template <class Args>
Maps maps_of(const Args& a) {
  Maps maps = {.q = map_of(a.q, a.q.shape[1]), .kv = map_of(a.kv, a.q.shape[1]), .k_extra = map_of(a.k_extra, 1)};
  if constexpr (requires { a.do_; }) maps.dout = map_of(a.do_, a.q.shape[1]);
  return maps;
}

template <class Args>
bool takes(const Args& a, std::initializer_list<ConstTensor> tensors) {
  return a.q.dtype == DType::bf16 && a.q.shape[2] == kKey && a.k_extra.shape[1] == kExtra && a.o.shape[2] == kValue &&
         a.scale > 0 && in_packs<8>(kKey, tensors);
}

}  // namespace moetrain::ops::cuda::attention_tiles
