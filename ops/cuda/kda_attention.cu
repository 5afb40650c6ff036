// kda_attention.cu -- KDA forward in three launches: prepare (chunks in parallel), scan (chunks in order, the state in registers),
// gated norm; and the map of a slice's states in two: prepare, and a scan of two states side by side. bf16 multiplies on tensor
// cores; f32 runs the same kernels with FFMA products. Straight-line code is kept short: these kernels run each instruction once a
// block, and took twice the time when they did not fit the instruction cache.
#include <algorithm>

#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/kda_attention.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

// ---- prepare

template <class S>
struct PrepareTiles {
  S *w, *u, *q, *k, *p, *t;
  float* decay;
};

constexpr int kSquareStride = kRows + 4;  // of L and of its inverse in f32

template <class S, int kWidth>
struct PrepareShared {
  using Ops = Operands<S, kWidth>;
  static constexpr int kTile = Ops::kTile, kSquare = kRows * kSquareStride;
  static constexpr bool kInverseApart = kTile * int(sizeof(S)) + kKuRows * kWidth * int(sizeof(S)) < kSquare * 4;
  static constexpr bool kOperandApart = kWidth < kRows;
  // operands, V; L, floats of the operands; the inverse in f32 unless it fits over kd and ku, as operand unless it fits over aq
  static constexpr int kBytes = (Ops::kElements + kTile + (kOperandApart ? kRows * kRows : 0)) * int(sizeof(S)) +
                                (kSquare * (kInverseApart ? 2 : 1) + Ops::kFloats) * int(sizeof(float));
};

// P and L of one pair of rows from the decays between them, one step back at a time; rows of a warp by turns.
template <class S, int kWidth>
__device__ void pairwise_scores(const float* g, const S* q, const S* k, const float* beta, float scale, float* L, S* p) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  constexpr int kPer = kWidth / kWarp;
  for (int i = warp; i < kRows; i += kChunkThreads / kWarp) {
    float qi[kPer], ki[kPer], G[kPer] = {};
    for (int x = 0; x < kPer; ++x) {
      qi[x] = to_float(q[place<S, kWidth>(i, lane * kPer + x)]);
      ki[x] = to_float(k[place<S, kWidth>(i, lane * kPer + x)]);
    }
    for (int j = i; j >= i / kSub * kSub; --j) {
      float qk = 0, kk = 0;
      for (int x = 0; x < kPer; ++x) {
        const float kD = to_float(k[place<S, kWidth>(j, lane * kPer + x)]) * power_of_2(G[x]);
        qk += qi[x] * kD;
        kk += ki[x] * kD;
        G[x] += g[place<float, kWidth>(j, lane * kPer + x)];
      }
      qk = warp_sum(qk);
      kk = warp_sum(kk);
      if (lane == 0) {
        p[place<S, kRows>(i, j)] = from_float<S>(scale * qk);
        if (j < i) L[i * kSquareStride + j] = beta[i] * kk;
      }
    }
    if (lane > i % kSub && lane < kSub) p[place<S, kRows>(i, i / kSub * kSub + lane)] = from_float<S>(0);
  }
}

// inverse = (I + L)^-1, lower triangle of blocks. A warp owns eight columns: within its diagonal block by substitution, then block
// row after block row: -T_II sum_M L_IM T_MJ.
__device__ inline void invert(const float* L, float* inverse) {
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, J = warp / 2;
  const int c = 8 * warp + lane % 8, quarter = lane / 8;
  if (quarter == 0) {
    float x[kSub];
#pragma unroll
    for (int i = 0; i < kSub; ++i) {
      float sum = kSub * J + i == c ? 1.0F : 0.0F;
#pragma unroll
      for (int j = 0; j < i; ++j) sum -= L[(kSub * J + i) * kSquareStride + kSub * J + j] * x[j];
      x[i] = sum;
      inverse[(kSub * J + i) * kSquareStride + c] = sum;
    }
  }
  __syncthreads();  // waits for the inverses of all diagonal blocks
  for (int I = J + 1; I < kSubs; ++I) {
    float x[4] = {};
    for (int m = kSub * J; m < kSub * I; m += 4) {
      float t[4];
      for (int s = 0; s < 4; ++s) t[s] = inverse[(m + s) * kSquareStride + c];
      for (int a = 0; a < 4; ++a) {
        const float4 l = *reinterpret_cast<const float4*>(L + (kSub * I + 4 * quarter + a) * kSquareStride + m);
        x[a] += l.x * t[0] + l.y * t[1] + l.z * t[2] + l.w * t[3];
      }
    }
    float* column = inverse + kSub * I * kSquareStride + c;
    for (int a = 0; a < 4; ++a) column[(4 * quarter + a) * kSquareStride] = x[a];
    __syncwarp();  // waits for the sums of the other rows of this column
    float sums[kSub], y[4] = {};
#pragma unroll
    for (int m = 0; m < kSub; ++m) sums[m] = column[m * kSquareStride];
    for (int a = 0; a < 4; ++a) {
      const float* row = inverse + (kSub * I + 4 * quarter + a) * kSquareStride + kSub * I;
#pragma unroll
      for (int m = 0; m < kSub; ++m) y[a] -= row[m] * sums[m];
    }
    __syncwarp();  // waits for the readers of the sums
    for (int a = 0; a < 4; ++a) column[(4 * quarter + a) * kSquareStride] = y[a];
    __syncwarp();  // waits for this block row's part
  }
}

