// kda_tiles.cuh -- tiles of one chunk in shared memory and their products by one warp (tensor cores for bf16, FFMA for f32), and
// whole tiles brought by the bulk copy engine.
#pragma once
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/instructions.cuh"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops::cuda {

// Where element (row, column) of a tile of kWidth columns lies. Pieces of 16 bytes change places with the row, so that eight rows
// of one column of pieces lie in different banks. Tiles lie in device memory in the same order, so that they are copied whole.
template <class S, int kWidth>
__device__ __forceinline__ int place(int row, int column) {
  constexpr int kPiece = 16 / int(sizeof(S)), kPieces = kWidth / kPiece;
  const int swap = kPieces >= 8 ? row & 7 : (row >> 1) & 3;
  return row * kWidth + ((column / kPiece) ^ swap) * kPiece + column % kPiece;
}

template <class S>
__device__ __forceinline__ Pack<S, 2> two_of(float a, float b) {
  if constexpr (sizeof(S) == 2) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(a, b);  // one instruction for both
    return *reinterpret_cast<const Pack<S, 2>*>(&pair);
  } else {
    return {{a, b}};
  }
}
template <class S, int kWidth>
__device__ __forceinline__ void put(S* tile, int row, int column, float a, float b) {  // column even
  store<2>(tile + place<S, kWidth>(row, column), two_of<S>(a, b));
}
template <class S, int kWidth>
__device__ __forceinline__ float2 get(const S* tile, int row, int column) {
  const auto pair = load<2>(tile + place<S, kWidth>(row, column));
  return {to_float(pair.at[0]), to_float(pair.at[1])};
}

// A thread's part of a 16 x 8 block of sums: g = lane / 4, t = lane % 4; element [2 h + e] is row g + 8 h, column 2 t + e (PTX ISA,
// mma.m16n8k16). All products below take and give blocks in this order, on either kind of arithmetic.
using Block = float[4];

// Element `at` of a tile of bf16; its address in shared memory is taken once a tile.
struct SharedTile {
  unsigned address;
  __device__ __forceinline__ explicit SharedTile(const __nv_bfloat16* tile) : address(shared_address(tile)) {}
  __device__ __forceinline__ unsigned at(int element) const { return address + 2U * unsigned(element); }
};
template <bool kTransposed>
__device__ __forceinline__ void load_matrices(unsigned (&r)[4], unsigned address) {
  if constexpr (kTransposed)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}
