// kda_attention_backward.cu -- KDA backward in eight launches: prepare and scan again (states and R kept), gated norm, scan in
// reverse, two for the gradients of a chunk (kda_attention_gradients.cu), what crosses chunks and slices in the convolutions, and
// the parameters' sums. The map of a slice's gradients of states in three: prepare, gated norm, scan in reverse.
#include "ops/cuda/kda_chunk.cuh"
#include "ops/cuda/launch.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

// ---- gated norm

template <class S>
struct NormArgs {
  const S *dy, *o, *gate;
  S *dgate, *do_;     // do_ as tiles (value, row); dgate null: not wanted
  float* norm_parts;  // (slots, N, H); null: not wanted
};

// grid (slots, N), block (kChunkThreads): four threads a row.
template <class S, int kWidth>
__global__ void __launch_bounds__(kChunkThreads) kda_attention_backward_norm_kernel(const KdaInputs<S> in, const NormArgs<S> a) {
  constexpr int kQuads = kWidth / 16, kStride = kWidth + 1;
  extern __shared__ __align__(128) unsigned char shared[];
  S* tile = reinterpret_cast<S*>(shared);
  float* parts = reinterpret_cast<float*>(tile + kRows * kWidth);  // (64, kStride)
  const int head = int(blockIdx.y), row = int(threadIdx.x) / 4, quarter = int(threadIdx.x) % 4;
  const std::int64_t at = std::int64_t(blockIdx.x) * in.N + head;
  Chunk chunk;
  if (!find_chunk(in.documents, blockIdx.x, chunk)) {
    if (a.norm_parts && int(threadIdx.x) < in.H) a.norm_parts[at * in.H + threadIdx.x] = 0;
    return;
  }
  const std::int64_t from = (chunk.first + row) * in.P + std::int64_t(head) * in.H;
  const bool valid = row < chunk.rows;
  auto elements = [&](const S* rows, int d) {
    Pack<S, 4> x;
    if (in.packs && valid && d < in.H) return load<4>(rows + from + d);
    for (int i = 0; i < 4; ++i) x.at[i] = valid && d + i < in.H ? rows[from + d + i] : from_float<S>(0);
    return x;
  };
  Pack<S, 4> o[kQuads];
  float squares = 0;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    o[j] = elements(a.o, 16 * j + 4 * quarter);
    for (int i = 0; i < 4; ++i) squares += to_float(o[j].at[i]) * to_float(o[j].at[i]);
  }
  auto over_row = [](float x) {
    x += __shfl_xor_sync(0xffffffffU, x, 1);
    return x + __shfl_xor_sync(0xffffffffU, x, 2);
  };
  const float root = 1.0F / sqrtf(over_row(squares) / float(in.H) + in.norm_eps);
  float e[kQuads][4], dot = 0;
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int d = 16 * j + 4 * quarter;
    const auto dys = elements(a.dy, d), gates = elements(in.gate, d);
    Pack<S, 4> dgates;
    for (int i = 0; i < 4; ++i) {
      const float dy = to_float(dys.at[i]), oh = to_float(o[j].at[i]) * root, s = nearly_sigmoid(to_float(gates.at[i]));
      const float w = d + i < in.H ? in.o_norm[d + i] : 0;
      e[j][i] = dy * w * s;
      dot += e[j][i] * oh;
      parts[row * kStride + d + i] = dy * oh * s;
      dgates.at[i] = from_float<S>(e[j][i] * oh * (1 - s));
    }
    if (!a.dgate) continue;
    if (in.packs && valid && d < in.H)
      store<4>(a.dgate + from + d, dgates);
    else
      for (int i = 0; i < 4; ++i)
        if (valid && d + i < in.H) a.dgate[from + d + i] = dgates.at[i];
  }
  const float mean = over_row(dot) / float(in.H);
