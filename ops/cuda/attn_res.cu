// attn_res.cu -- a block a token: its rows of all sources come to shared memory at once and are read twice there, for their scores
// and for what follows from the softmax. Bound by the bytes of the sources (and, back, by their gradients' eight a value).
#include <array>

#include "ops/attn_res.h"
#include "ops/cuda/instructions.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr unsigned int kAll = 0xffffffffU;
constexpr int kMostSources = 64;  // two a lane of a warp; their pointers travel in the launch's parameters
constexpr int kForwardThreads = 256, kBackwardThreads = 448;
constexpr int kTogether = 4;                      // sources whose rows are loaded together
constexpr std::int64_t kSharedBytes = 200 << 10;  // of one block on sm_90, with room to spare

template <class T>
struct Rows {
  std::array<T*, kMostSources> of;
};

// kDots sums over D of every source: each warp's part in `part`, added up by the first warp, two sources a lane.
template <int kDots, int kThreads>
struct Dots {
  float part[kDots][kMostSources][kThreads / kWarp];
  __device__ void put(int dot, int n, float x) {
    x = warp_sum(x);
    if (threadIdx.x % kWarp == 0) part[dot][n][threadIdx.x / kWarp] = x;
  }
  __device__ float get(int dot, int n) const {
    float sum = 0;
    for (int w = 0; w < int(blockDim.x) / kWarp; ++w) sum += part[dot][n][w];
    return sum;
  }
};

// The rows of one token: the first `staged` lie in shared memory, the others are read where they are.
template <class X>
struct Staged {
  const X* const* rows;
  X* shared;
  int staged;
  std::int64_t offset, D;  // of the token's row in every source
  __device__ const X* row(int n) const { return n < staged ? shared + n * D : rows[n] + offset; }
};