// grid (slots, N), block (kChunkThreads)
template <class S, int kWidth>
__global__ void __launch_bounds__(kChunkThreads, sizeof(S) == 2 ? 2 : 1)
    kda_attention_prepare_kernel(const KdaInputs<S> in, const PrepareTiles<S> out) {
  using Shared = PrepareShared<S, kWidth>;
  constexpr int kTile = Shared::kTile;
  Chunk chunk;
  if (!find_chunk(in.documents, blockIdx.x, chunk)) return;
  const int head = int(blockIdx.y), warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const std::int64_t tile = std::int64_t(blockIdx.x) * in.N + head;

  extern __shared__ __align__(128) unsigned char shared[];
  S* tiles = reinterpret_cast<S*>(shared);
  S* v = tiles + Shared::Ops::kElements;
  S* t = Shared::kOperandApart ? v + kTile : tiles;
  float* L = reinterpret_cast<float*>(v + kTile + (Shared::kOperandApart ? kRows * kRows : 0));
  Operands<S, kWidth> x(tiles, L + Shared::kSquare);
  float* inverse = Shared::kInverseApart ? L + Shared::kSquare + Shared::Ops::kFloats : reinterpret_cast<float*>(x.kd);
  S *q_out = out.q + tile * kTile, *k_out = out.k + tile * kTile, *p_out = out.p + tile * kRows * kRows;

  x.template fill<false>(
      in, chunk, head, v,
      [&](const float* g, const S* q, const S* k) { pairwise_scores<S, kWidth>(g, q, k, x.beta, in.scale, L, p_out); },
      [&](const Own<kWidth>& own, int row, const float(&q)[2], const float(&since)[2], const float(&)[2], const float(&before)[2]) {
        put<S, kWidth>(q_out, row, own.d, in.scale * q[0] * since[0] * before[0], in.scale * q[1] * since[1] * before[1]);
      },
      [&](const Own<kWidth>& own, int row, const float(&k)[2], const float(&after)[2]) {
        put<S, kWidth>(k_out, row, own.d, k[0] * after[0], k[1] * after[1]);
      });
  if (threadIdx.x < kWidth) out.decay[tile * kWidth + threadIdx.x] = x.before(kSubs, int(threadIdx.x));

  // L and P by blocks: those under the diagonal first.
  for (int task = warp; task < (in.factored ? 20 : 12); task += kChunkThreads / kWarp) {
    const int at = task / 2;
    const int I = at >= 6 ? at - 6 : at < 1 ? 1 : at < 3 ? 2 : 3, J = at >= 6 ? at - 6 : at - I * (I - 1) / 2;
    const bool of_q = task % 2 == 1;
    int first;
    const S* columns = x.column_operand(I, J, first);
    Block c[2] = {};
    product<Lies::straight, Lies::transposed, kWidth, kWidth>(c, of_q ? x.aq : x.ak, kSub * I, 0, columns, first, 0, kWidth / 16);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = kSub * I + lane / 4 + 8 * h, j = kSub * J + 8 * n + lane % 4 * 2;
        const float low = c[n][2 * h], high = c[n][2 * h + 1];
        if (of_q) {
          put<S, kRows>(p_out, i, j, j <= i ? in.scale * low : 0.0F, j + 1 <= i ? in.scale * high : 0.0F);
        } else {
          L[i * kSquareStride + j] = j < i ? x.beta[i] * low : 0.0F;
          L[i * kSquareStride + j + 1] = j + 1 < i ? x.beta[i] * high : 0.0F;
        }
      }
  }
  __syncthreads();  // waits for L, and for the readers of the operands
  // V and Kin, both times beta, which is zero beyond the last row.
  const Own<kWidth> own;
  if (own.active) {
    const float before[2] = {x.before(own.sub, own.d), x.before(own.sub, own.d + 1)};
#pragma unroll
    for (int r = 0; r < kSub; ++r) {
      const int row = kSub * own.sub + r;
      const float2 k = get<S, kWidth>(x.ak, row, own.d), values = get<S, kWidth>(v, row, own.d);
      put<S, kWidth>(x.ak, row, own.d, x.beta[row] * k.x * before[0], x.beta[row] * k.y * before[1]);
      put<S, kWidth>(v, row, own.d, x.beta[row] * values.x, x.beta[row] * values.y);
    }
  }
  invert(L, inverse);
  __syncthreads();  // waits for the inverse
  for (int at = int(threadIdx.x); at < kRows * kRows / 2; at += kChunkThreads) {
    const int i = at / (kRows / 2), j = at % (kRows / 2) * 2;
    const float* from = inverse + i * kSquareStride + j;
    if (j / kSub <= i / kSub)
      put<S, kRows>(t, i, j, from[0], from[1]);
    else
      put<S, kRows>(t, i, j, 0, 0);
  }
  __syncthreads();  // waits for the inverse as operand, and for the readers of its f32

  S *w_tile = x.kd, *u_tile = x.ku;
  if (warp < kWidth / 16) {
    const int c0 = 16 * warp, g = lane / 4, t2 = lane % 4 * 2;
#pragma unroll 1
    for (int I = 0; I < kSubs; ++I) {
      Block w[2] = {}, u[2] = {};
      product<Lies::straight, Lies::straight, kRows, kWidth>(w, t, kSub * I, 0, x.ak, 0, c0, I + 1);
      product<Lies::transposed, Lies::transposed, kWidth, kRows>(u, v, 0, c0, t, kSub * I, 0, I + 1);
      for (int n = 0; n < 2; ++n)
        for (int h = 0; h < 2; ++h) {
          put<S, kWidth>(w_tile, kSub * I + g + 8 * h, c0 + 8 * n + t2, w[n][2 * h], w[n][2 * h + 1]);
          put<S, kRows>(u_tile, c0 + g + 8 * h, kSub * I + 8 * n + t2, u[n][2 * h], u[n][2 * h + 1]);
        }
    }
  }
  __syncthreads();  // waits for W and U
  constexpr int kPiece = 16 / int(sizeof(S));
  for (int at = int(threadIdx.x) * kPiece; at < kTile; at += kChunkThreads * kPiece) {
    store<kPiece>(out.w + tile * kTile + at, load<kPiece>(w_tile + at));
    store<kPiece>(out.u + tile * kTile + at, load<kPiece>(u_tile + at));
  }
  if (out.t)
    for (int at = int(threadIdx.x) * kPiece; at < kRows * kRows; at += kChunkThreads * kPiece)
      store<kPiece>(out.t + tile * kRows * kRows + at, load<kPiece>(t + at));
}

