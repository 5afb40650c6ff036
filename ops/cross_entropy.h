// cross_entropy.h -- the loss from hidden states, cut in tokens and vocabulary: logits of a block exist only while it is worked on.
//
//   logits[t,v] = hidden[t] . weight[v]
//   loss       += sum over labelled t of  log sum_v exp(logits[t,v]) - logits[t,label[t]]
//   g[t,v]      = gradient_scale * ( exp(logits[t,v]) / sum_u exp(logits[t,u]) - [v = label[t]] )     labelled t only
//   dhidden[t]  = sum_v g[t,v] weight[v]         written; 0 for ignored tokens, whatever their hidden state holds
//   dweight[v] += sum_t g[t,v] hidden[t]        or dweight =, with write_dweight
//
// A block is at most seq_chunk labelled tokens (ignored ones are left out before blocks are cut) by at most vocab_chunk vocabulary
// rows; neither must divide anything. Over the blocks of one token block the first pass keeps a running maximum, the sum of
// exponentials below it and the label's logit; the second computes the logits again and turns them into g. One block over the whole
// vocabulary keeps its logits instead. No label in the whole batch: loss += 0, dhidden = 0, dweight unchanged.
//
// Logits, gradients and what is kept between blocks are in real (f32 for f32 and bf16, f64 for f64); exponentials within a block
// and the loss over tokens are summed in f64; dhidden is rounded once. Nothing aliases. Repeatable to the bit for the same chunks;
// other chunks change rounding only.
//
// On CUDA blocks are cut over all tokens, ignored ones too, their rows zeroed; g is in the storage type, and so are logits that are
// kept (bf16: 8 bits of a logit), exponentials are summed in f32.
//
// Where `weight` is a part of the vocabulary, `merge` makes the statistics of a block of tokens those of all parts, in between: the
// logit of a label that is elsewhere is 0 before. Loss and g are then those of the whole vocabulary, dhidden is this part's share.
#pragma once
#include <algorithm>
#include <functional>

#include "ops/context.h"
#include "ops/vocabulary.h"

namespace moetrain::ops {

struct CrossEntropy {
  ConstTensor hidden;                   // (T, D)
  ConstTensor weight;                   // (V, D)
  ConstTensor labels;                   // (T) i32, 0..V-1, kIgnored or, with merge, kElsewhere; anything else is an Error
  std::int64_t seq_chunk, vocab_chunk;  // tokens and vocabulary rows a block; any positive numbers
  double gradient_scale;                // 1 / label tokens of the global batch
  Tensor loss;                          // (1) real; adds, not scaled
  Tensor dhidden;                       // (T, D), scaled; written; absent (with dweight): loss only
  Tensor dweight;                       // (V, D) real, scaled; adds; absent: frozen head
  bool write_dweight = false;           // what dweight held does not matter, as in a first micro-batch
  std::function<void(Tensor running)> merge = {};  // (3, s) real: maximum, sum of exponentials below it, logit of the label

  Work work(const Context&) const {
    const bool again = dhidden.present() && vocab_chunk < weight.shape[0];
    const double blocks = std::max(1.0, double(hidden.shape[0]) / double(seq_chunk)),
                 products = 1 + again + dhidden.present() + dweight.present();
    return {.kind = WorkKind::loss,
            .dtype = hidden.dtype,
            .flops = products * 2 * double(hidden.shape[0]) * double(weight.count()),
            .bytes = bytes_of(hidden, dhidden) + blocks * bytes_of(weight, dweight, dweight)};
  }
  void check_shapes() const {
    const auto T = hidden.shape[0], D = hidden.shape[1], V = weight.shape[0];
    const auto storage = hidden.dtype, real = real_of(storage);
    check(hidden.shape.rank() == 2 && (storage == DType::f32 || storage == DType::f64 || storage == DType::bf16),
          "cross_entropy: hidden is not (T, D) of a storage type", {{"rank", hidden.shape.rank()}, {"dtype", int(storage)}});
    check(weight.shape == Shape{V, D} && V >= 1 && weight.dtype == storage, "cross_entropy: weight is not (V, D) as hidden",
          {{"V", V}, {"D", D}, {"width", weight.shape[1]}, {"dtype", int(weight.dtype)}});
    check(labels.shape == Shape{T} && labels.dtype == DType::i32, "cross_entropy: labels are not (T) i32",
          {{"T", T}, {"labels", labels.count()}, {"dtype", int(labels.dtype)}});
    check(seq_chunk >= 1 && vocab_chunk >= 1, "cross_entropy: a chunk is not positive",
          {{"seq_chunk", seq_chunk}, {"vocab_chunk", vocab_chunk}});
    check(loss.shape == Shape{1} && loss.dtype == real, "cross_entropy: loss is not (1) real",
          {{"loss", loss.count()}, {"dtype", int(loss.dtype)}});
    check(!dhidden.present() || (dhidden.shape == hidden.shape && dhidden.dtype == storage),
          "cross_entropy: dhidden does not fit hidden",
          {{"T", T}, {"D", D}, {"rows", dhidden.shape[0]}, {"width", dhidden.shape[1]}, {"dtype", int(dhidden.dtype)}});
    check(!dweight.present() || (dweight.shape == weight.shape && dweight.dtype == real),
          "cross_entropy: dweight is not (V, D) real",
          {{"V", V}, {"D", D}, {"rows", dweight.shape[0]}, {"width", dweight.shape[1]}, {"dtype", int(dweight.dtype)}});
    check(dhidden.present() || !dweight.present(), "cross_entropy: dweight without dhidden", {{"T", T}});
  }

