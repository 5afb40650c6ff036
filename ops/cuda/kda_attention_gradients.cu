// kda_attention_gradients.cu -- the gradients of one chunk of one head, from the states around it: first of q, k, v and the decays
// (all products), then, over rows, of the projected inputs. Two kernels, so that the code of each stays in the instruction cache.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

template <class S>
struct ChunkGradientArgs {
  const S *s, *ds, *do_, *t;
  const S* r;
  S* dr;  // becomes dZ, (row, value)
  S *dq, *dk;
  float *dg, *dx;  // what a row gives to the decays of itself and all earlier rows; of all later rows
  float* carried;  // over exp(G_last): what all rows' decays get by the state that is carried through
  float* rows;     // (4, 64): 1 / |q|, 1 / |k|, beta, and beta dbeta but for what V gives
};

// bf16 brings the tiles of the chunk into shared memory; f32, twice as wide, reads them where they lie.
template <class S, int kWidth>
struct GradientShared {
  using Ops = Operands<S, kWidth>;
  static constexpr bool kHere = sizeof(S) == 2;
  static constexpr int kTile = kRows * kWidth, kSquare = kWidth * kWidth, kPairs = kRows * kRows;
  static constexpr int kState = kSquare * int(sizeof(S));  // bytes
  static constexpr int kTiles = kHere ? kState + (3 * kTile + kPairs) * int(sizeof(S)) : 0;
  // floats: those of the operands; P's diagonal; sums of rows of 8 warps, and of one stream; leaving
  static constexpr int kFloats = Ops::kFloats + kRows * (1 + 8 + 1) + kSubs * kWidth + 16;
  static constexpr int kBytes = (Ops::kElements + 2 * kPairs) * int(sizeof(S)) + kTile * 4 + kTiles + kFloats * 4;
  static_assert(kBytes <= 227 * 1024);
};