// ---- scan

template <class S>
struct ScanArgs {
  const S *w, *q, *k, *p;
  S* u;  // R is written over U when states are kept
  const float* decay;
  S *s, *o;
  const float* initial_state;
  float* final_state;  // or the map
  KdaDocuments documents;
  int N, H;
};

// What a walk gives beside the final state: o, or the states within and R, or nothing: then two states go side by side, one from
// zero and one that starts as identity and that V adds nothing to, and both together are the map of the state.
enum class Walk { outputs, states, map };

template <class S, int kWidth, Walk kWalk>
struct ScanShared {
  static constexpr int kTile = kRows * kWidth;
  static constexpr bool kOutputs = kWalk == Walk::outputs;
  static constexpr int stage_elements(int warps) {
    return kTile * (kOutputs ? 3 : 2) + (kOutputs ? kRows * kRows : 0) + warps * 16 * kRows;
  }
  static constexpr int stage_bytes(int warps) { return stage_elements(warps) * int(sizeof(S)) + kWidth * 4; }
};

// grid (kWidth / (16 warps), twice that for a map, N, documents), block (32 (warps + 1)): a warp holds S^T of 16 values; the last
// one brings the tiles.
template <class S, int kWidth, Walk kWalk>
__global__ void __launch_bounds__(160) kda_attention_scan_kernel(const ScanArgs<S> a, int stages) {
  using Shared = ScanShared<S, kWidth, kWalk>;
  constexpr int kTile = Shared::kTile;
  constexpr bool kOutputs = Shared::kOutputs;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warps = int(blockDim.x) / kWarp - 1, warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int head = int(blockIdx.y), slice = warps * 16;
  const bool identity = kWalk == Walk::map && int(blockIdx.x) * slice >= kWidth;
  if (kWalk == Walk::map && (a.documents.leaves(blockIdx.z) < 0 || (identity && a.documents.enters(blockIdx.z) < 0))) return;
  const int first_value = int(blockIdx.x) * slice - (identity ? kWidth : 0);
  const std::int64_t begin = a.documents.starts[blockIdx.z], end = a.documents.starts[blockIdx.z + 1],
                     slot = begin / kRows + blockIdx.z;
  const int chunks = int((end - begin + kRows - 1) / kRows);
  const int of_u = identity ? 0 : slice * kRows;  // elements of a stage
  const TileRing ring(shared, stages, Shared::stage_bytes(warps) - (slice * kRows - of_u) * int(sizeof(S)), warps);

  if (warp == warps) {
    if (lane != 0) return;
    for (int i = 0; i < chunks; ++i) {
      const std::int64_t tile = (slot + i) * a.N + head;
      unsigned char* to = ring.begin(i);
      ring.bring(to, a.w + tile * kTile, kTile * int(sizeof(S)), i);
      ring.bring(to, a.k + tile * kTile, kTile * int(sizeof(S)), i);
      if constexpr (kOutputs) {
        ring.bring(to, a.q + tile * kTile, kTile * int(sizeof(S)), i);
        ring.bring(to, a.p + tile * kRows * kRows, kRows * kRows * int(sizeof(S)), i);
      }
      if (!identity) ring.bring(to, a.u + tile * kTile + first_value * kRows, of_u * int(sizeof(S)), i);
      ring.bring(to, a.decay + tile * kWidth, kWidth * 4, i);
    }
    return;
  }

  const int g = lane / 4, t2 = lane % 4 * 2, v0 = first_value + 16 * warp;
  const int enters = a.documents.enters(blockIdx.z);
  const float* entering_state =
      a.initial_state && enters >= 0 ? a.initial_state + (std::int64_t(enters) * a.N + head) * a.H * a.H : nullptr;
  float s[kWidth / 8][4];
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = v0 + g + i / 2 * 8, key = 8 * n + t2 + i % 2;
      if (identity)
        s[n][i] = value == key && key < a.H ? 1.0F : 0.0F;
      else
        s[n][i] = entering_state && value < a.H && key < a.H ? entering_state[std::int64_t(key) * a.H + value] : 0.0F;
    }
  const int row_step = a.N * a.H, last_rows = int(end - begin) - (chunks - 1) * kRows;
  S* o_rows = a.o + ((begin + g) * a.N + head) * a.H + v0 + t2;
  for (int i = 0; i < chunks; ++i) {
    const S* w = reinterpret_cast<const S*>(ring.wait(i));
    const S *k = w + kTile, *q = k + kTile, *p = q + kTile, *u = kOutputs ? p + kRows * kRows : q;
    const float* decay = reinterpret_cast<const float*>(u + of_u);
    const std::int64_t tile = (slot + i) * a.N + head;

    Fragment<S> entering[kWidth / 16];
    Block r[kRows / 8] = {};
#pragma unroll
    for (int d = 0; d < kWidth / 16; ++d) entering[d].set(s[2 * d], s[2 * d + 1]);
#pragma unroll
    for (int d = 0; d < kWidth / 16; ++d) product_of_left<Lies::transposed, kWidth, kRows / 8>(r, entering[d], w, 0, 16 * d);
#pragma unroll
    for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 us = identity ? float2{0, 0} : get<S, kRows>(u, 16 * warp + g + 8 * h, 8 * n + t2);
        r[n][2 * h] = us.x - r[n][2 * h];
        r[n][2 * h + 1] = us.y - r[n][2 * h + 1];
      }
    Fragment<S> pseudo[kSubs];
