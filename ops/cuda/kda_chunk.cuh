// kda_chunk.cuh -- one chunk of one head on the device: where it lies, its convolutions and gates, and the decayed operands of its
// products. Shared by prepare and by the gradients, which both start from the projected inputs.
#pragma once
#include <algorithm>

#include "ops/cuda/blas.h"
#include "ops/cuda/kda_passes.h"
#include "ops/cuda/kda_tiles.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/kda.h"
#include "ops/kda_attention.h"

namespace moetrain::ops::cuda {

constexpr int kRows = int(kKdaChunk), kSub = int(kKdaSubChunk), kSubs = kRows / kSub, kTaps = 4;
constexpr int kChunkThreads = 256;

// By the device's own power of two and reciprocal: within a few units in the last place.
__device__ __forceinline__ float nearly_sigmoid(float x) { return reciprocal(1.0F + power_of_2(-kLog2E * x)); }

// Documents as kernels see them.
struct KdaDocuments {
  const std::int64_t *starts, *pieces;  // pieces: null where documents are whole
  std::int64_t count;
  __device__ __forceinline__ int enters(std::int64_t n) const { return int(pieces ? pieces[4 * n + 2] : n); }
  __device__ __forceinline__ int leaves(std::int64_t n) const { return int(pieces ? pieces[4 * n + 3] : n); }
};
inline KdaDocuments kda_documents(const Documents& d) {
  check(d.on_device.present() && (d.whole() || d.pieces_on_device.present()),
        "kda_attention: CUDA needs the documents on the device");
  check(d.count() <= 65535 && d.states() <= 0x7fffffff, "kda_attention: more documents than a grid has",
        {{"documents", d.count()}, {"states", d.states()}});
  return {d.on_device.as<std::int64_t>(), d.whole() ? nullptr : d.pieces_on_device.as<std::int64_t>(), d.count()};
}

// KdaAttention as kernels see it.
template <class S>
struct KdaInputs {
  const S *u[3], *f, *b, *gate;  // u: q_in, k_in, v_in
  const S* history;              // null: zeros
  const float *conv[3], *a_log, *dt_bias, *o_norm;
  KdaDocuments documents;
  std::int64_t states, T, P;
  int N, H, taps;
  float lower_bound, scale, l2_eps, norm_eps;
  bool lower_bounded, factored;  // factored: diagonal sub-blocks, too
  bool pairs, packs;             // rows may be moved two, four elements at a time
  // Of a stream known at run time: chosen, since an indexed array of parameters would be copied to local memory.
  __device__ __forceinline__ const S* input(int s) const { return s == 0 ? u[0] : s == 1 ? u[1] : u[2]; }
  __device__ __forceinline__ const float* taps_of(int s) const { return s == 0 ? conv[0] : s == 1 ? conv[1] : conv[2]; }
};
template <class T>
KdaInputs<device_t<T>> kda_inputs(const KdaAttention& x) {
  check(x.H() <= 128 && x.q_conv.shape[2] <= kTaps, "kda_attention: CUDA has heads of up to 128 and up to 4 taps",
        {{"H", x.H()}, {"taps", x.q_conv.shape[2]}});
  check(x.P() < (1 << 24) && x.slots() <= 0x7fffffff && x.N() <= 65535, "kda_attention: more heads or tokens than a grid has");
  return {.u = {device_pointer<T>(x.q_in), device_pointer<T>(x.k_in), device_pointer<T>(x.v_in)},
          .f = device_pointer<T>(x.f),
          .b = device_pointer<T>(x.b),
          .gate = device_pointer<T>(x.gate),
          .history = device_pointer<T>(x.history),
          .conv = {x.q_conv.as<float>(), x.k_conv.as<float>(), x.v_conv.as<float>()},
          .a_log = x.a_log.as<float>(),
          .dt_bias = x.dt_bias.as<float>(),
          .o_norm = x.o_norm.as<float>(),
          .documents = kda_documents(x.documents),
          .states = x.documents.states(),
          .T = x.T(),
          .P = x.P(),
          .N = int(x.N()),
          .H = int(x.H()),
          .taps = int(x.q_conv.shape[2]),
          .lower_bound = float(x.lower_bound.value_or(0)),
          .scale = float(x.scale),
          .l2_eps = float(x.l2_eps),
          .norm_eps = float(x.norm_eps),
          .lower_bounded = x.lower_bound.has_value(),
          .factored = x.bounded_gate(),
          .pairs = in_packs<2>(x.H(), {x.q_in, x.k_in, x.v_in, x.f, x.gate}),
          .packs = in_packs<4>(x.H(), {x.gate})};
}

inline void zero(Context& ctx, Tensor t) {
  if (t.bytes() > 0) cuda_ok(cudaMemsetAsync(t.data, 0, std::size_t(t.bytes()), ctx.stream));
}

struct Chunk {
  std::int64_t first;  // token
  int rows;
  bool opens, closes;  // its document
  int enters;          // slice whose history comes before its first row; -1: none
};
// False: the slot has no chunk. The key begin / 64 + n ascends with the document n.
__device__ inline bool find_chunk(const KdaDocuments& documents, std::int64_t slot, Chunk& chunk) {
  const std::int64_t* starts = documents.starts;
  std::int64_t low = 0, high = documents.count;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    (starts[middle] / kRows + middle <= slot ? low : high) = middle;
  }
  const std::int64_t begin = starts[low], end = starts[low + 1], at = (slot - begin / kRows - low) * kRows;
  if (at >= end - begin) return false;
  chunk.first = begin + at;
  chunk.rows = int(end - chunk.first < kRows ? end - chunk.first : kRows);
  chunk.opens = at == 0;
  chunk.closes = chunk.first + chunk.rows == end;
  chunk.enters = chunk.opens ? documents.enters(low) : -1;
  return true;
}

