// cross_entropy.cu -- blocks of tokens by vocabulary: products by cuBLASLt, statistics and gradients of a block in one pass of a
// row. One block over the whole vocabulary keeps its logits (three products); smaller ones are computed again once the sums are
// known.
#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/launch.cuh"
#include "ops/cuda/rows.cuh"

namespace moetrain::ops {
namespace {

using namespace cuda;  // NOLINT: the helpers of this backend

constexpr int kThreads = 512;

// The largest logit so far and the sum of exponentials below it.
struct Sum {
  float top = -INFINITY, sum = 0;
  __device__ void add(float logit) {
    if (logit > top) {
      sum *= exp2f((top - logit) * kLog2E);
      top = logit;
    }
    sum += exp2f((logit - top) * kLog2E);
  }
  __device__ void add(const Sum& o) {
    const float most = fmaxf(top, o.top);
    if (most == -INFINITY) return;  // neither has seen a logit
    sum = sum * exp2f((top - most) * kLog2E) + o.sum * exp2f((o.top - most) * kLog2E);
    top = most;
  }
};

// The sum of all threads, in every thread, in a fixed order.
__device__ Sum block_total(Sum mine) {
  __shared__ Sum of_warp[kWarp];
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    Sum other;
    other.top = __shfl_xor_sync(0xffffffffU, mine.top, lanes);
    other.sum = __shfl_xor_sync(0xffffffffU, mine.sum, lanes);
    // Both lanes of a pair add the same two values; the lower one's first, so that both get the same bits.
    Sum first = threadIdx.x & lanes ? other : mine;
    first.add(threadIdx.x & lanes ? mine : other);
    mine = first;
  }
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();  // waits for every warp's sum
  Sum total = of_warp[0];
  for (int w = 1; w < kThreads / kWarp; ++w) total.add(of_warp[w]);
  return total;
}

struct Rows {
  const std::int32_t* labels;  // of the block's tokens
  float *top, *sum, *label_logit;
  std::int64_t first, width, stride;  // vocabulary rows of this block, and elements between rows of logits
};

template <class T>
__device__ Sum sum_of_row(const T* row, std::int64_t width) {
  constexpr int kCount = 16 / sizeof(T);
  Sum mine;
  const std::int64_t packs = width / kCount;
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads) {
    const auto logits = load<kCount>(row + p * kCount);
    float most = to_float(logits.at[0]);
    for (int i = 1; i < kCount; ++i) most = fmaxf(most, to_float(logits.at[i]));
    if (most > mine.top) {
      mine.sum *= exp2f((mine.top - most) * kLog2E);
      mine.top = most;
    }
    for (int i = 0; i < kCount; ++i) mine.sum += exp2f((to_float(logits.at[i]) - mine.top) * kLog2E);
  }
  for (std::int64_t v = packs * kCount + threadIdx.x; v < width; v += kThreads) mine.add(to_float(row[v]));
  return block_total(mine);
}

// grid (s), block (kThreads): the sums of one token over this block's part of the vocabulary, added to those before it.
template <class T>
__global__ void cross_entropy_forward_sums_kernel(const T* __restrict__ logits, Rows r) {
  const std::int64_t t = blockIdx.x;
  const std::int32_t label = r.labels[t];
  if (label == CrossEntropy::kIgnored) return;
  const T* row = logits + t * r.stride;
  Sum total = sum_of_row(row, r.width);
  if (threadIdx.x != 0) return;
  if (r.first > 0) {
    Sum before;
    before.top = r.top[t];
    before.sum = r.sum[t];
    before.add(total);
    total = before;
  }
  r.top[t] = total.top;
  r.sum[t] = total.sum;
  if (r.first <= label && label < r.first + r.width) r.label_logit[t] = to_float(row[label - r.first]);
}

