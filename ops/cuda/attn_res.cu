// attn_res.cu -- a block a token: its rows of all sources come to shared memory at once and are read twice there, for their scores
// and for what follows from the softmax. Bound by the bytes of the sources (and, back, by their gradients' eight a value).
#include <array>

#include "ops/attn_res.h"
#include "ops/cuda/blas.h"
#include "ops/cuda/instructions.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kAll = 0xffffffffU;
constexpr int kMostSources = 64;  // two a lane of a warp; their pointers travel in the launch's parameters
constexpr int kMostThreads = 448, kHeldPacks = 2;
constexpr int kTogether = 4, kPair = 2;           // sources whose rows are loaded together, backward and forward
constexpr std::int64_t kSharedBytes = 220 << 10;  // of a multiprocessor of sm_90, with room to spare

template <class T>
struct Rows {
  std::array<T*, kMostSources> of;
};

// Sums over D of every source: each warp's part in shared memory, added up by the first warp, two sources a lane.
struct Dots {
  float* part;  // (dots, Z, warps of the block)
  int Z;
  __device__ float* parts_of(int dot, int n) const { return part + (dot * Z + n) * int(blockDim.x / kWarp); }
  __device__ void put(int dot, int n, float x) const {
    x = warp_sum(x);
    if (threadIdx.x % kWarp == 0) parts_of(dot, n)[threadIdx.x / kWarp] = x;
  }
  __device__ float get(int dot, int n) const {
    const float* of_warp = parts_of(dot, n);
    float sum = 0;
    for (int w = 0; w < int(blockDim.x) / kWarp; ++w) sum += of_warp[w];
    return sum;
  }
};
__host__ __device__ constexpr std::int64_t dots_bytes(int dots, std::int64_t Z, int threads) {  // in whole packs
  return (dots * Z * (threads / kWarp) * std::int64_t(sizeof(float)) + 15) / 16 * 16;
}

// The rows of one token: the first `staged` lie in shared memory, the others are read where they are.
template <class X>
struct Staged {
  const X* const* rows;
  X* shared;
  int staged;
  std::int64_t offset, D;  // of the token's row in every source
  __device__ const X* row(int n) const { return n < staged ? shared + n * D : rows[n] + offset; }
};

// The staged rows come to shared memory by the copy engine: one thread requests them, every thread awaits them. Or each thread
// brings the columns that it alone will read, where rows are not in packs.
template <int kCount, class X>
__device__ void request(const Staged<X>& s, std::uint64_t* barrier) {
  if constexpr (kCount > 1) {
    const int bytes = int(s.D) * int(sizeof(X));
    arrive_and_expect(barrier, s.staged * bytes);
    for (int n = 0; n < s.staged; ++n) copy_bytes(s.shared + n * s.D, s.rows[n] + s.offset, bytes, barrier);
  }
}
template <int kCount, class X>
__device__ void await(const Staged<X>& s, std::uint64_t* barrier, unsigned int parity) {
  if constexpr (kCount > 1) {
    wait(barrier, parity);
  } else {
    for (int n = 0; n < s.staged; ++n)
      for (std::int64_t d = threadIdx.x; d < s.D; d += blockDim.x) s.shared[n * s.D + d] = s.rows[n][s.offset + d];
  }
}

struct Norm {  // the norm that follows, of y; y null: none
  const void* w;
  bool half;
  void* y;
  float *r, eps;
};

template <int kCount>
__device__ Floats<kCount> load_any(const void* from, bool half, std::int64_t i) {
  return half ? load_floats<kCount>(static_cast<const __nv_bfloat16*>(from) + i)
              : load_floats<kCount>(static_cast<const float*>(from) + i);
}

// grid (ceil(D / blockDim.x))
__global__ void attn_res_product_kernel(const void* gamma, bool half_gamma, const void* query, bool half_query, float* c,
                                        std::int64_t D) {
  const std::int64_t d = std::int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (d < D) c[d] = load_any<1>(gamma, half_gamma, d).at[0] * load_any<1>(query, half_query, d).at[0];
}