// What a thread owns while rows are walked: two neighbouring channels of the 16 rows of one sub-chunk. Threads beyond 2 kWidth
// rest.
template <int kWidth>
struct Own {
  int pair, sub, d;  // d: the first channel in the head
  bool active;
  __device__ Own()
      : pair(int(threadIdx.x) % (kWidth / 2)), sub(int(threadIdx.x) / (kWidth / 2)), d(2 * pair), active(sub < kSubs) {}
};

// Two channels d, d + 1 of kCount rows from `first` on, of rows counted from the chunk's first; zero outside [low, high). Rows below
// 0 are counted from `before`.
template <int kCount, class S>
__device__ __forceinline__ void load_columns(const KdaInputs<S>& in, const S* rows, const S* before, int first, int low, int high,
                                             int d, Pack<S, 2> (&to)[kCount]) {
  const int P = int(in.P);  // rows of a chunk: offsets of 32 bits
  if (in.pairs && first >= low && first + kCount <= high && d < in.H && (first >= 0 || before == rows)) {
    const S* from = rows + first * P + d;
#pragma unroll
    for (int r = 0; r < kCount; ++r) to[r] = load<2>(from + r * P);
    return;
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    const bool inside = first + r >= low && first + r < high;
    const S* from = (r < kTaps - 1 && first + r < 0 ? before : rows) + (inside ? first + r : 0) * P;
    const S zero = from_float<S>(0);
    to[r].at[0] = inside && d < in.H ? from[d] : zero;
    to[r].at[1] = inside && d + 1 < in.H ? from[d + 1] : zero;
  }
}
template <int kCount, class S>
__device__ __forceinline__ void store_columns(const KdaInputs<S>& in, S* rows, int first, int high, int d,
                                              const float (&from)[kCount][2]) {
  const int P = int(in.P);
  S* to = rows + first * P + d;
  if (in.pairs && first + kCount <= high && d < in.H) {
#pragma unroll
    for (int r = 0; r < kCount; ++r) store<2>(to + r * P, two_of<S>(from[r][0], from[r][1]));
    return;
  }
#pragma unroll
  for (int r = 0; r < kCount; ++r) {
    if (first + r < high && d < in.H) to[r * P] = from_float<S>(from[r][0]);
    if (first + r < high && d + 1 < in.H) to[r * P + 1] = from_float<S>(from[r][1]);
  }
}

