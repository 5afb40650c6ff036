// sparse_attention_tiles.cuh -- what the tensor-core kernels of sparse attention share: 64 heads of one query meet its selected
// keys 32 at a time, gathered into shared memory in panels of 64 columns; a column is 512 of the latent, then 64 extra.
#pragma once
#include <cuda_bf16.h>

#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/attention_products.cuh"
#include "ops/cuda/tensor_copy.cuh"
#include "ops/cuda/tensor_cores.cuh"
#include "ops/sparse_attention.h"

namespace moetrain::ops::cuda {

void sparse_attention_tiles(Context&, const SparseAttentionForward&);
void sparse_attention_tiles(Context&, const SparseAttentionBackward&);

namespace tiles {

constexpr int kHeads = 64, kLatent = 512, kExtra = 64, kPanel = 64, kPanels = (kLatent + kExtra) / kPanel, kKeys = 32;
constexpr int kGroup = 128;  // threads of a warpgroup
constexpr int kLine = kPanel * int(sizeof(__nv_bfloat16));
constexpr int kKeyPanel = kKeys * kLine, kKeyTile = kPanels * kKeyPanel, kHeadPanel = kHeads * kLine;  // bytes
constexpr float kLn2 = 0.69314718055994530942F;

struct Inputs {
  const __nv_bfloat16 *q_latent, *q, *latent, *k_extra;
  const std::int32_t* indices;  // (T, K)
  std::int64_t T, keys, N, K, Hq;
  float scale_log2;  // scale * log2 e
  template <class Args>
  explicit Inputs(const Args& a)
      : q_latent(device_pointer<bf16>(a.q_latent)),
        q(device_pointer<bf16>(a.q)),
        latent(device_pointer<bf16>(a.latent)),
        k_extra(device_pointer<bf16>(a.k_extra)),
        indices(a.indices.template as<std::int32_t>()),
        T(a.q.shape[0]),
        keys(a.latent.shape[0]),
        N(a.q.shape[1]),
        K(a.indices.shape[1]),
        Hq(a.q.shape[2]),
        scale_log2(float(a.scale) * kLog2E) {}
};

// The same in all lanes, and known as such to the compiler, which else gives up products that are under way across a branch.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffU, x, 0); }

// Where 16-byte piece `piece` of line `row` lies in a panel.
__device__ inline std::uint32_t place(int row, int piece) { return std::uint32_t(row * kLine + ((piece ^ (row & 7)) << 4)); }

// Queues 16 bytes, or zeros, for shared memory; the barrier hears of what a thread has queued.
__device__ inline void copy_piece(std::uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(__cvta_generic_to_global(from)), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void arrive_when_copied(std::uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void wait_for_own_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A warpgroup's thread queues its share of a tile: lines thread / 8 and 16 on, of which `at` says the positions (-1: zeros); the
// tile's panels are kStride bytes apart.
template <int kStride>
__device__ void gather(const Inputs& in, const std::int32_t (&at)[2], std::uint32_t tile, int thread) {
  const int piece = thread % 8;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool there = at[i] >= 0;
    const std::int64_t s = there ? at[i] : 0;
    const std::uint32_t to = tile + place(thread / 8 + 16 * i, piece);
    const __nv_bfloat16* from = in.latent + s * kLatent + piece * 8;
#pragma unroll
    for (int p = 0; p < kPanels - 1; ++p) copy_piece(to + p * kStride, from + p * kPanel, there);
    copy_piece(to + (kPanels - 1) * kStride, in.k_extra + s * kExtra + piece * 8, there);
  }
}

// Heads [head, head + 64) of query t, latent and extra, or zeros past the last head, into panels; all `threads` of a block.
__device__ inline void load_query(const Inputs& in, std::int64_t t, std::int64_t head, unsigned char* to, int threads) {
  for (int i = int(threadIdx.x); i < kHeads * kPanels * 8; i += threads) {
    const int row = i / (kPanels * 8), panel = i / 8 % kPanels, piece = i % 8;
    const std::int64_t n = t * in.N + head + row;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (head + row < in.N)
      x = *reinterpret_cast<const uint4*>(panel < kPanels - 1 ? in.q_latent + n * kLatent + panel * kPanel + piece * 8
                                                              : in.q + n * in.Hq + in.Hq - kExtra + piece * 8);
    *reinterpret_cast<uint4*>(to + panel * kHeadPanel + place(row, piece)) = x;
  }
}

// z = a b: 64 lines by 32 or 64 lines, 16 summands along both. wgmma() only adds; where a product is under way no register may be
// cleared.
__device__ inline void begin_product(float (&z)[16], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      "{ .reg .pred adds; setp.ne.b32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, adds, 1, 1, 0, 0; }"
      : "=f"(z[0]), "=f"(z[1]), "=f"(z[2]), "=f"(z[3]), "=f"(z[4]), "=f"(z[5]), "=f"(z[6]), "=f"(z[7]), "=f"(z[8]), "=f"(z[9]),
        "=f"(z[10]), "=f"(z[11]), "=f"(z[12]), "=f"(z[13]), "=f"(z[14]), "=f"(z[15])
      : "l"(a), "l"(b));
}
__device__ inline void begin_product(float (&z)[32], std::uint64_t a, std::uint64_t b) {
  asm volatile(
      "{ .reg .pred adds; setp.ne.b32 adds, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, "
      "%26, "
      "%27, %28, %29, %30, %31}, %32, %33, adds, 1, 1, 0, 0; }"
      : "=f"(z[0]), "=f"(z[1]), "=f"(z[2]), "=f"(z[3]), "=f"(z[4]), "=f"(z[5]), "=f"(z[6]), "=f"(z[7]), "=f"(z[8]), "=f"(z[9]),
        "=f"(z[10]), "=f"(z[11]), "=f"(z[12]), "=f"(z[13]), "=f"(z[14]), "=f"(z[15]), "=f"(z[16]), "=f"(z[17]), "=f"(z[18]),
        "=f"(z[19]), "=f"(z[20]), "=f"(z[21]), "=f"(z[22]), "=f"(z[23]), "=f"(z[24]), "=f"(z[25]), "=f"(z[26]), "=f"(z[27]),
        "=f"(z[28]), "=f"(z[29]), "=f"(z[30]), "=f"(z[31])
      : "l"(a), "l"(b));
}
// z += a b, a (64, 16) in registers.
__device__ inline void add_product(float (&z)[16], const unsigned (&a)[4], std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, "
      "%15}, "
      "{%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
      : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3]), "+f"(z[4]), "+f"(z[5]), "+f"(z[6]), "+f"(z[7]), "+f"(z[8]), "+f"(z[9]),
        "+f"(z[10]), "+f"(z[11]), "+f"(z[12]), "+f"(z[13]), "+f"(z[14]), "+f"(z[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ inline void add_product(float (&z)[32], const unsigned (&a)[4], std::uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
      : "+f"(z[0]), "+f"(z[1]), "+f"(z[2]), "+f"(z[3]), "+f"(z[4]), "+f"(z[5]), "+f"(z[6]), "+f"(z[7]), "+f"(z[8]), "+f"(z[9]),
        "+f"(z[10]), "+f"(z[11]), "+f"(z[12]), "+f"(z[13]), "+f"(z[14]), "+f"(z[15]), "+f"(z[16]), "+f"(z[17]), "+f"(z[18]),
        "+f"(z[19]), "+f"(z[20]), "+f"(z[21]), "+f"(z[22]), "+f"(z[23]), "+f"(z[24]), "+f"(z[25]), "+f"(z[26]), "+f"(z[27]),
        "+f"(z[28]), "+f"(z[29]), "+f"(z[30]), "+f"(z[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
// z = products of 64 heads (panels of 64 lines) with 32 or 64 keys (panels kStride bytes apart) over the first kCount panels.
template <int kCount, int kStride, int kSums>
__device__ void products(float (&z)[kSums], std::uint32_t heads, std::uint32_t keys) {
  constexpr int kSteps = kPanel / 16;
  const std::uint64_t first_a = operand_at(heads), first_b = operand_at(keys);
  const auto a = [&](int i) { return first_a + further(i / kSteps * kHeadPanel) + i % kSteps * step_of(Along::k); };
  const auto b = [&](int i) { return first_b + further(i / kSteps * kStride) + i % kSteps * step_of(Along::k); };
  begin_product(z, a(0), b(0));
#pragma unroll
  for (int i = 1; i < kCount * kSteps; ++i) wgmma<Along::k, Along::k>(z, a(i), b(i));
}

// Panels that a warpgroup keeps in registers, so that shared memory is read less.
template <int kCount>
struct Held {
  unsigned heads[kCount][kPanel / 16][4];
  __device__ void load(const unsigned char* from, int warp, int lane) {
#pragma unroll
    for (int p = 0; p < kCount; ++p)
#pragma unroll
      for (int step = 0; step < kPanel / 16; ++step)
        load_matrices(heads[p][step], reinterpret_cast<const __nv_bfloat16*>(from + p * kHeadPanel +
                                                                             place(16 * warp + lane % 16, 2 * step + lane / 16)));
  }
  // z += their products with panels of keys
  template <int kStride, int kSums>
  __device__ void add_products(float (&z)[kSums], std::uint32_t keys) const {
    const std::uint64_t first = operand_at(keys);
#pragma unroll
    for (int p = 0; p < kCount; ++p)
#pragma unroll
      for (int step = 0; step < kPanel / 16; ++step)
        add_product(z, heads[p][step], first + further(p * kStride) + step * step_of(Along::k));
  }
};

// A warpgroup's 64 x 32 values, as bf16 and transposed: a line a key with its 64 heads.
__device__ inline void store_transposed(const float* x, std::uint32_t to, int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const std::uint32_t address = to + place(8 * (j + lane / 16) + lane % 8, 2 * warp + lane / 8 % 2);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(packed(x[4 * j], x[4 * j + 1])), "r"(packed(x[4 * j + 2], x[4 * j + 3])),
                 "r"(packed(x[4 * j + 4], x[4 * j + 5])), "r"(packed(x[4 * j + 6], x[4 * j + 7]))
                 : "memory");
  }
}

// Panel `panel` of a thread's sums (64 heads by panels of 64 columns) times factor[h], to rows first_row and first_row + 8 where
// they are below `rows`; to: the panel's first column of row 0.
template <int kCount>
__device__ void store_panel(const float (&sums)[kCount], int panel, const float (&factor)[2], __nv_bfloat16* to,
                            std::int64_t stride, std::int64_t first_row, std::int64_t rows, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int j = 0; j < 8; j += 4) {
      std::uint32_t x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = 4 * (8 * panel + j + i) + 2 * h;
        x[i] = packed(sums[at] * factor[h], sums[at + 1] * factor[h]);
      }
      const uint4 piece = whole_piece(x[0], x[1], x[2], x[3], lane);
      const std::int64_t row = first_row + 8 * h;
      if (row < rows) *reinterpret_cast<uint4*>(to + row * stride + 8 * (j + lane % 4)) = piece;
    }
}

}  // namespace tiles
}  // namespace moetrain::ops::cuda