// Calls body(p, d) for the packs of a row that a thread owns, from d on: at most kHeld of them, with p known to the compiler, or
// any number with p = 0.
template <int kHeld, int kCount, class Body>
__device__ void for_packs(std::int64_t D, Body body) {
  const std::int64_t first = std::int64_t(threadIdx.x) * kCount, step = std::int64_t(blockDim.x) * kCount;
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int p = 0; p < kHeld; ++p)
      if (const std::int64_t d = first + p * step; d < D) body(p, d);
  } else {
    for (std::int64_t d = first; d < D; d += step) body(0, d);
  }
}

// grid (blocks that run at once), block (up to kMostThreads), shared dots_bytes, then `stages` times `staged` rows: block b
// takes tokens b, b + gridDim.x, ...; with two stages a token's rows are under way while the one before is worked on. A thread
// holds c of its packs where they are at most kHeld.
template <class X, int kCount, int kHeld>
__global__ void __launch_bounds__(kMostThreads, 2)
    attn_res_forward_kernel(const __grid_constant__ Rows<const X> sources, int Z, int staged, int stages,
                            const float* __restrict__ c, X* __restrict__ y, float* __restrict__ weights, float eps, Norm norm,
                            std::int64_t T, std::int64_t D) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float weight[kMostSources];
  __shared__ std::uint64_t barrier[2];
  const Dots dots{reinterpret_cast<float*>(shared), Z};
  X* rows = reinterpret_cast<X*>(shared + dots_bytes(2, Z, int(blockDim.x)));
  const auto rows_of_token = [&](std::int64_t t, int stage) {
    return Staged<X>{sources.of.data(), rows + stage * staged * D, staged, t * D, D};
  };
  Floats<kCount> held[kHeld > 0 ? kHeld : 1];
  if constexpr (kHeld > 0) for_packs<kHeld, kCount>(D, [&](int p, std::int64_t d) { held[p] = load<kCount>(c + d); });

  if (threadIdx.x == 0) {
    barrier_init(&barrier[0], 1), barrier_init(&barrier[1], 1), barriers_are_initialised();
    request<kCount>(rows_of_token(blockIdx.x, 0), &barrier[0]);
  }
  __syncthreads();  // waits for the barriers of the copies
  int stage = 0;
  unsigned int parity = 0;
  for (std::int64_t t = blockIdx.x; t < T; t += gridDim.x) {
    const std::int64_t next = t + gridDim.x;
    if (threadIdx.x == 0 && stages == 2 && next < T) request<kCount>(rows_of_token(next, stage ^ 1), &barrier[stage ^ 1]);
    const Staged<X> v = rows_of_token(t, stage);
    await<kCount>(v, &barrier[stage], parity);

    for (int n = 0; n < Z; n += kPair) {
      float square[kPair] = {}, dot[kPair] = {};
      for_packs<kHeld, kCount>(D, [&](int p, std::int64_t d) {
        Pack<X, kCount> vs[kPair];
#pragma unroll
        for (int u = 0; u < kPair; ++u)
          if (n + u < Z) vs[u] = load<kCount>(v.row(n + u) + d);
        Floats<kCount> cs;
        if constexpr (kHeld > 0)
          cs = held[p];
        else
          cs = load<kCount>(c + d);
#pragma unroll
        for (int u = 0; u < kPair; ++u)
          if (n + u < Z)
            for (int i = 0; i < kCount; ++i) {
              const float x = to_float(vs[u].at[i]);
              square[u] += x * x;
              dot[u] += x * cs.at[i];
            }
      });
#pragma unroll
      for (int u = 0; u < kPair; ++u)
        if (n + u < Z) dots.put(0, n + u, square[u]), dots.put(1, n + u, dot[u]);
    }
    __syncthreads();  // waits for the dots of every warp

    if (threadIdx.x < kWarp) {
      float score[2], top = -INFINITY, sum = 0;
      for (int i = 0; i < 2; ++i) {
        const int n = i * kWarp + int(threadIdx.x);
        score[i] = n < Z ? dots.get(1, n) / sqrtf(dots.get(0, n) / float(D) + eps) : -INFINITY;
        top = fmaxf(top, score[i]);
      }
      for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(kAll, top, lanes));
      for (int i = 0; i < 2; ++i) sum += score[i] = expf(score[i] - top);
      sum = warp_sum(sum);
      for (int i = 0; i < 2; ++i)
        if (const int n = i * kWarp + int(threadIdx.x); n < Z) weights[t * Z + n] = weight[n] = score[i] / sum;
    }
    __syncthreads();  // waits for the weights

    float square = 0;
    X *y_row = y + t * D, *own = staged > 0 ? v.shared : y_row;  // where y is read again: those columns of row 0 have been used
    for_packs<kHeld, kCount>(D, [&](int, std::int64_t d) {
      Floats<kCount> sum{};
#pragma unroll 4
      for (int n = 0; n < Z; ++n) {
        const auto vs = load_floats<kCount>(v.row(n) + d);
        for (int i = 0; i < kCount; ++i) sum.at[i] += weight[n] * vs.at[i];
      }
      store_floats<kCount>(y_row + d, sum);
      if (!norm.y) return;
      store_floats<kCount>(own + d, sum);
      for (int i = 0; i < kCount; ++i) {
        const float x = to_float(from_float<X>(sum.at[i]));
        square += x * x;
      }
    });
    if (norm.y) {
      const float r = 1.0F / sqrtf(block_sum(square) / float(D) + norm.eps);
      X* normed = static_cast<X*>(norm.y) + t * D;
      for_packs<kHeld, kCount>(D, [&](int, std::int64_t d) {
        const auto ys = load_floats<kCount>(own + d);
        auto w = load_any<kCount>(norm.w, norm.half, d);
        for (int i = 0; i < kCount; ++i) w.at[i] *= to_float(from_float<X>(ys.at[i] * r));
        store_floats<kCount>(normed + d, w);
      });
      if (threadIdx.x == 0) norm.r[t] = r;
      fence_shared_writes();
    }
    __syncthreads();  // waits for the readers of this token's rows, dots and weights
    if (threadIdx.x == 0 && stages == 1 && next < T) request<kCount>(rows_of_token(next, 0), &barrier[0]);
    if (stages == 1 || stage == 1) parity ^= 1;
    if (stages == 2) stage ^= 1;
  }
}

