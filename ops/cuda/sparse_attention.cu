// sparse_attention.cu -- which kernels run, and those for any width and for f32: a block a query, eight heads at a time, a warp a
// key for the products and a thread a column for the sums. bf16 in the model's widths goes to
// sparse_attention_forward.cu and sparse_attention_backward.cu.
#include <algorithm>

#include "ops/cuda/key_sums.cuh"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"
#include "ops/cuda/sparse_attention_tiles.cuh"
#include "ops/cuda/storage.cuh"
#include "ops/sparse_attention.h"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kHeads = SparseAttentionForward::kHeads, kThreads = kHeads * kWarp;  // a warp a head where rows of scores are reduced
constexpr std::int64_t kBlocks = SparseAttentionForward::kBlocks;                  // rows in flight

struct Sizes {
  std::int64_t T, keys, N, C, He, Hq, K;
  __host__ __device__ std::int64_t width() const { return C + He; }
  template <class Args>
  explicit Sizes(const Args& a)
      : T(a.q.shape[0]),
        keys(a.latent.shape[0]),
        N(a.q.shape[1]),
        C(a.q_latent.shape[2]),
        He(a.k_extra.shape[1]),
        Hq(a.q.shape[2]),
        K(a.indices.shape[1]) {}
};

// What both directions read.
template <class T>
struct Inputs {
  const T *q_latent, *q, *latent, *k_extra;
  const std::int32_t* indices;
  Sizes s;
  float scale;
  template <class Args, class Storage>
  Inputs(const Args& a, Storage)
      : q_latent(device_pointer<Storage>(a.q_latent)),
        q(device_pointer<Storage>(a.q)),
        latent(device_pointer<Storage>(a.latent)),
        k_extra(device_pointer<Storage>(a.k_extra)),
        indices(a.indices.template as<std::int32_t>()),
        s(a),
        scale(float(a.scale)) {}

  __device__ std::int32_t position(std::int64_t t, std::int64_t k) const {
    const std::int32_t at = indices[t * s.K + k];
    if (at >= s.keys) __trap();  // no position: as the CPU, refuse rather than read what is not there
    return at;
  }
  // query (kHeads, C + He) in shared memory: heads [n, n + kHeads) of t, zeros past the last
  __device__ void load_query(std::int64_t t, std::int64_t n, float* query) const {
    for (std::int64_t i = threadIdx.x; i < kHeads * s.width(); i += kThreads) {
      const std::int64_t head = n + i / s.width(), c = i % s.width();
      const bool there = head < s.N;
      const std::int64_t row = t * s.N + head;
      query[i] = !there ? 0.0F : to_float(c < s.C ? q_latent[row * s.C + c] : q[row * s.Hq + s.Hq - s.width() + c]);
    }
  }
  __device__ float key(std::int64_t at, std::int64_t c) const {
    return to_float(c < s.C ? latent[at * s.C + c] : k_extra[at * s.He + c - s.C]);
  }
};

// sums[h] of a thread's column c: sum_k weight[h, k] * key(k)[c], empty slots left out
template <class T>
__device__ void sum_keys_of(const Inputs<T>& in, std::int64_t t, std::int64_t c, const float* weight, std::int64_t heads,
                            float (&sums)[kHeads]) {
  for (float& sum : sums) sum = 0;
  for (std::int64_t k = 0; k < in.s.K; ++k) {
    const std::int32_t at = in.position(t, k);
    if (at < 0) continue;
    const float x = in.key(at, c);
#pragma unroll
    for (int h = 0; h < kHeads; ++h)
      if (h < heads) sums[h] += weight[h * in.s.K + k] * x;
  }
}

