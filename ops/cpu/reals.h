// reals.h -- parts of a tensor of any floating type as f32 or f64 and back, so that mixed types reach BLAS and the loops.
#pragma once
#include "ops/context.h"
#include "ops/cpu/types.h"

namespace moetrain::ops::cpu {

inline constexpr std::int64_t kWorthThreads = 1 << 15;  // elements of a streaming loop; below, waking threads costs more

// A block of a row-major matrix.
template <class R>
struct Reals {
  const R* data;
  std::int64_t stride;  // from row to row
};

struct Part {
  std::int64_t row, rows, column, columns;
};

// The part of t, seen as (dim 0, all else): in place when t holds R, else converted into scratch (rows x columns).
template <class R>
Reals<R> reals(ConstTensor t, Part part, R* scratch) {
  const std::int64_t stride = t.shape.row();
  if (t.dtype == DTypeOf<R>::value) return {t.as<R>() + part.row * stride + part.column, stride};
  with_storage(t.dtype, [&](auto storage) {
    const auto* from = t.as<decltype(storage)>() + part.row * stride + part.column;
#pragma omp parallel for if (part.rows * part.columns > kWorthThreads)
    for (std::int64_t i = 0; i < part.rows; ++i) {
      const auto* in = from + i * stride;
      R* out = scratch + i * part.columns;
#pragma omp simd
      for (std::int64_t j = 0; j < part.columns; ++j) out[j] = R(in[j]);
    }
  });
  return {scratch, part.columns};
}

// All elements of t, converted into scratch of the context (the caller's Scope gives it back) unless t holds R; on Device::dry the
// scratch is taken all the same.
template <class R>
const R* reals(Context& ctx, ConstTensor t) {
  if (t.dtype == DTypeOf<R>::value) return t.as<R>();
  R* scratch = ctx.scratch.take(DTypeOf<R>::value, {t.count()}).template as<R>();
  if (ctx.dry()) return scratch;
  return reals<R>(t.reshape({1, t.count()}), {0, 1, 0, t.count()}, scratch).data;
}

// Rounds values (rows x columns, dense) into the part of t, or adds them to it.
template <class R>
void write_reals(const R* values, Tensor t, Part part, bool add) {
  const std::int64_t stride = t.shape.row();
  with_storage(t.dtype, [&](auto storage) {
    using T = decltype(storage);
    T* to = t.as<T>() + part.row * stride + part.column;
#pragma omp parallel for if (part.rows * part.columns > kWorthThreads)
    for (std::int64_t i = 0; i < part.rows; ++i) {
      const R* in = values + i * part.columns;
      T* out = to + i * stride;
      if (add) {
#pragma omp simd
        for (std::int64_t j = 0; j < part.columns; ++j) out[j] = T(R(out[j]) + in[j]);
      } else {
#pragma omp simd
        for (std::int64_t j = 0; j < part.columns; ++j) out[j] = T(in[j]);
      }
    }
  });
}

}  // namespace moetrain::ops::cpu