// The inputs of stream s under a thread's 16 rows, three rows of history first; and the taps, padded to four.
template <class S>
struct Window {
  Pack<S, 2> u[kSub + kTaps - 1];
  float tap[kTaps][2];
  __device__ __forceinline__ void load_rows(const KdaInputs<S>& in, int s, const Chunk& chunk, int head, int sub, int d) {
    const S *rows = in.input(s) + chunk.first * in.P + std::int64_t(head) * in.H, *before = rows;
    int low = chunk.opens ? 0 : 1 - kTaps;
    if (in.history && chunk.enters >= 0) {
      low = 1 - in.taps;
      before = in.history + (s * in.states + chunk.enters + 1) * (in.taps - 1) * in.P + std::int64_t(head) * in.H;
    }
    load_columns(in, rows, before, kSub * sub - (kTaps - 1), low, chunk.rows, d, u);
    const float* w = in.taps_of(s) + (std::int64_t(head) * in.H + d) * in.taps;
#pragma unroll
    for (int i = 0; i < kTaps; ++i)
      for (int e = 0; e < 2; ++e) {
        const int at = i - (kTaps - in.taps);
        tap[i][e] = at >= 0 && d + e < in.H ? w[e * in.taps + at] : 0;
      }
  }
  __device__ __forceinline__ float convolved(int r, int e) const {
    float c = 0;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) c += tap[i][e] * to_float(u[r + i].at[e]);
    return c;
  }
};

// Log decay (base 2) of f, or what its gradient needs.
template <class S>
struct Gate {
  float rate, bias[2];
  __device__ __forceinline__ Gate(const KdaInputs<S>& in, int head, int d) : rate(power_of_2(kLog2E * in.a_log[head])) {
    for (int e = 0; e < 2; ++e) bias[e] = d + e < in.H ? in.dt_bias[std::int64_t(head) * in.H + d + e] : 0;
  }
  __device__ __forceinline__ float unbounded(float z) const {
    return -kLog2E * rate * (fmaxf(z, 0.0F) + log1pf(__expf(-fabsf(z))));
  }
  // Log decays (base 2) of a thread's rows; zero beyond the chunk's rows and the head's channels.
  __device__ __forceinline__ void load(const KdaInputs<S>& in, const Chunk& chunk, int head, int sub, int d,
                                       float (&g)[kSub][2]) const {
    Pack<S, 2> f[kSub];
    const S* rows = in.f + chunk.first * in.P + std::int64_t(head) * in.H;
    load_columns(in, rows, rows, kSub * sub, 0, chunk.rows, d, f);
    if (in.lower_bounded) {
#pragma unroll
      for (int r = 0; r < kSub; ++r)
        for (int e = 0; e < 2; ++e) g[r][e] = kLog2E * in.lower_bound * nearly_sigmoid(rate * (to_float(f[r].at[e]) + bias[e]));
    } else {
#pragma unroll
      for (int r = 0; r < kSub; ++r)
        for (int e = 0; e < 2; ++e) g[r][e] = unbounded(to_float(f[r].at[e]) + bias[e]);
    }
#pragma unroll
    for (int r = 0; r < kSub; ++r)
      for (int e = 0; e < 2; ++e) g[r][e] = kSub * sub + r < chunk.rows && d + e < in.H ? g[r][e] : 0.0F;
  }
};