// grid (up to kBlocks), block (kThreads), shared kHeads * (C + He) floats; scores (gridDim.x, kHeads, K)
template <class T>
__global__ void sparse_attention_forward_kernel(const Inputs<T> in, T* __restrict__ o, float* __restrict__ lse,
                                                float* __restrict__ probability, float* __restrict__ scores) {
  extern __shared__ float query[];
  const Sizes s = in.s;
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  scores += std::int64_t(blockIdx.x) * kHeads * s.K;
  for (std::int64_t t = blockIdx.x; t < s.T; t += gridDim.x) {
    if (probability)
      for (std::int64_t k = threadIdx.x; k < s.K; k += kThreads) probability[t * s.K + k] = 0;
    for (std::int64_t n = 0; n < s.N; n += kHeads) {
      __syncthreads();  // waits for the readers of the last heads' query and scores
      in.load_query(t, n, query);
      __syncthreads();  // waits for the query
      for (std::int64_t k = warp; k < s.K; k += kHeads) {
        const std::int32_t at = in.position(t, k);
        float dots[kHeads] = {};
        if (at >= 0)
          for (std::int64_t c = lane; c < s.width(); c += kWarp) {
            const float x = in.key(at, c);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) dots[h] += query[h * s.width() + c] * x;
          }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float dot = warp_sum(dots[h]);
          if (lane == 0) scores[h * s.K + k] = at < 0 ? -INFINITY : in.scale * dot;
        }
      }
      __syncthreads();  // waits for the scores
      if (n + warp < s.N) {
        float *row = scores + warp * s.K, top = -INFINITY, sum = 0;
        for (std::int64_t k = lane; k < s.K; k += kWarp) top = fmaxf(top, row[k]);
        for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffU, top, lanes));
        for (std::int64_t k = lane; k < s.K; k += kWarp) sum += top == -INFINITY ? 0.0F : expf(row[k] - top);
        sum = warp_sum(sum);
        const float share = sum > 0 ? 1.0F / sum : 0.0F;
        for (std::int64_t k = lane; k < s.K; k += kWarp) row[k] = top == -INFINITY ? 0.0F : expf(row[k] - top) * share;
        if (lane == 0) lse[t * s.N + n + warp] = top + logf(sum);
      }
      __syncthreads();  // waits for the probabilities
      const std::int64_t heads = min(std::int64_t(kHeads), s.N - n);
      if (probability)
        for (std::int64_t k = threadIdx.x; k < s.K; k += kThreads) {
          float sum = 0;
          for (std::int64_t h = 0; h < heads; ++h) sum += scores[h * s.K + k];
          probability[t * s.K + k] += sum / float(s.N);
        }
      for (std::int64_t c = threadIdx.x; c < s.C; c += kThreads) {
        float sums[kHeads];
        sum_keys_of(in, t, c, scores, heads, sums);
#pragma unroll
        for (int h = 0; h < kHeads; ++h)
          if (h < heads) o[(t * s.N + n + h) * s.C + c] = from_float<T>(sums[h]);
      }
    }
  }
}

// grid (up to kBlocks), block (kThreads), shared kHeads * (2 C + He) floats: rows [begin, end) of queries; p and dz (end - begin,
// N, K) are the probabilities and the gradients of the scores, 0 at empty slots
template <class T>
__global__ void sparse_attention_backward_kernel(const Inputs<T> in, const T* __restrict__ do_latent, const T* __restrict__ o,
                                                 const float* __restrict__ lse, T* __restrict__ dq_latent, T* __restrict__ dq,
                                                 float* __restrict__ p_all, float* __restrict__ dz_all, std::int64_t begin,
                                                 std::int64_t end) {
  extern __shared__ float query[];
  __shared__ float delta[kHeads];
  const Sizes s = in.s;
  float* const dout = query + kHeads * s.width();  // (kHeads, C)
  const unsigned int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (std::int64_t t = begin + blockIdx.x; t < end; t += gridDim.x)
    for (std::int64_t n = 0; n < s.N; n += kHeads) {
      const std::int64_t heads = min(std::int64_t(kHeads), s.N - n), row = t * s.N + n;
      float *const p = p_all + ((t - begin) * s.N + n) * s.K, *const dz = dz_all + ((t - begin) * s.N + n) * s.K;
      __syncthreads();  // waits for the readers of the last heads' query
      in.load_query(t, n, query);
      for (std::int64_t i = threadIdx.x; i < kHeads * s.C; i += kThreads)
        dout[i] = i < heads * s.C ? to_float(do_latent[row * s.C + i]) : 0.0F;
      __syncthreads();  // waits for the query and dout
      if (warp < heads) {
        float sum = 0;
        for (std::int64_t c = lane; c < s.C; c += kWarp) sum += dout[warp * s.C + c] * to_float(o[(row + warp) * s.C + c]);
        sum = warp_sum(sum);
        if (lane == 0) delta[warp] = sum;
      }
      __syncthreads();  // waits for delta
      for (std::int64_t k = warp; k < s.K; k += kHeads) {
        const std::int32_t at = in.position(t, k);
        float dots[kHeads] = {}, dp[kHeads] = {};
        if (at >= 0)
          for (std::int64_t c = lane; c < s.width(); c += kWarp) {
            const float x = in.key(at, c);
#pragma unroll
            for (int h = 0; h < kHeads; ++h) {
              dots[h] += query[h * s.width() + c] * x;
              if (c < s.C) dp[h] += dout[h * s.C + c] * x;
            }
          }
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          const float dot = warp_sum(dots[h]), gradient = warp_sum(dp[h]);
          if (lane != 0 || h >= heads) continue;
          const float share = at < 0 ? 0.0F : expf(in.scale * dot - lse[row + h]);
          p[h * s.K + k] = share;
          dz[h * s.K + k] = at < 0 ? 0.0F : in.scale * share * (gradient - delta[h]);
        }
      }
      __syncthreads();  // waits for dz
      for (std::int64_t c = threadIdx.x; c < s.width(); c += kThreads) {
        float sums[kHeads];
        sum_keys_of(in, t, c, dz, heads, sums);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) {
          if (h >= heads) continue;
          T* to = c < s.C ? dq_latent + (row + h) * s.C + c : dq + (row + h) * s.Hq + s.Hq - s.width() + c;
          *to = from_float<T>(sums[h]);
        }
      }
    }
}