// Brings the staged rows to shared memory: by the copy engine, whose barrier is waited for; or each thread the columns that it
// alone will read, where rows are not in packs.
template <int kCount, class X>
__device__ void stage(const Staged<X>& s, std::uint64_t* barrier, unsigned int parity) {
  if constexpr (kCount > 1) {
    const int bytes = int(s.D) * int(sizeof(X));
    if (threadIdx.x == 0) {
      arrive_and_expect(barrier, s.staged * bytes);
      for (int n = 0; n < s.staged; ++n) copy_bytes(s.shared + n * s.D, s.rows[n] + s.offset, bytes, barrier);
    }
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

// grid (T), block (up to kForwardThreads), shared `staged` rows
template <class X, int kCount>
__global__ void __launch_bounds__(kForwardThreads, 3)
    attn_res_forward_kernel(const __grid_constant__ Rows<const X> sources, int Z, int staged, const float* __restrict__ c,
                            X* __restrict__ y, float* __restrict__ weights, float eps, Norm norm, std::int64_t D) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Dots<2, kForwardThreads> dots;
  __shared__ float weight[kMostSources];
  __shared__ std::uint64_t barrier;
  const std::int64_t t = blockIdx.x, first = std::int64_t(threadIdx.x) * kCount, step = std::int64_t(blockDim.x) * kCount;
  const Staged<X> v{sources.of.data(), reinterpret_cast<X*>(shared), staged, t * D, D};
  y += t * D;
  if (threadIdx.x == 0) barrier_init(&barrier, 1), barriers_are_initialised();
  __syncthreads();  // waits for the barrier of the copies
  stage<kCount>(v, &barrier, 0);

  for (int n = 0; n < Z; n += kTogether) {
    float square[kTogether] = {}, dot[kTogether] = {};
    for (std::int64_t d = first; d < D; d += step) {
      Pack<X, kCount> vs[kTogether];
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (n + u < Z) vs[u] = load<kCount>(v.row(n + u) + d);
      const auto cs = load<kCount>(c + d);
#pragma unroll
      for (int u = 0; u < kTogether; ++u)
        if (n + u < Z)
          for (int i = 0; i < kCount; ++i) {
            const float x = to_float(vs[u].at[i]);
            square[u] += x * x;
            dot[u] += x * cs.at[i];
          }
    }
#pragma unroll
    for (int u = 0; u < kTogether; ++u)
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
  X* own = staged > 0 ? v.shared : y;  // where y is read again: its columns of the first row have been used by then
  for (std::int64_t d = first; d < D; d += step) {
    Floats<kCount> sum{};
#pragma unroll 4
    for (int n = 0; n < Z; ++n) {
      const auto vs = load_floats<kCount>(v.row(n) + d);
      for (int i = 0; i < kCount; ++i) sum.at[i] += weight[n] * vs.at[i];
    }
    store_floats<kCount>(y + d, sum);
    if (!norm.y) continue;
    store_floats<kCount>(own + d, sum);
    for (int i = 0; i < kCount; ++i) {
      const float x = to_float(from_float<X>(sum.at[i]));
      square += x * x;
    }
  }
  if (!norm.y) return;
  const float r = 1.0F / sqrtf(block_sum(square) / float(D) + norm.eps);
  X* normed = static_cast<X*>(norm.y) + t * D;
  for (std::int64_t d = first; d < D; d += step) {
    auto x = load_floats<kCount>(own + d);
    const auto w = load_any<kCount>(norm.w, norm.half, d);
    for (int i = 0; i < kCount; ++i) x.at[i] = w.at[i] * to_float(from_float<X>(x.at[i] * r));
    store_floats<kCount>(normed + d, x);
  }
  if (threadIdx.x == 0) norm.r[t] = r;
}

// grid (parts), block (up to kBackwardThreads), shared D floats of dc where it is wanted, then `staged` rows: block b takes tokens
// b, b + gridDim.x, ... and writes row b of dc_parts (gridDim.x, D).
template <class X, int kCount>
__global__ void __launch_bounds__(kBackwardThreads, 2)
    attn_res_backward_kernel(const __grid_constant__ Rows<const X> sources, const X* __restrict__ dy,
                             const __grid_constant__ Rows<float> dsources, int Z, int staged, const float* __restrict__ c,
                             const float* __restrict__ weights, float eps, float* __restrict__ dc_parts, std::int64_t T,
                             std::int64_t D) {
  extern __shared__ __align__(16) unsigned char shared[];
  __shared__ Dots<3, kBackwardThreads> dots;
  __shared__ float by_dy[kMostSources], by_c[kMostSources], by_v[kMostSources];
  __shared__ std::uint64_t barrier;
  auto* dc = reinterpret_cast<float*>(shared);  // each element has one owning thread: no barrier
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
    stage<kCount>(v, &barrier, parity);
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
  dgamma[d] += dc * load_any<1>(query, half_query, d).at[0];
  dquery[d] += dc * load_any<1>(gamma, half_gamma, d).at[0];
}

// Threads of a block, so that each owns about four packs of a row.
unsigned int threads_for(std::int64_t D, int count, int most) {
  const std::int64_t threads = (D + count * 4 - 1) / (count * 4);
  return static_cast<unsigned int>(std::clamp<std::int64_t>((threads + kWarp - 1) / kWarp * kWarp, kWarp, most));
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

template <class X, int kCount>
void forward(Context& ctx, const AttnResForward& a) {
  const std::int64_t T = a.y.shape[0], D = a.y.shape[1], Z = std::int64_t(a.sources.size()), row = D * std::int64_t(sizeof(X));
  Scope scope(ctx.scratch);
  const float* c = product_of(ctx, a.gamma, a.query);
  Norm norm{};
  if (a.norm) norm = {a.norm->w.data, half(a.norm->w), a.norm->y.data, a.norm->r.as<float>(), float(a.norm->eps)};
  const std::int64_t staged = staged_rows(Z, row, 104 << 10);  // two blocks a multiprocessor at least
  launch(ctx, attn_res_forward_kernel<device_t<X>, kCount>,
         {blocks(T, 1), threads_for(D, kCount, kForwardThreads), std::size_t(staged * row)}, rows_of<X>(a.sources), int(Z),
         int(staged), c, device_pointer<X>(a.y), a.weights.as<float>(), float(a.eps), norm, D);
}

template <class X, int kCount>
void backward(Context& ctx, const AttnResBackward& a) {
  const std::int64_t T = a.dy.shape[0], D = a.dy.shape[1], Z = std::int64_t(a.sources.size()), row = D * std::int64_t(sizeof(X));
  if (T == 0) return;
  Scope scope(ctx.scratch);
  const float* c = product_of(ctx, a.gamma, a.query);
  float* dc_parts = nullptr;
  std::int64_t shared = 0;
  if (a.dgamma.present()) {
    shared = D * std::int64_t(sizeof(float));
    check(shared <= kSharedBytes, "attn_res: a row of gradients does not fit a block's shared memory",
          {{"D", D}, {"most", kSharedBytes / 4}});
    dc_parts = ctx.scratch.take(DType::f32, {a.parts(), D}).as<float>();
  }
  Rows<float> dsources{};
  for (std::size_t n = 0; n < a.dsources.size(); ++n) dsources.of[n] = a.dsources[n].as<float>();
  const std::int64_t staged = staged_rows(Z, row, (D > a.kWide ? 98 << 10 : 43 << 10) - shared);  // for the blocks of parts()
  launch(ctx, attn_res_backward_kernel<device_t<X>, kCount>,
         {blocks(a.parts(), 1), threads_for(D, kCount, D > a.kWide ? kBackwardThreads : kBackwardThreads / 2),
          std::size_t(shared + staged * row)},
         rows_of<X>(a.sources), device_pointer<X>(a.dy), dsources, int(Z), int(staged), c, a.weights.as<float>(), float(a.eps),
         dc_parts, T, D);
  if (dc_parts)
    launch(ctx, attn_res_backward_weights_kernel, {blocks(D, kWarp), dim3(kWarp, kSumRows)}, dc_parts, a.gamma.data, half(a.gamma),
           a.query.data, half(a.query), a.dgamma.as<float>(), a.dquery.as<float>(), a.parts(), D);
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
    all_in_packs<kPack>(a.y.shape[1], {a.y, w, normed}, a.sources) ? forward<X, kPack>(ctx, a) : forward<X, 1>(ctx, a);
  });
}

void cuda::attn_res(Context& ctx, const AttnResBackward& a) {
  check_sources(a.sources.size());
  with_storage(a.dy.dtype, [&](auto storage) {
    using X = decltype(storage);
    constexpr int kPack = kPackOf<X, float>;  // the gradients of the sources are most of what moves
    all_in_packs<kPack>(a.dy.shape[1], {a.dy}, a.sources, a.dsources) ? backward<X, kPack>(ctx, a) : backward<X, 1>(ctx, a);
  });
}

}  // namespace moetrain::ops
