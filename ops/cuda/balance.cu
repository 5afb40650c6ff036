// balance.cu -- exact counts by integer atomics, quantiles and losses with a fixed order of every sum: a warp a token or an expert.
#include <array>

#include "ops/balance.h"
#include "ops/cuda/blas.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/storage.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

using Count = unsigned long long;  // what atomicAdd knows of 64 bits
constexpr unsigned int kAll = 0xffffffffU;
constexpr int kWarps = 8, kThreads = kWarps * kWarp, kSumThreads = 1024;
constexpr std::int64_t kSharedBytes = 200 << 10;  // of one block on sm_90, with room to spare
constexpr std::int64_t kSlots = 1 << 13;          // that a block counts

void check_real(ConstTensor t) { check(t.dtype == DType::f32, "balance: CUDA has f32 only", {{"dtype", std::int64_t(t.dtype)}}); }
Count* count_pointer(Tensor t) { return reinterpret_cast<Count*>(t.as<std::int64_t>()); }

__device__ double warp_sum_f64(double x) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAll, x, lanes);
  return x;
}
__device__ std::int64_t warp_sum_i64(std::int64_t x) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAll, x, lanes);
  return x;
}

// Groups of consecutive tokens, as many as travel in a launch's parameters.
struct Groups {
  std::array<std::int64_t, AuxiliaryLoss::kGroupsTogether + 1> offset;
  int count;
  std::array<std::int64_t, AuxiliaryLoss::kGroupsTogether> tokens;  // of each, here or on all ranks
};

// grid (parts of the slots of a group, groups), block (kThreads), shared E ints: counts[group, e] += slots of e in the group
__global__ void expert_count_kernel(const std::int32_t* __restrict__ experts, const __grid_constant__ Groups groups,
                                    Count* __restrict__ counts, std::int64_t K, int E) {
  extern __shared__ int shared_count[];
  const std::int64_t begin = groups.offset[blockIdx.y] * K + blockIdx.x * kSlots;
  const std::int64_t end = min(groups.offset[blockIdx.y + 1] * K, begin + kSlots);
  if (begin >= end) return;
  for (int e = threadIdx.x; e < E; e += kThreads) shared_count[e] = 0;
  __syncthreads();  // waits for the zeros
  for (std::int64_t i = begin + threadIdx.x; i < end; i += kThreads) atomicAdd(&shared_count[experts[i]], 1);
  __syncthreads();  // waits for every count
  for (int e = threadIdx.x; e < E; e += kThreads)
    if (shared_count[e] > 0) atomicAdd(&counts[blockIdx.y * std::int64_t(E) + e], Count(shared_count[e]));
}

void count_slots(Context& ctx, ConstTensor experts, const Groups& groups, Count* counts, std::int64_t E) {
  check(E * std::int64_t(sizeof(int)) <= kSharedBytes, "balance: more experts than a block counts", {{"E", E}});
  const std::int64_t K = experts.shape[1];
  std::int64_t longest = 0;
  for (std::size_t g = 0; g < std::size_t(groups.count); ++g) longest = std::max(longest, groups.offset[g + 1] - groups.offset[g]);
  launch(ctx, expert_count_kernel,
         {dim3(blocks(longest * K, kSlots), static_cast<unsigned int>(groups.count)), kThreads, std::size_t(E) * sizeof(int)},
         experts.as<std::int32_t>(), groups, counts, K, int(E));
}

struct Bins {
  double low, width;
  int count;
  __device__ int of(double x) const {
    const double place = (x - low) / width;
    if (!(place > 0)) return 0;  // also NaN and -infinity
    return place >= double(count) ? count - 1 : int(place);
  }
};

