// vocabulary.h -- a vocabulary that ranks have each a part of: which ids are words of this part, and the statistics of the loss
// over all parts from those over each (ops/cross_entropy.h).
//
//   LocalIds    y[t] = ids[t] - first where that is in [0, count); kIgnored where ids[t] is; else kElsewhere
//   MergeSums   top[t] = max_r top_r[t]     sum[t] = sum_r sum_r[t] exp(top_r[t] - top[t])     label_logit[t] = sum_r
//   label_logit_r[t]
//
// Sums over parts are in their order, in f64 on the CPU and f32 on CUDA. Repeatable. An id outside [0, words) that is not kIgnored
// is an error; on CUDA ids are not looked at, since those of a batch are checked as they are read.
#pragma once
#include <limits>

#include "ops/context.h"

namespace moetrain::ops {

inline constexpr std::int32_t kIgnored = -100;                                        // a label of no word
inline constexpr std::int32_t kElsewhere = std::numeric_limits<std::int32_t>::max();  // a word of another part

struct LocalIds {
  ConstTensor ids;            // (T) i32, of the whole vocabulary
  std::int64_t first, count;  // the words here
  std::int64_t words;         // of the whole vocabulary
  Tensor y;                   // (T) i32; may be ids
  Work work(const Context&) const { return {.bytes = bytes_of(ids, y)}; }
  void check_shapes() const {
    check(ids.shape.rank() == 1 && y.shape == ids.shape && ids.dtype == DType::i32 && y.dtype == DType::i32,
          "local_ids: ids and y are not (T) int32", {{"ids", ids.count()}, {"y", y.count()}});
    check(0 <= first && 0 <= count && first + count <= words, "local_ids: the words here are not of the vocabulary",
          {{"first", first}, {"count", count}, {"words", words}});
  }
};

struct MergeSums {
  ConstTensor parts;  // (ranks, 3, s) real: each one's maximum, sum of exponentials below it, logit of the label or 0
  Tensor all;         // (3, s), written
  Work work(const Context&) const { return {.bytes = bytes_of(parts, all)}; }
  void check_shapes() const {
    check(parts.shape.rank() == 3 && parts.shape[1] == 3 && all.shape == Shape{3, parts.shape[2]} && all.dtype == parts.dtype,
          "merge_sums: parts and all are not (ranks, 3, s) and (3, s)", {{"parts", parts.count()}, {"all", all.count()}});
  }
};

namespace cpu {
void local_ids(Context&, const LocalIds&);
void merge_sums(Context&, const MergeSums&);
}  // namespace cpu
namespace cuda {
void local_ids(Context&, const LocalIds&);
void merge_sums(Context&, const MergeSums&);
}  // namespace cuda

inline void local_ids(Context& ctx, const LocalIds& a) {
  dispatch(
      ctx, "local_ids", a, [&] { cpu::local_ids(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::local_ids(ctx, a);
      });
}
inline void merge_sums(Context& ctx, const MergeSums& a) {
  dispatch(
      ctx, "merge_sums", a, [&] { cpu::merge_sums(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::merge_sums(ctx, a);
      });
}

}  // namespace moetrain::ops