// grid (s), block (kThreads): logits of a token become gradients in place; zeros for an ignored one. kWhole: its sums are made
// here, the row then comes from the cache the second time.
template <class T, bool kWhole>
__global__ void cross_entropy_backward_kernel(T* logits, Rows r, float scale) {
  constexpr int kCount = 16 / sizeof(T);
  const std::int64_t t = blockIdx.x, packs = r.width / kCount;
  const std::int32_t label = r.labels[t];
  T* row = logits + t * r.stride;
  if (label == CrossEntropy::kIgnored) {
    for (std::int64_t v = threadIdx.x; v < r.width; v += kThreads) row[v] = from_float<T>(0.0F);
    return;
  }
  Sum total;
  if constexpr (kWhole) {
    if (threadIdx.x == 0) r.label_logit[t] = to_float(row[label]);
    total = sum_of_row(row, r.width);  // its barrier also waits for the line above: the row is overwritten below
    if (threadIdx.x == 0) {
      r.top[t] = total.top;
      r.sum[t] = total.sum;
    }
  } else {
    total.top = r.top[t];
    total.sum = r.sum[t];
  }
  const float share = scale / total.sum;
  const std::int64_t at_label = label - r.first;
  for (std::int64_t p = threadIdx.x; p < packs; p += kThreads) {
    auto g = load<kCount>(row + p * kCount);
    for (int i = 0; i < kCount; ++i) {
      const float probability = share * exp2f((to_float(g.at[i]) - total.top) * kLog2E);
      g.at[i] = from_float<T>(p * kCount + i == at_label ? probability - scale : probability);
    }
    store<kCount>(row + p * kCount, g);
  }
  for (std::int64_t v = packs * kCount + threadIdx.x; v < r.width; v += kThreads) {
    const float probability = share * exp2f((to_float(row[v]) - total.top) * kLog2E);
    row[v] = from_float<T>(v == at_label ? probability - scale : probability);
  }
}

// grid (s), block (kThreads): the hidden states of labelled tokens, zeros for ignored ones, whatever they held.
template <class T>
__global__ void cross_entropy_forward_hidden_kernel(const T* __restrict__ hidden, const std::int32_t* __restrict__ labels,
                                                    T* __restrict__ kept, std::int64_t D) {
  const std::int64_t t = blockIdx.x;
  const bool ignored = labels[t] == CrossEntropy::kIgnored;
  for (std::int64_t d = threadIdx.x; d < D; d += kThreads) kept[t * D + d] = ignored ? from_float<T>(0.0F) : hidden[t * D + d];
}

// one block (kThreads): loss += the sum over labelled tokens of log sum exp - the label's logit, in f64 and a fixed order
__global__ void cross_entropy_forward_loss_kernel(Rows r, std::int64_t s, float* loss) {
  __shared__ double parts[kThreads];
  double mine = 0;
  for (std::int64_t t = threadIdx.x; t < s; t += kThreads)
    if (r.labels[t] != CrossEntropy::kIgnored) mine += double(r.top[t]) + log(double(r.sum[t])) - double(r.label_logit[t]);
  parts[threadIdx.x] = mine;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();  // waits for the parts of the round before
    if (int(threadIdx.x) < half) parts[threadIdx.x] += parts[threadIdx.x + half];
  }
  if (threadIdx.x == 0) *loss += float(parts[0]);
}

// grid (blocks of kThreads): rounded once from the sum over vocabulary blocks
template <class T>
__global__ void cross_entropy_backward_round_kernel(const float* __restrict__ sum, T* __restrict__ dhidden, std::int64_t count) {
  const std::int64_t i = std::int64_t(blockIdx.x) * kThreads + threadIdx.x;
  if (i < count) dhidden[i] = from_float<T>(sum[i]);
}

template <class T>
class Loss {
  using D_ = device_t<T>;

 public:
  Loss(Context& ctx, const CrossEntropy& a, const CrossEntropy::DeviceScratch& s)
      : ctx_(ctx),
        a_(a),
        s_(s),
        type_(a.hidden.dtype),
        D(a.hidden.shape[1]),
        V(a.weight.shape[0]),
        chunk_(std::min(a.vocab_chunk, V)) {}

  void run() {
    const std::int64_t T_ = a_.hidden.shape[0], most = s_.hidden.shape[0];
    for (std::int64_t t = 0; t < T_; t += most) block(t, std::min(most, T_ - t));
  }