#pragma unroll
    for (int j = 0; j < kSubs; ++j) pseudo[j].set(r[2 * j], r[2 * j + 1]);

    if constexpr (kWalk == Walk::states) {
      S *r_out = a.u + tile * kTile, *s_out = a.s + tile * kWidth * kWidth;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int n = 0; n < kRows / 8; ++n) put<S, kRows>(r_out, v0 + g + 8 * h, 8 * n + t2, r[n][2 * h], r[n][2 * h + 1]);
#pragma unroll
        for (int n = 0; n < kWidth / 8; ++n) put<S, kWidth>(s_out, v0 + g + 8 * h, 8 * n + t2, s[n][2 * h], s[n][2 * h + 1]);
      }
    } else if constexpr (kOutputs) {
      const int rows = i + 1 < chunks ? kRows : last_rows;
#pragma unroll
      for (int m = 0; m < kSubs; ++m) {
        Block o[2] = {};
#pragma unroll
        for (int d = 0; d < kWidth / 16; ++d) product_of_right<kWidth>(o, q, kSub * m, 16 * d, entering[d]);
#pragma unroll
        for (int j = 0; j <= m; ++j) product_of_right<kRows>(o, p, kSub * m, 16 * j, pseudo[j]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = kSub * m + g + 8 * h;
          if (row >= rows) continue;
          S* to = o_rows + (kSub * m + 8 * h) * row_step;
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            const int value = v0 + 8 * n + t2;
            if (a.H == kWidth) {
              store<2>(to + 8 * n, two_of<S>(o[n][2 * h], o[n][2 * h + 1]));
            } else {
              if (value < a.H) to[8 * n] = from_float<S>(o[n][2 * h]);
              if (value + 1 < a.H) to[8 * n + 1] = from_float<S>(o[n][2 * h + 1]);
            }
          }
        }
      }
      o_rows += std::int64_t(kRows) * row_step;
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const float2 e = *reinterpret_cast<const float2*>(decay + 8 * n + t2);
      s[n][0] *= e.x;
      s[n][1] *= e.y;
      s[n][2] *= e.x;
      s[n][3] *= e.y;
    }
