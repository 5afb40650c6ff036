// embedding.h -- rows of a table by token id.
//
//   y[t,d]        = table[ids[t], d]
//   dtable[v,d]  += sum over t with ids[t] = v of dy[t,d]      adds, in the order of t, in f32 (f64 for f64)
//
// An id kElsewhere (ops/vocabulary.h) stands for a row of zeros, and its dy goes nowhere. Any other outside [0, V) is an error; on
// CUDA ids are not looked at, since those of a batch are checked as they are read. No float atomics: repeatable, for any number of
// threads.
#pragma once
#include "ops/context.h"
#include "ops/vocabulary.h"

namespace moetrain::ops {

struct EmbeddingForward {
  ConstTensor ids;    // (T) i32
  ConstTensor table;  // (V, D)
  Tensor y;           // (T, D)
  Work work(const Context&) const { return {.bytes = bytes_of(ids, y, y)}; }
  void check_shapes() const {
    check(ids.shape.rank() == 1 && ids.dtype == DType::i32, "embedding: ids are not (T) int32",
          {{"rank", ids.shape.rank()}, {"dtype", std::int64_t(ids.dtype)}});
    check(table.shape.rank() == 2 && y.shape == Shape{ids.shape[0], table.shape[1]}, "embedding: y is not (T, D)",
          {{"T", ids.shape[0]}, {"D", table.shape[1]}, {"rows", y.shape[0]}, {"columns", y.shape[1]}});
    check(is_floating(table.dtype) && y.dtype == table.dtype, "embedding: y is not of the table's floating type",
          {{"table", std::int64_t(table.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct EmbeddingBackward {
  ConstTensor ids;  // (T) i32
  ConstTensor dy;   // (T, D)
  Tensor dtable;    // (V, D) real; adds
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(ids, dy, dy, dy)}; }
  void check_shapes() const {
    check(ids.shape.rank() == 1 && ids.dtype == DType::i32, "embedding: ids are not (T) int32",
          {{"rank", ids.shape.rank()}, {"dtype", std::int64_t(ids.dtype)}});
    check(dtable.shape.rank() == 2 && dy.shape == Shape{ids.shape[0], dtable.shape[1]}, "embedding: dy is not (T, D)",
          {{"T", ids.shape[0]}, {"D", dtable.shape[1]}, {"rows", dy.shape[0]}, {"columns", dy.shape[1]}});
    check(is_floating(dy.dtype) && dtable.dtype == real_of(dy.dtype), "embedding: dtable is not real",
          {{"dy", std::int64_t(dy.dtype)}, {"dtable", std::int64_t(dtable.dtype)}});
  }
};

namespace cpu {
void embedding(Context&, const EmbeddingForward&);
void embedding(Context&, const EmbeddingBackward&);
}  // namespace cpu
namespace cuda {
void embedding(Context&, const EmbeddingForward&);
void embedding(Context&, const EmbeddingBackward&);
}  // namespace cuda

inline void embedding(Context& ctx, const EmbeddingForward& a) {
  dispatch(
      ctx, "embedding forward", a, [&] { cpu::embedding(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::embedding(ctx, a);
      });
}
inline void embedding(Context& ctx, const EmbeddingBackward& a) {
  dispatch(
      ctx, "embedding backward", a, [&] { cpu::embedding(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::embedding(ctx, a);
      });
}

}  // namespace moetrain::ops