 private:
  void block(std::int64_t begin, std::int64_t s) {
    const auto* labels = a_.labels.as<std::int32_t>() + begin;
    float* running = s_.running.as<float>();
    rows_ = {labels, running, running + s, running + 2 * s, 0, chunk_, s_.logits.shape[1]};
    launch(ctx_, cross_entropy_forward_hidden_kernel<D_>, Grid(blocks(s, 1), kThreads), device_pointer<T>(a_.hidden) + begin * D,
           labels, device_pointer<T>(s_.hidden), D);
    const bool whole = chunk_ == V;
    if (whole && a_.dhidden.present()) {
      logits(s, 0, V);
      launch(ctx_, cross_entropy_backward_kernel<D_, true>, Grid(blocks(s, 1), kThreads), device_pointer<T>(s_.logits), rows_,
             float(a_.gradient_scale));
      gradients(begin, s);
    } else {
      for (std::int64_t v = 0; v < V; v += chunk_) {
        logits(s, v, std::min(chunk_, V - v));
        launch(ctx_, cross_entropy_forward_sums_kernel<D_>, Grid(blocks(s, 1), kThreads), device_pointer<T>(ConstTensor(s_.logits)),
               rows_);
      }
    }
    launch(ctx_, cross_entropy_forward_loss_kernel, Grid(1, kThreads), rows_, s, a_.loss.as<float>());
    if (whole || !a_.dhidden.present()) return;
    for (std::int64_t v = 0; v < V; v += chunk_) {
      logits(s, v, std::min(chunk_, V - v));
      launch(ctx_, cross_entropy_backward_kernel<D_, false>, Grid(blocks(s, 1), kThreads), device_pointer<T>(s_.logits), rows_,
             float(a_.gradient_scale));
      gradients(begin, s);
    }
    launch(ctx_, cross_entropy_backward_round_kernel<D_>, Grid(blocks(s * D, kThreads), kThreads), s_.dhidden.as<float>(),
           device_pointer<T>(a_.dhidden) + begin * D, s * D);
  }

  void logits(std::int64_t s, std::int64_t first, std::int64_t width) {
    rows_.first = first;
    rows_.width = width;
    ctx_.blas->run(ctx_, {.m = s,
                          .n = width,
                          .k = D,
                          .a = s_.hidden.data,
                          .b = device_pointer<T>(a_.weight) + first * D,
                          .c = s_.logits.data,
                          .a_type = type_,
                          .b_type = type_,
                          .c_type = type_,
                          .lda = D,
                          .ldb = D,
                          .ldc = rows_.stride,
                          .transpose_b = true});
  }

  // From the gradients that stand in the place of the logits.
  void gradients(std::int64_t begin, std::int64_t s) {
    const bool whole = chunk_ == V;
    void* dh = whole ? static_cast<void*>(device_pointer<T>(a_.dhidden) + begin * D) : s_.dhidden.data;
    ctx_.blas->run(ctx_, {.m = s,
                          .n = D,
                          .k = rows_.width,
                          .a = s_.logits.data,
                          .b = device_pointer<T>(a_.weight) + rows_.first * D,
                          .c = dh,
                          .a_type = type_,
                          .b_type = type_,
                          .c_type = whole ? type_ : DType::f32,
                          .lda = rows_.stride,
                          .ldb = D,
                          .ldc = D,
                          .beta = rows_.first > 0 ? 1.0F : 0.0F});
    if (!a_.dweight.present()) return;
    ctx_.blas->run(ctx_, {.m = rows_.width,
                          .n = D,
                          .k = s,
                          .a = s_.logits.data,
                          .b = s_.hidden.data,
                          .c = a_.dweight.as<float>() + rows_.first * D,
                          .a_type = type_,
                          .b_type = type_,
                          .c_type = DType::f32,
                          .lda = rows_.stride,
                          .ldb = D,
                          .ldc = D,
                          .transpose_a = true,
                          .beta = a_.write_dweight && begin == 0 ? 0.0F : 1.0F});
  }

  Context& ctx_;
  const CrossEntropy& a_;
  const CrossEntropy::DeviceScratch& s_;
  DType type_;
  std::int64_t D, V, chunk_;
  Rows rows_{};
};

}  // namespace

void cuda::cross_entropy(Context& ctx, const CrossEntropy& a) {
  if (a.hidden.shape[0] == 0) {
    if (a.write_dweight && a.dweight.present()) fill(Device::cuda, a.dweight.data, 0, a.dweight.bytes());
    return;
  }
  Scope scope(ctx.scratch);
  const auto taken = a.take_device_scratch(ctx);
  if (a.hidden.dtype == DType::bf16)
    Loss<bf16>(ctx, a, taken).run();
  else if (a.hidden.dtype == DType::f32)
    Loss<float>(ctx, a, taken).run();
  else
    fail("cross_entropy: on CUDA hidden is f32 or bf16", {{"dtype", std::int64_t(a.hidden.dtype)}});
}

}  // namespace moetrain::ops