template <class Storage>
void forward(Context& ctx, const SparseAttentionForward& a) {
  using T = device_t<Storage>;
  const Inputs<T> in(a, Storage{});
  const Scope scope(ctx.scratch);
  const Tensor scores = a.take_scratch(ctx);
  launch(ctx, sparse_attention_forward_kernel<T>,
         {blocks(std::min(in.s.T, kBlocks), 1), dim3(kThreads), std::size_t(kHeads * in.s.width()) * sizeof(float)}, in,
         device_pointer<Storage>(a.o_latent), a.lse.as<float>(), a.probability.present() ? a.probability.as<float>() : nullptr,
         scores.as<float>());
}

template <class Storage>
void backward(Context& ctx, const SparseAttentionBackward& a) {
  using T = device_t<Storage>;
  const Inputs<T> in(a, Storage{});
  const Sizes& s = in.s;
  const Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  const std::int64_t chunk = scratch.p.shape[0];
  float *const p = scratch.p.template as<float>(), *const dz = scratch.dz.template as<float>(),
               *const sums = scratch.sums.template as<float>();
  std::int32_t* const slots = scratch.slots.template as<std::int32_t>();
  const T* const dout = device_pointer<Storage>(a.do_latent);
  for (std::int64_t begin = 0; begin < s.T; begin += chunk) {
    const std::int64_t end = std::min(begin + chunk, s.T), rows = end - begin;
    launch(ctx, sparse_attention_backward_kernel<T>,
           {blocks(std::min(rows, kBlocks), 1), dim3(kThreads), std::size_t(kHeads * (s.width() + s.C)) * sizeof(float)}, in, dout,
           device_pointer<Storage>(a.o_latent), a.lse.as<float>(), device_pointer<Storage>(a.dq_latent),
           device_pointer<Storage>(a.dq), p, dz, begin, end);
    invert(ctx, in.indices + begin * s.K, slots, rows, s.K, s.keys);
    sum_keys(ctx, KeySums<T>{.terms = {{dz, in.q_latent + begin * s.N * s.C, s.C, 0, s.C},
                                       {p, dout + begin * s.N * s.C, s.C, 0, s.C},
                                       {dz, in.q + begin * s.N * s.Hq + s.Hq - s.He, s.Hq, s.C, s.He}},
                             .slots = slots,
                             .sums = sums,
                             .keys = s.keys,
                             .rows = rows,
                             .N = s.N,
                             .K = s.K,
                             .width = s.width(),
                             .first = begin == 0});
  }
  if (s.T == 0) set_zero(ctx, {scratch.sums});  // no query wrote them
  store_sums(ctx, sums, device_pointer<Storage>(a.dlatent), 1, s.keys, s.width(), 0, s.C);
  store_sums(ctx, sums, device_pointer<Storage>(a.dk_extra), 1, s.keys, s.width(), s.C, s.He);
}

void check_aligned(std::initializer_list<ConstTensor> tensors) {  // what views by rows keep
  check(in_packs<8>(8, tensors), "sparse_attention: a tensor does not begin at a multiple of 16 bytes");
}

}  // namespace

void cuda::sparse_attention(Context& ctx, const SparseAttentionForward& a) {
  if (!sparse_attention_in_tiles(a)) return with_storage(a.q.dtype, [&](auto storage) { forward<decltype(storage)>(ctx, a); });
  check_aligned({a.q_latent, a.q, a.latent, a.k_extra, a.o_latent});
  sparse_attention_tiles(ctx, a);
}
void cuda::sparse_attention(Context& ctx, const SparseAttentionBackward& a) {
  if (!sparse_attention_in_tiles(a)) return with_storage(a.q.dtype, [&](auto storage) { backward<decltype(storage)>(ctx, a); });
  check_aligned({a.do_latent, a.q_latent, a.q, a.latent, a.k_extra, a.o_latent, a.dq_latent, a.dq});
  sparse_attention_tiles(ctx, a);
}

}  // namespace moetrain::ops
