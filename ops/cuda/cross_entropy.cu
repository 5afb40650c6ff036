// cross_entropy.cu -- blocks of tokens by vocabulary. Dense bf16 goes to ops/cuda/cross_entropy_tiles.h; the rest is multiplied by
// cuBLASLt, with statistics and gradients of a block in one pass of a row. One block over the whole vocabulary keeps its logits
// (three products); smaller ones are computed again once the sums are known.
#include <algorithm>

#include "ops/cross_entropy.h"
#include "ops/cuda/arithmetic.cuh"
#include "ops/cuda/blas.h"
#include "ops/cuda/cross_entropy_tiles.h"
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

// The sum of all lanes, in every lane, in a fixed order.
__device__ Sum warp_total(Sum mine) {
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) {
    Sum other;
    other.top = __shfl_xor_sync(0xffffffffU, mine.top, lanes);
    other.sum = __shfl_xor_sync(0xffffffffU, mine.sum, lanes);
    // Both lanes of a pair add the same two values; the lower one's first, so that both get the same bits.
    Sum first = threadIdx.x & lanes ? other : mine;
    first.add(threadIdx.x & lanes ? mine : other);
    mine = first;
  }
  return mine;
}

// The sum of all threads, in every thread, in a fixed order.
__device__ Sum block_total(Sum mine) {
  __shared__ Sum of_warp[kWarp];
  mine = warp_total(mine);
  if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = mine;
  __syncthreads();  // waits for every warp's sum
  Sum total = of_warp[0];
  for (int w = 1; w < kThreads / kWarp; ++w) total.add(of_warp[w]);
  return total;
}

