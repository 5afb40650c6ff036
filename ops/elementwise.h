// elementwise.h -- one value from one place: sums, gates, casts and column slices.
//
//   Add           y += x
//   Sum           y  = a + b
//   Copy          y  = x
//   Scale         y *= factor
//   CopyColumns   y[t, y_column + i] = x[t, x_column + i], i < width; other columns of y stay
//   SigmoidGate   y = x s, s = sigmoid(gate);  dx = dy s,  dgate = dy x s (1 - s)
//
// Computed in f32 (f64 where an operand is f64), rounded once to nearest even. Repeatable.
#pragma once
#include "ops/context.h"

namespace moetrain::ops {

struct Add {
  ConstTensor x;  // any shape, any floating type
  Tensor y;       // same count, any floating type; y += x
  Work work(const Context&) const { return {.bytes = bytes_of(x, y, y)}; }
  void check_shapes() const {
    check(x.count() == y.count(), "add: x and y differ in size", {{"x", x.count()}, {"y", y.count()}});
    check(is_floating(x.dtype) && is_floating(y.dtype), "add: x or y is not floating",
          {{"x", std::int64_t(x.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct Sum {
  ConstTensor a;  // any shape, floating
  ConstTensor b;  // same
  Tensor y;       // = a + b; may alias either
  Work work(const Context&) const { return {.bytes = bytes_of(a, b, y)}; }
  void check_shapes() const {
    check(a.count() == y.count() && b.count() == y.count(), "sum: a, b and y differ in size",
          {{"a", a.count()}, {"b", b.count()}, {"y", y.count()}});
    check(is_floating(y.dtype) && a.dtype == y.dtype && b.dtype == y.dtype, "sum: a, b and y are not of one floating type",
          {{"a", std::int64_t(a.dtype)}, {"b", std::int64_t(b.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct Copy {
  ConstTensor x;  // any shape, any floating type
  Tensor y;       // same count, any floating type; rounded to nearest even
  Work work(const Context&) const { return {.bytes = bytes_of(x, y)}; }
  void check_shapes() const {
    check(x.count() == y.count(), "copy: x and y differ in size", {{"x", x.count()}, {"y", y.count()}});
    check(is_floating(x.dtype) && is_floating(y.dtype), "copy: x or y is not floating",
          {{"x", std::int64_t(x.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct Scale {
  double factor;
  Tensor y;  // y *= factor
  Work work(const Context&) const { return {.bytes = bytes_of(y, y)}; }
  void check_shapes() const { check(is_floating(y.dtype), "scale: y is not floating", {{"y", std::int64_t(y.dtype)}}); }
};

struct CopyColumns {
  ConstTensor x;  // (T, X)
  std::int64_t x_column;
  Tensor y;  // (T, Y), of x's type
  std::int64_t y_column;
  std::int64_t width;
  Work work(const Context&) const { return {.bytes = 2 * double(x.shape[0] * width * size_of(x.dtype))}; }
  void check_shapes() const {
    check(x.shape.rank() == 2 && y.shape.rank() == 2 && x.shape[0] == y.shape[0], "copy_columns: x and y are not of T rows",
          {{"x", x.shape[0]}, {"y", y.shape[0]}});
    check(width >= 0 && x_column >= 0 && x_column + width <= x.shape[1], "copy_columns: columns outside x",
          {{"column", x_column}, {"width", width}, {"X", x.shape[1]}});
    check(y_column >= 0 && y_column + width <= y.shape[1], "copy_columns: columns outside y",
          {{"column", y_column}, {"width", width}, {"Y", y.shape[1]}});
    check(x.dtype == y.dtype, "copy_columns: x and y differ in type", {{"x", std::int64_t(x.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct SigmoidGateForward {
  ConstTensor x;     // any shape
  ConstTensor gate;  // same count, before the sigmoid
  Tensor y;          // x sigmoid(gate); may alias either
  Work work(const Context&) const { return {.bytes = bytes_of(x, gate, y)}; }
  void check_shapes() const {
    check(x.count() == y.count() && gate.count() == y.count(), "sigmoid_gate: x, gate and y differ in size",
          {{"x", x.count()}, {"gate", gate.count()}, {"y", y.count()}});
    check(is_floating(y.dtype) && x.dtype == y.dtype && gate.dtype == y.dtype,
          "sigmoid_gate: x, gate and y are not of one floating type",
          {{"x", std::int64_t(x.dtype)}, {"gate", std::int64_t(gate.dtype)}, {"y", std::int64_t(y.dtype)}});
  }
};

struct SigmoidGateBackward {
  ConstTensor dy;    // same count as x
  ConstTensor x;     // any shape
  ConstTensor gate;  // same count
  Tensor dx;         // may alias dy
  Tensor dgate;      // may alias gate or x
  Work work(const Context&) const { return {.backward = true, .bytes = bytes_of(dy, x, gate, dx, dgate)}; }
  void check_shapes() const {
    check(dy.count() == x.count() && gate.count() == x.count() && dx.count() == x.count() && dgate.count() == x.count(),
          "sigmoid_gate: dy, x, gate, dx and dgate differ in size",
          {{"dy", dy.count()}, {"x", x.count()}, {"gate", gate.count()}, {"dx", dx.count()}, {"dgate", dgate.count()}});
    check(is_floating(x.dtype) && dy.dtype == x.dtype && gate.dtype == x.dtype && dx.dtype == x.dtype && dgate.dtype == x.dtype,
          "sigmoid_gate: dy, x, gate, dx and dgate are not of one floating type",
          {{"dy", std::int64_t(dy.dtype)},
           {"x", std::int64_t(x.dtype)},
           {"gate", std::int64_t(gate.dtype)},
           {"dx", std::int64_t(dx.dtype)},
           {"dgate", std::int64_t(dgate.dtype)}});
  }
};

namespace cpu {
void add(Context&, const Add&);
void sum(Context&, const Sum&);
void copy(Context&, const Copy&);
void scale(Context&, const Scale&);
void copy_columns(Context&, const CopyColumns&);
void sigmoid_gate(Context&, const SigmoidGateForward&);
void sigmoid_gate(Context&, const SigmoidGateBackward&);
}  // namespace cpu
namespace cuda {
void add(Context&, const Add&);
void sum(Context&, const Sum&);
void copy(Context&, const Copy&);
void scale(Context&, const Scale&);
void copy_columns(Context&, const CopyColumns&);
void sigmoid_gate(Context&, const SigmoidGateForward&);
void sigmoid_gate(Context&, const SigmoidGateBackward&);
}  // namespace cuda

inline void add(Context& ctx, const Add& a) {
  dispatch(
      ctx, "add", a, [&] { cpu::add(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::add(ctx, a);
      });
}
inline void sum(Context& ctx, const Sum& a) {
  dispatch(
      ctx, "sum", a, [&] { cpu::sum(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sum(ctx, a);
      });
}
inline void copy(Context& ctx, const Copy& a) {
  dispatch(
      ctx, "copy", a, [&] { cpu::copy(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::copy(ctx, a);
      });
}
inline void scale(Context& ctx, const Scale& a) {
  dispatch(
      ctx, "scale", a, [&] { cpu::scale(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::scale(ctx, a);
      });
}
inline void copy_columns(Context& ctx, const CopyColumns& a) {
  dispatch(
      ctx, "copy_columns", a, [&] { cpu::copy_columns(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::copy_columns(ctx, a);
      });
}
inline void sigmoid_gate(Context& ctx, const SigmoidGateForward& a) {
  dispatch(
      ctx, "sigmoid_gate forward", a, [&] { cpu::sigmoid_gate(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sigmoid_gate(ctx, a);
      });
}
inline void sigmoid_gate(Context& ctx, const SigmoidGateBackward& a) {
  dispatch(
      ctx, "sigmoid_gate backward", a, [&] { cpu::sigmoid_gate(ctx, a); },
      [&] {
        if constexpr (kHasCuda) cuda::sigmoid_gate(ctx, a);
      });
}

}  // namespace moetrain::ops