#pragma unroll
  for (int j = 0; j < kQuads; ++j)
    for (int i = 0; i < 4; ++i)
      tile[place<S, kRows>(16 * j + 4 * quarter + i, row)] = from_float<S>(root * (e[j][i] - to_float(o[j].at[i]) * root * mean));
  __syncthreads();  // waits for the tile and the parts
  constexpr int kPiece = 16 / int(sizeof(S));
  for (int i = int(threadIdx.x) * kPiece; i < kRows * kWidth; i += kChunkThreads * kPiece)
    store<kPiece>(a.do_ + at * kRows * kWidth + i, load<kPiece>(tile + i));
  if (a.norm_parts && int(threadIdx.x) < in.H) {
    float sum = 0;
    for (int r = 0; r < kRows; ++r) sum += parts[r * kStride + threadIdx.x];
    a.norm_parts[at * in.H + threadIdx.x] = sum;
  }
}

// ---- scan in reverse

template <class S>
struct ReverseArgs {
  const S *w, *q, *k, *p, *do_;
  const float* decay;
  S *ds, *dr;
  const float* dfinal_state;
  float* dinitial_state;  // or the map
  KdaDocuments documents;
  int N, H;
};

template <class S, int kWidth>
struct ReverseShared {
  static constexpr int kTile = kRows * kWidth;
  static constexpr int of_outputs(int warps) { return kTile + kRows * kRows + warps * 16 * kRows; }  // elements of a stage
  static constexpr int stage_bytes(int warps) { return (2 * kTile + of_outputs(warps)) * int(sizeof(S)) + kWidth * 4; }
};

