// adamw.cu -- one launch over the shards of a rank, whose table travels in the launch's parameters; 28 to 30 bytes an element move.
#include <array>

#include "ops/adamw.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 256, kPack = 4;
constexpr std::int64_t kChunk = 1 << 13;  // elements of a block
constexpr int kMost = 240;                // shards of a launch, in 16 KB of its parameters

struct Shard {
  const void* gradient;
  float *master, *exp_avg, *exp_avg_sq;
  void* weight;
  std::int64_t count;
  std::int32_t first_chunk;
  float decay;
  DType gradient_type, weight_type;  // weight_type none: master is the weight
  bool packed;                       // may be moved in packs
};
struct Shards {
  std::array<Shard, kMost> at;
  int count;
};
struct Rates {
  float scale, beta1, beta2, rest1, rest2, correct1, correct2, lr, eps;
};

struct State {
  float master, exp_avg, exp_avg_sq;
};
// With every rounding written out, so that an element has the same bits wherever it lies.
__device__ State updated(State s, float gradient, const Rates& r, float decay) {
  const float g = __fmul_rn(r.scale, gradient);
  const float m = __fmaf_rn(r.beta1, s.exp_avg, __fmul_rn(r.rest1, g));
  const float v = __fmaf_rn(r.beta2, s.exp_avg_sq, __fmul_rn(__fmul_rn(r.rest2, g), g));
  const float step = __fdiv_rn(__fmul_rn(m, r.correct1), __fadd_rn(__fsqrt_rn(__fmul_rn(v, r.correct2)), r.eps));
  return {__fmaf_rn(-r.lr, __fmaf_rn(decay, s.master, step), s.master), m, v};
}

template <int kCount>
__device__ Floats<kCount> load_any(const void* from, DType type, std::int64_t i) {
  return type == DType::bf16 ? load_floats<kCount>(static_cast<const __nv_bfloat16*>(from) + i)
                             : load_floats<kCount>(static_cast<const float*>(from) + i);
}

// A pack of every tensor of a shard.
template <int kCount>
struct Elements {
  Floats<kCount> gradient, master, exp_avg, exp_avg_sq;
  __device__ void read(const Shard& s, std::int64_t i) {
    gradient = load_any<kCount>(s.gradient, s.gradient_type, i);
    master = load<kCount>(s.master + i), exp_avg = load<kCount>(s.exp_avg + i), exp_avg_sq = load<kCount>(s.exp_avg_sq + i);
  }
  __device__ void update_and_write(const Shard& s, const Rates& r, std::int64_t i) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const State next = updated({master.at[j], exp_avg.at[j], exp_avg_sq.at[j]}, gradient.at[j], r, s.decay);
      master.at[j] = next.master, exp_avg.at[j] = next.exp_avg, exp_avg_sq.at[j] = next.exp_avg_sq;
    }
    store<kCount>(s.master + i, master);
    store<kCount>(s.exp_avg + i, exp_avg);
    store<kCount>(s.exp_avg_sq + i, exp_avg_sq);
    if (s.weight_type == DType::bf16) store_floats<kCount>(static_cast<__nv_bfloat16*>(s.weight) + i, master);
    if (s.weight_type == DType::f32) store_floats<kCount>(static_cast<float*>(s.weight) + i, master);
  }
};

// grid (chunks of all shards), block (kThreads). Bound by its bytes.
__global__ void __launch_bounds__(kThreads)
    adamw_kernel(const __grid_constant__ Shards shards, Rates rates, const double* __restrict__ scale) {
  int low = 0, high = shards.count - 1;  // the last shard that begins at or before this chunk
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (shards.at[middle].first_chunk <= int(blockIdx.x))
      low = middle;
    else
      high = middle - 1;
  }
  const Shard& s = shards.at[low];
  if (scale) rates.scale = float(double(rates.scale) * *scale);
  const std::int64_t begin = std::int64_t(int(blockIdx.x) - s.first_chunk) * kChunk, end = min(s.count, begin + kChunk);
  const std::int64_t rest = s.packed ? begin + (end - begin) / kPack * kPack : begin;
  constexpr std::int64_t kStep = kThreads * kPack;
  for (std::int64_t i = begin + threadIdx.x * kPack; i < rest; i += 2 * kStep) {
    Elements<kPack> here, there;  // both are under way before the first is used
    here.read(s, i);
    if (i + kStep < rest) there.read(s, i + kStep);
    here.update_and_write(s, rates, i);
    if (i + kStep < rest) there.update_and_write(s, rates, i + kStep);
  }
  for (std::int64_t i = rest + threadIdx.x; i < end; i += kThreads) {
    Elements<1> last;
    last.read(s, i);
    last.update_and_write(s, rates, i);
  }
}

}  // namespace

void cuda::adamw(Context& ctx, const AdamW& a) {
  const Rates rates{.scale = float(a.gradient_scale),
                    .beta1 = float(a.beta1),
                    .beta2 = float(a.beta2),
                    .rest1 = float(1 - a.beta1),
                    .rest2 = float(1 - a.beta2),
                    .correct1 = float(a.correction1()),
                    .correct2 = float(a.correction2()),
                    .lr = float(a.lr),
                    .eps = float(a.eps)};
  Shards shards{};
  std::int64_t chunks = 0;
  const auto flush = [&] {
    launch(ctx, adamw_kernel, {blocks(chunks, 1), kThreads}, shards, rates, device_pointer<double>(a.scale));
    chunks = shards.count = 0;
  };
  for (const AdamWShard& s : a.shards) {
    if (s.master.count() == 0) continue;
    check(s.master.dtype == DType::f32 && s.gradient.dtype != DType::f64 && s.weight.dtype != DType::f64,
          "adamw: CUDA has f32 and bf16 only");
    shards.at[std::size_t(shards.count++)] = {.gradient = s.gradient.data,
                                              .master = s.master.as<float>(),
                                              .exp_avg = s.exp_avg.as<float>(),
                                              .exp_avg_sq = s.exp_avg_sq.as<float>(),
                                              .weight = s.weight.data,
                                              .count = s.master.count(),
                                              .first_chunk = std::int32_t(chunks),
                                              .decay = float(s.weight_decay),
                                              .gradient_type = s.gradient.dtype,
                                              .weight_type = s.weight.dtype,
                                              .packed = aligned({s.gradient, s.master, s.exp_avg, s.exp_avg_sq, s.weight})};
    chunks += blocks(s.master.count(), kChunk);
    if (shards.count == kMost) flush();
  }
  if (shards.count > 0) flush();
}

}  // namespace moetrain::ops