// By a whole block.
__device__ Bins bins_of(const float* __restrict__ bias, int E, int count) {
  __shared__ float least_of_warp[kWarp], most_of_warp[kWarp];
  float least = bias[0], most = bias[0];
  for (int e = threadIdx.x; e < E; e += blockDim.x) least = fminf(least, bias[e]), most = fmaxf(most, bias[e]);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    least = fminf(least, __shfl_xor_sync(kAll, least, lanes));
    most = fmaxf(most, __shfl_xor_sync(kAll, most, lanes));
  }
  least_of_warp[threadIdx.x / kWarp] = least;
  most_of_warp[threadIdx.x / kWarp] = most;
  __syncthreads();  // waits for every warp's extremes
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) least = fminf(least, least_of_warp[w]), most = fmaxf(most, most_of_warp[w]);
  const double low = double(least) - 1, high = double(most) + 1;
  return {low, (high - low) / count, count};
}

// grid (ceil(E / together), slices of the tokens), block (kThreads), shared together * bins ints, or none: then bins are counted
// where they lie. Thread i of a block looks at expert i % together of every (kThreads / together)-th token.
__global__ void quantile_histogram_kernel(const float* __restrict__ logits, const float* __restrict__ cutoff,
                                          const float* __restrict__ bias, Count* __restrict__ histogram, std::int64_t T, int E,
                                          int bin_count, int together, bool shared) {
  extern __shared__ int bin[];
  const Bins bins = bins_of(bias, E, bin_count);
  const int own = threadIdx.x % together, e = int(blockIdx.x) * together + own;
  const std::int64_t begin = T * blockIdx.y / gridDim.y, end = T * (blockIdx.y + 1) / gridDim.y;
  if (shared)
    for (int i = threadIdx.x; i < together * bin_count; i += kThreads) bin[i] = 0;
  __syncthreads();  // waits for the zeros
  if (e < E)
    for (std::int64_t t = begin + threadIdx.x / together; t < end; t += kThreads / together) {
      const int place = bins.of(double(cutoff[t]) - double(sigmoid(logits[t * E + e])));
      if (shared)
        atomicAdd(&bin[own * bin_count + place], 1);
      else
        atomicAdd(&histogram[std::int64_t(e) * bin_count + place], Count(1));
    }
  __syncthreads();  // waits for every count
  if (shared)
    for (int i = threadIdx.x; i < together * bin_count; i += kThreads)
      if (bin[i] > 0) atomicAdd(&histogram[std::int64_t(blockIdx.x) * together * bin_count + i], Count(bin[i]));
}

// grid (ceil(E / kWarps)), block (kThreads), a warp an expert: its quantile, and the tokens it has seen
__global__ void quantile_kernel(const std::int64_t* __restrict__ histogram, const float* __restrict__ bias,
                                double* __restrict__ quantile, std::int64_t* __restrict__ tokens, int E, int bin_count, int K) {
  const Bins bins = bins_of(bias, E, bin_count);
  const int e = int(blockIdx.x) * kWarps + threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  if (e >= E) return;
  const std::int64_t* row = histogram + std::int64_t(e) * bin_count;
  std::int64_t all = 0;
  for (int n = lane; n < bin_count; n += kWarp) all += row[n];
  all = warp_sum_i64(all);
  const double rank = double(K) * double(all) / double(E);
  std::int64_t before = 0;
  for (int base = 0; base < bin_count; base += kWarp) {
    const int n = base + lane;
    const std::int64_t count = n < bin_count ? row[n] : 0;
    std::int64_t sum = count;
    for (int up = 1; up < kWarp; up *= 2) {
      const std::int64_t other = __shfl_up_sync(kAll, sum, up);
      if (lane >= up) sum += other;
    }
    const bool reached = n == bin_count - 1 || (n < bin_count && double(before + sum) >= rank);
    const unsigned int lanes = __ballot_sync(kAll, reached);
    if (lanes != 0) {
      if (lane == __ffs(int(lanes)) - 1) {
        const double part = (rank - double(before + sum - count)) / double(count);
        quantile[e] = bins.low + bins.width * (double(n) + part);
        tokens[e] = all;
      }
      return;
    }
    before += __shfl_sync(kAll, sum, kWarp - 1);
  }
}