struct Rows : LossRows {
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
  if (label == kIgnored) return;
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

// grid (blocks of kThreads), a warp a token: its sums over all parts of the vocabulary.
__global__ void cross_entropy_forward_parts_kernel(const Sum* __restrict__ parts, LossRows r, std::int64_t s, std::int64_t count) {
  const std::int64_t t = (std::int64_t(blockIdx.x) * kThreads + threadIdx.x) / kWarp;
  if (t >= s || r.labels[t] == kIgnored) return;
  Sum mine;
  for (std::int64_t i = threadIdx.x % kWarp; i < count; i += kWarp) mine.add(parts[t * count + i]);
  mine = warp_total(mine);
  if (threadIdx.x % kWarp != 0) return;
  r.top[t] = mine.top;
  r.sum[t] = mine.sum;
}

// grid (s), block (kThreads): logits of a token become gradients in place; zeros for an ignored one. kWhole: its sums are made
// here, the row then comes from the cache the second time.
template <class T, bool kWhole>
__global__ void cross_entropy_backward_kernel(T* logits, Rows r, float scale) {
  constexpr int kCount = 16 / sizeof(T);
  const std::int64_t t = blockIdx.x, packs = r.width / kCount;
  const std::int32_t label = r.labels[t];
  T* row = logits + t * r.stride;
  if (label == kIgnored) {
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
  const bool ignored = labels[t] == kIgnored;
  for (std::int64_t d = threadIdx.x; d < D; d += kThreads) kept[t * D + d] = ignored ? from_float<T>(0.0F) : hidden[t * D + d];
}

// one block (kThreads): loss += the sum over labelled tokens of log sum exp - the label's logit, in f64 and a fixed order
__global__ void cross_entropy_forward_loss_kernel(LossRows r, std::int64_t s, float* loss) {
  __shared__ double parts[kThreads];
  double mine = 0;
  for (std::int64_t t = threadIdx.x; t < s; t += kThreads)
    if (r.labels[t] != kIgnored) mine += double(r.top[t]) + log(double(r.sum[t])) - double(r.label_logit[t]);
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
        tiles_(a.on_tensor_cores()),
        D(a.hidden.shape[1]),
        V(a.weight.shape[0]),
        chunk_(std::min(a.vocab_chunk, V)) {}

  void run() {
    const std::int64_t T_ = a_.hidden.shape[0], most = s_.running.shape[1];
    for (std::int64_t t = 0; t < T_; t += most) block(t, std::min(most, T_ - t));
  }

 private:
  void block(std::int64_t begin, std::int64_t s) {
    float* running = s_.running.as<float>();
    rows_ = {{a_.labels.as<std::int32_t>() + begin, running, running + s, running + 2 * s}, 0, V, 0};
    hidden_ = a_.hidden.rows(begin, begin + s);
    const bool gradients = a_.dhidden.present(), keeps = gradients && chunk_ == V;
    if (a_.merge) fill(Device::cuda, running, 0, 3 * s * std::int64_t(sizeof(float)));
    Tensor dhidden;
    if (gradients) {
      dhidden = a_.dhidden.rows(begin, begin + s);
      launch(ctx_, cross_entropy_forward_hidden_kernel<D_>, Grid(blocks(s, 1), kThreads), device_pointer<T>(hidden_), rows_.labels,
             device_pointer<T>(dhidden), D);
      hidden_ = dhidden;
    }
    if (tiles_) {
      on_tensor_cores(dhidden, add_dweight(begin));
    } else {
      const bool together = keeps && !a_.merge;  // statistics and gradients in one pass
      if (!together) sums();
      merge();
      for (std::int64_t v = 0; gradients && v < V; v += chunk_) {
        cut(v, std::min(chunk_, V - v));
        if (together || !keeps) logits();
        logit_gradients(together);
        products(s_.sums.present() ? sums_of(dhidden) : dhidden, add_dweight(begin));
      }
    }
    launch(ctx_, cross_entropy_forward_loss_kernel, Grid(1, kThreads), rows_, s, a_.loss.as<float>());
    if (gradients && s_.sums.present())
      launch(ctx_, cross_entropy_backward_round_kernel<D_>, Grid(blocks(s * D, kThreads), kThreads), s_.sums.as<float>(),
             device_pointer<T>(dhidden), s * D);
  }

  // The words that are looked at next.
  void cut(std::int64_t first, std::int64_t width) {
    rows_.first = first;
    rows_.width = width;
    rows_.stride = (width + 7) / 8 * 8;
  }
  ConstTensor words() const { return a_.weight.rows(rows_.first, rows_.first + rows_.width); }
  bool add_dweight(std::int64_t begin) const { return !a_.write_dweight || begin > 0; }
  Tensor sums_of(Tensor dhidden) const { return {s_.sums.data, DType::f32, dhidden.shape}; }

  // All products of a block of tokens by kernels of our own; without dhidden only what the loss needs.
  void on_tensor_cores(Tensor dhidden, bool add) {
    const std::int64_t s = hidden_.shape[0], parts = (V + CrossEntropy::kWordsOfPart - 1) / CrossEntropy::kWordsOfPart;
    const LossBlock block{hidden_, a_.weight, rows_};
    const bool gradients = dhidden.present(), keeps = gradients && chunk_ == V;
    cut(0, V);
    const Tensor g = keeps ? Tensor(s_.logits.data, type_, {s, rows_.stride}) : s_.logits;
    loss_logits(ctx_, block, s_.sums.as<float>(), keeps ? g : Tensor{});
    launch(ctx_, cross_entropy_forward_parts_kernel, Grid(blocks(s * kWarp, kThreads), kThreads),
           reinterpret_cast<const Sum*>(s_.sums.data), rows_, s, parts);
    merge();
    if (keeps) logit_gradients(false);
    if (gradients)
      loss_gradients(ctx_, block,
                     {.g = g,
                      .done = s_.done,
                      .chunk = a_.half_chunk(),
                      .scale = float(a_.gradient_scale),
                      .dhidden = sums_of(dhidden),
                      .dweight = a_.dweight,
                      .add_dweight = add});
  }

  void merge() const {
    if (a_.merge) a_.merge(Tensor(rows_.top, DType::f32, {3, hidden_.shape[0]}));
  }

  // The statistics of every token over the whole vocabulary.
  void sums() {
    for (std::int64_t v = 0; v < V; v += chunk_) {
      cut(v, std::min(chunk_, V - v));
      logits();
      launch(ctx_, cross_entropy_forward_sums_kernel<D_>, Grid(blocks(hidden_.shape[0], 1), kThreads),
             device_pointer<T>(ConstTensor(s_.logits)), rows_);
    }
  }

  void logits() {
    ctx_.blas->run(ctx_, {.m = hidden_.shape[0],
                          .n = rows_.width,
                          .k = D,
                          .a = hidden_.data,
                          .b = words().data,
                          .c = s_.logits.data,
                          .a_type = type_,
                          .b_type = type_,
                          .c_type = type_,
                          .lda = D,
                          .ldb = D,
                          .ldc = rows_.stride,
                          .transpose_b = true});
  }

  // Leaves gradients in the place of the logits; `sums`: makes the statistics first.
  void logit_gradients(bool sums) {
    const Grid grid(blocks(hidden_.shape[0], 1), kThreads);
    launch(ctx_, sums ? cross_entropy_backward_kernel<D_, true> : cross_entropy_backward_kernel<D_, false>, grid,
           device_pointer<T>(s_.logits), rows_, float(a_.gradient_scale));
  }

  // What the block adds to dhidden, and to dweight before dhidden may take the place of hidden.
  void products(Tensor dhidden, bool add_dweight) {
    const Tensor dweight = a_.dweight.present() ? a_.dweight.rows(rows_.first, rows_.first + rows_.width) : Tensor{};
    if (dweight.present())
      ctx_.blas->run(ctx_, {.m = rows_.width,
                            .n = D,
                            .k = hidden_.shape[0],
                            .a = s_.logits.data,
                            .b = hidden_.data,
                            .c = dweight.data,
                            .a_type = type_,
                            .b_type = type_,
                            .c_type = DType::f32,
                            .lda = rows_.stride,
                            .ldb = D,
                            .ldc = D,
                            .transpose_a = true,
                            .beta = float(add_dweight)});
    ctx_.blas->run(ctx_, {.m = hidden_.shape[0],
                          .n = D,
                          .k = rows_.width,
                          .a = s_.logits.data,
                          .b = words().data,
                          .c = dhidden.data,
                          .a_type = type_,
                          .b_type = type_,
                          .c_type = dhidden.dtype,
                          .lda = rows_.stride,
                          .ldb = D,
                          .ldc = D,
                          .beta = rows_.first > 0 ? 1.0F : 0.0F});
  }

  Context& ctx_;
  const CrossEntropy& a_;
  const CrossEntropy::DeviceScratch& s_;
  DType type_;
  bool tiles_;
  std::int64_t D, V, chunk_;
  Rows rows_{};         // of the block of tokens, and of words
  ConstTensor hidden_;  // of the block, those of ignored tokens zero where gradients are wanted
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