__device__ __forceinline__ void multiply(Block& c, const unsigned (&a)[4], unsigned b0, unsigned b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A 16 x 16 operand held by a warp: two blocks side by side. As left operand it is (m, k), as right operand (n, k).
template <class S>
struct Fragment;
template <>
struct Fragment<__nv_bfloat16> {
  unsigned r[4];
  __device__ __forceinline__ void set(const Block& left, const Block& right, float sign = 1) {
    r[0] = packed(sign * left[0], sign * left[1]);
    r[1] = packed(sign * left[2], sign * left[3]);
    r[2] = packed(sign * right[0], sign * right[1]);
    r[3] = packed(sign * right[2], sign * right[3]);
  }
  template <int kWidth>
  __device__ __forceinline__ void load(const __nv_bfloat16* tile, int row, int column) {
    const int lane = int(threadIdx.x) % kWarp;
    load_matrices<false>(r, SharedTile(tile).at(place<__nv_bfloat16, kWidth>(row + lane % 16, column + lane / 16 * 8)));
  }
};
template <>
struct Fragment<float> {
  float v[2][4];
  __device__ __forceinline__ void set(const Block& left, const Block& right, float sign = 1) {
    for (int i = 0; i < 4; ++i) {
      v[0][i] = sign * left[i];
      v[1][i] = sign * right[i];
    }
  }
  template <int kWidth>
  __device__ __forceinline__ void load(const float* tile, int row, int column) {
    const int lane = int(threadIdx.x) % kWarp;
    for (int half = 0; half < 2; ++half)
      for (int i = 0; i < 4; ++i)
        v[half][i] = tile[place<float, kWidth>(row + lane / 4 + i / 2 * 8, column + half * 8 + lane % 4 * 2 + i % 2)];
  }
  // Element (row, k) of the operand, held by another lane of the warp.
  __device__ __forceinline__ float of(int row, int k) const {
    const int from = row % 8 * 4 + k % 8 / 2, i = row / 8 * 2 + k % 2;
    const float low = __shfl_sync(0xffffffffU, i == 0 ? v[0][0] : i == 1 ? v[0][1] : i == 2 ? v[0][2] : v[0][3], from);
    const float high = __shfl_sync(0xffffffffU, i == 0 ? v[1][0] : i == 1 ? v[1][1] : i == 2 ? v[1][2] : v[1][3], from);
    return k < 8 ? low : high;
  }
};

// How an operand lies in its tile: left (m, k) or transposed (k, m); right (k, n) or transposed (n, k).
enum class Lies { straight, transposed };

// c (16, 8 kBlocks) += left (16, 16 steps) right (16 steps, 8 kBlocks), both from tiles at the given row and column.
template <Lies kLeft, Lies kRight, int kLeftWidth, int kRightWidth, int kBlocks, class S>
__device__ __forceinline__ void product(Block (&c)[kBlocks], const S* left, int lr, int lc, const S* right, int rr, int rc,
                                        int steps) {
  const int lane = int(threadIdx.x) % kWarp;
  constexpr bool kL = kLeft == Lies::transposed, kR = kRight == Lies::transposed;
  if constexpr (sizeof(S) == 2) {
    const int al = kL ? lane % 8 + lane / 16 * 8 : lane % 16, ac = kL ? lane / 8 % 2 * 8 : lane / 16 * 8;
    const int br = kR ? lane % 8 + lane / 16 * 8 : lane % 16, bc = kR ? lane / 8 % 2 * 8 : lane / 16 * 8;
    const SharedTile lefts(left), rights(right);
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      unsigned a[4], b[4];
      load_matrices<kL>(a, lefts.at(place<S, kLeftWidth>(lr + (kL ? 16 * k : 0) + al, lc + (kL ? 0 : 16 * k) + ac)));
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        load_matrices<!kR>(b, rights.at(place<S, kRightWidth>(rr + (kR ? 8 * n : 16 * k) + br, rc + (kR ? 16 * k : 8 * n) + bc)));
        multiply(c[n], a, b[0], b[1]);
        multiply(c[n + 1], a, b[2], b[3]);
      }
    }
  } else {
    const int g = lane / 4, t = lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < 16 * steps; ++k) {
      float a[2];
      for (int h = 0; h < 2; ++h) a[h] = left[place<S, kLeftWidth>(lr + (kL ? k : g + 8 * h), lc + (kL ? g + 8 * h : k))];
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + t + e;
          const float b = right[place<S, kRightWidth>(rr + (kR ? column : k), rc + (kR ? k : column))];
          c[n][e] += a[0] * b;
          c[n][2 + e] += a[1] * b;
        }
    }
  }
}

// c[m] (16, 16) += rows 16 m of left (16 kParts, 16 steps), right (16 steps, 16): the right operand is loaded once for all m.
template <Lies kLeft, int kLeftWidth, int kRightWidth, int kParts, class S>
__device__ __forceinline__ void product_of_rows(Block (&c)[kParts][2], const S* left, const S* right, int rc, int steps) {
  if constexpr (sizeof(S) == 2) {
    constexpr bool kL = kLeft == Lies::transposed;
    const int lane = int(threadIdx.x) % kWarp;
    const int al = kL ? lane % 8 + lane / 16 * 8 : lane % 16, ac = kL ? lane / 8 % 2 * 8 : lane / 16 * 8;
    const SharedTile lefts(left), rights(right);
#pragma unroll
    for (int k = 0; k < steps; ++k) {
      unsigned a[4], b[4];
      load_matrices<true>(b, rights.at(place<S, kRightWidth>(16 * k + lane % 16, rc + lane / 16 * 8)));
#pragma unroll
      for (int m = 0; m < kParts; ++m) {
        load_matrices<kL>(a, lefts.at(place<S, kLeftWidth>((kL ? 16 * k : 16 * m) + al, (kL ? 16 * m : 16 * k) + ac)));
        multiply(c[m][0], a, b[0], b[1]);
        multiply(c[m][1], a, b[2], b[3]);
      }
    }
  } else {
#pragma unroll
    for (int m = 0; m < kParts; ++m)
      product<kLeft, Lies::straight, kLeftWidth, kRightWidth>(c[m], left, kLeft == Lies::transposed ? 0 : 16 * m,
                                                              kLeft == Lies::transposed ? 16 * m : 0, right, 0, rc, steps);
  }
}