#pragma unroll
    for (int j = 0; j < kSubs; ++j) product_of_left<Lies::straight, kWidth, kWidth / 8>(s, pseudo[j], k, 16 * j, 0);
    ring.release(i);
  }
  const int leaves = a.documents.leaves(blockIdx.z);
  if (!a.final_state || leaves < 0) return;
  const int row = kWalk == Walk::map ? 2 * a.H : a.H;
  float* to = a.final_state + (std::int64_t(leaves) * a.N + head) * a.H * row + (identity ? a.H : 0);
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = v0 + g + i / 2 * 8, key = 8 * n + t2 + i % 2;
      if (value < a.H && key < a.H) to[std::int64_t(key) * row + value] = s[n][i];
    }
}

// ---- gated norm

// grid (ceil(T N / 8)), block (256): a warp a row of a head, four elements a lane.
template <class S>
__global__ void kda_attention_norm_kernel(const S* __restrict__ o, const S* __restrict__ gate, const float* __restrict__ w,
                                          S* __restrict__ y, std::int64_t rows, int H, float eps, bool packs) {
  const int lane = int(threadIdx.x) % kWarp;
  const std::int64_t row = std::int64_t(blockIdx.x) * (kChunkThreads / kWarp) + threadIdx.x / kWarp;
  if (row >= rows) return;
  const int d = 4 * lane;
  auto elements = [&](const S* from) {
    if (packs && d < H) return load<4>(from + row * H + d);
    Pack<S, 4> x;
    for (int i = 0; i < 4; ++i) x.at[i] = d + i < H ? from[row * H + d + i] : from_float<S>(0);
    return x;
  };
  const auto os = elements(o), gates = elements(gate);
  float sum = 0;
  for (int i = 0; i < 4; ++i) sum += to_float(os.at[i]) * to_float(os.at[i]);
  const float root = 1.0F / sqrtf(warp_sum(sum) / float(H) + eps);
  Pack<S, 4> ys;
  for (int i = 0; i < 4; ++i)
    ys.at[i] = from_float<S>(d + i < H ? w[d + i] * (to_float(os.at[i]) * root) * nearly_sigmoid(to_float(gates.at[i])) : 0.0F);
  if (packs && d < H)
    store<4>(y + row * H + d, ys);
  else
    for (int i = 0; i < 4; ++i)
      if (d + i < H) y[row * H + d + i] = ys.at[i];
}

}  // namespace