// grid (parts), block (up to kMostThreads), shared dots_bytes, D floats of dc where it is wanted, then `staged` rows: block b takes
// tokens b, b + gridDim.x, ... and writes row b of dc_parts (gridDim.x, D)
template <class X, int kCount>
__global__ void __launch_bounds__(kMostThreads, 2)
    attn_res_backward_kernel(const __grid_constant__ Rows<const X> sources, const X* __restrict__ dy,
                             const __grid_constant__ Rows<float> dsources, int Z, int staged, const float* __restrict__ c,
                             const float* __restrict__ weights, float eps, float* __restrict__ dc_parts, std::int64_t T,
                             std::int64_t D) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ float by_dy[kMostSources], by_c[kMostSources], by_v[kMostSources];
  __shared__ std::uint64_t barrier;
  const Dots dots{reinterpret_cast<float*>(shared), Z};
  auto* dc =
      reinterpret_cast<float*>(shared + dots_bytes(3, Z, int(blockDim.x)));  // each element has one owning thread: no barrier
  auto* rows = reinterpret_cast<X*>(dc_parts ? dc + D : dc);
  const std::int64_t first = std::int64_t(threadIdx.x) * kCount, step = std::int64_t(blockDim.x) * kCount;
  if (dc_parts)
    for (std::int64_t d = first; d < D; d += step) store<kCount>(dc + d, Floats<kCount>{});
  if (threadIdx.x == 0) barrier_init(&barrier, 1), barriers_are_initialised();

  unsigned int parity = 0;
  for (std::int64_t t = blockIdx.x; t < T; t += gridDim.x, parity ^= 1) {
    const Staged<X> v{sources.of.data(), rows, staged, t * D, D};
    const X* dy_row = dy + t * D;
    __syncthreads();  // waits for the barrier of the copies, and for the readers of the last token's rows and factors
    if (threadIdx.x == 0) request<kCount>(v, &barrier);
    await<kCount>(v, &barrier, parity);
    for (int n = 0; n < Z; n += kTogether) {
      float square[kTogether] = {}, dot[kTogether] = {}, pull[kTogether] = {};
      for (std::int64_t d = first; d < D; d += step) {
        Pack<X, kCount> vs[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
          if (n + u < Z) vs[u] = load<kCount>(v.row(n + u) + d);
        const auto cs = load<kCount>(c + d), dys = load_floats<kCount>(dy_row + d);
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
          if (n + u < Z)
            for (int i = 0; i < kCount; ++i) {
              const float x = to_float(vs[u].at[i]);
              square[u] += x * x;
              dot[u] += x * cs.at[i];
              pull[u] += x * dys.at[i];
            }
      }
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (n + u < Z) dots.put(0, n + u, square[u]), dots.put(1, n + u, dot[u]), dots.put(2, n + u, pull[u]);
    }
    __syncthreads();  // waits for the dots of every warp

    if (threadIdx.x < kWarp) {
      float pull[2], y_dy = 0;
      for (int i = 0; i < 2; ++i)
        if (const int n = i * kWarp + int(threadIdx.x); n < Z) y_dy += weights[t * Z + n] * (pull[i] = dots.get(2, n));
      y_dy = warp_sum(y_dy);
      for (int i = 0; i < 2; ++i)
        if (const int n = i * kWarp + int(threadIdx.x); n < Z) {
          const float r = 1.0F / sqrtf(dots.get(0, n) / float(D) + eps), weight = weights[t * Z + n],
                      ds = weight * (pull[i] - y_dy);
          by_dy[n] = weight;
          by_c[n] = ds * r;
          by_v[n] = -ds * r * r * (r * dots.get(1, n)) / float(D);
        }
    }
    __syncthreads();  // waits for the factors

    for (std::int64_t d = first; d < D; d += step) {
      const auto cs = load<kCount>(c + d), dys = load_floats<kCount>(dy_row + d);
      Floats<kCount> sum{};
      for (int n = 0; n < Z; n += kTogether) {
        Floats<kCount> dv[kTogether];
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
          if (n + u < Z) dv[u] = load<kCount>(dsources.of[std::size_t(n + u)] + t * D + d);
#pragma unroll
        for (int u = 0; u < kTogether; ++u)
          if (n + u < Z) {
            const auto vs = load_floats<kCount>(v.row(n + u) + d);
            for (int i = 0; i < kCount; ++i) {
              dv[u].at[i] += by_dy[n + u] * dys.at[i] + by_c[n + u] * cs.at[i] + by_v[n + u] * vs.at[i];
              sum.at[i] += by_c[n + u] * vs.at[i];
            }
            store<kCount>(dsources.of[std::size_t(n + u)] + t * D + d, dv[u]);
          }
      }
      if (!dc_parts) continue;
      auto mine = load<kCount>(dc + d);
      for (int i = 0; i < kCount; ++i) mine.at[i] += sum.at[i];
      store<kCount>(dc + d, mine);
    }
  }
  if (dc_parts)
    for (std::int64_t d = first; d < D; d += step) store<kCount>(dc_parts + std::int64_t(blockIdx.x) * D + d, load<kCount>(dc + d));
}