// Gradients within a diagonal sub-block from the decays between its pairs, for one thread's channels: added to dq, dk, dg (before
// the sum over rows) and to the part of beta's gradient of each row. Rolled loops over copies: only unbounded gates come here, and
// the arrays of the others stay in registers.
template <class S>
__device__ __forceinline__ void pairwise_gradients(const S* dP, const S* dL, const float* beta, int first,
                                                   const float (&q_)[kSub][2], const float (&k_)[kSub][2],
                                                   const float (&g_)[kSub][2], float (&dq_)[kSub][2], float (&dk_)[kSub][2],
                                                   float (&dg_)[kSub][2], float (&by_beta_)[kSub]) {
  float q[kSub][2], k[kSub][2], g[kSub][2], dq[kSub][2] = {}, dk[kSub][2] = {}, dg[kSub][2] = {}, by_beta[kSub] = {};
#pragma unroll
  for (int i = 0; i < kSub; ++i)
    for (int e = 0; e < 2; ++e) {
      q[i][e] = q_[i][e];
      k[i][e] = k_[i][e];
      g[i][e] = g_[i][e];
    }
#pragma unroll 1
  for (int i = 1; i < kSub; ++i) {
    float G[2] = {0, 0};
#pragma unroll 1
    for (int j = i - 1; j >= 0; --j) {
      const float p = to_float(dP[place<S, kRows>(first + i, first + j)]),
                  l = beta[first + i] * to_float(dL[place<S, kRows>(first + i, first + j)]);
      for (int e = 0; e < 2; ++e) {
        G[e] += g[j + 1][e];
        const float D = power_of_2(G[e]), kD = k[j][e] * D, up = p * q[i][e] + l * k[i][e];
        dq[i][e] += p * kD;
        dk[i][e] += l * kD;
        dk[j][e] += up * D;
        dg[i][e] += up * kD;
        dg[j][e] -= up * kD;
        by_beta[i] += l * kD * k[i][e];
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSub; ++i) {
    for (int e = 0; e < 2; ++e) {
      dq_[i][e] += dq[i][e];
      dk_[i][e] += dk[i][e];
      dg_[i][e] += dg[i][e];
    }
    by_beta_[i] += by_beta[i];
  }
}

// grid (slots, N), block (kChunkThreads): a warp owns 16 channels of all rows and adds dq, dk and dg in registers.
template <class S, int kWidth>
__global__ void __launch_bounds__(kChunkThreads, 1)
    kda_attention_backward_chunk_kernel(const KdaInputs<S> in, const ChunkGradientArgs<S> a) {
  using Shared = GradientShared<S, kWidth>;
  constexpr int kTile = Shared::kTile, kSquare = Shared::kSquare, kPairs = Shared::kPairs;
  const int head = int(blockIdx.y), warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const std::int64_t slot = blockIdx.x, tile = slot * in.N + head;
  const Own<kWidth> own;
  Chunk chunk;
  if (!find_chunk(in.documents, slot, chunk)) return;

  extern __shared__ __align__(128) unsigned char shared[];
  S* operands = reinterpret_cast<S*>(shared);
  float* G = reinterpret_cast<float*>(operands + Shared::Ops::kElements);
  unsigned char* tiles = reinterpret_cast<unsigned char*>(G + kTile);
  S* dP = reinterpret_cast<S*>(tiles + Shared::kTiles);
  S* dL = dP + kPairs;
  float* floats = reinterpret_cast<float*>(dL + kPairs);
  Operands<S, kWidth> x(operands, floats);
  float* self = floats + Shared::Ops::kFloats;  // diagonal of dP
  float* by_warp = self + kRows;                // (64, 8) parts of beta's gradient
  float* row_sums = by_warp + kRows * 8;        // (64) of one stream
  float* leaving = row_sums + kRows;            // (4, kWidth) parts of rowsum(S dS')
  auto* arrived = reinterpret_cast<std::uint64_t*>(leaving + kSubs * kWidth);

  // The tiles: state (S, later dS'), R^T, dO^T, dR^T (later dZ), inverse of I + L.
  const S* state = Shared::kHere ? reinterpret_cast<S*>(tiles) : a.s + tile * kSquare;
  const S* r = Shared::kHere ? reinterpret_cast<S*>(tiles + Shared::kState) : a.r + tile * kTile;
  const S* do_ = Shared::kHere ? r + kTile : a.do_ + tile * kTile;
  S* dr = Shared::kHere ? reinterpret_cast<S*>(tiles + Shared::kState) + 2 * kTile : a.dr + tile * kTile;
  const S* t = Shared::kHere ? r + 3 * kTile : a.t + tile * kPairs;
  if constexpr (Shared::kHere) {
    if (threadIdx.x == 0) {
      barrier_init(arrived, 1);
      fence_shared_writes();
      constexpr int kSize = int(sizeof(S));
      arrive_and_expect(arrived, (kSquare + 3 * kTile + kPairs) * kSize);
      copy_whole(tiles, a.s + tile * kSquare, kSquare * kSize, arrived);
      copy_whole(tiles + Shared::kState, a.r + tile * kTile, kTile * kSize, arrived);
      copy_whole(const_cast<S*>(do_), a.do_ + tile * kTile, kTile * kSize, arrived);
      copy_whole(dr, a.dr + tile * kTile, kTile * kSize, arrived);
      copy_whole(const_cast<S*>(t), a.t + tile * kPairs, kPairs * kSize, arrived);
    }
    __syncthreads();  // waits for the barrier's init
  }
  x.template fill<true>(
      in, chunk, head, nullptr, [](const float*, const S*, const S*) {},
      [&](const Own<kWidth>& o, int row, const float(&)[2], const float(&)[2], const float(&g)[2], const float(&)[2]) {
        put<float, kWidth>(G, row, o.d, g[0], g[1]);
      },
      [](const Own<kWidth>&, int, const float(&)[2], const float(&)[2]) {});
  if constexpr (Shared::kHere) barrier_wait(arrived, 0);

  const int c0 = 16 * warp, g = lane / 4, t2 = lane % 4 * 2;
  const bool works = warp < kWidth / 16;
  // dZ = (I + L)^-T dR takes the place of dR^T, as (row, value).
  {
    Block z[kSubs][2] = {};
    if (works) {
#pragma unroll
      for (int J = 0; J < kSubs; ++J)
        product<Lies::transposed, Lies::transposed, kRows, kRows>(z[J], t, 16 * J, 16 * J, dr, c0, 16 * J, kSubs - J);
    }
    __syncthreads();  // waits for the readers of dR
    if (works) {
#pragma unroll
      for (int J = 0; J < kSubs; ++J)
        for (int n = 0; n < 2; ++n)
          for (int h = 0; h < 2; ++h) put<S, kWidth>(dr, 16 * J + g + 8 * h, c0 + 8 * n + t2, z[J][n][2 * h], z[J][n][2 * h + 1]);
    }
    __syncthreads();  // waits for dZ
  }
  const S* dz = dr;
  // dP and dL by blocks: those under the diagonal first.
  for (int task = warp; task < 20; task += kChunkThreads / kWarp) {
    const int at = task / 2;
    const int I = at >= 6 ? at - 6 : at < 1 ? 1 : at < 3 ? 2 : 3, J = at >= 6 ? at - 6 : at - I * (I - 1) / 2;
    const bool of_p = task % 2 == 0;
    Block c[2] = {};
    if (of_p)
      product<Lies::transposed, Lies::straight, kRows, kRows>(c, do_, 0, 16 * I, r, 0, 16 * J, kWidth / 16);
    else
      product<Lies::straight, Lies::straight, kWidth, kRows>(c, dz, 16 * I, 0, r, 0, 16 * J, kWidth / 16);
    const float scale = of_p ? in.scale : -1.0F;
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int i = 16 * I + g + 8 * h, j = 16 * J + 8 * n + t2;
        const float low = scale * c[n][2 * h], high = scale * c[n][2 * h + 1];
        put<S, kRows>(of_p ? dP : dL, i, j, j < i ? low : 0.0F, j + 1 < i ? high : 0.0F);
        if (of_p && j == i) self[i] = low;
        if (of_p && j + 1 == i) self[i] = high;
      }
  }

  float dq[kSubs][2][4], dk[kSubs][2][4], dg[kSubs][2][4], dx[kSubs][2][4] = {}, by_beta[kSubs][2] = {};
  if (works) {
    Block of_q[kSubs][2] = {}, of_k[kSubs][2] = {};
    product_of_rows<Lies::transposed, kRows, kWidth>(of_q, do_, state, c0, kWidth / 16);
    product_of_rows<Lies::straight, kWidth, kWidth>(of_k, dz, state, c0, kWidth / 16);
#pragma unroll
    for (int m = 0; m < kSubs; ++m) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = c0 + 8 * n + t2;
        const float before[2] = {x.before(m, c), x.before(m, c + 1)};
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * m + g + 8 * h;
          const float2 Gs = get<float, kWidth>(G, row, c), aq = get<S, kWidth>(x.aq, row, c), ak = get<S, kWidth>(x.ak, row, c);
          const float since[2] = {power_of_2(Gs.x), power_of_2(Gs.y)}, q[2] = {aq.x, aq.y}, k[2] = {ak.x, ak.y};
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float by_q = in.scale * of_q[m][n][2 * h + e] * before[e], by_k = -of_k[m][n][2 * h + e] * before[e];
            dq[m][n][2 * h + e] = by_q * since[e];
            dk[m][n][2 * h + e] = x.beta[row] * by_k * since[e];
            dg[m][n][2 * h + e] = by_q * q[e] + by_k * k[e];
            by_beta[m][h] += by_k * k[e];
          }
        }
      }
    }
  }
  __syncthreads();  // waits for the readers of S, and for dP and dL
  const S* dstate = Shared::kHere ? state : a.ds + tile * kSquare;
  if constexpr (Shared::kHere) {
    if (threadIdx.x == 0) {
      fence_shared_writes();
      arrive_and_expect(arrived, kSquare * int(sizeof(S)));
      copy_whole(tiles, a.ds + tile * kSquare, kSquare * int(sizeof(S)), arrived);
    }
    barrier_wait(arrived, 1);
  }
  if (own.active) {
    float sum[2] = {0, 0};
    const S* entering = a.s + tile * kSquare;
#pragma unroll 8
    for (int value = own.sub * (kWidth / kSubs); value < (own.sub + 1) * (kWidth / kSubs); ++value) {
      const float2 s = get<S, kWidth>(entering, value, own.d), ds = get<S, kWidth>(dstate, value, own.d);
      sum[0] += s.x * ds.x;
      sum[1] += s.y * ds.y;
    }
    leaving[own.sub * kWidth + own.d] = sum[0];
    leaving[own.sub * kWidth + own.d + 1] = sum[1];
  }
  if (works) {
    product_of_rows<Lies::transposed, kRows, kWidth>(dx, r, dstate, c0, kWidth / 16);
#pragma unroll
    for (int m = 0; m < kSubs; ++m) {
      Block by_p[2] = {}, by_l[2] = {};
#pragma unroll
      for (int J = 0; J < kSubs; ++J) {
        if (J > m || (J == m && !in.factored)) continue;
        int first;
        const S* columns = x.column_operand(m, J, first);
        product<Lies::straight, Lies::straight, kRows, kWidth>(by_p, dP, 16 * m, 16 * J, columns, first, c0, 1);
        product<Lies::straight, Lies::straight, kRows, kWidth>(by_l, dL, 16 * m, 16 * J, columns, first, c0, 1);
      }
      float until[2][4];  // exp(G_end - G)
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int c = c0 + 8 * n + t2;
        const float after[2] = {x.after(m, c), x.after(m, c + 1)};
        const float2 whole = get<float, kWidth>(G, 16 * m + 15, c);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * m + g + 8 * h;
          const float2 Gs = get<float, kWidth>(G, row, c), aq = get<S, kWidth>(x.aq, row, c), ak = get<S, kWidth>(x.ak, row, c),
                       ku = get<S, kWidth>(x.ku, row, c);
          const float since[2] = {power_of_2(Gs.x), power_of_2(Gs.y)}, q[2] = {aq.x, aq.y}, k[2] = {ak.x, ak.y},
                      ks[2] = {ku.x, ku.y};
          until[n][2 * h] = power_of_2(whole.x - Gs.x);
          until[n][2 * h + 1] = power_of_2(whole.y - Gs.y);
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = 2 * h + e;
            const float out = dx[m][n][i] * after[e];
            dk[m][n][i] += out * until[n][i] + x.beta[row] * since[e] * by_l[n][i];
            dx[m][n][i] = out * ks[e];
            dq[m][n][i] += since[e] * by_p[n][i];
            dg[m][n][i] += q[e] * by_p[n][i] + k[e] * by_l[n][i];
            by_beta[m][h] += k[e] * by_l[n][i];
          }
        }
      }
      // Columns of sub-chunk m under later rows. The same rounded operands as above, so that pairs cancel in dg's sums.