// c (16, 8 kBlocks) += left (16, 16) right (16, 8 kBlocks) for a left operand that the warp holds.
template <Lies kRight, int kRightWidth, int kBlocks, int kAll, class S>
__device__ __forceinline__ void product_of_left(Block (&c)[kAll], const Fragment<S>& left, const S* right, int rr, int rc) {
  const int lane = int(threadIdx.x) % kWarp;
  constexpr bool kR = kRight == Lies::transposed;
  if constexpr (sizeof(S) == 2) {
    const int br = kR ? lane % 8 + lane / 16 * 8 : lane % 16, bc = kR ? lane / 8 % 2 * 8 : lane / 16 * 8;
    const SharedTile rights(right);
#pragma unroll
    for (int n = 0; n < kBlocks; n += 2) {
      unsigned b[4];
      load_matrices<!kR>(b, rights.at(place<S, kRightWidth>(rr + (kR ? 8 * n : 0) + br, rc + (kR ? 0 : 8 * n) + bc)));
      multiply(c[n], left.r, b[0], b[1]);
      multiply(c[n + 1], left.r, b[2], b[3]);
    }
  } else {
    const int g = lane / 4, t = lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      const float a0 = left.of(g, k), a1 = left.of(g + 8, k);
#pragma unroll
      for (int n = 0; n < kBlocks; ++n)
        for (int e = 0; e < 2; ++e) {
          const int column = 8 * n + t + e;
          const float b = right[place<S, kRightWidth>(rr + (kR ? column : k), rc + (kR ? k : column))];
          c[n][e] += a0 * b;
          c[n][2 + e] += a1 * b;
        }
    }
  }
}

// c (16, 16) += left (16, 16) from a tile, right (16, 16) held by the warp as (n, k).
template <int kLeftWidth, class S>
__device__ __forceinline__ void product_of_right(Block (&c)[2], const S* left, int lr, int lc, const Fragment<S>& right) {
  const int lane = int(threadIdx.x) % kWarp;
  if constexpr (sizeof(S) == 2) {
    unsigned a[4];
    load_matrices<false>(a, SharedTile(left).at(place<S, kLeftWidth>(lr + lane % 16, lc + lane / 16 * 8)));
    multiply(c[0], a, right.r[0], right.r[2]);
    multiply(c[1], a, right.r[1], right.r[3]);
  } else {
    const int g = lane / 4, t = lane % 4 * 2;
#pragma unroll 1
    for (int k = 0; k < 16; ++k) {
      const float a0 = left[place<S, kLeftWidth>(lr + g, lc + k)], a1 = left[place<S, kLeftWidth>(lr + g + 8, lc + k)];
#pragma unroll
      for (int n = 0; n < 2; ++n)
        for (int e = 0; e < 2; ++e) {
          const float b = right.of(8 * n + t + e, k);
          c[n][e] += a0 * b;
          c[n][2 + e] += a1 * b;
        }
    }
  }
}

// For the end of the barrier's phase of this parity: as barrier_wait of tensor_copy.cuh, with no register for its outcome.
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}
// Copies bytes (a multiple of 16, both ends aligned to 16) into shared memory; the barrier counts them.
__device__ __forceinline__ void copy_whole(void* to, const void* from, int bytes, std::uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Stages of shared memory that one thread fills with whole tiles ahead of the warps that read them.
struct TileRing {
  static constexpr int kMost = 4, kBarrierBytes = 128;
  std::uint64_t *full, *empty;
  unsigned char* memory;
  int stages, bytes;
  __device__ TileRing(unsigned char* shared, int stages_, int bytes_, int readers)
      : full(reinterpret_cast<std::uint64_t*>(shared)),
        empty(full + kMost),
        memory(shared + kBarrierBytes),
        stages(stages_),
        bytes(bytes_) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < stages; ++i) {
        barrier_init(full + i, 1);
        barrier_init(empty + i, readers);
      }
      fence_shared_writes();
    }
    __syncthreads();  // waits for the barriers
  }
  // The filling thread: waits until stage i is free and announces its bytes; bring() then moves `to` on.
  __device__ __forceinline__ unsigned char* begin(int i) const {
    if (i >= stages) barrier_wait(empty + i % stages, (i / stages - 1) & 1);
    arrive_and_expect(full + i % stages, bytes);
    return memory + i % stages * bytes;
  }
  __device__ __forceinline__ void bring(unsigned char*& to, const void* from, int size, int i) const {
    copy_whole(to, from, size, full + i % stages);
    to += size;
  }
  __device__ __forceinline__ const unsigned char* wait(int i) const {
    barrier_wait(full + i % stages, (i / stages) & 1);
    return memory + i % stages * bytes;
  }
  __device__ __forceinline__ void release(int i) const {  // by every reading warp
    __syncwarp();                                         // waits for its readers
    if (threadIdx.x % kWarp == 0) barrier_arrive(shared_address(empty + i % stages));
  }
};

}  // namespace moetrain::ops::cuda