// grid (kWidth / (16 warps), twice that for a map, N, documents), block (32 (warps + 1)): a warp holds dS^T of 16 values; the last
// one brings the tiles.
//   dR^T = dO^T P + dS'^T Kout^T,  dS^T = dS'^T diag(exp G_last) + dO^T (s Qin) - dR^T W
// kMap: neither dR nor dS' is kept; a second dS, beside the one from zero, starts as identity and has no dO.
template <class S, int kWidth, bool kMap>
__global__ void __launch_bounds__(160) kda_attention_backward_scan_kernel(const ReverseArgs<S> a, int stages) {
  using Shared = ReverseShared<S, kWidth>;
  constexpr int kTile = Shared::kTile;
  extern __shared__ __align__(128) unsigned char shared[];
  const int warps = int(blockDim.x) / kWarp - 1, warp = int(threadIdx.x) / kWarp, lane = int(threadIdx.x) % kWarp;
  const int head = int(blockIdx.y), slice = warps * 16;
  const bool identity = kMap && int(blockIdx.x) * slice >= kWidth;
  if (kMap && (a.documents.enters(blockIdx.z) < 0 || (identity && a.documents.leaves(blockIdx.z) < 0))) return;
  const int first_value = int(blockIdx.x) * slice - (identity ? kWidth : 0);
  const std::int64_t begin = a.documents.starts[blockIdx.z], end = a.documents.starts[blockIdx.z + 1],
                     slot = begin / kRows + blockIdx.z;
  const int chunks = int((end - begin + kRows - 1) / kRows);
  const TileRing ring(shared, stages,
                      Shared::stage_bytes(warps) - (identity ? Shared::of_outputs(warps) * int(sizeof(S)) : 0), warps);

  if (warp == warps) {
    if (lane != 0) return;
    for (int i = 0; i < chunks; ++i) {
      const std::int64_t tile = (slot + chunks - 1 - i) * a.N + head;
      unsigned char* to = ring.begin(i);
      ring.bring(to, a.k + tile * kTile, kTile * int(sizeof(S)), i);
      ring.bring(to, a.w + tile * kTile, kTile * int(sizeof(S)), i);
      if (!identity) {
        ring.bring(to, a.q + tile * kTile, kTile * int(sizeof(S)), i);
        ring.bring(to, a.p + tile * kRows * kRows, kRows * kRows * int(sizeof(S)), i);
        ring.bring(to, a.do_ + tile * kTile + first_value * kRows, slice * kRows * int(sizeof(S)), i);
      }
      ring.bring(to, a.decay + tile * kWidth, kWidth * 4, i);
    }
    return;
  }

  const int g = lane / 4, t2 = lane % 4 * 2, v0 = first_value + 16 * warp;
  const int leaves = a.documents.leaves(blockIdx.z);
  const float* leaving_state =
      a.dfinal_state && leaves >= 0 ? a.dfinal_state + (std::int64_t(leaves) * a.N + head) * a.H * a.H : nullptr;
  float d[kWidth / 8][4];
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = v0 + g + i / 2 * 8, key = 8 * n + t2 + i % 2;
      if (identity)
        d[n][i] = value == key && key < a.H ? 1.0F : 0.0F;
      else
        d[n][i] = leaving_state && value < a.H && key < a.H ? leaving_state[std::int64_t(key) * a.H + value] : 0.0F;
    }
  for (int i = 0; i < chunks; ++i) {
    const S* k = reinterpret_cast<const S*>(ring.wait(i));
    const S *w = k + kTile, *q = w + kTile, *p = q + kTile, *do_ = p + kRows * kRows;
    const float* decay = reinterpret_cast<const float*>(identity ? q : do_ + slice * kRows);
    const std::int64_t tile = (slot + chunks - 1 - i) * a.N + head;
    S *ds_out = a.ds + tile * kWidth * kWidth, *dr_out = a.dr + tile * kTile;

    Fragment<S> leaving;
    Block r[kRows / 8] = {};
#pragma unroll
    for (int c = 0; c < kWidth / 16; ++c) {
      leaving.set(d[2 * c], d[2 * c + 1]);
      product_of_left<Lies::transposed, kWidth, kRows / 8>(r, leaving, k, 0, 16 * c);
    }
    if constexpr (!kMap) {
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) put<S, kWidth>(ds_out, v0 + g + 8 * h, 8 * n + t2, d[n][2 * h], d[n][2 * h + 1]);
    }
    Fragment<S> gradient[kSubs];
    if (!identity) {
#pragma unroll
      for (int j = 0; j < kSubs; ++j) gradient[j].template load<kRows>(do_, 16 * warp, 16 * j);
      product_of_left<Lies::straight, kRows, 2>(r, gradient[0], p, 0, 0);
      product_of_left<Lies::straight, kRows, 4>(r, gradient[1], p, 16, 0);
      product_of_left<Lies::straight, kRows, 6>(r, gradient[2], p, 32, 0);
      product_of_left<Lies::straight, kRows, 8>(r, gradient[3], p, 48, 0);
    }
    if constexpr (!kMap) {
#pragma unroll
      for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
        for (int h = 0; h < 2; ++h) put<S, kRows>(dr_out, v0 + g + 8 * h, 8 * n + t2, r[n][2 * h], r[n][2 * h + 1]);
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const float2 e = *reinterpret_cast<const float2*>(decay + 8 * n + t2);
      d[n][0] *= e.x;
      d[n][1] *= e.y;
      d[n][2] *= e.x;
      d[n][3] *= e.y;
    }
#pragma unroll
    for (int j = 0; j < kSubs; ++j) {
      if (!identity) product_of_left<Lies::straight, kWidth, kWidth / 8>(d, gradient[j], q, 16 * j, 0);
      Fragment<S> pull;
      pull.set(r[2 * j], r[2 * j + 1], -1);
      product_of_left<Lies::straight, kWidth, kWidth / 8>(d, pull, w, 16 * j, 0);
    }
    ring.release(i);
  }
  const int enters = a.documents.enters(blockIdx.z);
  if (!a.dinitial_state || enters < 0) return;
  const int row = kMap ? 2 * a.H : a.H;
  float* to = a.dinitial_state + (std::int64_t(enters) * a.N + head) * a.H * row + (identity ? a.H : 0);
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int value = v0 + g + i / 2 * 8, key = 8 * n + t2 + i % 2;
      if (value < a.H && key < a.H) to[std::int64_t(key) * row + value] = d[n][i];
    }
}

// ---- what crosses chunks, and sums