constexpr int kSumRows = 8;

// grid (ceil(D / kWarp)), block (kWarp, kSumRows): dc[d] is the sum of column d of dc_parts, in a fixed order
__global__ void attn_res_backward_weights_kernel(const float* __restrict__ dc_parts, const void* gamma, bool half_gamma,
                                                 const void* query, bool half_query, float* __restrict__ dgamma,
                                                 float* __restrict__ dquery, std::int64_t parts, std::int64_t D) {
  __shared__ float sums[kSumRows][kWarp];
  const std::int64_t d = std::int64_t(blockIdx.x) * kWarp + threadIdx.x;
  float dc = 0;
  if (d < D)
#pragma unroll 4
    for (std::int64_t part = threadIdx.y; part < parts; part += kSumRows) dc += dc_parts[part * D + d];
  sums[threadIdx.y][threadIdx.x] = dc;
  __syncthreads();  // waits for the sums of the other rows of threads
  if (threadIdx.y != 0 || d >= D) return;
  for (int row = 1; row < kSumRows; ++row) dc += sums[row][threadIdx.x];
  if (dgamma) dgamma[d] += dc * load_any<1>(query, half_query, d).at[0];
  if (dquery) dquery[d] += dc * load_any<1>(gamma, half_gamma, d).at[0];
}