#pragma unroll
      for (int I = 0; I < kSubs; ++I) {
        if (I < m || (I == m && !in.factored)) continue;
        Block by_rows[2] = {};
        product<Lies::transposed, Lies::straight, kRows, kWidth>(by_rows, dP, 16 * I, 16 * m, x.aq, 16 * I, c0, 1);
        product<Lies::transposed, Lies::straight, kRows, kWidth>(by_rows, dL, 16 * I, 16 * m, x.ak, 16 * I, c0, 1);
        int first;
        const S* columns = x.column_operand(I, m, first);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int c = c0 + 8 * n + t2;
          float between[2] = {1, 1};
          for (int s = m + 1; s < I; ++s)
            for (int e = 0; e < 2; ++e) between[e] *= x.decay[s * kWidth + c + e];
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 kop = get<S, kWidth>(columns, first + g + 8 * h, c);
            const float ks[2] = {kop.x, kop.y};
            float factor[2];
            if (I == m) {  // and P's diagonal, which is kept out of dg
              const int row = 16 * m + g + 8 * h;
              const float2 Gs = get<float, kWidth>(G, row, c), aq = get<S, kWidth>(x.aq, row, c);
              const float since[2] = {power_of_2(Gs.x), power_of_2(Gs.y)}, q[2] = {aq.x, aq.y};
#pragma unroll
              for (int e = 0; e < 2; ++e) {
                factor[e] = reciprocal(since[e]);
                dq[m][n][2 * h + e] += self[row] * ks[e] * since[e];
                dk[m][n][2 * h + e] += self[row] * q[e] * factor[e];
              }
            } else {
              for (int e = 0; e < 2; ++e) factor[e] = until[n][2 * h + e] * between[e];
            }
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              dk[m][n][2 * h + e] += by_rows[n][2 * h + e] * factor[e];
              dg[m][n][2 * h + e] -= by_rows[n][2 * h + e] * ks[e];
            }
          }
        }
      }
    }
  }
  __syncthreads();  // waits for the readers of all operands and tiles but dZ

  S *dq_out = a.dq + tile * kTile, *dk_out = a.dk + tile * kTile;
  float *dg_out = a.dg + tile * kTile, *dx_out = a.dx + tile * kTile;
  if (works) {
#pragma unroll
    for (int m = 0; m < kSubs; ++m)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = 16 * m + g + 8 * h;
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int c = c0 + 8 * n + t2;
          put<S, kWidth>(dq_out, row, c, dq[m][n][2 * h], dq[m][n][2 * h + 1]);
          put<S, kWidth>(dk_out, row, c, dk[m][n][2 * h], dk[m][n][2 * h + 1]);
          put<float, kWidth>(dg_out, row, c, dg[m][n][2 * h], dg[m][n][2 * h + 1]);
          put<float, kWidth>(dx_out, row, c, dx[m][n][2 * h], dx[m][n][2 * h + 1]);
        }
        float sum = by_beta[m][h];
        sum += __shfl_xor_sync(0xffffffffU, sum, 1);
        sum += __shfl_xor_sync(0xffffffffU, sum, 2);
        if (t2 == 0) by_warp[row * 8 + warp] = sum;
      }
  }
  if constexpr (Shared::kHere) {
    constexpr int kPiece = 16 / int(sizeof(S));
    for (int at = int(threadIdx.x) * kPiece; at < kTile; at += kChunkThreads * kPiece)
      store<kPiece>(a.dr + tile * kTile + at, load<kPiece>(dz + at));
  }
  for (int d = int(threadIdx.x); d < kWidth; d += kChunkThreads) {
    float sum = 0;
    for (int sub = 0; sub < kSubs; ++sub) sum += leaving[sub * kWidth + d];
    a.carried[tile * kWidth + d] = sum * x.before(kSubs, d);
  }
  if (threadIdx.x < kRows) row_sums[threadIdx.x] = 0;
  __syncthreads();     // waits for the rows, and the sums of the warps
  if (!in.factored) {  // a thread owns two channels of a sub-chunk; what kd and ku held is now for sums
    const RowSums<kWidth> sums{reinterpret_cast<float*>(x.kd)};
    if (own.active) {
      float q[kSub][2], k[kSub][2], decays[kSub][2], dqs[kSub][2], dks[kSub][2], gs[kSub][2], beta_part[kSub];
      const Gate<S> gate(in, head, own.d);
      auto normed = [&](int s, float(&to)[kSub][2]) {
        Window<S> window;
        window.load_rows(in, s, chunk, head, own.sub, own.d);
#pragma unroll
        for (int row = 0; row < kSub; ++row)
          for (int e = 0; e < 2; ++e) {
            const float c = window.convolved(row, e);
            to[row][e] = x.norm[kRows * s + kSub * own.sub + row] * to_float(from_float<S>(c * nearly_sigmoid(c)));
          }
      };
      normed(0, q);
      normed(1, k);
      gate.load(in, chunk, head, own.sub, own.d, decays);
#pragma unroll
      for (int row = 0; row < kSub; ++row) {
        const int at = kSub * own.sub + row;
        const float2 qs = get<S, kWidth>(dq_out, at, own.d), ks = get<S, kWidth>(dk_out, at, own.d),
                     dgs = get<float, kWidth>(dg_out, at, own.d);
        gs[row][0] = dgs.x;
        gs[row][1] = dgs.y;
        beta_part[row] = 0;
        for (int e = 0; e < 2; ++e) {
          dqs[row][e] = (e == 0 ? qs.x : qs.y) + self[at] * k[row][e];
          dks[row][e] = (e == 0 ? ks.x : ks.y) + self[at] * q[row][e];
        }
      }
      pairwise_gradients(dP, dL, x.beta, kSub * own.sub, q, k, decays, dqs, dks, gs, beta_part);
#pragma unroll
      for (int row = 0; row < kSub; ++row) {
        const int at = kSub * own.sub + row;
        put<S, kWidth>(dq_out, at, own.d, dqs[row][0], dqs[row][1]);
        put<S, kWidth>(dk_out, at, own.d, dks[row][0], dks[row][1]);
        put<float, kWidth>(dg_out, at, own.d, gs[row][0], gs[row][1]);
        sums.part(at, own.pair) = beta_part[row];
      }
    }
    __syncthreads();  // waits for the parts of beta's gradient
    const float sum = sums.sum();
    if (threadIdx.x % 4 == 0) row_sums[threadIdx.x / 4] = sum;
    __syncthreads();  // waits for the sums
  }
  if (threadIdx.x < kRows) {
    const int row = int(threadIdx.x);
    float sum = row_sums[row];
    for (int w = 0; w < kWidth / 16; ++w) sum += by_warp[row * 8 + w];
    float* rows = a.rows + tile * 4 * kRows + row;
    rows[0] = x.norm[row];
    rows[kRows] = x.norm[kRows + row];
    rows[2 * kRows] = x.beta[row];
    rows[3 * kRows] = sum;
  }
}