void cuda::kda_prepare(Context& ctx, const KdaAttention& x, const KdaTiles& tiles) {
  with_kda_types(x, tiles, [&](auto storage, auto width) {
    using T = decltype(storage);
    using S = device_t<T>;
    launch(ctx, kda_attention_prepare_kernel<S, width>,
           {dim3(unsigned(tiles.slots), unsigned(x.N())), kChunkThreads, std::size_t(PrepareShared<S, width>::kBytes)},
           kda_inputs<T>(x),
           PrepareTiles<S>{device_pointer<T>(tiles.w), device_pointer<T>(tiles.u), device_pointer<T>(tiles.q),
                           device_pointer<T>(tiles.k), device_pointer<T>(tiles.p), device_pointer<T>(tiles.t),
                           tiles.decay.as<float>()});
  });
}

void cuda::kda_scan(Context& ctx, const KdaAttention& x, const KdaTiles& tiles, Tensor o, Tensor final_state) {
  with_kda_types(x, tiles, [&](auto storage, auto width) {
    using T = decltype(storage);
    using S = device_t<T>;
    const ScanArgs<S> args{.w = device_pointer<T>(tiles.w),
                           .q = device_pointer<T>(tiles.q),
                           .k = device_pointer<T>(tiles.k),
                           .p = device_pointer<T>(tiles.p),
                           .u = device_pointer<T>(tiles.u),
                           .decay = tiles.decay.as<float>(),
                           .s = device_pointer<T>(tiles.s),
                           .o = device_pointer<T>(o),
                           .initial_state = x.initial_state.present() ? x.initial_state.as<float>() : nullptr,
                           .final_state = final_state.present() ? final_state.as<float>() : nullptr,
                           .documents = kda_documents(x.documents),
                           .N = int(x.N()),
                           .H = int(x.H())};
    auto run = [&](auto walk) {
      constexpr Walk kWalk = walk;
      const ScanShape shape = scan_shape(ctx, x, width, kWalk == Walk::map ? 2 : 1, ScanShared<S, width, kWalk>::stage_bytes);
      launch(ctx, kda_attention_scan_kernel<S, width, kWalk>, shape.grid, args, shape.stages);
    };
    if (tiles.s.present())
      run(std::integral_constant<Walk, Walk::states>());
    else if (o.present())
      run(std::integral_constant<Walk, Walk::outputs>());
    else
      run(std::integral_constant<Walk, Walk::map>());
  });
}

void cuda::kda_attention(Context& ctx, const KdaAttentionMap& a) {
  Scope scope(ctx.scratch);
  const KdaTiles tiles(ctx.scratch, a.x, KdaTiles::For::forward);
  kda_prepare(ctx, a.x, tiles);
  zero(ctx, a.map);
  kda_scan(ctx, a.x, tiles, {}, a.map);
}

void cuda::kda_attention(Context& ctx, const KdaAttentionForward& a) {
  Scope scope(ctx.scratch);
  const KdaTiles tiles(ctx.scratch, a.x, KdaTiles::For::forward);
  kda_prepare(ctx, a.x, tiles);
  kda_scan(ctx, a.x, tiles, a.o, a.final_state);
  auto norm = [&](auto storage) {
    using T = decltype(storage);
    const std::int64_t rows = a.x.T() * a.x.N();
    launch(ctx, kda_attention_norm_kernel<device_t<T>>, {blocks(rows, kChunkThreads / kWarp), kChunkThreads},
           device_pointer<T>(a.o), device_pointer<T>(a.x.gate), a.x.o_norm.as<float>(), device_pointer<T>(a.y), rows, int(a.x.H()),
           float(a.x.norm_eps), in_packs<4>(a.x.H(), {a.o, a.x.gate, a.y}));
  };
  a.x.q_in.dtype == DType::f32 ? norm(float{}) : norm(bf16{});
}

}  // namespace moetrain::ops