// Sums of a value over the channels of every row: each thread leaves its part of its rows, then four threads add a row in order.
template <int kWidth>
struct RowSums {
  static constexpr int kStride = kWidth / 2 + 1, kFloats = kRows * kStride;
  float* parts;
  __device__ __forceinline__ float& part(int row, int pair) const { return parts[row * kStride + pair]; }
  __device__ __forceinline__ float sum() const {  // of row threadIdx.x / 4, in all of its four threads
    const int row = int(threadIdx.x) / 4, quarter = int(threadIdx.x) % 4;
    float x = 0;
#pragma unroll 4
    for (int pair = quarter; pair < kWidth / 2; pair += 4) x += parts[row * kStride + pair];
    x += __shfl_xor_sync(0xffffffffU, x, 1);
    return x + __shfl_xor_sync(0xffffffffU, x, 2);
  }
};

// The decayed operands, tiles in shared memory. With G counted from the start of the row's own sub-chunk and G_end its last:
//   aq = q exp(G), ak = k exp(G) (times beta where folded), kd = k exp(-G) (bounded gates only: at most e^80),
//   ku rows 0..63 = k exp(G_end - G); rows 64.. = those of sub-chunks (0, 1, 0) decayed on to the starts of sub-chunks (2, 3, 3).
// So D of rows i and columns j is aq_i or ak_i times kop(I, J)_j, and no exponent but kd's is positive.
constexpr int kKuRows = kRows + 3 * kSub;
__device__ __forceinline__ int ku_row(int I, int J) {  // J < I
  return I - J == 1 ? kSub * J : kRows + (I - J == 3 ? 2 * kSub : kSub * J);
}

template <class S, int kWidth>
struct Operands {
  S *aq, *ak, *kd, *ku;
  float* decay;  // (4, kWidth): exp of the whole of each sub-chunk
  float* beta;   // (64)
  float* norm;   // (2, 64): 1 / |q|, 1 / |k|; zero, as beta, beyond the last row, which masks all else there
  static constexpr int kTile = kRows * kWidth, kElements = 3 * kTile + kKuRows * kWidth;
  static constexpr int kFloats = kSubs * kWidth + 3 * kRows;
  __device__ Operands(S* tiles, float* floats)
      : aq(tiles),
        ak(tiles + kTile),
        kd(tiles + 2 * kTile),
        ku(tiles + 3 * kTile),
        decay(floats),
        beta(floats + kSubs * kWidth),
        norm(floats + kSubs * kWidth + kRows) {}
  __device__ __forceinline__ float before(int sub, int d) const {  // exp(G) at the start of a sub-chunk, from the chunk's start
    float x = 1;
    for (int s = 0; s < sub; ++s) x *= decay[s * kWidth + d];
    return x;
  }
  __device__ __forceinline__ float after(int sub, int d) const {  // exp(G_last - G_end of the sub-chunk)
    float x = 1;
    for (int s = sub + 1; s < kSubs; ++s) x *= decay[s * kWidth + d];
    return x;
  }
  __device__ __forceinline__ const S* column_operand(int I, int J, int& row) const {  // the tile of kop(I, J) and its first row
    row = I == J ? kSub * I : ku_row(I, J);
    return I == J ? kd : ku;
  }