// one block (kThreads)
__global__ void quantile_update_kernel(const double* __restrict__ quantile, const std::int64_t* __restrict__ tokens,
                                       float* __restrict__ bias, int E) {
  __shared__ double mean;
  __shared__ bool differ;
  if (tokens[0] == 0) return;
  if (threadIdx.x == 0) {
    double sum = 0;
    bool other = false;
    for (int e = 0; e < E; ++e) sum += quantile[e] / double(E), other = other || tokens[e] != tokens[0];
    mean = sum;
    differ = other;
  }
  __syncthreads();  // waits for the mean
  for (int e = threadIdx.x; e < E; e += kThreads) bias[e] = differ ? NAN : float(quantile[e] - mean);
}

// The sum of n counts, in every thread of a block.
__device__ std::int64_t total_of(const std::int64_t* __restrict__ counts, int n) {
  __shared__ std::int64_t of_warp[kWarp];
  std::int64_t sum = 0;
  for (int e = threadIdx.x; e < n; e += blockDim.x) sum += counts[e];
  sum = warp_sum_i64(sum);
  of_warp[threadIdx.x / kWarp] = sum;
  __syncthreads();  // waits for every warp's sum
  sum = 0;
  for (int w = 0; w < int(blockDim.x) / kWarp; ++w) sum += of_warp[w];
  return sum;
}

// one block (kThreads)
__global__ void sign_update_kernel(const std::int64_t* __restrict__ counts, float* __restrict__ bias, int E, float rate) {
  const std::int64_t total = total_of(counts, E);
  for (int e = threadIdx.x; e < E; e += kThreads) {
    const std::int64_t scaled = counts[e] * E;  // against the sum, not the rounded mean
    bias[e] += rate * float((scaled < total) - (scaled > total));
  }
}

// grid (rows), block (kThreads): shares of the slots of a row of counts that an expert got; zeros when there are none
__global__ void share_of_counts_kernel(const std::int64_t* __restrict__ counts, float* __restrict__ frequency, int E) {
  counts += std::int64_t(blockIdx.x) * E, frequency += std::int64_t(blockIdx.x) * E;
  const std::int64_t total = total_of(counts, E);
  for (int e = threadIdx.x; e < E; e += kThreads) frequency[e] = total > 0 ? float(double(counts[e]) / double(total)) : 0;
}

// grid (ceil(E / kThreads), groups), block (kThreads): shares of the slots of each group
__global__ void share_of_group_kernel(const Count* __restrict__ counts, float* __restrict__ frequency,
                                      const __grid_constant__ Groups groups, std::int64_t K, int E) {
  const int e = int(blockIdx.x) * kThreads + threadIdx.x;
  if (e >= E) return;
  const std::int64_t at = std::int64_t(blockIdx.y) * E + e;
  const std::int64_t slots = (groups.offset[blockIdx.y + 1] - groups.offset[blockIdx.y]) * K;
  frequency[at] = float(double(counts[at]) / double(max(slots, std::int64_t(1))));
}

// grid (ceil(tokens / kWarps)), block (kThreads), a warp a token of the groups; `stride` of frequency between groups: E, or 0 where
// all share one row
__global__ void auxiliary_loss_kernel(const float* __restrict__ logits, const float* __restrict__ frequency, std::int64_t stride,
                                      const __grid_constant__ Groups groups, double scale, double* __restrict__ rows,
                                      float* __restrict__ dlogits, int E) {
  const std::int64_t t = groups.offset[0] + std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= groups.offset[groups.count]) return;
  int low = 0, high = groups.count - 1;  // the last group that begins at or before t: never an empty one
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (groups.offset[middle] <= t)
      low = middle;
    else
      high = middle - 1;
  }
  scale = scale * double(E) / double(groups.tokens[low]);
  const float* f = frequency + low * stride;
  const int lane = threadIdx.x % kWarp;
  logits += t * E;
  float sum = 0, dot = 0;
  for (int e = lane; e < E; e += kWarp) {
    const float s = sigmoid(logits[e]);
    sum += s;
    dot += f[e] * s;
  }
  sum = warp_sum(sum) + 1e-20F;
  dot = warp_sum(dot) / sum;
  if (lane == 0) rows[t] = scale * double(dot);
  if (!dlogits) return;
  dlogits += t * E;
  for (int e = lane; e < E; e += kWarp)
    dlogits[e] += float(scale) * (f[e] - dot) * (sigmoid(logits[e]) / sum) * sigmoid(-logits[e]);  // sigmoid(-x): 1 - s
}