// grid (slots, 9), block (kChunkThreads): the last rows of a chunk, and the rows of history before a slice (dhistory null: not
// wanted), get what the first rows that follow give them.
template <class S>
__global__ void kda_attention_backward_edges_kernel(const KdaInputs<S> in, const float* __restrict__ edge, S* dq_in, S* dk_in,
                                                    S* dv_in, S* dhistory) {
  Chunk chunk;
  if (!find_chunk(in.documents, blockIdx.x, chunk)) return;
  const int s = int(blockIdx.y) / 3, row = int(blockIdx.y) % 3 - 3;  // counted from the first that follows
  const auto add = [&](S* du, bool from_zero, const float* next) {
    for (std::int64_t p = threadIdx.x; p < in.P; p += kChunkThreads) {
      float sum = from_zero ? 0.0F : to_float(du[p]);
      for (int i = 0; i < in.taps; ++i) {  // tap i of row r reads row r - (taps - 1) + i
        const int from = row + in.taps - 1 - i;
        if (from >= 0) sum += in.taps_of(s)[p * in.taps + i] * next[from * in.P + p];
      }
      du[p] = from_float<S>(sum);
    }
  };
  const float* here = edge + (std::int64_t(blockIdx.x) * 3 + s) * 3 * in.P;
  if (!chunk.closes) add((s == 0 ? dq_in : s == 1 ? dk_in : dv_in) + (chunk.first + kRows + row) * in.P, false, here + 9 * in.P);
  if (dhistory && chunk.enters >= 0 && row >= 1 - in.taps)
    add(dhistory + ((s * in.states + chunk.enters + 1) * (in.taps - 1) + row) * in.P, true, here);
}

struct Sum {  // to[column] += the sum over parts of from[part stride + column]; taps: columns are (p, padded tap)
  const float* from;
  float* to;
  std::int64_t parts, stride, columns;
  int taps;
};
struct Sums {
  Sum of[6];
};
constexpr int kSumRows = 16;

// grid (blocks of the widest, 6), block (32, kSumRows); in a fixed order
__global__ void kda_attention_backward_sums_kernel(const Sums all) {
  __shared__ float rows[kSumRows][kWarp];
  const Sum sum = all.of[blockIdx.y];
  const std::int64_t column = std::int64_t(blockIdx.x) * kWarp + threadIdx.x;
  if (std::int64_t(blockIdx.x) * kWarp >= sum.columns || !sum.to) return;
  float x = 0;
  if (column < sum.columns)
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < sum.parts; part += kSumRows) x += sum.from[part * sum.stride + column];
  rows[threadIdx.y][threadIdx.x] = x;
  __syncthreads();  // waits for the sums of the other rows of threads
  if (threadIdx.y != 0 || column >= sum.columns) return;
  for (int row = 1; row < kSumRows; ++row) x += rows[row][threadIdx.x];
  std::int64_t to = column;
  if (sum.taps > 0) {
    const int tap = int(column % kTaps) - (kTaps - sum.taps);
    if (tap < 0) return;
    to = column / kTaps * sum.taps + tap;
  }
  sum.to[to] += x;
}

float* real(Tensor t) { return t.present() ? t.as<float>() : nullptr; }
const float* real(ConstTensor t) { return t.present() ? t.as<float>() : nullptr; }