  // Fills all. between(g, q, k tiles): called once by all threads when !factored, before the operands take their place.
  // forwards(own, row, q, exp(G), G / ln 2, exp(G) at the sub-chunk's start) and backwards(own, row, k exp(G_end - G),
  // exp(G_last - G_end)) once a row and thread, each of two channels.
  // v, where given, gets silu(conv(v_in)).
  template <bool kFoldBeta, class Between, class Forwards, class Backwards>
  __device__ __forceinline__ void fill(const KdaInputs<S>& in, const Chunk& chunk, int head, S* v, Between between,
                                       Forwards forwards, Backwards backwards) {
    const Own<kWidth> own;
    const RowSums<kWidth> squares_q{reinterpret_cast<float*>(kd)}, squares_k{squares_q.parts + RowSums<kWidth>::kFloats};
    static_assert(2 * RowSums<kWidth>::kFloats * int(sizeof(float)) <= (kTile + kKuRows * kWidth) * int(sizeof(S)));
    if (threadIdx.x < kRows)
      beta[threadIdx.x] = int(threadIdx.x) < chunk.rows ? nearly_sigmoid(to_float(in.b[(chunk.first + threadIdx.x) * in.N + head])) : 0.0F;
    Pack<S, 2> q[kSub], k[kSub];
    float g[kSub][2];
    if (own.active) {
      // One copy of this code for all streams: what is not in the instruction cache costs more than what it computes. The tiles of
      // aq and ak carry q and k to their own threads.
#pragma unroll 1
      for (int s = 0; s < (v ? 3 : 2); ++s) {
        Window<S> window;
        window.load_rows(in, s, chunk, head, own.sub, own.d);
        S* to = s == 0 ? aq : s == 1 ? ak : v;
        float* squares = squares_q.parts + (s == 1 ? RowSums<kWidth>::kFloats : 0);
#pragma unroll
        for (int r = 0; r < kSub; ++r) {
          const int row = kSub * own.sub + r;
          const float c[2] = {window.convolved(r, 0), window.convolved(r, 1)};
          const Pack<S, 2> pair = two_of<S>(c[0] * nearly_sigmoid(c[0]), c[1] * nearly_sigmoid(c[1]));
          store<2>(to + place<S, kWidth>(row, own.d), pair);
          const float y[2] = {to_float(pair.at[0]), to_float(pair.at[1])};
          if (s < 2) squares[row * RowSums<kWidth>::kStride + own.pair] = y[0] * y[0] + y[1] * y[1];
        }
      }
      const Gate<S> gate(in, head, own.d);
      gate.load(in, chunk, head, own.sub, own.d, g);
      float whole[2] = {0, 0};
#pragma unroll
      for (int r = 0; r < kSub; ++r)
        for (int e = 0; e < 2; ++e) whole[e] += g[r][e];
      for (int e = 0; e < 2; ++e) decay[own.sub * kWidth + own.d + e] = power_of_2(whole[e]);
    }
    __syncthreads();  // waits for the squares, the decays and beta
    const float qq = squares_q.sum(), kk = squares_k.sum();
    if (threadIdx.x % 4 == 0) {
      const bool valid = int(threadIdx.x) / 4 < chunk.rows;
      norm[threadIdx.x / 4] = valid ? 1.0F / sqrtf(qq + in.l2_eps) : 0.0F;
      norm[kRows + threadIdx.x / 4] = valid ? 1.0F / sqrtf(kk + in.l2_eps) : 0.0F;
    }
    if (own.active) {
#pragma unroll
      for (int r = 0; r < kSub; ++r) {
        q[r] = load<2>(aq + place<S, kWidth>(kSub * own.sub + r, own.d));
        k[r] = load<2>(ak + place<S, kWidth>(kSub * own.sub + r, own.d));
      }
    }
    __syncthreads();  // waits for the norms, and for the readers of the squares and of q and k
    if (!in.factored) {
      float* gs = reinterpret_cast<float*>(aq);
      if (own.active) {
#pragma unroll
        for (int r = 0; r < kSub; ++r) {
          const int row = kSub * own.sub + r;
          const float rq = norm[row], rk = norm[kRows + row];
          put<S, kWidth>(kd, row, own.d, rq * to_float(q[r].at[0]), rq * to_float(q[r].at[1]));
          put<S, kWidth>(ku, row, own.d, rk * to_float(k[r].at[0]), rk * to_float(k[r].at[1]));
          put<float, kWidth>(gs, row, own.d, g[r][0], g[r][1]);
        }
      }
      __syncthreads();  // waits for q, k and g
      between(static_cast<const float*>(gs), static_cast<const S*>(kd), static_cast<const S*>(ku));
      __syncthreads();  // waits for their readers
    }
    if (own.active) {
      const float sub_before[2] = {before(own.sub, own.d), before(own.sub, own.d + 1)};
      const float sub_after[2] = {after(own.sub, own.d), after(own.sub, own.d + 1)};
      float G[2] = {0, 0};
#pragma unroll
      for (int r = 0; r < kSub; ++r) {
        const int row = kSub * own.sub + r;
        const float rq = norm[row], rk = norm[kRows + row], fold = kFoldBeta ? beta[row] : 1.0F;
        float qh[2], kh[2], since[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          G[e] += g[r][e];
          since[e] = power_of_2(G[e]);
          qh[e] = rq * to_float(q[r].at[e]);
          kh[e] = rk * to_float(k[r].at[e]);
        }
        put<S, kWidth>(aq, row, own.d, qh[0] * since[0], qh[1] * since[1]);
        put<S, kWidth>(ak, row, own.d, fold * kh[0] * since[0], fold * kh[1] * since[1]);
        if (in.factored) put<S, kWidth>(kd, row, own.d, kh[0] * reciprocal(since[0]), kh[1] * reciprocal(since[1]));
        forwards(own, row, qh, since, G, sub_before);
      }
      float left[2] = {0, 0}, next[2], second[2];  // decay of the one and two sub-chunks that follow
      for (int e = 0; e < 2; ++e) {
        next[e] = own.sub + 1 < kSubs ? decay[(own.sub + 1) * kWidth + own.d + e] : 0;
        second[e] = own.sub + 2 < kSubs ? next[e] * decay[(own.sub + 2) * kWidth + own.d + e] : 0;
      }
#pragma unroll
      for (int r = kSub - 1; r >= 0; --r) {
        const int row = kSub * own.sub + r;
        const float rk = norm[kRows + row];
        float ks[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          ks[e] = rk * to_float(k[r].at[e]) * power_of_2(left[e]);
          left[e] += g[r][e];
        }
        put<S, kWidth>(ku, row, own.d, ks[0], ks[1]);
        if (own.sub < 2) put<S, kWidth>(ku, kRows + kSub * own.sub + r, own.d, ks[0] * next[0], ks[1] * next[1]);
        if (own.sub == 0) put<S, kWidth>(ku, kRows + 2 * kSub + r, own.d, ks[0] * second[0], ks[1] * second[1]);
        backwards(own, row, ks, sub_after);
      }
    }
    __syncthreads();  // waits for the operands
  }
};