// grid (ceil(T / kWarps)), block (kThreads), a warp a token
__global__ void z_loss_kernel(const float* __restrict__ logits, double scale, double* __restrict__ rows,
                              float* __restrict__ dlogits, std::int64_t T, int E) {
  const std::int64_t t = std::int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  if (t >= T) return;
  const int lane = threadIdx.x % kWarp;
  logits += t * E;
  float most = -INFINITY, sum = 0;
  for (int e = lane; e < E; e += kWarp) most = fmaxf(most, logits[e]);
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(kAll, most, lanes));
  for (int e = lane; e < E; e += kWarp) sum += expf(logits[e] - most);
  sum = warp_sum(sum);
  const float z = most + logf(sum);
  if (lane == 0) rows[t] = double(z) * double(z);
  if (!dlogits) return;
  dlogits += t * E;
  for (int e = lane; e < E; e += kWarp) dlogits[e] += float(2 * scale) * z * (expf(logits[e] - most) / sum);
}

// one block (kSumThreads): loss += scale * the sum of rows
__global__ void loss_sum_kernel(const double* __restrict__ rows, std::int64_t T, double scale, float* __restrict__ loss) {
  __shared__ double of_warp[kWarp];
  double sum = 0;
  for (std::int64_t t = threadIdx.x; t < T; t += kSumThreads) sum += rows[t];
  sum = warp_sum_f64(sum);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = sum;
  __syncthreads();  // waits for every warp's sum
  if (threadIdx.x >= kWarp) return;
  sum = warp_sum_f64(of_warp[threadIdx.x]);  // kSumThreads holds as many warps as a warp lanes
  if (threadIdx.x == 0) *loss += float(scale * sum);
}

}  // namespace

void cuda::expert_count(Context& ctx, const ExpertCount& a) {
  count_slots(ctx, a.experts, {.offset = {0, a.experts.shape[0]}, .count = 1}, count_pointer(a.counts), a.counts.shape[0]);
}

void cuda::quantile_histogram(Context& ctx, const QuantileHistogram& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], bins = a.histogram.shape[1];
  if (T == 0) return;
  int together = 8;  // experts whose logits of a token are one sector of memory
  const auto bytes = [&] { return std::size_t(together) * std::size_t(bins) * sizeof(int); };
  while (together > 1 && bytes() > std::size_t(kSharedBytes) / 2) together /= 2;
  const bool shared = bytes() <= std::size_t(kSharedBytes);
  const std::int64_t wide = blocks(E, together),  // and slices: four blocks a multiprocessor, of 256 tokens at least
      slices = std::clamp<std::int64_t>(4 * ctx.blas->multiprocessors() / wide, 1, std::max<std::int64_t>(T / 256, 1));
  launch(ctx, quantile_histogram_kernel, {dim3(blocks(wide, 1), blocks(slices, 1)), kThreads, shared ? bytes() : 0},
         a.logits.as<float>(), a.cutoff.as<float>(), a.bias.as<float>(), count_pointer(a.histogram), T, int(E), int(bins), together,
         shared);
}