// Threads of a block, so that each owns about so many packs of a row.
int threads_for(std::int64_t D, int count, int packs, int most) {
  const std::int64_t threads = (D + count * packs - 1) / (count * packs);
  return int(std::clamp<std::int64_t>((threads + kWarp - 1) / kWarp * kWarp, kWarp, most));
}

// How many of Z rows lie in what a block has of shared memory.
std::int64_t staged_rows(std::int64_t Z, std::int64_t row_bytes, std::int64_t bytes) {
  return std::min(Z, std::max<std::int64_t>(bytes, 0) / std::max<std::int64_t>(row_bytes, 1));
}

bool half(ConstTensor t) {
  check(t.dtype == DType::f32 || t.dtype == DType::bf16, "attn_res: CUDA has f32 and bf16 only",
        {{"dtype", std::int64_t(t.dtype)}});
  return t.dtype == DType::bf16;
}

const float* product_of(Context& ctx, ConstTensor gamma, ConstTensor query) {
  constexpr int kThreads = 256;
  const std::int64_t D = gamma.count();
  float* c = ctx.scratch.take(DType::f32, {D}).as<float>();
  launch(ctx, attn_res_product_kernel, {blocks(D, kThreads), kThreads}, gamma.data, half(gamma), query.data, half(query), c, D);
  return c;
}

template <class X>
Rows<const device_t<X>> rows_of(std::span<const ConstTensor> sources) {
  Rows<const device_t<X>> rows{};
  for (std::size_t n = 0; n < sources.size(); ++n) rows.of[n] = device_pointer<X>(sources[n]);
  return rows;
}

template <class X, int kCount, int kHeld>
void forward(Context& ctx, const AttnResForward& a) {
  const std::int64_t T = a.y.shape[0], D = a.y.shape[1], Z = std::int64_t(a.sources.size()), row = D * std::int64_t(sizeof(X));
  if (T == 0) return;
  Scope scope(ctx.scratch);
  const float* c = product_of(ctx, a.gamma, a.query);
  Norm norm{};
  if (a.norm) norm = {a.norm->w.data, half(a.norm->w), a.norm->y.data, a.norm->r.as<float>(), float(a.norm->eps)};
  const int threads = threads_for(D, kCount, kHeldPacks, kMostThreads);
  const std::int64_t together = std::clamp(2 * kMostThreads / threads, 2, 7);  // blocks of a multiprocessor
  const std::int64_t dots = dots_bytes(2, Z, threads), bytes = kSharedBytes / together - (2 << 10) - dots;
  const std::int64_t staged = staged_rows(Z, row, bytes), stages = kCount > 1 && 2 * Z * row <= bytes ? 2 : 1;
  launch(ctx, attn_res_forward_kernel<device_t<X>, kCount, kHeld>,
         {blocks(std::min(T, ctx.blas->multiprocessors() * together), 1), static_cast<unsigned int>(threads),
          std::size_t(dots + stages * staged * row)},
         rows_of<X>(a.sources), int(Z), int(staged), int(stages), c, device_pointer<X>(a.y), a.weights.as<float>(), float(a.eps),
         norm, T, D);
}