// dO and, where wanted, dgate; then the scan in reverse, which gives what else a backward needs, or the map.
template <class T, int kWidth, bool kMap>
void states_backward(Context& ctx, const KdaAttention& x, const KdaTiles& tiles, ConstTensor dy, ConstTensor o, Tensor dgate,
                     ConstTensor dfinal_state, Tensor dinitial_state) {
  using S = device_t<T>;
  auto in = kda_inputs<T>(x);
  in.packs = in.packs && in_packs<4>(x.H(), {dy, o, dgate});
  const dim3 chunks(unsigned(tiles.slots), unsigned(x.N()));
  launch(ctx, kda_attention_backward_norm_kernel<S, kWidth>,
         {chunks, kChunkThreads, std::size_t(kRows * kWidth * int(sizeof(S)) + kRows * (kWidth + 1) * 4)}, in,
         NormArgs<S>{device_pointer<T>(dy), device_pointer<T>(o), in.gate, device_pointer<T>(dgate), device_pointer<T>(tiles.do_),
                     real(tiles.norm_parts)});
  const ScanShape shape = scan_shape(ctx, x, kWidth, kMap ? 2 : 1, ReverseShared<S, kWidth>::stage_bytes);
  launch(ctx, kda_attention_backward_scan_kernel<S, kWidth, kMap>, shape.grid,
         ReverseArgs<S>{.w = device_pointer<T>(tiles.w),
                        .q = device_pointer<T>(tiles.q),
                        .k = device_pointer<T>(tiles.k),
                        .p = device_pointer<T>(tiles.p),
                        .do_ = device_pointer<T>(tiles.do_),
                        .decay = tiles.decay.as<float>(),
                        .ds = device_pointer<T>(tiles.ds),
                        .dr = device_pointer<T>(tiles.dr),
                        .dfinal_state = real(dfinal_state),
                        .dinitial_state = real(dinitial_state),
                        .documents = in.documents,
                        .N = in.N,
                        .H = in.H},
         shape.stages);
}

template <class T, int kWidth>
void backward(Context& ctx, const KdaAttentionBackward& a, const KdaTiles& tiles) {
  using S = device_t<T>;
  states_backward<T, kWidth, false>(ctx, a.x, tiles, a.dy, a.o, a.dgate, a.dfinal_state, a.dinitial_state);
  kda_gradients(ctx, a, tiles);
  zero(ctx, a.dhistory);
  launch(ctx, kda_attention_backward_edges_kernel<S>, {dim3(unsigned(tiles.slots), 9), kChunkThreads}, kda_inputs<T>(a.x),
         static_cast<const float*>(tiles.edge.as<float>()), device_pointer<T>(a.dq_in), device_pointer<T>(a.dk_in),
         device_pointer<T>(a.dv_in), device_pointer<T>(a.dhistory));
}

}  // namespace

void cuda::kda_attention(Context& ctx, const KdaAttentionMapBackward& a) {
  Scope scope(ctx.scratch);
  const KdaTiles tiles(ctx.scratch, a.x, KdaTiles::For::map_backward);
  kda_prepare(ctx, a.x, tiles);
  zero(ctx, a.map);
  with_kda_types(a.x, tiles, [&](auto storage, auto width) {
    states_backward<decltype(storage), width, true>(ctx, a.x, tiles, a.dy, a.o, {}, {}, a.map);
  });
}

void cuda::kda_attention(Context& ctx, const KdaAttentionBackward& a) {
  Scope scope(ctx.scratch);
  const auto& x = a.x;
  const KdaTiles tiles(ctx.scratch, x, KdaTiles::For::backward);
  kda_prepare(ctx, x, tiles);
  kda_scan(ctx, x, tiles, {}, {});
  with_kda_types(x, tiles, [&](auto storage, auto width) { backward<decltype(storage), width>(ctx, a, tiles); });
  const std::int64_t P = x.P(), slots = tiles.slots;
  const float* taps = tiles.conv_parts.as<float>();
  auto conv = [&](int s, Tensor to) {
    return Sum{taps + s * P * kTaps, real(to), slots, 3 * P * kTaps, P * kTaps, int(x.q_conv.shape[2])};
  };
  const Sums sums{{conv(0, a.dq_conv),
                   conv(1, a.dk_conv),
                   conv(2, a.dv_conv),
                   {tiles.bias_parts.as<float>(), real(a.ddt_bias), slots, P, P, 0},
                   {tiles.a_log_parts.as<float>(), real(a.da_log), slots, x.N(), x.N(), 0},
                   {tiles.norm_parts.as<float>(), real(a.do_norm), slots * x.N(), x.H(), x.H(), 0}}};
  launch(ctx, kda_attention_backward_sums_kernel, {dim3(blocks(P * kTaps, kWarp), 6), dim3(kWarp, kSumRows)}, sums);
}

}  // namespace moetrain::ops