template <class S>
struct InputGradientArgs {
  const S *dq, *dk, *dz;
  const float *dg, *dx, *carried, *rows;
  S *du[3], *df, *db;
  float *edge, *conv_parts, *bias_parts, *a_log_parts;
};

template <int kWidth>
struct InputGradientShared {
  // sums over channels; first rows of sub-chunks; taps; sums of sub-chunks; (5, 64): the four of the chunk, and sums of one stream
  static constexpr int kFloats = RowSums<kWidth>::kFloats + kSubs * kWidth * (3 + kTaps + 2) + 5 * kRows;
};

// grid (slots, N), block (kChunkThreads): a thread owns two channels of a sub-chunk. Back through norms, SiLU and convolutions, one
// stream after the other, then through the gate.
template <class S, int kWidth>
__global__ void __launch_bounds__(kChunkThreads, sizeof(S) == 2 ? 2 : 1)
    kda_attention_backward_inputs_kernel(const KdaInputs<S> in, const InputGradientArgs<S> a) {
  constexpr int kTile = kRows * kWidth;
  const int head = int(blockIdx.y);
  const std::int64_t slot = blockIdx.x, tile = slot * in.N + head;
  const Own<kWidth> own;
  const std::int64_t column = std::int64_t(head) * in.H + own.d;  // of the thread's channels in a row of P
  Chunk chunk;
  if (!find_chunk(in.documents, slot, chunk)) {
    for (int d = int(threadIdx.x); d < in.H; d += kChunkThreads) {
      const std::int64_t p = std::int64_t(head) * in.H + d;
      for (int s = 0; s < 3; ++s)
        for (int i = 0; i < kTaps; ++i) a.conv_parts[((slot * 3 + s) * in.P + p) * kTaps + i] = 0;
      a.bias_parts[slot * in.P + p] = 0;
    }
    if (threadIdx.x == 0) a.a_log_parts[tile] = 0;
    return;
  }
  extern __shared__ __align__(128) unsigned char shared[];
  const RowSums<kWidth> sums{reinterpret_cast<float*>(shared)};
  float* edges = sums.parts + RowSums<kWidth>::kFloats;  // (4, 3, kWidth)
  float* taps = edges + kSubs * 3 * kWidth;              // (4, kWidth, 4)
  float* sub_sums = taps + kSubs * kWidth * kTaps;       // (2, 4, kWidth)
  float* norms = sub_sums + 2 * kSubs * kWidth;          // (2, 64)
  float *beta = norms + 2 * kRows, *by_beta = beta + kRows, *row_sums = by_beta + kRows;
  norms[threadIdx.x] = a.rows[tile * 4 * kRows + threadIdx.x];
  static_assert(kChunkThreads == 4 * kRows);
  __syncthreads();  // waits for the rows' norms and beta

  // Through norm, SiLU and convolution; du of the last rows lacks what the next chunk adds.
#pragma unroll 1
  for (int s = 0; s < 3; ++s) {
    Window<S> window;
    float dc[kSub + kTaps - 1][2];
    if (own.active) {
      window.load_rows(in, s, chunk, head, own.sub, own.d);
#pragma unroll
      for (int row = 0; row < kSub; ++row) {
        const int at = kSub * own.sub + row;
        const float2 up = get<S, kWidth>((s == 0 ? a.dq : s == 1 ? a.dk : a.dz) + tile * kTile, at, own.d);
        const float fold = s == 2 ? beta[at] : 1.0F;
        dc[row][0] = fold * up.x;
        dc[row][1] = fold * up.y;
        float part = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float c = window.convolved(row, e);
          part += dc[row][e] * c * nearly_sigmoid(c);
        }
        sums.part(at, own.pair) = part;
      }
    }
    __syncthreads();  // waits for the parts of dy . y
    const float dot = sums.sum();
    if (threadIdx.x % 4 == 0) row_sums[threadIdx.x / 4] = dot;
    __syncthreads();  // waits for the dots, and for the readers of the parts
    if (own.active) {
#pragma unroll
      for (int row = 0; row < kSub; ++row) {
        const int at = kSub * own.sub + row;
        const float norm = s == 2 ? 1.0F : norms[kRows * s + at], along = s == 2 ? 0.0F : norm * norm * row_sums[at];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float c = window.convolved(row, e), sg = nearly_sigmoid(c), y = c * sg, dy = norm * (dc[row][e] - along * y);
          dc[row][e] = dy * (sg + y * (1.0F - sg));
          if (row < kTaps - 1) edges[(own.sub * 3 + row) * kWidth + own.d + e] = dc[row][e];
        }
      }
#pragma unroll
      for (int i = 0; i < kTaps; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float sum = 0;
#pragma unroll
          for (int row = 0; row < kSub; ++row) sum += dc[row][e] * to_float(window.u[row + i].at[e]);
          taps[(own.sub * kWidth + own.d + e) * kTaps + i] = sum;
        }
    }
    __syncthreads();  // waits for the edges and the taps' parts
    if (own.active) {
#pragma unroll
      for (int row = 0; row < kTaps - 1; ++row)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          dc[kSub + row][e] = own.sub + 1 < kSubs ? edges[((own.sub + 1) * 3 + row) * kWidth + own.d + e] : 0.0F;
      float du[kSub][2];
#pragma unroll
      for (int row = 0; row < kSub; ++row)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          du[row][e] = 0;
#pragma unroll
          for (int i = 0; i < kTaps; ++i) du[row][e] += window.tap[i][e] * dc[row + kTaps - 1 - i][e];
        }
      store_columns(in,
                    (s == 0   ? a.du[0]
                     : s == 1 ? a.du[1]
                              : a.du[2]) +
                        chunk.first * in.P + std::int64_t(head) * in.H,
                    kSub * own.sub, chunk.rows, own.d, du);
      if (own.sub == 0) {
        for (int e = 0; e < 2; ++e) {
          if (own.d + e >= in.H) continue;
          for (int row = 0; row < kTaps - 1; ++row) a.edge[((slot * 3 + s) * 3 + row) * in.P + column + e] = dc[row][e];
          for (int i = 0; i < kTaps; ++i) {
            float sum = 0;
            for (int sub = 0; sub < kSubs; ++sub) sum += taps[(sub * kWidth + own.d + e) * kTaps + i];
            a.conv_parts[((slot * 3 + s) * in.P + column + e) * kTaps + i] = sum;
          }
        }
      }
    }
  }

  // beta: beta dbeta is the sum of all parts; row_sums holds what V gives.
  if (int(threadIdx.x) < chunk.rows) {
    const int row = int(threadIdx.x);
    a.db[(chunk.first + row) * in.N + head] = from_float<S>((row_sums[row] + by_beta[row]) * (1.0F - beta[row]));
  }

  // The gate. dg of a row: what the state carries through, earlier rows' Kout dKout, later rows' own.
  const float *dg_rows = a.dg + tile * kTile, *dx_rows = a.dx + tile * kTile;
  float gs[kSub][2];
  if (own.active) {
    float sum_g[2] = {0, 0}, sum_x[2] = {0, 0};
#pragma unroll
    for (int row = 0; row < kSub; ++row) {
      const float2 xs = get<float, kWidth>(dx_rows, kSub * own.sub + row, own.d);
      const float2 dgs = get<float, kWidth>(dg_rows, kSub * own.sub + row, own.d);
      gs[row][0] = dgs.x;
      gs[row][1] = dgs.y;
      sum_x[0] += xs.x;
      sum_x[1] += xs.y;
      for (int e = 0; e < 2; ++e) sum_g[e] += gs[row][e];
    }
    for (int e = 0; e < 2; ++e) {
      sub_sums[own.sub * kWidth + own.d + e] = sum_x[e];
      sub_sums[(kSubs + own.sub) * kWidth + own.d + e] = sum_g[e];
    }
  }
  __syncthreads();  // waits for the sums of the other sub-chunks
  float bias_sum[2] = {0, 0}, rate_sum = 0;
  if (own.active) {
    float earlier[2], later[2];
    for (int e = 0; e < 2; ++e) {
      const int d = own.d + e;
      earlier[e] = a.carried[tile * kWidth + d];
      for (int s = 0; s < own.sub; ++s) earlier[e] += sub_sums[s * kWidth + d];
      later[e] = 0;
      for (int s = own.sub + 1; s < kSubs; ++s) later[e] += sub_sums[(kSubs + s) * kWidth + d];
    }
    for (int row = kSub - 1; row >= 0; --row)
      for (int e = 0; e < 2; ++e) {
        later[e] += gs[row][e];
        gs[row][e] = later[e];
      }
    const Gate<S> gate(in, head, own.d);
    const std::int64_t rows_at = chunk.first * in.P + std::int64_t(head) * in.H;
    Pack<S, 2> f[kSub];
    load_columns(in, in.f + rows_at, in.f + rows_at, kSub * own.sub, 0, chunk.rows, own.d, f);
#pragma unroll
    for (int row = 0; row < kSub; ++row) {
      const float2 xs = get<float, kWidth>(dx_rows, kSub * own.sub + row, own.d);
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        gs[row][e] = kSub * own.sub + row < chunk.rows && own.d + e < in.H ? gs[row][e] + earlier[e] : 0.0F;
        earlier[e] += e == 0 ? xs.x : xs.y;
      }
    }
    if (in.lower_bounded) {
#pragma unroll
      for (int row = 0; row < kSub; ++row)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float z = to_float(f[row].at[e]) + gate.bias[e];
          const float fall = fminf(power_of_2(-kLog2E * gate.rate * z), 1e30F), sg = reciprocal(1.0F + fall);
          gs[row][e] *= in.lower_bound * gate.rate * sg * (fall * sg);  // fall sg = 1 - sg, also where sg is nearly 1
          rate_sum += gs[row][e] * z;
        }
    } else {
#pragma unroll
      for (int row = 0; row < kSub; ++row)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float z = to_float(f[row].at[e]) + gate.bias[e];
          rate_sum += gs[row][e] * gate.unbounded(z) / kLog2E;
          gs[row][e] *= -gate.rate * nearly_sigmoid(z);
        }
    }