  // The temporaries of one block of tokens and vocabulary, in real.
  struct Scratch {
    Tensor token;    // (s) i64, where the rows of the block come from
    Tensor running;  // (3, s) maximum, sum of exponentials, logit of the label
    Tensor hidden;   // (s, D)
    Tensor logits;   // (s, v)
    Tensor weight;   // (v, D); absent where weight itself is real
    Tensor dhidden;  // (s, D); absent for loss only
  };
  Scratch take_host_scratch(Context& ctx) const {
    const auto s = std::min(seq_chunk, hidden.shape[0]), v = std::min(vocab_chunk, weight.shape[0]), D = hidden.shape[1];
    const auto real = real_of(hidden.dtype);
    auto& stack = ctx.scratch;
    Scratch taken;
    taken.token = stack.take(DType::i64, {s});
    taken.running = stack.take(real, {3, s});
    taken.hidden = stack.take(real, {s, D});
    taken.logits = stack.take(real, {s, v});
    if (weight.dtype != real) taken.weight = stack.take(real, {v, D});
    if (dhidden.present()) taken.dhidden = stack.take(real, {s, D});
    return taken;
  }
  void take_scratch(Context& ctx) const {  // of a dry run
    const Tensor running = ctx.plans_for == Device::cuda ? take_device_scratch(ctx).running : take_host_scratch(ctx).running;
    const std::int64_t s = running.shape[1];
    for (std::int64_t t = 0; merge && t < hidden.shape[0]; t += s) merge(running);
  }
  struct DeviceScratch {  // of CUDA
    Tensor running;       // (3, s) as above
    Tensor logits;  // (s, v) storage, v rounded up to 16 bytes; in halves (2, s, v / 2) where one is made while the other is used
    Tensor sums;    // (s, D) f32, of dhidden; before these the statistics of parts of the vocabulary. Absent where nothing needs it
    Tensor done;    // (halves of the vocabulary, 3) i32 counts; absent where there are no halves
  };
  static constexpr std::int64_t kWordsOfPart = 256;
  // Dense bf16 is for kernels of our own. On CUDA the rows of labelled tokens stand in dhidden until it is written.
  bool on_tensor_cores() const {
    const auto fits = [](ConstTensor t) { return reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0; };
    return hidden.dtype == DType::bf16 && hidden.shape[1] % 8 == 0 && fits(hidden) && fits(weight) && fits(dhidden) &&
           fits(dweight);
  }
  std::int64_t half_chunk() const { return (std::min(vocab_chunk, weight.shape[0]) + 15) / 16 * 8; }  // in whole 16 bytes
  DeviceScratch take_device_scratch(Context& ctx) const {
    const auto s = std::min(seq_chunk, hidden.shape[0]), V = weight.shape[0], v = std::min(vocab_chunk, V), D = hidden.shape[1];
    const auto parts = on_tensor_cores() ? 2 * ((V + kWordsOfPart - 1) / kWordsOfPart) : 0;
    const auto sums = dhidden.present() && (v < V || on_tensor_cores()) ? D : 0;
    const bool tiles = on_tensor_cores(), gradients = dhidden.present(), halves = tiles && v < V;
    auto& stack = ctx.scratch;
    DeviceScratch taken;
    taken.running = stack.take(DType::f32, {3, s});
    if (halves && gradients)
      taken.logits = stack.take(hidden.dtype, {2 * s, half_chunk()});
    else if (gradients || !tiles)
      taken.logits = stack.take(hidden.dtype, {s, (v + 7) / 8 * 8});
    if (sums > 0 || parts > 0) taken.sums = stack.take(DType::f32, {s, std::max(sums, parts)});
    if (halves && gradients) taken.done = stack.take(DType::i32, {(V + half_chunk() - 1) / half_chunk(), 3});
    return taken;
  }
};

namespace cpu {
void cross_entropy(Context&, const CrossEntropy&);
}  // namespace cpu
namespace cuda {
void cross_entropy(Context&, const CrossEntropy&);
}  // namespace cuda

inline void cross_entropy(Context& ctx, const CrossEntropy& a) {
  dispatch(
      ctx, "cross_entropy forward", a,
      [&] {
        if (a.write_dweight && a.dweight.present() && !ctx.dry()) fill(ctx.device(), a.dweight.data, 0, a.dweight.bytes());
        cpu::cross_entropy(ctx, a);
      },
      [&] {
        if constexpr (kHasCuda) cuda::cross_entropy(ctx, a);
      });
}

}  // namespace moetrain::ops