void cuda::quantile_update(Context& ctx, const QuantileUpdate& a) {
  check_real(a.bias);
  const std::int64_t E = a.histogram.shape[0];
  Scope scope(ctx.scratch);
  double* quantile = ctx.scratch.take(DType::f64, {E}).as<double>();
  std::int64_t* tokens = ctx.scratch.take(DType::i64, {E}).as<std::int64_t>();
  launch(ctx, quantile_kernel, {blocks(E, kWarps), kThreads}, a.histogram.as<std::int64_t>(), a.bias.as<float>(), quantile, tokens,
         int(E), int(a.histogram.shape[1]), int(a.experts_per_token));
  launch(ctx, quantile_update_kernel, {1, kThreads}, quantile, tokens, a.bias.as<float>(), int(E));
}

void cuda::sign_update(Context& ctx, const SignUpdate& a) {
  check_real(a.bias);
  launch(ctx, sign_update_kernel, {1, kThreads}, a.counts.as<std::int64_t>(), a.bias.as<float>(), int(a.counts.shape[0]),
         float(a.rate));
}

void cuda::auxiliary_loss(Context& ctx, const AuxiliaryLoss& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1], K = a.experts.shape[1];
  if (T == 0) return;
  Scope scope(ctx.scratch);
  const auto scratch = a.take_scratch(ctx);
  auto* counts = static_cast<Count*>(scratch.frequency.data);  // of 8 bytes each, as frequencies are on the CPU
  float* frequency = ctx.scratch.take(DType::f32, scratch.frequency.shape).as<float>();
  const bool given = a.counts.present(), by_group = given && a.counts.shape.rank() == 2;
  const auto share = [&](std::int64_t first, std::int64_t rows) {  // of the counts given
    launch(ctx, share_of_counts_kernel, {blocks(rows, 1), kThreads}, a.counts.as<std::int64_t>() + first * E, frequency, int(E));
  };
  if (given && !by_group) share(0, 1);
  constexpr std::size_t kTogether = AuxiliaryLoss::kGroupsTogether;
  for (std::size_t first = 0; first + 1 < a.groups.size(); first += kTogether) {
    Groups groups{.count = int(std::min(kTogether, a.groups.size() - 1 - first))};
    std::copy_n(a.groups.begin() + std::ptrdiff_t(first), groups.count + 1, groups.offset.begin());
    const std::int64_t tokens = groups.offset[std::size_t(groups.count)] - groups.offset[0];
    if (tokens == 0) continue;
    for (std::size_t g = 0; g < std::size_t(groups.count); ++g)
      groups.tokens[g] = a.tokens.empty() ? groups.offset[g + 1] - groups.offset[g] : a.tokens[first + g];
    if (by_group) share(std::int64_t(first), groups.count);
    if (!given) {
      const auto rows = static_cast<unsigned int>(groups.count);
      cuda_ok(cudaMemsetAsync(counts, 0, std::size_t(groups.count * E) * sizeof(Count), ctx.stream));
      count_slots(ctx, a.experts, groups, counts, E);
      launch(ctx, share_of_group_kernel, {dim3(blocks(E, kThreads), rows), kThreads}, counts, frequency, groups, K, int(E));
    }
    launch(ctx, auxiliary_loss_kernel, {blocks(tokens, kWarps), kThreads}, a.logits.as<float>(), frequency,
           given && !by_group ? 0 : E, groups, a.scale, scratch.rows.as<double>(), device_pointer<float>(a.dlogits), int(E));
  }
  launch(ctx, loss_sum_kernel, {1, kSumThreads}, scratch.rows.as<double>(), T, 1.0, a.loss.as<float>());
}

void cuda::z_loss(Context& ctx, const ZLoss& a) {
  check_real(a.logits);
  const std::int64_t T = a.logits.shape[0], E = a.logits.shape[1];
  if (T == 0) return;
  Scope scope(ctx.scratch);
  auto* rows = a.take_scratch(ctx).as<double>();
  launch(ctx, z_loss_kernel, {blocks(T, kWarps), kThreads}, a.logits.as<float>(), a.scale, rows, device_pointer<float>(a.dlogits),
         T, int(E));
  launch(ctx, loss_sum_kernel, {1, kSumThreads}, rows, T, a.scale, a.loss.as<float>());
}

}  // namespace moetrain::ops