#pragma unroll
    for (int row = 0; row < kSub; ++row)
      for (int e = 0; e < 2; ++e) bias_sum[e] += gs[row][e];
    store_columns(in, a.df + rows_at, kSub * own.sub, chunk.rows, own.d, gs);
    for (int e = 0; e < 2; ++e) edges[own.sub * kWidth + own.d + e] = bias_sum[e];
  }
  const float rate = block_sum(rate_sum);  // its barriers wait for the sums of dt_bias, too
  if (threadIdx.x == 0) a.a_log_parts[tile] = rate;
  if (own.active && own.sub == 0)
    for (int e = 0; e < 2; ++e)
      if (own.d + e < in.H) {
        float sum = 0;
        for (int s = 0; s < kSubs; ++s) sum += edges[s * kWidth + own.d + e];
        a.bias_parts[slot * in.P + column + e] = sum;
      }
}

}  // namespace

void cuda::kda_gradients(Context& ctx, const KdaAttentionBackward& a, const KdaTiles& tiles) {
  with_kda_types(a.x, tiles, [&](auto storage, auto width) {
    using T = decltype(storage);
    using S = device_t<T>;
    auto in = kda_inputs<T>(a.x);
    in.pairs = in.pairs && in_packs<2>(a.x.H(), {a.dq_in, a.dk_in, a.dv_in, a.df});
    const dim3 chunks(unsigned(tiles.slots), unsigned(a.x.N()));
    launch(ctx, kda_attention_backward_chunk_kernel<S, width>,
           {chunks, kChunkThreads, std::size_t(GradientShared<S, width>::kBytes)}, in,
           ChunkGradientArgs<S>{.s = device_pointer<T>(tiles.s),
                                .ds = device_pointer<T>(tiles.ds),
                                .do_ = device_pointer<T>(tiles.do_),
                                .t = device_pointer<T>(tiles.t),
                                .r = device_pointer<T>(tiles.u),
                                .dr = device_pointer<T>(tiles.dr),
                                .dq = device_pointer<T>(tiles.q),
                                .dk = device_pointer<T>(tiles.w),
                                .dg = tiles.dg.as<float>(),
                                .dx = tiles.dx.as<float>(),
                                .carried = tiles.decay.as<float>(),
                                .rows = tiles.rows.as<float>()});
    launch(ctx, kda_attention_backward_inputs_kernel<S, width>, {chunks, kChunkThreads, InputGradientShared<width>::kFloats * 4},
           in,
           InputGradientArgs<S>{.dq = device_pointer<T>(tiles.q),
                                .dk = device_pointer<T>(tiles.w),
                                .dz = device_pointer<T>(tiles.dr),
                                .dg = tiles.dg.as<float>(),
                                .dx = tiles.dx.as<float>(),
                                .carried = tiles.decay.as<float>(),
                                .rows = tiles.rows.as<float>(),
                                .du = {device_pointer<T>(a.dq_in), device_pointer<T>(a.dk_in), device_pointer<T>(a.dv_in)},
                                .df = device_pointer<T>(a.df),
                                .db = device_pointer<T>(a.db),
                                .edge = tiles.edge.as<float>(),
                                .conv_parts = tiles.conv_parts.as<float>(),
                                .bias_parts = tiles.bias_parts.as<float>(),
                                .a_log_parts = tiles.a_log_parts.as<float>()});
  });
}

}  // namespace moetrain::ops