// The launch of a walk over chunks with so many states side by side: a warp owns 16 values of a state, a block two warps, or four
// where that still fills the device; one warp more brings the tiles of the next chunks, as many as fit.
struct ScanShape {
  Grid grid;
  int stages;
};
template <class StageBytes>
ScanShape scan_shape(const Context& ctx, const KdaAttention& x, int width, int states, StageBytes stage_bytes) {
  const std::int64_t heads = x.N() * x.documents.count() * states;
  const int warps = width == 128 && heads * 2 >= ctx.blas->multiprocessors() ? 4 : 2;
  const int stages = std::min(TileRing::kMost, (224 * 1024 - TileRing::kBarrierBytes) / stage_bytes(warps));
  return {Grid(dim3(unsigned(states * width / (16 * warps)), unsigned(x.N()), unsigned(x.documents.count())),
               dim3(unsigned(kWarp * (warps + 1))), std::size_t(TileRing::kBarrierBytes + stages * stage_bytes(warps))),
          stages};
}

// Calls body(storage type, constant of the width) for the storage types and widths there are.
template <class Body>
void with_kda_types(const KdaAttention& x, const KdaTiles& tiles, Body body) {
  auto with_width = [&](auto storage) {
    if (tiles.width == 32)
      body(storage, std::integral_constant<int, 32>());
    else
      body(storage, std::integral_constant<int, 128>());
  };
  if (x.q_in.dtype == DType::f32) return with_width(float{});
  check(x.q_in.dtype == DType::bf16, "kda_attention: CUDA has f32 and bf16 only", {{"dtype", std::int64_t(x.q_in.dtype)}});
  with_width(bf16{});
}

}  // namespace moetrain::ops::cuda