template <class X, int kCount>
void backward(Context& ctx, const AttnResBackward& a) {
  const std::int64_t T = a.dy.shape[0], D = a.dy.shape[1], Z = std::int64_t(a.sources.size()), row = D * std::int64_t(sizeof(X));
  if (T == 0) return;
  Scope scope(ctx.scratch);
  const float* c = product_of(ctx, a.gamma, a.query);
  float* dc_parts = nullptr;
  std::int64_t shared = 0;
  if (a.trained()) {
    shared = D * std::int64_t(sizeof(float));
    check(shared <= kSharedBytes - (20 << 10), "attn_res: a row of gradients does not fit a block's shared memory",
          {{"D", D}, {"most", (kSharedBytes - (20 << 10)) / 4}});
    dc_parts = ctx.scratch.take(DType::f32, {a.parts(), D}).as<float>();
  }
  Rows<float> dsources{};
  for (std::size_t n = 0; n < a.dsources.size(); ++n) dsources.of[n] = a.dsources[n].as<float>();
  const int threads = threads_for(D, kCount, 4, kMostThreads / (a.blocks_together() == 2 ? 1 : 2));
  shared += dots_bytes(3, Z, threads);
  const std::int64_t staged = staged_rows(Z, row, kSharedBytes / a.blocks_together() - (2 << 10) - shared);
  launch(ctx, attn_res_backward_kernel<device_t<X>, kCount>,
         {blocks(a.parts(), 1), static_cast<unsigned int>(threads), std::size_t(shared + staged * row)}, rows_of<X>(a.sources),
         device_pointer<X>(a.dy), dsources, int(Z), int(staged), c, a.weights.as<float>(), float(a.eps), dc_parts, T, D);
  if (dc_parts)
    launch(ctx, attn_res_backward_weights_kernel, {blocks(D, kWarp), dim3(kWarp, kSumRows)}, dc_parts, a.gamma.data, half(a.gamma),
           a.query.data, half(a.query), a.dgamma.present() ? a.dgamma.as<float>() : nullptr,
           a.dquery.present() ? a.dquery.as<float>() : nullptr, a.parts(), D);
}

template <int kPack, class... Span>
bool all_in_packs(std::int64_t D, std::initializer_list<ConstTensor> tensors, const Span&... more) {
  bool packed = in_packs<kPack>(D, tensors);
  const auto look = [&](const auto& span) {
    for (const auto& t : span) packed = packed && in_packs<kPack>(D, {t});
  };
  (look(more), ...);
  return packed;
}

void check_sources(std::size_t Z) {
  check(Z <= kMostSources, "attn_res: more sources than a launch holds", {{"Z", std::int64_t(Z)}, {"most", kMostSources}});
}

}  // namespace

void cuda::attn_res(Context& ctx, const AttnResForward& a) {
  check_sources(a.sources.size());
  with_storage(a.y.dtype, [&](auto storage) {
    using X = decltype(storage);
    constexpr int kPack = kPackOf<X>;
    const ConstTensor w = a.norm ? a.norm->w : ConstTensor{}, normed = a.norm ? ConstTensor(a.norm->y) : ConstTensor{};
    const std::int64_t D = a.y.shape[1];
    if (!all_in_packs<kPack>(D, {a.y, w, normed}, a.sources)) return forward<X, 1, 0>(ctx, a);
    D <= kMostThreads* kPack* kHeldPacks ? forward<X, kPack, kHeldPacks>(ctx, a) : forward<X, kPack, 0>(ctx, a);
  });
}

void cuda::attn_res(Context& ctx, const AttnResBackward& a) {
  check_sources(a.sources.size());
  with_storage(a.dy.dtype, [&](auto storage) {
    using X = decltype(storage);
    constexpr int kPack = kPackOf<X, float>;  // the gradients of the sources are most of what moves
    const bool packed = all_in_packs<kPackOf<X>>(a.dy.shape[1], {a.dy}, a.sources, a.dsources);  // rows of whole 16 bytes are copied
    packed ? backward<X, kPack>(ctx, a) : backward<X, 1>(ctx, a);
  });
}

}  // namespace moetrain::ops
